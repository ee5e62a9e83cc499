/* Numbers as text: what is plain decimal and what is not, round trips, and no trust in the locale's decimal point. */
#include <stdarg.h>

#include "number.h"
#include "test.h"

/* number.c once more, with a printf whose decimal point is that of some locale. */
static const char *locale_point;
static int locale_snprintf(char *text, size_t size, const char *format, double value) {
  char plain[64];
  snprintf(plain, sizeof plain, format, value);
  char *point = strchr(plain, '.');
  if (!point) return snprintf(text, size, "%s", plain);
  *point = 0;
  return snprintf(text, size, "%s%s%s", plain, locale_point, point + 1);
}
#define snprintf locale_snprintf
#define number_write locale_number_write
#define number_read_integer locale_number_read_integer
#define number_read_decimal locale_number_read_decimal
#include "../../runtime/number.c"
#undef snprintf
#undef number_write
#undef number_read_integer
#undef number_read_decimal

static void test_write(void) {
  static const struct {
    double value;
    const char *text;
  } cases[] = {{0, "0"},         {2.5, "2.5"},     {10, "10"},     {1.0 / 3, "0.333333333"}, {1000000, "1000000"},
               {0.001, "0.001"}, {2.827, "2.827"}, {-1.5, "-1.5"}, {1e-20, "1e-20"},         {1.0000000004, "1"}};
  static const char *const points[] = {".", ",", "\xd9\xab"}; /* the last: U+066B, the Arabic decimal separator */
  char text[NUMBER_TEXT_MAX];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    number_write(cases[i].value, text);
    EXPECT(!strcmp(text, cases[i].text), "%s, wanted %s", text, cases[i].text);
    for (int j = 0; j < 3; j++) {
      locale_point = points[j];
      locale_number_write(cases[i].value, text);
      EXPECT(!strcmp(text, cases[i].text), "point '%s': %s, wanted %s", points[j], text, cases[i].text);
    }
  }
}

static void test_integers(void) {
  static const struct {
    const char *text;
    int64_t value;
  } good[] = {{"0", 0},
              {"1", 1},
              {"4096", 4096},
              {"2147483646", 2147483646},
              {"2147483647", 2147483647},
              {"2147483648", 2147483648},
              {"4294967296", 4294967296},
              {"9223372036854775806", INT64_MAX - 1},
              {"9223372036854775807", INT64_MAX},
              {"9223372036854775808", INT64_MAX},
              {"18446744073709551617", INT64_MAX},
              {"99999999999999999999999999", INT64_MAX}};
  static const char *const bad[] = {"",    "-1", "+1", "01", "00", "0x10", "0o17", "0b1", "1_0",  "1e3",     "1E3",
                                    "1.0", "1.", ".5", " 1", "1 ", "abc",  "1a",   "~",   "null", "\xd9\xa1"};
  for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
    int64_t value = -1;
    const char *wrong = number_read_integer(good[i].text, &value);
    EXPECT(!wrong && value == good[i].value, "%s: %s, %lld", good[i].text, wrong ? wrong : "", (long long)value);
  }
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    int64_t value;
    EXPECT(number_read_integer(bad[i], &value), "'%s' was read", bad[i]);
  }
}

static void test_decimals(void) {
  static const char *const bad[] = {"",    "-1.5",  "+1.5",  "01.5", "1.",  ".5",  "1..5", "1.5.5", "1.5e3",
                                    "1e3", "0x1.8", "1_0.5", "1,5",  "nan", "inf", "1.5f", " 1.5"};
  static const struct {
    const char *text;
    double value;
  } good[] = {{"0", 0},
              {"0.0", 0},
              {"2.5", 2.5},
              {"10", 10},
              {"10.0", 10},
              {"0.1", 0.1},
              {"2.827", 2.827},
              {"0.001", 0.001},
              {"123456.789", 123456.789},
              {"1.000000000000000000000000000000", 1},
              {"0.3333333333333333", 0.3333333333333333}};
  for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
    double value = -1;
    const char *wrong = number_read_decimal(good[i].text, &value);
    EXPECT(!wrong && value == good[i].value, "%s: %s, %.17g", good[i].text, wrong ? wrong : "", value);
  }
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    double value;
    EXPECT(number_read_decimal(bad[i], &value), "'%s' was read", bad[i]);
  }
  char longest[2000];
  double value;
  memset(longest, '9', sizeof longest - 1);
  longest[sizeof longest - 1] = 0;
  EXPECT(number_read_decimal(longest, &value), "1999 digits were read as %g", value);
}

/* Every value that is written is read back as the same text. */
static void test_round_trip(void) {
  for (int i = 1; i < 20000; i++) {
    char first[NUMBER_TEXT_MAX], second[NUMBER_TEXT_MAX];
    double value = i * 0.0437219 + 1.0 / i, again;
    number_write(value, first);
    EXPECT(!number_read_decimal(first, &again), "%s", first);
    number_write(again, second);
    EXPECT(!strcmp(first, second) && again == strtod(first, NULL), "%s, then %s", first, second);
  }
}

int main(void) {
  test_write();
  test_integers();
  test_decimals();
  test_round_trip();
  TEST_END;
}
