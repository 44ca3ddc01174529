"""The machine code that executes a plan (tilewise.native): one function for all plans, compiled once a process.

It walks through the operations of a plan (tilewise.operations).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from llvmlite import ir

from tilewise import machine_code
from tilewise.operations import ASK, DOUBTFUL, NO, OPERATIONS, STEP

I8, I32, I64, DOUBLE, FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.DoubleType(), ir.FloatType()
# Positions in the arguments of the driver's functions.
CONFIG, KERNEL, PARAMETERS = range(1, 4)
LEAST, EXACT = -(1 << 63), 1 << 53
SYMBOL = "tilewise_execute"
Value = Any  # llvmlite carries no types


def executor() -> int:
    """The address of the function."""
    with machine_code.lock:
        return _loaded().address


@functools.cache
def _loaded() -> machine_code.Loaded:
    return machine_code.load(machine_code.object_of(_module()), SYMBOL)


def _module() -> ir.Module:
    module = ir.Module("tilewise_plans")
    kind = ir.FunctionType(I64, [I32.as_pointer(), I64.as_pointer()])
    function = ir.Function(module, kind, SYMBOL)
    entry, following, no = (function.append_basic_block(name) for name in ("entry", "following", "no"))
    b = ir.IRBuilder(entry)
    at = b.alloca(I32.as_pointer())
    scratch = b.alloca(I64.as_pointer())
    b.store(function.args[0], at)
    b.branch(following)
    b.position_at_end(no)
    b.ret(I64(NO))
    b.position_at_end(following)
    now = b.load(at)
    operation, out, left, right = (b.load(b.gep(now, [I32(i)])) for i in range(STEP))
    b.store(b.gep(now, [I32(STEP)]), at)
    choice = b.switch(operation, no)
    for number, name in enumerate(OPERATIONS):
        block = function.append_basic_block(name)
        choice.add_case(I32(number), block)
        b.position_at_end(block)
        _EMITTERS[name](_Step(b, function.args[1], no, scratch, out, left, right))
        if not b.block.is_terminated:
            b.branch(following)
    return module


class _Step:
    """One operation, for the function that emits its code."""

    def __init__(
        self, builder: ir.IRBuilder, words: Value, no: ir.Block, scratch: Value, out: Value, left: Value, right: Value
    ) -> None:
        self.b, self.words, self.no, self.scratch = builder, words, no, scratch
        # The three numbers themselves.
        self.out, self.left, self.right = out, left, right

    def place(self, index: Value) -> Value:
        """Where a word lies."""
        return self.b.gep(self.words, [index])

    def word(self, index: Value) -> Value:
        """What is there."""
        return self.b.load(self.place(index))

    @property
    def x(self) -> Value:
        """The first operand."""
        return self.word(self.left)

    @property
    def y(self) -> Value:
        """The second operand."""
        return self.word(self.right)

    @property
    def floats(self) -> tuple[Value, Value]:
        """Both operands as floats."""
        return self.b.bitcast(self.x, DOUBLE), self.b.bitcast(self.y, DOUBLE)

    def put(self, value: Value) -> None:
        """Store the result."""
        if value.type == DOUBLE:
            value = self.b.bitcast(value, I64)
        self.b.store(value, self.place(self.out))

    def unless(self, wrong: Value, otherwise: Value | None = None) -> None:
        """Return NO, or another number, if a condition holds."""
        if otherwise is None:
            rest = self.b.append_basic_block()
            self.b.cbranch(wrong, self.no, rest)
            self.b.position_at_end(rest)
        else:
            with self.b.if_then(wrong):
                self.b.ret(otherwise)

    def expect(self, holds: Value) -> None:
        """Return NO if a comparison does not end as `out` says."""
        self.unless(self.b.icmp_unsigned("!=", self.b.zext(holds, I32), self.out))

    @contextmanager
    def times(self, count: Value) -> Iterator[Value]:
        """A loop over the indices below a count."""
        b = self.b
        before, body, after = b.block, b.append_basic_block(), b.append_basic_block()
        b.cbranch(b.icmp_signed(">", count, I32(0)), body, after)
        b.position_at_end(body)
        index = b.phi(I32)
        index.add_incoming(I32(0), before)
        yield index
        more = b.add(index, I32(1))
        index.add_incoming(more, b.block)
        b.cbranch(b.icmp_signed("<", more, count), body, after)
        b.position_at_end(after)

    def function(self, position: Value, result: ir.Type, *arguments: ir.Type) -> Value:
        """The function whose address is in a word."""
        return self.b.inttoptr(self.word(position), ir.FunctionType(result, arguments).as_pointer())


def _checked(name: str) -> Callable[[_Step], None]:
    """An operation that overflows as its instruction says."""

    def emit(s: _Step) -> None:
        both = getattr(s.b, f"{name}_with_overflow")(s.x, s.y)
        s.unless(s.b.extract_value(both, 1))
        s.put(s.b.extract_value(both, 0))

    return emit


def _divided(s: _Step) -> tuple[Value, Value, Value, Value]:
    """(divisor, quotient towards zero, remainder, whether the one towards minus infinity is another)."""
    b, x, y = s.b, s.x, s.y
    overflows = b.and_(b.icmp_signed("==", x, I64(LEAST)), b.icmp_signed("==", y, I64(-1)))
    s.unless(b.or_(b.icmp_signed("==", y, I64(0)), overflows))
    rest = b.srem(x, y)
    differs = b.icmp_signed("<", b.xor(rest, y), I64(0))
    return y, b.sdiv(x, y), rest, b.and_(b.icmp_signed("!=", rest, I64(0)), differs)


def _floor_divide(s: _Step) -> None:
    _, quotient, _, is_lower = _divided(s)
    s.put(s.b.sub(quotient, s.b.zext(is_lower, I64)))


def _modulo(s: _Step) -> None:
    divisor, _, rest, is_lower = _divided(s)
    s.put(s.b.add(rest, s.b.select(is_lower, divisor, I64(0))))


def _shift_left(s: _Step) -> None:
    b, x, y = s.b, s.x, s.y
    s.unless(b.icmp_unsigned(">", y, I64(62)))
    result = b.shl(x, y)
    s.unless(b.icmp_signed("!=", b.ashr(result, y), x))
    s.put(result)


def _shift_right(s: _Step) -> None:
    b, x, y = s.b, s.x, s.y
    s.unless(b.icmp_signed("<", y, I64(0)))
    s.put(b.ashr(x, b.select(b.icmp_signed(">", y, I64(63)), I64(63), y)))


def _bit_length(s: _Step) -> None:
    b, x = s.b, s.x
    size = b.select(b.icmp_signed("<", x, I64(0)), b.sub(I64(0), x), x)  # that of the least number is 2^63
    s.put(b.sub(I64(64), b.ctlz(size, ir.Constant(ir.IntType(1), 0))))


def _smaller(s: _Step) -> None:
    x, y = s.x, s.y
    s.put(s.b.select(s.b.icmp_signed("<", x, y), x, y))


def _larger(s: _Step) -> None:
    x, y = s.x, s.y
    s.put(s.b.select(s.b.icmp_signed("<", x, y), y, x))


def _to_float(s: _Step) -> None:
    b, x = s.b, s.x
    s.unless(b.icmp_unsigned(">", b.add(x, I64(EXACT)), I64(2 * EXACT)))
    s.put(b.sitofp(x, DOUBLE))


def _divide(s: _Step) -> None:
    x, y = s.floats
    s.unless(s.b.fcmp_ordered("==", y, DOUBLE(0.0)))
    s.put(s.b.fdiv(x, y))


def _narrow(s: _Step) -> None:
    """Refuse what does not fit into an int32."""
    s.unless(s.b.icmp_unsigned(">=", s.b.add(s.x, I64(1 << 31)), I64(1 << 32)))


def _half(s: _Step) -> None:
    """Store a uint32; `out` counts half words."""
    x = s.x
    s.unless(s.b.icmp_unsigned(">=", x, I64(1 << 32)))
    halves = s.b.bitcast(s.words, I32.as_pointer())
    s.b.store(s.b.trunc(x, I32), s.b.gep(halves, [s.out]))


def _single(s: _Step) -> None:
    """Store the bits of an fp32."""
    b, x = s.b, s.floats[0]
    single = b.fptrunc(x, FLOAT)
    again = b.fpext(single, DOUBLE)
    is_infinite = b.or_(*[b.fcmp_ordered("==", again, DOUBLE(end)) for end in (float("inf"), -float("inf"))])
    s.unless(b.and_(is_infinite, b.fcmp_ordered("!=", again, x)))
    s.put(b.zext(b.bitcast(single, I32), I64))


def _tensor(s: _Step) -> None:
    """Sizes, strides and address of the tensor of rank `right` whose implementation a word points to. The word is what
    C++ has as a Tensor.
    """
    b = s.b
    handle = b.bitcast(s.place(s.left), I8.as_pointer())
    kind = ir.FunctionType(I32, [I8.as_pointer(), I64.as_pointer().as_pointer()]).as_pointer()
    readers = _readers()
    if not readers:  # no plan applies to any tensor
        b.branch(s.no)
        return
    for number, address in enumerate(readers):
        ask = b.inttoptr(I64(address), kind)
        s.unless(b.icmp_signed("!=", b.call(ask, [handle, s.scratch]), I32(0)))
        first, found = b.add(s.out, b.mul(I32(number), s.right)), b.load(s.scratch)
        if number == 2:
            b.store(b.ptrtoint(found, I64), s.place(first))
        else:
            with s.times(s.right) as i:
                b.store(b.load(b.gep(found, [i])), s.place(b.add(first, i)))


def _readers() -> list[int]:
    """The addresses of the functions of torch's stable C interface that read sizes, strides and address; none where its
    libraries do not show them.
    """
    try:
        library = ctypes.PyDLL(torch._C.__file__)  # noqa: SLF001
        names = [f"aoti_torch_get_{name}" for name in ("sizes", "strides", "data_ptr")]
        return [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]
    except (AttributeError, OSError):
        return []


def _same(s: _Step) -> None:
    """Ask for the call of function number `out` unless two words are equal."""
    s.unless(s.b.icmp_signed("!=", s.x, s.y), s.b.add(I64(ASK), s.b.zext(s.out, I64)))


def _doubt(s: _Step) -> None:
    """Return DOUBTFUL if a number is below another."""
    s.unless(s.b.icmp_signed("<", s.x, s.y), I64(DOUBTFUL))


def _watched(s: _Step) -> None:
    """Launch nothing if a word is not 0."""
    s.unless(s.b.icmp_signed("!=", s.x, I64(0)), I64(-1))


def _encode(s: _Step) -> None:
    """Encode the tensor map whose arguments begin at `left`. The words that it is encoded from begin at `right`, their
    number is `out`, and behind them lie those of the last time: nothing is done if they are equal.
    """
    b = s.b
    differ = b.bitcast(s.scratch, I64.as_pointer())
    b.store(I64(0), differ)
    with s.times(s.out) as i:
        new, old = b.load(s.place(b.add(s.right, i))), s.place(b.add(b.add(s.right, s.out), i))
        b.store(b.or_(b.load(differ), b.xor(new, b.load(old))), differ)
        b.store(new, old)
    with b.if_then(b.icmp_signed("!=", b.load(differ), I64(0))):
        kinds = [I64, I32, I32, I64, I64, I64, I64, I64, I32, I32, I32, I32]
        words = [s.word(b.add(s.left, I32(i + 1))) for i in range(len(kinds))]
        words[3] = s.word(s.right)
        given = [word if kind is I64 else b.trunc(word, I32) for word, kind in zip(words, kinds, strict=True)]
        error = b.call(s.function(s.left, I32, *kinds), given)
        with b.if_then(b.icmp_signed("!=", error, I32(0))):
            b.store(b.zext(error, I64), s.place(s.left))
            b.ret(b.add(I64(ASK), b.zext(s.left, I64)))


def _clear(s: _Step) -> None:
    b, limit = s.b, s.y
    bits, word = s.word(b.add(s.right, I32(1))), s.word(s.out)
    s.put(b.select(b.icmp_signed("<", s.x, limit), b.and_(word, b.not_(bits)), word))


def _launch(s: _Step) -> None:
    """Launch kernel number `out` with the arguments from `left` on."""
    b = s.b
    words = [s.word(b.add(s.left, I32(i))) for i in (CONFIG, KERNEL, PARAMETERS)]
    error = b.call(s.function(s.left, I32, I64, I64, I64, I64), [*words, I64(0)])
    s.unless(b.icmp_signed("!=", error, I32(0)), b.sub(I64(-1), b.zext(s.out, I64)))


def _computed(combine: Callable[[Any, Value, Value], Value]) -> Callable[[_Step], None]:
    return lambda s: s.put(combine(s.b, s.x, s.y))


def _compared(sign: str) -> Callable[[_Step], None]:
    return lambda s: s.expect(s.b.icmp_signed(sign, s.x, s.y))


def _floating(combine: Callable[[Any, Value, Value], Value]) -> Callable[[_Step], None]:
    return lambda s: s.put(combine(s.b, *s.floats))


def _floats_compared(sign: str) -> Callable[[_Step], None]:
    return lambda s: s.expect(s.b.fcmp_ordered(sign, *s.floats))


_EMITTERS: dict[str, Callable[[_Step], None]] = {
    "end": lambda s: s.b.ret(s.b.zext(s.out, I64)),
    "move": lambda s: s.put(s.x),
    "+": _checked("sadd"), "-": _checked("ssub"), "*": _checked("smul"),
    "//": _floor_divide, "%": _modulo, "<<": _shift_left, ">>": _shift_right,
    "|": _computed(lambda b, x, y: b.or_(x, y)), "&": _computed(lambda b, x, y: b.and_(x, y)),
    "bit_length": _bit_length, "smallest": _smaller, "largest": _larger,
    "<": _compared("<"), "<=": _compared("<="), "==": _compared("=="),
    "float": _to_float,
    "float +": _floating(lambda b, x, y: b.fadd(x, y)), "float -": _floating(lambda b, x, y: b.fsub(x, y)),
    "float *": _floating(lambda b, x, y: b.fmul(x, y)), "float /": _divide,
    "float <": _floats_compared("<"), "float <=": _floats_compared("<="), "float ==": _floats_compared("=="),
    "tensor": _tensor, "same": _same, "doubt": _doubt,
    "narrow": _narrow, "half": _half, "single": _single,
    "watched": _watched, "encode": _encode, "clear": _clear, "launch": _launch,
}  # fmt: skip
