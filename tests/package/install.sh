#!/usr/bin/env bash
# install.sh SOURCE BUILD: installs, moves the prefix elsewhere, and builds and runs integrations/c-example from it alone, through
# pkg-config and through find_package.
set -euo pipefail
source=$1 build=$2
command -v pkg-config >/dev/null || { echo "skipped: pkg-config is not installed"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build" --prefix "$work/first" >/dev/null
mv "$work/first" "$work/moved"  # nothing installed may know where it was
cp -r "$source/integrations/c-example" "$work/example"
cd "$work/example"
rm -rf build layer tiny.spec
make run PKG_CONFIG_PATH="$(dirname "$(find "$work/moved" -name moeflow.pc)")" CFLAGS="-O2 -Wall -Wextra -Werror"
cmake -S . -B build -DCMAKE_PREFIX_PATH="$work/moved" >/dev/null
cmake --build build
build/layer tiny.spec
readelf -d layer | grep -q 'libmoeflow.so.0'
for tool in moeflow-gen moeflow-run moeflow-bench; do "$work/moved/bin/$tool" --version; done
# The example in README compiles as it stands there.
{
  echo '#include <moeflow.h>'
  echo '#include <stdio.h>'
  echo 'int example(int rank, moeflow_unique_id id, void *gate_up, void *down, float *bias, void *hidden, void *logits, void *out, void *stream) {'
  sed -n '/^```c$/,/^```$/p' "$source/README.md" | grep -v '^```'
  echo 'return 0; }'
} >readme.c
[ "$(wc -l <readme.c)" -gt 10 ] || { echo "README.md has no C example"; exit 1; }
cc -std=c99 -Wall -Wextra -Werror -I"$work/moved/include" -c readme.c
