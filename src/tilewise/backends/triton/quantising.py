"""The quantising kernel: rotation, largest magnitude, scale and e4m3 in one launch, with the bits of quantisation.py.

One program per (block of rows, head, sequence). It reads its rows twice, the second time from a cache: small tiles
leave room for many programs, which hide each other's loads. Scales per head or tensor need the largest magnitude of all
blocks first, which a separate kernel finds.

tilewise.fp8.quantisation has the definition. The host's side is below the kernels; the measurements behind its
constants are in bench/results/triton-tiles.csv, by name.
"""

# Triton types the arguments, and constexprs are CAPS.
# mypy: disable-error-code="misc, no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, RET505

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.gpu.launching import RawView, RawViews, described
from tilewise.backends.gpu.symbols import ALIGNMENT, Address, KernelCall, Multiple
from tilewise.fp8.container import E4M3
from tilewise.fp8.rotation import directions, norms, part_sizes, signs
from tilewise.fp8.rounding import broadcast_scale

E4M3_MAX = tl.constexpr(448.0)
AMAX_FLOOR = tl.constexpr(2.0**-96)
# fp32 bits: all but the sign, and the smallest magnitude that is not finite. Magnitudes are ordered like their bits.
MAGNITUDE, INFINITY = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)
LARGEST = tl.constexpr(3.4028234663852886e38)
# As in rounding.py: the bits that hold a channel's number, and the constant that rounds errors to multiples of 2^-11.
LAST_INDEX, GRID = tl.constexpr(511), tl.constexpr(1.5 * 2.0**12)


@triton.jit
def butterfly(x, sizes, DISTANCE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(a + b, a - b) of channels DISTANCE apart, in the parts of the head that are longer than that."""
    pairs = tl.reshape(x, [ROWS, COLUMNS // (2 * DISTANCE), 2, DISTANCE])
    left, right = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
    mixed = tl.reshape(tl.permute(tl.join(left + right, left - right), [0, 1, 3, 2]), [ROWS, COLUMNS])
    if sizes is None:
        return mixed
    else:
        return tl.where((sizes > DISTANCE)[None, :], mixed, x)


@triton.jit
def rotated(x, cols, basis, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Signs, butterflies of growing distance, one multiplication: the order that rotation.py defines."""
    signs_ptr, sizes_ptr, norms_ptr, _ = basis
    inside = cols < HEAD_DIM
    sizes = None
    if HEAD_DIM != COLUMNS:
        sizes = tl.load(sizes_ptr + cols, mask=inside, other=1)
    x = x * tl.load(signs_ptr + cols, mask=inside, other=1.0)[None, :]
    LOG_COLUMNS: tl.constexpr = (COLUMNS - 1).bit_length()
    for i in tl.static_range(LOG_COLUMNS):
        x = butterfly(x, sizes, 1 << i, ROWS, COLUMNS)
    return x * tl.load(norms_ptr + cols, mask=inside, other=1.0)[None, :]


@triton.jit
def e4m3_bits(y, HARDWARE: tl.constexpr):
    """The e4m3 code of y to nearest even, saturated; by one instruction from sm_89 on."""
    if HARDWARE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & MAGNITUDE
    # Three of 23 fraction bits remain, the exponent bias becomes 7.
    normal = tl.minimum(((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3), 0x7E)
    # Below 2^-6, codes count steps of 2^-9, the last bit of numbers around 2^14: adding 2^14 rounds.
    small = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0x3C800000, small, normal)
    code = tl.where(magnitude > INFINITY, 0x7F, code | ((bits >> 24) & 0x80))
    return code.to(tl.uint8)


@triton.jit
def rounded(y, HARDWARE: tl.constexpr):
    """The e4m3 number nearest to y, in fp32."""
    if HARDWARE:
        return y.to(tl.float8e4nv).to(tl.float32)
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & MAGNITUDE
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) & 0x7FF00000).to(tl.float32, bitcast=True)
    small = (tl.abs(y) + 16384.0) - 16384.0
    nearest = tl.where(magnitude < 0x3C800000, small, tl.minimum(normal, E4M3_MAX))
    nearest = tl.where(magnitude > INFINITY, float("nan"), nearest)
    return (nearest.to(tl.int32, bitcast=True) | (bits - magnitude)).to(tl.float32, bitcast=True)


@triton.jit
def largest_channel(x, cols):
    """The channel of each row's largest magnitude, as rounding.py defines it."""
    magnitude = x.to(tl.int32, bitcast=True) & (MAGNITUDE - LAST_INDEX)
    return (tl.max(magnitude | (cols ^ LAST_INDEX)[None, :], axis=1) & LAST_INDEX) ^ LAST_INDEX


@triton.jit
def keeping_largest(y, largest, cols, basis, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr):
    """Rotated rows, shifted so that rounding to e4m3 keeps the row's largest channel. NaN where one is not finite."""
    _, sizes_ptr, _, directions_ptr = basis
    at = directions_ptr + largest[:, None] * HEAD_DIM + cols[None, :]
    direction = tl.load(at, mask=(cols < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
    error = (rounded(y, HARDWARE) - y + GRID) - GRID
    moved = tl.sum(error * direction, axis=1)
    size = 1.0 * HEAD_DIM if HEAD_DIM == COLUMNS else tl.load(sizes_ptr + largest).to(tl.float32)
    moved = tl.div_rn(moved, size)
    moved = tl.where(tl.abs(moved) <= E4M3_MAX, moved, float("nan"))
    shifted = y - moved[:, None] * direction
    # NaN compares false, so the result is `shifted`, which is NaN as promised.
    is_far = tl.abs(rounded(shifted, HARDWARE) - y) > tl.abs(y) * 0.0625
    return tl.where(is_far, y, shifted)


@triton.jit
def finite_amax(x):
    """The bits of the largest finite magnitude."""
    largest = tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE)
    # Only tiles with NaN or infinities must select among their elements.
    if largest >= INFINITY:
        largest = tl.max(tl.where(tl.abs(x) <= LARGEST, tl.abs(x), 0.0)).to(tl.int32, bitcast=True)
    return largest


@triton.jit
def block_of(program, seqlen, num_heads, BLOCK: tl.constexpr):
    """(block of rows, head, batch entry): all along the grid's first dimension, because the others end at 65535."""
    blocks = tl.cdiv(seqlen, BLOCK)
    item = program // blocks
    return program % blocks, item % num_heads, item // num_heads


@triton.jit
def place_of(batch_idx, head, cu_seqlens, seqlen, strides):
    """(elements before a head's first row, its rows). Packed rows have cu_seqlens."""
    first = batch_idx.to(tl.int64) * strides[0]
    length = seqlen
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + batch_idx)
        length = tl.load(cu_seqlens + batch_idx + 1) - start
        first = start.to(tl.int64) * strides[2]
    return first + head.to(tl.int64) * strides[1], length


@triton.jit
def load_rows(x_ptr, rows, end, cols, stride, HEAD_DIM: tl.constexpr):
    """Rows before `end` in fp32, 0 elsewhere."""
    inside = (rows < end)[:, None] & (cols < HEAD_DIM)[None, :]
    return tl.load(x_ptr + rows[:, None].to(tl.int64) * stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def turned_rows(
    x_ptr, rows, end, cols, stride, basis, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ROTATE: tl.constexpr,
):  # fmt: skip
    """load_rows, rotated if asked."""
    x = load_rows(x_ptr, rows, end, cols, stride, HEAD_DIM)
    if ROTATE:
        x = rotated(x, cols, basis, HEAD_DIM, ROWS, COLUMNS)
    return x


@triton.jit
def store_rows(
    x, data_ptr, rows, end, cols, stride, inverse, basis, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ROTATE: tl.constexpr, SATURATE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Rotate, scale, round and write."""
    if ROTATE:
        largest = largest_channel(x, cols)
        x = rotated(x, cols, basis, HEAD_DIM, ROWS, COLUMNS)
    y = x * inverse
    if ROTATE:
        if SATURATE:
            is_finite = tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1) < INFINITY
            y = tl.where(is_finite[:, None], tl.minimum(tl.maximum(y, -E4M3_MAX), E4M3_MAX), float("nan"))
        y = keeping_largest(y, largest, cols, basis, HEAD_DIM, COLUMNS, HARDWARE)
    else:
        y = tl.where(tl.abs(x) <= LARGEST, y, float("nan"))
    inside = (rows < end)[:, None] & (cols < HEAD_DIM)[None, :]
    tl.store(data_ptr + rows[:, None].to(tl.int64) * stride + cols[None, :], e4m3_bits(y, HARDWARE), mask=inside)


@triton.jit
def block_amax(
    x_ptr, rows, end, cols, stride, basis, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """finite_amax of BLOCK rows, with one reduction at the end."""
    largest = tl.zeros([ROWS, COLUMNS], tl.int32)
    for tile in range(0, BLOCK, ROWS):
        x = turned_rows(x_ptr, rows + tile, end, cols, stride, basis, HEAD_DIM, ROWS, COLUMNS, ROTATE)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & MAGNITUDE)
    found = tl.max(largest)
    if found >= INFINITY:
        found = 0
        for tile in range(0, BLOCK, ROWS):
            x = turned_rows(x_ptr, rows + tile, end, cols, stride, basis, HEAD_DIM, ROWS, COLUMNS, ROTATE)
            found = tl.maximum(found, finite_amax(x))
    return found


@triton.jit(do_not_specialize=["seqlen", "num_heads"])
def amax_kernel(
    x_ptr, amax_ptr, cu_seqlens, basis, seqlen, num_heads, x_strides, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, PER_TENSOR: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """The bits of the largest magnitude of each head (or of all, PER_TENSOR), with one program per BLOCK rows."""
    block, head, batch_idx = block_of(tl.program_id(0), seqlen, num_heads, BLOCK)
    first, length = place_of(batch_idx, head, cu_seqlens, seqlen, x_strides)
    if block * BLOCK < length:
        rows, cols = block * BLOCK + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        largest = block_amax(
            x_ptr + first, rows, length, cols, x_strides[2], basis, BLOCK, HEAD_DIM, ROWS, COLUMNS, ROTATE)  # fmt: skip
        tl.atomic_max(amax_ptr + (0 if PER_TENSOR else batch_idx * num_heads + head), largest)


@triton.jit(do_not_specialize=["seqlen", "num_heads", "num_blocks"])
def quantize_kernel(
    x_ptr, data_ptr, scale_ptr, amax_ptr, cu_seqlens, basis, seqlen, num_heads, num_blocks, x_strides, data_strides,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, MODE: tl.constexpr,
    PER_TENSOR: tl.constexpr, BLOCK_SCALES: tl.constexpr, ROTATE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Strides are of (batch, head, row). One program per BLOCK rows, in tiles of ROWS; scales are contiguous.

    MODE "own" computes a scale per block. "shared" takes the largest magnitude of the head (or of all, PER_TENSOR) from
    amax_ptr and writes its scale. "given" takes scales (of blocks, or of heads) from scale_ptr.
    """
    program = tl.program_id(0)
    if MODE == "shared":
        # In reverse order: the rows that amax_kernel read last are still cached.
        program = tl.num_programs(0) - 1 - program
    block, head, batch_idx = block_of(program, seqlen, num_heads, BLOCK)
    first, length = place_of(batch_idx, head, cu_seqlens, seqlen, x_strides)
    x_ptr += first
    data_ptr += place_of(batch_idx, head, cu_seqlens, seqlen, data_strides)[0]
    group = batch_idx * num_heads + head
    end = min(length, (block + 1) * BLOCK)
    rows, cols = block * BLOCK + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    if MODE == "given":
        inverse = tl.div_rn(1.0, tl.load(scale_ptr + (group * num_blocks + block if BLOCK_SCALES else group)))
    else:
        if MODE == "own":
            slot = group * num_blocks + block
            largest = block_amax(x_ptr, rows, end, cols, x_strides[2], basis, BLOCK, HEAD_DIM, ROWS, COLUMNS, ROTATE)
        else:
            slot = 0 if PER_TENSOR else group
            largest = tl.load(amax_ptr + slot)
        amax = tl.maximum(largest.to(tl.float32, bitcast=True), AMAX_FLOOR)
        inverse = tl.div_rn(E4M3_MAX, amax)
        if MODE == "own" or block == 0:
            tl.store(scale_ptr + slot, tl.div_rn(amax, E4M3_MAX))
    for tile in range(0, BLOCK, ROWS):
        x = load_rows(x_ptr, rows + tile, end, cols, x_strides[2], HEAD_DIM)
        store_rows(x, data_ptr, rows + tile, end, cols, data_strides[2], inverse, basis,
                   HEAD_DIM, ROWS, COLUMNS, ROTATE, MODE == "given", HARDWARE)  # fmt: skip


# The order in which tensors are passed to the launches; the four after cu_seqlens are the rotation's.
NAMES = ("x", "cu_seqlens", "signs", "sizes", "norms", "directions", "data", "scale", "amax")
BASIS = (signs, part_sizes, norms, directions)
# The dimensions of batch entries, heads and rows, by layout.
ORDER = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1), "packed": (0, 1, 0)}
# Rows of a tile; taller and shorter ones are slower.
PLAIN_ROWS = 64
# Elements of a rotated tile. Larger ones spill for wide heads.
ROTATED_ELEMENTS = 4096
# A program has at most 32 warps.
MOST_ELEMENTS = 32 * 1024
# Tiles over which one program of amax_kernel searches. Rotated ones are searched tile by tile, which is faster.
AMAX_TILES = 2


class Job(NamedTuple):
    """A call without its tensors; `seqlen` is that of the longest sequence."""

    mode: str
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    layout: str
    block: int | None
    per_tensor: bool
    rotation: bool
    hardware: bool  # whether the device converts to e4m3

    @property
    def num_blocks(self) -> int:
        """Scales per head."""
        return -(-self.seqlen // self.block) if self.block else 1

    @property
    def scale_shape(self) -> tuple[int, int, int]:
        """Shape of the stored scales."""
        alone = self.per_tensor and self.mode == "shared"
        return (1, 1, 1) if alone else (self.batch, self.heads, self.num_blocks)


def quantize(
    x: Tensor,
    granularity: str,
    block: int | None,
    layout: str,
    cu_seqlens: Tensor | None,
    *,
    rotation: bool,
    given: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor]:
    """(data, scale) of a tensor on a GPU, or on the CPU in Triton's interpreter."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    mode = "given" if given is not None else "own" if block else "shared"
    sizes = _sizes(x, layout, cu_seqlens, max_seqlen)
    job = Job(mode, *sizes, x.shape[-1], layout, block, granularity == "tensor", rotation, devices.of(x.device).has_fp8)
    data = (torch.zeros if layout == "packed" else torch.empty)(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(job.scale_shape, dtype=torch.float32, device=x.device)
    if given is not None:
        scale.copy_(broadcast_scale(given, job.scale_shape))
    if 0 not in job[1:5]:
        _run(job, x, cu_seqlens, data, scale)
    elif given is None:
        scale.fill_(AMAX_FLOOR.value / E4M3_MAX.value)
    if job.per_tensor and given is None:
        scale = scale.expand(job.batch, job.heads, job.num_blocks)
    return data.view(E4M3), scale


def _sizes(x: Tensor, layout: str, cu_seqlens: Tensor | None, max_seqlen: int | None) -> tuple[int, int, int]:
    if cu_seqlens is not None:
        return len(cu_seqlens) - 1, x.shape[1], x.shape[0] if max_seqlen is None else max_seqlen
    batch, heads, rows = (x.shape[i] for i in ORDER[layout])
    return batch, heads, rows


def _run(job: Job, x: Tensor, cu_seqlens: Tensor | None, data: Tensor, scale: Tensor) -> None:
    amax = torch.zeros(scale.numel(), dtype=torch.int32, device=x.device) if job.mode == "shared" else None
    basis = [f(job.head_dim, x.device) for f in BASIS] if job.rotation else [None] * len(BASIS)
    tensors = (x, cu_seqlens, *basis, data, scale, amax)
    described(quantising_calls, NAMES, job, tensors).run(tensors)


def quantising_calls(job: Job, views: RawViews) -> list[KernelCall]:
    """The quantising kernel, preceded by amax_kernel where all rows share a scale."""
    named = dict(zip(NAMES, views, strict=True))
    address = {n: None if v is None else Address(n, v[1], v[2]) for n, v in named.items()}
    tile, num_warps = _tile(job)
    shared = {
        "x_ptr": address["x"],
        "amax_ptr": address["amax"],
        "cu_seqlens": address["cu_seqlens"],
        "basis": tuple(address[name] for name in NAMES[2:6]),
        "seqlen": job.seqlen,
        "num_heads": job.heads,
        "x_strides": _strides(named["x"], job.layout),
        "ROWS": tile,
        "HEAD_DIM": job.head_dim,
        "COLUMNS": _columns(job),
        "PER_TENSOR": job.per_tensor,
        "ROTATE": job.rotation,
    }
    rows = job.block or tile
    own = {
        "data_ptr": address["data"],
        "scale_ptr": address["scale"],
        "num_blocks": job.num_blocks,
        "data_strides": _strides(named["data"], job.layout),
        "BLOCK": rows,
        "MODE": job.mode,
        "BLOCK_SCALES": job.block is not None,
        "HARDWARE": job.hardware,
    }
    grid = (-(-job.seqlen // rows) * job.heads * job.batch, 1, 1)
    # Multiply and add are not fused, so that bits equal those of tilewise.fp8.quantisation.
    quantising = KernelCall(quantize_kernel, grid, shared | own, num_warps, fused=False)
    if job.mode != "shared":
        return [quantising]
    rows = tile if job.rotation else AMAX_TILES * tile
    grid = (-(-job.seqlen // rows) * job.heads * job.batch, 1, 1)
    return [KernelCall(amax_kernel, grid, shared | {"BLOCK": rows}, num_warps, fused=False), quantising]


def _columns(job: Job) -> int:
    return max(16, 1 << (job.head_dim - 1).bit_length())


def _tile(job: Job) -> tuple[int, int]:
    """(rows, warps) of a tile, with 32 elements per thread."""
    columns = _columns(job)
    rows = max(1, ROTATED_ELEMENTS // columns) if job.rotation else min(PLAIN_ROWS, MOST_ELEMENTS // columns)
    return rows, max(rows * columns // 1024, 1)


def _strides(view: RawView | None, layout: str) -> tuple[int | Multiple, ...]:
    """Strides of (batch, head, row). Multiples of 16 bytes are marked, so that a thread loads that many at once."""
    assert view is not None
    whole = ALIGNMENT // view[1].itemsize
    strides: Any = (view[0][i] for i in ORDER[layout])
    return tuple(Multiple(stride, whole) if stride % whole == 0 else stride for stride in strides)
