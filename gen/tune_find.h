/* Which tuned file belongs to a build: the one that is named, else the one beside the model, or where models are installed,
 * for the GPU that is named or here. */
#ifndef MOEFLOW_TUNE_FIND_H
#define MOEFLOW_TUNE_FIND_H

#include "command.h"
#include "tune.h"

/* "<folder of model_path>/tuned/<model>.<dtype>.<gpu>.tune": where `sweep` writes, and a search begins. */
void tune_path_beside(const char *model_path, const struct spec *spec, const char *gpu, char path[TUNE_PATH_MAX]);

/* The first of the folders that are searched: "<folder of model_path>/tuned". */
void tune_folder_beside(const char *model_path, char folder[TUNE_PATH_MAX]);

struct tune_search {
  struct tune *tune;         /* NULL: none was found; tune_search_free */
  struct tune_identity here; /* what is known of this build and its GPU */
  int untold;                /* a file was looked for and there was none, and no line said so */
};

/* --tuned, --gpu, the GPU here, or its being the only one choose. What is chosen, or left aside, is a line on stderr. An
 * error: the named file cannot be read or must not be used, or one that was found is damaged. The driver is started only if
 * there are files to choose from and neither option is given. */
moeflow_status tune_find(const struct gen_options *options, const struct model *model, struct tune_search *search);
void tune_search_free(struct tune_search *search);
#endif
