#include "build_stamp.h"
#include "moeflow.h"

#define TEXT(x) #x
#define NUMBER(x) TEXT(x)

int moeflow_version(void) {
  return MOEFLOW_VERSION_MAJOR * 10000 + MOEFLOW_VERSION_MINOR * 100 + MOEFLOW_VERSION_PATCH;
}

#if MOEFLOW_GIT_DIRTY
#define DIRTY "true"
#else
#define DIRTY "false"
#endif

const char *moeflow_build_info(void) {
  return "{\"version\": \"" NUMBER(MOEFLOW_VERSION_MAJOR) "." NUMBER(MOEFLOW_VERSION_MINOR) "." NUMBER(
      MOEFLOW_VERSION_PATCH) "\", \"sha\": \"" MOEFLOW_GIT_SHA "\", \"dirty\": " DIRTY
                             ", \"trees\": {\"templates\": \"" MOEFLOW_TREE_TEMPLATES
                             "\", \"runtime\": \"" MOEFLOW_TREE_RUNTIME "\", \"gen\": \"" MOEFLOW_TREE_GEN
                             "\"}, \"compiler\": \"" __VERSION__ "\"}";
}
