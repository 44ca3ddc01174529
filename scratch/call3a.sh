mkdir -p /tmp/t39 && (xz -dc build/t39/t39.tar.xz | tar xf - -C /tmp/t39) & unpack=$!
. scratch/env.sh 36
timeout 60 python3 bench/gpu_new_lengths.py --output "$OUT/new-lengths.json" 2>&1 | tail -12
wait $unpack; ls /tmp/t39/site
