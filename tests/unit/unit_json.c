/* The JSON writer: commas, nesting, escapes, what is not a number or not UTF-8; and the status messages that go into it. */
#include <math.h>

#include "json.h"
#include "status.h"
#include "test.h"

static struct json json;
static char *text;
static size_t size;

static void begin(void) {
  json_begin(&json, open_memstream(&text, &size));
}

static void expect(const char *wanted) {
  json_end(&json);
  fclose(json.file);
  EXPECT(!strcmp(text, wanted), "got %s wanted %s", text, wanted);
  free(text);
}

static void expect_string(const char *value, const char *wanted) {
  char line[256];
  begin();
  json_string(&json, value);
  snprintf(line, sizeof line, "%s\n", wanted);
  expect(line);
}

static void test_nesting(void) {
  begin();
  json_object(&json);
  json_key(&json, "a"), json_array(&json), json_array_end(&json);
  json_key(&json, "b"), json_array(&json);
  json_int(&json, 1), json_int(&json, INT64_MIN), json_object(&json), json_object_end(&json), json_bool(&json, 1);
  json_array(&json), json_array(&json), json_null(&json), json_array_end(&json), json_int(&json, 2), json_array_end(&json);
  json_array_end(&json);
  json_key(&json, "c"), json_object(&json), json_key(&json, "d"), json_raw(&json, "{\"e\": 1}"), json_object_end(&json);
  json_key(&json, "f"), json_bool(&json, 0);
  json_object_end(&json);
  expect("{\"a\": [], \"b\": [1, -9223372036854775808, {}, true, [[null], 2]], \"c\": {\"d\": {\"e\": 1}}, \"f\": false}\n");
}

static void test_strings(void) {
  expect_string("plain", "\"plain\"");
  expect_string("", "\"\"");
  expect_string(NULL, "null");
  expect_string("a\"b\\c\n\t\r\x01\x1b[0m\x7f", "\"a\\\"b\\\\c\\n\\t\\u000d\\u0001\\u001b[0m\\u007f\"");
  expect_string("\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", "\"\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80\"");
  expect_string("\xff\xc3", "\"\\ufffd\\ufffd\"");                       /* no sequence; cut short */
  expect_string("\xc0\xaf", "\"\\ufffd\\ufffd\"");                       /* overlong '/' */
  expect_string("\xe0\x80\x80", "\"\\ufffd\\ufffd\\ufffd\"");            /* overlong */
  expect_string("\xed\xa0\x80", "\"\\ufffd\\ufffd\\ufffd\"");            /* a surrogate */
  expect_string("\xf4\x90\x80\x80", "\"\\ufffd\\ufffd\\ufffd\\ufffd\""); /* above U+10FFFF */
  begin();
  json_object(&json);
  json_key(&json, "a\"b"), json_int(&json, 1);
  json_object_end(&json);
  expect("{\"a\\\"b\": 1}\n");
}

static void test_numbers(void) {
  begin();
  json_array(&json);
  json_double(&json, 1.5), json_double(&json, 0), json_double(&json, 1e-12), json_double(&json, 123456789.0);
  json_double(&json, NAN), json_double(&json, INFINITY), json_double(&json, -INFINITY);
  json_array_end(&json);
  expect("[1.5, 0, 1e-12, 123456789, null, null, null]\n");
}

static void test_status(void) {
  EXPECT(!strcmp(moeflow_last_error(), ""), "%s", moeflow_last_error());
  EXPECT(status_set(MOEFLOW_ERROR_FORMAT, "a %d\n\x1b[31mb", 7) == MOEFLOW_ERROR_FORMAT, "status");
  EXPECT(!strcmp(moeflow_last_error(), "a 7??[31mb"), "%s", moeflow_last_error());
  EXPECT(status_prefix(MOEFLOW_ERROR_CACHE, "file %s", "x") == MOEFLOW_ERROR_CACHE, "status");
  EXPECT(!strcmp(moeflow_last_error(), "file x: a 7??[31mb"), "%s", moeflow_last_error());
  status_set(MOEFLOW_ERROR_FORMAT, "again: %s", moeflow_last_error());
  EXPECT(!strcmp(moeflow_last_error(), "again: file x: a 7??[31mb"), "%s", moeflow_last_error());
  for (int i = 0; i < 2000; i++) status_prefix(MOEFLOW_ERROR_FORMAT, "0123456789");
  EXPECT(strlen(moeflow_last_error()) == 4095, "%zu characters", strlen(moeflow_last_error()));
}

static void test_status_tables(void) {
  for (int status = MOEFLOW_OK; status <= MOEFLOW_ERROR_UNSUPPORTED; status++) {
    EXPECT(!strncmp(moeflow_status_name(status), "MOEFLOW_", 8), "%d: %s", status, moeflow_status_name(status));
    EXPECT((status_exit_code(status) == 0) == (status == MOEFLOW_OK), "%d: exit %d", status, status_exit_code(status));
  }
  EXPECT(status_exit_code(MOEFLOW_ERROR_FORMAT) == 3 && status_exit_code(MOEFLOW_ERROR_CAPACITY) == 2, "codes");
  EXPECT(status_exit_code(MOEFLOW_ERROR_CACHE) == 6 && status_exit_code(MOEFLOW_ERROR_TIMEOUT) == 7, "codes");
  EXPECT(status_exit_code(99) == 1 && moeflow_status_name(99) && moeflow_status_name(-1), "unknown numbers");
}

int main(void) {
  test_status();
  test_status_tables();
  test_nesting();
  test_strings();
  test_numbers();
  TEST_END;
}
