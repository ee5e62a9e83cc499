/* Which known word somebody meant who typed another: keys of a model, commands, options, topics. */
#ifndef MOEFLOW_WORD_H
#define MOEFLOW_WORD_H

#define WORD_HINT_MAX 80

struct word_guess { /* all zero to begin with */
  const char *best; /* NULL: nothing is near */
  int distance;     /* of `best`: twice its edits, and its penalty */
};

/* Keeps `shown` as the best guess if `known` is nearer to `typed` than what was considered before. Near is a third of the
 * letters typed, at most 3, written otherwise, where two that changed places count once and capitals not at all, or one of
 * the words inside the other (`norm`, `renormalize`). A penalty of 1 lets another known word with as many edits win. */
void word_consider(struct word_guess *guess, const char *typed, const char *known, const char *shown, int penalty);

/* " (did you mean 'best'?)", or "". */
void word_hint(const struct word_guess *guess, char text[WORD_HINT_MAX]);
#endif
