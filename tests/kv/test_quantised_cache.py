"""Paged caches in e4m3 and int8: what is appended comes back to within the rounding of its scale, in whatever order it
came and whoever else is in its page.
"""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from quantised_rows import check_e4m3, check_int8
from tilewise import InvalidProblem, Unsupported, fp8, kv
from tilewise.fp8.rounding import encode_rows
from tilewise.kv.quantised import QuantisedRows, append_quantised, new_scales, write_quantised
from tilewise.kv.writing import write_rows

HEADS, DIM = 2, 16
Attended = torch.Tensor | fp8.Fp8Tensor
CPU = torch.device("cpu")
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
both = pytest.mark.parametrize("codes", [E4M3, INT8], ids=["e4m3", "int8"])


def make(dtype: torch.dtype, **options: bool) -> tw.PagedKVCache:
    return tw.PagedKVCache(32, 4, 1, HEADS, DIM, dtype=dtype, device="cpu", **options)


def rows(count: int, seed: int, size: float = 1.0) -> torch.Tensor:
    return size * torch.randn(count, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def exact(cache: tw.PagedKVCache, q: torch.Tensor) -> torch.Tensor:
    """Attention in fp64 to the values that the pages represent."""
    k_pages, v_pages = (t.dequantize().double() for t in cache.attended())
    result: torch.Tensor = tw.attention_paged(
        q.double(), k_pages, v_pages, cache.block_table(), cache.seqlens(), cu_seqlens_q=cache.cu_seqlens_q(),
        causal=True, backend="reference",
    )  # fmt: skip
    return result


@both
@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_the_kernels_write_the_bits_of_torch(page_size: int, dtype: torch.dtype, codes: torch.dtype) -> None:
    (check_e4m3 if codes == E4M3 else check_int8)(append_quantised, dtype, page_size)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_that_of_the_cached_values(dtype: torch.dtype, codes: torch.dtype) -> None:
    cache, plain = make(codes), make(dtype)
    requests = {c: [c.add([*range(8), 50, 51]), c.add([*range(8), 60])] for c in (cache, plain)}
    for ids in (None, [70, 71]):
        for c in (cache, plain):
            total = c.step(requests[c], tokens=ids)
            c.append(rows(total, 1).to(dtype), rows(total, 2).to(dtype))
        q = torch.randn(total, 4, DIM, generator=torch.Generator().manual_seed(3)).to(dtype)
        got = cache.attention(q)
        assert got.dtype == dtype
        assert float((got.double() - exact(cache, q)).abs().max()) < (1e-5 if dtype == torch.float32 else 2e-2)
        assert float((got.float() - plain.attention(q).float()).abs().max()) < (0.2 if codes == E4M3 else 0.03)


@both
def test_equal_prefixes_and_forks_share_codes_and_scales(codes: torch.dtype) -> None:
    """Sharing changes no bit of any result, also when somebody goes on with larger numbers."""
    prompt, results = list(range(9)), list[list[torch.Tensor]]()
    k, v = rows(9, 0, 3.0), rows(9, 1, 3.0)
    for sharing in (False, True):
        cache = make(codes, prefix_sharing=sharing)
        first = cache.add(prompt)
        cache.step([first])
        cache.append(k, v)
        second = cache.add(prompt)
        assert cache.length(second) == (8 if sharing else 0)
        count = cache.step([second])
        cache.append(k[-count:], v[-count:])
        third = cache.fork(first)
        results.append([])
        for number in range(6):
            cache.step([first, second, third], tokens=[number, 50 + number, 90 + number])
            new = torch.cat((rows(1, number, 100.0), rows(1, number), rows(1, number, 0.01)))
            cache.append(new, new)
            q = rows(3, number).repeat(1, 2, 1)
            results[-1].append(cache.attention(q))
            expected = exact(cache, q)
            assert float((results[-1][-1].double() - expected).abs().max() / expected.abs().max()) < 1e-5
        assert cache.stats().pages_shared >= 2
    assert all(torch.equal(apart, together) for apart, together in zip(*results, strict=True))


# --- e4m3: a page has a scale, a power of two, which grows


def decoded(pages: torch.Tensor, scale: torch.Tensor, count: int) -> torch.Tensor:
    return (pages.float() * scale[:, None, :, None]).flatten(0, 1)[:count]


@pytest.mark.parametrize("chunk", [1, 3, 4, 14])
def test_rows_come_back_however_they_were_appended(chunk: int) -> None:
    k = rows(14, 0)
    k[9] *= 100.0
    pages, scale = (torch.empty(4, 4, HEADS, DIM, dtype=E4M3), new_scales(1, 4, HEADS, CPU)[0])
    for begin in range(0, 14, chunk):
        write_quantised(k[begin : begin + chunk], pages, scale, torch.arange(begin, min(begin + chunk, 14)))
    exact = k[:14]
    # Half a step of 1/8 of the value, or of the smallest normal number of the page's scale.
    least = scale.repeat_interleave(4, 0)[:14, :, None] * 2.0**-6
    error = (decoded(pages, scale, 14) - exact).abs()
    assert bool((error <= torch.maximum(exact.abs(), least) / 16 + least / 8).all())
    assert bool((torch.frexp(scale)[0] == 0.5).all())


def test_a_page_that_is_taken_again_starts_its_scale_anew() -> None:
    pages, scale = (torch.empty(1, 4, HEADS, DIM, dtype=E4M3), new_scales(1, 1, HEADS, CPU)[0])
    write_quantised(rows(4, 0, 1e4), pages, scale, torch.arange(4))
    large = scale.clone()
    write_quantised(rows(2, 1), pages, scale, torch.arange(2))
    assert bool((scale < large / 1000).all())


def test_values_keep_all_their_bits_when_a_scale_grows() -> None:
    """Rounded once to the first scale and moved by whole exponents: as if the scale had been known at the start."""
    pages, scale = torch.zeros(1, 4, 1, DIM, dtype=E4M3), new_scales(1, 1, 1, CPU)[0]
    first = torch.linspace(0.5, 1.0, DIM).view(1, 1, DIM)
    write_quantised(first, pages, scale, torch.tensor([0]))
    small = decoded(pages, scale, 1)
    write_quantised(torch.full((1, 1, DIM), 30.0), pages, scale, torch.tensor([1]))
    assert float(scale) == 2.0**-3
    assert torch.equal(decoded(pages, scale, 1), small)
    # 0.5 is below 2^-6 of the scale now, and keeps what fits into steps of 2^-9 of it.
    write_quantised(torch.full((1, 1, DIM), 3e4), pages, scale, torch.tensor([2]))
    steps = decoded(pages, scale, 1) / (scale * 2.0**-9)
    assert torch.equal(steps, (small / (scale * 2.0**-9)).round())


# --- int8: a row has a scale


def test_codes_are_the_nearest_ones_of_each_rows_own_scale() -> None:
    x = rows(40, 0) * 10.0 ** torch.linspace(-20, 20, 40)[:, None, None]
    codes, scale = encode_rows(x)
    assert torch.equal(scale, x.abs().amax(-1) / 127)
    assert int(codes.abs().amax()) == 127
    error = (codes.double() * scale.double()[..., None] - x.double()).abs()
    assert bool((error <= scale.double()[..., None] * (0.5 + 1e-4)).all())


def test_zeros_tiny_and_broken_rows() -> None:
    x = rows(5, 0)
    x[0], x[1] = 0.0, 1e-40
    x[2, 0, 3], x[3, 1, 5] = torch.nan, -torch.inf
    found = fp8.quantize_pages(x[None], dtype=INT8).dequantize()[0]
    assert torch.equal(found[:2], torch.zeros(2, HEADS, DIM))
    # int8 has no NaN: all of such a row, of its head alone, reads as NaN.
    assert bool(found[2, 0].isnan().all() and found[3, 1].isnan().all())
    assert bool(torch.isfinite(torch.stack((found[2, 1], found[3, 0], *found[4]))).all())


def test_compiled_appends_write_the_same() -> None:
    new, slots = (rows(7, 0), rows(7, 1)), torch.tensor([3, -1, 8, 0, 5, 11, -1])

    def append(k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        pages = [torch.zeros(3, 4, HEADS, DIM, dtype=INT8) for _ in range(2)]
        scales = [new_scales(1, 3, HEADS, CPU, 4)[0] for _ in range(2)]
        append_quantised(QuantisedRows._make([k, v, *pages, *scales, slots]))
        return [*pages, *scales]

    compiled = torch.compile(append, backend="eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(compiled(*new), append(*new), strict=True))


def test_large_rows_leave_their_neighbours_alone() -> None:
    """A page has no scale of its own: a token's values are as exact next to large ones as alone."""
    cache = make(INT8)
    request = cache.add([1, 2, 3, 4])
    cache.step([request])
    v = rows(4, 1)
    v[3] *= 1e6
    cache.append(rows(4, 0), v)
    found = cache.attended()[1].dequantize()[int(cache.block_table()[0, 0])]
    assert bool(((found - v).abs() <= v.abs().amax(-1, keepdim=True) / 253).all())


def test_memory_is_half_of_bf16_and_the_scales() -> None:
    whole, half = make(torch.bfloat16).nbytes, make(INT8).nbytes
    assert half == whole // 2 + whole // (2 * DIM) * 4


def test_rows_are_rotated_on_their_way() -> None:
    table = kv.rotary_table(32, DIM, device="cpu")
    q, k, v = torch.randn(6, 4, DIM), rows(6, 0), rows(6, 1)
    plain, cache = make(torch.float32), make(INT8)
    turned = []
    for c in (plain, cache):
        request = c.add(list(range(6)))
        c.step([request])
        turned.append(c.append_rotated(q, k, v, torch.arange(6), table, norm_eps=1e-5))
    assert torch.equal(turned[0], turned[1])
    pages = cache.block_table()[0].long()
    assert torch.equal(pages, plain.block_table()[0].long())
    found, expected = (t[pages].flatten(0, 1)[:6] for t in (cache.attended()[0].dequantize(), plain.pages()[0]))
    assert bool(((found - expected).abs() <= expected.abs().amax(-1, keepdim=True) / 253).all())


def pages_of(dtype: torch.dtype = INT8) -> tuple[fp8.Fp8Tensor, fp8.Fp8Tensor]:
    k, v = (fp8.quantize_pages(rows(8, seed).view(2, 4, HEADS, DIM), dtype=dtype) for seed in range(2))
    return k, v


def test_refusals() -> None:
    k, v = pages_of()
    table, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    q = torch.randn(1, 4, DIM)

    def call(q: Attended, k: Attended, v: Attended) -> None:
        tw.attention_paged(q, k, v, table, lengths)

    with pytest.raises(InvalidProblem, match=r"k_pages.*quantize_pages"):
        call(q, k.data, v.data)
    with pytest.raises(InvalidProblem, match="as k_pages are int8"):
        call(fp8.quantize(q, cu_seqlens=torch.tensor([0, 1], dtype=torch.int32)), k, v)
    with pytest.raises(InvalidProblem, match="Quantise k and v alike"):
        call(q, k, pages_of(E4M3)[1])
    with pytest.raises(InvalidProblem, match=r"q.*float16"):
        call(q.to(INT8), k, v)
    with pytest.raises(Unsupported, match="gradients through int8"):
        call(q.requires_grad_(), k, v)
    with pytest.raises(InvalidProblem, match="int8 is for pages"):
        fp8.Fp8Tensor(torch.zeros(1, 2, 8, DIM, dtype=INT8), torch.ones(1, 2, 1), "head", "bhsd")
    with pytest.raises(InvalidProblem, match="'token' for pages of"):
        fp8.Fp8Tensor(k.data, k.scale[..., :1], "page", "paged")
    with pytest.raises(InvalidProblem, match="'page' for pages of"):
        fp8.Fp8Tensor(pages_of(E4M3)[0].data, k.scale, "token", "paged", block=1)
    with pytest.raises(InvalidProblem, match="shape"):
        fp8.Fp8Tensor(k.data, k.scale[..., :3], "token", "paged", block=1)
    with pytest.raises(InvalidProblem, match=r"float8_e4m3fn or torch.int8"):
        fp8.quantize_pages(rows(8, 0).view(2, 4, HEADS, DIM), dtype=torch.uint8)
    for codes in (INT8, E4M3):
        cache = make(codes)
        cache.step([cache.add([1])])
        with pytest.raises(InvalidProblem, match="to be quantised"):
            cache.append(rows(1, 0).to(codes), rows(1, 0))
    scales = [torch.ones(2, HEADS, 4) for _ in range(2)]
    with pytest.raises(InvalidProblem, match=r"k_scale.*int8 pages"):
        kv.append_rotated(
            q.detach(), rows(1, 0), rows(1, 1), k.data, v.data, torch.tensor([0]), torch.tensor([0]),
            kv.rotary_table(4, DIM, device="cpu"), k_scale=scales[0][:, 0], v_scale=scales[1],
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, E4M3, INT8])
def test_a_slot_past_the_pages_is_refused_on_a_cpu(dtype: torch.dtype) -> None:
    """Written, it would change other memory. The first call is refused, and one whose signature was seen before."""
    pages = torch.zeros(2, 3, 4, 2, 16).to(dtype)
    rows = torch.randn(2, 5, 2, 16)
    scales = torch.ones(2, 3, 2, 4) if dtype == INT8 else torch.ones(2, 3, 2)

    def write(slots: torch.Tensor) -> None:
        if dtype == torch.float32:
            write_rows(rows[0], rows[1], pages[0], pages[1], slots)
        else:
            append_quantised(QuantisedRows._make([*rows, *pages, *scales, slots]))

    for _ in range(2):
        with pytest.raises(tw.InvalidProblem, match="slots"):
            write(torch.arange(5) + 8)
        write(torch.arange(5) + 7)


@pytest.mark.parametrize("changed", range(4))
def test_rows_and_pages_of_several_dtypes_are_refused(changed: int) -> None:
    rows, pages = torch.zeros(3, 2, 64, dtype=INT8), torch.zeros(2, 8, 2, 64, dtype=INT8)
    given = [rows, rows, pages, pages]
    given[changed] = given[changed].to(torch.float16)
    with pytest.raises(InvalidProblem, match="one dtype"):
        write_rows(given[0], given[1], given[2], given[3], torch.arange(3))
