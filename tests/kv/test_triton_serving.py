"""The Triton kernels of serving, and the paged cache over the Triton backend, in Triton's interpreter.

Triton decides when a kernel is defined whether it is interpreted, so these tests run in a process of their own
(tests/backends/test_triton_interpreter.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import device as devices
from tilewise.backends.base import QuantisedRows
from tilewise.numerics import merge_partials

triton = pytest.importorskip("triton")

INTERPRETED = bool(triton.knobs.runtime.interpret)

pytestmark = pytest.mark.slow
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's process")


@pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled")
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


@pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled")
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


@inside
@pytest.mark.parametrize(
    ("page_size", "prompts"), [(1, False), (3, True), pytest.param(16, False, marks=pytest.mark.exhaustive)]
)
def test_the_kernel_that_quantises_writes_the_bits_of_torch(
    page_size: int, prompts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that start, go on, grow by 2^n or not at all, rows without slots, NaN, zeros, numbers below the floor."""
    from tilewise.backends.gpu import launching
    from tilewise.backends.triton import serving
    from tilewise.kv.quantised import new_scales, write_quantised

    monkeypatch.setattr(serving, "MANY_ROWS", 0 if prompts else 2048)
    launching._described.cache_clear()
    torch.manual_seed(2)
    dims, heads, num_pages = (24, 40), 2, 3 * -(-30 // page_size)
    mine, theirs = (
        [torch.randint(0, 256, (num_pages, page_size, heads, dim), dtype=torch.uint8) for dim in dims] for _ in range(2)
    )
    for a, b in zip(mine, theirs, strict=True):
        b.copy_(a)
    scales = [[new_scales(1, num_pages, heads, torch.device("cpu"))[0] for _ in dims] for _ in range(2)]
    latents = theirs[1].clone(), scales[1][1].clone()
    lengths = {0: 0, 1: 0, 2: 0}
    # Sequence s has the pages s, s + 3, ...; each takes some rows a step, and some rows of the batch go nowhere.
    for step, size in enumerate((1.0, 1.0, 300.0, 1e-3, 1e-38, 1e30)):
        slots: list[int] = []
        for sequence in lengths:
            count = (step + sequence) % 3 * 2 + 1
            position = range(lengths[sequence], lengths[sequence] + count)
            slots += [(sequence + 3 * (p // page_size)) * page_size + p % page_size for p in position] + [-1]
            lengths[sequence] += count
        rows = [size * torch.randn(len(slots), heads, dim) for dim in dims]
        rows[0][0, 1, 3], rows[1][0, 0, 5], rows[1][1] = torch.nan, torch.inf, 0.0
        rows[0] = rows[0].bfloat16()
        where = torch.tensor(slots)
        k_pages, v_pages = (t.view(torch.float8_e4m3fn) for t in mine)
        serving.append_quantised(QuantisedRows(rows[0], rows[1], k_pages, v_pages, scales[0][0], scales[0][1], where))
        for new, pages, scale in zip(rows, theirs, scales[1], strict=True):
            write_quantised(new, pages.view(torch.float8_e4m3fn), scale, where)
        # Latents are rows without V.
        alone, alone_scale = latents
        serving.append_quantised(
            QuantisedRows(rows[1], None, alone.view(torch.float8_e4m3fn), None, alone_scale, None, where)
        )
        assert torch.equal(alone, theirs[1])
        assert torch.equal(alone_scale, scales[1][1])
        for a, b in zip((*mine, *scales[0]), (*theirs, *scales[1]), strict=True):
            assert torch.equal(a, b)
    assert scales[0][0].unique().numel() > 2


@inside
@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_the_int8_kernel_writes_the_bits_of_torch(
    dtype: torch.dtype, prompts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots in any order, rows without one, NaN, infinities, zeros, ties, magnitudes of all sizes, strided scales."""
    from tilewise.backends.gpu import launching
    from tilewise.backends.triton import serving
    from tilewise.fp8.rounding import encode_rows

    monkeypatch.setattr(serving, "MANY_ROWS", 0 if prompts else 2048)
    launching._described.cache_clear()
    torch.manual_seed(2)
    heads, num_pages, page_size = 2, 5, 6
    slots = torch.randperm(num_pages * page_size)[:20]
    slots[::6] = -1
    new = [(torch.randn(20, heads, dim) * 10.0 ** torch.linspace(-4, 4, 20)[:, None, None]) for dim in (24, 40)]
    new[0][1, 1, 3], new[1][2, 0, 5], new[1][3], new[0][4] = torch.nan, torch.inf, 0.0, 127.0
    new[0][4, :, 1:] = torch.arange(23) - 11.5
    rows = [t.to(dtype) for t in new]
    pages = [torch.randint(-128, 128, (num_pages, page_size, heads, dim), dtype=torch.int8) for dim in (24, 40)]
    scales = [torch.full((num_pages, heads, page_size), 3.0) for _ in pages]
    if prompts:  # next to each other, as in a cell of a token
        scales = list(torch.full((num_pages, page_size, heads, 2), 3.0).transpose(1, 2).unbind(-1))
    expected = [t.clone() for t in (*pages, *scales)]
    serving.append_quantised(QuantisedRows(rows[0], rows[1], pages[0], pages[1], scales[0], scales[1], slots))
    for n in range(2):
        codes, scale = encode_rows(rows[n])
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[n][slot // page_size, slot % page_size] = codes[row]
                expected[2 + n][slot // page_size, :, slot % page_size] = scale[row]
    for a, b in zip((*pages, *scales), expected, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0, equal_nan=True)


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

    torch.manual_seed(0)
    out, lse, part, part_lse = (
        torch.randn(6, 4, 24).to(dtype),
        torch.randn(4, 6),
        torch.randn(3, 4, 24),
        torch.randn(4, 3),
    )
    part = part.to(dtype)
    rows = torch.tensor([4, 0, 2]) if some else torch.arange(3)
    # One side without keys and with rubbish in it, the other, and both; of so little weight that it is 0.
    lse[1, rows[0]], out[rows[0], 1] = -torch.inf, torch.nan
    part_lse[2, 1], part[1, 2] = -torch.inf, torch.nan
    lse[0, rows[2]], part_lse[0, 2] = -torch.inf, -torch.inf
    lse[3, rows[0]], out[rows[0], 3], part_lse[3, 0] = -200.0, torch.nan, 0.0
    lse[3, rows[1]], part_lse[3, 1], part[1, 3] = 0.0, -200.0, torch.nan
    want, want_lse = merge_partials(out[rows], lse[:, rows].mT, part, part_lse.mT)
    rest = [row for row in range(6) if row not in rows]
    before = out[rest].clone(), lse[:, rest].clone()
    serving.merge_rows(out, lse, part, part_lse, rows if some else None)
    torch.testing.assert_close(out[rows], want)
    torch.testing.assert_close(lse[:, rows], want_lse.mT)
    assert torch.equal(out[rest], before[0])
    assert torch.equal(lse[:, rest], before[1])


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
