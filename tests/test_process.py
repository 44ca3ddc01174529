"""Children that were forked after torch started its threads do not wait for them, and threads that make what lasts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import torch

import tilewise
from tilewise import lasting

# What children do after a parent that used threads, each by its name: `calls` maps names to functions that return
# tensors. Tensors have over 2^15 elements, from which on torch's own operations use threads.
CALLS = """
import os, signal, sys, threading, warnings
import torch, tilewise as tw
from tilewise import fp8
from tilewise.kv.writing import write_rows

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of fork() in a process with threads
torch.set_num_threads(2)
torch.manual_seed(0)
heads, rows, dim = 4, 256, 64
q, k, v, dout = (torch.randn(1, heads, rows, dim) for _ in range(4))
packed = [t[0].transpose(0, 1).contiguous() for t in (q, k, v, dout)]
cu = torch.tensor([0, 100, 250], dtype=torch.int32)
pages = [torch.randn(20, 16, heads, dim) for _ in range(2)]
table, lengths = torch.arange(20, dtype=torch.int32).view(2, 10), torch.tensor([150, 90], dtype=torch.int32)
bias = torch.randn(1, heads, rows, rows)
step = torch.randn(2, heads, dim)


def gradients(call, *tensors, grad=None):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = call(*leaves)
    return out, *torch.autograd.grad(out, leaves, torch.ones_like(out) if grad is None else grad)


def backward_in_bf16():
    with torch.autocast("cpu", torch.bfloat16):
        return gradients(tw.attention, q, k, v)


def merged():
    a, b = (tw.attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(100), slice(100, None)))
    return tw.merge(*a, *b)


def written():
    new = [torch.zeros_like(p) for p in pages]
    write_rows(packed[1], packed[2], *new, torch.arange(rows))
    return new


def cached(dtype):
    cache = tw.PagedKVCache(20, 16, 1, heads, dim, dtype=dtype, device="cpu")
    cache.step([cache.add(list(range(rows)))])
    cache.append(*packed[1:3])
    return [cache.attention(packed[0])]


def in_fp8():
    return [tw.attention(*(fp8.quantize(x, granularity="block", rotation=x is not v) for x in (q, k, v)))]


def graph_of_the_parent():
    return torch.autograd.grad(recorded, leaves, dout, retain_graph=True)


leaves = [t.clone().requires_grad_() for t in (q, k, v, bias)]
recorded = tw.attention(*leaves[:3], bias=leaves[3])
calls = {
    "forward": lambda: [tw.attention(q, k, v, causal=True)],
    "backward": lambda: gradients(tw.attention, q, k, v, grad=dout),
    "bias gradient": lambda: gradients(lambda q, b: tw.attention(q, k, v, bias=b), q, bias),
    "a graph that the parent recorded": graph_of_the_parent,
    "bshd": lambda: gradients(lambda *t: tw.attention(*t, layout="bshd"), *(t.transpose(1, 2) for t in (q, k, v))),
    "dropout": lambda: gradients(lambda *t: tw.attention(*t, dropout=0.2, seed=7), q, k, v),
    "sinks": lambda: gradients(lambda q, s: tw.attention(q, k, v, sinks=s), q, torch.zeros(heads)),
    "packed backward": lambda: gradients(lambda *t: tw.attention_varlen(*t, cu, cu), *packed[:3], grad=packed[3]),
    "paged backward": lambda: gradients(lambda *t: tw.attention_paged(*t, table, lengths), step, *pages),
    "decode": lambda: [tw.attention(q[:, :, :1], k, v)],
    "merge": merged,
    "autocast": backward_in_bf16,
    "reference": lambda: [tw.attention(q, k, v, backend="reference")],
    "fp8": in_fp8,
    "write_rows": written,
    "PagedKVCache": lambda: cached(torch.float32),
    "PagedKVCache of e4m3": lambda: cached(torch.float8_e4m3fn),
    "vmap": lambda: [torch.vmap(tw.attention)(*(torch.stack([t, t]) for t in (q, k, v)))],
    "torch itself": lambda: [bias * 2.0, bias.bfloat16()],
}
"""

FORKED = """
expected = {name: call() for name, call in calls.items()}
(torch.randn(512, 512) @ torch.randn(512, 512)).sum()
assert torch.get_num_threads() == 2


def judged(name):
    got = calls[name]()
    same = all(torch.equal(a, b) for a, b in zip(expected[name], got, strict=True))
    print(f"{name}: {'same' if same else 'other'}", flush=True)


def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


for name in calls:
    if in_child(lambda: judged(name)) != 0:
        print(f"{name}: hangs", flush=True)
"""


def run_python(code: str, **variables: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(Path(tilewise.__file__).parents[1])} | variables
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_call_hangs_in_a_forked_child() -> None:
    found = run_python(CALLS + "SECONDS = 30\n" + FORKED)
    lines = found.strip().splitlines()
    assert len(lines) >= 18
    assert all(line.endswith(": same") for line in lines), found


WORKERS = """
import multiprocessing, os, signal, threading, warnings
import torch, tilewise as tw
from torch.utils.data import DataLoader, Dataset
warnings.simplefilter("ignore", DeprecationWarning)
torch.set_num_threads(2)
q, bias = torch.randn(1, 4, 256, 64), torch.randn(1, 4, 256, 256, requires_grad=True)

class Data(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return work()

def work():
    (grad,) = torch.autograd.grad(tw.attention(q, q, q, bias=bias).square().sum(), bias)
    return grad.isfinite().all()

def answer(queue):
    signal.alarm(60)
    # New threads of the child work alone, too.
    other = threading.Thread(target=work)
    other.start()
    other.join()
    queue.put(bool(work()) and torch.get_num_threads() == 1)

work()
assert torch.get_num_threads() == 2
context = multiprocessing.get_context("fork")
queue = context.Queue()
child = context.Process(target=answer, args=(queue,))
child.start()
print(queue.get(timeout=90))
child.join(60)
loader = DataLoader(Data(), num_workers=2, multiprocessing_context="fork", timeout=90)
print(all(bool(batch.all()) for batch in loader), torch.get_num_threads())
"""


def test_workers_of_multiprocessing_and_of_a_data_loader_do_not_hang() -> None:
    assert run_python(WORKERS).split() == ["True", "True", "2"]


# --- what outlives a call is made by a thread of its own, outside of any pool of the calling one

CPU = torch.device("cpu")


def test_another_thread_without_the_callers_modes() -> None:
    with torch.inference_mode():
        made, thread = lasting.outside_pools(lambda: (torch.ones(3, device=CPU), threading.get_ident()), CPU)
    assert not made.is_inference()
    assert thread != threading.get_ident()


def test_made_also_after_the_main_thread_has_ended() -> None:
    """A thread that serves may outlive it."""
    code = """
import threading, torch
from tilewise import fp8

def serve():
    threading.main_thread().join()
    fp8.quantize(torch.ones(1, 1, 4, 16), rotation=True)
    print("served")

threading.Thread(target=serve).start()
"""
    assert run_python(code) == "served\n"
