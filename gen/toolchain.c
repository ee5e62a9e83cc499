#include "toolchain.h"

#include <dirent.h>
#include <elf.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sha256.h"
#include "status.h"

#ifndef MOEFLOW_NVRTC_DIR
#define MOEFLOW_NVRTC_DIR ""
#endif

static const char *const sonames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};

/* Searched in this order; a variable may list several folders and `suffix` follows each. */
static const struct place {
  const char *variable, *folder, *suffix;
} places[] = {
    {"LD_LIBRARY_PATH", NULL, ""},
    {"CUDA_HOME", NULL, "/lib64"},
    {"CUDA_HOME", NULL, "/lib"},
    {"CUDA_PATH", NULL, "/lib64"},
    {"CUDA_PATH", NULL, "/lib"},
    {NULL, MOEFLOW_NVRTC_DIR, ""},
    {NULL, "/usr/local/cuda/lib64", ""},
    {NULL, "/usr/lib/x86_64-linux-gnu", ""},
    {NULL, "/usr/lib/aarch64-linux-gnu", ""},
    {NULL, "/usr/lib64", ""},
};

/* The GNU build-id in the notes [offset, offset + size), as hex; 0 when there is none. */
static int note_build_id(FILE *file, long offset, size_t size, char hex[129]) {
  unsigned char notes[4096];
  if (size > sizeof notes) size = sizeof notes;
  if (fseek(file, offset, SEEK_SET) != 0 || fread(notes, 1, size, file) != size) return 0;
  for (size_t at = 0; at + sizeof(Elf64_Nhdr) <= size;) {
    Elf64_Nhdr note;
    memcpy(&note, notes + at, sizeof note);
    size_t name = at + sizeof note, id = name + ((note.n_namesz + 3u) & ~3u);
    size_t next = id + ((note.n_descsz + 3u) & ~3u);
    if (note.n_namesz > size || note.n_descsz > 64 || next > size) return 0;
    if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && memcmp(notes + name, "GNU", 4) == 0 && note.n_descsz) {
      for (size_t i = 0; i < note.n_descsz; i++) sprintf(hex + 2 * i, "%02x", notes[id + i]);
      return 1;
    }
    at = next;
  }
  return 0;
}

static int elf_build_id(FILE *file, char hex[129]) {
  Elf64_Ehdr header;
  if (fread(&header, sizeof header, 1, file) != 1 || memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
      header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_phentsize != sizeof(Elf64_Phdr)) {
    return 0;
  }
  for (int i = 0; i < header.e_phnum; i++) {
    Elf64_Phdr program;
    if (fseek(file, (long)(header.e_phoff + (size_t)i * sizeof program), SEEK_SET) != 0) return 0;
    if (fread(&program, sizeof program, 1, file) != 1) return 0;
    if (program.p_type == PT_NOTE && note_build_id(file, (long)program.p_offset, program.p_filesz, hex)) return 1;
  }
  return 0;
}

static int file_sha256(FILE *file, char hex[65]) {
  struct sha256 hash;
  uint8_t digest[32], block[65536];
  size_t n;
  rewind(file);
  sha256_begin(&hash);
  while ((n = fread(block, 1, sizeof block, file)) > 0) sha256_add(&hash, block, n);
  sha256_end(&hash, digest);
  sha256_hex(digest, hex);
  return !ferror(file);
}

moeflow_status toolchain_file_identity(const char *path, char *text, size_t text_size) {
  moeflow_status status = MOEFLOW_OK;
  char hex[129];
  struct stat info;
  FILE *file = fopen(path, "rbe");
  if (!file) return status_set(MOEFLOW_ERROR_ENVIRONMENT, "cannot open %s: %s", path, strerror(errno));
  if (fstat(fileno(file), &info) != 0) FAIL(MOEFLOW_ERROR_ENVIRONMENT, "cannot look at %s: %s", path, strerror(errno));
  if (elf_build_id(file, hex)) {
    snprintf(text, text_size, "size=%lld build-id=%s", (long long)info.st_size, hex);
  } else {
    if (!file_sha256(file, hex)) FAIL(MOEFLOW_ERROR_ENVIRONMENT, "cannot read %s: %s", path, strerror(errno));
    snprintf(text, text_size, "size=%lld sha256=%s", (long long)info.st_size, hex);
  }
cleanup:
  fclose(file);
  return status;
}

static int try_folder(struct toolchain *toolchain, const char *folder, size_t length, const char *suffix) {
  if (!length || folder[0] != '/') return 0; /* nothing is loaded from the working directory */
  for (size_t i = 0; i < sizeof sonames / sizeof sonames[0]; i++) {
    int n = snprintf(toolchain->nvrtc, sizeof toolchain->nvrtc, "%.*s%s/%s", (int)length, folder, suffix, sonames[i]);
    if (n > 0 && (size_t)n < sizeof toolchain->nvrtc && access(toolchain->nvrtc, R_OK) == 0) return 1;
  }
  return 0;
}

static moeflow_status find_nvrtc(struct toolchain *toolchain) {
  const char *named = getenv("MOEFLOW_NVRTC");
  if (named && *named) {
    if (access(named, R_OK) != 0) {
      return status_set(MOEFLOW_ERROR_ENVIRONMENT, "MOEFLOW_NVRTC is %s: %s", named, strerror(errno));
    }
    int n = snprintf(toolchain->nvrtc, sizeof toolchain->nvrtc, "%s", named);
    return (size_t)n < sizeof toolchain->nvrtc ? MOEFLOW_OK
                                               : status_set(MOEFLOW_ERROR_ENVIRONMENT, "MOEFLOW_NVRTC is too long");
  }
  for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
    const char *folders = places[i].variable ? getenv(places[i].variable) : places[i].folder;
    for (const char *p = folders; p && *p; p += strspn(p, ":")) {
      size_t length = strcspn(p, ":");
      if (try_folder(toolchain, p, length, places[i].suffix)) return MOEFLOW_OK;
      p += length;
    }
  }
  return status_set(
      MOEFLOW_ERROR_ENVIRONMENT,
      "libnvrtc.so.13 (or .12) not found in LD_LIBRARY_PATH, CUDA_HOME, /usr/local/cuda/lib64%s%s or the system's "
      "folders; install a CUDA toolkit or pip's nvidia-cuda-nvrtc, or set MOEFLOW_NVRTC to the library's path",
      *MOEFLOW_NVRTC_DIR ? ", " : "", MOEFLOW_NVRTC_DIR);
}

static int by_text(const void *a, const void *b) {
  return strcmp(a, b);
}

/* NVRTC loads its builtins by soname, which fails outside the loader's path; those beside it are the right ones. */
static moeflow_status find_builtins(struct toolchain *toolchain) {
  static const char prefix[] = "libnvrtc-builtins.so.";
  char real[PATH_MAX];
  if (!realpath(toolchain->nvrtc, real)) {
    return status_set(MOEFLOW_ERROR_ENVIRONMENT, "cannot resolve %s: %s", toolchain->nvrtc, strerror(errno));
  }
  *strrchr(real, '/') = 0;
  DIR *directory = opendir(*real ? real : "/");
  if (!directory) return status_set(MOEFLOW_ERROR_ENVIRONMENT, "cannot open %s: %s", real, strerror(errno));
  for (struct dirent *item; (item = readdir(directory)) && toolchain->builtins_count < TOOLCHAIN_BUILTINS_MAX;) {
    if (strncmp(item->d_name, prefix, sizeof prefix - 1) != 0) continue;
    char *path = toolchain->builtins[toolchain->builtins_count];
    int n = snprintf(path, TOOLCHAIN_PATH_MAX, "%s/%s", real, item->d_name);
    if (n > 0 && n < TOOLCHAIN_PATH_MAX) toolchain->builtins_count++;
  }
  closedir(directory);
  if (!toolchain->builtins_count) {
    return status_set(MOEFLOW_ERROR_ENVIRONMENT,
                      "%s has no libnvrtc-builtins.so.* beside it in %s; NVRTC cannot compile without it", toolchain->nvrtc,
                      real);
  }
  qsort(toolchain->builtins, (size_t)toolchain->builtins_count, sizeof toolchain->builtins[0], by_text);
  return MOEFLOW_OK;
}

moeflow_status toolchain_find(struct toolchain *toolchain) {
  moeflow_status status = MOEFLOW_OK;
  char one[160];
  memset(toolchain, 0, sizeof *toolchain);
  CHECK(find_nvrtc(toolchain));
  CHECK(find_builtins(toolchain));
  CHECK(toolchain_file_identity(toolchain->nvrtc, one, sizeof one));
  size_t length = (size_t)snprintf(toolchain->identity, sizeof toolchain->identity, "nvrtc %s", one);
  for (int i = 0; i < toolchain->builtins_count && length < sizeof toolchain->identity; i++) {
    CHECK(toolchain_file_identity(toolchain->builtins[i], one, sizeof one));
    length += (size_t)snprintf(toolchain->identity + length, sizeof toolchain->identity - length, ", builtins %s", one);
  }
  if (length >= sizeof toolchain->identity) {
    FAIL(MOEFLOW_ERROR_ENVIRONMENT, "%d builtins libraries beside %s: too many", toolchain->builtins_count,
         toolchain->nvrtc);
  }
cleanup:
  return status;
}
