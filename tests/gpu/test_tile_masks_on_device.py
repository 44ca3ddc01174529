"""Tile masks on a real GPU: results against dense masks and the calls' own flags, and reuse without waiting.

The conformance suite runs there with `pytest tests/backends/test_conformance.py --backend triton --device cuda -k
tiles`; graphs, threads and compiled calls are in test_calls_on_device.py.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from making import NoWaiting
from making import cuda_randn as randn
from tilewise import TileMask, tile_mask
from tilewise.tiles import lists_of

LENGTH = 1000


def holes(batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> TileMask:
    """Tiles of all kinds, with rows that see nothing."""
    kinds = torch.randint(0, 3, (batch, heads, -(-seqlen_q // 128), -(-seqlen_k // 128)), device="cuda")
    kinds = kinds.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :seqlen_q, :seqlen_k]
    dense = (kinds == 2) | ((kinds == 1) & (torch.rand(kinds.shape, device="cuda") < 0.5))
    dense[:, :, ::97] = False
    return TileMask.from_dense(dense)


MASKS: dict[str, Callable[[], TileMask]] = {
    "prefix": lambda: TileMask.prefix(300, LENGTH, device="cuda"),
    "documents": lambda: TileMask.documents(torch.arange(LENGTH, device="cuda") // 130),
    "chunks": lambda: TileMask.chunks(256, LENGTH, device="cuda"),
    "grid": lambda: TileMask.neighbourhood((25, 40), (7, 9), device="cuda"),
    "function": lambda: tile_mask(lambda _b, _h, i, j: (i >= j) & (i % 3 != j % 5), LENGTH, LENGTH, device="cuda"),
    "holes": lambda: holes(1, 1, LENGTH, LENGTH),
    "of sequences and heads": lambda: holes(2, 8, LENGTH, LENGTH),
}
every_mask = pytest.mark.parametrize("name", MASKS)


def trained(attend: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
    """The result and the gradients."""
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    out = attend(*leaves)
    draw = torch.Generator(device="cuda").manual_seed(1)
    dout = torch.randn(out.shape, device="cuda", dtype=torch.float32, generator=draw).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_near(got: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        bound = 2**-6 * max(1.0, other.abs().max().item())
        torch.testing.assert_close(one.float(), other.float(), atol=bound, rtol=0.0)


@every_mask
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_results_are_those_of_the_dense_mask(name: str, head_dim: int, kv_heads: int) -> None:
    made = MASKS[name]()
    # Of the tensors alone, so that no flag is refused.
    mask, dense = TileMask(made.tiles, made.bits, LENGTH, LENGTH), made.dense()
    q, k, v = randn(2, 8, LENGTH, head_dim), randn(2, kv_heads, LENGTH, head_dim), randn(2, kv_heads, LENGTH, head_dim)
    choices: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (200, 100)}]
    for flags in choices:
        want = trained(lambda q, k, v, flags=flags: tw.attention(q, k, v, mask=dense, **flags), q, k, v)
        # On Hopper, without causal and window, the first is its own kernel.
        for backend in ("auto", "triton"):
            more = flags | {"backend": backend}
            got = trained(lambda q, k, v, more=more: tw.attention(q, k, v, mask=mask, **more), q, k, v)
            assert_near(got, want)


def test_packed_sequences_with_masks_of_their_own() -> None:
    lengths = [300, 1, 777, 128]
    masks = [holes(1, 1, n, n) for n in lengths]
    stacked = TileMask.stack(masks)
    total, longest = sum(lengths), max(lengths)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    q, k, v = randn(total, 8, 128), randn(total, 2, 128), randn(total, 2, 128)
    flags: dict[str, Any] = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    got = trained(lambda q, k, v: tw.attention_varlen(q, k, v, bounds, bounds, mask=stacked, **flags), q, k, v)
    wants = []
    for part_q, part_k, part_v, mask in zip(*(t.split(lengths) for t in (q, k, v)), masks, strict=True):
        heads_first = (t.transpose(0, 1)[None] for t in (part_q, part_k, part_v))
        wants.append(tw.attention(*heads_first, mask=mask.dense())[0].transpose(0, 1))
    assert_near(got[:1], [torch.cat(wants)])
    dense = stacked.dense()
    want = trained(lambda q, k, v: tw.attention_varlen(q, k, v, bounds, bounds, mask=dense, **flags), q, k, v)
    assert_near(got, want)


@pytest.mark.parametrize("page_size", [16, 128])
def test_a_tree_over_the_last_keys_of_pages(page_size: int) -> None:
    """Speculative decoding: the rows of a draft see the context and their ancestors."""
    context, parents = 640, [-1, 0, 0, 1, 1, 2, 5, 6]
    keys = context + len(parents)
    pages = -(-keys // page_size)
    tree = TileMask.stack([TileMask.tree(parents, context, device="cuda")], seqlen_k=pages * page_size)
    k, v = (randn(2 * pages, page_size, 2, 128) for _ in range(2))
    table = torch.randperm(2 * pages, device="cuda").view(2, pages).int()
    lengths = torch.full((2,), keys, dtype=torch.int32, device="cuda")
    bounds = torch.tensor([0, 8, 16], dtype=torch.int32, device="cuda")
    q = randn(16, 8, 128)
    flags: dict[str, Any] = {"cu_seqlens_q": bounds, "max_seqlen_q": 8}
    got = tw.attention_paged(q, k, v, table, lengths, mask=tree, **flags)
    want = tw.attention_paged(q, k, v, table, lengths, mask=tree.dense(), **flags)
    assert_near([got], [want])


def test_reusing_a_mask_does_not_wait(no_waiting: NoWaiting) -> None:
    q, k, v = (randn(1, 4, LENGTH, 64).requires_grad_() for _ in range(3))
    mask = MASKS["holes"]()

    def step() -> None:
        out = tw.attention(q, k, v, mask=mask)
        torch.autograd.grad(out, (q, k, v), out.detach())

    step()
    with no_waiting():
        for _ in range(3):
            step()
            with torch.inference_mode():
                tw.attention(q, k, v, mask=mask, causal=True)


def test_a_mask_on_another_device() -> None:
    q = randn(1, 4, 300, 64)
    mask = TileMask.prefix(100, 300)
    with pytest.raises(tw.InvalidProblem, match="mask"):
        tw.attention(q, q, q, mask=mask)
    with pytest.raises(tw.InvalidProblem, match="mask"):
        tw.attention(q.cpu(), q.cpu(), q.cpu(), mask=mask.to("cuda"))
    assert_near([tw.attention(q, q, q, mask=mask.to("cuda"))], [tw.attention(q, q, q, mask=mask.dense().cuda())])


@every_mask
def test_masks_are_the_same_on_both_devices(name: str) -> None:
    """Moved, pickled, combined."""
    mask = MASKS[name]()
    here = mask.to("cpu")
    assert torch.equal(mask.dense().cpu(), here.dense())
    assert torch.equal(here.to("cuda").dense(), mask.dense())
    again = pickle.loads(pickle.dumps(mask))
    assert torch.equal(again.dense(), mask.dense())
    assert again.lists is not None
    other = MASKS["prefix"]()
    for got, want in (
        (mask & other, here & other.to("cpu")), (mask | other, here | other.to("cpu")), (~mask, ~here),
        (mask.cut((128, 900), (0, 777)), here.cut((128, 900), (0, 777))),
    ):  # fmt: skip
        assert torch.equal(got.dense().cpu(), want.dense())


@every_mask
def test_two_kernels_make_the_lists(name: str) -> None:
    """The same as the many of tiles.lists_of, word for word."""
    mask = MASKS[name]()
    assert mask.lists is not None
    assert torch.equal(mask.lists, lists_of(mask.tiles))


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_whole_tiles_with_masks_of_heads(head_dim: int, kv_heads: int) -> None:
    """Gradients of keys that nothing sees, and of queries that see nothing, are 0 in memory that held NaN."""
    q, k, v = randn(2, 8, 640, head_dim), randn(2, kv_heads, 1280, head_dim), randn(2, kv_heads, 1280, head_dim)
    mask = holes(2, 8, 640, 1280)
    want = trained(lambda q, k, v: tw.attention(q, k, v, mask=mask.dense()), q, k, v)
    for _ in range(2):
        torch.cuda.empty_cache()
        left = torch.full((2**26,), float("nan"), device="cuda")
        del left
        got = trained(lambda q, k, v: tw.attention(q, k, v, mask=mask), q, k, v)
        assert_near(got, want)
        assert not got[1][:, :, ::97].any()


# Importing torch's compiler warns about its own use of torch.jit.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_writes_that_torch_does_not_count_reach_no_kernel() -> None:
    """Numbers without bits would make kernels read other memory."""
    mask = holes(1, 2, LENGTH, LENGTH)
    q, k, v = (randn(1, 2, LENGTH, 64, dtype=torch.float32) for _ in range(3))
    bias = randn(1, 2, LENGTH, LENGTH, dtype=torch.float32)

    def attend(*leaves: Tensor) -> Tensor:
        out: Tensor = tw.attention(*leaves[:3], bias=leaves[3], mask=mask)
        return out

    def tangent() -> Tensor:
        along: Tensor = torch.func.jvp(lambda x: tw.attention(x, k, v, mask=mask), (q,), (k,))[1]
        return along

    expected = [*trained(attend, q, k, v, bias), tangent()]
    mask.tiles.data.fill_(2**30)
    for one, other in zip([*trained(attend, q, k, v, bias), tangent()], expected, strict=True):
        assert torch.equal(one, other)
