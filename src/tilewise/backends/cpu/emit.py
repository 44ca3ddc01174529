"""Vector code as LLVM IR: a thin layer over llvmlite's builder that knows the instruction set and the dtypes.

Addresses are int64 numbers of bytes, as in the drivers. Floating point is exact IEEE per instruction: no fast-math
flags, because reassociation would delete the rounding tricks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from tilewise.backends.cpu.isa import Isa

Value = Any  # llvmlite carries no types

F32, I64, I32, I16, I8 = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8)

# Element codes of the parameter block. A boolean mask is read as a bias: True is 0, False is -inf.
FP32, BF16, FP16, BOOL, E4M3, INT8 = range(6)
ITEM_BYTES = (4, 2, 2, 1, 1, 1)
# e4m3 bits shifted into fp16 give a number this many times too small: the exponent bias is 15 instead of 7.
E4M3_UNIT = 2.0**8

# 2^f on [-1/2, 1/2], minimax for relative error: 1.6e-7 in fp32 arithmetic.
EXP2_POLYNOMIAL = (1.326472690e-03, 9.671512661e-03, 5.550733744e-02, 2.402224208e-01, 6.931469776e-01, 1.0)
# One degree more, for uses where an error of P does not cancel as it does in a softmax: 7.9e-8.
EXP2_EXACT = (1.535336196e-04, 1.339887502e-03, 9.618436918e-03, 5.550332367e-02, 2.402264774e-01, 6.931471825e-01, 1.0)
# (tanh(x) - x) / x^3 in powers of x^2 for |x| < TANH_NEAR, minimax for relative error: 7.4e-8 in fp32 arithmetic.
TANH_POLYNOMIAL = (-5.895896586e-03, 2.079657117e-02, -5.378399631e-02, 1.333192591e-01, -3.333329806e-01)
TANH_NEAR = 0.6
ROUND_TO_INTEGER = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
SMALLEST_EXPONENT = -126.0


class BFloatType(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


BFLOAT = BFloatType()


class Emitter:
    """Emits vector instructions at the builder's position."""

    def __init__(self, builder: ir.IRBuilder, isa: Isa) -> None:
        self.b = builder
        self.isa = isa
        self.lanes = isa.lanes
        self.vector = ir.VectorType(F32, isa.lanes)
        self.int_vector = ir.VectorType(I32, isa.lanes)

    # Constants and addresses

    def i64(self, number: int) -> Value:
        """An int64 constant."""
        return ir.Constant(I64, number)

    def f32s(self, number: float, lanes: int | None = None) -> Value:
        """A vector of one fp32 constant."""
        count = lanes or self.lanes
        return ir.Constant(ir.VectorType(F32, count), [float(np.float32(number))] * count)

    def i32s(self, number: int, lanes: int | None = None) -> Value:
        """A vector of one int32 constant."""
        count = lanes or self.lanes
        return ir.Constant(ir.VectorType(I32, count), [number] * count)

    def at(self, address: Value, floats: Value | int) -> Value:
        """The address `floats` fp32 elements further on."""
        if isinstance(floats, int):
            return self.b.add(address, self.i64(4 * floats)) if floats else address
        return self.b.add(address, self.b.mul(floats, self.i64(4)))

    def rows(self, address: Value, stride_bytes: Value, count: int) -> list[Value]:
        """Addresses of `count` rows."""
        found = [address]
        for _ in range(1, count):
            found.append(self.b.add(found[-1], stride_bytes))
        return found

    # Memory

    def load(self, address: Value, kind: Any = None, align: int = 4) -> Value:
        """Load a value, by default a vector of fp32."""
        kind = kind or self.vector
        loaded = self.b.load(self.b.inttoptr(address, kind.as_pointer()), typ=kind)
        loaded.align = align
        return loaded

    def store(self, address: Value, value: Value, align: int = 4) -> None:
        """Store a scalar or a vector."""
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer())).align = align

    def load_vectors(self, address: Value, count: int) -> list[Value]:
        """`count` adjacent vectors of fp32."""
        return [self.load(self.at(address, i * self.lanes)) for i in range(count)]

    def store_vectors(self, address: Value, values: Sequence[Value]) -> None:
        """Store adjacent vectors."""
        for i, value in enumerate(values):
            self.store(self.at(address, i * self.lanes), value)

    def splat(self, scalar: Value, lanes: int | None = None) -> Value:
        """A vector of one run-time scalar."""
        count = lanes or self.lanes
        kind = ir.VectorType(scalar.type, count)
        first = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, count), [0] * count))

    def lane(self, vector: Value, index: int) -> Value:
        """A vector of one lane of another."""
        pick = ir.Constant(self.int_vector, [index] * self.lanes)
        return self.b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), pick)

    def broadcast(self, address: Value) -> Value:
        """A vector of the fp32 number at an address."""
        return self.splat(self.load(address, F32))

    def prefetch(self, address: Value) -> None:
        """Prefetch a cache line for reading, into the level of the instruction set's row."""
        pointer = I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
        # LLVM counts locality in reverse: 3 is the first level.
        read, locality, data = (ir.Constant(I32, n) for n in (0, 4 - self.isa.prefetch_level, 1))
        self.b.call(self.declared("llvm.prefetch.p0", kind), [self.b.inttoptr(address, pointer), read, locality, data])

    # Control

    def loop(
        self, count: Value, step: int, carried: Sequence[Value], body: Callable[..., Sequence[Value] | None]
    ) -> list[Value]:
        """Run `body(index, *carried)`, which returns the next carried values, at least once while index < count."""
        b, before = self.b, self.b.block
        inside, after = b.append_basic_block("loop"), b.append_basic_block("after")
        b.branch(inside)
        b.position_at_end(inside)
        index = b.phi(I64)
        index.add_incoming(self.i64(0), before)
        phis = [b.phi(value.type) for value in carried]
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(value, before)
        results = list(body(index, *phis) or ())
        following = b.add(index, self.i64(step))
        index.add_incoming(following, b.block)
        for phi, value in zip(phis, results, strict=True):
            phi.add_incoming(value, b.block)
        b.cbranch(b.icmp_signed("<", following, count), inside, after)
        b.position_at_end(after)
        return results

    def when(self, condition: Value, body: Callable[[], None]) -> None:
        """Run `body` if a condition holds."""
        with self.b.if_then(condition):
            body()

    def positive(
        self, count: Value, step: int, body: Callable[..., Sequence[Value] | None], carried: Sequence[Value] = ()
    ) -> list[Value]:
        """Like `loop`, but allowed to run zero times."""
        b, before = self.b, self.b.block
        some, after = b.append_basic_block("some"), b.append_basic_block("joined")
        b.cbranch(b.icmp_signed(">", count, self.i64(0)), some, after)
        b.position_at_end(some)
        results = self.loop(count, step, carried, body)
        b.branch(after)
        end = b.block
        b.position_at_end(after)
        joined = [b.phi(value.type) for value in carried]
        for phi, value, result in zip(joined, carried, results, strict=True):
            phi.add_incoming(value, before)
            phi.add_incoming(result, end)
        return joined

    # Arithmetic

    def declared(self, name: str, kind: ir.FunctionType) -> Value:
        """An LLVM intrinsic or outside function."""
        known = self.b.module.globals.get(name)
        return known if known is not None else ir.Function(self.b.module, kind, name)

    def call(self, name: str, *arguments: Value) -> Value:
        """An overloaded LLVM intrinsic whose result has the type of its first argument."""
        kind = arguments[0].type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        declaration = self.declared(f"llvm.{name}.{suffix}", ir.FunctionType(kind, [a.type for a in arguments]))
        return self.b.call(declaration, arguments)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """A * b + c, rounded once."""
        return self.call("fma", a, b, c)

    def load_split(self, address: Value) -> list[Value]:
        """2 * lanes adjacent bf16 numbers as two vectors of fp32: those at even places, and those at odd places."""
        words = self.load(address, self.int_vector, align=2)
        even, odd = self.b.shl(words, self.i32s(16)), self.b.and_(words, self.i32s(-(1 << 16)))
        return [self.b.bitcast(part, self.vector) for part in (even, odd)]

    def join_split(self, even: Value, odd: Value) -> list[Value]:
        """The numbers at even and odd places in order."""
        both = [n for i in range(self.lanes) for n in (i, self.lanes + i)]
        picks = (ir.Constant(self.int_vector, both[start : start + self.lanes]) for start in (0, self.lanes))
        return [self.b.shuffle_vector(even, odd, pick) for pick in picks]

    def maximum(self, a: Value, b: Value) -> Value:
        """`a` where a > b, else `b`: a NaN on the left loses to a number on the right."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def select_less(self, x: Value, bound: Value, yes: Value, no: Value) -> Value:
        """`yes` where x < bound."""
        return self.b.select(self.b.fcmp_ordered("<", x, bound), yes, no)

    def any(self, flags: Value) -> Value:
        """Whether a flag of a vector is set."""
        bits = ir.IntType(flags.type.count)
        return self.b.icmp_unsigned("!=", self.b.bitcast(flags, bits), ir.Constant(bits, 0))

    def polynomial(self, x: Value, coefficients: Sequence[float]) -> Value:
        """Horner's rule, highest power first."""
        result = self.f32s(coefficients[0])
        for coefficient in coefficients[1:]:
            result = self.fma(result, x, self.f32s(coefficient))
        return result

    def exp2(self, x: Value, coefficients: Sequence[float] = EXP2_POLYNOMIAL) -> Value:
        """2^x for x <= 126; exactly 0 for -inf and below 2^-126."""
        if self.isa.has_scalef:
            return self._exp2_scalef(x, coefficients)
        b = self.b
        shifted = b.fadd(x, self.f32s(ROUND_TO_INTEGER))
        exponent = b.shl(b.bitcast(shifted, self.int_vector), self.i32s(23))
        fraction = b.fsub(x, b.fsub(shifted, self.f32s(ROUND_TO_INTEGER)))
        mantissa = self.polynomial(fraction, coefficients)
        scaled = b.bitcast(b.add(b.bitcast(mantissa, self.int_vector), exponent), self.vector)
        return self.select_less(x, self.f32s(SMALLEST_EXPONENT), self.f32s(0.0), scaled)

    def _exp2_scalef(self, x: Value, coefficients: Sequence[float]) -> Value:
        b = self.b
        i32, i16 = ir.IntType(32), ir.IntType(16)
        reduce = self.declared(
            "llvm.x86.avx512.mask.reduce.ps.512",
            ir.FunctionType(self.vector, [self.vector, i32, self.vector, i16, i32]),
        )
        scale = self.declared(
            "llvm.x86.avx512.mask.scalef.ps.512",
            ir.FunctionType(self.vector, [self.vector, self.vector, self.vector, i16, i32]),
        )
        every, current_rounding, zero = ir.Constant(i16, -1), ir.Constant(i32, 4), self.f32s(0.0)
        # vreduceps: x minus x rounded to an integer (immediate 8: nearest even, no exceptions); 0 for an infinite x.
        fraction = b.call(reduce, [x, ir.Constant(i32, 8), zero, every, current_rounding])
        mantissa = self.polynomial(fraction, coefficients)
        return b.call(scale, [mantissa, b.fsub(x, fraction), zero, every, current_rounding])

    def tanh(self, x: Value) -> Value:
        """Tanh to 2 ulp: an odd polynomial near 0, (1 - e) / (1 + e) with e = exp(-2|x|) beyond."""
        b = self.b
        square = b.fmul(x, x)
        near = self.fma(b.fmul(self.polynomial(square, TANH_POLYNOMIAL), square), x, x)
        size = self.call("fabs", x)
        decay = self.exp2(b.fmul(size, self.f32s(-2.0 * np.log2(np.e))))
        one = self.f32s(1.0)
        far = self.call("copysign", b.fdiv(b.fsub(one, decay), b.fadd(one, decay)), x)
        return self.select_less(size, self.f32s(TANH_NEAR), near, far)

    # Element types

    def load_as_f32(self, address: Value, dtype: int, lanes: int | None = None, factor: Value = None) -> Value:
        """Adjacent elements of some dtype as a vector of fp32. 8-bit codes are multiplied by `factor`, their scale (of
        e4m3 times E4M3_UNIT), if it is given.
        """
        b, count = self.b, lanes or self.lanes
        floats, words = ir.VectorType(F32, count), ir.VectorType(I32, count)
        if dtype in (E4M3, INT8):
            codes = self.load(address, ir.VectorType(I8, count), align=1)
            values = self._e4m3_to_float(codes) if dtype == E4M3 else b.sitofp(b.sext(codes, words), floats)
            return values if factor is None else b.fmul(values, self.splat(factor, count))
        if dtype == FP32:
            return self.load(address, floats)
        if dtype == BOOL:
            flags = self.load(address, ir.VectorType(I8, count), align=1)
            attend = b.icmp_unsigned("!=", flags, ir.Constant(flags.type, [0] * count))
            return b.select(attend, self.f32s(0.0, count), self.f32s(-np.inf, count))
        halves = self.load(address, ir.VectorType(I16, count), align=2)
        if dtype == BF16:
            return b.bitcast(b.shl(b.zext(halves, words), self.i32s(16, count)), floats)
        return self._half_to_float(halves)

    def load_many_as_f32(self, address: Value, dtype: int, count: int, factor: Value = None) -> list[Value]:
        """`count` vectors, as `load_as_f32` makes them; e4m3 two at a time, as it is shifted in 16-bit lanes."""
        b, lanes, item = self.b, self.lanes, ITEM_BYTES[dtype]
        at_once = 2 if dtype == E4M3 else 1
        found = []
        for first in range(0, count, at_once):
            number = min(at_once, count - first)
            both = self.load_as_f32(b.add(address, self.i64(first * lanes * item)), dtype, number * lanes, factor)
            picks = [ir.Constant(self.int_vector, list(range(n * lanes, (n + 1) * lanes))) for n in range(number)]
            found += [b.shuffle_vector(both, both, pick) for pick in picks]
        return found

    def _e4m3_to_float(self, codes: Value) -> Value:
        """e4m3 numbers / E4M3_UNIT, by way of fp16: its subnormals match, and fp32 subnormals, which processors handle
        slowly or flush to 0, are avoided.
        """
        b, count = self.b, codes.type.count
        if count == 1:
            # LLVM 20 fails on vectors of one 16-bit number on ARM.
            twice, first = (ir.Constant(ir.VectorType(I32, n), [0] * n) for n in (2, 1))
            both = self._e4m3_to_float(b.shuffle_vector(codes, codes, twice))
            return b.shuffle_vector(both, both, first)
        shorts = ir.VectorType(I16, count)

        def constant(number: int) -> Value:
            return ir.Constant(shorts, [number] * count)

        # The sign is in bits 15 and 14, the other seven are below. Adding one in their last place changes bit 14 only
        # if they are all ones: xor with it leaves 0 there for numbers, and the exponent of NaN for NaN.
        placed = b.shl(b.sext(codes, shorts), constant(7))
        changed = b.and_(b.add(placed, constant(0x80)), constant(0x4000))
        return self._half_to_float(b.xor(placed, changed))

    def _half_to_float(self, halves: Value) -> Value:
        """fp16 bits as fp32. Without hardware: rescale the exponent by 2^112, restore inf, NaN and sign."""
        b, count = self.b, halves.type.count
        floats, words = ir.VectorType(F32, count), ir.VectorType(I32, count)
        if self.isa.has_half:
            return b.fpext(b.bitcast(halves, ir.VectorType(ir.HalfType(), count)), floats)
        word = b.zext(halves, words)
        body = b.shl(b.and_(word, self.i32s(0x7FFF, count)), self.i32s(13, count))
        scaled = b.bitcast(b.fmul(b.bitcast(body, floats), self.f32s(2.0**112, count)), words)
        special = b.icmp_unsigned(">=", body, self.i32s(0x7C00 << 13, count))
        magnitude = b.select(special, b.or_(body, self.i32s(0x7F800000, count)), scaled)
        sign = b.shl(b.and_(word, self.i32s(0x8000, count)), self.i32s(16, count))
        return b.bitcast(b.or_(magnitude, sign), floats)

    def store_from_f32(self, address: Value, value: Value, dtype: int) -> None:
        """Store a vector of fp32 as some dtype, rounded to nearest even."""
        if dtype == FP32:
            self.store(address, value)
            return
        halves = self._float_to_bfloat(value) if dtype == BF16 else self._float_to_half(value)
        self.store(address, halves, align=2)

    def _float_to_bfloat(self, value: Value) -> Value:
        b, count = self.b, value.type.count
        words, shorts = ir.VectorType(I32, count), ir.VectorType(I16, count)
        bits = b.bitcast(value, words)
        odd = b.and_(b.lshr(bits, self.i32s(16, count)), self.i32s(1, count))
        rounded = b.lshr(b.add(bits, b.add(odd, self.i32s(0x7FFF, count))), self.i32s(16, count))
        # Rounding would carry a NaN with a full mantissa into the sign bit.
        nan = b.fcmp_unordered("uno", value, value)
        return b.trunc(b.select(nan, self.i32s(0x7FC0, count), rounded), shorts)

    def _float_to_half(self, value: Value) -> Value:
        b, count = self.b, value.type.count
        shorts = ir.VectorType(I16, count)
        if self.isa.has_half:
            return b.bitcast(b.fptrunc(value, ir.VectorType(ir.HalfType(), count)), shorts)
        words, floats = ir.VectorType(I32, count), ir.VectorType(F32, count)
        bits = b.bitcast(value, words)
        magnitude = b.and_(bits, self.i32s(0x7FFFFFFF, count))
        sign = b.lshr(b.and_(bits, self.i32s(-(2**31), count)), self.i32s(16, count))
        # Subnormal halves: adding 2^-14 * 2^10 aligns the mantissa so that the hardware rounds at the right bit.
        aligned = b.fadd(b.bitcast(magnitude, floats), self.f32s(0.5, count))
        small = b.sub(b.bitcast(aligned, words), self.i32s(0x3F000000, count))
        odd = b.and_(b.lshr(magnitude, self.i32s(13, count)), self.i32s(1, count))
        rebased = b.add(b.add(magnitude, self.i32s(-(112 << 23) + 0xFFF, count)), odd)
        normal = b.lshr(rebased, self.i32s(13, count))
        finite = b.select(b.icmp_signed("<", magnitude, self.i32s(0x38800000, count)), small, normal)
        clipped = b.select(
            b.icmp_signed(">=", magnitude, self.i32s(0x47800000, count)), self.i32s(0x7C00, count), finite
        )
        nan = b.icmp_signed(">", magnitude, self.i32s(0x7F800000, count))
        return b.trunc(b.or_(b.select(nan, self.i32s(0x7E00, count), clipped), sign), shorts)

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """The lanes x lanes block with rows and columns exchanged, by log2(lanes) rounds of interleaving."""
        count = self.lanes
        half = count // 2
        low = ir.Constant(self.int_vector, [n for i in range(half) for n in (i, count + i)])
        high = ir.Constant(self.int_vector, [n for i in range(half, count) for n in (i, count + i)])
        current = list(rows)
        for _ in range(count.bit_length() - 1):
            # Interleaving row i with row i + half is a perfect shuffle of the index bits; log2(lanes) of them
            # transpose.
            pairs = [(current[i], current[i + half]) for i in range(half)]
            current = [self.b.shuffle_vector(x, y, pick) for x, y in pairs for pick in (low, high)]
        return current


def void(_: object) -> None:
    """Drop a result, for lambdas that must return nothing."""
