/* One emitted unit -> cubin, through NVRTC. Only worker processes call compile_unit: the compiler may crash, hang or eat
 * memory. */
#ifndef MOEFLOW_COMPILE_H
#define MOEFLOW_COMPILE_H

#include <stddef.h>
#include <stdint.h>

#include "template.h"
#include "toolchain.h"

#define COMPILE_OPTIONS_MAX 8
#define COMPILE_OPTION_MAX 48

struct compile_options { /* exactly what is given to NVRTC and hashed into the key; no path among them */
  char text[COMPILE_OPTIONS_MAX][COMPILE_OPTION_MAX];
  int count;
};
void compile_options_for(const char *arch, int lineinfo, struct compile_options *options);

struct compile_request {
  const char *name;   /* the unit's name in messages: "gate_up_....cu" */
  const char *symbol; /* the entry whose resources are reported */
  const char *text;
  const struct templates *templates; /* headers, in memory: nothing is read from disk */
  const int *included;               /* those that the unit needs */
  int included_count;
  const struct compile_options *options;
};

struct compile_result { /* compile_free */
  uint8_t *cubin;
  size_t cubin_size;
  char *log; /* as NVRTC gave it, with `file(12)` turned into `file:12`; also after failure */
  uint32_t registers;
  uint32_t static_shared_bytes;
  uint32_t spill_bytes;
  uint32_t nvrtc_version; /* major * 1000 + minor * 10 */
};

/* Loads NVRTC at the first call. MOEFLOW_ERROR_FORMAT: the source does not compile (see log); MOEFLOW_ERROR_INTERNAL: the
 * kernel spills; MOEFLOW_ERROR_ENVIRONMENT: NVRTC itself fails. */
moeflow_status compile_unit(const struct toolchain *toolchain, const struct compile_request *request,
                            struct compile_result *result);
void compile_free(struct compile_result *result);

/* Reads ptxas' report: registers and static shared memory of `symbol`, spills over all functions. 0, or -1 when the report
 * does not speak of the symbol. */
int compile_parse_report(const char *log, const char *symbol, struct compile_result *result);

/* Whether a line of the log belongs to that report, not to the compiler's errors and warnings. */
int compile_is_report(const char *line);
#endif
