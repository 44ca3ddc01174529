"""The FP8 cache on a real GPU: the bits of the CPU in one launch, without waiting, in a graph that is replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from making import NoWaiting
from quantised_rows import check_e4m3, check_int8
from tilewise.fp8 import Fp8Tensor
from tilewise.integrations.flash_attn_interface import flash_attn_with_kvcache
from tilewise.kv.quantised import append_quantised

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEADS, KV_HEADS, DIM, DIM_V = 8, 2, 64, 40


@pytest.mark.parametrize("count", [64, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_the_bits_of_int8_are_those_of_the_cpu(dtype: torch.dtype, count: int) -> None:
    check_int8(append_quantised, dtype, 16, count, device="cuda")


@pytest.mark.parametrize("page_size", [1, 16, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_the_bits_are_those_of_the_cpu(page_size: int, dtype: torch.dtype) -> None:
    check_e4m3(append_quantised, dtype, page_size, (1, 17, 70), device="cuda")


def cache_of(seats: int) -> tw.PagedKVCache:
    cache = tw.PagedKVCache(
        40, 16, 1, KV_HEADS, DIM, dtype=E4M3, device="cuda", head_dim_v=DIM_V, max_seqlen=128, max_requests=seats
    )
    # Codes of NaN: what nobody wrote must not matter.
    for pages in (cache.k, cache.v):
        pages.view(torch.uint8).fill_(0x7F)
    return cache


def rows_of(count: int, size: float = 1.0) -> tuple[Tensor, Tensor]:
    k, v = (size * torch.randn(count, KV_HEADS, d, device="cuda") for d in (DIM, DIM_V))
    return k.to(BF16), v.to(BF16)


def test_a_captured_step_quantises_and_attends() -> None:
    torch.manual_seed(1)
    seats = 4
    cache = cache_of(seats)
    requests = [cache.add([n] * length) for n, length in enumerate((30, 5))]
    cache.append(*rows_of(cache.step(requests)))
    q = torch.randn(seats, HEADS, DIM, device="cuda").to(BF16)
    k, v = rows_of(seats)
    cache.step([], fixed=True)
    cache.append(k, v)
    cache.attention(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(k, v)
        out = cache.attention(q)
    for number in range(40):
        if number == 12:
            requests.append(cache.add([7] * 16))
            cache.append(*rows_of(cache.step(requests[-1:])))
        for old, new in zip((k, v), rows_of(seats, 1.0 + number % 7), strict=True):
            old.copy_(new)
        q.copy_(torch.randn_like(q))
        cache.step(requests, tokens=[number] * len(requests), fixed=True)
        graph.replay()
        cache.mark_written()
        check(cache, q, out, cache.seats(requests), v)


def check(cache: tw.PagedKVCache, q: Tensor, out: Tensor, seats: list[int], v: Tensor) -> None:
    k_pages, v_pages = cache.attended()
    assert isinstance(k_pages, Fp8Tensor)
    assert isinstance(v_pages, Fp8Tensor)
    pages = [t.dequantize().double() for t in (k_pages, v_pages)]
    tables: tuple[Any, ...] = cache.block_table(), cache.seqlens()
    exact = tw.attention_paged(q.double(), *pages, *tables, backend="reference")
    assert bool(((out.double() - exact).abs().amax((1, 2)) <= 2e-2 * v.abs().max()).all())
    places = cache.slots()[seats]
    stored = pages[1].flatten(0, 1)[places]
    assert bool(((stored - v[seats]).abs() <= v[seats].abs() / 16 + v.abs().max() / 2**14).all())


def test_appending_does_not_wait_for_the_device(no_waiting: NoWaiting) -> None:
    cache = cache_of(4)
    requests = [cache.add([n] * 20) for n in range(4)]
    cache.append(*rows_of(cache.step(requests)))
    k, v = rows_of(4)

    def decode(number: int) -> None:
        cache.step(requests, tokens=[number] * 4, fixed=number % 2 == 0)
        cache.append(k, v)

    for number in range(4):
        decode(number)
    with no_waiting():
        for number in range(4, 30):
            decode(number)


@pytest.mark.parametrize("paged", [False, True])
def test_fa3_appends_to_fp8_caches_and_attends(paged: bool) -> None:
    """The same bytes in the cache as on a CPU, and the same result but for rounding."""
    torch.manual_seed(3)
    q, cache, new = (torch.randn(2, n, h, DIM).to(E4M3) for n, h in ((1, HEADS), (128, KV_HEADS), (1, KV_HEADS)))
    if paged:
        cache = cache.view(torch.uint8).view(8, 32, KV_HEADS, DIM).view(E4M3)
    found = []
    for device in ("cpu", "cuda"):
        k, v = (cache.clone().to(device) for _ in range(2))
        options: dict[str, Any] = {"cache_seqlens": torch.tensor([77, 30], dtype=torch.int32, device=device)}
        if paged:
            options["page_table"] = torch.arange(7, -1, -1, dtype=torch.int32, device=device).view(2, 4)
        for name, value in (("q", 0.5), ("k", 2.0), ("v", 3.0)):
            options[f"{name}_descale"] = torch.tensor([[value, 1.0], [1.0, value]], device=device)
        rows = new.to(device)
        out = flash_attn_with_kvcache(q.to(device), k, v, rows, rows, causal=True, **options)
        assert isinstance(out, Tensor)
        found.append((out.float().cpu(), k.view(torch.uint8).cpu(), v.view(torch.uint8).cpu()))
    (mine, *caches), (theirs, *their_caches) = found
    assert all(torch.equal(a, b) for a, b in zip(caches, their_caches, strict=True))
    torch.testing.assert_close(mine, theirs, atol=2e-2, rtol=2e-2)
