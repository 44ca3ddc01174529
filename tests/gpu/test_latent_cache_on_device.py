"""Caches of latents on a real GPU: written and read in place, without waiting, in a graph that is replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from making import NoWaiting
from tilewise.fp8 import Fp8Tensor, quantize_pages
from tilewise.integrations.engines import Batch, Layer
from tilewise.kv import rotary_table

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
VALUES, ROTARY, SCALE = 512, 64, 192**-0.5
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16, E4M3], ids=["bf16", "fp16", "e4m3"])
HEADS = pytest.mark.parametrize("heads", [16, 128])


def make(dtype: torch.dtype, page_size: int = 64, **options: Any) -> tw.PagedKVCache:
    cache = tw.PagedKVCache(
        64, page_size, 1, 1, VALUES + ROTARY, dtype=dtype, device="cuda", head_dim_v=VALUES, latent=True, **options
    )
    # What nobody wrote must not matter: NaN in every format.
    cache.k.view(torch.uint8).fill_(0x7F if dtype == E4M3 else 0xFF)
    return cache


def rows(count: int, width: int, heads: int = 1, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(count, heads, width, device="cuda").to(FP16 if dtype == FP16 else BF16)


def check(cache: tw.PagedKVCache, q: Tensor, out: Tensor) -> None:
    """Against the reference over what the pages hold."""
    k, _ = cache.attended()
    pages = (k.dequantize() if isinstance(k, Fp8Tensor) else k).double()
    exact = tw.attention_paged(
        q.double(), pages, pages[..., :VALUES], cache.block_table(), cache.seqlens(), causal=True, scale=SCALE,
        cu_seqlens_q=cache.cu_seqlens_q(), backend="reference",
    )  # fmt: skip
    seen = cache.seqlens() > 0
    assert seen.any()
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)


@HEADS
@DTYPES
@pytest.mark.parametrize("page_size", [16, 64])
def test_prompts_and_decoding(dtype: torch.dtype, heads: int, page_size: int) -> None:
    cache = make(dtype, page_size)
    first, second = cache.add(range(300)), cache.add([*range(200), *range(500, 570)])
    for step in range(4):
        count = cache.step([first, second], tokens=None if step == 0 else [step, step + 10])
        size = 1.0 if step < 2 else 30.0  # scales of e4m3 pages grow
        cache.append(size * rows(count, ROTARY, dtype=dtype), rows(count, VALUES, dtype=dtype))
        q = rows(count, VALUES + ROTARY, heads, dtype)
        check(cache, q, cache.attention(q, scale=SCALE))
    copy = cache.fork(first)
    count = cache.step([copy, first], tokens=[7, 8])
    cache.append(rows(count, ROTARY, dtype=dtype), rows(count, VALUES, dtype=dtype))
    q = rows(count, VALUES + ROTARY, heads, dtype)
    check(cache, q, cache.attention(q, scale=SCALE))


@DTYPES
def test_the_rotary_part_is_rotated_on_its_way(dtype: torch.dtype) -> None:
    table, positions, cache = rotary_table(512, ROTARY, device="cuda"), torch.arange(200, device="cuda"), make(dtype)
    q, k, v = rows(200, ROTARY, 16, dtype), rows(200, ROTARY, dtype=dtype), rows(200, VALUES, dtype=dtype)
    cache.step([cache.add(range(200))])
    turned = cache.append_rotated(q, k, v, positions, table)
    steps = 10000.0 ** (-torch.arange(32, device="cuda") / 32)
    angle = torch.polar(torch.ones(1, device="cuda"), positions[:, None] * steps)[:, None]
    pairs = torch.complex(*k.float().chunk(2, -1)) * angle
    kept, _ = cache.attended()
    pages = (kept.dequantize() if isinstance(kept, Fp8Tensor) else kept).float()
    stored = pages.flatten(0, 1)[cache.slots()]
    half_a_step = 2.0**-4 if dtype == E4M3 else 1e-2
    expected = torch.cat((v.float(), pairs.real, pairs.imag), -1)
    torch.testing.assert_close(stored, expected, atol=1e-2, rtol=half_a_step)
    q = torch.cat((rows(200, VALUES, 16, dtype), turned), -1)
    check(cache, q, cache.attention(q, scale=SCALE))


@DTYPES
def test_a_captured_step(dtype: torch.dtype, no_waiting: NoWaiting) -> None:
    cache = make(dtype, max_requests=4, max_seqlen=512)
    k, v, q = rows(4, ROTARY, dtype=dtype), rows(4, VALUES, dtype=dtype), rows(4, VALUES + ROTARY, 32, dtype)

    def decode() -> Tensor:
        cache.append(k, v)
        out: Tensor = cache.attention(q, scale=SCALE)
        return out

    cache.step([], fixed=True)
    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode()
    requests = [cache.add(range(n)) for n in (70, 3)]
    count = cache.step(requests)
    cache.append(rows(count, ROTARY, dtype=dtype), rows(count, VALUES, dtype=dtype))
    for token in range(6):
        for tensor in (k, v, q):
            tensor.normal_()
        with no_waiting():
            cache.step(requests, tokens=[token, token], fixed=True)
            graph.replay()
            cache.mark_written()
        check(cache, q, out)
    resting = [seat for seat in range(4) if seat not in cache.seats(requests)]
    assert not out[resting].any()


@HEADS
@pytest.mark.parametrize("is_e4m3", [False, True])
def test_the_calls_of_an_engine(is_e4m3: bool, heads: int) -> None:
    """A layer over an engine's tensor of latents, as the vLLM backend calls it; three rows a request, in a graph."""
    layer = Layer(heads, VALUES + ROTARY, SCALE, 1, is_e4m3=is_e4m3, latent_values=VALUES)
    unwritten, dtype = (0x7F, torch.uint8) if is_e4m3 else (torch.nan, BF16)
    cache = torch.full((40, 64, VALUES + ROTARY), unwritten, dtype=dtype, device="cuda")
    lengths, counts = [300, 64, 640, 5], [3, 1, 3, 2]
    scale = torch.full((), 0.02, device="cuda")
    scales = (scale, scale) if is_e4m3 else ()
    table = torch.randperm(40).view(4, 10)
    latents = [rows(n, VALUES + ROTARY) for n in lengths]
    for kept, pages in zip(latents, table, strict=True):
        place = torch.arange(len(kept))
        slots = (pages[place // 64] * 64 + place % 64).cuda()
        layer.write(kept[..., VALUES:], kept[..., :VALUES], cache, slots, *scales)
    totals = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    batch = Batch(
        sum(counts), totals, max(counts), torch.tensor(lengths, dtype=torch.int32, device="cuda"), table.int().cuda(),
        torch.empty(0, dtype=torch.int64, device="cuda"), page_size=64,
    )  # fmt: skip
    q = rows(sum(counts), VALUES + ROTARY, heads)
    out = torch.zeros(sum(counts), heads, VALUES, dtype=BF16, device="cuda")
    layer.attend(q, cache, batch, out, *scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.attend(q, cache, batch, out, *scales)
    q.normal_()
    graph.replay()
    start = 0
    for kept, length, count in zip(latents, lengths, counts, strict=True):
        exact = kept[:length].float()
        if is_e4m3:
            exact = (exact / scale).clamp(-448, 448).to(E4M3).float() * scale
        latent = exact.double().transpose(0, 1)[None]
        rows_of = q[start : start + count].double().transpose(0, 1)[None]
        want = tw.attention(rows_of, latent, latent[..., :VALUES], causal=True, scale=SCALE, backend="reference")
        torch.testing.assert_close(out[start : start + count].double(), want[0].transpose(0, 1), atol=2e-2, rtol=2e-2)
        start += count


@HEADS
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("graphed", [False, True])
def test_operands_that_change_right_before_a_call(dtype: torch.dtype, heads: int, graphed: bool) -> None:
    """Kernels that start while the one before them ends wait for what it writes."""
    torch.manual_seed(0)
    pages = torch.randn(40, 64, 1, VALUES + ROTARY, device="cuda").to(BF16)
    k: Any = quantize_pages(pages) if dtype == E4M3 else pages
    v = k.first_columns(VALUES) if dtype == E4M3 else k[..., :VALUES]
    table = torch.randperm(40, device="cuda")[:30].view(3, 10).int()
    rows_of, lengths = (
        torch.randn(12, 3, heads, VALUES + ROTARY, device="cuda").to(BF16),
        torch.randint(1, 640, (12, 3)),
    )
    q, used, lengths = torch.empty_like(rows_of[0]), table[:, 0].clone(), lengths.int().cuda()

    def chain(after: Callable[[], Any] = lambda: None) -> Tensor:
        found = []
        for new, length in zip(rows_of, lengths, strict=True):
            q.copy_(new)
            used.copy_(length)
            found.append(tw.attention_paged(q, k, v, table, used, scale=SCALE))
            after()
            q.fill_(float("nan"))
        return torch.stack(found)

    expected = chain(torch.cuda.synchronize)
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain()
        graph.replay()
    else:
        got = chain()
    assert torch.equal(got, expected)
