#include "note.h"

#include <stdio.h>
#include <string.h>

#include "experts_space.h"
#include "sweep.h"

static int has_arch(const struct model_deploy *deploy, const struct arch *arch) {
  for (int i = 0; i < deploy->arch_count; i++) {
    if (deploy->arch[i] == arch) return 1;
  }
  return 0;
}

void note_archs(const struct gen_options *options, const struct model_deploy *deploy) {
  for (int i = 0; i < deploy->arch_count; i++) {
    const struct arch *better = experts_arch_beside(deploy->arch[i]);
    if (!better || has_arch(deploy, better)) continue;
    fprintf(stderr,
            "moeflow-gen %s: note: %s has the portable kernels alone; the experts kernel is in --arch %s, for the same GPUs "
            "(%s)\n",
            options->command, deploy->arch[i]->name, better->name, better->gpus);
  }
}

void note_sweep_line(const struct gen_options *options, const struct model *model, char line[NOTE_SWEEP_LINE_MAX]) {
  char tokens[64] = "", capacity[32] = "";
  if (model->deploy.capacity > SWEEP_TOKENS_LAST)
    snprintf(tokens, sizeof tokens, " --tokens " SWEEP_TOKENS_DEFAULT ",%d", model->deploy.capacity);
  if (options->overrides.capacity) snprintf(capacity, sizeof capacity, " --capacity %d", model->deploy.capacity);
  snprintf(line, NOTE_SWEEP_LINE_MAX, "moeflow-gen sweep %s --dtype %s --ep %d%s%s%s", options->model,
           spec_dtype_name(model->spec.dtype), model->deploy.ep, options->packed ? " --packed" : "", capacity, tokens);
}

/* The first target on which `sweep` finds several variants; NULL: there is nothing to measure. */
static const struct arch *measurable(const struct gen_options *options, const struct model *model) {
  if (model->spec.reduce == SPEC_REDUCE_CHOICES) return NULL; /* a sweep times the owner's sums */
  for (int i = 0; i < model->deploy.arch_count; i++) {
    const struct arch *arch = model->deploy.arch[i];
    if (experts_kernel_on(KERNEL_EXPERTS, arch)) return arch;
    if (options->packed && experts_kernel_on(KERNEL_EXPERTS_STREAM, arch)) return arch;
  }
  return NULL;
}

void note_untuned(const struct gen_options *options, const struct model *model, const struct tune_search *search) {
  char line[NOTE_SWEEP_LINE_MAX], folder[TUNE_PATH_MAX];
  const struct arch *arch = measurable(options, model);
  if (!search->untold || !arch) return;
  tune_folder_beside(options->model, folder);
  note_sweep_line(options, model, line);
  fprintf(stderr, "moeflow-gen %s: note: no tuned file for %s %s%s%s in %s: %s gets default variants; to measure: %s\n",
          options->command, model->spec.name, spec_dtype_name(model->spec.dtype), search->here.gpu[0] ? " on " : "",
          search->here.gpu, folder, arch->name, line);
}
