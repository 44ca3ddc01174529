"""pack.py CACHE OUT [SKIP]: binaries of a Triton cache as OUT/NAME.tar.xz.00...: cubin, PTX and metadata, without those named in SKIP."""
import json, os, subprocess, sys
cache, out, name = sys.argv[1:4]
skip = set(open(sys.argv[4]).read().split()) if len(sys.argv) > 4 and os.path.exists(sys.argv[4]) else set()
keep, names = (".cubin", ".ptx", ".json"), []
for folder in sorted(os.listdir(cache)):
    path = os.path.join(cache, folder)
    if folder in skip or not os.path.isdir(path):
        continue
    files = os.listdir(path)
    if any(f.endswith(".so") for f in files):
        continue
    groups = [f for f in files if f.startswith("__grp__")]
    if not groups:
        continue
    for f in files:
        if f.endswith(keep) and ".tmp" not in f:
            names.append(os.path.join(folder, f))
    for g in groups:
        d = json.load(open(os.path.join(path, g)))
        d["child_paths"] = {c: p for c, p in d["child_paths"].items() if c.endswith(keep)}
        os.makedirs(os.path.join(out, "groups", folder), exist_ok=True)
        json.dump(d, open(os.path.join(out, "groups", folder, g), "w"))
names = [n for n in names if "__grp__" not in n]
open(os.path.join(out, "names"), "w").write("\n".join(names))
subprocess.run(f"cd {out} && (tar cf - --ignore-failed-read -C {cache} -T names -C {out}/groups . 2>/dev/null) | xz -T0 -{os.environ.get('XZ','4')} | split -b 15500K -d - {name}.tar.xz.", shell=True)
subprocess.run(f"rm -rf {out}/groups {out}/names", shell=True)
print("packed", len(names) // 3, "kernels", subprocess.run(f"ls -la {out} | grep {name}", shell=True, capture_output=True, text=True).stdout)
