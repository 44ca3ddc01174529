"""Plans in the form that machine code executes.

A plan has words of 64 bits and operations on them (tilewise.operations). The operations of a trace compute numbers from
tensors and lengths and compare them; those that a pass adds put numbers and addresses where the driver reads them, and
start kernels. One small function executes the operations of all plans, so making a plan compiles nothing.

Words are copied into a `Frame`, which one call has for itself. A plan whose call is over takes it back.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.memory import LOWEST, are_there
from tilewise.operations import ASK, DOUBTFUL, NO, OPERATIONS, YES
from tilewise.symbolic import Asked, Number, Step, Trace, numbers_in, replaced

WORD = 8
# Of the words of a frame; tensor maps need it.
ALIGNMENT = 64
OPCODES = {name: number for number, name in enumerate(OPERATIONS)}


class Frame(NamedTuple):
    """The memory of one call. `measuring` and `starting` are the arguments that execute the plan's operations on it."""

    words: memoryview
    measuring: tuple[Any, Any]
    starting: tuple[Any, Any]


class Plan:
    """The words and operations of a plan: those of a trace, if there is one, and what `operate`, `word` and `words` add
    until `finish`. `measure` executes the trace's. `start`, called with a frame's `starting`, executes the others,
    without the GIL, because the driver may wait.
    """

    def __init__(self, trace: Trace | None = None, outputs: Sequence[Any] = (), needed: Sequence[Number] = ()) -> None:
        """`outputs` are numbers of the trace, or constants, for `read`; `needed` those for operations added later."""
        self._template = array("q")
        self._constants: dict[int, int] = {}
        self._of_number: dict[int, int] = {}
        # Words that hold the address of another one.
        self._pointers: list[tuple[int, int]] = []
        self._asked: list[_Question] = []
        self._spare: deque[Frame] = deque()
        # Operations that compute, and those that start kernels.
        self._computing, self._starting = array("i"), array("i")
        # Where the addresses of the trace's tensors are, by name.
        self.addresses: dict[str, int] = {}
        self._lengths = [] if trace is None else [i for i, name in enumerate(trace.lengths) if name in trace.used]
        if trace is not None:
            self._compute(trace, [*numbers_in(list(outputs)), *needed])
        self._output, self._types = len(self._template), "".join(["d" if _is_float(out) else "q" for out in outputs])
        for output in outputs:
            self._moved(output, self._computing)
        self._read = struct.Struct(f"={self._types}").unpack_from

    # Making a plan.

    def words(self, *values: int, alignment: int = 1) -> int:
        """The position of new words with these values in every frame, a multiple of `alignment`."""
        self._template.extend([0] * (-len(self._template) % alignment))
        self._template.extend(values)
        return len(self._template) - len(values)

    def word(self, value: Any) -> int:
        """The position of a word that holds a number of the trace, or a constant; those of floats are their bits."""
        if value.__class__ is Number:
            return self._of_number[value.at]
        bits = bits_of(value)
        if bits not in self._constants:
            self._constants[bits] = self.words(bits)
        return self._constants[bits]

    def operate(self, name: str, out: int = 0, left: int = 0, right: int = 0) -> int:
        """Add an operation that is executed after the trace's; returns the position of its result."""
        self._starting.extend((OPCODES[name], out, left, right))
        return out

    def point(self, word: int, target: int, half: int = 0) -> None:
        """Put the address of another word (plus some half words) into a word."""
        self._pointers.append((word, WORD * target + WORD // 2 * half))

    def put(self, value: Any) -> int:
        """The position of a new word with a number or a constant, for `operate`'s operations."""
        return self._moved(value, self._starting)

    def _moved(self, value: Any, operations: array[int]) -> int:
        if value.__class__ is not Number:
            return self.words(bits_of(value))
        word = self.words(0)
        operations.extend((OPCODES["move"], word, self.word(value), 0))
        return word

    def _compute(self, trace: Trace, needed: Sequence[Number]) -> None:
        """Words and operations of a trace, as far as they are needed."""
        self._inputs = self.words(*[0] * (len(trace.tensors) + len(self._lengths)))
        self._take = struct.Struct(f"={len(trace.tensors) + len(self._lengths)}q").pack_into
        for i, name in enumerate(trace.lengths):
            if i in self._lengths:
                at = len(trace.tensors) + self._lengths.index(i)
                self._of_number[trace.used[name].at] = self._inputs + at
        for i, (name, numbers) in enumerate(trace.tensors.items()):
            first = self.words(*[0] * len(numbers))
            self._of_number |= {number.at: word for word, number in enumerate(numbers, first) if number is not None}
            self.addresses[name] = first + len(numbers) - 1
            self._computing.extend((OPCODES["tensor"], first, self._inputs + i, len(numbers) // 2))
        for step in trace.steps_for(needed):
            self._add(step)

    def _add(self, step: Step) -> None:
        if step.name == "ask":
            self._ask(step.operands[0])
            return
        words = [self.word(operand) for operand in step.operands]
        name = step.name
        if any(map(_is_float, step.operands)) or name == "/":
            words = [
                word if _is_float(operand) else self._result("float", word)
                for word, operand in zip(words, step.operands, strict=True)
            ]
            name = f"float {name}"
        if step.number is None:
            self._computing.extend((OPCODES[name], int(step.holds), *words))
        else:
            self._of_number[step.number.at] = self._result(name, *words)

    def _result(self, name: str, left: int, right: int = 0) -> int:
        out = self.words(0)
        self._computing.extend((OPCODES[name], out, left, right))
        return out

    def _ask(self, asked: Asked) -> None:
        """A function for run time. Its last arguments and results are kept in the frame, and it is called only if the
        arguments differ.
        """
        given = [operand for operand in asked.operands if operand.__class__ is Number]
        # Whether it was called, the arguments, the results.
        known = self.words(0)
        old = [self.words(0) for _ in given]
        results = [self.words(0) for _ in asked.results]
        for result, word in zip(asked.results, results, strict=True):
            self._of_number[result.at] = word
        number, now = len(self._asked), [self.word(operand) for operand in given]
        for one, other in zip((known, *old), (self.word(1), *now), strict=True):
            self._computing.extend((OPCODES["same"], number, one, other))
        self._asked.append(_Question(asked, now, known))

    def _doubt(self) -> None:
        """An address may be the offset in storage that was freed."""
        lowest, *others = self.addresses.values()
        for place in others:
            lowest = self._result("smallest", lowest, place)
        self._computing.extend((OPCODES["doubt"], 0, lowest, self.word(LOWEST)))

    def finish(self) -> Plan:
        """The plan is complete."""
        if self.addresses:
            self._doubt()
        for operations in (self._computing, self._starting):
            operations.extend((OPCODES["end"], YES, 0, 0))
        # Compiled here, before the plan is used.
        self._run, self.start = _executors()
        self._arguments = _argument(self._computing.buffer_info()[0]), _argument(self._starting.buffer_info()[0])
        return self

    # Executing it.

    def frame(self) -> Frame:
        """One that no other call uses."""
        try:
            return self._spare.pop()
        except IndexError:
            return self._new()

    def release(self, frame: Frame) -> None:
        """Take the frame of a call back that is over."""
        self._spare.append(frame)

    def measure(self, tensors: Sequence[Tensor], lengths: Sequence[int | None] = ()) -> Frame | None:
        """The frame with the numbers of a call, or None if the plan does not apply to it. `tensors` are all of the
        trace, and plain; `lengths` may hold others than the trace's.
        """
        frame = self.frame()
        given: list[Any] = [tensor._cdata for tensor in tensors]  # noqa: SLF001  (the object in C++)
        if self._lengths:
            given += [lengths[i] for i in self._lengths]
        try:
            self._take(frame.words, 0, *given)
            status = self._run(*frame.measuring)
            while status >= ASK:
                if not self._answered(frame, self._asked[status - ASK]):
                    status = NO
                    break
                status = self._run(*frame.measuring)
        except (struct.error, ArithmeticError):  # a number of more than 64 bits
            status = NO
        if status == YES or (status == DOUBTFUL and are_there(tensors, self.places(frame))):
            return frame
        self.release(frame)
        return None

    def _answered(self, frame: Frame, question: _Question) -> bool:
        """Call a function for the numbers in a frame; whether it returned what it may."""
        asked, words, known = question
        numbers = iter(words)
        given = [
            self._value(frame, operand, next(numbers)) if operand.__class__ is Number else operand
            for operand in asked.operands
        ]
        try:
            found = asked.function(*given)
        except Exception:  # the long way raises it, with words for the caller
            return False
        found = found if isinstance(found, tuple) else (found,)
        if [type(value) for value in found] != [type(result.value) for result in asked.results]:
            return False
        now = [self.peek(frame, word, 1)[0] for word in words]
        struct.pack_into(f"={1 + len(now) + len(found)}q", frame.words, WORD * known, 1, *now, *map(bits_of, found))
        return True

    def read(self, frame: Frame) -> tuple[Any, ...]:
        """The outputs."""
        return self._read(frame.words, WORD * self._output)

    def peek(self, frame: Frame, word: int, count: int) -> tuple[int, ...]:
        """Some words of a frame."""
        return struct.unpack_from(f"={count}q", frame.words, WORD * word)

    def places(self, frame: Frame) -> list[int]:
        """The addresses of the trace's tensors."""
        return [self.peek(frame, word, 1)[0] for word in self.addresses.values()]

    def value(self, frame: Frame, number: Any) -> Any:
        """The value of a number of the trace; anything else is a constant."""
        return self._value(frame, number, self._of_number[number.at]) if number.__class__ is Number else number

    def _value(self, frame: Frame, number: Number, word: int) -> Any:
        kind = type(number.value)
        return kind(struct.unpack_from("=d" if kind is float else "=q", frame.words, WORD * word)[0])

    def _new(self) -> Frame:
        size = WORD * len(self._template)
        memory = ctypes.create_string_buffer(size + ALIGNMENT)
        begin = -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT
        words = memoryview(memory).cast("B")[begin - ctypes.addressof(memory) :][:size]
        words[:] = self._template.tobytes()
        for word, target in self._pointers:
            struct.pack_into("=q", words, WORD * word, begin + target)
        computing, starting = self._arguments
        place = _argument(begin)
        return Frame(words, (computing, place), (starting, place))


class Filled:
    """A record with numbers of a trace, as a function of tensors and lengths."""

    __slots__ = ("_plan", "_trace", "record")

    def __init__(self, trace: Trace, record: Any) -> None:
        self._trace, self.record = trace, record
        self._plan: Plan | None = None

    def __call__(self, tensors: Sequence[Tensor], lengths: Sequence[int | None] = ()) -> Any:
        """The record of a call, or None if the trace does not apply to it."""
        numbers = numbers_in(self.record)
        if self._plan is None:  # few calls need it
            self._plan = Plan(self._trace, (), numbers).finish()
        plan = self._plan
        frame = plan.measure(tensors, lengths)
        if frame is None:
            return None
        found = replaced(self.record, {number.at: plan.value(frame, number) for number in numbers})
        plan.release(frame)
        return found


class _Question(NamedTuple):
    """A function, the words of its arguments, and where the last ones and the results are kept."""

    asked: Asked
    words: list[int]
    known: int


def bits_of(value: Any) -> int:
    """A constant as a word."""
    return struct.unpack("=q", struct.pack("=d" if isinstance(value, float) else "=q", value))[0]  # type: ignore[no-any-return]


def _is_float(value: Any) -> bool:
    return isinstance(value.value if value.__class__ is Number else value, float)


# Converts an address to a C argument. Done beforehand, because it takes as long as a short call.
_argument = ctypes.c_void_p.from_param


@functools.cache
def _executors() -> tuple[Callable[..., int], Callable[..., int]]:
    """The executor for computations, which are short and keep the GIL, and for launches, which release it."""
    from tilewise.executor import executor

    address = executor()
    return ctypes.PYFUNCTYPE(ctypes.c_int64)(address), ctypes.CFUNCTYPE(ctypes.c_int64)(address)
