#!/bin/bash
# The tools as a shell sees them: JSON that parses, exit codes, no home, a file size limit, a damaged cache and its mending.
# commands.sh GEN RUN MODEL.yaml FAKE_LIBCUDA
set -u
gen=$1 run=$2 model=$3 fake_cuda=$4
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
failures=0
notes='no GPU: running on the CPU|shared expert|all ranks run on GPU 0|: tuned by '

expect() { # expect CODE WHAT COMMAND...: the exit code, and on failure no more than one line on stderr beside the notes
  local code=$1 what=$2 got
  shift 2
  "$@" >"$folder/out" 2>"$folder/err"
  got=$?
  if [ $got -ne "$code" ]; then
    echo "$what: exit $got instead of $code: $(tail -1 "$folder/err")"
    failures=$((failures + 1))
  elif [ "$code" -ne 0 ] && [ "$(grep -vcE "$notes" "$folder/err")" -gt 1 ]; then
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

says() { # says WHAT PATTERN...: what the last command printed holds each
  local what=$1 pattern
  shift
  for pattern; do
    grep -qE -- "$pattern" "$folder/out" "$folder/err" && continue
    echo "$what: nothing like '$pattern' in: $(cat "$folder/out" "$folder/err")"
    failures=$((failures + 1))
  done
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
expect 0 "explain" "$gen" explain "$model" "${small[@]}" "${cache[@]}" --ep 2
says "explain" '^deepseek-v2-lite, bf16 weights$' 'experts +8, of which a token chooses 6' 'NOT computed by the layer' \
  'header 16 B .* padding 64 B .* hidden 4096 B' '2 \(send, receive\) x 2 ranks x 128 rows x 4224 B' \
  '^  4 experts a rank' '^gate_up ' 'the cache holds no plan' "run: moeflow-gen build $model --dtype bf16 --experts 8 --arch sm_90a --cache $folder/cache"
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
expect 6 "run --output, file size limit" limited "$run" "$model" "${small[@]}" --backend cpu --machine "$(printf %1024s)" \
  --output "$folder/result.json"
expect 6 "run --output into no folder" "$run" "$model" "${small[@]}" --backend cpu --output "$folder/none/result.json"
says "run --output into no folder" '--output: cannot write .*No such file'
expect 6 "run --output onto a folder" "$run" "$model" "${small[@]}" --backend cpu --output "$folder/"
says "run --output onto a folder" '--output: cannot write .*directory'
expect 2 "more ranks than experts" "$run" "$model" "${small[@]}" --backend cpu --ep 9
says "more ranks than experts" '--ep.* 9, .* 8 experts'
expect 0 "run -h" "$run" -h
expect 2 "a command with control bytes" "$gen" $'bu\x1b[31m\nild'
expect 2 "a misspelt command" "$gen" biuld "$model"
says "a misspelt command" "unknown command 'biuld' \(did you mean 'build'\?\); see"
expect 2 "a topic with control bytes" "$gen" help $'a\nb'
expect 2 "a list of 60 000 numbers" "$run" "$model" --tokens "$(printf '1/%.0s' {1..30000})x"
[ "$(wc -c <"$folder/err")" -lt 1000 ] || { echo "the message has $(wc -c <"$folder/err") bytes"; failures=$((failures + 1)); }

printf 'moeflow: 1\nname: x\nhiddn: 3\n' >"$folder/bad.yaml"
for tool in "$gen build" "$run"; do
  # shellcheck disable=SC2086
  expect 3 "a misspelt key" $tool "$folder/bad.yaml"
  says "a misspelt key" "bad.yaml:3:1: unknown key 'hiddn'"
done
expect 6 "run without cubins" env MOEFLOW_CUDA_LIB="$fake_cuda" "$run" "$model" "${small[@]}" "${cache[@]}" --reduce choices
says "run without cubins" \
  "moeflow-gen build $model --dtype bf16 --experts 8 --reduce choices --arch sm_[0-9a]+ --cache $folder/cache\$"

# doctor: exit 0 or 5 by what a build needs, alone
expect 5 "doctor without NVRTC" env MOEFLOW_NVRTC=/nonexistent "$gen" doctor "${cache[@]}"
says "doctor without NVRTC" '^MISSING +nvrtc ' '^(ok|absent) +driver ' '^ok +environment +MOEFLOW_NVRTC=/nonexistent' \
  'is missing$'
"$gen" doctor "${cache[@]}" --format json >"$folder/out" 2>"$folder/err"
doctor=$?
grep -q "\"can_build\": *$([ $doctor -eq 0 ] && echo true || echo false)" "$folder/out" ||
  { echo "doctor: exit $doctor and $(cat "$folder/out")"; failures=$((failures + 1)); }

# A tuned file: chosen, shown, refused, and what a build without one says to --tuned-only.
plain=(--cache "$folder/cache" --ep 2 --capacity 8)
mkdir "$folder/models" "$folder/models/tuned"
cp "$model" "$folder/models/m.yaml"
tuned_yaml=$folder/models/m.yaml tune=$folder/models/tuned/deepseek-v2-lite.bf16.fake-gpu.tune
expect_json "explain, not tuned" "$gen" explain "$tuned_yaml" "${plain[@]}" --format json
spec=$(python3 -c 'import json,sys; print(json.load(sys.stdin)["spec_sha256"])' <"$folder/out")
expect 2 "--tuned-only without a file" "$gen" build "$tuned_yaml" "${plain[@]}" --tuned-only
says "--tuned-only without a file" "nothing says what is best for up to 8 received rows on sm_90a \(no tuned file\)" \
  "run: moeflow-gen sweep $tuned_yaml --dtype bf16 --ep 2 --capacity 8\$"
zeros=$(printf '0%.0s' {1..64})
cat >"$tune" <<TUNE
moeflow-tune 1
model deepseek-v2-lite
dtype bf16
gpu Fake GPU
multiprocessors 132
arch sm_90a
spec $spec
driver 12080
nvrtc 12080
templates $zeros
rows 16 experts tile_tokens=16 tile_rows=64 tile_depth=128 stages=8 parts=2 residency=1 us=61.0 default=62.2 gap_percent=1.95 ci_percent=1.60,2.30 runner_up=portable
TUNE
without=(env MOEFLOW_CUDA_LIB=/nonexistent "$gen") with=(env "MOEFLOW_CUDA_LIB=$fake_cuda" "$gen")
expect 0 "the only tuned file" "${without[@]}" explain "$tuned_yaml" "${plain[@]}"
says "the only tuned file" "tuned by $tune, the only one for this model, on Fake GPU" '^experts: [0-9]+ of [0-9]+ variants legal; pruned by' \
  "^up to 16 .* tuned at 16: experts 61.0 us, 1.95 % \\[1.60, 2.30\\] less than the default's 62.2\$" \
  '^    runner-up: portable$' '^up to 1024 .*default \(not tuned\)$' '^more .*no other kernel for this size$'
expect_json "explain, tuned" "${without[@]}" explain "$tuned_yaml" "${plain[@]}" --format json
says "explain, tuned" '"source": *"tuned"' '"runner_up": *"portable"'
expect 0 "another GPU is named" "${without[@]}" explain "$tuned_yaml" "${plain[@]}" --gpu h200
grep -q 'tuned' "$folder/err" && { echo "another GPU is named: $(cat "$folder/err")"; failures=$((failures + 1)); }
expect 0 "a target without experts" "${without[@]}" explain "$tuned_yaml" "${plain[@]}" --arch sm_90
says "a target without experts" 'note: sm_90 has the portable kernels alone; the experts kernel is in --arch sm_90a' \
  ' the experts kernel is not for sm_90$'
expect 0 "both targets" "${without[@]}" explain "$tuned_yaml" "${plain[@]}" --arch sm_90,sm_90a
grep -q 'note: sm_90' "$folder/err" && { echo "both targets: $(cat "$folder/err")"; failures=$((failures + 1)); }
sed 's/^multiprocessors .*/multiprocessors 7/' "$tune" >"$folder/other.tune"
expect 0 "--tuned none" "${without[@]}" explain "$tuned_yaml" "${plain[@]}" --tuned none
says "--tuned none" '^up to 16 .*default \(not tuned\)$'
if [ $doctor -eq 0 ]; then
  expect 0 "no tuned file" "${without[@]}" build "$tuned_yaml" "${plain[@]}" --gpu h999 --dry-run
  says "no tuned file" "note: no tuned file for deepseek-v2-lite bf16 on h999 in $folder/models/tuned: sm_90a gets default variants" \
    "to measure: moeflow-gen sweep $tuned_yaml --dtype bf16 --ep 2 --capacity 8\$"
  for quiet in "--gpu h999 --arch sm_80" "--tuned none" "--reduce choices" "--experts 8"; do
    # shellcheck disable=SC2086
    expect 0 "nothing to tune" "${without[@]}" build "$tuned_yaml" "${plain[@]}" $quiet --dry-run
    grep -q 'no tuned file' "$folder/err" && { echo "$quiet: $(cat "$folder/err")"; failures=$((failures + 1)); }
  done
  expect 0 "--tuned-only" "${with[@]}" build "$tuned_yaml" "${plain[@]}" --tuned-only --dry-run
  says "--tuned-only" "tuned by $tune\$" "warning: $tune was measured with other software \(driver 12080, here .*; templates 000"
  expect 2 "--tuned-only, more rows" "${with[@]}" build "$tuned_yaml" --cache "$folder/cache" --ep 2 --tuned-only --dry-run
  expect 2 "a tuned file of other hardware" "${with[@]}" build "$tuned_yaml" "${plain[@]}" --tuned "$folder/other.tune" --dry-run
  says "a tuned file of other hardware" 'is for multiprocessors 7, this is [0-9]+; run: moeflow-gen sweep'
  mv "$folder/other.tune" "$tune"
  expect 0 "a file found is of other hardware" "${with[@]}" build "$tuned_yaml" "${plain[@]}" --dry-run
  says "a file found is of other hardware" 'not used: .* is for multiprocessors 7'
fi
rm -r "$folder/models"

# A damaged entry: verify names the command that mends it, for a scaled-down model too.
if [ $doctor -eq 0 ]; then
  expect 0 "build" "$gen" build "$model" "${small[@]}" "${cache[@]}"
  expect 0 "list" "$gen" list "${cache[@]}"
  says "list" '^  gate_up +[0-9a-f]{16}  tile tokens 8, rows 64, depth 64, stages 4$' \
    '^  experts +[0-9a-f]{16}  tile tokens .*, parts [0-9], residency [0-9]$' '^  router +[0-9a-f]{16}$'
  expect 0 "verify" "$gen" verify "${cache[@]}"
  says "verify" ': 1 plan and [0-9]+ entries read, 0 damaged$'
  printf x | dd of="$(find "$folder/cache/entries" -type f | head -1)" bs=1 seek=4000 conv=notrunc status=none
  expect 6 "verify, damaged" "$gen" verify "${cache[@]}"
  says "verify, damaged" '^damaged: .*entries/' 'lacks 1 of [0-9]+ entries'
  line=$(sed -n 's/^to rebuild: moeflow-gen //p' "$folder/out")
  # shellcheck disable=SC2086
  cd "$(dirname "$model")/.." && expect 0 "the line to rebuild" "$gen" $line
  says "the line to rebuild" ' 1 compiled, '
  expect 0 "verify, mended" "$gen" verify "${cache[@]}"
fi

# A narrow layer in which one activation lies between two bf16 values: beyond the bars, unless the user allows for that. The CPU
# backend gives the same bits everywhere, so seed 6 does.
cat >"$folder/narrow.yaml" <<'YAML'
moeflow: 1
name: narrow
hidden: 64
intermediate: 64
experts: 8
top_k: 2
activation: swiglu
router: {score: softmax, renormalize: true}
weights: {dtype: bf16}
YAML
narrow=("$run" "$folder/narrow.yaml" --backend cpu --ep 1 --tokens 64 --seed 6 --check)
expect 4 "a row beyond the bars" "${narrow[@]}"
says "a row beyond the bars" 'rank 0 token 9 .*relative L2 of the row 0.00281'
expect 0 "roundings allowed" "${narrow[@]}" --allow-roundings
says "roundings allowed" ' 0.00281 .*ok, 1 row\(s\) on the edge of a rounding$'
expect 4 "roundings do not explain other weights" "${narrow[@]}" --allow-roundings --reference-seed 7

echo "$failures failures"
[ $failures -eq 0 ]
