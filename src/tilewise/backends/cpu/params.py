"""The parameter block: one flat array of int64 that a compiled kernel reads everything from.

Pointers are addresses, strides are bytes, floats are the bits of an fp32. A pointer of 0 means "not there". Constants
named `WS_*` are offsets within one thread's workspace. The constants below are positions in the block, counted in
the order of their declaration; `new_block` builds it. After them come the layouts of what kernels keep in a workspace.
"""

from __future__ import annotations

import itertools
import struct
from array import array
from collections.abc import Mapping

_positions = itertools.count(1)


def _take(count: int) -> tuple[int, ...]:
    """The next positions."""
    return tuple(itertools.islice(_positions, count))


# What every kernel needs: the work items, how threads share them, and the workspaces.
NUM_ITEMS, SCHEDULE, UNITS, HEADS_PER_UNIT, WORKSPACE, WORKSPACE_BYTES = _take(6)
# Operands of the forward pass and their strides.
Q, Q_BATCH, Q_HEAD, Q_ROW = _take(4)
K, K_BATCH, K_HEAD, K_ROW = _take(4)
V, V_BATCH, V_HEAD, V_ROW = _take(4)
OUT, OUT_BATCH, OUT_HEAD, OUT_ROW = _take(4)
LSE, LSE_BATCH, LSE_HEAD = _take(3)
# Sequences: lengths, or tables of them; pages.
SEQLEN_Q, SEQLEN_K, CU_SEQLENS_Q, CU_SEQLENS_K, SEQLENS_K, BLOCK_TABLE, BLOCK_TABLE_ROW, PAGE_SIZE = _take(8)
# Sizes and dtypes: of results (and, where it is not e4m3, of q), of K and V.
NUM_HEADS, GROUP_SIZE, HEAD_DIM, HEAD_DIM_V, DIM_PADDED, DIM_LANES, DIM_V_PADDED, DTYPE, KV_DTYPE = _take(9)
# Semantics.
Q_SCALE, WINDOW_LEFT, WINDOW_RIGHT, FEATURES = _take(4)
BIAS, BIAS_BATCH, BIAS_HEAD, BIAS_ROW, BIAS_KEY, BIAS_DTYPE = _take(6)
MASK, MASK_BATCH, MASK_HEAD, MASK_ROW, MASK_KEY = _take(5)
ALIBI, ALIBI_BATCH, ALIBI_HEAD, SINKS, DROPOUT_THRESHOLD, KEEP_SCALE, SEED_LOW, SEED_HIGH = _take(8)
# Splitting over keys.
CHUNK, PARTIALS, PARTIAL_BYTES, DONE = _take(4)
# Workspace.
WS_Q, WS_ACC, WS_K, WS_V, WS_SCORES, WS_EXTRA, WS_ROWS, WS_PANELS, WS_STAGE, WS_MAX, WS_ALPHA = _take(11)
BLOCK_M, DIM_V_LANES = _take(2)
# Backward: the gradient that comes in, those that go out, and where rows of dk and dv start (0: dense).
DOUT, DOUT_BATCH, DOUT_HEAD, DOUT_ROW = _take(4)
DQ, DQ_BATCH, DQ_HEAD, DQ_ROW = _take(4)
DK, DK_BATCH, DK_HEAD, DK_ROW = _take(4)
DV, DV_BATCH, DV_HEAD, DV_ROW = _take(4)
DLSE, DELTA, SCALE, WORK, CU_GRADS_K, KV_GRAD_DTYPE, DIM_WIDE, DIM_V_WIDE = _take(8)
DBIAS, DBIAS_BATCH, DBIAS_HEAD, DBIAS_ROW, DBIAS_KEY = _take(5)
WS_DOUT, WS_DSCORES, WS_Q_ROWS, WS_DOUT_ROWS, WS_DQ, WS_DK, WS_DV, WS_CAP, WS_ONES, WS_LSE, WS_DELTA, WS_HEAD_ROW = (
    _take(12)
)
LSE_HIGH, LSE_LOW, LSE_TO_LOG2, TO_LOG2, WS_K_COLUMNS = _take(5)
# Forward on a matrix unit.
WS_ACC_T, WS_WEIGHTS, WS_PRODUCT, WS_V_ROWS, WS_TILES = _take(5)
# Where dropout counts from: not 0 for a part of a larger problem.
ORIGIN_BATCH, ORIGIN_HEAD, ORIGIN_ROW, ORIGIN_KEY = _take(4)
# The rest of lse's factor and of lse in log2 units, beyond fp32.
LSE_TO_LOG2_LOW, WS_LSE_LOW = _take(2)
# The dtype of q, and the scales of e4m3 operands: address (0: no scales), strides of a sequence or page, a head and a
# block, and the rows of a block (0: all rows of a head share one).
Q_DTYPE = next(_positions)
Q_SCALES, K_SCALES, V_SCALES = _take(15)[::5]
# Items of decoding that a thread takes at a time.
ITEMS_AT_ONCE = next(_positions)
# Whether rows are merged into existing results (0: no), and which of their rows they are (0: the same numbers).
IS_MERGED, MERGED_ROWS = _take(2)
# Answering signals (see stopping.py): a callback (0: none) and when it is due, the thread that calls it, functions that
# say which thread this is and what time it is, where the time is put, and one that sleeps; whether the call is to end
# early, and how many threads are through.
POLL, NEXT_POLL, CALLER, THREAD_ID, CLOCK, CLOCK_ID, CLOCK_SECONDS, CLOCK_NANOSECONDS, SLEEP = _take(9)
STOP, THROUGH = _take(2)
# Totals of a block over long runs of keys, and the rounding error of their sums (0: no run is that long).
WS_TOTAL, WS_CARRY = _take(2)
# Tangents and second derivatives: the tangents of q, k, v and of out (address 0: none), of lse and of the sinks.
TQ, TQ_BATCH, TQ_HEAD, TQ_ROW = _take(4)
TK, TK_BATCH, TK_HEAD, TK_ROW = _take(4)
TV, TV_BATCH, TV_HEAD, TV_ROW = _take(4)
TOUT, TOUT_BATCH, TOUT_HEAD, TOUT_ROW = _take(4)
TLSE, TSINKS = _take(2)
# Whether bias has a tangent, and how many bytes it lies behind the bias, whose strides and dtype it has.
HAS_TBIAS, TBIAS_BEHIND = _take(2)
# The factor from a product with packed q to a tangent of scores; 2 / softcap; an address for dout . out' (0: none).
TANGENT_SCALE, TWICE_PER_CAP, RATE = _take(3)
WS_TQ, WS_TK, WS_TV, WS_TSCORES, WS_TACC, WS_TSUM, WS_TQ_ROWS, WS_TK_COLUMNS, WS_USCORES, WS_TANH, WS_RATE, WS_TLSE = (
    _take(12)
)
# Scale fields that are 0, for tensors that are never e4m3.
NO_SCALES = _take(5)[0]
# A tile mask: its map (0: none) with the byte strides of a sequence, a head and a row of tiles, the keys that the map
# covers, and the bits of tiles that are visible in part: address and number of tiles.
TILES, TILES_BATCH, TILES_HEAD, TILES_ROW, TILES_KEYS, TILE_BITS, NUM_TILE_BITS = _take(7)
# The largest score of each row, with the strides of lse (0: not wanted).
LARGEST = next(_positions)
# Fields of a problem that kernels read as they are, in fp32 (0: none).
NUMBERS = {name: next(_positions) for name in ("softcap",)}
(SOFTCAP,) = NUMBERS.values()
# A whole number of cache lines.
BLOCK_FIELDS = -(-next(_positions) // 8) * 8

# Bits of WORK: what a backward pass produces.
MAKES_DQ, MAKES_DKV, MAKES_DBIAS = 1, 2, 4

# Bits of FEATURES, what a panel needs besides the plain product, by the field of a problem that turns each on.
FEATURE_BITS = {name: 1 << i for i, name in enumerate(("softcap", "has_alibi", "bias_shape", "mask_shape", "dropout"))}
HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS, HAS_MASK, HAS_DROPOUT = FEATURE_BITS.values()
# What scores have a slope by, which `change_scores` stores and the backward multiplies dS by.
HAS_SLOPE = HAS_SOFTCAP
# What changes scores, and so the row maximum; dropout acts on probabilities.
CHANGES_SCORES = sum(FEATURE_BITS.values()) - HAS_DROPOUT
# What needs per-row tables of positions, slopes and addresses.
NEEDS_ROW_TABLE = HAS_ALIBI | HAS_BIAS | HAS_MASK | HAS_DROPOUT

UNBOUNDED = 1 << 40

# Schedule entries, int64 each: (batch, first row, chunk of keys, number of chunks), and in the backward (first batch,
# end batch, first row, end row, first key, end key). Kernels cut rows and keys where a sequence ends.
ENTRY_BYTES, BACKWARD_ENTRY_BYTES = 32, 48
# Row table of a panel: fields of a 4-byte number per query, the last two of 8-byte addresses.
ROW_LAST, ROW_FIRST, ROW_POSITION, ROW_SLOPE, ROW_INDEX, ROW_HEAD, ROW_BIAS, ROW_MASK = 0, 1, 2, 3, 4, 5, 6, 8
ROW_FIELDS = 10
# Panel bounds: the key ranges common to the rows of a panel, and (backward) the part of the current tile it sees.
MIN_FIRST, MAX_FIRST, MIN_LAST, MAX_LAST, TILE_BEGIN, TILE_END = range(0, 48, 8)
PANEL_BYTES = 48

# After the block, a cache line each: the counters of a run (workspaces taken, items taken).
COUNTER_FIELDS = 16
_FLOAT, _INT = struct.Struct("f"), struct.Struct("I")


def float_bits(number: float) -> int:
    """A float as the block holds it."""
    return int(_INT.unpack(_FLOAT.pack(number))[0])


def new_block(fields: Mapping[int, int]) -> array[int]:
    """The block in memory, followed by its counters, which are 0; fields that are not given are 0."""
    block = array("q", bytes(8 * (BLOCK_FIELDS + COUNTER_FIELDS)))
    for position, value in fields.items():
        block[position] = value
    return block
