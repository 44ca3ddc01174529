"""Numbers that remember how they were computed, so that what is planned for one size serves others.

The first call of its kind is planned with a `Number` in place of every size. Arithmetic with numbers is recorded, and
so is every comparison, with its outcome. Afterwards `Trace.function` turns the record into plain Python code: it takes
the tensors of a later call, computes what the plan needs, and returns None if a comparison would end differently. So a
plan is never used for sizes that would have been planned otherwise, and nobody has to write down which these are.

    >>> trace = Trace(["x"])
    >>> rows = trace.leaf("x.shape[0]", 300)
    >>> blocks = (rows + 127) // 128
    >>> kernel = "long" if blocks > 2 else "short"
    >>> print(trace.source(["return " + code((kernel, blocks))]))
    def plan(x):
        n2 = ((x.shape[0]) + 127) // 128
        if not (n2 > 2): return None
        return ('long', n2, )

Code that plans may do with numbers what it does with integers, but a number is not hashable, and using one as an index
or in `range` fixes its value. A function that loops over sizes is marked with `at_run_time`: it is then called by the
plan, instead of being recorded.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

NUMBER = re.compile(r"\bn\d+\b")
MULTIPLE = re.compile(r"\((\w+|\(\w+\.data_ptr\(\)\)) % (2|4|8|16|32|64|128)\) == 0")
CONSTANTS = (int, float, bool)
Function = TypeVar("Function", bound=Callable[..., Any])


class NotTraceableError(TypeError):
    """What was done with a number cannot be recorded."""


class Trace:
    """The record of one plan: the arithmetic and the comparisons, in order."""

    def __init__(self, parameters: Sequence[str]) -> None:
        self.parameters = list(parameters)
        # Lines of code: (number it computes, or None for a comparison; text; numbers it reads).
        self._lines: list[tuple[int | None, str, tuple[int, ...]]] = []
        self._known: dict[tuple[str, type], Number] = {}
        self._compared = set[str]()
        self._count = 0
        # Objects that the code refers to by name.
        self.names: dict[str, Any] = {}
        self._whole: Any = None

    def leaf(self, text: str, value: Any) -> Number:
        """A number that a later call reads off its arguments by this expression."""
        return self.record(text, (), value)

    def record(self, text: str, reads: tuple[int, ...], value: Any) -> Number:
        """The number with this value, computed by an expression over others; a known one if the text is the same."""
        key = text, type(value)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Number(self, self._count, value)
            self._lines.append((self._count, text, reads))
            self._count += 1
        return found

    def require(self, text: str, reads: tuple[int, ...], *, holds: bool) -> None:
        """Later calls use the plan only if this comparison ends the same way."""
        condition = text if holds else f"not ({text})"
        if condition not in self._compared:
            self._compared.add(condition)
            self._lines.append((None, condition, reads))

    def name(self, thing: Any, hint: str = "f") -> str:
        """A name for an object in the code."""
        for name, known in self.names.items():
            if known is thing:
                return name
        name = f"{hint}{len(self.names)}"
        self.names[name] = thing
        return name

    def source(self, ending: Sequence[str]) -> str:
        """The code of a function that returns None for arguments to which the plan does not apply, and else goes on
        with `ending`: lines that may read numbers.
        """
        needed = Counter(NUMBER.findall("\n".join(ending)))
        for at, text, _ in reversed(self._lines):
            if at is None or needed[f"n{at}"]:
                needed.update(NUMBER.findall(text))
        texts: dict[str, str] = {}

        def inlined(text: str) -> str:
            return NUMBER.sub(lambda found: texts.get(found[0], found[0]), text)

        lines, multiples = list[str](), dict[str, list[str]]()
        for at, text, _ in self._lines:
            name = f"n{at}"
            if at is None and (multiple := MULTIPLE.fullmatch(inlined(text))):
                multiples.setdefault(multiple[2], []).append(multiple[1])
            elif at is None:
                lines.append(f"if not ({inlined(text)}): return None")
            elif needed[name] == 1:  # read once: written where it is read
                texts[name] = f"({inlined(text)})"
            elif needed[name]:
                lines.append(f"{name} = {inlined(text)}")
        # Multiples of a power of two are tested together.
        for of, which in multiples.items():
            lines.append(f"if ({' | '.join(which)}) % {of}: return None")
        lines += map(inlined, ending)
        return f"def plan({', '.join(self.parameters)}):\n" + "\n".join([f"    {line}" for line in lines])

    def function(self, ending: Sequence[str], names: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """The function that `source` writes; `names` are what `ending` refers to."""
        return _compiled(self.source(ending), {**self.names, **names})

    def values(self, *arguments: Any) -> list[Any] | None:
        """The values of all numbers for other arguments, or None if the plan does not apply to them."""
        if self._whole is None:
            everything = sorted(self._known.values(), key=lambda number: number.at)
            self._whole = self.function([f"return [{', '.join(map(code, everything))}]"])
        found: list[Any] | None = self._whole(*arguments)
        return found


def function(parameters: str, lines: Sequence[str], names: Mapping[str, Any]) -> Any:
    """A function with these parameters and lines, which refer to `names`."""
    return _compiled(f"def plan({parameters}):\n" + "\n".join([f"    {line}" for line in lines]), dict(names))


def _compiled(source: str, names: dict[str, Any]) -> Any:
    exec(_code_of(source), names)
    return names["plan"]


@functools.lru_cache(maxsize=256)
def _code_of(source: str) -> Any:
    """Compiling takes half a millisecond, and plans with other numbers often have the same code."""
    return compile(source, "<plan>", "exec")


def unpacked(numbers: Sequence[Any], name: str) -> list[str]:
    """Code that names the numbers of a tuple again; those of no trace by their positions."""
    names = [code(number) if number.__class__ is Number else f"n{i}" for i, number in enumerate(numbers)]
    return [f"{', '.join(names)}, = {name}"] if names else []


def code(value: Any) -> str:
    """A number, a constant or a record of them as code. Classes of records are named by themselves."""
    if value.__class__ is Number:
        return f"n{value.at}"
    if isinstance(value, tuple):
        parts = "".join([f"{code(part)}, " for part in value])
        return f"{type(value).__name__}({parts})" if hasattr(value, "_fields") else f"({parts})"
    return repr(value)


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


def _operands(*values: Any) -> tuple[int, ...]:
    return tuple([value.at for value in values if value.__class__ is Number])


# Operations with an integer that change nothing; the first two from either side.
UNCHANGED = (("*", 1), ("+", 0), ("//", 1), ("-", 0))


def _binary(symbol: str, of: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    def forward(self: Number, other: Any) -> Any:
        if other.__class__ is Number:
            return self.trace.record(
                f"n{self.at} {symbol} n{other.at}", (self.at, other.at), of(self.value, other.value)
            )
        if other.__class__ not in CONSTANTS:
            return NotImplemented
        if other.__class__ is int and (symbol, other) in UNCHANGED:
            return self
        return self.trace.record(f"n{self.at} {symbol} {other!r}", (self.at,), of(self.value, other))

    def backward(self: Number, other: Any) -> Any:
        if other.__class__ not in CONSTANTS:
            return NotImplemented
        if other.__class__ is int and (symbol, other) in UNCHANGED[:2]:
            return self
        return self.trace.record(f"{other!r} {symbol} n{self.at}", (self.at,), of(other, self.value))

    return forward, backward


def _comparison(symbol: str, of: Callable[[Any, Any], bool]) -> Any:
    def compare(self: Number, other: Any) -> Any:
        if other.__class__ is not Number and other.__class__ not in CONSTANTS:
            return NotImplemented
        value = other.value if other.__class__ is Number else other
        outcome = of(self.value, value)
        if other.__class__ is not Number or other.at != self.at:
            self.trace.require(f"n{self.at} {symbol} {code(other)}", _operands(self, other), holds=outcome)
        return outcome

    return compare


class Number:
    """A number of a trace. `value` is what it was in the call that was traced."""

    __slots__ = ("at", "trace", "value")

    def __init__(self, trace: Trace, at: int, value: Any) -> None:
        self.trace, self.at, self.value = trace, at, value

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
    __gt__ = _comparison(">", lambda a, b: a > b)
    __ge__ = _comparison(">=", lambda a, b: a >= b)
    __eq__ = _comparison("==", lambda a, b: a == b)
    __ne__ = _comparison("!=", lambda a, b: a != b)

    def __neg__(self) -> Any:
        return self.trace.record(f"-n{self.at}", (self.at,), -self.value)

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
        return self.trace.record(f"n{self.at}.bit_length()", (self.at,), self.value.bit_length())

    def __repr__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


def fixed(value: Any) -> Any:
    """The value of a number, which later calls must have too; anything else unchanged. Looks into tuples."""
    if value.__class__ is Number:
        _ = value == value.value  # recorded, with python -O too
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
                trace: Trace = value.trace
                break
        else:
            return function(*values)
        name = trace.name(function)
        result = function(*[value.value if value.__class__ is Number else value for value in values])
        given = [code(v) if v.__class__ is Number or v.__class__ in CONSTANTS else trace.name(v) for v in values]
        call = f"{name}({', '.join(given)})"
        if not isinstance(result, tuple):
            return trace.record(call, _operands(*values), result)
        whole = trace.record(call, _operands(*values), result)
        return tuple([trace.record(f"n{whole.at}[{i}]", (whole.at,), part) for i, part in enumerate(result)])

    return called  # type: ignore[return-value]


def replaced(thing: Any, values: Sequence[Any]) -> Any:
    """A tuple or record in which every number is exchanged for the value at its position."""
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
        # Taken apart from one tuple, because each call of `size` or `stride` takes several times as long.
        shape, strides = (
            tuple([trace.record(f"n{whole.at}[{i}]", (whole.at,), n) if opened else n for i, n, opened in parts])
            for whole, parts in (
                (trace.leaf(f"{name}.shape", tensor.shape), zip(itertools.count(), tensor.shape, is_open)),
                (
                    trace.leaf(f"{name}.stride()", tensor.stride()),
                    ((i, n, True) for i, n in enumerate(tensor.stride())),
                ),
            )
        )
        place = trace.leaf(f"{name}.data_ptr()", tensor.data_ptr())
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
