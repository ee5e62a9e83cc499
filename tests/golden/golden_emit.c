/* What the generator writes for glm-5.3-flash, against committed text: the units, the plan's tables and the rows byte by
 * byte. After an intended change, `build/tests/golden_emit --update` rewrites the files; look at the difference before
 * committing it. */
#include "bill.h"
#include "plan_build.h"
#include "status.h"
#include "test.h"
#include "unit.h"

#define FOLDER MOEFLOW_SOURCE_DIR "/tests/golden/"

static struct model model;
static struct units units;

static void write_units(FILE *file) {
  for (int i = 0; i < units.count; i++) fprintf(file, "---- %s\n%s", units.units[i].name, units.units[i].text);
}

static void write_plan(FILE *file) {
  plan_print(&units.drafts[0], file);
}

static void write_layout(FILE *file, const char *title, const struct row_layout *layout) {
  int64_t at = 0;
  fprintf(file, "%s: %lld bytes\n", title, (long long)layout->bytes);
  for (int i = 0; i < layout->count; i++) {
    const struct row_part *part = &layout->parts[i];
    EXPECT(part->offset == at, "%s: a gap before %s", title, part->name);
    at = part->offset + part->bytes;
    fprintf(file, "%8lld %8lld  %s: %s\n", (long long)part->offset, (long long)part->bytes, part->name, part->content);
  }
  EXPECT(at == layout->bytes && at % 128 == 0, "%s ends at %lld", title, (long long)at);
}

static void write_rows(FILE *file) {
  struct row_layout layout;
  row_layout_dispatch(&model.spec, &layout);
  write_layout(file, "dispatched row", &layout);
  EXPECT(layout.bytes == spec_row_bytes(&model.spec));
  row_layout_return(&model.spec, &layout);
  write_layout(file, "returned row", &layout);
  EXPECT(layout.bytes == spec_return_row_bytes(&model.spec));
}

static char *read_file(const char *path) {
  char *text = calloc(1, 1 << 20);
  FILE *file = fopen(path, "rb");
  if (file) {
    if (fread(text, 1, (1 << 20) - 1, file) == 0) text[0] = 0;
    fclose(file);
  }
  return text;
}

static void compare_lines(const char *name, const char *wanted, const char *got) {
  for (int line = 1; *wanted || *got; line++) {
    size_t a = strcspn(wanted, "\n"), b = strcspn(got, "\n");
    if (a != b || memcmp(wanted, got, a) != 0) {
      EXPECT(0, "tests/golden/%s:%d: '%.*s' instead of '%.*s'; if that is meant: golden_emit --update", name, line, (int)b,
             got, (int)a, wanted);
      return;
    }
    wanted += a + (wanted[a] == '\n');
    got += b + (got[b] == '\n');
  }
  EXPECT(1);
}

static void golden(const char *name, void (*write)(FILE *file), int update) {
  char path[4096], *text = NULL;
  size_t size;
  snprintf(path, sizeof path, FOLDER "%s", name);
  FILE *memory = open_memstream(&text, &size);
  write(memory);
  fclose(memory);
  if (update) {
    FILE *file = fopen(path, "wb");
    EXPECT(file && fwrite(text, 1, size, file) == size && fclose(file) == 0, "cannot write %s", path);
  } else {
    char *wanted = read_file(path);
    EXPECT(*wanted, "%s is missing or empty", path);
    compare_lines(name, wanted, text);
    free(wanted);
  }
  free(text);
}

int main(int count, char **arguments) {
  int update = count == 2 && strcmp(arguments[1], "--update") == 0;
  const struct model_overrides overrides = {.dtype = "bf16", .arch = "sm_90a"};
  if (model_load(MOEFLOW_SOURCE_DIR "/models/glm-5.3-flash.yaml", &overrides, &model) != MOEFLOW_OK ||
      units_make(&model, NULL, NULL, 0, &units) != MOEFLOW_OK) {
    fprintf(stderr, "%s\n", moeflow_last_error());
    return 1;
  }
  golden("glm-5.3-flash.sm_90a.units", write_units, update);
  golden("glm-5.3-flash.sm_90a.plan", write_plan, update);
  golden("glm-5.3-flash.rows", write_rows, update);
  units_free(&units);
  TEST_END;
}
