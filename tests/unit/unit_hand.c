/* The worked example: the layer gives the numbers of docs/hand-example.md, the reference the same, and the document has
 * them. */
#include "hand_example.h"

#include "reference.h"
#include "test.h"

static void test_layer(char **text) {
  size_t length = 0;
  FILE *out = open_memstream(text, &length);
  const int code = hand_example_print(out);
  fclose(out);
  EXPECT(code == 0, "exit code %d:\n%s", code, *text);
  EXPECT(strstr(*text, " 0 lines differ"), "%s", *text);
}

/* The document shows what the program prints: every line of its output stands in it. */
static void test_document(const char *text) {
  FILE *file = fopen(MOEFLOW_SOURCE_DIR "/docs/hand-example.md", "rb");
  static char document[1 << 16];
  EXPECT(file != NULL, "docs/hand-example.md");
  if (!file) return;
  document[fread(document, 1, sizeof document - 1, file)] = 0;
  fclose(file);
  while (*text) {
    char line[512];
    const int length = (int)strcspn(text, "\n");
    snprintf(line, sizeof line, "%.*s\n", length, text);
    EXPECT(strstr(document, line), "the document lacks: %s", line);
    text += length + 1;
  }
}

static void weights(void *user, int expert, int down, uint16_t *matrix) { /* the rule in words, not the program's */
  (void)user;
  memset(matrix, 0, (down ? 64 : 128) * sizeof *matrix);
  for (int i = 0; i < 8; i++) {
    if (down)
      matrix[i * 8 + (expert & 1 ? (i + 1) & 7 : i)] = 0x3f80;
    else
      matrix[i * 8 + i] = 0x3f80, matrix[64 + i * 8] = reference_to_bf16(expert + 1);
  }
}

static void test_reference(void) {
  static const double hidden[3][8] = {{1, 2}, {1, 0, 0, 0, 2, 0, 0, -1}, {1, 1, 1, 1, 0, 0, 0, 2}};
  static const double want[3][8] = {{2.125, 0.87890625, 0, 0, 0, 0, 0, 0.73046875},
                                    {2.1875, 0, 0, 0, 5.28125, 0, 0, -0.80859375},
                                    {2.5625, 2.5625, 2.5625, 1.09375, 0, 0, 3.515625, 4.09375}};
  const int32_t ids[6] = {0, 3, 2, -1, 2, 3}, sources[3] = {0, 0, 1};
  const float choice_weights[6] = {0.5f, 0.25f, 1, 0.5f, 0.5f, 0.5f};
  struct reference_layer layer = {
      .hidden = 8, .intermediate = 8, .experts = 4, .top_k = 2, .ranks = 2, .output_scale = 1, .weights = weights};
  uint16_t rows[24], out[24];
  for (int i = 0; i < 24; i++) rows[i] = reference_to_bf16(hidden[i / 8][i % 8]);
  EXPECT(reference_run(&layer, 3, rows, ids, choice_weights, sources, out, NULL, 1) == 0, "memory");
  for (int i = 0; i < 24; i++) {
    EXPECT(reference_from_bf16(out[i]) == want[i / 8][i % 8], "token %d, column %d: %g", i / 8, i % 8,
           reference_from_bf16(out[i]));
  }
}

int main(void) {
  char *text = NULL;
  test_layer(&text);
  test_document(text);
  test_reference();
  free(text);
  TEST_END;
}
