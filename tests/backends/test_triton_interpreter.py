"""The Triton kernels on a CPU, in Triton's interpreter: the device's tile ranges, quantising, the conformance
suite cut small, and the tests of other files that are for it.

Triton decides when a kernel is defined whether it is interpreted, so these tests run in a process of their own.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, valid-type, name-defined"
# ruff: noqa: N803

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise
from interpreting import interpret
from making import watched
from tilewise import fp8
from tilewise.backends.gpu.records import Window
from tilewise.masks import Band, TileGrid, TileKind
from tilewise.testing.tiles import overridden

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
primitives = pytest.importorskip("tilewise.backends.triton.primitives")
configs = pytest.importorskip("tilewise.backends.triton.configs")
symbols = pytest.importorskip("tilewise.backends.gpu.symbols")
planning = pytest.importorskip("tilewise.backends.triton.planning")
quantising = pytest.importorskip("tilewise.backends.triton.quantising")
key_range, query_range = primitives.key_range, primitives.query_range
sequence_of = primitives.sequence_of
DeviceBand, Traits = Window, planning.Traits

INTERPRETED = bool(triton.knobs.runtime.interpret)

pytestmark = pytest.mark.slow
HERE = Path(__file__)
# The suite in parts that processes can share.
LARGE = ("special_cases", "single_features", "fp8", "left_alone", "outside_the_lengths", "tangents")
PARTS = (*LARGE[:-1], "tangents and dense", "tangents and not dense", f"not ({' or '.join(LARGE)})")
# A few tests of the small suite for the fast run, one for each kernel and loader; all of it with `-m exhaustive`.
# Tangents of dense and packed sequences are also in `test_derivatives_in_boxes`.
SAMPLE = "(gqa or varlen_padding or paged_decode_strided or fp32_bias_and_sinks) and not (tangents and fp32 and gqa)"


# Files with tests that run in the interpreter alone: all of them in one process, whose start takes as long as most.
FILES = (
    str(HERE),
    str(HERE.with_name("test_triton_decode.py")),
    str(HERE.with_name("test_triton_prefix.py")),
    str(HERE.parents[1] / "kv" / "test_triton_serving.py"),
)


@pytest.mark.skipif(INTERPRETED, reason="already in the interpreter")
@pytest.mark.parametrize(
    "part", ["not exhaustive", pytest.param("exhaustive", marks=[pytest.mark.exhaustive, pytest.mark.timeout(1800)])]
)
def test_in_the_interpreter(part: str) -> None:
    interpret(*FILES, "-m", part)


@pytest.mark.skipif(INTERPRETED, reason="already in the interpreter")
def test_a_sample_of_the_conformance_suite() -> None:
    suite = str(HERE.with_name("test_conformance.py"))
    interpret(suite, "--backend", "triton", "--size", "small", "-m", "not slow", "-k", SAMPLE)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.skipif(INTERPRETED, reason="already in the interpreter")
@pytest.mark.parametrize("part", PARTS)
def test_the_conformance_suite(part: str) -> None:
    suite = str(HERE.with_name("test_conformance.py"))
    interpret(suite, "--backend", "triton", "--size", "small", "-m", "not slow", "-k", part)


LENGTHS = (1, 5, 16, 37)
WINDOWS = (None, 0, 3)
BANDS = [Band(q, k, left, right) for q, k, left, right in itertools.product(LENGTHS, LENGTHS, WINDOWS, (*WINDOWS, -2))]
GRID = TileGrid(16, 8)


@triton.jit
def ranges_kernel(
    found, asked, count, OF_KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Write down the tile range of every row of (block, seqlen_q, seqlen_k, left, right)."""
    lane = tl.arange(0, LANES)
    mask = lane < count
    block = tl.load(asked + lane * 5, mask=mask, other=0)
    seqlen_q = tl.load(asked + lane * 5 + 1, mask=mask, other=0)
    seqlen_k = tl.load(asked + lane * 5 + 2, mask=mask, other=0)
    band = DeviceBand(
        tl.load(asked + lane * 5 + 3, mask=mask, other=0), tl.load(asked + lane * 5 + 4, mask=mask, other=0)
    )
    if OF_KEYS:
        begin, full_begin, full_end, end = key_range(block * BLOCK_M, seqlen_q, seqlen_k, band, BLOCK_M, BLOCK_N, T)
    else:
        begin, full_begin, full_end, end = query_range(block * BLOCK_N, seqlen_q, seqlen_k, band, BLOCK_M, BLOCK_N, T)
    tl.store(found + lane * 4, begin, mask=mask)
    tl.store(found + lane * 4 + 1, full_begin, mask=mask)
    tl.store(found + lane * 4 + 2, full_end, mask=mask)
    tl.store(found + lane * 4 + 3, end, mask=mask)


def device_ranges(*, of_keys: bool) -> Iterator[tuple[Band, int, list[int]]]:
    """Every band, block and (begin, full_begin, full_end, end) by the device code: bands of a kind in one launch."""
    sides = [(left, right) for left in (False, True) for right in (False, True)]
    for has_left, has_right in sides:
        bands = [b for b in BANDS if (b.left is not None, b.right is not None) == (has_left, has_right)]
        asked = [
            (band, block)
            for band in bands
            for block in range(-(-band.seqlen_q // GRID.block_m) if of_keys else -(-band.seqlen_k // GRID.block_n))
        ]
        rows = [(block, b.seqlen_q, b.seqlen_k, b.left or 0, b.right or 0) for b, block in asked]
        found = torch.full((len(rows), 4), -1, dtype=torch.int32)
        facts: dict[str, Any] = dict.fromkeys(Traits.__dataclass_fields__, False) | {"PRECISION": "ieee"}
        facts |= {"HAS_LEFT": has_left, "HAS_RIGHT": has_right}
        ranges_kernel[(1,)](
            found, torch.tensor(rows, dtype=torch.int32), len(rows), OF_KEYS=of_keys, BLOCK_M=GRID.block_m,
            BLOCK_N=GRID.block_n, LANES=triton.next_power_of_2(len(rows)), T=Traits(**facts),
        )  # fmt: skip
        yield from ((band, block, row) for (band, block), row in zip(asked, found.tolist(), strict=True))


def blocks_between(begin: int, end: int, block: int) -> set[int]:
    return set(range(begin // block, -(-end // block))) if begin < end else set()


@pytest.mark.skipif(not INTERPRETED, reason="only in the interpreter")
def test_key_ranges_mirror_masks() -> None:
    for band, m_block, (begin, full_begin, full_end, end) in device_ranges(of_keys=True):
        tiles = {tile.n_block: tile.kind for tile in band.key_tiles(m_block, GRID)}
        full = blocks_between(full_begin, full_end, GRID.block_n)
        edge = blocks_between(begin, min(full_begin, end), GRID.block_n)
        edge |= blocks_between(full_end, end, GRID.block_n)
        assert full == {n for n, kind in tiles.items() if kind is TileKind.FULL}, (band, m_block)
        assert edge == {n for n, kind in tiles.items() if kind is TileKind.PARTIAL}, (band, m_block)


@pytest.mark.skipif(not INTERPRETED, reason="only in the interpreter")
def test_query_ranges_mirror_masks() -> None:
    for band, n_block, (begin, full_begin, full_end, end) in device_ranges(of_keys=False):
        visited = {tile.m_block for tile in band.query_tiles(n_block, GRID)}
        full = blocks_between(full_begin, full_end, GRID.block_m)
        edge = blocks_between(begin, min(full_begin, end), GRID.block_m)
        edge |= blocks_between(full_end, end, GRID.block_m)
        assert full | edge == visited, (band, n_block)
        assert not full & edge
        # Whole tiles are read without a row mask and scored without a band mask; ragged keys do not matter.
        n_stop = min((n_block + 1) * GRID.block_n, band.seqlen_k)
        for m_block in full:
            rows = range(m_block * GRID.block_m, (m_block + 1) * GRID.block_m)
            assert all(band.sees(m, n) for m in rows for n in range(n_block * GRID.block_n, n_stop))


@triton.jit
def search_kernel(found, slots, cu_seqlens, batch, BLOCK: tl.constexpr):
    """The sequence of each slot, and its first slot."""
    pid = tl.program_id(0)
    sequence, first_slot = sequence_of(tl.load(slots + pid), cu_seqlens, batch, BLOCK)
    tl.store(found + 2 * pid, sequence)
    tl.store(found + 2 * pid + 1, first_slot)


@pytest.mark.skipif(not INTERPRETED, reason="only in the interpreter")
def test_slots_of_many_sequences() -> None:
    """More sequences than are searched at a time, many of them empty."""
    lengths = [(7 * i) % 40 if i % 3 else 0 for i in range(1100)]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    first = starts[:-1] // 16 + torch.arange(1100, dtype=torch.int32)
    slots = torch.tensor(
        [0, 1, 511, 512, 513, int(first[511]), int(first[512]) - 1, int(first[-1]), 10**6], dtype=torch.int32
    )
    found = torch.zeros(len(slots), 2, dtype=torch.int32)
    search_kernel[(len(slots),)](found, slots, starts, 1100, BLOCK=16)
    want = torch.searchsorted(first, slots, right=True).to(torch.int32) - 1
    assert torch.equal(found[:, 0], want)
    assert torch.equal(found[:, 1], first[want])


@pytest.mark.skipif(not INTERPRETED, reason="only in the interpreter")
@pytest.mark.parametrize(
    ("flags", "loads"),
    [
        ({"causal": True}, "boxes"),
        ({"causal": True}, "apart"),
        pytest.param({"window": (7, 3)}, "boxes", marks=pytest.mark.exhaustive),
        pytest.param({}, "boxes", marks=pytest.mark.exhaustive),
        pytest.param({"causal": True}, "pointers", marks=pytest.mark.exhaustive),
        pytest.param({}, "apart", marks=pytest.mark.exhaustive),
        pytest.param({"window": (7, 3), "softcap": 3.0}, "apart", marks=pytest.mark.exhaustive),
    ],
    ids=["causal", "causal_apart", "window", "full", "causal_by_pointers", "apart", "window_apart"],
)
def test_joined_loops(flags: dict[str, Any], loads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper: masked tiles in the loop of the others, for packed sequences with ragged ends and shared heads.
    Boxes pad columns. "apart" is as for wide heads: dP comes first, dK and dV have a kernel each.
    """
    driver = importlib.import_module("tilewise.backends.gpu.driver")
    made = watched(monkeypatch, driver, "materialised")
    generator = torch.Generator().manual_seed(1)
    lengths = (37, 0, 5)
    dim = 16 if loads == "pointers" else 12
    q, k, v, dout = (torch.randn(sum(lengths), heads, dim, generator=generator) for heads in (2, 1, 1, 2))
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    leaves = tuple(t.requires_grad_() for t in (q, k, v))
    found = []
    tile = configs.Config(16, 16, 4, 1, boxes=loads != "pointers", joined=True)
    if loads == "apart":
        tile = replace(tile, dp_first=True, split=True, dv=replace(tile, block_m=32, split=True))
    for backend in ("triton", "reference"):
        with overridden({"dkdv": tile, "dq": tile}):
            out = tilewise.attention_varlen(q, k, v, bounds, bounds, backend=backend, **flags)
            found.append(torch.autograd.grad(out, leaves, dout))
    # q and dout for dK and dV, whose statistics lie in the workspace, k and v for dQ
    tiles = {call.args[0].address.name for call in made if isinstance(call.args[0], symbols.Tile)}
    assert tiles == (set() if loads == "pointers" else {"q", "dout", "k", "v", "workspace"})
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="only in the interpreter")
@pytest.mark.parametrize(
    ("causal", "joined", "most_programs"),
    [
        (True, False, 0),
        pytest.param(False, True, 0, marks=pytest.mark.exhaustive),
        pytest.param(True, True, 65535, marks=pytest.mark.exhaustive),
    ],
)
def test_boxes(causal: bool, joined: bool, most_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles by descriptors, in two loops and in one: ragged ends, both layouts, heads that share their keys, and packed
    sequences whose neighbours hold NaN, by a grid of (head, place, wave) and where that is too long by one row of
    programs.
    """
    torch.manual_seed(0)
    launch = importlib.import_module("tilewise.backends.triton.launch")
    monkeypatch.setattr(launch, "MAX_GRID_SIDE", most_programs)
    made = watched(monkeypatch, launch, "box_descriptors")
    q, k, v = torch.randn(2, 2, 37, 16), torch.randn(2, 1, 53, 16), torch.randn(2, 1, 53, 16)
    starts = torch.tensor([0, 5, 5, 38, 55], dtype=torch.int32)
    row_q, row_k, row_v = (torch.randn(58, 4, 16) for _ in range(3))
    bad_q, bad_k, bad_v = (
        torch.where(torch.arange(58)[:, None, None] >= 38, torch.nan, x) for x in (row_q, row_k, row_v)
    )
    tile = configs.Config(16, 16, 4, 1, boxes=True, hold_queries=True, joined=joined, heads_per_wave=3)
    with overridden({"forward": tile}):
        out = tilewise.attention(q, k, v, causal=causal, backend="triton")
        q2, k2, v2 = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        other = tilewise.attention(q2, k2, v2, causal=causal, layout="bshd", backend="triton")
        packed = tilewise.attention_varlen(bad_q, bad_k, bad_v, starts, starts, causal=causal, backend="triton")
        of_all = tilewise.attention(q, *(x.expand(2, 2, 53, 16) for x in (k, v)), causal=causal, backend="triton")
    want = tilewise.attention(q.double(), k.double(), v.double(), causal=causal, backend="reference")
    torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-6)
    assert torch.equal(of_all, out)
    assert torch.equal(other.transpose(1, 2), out)
    row_q, row_k, row_v = (x.double() for x in (row_q, row_k, row_v))
    want = tilewise.attention_varlen(row_q, row_k, row_v, starts, starts, causal=causal, backend="reference")
    torch.testing.assert_close(packed[:38].double(), want[:38], rtol=0, atol=2e-6)
    assert not packed[55:].any()
    assert len(made) >= 4
    assert all(call.result["q_desc"] is not None for call in made)  # and not by pointers


@pytest.mark.skipif(not INTERPRETED, reason="only in the interpreter")
@pytest.mark.parametrize(
    "flags",
    [
        {"causal": True},
        pytest.param({}, marks=pytest.mark.exhaustive),
        pytest.param({"window": (7, 3), "softcap": 3.0}, marks=pytest.mark.exhaustive),
    ],
    ids=["causal", "full", "capped_window"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_derivatives_in_boxes(flags: dict[str, Any], packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tangents and second derivatives as on Hopper: tiles by descriptors in one loop, ragged ends, rows without a key,
    shared heads, and packed sequences that are followed by NaN.
    """
    torch.manual_seed(0)
    higher = importlib.import_module("tilewise.backends.triton.launch_higher")
    made = watched(monkeypatch, higher, "box_descriptors")
    lengths, pad = (37, 0, 21), 3 * packed
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    shapes: list[tuple[int, ...]] = [(2, 4, 37, 16), (2, 2, 29, 16), (2, 2, 29, 16)]
    if packed:
        shapes = [(sum(lengths) + pad, heads, 16) for heads in (4, 2, 2)]
    drawn = [torch.randn(shape) for shape in (*shapes, *shapes, shapes[0])]
    found = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        *operands, dot_q, dot_k, dot_v, dout = (t.to(dtype) for t in drawn)
        if packed and backend == "triton":
            for tensor in (*operands, dot_q, dot_k, dot_v):
                tensor[sum(lengths) :] = torch.nan
        leaves = [t.requires_grad_() for t in (*operands, dout)]

        tile = configs.Config(16, 16, 4, 1, boxes=True)
        with overridden(dict.fromkeys(("tangent", "tangent_only", "twice_dkdv", "twice_dq"), tile)):
            q, k, v = leaves[:3]
            if packed:
                out = tilewise.attention_varlen(q, k, v, bounds, bounds, backend=backend, **flags)
            else:
                out = tilewise.attention(q, k, v, backend=backend, **flags)
            first = torch.autograd.grad(out, leaves[:3], leaves[3], create_graph=True)
            second = torch.autograd.grad(first, leaves, (dot_q, dot_k, dot_v))
        found.append([t[: sum(lengths)] if packed else t for t in second])
        if packed:
            assert not any(t[sum(lengths) :].any() for t in second)
    assert [call.result["q_desc"] is not None for call in made] == [True] * 3  # tangents, dK and dV, dQ
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.skipif(not INTERPRETED, reason="only in the interpreter")
@pytest.mark.parametrize("flags", [{}, {"causal": True}, {"window": (7, 3)}], ids=["full", "causal", "window"])
def test_few_keys_in_boxes(flags: dict[str, Any]) -> None:
    """One loop for all keys and a grid of (tile, head, sequence): ragged ends, rows without a key, shared heads."""
    torch.manual_seed(0)
    tile = configs.Config(16, 16, 4, 1, boxes=True, hold_queries=True, joined=True, heads_per_wave=1)
    q, k, v = torch.randn(2, 4, 37, 16), torch.randn(2, 2, 29, 16), torch.randn(2, 2, 29, 16)
    with overridden({"forward": tile}):
        out, lse = tilewise.attention(q, k, v, **flags, return_lse=True, backend="triton")
    wide = (x.double() for x in (q, k, v))
    want, want_lse = tilewise.attention(*wide, **flags, return_lse=True, backend="reference")
    torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), want_lse.double(), rtol=0, atol=2e-6)


def quantised_alike(x: torch.Tensor, granularity: Any, *, rotation: bool = False, **options: Any) -> bool:
    """Whether the kernel and plain torch write the same bits."""
    expected = fp8.quantize(x, granularity=granularity, rotation=rotation, **options)
    given = options.get("scale")
    data, scale = quantising.quantize(
        x, granularity, expected.block, expected.layout, options.get("cu_seqlens"), rotation=rotation,
        given=None if given is None else torch.as_tensor(given), max_seqlen=options.get("max_seqlen"),
    )  # fmt: skip
    return torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8)) and torch.equal(scale, expected.scale)


@pytest.mark.skipif(not INTERPRETED, reason="only in the interpreter")
def test_quantising_writes_the_bits_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    odd = torch.randn(1, 2, 150, 40, generator=generator).bfloat16()
    odd[0, 0, 3, 4], odd[0, 1, 3, 4] = torch.nan, torch.inf
    odd[0, 0, 7] *= 1e-4
    packed = torch.randn(150, 2, 24, generator=generator).half()
    cu_seqlens = torch.tensor([0, 7, 7, 140], dtype=torch.int32)
    for granularity in ("tensor", "head", "block"):
        assert quantised_alike(odd, granularity, rotation=granularity != "tensor")
        assert quantised_alike(packed, granularity, rotation=True, cu_seqlens=cu_seqlens, max_seqlen=133)
    assert quantised_alike(odd.transpose(1, 2), "block", layout="bshd")
    assert quantised_alike(odd, "block", block=48)
    steps = torch.cat([torch.arange(-460, 460, 0.37), torch.arange(-0.1, 0.1, 2.0**-12)])
    assert quantised_alike(steps[: len(steps) // 16 * 16].reshape(1, 1, -1, 16), "head", scale=1.0)


@pytest.mark.skipif(not INTERPRETED, reason="in the interpreter")
@pytest.mark.parametrize("shape", [(2, 2, 3, 2), (1, 1, 2, 130), (1, 1, 0, 3)])
def test_two_kernels_list_the_tiles_of_a_mask(shape: tuple[int, int, int, int]) -> None:
    """As tiles.lists_of does, word for word, also of a map that is not contiguous."""
    listing = importlib.import_module("tilewise.backends.gpu.listing")
    kinds = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    kinds[:, 0, :1] = tilewise.tiles.EMPTY
    for tile_map in (kinds, kinds.transpose(2, 3)):
        assert torch.equal(listing.listed(tile_map), tilewise.tiles.lists_of(tile_map.contiguous()))


@pytest.mark.skipif(not INTERPRETED, reason="in the interpreter")
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 300), (128, 1200), (1, 129)])
def test_two_kernels_make_the_masks_of_documents_and_ranges(seqlen_q: int, seqlen_k: int) -> None:
    """The tiles and the bits that a CPU makes, of sorted and of mixed documents, and of one range and of two."""
    making = importlib.import_module("tilewise.backends.gpu.mask_making")
    generator = torch.Generator().manual_seed(seqlen_k)

    def same(mask: tilewise.TileMask, made: tuple[torch.Tensor, torch.Tensor]) -> None:
        assert torch.equal(made[0], mask.tiles)
        rows, keys = (tilewise.tiles.num_tiles(n) * tilewise.tiles.TILE for n in (seqlen_q, seqlen_k))
        found = tilewise.tiles.visible(*made, rows, keys)[..., :seqlen_q, :seqlen_k]
        assert torch.equal(found, mask.dense())

    for most, dtype in ((3, torch.int64), (9, torch.int32)):
        q, k = (torch.randint(-1, most, (2, n), generator=generator, dtype=dtype) for n in (seqlen_q, seqlen_k))
        for ids in ((q, k), (q.sort().values, k.sort().values), (q * 0, k * 0), (q * 0 - 1, k * 0 - 1)):
            same(tilewise.TileMask.documents(*ids), making.documents(*ids))
    for count in (1, 2):
        for of, own, other in (("keys", seqlen_q, seqlen_k), ("queries", seqlen_k, seqlen_q)):
            starts = torch.randint(0, other, (1, 2, own, count), generator=generator)
            ends = starts + torch.randint(-3, 400, starts.shape, generator=generator)
            mask = tilewise.TileMask.from_intervals(starts, ends, other, of=of)
            nothing = starts >= ends
            both = starts.masked_fill(nothing, other), ends.masked_fill(nothing, 0)
            same(mask, making.ranges(*(x.transpose(2, 3) for x in both), other, of_queries=of == "queries"))


@pytest.mark.skipif(not INTERPRETED, reason="in the interpreter")
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 0), (0, 300)])
def test_a_tile_mask_without_keys_or_queries(seqlen_q: int, seqlen_k: int) -> None:
    """Every query is written, and every gradient."""
    q, k = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (seqlen_q, seqlen_k))
    mask = tilewise.TileMask.from_dense(torch.ones(seqlen_q, seqlen_k, dtype=torch.bool))
    out, lse = tilewise.attention(q, k, k, mask=mask, backend="triton", return_lse=True)
    out.sum().backward()
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    for x in (q, k):
        assert x.grad is not None
        assert x.grad.eq(0).all()
