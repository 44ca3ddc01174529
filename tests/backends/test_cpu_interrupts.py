"""Ctrl-C during long CPU calls: answered soon, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.backends.cpu import BACKEND, threads

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers that send signals")
# When the signal comes, and how soon the call ends then; all of these calls take many times that long.
AFTER, WITHIN = 0.3, 0.5


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    """Compiling is Python's, which answers signals anyway."""
    BACKEND.warmup(lambda *_: None)


@contextlib.contextmanager
def with_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def thread_count(request: pytest.FixtureRequest) -> Iterator[int]:
    with with_threads(request.param):
        yield request.param


def rows_of(rows: int, dim: int = 64, heads: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Many rows in the memory of one."""
    return torch.ones(1, heads, 1, dim, dtype=dtype).expand(1, heads, rows, dim)


def forward(dtype: torch.dtype = torch.float32, **flags: Any) -> Callable[[], object]:
    """One item a head: 300 rows and 2^24 keys."""
    q, k = torch.zeros(1, 1, 300, 64, dtype=dtype), rows_of(2**24, dtype=dtype)
    return lambda: tw.attention(q, k, k, backend="cpu", **flags)


def decode() -> Callable[[], object]:
    q, k = torch.zeros(1, 1, 1, 128), rows_of(2**28, 128)
    return lambda: tw.attention(q, k, k, backend="cpu")


def paged() -> Callable[[], object]:
    """All pages are one."""
    pages, table = torch.ones(1, 64, 8, 128), torch.zeros(1, 2**20, dtype=torch.int32)
    q, lengths = torch.zeros(1, 8, 128), torch.tensor([2**26], dtype=torch.int32)
    return lambda: tw.attention_paged(q, pages, pages, table, lengths, backend="cpu")


CALLS: dict[str, Callable[[], Callable[[], object]]] = {
    "forward": forward,
    "bf16": lambda: forward(torch.bfloat16),
    "features": lambda: forward(causal=True, alibi_slopes=torch.ones(1), softcap=2.0, dropout=0.1, seed=0),
    "decode": decode,
    "paged": paged,
}


@contextlib.contextmanager
def signal_after(seconds: float, handler: Callable[..., Any] | int = signal.default_int_handler) -> Iterator[None]:
    """SIGALRM, which the handler answers as Python answers Ctrl-C."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def sigint_after(seconds: float) -> Iterator[None]:
    """SIGINT from another thread of the process, which a shell may have told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


def check_interrupted(call: Callable[[], object], sent: Callable[[float], Any] = signal_after) -> None:
    """The call ends soon; where others use the cores, in one of three attempts."""
    seconds: list[float] = []
    while len(seconds) < 3 and min(seconds, default=WITHIN) >= WITHIN:
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt), sent(AFTER):
            call()
        seconds.append(time.monotonic() - started - AFTER)
    assert min(seconds) < WITHIN


def check_next_call() -> None:
    """Threads and counters are as before: results are right, and repeat."""
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 700, 64, generator=make).requires_grad_() for _ in range(3))
    out = tw.attention(q, k, v, causal=True, backend="cpu")
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    again = tw.attention(q, k, v, causal=True, backend="cpu")
    assert torch.equal(out, again)
    torch.autograd.grad(out.sum(), (q, k, v))


# Every call, with one thread or two.
@pytest.mark.parametrize(("name", "count"), [(name, 1 + number % 2) for number, name in enumerate(CALLS)])
def test_a_long_call_is_interrupted(name: str, count: int) -> None:
    call = CALLS[name]()
    with with_threads(count):
        check_next_call()
        check_interrupted(call)
        check_next_call()


@pytest.mark.parametrize("heads", [1, 2], ids=["three and four products", "five products"])
def test_a_long_backward_is_interrupted(heads: int) -> None:
    q, k, v = (torch.randn(1, heads, 30_000, 64).requires_grad_() for _ in range(3))
    with with_threads(2):
        out = tw.attention(q, k, v, window=(3000, 3000), backend="cpu")
        check_interrupted(lambda: torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True))
        check_next_call()


def test_handlers_that_return_run_in_time_and_change_nothing(thread_count: int) -> None:
    """A handler may note the signal and go on: so does the call, to its right end."""
    q, k, v = (torch.randn(1, 2, 6000, 64, generator=torch.Generator().manual_seed(i)) for i in range(3))
    expected = tw.attention(q, k, v, backend="cpu")
    noted: list[float] = []
    started = time.monotonic()
    with signal_after(0.05, lambda *_: noted.append(time.monotonic() - started)):
        found = tw.attention(q, k, v, backend="cpu")
        while not noted:
            time.sleep(0.001)
    ended = time.monotonic() - started
    assert torch.equal(found, expected)
    assert noted[0] < min(ended, 0.05 + WITHIN)


def test_interrupted_calls_leave_no_memory() -> None:
    call = forward()
    check_interrupted(call)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        check_interrupted(call)
    gc.collect()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024
    check_next_call()


def test_other_threads_compute_on() -> None:
    """Python's handlers run in the main thread alone: a call in another thread is not interrupted."""
    q, k, v = (torch.randn(1, 2, 4000, 64, generator=torch.Generator().manual_seed(i)) for i in range(3))
    expected = tw.attention(q, k, v, backend="cpu")
    found: list[torch.Tensor] = []
    worker = threading.Thread(target=lambda: found.append(tw.attention(q, k, v, backend="cpu")))
    worker.start()
    with signal_after(0.05), pytest.raises(KeyboardInterrupt):
        time.sleep(10.0)
    worker.join()
    assert torch.equal(found[0], expected)


def test_interrupts_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a call is in use until the pool's threads are done with it."""
    monkeypatch.setattr(threads, "_openmp_parallel", lambda: None)
    with with_threads(3):
        check_interrupted(forward())
        check_interrupted(decode())
        check_next_call()


def test_ctrl_c_itself() -> None:
    check_interrupted(forward(), sigint_after)
