#!/usr/bin/env bash
# The GPU tests of this tree in 15 processes, for SECONDS at most: scratch/gpu.sh 36|39 SECONDS [PYTEST ARGUMENTS]
# Outcomes are written to $OUT as tests end. Put the file of an earlier call at build/outcomes-36.jsonl (and carry it): what
# passed there is left out. Needs build/gpu (pip install --target build/gpu pytest-xdist) and, for 39,
# build/peers/triton-3.9.0.tar.xz (peers.sh build/peers triton 3.9.0).
set -u
release=$1 seconds=$2
shift 2
export PYTHONPATH=src:bench:tools:tests/backends:build/gpu TRITON_DISABLE_LINE_INFO=1
if [ "$release" = 39 ]; then
  [ -d /tmp/t39 ] || { mkdir /tmp/t39 && tar xJf build/peers/triton-3.9.0.tar.xz -C /tmp/t39; }
  export PYTHONPATH=/tmp/t39/site:$PYTHONPATH TRITON_PTXAS_BLACKWELL_PATH=/tmp/t39/site/triton/backends/nvidia/bin/ptxas
fi
cp "build/outcomes-$release.jsonl" "$OUT/" 2> /dev/null
timeout "$seconds" python3 -m pytest -q -p resuming -p no:cacheprovider -n 15 --outcomes "$OUT/outcomes-$release.jsonl" \
  tests/gpu tests/backends/test_conformance.py --device cuda --backend hopper --backend triton -m "not exhaustive" "$@" 2>&1 | tail -40
