"""Operations for drivers besides integer arithmetic: scalar memory access, shared counters, and two functions.

Drivers hold addresses as int64 and nothing else: no arrays, no reference counts.
"""

from __future__ import annotations

from llvmlite import ir

from tilewise.backends.cpu.compiler import kernel
from tilewise.backends.cpu.emit import F32, I32, I64, Emitter, Value


@kernel("i", "i")
def load_i64(e: Emitter, address: Value) -> Value:
    """The int64 at an address."""
    return e.load(address, I64, align=8)


@kernel("ii", "i")
def field(e: Emitter, block: Value, position: Value) -> Value:
    """One field of a parameter block."""
    return e.load(e.b.add(block, e.b.mul(position, e.i64(8))), I64, align=8)


@kernel("i", "i")
def load_i32(e: Emitter, address: Value) -> Value:
    """The int32 at an address."""
    return e.b.sext(e.load(address, I32), I64)


@kernel("i", "f")
def load_f32(e: Emitter, address: Value) -> Value:
    """The float32 at an address."""
    return e.load(address, F32)


@kernel("ii")
def store_i64(e: Emitter, address: Value, value: Value) -> None:
    """Store an int64."""
    e.store(address, value, align=8)


@kernel("ii")
def store_i32(e: Emitter, address: Value, value: Value) -> None:
    """Store an int32."""
    e.store(address, e.b.trunc(value, I32))


@kernel("if")
def store_f32(e: Emitter, address: Value, value: Value) -> None:
    """Store a float32."""
    e.store(address, value)


@kernel("ii", "i")
def atomic_add(e: Emitter, address: Value, amount: Value) -> Value:
    """Add to a shared counter and return its old value. Orders the memory accesses before and after it."""
    return e.b.atomic_rmw("add", e.b.inttoptr(address, I64.as_pointer()), amount, "acq_rel")


@kernel("i", "i")
def load_shared(e: Emitter, address: Value) -> Value:
    """The int64 at an address that another thread may write concurrently."""
    return e.b.load_atomic(e.b.inttoptr(address, I64.as_pointer()), "monotonic", 8)


@kernel("iii", "i")
def call_function(e: Emitter, address: Value, first: Value, second: Value) -> Value:
    """The result of the C function at an address. A function without arguments ignores these."""
    kind = ir.FunctionType(I64, [I64, I64])
    return e.b.call(e.b.inttoptr(address, kind.as_pointer()), [first, second])


@kernel("f", "f")
def exp2(e: Emitter, x: Value) -> Value:
    """2^x, the same polynomial as in the kernels."""
    return e.b.extract_element(e.exp2(e.splat(x)), ir.Constant(I32, 0))


@kernel("fff", "f")
def fma(e: Emitter, a: Value, b: Value, c: Value) -> Value:
    """A * b + c, rounded once."""
    return e.call("fma", a, b, c)


@kernel("f", "f")
def log2(e: Emitter, x: Value) -> Value:
    """Base-2 logarithm."""
    return e.call("log2", x)


@kernel("i", "f")
def scalar_bits(e: Emitter, bits: Value) -> Value:
    """The float32 whose bits are in the low half of an int64 (how the parameter block stores floats)."""
    return e.b.bitcast(e.b.trunc(bits, I32), F32)
