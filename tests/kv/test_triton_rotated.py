"""The Triton kernel of `kv.append_rotated` against its definition, in Triton's interpreter, and compiled without a GPU.

Triton decides when a kernel is defined whether it is interpreted, so the former run in a process of their own
(tests/backends/test_triton_interpreter.py).
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import device as devices

triton = pytest.importorskip("triton")

INTERPRETED = bool(triton.knobs.runtime.interpret)

pytestmark = pytest.mark.slow
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's process")
outside = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled")

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
HEADS, KV_HEADS, DIM, DIM_V, PAGES, PAGE_SIZE, LONGEST = 3, 2, 24, 40, 8, 4, 40


@pytest.fixture
def many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch for many rows, with heads in groups that do not divide their number."""
    from tilewise.backends.gpu import launching
    from tilewise.backends.triton import rotating

    monkeypatch.setattr(rotating, "MANY_ROWS", 0)
    monkeypatch.setattr(rotating, "MANY", (128, 2))
    launching._described.cache_clear()


def both(options: dict[str, Any], dtype: torch.dtype = torch.float32, in_place: bool = False, **changed: Any) -> Any:
    """What the kernel and the definition make of the same tensors: [out, pages of k and v, scales]."""
    from tilewise.backends.triton import BACKEND
    from tilewise.kv import rotary_table
    from tilewise.kv.rotated import _append, _packed
    from tilewise.kv.rotated_arguments import Step

    torch.manual_seed(0)
    # Rows of a page are consecutive; some rows have no slot, and the last one is past the slots.
    slots = torch.tensor([5, 6, 7, -1, 8, 9, 10, 11, 12, 30, -1, -1])
    total = len(slots) + 1
    positions = torch.randint(0, LONGEST, (total,), dtype=torch.int32)
    # One row past the table, one before it.
    positions[2], positions[5] = LONGEST, -1
    page_dtype = changed.pop("page_dtype", dtype)
    tensors: dict[str, Any] = {
        "q": torch.randn(total, HEADS, DIM).to(dtype), "k": torch.randn(total, KV_HEADS, DIM).to(dtype),
        "v": torch.randn(total, KV_HEADS, DIM_V).to(dtype), "out": None,
        "k_pages": torch.randn(PAGES, PAGE_SIZE, KV_HEADS, DIM).to(page_dtype),
        "v_pages": torch.randn(PAGES, PAGE_SIZE, KV_HEADS, DIM_V).to(page_dtype),
        "slots": slots, "positions": positions,
        "cos_sin": rotary_table(LONGEST, changed.pop("rotary_dim", DIM), device="cpu"),
        "q_weight": None, "k_weight": None, "k_scale": None, "v_scale": None,
    } | changed  # fmt: skip
    results = []
    for kernel in (True, False):
        mine: dict[str, Any] = {name: None if t is None else t.clone() for name, t in tensors.items()}
        mine["out"] = mine["q"] if in_place else torch.full_like(mine["q"], torch.nan)
        step = Step(**mine)
        if kernel:
            packed = _packed(step)
            BACKEND.bind_rotated(packed, in_place=in_place, **options)(packed)
        else:
            _append(step, on_host=False, **options)
        found = (step.out, step.k_pages, step.v_pages, step.k_scale, step.v_scale)
        results.append([t.float() for t in found if t is not None])
    return results


def compare(results: list[list[Tensor]], rtol: float = 2e-6) -> None:
    mine, theirs = results
    assert mine[0].isnan().any(), "positions that are not in the table"
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=rtol, rtol=rtol, equal_nan=True)


@inside
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("interleaved", "norm", "rotary_dim", "in_place"),
    [
        (False, "none", DIM, False), (True, "plain", 10, True), (False, "weights", 2, False),
        (True, "none", DIM, True), (False, "plain", 10, True), (True, "weights", 10, False),
        *(pytest.param(*p, marks=pytest.mark.exhaustive)
          for p in itertools.product([False, True], ["none", "plain", "weights"], [DIM, 10, 2], [False, True])),
    ],
)  # fmt: skip
def test_the_kernel_computes_the_definition(
    interleaved: bool, norm: str, rotary_dim: int, in_place: bool, large: bool, request: pytest.FixtureRequest
) -> None:
    if large:
        request.getfixturevalue("many_rows")
    options: dict[str, Any] = {"interleaved": interleaved, "norm_eps": None if norm == "none" else 0.1}
    weights: dict[str, Any] = {"q_weight": torch.rand(DIM), "k_weight": torch.rand(DIM)} if norm == "weights" else {}
    compare(both(options, rotary_dim=rotary_dim, in_place=in_place, **weights))


@inside
def test_the_kernel_rounds_once() -> None:
    """The interpreter cuts bf16 off instead of rounding it: one unit in the last place."""
    options = {"interleaved": False, "norm_eps": 1e-6}
    compare(both(options, BF16, q_weight=torch.rand(DIM).bfloat16()), rtol=2**-7)
    compare(both(options, torch.float32, page_dtype=BF16), rtol=2**-7)


@inside
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scales", ["given", "heads", "growing"])
def test_the_kernel_writes_e4m3(scales: str, interleaved: bool, large: bool, request: pytest.FixtureRequest) -> None:
    if large:
        request.getfixturevalue("many_rows")
    shape = {"given": (), "heads": (KV_HEADS,), "growing": (PAGES, KV_HEADS)}[scales]
    k_scale, v_scale = (torch.full(shape, 2.0**n) for n in (-7, -9))
    options = {"interleaved": interleaved, "norm_eps": 1e-6}
    mine, theirs = both(options, page_dtype=E4M3, rotary_dim=10, k_scale=k_scale, v_scale=v_scale)
    for a, b in zip(mine, theirs, strict=True):
        # A value between two codes may fall to either.
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0.13, equal_nan=True)
        assert ((a == b) | a.isnan()).float().mean() > 0.97 or a is mine[0]
    if scales == "growing":
        assert torch.equal(mine[3], theirs[3])
        assert torch.equal(mine[4], theirs[4])


@inside
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("interleaved", "rotary_dim"), [(False, 10), (True, 10), (False, DIM)])
def test_the_kernel_writes_int8(
    interleaved: bool, rotary_dim: int, large: bool, request: pytest.FixtureRequest
) -> None:
    if large:
        request.getfixturevalue("many_rows")
    k_scale, v_scale = (torch.full((PAGES, KV_HEADS, PAGE_SIZE), 2.0) for _ in range(2))
    options = {"interleaved": interleaved, "norm_eps": 1e-6}
    mine, theirs = both(options, page_dtype=torch.int8, rotary_dim=rotary_dim, k_scale=k_scale, v_scale=v_scale)
    for a, b in zip(mine[1:3], theirs[1:3], strict=True):
        # A value between two codes may fall to either.
        assert float((a - b).abs().max()) <= 1
        assert float((a == b).float().mean()) > 0.99
    for a, b in zip(mine[3:], theirs[3:], strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=1e-6, equal_nan=True)
    # Keys whose position is not in the table.
    assert bool(mine[3].isnan().any())


@inside
def test_no_rows() -> None:
    none: dict[str, Any] = {
        name: torch.empty(0, heads, dim)
        for name, heads, dim in (("q", HEADS, DIM), ("k", KV_HEADS, DIM), ("v", KV_HEADS, DIM_V))
    }
    empty = torch.empty(0, dtype=torch.int64)
    mine, theirs = both({"interleaved": False, "norm_eps": None}, slots=empty, positions=empty, **none)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@outside
@pytest.mark.parametrize(
    ("device", "rows", "interleaved", "scales", "rotary_dim"),
    [
        ("h200", 8192, False, "none", 128),
        ("h200", 64, False, "none", 128),
        ("h200", 64, True, "growing", 64),
        ("h200", 64, True, "int8", 64),
        ("h200", 8192, False, "int8", 128),
        ("a100", 8192, True, "given", 64),
        *(
            pytest.param(*p, marks=pytest.mark.exhaustive)
            for p in itertools.product(
                ["h200", "a100", "b200"], [64, 8192], [False, True], ["none", "given", "growing", "int8"], [64, 128])
        ),
    ],
)  # fmt: skip
def test_the_kernel_compiles_without_a_gpu(
    device: str, rows: int, interleaved: bool, scales: str, rotary_dim: int
) -> None:
    from tilewise.backends.gpu import compilation
    from tilewise.backends.gpu.launching import raw_views
    from tilewise.backends.triton.rotating import Job, rotate_calls

    spec = devices.named(device)
    q, k = torch.zeros(8, 32, 128).bfloat16(), torch.zeros(8, 8, 128).bfloat16()
    stored = {"none": BF16, "int8": torch.int8}.get(scales, E4M3)
    pages, weight = torch.zeros(4, 64, 8, 128).to(stored), torch.zeros(128).bfloat16()
    scale = {
        "none": None, "given": torch.zeros(1).expand(8), "growing": torch.zeros(4, 8), "int8": torch.zeros(4, 8, 64),
    }[scales]  # fmt: skip
    index, turns = torch.zeros(8, dtype=torch.int64), torch.zeros(100, rotary_dim)
    views = raw_views((q, k, k, q, pages, pages, index, index, turns, weight, weight, scale, scale))
    kind, hardware = (scales == "growing", scales == "int8"), spec.has_fp8
    job = Job(rows, rows, 32, 8, 100, 64, 128, 128, rotary_dim, 1e-6, interleaved, False, *kind, hardware)
    (call,) = rotate_calls(job, views)
    ptx = compilation.compile_call(call, spec, -1).asm["ptx"]
    assert ("e4m3" in ptx) == (hardware and stored == E4M3)
    if rotary_dim == 128 and scales == "none":
        # q, k and v are moved 16 bytes at a time: only indices and weights are loaded otherwise.
        assert ptx.count("ld.global.v4") >= 6
        assert ptx.count("st.global.v4") >= 6
        assert "st.global.b" not in ptx
