"""What forward, decoding and backward share: descriptors of operands, copies of what TMA cannot address, and how a pass
over canonical operands is run and bound.

Nothing here waits for the device, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from tilewise import device as devices
from tilewise.backends.gpu.launching import HEADS_FIRST, Allocation, Pass, RawViews, View, Wish, pass_of, raw_views
from tilewise.backends.gpu.symbols import Address, KernelCall, Tile
from tilewise.backends.hopper.layouts import smem_layout, tile_box
from tilewise.device import DeviceSpec
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem

__all__ = [
    "ForwardPass",
    "addressable",
    "bind_pass",
    "contiguous",
    "describe",
    "describe_flat",
    "packed_rows",
    "page_rows",
    "prepared",
    "rows_allocation",
    "run_pass",
]

GLUON_DTYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.int32: gl.int32,
    torch.float8_e4m3fn: gl.float8e4nv,
}
# TMA takes addresses and strides that are multiples of this.
TMA_BYTES = 16
# The extra dimensions of a packed descriptor, see layouts.tile_at: any coordinate is inside, and 2^30 steps of 2^34
# elements are a multiple of 2^64 bytes.
PACKED_EXTENT, PACKED_ROWS, PACKED_STRIDE = 0x7FFF0000, 1 << 30, 1 << 34


class ForwardPass(NamedTuple):
    """A forward call with everything but addresses, or the operands that TMA cannot address as they are: `copies`."""

    copies: tuple[str, ...]
    kernels: Pass | None


Prepare = Callable[[AttentionProblem, DeviceSpec, int, RawViews, Wish], ForwardPass]


def prepared(
    copies: Sequence[str],
    problem: AttentionProblem,
    made: Mapping[str, Allocation | None],
    calls: Sequence[KernelCall],
    device: DeviceSpec,
    index: int,
    wish: Wish,
    num_counters: int = 1,
) -> ForwardPass:
    """A pass of these calls, which make out, lse and what only they read; their counters are called "counter"."""
    if copies:
        return ForwardPass(tuple(copies), None)
    kernels = pass_of(
        problem.layout, calls, Operands._fields, made, device, index, wish, num_counters=num_counters
    )  # fmt: skip
    return ForwardPass((), kernels)


def run_pass(prepare: Prepare, problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of canonical operands; `prepare` remembers the passes it made."""
    if operands.sinks is not None:
        operands = operands._replace(sinks=operands.sinks.contiguous())
    copies, kernels = _prepared_for(prepare, problem, operands, HEADS_FIRST)
    if kernels is None:
        operands = operands._replace(**{name: contiguous(getattr(operands, name)) for name in copies})
        _, kernels = _prepared_for(prepare, problem, operands, HEADS_FIRST)
    assert kernels is not None
    made = kernels.run(operands)
    return made["out"], made["lse"]


def bind_pass(prepare: Prepare, problem: AttentionProblem, operands: Operands, *, want_lse: bool) -> Pass | None:
    """The pass for operands that lie like these; None if some must be copied in every call."""
    if operands.sinks is not None and not operands.sinks.is_contiguous():
        return None
    return _prepared_for(prepare, problem, operands, Wish(in_layout=True, also=("lse",) if want_lse else ())).kernels


def _prepared_for(prepare: Prepare, problem: AttentionProblem, operands: Operands, wish: Wish) -> ForwardPass:
    q = operands.q
    return prepare(problem, devices.of(q.device), q.get_device(), raw_views(operands), wish)


def addressable(view: View, shape: tuple[int, ...], *, shared: bool = False) -> bool:
    """Whether TMA can address a tensor (else it is copied): base and strides multiples of 16 bytes.

    `shared`: those of heads and sequences may be 0, which is one, too.
    """
    step, rows = TMA_BYTES // view.dtype.itemsize, 2 if len(shape) == 4 else 0
    sides = enumerate(zip(shape[:-1], view.strides, strict=False))
    return view.aligned and all(
        size == 1 or (stride % step == 0 and (stride > 0 or (shared and at != rows))) for at, (size, stride) in sides
    )


def packed_rows(problem: AttentionProblem, name: str, view: View) -> View:
    """The view of q, k or v; of pages, the view of all their rows, unaligned if TMA cannot step from page to page."""
    if problem.page_size is None or name not in ("k", "v"):
        return view
    _, row, head, column = view.strides
    steps = page_rows(problem, view)
    whole = 0 < steps * (problem.total_k // problem.page_size) < PACKED_EXTENT
    return View((row, head, column), view.dtype, view.aligned and whole)


def page_rows(problem: AttentionProblem, view: View) -> int:
    """Rows from the beginning of a page to that of the next one; 0 if that is no whole number."""
    assert problem.page_size is not None
    page, row = view.strides[:2]
    if problem.total_k == problem.page_size:  # one page
        return problem.page_size
    return page // row if row > 0 and page % row == 0 else 0


def describe(name: str, view: View, shape: tuple[int, ...], rows: int, columns: int) -> Tile:
    """A descriptor for tiles of a (batch, head, row, column) tensor, or of packed (row, head, column) rows."""
    packed = len(shape) == 3
    strides = view.strides
    if packed:
        (_, heads, width), (row, head, _) = shape, strides
        shape = (PACKED_EXTENT, PACKED_EXTENT, heads, PACKED_ROWS, width)
        strides = (PACKED_STRIDE - row, row, head, row, 1)
    # The stride of a dimension of size 1 is never used, but TMA checks it.
    strides = (*(TMA_BYTES if n == 1 else s for n, s in zip(shape[:-1], strides, strict=False)), 1)
    box, layout = _box(rows, columns, packed, view.dtype)
    return Tile(Address(name, view.dtype), shape, strides, box, layout)


@functools.cache
def _box(rows: int, columns: int, packed: bool, dtype: torch.dtype) -> tuple[tuple[int, ...], Any]:
    box = tile_box(rows, columns, packed=packed)
    return tuple(box), smem_layout(box, GLUON_DTYPES[dtype])


def describe_flat(address: Address, shape: tuple[int, ...], box: list[int]) -> Tile:
    """A descriptor for blocks of contiguous scratch memory."""
    strides = tuple(Allocation.contiguous(shape, address.dtype).strides)
    return Tile(address, shape, strides, tuple(box), smem_layout(box, GLUON_DTYPES[address.dtype]))


def rows_allocation(problem: AttentionProblem, heads: int, seqlen: int, total: int, head_dim: int) -> Allocation:
    """A new tensor of token rows in canonical shape, over the memory order of the problem's layout."""
    if problem.kind != "dense":
        return Allocation.contiguous((total, heads, head_dim), problem.dtype)
    if problem.layout == "bshd":
        shape = (problem.batch, heads, seqlen, head_dim)
        return Allocation(shape, (seqlen * heads * head_dim, head_dim, heads * head_dim, 1), problem.dtype)
    return Allocation.contiguous((problem.batch, heads, seqlen, head_dim), problem.dtype)


def contiguous(tensor: Tensor) -> Tensor:
    """A copy that TMA can address."""
    return tensor.clone(memory_format=torch.contiguous_format)
