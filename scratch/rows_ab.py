# ruff: noqa
# fmt: off
"""Time the Triton kernels of two trees on a GPU, interleaved: python rows_ab.py OLD NEW [--seconds 60]

The calls are those whose rows are loaded in another way (matrix descriptors before, boxes now). Each tree runs in a
process of its own; the two take turns, case by case, round after round. Printed: medians in microseconds of device
time, their ratio (under 1: NEW is faster), and how far the results of both differ, relative to the largest element.
A first set of processes, one a case and tree, compiles all kernels side by side into one cache.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

# name: (kind, head_dim, what is special)
CASES: dict[str, dict] = {
    "backward d64 full 4x4096": {"d": 64, "batch": 4, "n": 4096, "backward": True},
    "backward d64 causal 4x4096": {"d": 64, "batch": 4, "n": 4096, "backward": True, "causal": True},
    "backward d128 full 4x4096": {"d": 128, "batch": 4, "n": 4096, "backward": True},
    "backward d128 causal 4x4096": {"d": 128, "batch": 4, "n": 4096, "backward": True, "causal": True},
    "backward d256 full 4x4096": {"d": 256, "batch": 4, "n": 4096, "backward": True},
    "backward d256 causal 4x4096": {"d": 256, "batch": 4, "n": 4096, "backward": True, "causal": True},
    "backward d128 full 32x500": {"d": 128, "batch": 32, "n": 500, "backward": True},
    "backward d96 full 4x4096": {"d": 96, "batch": 4, "n": 4096, "backward": True},
    "backward d128 packed causal": {"d": 128, "packed": (4096, 300, 2048, 77, 8192, 1600, 71), "backward": True, "causal": True},
    "backward d64 tile mask 4x4096": {"d": 64, "batch": 4, "n": 4096, "backward": True, "documents": True},
    "forward d64 alibi causal 4x4096": {"d": 64, "batch": 4, "n": 4096, "causal": True, "alibi": True},
    "forward d256 full 4x4096": {"d": 256, "batch": 4, "n": 4096},
    "latents 128 heads 16x8192": {"latent": True},
    "prefix d64 64 rows x 8192": {"prefix": 64},
    "prefix d256 64 rows x 8192": {"prefix": 256},
}
CALLS = 10


def make(case: dict):
    """(function that runs the call once, function that returns its results)."""
    import torch

    import tilewise as tw

    torch.manual_seed(0)
    cuda, half = "cuda", torch.bfloat16
    if "prefix" in case:
        return prefix(case["prefix"])
    if "latent" in case:
        pages = torch.randn(16 * 128, 64, 1, 576, device=cuda).to(half)
        q = torch.randn(16, 128, 576, device=cuda).to(half)
        table = torch.randperm(16 * 128, device=cuda).int().view(16, -1)
        used = torch.full((16,), 8192, dtype=torch.int32, device=cuda)

        def latents():
            return (tw.attention_paged(q, pages, pages[..., :512], table, used, causal=True, scale=576**-0.5, backend="triton"),)

        return latents
    d, heads = case["d"], 2048 // case["d"]
    flags = {"causal": case.get("causal", False), "backend": "triton"}
    if case.get("alibi"):
        flags["alibi_slopes"] = torch.rand(heads, device=cuda)
    if "packed" in case:
        lengths = torch.tensor((0, *case["packed"]), device=cuda).cumsum(0).int()
        total, longest = sum(case["packed"]), max(case["packed"])
        q, k, v, dout = (torch.randn(total, heads, d, device=cuda).to(half) for _ in range(4))

        def forward():
            return tw.attention_varlen(q, k, v, lengths, lengths, max_seqlen_q=longest, max_seqlen_k=longest, **flags)
    else:
        q, k, v, dout = (torch.randn(case["batch"], heads, case["n"], d, device=cuda).to(half) for _ in range(4))
        if case.get("documents"):
            flags["mask"] = tw.TileMask.documents(torch.arange(case["n"], device=cuda) // 700)

        def forward():
            return tw.attention(q, k, v, **flags)

    if not case.get("backward"):
        return lambda: (forward(),)
    for t in (q, k, v):
        t.requires_grad_()
    out = forward()
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def prefix(d: int):
    """Rows of two groups of 32 sequences against prefixes of 8192 keys: the kernel and its merge."""
    import torch

    from tilewise.backends.triton import prefix as passes
    from tilewise.operands import Operands
    from tilewise.problem import AttentionProblem

    half, heads, kv_heads, page, keys, rows = torch.bfloat16, 32, 8, 128, 8192, 64
    pages = 2 * keys // page
    problem = AttentionProblem(
        kind="paged", dtype=half, batch=2, seqlen_q=32, seqlen_k=keys, total_q=rows, total_k=pages * page,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=d, head_dim_v=d, scale=d**-0.5, page_size=page,
    )  # fmt: skip
    k, v = (torch.randn(pages, page, kv_heads, d, device="cuda").to(half) for _ in range(2))
    operands = Operands(
        torch.randn(rows, heads, d, device="cuda").to(half), k, v,
        cu_seqlens_q=torch.tensor([0, 32, 64], device="cuda").int(),
        block_table=torch.randperm(pages, device="cuda").int().view(2, -1),
        seqlens_k=torch.full((2,), keys, device="cuda").int(),
    )  # fmt: skip
    out, lse = torch.zeros(rows, heads, d, device="cuda", dtype=half), torch.empty(heads, rows, device="cuda")
    bound = passes.bind_prefixes(problem, operands, rows, None, out, lse)
    given = (*operands, None, out, lse)

    def run():
        lse.fill_(float("-inf"))
        bound.run(given)
        return out, lse

    return run


def captured(call):
    """CALLS calls as a CUDA graph: short calls take the host as long as the device."""
    import torch

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def timed(call) -> float:
    """Microseconds of a call on the device."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    is_graph = isinstance(call, torch.cuda.CUDAGraph)
    run = call.replay if is_graph else call
    run()
    begin.record()
    for _ in range(1 if is_graph else CALLS):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / CALLS * 1e3


def work(tree: str, only: str | None) -> None:
    """Answer lines of standard input: the name of a case; times it and prints JSON."""
    sys.path.insert(0, os.path.join(tree, "src"))
    import torch

    import tilewise

    assert os.path.realpath(tilewise.__file__).startswith(os.path.realpath(tree)), tilewise.__file__
    calls, kept = {}, {}
    names = [only] if only else list(CASES)
    for name in names:
        try:
            call = make(CASES[name])
            result = [t.detach().float() for t in call()]
            torch.cuda.synchronize()
            calls[name], kept[name] = call if CASES[name].get("backward") else captured(call), result
        except Exception as error:  # noqa: BLE001
            print(json.dumps({"case": name, "failed": f"{type(error).__name__}: {error}"[:300]}), flush=True)
    if only:
        return
    print(json.dumps({"ready": sorted(calls)}), flush=True)
    for line in sys.stdin:
        what, _, name = line.strip().partition(" ")
        if what == "save":
            torch.save([t.cpu() for t in kept[name.split("|")[0]]], name.split("|")[1])
            print(json.dumps({"saved": name}), flush=True)
            continue
        print(json.dumps({"case": name, "us": timed(calls[name])}), flush=True)


def main() -> None:
    old, new = sys.argv[1:3]
    seconds = float(sys.argv[sys.argv.index("--seconds") + 1]) if "--seconds" in sys.argv else 60.0
    began = time.time()
    folder = tempfile.mkdtemp()
    environment = os.environ | {"TRITON_CACHE_DIR": os.path.join(folder, "cache")}
    compiling = [
        subprocess.Popen([sys.executable, __file__, "--work", tree, "--only", name], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for name in CASES
        for tree in (old, new)
    ]
    for process in compiling:
        process.wait()
    print(f"compiled after {time.time() - began:.0f} s", flush=True)
    workers = {
        tree: subprocess.Popen([sys.executable, __file__, "--work", tree], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for tree in (old, new)
    }
    ready = {}
    for tree, process in workers.items():
        while True:
            said = json.loads(process.stdout.readline())
            if "ready" in said:
                ready[tree] = said["ready"]
                break
            print(tree, said, flush=True)
    names = [name for name in CASES if all(name in found for found in ready.values())]

    def ask(tree: str, line: str) -> dict:
        process = workers[tree]
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    times = {(tree, name): [] for tree in (old, new) for name in names}
    start, rounds = time.time(), 0
    while time.time() - start < seconds or rounds < 3:
        for name in names:
            order = (old, new) if rounds % 2 else (new, old)
            for tree in order:
                times[tree, name].append(ask(tree, f"time {name}")["us"])
        rounds += 1
        if time.time() - began > 135:
            break
    import torch

    print(f"{rounds} rounds of {CALLS} calls; {torch.cuda.get_device_name(0)}")
    print("| case | old us | new us | new / old | apart |\n|---|---|---|---|---|")
    for name in names:
        files = []
        for tree in (old, new):
            file = os.path.join(folder, f"{len(files)}.pt")
            ask(tree, f"save {name}|{file}")
            files.append(torch.load(file))
        apart = max(float((a - b).abs().nan_to_num(0.0, posinf=0.0).max() / a[a.isfinite()].abs().max()) for a, b in zip(*files))
        a, b = (statistics.median(times[tree, name]) for tree in (old, new))
        print(f"| {name} | {a:.1f} | {b:.1f} | {b / a:.3f} | {apart:.1e} |", flush=True)
    for process in workers.values():
        process.stdin.close()
        process.wait()
    print(f"{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    if "--work" in sys.argv:
        at = sys.argv.index("--work")
        work(sys.argv[at + 1], sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else None)
    else:
        main()
