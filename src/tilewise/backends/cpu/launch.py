"""From a problem and its tensors to a parameter block, a workspace and a run.

Measurements behind the constants are in bench/results/cpu-choices.csv, by name.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tilewise.backends.cpu import interrupts, schedule, threads
from tilewise.backends.cpu import params as f
from tilewise.backends.cpu.cache import program
from tilewise.backends.cpu.emit import BF16, E4M3, FP16, FP32
from tilewise.backends.cpu.isa import host
from tilewise.backends.cpu.schedule import Lengths, Schedule, round_up
from tilewise.numerics import LOG2E, dropout_threshold
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem

__all__ = [
    "Block",
    "Values",
    "forward",
    "forward_into",
    "problem_fields",
    "put",
    "put_operands",
    "run_items",
    "template_of",
]

DTYPES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
# Row tables hold 10 numbers of 4 bytes per row (features.ROW_FIELDS), panel bounds 6 of 8 bytes.
ROW_TABLE_FIELDS, PANEL_BOUNDS_BYTES = 10, 48

# Minimum work per thread. Waking a thread costs less than it saves from here on; but if other processes want the cores,
# the wait for a second thread can be far longer.
MICROSECONDS_PER_THREAD = 40
# Rough work of one thread per microsecond: FLOPs per vector lane, FLOPs with a matrix unit, bytes of K and V in decode.
FLOPS_PER_LANE, FLOPS_WITH_MATRIX, DECODED_BYTES = 7_000, 400_000, 10_000

# Calls that would take one thread longer than this handle signals while they run, which has a small cost.
LONG_MICROSECONDS = 50_000

# Maximum number of decode items that a thread takes at a time, and minimum number of turns. The first keys of an item
# are prefetched while the previous one is finished.
MOST_AT_ONCE, TURNS = 8, 8

# The dimensions of the batch (or page), the head and the row; None if a tensor has no such stride.
STRIDE_ORDER: dict[str, tuple[int | None, int | None, int | None]] = {
    "dense": (0, 1, 2),
    "paged": (0, 2, 1),
    "packed": (None, 1, 0),
    "token": (0, 1, None),
}

Block = dict[int, int]
Values: TypeAlias = "array[int]"


class Dims(NamedTuple):
    """Head dims as padded in the packed buffers."""

    padded: int
    lanes: int
    v_padded: int
    v_lanes: int


def dims(problem: AttentionProblem) -> Dims:
    """Padded head dims of a problem."""
    isa = host()
    padded = round_up(problem.head_dim, isa.dim_step)
    return Dims(
        padded,
        round_up(padded, isa.lanes),
        round_up(problem.head_dim_v, isa.value_step),
        round_up(problem.head_dim_v, isa.lanes),
    )


def problem_fields(problem: AttentionProblem) -> Block:
    """The part of the block that depends on the problem alone."""
    left, right = problem.band
    padded = dims(problem)
    softcap = problem.softcap
    features = _features(problem)
    # Plain scores stay unscaled until the softmax scales them. Features work in natural units, so q is scaled for them.
    if features & f.CHANGES_SCORES or problem.scale == 0.0:
        q_scale, unit = problem.scale / (softcap or 1.0), 1.0
    else:
        q_scale, unit = math.copysign(1.0, problem.scale), abs(problem.scale)
    to_log2 = float(np.float32(unit * LOG2E))
    # Invert exactly the factor that was applied: rounding scale * log2(e) to fp32 would show in lse.
    to_natural = unit / to_log2
    return {
        f.SEQLEN_Q: problem.seqlen_q,
        f.SEQLEN_K: problem.seqlen_k,
        f.PAGE_SIZE: problem.page_size or 0,
        f.NUM_HEADS: problem.num_heads,
        f.GROUP_SIZE: problem.group_size,
        f.HEAD_DIM: problem.head_dim,
        f.HEAD_DIM_V: problem.head_dim_v,
        f.DIM_PADDED: padded.padded,
        f.DIM_LANES: padded.lanes,
        f.DIM_V_PADDED: padded.v_padded,
        f.DIM_V_LANES: padded.v_lanes,
        f.DTYPE: DTYPES[problem.dtype],
        f.Q_DTYPE: E4M3 if "q" in problem.fp8 else DTYPES[problem.dtype],
        f.KV_DTYPE: E4M3 if problem.fp8 else DTYPES[problem.dtype],
        f.Q_SCALE: f.float_bits(q_scale),
        f.SCALE: f.float_bits(problem.scale),
        f.TO_LOG2: f.float_bits(to_log2),
        f.LSE_HIGH: f.float_bits(to_natural),
        f.LSE_LOW: f.float_bits(to_natural - float(np.float32(to_natural))),
        f.LSE_TO_LOG2: f.float_bits(1.0 / to_natural),
        f.LSE_TO_LOG2_LOW: f.float_bits(1.0 / to_natural - float(np.float32(1.0 / to_natural))),
        f.WINDOW_LEFT: f.UNBOUNDED if left is None else left,
        f.WINDOW_RIGHT: f.UNBOUNDED if right is None else right,
        f.SOFTCAP: f.float_bits(softcap or 0.0),
        f.FEATURES: features,
        f.DROPOUT_THRESHOLD: dropout_threshold(problem.dropout),
        f.KEEP_SCALE: f.float_bits(1.0 / (1.0 - problem.dropout) if problem.dropout < 1.0 else 0.0),
    }


def _features(problem: AttentionProblem) -> int:
    """The FEATURES bits of a problem."""
    return (
        f.HAS_SOFTCAP * (problem.softcap is not None)
        | f.HAS_ALIBI * problem.has_alibi
        | f.HAS_BIAS * (problem.bias_shape is not None)
        | f.HAS_MASK * (problem.mask_shape is not None)
        | f.HAS_DROPOUT * (problem.dropout > 0.0)
    )


def stride_fields(position: int, strides: Sequence[int], item: int, kind: str) -> Block:
    """Byte strides (batch or page, head, row) of a q- or k-like tensor."""
    at = STRIDE_ORDER[kind]
    return {position + 1 + i: strides[n] * item if n is not None else 0 for i, n in enumerate(at)}


def tensor_fields(position: int, tensor: Tensor, kind: str) -> Block:
    """Address and byte strides of a q- or k-like tensor."""
    return {position: tensor.data_ptr(), **stride_fields(position, tensor.stride(), tensor.element_size(), kind)}


def query_kind(problem: AttentionProblem, operands: Operands) -> str:
    """How query rows are addressed: dense, packed, or one token a sequence."""
    if problem.kind == "dense":
        return "dense"
    return "token" if operands.cu_seqlens_q is None else "packed"


def lse_strides(problem: AttentionProblem, kind: str) -> Block:
    """Byte strides of lse, contiguous in the problem's lse_shape."""
    if kind == "dense":
        return {f.LSE_BATCH: 4 * problem.num_heads * problem.seqlen_q, f.LSE_HEAD: 4 * problem.seqlen_q}
    return {f.LSE_BATCH: 4 if kind == "token" else 0, f.LSE_HEAD: 4 * problem.total_q}


def _dense_out_strides(problem: AttentionProblem) -> tuple[int, int, int]:
    """Element strides (batch, head, row) of a new dense output in the caller's layout."""
    rows, heads, dim = problem.seqlen_q, problem.num_heads, problem.head_dim_v
    return (rows * heads * dim, dim, heads * dim) if problem.layout == "bshd" else (heads * rows * dim, rows * dim, dim)


Strides = tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def template(problem: AttentionProblem, kind: str, q: Strides, k: Strides, v: Strides) -> Values:
    """The parameter block of a call without addresses, to be copied."""
    item, kv_item = problem.dtype.itemsize, schedule.kv_item(problem)
    kv_kind = problem.kind if problem.kind in ("dense", "paged") else "packed"
    fields = problem_fields(problem) | lse_strides(problem, kind)
    fields |= stride_fields(f.Q, q, 1 if "q" in problem.fp8 else item, kind)
    fields |= stride_fields(f.K, k, kv_item, kv_kind) | stride_fields(f.V, v, kv_item, kv_kind)
    packed = (problem.num_heads * problem.head_dim_v, problem.head_dim_v)
    fields |= stride_fields(f.OUT, _dense_out_strides(problem) if kind == "dense" else packed, item, kind)
    if kind == "token":
        fields[f.SEQLEN_Q] = 1
    return f.new_block(fields)


def template_of(problem: AttentionProblem, operands: Operands) -> Values:
    """The template for these operands."""
    strides = operands.q.stride(), operands.k.stride(), operands.v.stride()
    return template(problem, query_kind(problem, operands), *strides)


def put_operands(
    values: Values, problem: AttentionProblem, operands: Operands, out: Tensor, lse: Tensor, keep: list[Tensor]
) -> None:
    """Fills in the addresses of operands and results. Temporary tensors are appended to `keep`."""
    values[f.Q], values[f.K], values[f.V] = operands.q.data_ptr(), operands.k.data_ptr(), operands.v.data_ptr()
    values[f.OUT], values[f.LSE] = out.data_ptr(), lse.data_ptr()
    if problem.kind != "dense":
        put(values, _sequence_fields(operands, keep))
    if problem.fp8:
        put(values, _scale_fields(problem, operands))
    if values[f.FEATURES] or problem.has_sinks:
        put(values, _feature_fields(problem, operands, keep))


def put(values: Values, fields: Block) -> None:
    """Set some fields of a block."""
    for position, value in fields.items():
        values[position] = value


def _sequence_fields(operands: Operands, keep: list[Tensor]) -> Block:
    block: Block = {}
    tables = (
        (f.CU_SEQLENS_Q, operands.cu_seqlens_q),
        (f.CU_SEQLENS_K, operands.cu_seqlens_k),
        (f.SEQLENS_K, operands.seqlens_k),
    )
    for position, table in tables:
        if table is not None:
            keep.append(table.to(torch.int32).contiguous())
            block[position] = keep[-1].data_ptr()
    if operands.block_table is not None:
        keep.append(operands.block_table.to(torch.int32).contiguous())
        block |= {f.BLOCK_TABLE: keep[-1].data_ptr(), f.BLOCK_TABLE_ROW: 4 * keep[-1].shape[1]}
    return block


def _scale_fields(problem: AttentionProblem, operands: Operands) -> Block:
    """Addresses and byte strides of the scales of e4m3 operands, and the rows that share one."""
    block: Block = {}
    positions = (f.Q_SCALES, f.K_SCALES, f.V_SCALES)
    scales = (operands.q_scale, operands.k_scale, operands.v_scale)
    for position, scale, rows in zip(positions, scales, problem.scale_blocks, strict=True):
        if scale is not None:
            strides = (4 * stride for stride in scale.stride())
            block |= dict(enumerate((scale.data_ptr(), *strides, rows or 0), position))
    return block


def _feature_fields(problem: AttentionProblem, operands: Operands, keep: list[Tensor]) -> Block:
    block: Block = {}
    if operands.bias is not None:
        bias = _readable(operands.bias)
        block |= _score_fields(f.BIAS, bias) | {f.BIAS_DTYPE: DTYPES[bias.dtype]}
        keep.append(bias)
    if operands.mask is not None:
        block |= _score_fields(f.MASK, operands.mask)
    if operands.alibi_slopes is not None:
        slopes = operands.alibi_slopes
        block |= {f.ALIBI: slopes.data_ptr(), f.ALIBI_BATCH: 4 * slopes.stride(0), f.ALIBI_HEAD: 4 * slopes.stride(1)}
    if operands.sinks is not None:
        keep.append(operands.sinks.to(torch.float32).contiguous())
        block[f.SINKS] = keep[-1].data_ptr()
    if problem.dropout > 0.0 and operands.seed is not None:
        seed, *origin = operands.seed.reshape(-1).tolist()
        block |= {f.SEED_LOW: seed & 0xFFFFFFFF, f.SEED_HIGH: (seed >> 32) & 0xFFFFFFFF}
        block |= {f.ORIGIN_BATCH + i: start for i, start in enumerate(origin)}
    return block


def _score_fields(position: int, tensor: Tensor) -> Block:
    item = tensor.element_size()
    strides = {position + 1 + i: stride * item for i, stride in enumerate(tensor.stride())}
    return {position: tensor.data_ptr(), **strides}


def _readable(bias: Tensor) -> Tensor:
    """A bias the kernels can read: fp64 is rounded to fp32, before being expanded."""
    if bias.dtype in DTYPES:
        return bias
    stored = bias[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in bias.stride())]
    return stored.to(torch.float32).expand(bias.shape)


@functools.lru_cache(maxsize=256)
def forward_workspace(problem: AttentionProblem, block_m: int) -> tuple[Block, int]:
    """Offsets in one thread's workspace, and its size in bytes."""
    block_m = round_up(block_m, host().panel)
    return places(forward_floats(problem, block_m) | _totals(problem, block_m, dims(problem).v_padded))


def forward_floats(problem: AttentionProblem, block_m: int) -> dict[int, int]:
    """The buffers of a block of `block_m` rows and their sizes in floats."""
    isa, padded = host(), dims(problem)
    return {
        f.WS_Q: block_m * padded.lanes,
        f.WS_ACC: block_m * (padded.v_padded + 2),
        f.WS_K: isa.block_n * padded.lanes,
        f.WS_V: isa.block_n * padded.v_padded,
        f.WS_SCORES: isa.block_n * isa.panel,
        f.WS_EXTRA: (isa.block_n + isa.lanes) * isa.panel,
        f.WS_STAGE: isa.panel * max(padded.lanes, isa.block_n),
        f.WS_MAX: isa.panel,
        f.WS_ALPHA: isa.panel,
        f.WS_ROWS: ROW_TABLE_FIELDS * block_m,
        f.WS_PANELS: PANEL_BOUNDS_BYTES // 4 * (block_m // isa.panel),
    }


@functools.lru_cache(maxsize=256)
def matrix_workspace(problem: AttentionProblem, block_m: int) -> tuple[Block, int]:
    """`forward_workspace` for a matrix unit; packed head dims are whole tiles."""
    isa, unit = host(), host().matrix
    assert unit is not None
    block_m = round_up(block_m, isa.panel)
    width, width_v = round_up(problem.head_dim, unit.depth), round_up(problem.head_dim_v, unit.depth)
    floats = {
        f.WS_Q: block_m * width // 2,
        f.WS_ACC: block_m * (width_v + 2),
        f.WS_ACC_T: block_m * width_v,
        f.WS_K: unit.keys * width // 2,
        f.WS_V: unit.keys * width_v // 2,
        f.WS_V_ROWS: unit.keys * width_v // 2,
        f.WS_SCORES: unit.keys * isa.panel,
        f.WS_WEIGHTS: unit.keys * isa.panel // 2,
        f.WS_PRODUCT: width_v * isa.panel,
        f.WS_EXTRA: (isa.block_n + isa.lanes) * isa.panel,
        f.WS_STAGE: isa.panel * max(width, isa.block_n),
        f.WS_MAX: isa.panel,
        f.WS_ALPHA: isa.panel,
        f.WS_ROWS: ROW_TABLE_FIELDS * block_m,
        f.WS_PANELS: PANEL_BOUNDS_BYTES // 4 * (block_m // isa.panel),
        f.WS_TILES: 32,
        **_totals(problem, block_m, width_v),
    }
    offsets, size = places(floats)
    return offsets | {f.DIM_PADDED: width, f.DIM_V_PADDED: width_v}, size


def _totals(problem: AttentionProblem, block_m: int, width_v: int) -> dict[int, int]:
    """Totals of a block, shaped like WS_ACC, and the rounding errors of their sums."""
    if not schedule.folds(problem):
        return {}
    return {f.WS_TOTAL: block_m * (width_v + 2), f.WS_CARRY: block_m * (width_v + 1)}


def places(floats: dict[int, int]) -> tuple[Block, int]:
    """Offsets of consecutive buffers, each on its own cache lines, and their total size in bytes."""
    offsets: Block = {}
    end = 0
    for position, count in floats.items():
        offsets[position] = end
        end += round_up(4 * count, 64)
    # A multiple of 4 KiB would map the same buffer of all threads to the same cache sets.
    return offsets, round_up(end, 4096) + 64


def lengths(problem: AttentionProblem, operands: Operands) -> tuple[Lengths, Lengths]:
    """Query and key lengths of packed or paged sequences."""
    if operands.cu_seqlens_q is None:
        q_lengths = np.ones(problem.batch, np.int64)
    else:
        q_lengths = np.diff(operands.cu_seqlens_q.numpy()).astype(np.int64)
    if operands.seqlens_k is not None:
        return q_lengths, operands.seqlens_k.numpy().astype(np.int64)
    assert operands.cu_seqlens_k is not None
    return q_lengths, np.diff(operands.cu_seqlens_k.numpy()).astype(np.int64)


def empty_out(problem: AttentionProblem) -> Tensor:
    """The output: a heads-first view of memory in the caller's layout."""
    out = torch.empty(problem.out_shape, dtype=problem.dtype, device="cpu")
    return out.transpose(1, 2) if problem.kind == "dense" and problem.layout == "bshd" else out


def useful_threads(expected: int, available: int) -> int:
    """The available threads, or fewer for little work (in microseconds). The result does not depend on it."""
    return max(1, min(available, expected // MICROSECONDS_PER_THREAD))


def is_long(problem: AttentionProblem, expected: int, q_lengths: Lengths, k_lengths: Lengths, passes: int = 1) -> bool:
    """Whether signals are handled during `passes` passes. `expected` microseconds is the estimate for one pass, from
    the upper bounds of the lengths.
    """
    if passes * expected < LONG_MICROSECONDS:
        return False
    if problem.kind != "dense":
        work = k_lengths.sum() if schedule.decodes(problem) else (q_lengths * k_lengths).sum()
        expected = expected_microseconds(problem, int(work))
    return passes * expected >= LONG_MICROSECONDS


def expected_microseconds(problem: AttentionProblem, work: int | None = None) -> int:
    """Estimated time of a forward pass on one thread. `work` counts (query, key) pairs of one head, or keys in decode.
    Without it, the upper bounds of the lengths are used.
    """
    dims_of_pair = problem.head_dim + problem.head_dim_v
    if schedule.decodes(problem):
        rows = (problem.batch * problem.seqlen_k if work is None else work) * problem.num_kv_heads
        return rows * dims_of_pair * schedule.kv_item(problem) // DECODED_BYTES
    pairs = problem.total_q * problem.seqlen_k if work is None else work
    flops = 2 * pairs * problem.num_heads * dims_of_pair
    rate = FLOPS_WITH_MATRIX if forward_program(problem) == "forward_matrix" else FLOPS_PER_LANE * host().lanes
    return flops // rate


def clear_unused_rows(used: int, out: Tensor, lse: Tensor | None) -> None:
    """Make the rows of packed tensors after the last sequence empty rows."""
    if used < out.shape[0]:
        out[used:].zero_()
        if lse is not None:
            lse[:, used:].fill_(-torch.inf)


class Call(NamedTuple):
    """A forward pass without its tensors."""

    program: str
    values: Values
    plan: Schedule
    workspace_bytes: int
    threads: int
    is_long: bool


@functools.lru_cache(maxsize=1024)
def dense_call(problem: AttentionProblem, available: int, q: Strides, k: Strides, v: Strides) -> Call:
    """How a dense problem runs on up to `available` threads. Cached as a whole, which saves small calls host time."""
    expected, lengths = expected_microseconds(problem), schedule.dense_lengths(problem)
    count = useful_threads(expected, available)
    plan = schedule.forward_schedule(problem, *lengths, count)
    return new_call(problem, template(problem, "dense", q, k, v), plan, count, is_long(problem, expected, *lengths))


def new_call(problem: AttentionProblem, values: Values, plan: Schedule, count: int, long: bool) -> Call:
    """The call of a schedule."""
    name = forward_program(problem)
    offsets, size = (matrix_workspace if name == "forward_matrix" else forward_workspace)(problem, plan.block_m)
    values = values[:]
    put(values, offsets)
    return Call(name, values, plan, size, count, long)


def packed_call(problem: AttentionProblem, operands: Operands, q_lengths: Lengths, k_lengths: Lengths) -> Call:
    """How a packed or paged problem with sequences of these lengths runs."""
    expected = expected_microseconds(problem)
    count = useful_threads(expected, threads.num_threads())
    plan = schedule.kept_schedule(problem, q_lengths, k_lengths, count)
    long = is_long(problem, expected, q_lengths, k_lengths)
    return new_call(problem, template_of(problem, operands), plan, count, long)


def forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of canonical operands."""
    out, lse = empty_out(problem), torch.empty(problem.lse_shape, dtype=torch.float32, device="cpu")
    if out.numel() == 0:
        return out, lse.fill_(-torch.inf)
    if problem.kind == "dense":
        strides = operands.q.stride(), operands.k.stride(), operands.v.stride()
        call = dense_call(problem, threads.num_threads(), *strides)
    else:
        q_lengths, k_lengths = lengths(problem, operands)
        call = packed_call(problem, operands, q_lengths, k_lengths)
        clear_unused_rows(int(q_lengths.sum()), out, lse)
    keep: list[Tensor] = []
    values = call.values[:]
    put_operands(values, problem, operands, out, lse, keep)
    run_items(call.program, values, call.plan, call.workspace_bytes, call.threads, call.is_long)
    return out, lse


def forward_into(problem: AttentionProblem, operands: Operands, rows: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """A packed or paged pass whose rows are merged into results over other keys: its row i into row `rows[i]` (or i).
    `out` and `lse` are contiguous and of the problem's shapes.
    """
    keep: list[Tensor] = []
    call = packed_call(problem, operands, *lengths(problem, operands))
    values = call.values[:]
    put_operands(values, problem, operands, out, lse, keep)
    values[f.IS_MERGED] = 1
    if rows is not None:
        keep.append(rows.to(torch.int64).contiguous())
        values[f.MERGED_ROWS] = keep[-1].data_ptr()
    run_items(call.program, values, call.plan, call.workspace_bytes, call.threads, call.is_long)


def forward_program(problem: AttentionProblem) -> str:
    """The program for a forward pass."""
    if schedule.decodes(problem):
        return "decode"
    # e4m3 times its scale does not fit bf16.
    in_tiles = problem.dtype == torch.bfloat16 and not problem.fp8 and host().matrix is not None
    return "forward_matrix" if in_tiles else "forward"


def run_items(name: str, values: Values, plan: Schedule, workspace_bytes: int, count: int, is_long: bool) -> None:
    """Run a program over a schedule with as many threads as the work justifies. A long one handles signals."""
    items = len(plan.entries) * plan.units
    count = min(count, items)
    if count == 0:
        return
    workspace = torch.empty(count * workspace_bytes, dtype=torch.uint8, device="cpu")
    values[f.NUM_ITEMS], values[f.UNITS], values[f.HEADS_PER_UNIT] = items, plan.units, plan.heads_per_unit
    values[f.SCHEDULE], values[f.BLOCK_M], values[f.CHUNK] = plan.entries.data_ptr(), plan.block_m, plan.chunk
    values[f.WORKSPACE], values[f.WORKSPACE_BYTES] = workspace.data_ptr(), workspace_bytes
    values[f.ITEMS_AT_ONCE] = max(1, min(MOST_AT_ONCE, items // (TURNS * count)))
    if plan.split:
        partial_bytes = 4 * plan.block_m * (values[f.DIM_V_PADDED] + 2)
        partials = torch.empty(items * partial_bytes, dtype=torch.uint8, device="cpu")
        done = torch.zeros(items, dtype=torch.int64, device="cpu")
        values[f.PARTIALS], values[f.PARTIAL_BYTES], values[f.DONE] = (
            partials.data_ptr(),
            partial_bytes,
            done.data_ptr(),
        )
    (interrupts if is_long else threads).run(program(name).address, values, count)
