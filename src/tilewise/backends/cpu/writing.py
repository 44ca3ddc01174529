"""Scatter rows of K and V into pages. A work item is a few rows."""

from __future__ import annotations

from llvmlite import ir

from tilewise.backends.cpu import launch_writing as f
from tilewise.backends.cpu.compiler import driver, kernel
from tilewise.backends.cpu.emit import I8, I64, Emitter, Value
from tilewise.backends.cpu.intrinsics import atomic_add, field, load_i64

__all__ = ["write_rows"]


@kernel("iii")
def copy_bytes(e: Emitter, source: Value, target: Value, count: Value) -> None:
    """target[count] = source[count], bytes that do not overlap."""
    pointer, flag = I8.as_pointer(), ir.IntType(1)
    copy = e.declared("llvm.memcpy.p0.p0.i64", ir.FunctionType(ir.VoidType(), [pointer, pointer, I64, flag]))
    e.b.call(copy, [e.b.inttoptr(target, pointer), e.b.inttoptr(source, pointer), count, ir.Constant(flag, 0)])


@driver
def write_row(p: int, tensor: int, row: int, slot: int) -> None:
    """Copy one row of K (or V) into its slot: at once if its heads are adjacent on both sides, else head by head."""
    size, page_size = field(p, tensor + f.HEAD_BYTES), field(p, f.PAGE_SIZE)
    source = field(p, tensor + f.SOURCE) + row * field(p, tensor + f.SOURCE_ROW)
    target = field(p, tensor + f.PAGES) + slot // page_size * field(p, tensor + f.PAGES_PAGE)
    target += slot % page_size * field(p, tensor + f.PAGES_SLOT)
    if field(p, tensor + f.SOURCE_HEAD) == size and field(p, tensor + f.PAGES_HEAD) == size:
        copy_bytes(source, target, size * field(p, f.NUM_HEADS))
    else:
        for head in range(field(p, f.NUM_HEADS)):
            place = source + head * field(p, tensor + f.SOURCE_HEAD)
            copy_bytes(place, target + head * field(p, tensor + f.PAGES_HEAD), size)


@driver
def write_rows(p: int) -> None:
    """The entry point of each thread: take items until none is left."""
    rows = field(p, f.NUM_ROWS)
    while True:
        first = atomic_add(p + 8 * f.BLOCK_FIELDS + f.NEXT_ITEM, f.ROWS_PER_ITEM)
        if first >= rows:
            break
        for row in range(first, min(rows, first + f.ROWS_PER_ITEM)):
            slot = load_i64(field(p, f.SLOTS) + 8 * row)
            if slot >= 0:
                write_row(p, f.K, row, slot)
                write_row(p, f.V, row, slot)
