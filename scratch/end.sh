# scratch/end.sh R: pack the kernels that were compiled here
python3 scratch/pack.py /tmp/tc$1 "$OUT" "new$1" /tmp/carried$1
