"""Tile masks: how they are made, combined, cut and moved, what calls do with them, and what is refused."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask

import tilewise as tw
from making import watched
from tilewise import TileMask, tile_mask, tile_masks
from tilewise.masks import TileCounts
from tilewise.plan.plots import traffic_by_length
from tilewise.tiles import EMPTY, bits_by_queries, is_visible, lists_of, sections, visible

Sees = Callable[[int, int, Tensor, Tensor], Tensor]


def dense_of(sees: Sees, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The mask of a function, evaluated all at once."""
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]
    rows = [[sees(b, h, i, j).expand(seqlen_q, seqlen_k) for h in range(heads)] for b in range(batch)]
    return torch.stack([torch.stack(row) for row in rows])


def assert_is(mask: TileMask, sees: Sees) -> None:
    assert torch.equal(mask.dense(), dense_of(sees, *mask.shape))


def random_mask(seqlen_q: int, seqlen_k: int, *, batch: int = 1, heads: int = 1, seed: int = 0) -> TileMask:
    """Tiles of all three kinds."""
    draw = torch.Generator().manual_seed(seed)
    kinds = torch.randint(3, (batch, heads, -(-seqlen_q // 128), -(-seqlen_k // 128)), generator=draw)
    wide = kinds.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :seqlen_q, :seqlen_k]
    return TileMask.from_dense((wide == 2) | ((wide == 1) & (torch.rand(wide.shape, generator=draw) < 0.5)))


IDS = torch.tensor([3] * 150 + [1] * 200 + [2] * 30 + [-1] * 20)
SCATTERED = torch.arange(400) * 7 % 5
OFFSETS = torch.tensor([[0, 130, 131, 300], [5, 5, 5, 5]])


@pytest.mark.parametrize(
    ("made", "sees"),
    [
        (
            lambda: tile_mask(lambda _b, _h, i, j: (i >= j) | (j < 64), 300, 300),
            lambda _b, _h, i, j: (i >= j) | (j < 64),
        ),
        (
            lambda: tile_mask(lambda b, h, i, j: (i + j * h) % 3 > b, 130, 257, batch=2, heads=3),
            lambda b, h, i, j: (i + j * h) % 3 > b,
        ),
        (
            lambda: tile_mask(lambda b, _h, _i, j: (OFFSETS[b] == j).any(), 140, 301, batch=2),
            lambda b, _h, _i, j: (OFFSETS[b] == j[..., None]).any(-1),
        ),
        (lambda: TileMask.documents(IDS), lambda _b, _h, i, j: (IDS[i] == IDS[j]) & (IDS[i] >= 0)),
        (lambda: TileMask.documents(SCATTERED), lambda _b, _h, i, j: SCATTERED[i] == SCATTERED[j]),
        (
            lambda: TileMask.documents(torch.stack([IDS, SCATTERED]), IDS[100:][None]),
            lambda b, _h, i, j: ((IDS, SCATTERED)[b][i] == IDS[j + 100]) & (IDS[j + 100] >= 0),
        ),
        (
            lambda: TileMask.from_cu_seqlens(torch.tensor([0, 150, 350, 350, 380], dtype=torch.int32), 400),
            lambda _b, _h, i, j: (IDS[i] == IDS[j]) & (IDS[i] >= 0),
        ),
        (lambda: TileMask.prefix([10, 200], 300, 400), lambda b, _h, i, j: (j < (10, 200)[b]) | (j <= i + 100)),
        (lambda: TileMask.prefix(50, 200), lambda _b, _h, i, j: (j < 50) | (j <= i)),
        (lambda: TileMask.chunks(100, 300, 400), lambda _b, _h, i, j: j // 100 == (i + 100) // 100),
        (lambda: TileMask.chunks(100, 400, 300), lambda _b, _h, i, j: j // 100 == (i - 100) // 100),
        (lambda: TileMask.chunks(256, 1024), lambda _b, _h, i, j: j // 256 == i // 256),
        (
            lambda: TileMask.neighbourhood(500, 33),
            lambda _b, _h, i, j: (j - (i - 16).clamp(0, 467) >= 0) & (j - (i - 16).clamp(0, 467) < 33),
        ),
    ],
    ids=[
        "function", "of heads", "with a table", "documents", "scattered documents", "a batch", "cu_seqlens", "prefixes",
        "prefix", "chunks", "chunks, more queries", "whole chunks", "neighbourhood",
    ],
)  # fmt: skip
def test_masks_are_what_they_say(made: Callable[[], TileMask], sees: Sees) -> None:
    assert_is(made(), sees)


def test_a_grid_s_neighbourhood() -> None:
    """Every token sees 5 x 7 others, those nearest to it."""
    mask = TileMask.neighbourhood((30, 20), (5, 7)).dense()[0, 0]
    assert mask.sum(1).unique().tolist() == [35]
    for token in (0, 19, 45, 310, 599):
        y, x = divmod(token, 20)
        top, left = min(max(y - 2, 0), 25), min(max(x - 3, 0), 13)
        seen = torch.zeros(30, 20, dtype=torch.bool)
        seen[top : top + 5, left : left + 7] = True
        assert torch.equal(mask[token], seen.view(-1))


@pytest.mark.parametrize("of", ["keys", "queries"])
def test_ranges(of: str) -> None:
    draw = torch.Generator().manual_seed(1)
    starts = torch.randint(-20, 300, (2, 3, 270, 2), generator=draw)
    ends = starts + torch.randint(-3, 200, starts.shape, generator=draw)
    starts[:, :, 128:, 0], ends[:, :, 128:, 0] = 0, 256

    def sees(b: int, h: int, i: Tensor, j: Tensor) -> Tensor:
        mine, other = (i, j) if of == "keys" else (j, i)
        low, high = starts[b, h][mine], ends[b, h][mine]
        return ((other[..., None] >= low) & (other[..., None] < high)).any(-1)

    mask = TileMask.from_intervals(starts, ends, 310, of=of)
    assert mask.shape == (2, 3, *((270, 310) if of == "keys" else (310, 270)))
    assert_is(mask, sees)
    assert mask.counts.full > 0


def test_tiles_between_documents_and_between_ranges_are_skipped() -> None:
    """The least and the greatest number of such a tile do not tell."""
    turns = torch.arange(128) % 2
    documents = TileMask.documents(torch.cat([2 * turns, 2 * turns + 1, -turns]))
    assert documents.counts == TileCounts(full=0, partial=5, skipped=4)
    # Even rows see the first tile and odd rows the last.
    ranges = TileMask.from_intervals(256 * turns, 256 * turns + 128, 384)
    assert ranges.counts == TileCounts(full=0, partial=2, skipped=1)


def test_a_tree_sees_its_ancestors_and_the_context() -> None:
    parents = [[-1, 0, 0, 1, 1, 2], [-1, -1, 1, 2, 3, 0]]
    mask = TileMask.tree(torch.tensor(parents), context=200).dense()
    for b, up in enumerate(parents):
        for node in range(6):
            seen, at = set(), node
            while at >= 0:
                seen.add(at)
                at = up[at]
            assert mask[b, 0, node, :200].all()
            assert set(mask[b, 0, node, 200:].nonzero().flatten().tolist()) == seen
    with pytest.raises(tw.InvalidProblem, match="a cycle"):
        TileMask.tree([1, 2, 0])
    with pytest.raises(tw.InvalidProblem, match="below 2"):
        TileMask.tree([-1, 7])


@pytest.mark.parametrize("block", [128, 64, (128, 256)])
def test_of_a_block_mask(block: Any) -> None:
    def sees(b: Any, _h: Any, i: Tensor, j: Tensor) -> Tensor:
        close: Tensor = i - j < 100 + 50 * b
        return (i >= j) & close

    made = create_block_mask(sees, 2, None, 300, 333, device="cpu", BLOCK_SIZE=block)
    assert_is(TileMask.from_block_mask(made), sees)


def test_of_a_block_mask_that_is_only_lists() -> None:
    """Its blocks are what counts; its function says yes to everything."""
    count, indices = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    made = BlockMask.from_kv_blocks(count, indices, BLOCK_SIZE=128, mask_mod=noop_mask)
    assert_is(TileMask.from_block_mask(made), lambda _b, _h, i, j: (i >= 128) | (j >= 128))


@pytest.mark.parametrize("lengths", [(300, 270), (128, 256), (1, 5)])
def test_algebra(lengths: tuple[int, int]) -> None:
    a, b = random_mask(*lengths, batch=2), random_mask(*lengths, heads=3, seed=1)
    assert torch.equal((a & b).dense(), a.dense() & b.dense())
    assert torch.equal((a | b).dense(), a.dense() | b.dense())
    assert torch.equal((~a).dense(), ~a.dense())
    nothing, everything = a & ~a, a | ~a
    assert nothing.counts.visited == 0
    assert everything.counts.partial == everything.counts.skipped == 0
    assert nothing.density == 0.0
    assert everything.density == 1.0


@pytest.mark.parametrize(("rows", "keys"), [((0, 200), (128, 270)), ((5, 200), (130, 270)), ((299, 300), (0, 270))])
def test_cuts(rows: tuple[int, int], keys: tuple[int, int]) -> None:
    mask = random_mask(300, 270, batch=2)
    cut = mask.cut(rows, keys)
    expected = mask.dense()[:, :, slice(*rows), slice(*keys)]
    assert torch.equal(cut.dense(), expected)
    assert torch.equal((~cut).dense(), ~expected)
    q, k = torch.randn(2, 1, rows[1] - rows[0], 8), torch.randn(2, 1, keys[1] - keys[0], 8)
    torch.testing.assert_close(tw.attention(q, k, k, mask=cut), tw.attention(q, k, k, mask=expected))


def test_growing_row_by_row_is_the_mask_of_all_rows() -> None:
    whole = random_mask(280, 280, heads=2).dense().tril()
    mask = TileMask.from_dense(whole[:, :, :120, :120])
    for length in range(121, 281):
        mask = mask.grow(whole[:, :, length - 1 : length, :length])
    assert torch.equal(mask.dense(), whole)
    direct = TileMask.from_dense(whole)
    assert (mask.counts, mask.nbytes) == (direct.counts, direct.nbytes)


def test_growing_from_nothing_and_by_several_rows() -> None:
    rows = random_mask(200, 300).dense()
    assert torch.equal(TileMask.from_dense(rows[:, :, :0, :0]).grow(rows).dense(), rows)
    more = TileMask.from_dense(rows[:, :, :130, :140]).grow(rows[:, :, 130:])
    expected = rows.clone()
    expected[:, :, :130, 140:] = False
    assert torch.equal(more.dense(), expected)
    wider = TileMask.from_dense(rows[:, :, :130, :140]).grow(rows[:, :, :0]).dense()
    assert torch.equal(wider[..., :140], rows[:, :, :130, :140])
    assert not wider[..., 140:].any()


def test_stacked_masks_hide_what_is_past_their_own() -> None:
    masks = [~random_mask(50, 60), ~random_mask(300, 129, seed=1), random_mask(128, 270, seed=2)]
    stacked = TileMask.stack(masks).dense()
    assert stacked.shape == (3, 1, 300, 270)
    for found, mask in zip(stacked, masks, strict=True):
        expected = torch.zeros(300, 270, dtype=torch.bool)
        expected[: mask.seqlen_q, : mask.seqlen_k] = mask.dense()[0, 0]
        assert torch.equal(found[0], expected)


def test_one_mask_per_packed_sequence() -> None:
    lengths = [50, 300, 128]
    masks = [random_mask(n, n, seed=n) for n in lengths]
    q, k, v = (torch.randn(sum(lengths), 2, 16) for _ in range(3))
    cu = torch.tensor([0, 50, 350, 478], dtype=torch.int32)
    out = tw.attention_varlen(q, k, v, cu, cu, mask=TileMask.stack(masks))
    for start, length, mask in zip(cu.tolist(), lengths, masks, strict=False):
        parts = [t[start : start + length].transpose(0, 1)[None] for t in (q, k, v)]
        alone = tw.attention(*parts, mask=mask.dense())[0].transpose(0, 1)
        torch.testing.assert_close(out[start : start + length], alone)


def test_verifying_a_tree_in_pages() -> None:
    """Speculative decoding: the last rows of a sequence in pages are a tree over its context."""
    parents, context, page = [-1, 0, 0, 1, 2], 300, 16
    nodes, keys = len(parents), context + len(parents)
    k, v = (torch.randn(keys, 2, 16) for _ in range(2))
    pages = -(-keys // page)
    padded = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, pages * page - keys)) for t in (k, v)]
    stored = [t.view(pages, page, 2, 16) for t in padded]
    q = torch.randn(nodes, 4, 16)
    mask = TileMask.tree(parents, context)
    table = torch.arange(pages, dtype=torch.int32)[None]
    out = tw.attention_paged(
        q, stored[0], stored[1], table, torch.tensor([keys], dtype=torch.int32), max_seqlen_q=nodes,
        cu_seqlens_q=torch.tensor([0, nodes], dtype=torch.int32), mask=TileMask.stack([mask], seqlen_k=pages * page),
    )  # fmt: skip
    dense = [t.transpose(0, 1)[None] for t in (q, k, v)]
    torch.testing.assert_close(out.transpose(0, 1)[None], tw.attention(*dense, mask=mask.dense()))


def test_lists_name_every_tile_that_is_not_empty() -> None:
    """What Triton's kernels walk: in order, with its kind, by rows and by columns, each of which has a rank."""
    mask = random_mask(500, 300, heads=2)
    parts = sections((1, 2, 4, 3))
    for kinds, listed in zip(mask.tiles[0], lists_of(mask.tiles)[: parts.groups].view(2, -1), strict=True):
        by_row, by_column = listed[: parts.columns].view(4, -1), listed[parts.columns :].view(3, -1)
        for lines, entries in ((kinds, by_row), (kinds.T, by_column)):
            assert sorted(entries[:, 1].tolist()) == list(range(len(lines)))
            for line, (count, _, *words) in zip(lines.tolist(), entries.tolist(), strict=True):
                found = list(zip(words[: 2 * count : 2], words[1 : 2 * count : 2], strict=True))
                assert found == [(at, kind) for at, kind in enumerate(line) if kind != EMPTY]


def test_bits_in_the_order_of_a_gpu_say_the_same() -> None:
    mask = random_mask(500, 300, batch=2, heads=3)
    turned = bits_by_queries(mask.bits)
    assert torch.equal(visible(mask.tiles, turned, 500, 300), mask.dense())
    b, h, i, j = (torch.randint(0, n, (1000,)) for n in mask.shape)
    assert torch.equal(is_visible(mask.tiles, turned, b, h, i, j), mask.dense()[b, h, i, j])
    # A mask has them in the order of its device, whatever it is made of.
    assert torch.equal(TileMask(mask.tiles, turned, 500, 300).bits, mask.bits)


def test_memory_is_a_fraction_of_the_dense_mask() -> None:
    """A tenth of the tiles visible in part: below 2 % of a boolean tensor."""
    kinds = torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) < 0.1
    dense = kinds.repeat_interleave(128, 0).repeat_interleave(128, 1) & (torch.arange(4096) % 3 > 0)
    mask = TileMask.from_dense(dense)
    assert mask.counts.full == 0
    assert mask.density == float(kinds.float().mean())
    assert mask.nbytes < 0.02 * dense.nbytes


def test_nothing_as_large_as_the_pairs_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 65,536 tokens, 4 billion pairs, the documents' tiles are known without their pairs."""
    evaluated = watched(monkeypatch, tile_masks, "packed")
    mask = TileMask.documents(torch.arange(65536) // 1000)
    assert sum(call.args[0].numel() for call in evaluated) < 0.01 * 65536**2
    assert 0.01 < mask.density < 0.04


def test_it_is_pickled_moved_and_printed() -> None:
    mask = random_mask(300, 270, heads=2)
    again = pickle.loads(pickle.dumps(mask))
    assert torch.equal(again.dense(), mask.dense())
    assert mask.to("cpu") is mask
    assert mask.to("meta").shape == mask.shape
    assert {mask: 1}[mask] == 1
    assert mask != again
    head, *picture = repr(mask).splitlines()
    assert "heads 2, 300 x 270" in head
    assert f"{100 * mask.density:.1f} %" in head
    assert [len(row) for row in picture] == [3, 3, 3]
    assert set("".join(picture)) <= set("█▒·")
    signs = {-2: "·", -1: "█"}
    assert picture == ["".join(signs.get(kind, "▒") for kind in row) for row in mask.tiles[0, 0].tolist()]
    svg = mask.plot(head=1)
    assert svg.startswith("<svg")
    assert svg.count('fill-opacity="1.0"') == int((mask.tiles[0, 1] == -1).sum())
    assert svg.count('fill-opacity="0.4"') == int((mask.tiles[0, 1] >= 0).sum())
    with pytest.raises(AttributeError):
        mask.seqlen_q = 5  # type: ignore[misc]


def test_a_second_call_with_another_mask_of_the_same_shape_uses_that_mask() -> None:
    q, k, v = (torch.randn(1, 2, 200, 16) for _ in range(3))
    for seed in range(3):
        mask = random_mask(200, 200, seed=seed)
        for _ in range(2):
            torch.testing.assert_close(tw.attention(q, k, v, mask=mask), tw.attention(q, k, v, mask=mask.dense()))


def chunks_in_inference_mode() -> TileMask:
    with torch.inference_mode():
        return TileMask.chunks(7, 40)


def of_inference_tensors() -> TileMask:
    with torch.inference_mode():
        made = TileMask.chunks(7, 40)
        return TileMask(made.tiles.clone(), made.bits.clone(), 40, 40)


@pytest.mark.parametrize("part", ["tiles", "bits"])
@pytest.mark.parametrize("made", [lambda: TileMask.chunks(7, 40), chunks_in_inference_mode, of_inference_tensors])
@pytest.mark.parametrize("writing", [torch.enable_grad, torch.inference_mode])
def test_a_mask_that_was_written_into_is_refused(part: str, made: Callable[[], TileMask], writing: Any) -> None:
    q, mask = torch.randn(1, 1, 40, 16), made()
    for _ in range(2):  # the second call is the cached one
        tw.attention(q, q, q, mask=mask)
    with writing():
        getattr(mask, part).zero_()
        for call in (tw.attention, tw.explain):
            with pytest.raises(tw.InvalidProblem, match="written into"):
                call(q, q, q, mask=mask)


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: mask.dense(),
        lambda mask: mask.cut((0, 20), (0, 40)),
        lambda mask: mask.cut((1, 20), (0, 40)),
        lambda mask: mask.grow(torch.ones(1, 40, dtype=torch.bool)),
        lambda mask: ~mask,
        lambda mask: TileMask.chunks(5, 40) & mask,
        lambda mask: mask | TileMask.chunks(5, 40),
        lambda mask: TileMask.stack([mask]),
        lambda mask: TileMask.stack([mask], seqlen_k=50),
        lambda mask: mask.to("meta"),
        pickle.dumps,
        copy.deepcopy,
        copy.copy,
    ],
    ids=["dense", "cut", "cut inside", "grow", "~", "&", "|", "stack", "longer", "to", "pickle", "deepcopy", "copy"],
)
def test_no_other_mask_is_made_of_one_that_was_written_into(use: Callable[[TileMask], object]) -> None:
    mask = TileMask.chunks(7, 40)
    use(mask)
    mask.bits.zero_()
    with pytest.raises(tw.InvalidProblem, match="written into"):
        use(mask)


@pytest.mark.parametrize("number", [2**30, -7, -(2**31), 2**31 - 1])
def test_a_tile_that_names_no_bits_is_hidden_outside_of_kernels(number: int) -> None:
    """Writes through NumPy are not counted. tests/backends/guarded_memory.py has the same for the CPU's kernels."""
    q, mask = torch.randn(1, 1, 300, 8), random_mask(300, 300)
    hidden = mask.tiles.clone()
    hidden[..., 1] = EMPTY
    without, other = TileMask(hidden, mask.bits, 300, 300), random_mask(300, 300)
    wanted = tw.attention(q, q, q, mask=without, backend="reference")
    mask.tiles.numpy()[..., 1] = number
    assert torch.equal(tw.attention(q, q, q, mask=mask, backend="reference"), wanted)
    uses: tuple[Callable[[TileMask], TileMask], ...] = (
        lambda mask: mask & other,
        lambda mask: other | mask,
        lambda mask: mask.cut((3, 290), (0, 300)),
    )
    for use in uses:
        assert torch.equal(use(mask).dense(), use(without).dense())


def test_writing_into_the_tensors_a_mask_was_made_of() -> None:
    """Those that are evaluated may change afterwards; those that it consists of, and of which it was cut, may not."""
    ids, q = torch.arange(200) // 60, torch.randn(1, 1, 200, 8)
    dense = TileMask.documents(ids).dense()
    masks = [TileMask.documents(ids), TileMask.from_dense(dense)]
    before = masks[0].dense()
    ids.zero_()
    dense.zero_()
    assert all(torch.equal(mask.dense(), before) for mask in masks)
    whole = TileMask.documents(torch.arange(200) // 60)
    again, part = TileMask(whole.tiles, whole.bits, 200, 200), whole.cut((0, 128), (0, 200))
    whole.tiles.zero_()
    for mask, rows in ((again, q), (part, q[:, :, :128])):
        with pytest.raises(tw.InvalidProblem, match="written into"):
            tw.attention(rows, q, q, mask=mask)


def test_a_mask_written_into_between_forward_and_backward_is_refused() -> None:
    q, mask = torch.randn(1, 1, 40, 16, requires_grad=True), TileMask.chunks(7, 40)
    for _ in range(2):
        out = tw.attention(q, q, q, mask=mask)
        out.sum().backward()
    out = tw.attention(q, q, q, mask=mask)
    mask.bits.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_mask_made_in_inference_mode_can_be_trained_with() -> None:
    q = torch.randn(1, 1, 40, 16, requires_grad=True)
    grads = [
        torch.autograd.grad(tw.attention(q, q, q, mask=mask).sum(), q)[0]
        for mask in (chunks_in_inference_mode(), TileMask.chunks(7, 40))
    ]
    assert torch.equal(*grads)


def test_compiled_exported_and_vmapped() -> None:
    q, k, v = (torch.randn(2, 2, 300, 16, requires_grad=True) for _ in range(3))
    masks = [random_mask(300, 300), random_mask(300, 300, batch=2, seed=1), TileMask.prefix(50, 300)]

    def step(q: Tensor, k: Tensor, v: Tensor, mask: TileMask) -> Tensor:
        out, lse = tw.attention(q * 2, k, v, mask=mask, return_lse=True)
        return out.square().sum() + lse.clamp_min(-9.0).sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for mask in masks:
        for a, b in zip(*(torch.autograd.grad(f(q, k, v, mask), (q, k, v)) for f in (compiled, step)), strict=True):
            assert torch.equal(a, b)

    with pytest.raises(tw.InvalidProblem, match="the whole prefix"):
        torch.compile(lambda q: tw.attention(q, q, q, mask=masks[2], causal=True), backend="eager")(q)

    class Module(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return tw.attention(q, q, q, mask=masks[0])

    program = torch.export.export(Module(), (q.detach(),))
    assert torch.equal(program.module()(q), Module()(q))
    many = torch.randn(3, 2, 2, 300, 16)
    for mask in masks:
        found = torch.vmap(lambda x, mask=mask: tw.attention(x, x, x, mask=mask))(many)
        assert torch.equal(found, torch.stack([tw.attention(x, x, x, mask=mask) for x in many]))


def test_masks_can_be_made_in_a_compiled_function() -> None:
    def attend(q: Tensor, ids: Tensor) -> Tensor:
        return tw.attention(q, q, q, mask=TileMask.documents(ids) & tw.tile_mask(lambda _b, _h, i, j: i >= j, 200, 200))

    q, ids = torch.randn(1, 2, 200, 8), torch.arange(200) // 30
    assert torch.equal(torch.compile(attend, backend="eager")(q, ids), attend(q, ids))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_masks_can_be_made_under_torch_func() -> None:
    x, ids, cu = torch.randn(1, 2, 150, 8), torch.arange(150) // 40, torch.tensor([0, 30, 100])

    def made(zero: Tensor) -> TileMask:
        mask = TileMask.documents(ids + zero) & tw.tile_mask(lambda _b, _h, i, j: i + zero >= j, 150, 150)
        return mask | TileMask.from_cu_seqlens(cu + zero, 150).cut((0, 150), (0, 150))

    def attended(x: Tensor, mask: TileMask | None = None) -> Tensor:
        mask = made((x * 0).sum().long().detach()) if mask is None else mask
        return tw.attention(x, x, x, mask=mask).square().sum()

    outside = functools.partial(attended, mask=made(torch.tensor(0)))
    for transform in (torch.func.grad, lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).square().sum())):
        torch.testing.assert_close(transform(attended)(x), transform(outside)(x))
    torch.testing.assert_close(*(torch.func.jvp(f, (x,), (x,))[1] for f in (attended, outside)))
    with pytest.raises(tw.InvalidProblem, match=r"what torch\.vmap does not map"):
        torch.vmap(attended)(torch.stack([x, x]))


def test_gradients_agree_with_finite_differences() -> None:
    q, k, v = (torch.randn(1, 2, n, 3, dtype=torch.double, requires_grad=True) for n in (5, 7, 7))
    seen = torch.rand(1, 2, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    seen[:, :, 1] = False
    mask = TileMask.from_dense(seen)
    assert torch.autograd.gradcheck(lambda *x: tw.attention(*x, mask=mask, causal=True), (q, k, v))


def test_explain_counts_the_tiles() -> None:
    q = torch.empty(2, 4, 1024, 64)
    mask = TileMask.documents(torch.arange(1024) // 256)
    plan = tw.explain(q, q, q, mask=mask, causal=True)
    assert plan.backend == "cpu"
    assert plan.mask is not None
    # Four documents of 2 x 2 tiles each: causal leaves three of them, two on the diagonal.
    assert tuple(plan.mask.tiles) == (8 * 4, 8 * 8, 8 * (64 - 12))
    # All pairs of these documents that causal leaves.
    assert plan.flops_forward == 8 * 4 * (256 * 257 // 2) * 4 * 64
    # One count, in the report and in its dict.
    report = " ".join(str(plan).split())
    assert "128 x 128 of the mask, all heads: 96 of 512 visited (18.8 %), 64 of them masked, 416 skipped" in report
    assert report.count("visited") == 1
    assert plan.tiles == plan.mask.tiles
    assert plan.to_dict()["tiles"] == {"full": 32, "partial": 64, "skipped": 416, "visited": 96}
    assert tw.explain(q, q, q).mask is None
    half = q.bfloat16()
    there = tw.explain(half, half, half, mask=mask, device="h200")
    assert there.backend == "hopper"
    assert there.mask is not None
    assert tuple(there.mask.tiles) == (8 * 16, 0, 8 * 48)
    # Tensors without contents, for which the mask has some.
    shape = half.to("meta")
    assert tw.explain(shape, shape, shape, mask=mask, device="h200").mask == there.mask
    unread = tw.explain(shape, shape, shape, mask=mask.to("meta"), device="h200")
    assert unread.mask is None
    assert "the tile mask has no contents here: every tile counts" in " ".join(str(unread).split())
    there = tw.explain(half, half, half, mask=mask, causal=True, device="h200")
    assert there.backend == "triton"
    assert [name for name, reason in there.rejected if "tile mask" in reason] == ["hopper"]


def test_explain_counts_the_bytes_of_visited_tiles() -> None:
    """Four documents of 2 x 2 tiles: each block of queries reads a quarter of the keys."""
    q = torch.empty(1, 1, 1024, 64, dtype=torch.bfloat16, requires_grad=True)
    documents, everything = (TileMask.documents(torch.arange(1024) // size) for size in (256, 1024))
    plain, all_seen, some = (tw.explain(q, q, q, mask=m, device="h200") for m in (None, everything, documents))
    grid = plain.tile
    assert all_seen.tiled == plain.tiled
    forward = 1024 * (64 + 64) + (1024 // grid.block_m) * 256 * (64 + 64)
    assert tw.explain(*[q.detach()] * 3, mask=documents, device="h200").tiled.traffic.elements == forward
    backward = 1024 * 64 * 2 + 1024 * 128 * 2 + (1024 // grid.block_n) * 256 * 128 + 1024 * 64
    assert some.tiled.traffic.elements == forward + backward
    assert some.tiled.bytes_moved < 0.5 * plain.tiled.bytes_moved
    drawn = {at.keys: at.tiled for at in traffic_by_length(some)}
    assert drawn[1024] == some.tiled.bytes_moved


def test_explain_counts_the_pairs_of_packed_sequences_and_of_edges() -> None:
    short, long = (TileMask.from_dense(torch.ones(n, n, dtype=torch.bool)) for n in (100, 1000))
    q, cu = torch.empty(1100, 2, 16), torch.tensor([0, 100, 1100], dtype=torch.int32)
    plan = tw.explain(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=TileMask.stack([short, long]))
    assert plan.flops_forward == 2 * 4 * 16 * (100**2 + 1000**2)
    assert plan.mask is not None
    # Past the end of its own mask a tile has bits.
    assert tuple(plan.mask.tiles) == (2 * 64, 2, 0)
    corner = torch.zeros(130, 130, dtype=torch.bool)
    corner[128:, 128:] = True
    plan = tw.explain(*q[:130].transpose(0, 1)[None].expand(3, -1, -1, -1, -1), mask=TileMask.from_dense(corner))
    assert plan.flops_forward == 2 * 4 * 16 * 2 * 2


PREFIX, GRID = TileMask.prefix(20, 200), TileMask.neighbourhood((10, 20), (5, 5))
TREE, LOOSE_TREE = TileMask.tree([-1, *range(199)]), TileMask.tree([*range(1, 200), -1])
CROSSED = TileMask.documents(torch.arange(200) // 60, torch.arange(200) // 90)
ALL = tile_mask(lambda _b, _h, _i, j: j >= 0, 200, 200)


@pytest.mark.parametrize(
    ("mask", "flags", "message"),
    [
        (PREFIX, {"causal": True}, "causal: expected False with TileMask.prefix"),
        (PREFIX, {"window": (None, 0)}, "window: expected None with TileMask.prefix"),
        (PREFIX, {"window": (50, None)}, "every query sees the whole prefix"),
        (GRID, {"causal": True}, "causal: expected False with TileMask.neighbourhood"),
        (TileMask.neighbourhood(200, 9), {"window": (4, 4)}, "window=(n - 1, 0)"),
        (TREE, {"window": (50, None)}, "a node's position is its depth"),
        (TREE, {"causal": True, "window": (50, 0)}, "window: expected None with TileMask.tree"),
        (LOOSE_TREE, {"causal": True}, "parents come after their children"),
        (CROSSED, {"causal": True}, "attention_varlen aligns each"),
        (TileMask.documents(IDS[:200], IDS[:200].flip(0)), {"window": (9, 9)}, "window: expected None"),
    ],
)
def test_flags_that_would_take_away_what_a_mask_promises_are_refused(
    mask: TileMask, flags: dict[str, Any], message: str
) -> None:
    q = torch.randn(1, 2, 200, 8)
    everything = TileMask(mask.tiles, mask.bits, 200, 200)
    made = [mask, mask & ALL, ALL & mask, mask | mask, mask.cut((0, 200), (0, 200)), TileMask.stack([mask])]
    made += [pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), mask.to("cpu")]
    for one in made:
        # The cached call of another mask of the same shape is not used.
        for _ in range(2):
            tw.attention(q, q, q, mask=everything, **flags)
            for call in (tw.attention, tw.explain):
                with pytest.raises(tw.InvalidProblem) as refusal:
                    call(q, q, q, mask=one, **flags)
                assert message in str(refusal.value)
        tw.attention(q, q, q, mask=one)
        tw.attention(q, q, q, mask=one, window=(None, None))
    with pytest.raises(tw.InvalidProblem):
        tw.explain(q.to("meta"), q.to("meta"), q.to("meta"), mask=mask, **flags)


@pytest.mark.parametrize("rows", [200, 130])
@pytest.mark.parametrize(
    ("made", "flags"),
    [
        (lambda rows: TileMask.chunks(70, rows, 200), {"causal": True}),
        (lambda rows: TileMask.chunks(70, rows, 200), {"causal": True, "window": (9, 0)}),
        (lambda rows: TileMask.chunks(70, rows, 200), {"window": (9, 9)}),
        (lambda rows: TileMask.documents(SCATTERED[200 - rows : 200], SCATTERED[:200]), {"causal": True}),
        (lambda rows: TileMask.documents(SCATTERED[200 - rows : 200], SCATTERED[:200]), {"window": (20, 3)}),
        (lambda rows: TileMask.tree([-1, *range(rows - 1)], 200 - rows), {"causal": True}),
        (lambda rows: tile_mask(lambda _b, _h, i, j: (i + j) % 3 > 0, rows, 200), {"causal": True, "window": (50, 0)}),
    ],
)
def test_other_flags_join_the_mask(made: Callable[[int], TileMask], flags: dict[str, Any], rows: int) -> None:
    """A query sees what the mask and every flag show it."""
    mask, q, k = made(rows), torch.randn(1, 2, rows, 8), torch.randn(1, 2, 200, 8)
    left, right = flags.get("window", (None, None))
    distance = torch.arange(200)[None, :] - torch.arange(200 - rows, 200)[:, None]
    seen = mask.dense()
    seen = seen & (distance <= 0) if flags.get("causal") else seen
    seen = seen if left is None else seen & (distance >= -left) & (distance <= right)
    torch.testing.assert_close(tw.attention(q, k, k, mask=mask, **flags), tw.attention(q, k, k, mask=seen))


@pytest.mark.parametrize(
    "made",
    [
        lambda rows, keys: TileMask.chunks(16, rows, keys),
        lambda rows, keys: TileMask.prefix(5, rows, keys),
        lambda rows, keys: TileMask.tree([-1, *range(rows - 1)], keys - rows),
    ],
    ids=["chunks", "prefix", "tree"],
)
def test_masks_aligned_with_the_last_key_are_made_for_each_packed_sequence(made: Callable[..., TileMask]) -> None:
    """One of the longest sequence would be aligned with keys that shorter ones do not have."""
    rows, lengths = 3, (100, 50)
    q, k = torch.randn(2 * rows, 2, 8), torch.randn(150, 2, 8)
    cu_q, cu_k = torch.tensor([0, rows, 2 * rows], dtype=torch.int32), torch.tensor([0, 100, 150], dtype=torch.int32)
    table, ends = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    pages = torch.zeros(2, 100, 2, 8)
    pages[0], pages[1, :50] = k[:100], k[100:]

    def packed(mask: TileMask) -> Tensor:
        return tw.attention_varlen(q, k, k, cu_q, cu_k, mask=mask)

    def paged(mask: TileMask) -> Tensor:
        return tw.attention_paged(q, pages, pages, table, ends, cu_seqlens_q=cu_q, max_seqlen_q=rows, mask=mask)

    masks = [made(rows, keys) for keys in lengths]
    apart = [
        tw.attention(*(x.transpose(0, 1)[None] for x in (q[rows * i :][:rows], part, part)), mask=mask)
        for i, (part, mask) in enumerate(zip(k.split(lengths), masks, strict=True))
    ]
    expected = torch.cat([x[0].transpose(0, 1) for x in apart])
    part = made(100, 100).cut((97, 100), (0, 100))
    assert torch.equal(part.dense(), masks[0].dense())
    for call in (packed, paged):
        for mask in (masks[0], part, ~masks[0], masks[0] & part):
            with pytest.raises(tw.InvalidProblem, match=r"TileMask\.stack"):
                call(mask)
        torch.testing.assert_close(call(TileMask.stack(masks)), expected)


def test_neighbourhoods_of_packed_sequences_end_where_these_do() -> None:
    lengths = (100, 50)
    cu, q = torch.tensor([0, 100, 150], dtype=torch.int32), torch.randn(150, 2, 8)
    masks = [TileMask.neighbourhood(length, 9) for length in lengths]
    expected = torch.cat(
        [
            tw.attention(*(part[None],) * 3, mask=mask, layout="bshd")[0]
            for part, mask in zip(q.split(lengths), masks, strict=True)
        ]
    )
    with pytest.raises(tw.InvalidProblem, match=r"TileMask\.stack"):
        tw.attention_varlen(q, q, q, cu, cu, mask=masks[0])
    torch.testing.assert_close(tw.attention_varlen(q, q, q, cu, cu, mask=TileMask.stack(masks)), expected)


def test_flags_beside_a_part_whose_last_query_is_not_the_last_key() -> None:
    """They would be aligned with a key that the whole mask aligns with another query."""
    mask, q = TileMask.documents(IDS[:200]), torch.randn(1, 2, 200, 8)
    whole = tw.attention(q, q, q, mask=mask, causal=True)
    for first, end in ((0, 128), (130, 150)):
        part = mask.cut((first, end), (0, end))
        keys = q[:, :, :end]
        torch.testing.assert_close(
            tw.attention(q[:, :, first:end], keys, keys, mask=part, causal=True), whole[:, :, first:end]
        )
    longer = torch.randn(1, 2, 203, 8)
    tw.attention(longer, longer, longer, mask=mask.grow(torch.ones(3, 203, dtype=torch.bool)), causal=True)
    more = mask.grow(torch.ones(3, 200, dtype=torch.bool))
    moved = (mask.cut((0, 128), (0, 200)), mask.cut((5, 60), (0, 200)), more, more & more)
    flags: list[dict[str, Any]] = [{"causal": True}, {"window": (9, None)}, {"window": (None, 9)}]
    for part in moved:
        rows = torch.randn(1, 2, part.seqlen_q, 8)
        tw.attention(rows, q, q, mask=part)
        for some in flags:
            with pytest.raises(tw.InvalidProblem, match=r"TileMask\.cut or grow"):
                tw.attention(rows, q, q, mask=part, **some)


def test_documents_over_pages_end_where_the_sequence_does() -> None:
    """A mask for pages is longer than the sequence, so its last key says nothing of the last query."""
    q, first, end = torch.randn(1, 2, 150, 8), 130, 150
    expected = tw.attention(q, q, q, mask=TileMask.documents(SCATTERED[:end]), causal=True)[:, :, first:]
    ids = torch.cat([SCATTERED[:end], torch.full((256 - end,), -1)])
    rows, pages = q[0].transpose(0, 1), torch.zeros(4, 64, 2, 8)
    pages.view(256, 2, 8)[:end] = rows
    table, lengths, totals = (torch.tensor(x, dtype=torch.int32) for x in ([[0, 1, 2, 3]], [end], [0, end - first]))
    for mask in (TileMask.documents(ids[first:end], ids), TileMask.documents(ids).cut((first, end), (0, 256))):
        out = tw.attention_paged(
            rows[first:], pages, pages, table, lengths, cu_seqlens_q=totals, max_seqlen_q=end - first, mask=mask,
            causal=True,
        )  # fmt: skip
        torch.testing.assert_close(out.transpose(0, 1)[None], expected)


CAUSAL: Any = "causal"
CUBE: Any = (4, 4, 4)
FUNCTION: Any = torch.ge


class Odd(Tensor):
    """Its memory may mean anything."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


Q = torch.zeros(2, 4, 200, 8)
MASK = tile_mask(lambda _b, _h, i, j: i >= j, 200, 200)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tw.attention(Q, Q, Q, mask=MASK.cut((0, 199), (0, 200))), "of 200 queries x 200 keys, got one of 199"),
        (lambda: tw.attention(Q[:, :, :1], Q, Q, mask=MASK), "of 1 query x 200 keys"),
        (lambda: tw.attention(Q, Q, Q, mask=tile_mask(MASK_OF_HEADS, 200, 200, heads=3)), "4 heads, or 1"),
        (lambda: tw.attention(Q, Q, Q, mask=MASK.to("meta")), "on cpu as q is, got meta"),
        (lambda: tw.attention(Q, Q, Q, mask=CAUSAL), "a torch.Tensor, a TileMask or None, got str"),
        (lambda: tw.attention(Q, Q, Q, mask=FUNCTION), "tile_mask takes a function"),
        (lambda: tile_mask(CAUSAL, 5, 5), "a function of b, h, i, j"),
        (lambda: tile_mask(lambda _b, _h, i, j: i - j, 5, 5), "got torch.int64 of 0 dimensions"),
        (lambda: tile_mask(lambda _b, _h, _i, _j: True, 5, 5), "got True"),  # type: ignore[arg-type,return-value]
        (lambda: tile_mask(lambda _b, _h, i, j: (i >= j)[None], 5, 5), "of 1 dimension"),
        (lambda: tile_mask(lambda _b, _h, i, j: i >= j, 5.0, 5), "seqlen_q: expected an integer"),  # type: ignore[arg-type]
        (lambda: tile_mask(lambda _b, _h, i, j: i >= j, 2**30, 2**30), "at most 268,435,456 tiles"),
        (lambda: TileMask.from_dense(torch.zeros(5, 5)), "a boolean tensor"),
        (lambda: TileMask.from_dense(torch.zeros(5, dtype=torch.bool)), "of 2 to 4 dimensions"),
        (lambda: TileMask.documents(torch.zeros(5)), "an int32 or int64 tensor"),
        (lambda: TileMask.documents(torch.zeros(5, dtype=torch.int16)), "an int32 or int64 tensor"),
        (lambda: TileMask.documents(IDS.as_subclass(Odd)), "a subclass with no operations of its own, got Odd"),
        (lambda: TileMask.from_cu_seqlens(torch.zeros(5), 5), "a 1-D int32 or int64 tensor"),
        (lambda: TileMask.from_cu_seqlens(torch.tensor([2, 5]), 5), "0 as its first entry"),
        (lambda: TileMask.from_cu_seqlens(torch.tensor([0, 4, 3]), 5), "never decrease"),
        (lambda: TileMask.from_cu_seqlens(torch.tensor([0, 6]), 5), "at most 5"),
        (lambda: TileMask.from_cu_seqlens(IDS[:0], 5), "one entry or more"),
        (lambda: TileMask.from_cu_seqlens(IDS.to("meta"), 5), "with contents"),
        (lambda: TileMask.prefix(torch.tensor([True]), 5), "lengths: expected integers, got torch.bool"),
        (lambda: TileMask.prefix(2.5, 5), "lengths: expected integers, got torch.float32"),  # type: ignore[arg-type]
        (lambda: TileMask.prefix(IDS[None], 5), "lengths: expected integers"),
        (lambda: TileMask.prefix(CAUSAL, 5), "lengths: expected integers, got str"),
        (lambda: TileMask.documents(IDS, IDS.to("meta")), "ids_k: expected a tensor on cpu as ids is"),
        (lambda: TileMask.from_intervals(IDS, IDS.to("meta"), 400), "ends: expected a tensor on cpu as starts is"),
        (lambda: TileMask.from_intervals(IDS, IDS[:5], 400), "shape"),
        (lambda: TileMask.from_intervals(IDS, IDS, 400, of="heads"), "'keys' or 'queries'"),
        (lambda: TileMask.neighbourhood(CUBE, 3), "one number per axis"),
        (lambda: TileMask.from_block_mask(MASK), "a BlockMask"),
        (lambda: TileMask.stack([]), "masks of batch 1"),
        (lambda: TileMask.stack([TileMask.chunks(2, 5)], seqlen_k=0), "at least 5 and 5"),
        (lambda: TileMask.stack([3]), "masks of batch 1, got ['int']"),  # type: ignore[list-item]
        (lambda: TileMask.stack([random_mask(9, 9, heads=n) for n in (2, 3)]), "masks of 3 heads, or 1, got [2, 3]"),
        (lambda: TileMask.tree(CAUSAL), "parents: expected an int32 or int64 tensor"),
        (lambda: MASK & MASK.cut((0, 128), (0, 200)), "a mask of 200 x 200"),
        (lambda: MASK & MASK.to("meta"), "a mask on cpu"),
        (lambda: random_mask(9, 9, heads=2) & random_mask(9, 9, heads=3), "broadcasts"),
        (lambda: MASK.cut((0, 201), (0, 200)), "end <= 200"),
        (lambda: MASK.cut(3, (0, 200)), "a tuple (start, end)"),  # type: ignore[arg-type]
        (lambda: tile_mask(lambda _b, _h, i, j: i >= j and j < 3, 5, 5), "Use torch.where, &, | and ~"),
        (lambda: MASK.grow(torch.ones(1, 199, dtype=torch.bool)), "200 keys or more"),
        (lambda: MASK.grow(torch.ones(1, 200)), "a boolean tensor"),
        (lambda: TileMask(MASK.tiles, MASK.bits[:1], 200, 200), "an index below 1"),
        (lambda: TileMask(MASK.tiles, MASK.bits[:, 0], 200, 200), "shape (number, 4, 128)"),
        (lambda: TileMask(MASK.tiles, MASK.bits.to("meta"), 200, 200), "device cpu"),
        (lambda: TileMask(MASK.tiles.long(), MASK.bits, 200, 200), "an int32 tensor"),
        (lambda: TileMask(MASK.tiles, MASK.bits, 200, 200, ("speed",)), "names among prefix"),
        (lambda: TileMask(MASK.tiles, MASK.bits, 200, 300), "shape (batch or 1, heads or 1, 2, 3)"),
    ],
)
def test_what_is_wrong_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(tw.InvalidProblem) as refusal:
        call()
    assert message in str(refusal.value)


def MASK_OF_HEADS(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: N802
    return (i >= j) & (h != 1)


def test_packed_sequences_need_their_longest_lengths_on_a_gpu() -> None:
    """As for a dense mask: reading them would make the CPU wait."""
    q = torch.empty(200, 4, 8, device="meta")
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    with pytest.raises(tw.InvalidProblem, match="max_seqlen_q, max_seqlen_k"):
        tw.attention_varlen(q, q, q, cu, cu, mask=MASK.to("meta"))
