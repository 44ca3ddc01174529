"""A paged cache in e4m3: what is appended comes back to within e4m3's rounding, whatever order it came in."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tilewise import InvalidProblem
from tilewise.kv.quantised import append_quantised, new_scales, write_quantised

HEADS, DIM = 2, 16


def make(dtype: torch.dtype = torch.float8_e4m3fn, num_pages: int = 16) -> tw.PagedKVCache:
    return tw.PagedKVCache(num_pages, 4, 1, HEADS, DIM, dtype=dtype, device="cpu")


def rows(count: int, seed: int, size: float = 1.0) -> torch.Tensor:
    return size * torch.randn(count, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def decoded(pages: torch.Tensor, scale: torch.Tensor, count: int) -> torch.Tensor:
    return (pages.float() * scale[:, None, :, None]).flatten(0, 1)[:count]


@pytest.mark.parametrize("chunk", [1, 3, 4, 14])
def test_rows_come_back_however_they_were_appended(chunk: int) -> None:
    k = rows(14, 0)
    k[9] *= 100.0
    pages, scale = (
        torch.empty(4, 4, HEADS, DIM, dtype=torch.float8_e4m3fn),
        new_scales(1, 4, HEADS, torch.device("cpu"))[0],
    )
    for begin in range(0, 14, chunk):
        write_quantised(k[begin : begin + chunk], pages, scale, torch.arange(begin, min(begin + chunk, 14)))
    exact = k[:14]
    # Half a step of 1/8 of the value, or of the smallest normal number of the page's scale.
    least = scale.repeat_interleave(4, 0)[:14, :, None] * 2.0**-6
    error = (decoded(pages, scale, 14) - exact).abs()
    assert bool((error <= torch.maximum(exact.abs(), least) / 16 + least / 8).all())
    assert bool((torch.frexp(scale)[0] == 0.5).all())


@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_the_kernel_writes_the_bits_of_torch(page_size: int, dtype: torch.dtype) -> None:
    """Sequences grow by chunks and single rows, large and small ones, with NaN, zeros and rows that have no slot."""
    torch.manual_seed(0)
    per_sequence, lengths, dims = -(-100 // page_size), [0, 0, 0], (16, 27)
    num_pages = 3 * per_sequence
    codes = [torch.randint(0, 256, (num_pages, page_size, HEADS, d), dtype=torch.uint8) for d in dims]
    scales = [new_scales(1, num_pages, HEADS, torch.device("cpu"))[0] for _ in dims]
    mine, mine_scales = [c.clone() for c in codes], [s.clone() for s in scales]
    for step, size in enumerate((1.0, 0.01, 30.0, 1.0, 1e-7, 1e4)):
        slots: list[int] = []
        for sequence in range(3):
            count = (1, 9, 30)[(step + sequence) % 3]
            position = range(lengths[sequence], lengths[sequence] + count)
            slots += [(sequence * per_sequence + p // page_size) * page_size + p % page_size for p in position] + [-1]
            lengths[sequence] += count
        # Channels of a row differ, so that some end up below e4m3's normal numbers.
        spread = torch.logspace(-6, 0, dims[1])
        new = [(size * torch.randn(len(slots), HEADS, d)).to(dtype) for d in dims]
        new[1] = (new[1].float() * spread).to(dtype)
        new[0][0, 0, 3], new[1][0, 1, 7], new[1][1] = torch.nan, -torch.inf, 0.0
        where = torch.tensor(slots)
        for n, (pages, scale) in enumerate(zip(codes, scales, strict=True)):
            write_quantised(new[n], pages.view(torch.float8_e4m3fn), scale, where)
        k, v = (m.view(torch.float8_e4m3fn) for m in mine)
        append_quantised((new[0], new[1]), (k, v), (mine_scales[0], mine_scales[1]), where)
        for a, b in zip((*mine, *mine_scales), (*codes, *scales), strict=True):
            assert torch.equal(a, b)


def test_a_page_that_is_taken_again_starts_its_scale_anew() -> None:
    pages, scale = (
        torch.empty(1, 4, HEADS, DIM, dtype=torch.float8_e4m3fn),
        new_scales(1, 1, HEADS, torch.device("cpu"))[0],
    )
    write_quantised(rows(4, 0, 1e4), pages, scale, torch.arange(4))
    large = scale.clone()
    write_quantised(rows(2, 1), pages, scale, torch.arange(2))
    assert bool((scale < large / 1000).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_that_of_the_cached_values(dtype: torch.dtype) -> None:
    cache, plain = make(), make(dtype)
    shared = list(range(8))
    for step_cache in (cache, plain):
        step_cache.requests = [step_cache.add([*shared, 50, 51]), step_cache.add([*shared, 60])]  # type: ignore[attr-defined]
    for count in (None, [[70], [71]]):
        for c in (cache, plain):
            ids = None if count is None else [70, 71]
            total = c.step(c.requests, tokens=ids)  # type: ignore[attr-defined]
            c.append(rows(total, 1).to(dtype), rows(total, 2).to(dtype))
        q = torch.randn(total, 4, DIM, generator=torch.Generator().manual_seed(3)).to(dtype)
        got, expected = cache.attention(q), plain.attention(q)
        assert got.dtype == dtype
        assert float((got.float() - expected.float()).abs().max()) < 0.2
        k_pages, v_pages = cache.attended()
        exact = tw.attention_paged(
            q.double(), k_pages.dequantize().double(), v_pages.dequantize().double(), cache.block_table(),
            cache.seqlens(), cu_seqlens_q=cache.cu_seqlens_q(), causal=True, backend="reference",
        )  # fmt: skip
        assert float((got.double() - exact).abs().max()) < (1e-5 if dtype == torch.float32 else 2e-2)


def test_forks_copy_scales_with_their_pages() -> None:
    cache = make()
    first = cache.add([1, 2, 3, 4, 5])
    cache.append(rows(cache.step([first]), 0), rows(5, 1))
    second = cache.fork(first)
    total = cache.step([first, second], tokens=[6, 7])
    new = torch.stack([rows(1, 5)[0], 1000 * rows(1, 6)[0]])
    cache.append(new, new)
    out = cache.attention(torch.zeros(total, HEADS, DIM))
    mean = (rows(5, 1).sum(0) + rows(1, 5)[0]) / 6
    assert float((out[0] - mean).abs().max()) < 0.1


def test_equal_prefixes_share_codes_and_scales() -> None:
    """Sharing changes no bit of any result, also when somebody goes on with larger numbers."""
    prompt, results = list(range(9)), list[list[torch.Tensor]]()
    k, v = rows(9, 0, 3.0), rows(9, 1, 3.0)
    for sharing in (False, True):
        cache = tw.PagedKVCache(32, 4, 1, HEADS, DIM, dtype=torch.float8_e4m3fn, device="cpu", prefix_sharing=sharing)
        first = cache.add(prompt)
        cache.step([first])
        cache.append(k, v)
        second = cache.add(prompt)
        assert cache.length(second) == (8 if sharing else 0)
        count = cache.step([second])
        cache.append(k[-count:], v[-count:])
        results.append([])
        for number in range(6):
            cache.step([first, second], tokens=[number, 50 + number])
            new = torch.cat((rows(1, number, 100.0), rows(1, number)))
            cache.append(new, new)
            results[-1].append(cache.attention(rows(2, number).repeat(1, 2, 1)))
        assert cache.stats().pages_shared == (2 if sharing else 0)
    assert all(torch.equal(apart, together) for apart, together in zip(*results, strict=True))


def test_values_keep_all_their_bits_when_a_scale_grows() -> None:
    """Rounded once to the first scale and moved by whole exponents: as if the scale had been known at the start."""
    pages, scale = torch.zeros(1, 4, 1, DIM, dtype=torch.float8_e4m3fn), new_scales(1, 1, 1, torch.device("cpu"))[0]
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


def test_refusals() -> None:
    small = make()
    request = small.add([1])
    small.step([request])
    with pytest.raises(InvalidProblem, match="to be quantised"):
        small.append(rows(1, 0).to(torch.float8_e4m3fn), rows(1, 0))
