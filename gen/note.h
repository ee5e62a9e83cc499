/* What `build` and `explain` say on stderr of a model whose kernels will be slower than they might be. */
#ifndef MOEFLOW_NOTE_H
#define MOEFLOW_NOTE_H

#include "tune_find.h"

#define NOTE_SWEEP_LINE_MAX (TUNE_PATH_MAX + 192)

/* For each target without the experts kernel whose GPUs another target would serve with it. */
void note_archs(const struct gen_options *options, const struct model_deploy *deploy);

/* There are variants to choose from, no tuned file chose, and nobody has said why yet. */
void note_untuned(const struct gen_options *options, const struct model *model, const struct tune_search *search);

/* "moeflow-gen sweep MODEL.yaml ...": what would measure this build. */
void note_sweep_line(const struct gen_options *options, const struct model *model, char line[NOTE_SWEEP_LINE_MAX]);
#endif
