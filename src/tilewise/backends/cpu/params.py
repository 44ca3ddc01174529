"""The parameter block: one flat array of int64 that a compiled kernel reads everything from.

Pointers are addresses, strides are bytes, floats are the bits of an fp32. A pointer of 0 means "not there". Offsets
named `WS_*` are places within one thread's workspace. The constants below are positions in the block; `new_block`
builds it.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping

__all__ = ["BLOCK_FIELDS", "float_bits", "new_block"]

# What every kernel needs: who works on what, and where.
NUM_ITEMS, SCHEDULE, UNITS, HEADS_PER_UNIT, WORKSPACE, WORKSPACE_BYTES = range(1, 7)
# Operands of the forward pass and their strides.
Q, Q_BATCH, Q_HEAD, Q_ROW = range(7, 11)
K, K_BATCH, K_HEAD, K_ROW = range(11, 15)
V, V_BATCH, V_HEAD, V_ROW = range(15, 19)
OUT, OUT_BATCH, OUT_HEAD, OUT_ROW = range(19, 23)
LSE, LSE_BATCH, LSE_HEAD = range(23, 26)
# Sequences: lengths, or tables of them; pages.
SEQLEN_Q, SEQLEN_K, CU_SEQLENS_Q, CU_SEQLENS_K, SEQLENS_K, BLOCK_TABLE, BLOCK_TABLE_ROW, PAGE_SIZE = range(26, 34)
# Sizes and dtypes: of results (and, where it is not e4m3, of q), of K and V.
NUM_HEADS, GROUP_SIZE, HEAD_DIM, HEAD_DIM_V, DIM_PADDED, DIM_LANES, DIM_V_PADDED, DTYPE, KV_DTYPE = range(34, 43)
# Semantics.
Q_SCALE, WINDOW_LEFT, WINDOW_RIGHT, SOFTCAP, FEATURES = range(43, 48)
BIAS, BIAS_BATCH, BIAS_HEAD, BIAS_ROW, BIAS_KEY, BIAS_DTYPE = range(48, 54)
MASK, MASK_BATCH, MASK_HEAD, MASK_ROW, MASK_KEY = range(54, 59)
ALIBI, ALIBI_BATCH, ALIBI_HEAD, SINKS, DROPOUT_THRESHOLD, KEEP_SCALE, SEED_LOW, SEED_HIGH = range(59, 67)
# Splitting over keys.
CHUNK, PARTIALS, PARTIAL_BYTES, DONE = range(67, 71)
# Workspace.
WS_Q, WS_ACC, WS_K, WS_V, WS_SCORES, WS_EXTRA, WS_ROWS, WS_PANELS, WS_STAGE, WS_MAX, WS_ALPHA = range(71, 82)
BLOCK_M, DIM_V_LANES = 82, 83
# Backward: the gradient that comes in, those that go out, and where rows of dk and dv start (0: dense).
DOUT, DOUT_BATCH, DOUT_HEAD, DOUT_ROW = range(84, 88)
DQ, DQ_BATCH, DQ_HEAD, DQ_ROW = range(88, 92)
DK, DK_BATCH, DK_HEAD, DK_ROW = range(92, 96)
DV, DV_BATCH, DV_HEAD, DV_ROW = range(96, 100)
DLSE, DELTA, SCALE, WORK, CU_GRADS_K, KV_GRAD_DTYPE, DIM_WIDE, DIM_V_WIDE = range(100, 108)
DBIAS, DBIAS_BATCH, DBIAS_HEAD, DBIAS_ROW, DBIAS_KEY = range(108, 113)
WS_DOUT, WS_DSCORES, WS_Q_ROWS, WS_DOUT_ROWS, WS_DQ, WS_DK, WS_DV, WS_CAP, WS_ONES, WS_LSE, WS_DELTA, WS_HEAD_ROW = (
    range(113, 125)
)
LSE_HIGH, LSE_LOW, LSE_TO_LOG2, TO_LOG2, WS_K_COLUMNS = range(125, 130)
# Forward on a matrix unit.
WS_ACC_T, WS_WEIGHTS, WS_PRODUCT, WS_V_ROWS, WS_TILES = range(130, 135)
# Where dropout counts from: not 0 for a part of a larger problem.
ORIGIN_BATCH, ORIGIN_HEAD, ORIGIN_ROW, ORIGIN_KEY = range(135, 139)
# The rest of lse's factor and of lse in log2 units, beyond fp32.
LSE_TO_LOG2_LOW, WS_LSE_LOW = range(139, 141)
# The dtype of q, and the scales of e4m3 operands: address (0: no scales), strides of a sequence or page, a head and a
# block, and the rows of a block (0: all rows of a head share one).
Q_DTYPE = 141
Q_SCALES, K_SCALES, V_SCALES = range(142, 157, 5)
# Items of decoding that a thread takes at a time.
ITEMS_AT_ONCE = 157
# Whether rows are worked into results that are there (0: no), and which rows of them they are (0: their own numbers).
IS_MERGED, MERGED_ROWS = 158, 159
# Answering signals (see stopping.py): a callback (0: none) and when it is due, the thread that calls it, functions that
# say which thread this is and what time it is, where the time is put, and one that sleeps; whether the call is to end
# early, and how many threads are through.
POLL, NEXT_POLL, CALLER, THREAD_ID, CLOCK, CLOCK_ID, CLOCK_SECONDS, CLOCK_NANOSECONDS, SLEEP = range(160, 169)
STOP, THROUGH = 169, 170
# Totals of a block over long runs of keys, and what their sums lost to rounding (0: no run is that long).
WS_TOTAL, WS_CARRY = 171, 172
BLOCK_FIELDS = 176

# Bits of WORK: what a backward pass produces.
MAKES_DQ, MAKES_DKV, MAKES_DBIAS = 1, 2, 4

# Bits of FEATURES: what a panel needs besides the plain product.
HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS, HAS_MASK, HAS_DROPOUT = 1, 2, 4, 8, 16
# What changes scores, and so the row maximum; dropout acts on probabilities.
CHANGES_SCORES = HAS_SOFTCAP | HAS_ALIBI | HAS_BIAS | HAS_MASK
# What needs per-row tables of positions, slopes and addresses.
NEEDS_ROW_TABLE = HAS_ALIBI | HAS_BIAS | HAS_MASK | HAS_DROPOUT

UNBOUNDED = 1 << 40

# Behind the block, a cache line each: the counters of a run (workspaces taken, items taken).
COUNTER_FIELDS = 16
_FLOAT, _INT = struct.Struct("f"), struct.Struct("I")


def float_bits(number: float) -> int:
    """How a float travels in the block."""
    return int(_INT.unpack(_FLOAT.pack(number))[0])


def new_block(fields: Mapping[int, int]) -> array[int]:
    """The block in memory, with its counters at 0 behind it; fields that are not given are 0."""
    block = array("q", bytes(8 * (BLOCK_FIELDS + COUNTER_FIELDS)))
    for position, value in fields.items():
        block[position] = value
    return block
