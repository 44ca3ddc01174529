"""`kv.append_rotated` on a real GPU: against fp64, in place, in graphs, without waiting, and in e4m3 pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from making import NoWaiting
from tilewise import settings
from tilewise.kv import append_rotated, rotary_table

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
LONGEST, PAGE_SIZE = 5000, 16
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def inputs(
    total: int, heads: int, kv_heads: int, dim: int, dim_v: int, rotary_dim: int, dtype: torch.dtype,
    page_dtype: torch.dtype | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Rows of prompts: the slots of a page one after another, with rows between that have none."""
    num_pages = total // PAGE_SIZE + 3
    slots = torch.arange(total, device="cuda") + PAGE_SIZE + 5
    slots[-(total // 3) :] += PAGE_SIZE - 3
    slots[:: 2 * PAGE_SIZE][1:] = -1
    pages = [torch.full((num_pages, PAGE_SIZE, kv_heads, d), torch.nan, device="cuda") for d in (dim, dim_v)]
    return {
        "q": torch.randn(total, heads, dim, device="cuda").to(dtype),
        "k": torch.randn(total, kv_heads, dim, device="cuda").to(dtype),
        "v": torch.randn(total, kv_heads, dim_v, device="cuda").to(dtype),
        "k_pages": pages[0].to(page_dtype or dtype), "v_pages": pages[1].to(page_dtype or dtype), "slots": slots,
        "positions": torch.randint(0, LONGEST, (total,), device="cuda"),
        "cos_sin": rotary_table(LONGEST, rotary_dim, device="cuda"),
    }  # fmt: skip


def exact(given: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """q and the pages in fp64, by the definition on a CPU."""
    wide = {n: t.cpu().double() if t.is_floating_point() else t.cpu() for n, t in given.items()}
    options = {n: t.cpu() if isinstance(t, Tensor) else t for n, t in options.items()}
    wide |= {n: torch.full(given[n].shape, torch.nan, dtype=torch.float64) for n in ("k_pages", "v_pages")}
    return append_rotated(**wide, **options), wide["k_pages"], wide["v_pages"]


def compare(given: dict[str, Any], out: Tensor, **options: Any) -> None:
    """Slots that are not written keep their NaN."""
    for got, want in zip((out, given["k_pages"], given["v_pages"]), exact(given, **options), strict=True):
        tolerance = TOLERANCE[got.dtype]
        torch.testing.assert_close(got.cpu().double(), want, atol=tolerance, rtol=tolerance, equal_nan=True)


SHAPES = {
    "llama": (32, 8, 128, 128, 128),
    "partial": (16, 4, 96, 96, 32),
    "odd": (6, 3, 40, 24, 10),
    "wide": (8, 1, 512, 512, 64),
    "unequal": (5, 5, 192, 128, 64),
}


@pytest.mark.parametrize("total", [1, 64, 2500])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_fp64(shape: str, interleaved: bool, total: int) -> None:
    dim = SHAPES[shape][2]
    weights = {f"{n}_weight": torch.rand(dim, device="cuda") + 0.5 for n in ("q", "k")}
    for dtype, page_dtype, options in (
        (torch.float32, torch.float32, {"norm_eps": 1e-6, **weights}),
        (BF16, BF16, {"norm_eps": 1e-6}),
        (torch.float16, BF16, {}),
    ):
        given = inputs(total, *SHAPES[shape], dtype, page_dtype)
        out = torch.full_like(given["q"], torch.nan)
        assert append_rotated(**given, interleaved=interleaved, out=out, **options) is out
        compare(given, out, interleaved=interleaved, **options)


@pytest.mark.parametrize("total", [3, 64, 4096])
def test_in_place_within_one_projection(total: int) -> None:
    """A hundred times, because threads that read what others already wrote would differ now and then."""
    given = inputs(total, 32, 8, 128, 128, 128, BF16)
    whole = torch.cat([given[name].flatten(1) for name in ("q", "k", "v")], 1)
    parts = whole.split([32 * 128, 8 * 128, 8 * 128], 1)
    views = dict(zip(("q", "k", "v"), (part.unflatten(1, (-1, 128)) for part in parts), strict=True))
    fixed = given | views
    want = append_rotated(**given, norm_eps=1e-6)
    before = whole.clone()
    for _ in range(100):
        whole.copy_(before)
        append_rotated(**fixed, norm_eps=1e-6, out=views["q"])
        assert torch.equal(views["q"], want)
    assert torch.equal(whole[:, 32 * 128 :], before[:, 32 * 128 :])
    compare(given, want, norm_eps=1e-6)


@pytest.mark.parametrize("total", [40, 2500])
def test_e4m3_with_given_scales(total: int) -> None:
    given = inputs(total, 8, 4, 128, 64, 128, BF16, E4M3)
    for name in ("k_pages", "v_pages"):
        given[name].view(torch.uint8).fill_(0x55)
    k_scale, v_scale = torch.rand(4, device="cuda") / 50 + 0.01, torch.full((), 0.002, device="cuda")
    mine = {name: given[name].clone() for name in ("k_pages", "v_pages")}
    append_rotated(**(given | mine), norm_eps=1e-6, k_scale=k_scale, v_scale=v_scale)
    host = {name: t.cpu() for name, t in given.items()}
    append_rotated(**host, norm_eps=1e-6, k_scale=k_scale.cpu(), v_scale=v_scale.cpu())
    for name, pages in mine.items():
        a, b = pages.cpu().float(), host[name].float()
        torch.testing.assert_close(a, b, atol=2e-3, rtol=0.13)
        assert (a == b).float().mean() > 0.999


@pytest.mark.parametrize("counts", [[1] * 30, [700, 1, 1, 2000, 33]])
def test_e4m3_with_scales_that_grow(counts: list[int]) -> None:
    caches = [tw.PagedKVCache(400, 16, 1, 4, 128, dtype=E4M3, device=device) for device in ("cuda", "cpu")]
    torch.manual_seed(0)
    requests = [[cache.add([n, *range(count - 1)]) for n, count in enumerate(counts)] for cache in caches]
    table = rotary_table(LONGEST, 64, device="cpu")
    for size in (1.0, 40.0, 0.1, 3.0):
        before = [caches[1].length(request) for request in requests[1]]
        rows, _ = (cache.step(mine) for cache, mine in zip(caches, requests, strict=True))
        after = [caches[1].length(request) for request in requests[1]]
        positions = torch.cat([torch.arange(*ends) for ends in zip(before, after, strict=True)])
        new = [(size * torch.randn(rows, heads, 128)).to(BF16) for heads in (8, 4, 4)]
        turned = [
            cache.append_rotated(*(t.to(cache.device) for t in (*new, positions, table)), interleaved=True)
            for cache in caches
        ]
        torch.testing.assert_close(turned[0].cpu(), turned[1], atol=0.01 * size, rtol=8e-3)
        mine, theirs = (cache.attended() for cache in caches)
        for a, b in zip(mine, theirs, strict=True):
            assert isinstance(a, tw.fp8.Fp8Tensor)
            assert isinstance(b, tw.fp8.Fp8Tensor)
            assert torch.equal(a.scale.cpu(), b.scale)
        outs = [cache.attention(q).cpu() for cache, q in zip(caches, turned, strict=True)]
        torch.testing.assert_close(outs[0], outs[1], atol=0.02 * size, rtol=0.02)


def test_positions_past_the_table_are_nan_and_refused_where_values_are_checked() -> None:
    given = inputs(9, 4, 2, 64, 64, 32, BF16)
    given["positions"][2], given["positions"][5] = LONGEST, -3
    out = append_rotated(**given)
    bad = torch.zeros(9, 4, 64, dtype=torch.bool, device="cuda")
    bad[[2, 5], :, :32] = True
    assert torch.equal(out.isnan(), bad)
    with settings.overridden(check_values=True), pytest.raises(tw.InvalidProblem, match="positions"):
        append_rotated(**given)


def test_in_a_graph_without_waiting(no_waiting: NoWaiting) -> None:
    given = inputs(64, 32, 8, 128, 128, 128, BF16)
    out = torch.empty_like(given["q"])
    append_rotated(**given, out=out)
    with no_waiting():
        append_rotated(**given, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append_rotated(**given, out=out)
    for _ in range(3):
        given["q"].normal_()
        given["k"].normal_()
        given["positions"].random_(0, LONGEST)
        given["slots"].copy_(given["slots"].roll(1))
        for name in ("k_pages", "v_pages"):
            given[name].fill_(torch.nan)
        out.fill_(torch.nan)
        graph.replay()
        compare(given, out)


def test_a_repeated_call_is_refused_like_the_first() -> None:
    given = inputs(9, 4, 2, 64, 64, 32, BF16)
    for _ in range(2):
        compare(given, append_rotated(**given, norm_eps=1.0), norm_eps=1.0)
        given["q"].normal_()
    with pytest.raises(tw.InvalidProblem, match="norm_eps"):
        append_rotated(**given, norm_eps=True)
    with pytest.raises(tw.Unsupported, match="gradient"):
        append_rotated(**(given | {"q": given["q"].requires_grad_()}), norm_eps=1.0)
    with pytest.raises(tw.InvalidProblem, match="slots"):
        append_rotated(
            **(given | {"q": given["q"].detach(), "slots": given["slots"].view(torch.float64)}), norm_eps=1.0
        )
