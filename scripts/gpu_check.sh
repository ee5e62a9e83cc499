#!/usr/bin/env bash
# Runs what needs a GPU, and records it in DIR/verified.json. Needs a built tree, but neither git, CMake nor a compiler.
#
#   scripts/gpu_check.sh [--out DIR] [--results DIR]   DIR: tests/gpu; with --results each checked run's JSON is kept there
#   scripts/gpu_check.sh --digest                      prints what identifies the code under test: 64 hex digits
#
# The digest covers runtime/ by path and content, and the kernels' emitted sources with the templates that they include, for sm_90a
# and the models below.
# Equal digests mean that the last GPU run vouches for this code. MOEFLOW_BIN overrides build/bin, MOEFLOW_CACHE_DIR the cache
# (default: a temporary one, built first).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bin=${MOEFLOW_BIN:-$root/build/bin}
case $bin in /*) ;; *) bin=$PWD/$bin ;; esac
models=(glm-5.3-flash deepseek-v2-lite qwen3-30b-a3b mixtral-8x7b)
out=tests/gpu results='' only_digest=
while [ $# -gt 0 ]; do
  case $1 in
    --digest) only_digest=1 ;;
    --out | --results)
      [ $# -ge 2 ] || { echo "gpu_check.sh: $1 needs a folder" >&2; exit 2; }
      case $1 in --out) out=$2 ;; *) results=$2 ;; esac
      shift ;;
    *) echo "gpu_check.sh: unknown option $1" >&2; exit 2 ;;
  esac
  shift
done
cd "$root"
[ -x "$bin/moeflow-gen" ] || { echo "gpu_check.sh: $bin/moeflow-gen is not built" >&2; exit 5; }

digest() {
  local model units
  if [ -n "$(find gen -newer "$bin/moeflow-gen" -name '*.[ch]' | head -n 1)" ]; then
    echo "gpu_check.sh: $bin/moeflow-gen is older than gen/: build first, or this is the digest of an older generator" >&2
  fi
  units=$(for model in "${models[@]}"; do
    "$bin/moeflow-gen" emit "models/$model.yaml" --dtype bf16 --arch sm_90a --templates templates --digest || exit
    echo "$model"
  done) || return
  { find runtime -name '*.[ch]' -type f | LC_ALL=C sort | xargs sha256sum && echo "$units"; } | sha256sum | cut -d' ' -f1
}

if [ -n "$only_digest" ]; then digest; exit; fi

# shellcheck source=scripts/steps.sh
. scripts/steps.sh
digest=$(digest)
mkdir -p "$out" ${results:+"$results"}
mapfile -t gpus < <(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || true)
if [ "${#gpus[@]}" = 0 ]; then echo "gpu_check.sh: no GPU here" >&2; exit 5; fi

if [ -z "${MOEFLOW_CACHE_DIR:-}" ]; then
  MOEFLOW_CACHE_DIR=$logs/cache
  mkdir -m 700 "$MOEFLOW_CACHE_DIR"
fi
export MOEFLOW_CACHE_DIR MOEFLOW_BIN=$bin  # the tests' own idea of where the tools are is that of the machine that built them

run_json() { # FILE ARGS...: a checked run whose JSON goes to FILE
  local json=$1
  shift
  timeout 580 "$bin/moeflow-run" "$@" --backend cuda --check --format json >"$json"
}

# checked LABEL MODEL.yaml ARGS...: one moeflow-run --check; needs `need` GPUs
need=1
checked() {
  local label=$1 model=$2
  shift 2
  if [ "${#gpus[@]}" -lt "$need" ]; then step "run-$label" sh -c "echo 'needs $need GPUs, has ${#gpus[@]}'; exit 77"; return; fi
  step "run-$label" run_json "${results:-$logs}/run-$label.json" "$model" --dtype bf16 "$@"
}

glm=models/glm-5.3-flash.yaml lite=models/deepseek-v2-lite.yaml
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1)
case $arch in 9.*) arch=sm_90a ;; 10.*) arch=sm_100a ;; 12.*) arch=sm_120 ;; *) arch=sm_80 ;; esac
step cubins-glm-5.3-flash "$bin/moeflow-gen" build "$glm" --dtype bf16 --arch "$arch"
step cubins-deepseek-v2-lite "$bin/moeflow-gen" build "$lite" --dtype bf16 --arch "$arch"
step cubins-deepseek-v2-lite-experts8 "$bin/moeflow-gen" build "$lite" --dtype bf16 --arch "$arch" --experts 8
step cubins-glm-5.3-flash-choices "$bin/moeflow-gen" build "$glm" --dtype bf16 --arch "$arch" --reduce choices
for test in "$bin"/../tests/gpu_* "$bin"/../tests/ranks_*; do
  if [ -f "$test" ] && [ -x "$test" ]; then step "$(basename "$test")" timeout 300 "$test"; fi
done
need=2
checked glm-5.3-flash-bf16-ep2-nccl "$glm" --ep 2 --transport nccl --tokens 0,1,8,128
checked glm-5.3-flash-bf16-ep2-nccl-8192 "$glm" --ep 2 --transport nccl --tokens 8192 --capacity 8192 --check-rows 64
checked deepseek-v2-lite-bf16-ep2-nccl "$lite" --ep 2 --transport nccl --tokens 0,1,8,128,5/0
checked glm-5.3-flash-bf16-ep2-window "$glm" --ep 2 --transport window --tokens 0,1,8,128
need=1
checked glm-5.3-flash-bf16-ep4-local "$glm" --ep 4 --transport local --tokens 0,1,8,128
checked glm-5.3-flash-bf16-ep8-local "$glm" --ep 8 --transport local --tokens 0,1,8,128
checked deepseek-v2-lite-bf16-ep3-local "$lite" --ep 3 --transport local --tokens 1,32
step run-choices-every-ep env ${results:+RESULTS="$results/run-glm-5.3-flash-bf16-choices"} timeout 580 \
  tests/every_ep.sh "$bin/moeflow-run" "$glm" --dtype bf16 --backend cuda --reduce choices

# under COMMAND NAME ARGS...: the checked layer started by a launcher or a tool that may be missing
under() {
  local command=$1 label=$2
  shift 2
  if ! command -v "$command" >/dev/null; then step "$label" sh -c "echo '$command is not installed'; exit 77"; return; fi
  if [ "${#gpus[@]}" -lt "$need" ]; then step "$label" sh -c "echo 'needs $need GPUs, has ${#gpus[@]}'; exit 77"; return; fi
  step "$label" timeout 300 "$command" "$@"
}
lite_args=("$bin/moeflow-run" "$lite" --dtype bf16 --backend cuda --tokens 1,8 --check)
need=2
under mpirun mpirun -n 2 --allow-run-as-root "${lite_args[@]}" --transport nccl
under torchrun torchrun --no-python --nproc-per-node 2 --master-port 29555 "${lite_args[@]}" --transport nccl
need=1
under compute-sanitizer memcheck --tool memcheck --error-exitcode 9 "${lite_args[@]}" --experts 8 --ep 1 --transport local --replays 3

sha=$("$bin/moeflow-run" --version | sed -n 's/.*"sha": "\([0-9a-f]*\)".*/\1/p')  # what the tested tools were built from
quoted() { if [ $# -gt 0 ]; then printf '"%s", ' "$@" | sed 's/, $//'; fi; }
printf '{"digest": "%s", "git": "%s", "models": [%s], "gpus": [%s],\n "passed": %d, "failed": %d, "skipped": %d, "skipped_names": [%s]}\n' \
  "$digest" "$sha" "$(quoted "${models[@]}")" "$(quoted "${gpus[@]}")" "$passed" "$failed" "$skipped" \
  "$(quoted ${skipped_names[@]+"${skipped_names[@]}"})" >"$out/verified.json"
cat "$out/verified.json"
finish
