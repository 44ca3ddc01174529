"""Host side of quantising: which kernel runs over which blocks. See tilewise.fp8.quantisation for the definition.

Measurements behind the constants are in bench/results/triton-tiles.csv, by name.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.gpu.launching import Pass, RawView, raw_views
from tilewise.backends.gpu.symbols import ALIGNMENT, Address, KernelCall, Multiple
from tilewise.backends.triton.quantising import amax_kernel, quantize_kernel
from tilewise.fp8.container import E4M3, E4M3_MAX
from tilewise.fp8.rotation import directions, norms, part_sizes, signs
from tilewise.fp8.scales import AMAX_FLOOR, broadcast_scale

__all__ = ["Job", "quantising_calls", "quantize"]

# The order in which tensors are passed to the launches; the four after cu_seqlens are the rotation's.
NAMES = ("x", "cu_seqlens", "signs", "sizes", "norms", "directions", "data", "scale", "amax")
BASIS = (signs, part_sizes, norms, directions)
# The dimensions of batch entries, heads and rows, by layout.
ORDER = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1), "packed": (0, 1, 0)}
# Rows of a tile; taller and shorter ones are slower.
PLAIN_ROWS = 64
# Elements of a rotated tile. Larger ones spill for wide heads.
ROTATED_ELEMENTS = 4096
# Tiles over which one program of amax_kernel searches. Rotated ones are searched tile by tile, which is faster.
AMAX_TILES = 2
Views = tuple[RawView | None, ...]


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
    job = Job(mode, *sizes, x.shape[-1], layout, block, granularity == "tensor", rotation)
    data = (torch.zeros if layout == "packed" else torch.empty)(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(job.scale_shape, dtype=torch.float32, device=x.device)
    if given is not None:
        scale.copy_(broadcast_scale(given, job.scale_shape))
    if 0 not in job[1:5]:
        _run(job, x, cu_seqlens, data, scale)
    elif given is None:
        scale.fill_(AMAX_FLOOR / E4M3_MAX)
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
    _prepared(job, raw_views(tensors), x.device).run(tensors)


@functools.lru_cache(maxsize=512)
def _prepared(job: Job, views: Views, device: torch.device) -> Pass:
    spec = devices.of(device)
    index = -1 if device.type != "cuda" else device.index
    return Pass(quantising_calls(job, views, hardware=spec.has_fp8), NAMES, {}, spec, index)


def quantising_calls(job: Job, views: Views, *, hardware: bool) -> list[KernelCall]:
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
        "HARDWARE": hardware,
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
    rows = max(1, ROTATED_ELEMENTS // columns) if job.rotation else PLAIN_ROWS
    return rows, max(rows * columns // 1024, 1)


def _strides(view: RawView | None, layout: str) -> tuple[int | Multiple, ...]:
    """Strides of (batch, head, row). Multiples of 16 bytes are marked, so that a thread loads that many at once."""
    assert view is not None
    whole = ALIGNMENT // view[1].itemsize
    strides: Any = (view[0][i] for i in ORDER[layout])
    return tuple(Multiple(stride, whole) if stride % whole == 0 else stride for stride in strides)
