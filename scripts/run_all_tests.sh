#!/usr/bin/env bash
# Builds MoEFlow and runs every test that this machine can run; ends with `N passed, N failed, N skipped`.
# Tests that need a GPU skip themselves by name where there is none.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# shellcheck source=scripts/steps.sh
. scripts/steps.sh

cache=$logs/cache  # the user's own cache takes no part in tests
mkdir -m 700 "$cache"
export MOEFLOW_CACHE_DIR=$cache

configure_and_build() { cmake --preset "$1" -DMOEFLOW_WERROR=ON && cmake --build --preset "$1" -j "$(nproc)"; }

build_twice() {
  local build="build/bin/moeflow-gen build models/glm-5.3-flash.yaml --dtype bf16 --format json"
  $build && $build | tee "$logs/second.json" && grep -q '"compiled": *0\b' "$logs/second.json"
}

check_format() {
  command -v clang-format >/dev/null || { echo "clang-format is not installed"; return 77; }
  clang-format --version | grep -q 'version 14\.' || { echo "$(clang-format --version): the style is that of version 14"; return 77; }
  find bench gen runtime run tests integrations -name build -prune -o -name '*.c' -print0 | xargs -0 clang-format --dry-run -Werror  # headers align their comments by hand
}

planted() {
  [ -x tests/planted/run.sh ] || { echo "tests/planted/run.sh is not there"; return 77; }
  tests/planted/run.sh
}

step setup scripts/setup.sh
python=python3
if ! python3 -c 'import numpy' 2>/dev/null && [ -x .venv/bin/python3 ]; then python=.venv/bin/python3; fi
step build configure_and_build default
[ "$failed" = 0 ] || finish  # the rest would test an older build
step_ctest tests build --timeout 600
step build-twice build_twice
step choices-every-ep tests/every_ep.sh build/bin/moeflow-run models/deepseek-v2-lite.yaml --backend cpu --reduce choices
step_unittest python "$python" -m unittest discover -v -s integrations/python/tests
step build-asan configure_and_build asan
step_ctest asan build-asan --timeout 600 -L '^(unit|emulated)$'
step planted planted
grep 'planted defects caught' "$logs/planted.log" | sed 's/^/   /' || true
step format check_format
finish
