"""Quantising on a GPU: which passes of the kernel, over which blocks."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from tilewise.fp8.container import BLOCK, E4M3
from tilewise.fp8.kernels import quantize_kernel
from tilewise.fp8.quantisation import scale_of
from tilewise.fp8.rotation import norms, part_sizes, signs

__all__ = ["quantize"]

# From here on GPUs convert to e4m3 in hardware.
FIRST_WITH_E4M3 = (8, 9)


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
    data = (torch.zeros if layout == "packed" else torch.empty)(x.shape, dtype=torch.uint8, device=x.device)
    batch, heads, seqlen = _sizes(x, layout, cu_seqlens, max_seqlen)
    rows = block or BLOCK
    num_blocks = -(-seqlen // block) if block else 1
    own = granularity == "block" and given is None
    scale = torch.empty((batch, heads, num_blocks), dtype=torch.float32, device=x.device)
    if given is not None:
        scale.copy_(given.expand(scale.shape))
    per_tensor = granularity == "tensor"
    amax = torch.zeros(1 if per_tensor else batch * heads, dtype=torch.int32, device=x.device)
    arguments = _arguments(x, data, scale, amax, layout, cu_seqlens, rows, seqlen, rotation=rotation)
    arguments |= {
        "PER_TENSOR": per_tensor,
        "BLOCK_SCALES": block is not None,
        "num_heads": heads,
        "num_blocks": num_blocks,
    }
    grid = (-(-seqlen // rows), heads, batch)
    if 0 not in grid and x.shape[-1]:
        modes = ("own",) if own else ("given",) if given is not None else ("amax", "shared")
        for mode in modes:
            quantize_kernel[grid](**arguments, MODE=mode, **_options(arguments["ROWS"] * arguments["COLUMNS"]))
    if not own and given is None:
        shape = (1, 1, 1) if per_tensor else (batch, heads, 1)
        scale = scale_of(amax.view(torch.float32)).reshape(shape).expand(batch, heads, 1)
    return data.view(E4M3), scale


def _options(elements: int) -> dict[str, int]:
    """Warps for 32 elements a thread, in 64 registers: two blocks of 128 x 128 on an SM, one is loaded meanwhile."""
    return {"num_warps": min(max(elements // 1024, 4), 32), "maxnreg": 64}


def _sizes(x: Tensor, layout: str, cu_seqlens: Tensor | None, max_seqlen: int | None) -> tuple[int, int, int]:
    if cu_seqlens is not None:
        return len(cu_seqlens) - 1, x.shape[1], x.shape[0] if max_seqlen is None else max_seqlen
    return (x.shape[0], x.shape[2], x.shape[1]) if layout == "bshd" else (x.shape[0], x.shape[1], x.shape[2])


def _arguments(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    amax: Tensor,
    layout: str,
    cu_seqlens: Tensor | None,
    rows: int,
    seqlen: int,
    *,
    rotation: bool,
) -> dict[str, Any]:
    order = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1), "packed": (0, 1, 0)}[layout]
    head_dim = x.shape[-1]
    basis = tuple(f(head_dim, x.device) for f in (signs, part_sizes, norms)) if rotation else (None, None, None)
    return {
        "x_ptr": x,
        "data_ptr": data,
        "scale_ptr": scale,
        "amax_ptr": amax,
        "cu_seqlens": cu_seqlens,
        "basis": basis,
        "seqlen": seqlen,
        "x_strides": tuple(x.stride(i) for i in order),
        "data_strides": tuple(data.stride(i) for i in order),
        "BLOCK": rows,
        "ROWS": triton.next_power_of_2(rows),
        "HEAD_DIM": head_dim,
        "COLUMNS": max(16, triton.next_power_of_2(head_dim)),
        "ROTATE": rotation,
        "HARDWARE": x.is_cuda and torch.cuda.get_device_capability(x.device) >= FIRST_WITH_E4M3,
    }
