"""Plans made with numbers in place of sizes: they compute what was computed, or say that they do not apply.

What a plan computes in machine code is compared with the same program in Python, whose integers have any size.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import executor, machine_code, native, symbolic
from tilewise.native import Filled, Plan
from tilewise.symbolic import (
    NotTraceableError,
    Number,
    Sketch,
    Trace,
    at_run_time,
    fixed,
    largest,
    numbers_in,
    smallest,
)

NAMES = ("a", "b", "c")
# Where 32 and 64 bits, and the integers that a float holds exactly, end.
EDGES = [sign * (2**bits + more) for bits in (31, 32, 53, 62, 63) for more in (-1, 0, 1) for sign in (1, -1)]


@at_run_time
def largest_power(x: Any, y: Any) -> tuple[Any, bool]:
    """A loop over sizes."""
    power = 1
    while 2 * power <= abs(x) + y % 7:
        power *= 2
    return power, power > 8


def program(seed: int) -> Callable[..., Any]:
    """A random function of three numbers: arithmetic, and branches that compare."""

    def run(*given: Any) -> Any:
        draw, known, path, floats = random.Random(seed), list(given), list[Any](), [0.5]
        for _ in range(draw.randint(3, 25)):
            x, y, n = draw.choice(known), draw.choice(known), draw.choice((1, 2, 3, 8, 16, 0, -1, -7))
            kind = draw.randrange(24)
            if kind == 0:
                known.append(x + y)
            elif kind == 1:
                known.append(x * n)
            elif kind == 2:
                known.append(x - y)
            elif kind == 3:
                known.append(-(-x // (n or 5)))
            elif kind == 4:
                known.append(x % (n or 5))
            elif kind == 5:
                known.append((x | n) & 255)
            elif kind == 6:
                known.append(largest_power(x, y)[0])
            elif kind == 7:
                path.append("multiple" if x % (n or 4) == 0 else "rest")
            elif kind == 8:
                path.append("less" if x < y else "more")
            elif kind == 9:
                path.append(n if x == n else x)
            elif kind == 10:
                floats.append(x / (n or 3))
            elif kind == 11:
                known.append(x * y)
            elif kind == 12:
                known.append(x // y if y != 0 else n)
            elif kind == 13:
                known.append(n % y if y else x | y)
            elif kind == 14:
                known.append(1 << (x & 63))
            elif kind == 15:
                known.append((x >> (y & 127)) + (n << (x % 5)))
            elif kind == 16:
                known.append(x.bit_length() if x.__class__ is not bool else n)
            elif kind == 17:
                known.append(smallest(x, n, largest(y, 3)))
            elif kind == 18:
                floats.append(draw.choice(floats) * n - y)
            elif kind == 19:
                floats.append(draw.choice(floats) / (x + 0.25))
            elif kind == 20:
                path.append("below" if draw.choice(floats) <= x else "above")
            elif kind == 21:
                path.append("same" if draw.choice(floats) == draw.choice(floats) else "other")
            elif kind == 22:
                path.append("at least" if x >= n and y != n else "under")
            elif largest_power(x, y)[1]:
                known.append(n - x)
            del known[: len(known) - 6]
        return (*path, *floats[-3:], *known)

    return run


def shape(result: Any) -> list[Any]:
    """What a program decided: everything but numbers."""
    return [value if isinstance(value, str) else None for value in result]


def outcome(run: Callable[..., Any], given: Sequence[Any]) -> Any:
    """What a program returns, or the class of what it raises."""
    try:
        return run(*given)
    except (ArithmeticError, ValueError) as error:
        return type(error)


def is_equal(found: Any, expected: Any) -> bool:
    """Whether values and types are the same."""
    return bool(found == expected) and list(map(type, found)) == list(map(type, expected))


def traced(run: Callable[..., Any], values: Sequence[int]) -> tuple[Trace, Any] | None:
    """The record of a program, and what it returns; None for what plans do not hold."""
    trace = Trace(lengths=NAMES)
    try:
        return trace, run(*[trace.length(name, value) for name, value in zip(NAMES, values, strict=True)])
    except (NotTraceableError, ArithmeticError, ValueError):
        return None


def must_apply(trace: Trace, others: Trace) -> bool:
    """Whether a plan of one record serves the numbers of another: the same was done, and all numbers are small."""
    numbers = [*others.used.values(), *[number for step in others.steps for number in numbers_in(step)]]
    return str(trace) == str(others) and all(abs(number.value) <= 2**53 for number in numbers)


@pytest.mark.parametrize("seed", range(200))
def test_plans_compute_what_the_program_computes(seed: int) -> None:
    run, draw = program(seed), random.Random(-seed)
    small, large = (0, 1, 2, 8, 15, 16, 17, 96, 128, 130, 4096), (*EDGES, 2**33, -3, -128)
    values = [draw.choice(small) for _ in NAMES]
    found = traced(run, values)
    if found is None:
        return
    trace, result = found
    plan = Filled(trace, result)
    for i in range(60):
        others = values if i == 0 else [draw.choice(small if i % 2 or draw.random() < 0.5 else large) for _ in NAMES]
        got, expected, again = plan((), others), outcome(run, others), traced(run, others)
        if got is None:
            assert again is None or not must_apply(trace, again[0]), (str(trace), others)
        else:
            assert isinstance(expected, tuple), (str(trace), others)
            assert is_equal(got, expected), (str(trace), others)
            assert shape(expected) == shape(run(*values))


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y, "//": lambda x, y: x // y,
    "%": lambda x, y: x % y, "<<": lambda x, y: x << y, ">>": lambda x, y: x >> y, "|": lambda x, y: x | y,
    "&": lambda x, y: x & y, "/": lambda x, y: x / y, "bits": lambda x, y: x.bit_length() + y,
    "negated": lambda x, y: -x + y * 0,
    "smallest": smallest, "largest": largest, "float": lambda x, y: x * 1.0 - y, "mixed": lambda x, y: (x / 3) * y,
    "<": lambda x, y: (x < y, x)[0] and x, "<=": lambda x, y: x <= y and x, "==": lambda x, y: x == y and x,
    "float <": lambda x, y: x < y / 1 and y, "float ==": lambda x, y: x == y / 2 and y, ">": lambda x, y: x > y and x,
    "backwards": lambda x, y: (3 - x) // 7 + (100 % (y | 1)) + (5 | x), "of floats": lambda x, y: 2.5 / (x / 4) + y,
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_at_the_edges_of_words(name: str) -> None:
    """Each is Python's, or the plan does not apply: never a number that wrapped around or was rounded."""
    run, plans = OPERATIONS[name], list[Filled]()
    numbers = (*EDGES, 0, 1, -1, 2, -2, 3, -3, 7, -7, 62, 63, 64, 65, 100, -(2**63))
    applied = 0
    for x, y in ((3, 2), (2, 3), (3, 3), (-7, 2), (4, 8)):
        trace = Trace(lengths=("x", "y"))
        try:
            plans.append(Filled(trace, (run(trace.length("x", x), trace.length("y", y)),)))
        except ValueError:  # a negative shift
            continue
    for x in numbers:
        for y in numbers:
            # Python would need more memory than there is.
            expected = None if name == "<<" and y > 1000 else outcome(lambda *given: (run(*given),), (x, y))
            for plan in plans:
                found = plan((), (x, y))
                if found is not None:
                    applied += 1
                    assert isinstance(expected, tuple), (name, x, y)
                    assert is_equal(found, expected), (name, x, y)
    assert applied > len(numbers)


def test_numbers_of_more_than_64_bits_are_refused() -> None:
    trace = Trace(lengths=("x",))
    x = trace.length("x", 5)
    plan = Filled(trace, (x * x,))
    assert plan((), (2**31,)) == (2**62,)
    assert plan((), (2**32,)) is None
    assert plan((), (2**70,)) is None
    with pytest.raises(NotTraceableError, match="64 bits"):
        _ = x < 2**64


def test_types_of_numbers_are_kept() -> None:
    """True, 1 and 1.0 are equal, and not the same."""
    trace = Trace(lengths=["x"])
    x = trace.length("x", 4)
    found = (x * 1, x + 0, x / 1, x * 1.0, x // 1, x * 1, x * True)
    plan = Filled(trace, found)
    assert is_equal(plan((), (6,)), (6 * 1, 6 + 0, 6 / 1, 6 * 1.0, 6 // 1, 6, 6))


def test_numbers_are_no_keys_and_no_indices_without_a_word() -> None:
    trace = Trace(lengths=["x"])
    x: Any = trace.length("x", 3)
    with pytest.raises(NotTraceableError):
        hash(x)
    assert list(range(x)) == [0, 1, 2]  # fixes the value
    plan = Plan(trace, (1,)).finish()
    assert plan.measure((), (3,)) is not None
    assert plan.measure((), (4,)) is None
    assert fixed((x, 5)) == (3, 5)


def sketched(make: Callable[[Any], Any], tensor: Tensor) -> Filled:
    """A plan of what is made of a tensor."""
    trace = Trace(["t"])
    return Filled(trace, tuple(make(Sketch.of(trace, "t", tensor, [True] * (tensor.dim() - 1) + [False]))))


MADE: list[Callable[[Any], Any]] = [
    lambda t: (*t.shape, *t.stride(), t.numel(), t.element_size(), t.data_ptr()),
    lambda t: (*t.transpose(1, 2).shape, *t.transpose(1, 2).stride()),
    lambda t: (t.is_contiguous(), t.transpose(0, 2).is_contiguous()),
]


@pytest.mark.parametrize("make", MADE)
def test_sketches_are_like_tensors(make: Callable[[Any], Any]) -> None:
    plan = sketched(make, torch.empty(2, 5, 3, 8))
    others = [
        torch.empty(2, 5, 3, 8), torch.empty(4, 1, 9, 8), torch.empty(0, 5, 3, 8),
        torch.empty(8, 3, 5, 2).transpose(0, 3), torch.empty(2, 5, 3, 8).expand(2, 5, 3, 8),
        torch.empty(1).expand(7, 2**20, 3, 8), torch.empty(1).as_strided((1, 1, 1, 8), (2**61, 2**40, 5, 0)),
    ]  # fmt: skip
    assert plan(others[:1]) == tuple(make(others[0]))
    for other in others:
        if other.numel() or make is not MADE[2]:  # an empty sketch may say that it is not contiguous
            assert plan([other]) in (None, tuple(make(other)))


def test_sketches_have_no_more_than_they_say() -> None:
    with pytest.raises(NotTraceableError):
        _ = Sketch.of(Trace(["t"]), "t", torch.empty(2, 3), [True, True]).grad


def test_tensors_are_told_apart_and_their_storage_is_looked_at() -> None:
    trace, tensors = Trace(["s", "t"]), [torch.empty(3, 4), torch.empty(5)]
    s, t = (Sketch.of(trace, n, tensor, [True] * tensor.dim()) for n, tensor in zip("st", tensors, strict=True))
    plan = Filled(trace, (*s.shape, *t.shape, t.data_ptr() - s.data_ptr()))
    assert plan(tensors) == (3, 4, 5, tensors[1].data_ptr() - tensors[0].data_ptr())
    assert plan([torch.empty(0, 4), tensors[1]]) is not None
    tensors[1].untyped_storage().resize_(0)
    assert plan(tensors) is None


def test_a_torch_that_shows_no_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan applies to a tensor then; those of numbers alone work."""
    monkeypatch.setattr(executor, "_readers", list)
    loaded = machine_code.load(machine_code.object_of(executor._module()), executor.SYMBOL)
    run = ctypes.PYFUNCTYPE(ctypes.c_int64)(loaded.address)
    monkeypatch.setattr(native, "_executors", lambda: (run, run))
    assert sketched(MADE[0], torch.empty(2, 5, 3, 8))([torch.empty(2, 5, 3, 8)]) is None
    trace = Trace(lengths=["x"])
    assert Filled(trace, (trace.length("x", 3) + 1,))((), (5,)) == (6,)


def test_functions_for_run_time() -> None:
    """They are called again only for other arguments, and a plan does not apply where they raise, or return other
    types.
    """
    seen = list[Any]()

    @at_run_time
    def chosen(x: int, about: str, half: float) -> tuple[Any, float]:
        seen.append((x, about, half))
        return (len(about) if x < 100 else 0.5 if x < 200 else 1 // (x - 300)), half * x

    trace = Trace(lengths=["x"])
    x = trace.length("x", 4)
    plan = Filled(trace, (*chosen(x % 1000, "three", x / 8), *chosen(x % 1000, "three", x / 8), *chosen(7, "no", 1.0)))
    assert seen == [(4, "three", 0.5), (7, "no", 1.0)]
    assert is_equal(plan((), (6,)), (5, 4.5, 5, 4.5, 2, 7.0))
    assert plan((), (6,)) == plan((), (6,))
    assert seen[2:] == [(6, "three", 0.75)]
    assert [plan((), (n,)) for n in (150, 300, 2**80)] == [None] * 3
    assert plan((), (6,)) == (5, 4.5, 5, 4.5, 2, 7.0)
    assert plan((), (8,)) == (5, 8.0, 5, 8.0, 2, 7.0)


def test_what_a_function_for_run_time_must_not_hide() -> None:
    """An interrupt is none of its errors."""

    @at_run_time
    def stopped(x: Any) -> Any:
        if x == 5:
            raise KeyboardInterrupt
        return x

    trace = Trace(lengths=["x"])
    plan = Filled(trace, (stopped(trace.length("x", 4)),))
    with pytest.raises(KeyboardInterrupt):
        plan((), (5,))
    assert plan((), (6,)) == (6,)


def test_threads_share_a_plan() -> None:
    """Each has its own frame, also while a function for run time is called."""
    barrier = threading.Barrier(4)
    trace = Trace(lengths=["x", "y"])
    x, y = trace.length("x", 3), trace.length("y", 4)
    plan = Filled(trace, (x * y, largest_power(x, y)[0], x / y))

    def work(number: int) -> None:
        barrier.wait()
        for i in range(1, 1500):
            given = number * 1000 + i, i % 5 + 1
            expected = (given[0] * given[1], largest_power(*given)[0], given[0] / given[1])
            assert plan((), given) == expected

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_only_what_is_needed_is_computed() -> None:
    """A stride that no kernel reads may be of any size: what it is multiplied with is not computed."""
    trace = Trace(lengths=["x", "y"])
    x, y = trace.length("x", 3), trace.length("y", 4)
    _ = x * x * x * x
    found = Filled(trace, (y * 2,))
    assert found((), (2**60, 5)) == (10,)
    assert len(trace.steps_for(numbers_in((y * 2,)))) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_compiles_and_executes_though_another_thread_compiled_while_it_was_forked() -> None:
    """fork() waits for that thread: a child would find LLVM locked for ever."""
    trace = Trace(lengths=["x"])
    plan = Filled(trace, (trace.length("x", 3) * 7,))
    started, compiled = threading.Event(), list[float]()

    def compile_slowly() -> None:
        with machine_code.lock:
            started.set()
            time.sleep(0.3)
            compiled.append(time.monotonic())

    assert plan((), (5,)) == (35,)
    thread = threading.Thread(target=compile_slowly)
    thread.start()
    started.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        loaded = machine_code.load(machine_code.object_of(executor._module()), executor.SYMBOL)
        os._exit(0 if loaded.address and compiled and plan((), (6,)) == (42,) else 1)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_functions_for_run_time_are_called_at_once_without_numbers() -> None:
    assert largest_power(100, 3) == (64, True)
    assert not isinstance(largest_power(100, 3)[0], Number)
    assert symbolic.numbers_in((1, "x", None, [2.0])) == []


def test_a_fixed_value_is_recorded_without_assertions() -> None:
    code = """
from tilewise.symbolic import Trace, fixed
trace = Trace(lengths=["rows"])
fixed(trace.length("rows", 3))
print(trace)
"""
    found = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert "rows == 3" in found.stdout
