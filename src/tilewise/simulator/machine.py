"""The machine that executes events on real numbers (fp64), and nothing but events: it knows no algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.errors import InvalidProblem
from tilewise.simulator.events import ArraySpec, Compute, Event, Free, Load, Rescale, Skip, Store, Trace, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]


def replay(trace: Trace, inputs: Mapping[str, NDArray[Any]]) -> dict[str, Matrix]:
    """Executes a trace's events in order on its inputs and returns the arrays of slow memory that are not inputs.

    FA-1 leaves row_max and row_sum: lse is computed from them.
    """
    machine = Machine(trace.workload, trace.arrays, inputs)
    for event in trace.events:
        machine.execute(event)
    results = {name: machine.slow[name] for name, spec in trace.arrays.items() if spec.fill != "input"}
    if "row_max" in results:
        with np.errstate(divide="ignore"):
            results["lse"] = results["row_max"] + np.log(results["row_sum"])
    return results


class Machine:
    """Two memories: `slow` holds arrays, `fast` buffers. Unset elements are NaN, so that reading them shows."""

    def __init__(self, workload: Workload, arrays: Mapping[str, ArraySpec], inputs: Mapping[str, NDArray[Any]]) -> None:
        self.workload = workload
        self.slow = {name: _array(name, spec, inputs) for name, spec in arrays.items()}
        self.fast: dict[str, Matrix] = {}

    def execute(self, event: Event) -> None:
        """One event; an event that names what is not there is rejected."""
        try:
            if isinstance(event, Load):
                region = self.slow[event.array][slice(*event.rows), slice(*event.cols)]
                self.fast[event.buffer] = region.copy()
            elif isinstance(event, Store):
                self.slow[event.array][slice(*event.rows), slice(*event.cols)] = self.fast[event.buffer]
            elif isinstance(event, Compute):
                self._compute(event)
            elif isinstance(event, Rescale):
                self._rescale(event)
            elif isinstance(event, Free):
                del self.fast[event.buffer]
            elif not isinstance(event, Skip):
                raise TypeError(f"unknown event {type(event).__name__}")
        except (KeyError, ValueError, TypeError) as error:
            fix = "Replay the events of one trace, all of them, in order."
            raise InvalidProblem("events", "an event that fits what came before", f"{event}: {error}", fix) from error

    def _compute(self, event: Compute) -> None:
        sources = [self.fast[name] for name in event.sources]
        with np.errstate(divide="ignore"):
            result = OPERATIONS[event.op](self.workload, event, sources)
        if result.shape != event.shape:
            raise ValueError(f"the result has shape {result.shape}")
        if event.replaces is not None:
            del self.fast[event.replaces]
        self.fast[event.target] = result

    def _rescale(self, event: Rescale) -> None:
        new_max = self.fast["new_max"]
        alpha = np.exp(self.fast["row_max"] - _finite(new_max))
        if event.normalised:
            self.fast["acc"] = self.fast["acc"] * self.fast["row_sum"]
        for name in event.buffers:
            self.fast[name] = self.fast[name] * alpha
        self.fast["row_max"] = new_max.copy()


def _array(name: str, spec: ArraySpec, inputs: Mapping[str, NDArray[Any]]) -> Matrix:
    shape = spec.rows, spec.cols
    if spec.fill != "input":
        value = {"empty": math.nan, "zero": 0.0, "minus_infinity": -math.inf}[spec.fill]
        return np.full(shape, value)
    if name not in inputs:
        raise InvalidProblem(name, f"an array of shape {shape}", None, "Pass every input of the trace.")
    given = np.asarray(inputs[name], dtype=np.float64)
    given = given[:, None] if given.ndim == 1 else given
    if given.ndim != 2 or given.shape[1] != spec.cols or given.shape[0] < spec.rows:
        raise InvalidProblem(name, f"an array of shape {shape}", given.shape, "Sizes come from the workload.")
    return given.copy()


def _mask(work: Workload, event: Compute, sources: list[Matrix]) -> Matrix:
    if event.rows is None or event.cols is None:
        raise ValueError("a mask needs its rows and columns")
    if work.seen is not None:
        rows = work.seen[slice(*event.rows)]
        return np.where([[key == "1" for key in row[slice(*event.cols)]] for row in rows], sources[0], -math.inf)
    distance = np.arange(*event.cols)[None, :] - (np.arange(*event.rows)[:, None] + work.band.offset)
    hidden = np.zeros(distance.shape, dtype=bool)
    if work.left is not None:
        hidden |= distance < -work.left
    if work.right is not None:
        hidden |= distance > work.right
    return np.where(hidden, -math.inf, sources[0])


def _softmax(_: Workload, __: Compute, sources: list[Matrix]) -> Matrix:
    (s,) = sources
    weights: Matrix = np.exp(s - _finite(s.max(axis=1, keepdims=True)))
    return weights / _nonzero(_row_sum(weights))


def _finite(row_max: Matrix) -> Matrix:
    """A row without a key has maximum -inf; subtracting 0 instead keeps its exponentials at 0."""
    return np.where(row_max == -math.inf, 0.0, row_max)


def _nonzero(row_sum: Matrix) -> Matrix:
    """A row without a key has sum 0 and result 0: divide by 1."""
    return np.where(row_sum == 0.0, 1.0, row_sum)


def _row_sum(matrix: Matrix) -> Matrix:
    total: Matrix = matrix.sum(axis=1, keepdims=True)
    return total


Operation = Callable[[Workload, Compute, "list[Matrix]"], "Matrix"]

OPERATIONS: dict[str, Operation] = {
    "init": lambda _, event, __: np.full(event.shape, -math.inf if event.target == "row_max" else 0.0),
    "scores": lambda work, _, b: work.scale * (b[0] @ b[1].T),
    "mask": _mask,
    "softmax": _softmax,
    "product": lambda _, __, b: b[0] @ b[1],
    "product_sum": lambda _, __, b: b[0] + b[1] @ b[2],
    "row_max": lambda _, __, b: np.maximum(b[0], b[1].max(axis=1, keepdims=True)),
    "exp": lambda _, __, b: np.exp(b[0] - _finite(b[1])),
    "row_sum": lambda _, __, b: b[0] + _row_sum(b[1]),
    "values": lambda _, __, b: b[0] + b[1] @ b[2],
    "normalise": lambda _, __, b: b[0] / _nonzero(b[1]),
    "lse": lambda _, __, b: b[1] + np.log(b[0]),
    "merge": lambda _, __, b: b[0] + np.exp(b[2] - _finite(b[3])) * b[1],
    "merge_sum": lambda _, __, b: b[0] + np.exp(b[1] - _finite(b[2])),
    "delta": lambda _, __, b: _row_sum(b[0] * b[1]),
    "probabilities": lambda _, __, b: np.exp(b[0] - _finite(b[1])),
    "dv": lambda _, __, b: b[0] + b[1].T @ b[2],
    "dp": lambda _, __, b: b[0] @ b[1].T,
    "ds": lambda _, __, b: b[1] * (b[0] - b[2]),
    "softmax_gradient": lambda _, __, b: b[1] * (b[0] - _row_sum(b[0] * b[1])),
    "dk": lambda work, _, b: b[0] + work.scale * (b[1].T @ b[2]),
    "dq": lambda work, _, b: b[0] + work.scale * (b[1] @ b[2]),
}
