"""Every shipped Triton configuration, compiled for every architecture without a GPU, takes no more than is recorded.

Registers a thread, bytes of them that lie in memory, and shared memory, of each kernel (triton_records.csv): what the
assembler of Triton 3.6.0 made of them. The cases are described without tensors, as `tilewise warmup` does it; that the
same is compiled for calls is in test_gpu_launch.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from hopper_spills import is_recorded
from tilewise import device as devices
from tilewise.backends.triton import configs
from triton_cases import EVERYWHERE, Used, calls_of, places, problem_of, recorded, used_by

triton = pytest.importorskip("triton", minversion="3.6")
compilation = pytest.importorskip("tilewise.backends.gpu.compilation")
launch = pytest.importorskip("tilewise.backends.triton.launch")
operand_views = pytest.importorskip("tilewise.backends.gpu.offline").operand_views
passes = pytest.importorskip("tilewise.backends.triton.passes")
planning = pytest.importorskip("tilewise.backends.triton.planning")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(triton.knobs.runtime.interpret), reason="kernels are interpreted, not compiled"),
]

# Compiled in the ordinary run, one or two kernels of each architecture; those for H200 and A100 are in test_triton_aot.
SAMPLE = (
    ("rtx5090", "causal", 64),
    ("b200", "decode", 128),
    ("l40s", "decode e4m3", 128),
    ("h200", "causal", 128),
    ("a100", "causal", 128),
    ("h200", "causal", 64),
    ("a100", "causal", 64),
)
# More than any thread has, so that a record of 255 can be passed only by what is spilled.
MAX_REGISTERS = 255
# Bytes of registers in memory that a kernel may have by other releases than the recorded one.
SPILLED_ELSEWHERE = 4096


def name_of(place: tuple[str, str, int]) -> str:
    return " ".join(map(str, place))


@pytest.mark.parametrize(
    "place",
    [pytest.param(place, id=name_of(place), marks=() if place in SAMPLE else pytest.mark.exhaustive)
     for place in sorted(places(), key=lambda place: SAMPLE.index(place) if place in SAMPLE else len(SAMPLE))],
)  # fmt: skip
def test_nothing_takes_more_than_recorded(place: tuple[str, str, int]) -> None:
    device, known = place[0], recorded()[place]
    for call in calls_of(*place):
        # Other releases give registers otherwise, and have another forward for some problems.
        limit = known[call.kernel.__name__] if is_recorded() else Used(MAX_REGISTERS, SPILLED_ELSEWHERE, 1 << 20)
        used = used_by(call, device)
        over = [field for field in used._fields if getattr(used, field) > getattr(limit, field)]
        assert not over, f"{call.kernel.__name__}: {used}, recorded {limit}"
        assert used.shared <= devices.named(device).smem_bytes
        assert used.registers <= MAX_REGISTERS


@pytest.mark.skipif(not is_recorded(), reason="the kernels are those of another release")
def test_records_are_those_of_the_cases() -> None:
    """Of all of them, of all their kernels, and of no others."""
    expected = {place: {call.kernel.__name__ for call in calls_of(*place)} for place in places()}
    assert {place: set(kernels) for place, kernels in recorded().items()} == expected
    assert set(SAMPLE) <= set(expected)


def rows_of_tables() -> Iterator[tuple[str, configs.Config]]:
    """Every row, with where it stands."""

    def walk(where: str, value: Any) -> Iterator[tuple[str, configs.Config]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(f"{where} {key}", inner)
        elif isinstance(value, configs.Config):
            yield where, value

    for name, table in vars(configs).items():
        if isinstance(table, dict):
            yield from walk(name, table)


def test_every_row_of_the_tables_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those for architectures before and after Hopper on each of them."""
    taken: dict[int, set[str]] = {}
    current, choose = [""], configs.choose

    def noted(*args: Any) -> configs.Config:
        chosen = choose(*args)
        taken.setdefault(id(chosen), set()).add(current[0])
        return chosen

    monkeypatch.setattr(configs, "choose", noted)
    for place in places():
        current[0] = place[0]
        calls_of(*place)
    assert [where for where, row in rows_of_tables() if id(row) not in taken] == []
    for table, here in ((configs._LARGE_SMEM, {"a100", "b200"}), (configs._SMALL_SMEM, {"l40s", "rtx5090"})):
        assert all(taken[id(row)] == here for rows in table.values() for row in rows.values())
    single = [row for rows in configs._SINGLE.values() for width, row in rows.items() if width <= 256]
    assert all(taken[id(row)] == set(EVERYWHERE) for row in single)


def test_rows_are_named() -> None:
    names = dict(rows_of_tables())
    assert names["_HOPPER dkdv 128"] is configs._HOPPER["dkdv"][128]
    assert names["_EVERYWHERE decode 1 64"] is configs._EVERYWHERE["decode"][1][64]
    # Five tables of three passes, the kinds, e4m3, decode and dbias.
    assert len(names) == 12 * 5 + 7 + 8 + 20


@pytest.mark.parametrize("device", ["a100", pytest.param("h200", marks=pytest.mark.exhaustive)])
def test_three_products_of_tf32(device: str) -> None:
    """fp32 is multiplied by no matrix unit; asked for, every product becomes three of TF32 parts."""
    problem, spec = problem_of("fp32", 64), devices.named(device)
    views = operand_views(problem, packed_queries=True)
    views |= {name: made.view for name, made in launch.result_allocations(problem, views).items()}
    products = {}
    for precision in ("ieee", "tf32", "tf32x3"):
        (call,) = passes.forward_calls(planning.plan_for(problem, spec, False, precision), views)
        ptx = compilation.compile_call(call, spec, -1).asm["ptx"]
        products[precision] = len(re.findall(r"\bw?g?mma\S*\.f32\.tf32\.tf32", ptx))
        assert used_by(call, device).spilled == 0
    # Two products of 32 x 32 x 64, each in pieces of 16 x 8 x 8 by four warps.
    pieces = 2 * (32 // 16) * (32 // 8) * (64 // 8) // 2
    assert products == {"ieee": 0, "tf32": pieces, "tf32x3": 3 * pieces}
