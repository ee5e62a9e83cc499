#!/usr/bin/env bash
# exports.sh LIBRARY HEADER: the library exports exactly the functions that the public header declares, with SONAME 0.
set -euo pipefail
library=$1 header=$2
exported=$(nm -D --defined-only "$library" | awk '{print $NF}' | sort)
declared=$(grep -oE '^MOEFLOW_API [^;(]*\(' "$header" | grep -oE 'moeflow_[a-z_0-9]+\($' | tr -d '(' | sort)
[ -n "$declared" ] || { echo "$header declares nothing"; exit 1; }
diff <(echo "$declared") <(echo "$exported") || { echo "exported (>) differs from declared (<)"; exit 1; }
soname=$(readelf -d "$library" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')
[ "$soname" = libmoeflow.so.0 ] || { echo "SONAME is $soname"; exit 1; }
for needed in cuda nvrtc nccl yaml; do
  if readelf -d "$library" | grep -q "(NEEDED).*$needed"; then echo "the library is linked with $needed"; exit 1; fi
done
echo "$(wc -l <<<"$exported") functions, $soname"
