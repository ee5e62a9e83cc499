#include "number.h"

#include <float.h>
#include <stdio.h>
#include <string.h>

static int is_digit(char c) {
  return c >= '0' && c <= '9';
}

void number_write(double value, char text[NUMBER_TEXT_MAX]) {
  char raw[64];
  snprintf(raw, sizeof raw, "%.9g", value);
  /* A locale's decimal point may be any run of bytes that is none of these. */
  char *to = text;
  for (const char *from = raw; *from && to < text + NUMBER_TEXT_MAX - 1;) {
    if (strchr("0123456789+-einfa", *from)) {
      *to++ = *from++;
      continue;
    }
    *to++ = '.';
    while (*from && !strchr("0123456789+-einfa", *from)) from++;
  }
  *to = 0;
}

static const char *fault(const char *text, int fraction_allowed) {
  if (!*text) return "is empty";
  if (*text == '-' || *text == '+') return "has a sign";
  if (!is_digit(*text)) return "is not a number";
  if (text[0] == '0' && strchr("xXoObB", text[1]) && text[1]) return "has a base prefix";
  if (text[0] == '0' && is_digit(text[1])) return "has a leading zero";
  for (const char *c = text; *c; c++) {
    if (*c == '_') return "has an underscore";
    if (*c == 'e' || *c == 'E') return "has an exponent";
    if (*c == '.' && !fraction_allowed) return "has a fraction";
    if (*c == '.' && (!is_digit(c[1]) || memchr(text, '.', (size_t)(c - text)))) return "is not a number";
    if (*c != '.' && !is_digit(*c)) return "is not a number";
  }
  return NULL;
}

const char *number_read_integer(const char *text, int64_t *value) {
  const char *wrong = fault(text, 0);
  if (wrong) return wrong;
  int64_t total = 0;
  for (; *text; text++) {
    int digit = *text - '0';
    if (total > (INT64_MAX - digit) / 10) {
      *value = INT64_MAX;
      return NULL;
    }
    total = total * 10 + digit;
  }
  *value = total;
  return NULL;
}

/* Up to 15 significant digits and 22 places are exact: the mantissa and the power of ten are doubles, one rounding follows.
 */
const char *number_read_decimal(const char *text, double *value) {
  const char *wrong = fault(text, 1);
  if (wrong) return wrong;
  uint64_t mantissa = 0;
  int digits = 0, exponent = 0, fraction = 0;
  for (; *text; text++) {
    if (*text == '.') {
      fraction = 1;
    } else if (digits < 18) {
      mantissa = mantissa * 10 + (uint64_t)(*text - '0');
      digits += mantissa != 0;
      exponent -= fraction;
    } else {
      exponent += !fraction;
    }
    if (exponent > 300 || exponent < -300) return "is out of range";
  }
  while (exponent < 0 && mantissa % 10 == 0 && mantissa) mantissa /= 10, exponent++;
  double power = 1;
  for (int i = exponent < 0 ? -exponent : exponent; i > 0; i--) power *= 10;
  *value = exponent < 0 ? (double)mantissa / power : (double)mantissa * power;
  if (!(*value <= DBL_MAX)) return "is out of range";
  return NULL;
}
