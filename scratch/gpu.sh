#!/usr/bin/env bash
# scratch/gpu.sh 36|39 SECONDS [PYTEST ARGUMENTS]: GPU tests in 15 processes. Carried: build/gpu, build/cache-R (kernels), build/o/outcomes-R.jsonl
set -u
release=$1 seconds=$2
shift 2
. scratch/env.sh "$release"
[ -f "$OUT/outcomes-$release.jsonl" ] || cp "build/o/outcomes-$release.jsonl" "$OUT/" 2> /dev/null
timeout -k 5 "$seconds" python3 -m pytest -q -p resuming -p samekey -p no:cacheprovider -p no:benchmark -n "${N:-15}" --outcomes "$OUT/outcomes-$release.jsonl" \
  --device cuda --backend hopper --backend triton --tb=short "$@" > /tmp/log-$release-$$ 2>&1
cat /tmp/log-$release-$$ >> "$OUT/log-$release.txt"
grep -aE "^(FAILED|ERROR)|passed|failed|error" /tmp/log-$release-$$ | cut -c1-220 | tail -60
