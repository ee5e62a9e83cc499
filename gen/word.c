#include "word.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#define LETTERS_MAX 63   /* what comes after is not compared */
#define INSIDE_LETTERS 3 /* shorter words are inside many others by chance */

static int smaller(int a, int b) {
  return a < b ? a : b;
}

static int same_letter(char a, char b) {
  return tolower((unsigned char)a) == tolower((unsigned char)b);
}

/* Levenshtein's distance, in which two neighbours that changed places are one edit. */
static int edits(const char *a, int a_length, const char *b, int b_length) {
  int rows[3][LETTERS_MAX + 1] = {{0}};
  for (int j = 0; j <= b_length; j++) rows[0][j] = j;
  for (int i = 1; i <= a_length; i++) {
    int *row = rows[i % 3];
    const int *above = rows[(i + 2) % 3], *second = rows[(i + 1) % 3];
    row[0] = i;
    for (int j = 1; j <= b_length; j++) {
      row[j] = smaller(smaller(above[j], row[j - 1]) + 1, above[j - 1] + !same_letter(a[i - 1], b[j - 1]));
      if (i > 1 && j > 1 && same_letter(a[i - 1], b[j - 2]) && same_letter(a[i - 2], b[j - 1]))
        row[j] = smaller(row[j], second[j - 2] + 1);
    }
  }
  return rows[a_length % 3][b_length];
}

/* One word inside the other, and no tiny part of it. */
static int inside(const char *a, int a_length, const char *b, int b_length) {
  const int shorter = smaller(a_length, b_length), longer = a_length + b_length - shorter;
  return shorter >= INSIDE_LETTERS && 3 * shorter >= longer && (a_length < b_length ? strstr(b, a) : strstr(a, b)) != NULL;
}

void word_consider(struct word_guess *guess, const char *typed, const char *known, const char *shown, int penalty) {
  const int length = (int)strnlen(typed, LETTERS_MAX), known_length = (int)strnlen(known, LETTERS_MAX);
  const int limit = length < 6 ? 1 : smaller(length / 3, 3);
  int count = edits(typed, length, known, known_length);
  if (count > 1 && inside(typed, length, known, known_length)) count = 1;
  if (count > limit || count >= length || (guess->best && 2 * count + penalty >= guess->distance)) return;
  guess->best = shown;
  guess->distance = 2 * count + penalty;
}

void word_hint(const struct word_guess *guess, char text[WORD_HINT_MAX]) {
  text[0] = 0;
  if (guess->best) snprintf(text, WORD_HINT_MAX, " (did you mean '%s'?)", guess->best);
}
