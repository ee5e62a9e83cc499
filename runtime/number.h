/* Numbers as text, the same in every locale: what YAML, canonical spec text, plan files and JSON share. */
#ifndef MOEFLOW_NUMBER_H
#define MOEFLOW_NUMBER_H

#include <stdint.h>

#define NUMBER_TEXT_MAX 32

/* "%.9g" with '.' as the decimal point. */
void number_write(double value, char text[NUMBER_TEXT_MAX]);

/* Plain decimal: digits, without sign, leading zero, underscore, exponent or base prefix; a decimal may have a fraction
 * after
 * '.', with digits on both sides. NULL when it was read, else what is wrong with the text, to follow "which ". An integer
 * beyond int64 reads as INT64_MAX, for the caller's range check to refuse; up to 18 significant digits of a decimal count.
 */
const char *number_read_integer(const char *text, int64_t *value);
const char *number_read_decimal(const char *text, double *value);
#endif
