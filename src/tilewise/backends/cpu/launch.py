"""From a problem and its tensors to a parameter block, a workspace and a run.

Measurements behind the constants are in bench/results/cpu-choices.csv, by name.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tilewise.backends.cpu import interrupts, schedule, threads
from tilewise.backends.cpu import params as f
from tilewise.backends.cpu.cache import program
from tilewise.backends.cpu.emit import BF16, E4M3, FP16, FP32, INT8
from tilewise.backends.cpu.isa import host
from tilewise.backends.cpu.schedule import Lengths, Schedule, round_up
from tilewise.memory import Reader
from tilewise.numerics import LOG2E, dropout_threshold
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem
from tilewise.tiles import TILE, bits_by_keys

DTYPES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
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


def problem_fields(problem: AttentionProblem) -> Block:
    """The part of the block that depends on the problem alone."""
    left, right = problem.band
    isa = host()
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
        f.DIM_PADDED: round_up(problem.head_dim, isa.dim_step),
        f.DIM_LANES: round_up(problem.head_dim, math.lcm(isa.dim_step, isa.lanes)),
        f.DIM_V_PADDED: round_up(problem.head_dim_v, isa.value_step),
        f.DIM_V_LANES: round_up(problem.head_dim_v, isa.lanes),
        f.DTYPE: DTYPES[problem.dtype],
        f.Q_DTYPE: E4M3 if "q" in problem.fp8 else DTYPES[problem.dtype],
        f.KV_DTYPE: (INT8 if problem.int8 else E4M3) if problem.fp8 else DTYPES[problem.dtype],
        f.Q_SCALE: f.float_bits(q_scale),
        f.SCALE: f.float_bits(problem.scale),
        f.TO_LOG2: f.float_bits(to_log2),
        f.LSE_HIGH: f.float_bits(to_natural),
        f.LSE_LOW: f.float_bits(to_natural - float(np.float32(to_natural))),
        f.LSE_TO_LOG2: f.float_bits(1.0 / to_natural),
        f.LSE_TO_LOG2_LOW: f.float_bits(1.0 / to_natural - float(np.float32(1.0 / to_natural))),
        f.WINDOW_LEFT: f.UNBOUNDED if left is None else left,
        f.WINDOW_RIGHT: f.UNBOUNDED if right is None else right,
        **{position: f.float_bits(getattr(problem, name) or 0.0) for name, position in f.NUMBERS.items()},
        f.FEATURES: features,
        f.DROPOUT_THRESHOLD: dropout_threshold(problem.dropout),
        f.KEEP_SCALE: f.float_bits(1.0 / (1.0 - problem.dropout) if problem.dropout < 1.0 else 0.0),
    }


def _features(problem: AttentionProblem) -> int:
    """The FEATURES bits of a problem."""
    return sum(bit for name, bit in f.FEATURE_BITS.items() if getattr(problem, name))


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


def new_results(problem: AttentionProblem, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Memory for out, as a heads-first view of the caller's layout, and for lse."""
    out = torch.empty(problem.out_shape, dtype=problem.dtype, device=device)
    out = out.transpose(1, 2) if problem.kind == "dense" and problem.layout == "bshd" else out
    return out, torch.empty(problem.lse_shape, dtype=torch.float32, device=device)


Strides = tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def template(
    problem: AttentionProblem, kind: str, q: Strides, k: Strides, v: Strides, given_out: Strides | None = None
) -> Values:
    """The parameter block of a call without addresses, to be copied. `out` is contiguous in the caller's layout, or has
    the strides that are given.
    """
    item, kv_item = problem.dtype.itemsize, schedule.kv_item(problem)
    kv_kind = problem.kind if problem.kind in ("dense", "paged") else "packed"
    out, lse = (result.stride() for result in new_results(problem, "meta"))
    out = given_out or out
    fields = problem_fields(problem)
    fields |= stride_fields(f.Q, q, 1 if "q" in problem.fp8 else item, kind) | stride_fields(f.OUT, out, item, kind)
    fields |= stride_fields(f.K, k, kv_item, kv_kind) | stride_fields(f.V, v, kv_item, kv_kind)
    fields[f.LSE_BATCH] = 4 * lse[0] if kind == "dense" else 4 * (kind == "token")
    fields[f.LSE_HEAD] = 4 * lse[-2]
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
    if problem.tiles_shape is not None:
        put(values, _tile_fields(operands, keep))
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
    """Addresses and byte strides of the scales of 8-bit operands, and the rows that share one."""
    block: Block = {}
    positions = (f.Q_SCALES, f.K_SCALES, f.V_SCALES)
    scales = (operands.q_scale, operands.k_scale, operands.v_scale)
    for position, scale, rows in zip(positions, scales, problem.scale_blocks, strict=True):
        if scale is not None:
            strides = (4 * stride for stride in scale.stride())
            block |= dict(enumerate((scale.data_ptr(), *strides, rows or 0), position))
    return block


def _tile_fields(operands: Operands, keep: list[Tensor]) -> Block:
    """A tile mask: rows of the map are contiguous, and so are its bits."""
    tiles, bits = operands.tiles, operands.tile_bits
    assert tiles is not None
    assert bits is not None
    tiles = tiles if tiles.stride(3) == 1 or tiles.shape[3] == 1 else tiles.contiguous()
    keep += [tiles, bits_by_keys(bits).contiguous()]
    batch, head, row = (4 * stride for stride in tiles.stride()[:3])
    places = (tiles.data_ptr(), batch, head, row, TILE * tiles.shape[3], keep[-1].data_ptr(), len(bits))
    return dict(enumerate(places, f.TILES))


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
    """Offsets in one thread's workspace, and its size in bytes. On a matrix unit, packed head dims are whole tiles."""
    rows, in_tiles = round_up(block_m, host().panel), forward_program(problem) == "forward_matrix"
    floats, changed = matrix_floats(problem, rows) if in_tiles else (forward_floats(problem, rows), {})
    if schedule.folds(problem):
        # Totals of a block, shaped like WS_ACC, and the rounding errors of their sums.
        floats |= {f.WS_TOTAL: floats[f.WS_ACC], f.WS_CARRY: floats[f.WS_ACC] - rows}
    offsets, size = places(floats)
    return offsets | changed, size


def forward_floats(problem: AttentionProblem, rows: int) -> dict[int, int]:
    """The buffers of a block of `rows` rows and their sizes in floats."""
    isa = host()
    width = round_up(problem.head_dim, math.lcm(isa.dim_step, isa.lanes))
    width_v = round_up(problem.head_dim_v, isa.value_step)
    return {
        f.WS_Q: rows * width,
        f.WS_ACC: rows * (width_v + 2),
        f.WS_K: isa.block_n * width,
        f.WS_V: isa.block_n * width_v,
        f.WS_SCORES: isa.block_n * isa.panel,
        f.WS_TILES: 32,
    } | _row_floats(rows, width)


def matrix_floats(problem: AttentionProblem, rows: int) -> tuple[dict[int, int], Block]:
    """`forward_floats` for a matrix unit, and the padded head dims."""
    panel, unit = host().panel, host().matrix
    assert unit is not None
    width, width_v = (round_up(dim, unit.depth) for dim in (problem.head_dim, problem.head_dim_v))
    floats = {
        f.WS_Q: rows * width // 2,
        f.WS_ACC: rows * (width_v + 2),
        f.WS_ACC_T: rows * width_v,
        f.WS_K: unit.keys * width // 2,
        f.WS_V: unit.keys * width_v // 2,
        f.WS_V_ROWS: unit.keys * width_v // 2,
        f.WS_SCORES: unit.keys * panel,
        f.WS_WEIGHTS: unit.keys * panel // 2,
        f.WS_PRODUCT: width_v * panel,
        f.WS_TILES: 32,
    }
    return floats | _row_floats(rows, width), {f.DIM_PADDED: width, f.DIM_V_PADDED: width_v}


def _row_floats(rows: int, width: int) -> dict[int, int]:
    isa = host()
    return {
        f.WS_EXTRA: (isa.block_n + isa.lanes) * isa.panel,
        f.WS_STAGE: isa.panel * max(width, isa.block_n),
        f.WS_MAX: isa.panel,
        f.WS_ALPHA: isa.panel,
        f.WS_ROWS: f.ROW_FIELDS * rows,
        f.WS_PANELS: f.PANEL_BYTES // 4 * (rows // isa.panel),
    }


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
    """Query and key lengths of all sequences."""
    q_lengths, k_lengths = schedule.dense_lengths(problem)
    if operands.cu_seqlens_q is not None:
        q_lengths = np.diff(operands.cu_seqlens_q.numpy()).astype(np.int64)
    if operands.seqlens_k is not None:
        k_lengths = operands.seqlens_k.numpy().astype(np.int64)
    elif operands.cu_seqlens_k is not None:
        k_lengths = np.diff(operands.cu_seqlens_k.numpy()).astype(np.int64)
    return q_lengths, k_lengths


def expected_microseconds(problem: AttentionProblem, q_lengths: Lengths, k_lengths: Lengths) -> int:
    """Estimated time of a forward pass on one thread."""
    dims = problem.head_dim + problem.head_dim_v
    if schedule.decodes(problem):
        rows = int(k_lengths[q_lengths > 0].sum()) * problem.num_kv_heads
        return rows * dims * schedule.kv_item(problem) // DECODED_BYTES
    flops = 2 * int(q_lengths.dot(k_lengths)) * problem.num_heads * dims
    rate = FLOPS_WITH_MATRIX if forward_program(problem) == "forward_matrix" else FLOPS_PER_LANE * host().lanes
    return flops // rate


def useful_threads(expected: int, available: int) -> int:
    """The available threads, or fewer for little work (in microseconds). The result does not depend on it."""
    return max(1, min(available, expected // MICROSECONDS_PER_THREAD))


def clear_unused_rows(totals: Tensor | None, out: Tensor, lse: Tensor | None) -> None:
    """Make the rows of packed tensors after the last sequence empty rows."""
    used = out.shape[0] if totals is None else int(totals[-1])
    if used < out.shape[0]:
        out[used:].zero_()
        if lse is not None:
            lse[:, used:].fill_(-torch.inf)


class Call(NamedTuple):
    """A forward pass, or the part of it for some sequences, without its tensors."""

    program: str
    values: Values
    plan: Schedule
    workspace_bytes: int
    threads: int
    is_long: bool


@functools.lru_cache(maxsize=256)
def prepared(
    problem: AttentionProblem, kind: str, available: int, q_lengths: bytes, k_lengths: bytes, *strides: Strides
) -> tuple[Call, ...]:
    """How a problem with sequences of these lengths (int64; none if dense) runs on up to `available` threads.

    Cached, which saves small calls and the layers of a model host time.
    """
    if problem.kind == "dense":
        q, k = schedule.dense_lengths(problem)
    else:
        q, k = (np.frombuffer(given, np.int64) for given in (q_lengths, k_lengths))
    calls = []
    for part, rows in schedule.divided(problem, q):
        expected = expected_microseconds(part, rows, k)
        count = useful_threads(expected, available)
        plan = schedule.forward_schedule(part, rows, k, count)
        offsets, size = forward_workspace(part, plan.block_m)
        values = template(part, kind, *strides)[:]
        put(values, offsets)
        calls.append(Call(forward_program(part), values, plan, size, count, expected >= LONG_MICROSECONDS))
    return tuple(calls)


def forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of canonical operands."""
    given = operands.out
    if given is not None and (given.stride(-1) == 1 or problem.head_dim_v == 1):
        out, lse = given, torch.empty(problem.lse_shape, dtype=torch.float32, device="cpu")
    else:
        out, lse = new_results(problem)
    if out.numel() == 0:
        return out, lse.fill_(-torch.inf)
    if problem.kind != "dense":
        clear_unused_rows(operands.cu_seqlens_q, out, lse)
    if operands.max_logits is None:
        _run_forward(problem, operands, out, lse, {})
        return out, lse
    # Rows of no sequence are not written.
    rows = torch.full_like(lse, -torch.inf)
    _run_forward(problem, operands, out, lse, {f.LARGEST: rows.data_ptr()})
    torch.amax(rows, (0, 2) if problem.kind == "dense" else 1, out=operands.max_logits)
    return out, lse


def forward_into(problem: AttentionProblem, operands: Operands, rows: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """A packed or paged pass whose rows are merged into results over other keys: its row i into row `rows[i]` (or i).
    `out` and `lse` are contiguous and of the problem's shapes.
    """
    rows = None if rows is None else rows.to(torch.int64).contiguous()
    merging = {f.IS_MERGED: 1, f.MERGED_ROWS: 0 if rows is None else rows.data_ptr()}
    _run_forward(problem, operands, out, lse, merging)


def prepared_for(problem: AttentionProblem, operands: Operands, out: Tensor, available: int) -> tuple[Call, ...]:
    """`prepared` for these tensors."""
    given = (b"", b"")
    if problem.kind != "dense":
        q_lengths, k_lengths = lengths(problem, operands)
        given = (q_lengths.tobytes(), k_lengths.tobytes())
    strides = operands.q.stride(), operands.k.stride(), operands.v.stride(), out.stride()
    return prepared(problem, query_kind(problem, operands), available, *given, *strides)


def _run_forward(problem: AttentionProblem, operands: Operands, out: Tensor, lse: Tensor, more: Block) -> None:
    keep: list[Tensor] = []
    for call in prepared_for(problem, operands, out, threads.num_threads()):
        values = call.values[:]
        put_operands(values, problem, operands, out, lse, keep)
        put(values, more)
        run_items(call.program, values, call.plan, call.workspace_bytes, call.threads, call.is_long)


# Operands of which only the address changes between calls of one signature, and the slot of that address.
ADDRESSED = {
    "q": f.Q, "k": f.K, "v": f.V, "cu_seqlens_q": f.CU_SEQLENS_Q, "block_table": f.BLOCK_TABLE,
    "seqlens_k": f.SEQLENS_K, "sinks": f.SINKS, "k_scale": f.K_SCALES, "v_scale": f.V_SCALES, "out": f.OUT,
}  # fmt: skip
TOTALS, LENGTHS, OUT = (Operands._fields.index(name) for name in ("cu_seqlens_q", "seqlens_k", "out"))


class Repeated:
    """`forward` for paged tensors of one signature. While lengths stay the same, as they do in all layers of a decoding
    step, only addresses are filled in.
    """

    __slots__ = ("_last", "_lengths", "_positions", "_problem", "_totals", "made")

    def __init__(self, problem: AttentionProblem, operands: Operands, want_lse: bool) -> None:
        present = [name for name, tensor in zip(Operands._fields, operands, strict=True) if tensor is not None]
        self._positions = [ADDRESSED[name] for name in present]
        self._problem, self._totals, self._lengths = problem, Reader(), Reader()
        self.made = ("lse",) if want_lse else ()
        self._last: tuple[tuple[int, bytes, bytes], list[Call]] | None = None

    def __call__(
        self, tensors: Sequence[Any], places: tuple[int, ...] | None = None, sized: Any = None
    ) -> list[Tensor]:
        """See tilewise.backends.base.Bound."""
        del sized
        if places is None:
            places = tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])
        totals, seqlens_k = tensors[TOTALS], tensors[LENGTHS]
        starts = b"" if totals is None else self._totals.read(totals)
        key = threads.num_threads(), starts, self._lengths.read(seqlens_k)
        last = self._last
        if last is None or last[0] != key:
            self._last = last = key, self._calls(Operands(*tensors), key[0])
        shape = self._problem.lse_shape
        lse = torch.empty(shape, dtype=torch.float32, device="cpu") if self.made else None
        unread = 0 if self.made else 4 * math.prod(shape)
        if totals is not None:
            clear_unused_rows(totals, tensors[OUT], lse)
        for call in last[1]:
            values = call.values[:]
            for position, place in zip(self._positions, places, strict=True):
                values[position] = place
            if lse is not None:
                values[f.LSE] = lse.data_ptr()
            run_items(call.program, values, call.plan, call.workspace_bytes, call.threads, call.is_long, unread)
        return [] if lse is None else [lse]

    def _calls(self, operands: Operands, available: int) -> list[Call]:
        """The calls with all fields but addresses, which are those of these operands."""
        assert operands.out is not None
        calls = []
        for call in prepared_for(self._problem, operands, operands.out, available):
            values = call.values[:]
            put_operands(values, self._problem, operands, operands.out, operands.out, [])
            calls.append(call._replace(values=values))
        return calls


def bind_forward(problem: AttentionProblem, operands: Operands, want_lse: bool) -> Repeated | None:
    """`forward` for canonical operands like these; None where it would have to look at more than their addresses."""
    present = [name for name, tensor in zip(Operands._fields, operands, strict=True) if tensor is not None]
    if problem.kind != "paged" or problem.max_logits or not ADDRESSED.keys() >= set(present) or present[-1] != "out":
        return None
    out, sinks, table = operands.out, operands.sinks, operands.block_table
    assert out is not None
    assert table is not None
    is_copied = not table.is_contiguous() or (
        sinks is not None and (sinks.dtype != torch.float32 or not sinks.is_contiguous())
    )
    if is_copied or out.numel() == 0 or (out.stride(-1) != 1 and problem.head_dim_v > 1):
        return None
    return Repeated(problem, operands, want_lse)


def forward_program(problem: AttentionProblem) -> str:
    """The program for a forward pass."""
    if schedule.decodes(problem):
        return "decode"
    # An 8-bit code times its scale does not fit bf16.
    in_tiles = problem.dtype == torch.bfloat16 and not problem.fp8 and host().matrix is not None
    return "forward_matrix" if in_tiles else "forward"


def run_items(
    name: str, values: Values, plan: Schedule, workspace_bytes: int, count: int, is_long: bool, unread_lse: int = 0
) -> None:
    """Run a program over a schedule with as many threads as the work justifies. A long one handles signals.

    `unread_lse`: bytes of an lse that nobody reads. Kernels always write one; it then lies behind the workspace.
    """
    items = plan.entries.shape[0] * plan.units
    count = min(count, items)
    if count == 0:
        return
    workspace = torch.empty(count * workspace_bytes + unread_lse, dtype=torch.uint8, device="cpu")
    if unread_lse:
        values[f.LSE] = workspace.data_ptr() + count * workspace_bytes
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
