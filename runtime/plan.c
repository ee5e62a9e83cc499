#include "plan.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "number.h"
#include "sha256.h"
#include "status.h"

const char *const kernel_names[KERNEL_COUNT] = {
    [KERNEL_ROUTER] = "router",
    [KERNEL_PACK] = "pack",
    [KERNEL_EXCHANGE] = "exchange",
    [KERNEL_DISPATCH] = "dispatch",
    [KERNEL_EXPERT_INDEX] = "expert_index",
    [KERNEL_EXPERT_PREPARE] = "expert_prepare",
    [KERNEL_GATE_UP] = "gate_up",
    [KERNEL_DOWN] = "down",
    [KERNEL_EXPERTS] = "experts",
    [KERNEL_EXPERTS_STREAM] = "experts_stream",
    [KERNEL_PACK_WEIGHTS] = "pack_weights",
    [KERNEL_IDENTITY] = "identity",
    [KERNEL_OWNER_REDUCE] = "owner_reduce",
    [KERNEL_COMBINE] = "combine",
    [KERNEL_COMBINE_RING] = "combine_ring",
    [KERNEL_RETURN_COMBINE] = "return_combine",
    [KERNEL_FILL] = "fill",
};

#define HASH_DIGITS 64
#define END_LINE_BYTES (4 + HASH_DIGITS + 1) /* "end ", hash, newline */

/* The integers of a `kernel` line, in order. */
static const struct {
  const char *key;
  size_t offset;
  int32_t minimum, maximum;
} variant_fields[] = {
    {"tile_tokens", offsetof(struct plan_variant, tile_tokens), 0, 1024},
    {"tile_rows", offsetof(struct plan_variant, tile_rows), 0, 1024},
    {"tile_depth", offsetof(struct plan_variant, tile_depth), 0, 1024},
    {"stages", offsetof(struct plan_variant, stages), 0, 64},
    {"parts", offsetof(struct plan_variant, parts), 1, MOEFLOW_PARTS_MAX},
    {"residency", offsetof(struct plan_variant, residency), 1, 2},
    {"threads", offsetof(struct plan_variant, threads), 32, 1024},
    {"shared", offsetof(struct plan_variant, shared_bytes), 0, 1 << 20},
    {"order_tag", offsetof(struct plan_variant, order_tag), 0, 65535},
};
#define VARIANT_FIELDS (int)(sizeof variant_fields / sizeof *variant_fields)

static int32_t *variant_field(const struct plan_variant *variant, int i) {
  return (int32_t *)((char *)variant + variant_fields[i].offset);
}

/* The optional kernels of a bucket's line, in order. */
static const struct {
  enum kernel_id kernel;
  size_t offset;
} bucket_options[] = {
    {KERNEL_EXPERTS, offsetof(struct plan_bucket, experts)},
    {KERNEL_EXPERTS_STREAM, offsetof(struct plan_bucket, experts_stream)},
};
#define BUCKET_OPTIONS (int)(sizeof bucket_options / sizeof *bucket_options)

static int32_t *bucket_option(const struct plan_bucket *bucket, int i) {
  return (int32_t *)((char *)bucket + bucket_options[i].offset);
}

static int is_experts(int32_t kernel) {
  return kernel == KERNEL_EXPERTS || kernel == KERNEL_EXPERTS_STREAM;
}

int plan_is_gemm(int32_t kernel) {
  return kernel == KERNEL_GATE_UP || kernel == KERNEL_DOWN || is_experts(kernel);
}

/* ---- Rules: the same for what is written and what is read ---- */

static int is_hash(const char *text) {
  return strspn(text, "0123456789abcdef") == HASH_DIGITS && !text[HASH_DIGITS];
}

static int is_arch(const char *text) {
  size_t length = strnlen(text, PLAN_ARCH_MAX);
  if (length >= PLAN_ARCH_MAX || strncmp(text, "sm_", 3)) return 0;
  size_t digits = strspn(text + 3, "0123456789");
  return digits >= 2 && digits <= 4 && (length == 3 + digits || (length == 4 + digits && strchr("af", text[3 + digits])));
}

static moeflow_status check_shape(const struct plan_variant *variant, const char *name, int number) {
  const int32_t tiles[] = {variant->tile_tokens, variant->tile_rows, variant->tile_depth, variant->stages};
  for (int i = 0; i < 4; i++) {
    if ((tiles[i] > 0) == plan_is_gemm(variant->kernel)) continue;
    return status_set(
        MOEFLOW_ERROR_ARGUMENT,
        "%s (variant %d): tiles of %d tokens, %d rows and depth %d in %d stages; GEMMs have all of them, other "
        "kernels none",
        name, number, tiles[0], tiles[1], tiles[2], tiles[3]);
  }
  if (!is_experts(variant->kernel) && (variant->parts != 1 || variant->residency != 1)) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "%s (variant %d): %d parts and residency %d; only experts have more than 1",
                      name, number, variant->parts, variant->residency);
  }
  return MOEFLOW_OK;
}

static moeflow_status check_variant(const struct plan_variant *variant, int number) {
  if (variant->kernel < 0 || variant->kernel >= KERNEL_COUNT) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "variant %d has kernel number %d of %d", number, variant->kernel,
                      KERNEL_COUNT);
  }
  const char *name = kernel_names[variant->kernel];
  if (!is_hash(variant->entry)) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "%s (variant %d): the entry is not a hash of 64 hex digits", name, number);
  }
  for (int i = 0; i < VARIANT_FIELDS; i++) {
    int32_t value = *variant_field(variant, i);
    if (value < variant_fields[i].minimum || value > variant_fields[i].maximum) {
      return status_set(MOEFLOW_ERROR_ARGUMENT, "%s (variant %d): %s is %d; it must be %d to %d", name, number,
                        variant_fields[i].key, value, variant_fields[i].minimum, variant_fields[i].maximum);
    }
  }
  if (variant->threads % 32) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "%s (variant %d): %d threads are not whole warps of 32", name, number,
                      variant->threads);
  }
  return check_shape(variant, name, number);
}

/* 0 for none: a tag that no sum has. */
static int order_tag(const struct plan *plan, enum kernel_id kernel, int n) {
  const struct plan_variant *variant = plan_variant(plan, kernel, n);
  return variant ? variant->order_tag : 0;
}

static moeflow_status check_bucket_variants(const struct plan *plan, const struct plan_bucket *bucket, int i) {
  const struct plan_variant *gate_up = plan_variant(plan, KERNEL_GATE_UP, bucket->gate_up);
  const struct plan_variant *down = plan_variant(plan, KERNEL_DOWN, bucket->down);
  if (!gate_up || !down) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "bucket %d names gate_up %d and down %d, of which there is no variant", i,
                      bucket->gate_up, bucket->down);
  }
  /* one list of tiles serves both */
  if (gate_up->tile_tokens != down->tile_tokens) {
    return status_set(MOEFLOW_ERROR_ARGUMENT,
                      "bucket %d pairs tiles of %d tokens (gate_up) with %d (down); they must be equal", i,
                      gate_up->tile_tokens, down->tile_tokens);
  }
  for (int j = 0; j < BUCKET_OPTIONS; j++) {
    int n = *bucket_option(bucket, j);
    if (n == PLAN_NONE || plan_variant(plan, bucket_options[j].kernel, n)) continue;
    return status_set(MOEFLOW_ERROR_ARGUMENT, "bucket %d names %s %d, of which there is no variant", i,
                      kernel_names[bucket_options[j].kernel], n);
  }
  return MOEFLOW_OK;
}

/* A batch-invariant plan adds in one order, whatever the bucket: in one form of the kernels, too. */
static int same_order(const struct plan *plan, const struct plan_bucket *a, const struct plan_bucket *b) {
  return order_tag(plan, KERNEL_GATE_UP, a->gate_up) == order_tag(plan, KERNEL_GATE_UP, b->gate_up) &&
         order_tag(plan, KERNEL_DOWN, a->down) == order_tag(plan, KERNEL_DOWN, b->down) &&
         order_tag(plan, KERNEL_EXPERTS, a->experts) == order_tag(plan, KERNEL_EXPERTS, b->experts) &&
         order_tag(plan, KERNEL_EXPERTS_STREAM, a->experts_stream) ==
             order_tag(plan, KERNEL_EXPERTS_STREAM, b->experts_stream);
}

static moeflow_status check_bucket(const struct plan *plan, int i) {
  const struct plan_bucket *bucket = &plan->buckets[i], *before = i ? bucket - 1 : bucket;
  int last = i == plan->bucket_count - 1;
  if (bucket->rows_max < 0 || last != (bucket->rows_max == 0) || (i && !last && bucket->rows_max <= before->rows_max)) {
    return status_set(MOEFLOW_ERROR_ARGUMENT,
                      "bucket %d is for up to %d rows; buckets ascend and the last one, and only it, is 0", i,
                      bucket->rows_max);
  }
  moeflow_status status = check_bucket_variants(plan, bucket, i);
  if (status != MOEFLOW_OK) return status;
  if ((bucket->experts_stream == PLAN_NONE) != (before->experts_stream == PLAN_NONE)) {
    return status_set(MOEFLOW_ERROR_ARGUMENT,
                      "bucket %d and the one before differ in having an experts_stream: packed weights need it in all", i);
  }
  if (plan->spec.batch_invariant && !same_order(plan, before, bucket)) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "bucket %d changes the order tag, which a batch-invariant plan must not", i);
  }
  return MOEFLOW_OK;
}

static moeflow_status check_counts(const struct plan *plan) {
  if (!is_arch(plan->arch)) return status_set(MOEFLOW_ERROR_ARGUMENT, "the arch is not of the form sm_90a");
  if (plan->minimum_driver < 0 || plan->minimum_driver > 999990) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "minimum_driver %d is not a CUDA version such as 13000", plan->minimum_driver);
  }
  if (plan->variant_count < 0 || plan->variant_count > PLAN_VARIANTS_MAX) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "%d variants; at most %d fit", plan->variant_count, PLAN_VARIANTS_MAX);
  }
  if (plan->bucket_count < 1 || plan->bucket_count > PLAN_BUCKETS_MAX) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "%d buckets; it must be 1 to %d", plan->bucket_count, PLAN_BUCKETS_MAX);
  }
  return MOEFLOW_OK;
}

int plan_fuses(const struct plan *plan) {
  return plan_variant(plan, KERNEL_EXPERTS, 0) && plan->spec.reduce == SPEC_REDUCE_OWNER;
}

static int kernel_needed(const struct plan *plan, int kernel) {
  switch (kernel) {
    case KERNEL_EXPERTS:
    case KERNEL_EXPERTS_STREAM:
      return 0;
    case KERNEL_PACK_WEIGHTS:
      return plan_variant(plan, KERNEL_EXPERTS_STREAM, 0) != NULL;
    case KERNEL_DISPATCH:
    case KERNEL_RETURN_COMBINE:
      return plan_fuses(plan);
    case KERNEL_COMBINE_RING: /* it adds partial sums, and `reduce: choices` returns none */
      return plan->spec.reduce == SPEC_REDUCE_OWNER;
    default:
      return 1;
  }
}

static moeflow_status check_plan(const struct plan *plan) {
  moeflow_status status = MOEFLOW_OK;
  CHECK(check_counts(plan));
  CHECK(spec_check(&plan->spec));
  for (int i = 0; i < plan->variant_count; i++) CHECK(check_variant(&plan->variants[i], i));
  for (int kernel = 0; kernel < KERNEL_COUNT; kernel++) {
    if (kernel_needed(plan, kernel) && !plan_variant(plan, kernel, 0)) {
      FAIL(MOEFLOW_ERROR_ARGUMENT, "kernel %s has no variant", kernel_names[kernel]);
    }
  }
  for (int i = 0; i < plan->bucket_count; i++) CHECK(check_bucket(plan, i));
cleanup:
  return status;
}

/* ---- Writing: into text, into a hash, or both ---- */

struct sink {
  char *text; /* NULL: hash only */
  size_t size, length;
  struct sha256 hash;
};

static void put(struct sink *sink, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(struct sink *sink, const char *format, ...) {
  char piece[SPEC_TEXT_MAX];
  va_list arguments;
  va_start(arguments, format);
  int bytes = vsnprintf(piece, sizeof piece, format, arguments);
  va_end(arguments);
  if (bytes < 0 || (size_t)bytes >= sizeof piece) bytes = 0; /* a spec's text is the longest piece */
  sha256_add(&sink->hash, piece, (size_t)bytes);
  if (sink->text && sink->length + (size_t)bytes < sink->size) memcpy(sink->text + sink->length, piece, (size_t)bytes + 1);
  sink->length += (size_t)bytes;
}

static void put_plan(struct sink *sink, const struct plan *plan) {
  char spec_text[SPEC_TEXT_MAX], hex[65];
  uint8_t digest[32];
  if (spec_write(&plan->spec, spec_text) != MOEFLOW_OK) spec_text[0] = 0;
  sha256_begin(&sink->hash);
  put(sink, "moeflow-plan %d\narch %s\nminimum_driver %d\nspec %d\n", PLAN_VERSION, plan->arch, plan->minimum_driver,
      SPEC_FIELDS);
  put(sink, "%s", spec_text);
  for (int i = 0; i < plan->variant_count; i++) {
    const struct plan_variant *variant = &plan->variants[i];
    put(sink, "kernel %s %s", kernel_names[variant->kernel], variant->entry);
    for (int j = 0; j < VARIANT_FIELDS; j++) put(sink, " %s=%d", variant_fields[j].key, *variant_field(variant, j));
    put(sink, "\n");
  }
  for (int i = 0; i < plan->bucket_count; i++) {
    const struct plan_bucket *bucket = &plan->buckets[i];
    put(sink, "bucket %d gate_up=%d down=%d", bucket->rows_max, bucket->gate_up, bucket->down);
    for (int j = 0; j < BUCKET_OPTIONS; j++) {
      int n = *bucket_option(bucket, j);
      if (n != PLAN_NONE) put(sink, " %s=%d", kernel_names[bucket_options[j].kernel], n);
    }
    put(sink, "\n");
  }
  struct sha256 body = sink->hash;
  sha256_end(&body, digest);
  sha256_hex(digest, hex);
  put(sink, "end %s\n", hex);
}

moeflow_status plan_write(const struct plan *plan, char *text, size_t text_size) {
  if (check_plan(plan) != MOEFLOW_OK)
    return status_prefix(MOEFLOW_ERROR_INTERNAL, "a plan to be written breaks its own rules");
  struct sink sink = {.text = text, .size = text_size};
  put_plan(&sink, plan);
  if (sink.length < text_size) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_INTERNAL, "a plan's text takes %zu bytes and the buffer holds %zu", sink.length + 1,
                    text_size);
}

void plan_hash(const struct plan *plan, char hex[65]) {
  struct sink sink = {.text = NULL};
  uint8_t digest[32];
  put_plan(&sink, plan);
  sha256_end(&sink.hash, digest);
  sha256_hex(digest, hex);
}

/* ---- Reading: the hash first, so that damage is called damage; then line by line ---- */

struct reader {
  char *next; /* NUL-terminated copy; each line is cut off as it is read */
  const char *where;
  int line;
};

static char *take_line(struct reader *reader) {
  char *line = reader->next, *end = strchr(line, '\n');
  reader->line++;
  if (!end) return line; /* only at the end of the text, where the line is empty */
  *end = 0;
  reader->next = end + 1;
  return line;
}

/* Text up to the next space, which is cut off; advances past it. */
static char *take_word(char **rest) {
  char *word = *rest, *end = strchr(word, ' ');
  if (end) *end++ = 0;
  *rest = end ? end : word + strlen(word);
  return word;
}

/* `key=value` or, with separator ' ', `key value`; NULL or what is wrong. */
static const char *take_integer(char **rest, const char *key, char separator, int32_t *value) {
  int64_t number;
  size_t length = strlen(key);
  if (strncmp(*rest, key, length) || (*rest)[length] != separator) return "is not where it should be";
  *rest += length + 1;
  const char *wrong = number_read_integer(take_word(rest), &number);
  if (!wrong && number > INT32_MAX) wrong = "is too large";
  if (!wrong) *value = (int32_t)number;
  return wrong;
}

static moeflow_status fault(const struct reader *reader, const char *what, const char *wrong) {
  return status_set(MOEFLOW_ERROR_FORMAT, "%s:%d: %s %s", reader->where, reader->line, what, wrong);
}

static moeflow_status read_integer_line(struct reader *reader, const char *key, int32_t *value) {
  char *line = take_line(reader);
  const char *wrong = take_integer(&line, key, ' ', value);
  if (!wrong && *line) wrong = "is followed by more text";
  return wrong ? fault(reader, key, wrong) : MOEFLOW_OK;
}

static moeflow_status read_head(struct reader *reader, struct plan *plan) {
  moeflow_status status = MOEFLOW_OK;
  int32_t version, fields;
  CHECK(read_integer_line(reader, "moeflow-plan", &version));
  if (version != PLAN_VERSION) {
    FAIL(MOEFLOW_ERROR_FORMAT,
         "%s:1: plan version %d; this library reads version %d: build the plan anew with its moeflow-gen", reader->where,
         version, PLAN_VERSION);
  }
  const char *line = take_line(reader);
  if (strncmp(line, "arch ", 5) || !is_arch(line + 5)) {
    status = fault(reader, "arch", "is missing or not of the form sm_90a");
    goto cleanup;
  }
  memcpy(plan->arch, line + 5, strlen(line + 5) + 1);
  CHECK(read_integer_line(reader, "minimum_driver", &plan->minimum_driver));
  CHECK(read_integer_line(reader, "spec", &fields));
  if (fields != SPEC_FIELDS) {
    FAIL(MOEFLOW_ERROR_FORMAT, "%s:%d: a spec of %d lines; it has %d", reader->where, reader->line, fields, SPEC_FIELDS);
  }
cleanup:
  return status;
}

static moeflow_status read_spec(struct reader *reader, struct plan *plan) {
  char text[SPEC_TEXT_MAX], where[256];
  size_t length = 0;
  snprintf(where, sizeof where, "%s: spec line", reader->where);
  for (int i = 0; i < SPEC_FIELDS; i++) {
    const char *line = take_line(reader);
    size_t bytes = strlen(line);
    if (length + bytes + 2 > sizeof text) return fault(reader, "the spec", "is too long");
    memcpy(text + length, line, bytes);
    text[length + bytes] = '\n';
    length += bytes + 1;
  }
  text[length] = 0;
  return spec_parse(text, where, &plan->spec);
}

static moeflow_status read_variant(struct reader *reader, char *rest, struct plan *plan) {
  if (plan->variant_count == PLAN_VARIANTS_MAX) return fault(reader, "this variant", "is one too many");
  struct plan_variant *variant = &plan->variants[plan->variant_count++];
  const char *name = take_word(&rest), *entry = take_word(&rest);
  for (variant->kernel = 0; strcmp(kernel_names[variant->kernel], name);) {
    if (++variant->kernel == KERNEL_COUNT) return fault(reader, name, "is not a kernel of this version");
  }
  if (!is_hash(entry)) return fault(reader, name, "has an entry that is not a hash of 64 hex digits");
  memcpy(variant->entry, entry, sizeof variant->entry);
  for (int i = 0; i < VARIANT_FIELDS; i++) {
    const char *wrong = take_integer(&rest, variant_fields[i].key, '=', variant_field(variant, i));
    if (wrong) return fault(reader, variant_fields[i].key, wrong);
  }
  return *rest ? fault(reader, rest, "is not a known key") : MOEFLOW_OK;
}

static moeflow_status read_bucket(struct reader *reader, char *rest, struct plan *plan) {
  if (plan->bucket_count == PLAN_BUCKETS_MAX) return fault(reader, "this bucket", "is one too many");
  struct plan_bucket *bucket = &plan->buckets[plan->bucket_count++];
  int64_t rows;
  const char *wrong = number_read_integer(take_word(&rest), &rows);
  if (wrong || rows > INT32_MAX) return fault(reader, "the bucket's row count", wrong ? wrong : "is too large");
  bucket->rows_max = (int32_t)rows;
  if ((wrong = take_integer(&rest, "gate_up", '=', &bucket->gate_up))) return fault(reader, "gate_up", wrong);
  if ((wrong = take_integer(&rest, "down", '=', &bucket->down))) return fault(reader, "down", wrong);
  for (int i = 0; i < BUCKET_OPTIONS; i++) {
    const char *name = kernel_names[bucket_options[i].kernel];
    *bucket_option(bucket, i) = PLAN_NONE;
    if (strncmp(rest, name, strlen(name)) || rest[strlen(name)] != '=') continue;
    if ((wrong = take_integer(&rest, name, '=', bucket_option(bucket, i)))) return fault(reader, name, wrong);
  }
  return *rest ? fault(reader, rest, "is not a known key") : MOEFLOW_OK;
}

static moeflow_status read_body(struct reader *reader, struct plan *plan) {
  moeflow_status status = MOEFLOW_OK;
  while (*reader->next) {
    char *line = take_line(reader);
    if (!strncmp(line, "kernel ", 7) && plan->bucket_count == 0) {
      CHECK(read_variant(reader, line + 7, plan));
    } else if (!strncmp(line, "bucket ", 7)) {
      CHECK(read_bucket(reader, line + 7, plan));
    } else {
      status = fault(reader, "this line", "is neither a kernel (these come first) nor a bucket");
      goto cleanup;
    }
  }
cleanup:
  return status;
}

static moeflow_status check_end(const char *text, size_t length, const char *where) {
  if (length > PLAN_TEXT_MAX || memchr(text, 0, length)) {
    return status_set(MOEFLOW_ERROR_FORMAT, "%s: not a plan: %zu bytes (at most %d), or a NUL among them", where, length,
                      PLAN_TEXT_MAX);
  }
  const char *end = text + (length > END_LINE_BYTES ? length - END_LINE_BYTES : 1);
  if (length <= END_LINE_BYTES || memcmp(end, "end ", 4) || end[-1] != '\n' || text[length - 1] != '\n') {
    return status_set(MOEFLOW_ERROR_FORMAT, "%s: the plan has no `end HASH` line: it is cut short, or no plan", where);
  }
  uint8_t digest[32];
  char hex[65];
  sha256(text, length - END_LINE_BYTES, digest);
  sha256_hex(digest, hex);
  if (!memcmp(hex, end + 4, HASH_DIGITS)) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_FORMAT,
                    "%s: the plan is damaged: its text hashes to %.16s..., its last line says %.16s...", where, hex,
                    end + 4);
}

/* What was read must be what would be written: no second spelling of the same plan. */
static moeflow_status check_canonical(const struct plan *plan, const char *text, size_t length, const char *where) {
  moeflow_status status = MOEFLOW_OK;
  char *again = malloc(PLAN_TEXT_MAX + 1);
  if (!again) FAIL(MOEFLOW_ERROR_MEMORY, "%s: no memory to check the plan", where);
  CHECK(plan_write(plan, again, PLAN_TEXT_MAX + 1));
  if (strlen(again) != length || memcmp(again, text, length)) {
    FAIL(MOEFLOW_ERROR_FORMAT, "%s: the plan's text is not in canonical form", where);
  }
cleanup:
  free(again);
  return status;
}

moeflow_status plan_parse(const char *text, size_t length, const char *where, struct plan *plan) {
  moeflow_status status = MOEFLOW_OK;
  char *copy = NULL;
  memset(plan, 0, sizeof *plan);
  CHECK(check_end(text, length, where));
  copy = malloc(length + 1);
  if (!copy) FAIL(MOEFLOW_ERROR_MEMORY, "%s: no memory for a plan of %zu bytes", where, length);
  memcpy(copy, text, length);
  copy[length - END_LINE_BYTES] = 0;
  struct reader reader = {.next = copy, .where = where};
  CHECK(read_head(&reader, plan));
  CHECK(read_spec(&reader, plan));
  CHECK(read_body(&reader, plan));
  if (check_plan(plan) != MOEFLOW_OK) {
    status = status_prefix(MOEFLOW_ERROR_FORMAT, "%s", where);
    goto cleanup;
  }
  CHECK(check_canonical(plan, text, length, where));
cleanup:
  free(copy);
  return status;
}

/* ---- Look-ups ---- */

const struct plan_bucket *plan_bucket_for(const struct plan *plan, int64_t received_rows) {
  int i = 0;
  while (i < plan->bucket_count - 1 && received_rows > plan->buckets[i].rows_max) i++;
  return &plan->buckets[i];
}

const struct plan_variant *plan_variant(const struct plan *plan, enum kernel_id kernel, int n) {
  if (n < 0) return NULL;
  for (int i = 0; i < plan->variant_count; i++) {
    if (plan->variants[i].kernel == (int32_t)kernel && n-- == 0) return &plan->variants[i];
  }
  return NULL;
}

void plan_file_name(const struct plan *plan, char name[160]) {
  char hex[65];
  spec_hash(&plan->spec, hex);
  snprintf(name, 160, "%s.%s.%s.%.16s.plan", plan->spec.name, spec_dtype_name(plan->spec.dtype), plan->arch, hex);
}
