"""From a problem and its tensors to a parameter block, a workspace and a run.

Measurements behind the constants are in bench/results/cpu-choices.csv, by name.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.backends.cpu import interrupts, schedule, threads
from tilewise.backends.cpu import params as f
from tilewise.backends.cpu.cache import program
from tilewise.backends.cpu.emit import BF16, E4M3, FP16, FP32, INT8
from tilewise.backends.cpu.isa import host
from tilewise.backends.cpu.schedule import BothLengths, Bounds, Division, Numbers, Schedule, bounds_of, round_up
from tilewise.numerics import LOG2E, dropout_threshold
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem
from tilewise.symbolic import largest, smallest
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

# Runs that a kernel keeps: a few KiB each, more for large batches.
MAX_KNOWN = 8

# The dimensions of the batch (or page), the head and the row; None if a tensor has no such stride.
STRIDE_ORDER: dict[str, tuple[int | None, int | None, int | None]] = {
    "dense": (0, 1, 2),
    "paged": (0, 2, 1),
    "packed": (None, 1, 0),
    "token": (0, 1, None),
}

# Where kernels find the address of an operand.
ADDRESSED = {
    "q": f.Q, "k": f.K, "v": f.V, "cu_seqlens_q": f.CU_SEQLENS_Q, "cu_seqlens_k": f.CU_SEQLENS_K,
    "block_table": f.BLOCK_TABLE, "seqlens_k": f.SEQLENS_K, "bias": f.BIAS, "mask": f.MASK, "alibi_slopes": f.ALIBI,
    "sinks": f.SINKS, "tiles": f.TILES, "tile_bits": f.TILE_BITS, "q_scale": f.Q_SCALES, "k_scale": f.K_SCALES,
    "v_scale": f.V_SCALES,
}  # fmt: skip

# The function that inductor's code calls: it skips the dispatcher and takes half of torch.empty's time.
allocate: Any = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]  # noqa: SLF001

Block = dict[int, int]
Values = Numbers


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


def row_fields(
    problem: AttentionProblem, kind: str, q: Strides, k: Strides, v: Strides, out: Strides, lse: Strides
) -> Block:
    """Byte strides of everything that has rows."""
    item, kv_item = problem.dtype.itemsize, schedule.kv_item(problem)
    kv_kind = problem.kind if problem.kind in ("dense", "paged") else "packed"
    fields = stride_fields(f.Q, q, 1 if "q" in problem.fp8 else item, kind) | stride_fields(f.OUT, out, item, kind)
    fields |= stride_fields(f.K, k, kv_item, kv_kind) | stride_fields(f.V, v, kv_item, kv_kind)
    fields[f.LSE_BATCH] = 4 * lse[0] if kind == "dense" else 4 * (kind == "token")
    fields[f.LSE_HEAD] = 4 * lse[-2]
    return fields


def template(
    problem: AttentionProblem, kind: str, q: Strides, k: Strides, v: Strides, given_out: Strides | None = None
) -> Values:
    """The parameter block of a call without addresses. `out` is contiguous in the caller's layout, or has
    the strides that are given.
    """
    out, lse = (result.stride() for result in new_results(problem, "meta"))
    return f.new_block(problem_fields(problem) | row_fields(problem, kind, q, k, v, given_out or out, lse))


def template_of(problem: AttentionProblem, operands: Operands) -> Values:
    """The template for these operands."""
    strides = operands.q.stride(), operands.k.stride(), operands.v.stride()
    return template(problem, query_kind(problem, operands), *strides)


def put_operands(
    values: Values, problem: AttentionProblem, operands: Operands, out: Tensor, lse: Tensor, keep: list[Tensor]
) -> None:
    """Fills in the addresses of operands and results, and what kernels need of operands without rows. Temporary tensors
    are appended to `keep`.
    """
    values[f.OUT], values[f.LSE] = out.data_ptr(), lse.data_ptr()
    read = readable(problem, operands)
    for (name, position), tensor in zip(ADDRESSED.items(), _addressed(read), strict=True):
        if tensor is not None:
            values[position] = tensor.data_ptr()
            if tensor is not getattr(operands, name):
                keep.append(tensor)
    put(values, more_fields(problem, read))
    if problem.dropout > 0.0 and operands.seed is not None:
        put(values, seed_fields(operands.seed))


def seed_fields(tensor: Tensor) -> Block:
    """A seed, and where dropout counts from if that follows it."""
    seed, *origin = tensor.reshape(-1).tolist()
    numbers = {f.SEED_LOW: seed & 0xFFFFFFFF, f.SEED_HIGH: (seed >> 32) & 0xFFFFFFFF}
    return numbers | {f.ORIGIN_BATCH + i: start for i, start in enumerate(origin)}


_addressed = operator.attrgetter(*ADDRESSED)


def put(values: Values, fields: Block) -> None:
    """Set some fields of a block."""
    for position, value in fields.items():
        values[position] = value


def readable(problem: AttentionProblem, operands: Operands) -> Operands:
    """Canonical operands with copies of those that kernels cannot read."""
    tables = ("cu_seqlens_q", "cu_seqlens_k", "block_table", "seqlens_k") if problem.kind != "dense" else ()
    found: dict[str, Any] = {name: _contiguous(getattr(operands, name), torch.int32) for name in tables}
    found["sinks"] = _contiguous(operands.sinks, torch.float32)
    bias, tiles = operands.bias, operands.tiles
    if bias is not None and bias.dtype not in DTYPES:
        # fp64 is rounded to fp32, before being expanded.
        stored = bias[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in bias.stride())]
        found["bias"] = stored.to(torch.float32).expand(bias.shape)
    if tiles is not None:
        assert operands.tile_bits is not None
        found["tiles"] = tiles if tiles.stride(3) == 1 or tiles.shape[3] == 1 else tiles.contiguous()
        found["tile_bits"] = bits_by_keys(operands.tile_bits).contiguous()
    return operands._replace(**found)


def _contiguous(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or (tensor.dtype == dtype and tensor.is_contiguous()):
        return tensor
    return tensor.to(dtype).contiguous()


def more_fields(problem: AttentionProblem, operands: Operands) -> Block:
    """Byte strides, sizes and dtypes of readable operands without rows."""
    block: Block = {}
    bias, mask, slopes, tiles = operands.bias, operands.mask, operands.alibi_slopes, operands.tiles
    if operands.block_table is not None:
        block[f.BLOCK_TABLE_ROW] = 4 * operands.block_table.shape[1]
    if bias is not None:
        block |= _strides_from(f.BIAS, bias) | {f.BIAS_DTYPE: DTYPES[bias.dtype]}
    if mask is not None:
        block |= _strides_from(f.MASK, mask)
    if slopes is not None:
        block |= _strides_from(f.ALIBI, slopes)
    if tiles is not None:
        assert operands.tile_bits is not None
        batch, head, row = (4 * stride for stride in tiles.stride()[:3])
        numbers = (batch, head, row, TILE * tiles.shape[3])
        block |= dict(enumerate(numbers, f.TILES + 1)) | {f.NUM_TILE_BITS: len(operands.tile_bits)}
    scales = (operands.q_scale, operands.k_scale, operands.v_scale)
    for position, scale, rows in zip((f.Q_SCALES, f.K_SCALES, f.V_SCALES), scales, problem.scale_blocks, strict=True):
        # With the rows that share one.
        if scale is not None:
            block |= _strides_from(position, scale) | {position + 4: rows or 0}
    return block


def _strides_from(position: int, tensor: Tensor) -> Block:
    """Byte strides of a tensor whose address is at a position."""
    item = tensor.dtype.itemsize
    return {position + i: stride * item for i, stride in enumerate(tensor.stride(), 1)}


def forward_workspace(division: Division, block_m: int, *, in_tiles: bool) -> tuple[Block, int]:
    """Offsets in one thread's workspace, and its size in bytes. On a matrix unit, packed head dims are whole tiles."""
    rows, dims = round_up(block_m, host().panel), (division.head_dim, division.head_dim_v)
    floats, changed = matrix_floats(*dims, rows) if in_tiles else (forward_floats(*dims, rows), {})
    if division.folds:
        # Totals of a block, shaped like WS_ACC, and the rounding errors of their sums.
        floats |= {f.WS_TOTAL: floats[f.WS_ACC], f.WS_CARRY: floats[f.WS_ACC] - rows}
    offsets, size = places(floats)
    return offsets | changed, size


def forward_floats(head_dim: int, head_dim_v: int, rows: int) -> dict[int, int]:
    """The buffers of a block of `rows` rows and their sizes in floats."""
    isa = host()
    width = round_up(head_dim, math.lcm(isa.dim_step, isa.lanes))
    width_v = round_up(head_dim_v, isa.value_step)
    return {
        f.WS_Q: rows * width,
        f.WS_ACC: rows * (width_v + 2),
        f.WS_K: isa.block_n * width,
        f.WS_V: isa.block_n * width_v,
        f.WS_SCORES: isa.block_n * isa.panel,
        f.WS_TILES: 32,
    } | _row_floats(rows, width)


def matrix_floats(head_dim: int, head_dim_v: int, rows: int) -> tuple[dict[int, int], Block]:
    """`forward_floats` for a matrix unit, and the padded head dims."""
    panel, unit = host().panel, host().matrix
    assert unit is not None
    width, width_v = (round_up(dim, unit.depth) for dim in (head_dim, head_dim_v))
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


def lengths(problem: AttentionProblem, operands: Operands) -> BothLengths | None:
    """Query and key lengths of all sequences; None if all are as long as the bounds say."""
    if problem.kind == "dense":
        return None
    q = [problem.seqlen_q] * problem.batch if operands.cu_seqlens_q is None else _differences(operands.cu_seqlens_q)
    if operands.seqlens_k is not None:
        return q, operands.seqlens_k.tolist()
    return q, [problem.seqlen_k] * problem.batch if operands.cu_seqlens_k is None else _differences(
        operands.cu_seqlens_k
    )


def _differences(totals: Tensor) -> list[int]:
    return [b - a for a, b in itertools.pairwise(totals.tolist())]


def both_lengths(bounds: Bounds, given: BothLengths | None) -> BothLengths:
    """The lengths of all sequences, also where they are equal."""
    batch, seqlen_q, seqlen_k = bounds
    return given or ((seqlen_q,) * batch, (seqlen_k,) * batch)


def expected_microseconds(division: Division, bounds: Bounds, given: BothLengths | None, *, in_tiles: bool) -> int:
    """Estimated time of a forward pass on one thread."""
    (batch, seqlen_q, seqlen_k), dims = bounds, division.head_dim + division.head_dim_v
    if division.decodes:
        keys = batch * seqlen_k if given is None else sum([n for rows, n in zip(*given, strict=True) if rows])
        return keys * division.num_kv_heads * dims * division.kv_item // DECODED_BYTES
    pairs = batch * seqlen_q * seqlen_k if given is None else sum(map(operator.mul, *given))
    rate = FLOPS_WITH_MATRIX if in_tiles else FLOPS_PER_LANE * host().lanes
    return 2 * pairs * division.num_heads * dims // rate


def useful_threads(expected: int, available: int) -> int:
    """The available threads, or fewer for little work (in microseconds). The result does not depend on it."""
    return largest(1, smallest(available, expected // MICROSECONDS_PER_THREAD))


def clear_unused_rows(totals: Tensor | None, out: Tensor, lse: Tensor | None) -> None:
    """Make the rows of packed tensors after the last sequence empty rows."""
    used = out.shape[0] if totals is None else int(totals[-1])
    if used < out.shape[0]:
        out[used:].zero_()
        if lse is not None:
            lse[:, used:].fill_(-torch.inf)


class Run(NamedTuple):
    """A program and what its parameter block has besides strides, the number of keys and addresses. `threads` is 0 if
    there is nothing to do. `num_partials` and `partial_bytes`: the results of chunks of keys that are merged, or 0.
    """

    program: str
    values: Values
    entries: Numbers
    workspace_bytes: int
    threads: int
    is_long: bool
    num_partials: int
    partial_bytes: int

    @classmethod
    def of(
        cls, program: str, values: Values, plan: Schedule, workspace_bytes: int, threads: int, *, is_long: bool
    ) -> Run:
        """That of a schedule, on as many threads as the work justifies. `values` are filled in."""
        items = plan.num_entries * plan.units
        threads = min(threads, items)
        values[f.NUM_ITEMS], values[f.UNITS], values[f.HEADS_PER_UNIT] = items, plan.units, plan.heads_per_unit
        values[f.BLOCK_M], values[f.CHUNK], values[f.WORKSPACE_BYTES] = plan.block_m, plan.chunk, workspace_bytes
        values[f.ITEMS_AT_ONCE] = max(1, min(MOST_AT_ONCE, items // (TURNS * max(1, threads))))
        if not plan.split:
            return cls(program, values, plan.entries, workspace_bytes, threads, is_long, 0, 0)
        values[f.PARTIAL_BYTES] = partial_bytes = 4 * plan.block_m * (values[f.DIM_V_PADDED] + 2)
        return cls(program, values, plan.entries, workspace_bytes, threads, is_long, items, partial_bytes)

    def start(self, values: Values, unread: int = 0) -> None:
        """Run the program with these values, which have addresses. A long run handles signals.

        `unread`: the bytes of an lse that nobody reads. Kernels always write one; it then lies behind the workspace.
        """
        name, _, entries, workspace_bytes, count, is_long, num_partials, partial_bytes = self
        if not count:
            return
        workspace = allocate((count * workspace_bytes + unread,), (1,), torch.uint8)
        values[f.WORKSPACE], values[f.SCHEDULE] = workspace.data_ptr(), entries.buffer_info()[0]
        if unread:
            values[f.LSE] = values[f.WORKSPACE] + count * workspace_bytes
        if num_partials:
            partials = allocate((num_partials * partial_bytes,), (1,), torch.uint8)
            done = torch.zeros(num_partials, dtype=torch.int64, device="cpu")
            values[f.PARTIALS], values[f.DONE] = partials.data_ptr(), done.data_ptr()
        (interrupts if is_long else threads).run(program(name), values, count)


class Kernel:
    """A program for a forward pass, with the part of its parameter block that does not depend on lengths."""

    __slots__ = ("_blocks", "_constants", "_division", "_in_tiles", "_known", "_program")

    def __init__(self, program: str, division: Division, constants: Values) -> None:
        self._program, self._division, self._constants = program, division, constants
        self._in_tiles = program == "forward_matrix"
        # The parameter block and the bytes of a workspace, by the rows of a work item: there are few.
        self._blocks: dict[int, tuple[Values, int]] = {}
        # Runs that serve many lengths.
        self._known: dict[Any, Run] = {}

    def items(self, bounds: Bounds, available: int) -> tuple[int, ...]:
        """What decides on the run for sequences that all have the bounds' lengths, on up to `available` threads, which
        come first. May be numbers of a trace.
        """
        expected = expected_microseconds(self._division, bounds, None, in_tiles=self._in_tiles)
        count, is_long = useful_threads(expected, available), smallest(1, expected // LONG_MICROSECONDS)
        return available, *schedule.Blocks.of(self._division, bounds, count), count, is_long

    def equal_run(self, items: tuple[int, ...]) -> Run:
        """The run for these `items`, which a prompt that is a little longer shares, and so does a step of decoding."""
        run = self._known.get(items)
        if run is None:
            _, *sizes, count, is_long = items
            run = self._planned(schedule.equal_schedule(self._division, schedule.Blocks(*sizes)), count, is_long)
            self._keep(items, run)
        return run

    def run(self, bounds: Bounds, given: BothLengths, available: int) -> Run:
        """The run for sequences of these lengths, on up to `available` threads."""
        division = self._division
        expected = expected_microseconds(division, bounds, given, in_tiles=self._in_tiles)
        count, is_long = useful_threads(expected, available), smallest(1, expected // LONG_MICROSECONDS)
        # A step of decoding has one key more than the one before, and most often the same items.
        key = (bounds[:2], schedule.items_of(division, given), count, is_long) if division.decodes else None
        run = self._known.get(key)
        if run is None:
            run = self._planned(schedule.forward_schedule(division, bounds, given, count), count, is_long)
            if key is not None:
                self._keep(key, run)
        return run

    def _keep(self, key: Any, run: Run) -> None:
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[key] = run

    def _planned(self, plan: Schedule, count: int, is_long: int) -> Run:
        division = self._division
        found = self._blocks.get(plan.block_m)
        if found is None:
            offsets, size = forward_workspace(division, plan.block_m, in_tiles=self._in_tiles)
            values = self._constants[:]
            put(values, offsets)
            found = self._blocks[plan.block_m] = values, size
        values, size = found[0][:], found[1]
        return Run.of(self._program, values, plan, size, count, is_long=bool(is_long))


class Forward:
    """The kernels of a forward pass: one for all sequences, or another one for those with few query rows."""

    __slots__ = ("_few", "_group", "_kernel")

    def __init__(self, problem: AttentionProblem, constants: Values) -> None:
        division = Division.of(problem)
        self._kernel, self._group = Kernel(forward_program(problem), division, constants), problem.group_size
        self._few = None
        if problem.kind != "dense" and problem.tiles_shape is None and not division.decodes:
            self._few = Kernel("decode", Division.of(problem, few=True), constants)

    def items(self, bounds: Bounds, available: int) -> tuple[int, ...]:
        """See Kernel."""
        return self._kernel.items(bounds, available)

    def equal_runs(self, items: tuple[int, ...]) -> list[Run]:
        """The runs for sequences that are equally long, by what `items` returned."""
        return [self._kernel.equal_run(items)]

    def runs(self, bounds: Bounds, given: BothLengths | None, available: int) -> list[Run]:
        """The runs for sequences of these lengths (None: of the bounds' lengths) on up to `available` threads."""
        few = self._few
        if given is None:
            return self.equal_runs(self.items(bounds, available))
        if few is None:
            return [self._kernel.run(bounds, given, available)]
        return [
            (few if is_few else self._kernel).run(part, lengths_of_part, available)
            for is_few, part, lengths_of_part in schedule.divided(self._group, bounds, given)
        ]


@functools.lru_cache(maxsize=256)
def prepared(
    problem: AttentionProblem,
    kind: str,
    available: int,
    given: tuple[tuple[int, ...], tuple[int, ...]] | None,
    *strides: Strides,
) -> list[Run]:
    """How a problem with sequences of these lengths (None: dense) runs on up to `available` threads.

    Cached, which saves small calls and the layers of a model host time.
    """
    return Forward(problem, template(problem, kind, *strides)).runs(bounds_of(problem), given, available)


def prepared_for(problem: AttentionProblem, operands: Operands, out: Tensor, available: int) -> list[Run]:
    """`prepared` for these tensors."""
    given = lengths(problem, operands)
    strides = operands.q.stride(), operands.k.stride(), operands.v.stride(), out.stride()
    known = None if given is None else (tuple(given[0]), tuple(given[1]))
    return prepared(problem, query_kind(problem, operands), available, known, *strides)


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


def _run_forward(problem: AttentionProblem, operands: Operands, out: Tensor, lse: Tensor, more: Block) -> None:
    keep: list[Tensor] = []
    for run in prepared_for(problem, operands, out, threads.num_threads()):
        values = run.values[:]
        put_operands(values, problem, operands, out, lse, keep)
        put(values, more)
        run.start(values)


def forward_program(problem: AttentionProblem) -> str:
    """The program for a forward pass."""
    if schedule.decodes(problem):
        return "decode"
    # An 8-bit code times its scale does not fit bf16.
    in_tiles = problem.dtype == torch.bfloat16 and not problem.fp8 and host().matrix is not None
    return "forward_matrix" if in_tiles else "forward"
