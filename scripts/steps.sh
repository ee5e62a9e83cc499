# Sourced: named steps that are timed and counted. A step is a command; exit code 77 means skipped, any other but 0 failed.
#
#   step NAME COMMAND...       one test
#   step_ctest NAME FOLDER ARGS... each of ctest's tests counts
#   step_unittest NAME ARGS... each test of Python's unittest counts
#   step_counted NAME COMMAND... its output must end with `N passed, N failed, N skipped`, which is added
#   finish                     prints `N passed, N failed, N skipped` as the last line and exits 1 if any failed or none passed
#
# What a step prints is kept in $logs/NAME.log and shown when it fails. Skipped tests are named with their reason.
passed=0 failed=0 skipped=0
skipped_names=()  # of single steps
logs=$(mktemp -d "${TMPDIR:-/tmp}/moeflow-logs.XXXXXX")
trap 'rm -rf "$logs"' EXIT

count() { passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3)); }

# Runs a command into its log. Sets `code` and `seconds`.
logged() {
  local name=$1 begin=$SECONDS
  shift
  printf '== %s\n' "$name"
  code=0
  "$@" >"$logs/$name.log" 2>&1 </dev/null || code=$?
  seconds=$((SECONDS - begin))
}

show_log() { tail -n "${STEP_LINES:-80}" "$logs/$1.log" | sed 's/^/   | /'; }

step() {
  local name=$1
  logged "$@"
  case $code in
    0) count 1 0 0; echo "   passed in $seconds s" ;;
    77) count 0 0 1; skipped_names+=("$name"); echo "   skipped: $name: $(tail -n 1 "$logs/$name.log")" ;;
    *) count 0 1 0; echo "   FAILED: $name: exit code $code after $seconds s"; show_log "$name" ;;
  esac
}

# Adds counts found in a step's log; a failing exit code counts as a failure even if none was found, and so do no tests at all.
counted() {
  local name=$1 ok=$2 bad=$3 skips=$4
  if [ "$bad" = 0 ] && { [ "$code" != 0 ] || [ $((ok + skips)) = 0 ]; }; then bad=1; fi
  count "$ok" "$bad" "$skips"
  echo "   $ok passed, $bad failed, $skips skipped in $seconds s"
  if [ "$bad" != 0 ]; then echo "   FAILED: $name: exit code $code"; show_log "$name"; fi
}

matches() { grep -cE "^ *[0-9]+/[0-9]+ Test +#$1" "$2" || true; }

step_ctest() {
  local name=$1 folder=$2 log ran passes skips
  shift 2
  logged "$name" ctest --output-on-failure --test-dir "$folder" "$@"
  log=$logs/$name.log
  awk '/^[0-9]+\/[0-9]+ Testing: / { test = $3 } /^skipped: / { sub(/^skipped: /, ""); print "   skipped: " test ": " $0 }' \
    "$folder/Testing/Temporary/LastTest.log" 2>/dev/null || true
  ran=$(matches '' "$log") passes=$(matches '.* Passed ' "$log") skips=$(matches '.*\*\*\*Skipped' "$log")
  counted "$name" "$passes" $((ran - passes - skips)) "$skips"
}

step_unittest() {
  local name=$1 log ran bad skips
  shift
  logged "$name" "$@"
  log=$logs/$name.log
  number() { sed -n "s/^\(OK\|FAILED\).*$1=\([0-9]*\).*/\2/p" "$log" | tail -n 1 | grep . || echo 0; }
  ran=$(sed -n 's/^Ran \([0-9]*\) test.*/\1/p' "$log" | tail -n 1)
  bad=$(($(number failures) + $(number errors))) skips=$(number skipped)
  grep -E "\.\.\. skipped " "$log" | sed 's/^/   skipped: /' || true
  counted "$name" $((${ran:-0} - bad - skips)) "$bad" "$skips"
}

step_counted() {
  local name=$1 line
  logged "$@"
  line=$(tail -n 1 "$logs/$name.log" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p')
  grep -E '^skipped: ' "$logs/$name.log" | sed 's/^/   /' || true
  # shellcheck disable=SC2086
  counted "$name" ${line:-0 0 0}
}

finish() {
  echo "$passed passed, $failed failed, $skipped skipped"
  [ "$failed" = 0 ] && [ "$passed" != 0 ]
  exit
}
