"""Plans made with numbers in place of sizes: they compute what was computed, or say that they do not apply."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewise import symbolic
from tilewise.symbolic import NotTraceableError, Number, Sketch, Trace, at_run_time, code, fixed, replaced

NAMES = ("a", "b", "c")


@at_run_time
def largest_power(x: int, y: int) -> tuple[int, bool]:
    """A loop over sizes."""
    power = 1
    while 2 * power <= abs(x) + y % 7:
        power *= 2
    return power, power > 8


def program(seed: int) -> Callable[..., Any]:
    """A random function of three numbers: arithmetic, and branches that compare."""

    def run(*given: Any) -> Any:
        draw, known, path = random.Random(seed), list(given), list[Any]()
        for _ in range(draw.randint(3, 25)):
            x, y, n = draw.choice(known), draw.choice(known), draw.choice((1, 2, 3, 8, 16, 0))
            kind = draw.randrange(12)
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
                path.append(x / (n or 3))
            elif largest_power(x, y)[1]:
                known.append(n - x)
            del known[: len(known) - 6]
        return (*path, *known)

    return run


def shape(result: Any) -> list[Any]:
    """What a program decided: everything but numbers."""
    return [value if isinstance(value, str) else None for value in result]


@pytest.mark.parametrize("seed", range(300))
def test_plans_compute_what_the_program_computes(seed: int) -> None:
    run, draw = program(seed), random.Random(-seed)
    values = [draw.choice((0, 1, 2, 7, 8, 16, 100, 128, 4096)) for _ in NAMES]
    trace = Trace(NAMES)
    traced = run(*[trace.leaf(name, value) for name, value in zip(NAMES, values, strict=True)])
    plan = trace.function([f"return {code(traced)}"])
    assert plan(*values) == run(*values)
    numbers = trace.values(*values)
    assert numbers is not None
    assert replaced(traced, numbers) == run(*values)
    for _ in range(40):
        others = [draw.choice((0, 1, 2, 8, 15, 16, 17, 96, 128, 130, 2**33)) for _ in NAMES]
        found, expected = plan(*others), run(*others)
        assert found in (None, expected), trace.source(["..."])
        if shape(expected) != shape(run(*values)):
            assert found is None


def test_types_of_numbers_are_kept() -> None:
    """True, 1 and 1.0 are equal, and not the same."""
    trace = Trace(["x"])
    x = trace.leaf("x", 4)
    found = (x * 1, x + 0, x / 1, x * 1.0, x // 1)
    plan = trace.function([f"return {code(found)}"])
    assert [type(value) for value in plan(6)] == [type(value) for value in (6 * 1, 6 + 0, 6 / 1, 6 * 1.0, 6 // 1)]


def test_numbers_are_no_keys_and_no_indices_without_a_word() -> None:
    trace = Trace(["x"])
    x: Any = trace.leaf("x", 3)
    with pytest.raises(NotTraceableError):
        hash(x)
    assert list(range(x)) == [0, 1, 2]  # fixes the value
    plan = trace.function(["return 1"])
    assert (plan(3), plan(4)) == (1, None)
    assert fixed((x, 5)) == (3, 5)


def test_sketches_are_like_tensors() -> None:
    trace = Trace(["t"])
    tensor = torch.empty(2, 5, 3, 8)
    sketch: Any = Sketch.of(trace, "t", tensor, [True, True, True, False])
    other = torch.empty(4, 1, 9, 8)
    for make in (
        lambda t: (t.shape, t.stride(), t.numel(), t.element_size()),
        lambda t: (t.transpose(1, 2).shape, t.transpose(1, 2).stride()),
        lambda t: (t.is_contiguous(), t.transpose(0, 2).is_contiguous()),
    ):
        trace = Trace(["t"])
        sketch = Sketch.of(trace, "t", tensor, [True, True, True, False])
        found = make(sketch)
        plan = trace.function([f"return {code(tuple(found))}"])
        assert plan(tensor) == make(tensor)
        assert plan(other) in (None, make(other))
    with pytest.raises(NotTraceableError):
        _ = sketch.grad


def test_functions_for_run_time_are_called_at_once_without_numbers() -> None:
    assert largest_power(100, 3) == (64, True)
    assert not isinstance(largest_power(100, 3)[0], Number)
    assert symbolic.numbers_in((1, "x", None, [2.0])) == []


def test_a_fixed_value_is_recorded_without_assertions() -> None:
    code = """
from tilewise.symbolic import Trace, fixed
trace = Trace(["rows"])
fixed(trace.leaf("rows", 3))
print(trace.function(["return 1"])(4))
"""
    found = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "None\n"
