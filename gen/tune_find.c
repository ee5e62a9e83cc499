#include "tune_find.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"
#include "status.h"

#define FILES_MAX 64

struct files { /* of the folders that may hold one for this model */
  char paths[FILES_MAX][TUNE_PATH_MAX];
  int count;
};

/* ---- Where they are ---- */

void tune_folder_beside(const char *model_path, char folder[TUNE_PATH_MAX]) {
  const char *slash = strrchr(model_path, '/');
  snprintf(folder, TUNE_PATH_MAX, "%.*stuned", slash ? (int)(slash + 1 - model_path) : 0, model_path);
}

void tune_path_beside(const char *model_path, const struct spec *spec, const char *gpu, char path[TUNE_PATH_MAX]) {
  char name[192];
  tune_folder_beside(model_path, path);
  tune_file_name(spec->name, spec_dtype_name(spec->dtype), gpu, name);
  size_t used = strlen(path);
  snprintf(path + used, TUNE_PATH_MAX - used, "/%s", name);
}

/* PREFIX/share/moeflow/models/tuned of a tool that runs as PREFIX/bin/moeflow-gen: an installation may be moved. */
static int folder_installed(char folder[TUNE_PATH_MAX]) {
  static const char below[] = "/share/moeflow/models/tuned";
  ssize_t length = readlink("/proc/self/exe", folder, TUNE_PATH_MAX - 1);
  if (length <= 0) return 0;
  folder[length] = 0;
  for (int i = 0; i < 2; i++) {
    char *slash = strrchr(folder, '/');
    if (!slash) return 0;
    *slash = 0;
  }
  if (strlen(folder) + sizeof below > TUNE_PATH_MAX) return 0;
  strcat(folder, below);
  return 1;
}

static int ends_with(const char *text, const char *end) {
  size_t length = strlen(text), size = strlen(end);
  return length >= size && !strcmp(text + length - size, end);
}

static const char *base_name(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

/* A file of a name that an earlier folder has is hidden by that one. */
static int is_hidden(const struct files *files, const char *name) {
  for (int i = 0; i < files->count; i++) {
    if (!strcmp(base_name(files->paths[i]), name)) return 1;
  }
  return 0;
}

static void list_folder(const char *folder, const char *prefix, struct files *files) {
  DIR *directory = opendir(folder);
  if (!directory) return;
  for (struct dirent *item; (item = readdir(directory)) && files->count < FILES_MAX;) {
    if (strncmp(item->d_name, prefix, strlen(prefix)) || !ends_with(item->d_name, ".tune")) continue;
    if (is_hidden(files, item->d_name)) continue;
    char *path = files->paths[files->count];
    if ((size_t)snprintf(path, TUNE_PATH_MAX, "%s/%s", folder, item->d_name) < TUNE_PATH_MAX) files->count++;
  }
  closedir(directory);
}

static int by_path(const void *a, const void *b) {
  return strcmp(a, b);
}

static void list_files(const char *model_path, const struct spec *spec, struct files *files) {
  char folder[TUNE_PATH_MAX], prefix[SPEC_NAME_MAX + 32];
  files->count = 0;
  snprintf(prefix, sizeof prefix, "%s.%s.", spec->name, spec_dtype_name(spec->dtype));
  tune_folder_beside(model_path, folder);
  list_folder(folder, prefix, files);
  if (folder_installed(folder)) list_folder(folder, prefix, files);
  qsort(files->paths, (size_t)files->count, sizeof files->paths[0], by_path);
}

/* ---- Which GPU ---- */

/* The first visible one; nothing where there is no driver or no GPU. */
static void look_at_gpu(struct tune_identity *here) {
  CUdevice device;
  int count = 0, value = 0;
  if (driver_load() != MOEFLOW_OK || driver.cuDeviceGetCount(&count) != CUDA_SUCCESS || count < 1) return;
  if (driver.cuDeviceGet(&device, 0) != CUDA_SUCCESS) return;
  if (driver.cuDeviceGetName(here->gpu, sizeof here->gpu, device) != CUDA_SUCCESS) here->gpu[0] = 0;
  if (driver.cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) == CUDA_SUCCESS) {
    here->multiprocessors = value;
  }
  here->driver = driver.version;
}

/* --gpu is a name as the driver gives it, "NVIDIA H200", or short, "h200". */
static int same_gpu(const char *a, const char *b) {
  char left[64], right[64];
  tune_gpu_slug(a, left);
  tune_gpu_slug(b, right);
  return !strcmp(left, right);
}

/* ---- Choosing ---- */

/* The file's arch is one of those built for, whatever their order; a name that --gpu gives shortly is the file's. */
static void align(const struct model *model, const struct tune *tune, struct tune_identity *here) {
  snprintf(here->arch, sizeof here->arch, "%s", model->deploy.arch[0]->name);
  for (int i = 0; i < model->deploy.arch_count; i++) {
    if (!strcmp(model->deploy.arch[i]->name, tune->identity.arch)) strcpy(here->arch, tune->identity.arch);
  }
  if (here->gpu[0] && same_gpu(here->gpu, tune->identity.gpu)) strcpy(here->gpu, tune->identity.gpu);
}

static moeflow_status read_and_match(const struct gen_options *options, const struct model *model, const char *path,
                                     struct tune_search *search) {
  moeflow_status status = tune_read(path, search->tune);
  if (status != MOEFLOW_OK) return status;
  align(model, search->tune, &search->here);
  return tune_match(search->tune, &search->here, options->model);
}

/* The one of the files that is for this GPU, or for this model whatever the GPU when that is not known; -1: none. */
static moeflow_status choose_file(const struct gen_options *options, const struct model *model, const struct files *files,
                                  struct tune_search *search, int *chosen) {
  char refusal[1024] = "";
  int matching = 0;
  *chosen = -1;
  for (int i = 0; i < files->count; i++) {
    char name[192];
    moeflow_status status;
    tune_file_name(model->spec.name, spec_dtype_name(model->spec.dtype), search->here.gpu, name);
    if (search->here.gpu[0] && strcmp(base_name(files->paths[i]), name)) continue;
    status = read_and_match(options, model, files->paths[i], search);
    if (status == MOEFLOW_ERROR_UNSUPPORTED) {
      snprintf(refusal, sizeof refusal, "%s", moeflow_last_error());
      continue;
    }
    if (status != MOEFLOW_OK) return status;
    *chosen = i;
    matching++;
  }
  search->untold = !matching && !refusal[0];
  if (!matching && refusal[0]) fprintf(stderr, "moeflow-gen %s: not used: %s\n", options->command, refusal);
  if (matching > 1) {
    fprintf(stderr, "moeflow-gen %s: %d tuned files for this model and no GPU here: say which with --gpu NAME\n",
            options->command, matching);
    *chosen = -1;
  }
  return MOEFLOW_OK;
}

static moeflow_status search_folders(const struct gen_options *options, const struct model *model,
                                     struct tune_search *search, int *found) {
  moeflow_status status = MOEFLOW_OK;
  struct files *files = malloc(sizeof *files);
  int chosen = -1, known;
  if (!files) return status_set(MOEFLOW_ERROR_MEMORY, "no memory to look for tuned files");
  list_files(options->model, &model->spec, files);
  search->untold = !files->count;
  if (!files->count) goto cleanup;
  if (!search->here.gpu[0]) look_at_gpu(&search->here);
  known = search->here.gpu[0] != 0;
  CHECK(choose_file(options, model, files, search, &chosen));
  if (chosen < 0) goto cleanup;
  CHECK(read_and_match(options, model, files->paths[chosen], search));
  fprintf(stderr, "moeflow-gen %s: tuned by %s%s%s\n", options->command, search->tune->path,
          known ? "" : ", the only one for this model, on ", known ? "" : search->tune->identity.gpu);
  *found = 1;
cleanup:
  free(files);
  return status;
}

moeflow_status tune_find(const struct gen_options *options, const struct model *model, struct tune_search *search) {
  moeflow_status status = MOEFLOW_OK;
  struct tune_identity *here = &search->here;
  int found = 0;
  memset(search, 0, sizeof *search);
  snprintf(here->model, sizeof here->model, "%s", model->spec.name);
  snprintf(here->dtype, sizeof here->dtype, "%s", spec_dtype_name(model->spec.dtype));
  if (options->gpu) snprintf(here->gpu, sizeof here->gpu, "%s", options->gpu);
  spec_hash(&model->spec, here->spec);
  search->tune = calloc(1, sizeof *search->tune);
  if (!search->tune) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for a tuned file");
  if (options->tuned && strcmp(options->tuned, "none")) {
    if (!here->gpu[0]) look_at_gpu(here);
    CHECK(read_and_match(options, model, options->tuned, search));
    found = 1;
  } else if (!options->tuned && !options->overrides.experts && !options->overrides.reduce) {
    CHECK(search_folders(options, model, search, &found)); /* a model that --experts or --reduce makes has none */
  }
cleanup:
  if (!found) tune_search_free(search);
  return status;
}

void tune_search_free(struct tune_search *search) {
  free(search->tune);
  search->tune = NULL;
}
