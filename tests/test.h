/* The whole test framework: EXPECT records a failure and goes on, TEST_END reports and gives main its exit code.
 * A test that cannot run here calls SKIP with the reason; ctest counts exit code 77 as skipped. */
#ifndef MOEFLOW_TEST_H
#define MOEFLOW_TEST_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int test_checks, test_failures;

#define EXPECT(condition, ...)                                            \
  do {                                                                    \
    test_checks++;                                                        \
    if (!(condition)) {                                                   \
      test_failures++;                                                    \
      fprintf(stderr, "%s:%d: not true: %s:", __FILE__, __LINE__, #condition); \
      fprintf(stderr, " " __VA_ARGS__);                                   \
      fputc('\n', stderr);                                                \
    }                                                                     \
  } while (0)

#define SKIP(...)                        \
  do {                                   \
    printf("skipped: " __VA_ARGS__);     \
    putchar('\n');                       \
    exit(77);                            \
  } while (0)

#define TEST_END                                                        \
  do {                                                                  \
    printf("%d checks, %d failures\n", test_checks, test_failures);     \
    return test_failures || !test_checks ? EXIT_FAILURE : EXIT_SUCCESS; \
  } while (0)
#endif
