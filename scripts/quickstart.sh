#!/usr/bin/env bash
# From a fresh clone to a checked layer: installs what is missing, builds, makes the default model's cubins, runs the layer on
# the GPUs present, or on the CPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
model=models/glm-5.3-flash.yaml
say() { printf '\n== %s\n' "$*"; }

say "Setting up"
scripts/setup.sh

say "Building"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
built() { "$@" >"$log" 2>&1 || { tail -n 60 "$log"; echo "quickstart: '$*' failed"; exit 1; }; }
built cmake --preset default
built cmake --build --preset default -j "$(nproc)" --target moeflow moeflow-gen moeflow-run moeflow-bench
echo "build/bin/moeflow-gen, build/bin/moeflow-run, build/bin/moeflow-bench, build/lib/libmoeflow.so"

say "moeflow-gen build $model --dtype bf16"
build/bin/moeflow-gen build "$model" --dtype bf16

gpus=0
if command -v nvidia-smi >/dev/null 2>&1; then gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true); fi
if [ "$gpus" -gt 0 ]; then
  run=(build/bin/moeflow-run "$model" --dtype bf16 --ep "$gpus" --tokens 1,8 --check)
else
  echo "No NVIDIA GPU here: the layer runs on the CPU backend, as two ranks in one process."
  run=(build/bin/moeflow-run "$model" --dtype bf16 --backend cpu --ep 2 --tokens 1 --check)
fi
say "${run[*]}"
"${run[@]}"

cat <<'TEXT'

== Next
build/bin/moeflow-gen explain models/glm-5.3-flash.yaml --dtype bf16   rows, memory, which kernels serve what
build/bin/moeflow-run --hand-example                                   a layer small enough to follow with a pencil
build/bin/moeflow-gen help model                                       the keys of your own model's YAML
scripts/run_all_tests.sh                                               the tests
integrations/c-example/, integrations/python/                          the layer in your engine; README.md shows how
TEXT
