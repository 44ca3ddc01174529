"""A trial of Triton releases on which no test has run: a few small problems, compared with the reference.

A backend that passes runs, with a warning; one that fails is refused. The trial takes as long as its kernels take to
compile, once a process.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.base import Backend
from tilewise.backends.gpu import releases
from tilewise.errors import Unsupported
from tilewise.lasting import outside_pools
from tilewise.operands import Operands, Wanted
from tilewise.problem import AttentionProblem

# The largest relative distance from the reference that passes: several times what rounding to bf16 causes.
TOLERANCE = 0.02


def failure(backend: Backend) -> str | None:
    """Why the installed release failed the trial of a backend's kernels; None if it passed or needs no trial."""
    if releases.is_known():
        return None
    outcomes = _outcomes()
    if backend.name not in outcomes:
        if torch.cuda.is_current_stream_capturing():
            raise Unsupported(
                f"triton {releases.installed()} is newer than the releases that were tested, so its kernels are tried "
                "before they are used. That cannot be done while a CUDA graph is captured: call attention once before"
            )
        outcomes[backend.name] = _outcome(backend, torch.device("cuda", torch.cuda.current_device()))
    return outcomes[backend.name]


def report(name: str) -> str:
    """The compiler and whether it was tested, for `tilewise doctor`; only for a backend that runs here."""
    if releases.is_known():
        return f"triton {releases.installed()}, a release that was tested"
    oldest, newest = (".".join(map(str, release)) for release in (releases.OLDEST, releases.NEWEST))
    tried = f"{name} kernels were tried against the reference and are right"
    return f"triton {releases.installed()}, newer than those that were tested ({oldest} to {newest}); {tried}"


@functools.cache
def _outcomes() -> dict[str, str | None]:
    """By backend name: why it is refused, or None. Any thread may add."""
    return {}


def _outcome(backend: Backend, where: torch.device) -> str | None:
    found = outside_pools(lambda: _first_error(backend, where), where)
    if found is not None:
        return f"triton {releases.installed()} is newer than the releases that were tested, and {found}"
    warnings.warn(
        f"triton {releases.installed()} is newer than the releases that tilewise was tested with; a first trial of the "
        f"{backend.name} kernels against the reference was right",
        stacklevel=2,
    )
    return None


def _first_error(backend: Backend, where: torch.device) -> str | None:
    for what, problem in _problems():
        if backend.supports(problem, devices.of(where)) is not None:
            continue
        try:
            error = _error(backend, problem, where)
        except Exception as reason:  # an unknown compiler may raise anything
            return f"its {what} failed: {type(reason).__name__}: {reason}"
        if not error <= TOLERANCE:
            return f"its {what} is off by {error:.1%} of the result"
    return None


def _problems() -> Iterator[tuple[str, AttentionProblem]]:
    values: dict[str, Any] = {
        "kind": "dense", "dtype": torch.bfloat16, "batch": 2, "seqlen_q": 300, "seqlen_k": 300, "total_q": 600,
        "total_k": 600, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "head_dim_v": 128, "scale": 0.1,
    }  # fmt: skip
    forward = AttentionProblem(**values | {"causal": True})
    yield "forward", forward
    yield "backward", replace(forward, head_dim=64, head_dim_v=64, needs_grad=True)
    yield "decoding", AttentionProblem(**values | {"seqlen_q": 1, "total_q": 2})


def _error(backend: Backend, problem: AttentionProblem, where: torch.device) -> float:
    """The largest relative distance of a result from the reference."""
    reference: Backend = importlib.import_module("tilewise.backends.reference").BACKEND
    shapes = [(problem.num_heads, problem.seqlen_q), *[(problem.num_kv_heads, problem.seqlen_k)] * 2]
    generator = torch.Generator().manual_seed(0)
    numbers = [
        torch.randn(problem.batch, *shape, problem.head_dim, generator=generator, dtype=torch.float32, device="cpu")
        for shape in shapes
    ]
    here = [x.to(problem.dtype) for x in numbers]
    exact = replace(problem, dtype=torch.float64)
    found = _results(backend, problem, Operands(*[x.to(where) for x in here]))
    wanted = _results(reference, exact, Operands(*[x.double() for x in here]))
    return max(_distance(a.cpu().double(), b) for a, b in zip(found, wanted, strict=True))


def _results(backend: Backend, problem: AttentionProblem, operands: Operands) -> list[Tensor]:
    out, lse = backend.forward(problem, operands)
    if not problem.needs_grad:
        return [out, lse]
    gradients = backend.backward(problem, operands, out, lse, operands.q, None, Wanted())
    return [out, lse, *[gradient for gradient in gradients[:3] if gradient is not None]]


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
