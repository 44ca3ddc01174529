began=$(date +%s)
total=$1
left() { echo $((${1} - ($(date +%s) - began))); }
( . scratch/env.sh 39; python3 -c "import triton; print(triton.__version__)"
bash scratch/gpu.sh 39 $(left $((total - 150))) -m "not exhaustive" tests/gpu )
echo "$(left $total) left"
. scratch/env.sh 36
if [ $(left $total) -gt 60 ]; then
python3 scratch/warm_bench.py 75
echo "$(left $total) left"
timeout -s INT -k 10 $(left $((total - 12))) python3 -m suite --device cuda --seconds-per-case 0.1 --max-seconds $(left $((total - 40))) --commit land --output "$OUT/official.json" --only forward --only backward --only decode --only varlen --only latency --only cascade --only gqa --only short --only scores > "$OUT/bench.txt" 2>&1
tail -5 "$OUT/bench.txt"; fi
echo "$(left $total) left"
