"""The Hopper kernels run on the CPU, functionally, over the stand-in for Gluon in gluon_emulator.py.

The real modules are imported with the stand-in in place of triton. A wrong parity, a slot released too early, a missing
wait or a wrong mask shows up as a deadlock or as a wrong number.
"""

from __future__ import annotations

import importlib
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from emulated_backend import Emulated
from gluon_emulator import MODE
from sampling import marks_of, sampled
from tilewise import masks
from tilewise.backends.gpu.records import Window
from tilewise.operands import Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """A small problem; its lengths are odd on purpose."""

    head_dim: int = 64
    head_dim_v: int | None = None
    batch: int = 1
    heads: tuple[int, int] = (2, 1)
    seqlens: tuple[int, int] = (333, 457)
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    sinks: bool = False
    padding: int = 0
    deterministic: bool = False
    dtype: torch.dtype = torch.bfloat16
    tile: str | None = None  # a row of the table of tiles, whatever the problem's own is
    rising: float = 0.0  # scores grow this much towards the first key, which is visited last

    @property
    def problem(self) -> AttentionProblem:
        lengths = self.lengths
        seqlens = self.seqlens if lengths is None else (max(lengths[0]), max(lengths[1]))
        totals = [self.batch * n for n in seqlens] if lengths is None else [sum(n) + self.padding for n in lengths]
        return AttentionProblem(
            kind="dense" if lengths is None else "varlen", dtype=self.dtype,
            batch=self.batch if lengths is None else len(lengths[0]), seqlen_q=seqlens[0], seqlen_k=seqlens[1],
            total_q=totals[0], total_k=totals[1], num_heads=self.heads[0], num_kv_heads=self.heads[1],
            head_dim=self.head_dim, head_dim_v=self.head_dim_v or self.head_dim, scale=self.head_dim**-0.5,
            causal=self.causal, window_left=self.window[0], window_right=self.window[1], softcap=self.softcap,
            has_sinks=self.sinks, deterministic=self.deterministic,
        )  # fmt: skip

    def inputs(self) -> Operands:
        problem = self.problem
        generator = torch.Generator().manual_seed(problem.head_dim)

        def rows(heads: int, seqlen: int, total: int, width: int) -> Tensor:
            packed = problem.kind == "varlen"
            shape = (total, heads, width) if packed else (problem.batch, heads, seqlen, width)
            values = torch.randn(shape, generator=generator).to(self.dtype)
            if packed and self.padding:
                values[-self.padding :] = math.nan
            return values

        cu = [None, None]
        if self.lengths is not None:
            cu = [torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in self.lengths]  # type: ignore[misc]
        q = rows(problem.num_heads, problem.seqlen_q, problem.total_q, problem.head_dim)
        k = rows(problem.num_kv_heads, problem.seqlen_k, problem.total_k, problem.head_dim)
        if self.rising:
            steps = (-1, 1, 1) if self.lengths is not None else (-1, 1)
            k = k * torch.linspace(self.rising, 0.1, k.shape[-len(steps)]).reshape(steps).to(self.dtype)
        return Operands(
            q,
            k,
            rows(problem.num_kv_heads, problem.seqlen_k, problem.total_k, problem.head_dim_v),
            cu_seqlens_q=cu[0],
            cu_seqlens_k=cu[1],
            sinks=torch.randn(problem.num_heads, generator=generator) if self.sinks else None,
        )


def reference() -> Any:
    return importlib.import_module("tilewise.backends.reference").BACKEND


def in_double(operands: Operands) -> Operands:
    q, k, v = (t.double() for t in operands[:3])
    return operands._replace(q=q, k=k, v=v, sinks=None if operands.sinks is None else operands.sinks.double())


def expected(case: Case, operands: Operands) -> tuple[Tensor, Tensor]:
    """The fp64 specification, in canonical shapes."""
    out, lse = reference().forward(replace(case.problem, dtype=torch.float64), in_double(operands))
    return out, lse


def assert_near(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], error: float = 0.02) -> None:
    """out and lse."""
    torch.testing.assert_close(got[0].double(), want[0], atol=error, rtol=error)
    torch.testing.assert_close(got[1].double(), want[1], atol=1e-4, rtol=1e-5)


LOADS = [pytest.param(False, id="loads at once"), pytest.param(True, id="loads late", marks=pytest.mark.exhaustive)]
# For tests of other files, the other way round.
LATE_FIRST = [
    pytest.param(True, id="loads late"),
    pytest.param(False, id="loads at once", marks=pytest.mark.exhaustive),
]
# (deterministic, late loads): of each case one in the ordinary run, all four in the exhaustive one.
BACKWARD_MODES = {
    "in any order, loads at once": (False, False),
    "deterministic, loads late": (True, True),
    "in any order, loads late": (False, True),
    "deterministic, loads at once": (True, False),
}
PACKED = ((130, 0, 1, 300, 64), (200, 33, 0, 300, 1))
FORWARD = {
    "d64": Case(),
    "d64 whole tiles": Case(seqlens=(300, 256), batch=2),
    "d64 three warpgroups": Case(seqlens=(600, 600), heads=(1, 1), tile="D64"),
    "d64 causal three warpgroups": Case(seqlens=(500, 300), heads=(1, 1), causal=True, tile="D64_BANDED"),
    "d64 fewer rows": Case(seqlens=(333, 457), causal=True, batch=2),
    "d64 causal": Case(seqlens=(400, 400), heads=(3, 1), batch=2, causal=True),
    "d64 fewer keys": Case(seqlens=(500, 100), causal=True),
    "d64 rising": Case(seqlens=(130, 600), causal=True, rising=40),
    "d64 rising, three warpgroups": Case(seqlens=(200, 600), rising=40, tile="D64"),
    "d128 rising": Case(128, seqlens=(100, 500), rising=40),
    "d192 rising": Case(192, seqlens=(65, 300), causal=True, rising=40),
    "d128": Case(128, seqlens=(300, 600)),
    "d128 whole tiles": Case(128, seqlens=(300, 512)),
    "d128 causal": Case(128, seqlens=(600, 600), causal=True),
    "d96 one tile": Case(96, seqlens=(64, 100), causal=True),
    "d192 causal": Case(192, seqlens=(300, 300), causal=True),
    "d256": Case(256, seqlens=(200, 333)),
    "d256 causal": Case(256, seqlens=(333, 300), causal=True),
    "d512": Case(512, seqlens=(130, 200), batch=2),
    "d512 causal": Case(512, seqlens=(200, 333), causal=True),
    "d512 fewer keys": Case(512, seqlens=(200, 70), causal=True, sinks=True),
    "d512 rising": Case(512, seqlens=(65, 300), causal=True, rising=40),
    "d512 window": Case(512, seqlens=(200, 300), window=(70, 20), softcap=2.0),
    "d512 packed": Case(512, lengths=PACKED, causal=True, padding=3, sinks=True),
    "d392 unequal": Case(392, 264, heads=(4, 2), seqlens=(100, 150), dtype=torch.float16),
    "d320 unequal": Case(320, 512, heads=(1, 1), seqlens=(80, 130), causal=True),
    "d384": Case(384, heads=(1, 1), seqlens=(64, 128)),
    "unequal": Case(192, 128, seqlens=(200, 300), causal=True),
    "window": Case(128, seqlens=(600, 500), window=(100, 30)),
    "narrow window": Case(64, seqlens=(300, 300), window=(0, 0)),
    "d64 capped": Case(64, seqlens=(200, 300), softcap=2.0, window=(None, 30), sinks=True),
    "d64 left edge, four warpgroups": Case(64, seqlens=(200, 300), window=(100, 30), tile="D64_QUAD"),
    "left window": Case(128, seqlens=(300, 700), window=(64, None), causal=True),
    "right window": Case(64, seqlens=(333, 457), window=(None, 50)),
    "softcap": Case(128, seqlens=(200, 300), softcap=2.0, causal=True),
    "sinks": Case(128, seqlens=(400, 200), sinks=True, causal=True),
    "packed": Case(128, lengths=PACKED, padding=3),
    "packed causal": Case(64, lengths=PACKED, causal=True, padding=5, sinks=True),
    "packed three warpgroups": Case(64, lengths=PACKED, causal=True, padding=2, tile="D64_BANDED"),
    "packed window": Case(256, lengths=PACKED, window=(20, 30)),
}


BANDS = [(None, None), (None, 0), (0, 0), (5, None), (70, 0), (3, 40), (None, 33), (200, 200)]


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_tile_ranges_agree_with_masks(band: tuple[int | None, int | None], emulated: Emulated) -> None:
    """Every tile that somebody sees is visited, and a tile that runs without a mask is seen by everybody."""
    schedule, configs = emulated("schedule"), emulated("configs")
    left, right = band
    for seqlen_q, seqlen_k in itertools.product((1, 63, 130, 400), (1, 64, 129, 300, 513)):
        shown = masks.Band(seqlen_q, seqlen_k, left, right)
        sizes = schedule.Sizes(*[0] * 10, window=Window(left or 0, right or 0))
        flags = {"HAS_LEFT": left is not None, "HAS_RIGHT": right is not None, "IS_CAUSAL": right == 0}
        forward = configs.ForwardConfig(NUM_WARPGROUPS=2, BLOCK_N=64, IS_LAZY=True, **flags)
        for block in range(-(-seqlen_q // 128)):
            last, count = (int(x) for x in schedule.key_tiles(block, seqlen_q, seqlen_k, sizes, forward))
            seen = {t.n_block for t in shown.key_tiles(block, masks.TileGrid(128, 64))}
            assert seen <= set(range(last + 1 - count, last + 1))
            for half in (0, 1):
                row = block * 128 + half * 64
                steps = schedule.whole_tiles(row, last, count, seqlen_q, seqlen_k, sizes, forward)
                for i in range(*map(int, steps)):
                    common = shown.keys_common(row, row + 64)
                    first = (last - i) * 64
                    assert row >= seqlen_q or (common.start <= first and first + 64 <= common.stop)
                check_started_rows(shown, row, last, count, sizes, forward, schedule)
        for block_n in (64, 128):
            even = seqlen_k % block_n == 0
            backward = configs.BackwardConfig(BLOCK_M=64, BLOCK_N=block_n, EVEN_K=even, **flags)
            check_query_tiles(shown, sizes, backward, schedule)


def check_started_rows(
    shown: masks.Band, row: int, last: int, count: int, sizes: Any, config: Any, schedule: Any
) -> None:
    """Before a tile without a mask, every row has seen a key, and so has a reference for its softmax."""
    lengths = shown.seqlen_q, shown.seqlen_k
    plain = schedule.whole_tiles(row, last, count, *lengths, sizes, config)
    started = schedule.whole_tiles(row, last, count, *lengths, sizes, config, True)
    hidden, begin, end = schedule.seen_tiles(row, last, count, *lengths, sizes, config)
    assert plain[0] <= started[0] <= plain[0] + 1
    assert hidden <= begin or begin == count
    for first, stop in (started, (begin, end)):
        rows = range(row, min(row + 64, shown.seqlen_q)) if first < stop else ()
        edge = (last + 1 - int(first)) * config.BLOCK_N
        assert all(shown.keys_seen(i, i + 1).stop > edge for i in rows)


def check_query_tiles(shown: masks.Band, sizes: Any, config: Any, schedule: Any) -> None:
    """The same for the query tiles of every key tile."""
    lengths = shown.seqlen_q, shown.seqlen_k
    grid = masks.TileGrid(config.BLOCK_M, config.BLOCK_N)
    for n_block in range(-(-shown.seqlen_k // config.BLOCK_N)):
        first = n_block * config.BLOCK_N
        lo, hi = (int(x) for x in schedule.query_tiles(first, *lengths, sizes, config))
        assert {t.m_block for t in shown.query_tiles(n_block, grid)} <= set(range(lo, hi))
        begin, end = schedule.whole_query_tiles(first, lo, hi, *lengths, sizes, config)
        for m_block in range(int(begin), int(end)):
            assert shown.tile_kind(m_block, n_block, grid) is masks.TileKind.FULL


# Every tile, both ends of a window, every other feature once.
ORDINARY = (
    "d64 whole tiles", "d64 three warpgroups", "d64 causal three warpgroups", "d64 fewer keys", "d128 rising",
    "d128 causal", "d96 one tile", "d192 causal", "d256", "d512", "d512 causal", "d512 window", "d512 packed",
    "d320 unequal", "unequal", "window", "d64 capped",
    "d64 left edge, four warpgroups", "sinks", "packed", "packed three warpgroups", "packed window",
)  # fmt: skip


def force_tile(tile: str | None, emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated("launch").launching.kept.cache_clear()
    if tile is not None:
        configs = emulated("configs")
        monkeypatch.setattr(configs, "_forward_tile", lambda _: getattr(configs, tile))


@pytest.mark.parametrize("late_loads", LOADS)
@pytest.mark.parametrize("case", sampled(FORWARD, ORDINARY))
def test_forward_protocol(case: Case, late_loads: bool, emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    MODE.late_loads = late_loads
    force_tile(case.tile, emulated, monkeypatch)
    check_forward(case, emulated)


def check_forward(case: Case, emulated: Emulated) -> None:
    """The forward of a case against the specification."""
    operands = case.inputs()
    got = emulated("launch").run_forward(case.problem, operands)
    assert emulated("counters").HostCounters().current() == 0, "the tile counter must come back to zero"
    assert_near(got, expected(case, operands), 0.02 if case.dtype == torch.bfloat16 else 0.0025)


SHARED = Case(128, batch=2, heads=(2, 2), seqlens=(70, 200), causal=True)


@pytest.mark.parametrize(
    ("case", "dim"),
    [(SHARED, 1), (SHARED, 0), (replace(SHARED, lengths=PACKED, padding=2), 1)],
    ids=["heads", "sequences", "packed heads"],
)
def test_shared_keys_are_read_as_they_lie(case: Case, dim: int, emulated: Emulated) -> None:
    """Of heads or sequences that share them, strides of 0: nothing is copied on the way."""
    MODE.late_loads = False
    given = case.inputs()
    k, v = (t.narrow(dim, 0, 1).expand(t.shape) for t in (given.k, given.v))
    assert 0 in k.stride()
    shared = given._replace(k=k, v=v)
    assert emulated("launch").bind_forward(case.problem, shared, want_lse=True).copied == {}
    assert_near(emulated("launch").run_forward(case.problem, shared), expected(case, shared))


def test_what_kernels_cannot_address_is_copied(emulated: Emulated) -> None:
    """Rows off the alignment that TMA asks for, and sinks that are not adjacent."""
    MODE.late_loads = False
    case = Case(seqlens=(70, 200), sinks=True)
    given = case.inputs()
    assert given.sinks is not None
    q = torch.empty(given.q.numel() + 1, dtype=given.q.dtype)[1:].view(given.q.shape).copy_(given.q)
    odd = given._replace(q=q, sinks=given.sinks.repeat_interleave(2)[::2])
    assert emulated("launch").bind_forward(case.problem, odd, want_lse=True).copied.keys() == {"q", "sinks"}
    assert_near(emulated("launch").run_forward(case.problem, odd), expected(case, given))


def overflowing(operands: Operands, keys: slice) -> Operands:
    """Some keys whose scores overflow to -inf in fp32, for all queries."""
    q, k = operands.q.clone(), operands.k.clone()
    q[..., -1], k[..., -1] = 1e30, 0.0
    k[..., keys, -1] = -1e30
    return operands._replace(q=q, k=k)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_minus_infinity_weigh_nothing(head_dim: int, causal: bool, emulated: Emulated) -> None:
    """The tiles that a row sees first have no other scores."""
    MODE.late_loads = False
    case = Case(head_dim, heads=(1, 1), seqlens=(130, 600), causal=causal)
    operands = overflowing(case.inputs(), slice(300, None))
    assert_near(emulated("launch").run_forward(case.problem, operands), expected(case, operands))


@pytest.mark.parametrize("tile", ["D64", "D64_BANDED"])
def test_one_key_stands_out_among_scores_of_any_sign(
    tile: str, emulated: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its P is exactly 1 wherever it is, also in rows whose scores are all negative."""
    MODE.late_loads = False
    force_tile(tile, emulated, monkeypatch)
    case = Case(heads=(1, 1), seqlens=(192, 600), causal=tile == "D64_BANDED")
    q, k, v = (torch.zeros(1, 1, n, 64, dtype=torch.bfloat16) for n in case.seqlens[:1] + case.seqlens[1:] * 2)
    rows, best = torch.arange(192), torch.randint(1, 400, (192,), generator=torch.Generator().manual_seed(3))
    shift = torch.where(rows // 16 % 3 == 0, 40.0, torch.where(rows // 16 % 3 == 1, -200.0, (rows % 5 - 2) * 50.0))
    # Keys count in binary in nine columns. Each bit in which a key differs from the row's best one takes 60 off.
    bits = torch.arange(9)
    signs = [((n[:, None] >> bits & 1) * 2 - 1).bfloat16() for n in (best, torch.arange(600) % 512)]
    q[0, 0, :, :9], k[0, 0, :, :9] = signs[0] * 30 * 8, signs[1]
    q[0, 0, :, 9], k[0, 0, :, 9] = (shift - 270).bfloat16() * 8, 1.0
    v[0, 0] = torch.randn(600, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    v[0, 0, 512:] = v[0, 0, :88]  # keys that count from 0 again
    out, lse = emulated("launch").run_forward(case.problem, Operands(q, k, v))
    _, ref_lse = expected(case, Operands(q, k, v))
    torch.testing.assert_close(out[0, 0], v[0, 0, best], atol=0.0, rtol=0.0)
    torch.testing.assert_close(lse.double(), ref_lse, atol=1e-4, rtol=1e-5)


# The last one has a scale from which on scores of any size are right.
LARGEST = (
    "d64 fewer keys", "d64 three warpgroups", "d128 rising", "d192 causal", "d256 causal", "d512 rising", "sinks",
    "softcap", "packed", "window", "d128",
)  # fmt: skip


@pytest.mark.parametrize("name", LARGEST)
def test_largest_scores(name: str, emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """The true maximum of each head, also where the reference of a row stays behind it. No other bit changes."""
    MODE.late_loads = False
    case, launch = FORWARD[name], emulated("launch")
    force_tile(case.tile, emulated, monkeypatch)
    problem = replace(case.problem, max_logits=True)
    if name == LARGEST[-1]:
        problem = replace(problem, scale=2.0**11)
    largest, ref_largest = (torch.full((problem.num_heads,), -math.inf, dtype=d) for d in (torch.float32, torch.double))
    operands = case.inputs()._replace(max_logits=largest)
    out, lse = launch.run_forward(problem, operands)
    specified = in_double(operands)._replace(max_logits=ref_largest)
    assert_near((out, lse), reference().forward(replace(problem, dtype=torch.float64), specified))
    torch.testing.assert_close(largest.double(), ref_largest, atol=1e-5, rtol=1e-5)
    plain, plain_lse = launch.run_forward(replace(problem, max_logits=False), operands._replace(max_logits=None))
    assert torch.equal(out, plain)
    assert torch.equal(lse, plain_lse)


@pytest.mark.parametrize("padding", [0, 8, 4])
@pytest.mark.parametrize("name", ["d64 fewer keys", "packed"])
def test_forward_into_memory_of_the_caller(name: str, padding: int, emulated: Emulated) -> None:
    """Straight into `out` where TMA can address it; else the caller copies. Columns between its own are not written."""
    MODE.late_loads = False
    case = FORWARD[name]
    operands, launch = case.inputs(), emulated("launch")
    ref, ref_lse = launch.run_forward(case.problem, operands)
    memory = torch.full((*ref.shape[:-1], ref.shape[-1] + padding), 7.0, dtype=ref.dtype)
    given = memory[..., : ref.shape[-1]]
    assert launch.writes_into(case.problem, given) == (padding == 0 or (padding == 8 and name != "packed"))
    if launch.writes_into(case.problem, given):
        out, lse = launch.run_forward(case.problem, operands._replace(out=given))
        assert out is given
        assert torch.equal(out, ref)
        assert torch.equal(lse, ref_lse)
        assert bool((memory[..., ref.shape[-1] :] == 7.0).all())


PAGED = {
    "one page a tile": (Case(128, lengths=PACKED, padding=3), 128, "rows first"),
    "two pages a tile": (Case(128, lengths=PACKED, causal=True, sinks=True), 64, "heads first"),
    "large pages": (Case(64, heads=(4, 2), lengths=PACKED, causal=True, padding=2), 256, "together"),
    "odd pages": (Case(128, lengths=PACKED, window=(70, 20)), 192, "rows first"),
    "d192": (Case(192, 128, lengths=PACKED, causal=True), 64, "together"),
    "d96": (Case(96, lengths=PACKED, softcap=2.0), 64, "rows first"),
    "d256": (Case(256, lengths=PACKED, causal=True), 128, "heads first"),
    "d512": (Case(512, lengths=PACKED, causal=True), 64, "together"),
    "d328": (Case(328, 400, lengths=PACKED, window=(70, 20), padding=2), 128, "heads first"),
}


@pytest.mark.parametrize(
    ("case", "page_size", "storage"), sampled(PAGED, ("two pages a tile", "large pages", "odd pages", "d192", "d512"))
)
def test_paged_forward_protocol(case: Case, page_size: int, storage: str, emulated: Emulated) -> None:
    """Pages in any order, NaN in every row that no sequence has, nonsense in the unused part of the table."""
    MODE.late_loads = False
    packed = case.inputs()
    operands, problem = in_pages(case, packed, page_size, storage)
    assert_near(emulated("launch").run_forward(problem, operands), expected(case, packed))


def in_pages(case: Case, packed: Operands, page_size: int, storage: str) -> tuple[Operands, AttentionProblem]:
    """The case with its keys and values in pages."""
    assert case.lengths is not None
    lengths = case.lengths[1]
    counts = [-(-n // page_size) for n in lengths]
    num_pages = 2 * sum(counts) + 1
    shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(2)).tolist()
    table = torch.full((len(lengths), max(counts) + 2), 1 << 30, dtype=torch.int32)

    def empty(width: int) -> Tensor:
        shapes = {"rows first": (page_size, case.heads[1]), "heads first": (case.heads[1], page_size)}
        if storage == "together":  # K and V of a page behind each other
            return torch.full((num_pages, 2, page_size, case.heads[1], width), math.nan).bfloat16()[:, 1]
        pages = torch.full((num_pages, *shapes[storage], width), math.nan).bfloat16()
        return pages.transpose(1, 2) if storage == "heads first" else pages

    k, v = empty(packed.k.shape[-1]), empty(packed.v.shape[-1])
    row = 0
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for number in range(count):
            page = table[i, number] = shuffled.pop()
            rows = min(page_size, length - number * page_size)
            k[page, :rows], v[page, :rows] = packed.k[row : row + rows], packed.v[row : row + rows]
            row += rows
    problem = replace(case.problem, kind="paged", page_size=page_size, total_k=num_pages * page_size)
    seqlens_k = torch.tensor(lengths, dtype=torch.int32)
    return packed._replace(k=k, v=v, cu_seqlens_k=None, block_table=table, seqlens_k=seqlens_k), problem


Plant = Callable[[Emulated, pytest.MonkeyPatch], None]


def release_early(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = emulated("channels").Ring
    wait = ring.wait

    def wait_and_release(self: Any, at: Any) -> None:
        wait.function(self, at)
        self.empty.index(at.slot).one.arrive(1)
        # Time for the producer, which other work on the machine would hold up, to write where is still to be read.
        time.sleep(1e-2)

    monkeypatch.setattr(ring, "wait", wait_and_release)
    monkeypatch.setattr(ring, "release", lambda *_: None)


def no_wait(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated("channels").Ring, "wait", lambda *_: None)


def no_wait_for_p(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two warpgroups that share rows."""
    ring = emulated("channels").Ring
    wait = ring.wait
    monkeypatch.setattr(ring, "wait", lambda self, at: None if at.NUM_SLOTS == 2 else wait.function(self, at))


def no_wait_for_the_store(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between O and the V that comes after it into its slot."""
    monkeypatch.setattr(emulated("forward_wide").tma, "store_wait", lambda _: None)


@pytest.mark.parametrize(
    ("plant", "name", "late_loads"),
    [
        (release_early, "d128 causal", False),
        (no_wait, "d128 causal", True),
        (no_wait_for_p, "d512 causal", False),
        (no_wait_for_the_store, "d512 causal", False),
    ],
)
def test_a_broken_protocol_is_found(
    plant: Plant, name: str, late_loads: bool, emulated: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator is worth something only if it fails when the protocol is broken."""
    if plant is not release_early:  # roles out of step wait for each other, which is enough
        monkeypatch.setattr("gluon_emulator.DEADLOCK_S", 2.0)
    monkeypatch.setattr("gluon_emulator.LATE_S", 0.1)  # not before a busy machine runs the warpgroups
    monkeypatch.setattr(emulated("counters").HostCounters, "current", lambda *_: torch.zeros(1, dtype=torch.int32))
    plant(emulated, monkeypatch)
    assert not survives(FORWARD[name], emulated, late_loads=late_loads)


def survives(case: Case, emulated: Emulated, late_loads: bool) -> bool:
    """Whether the forward runs through and is right."""
    MODE.late_loads = late_loads
    operands = case.inputs()
    try:
        out, _ = emulated("launch").run_forward(case.problem, operands)
    except (RuntimeError, AssertionError):
        return False
    return torch.allclose(out.double(), expected(case, operands)[0], atol=0.02, rtol=0.02)


BACKWARD = {
    "d64": Case(seqlens=(300, 256)),
    "d64 causal": Case(seqlens=(333, 457), causal=True, batch=2),
    "d128": Case(128, seqlens=(200, 300)),
    "d128 causal": Case(128, seqlens=(300, 384), causal=True),
    "fewer keys": Case(128, seqlens=(400, 100), causal=True),
    "d96 grouped": Case(96, heads=(4, 2), seqlens=(150, 200), causal=True),
    "sinks": Case(64, seqlens=(300, 140), causal=True, sinks=True),
    "window": Case(64, seqlens=(500, 600), window=(100, 30)),
    "left window": Case(128, seqlens=(600, 400), window=(50, None), causal=True),
    "softcap": Case(128, seqlens=(200, 300), softcap=2.0, causal=True),
    "softcap window": Case(64, seqlens=(200, 300), softcap=0.5, window=(90, 20), sinks=True),
    "packed": Case(128, lengths=PACKED, padding=3),
    "packed causal": Case(64, lengths=PACKED, causal=True, padding=5, sinks=True),
    "d256": Case(256, seqlens=(130, 200)),
    "d256 causal": Case(256, seqlens=(200, 264), causal=True),
    "d192 grouped": Case(192, heads=(4, 2), seqlens=(150, 130), causal=True, softcap=2.0),
    "d200 window": Case(200, heads=(1, 1), seqlens=(300, 200), window=(50, 30)),
    "unequal": Case(192, 128, seqlens=(130, 190), causal=True, sinks=True),
    "narrow unequal": Case(64, 128, seqlens=(130, 190)),
    "packed d256": Case(256, lengths=PACKED, causal=True, padding=3),
    "packed unequal": Case(128, 64, lengths=PACKED, padding=3),
}


class Backward(NamedTuple):
    """What a backward gets beside the operands."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor


def backward_inputs(case: Case, operands: Operands) -> Backward:
    out, lse = expected(case, operands)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).bfloat16()
    return Backward(out, lse, dout, torch.randn(lse.shape, generator=generator))


def run_backward(case: Case, operands: Operands, given: Backward, emulated: Emulated) -> Gradients:
    out, lse, dout, dlse = given
    run = emulated("launch").run_backward
    got: Gradients = run(
        case.problem, operands, out.bfloat16(), lse.float(), dout, dlse.float(), Wanted(dsinks=case.sinks)
    )
    assert emulated("counters").HostCounters().current() == 0, "the tile counter must come back to zero"
    return got


def check_backward(case: Case, emulated: Emulated) -> None:
    operands = case.inputs()
    given = backward_inputs(case, operands)
    got = run_backward(case, operands, given, emulated)
    problem = replace(case.problem, dtype=torch.float64)
    exact = Backward(*(t.double() for t in given))
    ref = reference().backward(problem, in_double(operands), *exact, Wanted(dsinks=case.sinks))
    for name, mine, theirs in zip(ref._fields, got, ref, strict=True):
        if theirs is not None:
            assert mine is not None
            scale = theirs.abs().max().item()
            error = (mine.double() - theirs).abs().max().item()
            assert error <= 0.015 * scale, f"{name}: error {error}, largest {scale}"


@pytest.mark.parametrize(
    ("case", "deterministic", "late_loads"),
    [
        pytest.param(case, *mode, id=f"{name}, {how}", marks=marks_of(which == number % 2))
        for number, (name, case) in enumerate(BACKWARD.items())
        for which, (how, mode) in enumerate(BACKWARD_MODES.items())
    ],
)
def test_backward_protocol(case: Case, deterministic: bool, late_loads: bool, emulated: Emulated) -> None:
    MODE.late_loads = late_loads
    check_backward(replace(case, deterministic=deterministic), emulated)


@pytest.mark.parametrize("missing", ["barrier_sync", "store_wait"])
def test_a_missing_hand_over_is_found(missing: str, emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two roles of the wide backward."""
    MODE.late_loads = False
    wide = emulated("backward_wide")
    if missing == "barrier_sync":
        monkeypatch.setattr(wide, "barrier_sync", lambda *_: None)
        monkeypatch.setattr(wide, "barrier_at", lambda *_: None)
    else:
        monkeypatch.setattr(wide.tma, "store_wait", lambda _: None)
    monkeypatch.setattr(emulated("counters").HostCounters, "current", lambda *_: torch.zeros(1, dtype=torch.int32))
    with pytest.raises((AssertionError, RuntimeError)):
        check_backward(BACKWARD["d256"], emulated)


@pytest.mark.parametrize("name", ["d64 causal", "d256"])
def test_fixed_point_does_not_depend_on_the_order(name: str, emulated: Emulated) -> None:
    MODE.late_loads = True
    case = replace(BACKWARD[name], deterministic=True)
    operands = case.inputs()
    given = backward_inputs(case, operands)
    first, *others = [run_backward(case, operands, given, emulated) for _ in range(3)]
    for other in others:
        for a, b in zip(first[:3], other[:3], strict=True):
            torch.testing.assert_close(a, b, atol=0.0, rtol=0.0)
