#!/usr/bin/env bash
# Installs what MoEFlow's build needs and this machine lacks; does nothing, quickly, when all is there.
#
#   compilers, CMake, libyaml  from apt, as root or through sudo
#   CUDA headers, NVRTC, NCCL  from a toolkit if there is one, else as pip wheels into .venv
#   numpy, for the Python tests, into .venv unless python3 has it; a failure here is only a warning
#
# MOEFLOW_NO_SYSTEM_CUDA=1 ignores toolkits and python3's own wheels and takes the wheels in .venv.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

cuda_wheels=("nvidia-cuda-nvrtc==13.0.*" "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-crt==13.0.*" "nvidia-cuda-cccl==13.0.*"
             "nvidia-nccl-cu13==2.28.*")

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 5; }
have() { command -v "$1" >/dev/null 2>&1; }
have_header() { printf '#include <%s>\n' "$1" | gcc -E -x c - >/dev/null 2>&1; }

# ---- Debian packages ----

missing_packages() {
  local pair
  for pair in gcc:gcc g++:g++ cmake:cmake make:make pkg-config:pkg-config git:git python3:python3; do
    have "${pair%%:*}" || echo "${pair##*:}"
  done
  if ! have gcc || ! have_header stdio.h; then echo libc6-dev; fi
  if ! have gcc || ! have_header yaml.h; then echo libyaml-dev; fi
  if ! have python3 || ! python3 -c 'import venv, ensurepip' 2>/dev/null; then echo python3-venv; fi
}

install_packages() {
  local as_root=()
  have apt-get || fail "missing: $*. There is no apt-get here: install these (or what they are called on this system) and run again"
  if [ "$(id -u)" != 0 ]; then
    have sudo || fail "missing: $*. Neither root nor sudo here: run 'apt-get install $*' as root and run again"
    as_root=(sudo)
  fi
  say "installing $*"
  "${as_root[@]}" apt-get update -qq >&2 || say "apt-get update failed; trying the lists that are there"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" ca-certificates >&2 \
    || fail "apt-get could not install: $*"
}

# ---- CUDA headers: the same places as cmake/CudaHeaders.cmake ----

cuda_roots() {
  if [ "${MOEFLOW_NO_SYSTEM_CUDA:-0}" != 1 ]; then
    printf '%s\n' ${CUDA_HOME:+"$CUDA_HOME"} ${CUDA_PATH:+"$CUDA_PATH"} /usr/local/cuda /usr/local /usr
    python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null || true
  fi
  printf '%s\n' "$venv"/lib/python3*/site-packages/nvidia
}

# The first of the needed headers that no root has; nothing when all are there.
missing_cuda_header() {
  local header root_ suffix found roots
  roots=$(cuda_roots)
  for header in cuda.h nvrtc.h nccl.h crt/host_config.h nv/target; do
    found=
    while IFS= read -r root_; do
      for suffix in include cu13/include nccl/include include/cccl cu13/include/cccl; do
        if [ -e "$root_/$suffix/$header" ]; then found=1; break 2; fi
      done
    done <<<"$roots"
    [ -n "$found" ] || { echo "$header"; return; }
  done
}

make_venv() {
  [ -x "$venv/bin/python3" ] || python3 -m venv "$venv" || fail "python3 -m venv $venv failed"
}

pip_install() { "$venv/bin/python3" -m pip install -q --disable-pip-version-check "$@" >&2; }

has_numpy() { "$1" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("numpy") is None)' 2>/dev/null; }

# ---- all of it ----

packages=$(missing_packages)
# shellcheck disable=SC2086  # one word per package
if [ -n "$packages" ]; then install_packages $packages; fi

header=$(missing_cuda_header)
if [ -n "$header" ]; then
  say "no $header in a CUDA toolkit: installing NVRTC, NCCL and the CUDA headers as pip wheels into .venv (about 290 MB)"
  make_venv
  pip_install "${cuda_wheels[@]}" || fail "pip could not install ${cuda_wheels[*]}. Install a CUDA 13 toolkit with NCCL and set CUDA_HOME"
  header=$(missing_cuda_header)
  [ -z "$header" ] || fail "$header is still missing after installing the wheels"
fi

if ! has_numpy python3 && ! has_numpy "$venv/bin/python3"; then
  make_venv
  pip_install numpy || say "numpy could not be installed: the Python tests will be skipped"
fi
