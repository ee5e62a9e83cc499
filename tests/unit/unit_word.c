/* What "did you mean" proposes, and what it is silent about. */
#include "test.h"
#include "word.h"

static const char *guess(const char *typed) {
  static const char *const known[] = {"build", "explain", "sweep",       "hidden", "experts", "top_k", "ep",
                                      "dtype", "tokens",  "renormalize", "score",  "log",     "limit", "intermediate"};
  struct word_guess guess = {NULL, 0};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) word_consider(&guess, typed, known[i], known[i], 0);
  return guess.best ? guess.best : "";
}

static void test_guesses(void) {
  static const struct {
    const char *typed, *best;
  } cases[] = {{"build", "build"},
               {"biuld", "build"}, /* two that changed places */
               {"buidl", "build"},
               {"Hidden", "hidden"},
               {"HIDDN", "hidden"},
               {"dytpe", "dtype"},
               {"token", "tokens"},
               {"topk", "top_k"},
               {"n_experts", "experts"}, /* one inside the other */
               {"norm", "renormalize"},
               {"normalize", "renormalize"},
               {"intremediat", "intermediate"},
               {"pe", "ep"},
               {"core", "score"},
               {"frobnicate", ""},
               {"hint", ""}, /* half of it would have to change */
               {"a", ""},    /* any short word is near to it */
               {"", ""},
               {"to", ""},          /* inside many, by chance */
               {"cataloguing", ""}, /* `log` is a small part of it */
               {"quantization_config", ""}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *best = guess(cases[i].typed);
    EXPECT(!strcmp(best, cases[i].best), "%s: '%s' instead of '%s'", cases[i].typed, best, cases[i].best);
  }
  char many[400];
  memset(many, 'x', sizeof many);
  many[sizeof many - 1] = 0;
  EXPECT(!*guess(many), "a long word");
}

/* Of two as near, the first; a penalty puts one behind the other. */
static void test_order(void) {
  struct word_guess first = {NULL, 0}, second = {NULL, 0};
  word_consider(&first, "limits", "limit", "a", 0), word_consider(&first, "limits", "limit", "b", 0);
  EXPECT(!strcmp(first.best, "a") && first.distance == 2, "%s %d", first.best, first.distance);
  word_consider(&second, "limits", "limit", "a", 1), word_consider(&second, "limits", "limit", "b", 0);
  EXPECT(!strcmp(second.best, "b"), "%s", second.best);
  word_consider(&second, "limits", "limits", "c", 1); /* fewer edits weigh more than the penalty */
  EXPECT(!strcmp(second.best, "c"), "%s", second.best);
}

static void test_hint(void) {
  char text[WORD_HINT_MAX];
  struct word_guess guess = {NULL, 0};
  word_hint(&guess, text);
  EXPECT(!text[0], "'%s'", text);
  guess.best = "build";
  word_hint(&guess, text);
  EXPECT(!strcmp(text, " (did you mean 'build'?)"), "'%s'", text);
}

int main(void) {
  test_guesses();
  test_order();
  test_hint();
  TEST_END;
}
