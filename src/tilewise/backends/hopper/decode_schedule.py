"""Which program reads which keys in decoding: key tiles of all (sequence, K/V head) items form one line, cut evenly.

Program i of P takes the i-th share of the line, so every SM reads the same number of bytes whatever the lengths are.
Shares may begin and end inside items. Lengths are read on the device; the host never waits for them.

Figures: bench/results/hopper-decode-choices.csv.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc,assignment"
# ruff: noqa: N803, N806, RET505

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gpu.records import Extent, Window

# Sequences whose lengths are summed at a time, across the lanes of a warp. Up to C.FEW sequences are handled one by one
# in every lane instead.
SCAN = gl.constexpr(128)


class DecodeSizes(NamedTuple):
    """The sizes of a launch, on which no kernel is specialised; `pace`: sequences per share on average."""

    batch: int
    pace: float
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    total_q: int
    window: Window


@gluon.jit
def _length(cu_seqlens, at, length, ok, PACKED: gl.constexpr):
    """(first row, rows) of sequences in a packed tensor, or of sequences of `length` rows each."""
    if PACKED:
        first = gl.load(cu_seqlens + at, mask=ok, other=0)
        return first, gl.load(cu_seqlens + at + 1, mask=ok, other=0) - first
    else:
        return at * length, at * 0 + length


@gluon.jit
def extent_of(lengths, at, sizes, ok, C: gl.constexpr):
    """The Extents of sequences."""
    q_start, seqlen_q = _length(lengths.cu_seqlens_q, at, sizes.seqlen_q, ok, C.PACKED_Q)
    if C.IS_PAGED:
        return Extent(q_start, seqlen_q, q_start * 0, gl.load(lengths.seqlens_k + at, mask=ok, other=0))
    else:
        k_start, seqlen_k = _length(lengths.cu_seqlens_k, at, sizes.seqlen_k, ok, C.IS_VARLEN)
        return Extent(q_start, seqlen_q, k_start, seqlen_k)


@gluon.jit
def key_tiles_of(seqlen_q, seqlen_k, sizes, C: gl.constexpr):
    """(first, number) of the key tiles that any query sees: at least one, so that queries without keys get their zeros
    written; none if there is no query.
    """
    stop = (seqlen_k + C.BLOCK_N - 1) // C.BLOCK_N
    first = stop * 0
    if C.HAS_LEFT:
        first = gl.maximum(seqlen_k - seqlen_q - sizes.window.left, 0) // C.BLOCK_N
    return first, gl.where(seqlen_q > 0, gl.maximum(stop - first, 1), 0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.constexpr_function
def asks_first(C):
    """Whether the lengths of the first sequences are loaded (`ask`) before the search that needs them."""
    return not (C.IS_UNIFORM or C.IS_FP8)


@gluon.jit
def ask_lengths(lengths, first, sizes, NUM_WARPS: gl.constexpr, C: gl.constexpr):
    """The Extents of SCAN sequences from `first` on. Every warp holds all of them and sums them by itself; with e4m3
    keys that would cause spills, so the warps share them.
    """
    EACH: gl.constexpr = SCAN // (32 * NUM_WARPS) if C.IS_FP8 else SCAN // 32
    at = first + gl.arange(0, SCAN, gl.BlockedLayout([EACH], [32], [NUM_WARPS], [0]))
    found = extent_of(lengths, at, sizes, at < sizes.batch, C)
    return Extent(found.q_start, gl.where(at < sizes.batch, found.seqlen_q, 0), found.k_start, found.seqlen_k)


@gluon.jit
def ask(lengths, sizes, NUM_WARPS: gl.constexpr, C: gl.constexpr):
    """Load early what the search for a share's sequence starts with: the Extents of the first SCAN sequences, or of
    each of C.FEW.
    """
    if C.FEW == 0:
        return ask_lengths(lengths, 0, sizes, NUM_WARPS, C)
    else:
        FEW: gl.constexpr = C.FEW
        few = ()
        for i in gl.static_range(FEW):
            found = extent_of(lengths, gl.to_tensor(i), sizes, i < sizes.batch, C)
            seqlen_q = gl.where(i < sizes.batch, found.seqlen_q, 0)
            few = few + (Extent(found.q_start, seqlen_q, found.k_start, found.seqlen_k),)  # noqa: RUF005  (Triton knows no unpacking)
        return few


@gluon.jit
def _extent_among_few(few, batch_idx, C: gl.constexpr):
    """Like `extent_of`, for one of C.FEW sequences whose spans are in registers: no load that depends on a load."""
    FEW: gl.constexpr = C.FEW
    q_start, seqlen_q, k_start, seqlen_k = few[0]
    for i in gl.static_range(1, FEW):
        here = batch_idx == i
        q_first, q_rows, k_first, k_rows = few[i]
        q_start, seqlen_q = gl.where(here, q_first, q_start), gl.where(here, q_rows, seqlen_q)
        k_start, seqlen_k = gl.where(here, k_first, k_start), gl.where(here, k_rows, seqlen_k)
    return Extent(q_start, seqlen_q, k_start, seqlen_k)


@gluon.jit
def _counts(asked, sizes, C: gl.constexpr):
    """Key tiles of sequences, over all heads. (In Triton 3.6 an Extent out of a tuple has lost its names.)"""
    _, seqlen_q, _, seqlen_k = asked
    _, count = key_tiles_of(seqlen_q, seqlen_k, sizes, C)
    return count * sizes.num_kv_heads


@gluon.jit
def share_of(total, program, C: gl.constexpr):
    """The first tile of a program's share; the remainder goes to the first programs, one tile each."""
    programs = gl.num_programs(0) * C.LANES
    each = total // programs
    return program * each + min(program, total - each * programs)


@gluon.jit
def program_of(total, tile, C: gl.constexpr):
    """The program whose share holds a tile."""
    programs = gl.num_programs(0) * C.LANES
    each = total // programs
    rest = total - each * programs
    longer = rest * (each + 1)
    return gl.where(tile < longer, tile // (each + 1), (tile - longer) // max(each, 1) + rest)


@gluon.jit
def _passed(ends, begin):
    """(number, last end) of the sequences that end at tile `begin` or before it; `ends` are their ends."""
    done = ends <= begin
    return gl.sum(gl.where(done, 1, 0), axis=0), gl.max(gl.where(done, ends, 0), axis=0)


@gluon.jit
def _find_among_few(few, program, sizes, C: gl.constexpr):
    """Like `_find_sequence`, among at most C.FEW."""
    FEW: gl.constexpr = C.FEW
    total = gl.to_tensor(0)
    ends = ()
    for i in gl.static_range(FEW):
        total = total + _counts(few[i], sizes, C)
        ends = ends + (total,)  # noqa: RUF005  (Triton knows no unpacking)
    begin = share_of(total, program, C)
    batch_idx = gl.to_tensor(0)
    before = gl.to_tensor(0)
    for i in gl.static_range(FEW - 1):
        batch_idx += gl.where(ends[i] <= begin, 1, 0)
        before = gl.where(ends[i] <= begin, ends[i], before)
    return total, begin, batch_idx, before


@gluon.jit
def _find_sequence(lengths, asked, program, sizes, NUM_WARPS: gl.constexpr, C: gl.constexpr):
    """(total, first tile of the share, its sequence, tiles before that sequence)."""
    batch_idx = gl.to_tensor(0)
    before = gl.to_tensor(0)
    if C.IS_FP8:
        # Reading all lengths twice takes fewer registers, so the loop over keys spills less.
        total = gl.to_tensor(0)
        for first in range(0, sizes.batch, SCAN):
            total += gl.sum(_counts(ask_lengths(lengths, first, sizes, NUM_WARPS, C), sizes, C), axis=0)
        begin = share_of(total, program, C)
        passed = gl.to_tensor(0)
        for first in range(0, sizes.batch, SCAN):
            counts = _counts(ask_lengths(lengths, first, sizes, NUM_WARPS, C), sizes, C)
            number, end = _passed(passed + gl.associative_scan(counts, 0, _add), begin)
            batch_idx += number
            before = max(before, end)
            passed += gl.sum(counts, axis=0)
    elif C.FEW:
        total, begin, batch_idx, before = _find_among_few(asked, program, sizes, C)
    else:
        counts = _counts(asked, sizes, C)
        ends = gl.associative_scan(counts, 0, _add)
        # Independent of the scan, so that the two overlap.
        passed = gl.sum(counts, axis=0)
        total = passed
        for first in range(SCAN, sizes.batch, SCAN):
            total = total + gl.sum(_counts(ask_lengths(lengths, first, sizes, NUM_WARPS, C), sizes, C), axis=0)
        begin = share_of(total, program, C)
        batch_idx, before = _passed(ends, begin)
        for first in range(SCAN, sizes.batch, SCAN):
            counts = _counts(ask_lengths(lengths, first, sizes, NUM_WARPS, C), sizes, C)
            number, end = _passed(passed + gl.associative_scan(counts, 0, _add), begin)
            batch_idx += number
            before = max(before, end)
            passed += gl.sum(counts, axis=0)
    if C.FEW != 1:
        batch_idx = min(batch_idx, sizes.batch - 1)
    return total, begin, batch_idx, before


@gluon.jit
def locate(lengths, asked, program, sizes, NUM_WARPS: gl.constexpr, C: gl.constexpr):
    """(total, first tile, last + 1, sequence, head, tile within that item, its Extent) of this program's share.

    `asked` is the result of `ask` if `asks_first`.
    """
    if C.IS_UNIFORM:
        _, count = key_tiles_of(sizes.seqlen_q, gl.to_tensor(sizes.seqlen_k), sizes, C)
        total = count * sizes.num_kv_heads * sizes.batch
        begin = share_of(total, program, C)
        item = begin // count
        batch_idx = item // sizes.num_kv_heads
        head = item - batch_idx * sizes.num_kv_heads
        tile = begin - item * count
        extent = extent_of(lengths, batch_idx, sizes, True, C)
    else:
        total, begin, batch_idx, before = _find_sequence(lengths, asked, program, sizes, NUM_WARPS, C)
        extent = _extent_among_few(asked, batch_idx, C) if C.FEW else extent_of(lengths, batch_idx, sizes, True, C)
        _, count = key_tiles_of(extent.seqlen_q, extent.seqlen_k, sizes, C)
        head = (begin - before) // max(count, 1)
        tile = begin - before - head * count
    return total, begin, share_of(total, program + 1, C), batch_idx, head, tile, extent


@gluon.jit
def guess(program, sizes):
    """(sequence, key row) where this program's share would begin if all sequences had the maximum length."""
    place = program.to(gl.float32) * sizes.pace
    batch_idx = min(place.to(gl.int32), sizes.batch - 1)
    heads = (place - batch_idx) * sizes.num_kv_heads
    return batch_idx, ((heads - heads.to(gl.int32)) * sizes.seqlen_k).to(gl.int32)


@gluon.jit
def advance(lengths, batch_idx, head, more, sizes, C: gl.constexpr):
    """The item after (sequence, head): the next head, or the next sequence that has queries if there is `more`."""
    head += 1
    if head == sizes.num_kv_heads:
        head = head * 0
        batch_idx += 1
        if C.PACKED_Q:
            searching = more
            while searching:
                searching = extent_of(lengths, batch_idx, sizes, True, C).seqlen_q == 0
                batch_idx += gl.where(searching, 1, 0)
    return batch_idx, head
