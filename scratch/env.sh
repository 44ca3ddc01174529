release=$1
export PYTHONPATH=$PWD/src:$PWD/bench:$PWD/tools:$PWD/tests/backends:$PWD/scratch:$PWD/build/gpu TRITON_DISABLE_LINE_INFO=1 TRITON_CACHE_DIR=/tmp/tc$release PYTHONUNBUFFERED=1
if [ "$release" = 39 ]; then
  :
  export PYTHONPATH=/tmp/t39/site:$PYTHONPATH TRITON_PTXAS_BLACKWELL_PATH=/tmp/t39/site/triton/backends/nvidia/bin/ptxas
fi
if [ ! -d "$TRITON_CACHE_DIR" ]; then
  mkdir -p "$TRITON_CACHE_DIR"
  for first in build/cache-$release/*.00; do
    [ -f "$first" ] && cat "${first%.00}".* | xz -dc -T0 | tar xf - -C "$TRITON_CACHE_DIR"
  done
  ls "$TRITON_CACHE_DIR" > /tmp/carried$release
  echo "cache $release: $(wc -l < /tmp/carried$release) kernels carried"
fi
