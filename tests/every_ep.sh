#!/usr/bin/env bash
# every_ep.sh MOEFLOW_RUN MODEL.yaml ARGS...: with `reduce: choices` a token's output depends on neither EP nor placement. Rank 0
# brings 8 tokens, the others none; each run is checked, and all must give the same output, bit for bit. With RESULTS=PREFIX each
# run's JSON is kept as PREFIX-epN-local.json.
set -euo pipefail
run=$1
shift
first=
for ep in 1 2 3 4 8; do
  tokens=8
  for ((rank = 1; rank < ep; rank++)); do tokens+=/0; done
  result=$("$run" "$@" --transport local --ep "$ep" --tokens "$tokens" --check --format json)
  [ -z "${RESULTS:-}" ] || printf '%s\n' "$result" >"$RESULTS-ep$ep-local.json"
  hash=$(sed -n 's/.*"output_sha256": "\([0-9a-f]\{64\}\)".*/\1/p' <<<"$result")
  echo "EP=$ep: ${hash:-no output_sha256 in the result}"
  [ -n "$hash" ] && [ "${first:=$hash}" = "$hash" ] || { echo "EP=$ep differs from EP=1"; exit 1; }
done
