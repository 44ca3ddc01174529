"""Tile masks in the Hopper kernels, run on the CPU over the stand-in for Gluon (see test_hopper_protocol.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from emulated_backend import Emulated
from gluon_emulator import MODE
from sampling import sampled
from test_hopper_protocol import LATE_FIRST, Case, assert_near, in_double, reference
from tilewise import TileMask
from tilewise.operands import Operands, Wanted
from tilewise.problem import AttentionProblem
from tilewise.tiles import bits_by_queries, lists_of

pytestmark = pytest.mark.slow

# A case, and the (sequences, heads) of its mask.
CASES = {
    "d64": (Case(64, heads=(2, 1), seqlens=(300, 520), batch=2), (1, 1)),
    "d64 of its own heads": (Case(64, heads=(4, 2), seqlens=(200, 300), batch=2), (2, 4)),
    "d128": (Case(128, heads=(2, 2), seqlens=(300, 640)), (1, 2)),
    "d128 rising": (Case(128, heads=(1, 1), seqlens=(130, 900), rising=40), (1, 1)),
    "d96 capped, sinks": (Case(96, heads=(2, 1), seqlens=(140, 400), softcap=2.0, sinks=True), (1, 2)),
    "one tile": (Case(128, heads=(2, 1), seqlens=(70, 100)), (1, 1)),
}


def holes(shape: tuple[int, int], seqlens: tuple[int, int]) -> TileMask:
    """Tiles of all kinds, rows of tiles without any, and rows that see nothing or only keys of full tiles."""
    draw = torch.Generator().manual_seed(1)
    sides = [-(-length // 128) for length in seqlens]
    kinds = torch.randint(0, 3, (*shape, *sides), generator=draw)
    kinds[0, -1, -1] = 0
    wide = kinds.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, : seqlens[0], : seqlens[1]]
    bits = torch.rand(wide.shape, generator=draw) < 0.5
    bits[:, :, ::7] = False
    dense = (wide == 2) | ((wide == 1) & bits)
    dense[:, :, ::37] = False
    return TileMask.from_dense(dense)


def masked(case: Case, mask: TileMask) -> tuple[AttentionProblem, Operands, Operands]:
    """The problem, its operands as the kernels take them, and with the dense mask."""
    operands, problem = case.inputs(), case.problem
    batch, heads, rows, columns = mask.tiles.shape
    problem = replace(problem, tiles_shape=(batch, heads, rows, columns))
    lists, bits = lists_of(mask.tiles), bits_by_queries(mask.bits)
    tiles = mask.tiles.expand(problem.batch, problem.num_heads, -1, -1)
    dense = mask.dense().expand(problem.batch, problem.num_heads, -1, -1)
    return problem, operands._replace(tiles=tiles, tile_bits=bits, tile_lists=lists), operands._replace(mask=dense)


@pytest.mark.parametrize("late_loads", LATE_FIRST)
@pytest.mark.parametrize(("given", "shape"), sampled(CASES, ("d64", "d128", "d96 capped, sinks")))
def test_the_forward_walks_lists(given: Case, shape: tuple[int, int], late_loads: bool, emulated: Emulated) -> None:
    MODE.late_loads = late_loads
    emulated("launch").launching.kept.cache_clear()
    problem, operands, dense = masked(given, holes(shape, given.seqlens))
    got = emulated("launch").run_forward(problem, operands)
    assert emulated("counters").HostCounters().current() == 0, "the tile counter must come back to zero"
    scores = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    plain = replace(given.problem, dtype=torch.float64, mask_shape=scores)
    assert_near(got, reference().forward(plain, in_double(dense)))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_forward_reads_no_tile_that_nobody_sees(head_dim: int, emulated: Emulated) -> None:
    """NaN in such tiles changes nothing, also in a block of queries that sees nothing at all."""
    MODE.late_loads = False
    emulated("launch").launching.kept.cache_clear()
    case = Case(head_dim, heads=(1, 1), seqlens=(300, 400))
    dense = torch.zeros(300, 400, dtype=torch.bool)
    dense[:128, 128:256] = True
    dense[256:, 200:400] = True
    problem, operands, _ = masked(case, TileMask.from_dense(dense))
    for tensor in (operands.k, operands.v):
        tensor[:, :, :128] = torch.nan
    out, lse = emulated("launch").run_forward(problem, operands)
    assert not out.isnan().any()
    assert not out[:, :, 128:256].any()
    assert (lse[:, :, 128:256] == -torch.inf).all()


BACKWARD = {
    "d64": (Case(64, heads=(2, 1), seqlens=(300, 520), batch=2), (1, 1)),
    "d64 of its own heads": (Case(64, heads=(4, 2), seqlens=(200, 300), batch=2), (2, 4)),
    "d128": (Case(128, heads=(2, 2), seqlens=(300, 640)), (1, 2)),
    "d128 half a tile": (Case(128, heads=(4, 2), seqlens=(180, 300), batch=2), (2, 4)),
    "d96 capped, sinks": (Case(96, heads=(2, 1), seqlens=(140, 400), softcap=2.0, sinks=True), (1, 2)),
    "d128 with idle warps": (Case(128, heads=(24, 24), seqlens=(130, 128)), (1, 24)),
    "one tile": (Case(128, heads=(2, 1), seqlens=(70, 100)), (1, 1)),
}


@pytest.mark.parametrize("late_loads", LATE_FIRST)
@pytest.mark.parametrize(
    ("given", "shape"), sampled(BACKWARD, ("d64 of its own heads", "d128 half a tile", "d128 with idle warps"))
)
def test_the_backward_walks_lists(given: Case, shape: tuple[int, int], late_loads: bool, emulated: Emulated) -> None:
    """Gradients are those of fp64, and 0 where nothing is seen; keys and queries that no tile names are not touched."""
    MODE.late_loads = late_loads
    emulated("launch").launching.kept.cache_clear()
    problem, operands, dense = masked(given, holes(shape, given.seqlens))
    scores = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    plain = replace(given.problem, dtype=torch.float64, mask_shape=scores)
    wanted = Wanted(dsinks=given.sinks)
    out, lse = reference().forward(plain, in_double(dense))
    draw = torch.Generator().manual_seed(2)
    dout, dlse = torch.randn(out.shape, generator=draw).bfloat16(), torch.randn(lse.shape, generator=draw)
    ref = reference().backward(plain, in_double(dense), out, lse, dout.double(), dlse.double(), wanted)
    run = emulated("launch").run_backward
    got = run(problem, operands, out.bfloat16(), lse.float(), dout, dlse, wanted)
    assert emulated("counters").HostCounters().current() == 0, "the tile counter must come back to zero"
    for name, mine, theirs in zip(ref._fields, got, ref, strict=True):
        if theirs is not None:
            assert mine is not None
            error, largest = (mine.double() - theirs).abs().max().item(), theirs.abs().max().item()
            assert error <= 0.015 * largest, f"{name}: error {error}, largest {largest}"
            unseen = (theirs == 0).all(-1) if theirs.dim() == 4 else theirs == 0
            assert not mine[unseen].any(), f"{name} of rows that see nothing"
