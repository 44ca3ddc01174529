"""`PagedKVCache(latent=True)`: one row a token for K and V, in any dtype. test_cache.py has a life of requests."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.fp8 import Fp8Tensor
from tilewise.kv.quantised import new_scales, write_quantised

HEADS, VALUES, ROTARY = 8, 32, 16
E4M3 = torch.float8_e4m3fn


def make(dtype: torch.dtype = E4M3, *, page_size: int = 4, **options: Any) -> tw.PagedKVCache:
    given: dict[str, Any] = {"head_dim_v": VALUES, "latent": True} | options
    return tw.PagedKVCache(16, page_size, 1, 1, VALUES + ROTARY, dtype=dtype, device="cpu", **given)


def rows(count: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1 if seed else HEADS, width, generator=generator).to(dtype)


def test_a_token_is_stored_once() -> None:
    for dtype in (torch.float32, torch.float16, E4M3):
        latents, pairs = make(dtype), make(dtype, latent=False)
        scales = 16 * 4 if dtype == E4M3 else 0
        assert latents.nbytes == 16 * 4 * (VALUES + ROTARY) * dtype.itemsize + scales
        assert pairs.nbytes == 16 * 4 * (2 * VALUES + ROTARY) * dtype.itemsize + 2 * scales
        k, v = latents.attended()
        pages = [t.data if isinstance(t, Fp8Tensor) else t for t in (k, v)]
        assert pages[0].data_ptr() == pages[1].data_ptr()
        assert "latents" in repr(latents)
        assert "latents" not in repr(pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_e4m3_latents_have_one_scale_for_both_parts(dtype: torch.dtype) -> None:
    """The codes are those of whole rows: whichever part is larger decides, in every page."""
    cache = make()
    request = cache.add(list(range(10)))
    cache.step([request])
    k, v = rows(10, ROTARY, 1, dtype), rows(10, VALUES, 2, dtype)
    k[2] *= 50.0
    v[5] *= 700.0
    cache.append(k, v)
    codes, scale = torch.zeros(16, 4, 1, VALUES + ROTARY).to(E4M3), new_scales(1, 16, 1, torch.device("cpu"))[0]
    write_quantised(torch.cat((v, k), -1), codes, scale, cache.slots())
    got, values = cache.attended()
    assert isinstance(got, Fp8Tensor)
    assert isinstance(values, Fp8Tensor)
    used = cache.block_table()[0, :3].long()
    whole = Fp8Tensor(codes, scale[..., None], "page", "paged")
    stored, expected = (t.dequantize()[used].flatten(0, 1)[:10] for t in (got, whole))
    assert torch.equal(stored, expected)
    q = rows(10, VALUES + ROTARY, 0, dtype)
    exact = got.dequantize()
    table, lengths = cache.block_table(), cache.seqlens()
    expected = tw.attention_paged(
        q.float(), exact, exact[..., :VALUES], table, lengths, cu_seqlens_q=cache.cu_seqlens_q(), causal=True
    )
    tolerance = (1e-5 if dtype == torch.float32 else 1e-2) * float(expected.abs().max())
    torch.testing.assert_close(cache.attention(q).float(), expected, atol=tolerance, rtol=0)


@pytest.mark.usefixtures("always_cascade")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3], ids=["fp32", "bf16", "e4m3"])
def test_forks_and_shared_prefixes_read_the_same_latents(dtype: torch.dtype) -> None:
    """A cache that shares gives what one gives that does not, and a fork keeps its past when the other goes on."""
    given = torch.float32 if dtype == E4M3 else dtype
    results = []
    for sharing in (False, True):
        cache, outs = make(dtype, prefix_sharing=sharing), []
        first = cache.add(list(range(9)))
        cache.step([first])
        cache.append(rows(9, ROTARY, 1, given), rows(9, VALUES, 2, given))
        second = cache.add([*range(9), 50, 51])
        count = cache.step([second])
        assert count == (3 if sharing else 11)
        new = [
            torch.cat((rows(9, width, seed, given), rows(2, width, 3, given)))
            for width, seed in ((ROTARY, 1), (VALUES, 2))
        ]
        cache.append(*(t[-count:] for t in new))
        third = cache.fork(second)
        for number in range(3):
            cache.step([first, second, third], tokens=[number, 10 + number, 20 + number])
            cache.append(rows(3, ROTARY, 4 + number, given) * 10**number, rows(3, VALUES, 9 + number, given))
            q = rows(3, VALUES + ROTARY, 0, given)
            outs.append(cache.attention(q, scale=0.1))
            assert "latent" in cache.explain(q).problem.features
        assert cache.shared_prefix() is not None
        results.append(torch.stack(outs))
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3], ids=["fp32", "bf16", "e4m3"])
def test_the_rotary_part_is_rotated_on_its_way(dtype: torch.dtype, interleaved: bool) -> None:
    """`append_rotated` is `append` of rows that were rotated before."""
    given = torch.float32 if dtype == E4M3 else dtype
    table, positions = tw.kv.rotary_table(64, ROTARY, device="cpu"), torch.arange(7)
    q, k, v = rows(7, ROTARY, 0, given), rows(7, ROTARY, 1, given), rows(7, VALUES, 2, given)
    k[3] *= 1000.0
    fused, plain = make(dtype), make(dtype)
    for cache in (fused, plain):
        cache.step([cache.add(list(range(7)))])
    turned = fused.append_rotated(q, k, v, positions, table, interleaved=interleaved)
    pages = torch.zeros(2, 8, 1, HEADS + ROTARY, dtype=given)
    scratch = pages[0, ..., :ROTARY][None], pages[1, ..., :ROTARY][None]
    q_turned = tw.kv.append_rotated(q, k, k, *scratch, torch.arange(7), positions, table, interleaved=interleaved)
    plain.append(scratch[0][0, :7], v)
    assert torch.equal(turned, q_turned)
    q = torch.cat((rows(7, VALUES, 0, given), turned), -1)
    assert torch.equal(fused.attention(q), plain.attention(q))


def test_idle_seats_are_not_written() -> None:
    for dtype in (torch.float32, E4M3):
        cache = make(dtype, max_requests=3, max_seqlen=16)
        cache.k.view(torch.uint8).fill_(0)
        request = cache.add([1])
        cache.step([request], fixed=True)
        k, v = rows(3, ROTARY, 1), rows(3, VALUES, 2)
        k[torch.arange(3) != cache.seats([request])[0]] = 1e6
        cache.append(k, v)
        out = cache.attention(rows(3, VALUES + ROTARY, 0))
        assert (cache.k.view(torch.uint8).flatten(3).any(-1)).sum() == 1
        seat = cache.seats([request])
        torch.testing.assert_close(out[seat], v[seat].expand(1, HEADS, VALUES), rtol=0.07, atol=0.01)


def test_refusals() -> None:
    for values in (None, VALUES + ROTARY):
        with pytest.raises(tw.InvalidProblem, match="less than head_dim = 48 of a latent"):
            make(head_dim_v=values)
    with pytest.raises(tw.InvalidProblem, match="latent: expected True or False"):
        make(latent=VALUES)
    cache = make(torch.float32)
    cache.step([cache.add([1, 2])])
    with pytest.raises(tw.InvalidProblem, match=r"k: expected shape \(2, 1, 16\)"):
        cache.append(rows(2, VALUES + ROTARY, 1), rows(2, VALUES, 2))


def test_a_pickled_cache_still_has_one_row_a_token() -> None:
    caches = [make(torch.float32)]
    request = caches[0].add(list(range(6)))
    caches.append(pickle.loads(pickle.dumps(caches[0])))
    for cache in caches:
        cache.step([request])
        cache.append(rows(6, ROTARY, 1), rows(6, VALUES, 2))
    query = rows(6, VALUES + ROTARY, 0)
    assert torch.equal(caches[0].attention(query), caches[1].attention(query))
    assert caches[1].k.data_ptr() == caches[1].v.data_ptr()


def test_int8_is_refused() -> None:
    with pytest.raises(tw.Unsupported, match="latents are not stored in int8"):
        tw.PagedKVCache(4, 16, 1, 1, 40, head_dim_v=32, latent=True, dtype=torch.int8, device="cpu")
