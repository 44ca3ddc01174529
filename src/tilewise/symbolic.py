"""Numbers that remember how they were computed, so that what is planned for one size serves others.

The second call of its kind that no plan serves is planned with a `Number` in place of every size. Arithmetic with
numbers is recorded, and so is every comparison, with its outcome. Afterwards a `tilewise.native.Plan` executes the
record: it takes the tensors of a later call, computes what that call needs, and does not apply if a comparison would
end differently. So a plan is never used for sizes that would have been planned otherwise, and nobody has to write down
which these are.

    >>> trace = Trace(lengths=["rows"])
    >>> rows = trace.length("rows", 300)
    >>> blocks = (rows + 127) // 128
    >>> kernel = "long" if blocks > 2 else "short"
    >>> print(trace)
    n1 = rows + 127
    n2 = n1 // 128
    2 < n2

Code that plans may do with numbers what it does with integers, but a number is not hashable, and using one as an index
or in `range` fixes its value. `smallest` and `largest` are recorded as numbers, `min` and `max` as comparisons. A
function that loops over sizes is marked with `at_run_time`: it is then called for the numbers of each new size, instead
of being recorded.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

CONSTANTS = (int, float, bool)
# Integers of a plan are between plus and minus this.
MOST = 2**63
Function = TypeVar("Function", bound=Callable[..., Any])


class NotTraceableError(TypeError):
    """What was done with a number cannot be recorded."""


class Asked(NamedTuple):
    """A function for run time with what it was called with, and the numbers that it returned."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]
    results: tuple[Number, ...]


class Step(NamedTuple):
    """What was done with numbers and constants: an operation of tilewise.operations, or "ask", whose operand is an
    `Asked`. `number` is the result; None for a comparison, which must end as `holds` says.
    """

    name: str
    operands: tuple[Any, ...]
    number: Number | None = None
    holds: bool = True

    def __str__(self) -> str:
        if self.name == "ask":
            asked: Asked = self.operands[0]
            given = ", ".join(map(_spelled, asked.operands))
            return f"{', '.join(map(_spelled, asked.results))} = {asked.function.__name__}({given})"
        first, *second = map(_spelled, self.operands)
        text = f"{first} {self.name} {second[0]}" if second else f"{self.name}({first})"
        if self.number is not None:
            return f"{_spelled(self.number)} = {text}"
        return text if self.holds else f"not {text}"


class Trace:
    """The record of one plan: the arithmetic and the comparisons, in order."""

    def __init__(self, tensors: Sequence[str] = (), lengths: Sequence[str] = ()) -> None:
        """For calls with these tensors and numbers, in this order."""
        self.lengths = tuple(lengths)
        # The numbers of tensors (None for sizes that are not open; the last is the address), and of lengths.
        self.tensors: dict[str, tuple[Number | None, ...]] = dict.fromkeys(tensors, ())
        self.used: dict[str, Number] = {}
        self.steps: list[Step] = []
        self.count = 0
        self._known: dict[Any, Number] = {}
        self._compared = set[Any]()

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))

    def length(self, name: str, value: int) -> Number:
        """A number that callers pass."""
        self.used[name] = self._new(value, name)
        return self.used[name]

    def tensor(self, name: str, sizes: Sequence[int | None], strides: Sequence[int], place: int) -> Sequence[Any]:
        """The numbers of a tensor: its sizes (None for those that are not open), strides and address."""
        names = [f"{name}.{what}({i})" for what, of in (("size", sizes), ("stride", strides)) for i in range(len(of))]
        values = (*sizes, *strides, place)
        numbers = tuple(
            None if value is None else self._new(value, text)
            for value, text in zip(values, (*names, f"{name}.data_ptr()"), strict=True)
        )
        self.tensors[name] = numbers
        return numbers

    def record(self, name: str, operands: tuple[Any, ...], value: Any) -> Number:
        """The number with this value, computed by an operation of others; a known one if that was done before."""
        key = (name, type(value), *map(_key, operands))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._new(value)
            self.steps.append(Step(name, operands, found))
        return found

    def require(self, name: str, operands: tuple[Any, ...], *, holds: bool) -> None:
        """Later calls use the plan only if this comparison ends the same way."""
        key = (name, *map(_key, operands))
        if key not in self._compared:
            self._compared.add(key)
            self.steps.append(Step(name, operands, holds=holds))

    def ask(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """What a function for run time returns."""
        key = (function, *[id(each) if each.__class__ not in (Number, *CONSTANTS) else _key(each) for each in operands])
        if key not in self._known:
            found = function(*[value_of(each) for each in operands])
            results = tuple(map(self._new, found if isinstance(found, tuple) else (found,)))
            self.steps.append(Step("ask", (Asked(function, operands, results),)))
            self._known[key] = results if isinstance(found, tuple) else results[0]  # type: ignore[assignment]
        return self._known[key]

    def steps_for(self, needed: Iterable[Number]) -> list[Step]:
        """The comparisons, and what computes the numbers that they or others need."""
        wanted, found = {number.at for number in needed}, []
        for step in reversed(self.steps):
            operands, results = step.operands, (step.number,)
            if step.name == "ask":
                operands, results = operands[0].operands, operands[0].results
            is_compared = results == (None,)
            if is_compared or any(result.at in wanted for result in results if result is not None):
                wanted |= {number.at for number in numbers_in(operands)}
                found.append(step)
        return found[::-1]

    def _new(self, value: Any, name: str = "") -> Number:
        self.count += 1
        return Number(self, self.count - 1, value, name)


def _key(operand: Any) -> Any:
    """Of an operand, for what was recorded before. True, 1 and 1.0 are equal, and not the same."""
    if operand.__class__ is Number:
        return operand.at
    if not -MOST <= operand < MOST and operand.__class__ is int:
        raise NotTraceableError(f"{operand} takes more than 64 bits")
    return (operand.__class__, operand)


def _spelled(operand: Any) -> str:
    return (operand.name or f"n{operand.at}") if operand.__class__ is Number else repr(operand)


def value_of(value: Any) -> Any:
    """The value of a number in the call that was traced; anything else unchanged."""
    return value.value if value.__class__ is Number else value


def numbers_in(value: Any) -> list[Number]:
    """The numbers in a record."""
    found, left = list[Number](), [value]
    while left:
        part = left.pop()
        kind = part.__class__
        if kind is Number:
            found.append(part)
        elif kind in CONSTANTS or part is None:
            continue
        elif isinstance(part, (tuple, list)):
            left += part
        elif isinstance(part, dict):
            left += part.values()
        elif dataclasses.is_dataclass(part):
            left += [getattr(part, field.name) for field in dataclasses.fields(part)]
    return found


def is_traced(value: Any) -> bool:
    """Whether a record holds numbers of a trace."""
    return bool(numbers_in(value))


# Operations with an integer that change nothing; the first two from either side.
UNCHANGED = (("*", 1), ("+", 0), ("//", 1), ("-", 0))
# Operations that have no form for floats.
INTEGRAL = ("//", "%", "<<", ">>", "|", "&")


def _binary(name: str, of: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    def recorded(trace: Trace, left: Any, right: Any) -> Any:
        values = value_of(left), value_of(right)
        if name in INTEGRAL and float in map(type, values):
            raise NotTraceableError(f"{name} of floats is not recorded")
        return trace.record(name, (left, right), of(*values))

    def forward(self: Number, other: Any) -> Any:
        if other.__class__ is not Number and other.__class__ not in CONSTANTS:
            return NotImplemented
        return self if _is_neutral(name, other, UNCHANGED) else recorded(self.trace, self, other)

    def backward(self: Number, other: Any) -> Any:
        if other.__class__ not in CONSTANTS:
            return NotImplemented
        return self if _is_neutral(name, other, UNCHANGED[:2]) else recorded(self.trace, other, self)

    return forward, backward


def _is_neutral(name: str, other: Any, pairs: Sequence[tuple[str, int]]) -> bool:
    return other.__class__ is int and (name, other) in pairs


def _comparison(name: str, of: Callable[[Any, Any], bool], *, swapped: bool = False, negated: bool = False) -> Any:
    """`name` is compared, with the operands `swapped` or the outcome `negated`."""

    def compare(self: Number, other: Any) -> Any:
        if other.__class__ is not Number and other.__class__ not in CONSTANTS:
            return NotImplemented
        outcome = of(self.value, value_of(other))
        if other.__class__ is not Number or other.at != self.at:
            self.trace.require(name, (other, self) if swapped else (self, other), holds=outcome is not negated)
        return outcome

    return compare


class Number:
    """A number of a trace. `value` is what it was in the call that was traced."""

    __slots__ = ("at", "name", "trace", "value")

    def __init__(self, trace: Trace, at: int, value: Any, name: str = "") -> None:
        self.trace, self.at, self.value, self.name = trace, at, value, name

    __add__, __radd__ = _binary("+", lambda a, b: a + b)
    __sub__, __rsub__ = _binary("-", lambda a, b: a - b)
    __mul__, __rmul__ = _binary("*", lambda a, b: a * b)
    __floordiv__, __rfloordiv__ = _binary("//", lambda a, b: a // b)
    __truediv__, __rtruediv__ = _binary("/", lambda a, b: a / b)
    __mod__, __rmod__ = _binary("%", lambda a, b: a % b)
    __lshift__, __rlshift__ = _binary("<<", lambda a, b: a << b)
    __rshift__, __rrshift__ = _binary(">>", lambda a, b: a >> b)
    __or__, __ror__ = _binary("|", lambda a, b: a | b)
    __and__, __rand__ = _binary("&", lambda a, b: a & b)
    __lt__ = _comparison("<", lambda a, b: a < b)
    __le__ = _comparison("<=", lambda a, b: a <= b)
    __gt__ = _comparison("<", lambda a, b: a > b, swapped=True)
    __ge__ = _comparison("<=", lambda a, b: a >= b, swapped=True)
    __eq__ = _comparison("==", lambda a, b: a == b)
    __ne__ = _comparison("==", lambda a, b: a != b, negated=True)

    def __neg__(self) -> Any:
        return 0 - self

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __hash__(self) -> int:
        raise NotTraceableError("a size was used as a key of a cache")

    def __index__(self) -> int:
        return int(fixed(self))

    __int__ = __index__

    def __float__(self) -> float:
        return float(fixed(self))

    def bit_length(self) -> Any:
        """Of an integer."""
        return self.trace.record("bit_length", (self,), self.value.bit_length())

    def __repr__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


def fixed(value: Any) -> Any:
    """The value of a number, which later calls must have too; anything else unchanged. Looks into tuples."""
    if value.__class__ is Number:
        value.trace.require("==", (value, value.value), holds=True)
        return value.value
    if isinstance(value, tuple):
        parts = [fixed(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def is_integer(value: Any) -> bool:
    """Whether a value is an integer, or the number of one."""
    return isinstance(value.value if value.__class__ is Number else value, int)


def at_run_time(function: Function) -> Function:
    """A pure function of numbers, called by a plan for each new size. Without numbers it is called at once."""

    @functools.wraps(function)
    def called(*values: Any) -> Any:
        for value in values:
            if value.__class__ is Number:
                return value.trace.ask(function, values)
        return function(*values)

    return called  # type: ignore[return-value]


def _extreme(name: str, of: Callable[..., Any]) -> Callable[..., int]:
    def chosen(first: Any, *others: Any) -> Any:
        for other in others:
            if first.__class__ is Number or other.__class__ is Number:
                trace: Trace = (first if first.__class__ is Number else other).trace
                first = trace.record(name, (first, other), of(value_of(first), value_of(other)))
            else:
                first = of(first, other)
        return first

    return chosen


# Of integers, as `min` and `max`.
smallest, largest = _extreme("smallest", min), _extreme("largest", max)


def replaced(thing: Any, values: Mapping[int, Any]) -> Any:
    """A tuple or record in which every number is exchanged for its value, found by the number's position."""
    if thing.__class__ is Number:
        return values[thing.at]
    if isinstance(thing, tuple):
        parts = [replaced(part, values) for part in thing]
        return type(thing)(*parts) if hasattr(thing, "_fields") else tuple(parts)
    if isinstance(thing, dict):
        return {name: replaced(part, values) for name, part in thing.items()}
    if isinstance(thing, list):
        return [replaced(part, values) for part in thing]
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        changes = {
            f.name: replaced(old, values)
            for f in dataclasses.fields(thing)
            if (old := getattr(thing, f.name)) is not None
        }
        return dataclasses.replace(thing, **{n: v for n, v in changes.items() if v is not getattr(thing, n)})
    return thing


class Sketch:
    """A tensor of a trace: open sizes, strides and the address are numbers, there is no memory."""

    __slots__ = ("_index", "_place", "_strides", "device", "dtype", "shape")

    def __init__(
        self, shape: tuple[Any, ...], strides: tuple[Any, ...], place: Any, dtype: torch.dtype, device: torch.device,
        index: int,
    ) -> None:  # fmt: skip
        self.shape, self.dtype, self.device = shape, dtype, device
        self._strides, self._place, self._index = strides, place, index

    @classmethod
    def of(cls, trace: Trace, name: str, tensor: Tensor, is_open: Sequence[bool]) -> Sketch:
        """The tensor that later calls pass under this name, with those sizes open that `is_open` marks."""
        sizes = [size if opened else None for size, opened in zip(tensor.shape, is_open, strict=True)]
        numbers = trace.tensor(name, sizes, tensor.stride(), tensor.data_ptr())
        shape = tuple([size if number is None else number for size, number in zip(tensor.shape, numbers, strict=False)])
        strides, place = tuple(numbers[len(shape) : -1]), numbers[-1]
        return cls(shape, strides, place, tensor.dtype, tensor.device, tensor.get_device())

    def _with(self, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> Sketch:
        return Sketch(shape, strides, self._place, self.dtype, self.device, self._index)

    def stride(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self._strides if dim is None else self._strides[dim]

    def data_ptr(self) -> Any:
        """The address."""
        return self._place

    def get_device(self) -> int:
        """As of a tensor."""
        return self._index

    def numel(self) -> Any:
        """As of a tensor."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """As of a tensor."""
        return self.dtype.itemsize

    def is_contiguous(self) -> bool:
        """As of a tensor."""
        expected: Any = 1
        for size, stride in zip(self.shape[::-1], self._strides[::-1], strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def transpose(self, a: int, b: int) -> Sketch:
        """As of a tensor."""
        order = list(range(len(self.shape)))
        order[a], order[b] = order[b], order[a]
        return self._with(tuple(self.shape[i] for i in order), tuple(self._strides[i] for i in order))

    def expand(self, *sizes: Any) -> Sketch:
        """As of a tensor."""
        wanted = sizes[0] if isinstance(sizes[0], tuple) else sizes
        new = len(wanted) - len(self.shape)
        shape, strides = list(wanted), [0] * len(wanted)
        for i, (size, stride) in enumerate(zip(self.shape, self._strides, strict=True), new):
            if wanted[i].__class__ is int and wanted[i] == -1:
                shape[i] = size
            strides[i] = 0 if size == 1 and shape[i] != 1 else stride
        return self._with(tuple(shape), tuple(strides))

    def __getattr__(self, name: str) -> Any:
        raise NotTraceableError(f"a tensor without memory has no {name}")
