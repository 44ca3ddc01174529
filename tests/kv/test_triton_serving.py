"""The Triton kernels of serving, and the paged cache over the Triton backend, in Triton's interpreter.

Triton decides when a kernel is defined whether it is interpreted, so these tests run in a process of their own
(tests/backends/test_triton_interpreter.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise as tw
from making import check_merging
from quantised_rows import check_e4m3, check_int8
from tilewise import device as devices
from tilewise.backends.base import QuantisedRows

triton = pytest.importorskip("triton")

INTERPRETED = bool(triton.knobs.runtime.interpret)

pytestmark = pytest.mark.slow
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's process")
outside = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled")


@outside
@pytest.mark.parametrize("device", ["h200", "a100"])
def test_the_kernels_compile_without_a_gpu_and_move_16_bytes_a_thread(device: str) -> None:
    from tilewise.backends.gpu import compilation
    from tilewise.backends.gpu.launching import raw_views
    from tilewise.backends.triton import serving

    k, pages = torch.zeros(256, 8, 128).bfloat16(), torch.zeros(4, 64, 8, 128).bfloat16()
    slots, lse, rows = torch.zeros(256, dtype=torch.int64), torch.zeros(8, 256), torch.zeros(64, dtype=torch.int64)
    (write,) = serving.write_calls((256, 8, 128, 128, 64), raw_views((k, k, pages, pages, slots)))
    ptx = compilation.compile_call(write, devices.named(device), -1).asm["ptx"]
    assert ptx.count("ld.global.v4") == ptx.count("st.global.v4") == 2
    for named in (None, rows):
        (merge,) = serving.merge_calls((64, 8, 128), raw_views((k, lse, k[:64], lse[:, :64].contiguous(), named)))
        assert compilation.compile_call(merge, devices.named(device), -1).asm["ptx"]


@outside
@pytest.mark.parametrize(
    ("device", "rows", "page_size", "dim"),
    [
        ("h200", 4096, 64, 128),
        ("a100", 256, 1, 128),
        ("h200", 256, 256, 128),
        ("h200", 4096, 64, 576),
        ("a100", 8, 64, 576),
    ],
)
def test_the_kernel_that_quantises_compiles_without_a_gpu(device: str, rows: int, page_size: int, dim: int) -> None:
    """Rows of 576 columns are latents, without V."""
    from tilewise.backends.gpu import compilation
    from tilewise.backends.gpu.launching import raw_views
    from tilewise.backends.triton.serving import append_calls, append_int8_calls

    spec = devices.named(device)
    new, pages = torch.zeros(rows, 8, dim).bfloat16(), torch.zeros(4, page_size, 8, dim).to(torch.float8_e4m3fn)
    scale, slots = torch.zeros(4, 8), torch.zeros(rows, dtype=torch.int64)
    given = (new, None, pages, None, scale, None, slots) if dim > 512 else (new, new, pages, pages, scale, scale, slots)
    (call,) = append_calls((rows, 8, dim, 0 if dim > 512 else dim, page_size, spec.has_fp8), raw_views(given))
    compiled = compilation.compile_call(call, spec, -1)
    assert ("e4m3" in compiled.asm["ptx"]) == spec.has_fp8
    if dim <= 512:
        pages, scale = pages.view(torch.int8), torch.zeros(4, 8, page_size)
        views = raw_views((new, new, pages, pages, scale, scale, slots))
        (call,) = append_int8_calls((rows, 8, dim, dim, page_size, spec.has_fp8), views)
        assert "st.global" in compilation.compile_call(call, spec, -1).asm["ptx"]


@pytest.fixture(params=[False, True], ids=["decoding", "prompts"])
def append(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels that quantise, launched as for few rows and as for many."""
    from tilewise.backends.gpu import launching
    from tilewise.backends.triton import serving

    monkeypatch.setattr(serving, "MANY_ROWS", 0 if request.param else 2048)
    launching.kept.cache_clear()

    def append(rows: QuantisedRows) -> None:
        # Latents are rows without V.
        assert rows.v is not None
        assert rows.v_pages is not None
        assert rows.v_scale is not None
        alone, alone_scale = rows.v_pages.clone(), rows.v_scale.clone()
        serving.append_quantised(rows)
        if rows.k_pages.dtype != torch.int8:
            serving.append_quantised(QuantisedRows(rows.v, None, alone, None, alone_scale, None, rows.slots))
            assert torch.equal(alone.view(torch.uint8), rows.v_pages.view(torch.uint8))
            assert torch.equal(alone_scale, rows.v_scale)

    return append


@inside
@pytest.mark.parametrize("page_size", [1, 3, pytest.param(16, marks=pytest.mark.exhaustive)])
def test_the_kernel_that_quantises_writes_the_bits_of_torch(page_size: int, append: Any) -> None:
    check_e4m3(append, torch.bfloat16 if page_size == 3 else torch.float32, page_size, (1, 3, 5))


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_the_int8_kernel_writes_the_bits_of_torch(dtype: torch.dtype, append: Any) -> None:
    check_int8(append, dtype, 6, 20, strided=dtype == torch.bfloat16)


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_go_to_their_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    from tilewise.backends.triton import serving

    k, v = torch.randn(9, 3, 14).to(dtype)[..., :7], torch.randn(9, 3, 500).to(dtype)
    k_pages, v_pages = (torch.full((5, 4, 3, dim), -1.0, dtype=dtype) for dim in (7, 500))
    slots = torch.randperm(20)[:9]
    where = torch.cat((slots[:4], torch.tensor([-1]), slots[4:]))
    k_more, v_more = (torch.cat((t[:4], torch.full_like(t[:1], 5.0), t[4:])) for t in (k, v))
    serving.write_rows(k_more, v_more, k_pages, v_pages, where)
    for new, pages in ((k, k_pages), (v, v_pages)):
        assert torch.equal(pages.flatten(0, 1)[slots], new)
        assert (pages == -1.0).all(-1).all(-1).sum() == 11
    serving.write_rows(k[:0], v[:0], k_pages, v_pages, slots[:0])


@inside
@pytest.mark.parametrize("some", [False, True], ids=["first rows", "named rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_partial_rows_are_merged_in_place(dtype: torch.dtype, some: bool) -> None:
    from tilewise.backends.triton import serving

    check_merging(serving.merge_rows, dtype, some)


class Step(NamedTuple):
    """Queries of a step, what the cache answers, and the same keys and values as packed rows."""

    q: Tensor
    out: Tensor
    k: Tensor
    v: Tensor
    cu_q: Tensor
    cu_k: Tensor


def life(page_size: int, dtype: torch.dtype) -> Iterator[Step]:
    """Two prompts, the longer one in chunks beside a decoding request, then both decoding."""
    torch.manual_seed(1)
    cache = tw.PagedKVCache(-(-160 // page_size) + 2, page_size, 1, 1, 16, dtype=dtype, device="cpu")
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    a, b = cache.add(range(40)), cache.add(range(100, 107))
    stored: dict[int, Any] = {request: torch.empty(0, 1, 32, dtype=dtype) for request in (a, b)}
    for counts in ((25, 7), (15, 1), (1, 1)):
        new = [torch.randn(count, 1, 32).to(dtype) for count in counts]
        cache.step([a, b], counts)
        rows = torch.cat(new)
        cache.append(rows[..., :16], rows[..., 16:])
        stored = {request: torch.cat((stored[request], part)) for request, part in zip((a, b), new, strict=True)}
        q = torch.randn(sum(counts), 2, 16).to(dtype)
        lengths = torch.tensor([len(stored[a]), len(stored[b])])
        cu_q, cu_k = (torch.cat((torch.zeros(1), n.cumsum(0))).int() for n in (torch.tensor(counts), lengths))
        k, v = torch.cat((stored[a], stored[b])).split(16, -1)
        yield Step(q, cache.attention(q, backend="triton"), k.contiguous(), v.contiguous(), cu_q, cu_k)


@inside
@pytest.mark.parametrize("page_size", [1, pytest.param(16, marks=pytest.mark.exhaustive), 64])
def test_prefill_chunks_and_decoding_of_the_paged_cache(page_size: int) -> None:
    for q, out, k, v, cu_q, cu_k in life(page_size, torch.float32):
        exact = tw.attention_varlen(q.double(), k.double(), v.double(), cu_q, cu_k, causal=True)
        torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=2e-6)


@inside
@pytest.mark.parametrize("page_size", [16, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 128))])
def test_pages_have_the_bits_of_packed_rows(page_size: int) -> None:
    """In fp16; in fp32 the last bits differ from pages of 64 on, in steps with decoding rows."""
    for q, out, k, v, cu_q, cu_k in life(page_size, torch.float16):
        longest = int(cu_q.diff().max())
        packed = tw.attention_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=longest, causal=True, backend="triton")
        assert torch.equal(out, packed)


# --- kv.append_rotated against its definition

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
HEADS, KV_HEADS, DIM, DIM_V, PAGES, PAGE_SIZE, LONGEST = 3, 2, 24, 40, 8, 4, 40


@pytest.fixture
def many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch for many rows, with heads in groups that do not divide their number."""
    from tilewise.backends.gpu import launching
    from tilewise.backends.triton import rotating

    monkeypatch.setattr(rotating, "MANY_ROWS", 0)
    monkeypatch.setattr(rotating, "MANY", (128, 2))
    launching.kept.cache_clear()


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
