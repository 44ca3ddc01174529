"""Who does it: the backends in order of preference, and why each one was passed over.

>>> from tilewise import dispatch
>>> dispatch.load("reference").name
'reference'
"""

from __future__ import annotations

import functools
import importlib
from typing import NamedTuple

import torch

from tilewise import backends, settings
from tilewise.backends.base import Backend
from tilewise.device import DeviceSpec
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.problem import AttentionProblem

__all__ = ["Rejection", "Selection", "Status", "load", "select", "statuses"]


class Rejection(NamedTuple):
    """A backend that was asked before the chosen one, and its reason."""

    backend: str
    reason: str


class Selection(NamedTuple):
    """The backend that runs a problem and the ones that were preferred but refused."""

    backend: Backend
    rejected: tuple[Rejection, ...]


class Status(NamedTuple):
    """A backend and whether it can run here: `reason` is None if so."""

    name: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.name}: {self.reason or 'available'}"


@functools.cache
def load(name: str) -> Backend:
    """The backend of that name; its compiler is not loaded yet."""
    backend: Backend = importlib.import_module(f"tilewise.backends.{name}").BACKEND
    return backend


def statuses() -> tuple[Status, ...]:
    """Every backend in order of preference, with the reason why it cannot run on this machine, if any."""
    return tuple(Status(name, load(name).unavailable()) for name in backends.NAMES)


def select(problem: AttentionProblem, device: DeviceSpec, requested: str, *, here: bool = True) -> Selection:
    """The first backend that takes the problem. A backend named by the caller is the only candidate.

    With `here=False` only the problem and the device count, not what this machine has: for planning.
    """
    name = settings.current().backend if requested == "auto" else requested
    if name != "auto" and name not in backends.NAMES:
        known = "auto or one of " + ", ".join(backends.NAMES)
        raise InvalidProblem("TILEWISE_BACKEND", known, repr(name), "Unset the variable or name a backend.")
    if problem.fp8 and problem.needs_grad:
        raise Unsupported(
            "gradients through FP8 inputs are not computed: rounding to e4m3 has none. Call it under torch.no_grad(), "
            "or pass bf16 or fp16 tensors"
        )
    return _select(problem, device, name, here)


@functools.lru_cache(maxsize=4096)
def _select(problem: AttentionProblem, device: DeviceSpec, name: str, here: bool) -> Selection:
    rejected: list[Rejection] = []
    for candidate in backends.NAMES if name == "auto" else (name,):
        backend = load(candidate)
        reason = (backend.unavailable() if here else None) or backend.supports(problem, device)
        if reason is None and name == "auto" and candidate == "reference" and problem.dtype != torch.float64:
            reason = "materialises every score in fp64, so it is never chosen for you: ask for backend='reference'"
        if reason is None:
            return Selection(backend, tuple(rejected))
        rejected.append(Rejection(candidate, reason))
    asked = "no backend" if name == "auto" else f"backend {name!r} does not"
    verb = "takes" if name == "auto" else "take"
    features = ", ".join(problem.features) or "no extra features"
    raise Unsupported(f"{asked} {verb} this {problem.kind} problem ({features}) on {device.name}", rejected)
