"""Which tile a problem gets: a small table of what measured fastest on an H200, and what the kernel is compiled for.

TFLOP/s in the comments: bf16, 16384 tokens, 2048 = heads x head_dim, at N = 1024/4096/16384.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from tilewise.problem import AttentionProblem

__all__ = [
    "BackwardConfig",
    "ForwardConfig",
    "ForwardTile",
    "backward_config",
    "column_parts",
    "dq_blocks",
    "forward_config",
    "has_left",
    "has_right",
    "prepares_ahead",
]


@dataclass(frozen=True)
class ForwardTile:
    """One row of the table.

    NUM_WARPGROUPS of 64 query rows; BLOCK_N keys in a tile; NUM_STAGES slots in the K and V rings and Q_STAGES in Q's;
    MERGE_KV: K_i and V_{i-1} share a slot, one barrier less per tile; PIN_EXP: keep the exponentials ahead of the wait
    for P V; IS_LAZY: the reference of a row's softmax and O move only when scores outgrow it (see scores.py), VOTES:
    which a thread sees by its own scores; AT_ONCE: which the sums tell afterwards, and rows that are lost by it get a
    second kernel (again.py); MENDS_P: before P of the same tile are rounded, so that they fit into fp16; RESCALE_EARLY:
    rescale O between Q K^T and P V; SPLIT_SUM: no shuffles in the row sums; OUT_IN_Q: O leaves through Q's buffer;
    CTAS_PER_SM: more than one run the kernel of forward_quad.py; PASSES_OVER: a warpgroup passes over key tiles that
    only others of its CTA see; TAKES_LATE: a CTA takes its next tile at the end of this one's keys, not at their start.
    """

    NUM_WARPGROUPS: int = 2
    BLOCK_N: int = 128
    NUM_STAGES: int = 2
    Q_STAGES: int = 2
    MERGE_KV: bool = False
    PIN_EXP: bool = True
    IS_LAZY: bool = False
    VOTES: bool = False
    AT_ONCE: bool = False
    MENDS_P: bool = False
    RESCALE_EARLY: bool = False
    SPLIT_SUM: bool = True
    OUT_IN_Q: bool = False
    CTAS_PER_SM: int = 1
    PASSES_OVER: bool = False
    TAKES_LATE: bool = False


# Two CTAs an SM. N = 128/256/512/1024/2048/4096: full 68/92/162/289/585/1164 us, with two warpgroups that overlap more
# 68/101/177/306/628/1231; causal 70/79/112/175/315/592, 74/101/135/202/347/663.
D64_QUAD = ForwardTile(BLOCK_N=64, NUM_STAGES=4, CTAS_PER_SM=2)
# Voting: causal N = 256/4096 87/654 -> 82/633 us, packed mix 353 -> 338, a window of 1024 at 16384 403 -> 373 (with two
# warpgroups 417). Not without a mask, where the first tile would get one for it: full N = 256/1024 91/304 -> 94/306.
D64_QUAD_BANDED = replace(D64_QUAD, IS_LAZY=True, VOTES=True)
# At once: full N = 512/1024/2048 157/295/507 -> 148/267/487 us (2048: three warpgroups before), packed mix 566 -> 535;
# causal 512/2048 107/271 -> 103/266, mix 305 -> 299; a window of 1024 at 16384 359 -> 325.
D64_QUAD_AT_ONCE = replace(D64_QUAD, IS_LAZY=True, AT_ONCE=True)
# P mended: fp16 full N = 1024 315 -> 290 us, causal 1024/4096 187/607 -> 177/549 (bf16 at once 284, 174/531).
D64_QUAD_MENDED = replace(D64_QUAD_AT_ONCE, MENDS_P=True)
# Three warpgroups, 4 stages: 412/506/541 full, 428/520 causal at 4k/16k. Merged barriers pay with three consumers.
D64_BANDED = ForwardTile(NUM_WARPGROUPS=3, NUM_STAGES=4, MERGE_KV=True, PIN_EXP=False, SPLIT_SUM=False)
# Lazy: full at 4k/16k 499/511 -> 505/539, causal at 16k 541 -> 514. With split sums 489/525.
D64_FULL = replace(D64_BANDED, IS_LAZY=True)
# At once: full at 2k/4k/16k 474/488/514 -> 531/551/602 (cuDNN 446/447/452), packed mix 503 -> 543.
D64_AT_ONCE = replace(D64_FULL, AT_ONCE=True, PIN_EXP=True, SPLIT_SUM=True)
# P mended: fp16 full at 4k/16k 1165/4365 -> 1012/3761 us (bf16 at once 1008/3788).
D64_MENDED = replace(D64_AT_ONCE, MENDS_P=True)
# Causal at 16k 544 -> 560, again 510 -> 533. Pinned, its loops spill (107 times).
D64_BANDED_AT_ONCE = replace(D64_AT_ONCE, PIN_EXP=False)
# Dense and causal, tiles that 64 rows do not see (a third of the masked ones) passed over: 2038 -> 1845 us at 16k.
D64_CAUSAL = replace(D64_BANDED_AT_ONCE, PASSES_OVER=True)
# P mended: fp16 causal at 16k 2188 -> 2056 us (bf16 at once 1928); pinned 2004, with 16 spills, four warpgroups 2069.
D64_BANDED_MENDED = replace(D64_BANDED_AT_ONCE, MENDS_P=True)
D64_CAUSAL_MENDED = replace(D64_CAUSAL, MENDS_P=True)
# Separate K and V barriers: 419/576/623 -> 454/597/656 causal.
D128_BANDED = ForwardTile()
# Lazy and early: full at 4k/16k 724/666 -> 745/698, causal 643/667 -> 660/644.
D128_FULL = ForwardTile(IS_LAZY=True, RESCALE_EARLY=True)
# At once: causal N = 1024/2048/4096/16384 142/251/437/1493 -> 140/236/421/1483 us, packed mix 245 -> 232; full
# 1024/2048/4096 204/380/717 -> 206/374/706, packed mix 461 -> 435. (From 4096 on at once before, lost rows in place.)
D128_AT_ONCE = ForwardTile(IS_LAZY=True, AT_ONCE=True)
# P mended: fp16 causal at 1k/4k/16k 160/461/1744 -> 157/426/1545 us (bf16 at once 156/421/1537, mended 157/437/1553);
# full 2k and more: at 4k/16k fp16 836/3262 -> 790/3010, bf16 at once 801/3076 -> 791/3022.
D128_MENDED = replace(D128_AT_ONCE, MENDS_P=True)
# As two column parts 128 + 64 instead of padding to 256. Voting: 4k 672 -> 757 full (cuDNN 670), 579 -> 648 causal.
D192 = ForwardTile(
    BLOCK_N=64, NUM_STAGES=3, Q_STAGES=1, MERGE_KV=True, PIN_EXP=False, OUT_IN_Q=True, IS_LAZY=True, VOTES=True
)
# At once: full at 1k/2k/4k/16k 159/290/546/2336 -> 157/280/527/2219 us, packed mix 321 -> 310. P mended, full at 4k:
# 743 -> 727, from voting 786; in fp16 781 -> 728.
D192_MENDED = replace(D192, VOTES=False, AT_ONCE=True, MENDS_P=True, PIN_EXP=True)
# Dense and causal at 4k: 459 -> 422 us, in fp16 464 -> 424 (at once, P not mended 421; tiles not passed over 440).
D192_CAUSAL_MENDED = replace(D192_MENDED, PASSES_OVER=True)
# O takes 128 registers of a thread, so the key tile is halved. Lazy: 4k/16k 748/708 -> 778/746 full, 1k/16k 473/662 ->
# 485/668 causal.
D256 = ForwardTile(BLOCK_N=64, Q_STAGES=1, MERGE_KV=True, PIN_EXP=False, OUT_IN_Q=True, IS_LAZY=True)
# Dense and causal: at 16k 1620 -> 1493 us; tiles passed over alone 453 -> 442 at 4k, 151 -> 146 at 1k.
D256_CAUSAL = replace(D256, PASSES_OVER=True, TAKES_LATE=True)
# What fp16, which ends at 2^16, has in the places of rows of bf16.
HALVES = {
    D64_QUAD_AT_ONCE: D64_QUAD_MENDED,
    D64_AT_ONCE: D64_MENDED,
    D64_BANDED_AT_ONCE: D64_BANDED_MENDED,
    D64_CAUSAL: D64_CAUSAL_MENDED,
    D128_AT_ONCE: D128_MENDED,
}

# Keys up to which four warpgroups an SM beat three that overlap more (D=64), with a band and without: causal 611 us
# instead of 619 at 4096, 2373 instead of 2123 at 16384; full 308 instead of 338 at 1024, 588 instead of 578 at 2048, at
# once 487 instead of 499 at 2048, 931 instead of 932 at 4096.
QUAD_BANDED_SEQLEN_K, QUAD_SEQLEN_K, QUAD_AT_ONCE_SEQLEN_K = 4096, 1024, 2048
# Query rows up to which too much of a tile of 192 is empty or masked: a third at 256 without a band. Of packed ones
# the mean counts: 16 of 7 to 4096 tokens, causal, 338 us, with two warpgroups 368, with three 387; full, at once, with
# four 535, with three 558.
QUAD_BANDED_ROWS, QUAD_ROWS, QUAD_PACKED_ROWS = 2048, 512, 2048
# Keys from which P at once is ahead of what it adds: the end of a query block, and 2 us for the kernel that looks for
# lost rows. By width and whether there is a band. D=64 N = 256 full 89.3 -> 89.9 us, causal 75.8 -> 75.9; D=128 full
# 1024 204 -> 206, causal 512 95.5 -> 95.7. D=256 1024/4096 full 195/684 -> 200/688, causal 128/370 -> 134/379.
AT_ONCE_KEYS = {
    (64, False): 512, (64, True): 512, (128, False): 2048, (128, True): 1024, (192, False): 1024, (192, True): 2048,
}  # fmt: skip
# Keys of packed sequences, in the mean. D=64 32 x 512 full 164 -> 154 us, causal 111 -> 109; D=128 causal 64 x 256,
# 32 x 512, 16 x 1024 81/100/149 -> 84/104/145, full 16 x 1024 228 -> 218. D=192 with a mask was not timed.
AT_ONCE_PACKED_KEYS = {(64, False): 512, (64, True): 512, (128, False): 1024, (128, True): 1024, (192, False): 1024}
# Keys of a window, D=64. 128/256/512/1024/4096 at 16384: 132/152/213/349/1052 -> 135/151/201/316/907 us.
AT_ONCE_WINDOW = 512
# A scale from which on scores of ordinary q and k may pass 2^31. To be right there takes 2 to 6 % of a forward whose
# references are maxima (D=128, N=1024 full 210 -> 222 us), which no other scale pays.
LARGE_SCALE = 1024.0
# dK and dV of wider heads do not fit into the registers of one warpgroup. Resting at D=128 (N=1k/4k/16k, causal):
# 343/511/577 -> 343/521/599; at D=64, where half a warpgroup's tile is hidden, it cost 6 to 10 %.
MAX_NARROW_HEAD_DIM = 128
# Columns of a swizzled tile that lie together: what TMA fetches of a page at a time.
PANEL = 64
# Registers of an SM; of a thread beside the consumers (the producer's warp and three that are not used).
SM_REGS, PRODUCER_REGS = 1 << 16, 24


def registers(warpgroups: int, ctas: int = 1) -> tuple[int, int]:
    """Registers of a thread when a kernel starts, and of a consumer's after the producer has given up its own.

    >>> registers(2), registers(3), registers(2, ctas=2)
    ((168, 240), (128, 160), (80, 104))
    """
    first = SM_REGS // (ctas * 128 * (warpgroups + 1)) // 8 * 8
    return first, (first * (warpgroups + 1) - PRODUCER_REGS) // warpgroups // 8 * 8


CONSUMER_REGS = {warpgroups: registers(warpgroups)[1] for warpgroups in (2, 3)}


@dataclass(frozen=True)
class ForwardConfig(ForwardTile):
    """Everything the forward kernel is compiled for; head dims are pairs of column parts (see `column_parts`).

    IS_PAGED: queries are packed, keys come from pages of PAGE_SIZE rows, CHUNK rows at a time. EXACT: scores of any
    size are right also where a row's reference is its maximum (scores.row_scale).
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


@dataclass(frozen=True)
class BackwardConfig:
    """Everything the main backward kernels are compiled for; head dims are pairs of column parts.

    WIDE: the kernels for more than 128 columns: dK and dV (backward_wide.py), then dQ (query_gradient.py), all summed
    in a fixed order. Else one kernel (backward.py) that adds to dQ as well, in any order; FIXED_POINT: in integers, so
    that the order does not matter (dq_tiles.py). SKIP_HIDDEN: its second warpgroup rests where it sees nothing.
    ANEW_KV, ANEW_DQ: its loops make the descriptors of K and V anew (primitives.py), for S^T and dP^T, for dQ. AHEAD:
    it clears dQ for later tiles and, with STATS_AHEAD, computes their row statistics (preparing.py). FINISHES: and
    makes dQ of heads that are done, whose sums then lie in a ring (finishing.py). ENDING: how many of the last waves of
    heads are one (schedule.place_of).
    NUM_STAGES slots in the rings of Q and dO; where dQ has a kernel of its own, NUM_STAGES of K and V_STAGES of V.
    EVEN_K: every key tile is whole.
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
    ANEW_KV: bool = False
    ANEW_DQ: bool = False
    AHEAD: bool = False
    STATS_AHEAD: bool = False
    FINISHES: bool = False
    ENDING: int = 1
    FIXED_POINT: bool = False
    EVEN_K: bool = True
    HAS_RIGHT: bool = False
    IS_CAUSAL: bool = False
    HAS_LEFT: bool = False
    HAS_SOFTCAP: bool = False
    IS_VARLEN: bool = False
    IS_PAGED: bool = False  # pages have no gradient
    # Of the kernel that computes dQ alone: its blocks are 128 queries.
    NUM_WARPGROUPS: int = 2


# Query rows in a tile, by padded head dim: what fits beside dK and dV in 240 registers a thread.
BACKWARD_BLOCK_M = {64: 128, 128: 64}
# The longest sequences whose backward is faster with heads prepared beside it: under a causal mask, and without.
AHEAD_SEQLEN_K, AHEAD_FULL_SEQLEN_K = 4096, 2048
# The longest ones of these at D=128, under a causal mask, with sums in fixed point; longer ones were not timed.
AHEAD_FIXED_SEQLEN_K = 1024
# Keys of packed sequences, in the mean, from which it is not slower with sequences prepared beside it. D=128 causal,
# 512/1024/2048/4096/8192 keys each: 204/305/393/470/519 -> 201/305/392/475/523 TFLOP/s.
LISTED_KEYS = 1024
# The longest ones whose backward at D=128, under a causal mask, is faster with dQ finished in the main kernel; longer
# ones were not timed.
FINISHED_SEQLEN_K = 16384
# At D=128, under a causal mask, with heads prepared beside: how many of the last waves are one, so that light tiles of
# all their heads come last. N=1024, 1/2/3/4: 486.1/483.7/488.9/486.4 us, SMs busy 95.8/98.2/97.6/98.8 % by count; but a
# larger wave has a longer front, and with 2, N = 512/2048/4096 take 1.008/1.007/1.006 of the time, D=64 at 1024 1.021.
# So only for so many keys, and tiles in all: there SMs are 2 % more busy by count.
ENDING_WAVES = 2
ENDING_SEQLEN_K, ENDING_TILES = (1024, 1280), 2560
# The longest dense sequences whose backward at D=64, under a causal mask, is faster with descriptors made anew.
ANEW_SEQLEN_K = 1024
# Tiles of 64 rows and 64 columns of 16 bits (8 KiB) in the shared memory of a CTA that computes dQ alone.
QUERY_GRADIENT_TILES = 28


def backward_config(problem: AttentionProblem) -> BackwardConfig:
    """The configuration of a problem's backward."""
    d, d_rest = column_parts(problem.head_dim)
    dv, dv_rest = column_parts(problem.head_dim_v)
    packed = problem.kind == "varlen"
    wide = max(problem.head_dim, problem.head_dim_v) > MAX_NARROW_HEAD_DIM
    if not wide:  # the narrower of 64 and 128 columns is padded: five products of 128 are fewer cycles than seven
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
        ANEW_KV=not wide and descriptors_anew(problem)[0],
        ANEW_DQ=not wide and descriptors_anew(problem)[1],
        AHEAD=prepares_ahead(problem) or finishes_inside(problem) or prepares_listed(problem),
        STATS_AHEAD=finishes_inside(problem)
        or prepares_listed(problem)
        or (prepares_ahead(problem) and not problem.deterministic),
        FINISHES=finishes_inside(problem),
        ENDING=ENDING_WAVES if d == 128 and ends_together(problem) else 1,
        EVEN_K=not packed and problem.seqlen_k % block_n == 0,
        HAS_RIGHT=has_right(problem),
        IS_CAUSAL=has_right(problem) and problem.band[1] == 0,
        HAS_LEFT=has_left(problem),
        HAS_SOFTCAP=problem.softcap is not None,
        IS_VARLEN=packed,
    )


def descriptors_anew(problem: AttentionProblem) -> tuple[bool, bool]:
    """(ANEW_KV, ANEW_DQ): whether a loop without these descriptors in registers is faster, by its head dim and mask.

    TFLOP/s with neither, KV, DQ, both. D=128 causal, N = 1024/4096: 339/505, 356/515, 346/496, 362/520; 16384: 566,
    579, 562, 567; packed 422, 444, 426, 443; softcap 411, 470, 469, 455; no mask, N = 4096/16384: 556/591, 550/582,
    548/580, 546/578. D=64, N = 1024/4096/16384: 416/508/526, 412/485/502, 428/508/535, 429/496/517; causal 322/472/510,
    313/444/515, 319/446/503, 326/454/514; packed 386, 392, 388, 389; softcap 329, 333, 331, 336.
    """
    wide = max(problem.head_dim, problem.head_dim_v) > 64
    if problem.softcap is not None:
        return True, not wide
    if wide:
        return has_right(problem) or problem.deterministic, has_right(problem) and not finishes_inside(problem)
    if not has_right(problem):
        return False, True
    # Longer dense ones spill nothing in the loop without a mask or, with heads prepared beside it, cost less than this.
    short = problem.kind == "varlen" or problem.seqlen_k <= ANEW_SEQLEN_K or problem.deterministic
    return (short and not has_left(problem),) * 2


def prepares_ahead(problem: AttentionProblem) -> bool:
    """Whether heads are prepared beside the main kernel (preparing.py): where that was timed and is faster.

    TFLOP/s at N = 1024/2048/4096: D=64 causal 303/386/456 -> 328/410/488, D=128 causal 344/442/512 -> 357/451/525;
    D=64 full 445/475/516 -> 450/474/506, D=128 full 468/574/570 -> 476/579/553. In fixed point, D=128, N=1024, us:
    causal 545 -> 536, full 811 -> 817.
    """
    longest = AHEAD_SEQLEN_K if has_right(problem) else AHEAD_FULL_SEQLEN_K
    if problem.deterministic and max(problem.head_dim, problem.head_dim_v) > 64:
        longest = AHEAD_FIXED_SEQLEN_K if has_right(problem) else 0
    return _is_plain(problem) and problem.seqlen_k <= longest


def prepares_listed(problem: AttentionProblem) -> bool:
    """Whether packed sequences are prepared beside the main kernel: where that was timed and is not slower.

    TFLOP/s, causal, 16 sequences of 7 to 4096 keys: D=64 357 -> 376, D=128 414 -> 424; GQA 32/8 395 -> 383.
    """
    banded = has_right(problem) and not has_left(problem)
    plain = banded and problem.softcap is None and problem.group_size == 1 and not problem.deterministic
    narrow = max(problem.head_dim, problem.head_dim_v) <= MAX_NARROW_HEAD_DIM
    long = problem.total_k >= LISTED_KEYS * problem.batch
    return problem.kind == "varlen" and plain and narrow and long


def finishes_inside(problem: AttentionProblem) -> bool:
    """Whether the main kernel makes dQ out of its sums as well (finishing.py): where that was timed and is faster.

    TFLOP/s, D=128 causal, N = 1024/4096/8192/16384: 357/525/501/578 -> 326/517/521/587 (the first two: with heads
    prepared beside it both times).
    """
    narrow = max(problem.head_dim, problem.head_dim_v) <= 64
    long = AHEAD_SEQLEN_K < problem.seqlen_k <= FINISHED_SEQLEN_K
    return _is_plain(problem) and has_right(problem) and long and not narrow and not problem.deterministic


def ends_together(problem: AttentionProblem) -> bool:
    """Whether the last waves of heads are one, where heads are prepared beside the main kernel: see ENDING_WAVES."""
    first, last = ENDING_SEQLEN_K
    few = problem.batch * problem.num_kv_heads * problem.seqlen_k // 128 <= ENDING_TILES
    square = problem.seqlen_q == problem.seqlen_k and first <= problem.seqlen_k <= last
    return square and few and has_right(problem) and prepares_ahead(problem) and not problem.deterministic


def cuts_last_round(problem: AttentionProblem) -> bool:
    """Whether the last round of tiles may be cut in pieces (backward_pieces.py), if the plan finds that it pays.

    TFLOP/s without a mask, N = 4096/16384: D=128 566/598 -> 574/611, again 553/592 -> 560/610; D=64 at 16384
    544 -> 558. Sums in fixed point were judged right, too; how much of their gain is this was not timed.
    """
    return _is_plain(problem) and not has_right(problem) and not prepares_ahead(problem)


def _is_plain(problem: AttentionProblem) -> bool:
    """Dense, every head by itself, whole key tiles, at most a right edge, up to 128 columns."""
    plain = problem.softcap is None and not has_left(problem) and problem.group_size == 1
    narrow = max(problem.head_dim, problem.head_dim_v) <= MAX_NARROW_HEAD_DIM
    return problem.kind == "dense" and plain and narrow and problem.seqlen_k % 128 == 0


def _value_stages(width: int, width_v: int) -> int:
    """Two tiles of V where they fit beside 128 rows of Q and dO and two tiles of K, else one (256 columns in both).

    >>> [_value_stages(d, dv) for d, dv in ((256, 256), (256, 192), (192, 128))]
    [1, 2, 2]
    """
    return 2 if (4 * width + 4 * width_v) // 64 <= QUERY_GRADIENT_TILES else 1


def dq_blocks(config: BackwardConfig) -> int:
    """64 x 64 blocks of dQ in a query tile."""
    return config.BLOCK_M * (config.D + config.D_REST) // 4096


def column_parts(head_dim: int) -> tuple[int, int]:
    """Powers of two that cover a head dim; TMA fills the columns past it with zeros and does not store them.

    >>> [column_parts(d) for d in (64, 96, 128, 192, 256)]
    [(64, 0), (128, 0), (128, 0), (128, 64), (256, 0)]
    """
    if 128 < head_dim <= 192:
        return 128, 64
    return next(width for width in (64, 128, 256) if head_dim <= width), 0


def has_right(problem: AttentionProblem) -> bool:
    """Whether the band's right side cuts anything off."""
    right = problem.band[1]
    return right is not None and right < problem.seqlen_q - 1


def has_left(problem: AttentionProblem) -> bool:
    """Whether the band's left side cuts anything off."""
    left = problem.band[0]
    return left is not None and left < problem.seqlen_k - 1


def forward_config(problem: AttentionProblem) -> ForwardConfig:
    """The table's row for a problem, with what its features add."""
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
        CONSUMER_REGS=registers(tile.NUM_WARPGROUPS, tile.CTAS_PER_SM)[1],
        HAS_RIGHT=has_right(problem),
        IS_CAUSAL=has_right(problem) and problem.band[1] == 0,
        HAS_LEFT=has_left(problem),
        HAS_SOFTCAP=problem.softcap is not None,
        HAS_SINKS=problem.has_sinks,
        IS_VARLEN=problem.kind != "dense",
        IS_PAGED=problem.page_size is not None,
        PAGE_SIZE=problem.page_size or 0,
        CHUNK=math.gcd(problem.page_size or 0, tile.BLOCK_N),
        EXACT=_is_exact(problem, tile),
    )


def _is_exact(problem: AttentionProblem, tile: ForwardTile) -> bool:
    """Whether scores may be so large that they need it, by the scale, and the tile does not do without."""
    return problem.scale >= LARGE_SCALE and problem.softcap is None and not (tile.AT_ONCE or tile.VOTES)


def _at_once(problem: AttentionProblem, keys: int, width: int) -> bool:
    """Whether P at once is there for the problem, what it loses can be computed again, and it was timed.

    Not from pages. Left edges at D=64 alone: D=128 with a window of 1024 at 16384 249 -> 250 us.
    """
    left, right = problem.band
    if has_left(problem):
        assert left is not None
        keys = min(keys, left + 1 + (right or 0))
    windowed = (has_left(problem) and width != 64) or (has_right(problem) and right != 0)
    plain = problem.page_size is None and problem.softcap is None and not windowed
    fits = problem.head_dim == problem.head_dim_v == width
    banded, packed = has_right(problem) or has_left(problem), problem.kind != "dense"
    least = (AT_ONCE_PACKED_KEYS if packed else AT_ONCE_KEYS).get((width, banded), math.inf)
    return plain and fits and keys >= (max(least, AT_ONCE_WINDOW) if has_left(problem) else least)


def _forward_tile(problem: AttentionProblem) -> ForwardTile:
    tile = _wide_tile(problem)
    return HALVES.get(tile, tile) if problem.dtype == torch.float16 else tile


def _wide_tile(problem: AttentionProblem) -> ForwardTile:
    """Of P in bf16."""
    width = max(sum(column_parts(problem.head_dim)), sum(column_parts(problem.head_dim_v)))
    banded = has_right(problem) or has_left(problem)
    packed = problem.kind != "dense"
    plain_causal = has_right(problem) and problem.band == (None, 0) and not packed
    rows = problem.total_q // problem.batch if packed else problem.seqlen_q
    at_once = _at_once(problem, problem.total_k // problem.batch if packed else problem.seqlen_k, width)
    if width == 64:
        most_keys, most_rows = QUAD_BANDED_SEQLEN_K, QUAD_BANDED_ROWS
        if not banded:
            most_keys = QUAD_AT_ONCE_SEQLEN_K if at_once else QUAD_SEQLEN_K
            most_rows = QUAD_PACKED_ROWS if at_once and packed else QUAD_ROWS
        # Softcap and left edges do not fit into the 160 registers of three warpgroups (64 spills in the hot loops).
        crowded = problem.softcap is not None or has_left(problem)
        if crowded or rows <= most_rows or (not packed and problem.seqlen_k <= most_keys):
            return D64_QUAD_AT_ONCE if at_once else D64_QUAD_BANDED if banded else D64_QUAD
        if banded:
            return (D64_CAUSAL if plain_causal else D64_BANDED_AT_ONCE) if at_once else D64_BANDED
        return D64_AT_ONCE if at_once else D64_FULL
    if width == 128:
        if at_once:
            return D128_AT_ONCE if banded else D128_MENDED
        return D128_BANDED if banded else D128_FULL
    if width == 192:
        return (D192_CAUSAL_MENDED if plain_causal else D192_MENDED) if at_once else D192
    return D256_CAUSAL if plain_causal else D256
