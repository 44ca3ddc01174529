"""A pytest plugin: AVX-512 and AMX on any processor. The x86 instructions that kernels name are emulated in LLVM IR.

Vectors of 16 lanes are LLVM's to lower; only `llvm.x86` intrinsics are replaced. Tile registers are memory that all
threads share, so there may be one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from llvmlite import ir

from tilewise.backends.cpu import isa
from tilewise.backends.cpu.emit import BFLOAT, F32, I8, I16, I32, I64, Emitter, Value

TILES, ROWS, ROW_BYTES, CONFIG_BYTES = 8, 16, 64, 64
# Where a configuration holds the bytes of a tile's rows (16 bits each), and the rows of tiles (8 bits).
WIDTHS, HEIGHTS = 16, 48

Body = Callable[[Emitter, Sequence[Value]], Value]


def memory(e: Emitter, name: str, size: int) -> Value:
    """The address of zeros that the program keeps."""
    known = e.b.module.globals.get(name)
    if known is None:
        kind = ir.ArrayType(I8, size)
        known = ir.GlobalVariable(e.b.module, kind, name)
        known.linkage, known.initializer, known.align = "internal", ir.Constant(kind, None), 64
    return e.b.ptrtoint(known, I64)


def config(e: Emitter) -> Value:
    return memory(e, "emulated_config", CONFIG_BYTES)


def tile_at(e: Emitter, number: Value) -> Value:
    size = ROWS * ROW_BYTES
    return e.b.add(memory(e, "emulated_tiles", TILES * size), e.b.mul(e.b.zext(number, I64), e.i64(size)))


def shape_of(e: Emitter, number: Value) -> tuple[Value, Value]:
    """(rows, bytes of a row) of a tile."""
    number = e.b.zext(number, I64)
    height = e.load(e.b.add(config(e), e.b.add(e.i64(HEIGHTS), number)), I8, align=1)
    width = e.load(e.b.add(config(e), e.b.add(e.i64(WIDTHS), e.b.mul(number, e.i64(2)))), I16, align=1)
    return e.b.zext(height, I64), e.b.zext(width, I64)


def copy(e: Emitter, source: Value, target: Value, count: Value) -> None:
    def byte(i: Value) -> None:
        e.store(e.b.add(target, i), e.load(e.b.add(source, i), I8, align=1), align=1)

    e.positive(count, 1, byte)


def clear(e: Emitter, target: Value, count: Value) -> None:
    e.positive(count, 1, lambda i: e.store(e.b.add(target, i), ir.Constant(I8, 0), align=1))


def save(e: Emitter, given: Sequence[Value]) -> None:
    copy(e, config(e), e.b.ptrtoint(given[0], I64), e.i64(CONFIG_BYTES))


def configure(e: Emitter, given: Sequence[Value]) -> None:
    copy(e, e.b.ptrtoint(given[0], I64), config(e), e.i64(CONFIG_BYTES))
    clear(e, tile_at(e, ir.Constant(I8, 0)), e.i64(TILES * ROWS * ROW_BYTES))


def zero(e: Emitter, given: Sequence[Value]) -> None:
    clear(e, tile_at(e, given[0]), e.i64(ROWS * ROW_BYTES))


def load(e: Emitter, given: Sequence[Value]) -> None:
    number, source, stride = given
    zero(e, given)
    rows, width = shape_of(e, number)
    first, target = e.b.ptrtoint(source, I64), tile_at(e, number)

    def row(r: Value) -> None:
        copy(e, e.b.add(first, e.b.mul(r, stride)), e.b.add(target, e.b.mul(r, e.i64(ROW_BYTES))), width)

    e.positive(rows, 1, row)


def store(e: Emitter, given: Sequence[Value]) -> None:
    number, target, stride = given
    rows, width = shape_of(e, number)
    first, source = e.b.ptrtoint(target, I64), tile_at(e, number)

    def row(r: Value) -> None:
        copy(e, e.b.add(source, e.b.mul(r, e.i64(ROW_BYTES))), e.b.add(first, e.b.mul(r, stride)), width)

    e.positive(rows, 1, row)


def multiply(e: Emitter, given: Sequence[Value]) -> None:
    """C[m][n] += A[m][2k] B[k][2n] + A[m][2k + 1] B[k][2n + 1]."""
    b = e.b
    sums, left, right = (tile_at(e, number) for number in given)
    (rows, width), (_, depth) = shape_of(e, given[0]), shape_of(e, given[1])

    def wide(address: Value) -> Value:
        return b.bitcast(b.shl(b.zext(e.load(address, I16, align=2), I32), ir.Constant(I32, 16)), F32)

    def element(m: Value, n: Value) -> None:
        line = b.mul(m, e.i64(ROW_BYTES))

        def pair(k: Value, total: Value) -> list[Value]:
            a, c = b.add(b.add(left, line), k), b.add(b.add(right, b.mul(k, e.i64(ROW_BYTES // 4))), n)
            for half in (0, 2):
                total = e.fma(wide(b.add(a, e.i64(half))), wide(b.add(c, e.i64(half))), total)
            return [total]

        place = b.add(b.add(sums, line), n)
        e.store(place, e.positive(depth, 4, pair, [e.load(place, F32)])[0])

    e.positive(rows, 1, lambda m: e.positive(width, 4, lambda n: element(m, n)) and None)


def rest_of_integer(e: Emitter, given: Sequence[Value]) -> Value:
    """x minus the nearest integer; 0 for an infinite x."""
    b, x = e.b, given[0]
    is_infinite = b.fcmp_ordered("==", e.call("fabs", x), e.f32s(float("inf")))
    return b.select(is_infinite, e.f32s(0.0), b.fsub(x, e.call("rint", x)))


def scaled(e: Emitter, given: Sequence[Value]) -> Value:
    """a * 2^b, where b is an integer: in two steps, as a power of two may be too small for fp32."""
    b, x, power = e.b, given[0], given[1]
    low, high = e.f32s(-250.0), e.f32s(250.0)
    bounded = b.select(b.fcmp_ordered("<", power, low), low, power)
    bounded = b.select(b.fcmp_ordered(">", bounded, high), high, bounded)
    number = b.fptosi(bounded, e.int_vector)
    first = b.ashr(number, e.i32s(1))
    for part in (first, b.sub(number, first)):
        x = b.fmul(x, b.bitcast(b.shl(b.add(part, e.i32s(127)), e.i32s(23)), e.vector))
    return b.select(b.fcmp_unordered("uno", power, power), power, x)


def rounded(e: Emitter, given: Sequence[Value]) -> Value:
    """Two vectors in bf16, the second one first."""
    b, halves = e.b, []
    for x in (given[1], given[0]):
        bits = b.bitcast(x, e.int_vector)
        odd = b.and_(b.lshr(bits, e.i32s(16)), e.i32s(1))
        near = b.lshr(b.add(b.add(bits, e.i32s(0x7FFF)), odd), e.i32s(16))
        nan = b.or_(b.lshr(bits, e.i32s(16)), e.i32s(0x40))
        halves.append(b.trunc(b.select(b.fcmp_unordered("uno", x, x), nan, near), ir.VectorType(I16, e.lanes)))
    both = b.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, 2 * e.lanes), list(range(2 * e.lanes))))
    return b.bitcast(both, ir.VectorType(BFLOAT, 2 * e.lanes))


BODIES: dict[str, Callable[[Emitter, Sequence[Value]], Any]] = {
    "sttilecfg": save,
    "ldtilecfg": configure,
    "tilezero": zero,
    "tileloadd64": load,
    "tilestored64": store,
    "tdpbf16ps": multiply,
    "avx512.mask.reduce.ps.512": rest_of_integer,
    "avx512.mask.scalef.ps.512": scaled,
    "avx512bf16.cvtne2ps2bf16.512": rounded,
}


def install() -> None:
    """From now on kernels are those of AVX-512 with AMX."""
    plain = Emitter.declared

    def declared(self: Emitter, name: str, kind: ir.FunctionType) -> Value:
        if not name.startswith("llvm.x86."):
            return plain(self, name, kind)
        name = name.removeprefix("llvm.x86.")
        symbol = "emulated_" + name.replace(".", "_")
        known = self.b.module.globals.get(symbol)
        if known is None:
            known = ir.Function(self.b.module, kind, symbol)
            known.linkage = "internal"
            inside = Emitter(ir.IRBuilder(known.append_basic_block("entry")), self.isa)
            made = BODIES[name](inside, known.args)
            if isinstance(kind.return_type, ir.VoidType):
                inside.b.ret_void()
            else:
                inside.b.ret(made)
        return known

    Emitter.declared = declared  # type: ignore[method-assign]
    isa.choose = lambda *_: isa.AVX512_AMX
    isa._may_use_tiles = lambda: True
    isa.host.cache_clear()
    torch.set_num_threads(1)


install()
