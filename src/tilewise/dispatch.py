"""Chooses the backend of a problem: asks them in order of preference and keeps the reason of each that refused.

>>> from tilewise import dispatch
>>> dispatch.load("reference").name
'reference'
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from tilewise import backends, settings
from tilewise.backends import Status, load, statuses
from tilewise.backends.base import Backend, Differentiating, Serving
from tilewise.device import DeviceSpec
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.problem import AttentionProblem

__all__ = [
    "Rejection", "Selection", "Status", "load", "refusal", "register", "require", "select", "serving", "statuses",
    "unknown_feature", "unregister",
]  # fmt: skip

# Features that a backend may ignore: its results are the same without them.
HINTS = frozenset(("latent",))
# What is said of features that a backend does not declare, where its name alone would not help.
REASONS = {
    "tile mask": "has no tile masks: pass mask=mask.dense(), which computes every pair",
    "batch-invariant": "does not say that its results are independent of the batch",
}
# The backend with the serving passes (writes, prefixes, merges), by device type.
SERVING = {"cpu": "cpu", "cuda": "triton"}


class Rejection(NamedTuple):
    """A backend that was asked before the chosen one, and its reason."""

    backend: str
    reason: str


class Selection(NamedTuple):
    """The backend that runs a problem and the ones that were preferred but refused."""

    backend: Backend
    rejected: tuple[Rejection, ...]


def register(backend: object, *, before: str) -> None:
    """Register an outside backend, asked before the one named. Drops cached selections."""
    backends.register(backend, before)
    _select.cache_clear()


def unregister(name: str) -> None:
    """Remove an outside backend."""
    backends.unregister(name)
    _select.cache_clear()


def require(name: str, argument: str = "backend") -> None:
    """Raise unless a backend of that name exists."""
    if name != "auto" and name not in (known := backends.names()):
        expected = "'auto' or one of " + ", ".join(map(repr, known))
        fix = "tilewise.backends() lists what is there." if argument == "backend" else "Unset it or name a backend."
        raise InvalidProblem(argument, expected, repr(name), fix)


def select(problem: AttentionProblem, device: DeviceSpec, requested: str, *, here: bool = True) -> Selection:
    """The first backend that takes the problem. A backend named by the caller is the only candidate.

    With `here=False` availability on this machine is ignored, for planning. Nothing of that is cached: it may ask about
    thousands of problems, each of them once.
    """
    name = settings.current().backend if requested == "auto" else requested
    require(name, "TILEWISE_BACKEND" if requested == "auto" else "backend")
    if problem.fp8 and (problem.needs_grad or problem.higher):
        raise Unsupported(
            f"gradients through {'int8' if problem.int8 else 'FP8'} inputs are not computed: rounding to "
            f"{problem.codes} has none. Call it under torch.no_grad(), or pass bf16 or fp16 tensors"
        )
    return (_select if here and not problem.is_traced else _select.__wrapped__)(problem, device, name, here)


def refusal(backend: Backend, problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Why a backend does not take the problem on such a device, or None."""
    reason = backend.supports(problem, device)
    if reason is None and problem.higher and not isinstance(backend, Differentiating):
        return "has no tangents (jvp) and no second derivatives"
    # Asked here, so that a backend cannot ignore what was added after it was written.
    return unknown_feature(backend, problem) if reason is None else reason


def unknown_feature(backend: Backend, problem: AttentionProblem) -> str | None:
    """The refusal of a problem with a feature that the backend does not declare, or None."""
    missing = next((name for name in problem.features if name not in backend.honours and name not in HINTS), None)
    return None if missing is None else REASONS.get(missing, f"does not know {missing}")


@functools.lru_cache(maxsize=4096)
def _select(problem: AttentionProblem, device: DeviceSpec, name: str, here: bool) -> Selection:
    rejected: list[Rejection] = []
    for candidate in backends.names() if name == "auto" else (name,):
        backend = load(candidate)
        reason = (backend.unavailable() if here else None) or refusal(backend, problem, device)
        if reason is None and name == "auto" and candidate == "reference" and problem.dtype != torch.float64:
            reason = "materialises every score in fp64, so it is never chosen for you: ask for backend='reference'"
        if reason is None:
            return Selection(backend, tuple(rejected))
        rejected.append(Rejection(candidate, reason))
    features = ", ".join(problem.features) or "no extra features"
    given = f"this {problem.kind} problem ({features}) on {device.name}"
    if name == "auto":
        raise Unsupported(f"no backend takes {given}", rejected)
    fix = "backend='auto' asks all of them, unless TILEWISE_BACKEND names one"
    raise Unsupported(f"backend {name!r} does not take {given}; {fix}", rejected)


def serving(device_type: str) -> Serving | None:
    """The backend with the serving passes for such a device. None if there is none or it cannot run."""
    name = SERVING.get(device_type)
    return None if name is None else _serving(name)


@functools.cache
def _serving(name: str) -> Serving | None:
    """Cached, because looking for a package takes longer than a call."""
    backend = load(name)
    return backend if isinstance(backend, Serving) and backend.unavailable() is None else None
