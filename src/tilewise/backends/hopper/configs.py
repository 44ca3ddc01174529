"""Tile tables of the forward and the backward, and everything that these kernels are compiled for.

Rows and limits were chosen by measurements on an H200. Figures: bench/results/hopper-forward-choices.csv and
hopper-backward-choices.csv, by the name of the constant or function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tilewise.problem import AttentionProblem


@dataclass(frozen=True)
class ForwardTile:
    """One row of the forward table.

    NUM_WARPGROUPS  consumers of 64 query rows each
    BLOCK_N         keys in a tile
    NUM_STAGES      slots in the K and V rings; Q_STAGES: slots in Q's ring
    MERGE_KV        K_i and V_{i-1} share a slot, which saves one barrier per tile
    PIN_EXP         the exponentials stay ahead of the wait for P V (primitives.pin)
    IS_LAZY         the softmax reference of a row, and with it O, moves only if scores exceed it by 8 (scores.py)
    INTEGER_MAX     maxima of rows are taken of their bits as integers where that is right (primitives.largest)
    CARRY_PAIRS     P is carried to the next tile in 16 bits, two columns in a register
    RESCALE_EARLY   O is rescaled between Q K^T and P V
    OUT_IN_Q        O is staged in Q's buffer
    CTAS_PER_SM     2 selects the kernel of forward_quad.py
    SHARES_ROWS     two warpgroups share 64 query rows, each has a column part of O: the kernel of forward_wide.py
    TAKES_LATE      a CTA takes its next tile at the end of the key loop instead of at its start
    """

    NUM_WARPGROUPS: int = 2
    BLOCK_N: int = 128
    NUM_STAGES: int = 2
    Q_STAGES: int = 2
    MERGE_KV: bool = False
    PIN_EXP: bool = True
    IS_LAZY: bool = False
    INTEGER_MAX: bool = False
    CARRY_PAIRS: bool = False
    RESCALE_EARLY: bool = False
    OUT_IN_Q: bool = False
    CTAS_PER_SM: int = 1
    TAKES_LATE: bool = False
    SHARES_ROWS: bool = False


# Two CTAs an SM. A query block of a short sequence is mostly prologue and epilogue; four warpgroups hide them better
# than two that overlap more within themselves.
D64_QUAD = ForwardTile(BLOCK_N=64, NUM_STAGES=4, CTAS_PER_SM=2)
# Three consumers share a slot: the arrivals that merged barriers save outweigh the later start of Q K^T. Pinned
# exponentials are slower here: the products of the other warpgroups overlap them.
D64_BANDED = ForwardTile(NUM_WARPGROUPS=3, NUM_STAGES=4, MERGE_KV=True, PIN_EXP=False, IS_LAZY=True, INTEGER_MAX=True)
# Without a mask, it is faster to round P right after its exponentials than right before its product, unless maxima are
# kept.
D64 = replace(D64_BANDED, CARRY_PAIRS=True)
# With two consumers, separate barriers win: Q K^T can start before V arrives.
D128 = ForwardTile(IS_LAZY=True, RESCALE_EARLY=True)
# Next to maxima that are kept, ptxas computes those of all rows before the first exponential. Integers take less time.
D128_TOP = replace(D128, INTEGER_MAX=True, CARRY_PAIRS=True)
# Rows of a tile mask differ as much in work as causal ones (see D256_CAUSAL).
D128_LISTED = replace(D128, TAKES_LATE=True)
# Two column parts of 128 + 64 instead of padding to 256.
D192 = ForwardTile(BLOCK_N=64, NUM_STAGES=3, Q_STAGES=1, MERGE_KV=True, OUT_IN_Q=True, IS_LAZY=True)
# O takes 128 registers of a thread, so the key tile is halved.
D256 = ForwardTile(BLOCK_N=64, Q_STAGES=1, MERGE_KV=True, PIN_EXP=False, OUT_IN_Q=True, IS_LAZY=True)
# Causal tiles differ much in work. A CTA that took its next tile early would hold it while other CTAs are idle.
D256_CAUSAL = replace(D256, TAKES_LATE=True)
# Q, one tile of K and one of V fill the shared memory.
D512 = ForwardTile(
    NUM_WARPGROUPS=1, BLOCK_N=64, NUM_STAGES=1, Q_STAGES=1, PIN_EXP=False, IS_LAZY=True, SHARES_ROWS=True
)
D512_CAUSAL = replace(D512, TAKES_LATE=True)

# head_dim 64: up to so many keys, four warpgroups on an SM (D64_QUAD) beat three that overlap more within themselves.
# Banded: a causal mask or a window.
QUAD_BANDED_SEQLEN_K, QUAD_SEQLEN_K = 4096, 1024
# And up to so many query rows, because too much of a tile of 192 rows would be empty or masked. Of packed sequences the
# mean counts.
QUAD_BANDED_ROWS, QUAD_ROWS = 2048, 512
# From this scale on, ordinary q and k may give scores above 2^31. EXACT makes them right, but costs a few per cent,
# so smaller scales do without it.
LARGE_SCALE = 1024.0
# dK and dV of wider heads do not fit into the registers of one warpgroup.
MAX_NARROW_HEAD_DIM = 128
# Contiguous columns of a swizzled 16-bit tile: the width of the boxes that TMA fetches from a page.
PANEL = 64
# Registers of an SM, and of a thread in the producer's warpgroup: the producer's warp and three idle ones.
SM_REGS, PRODUCER_REGS = 1 << 16, 24


def registers(warpgroups: int, ctas: int = 1) -> tuple[int, int]:
    """Registers of a thread at launch, and of a consumer thread after the producer's warpgroup has given up its own.

    >>> registers(2), registers(3), registers(2, ctas=2)
    ((168, 240), (128, 160), (80, 104))
    """
    first = SM_REGS // (ctas * 128 * (warpgroups + 1)) // 8 * 8
    return first, (first * (warpgroups + 1) - PRODUCER_REGS) // warpgroups // 8 * 8


CONSUMER_REGS = {warpgroups: registers(warpgroups)[1] for warpgroups in (2, 3)}


@dataclass(frozen=True)
class ForwardConfig(ForwardTile):
    """Everything the forward kernel is compiled for. Head dims are pairs of column parts (see `column_parts`).

    IS_PAGED: queries are packed, and keys are fetched from pages of PAGE_SIZE rows in boxes of CHUNK rows. EXACT:
    scores of any size are right even where a row's reference is its maximum (scores.row_scale). IS_LISTED: key tiles
    come from the lists of a tile mask (listed.py). KEEPS_TOP: the maxima of rows are kept next to references that stay
    behind them. SENDS_PLACES: consumers get the place of a tile from the producer.
    """

    D: int = 128
    D_REST: int = 0
    DV: int = 128
    DV_REST: int = 0
    CONSUMER_REGS: int = 240
    HAS_RIGHT: bool = False
    IS_CAUSAL: bool = False
    HAS_LEFT: bool = False
    HAS_SOFTCAP: bool = False
    HAS_SINKS: bool = False
    IS_VARLEN: bool = False
    IS_PAGED: bool = False
    PAGE_SIZE: int = 0
    CHUNK: int = 0
    EXACT: bool = False
    IS_LISTED: bool = False
    KEEPS_TOP: bool = False
    SENDS_PLACES: bool = False


@dataclass(frozen=True)
class BackwardConfig:
    """Everything the main backward kernels are compiled for. Head dims are pairs of column parts.

    WIDE              more than 128 columns: dK and dV (backward_wide.py), then dQ (query_gradient.py), every sum in a
                      fixed order. Otherwise one kernel (backward.py) that also adds to dQ, in any order.
    FIXED_POINT       dQ is summed in integers, so that the order does not matter (dq_tiles.py)
    SKIP_HIDDEN       the second warpgroup skips the products of query tiles that see none of its keys
    REBUILD_KV        the loops rebuild the wgmma descriptors of K and V for S^T and dP^T (primitives.rebuilt)
    REBUILD_DQ        and those of K for dQ
    AHEAD             idle warps clear dQ's accumulator for later tiles; with STATS_AHEAD they also compute their row
                      statistics (preparing.py)
    ENDING            how many of the last waves of heads are merged into one (schedule.place_of)
    NUM_STAGES        slots in the rings of Q and dO; in query_gradient.py slots for K, and V_STAGES slots for V
    EVEN_K            every key tile is whole
    IS_LISTED         query tiles come from the lists of a tile mask (listed.py)
    SENDS_PLACES      as in ForwardConfig
    """

    D: int = 128
    D_REST: int = 0
    DV: int = 128
    DV_REST: int = 0
    WIDE: bool = False
    BLOCK_M: int = 64
    BLOCK_N: int = 128
    NUM_STAGES: int = 2
    V_STAGES: int = 2
    SKIP_HIDDEN: bool = False
    REBUILD_KV: bool = False
    REBUILD_DQ: bool = False
    AHEAD: bool = False
    STATS_AHEAD: bool = False
    ENDING: int = 1
    FIXED_POINT: bool = False
    EVEN_K: bool = True
    HAS_RIGHT: bool = False
    IS_CAUSAL: bool = False
    HAS_LEFT: bool = False
    HAS_SOFTCAP: bool = False
    IS_VARLEN: bool = False
    IS_PAGED: bool = False  # pages have no gradient
    IS_LISTED: bool = False
    SENDS_PLACES: bool = False
    # Of query_gradient.py, whose blocks are 128 queries.
    NUM_WARPGROUPS: int = 2


# Query rows in a tile, by padded head dim: what fits next to dK and dV in 240 registers a thread.
BACKWARD_BLOCK_M = {64: 128, 128: 64}
# Up to so many keys it is faster to prepare later heads in idle warps: under a causal mask, or at head_dim 128 a tile
# mask; and without one.
AHEAD_SEQLEN_K, AHEAD_FULL_SEQLEN_K = 4096, 2048
# The same at head_dim 128, causal, with sums in fixed point. Longer sequences were not timed.
AHEAD_FIXED_SEQLEN_K = 1024
# From so many keys on average, packed sequences are not slower with preparation in idle warps.
LISTED_KEYS = 1024
# Merging the last waves lets the light tiles of all their heads come last, so that SMs finish together. But a larger
# wave has more heads to prepare before it starts. At head_dim 128, causal, the gain is larger only in this range of
# keys, and up to so many tiles in total.
ENDING_WAVES = 2
ENDING_SEQLEN_K, ENDING_TILES = (1024, 1280), 2560
# Up to so many keys, the dense causal backward at head_dim 64 is faster with rebuilt descriptors.
REBUILD_SEQLEN_K = 1024
# Shared memory of a CTA of query_gradient.py, in tiles of 64 x 64 16-bit elements (8 KiB).
QUERY_GRADIENT_TILES = 28


def backward_config(problem: AttentionProblem) -> BackwardConfig:
    """The configuration of a problem's backward."""
    d, d_rest = column_parts(problem.head_dim)
    dv, dv_rest = column_parts(problem.head_dim_v)
    packed = problem.kind == "varlen"
    wide = max(problem.head_dim, problem.head_dim_v) > MAX_NARROW_HEAD_DIM
    if not wide:  # pad the narrower of 64 and 128 columns: five products of 128 columns are cheaper than WIDE's seven
        d = dv = max(d, dv)
    block_n = 64 if wide else 128
    return BackwardConfig(
        D=d,
        D_REST=d_rest,
        DV=dv,
        DV_REST=dv_rest,
        WIDE=wide,
        BLOCK_M=64 if wide else BACKWARD_BLOCK_M[d],
        BLOCK_N=block_n,
        V_STAGES=_value_stages(d + d_rest, dv + dv_rest),
        FIXED_POINT=problem.deterministic and not wide,
        SKIP_HIDDEN=not wide and d == 128 and has_right(problem),
        REBUILD_KV=not wide and rebuilt_descriptors(problem)[0],
        REBUILD_DQ=not wide and rebuilt_descriptors(problem)[1],
        AHEAD=prepares_ahead(problem) or prepares_listed(problem),
        STATS_AHEAD=prepares_listed(problem) or (prepares_ahead(problem) and not problem.deterministic),
        ENDING=ENDING_WAVES if d == 128 and ends_together(problem) else 1,
        EVEN_K=not packed and problem.seqlen_k % block_n == 0,
        HAS_RIGHT=has_right(problem),
        IS_CAUSAL=has_right(problem) and problem.band[1] == 0,
        HAS_LEFT=has_left(problem),
        HAS_SOFTCAP=problem.softcap is not None,
        IS_VARLEN=packed,
        IS_LISTED=problem.tiles_shape is not None,
        SENDS_PLACES=packed,
    )


def rebuilt_descriptors(problem: AttentionProblem) -> tuple[bool, bool]:
    """(REBUILD_KV, REBUILD_DQ): whether the loop is faster if it rebuilds these descriptors instead of keeping them."""
    wide = max(problem.head_dim, problem.head_dim_v) > 64
    if problem.tiles_shape is not None:  # kept ones would spill, next to the place in a list
        return True, True
    if problem.softcap is not None:
        return True, not wide
    if wide:
        return has_right(problem) or problem.deterministic, has_right(problem)
    if not has_right(problem):
        return False, True
    # Longer dense sequences spend most time in the loop without a mask. There, kept descriptors cause no spills
    # or, with heads prepared in idle warps, cost less than rebuilt ones.
    short = problem.kind == "varlen" or problem.seqlen_k <= REBUILD_SEQLEN_K or problem.deterministic
    return (short and not has_left(problem),) * 2


def prepares_ahead(problem: AttentionProblem) -> bool:
    """Whether idle warps of the main kernel prepare later heads (preparing.py): where that measured faster."""
    longest = AHEAD_SEQLEN_K if has_right(problem) else AHEAD_FULL_SEQLEN_K
    wide = max(problem.head_dim, problem.head_dim_v) > 64
    if problem.tiles_shape is not None:
        longest = AHEAD_SEQLEN_K if wide else 0
    if problem.deterministic and wide:
        longest = AHEAD_FIXED_SEQLEN_K if has_right(problem) else 0
    return _is_plain(problem) and problem.seqlen_k <= longest


def prepares_listed(problem: AttentionProblem) -> bool:
    """Whether idle warps of the main kernel prepare packed sequences: where that measured no slower. GQA was slower."""
    banded = has_right(problem) and not has_left(problem)
    plain = banded and problem.softcap is None and problem.group_size == 1 and not problem.deterministic
    narrow = max(problem.head_dim, problem.head_dim_v) <= MAX_NARROW_HEAD_DIM
    long = problem.total_k >= LISTED_KEYS * problem.batch
    return problem.kind == "varlen" and plain and narrow and long


def ends_together(problem: AttentionProblem) -> bool:
    """Whether the last waves of heads are merged into one: see ENDING_WAVES."""
    first, last = ENDING_SEQLEN_K
    few = problem.batch * problem.num_kv_heads * problem.seqlen_k // 128 <= ENDING_TILES
    square = problem.seqlen_q == problem.seqlen_k and first <= problem.seqlen_k <= last
    return square and few and has_right(problem) and prepares_ahead(problem) and not problem.deterministic


def cuts_last_round(problem: AttentionProblem) -> bool:
    """Whether the last round of tiles may be cut in pieces (backward_pieces.py), if the plan finds that it pays."""
    banded = has_right(problem) or problem.tiles_shape is not None
    return _is_plain(problem) and not banded and not prepares_ahead(problem)


def _is_plain(problem: AttentionProblem) -> bool:
    """Dense, every head by itself, whole key tiles, at most a right edge, up to 128 columns."""
    plain = problem.softcap is None and not has_left(problem) and problem.group_size == 1
    narrow = max(problem.head_dim, problem.head_dim_v) <= MAX_NARROW_HEAD_DIM
    return problem.kind == "dense" and plain and narrow and problem.seqlen_k % 128 == 0


def _value_stages(width: int, width_v: int) -> int:
    """Two tiles of V where they fit next to 128 rows of Q and dO and two tiles of K, otherwise one.

    >>> [_value_stages(d, dv) for d, dv in ((256, 256), (256, 192), (192, 128))]
    [1, 2, 2]
    """
    return 2 if (4 * width + 4 * width_v) // 64 <= QUERY_GRADIENT_TILES else 1


def dq_blocks(config: BackwardConfig) -> int:
    """64 x 64 blocks of dQ in a query tile."""
    return config.BLOCK_M * (config.D + config.D_REST) // 4096


def column_parts(head_dim: int) -> tuple[int, int]:
    """Two powers of two that cover a head dim. TMA loads zeros into the columns past it and does not store them.

    >>> [column_parts(d) for d in (64, 96, 128, 192, 256, 320, 392)]
    [(64, 0), (128, 0), (128, 0), (128, 64), (256, 0), (256, 64), (256, 256)]
    """
    if 128 < head_dim <= 192:
        return 128, 64
    first, rest = (256, head_dim - 256) if head_dim > 256 else (0, head_dim)
    padded = next(width for width in (64, 128, 256) if rest <= width)
    return (first, padded) if first else (padded, 0)


def has_right(problem: AttentionProblem) -> bool:
    """Whether the band's right side cuts anything off."""
    right = problem.band[1]
    return right is not None and right < problem.seqlen_q - 1


def has_left(problem: AttentionProblem) -> bool:
    """Whether the band's left side cuts anything off."""
    left = problem.band[0]
    return left is not None and left < problem.seqlen_k - 1


def forward_config(problem: AttentionProblem) -> ForwardConfig:
    """The table's row for a problem, completed by what its features need."""
    tile = _forward_tile(problem)
    d, d_rest = column_parts(problem.head_dim)
    dv, dv_rest = column_parts(problem.head_dim_v)
    out_fits_q = dv == d and dv_rest in (0, d_rest)
    return ForwardConfig(
        **{**vars(tile), "OUT_IN_Q": tile.OUT_IN_Q and out_fits_q},
        D=d,
        D_REST=d_rest,
        DV=dv,
        DV_REST=dv_rest,
        CONSUMER_REGS=registers(2 if tile.SHARES_ROWS else tile.NUM_WARPGROUPS, tile.CTAS_PER_SM)[1],
        HAS_RIGHT=has_right(problem),
        IS_CAUSAL=has_right(problem) and problem.band[1] == 0,
        HAS_LEFT=has_left(problem),
        HAS_SOFTCAP=problem.softcap is not None,
        HAS_SINKS=problem.has_sinks,
        IS_VARLEN=problem.kind != "dense",
        IS_PAGED=problem.page_size is not None,
        PAGE_SIZE=problem.page_size or 0,
        CHUNK=math.gcd(problem.page_size or 0, tile.BLOCK_N),
        EXACT=problem.scale >= LARGE_SCALE and problem.softcap is None,
        IS_LISTED=problem.tiles_shape is not None,
        KEEPS_TOP=tile.IS_LAZY and problem.max_logits,
        SENDS_PLACES=problem.kind != "dense" or problem.tiles_shape is not None,
    )


def _forward_tile(problem: AttentionProblem) -> ForwardTile:
    width = max(sum(column_parts(problem.head_dim)), sum(column_parts(problem.head_dim_v)))
    banded = has_right(problem) or has_left(problem)
    packed = problem.kind != "dense"
    plain_causal = has_right(problem) and problem.band == (None, 0) and not packed
    if problem.tiles_shape is not None:
        return D64_QUAD if width == 64 else D128_LISTED
    if width == 64:
        rows = problem.total_q // problem.batch if packed else problem.seqlen_q
        most_keys, most_rows = (QUAD_BANDED_SEQLEN_K, QUAD_BANDED_ROWS) if banded else (QUAD_SEQLEN_K, QUAD_ROWS)
        # Softcap and left edges would spill: three warpgroups have 160 registers a thread.
        crowded = problem.softcap is not None or has_left(problem)
        # The mean length of packed sequences depends on the batch.
        crowded = crowded or (problem.batch_invariant and packed)
        if crowded or rows <= most_rows or (not packed and problem.seqlen_k <= most_keys):
            return D64_QUAD
        return D64_BANDED if banded or problem.max_logits else D64
    if width == 128:
        return D128_TOP if problem.max_logits and not banded else D128
    if width == 192:
        return D192
    if width > 256:
        return D512_CAUSAL if plain_causal else D512
    return D256_CAUSAL if plain_causal else D256
