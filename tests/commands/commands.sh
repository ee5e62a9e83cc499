#!/bin/bash
# The tools as a shell sees them: JSON that parses, exit codes, no home, a file size limit. commands.sh GEN RUN MODEL.yaml
set -u
gen=$1 run=$2 model=$3
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
failures=0

expect() { # expect CODE WHAT COMMAND...: the exit code, and on failure no more than one line on stderr beside the notes
  local code=$1 what=$2 got
  shift 2
  "$@" >"$folder/out" 2>"$folder/err"
  got=$?
  if [ $got -ne "$code" ]; then
    echo "$what: exit $got instead of $code: $(tail -1 "$folder/err")"
    failures=$((failures + 1))
  elif [ "$code" -ne 0 ] && [ "$(grep -vcE 'no GPU: running on the CPU|shared expert' "$folder/err")" -gt 1 ]; then
    echo "$what: more than one line: $(cat "$folder/err")"
    failures=$((failures + 1))
  fi
}

expect_json() { # expect_json WHAT COMMAND...
  expect 0 "$@"
  python3 -m json.tool <"$folder/out" >"$folder/json" 2>&1 && return
  echo "$1: no JSON: $(head -c 200 "$folder/out")"
  failures=$((failures + 1))
}

limited() { # a file may have no more than one block
  (
    ulimit -f 1
    exec "$@"
  )
}

small=(--dtype bf16 --experts 8)
cache=(--cache "$folder/cache")
expect_json "explain" "$gen" explain "$model" "${small[@]}" "${cache[@]}" --format json
expect_json "build --dry-run" "$gen" build "$model" "${small[@]}" "${cache[@]}" --dry-run --format json
expect_json "emit" "$gen" emit "$model" "${small[@]}" -o "$folder/emitted" --format json
expect_json "emit --digest" "$gen" emit "$model" "${small[@]}" --digest --format json
expect_json "list" "$gen" list "${cache[@]}" --format json
expect_json "run" "$run" "$model" "${small[@]}" --backend cpu --ep 2 --format json --machine 'a"b\'

expect 0 "explain without a home" env -u HOME -u XDG_CACHE_HOME -u MOEFLOW_CACHE_DIR "$gen" explain "$model" "${small[@]}"
expect_json "explain without a home" env -u HOME -u XDG_CACHE_HOME -u MOEFLOW_CACHE_DIR "$gen" explain "$model" "${small[@]}" \
  --format json
expect 6 "build without a home" env -u HOME -u XDG_CACHE_HOME -u MOEFLOW_CACHE_DIR "$gen" build "$model" "${small[@]}"
expect 6 "emit, file size limit" limited "$gen" emit "$model" "${small[@]}" -o "$folder/limited"
expect 6 "run --output, file size limit" limited "$run" "$model" "${small[@]}" --backend cpu --output "$folder/result.json"
expect 2 "a command with control bytes" "$gen" $'bu\x1b[31m\nild'
expect 2 "a topic with control bytes" "$gen" help $'a\nb'
expect 2 "a list of 60 000 numbers" "$run" "$model" --tokens "$(printf '1/%.0s' {1..30000})x"
[ "$(wc -c <"$folder/err")" -lt 1000 ] || { echo "the message has $(wc -c <"$folder/err") bytes"; failures=$((failures + 1)); }

echo "$failures failures"
[ $failures -eq 0 ]
