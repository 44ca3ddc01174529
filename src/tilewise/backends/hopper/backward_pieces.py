"""The last round of a backward without a mask, cut along its queries, so that all SMs end together.

Without a mask all tiles cost the same. If their number is no multiple of the SMs, some SMs idle for a whole tile: 2048
tiles on 132 SMs are 15.5 rounds and take 16. The main kernel (backward.py) computes whole rounds. The remaining tiles x
query tiles form one line, of which every program computes an equal length: a piece of a tile, or the end of one and the
start of the next. A piece writes its dK and dV in fp32. join_pieces_kernel adds the pieces of a tile in a fixed order,
so results do not depend on timing. dQ is added as in the main kernel.

This is a kernel of its own because ptxas schedules the main kernel's loop worse if it contains such pieces: it moves
the wait for dP behind the exponentials. Figures: bench/results/hopper-backward-choices.csv.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tilewise.backends.gpu.records import Span
from tilewise.backends.gpu.releases import async_load
from tilewise.backends.hopper.backward import backward_step, load_queries, make_pipeline
from tilewise.backends.hopper.channels import start
from tilewise.backends.hopper.layouts import accumulator_layout, tile_at
from tilewise.backends.hopper.schedule import place_of, row_tile_of

# Strides come in units of 16 bytes, as in backward_rows.py.
UNIT = tl.constexpr(8)
# Rows of a tile that a program of join_pieces_kernel sums, and keys of a tile.
JOINED_ROWS, KEYS = tl.constexpr(8), tl.constexpr(128)


class Line(NamedTuple):
    """What is cut: the first tile, query tiles per tile, query tiles in total, query tiles per program."""

    first_tile: int
    query_tiles: int
    total: int
    length: int

    @property
    def programs(self) -> int:
        """How many programs compute a length of the line."""
        return -(-self.total // self.length)


@gluon.jit
def piece_at(step, end, line):
    """(tile, first query tile, end) of the piece that begins at a step of the line; `end` is the program's last + 1."""
    number = step // line.query_tiles
    lo = step - number * line.query_tiles
    return line.first_tile + number, lo, min(line.query_tiles, lo + end - step)


@gluon.jit
def producer(q_desc, dout_desc, k_desc, v_desc, stats_desc, units_desc, line, sizes, pipe, C: gl.constexpr):
    """Feed the rings."""
    KEY_BYTES: gl.constexpr = 2 * k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes
    at = start(C.NUM_STAGES)
    key_turn = start(1)
    step = gl.program_id(0) * line.length
    end = min(step + line.length, line.total)
    while step < end:
        tile, lo, hi = piece_at(step, end, line)
        block, item = place_of(tile, sizes, False)
        batch_idx = item // sizes.num_heads
        head = item - batch_idx * sizes.num_heads
        q_span = Span(batch_idx, 0, sizes.seqlen_q)
        row_tile = row_tile_of(item, q_span, sizes, C)
        at = load_queries(q_desc, dout_desc, stats_desc, units_desc, pipe, at, q_span, head, row_tile, lo, C)
        ready = pipe.key_ring.acquire(key_turn, KEY_BYTES)
        key_turn = key_turn.next()
        for w in gl.static_range(2):
            place = tile_at(q_span, head, block * 128 + w * 64, 0, False)
            async_load(k_desc, place, ready, pipe.k_smem.index(w))
            async_load(v_desc, place, ready, pipe.v_smem.index(w))
        for m_block in range(lo + 1, hi):
            at = load_queries(q_desc, dout_desc, stats_desc, units_desc, pipe, at, q_span, head, row_tile, m_block, C)
        step += hi - lo


@gluon.jit
def store_part(x, at, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """Store the fp32 sums of 64 keys, row by row."""
    LAYOUT: gl.constexpr = accumulator_layout(C.D)
    rows = WARPGROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, C.D, gl.SliceLayout(0, LAYOUT))
    gl.store(at + rows[:, None] * C.D + cols[None, :], x)


@gluon.jit
def consumer(
    dq_desc, parts_ptr, units_ptr, scale_log2, cap_scale, line, sizes, pipe, WARPGROUP: gl.constexpr, C: gl.constexpr
):
    """Sum dK and dV of 64 keys over a piece's query tiles, piece after piece."""
    D: gl.constexpr = C.D
    at = start(C.NUM_STAGES)
    key_turn = start(1)
    step = gl.program_id(0) * line.length
    end = min(step + line.length, line.total)
    while step < end:
        tile, lo, hi = piece_at(step, end, line)
        block, item = place_of(tile, sizes, False)
        row = row_tile_of(item, (0, 0, sizes.seqlen_q), sizes, C)
        dk = gl.zeros([64, D], gl.float32, accumulator_layout(D))
        dv = gl.zeros([64, D], gl.float32, accumulator_layout(D))
        pipe.key_ring.wait(key_turn)
        for m_block in range(lo, hi):
            dk, dv, at = backward_step(
                m_block, row + m_block, block * 128, dk, dv, at, dq_desc, units_ptr, scale_log2, cap_scale,
                sizes.seqlen_q, sizes.seqlen_k, None, None, sizes, pipe, WARPGROUP, False, C)  # fmt: skip
        pipe.key_ring.release(key_turn)
        key_turn = key_turn.next()
        part = gl.program_id(0) + (tile - line.first_tile)
        place = parts_ptr + gl.to_tensor(part).to(gl.int64) * (2 * 128 * D)
        store_part(dk, place, WARPGROUP, C)
        store_part(dv, place + 128 * D, WARPGROUP, C)
        step += hi - lo
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["line", "scale_log2", "cap_scale", "sizes"])
def backward_pieces_kernel(
    q_desc, dout_desc, k_desc, v_desc, stats_desc, units_desc, dq_desc, parts_ptr, units_ptr, line, scale_log2,
    cap_scale, sizes, C: gl.constexpr,
):  # fmt: skip
    """Pieces of dK and dV, and what they add to dQ; every program computes one length of the line."""
    pipe = make_pipeline(q_desc, dout_desc, k_desc, v_desc, stats_desc, units_desc, dq_desc, 0, C)
    gl.warp_specialize([
        (consumer, (dq_desc, parts_ptr, units_ptr, scale_log2, cap_scale, line, sizes, pipe, 0, C)),
        (consumer, (dq_desc, parts_ptr, units_ptr, scale_log2, cap_scale, line, sizes, pipe, 1, C)),
        (producer, (q_desc, dout_desc, k_desc, v_desc, stats_desc, units_desc, line, sizes, pipe, C)),
    ], [4, 1], [240, 24])  # fmt: skip


@triton.jit(do_not_specialize=["line", "scale", "num_heads", "num_blocks", "dk_strides", "dv_strides"])
def join_pieces_kernel(
    parts_ptr, dk_ptr, dv_ptr, line, scale, num_heads, num_blocks, dk_strides, dv_strides,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Sum the pieces of dK or dV of a tile, in the order of the programs that computed them.

    Programs: tiles x JOINED_ROWS of their rows x (dK, dV).
    """
    number = tl.program_id(0)
    first = number * line.query_tiles // line.length
    last = (number * line.query_tiles + line.query_tiles - 1) // line.length
    rows = tl.program_id(1) * JOINED_ROWS + tl.arange(0, JOINED_ROWS)
    cols = tl.arange(0, D)
    is_value = tl.program_id(2)
    x = tl.zeros([JOINED_ROWS, D], tl.float32)
    for program in range(first, last + 1):
        part = ((program + number) * 2 + is_value).to(tl.int64)
        x += tl.load(parts_ptr + part * (KEYS * D) + rows[:, None] * D + cols[None, :])
    tile = line.first_tile + number
    item = tile // num_blocks
    batch_idx = (item // num_heads).to(tl.int64)
    head = (item % num_heads).to(tl.int64)
    keys = (tile % num_blocks * KEYS + rows).to(tl.int64)
    if is_value == 0:
        at = dk_ptr + (batch_idx * dk_strides.batch + head * dk_strides.head + keys[:, None] * dk_strides.row) * UNIT
        tl.store(at + cols[None, :], (x * scale).to(dk_ptr.dtype.element_ty), mask=(cols < HEAD_DIM)[None, :])
    else:
        at = dv_ptr + (batch_idx * dv_strides.batch + head * dv_strides.head + keys[:, None] * dv_strides.row) * UNIT
        tl.store(at + cols[None, :], x.to(dv_ptr.dtype.element_ty), mask=(cols < HEAD_DIM_V)[None, :])
