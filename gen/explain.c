#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bill.h"
#include "command.h"
#include "json.h"
#include "nearest.h"
#include "note.h"
#include "number.h"
#include "status.h"
#include "tune_find.h"

struct explanation {
  const struct gen_options *options;
  struct model model;
  struct row_layout dispatched, returned;
  struct bill bill;
  int planned;      /* there are kernels for this dtype */
  char reason[512]; /* why not, else why there are no keys, else "" */
  struct tune_search tuned;
  struct units units;
  int keyed;
  struct store store;
  char no_cache[512]; /* why the cache cannot be read, else "" */
  struct catalog catalog;
  struct nearest nearest[ARCH_MAX];
};

/* ---- Gathering ---- */

static moeflow_status compare_with_cache(struct explanation *x) {
  moeflow_status status = MOEFLOW_OK;
  struct toolchain toolchain;
  x->keyed = toolchain_find(&toolchain) == MOEFLOW_OK;
  if (!x->keyed) snprintf(x->reason, sizeof x->reason, "%s", moeflow_last_error());
  if (x->keyed) CHECK(units_keys(&x->units, &toolchain));
  if (store_open(x->options->cache, &x->store) != MOEFLOW_OK || catalog_read(&x->store, &x->catalog) != MOEFLOW_OK)
    snprintf(x->no_cache, sizeof x->no_cache, "%s", moeflow_last_error());
  for (int i = 0; i < x->units.arch_count; i++) {
    nearest_find(&x->catalog, &x->units.drafts[i].plan, x->keyed, &x->nearest[i]);
  }
cleanup:
  return status;
}

static moeflow_status gather(struct explanation *x) {
  moeflow_status status = MOEFLOW_OK;
  CHECK(model_load(x->options->model, &x->options->overrides, &x->model));
  row_layout_dispatch(&x->model.spec, &x->dispatched);
  row_layout_return(&x->model.spec, &x->returned);
  x->planned = model_buildable(&x->model) == MOEFLOW_OK;
  if (x->planned) {
    CHECK(tune_find(x->options, &x->model, &x->tuned));
    const struct plan_options plan = {.tune = x->tuned.tune, .packed = x->options->packed != 0};
    CHECK(units_make(&x->model, &plan, x->options->templates, 0, &x->units));
    CHECK(compare_with_cache(x));
  } else {
    snprintf(x->reason, sizeof x->reason, "%s", moeflow_last_error());
  }
  CHECK(bill_make(&x->model, x->planned ? &x->units.drafts[0].plan : NULL, &x->bill));
  if (x->planned) note_archs(x->options, &x->model.deploy);
cleanup:
  return status;
}

/* ---- As text ---- */

static const char *name_of(const char *key, int32_t value) {
  return spec_field(key)->names[value];
}

static void print_router(const struct spec *s) {
  static const char *const guards[] = {"", "sum + 1e-20", "sum + 1e-6", "max(sum, 1e-12)"};
  char scale[NUMBER_TEXT_MAX];
  printf("  router       %s%s", name_of("score", s->score), s->correction_bias ? ", chosen with a correction bias" : "");
  if (s->groups > 1) {
    printf(", best %d of %d groups by their %s", s->top_groups, s->groups,
           s->group_score == SPEC_GROUP_TOP2 ? "two best experts" : "best expert");
  }
  if (s->renormalize) printf(", weights divided by %s", guards[s->renormalize]);
  number_write(s->scale, scale);
  if (s->scale != 1) printf(", %s times %s", name_of("scale_on", s->scale_on), scale);
  printf("\n");
}

static void print_model(const struct explanation *x) {
  const struct spec *s = &x->model.spec;
  char limit[NUMBER_TEXT_MAX];
  number_write(s->activation_limit, limit);
  printf("%s, %s weights\n", s->name, spec_dtype_name(s->dtype));
  printf("  experts      %d, of which a token chooses %d; hidden %d, intermediate %d, %s%s%s\n", s->experts, s->top_k,
         s->hidden, s->intermediate, name_of("activation", s->activation), s->activation_limit > 0 ? " limit " : "",
         s->activation_limit > 0 ? limit : "");
  if (x->model.hidden != s->hidden) {
    printf("  width        the model is %d wide, the experts %d: rows carry %d values, projected by the engine\n",
           x->model.hidden, s->hidden, s->hidden);
  }
  print_router(s);
  printf("  rows         out as %s, home as %s, %s\n", name_of("dispatch", s->dispatch), name_of("return", s->returned),
         s->reduce == SPEC_REDUCE_OWNER ? "each owner sums a token's choices" : "one per choice, summed by the source");
  if (s->shared_experts) {
    printf(
        "  shared       %d shared expert%s of intermediate %d: described here, NOT computed by the layer; the engine adds "
        "%s\n",
        s->shared_experts, s->shared_experts > 1 ? "s" : "", s->shared_intermediate, s->shared_experts > 1 ? "them" : "it");
  }
  if (s->batch_invariant) printf("  batch        invariant: one order of additions for every batch size\n");
}

/* The parts side by side, each as wide as its text, with its offset above. */
static void print_row(const char *title, const struct row_layout *layout) {
  char above[256] = "", box[256] = "", line[256] = "";
  size_t used = 0;
  for (int i = 0; i < layout->count; i++) {
    const struct row_part *part = &layout->parts[i];
    char offset[24], text[48];
    snprintf(offset, sizeof offset, "%" PRId64, part->offset);
    int width = snprintf(text, sizeof text, " %s %" PRId64 " B ", part->name, part->bytes);
    if (used + (size_t)width + 2 > sizeof box - 24) break;
    snprintf(above + used, sizeof above - used, "%-*s", width + 1, offset);
    snprintf(box + used, sizeof box - used, "|%s", text);
    line[used] = '+';
    memset(line + used + 1, '-', (size_t)width);
    used += (size_t)width + 1;
  }
  printf("\n%s: %" PRId64 " bytes\n    %s%" PRId64 "\n    %s+\n    %s|\n    %s+\n", title, layout->bytes, above,
         layout->bytes, line, box, line);
  for (int i = 0; i < layout->count; i++) printf("    %-8s %s\n", layout->parts[i].name, layout->parts[i].content);
}

static void print_amount(const char *what, int64_t bytes, const char *why) {
  printf("  %-18s %16" PRId64 "  %9.1f MB  %s\n", what, bytes, (double)bytes / 1e6, why);
}

static void print_bill(const struct explanation *x) {
  const struct bill *bill = &x->bill;
  const struct spec *s = &x->model.spec;
  int ep = x->model.deploy.ep, capacity = x->model.deploy.capacity;
  char why[160];
  printf("\nmemory of one rank, ep %d, capacity %d tokens a rank (bytes)\n", ep, capacity);
  snprintf(why, sizeof why, "2 (send, receive) x %d ranks x %d rows x %" PRId64 " B", ep, capacity, x->dispatched.bytes);
  print_amount("dispatch buffers", bill->dispatch_buffers, why);
  snprintf(why, sizeof why, "2 x %d ranks x %" PRId64 " rows x %" PRId64 " B", ep, capacity * spec_return_rows_per_token(s),
           x->returned.bytes);
  print_amount("return buffers", bill->return_buffers, why);
  snprintf(why, sizeof why, "work lists; %" PRId64 " activations of %d bf16, outputs of %d fp32",
           (int64_t)ep * capacity * s->top_k, s->intermediate, s->hidden);
  print_amount("workspace", bill->workspace, why);
  print_amount("a lane", bill->lane, "the three together (nccl), shared by all layers; twice with 2 lanes");
  snprintf(why, sizeof why, "%d experts x (gate_up %" PRId64 " + down %" PRId64 " B), per layer, lent by the engine",
           bill->local_experts_max, spec_gate_up_bytes(s), spec_down_bytes(s));
  print_amount("expert weights", bill->weights, why);
  print_amount("total", bill->total, "one lane, one layer");
  if (bill->local_experts_min == bill->local_experts_max) {
    printf("  %d experts a rank\n", bill->local_experts_max);
  } else {
    printf("  %d experts do not divide by %d ranks: ranks with %d experts: %d, with %d: %d\n", s->experts, ep,
           bill->local_experts_max, bill->ranks_with_max, bill->local_experts_min, ep - bill->ranks_with_max);
  }
}

static void print_field(void *user, const char *key, const char *cached, const char *wanted) {
  (void)user;
  printf("    %-20s cached %s, this model %s\n", key, cached, wanted);
}

static void print_build_line(const struct explanation *x, const char *arch) {
  const struct gen_options *options = x->options;
  char line[MODEL_BUILD_LINE_MAX];
  model_build_line(options->model, &options->overrides, arch, options->cache, line);
  const struct {
    const char *option, *value;
  } rows[] = {{"--templates", options->templates}, {"--tuned", options->tuned}, {"--gpu", options->gpu}};
  printf("  run: %s%s", line, options->packed ? " --packed" : "");
  for (int i = 0; i < 3; i++) {
    if (rows[i].value) printf(" %s %s", rows[i].option, rows[i].value);
  }
  putchar('\n');
}

static void print_nearest(const struct explanation *x, int arch) {
  const struct nearest *nearest = &x->nearest[arch];
  const struct plan *plan = &x->units.drafts[arch].plan;
  if (x->no_cache[0]) {
    printf("\ncache unknown, %s\n  %s\n", plan->arch, x->no_cache);
    return;
  }
  printf("\ncache %s, %s\n", x->store.path, plan->arch);
  switch (nearest->state) {
    case NEAREST_READY:
      printf("  ready: %s%s\n", nearest->plan->file, x->keyed ? "" : " (not compared with the templates: no NVRTC)");
      return;
    case NEAREST_STALE:
      printf("  stale: %s; ", nearest->plan->file);
      if (nearest->differing) {
        printf("%d of %d variants are missing, damaged, or made from other templates or by another NVRTC\n",
               nearest->differing, plan->variant_count);
      } else {
        printf("its variants serve other sizes: built with another tuned file, or with none\n");
      }
      break;
    case NEAREST_OTHER:
      printf("  not there; the nearest of %d plans is %s, which differs in %d field%s:\n", x->catalog.plan_names.count,
             nearest->plan->file, nearest->differing, nearest->differing > 1 ? "s" : "");
      nearest_fields(&nearest->plan->plan, plan, print_field, NULL);
      break;
    case NEAREST_NOTHING:
      printf("  not there; the cache holds no plan\n");
      break;
  }
  print_build_line(x, plan->arch);
}

static void print_text(const struct explanation *x) {
  print_model(x);
  print_row("dispatched row, one per token and owner", &x->dispatched);
  print_row(x->model.spec.reduce == SPEC_REDUCE_OWNER ? "returned row, one per token and owner"
                                                      : "returned row, one per token and choice",
            &x->returned);
  print_bill(x);
  for (int i = 0; i < x->units.arch_count; i++) {
    printf("\nkernels, %s: %d variants\n", x->units.drafts[i].plan.arch, x->units.drafts[i].plan.variant_count);
    plan_print(&x->units.drafts[i], stdout);
  }
  for (int i = 0; i < x->units.arch_count; i++) print_nearest(x, i);
  if (x->reason[0]) printf("\nnote: %s\n", x->reason);
}

/* ---- As JSON ---- */

static void json_spec(struct json *json, const struct spec *spec) {
  json_object(json);
  for (int i = 0; i < SPEC_FIELDS; i++) {
    const struct spec_field *field = &spec_fields[i];
    const void *value = (const char *)spec + field->offset;
    json_key(json, field->key);
    switch (field->kind) {
      case SPEC_NAME:
        json_string(json, value);
        break;
      case SPEC_INTEGER:
        json_int(json, *(const int32_t *)value);
        break;
      case SPEC_BOOLEAN:
        json_bool(json, *(const int32_t *)value);
        break;
      case SPEC_REAL:
        json_double(json, *(const double *)value);
        break;
      case SPEC_ENUM:
        json_string(json, field->names[*(const int32_t *)value]);
        break;
    }
  }
  json_object_end(json);
}

static void json_row(struct json *json, const char *key, const struct row_layout *layout) {
  json_key(json, key), json_object(json);
  json_key(json, "bytes"), json_int(json, layout->bytes);
  json_key(json, "parts"), json_array(json);
  for (int i = 0; i < layout->count; i++) {
    json_object(json);
    json_key(json, "name"), json_string(json, layout->parts[i].name);
    json_key(json, "offset"), json_int(json, layout->parts[i].offset);
    json_key(json, "bytes"), json_int(json, layout->parts[i].bytes);
    json_object_end(json);
  }
  json_array_end(json);
  json_object_end(json);
}

static void json_bill(struct json *json, const struct bill *bill) {
  const struct {
    const char *key;
    int64_t value;
  } rows[] = {{"local_experts_max", bill->local_experts_max},
              {"local_experts_min", bill->local_experts_min},
              {"ranks_with_max", bill->ranks_with_max},
              {"dispatch_buffers", bill->dispatch_buffers},
              {"return_buffers", bill->return_buffers},
              {"workspace", bill->workspace},
              {"lane", bill->lane},
              {"gate_up", bill->gate_up},
              {"down", bill->down},
              {"weights", bill->weights},
              {"total", bill->total}};
  json_key(json, "memory"), json_object(json);
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) json_key(json, rows[i].key), json_int(json, rows[i].value);
  json_object_end(json);
}

static void json_field(void *user, const char *key, const char *cached, const char *wanted) {
  struct json *json = user;
  json_object(json);
  json_key(json, "field"), json_string(json, key);
  json_key(json, "cached"), json_string(json, cached);
  json_key(json, "wanted"), json_string(json, wanted);
  json_object_end(json);
}

static void json_number_or_null(struct json *json, const char *key, int32_t number, int32_t none) {
  json_key(json, key);
  if (number == none) {
    json_null(json);
  } else {
    json_int(json, number);
  }
}

static void json_measurement(struct json *json, const struct tune_line *line) {
  json_object(json);
  json_key(json, "rows"), json_int(json, line->rows);
  json_key(json, "kernel"), json_string(json, tune_kernel_name(line->kernel));
  json_key(json, "us"), json_double(json, line->us);
  json_key(json, "default_us"), json_double(json, line->default_us);
  json_key(json, "gap_percent"), json_double(json, line->gap);
  json_key(json, "ci_percent"), json_array(json);
  json_double(json, line->gap_low), json_double(json, line->gap_high);
  json_array_end(json);
  json_key(json, "runner_up"), json_string(json, line->runner_up[0] ? line->runner_up : NULL);
  json_object_end(json);
}

static void json_bucket(struct json *json, const struct plan_bucket *bucket, const struct bucket_reason *reason) {
  static const char *const sources[] = {[BUCKET_DEFAULT] = "default", [BUCKET_TUNED] = "tuned", [BUCKET_ONLY] = "only"};
  json_object(json);
  json_number_or_null(json, "rows_max", bucket->rows_max, 0);
  json_key(json, "gate_up"), json_int(json, bucket->gate_up);
  json_key(json, "down"), json_int(json, bucket->down);
  json_number_or_null(json, "experts", bucket->experts, PLAN_NONE);
  json_number_or_null(json, "experts_stream", bucket->experts_stream, PLAN_NONE);
  json_key(json, "source"), json_string(json, sources[reason->source]);
  json_key(json, "note"), json_string(json, reason->note[0] ? reason->note : NULL);
  json_key(json, "measured");
  if (reason->source == BUCKET_TUNED) {
    json_measurement(json, &reason->line);
  } else {
    json_null(json);
  }
  json_object_end(json);
}

static void json_plan(struct json *json, const struct explanation *x, int arch) {
  static const char *const states[] = {"ready", "stale", "missing", "missing"};
  const struct plan *plan = &x->units.drafts[arch].plan;
  const struct nearest *nearest = &x->nearest[arch];
  json_object(json);
  json_key(json, "arch"), json_string(json, plan->arch);
  json_key(json, "variants"), json_array(json);
  for (int i = 0; i < plan->variant_count; i++) {
    const struct plan_variant *variant = &plan->variants[i];
    json_object(json);
    json_key(json, "kernel"), json_string(json, kernel_names[variant->kernel]);
    json_key(json, "entry"), json_string(json, x->keyed ? variant->entry : NULL);
    json_key(json, "tile_tokens"), json_int(json, variant->tile_tokens);
    json_key(json, "tile_rows"), json_int(json, variant->tile_rows);
    json_key(json, "tile_depth"), json_int(json, variant->tile_depth);
    json_key(json, "stages"), json_int(json, variant->stages);
    json_key(json, "parts"), json_int(json, variant->parts);
    json_key(json, "residency"), json_int(json, variant->residency);
    json_key(json, "threads"), json_int(json, variant->threads);
    json_key(json, "shared"), json_int(json, variant->shared_bytes);
    json_object_end(json);
  }
  json_array_end(json);
  json_key(json, "buckets"), json_array(json);
  for (int i = 0; i < plan->bucket_count; i++) json_bucket(json, &plan->buckets[i], &x->units.drafts[arch].reasons[i]);
  json_array_end(json);
  json_key(json, "cached"), json_string(json, x->no_cache[0] ? NULL : states[nearest->state]);
  json_key(json, "nearest"), json_string(json, nearest->plan ? nearest->plan->file : NULL);
  json_key(json, "differences"), json_array(json);
  if (nearest->plan) nearest_fields(&nearest->plan->plan, plan, json_field, json);
  json_array_end(json);
  json_object_end(json);
}

static void print_json(const struct explanation *x) {
  char hash[65];
  struct json json;
  spec_hash(&x->model.spec, hash);
  json_begin(&json, stdout);
  json_object(&json);
  json_key(&json, "model"), json_string(&json, x->model.spec.name);
  json_key(&json, "hidden"), json_int(&json, x->model.hidden);
  json_key(&json, "spec"), json_spec(&json, &x->model.spec);
  json_key(&json, "spec_sha256"), json_string(&json, hash);
  json_key(&json, "ep"), json_int(&json, x->model.deploy.ep);
  json_key(&json, "capacity"), json_int(&json, x->model.deploy.capacity);
  json_key(&json, "shared_experts_computed"), json_bool(&json, 0);
  json_row(&json, "dispatched_row", &x->dispatched);
  json_row(&json, "returned_row", &x->returned);
  json_bill(&json, &x->bill);
  json_key(&json, "cache"), json_string(&json, x->planned && !x->no_cache[0] ? x->store.path : NULL);
  json_key(&json, "tuned"), json_string(&json, x->tuned.tune ? x->tuned.tune->path : NULL);
  json_key(&json, "plans"), json_array(&json);
  for (int i = 0; i < x->units.arch_count; i++) json_plan(&json, x, i);
  json_array_end(&json);
  json_key(&json, "note"), json_string(&json, x->reason[0] ? x->reason : x->no_cache[0] ? x->no_cache : NULL);
  json_object_end(&json);
  json_end(&json);
}

static moeflow_status explain_spec(const struct gen_options *options) {
  struct model model;
  char text[SPEC_TEXT_MAX];
  moeflow_status status = model_load(options->model, &options->overrides, &model);
  if (status == MOEFLOW_OK) status = spec_write(&model.spec, text);
  if (status == MOEFLOW_OK) fputs(text, stdout);
  return status;
}

int command_explain(const struct gen_options *options) {
  if (options->format == FORMAT_SPEC) return command_status(options, explain_spec(options));
  struct explanation *x = calloc(1, sizeof *x);
  if (!x) return command_status(options, status_set(MOEFLOW_ERROR_MEMORY, "no memory"));
  x->options = options;
  x->store.fd = -1;
  moeflow_status status = gather(x);
  if (status == MOEFLOW_OK && options->format == FORMAT_JSON) {
    print_json(x);
  } else if (status == MOEFLOW_OK) {
    print_text(x);
  }
  catalog_free(&x->catalog);
  store_close(&x->store);
  units_free(&x->units);
  tune_search_free(&x->tuned);
  free(x);
  return command_status(options, status);
}
