"""Backward configurations that are timed beside the one that is used: to choose by measurement, to state a price."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from tilewise import device
from tilewise.backends.gpu.launching import raw_views
from tilewise.backends.hopper import BACKEND, backward_plan, launch
from tilewise.backends.hopper.configs import BackwardConfig, backward_config
from tilewise.operands import Operands, Wanted
from tilewise.problem import AttentionProblem

__all__ = ["backward_candidates"]

# What two ways to the same gradients may differ by, relative to the largest element: a few roundings to bf16.
AGREEMENT = 0.02

ConfigOf = Callable[[AttentionProblem], BackwardConfig]


def backward_candidates(
    problem: AttentionProblem, operands: Operands, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> dict[str, Callable[[], Any]]:
    """Calls by name: `fused`, the unordered sum of a deterministic problem; `split`, dQ in a kernel of its own.

    A candidate whose gradients are not those of the configuration that is used is named and left out.
    """
    usual = BACKEND.backward(problem, operands, out, lse, dout, None, Wanted())
    calls = {}
    for name, config_of in _configs(problem).items():
        call = _call(config_of, problem, (dout, None, out, lse, *operands))
        wrong = [n for n, mine, theirs in zip(("dq", "dk", "dv"), call(), usual, strict=False) if _differ(mine, theirs)]
        if wrong:
            print(f"candidate {name}: {', '.join(wrong)} differ", flush=True)
        else:
            calls[name] = call
    return calls


def _configs(problem: AttentionProblem) -> dict[str, ConfigOf]:
    found: dict[str, ConfigOf] = {}
    if problem.deterministic:
        found["fused"] = lambda p: backward_config(replace(p, deterministic=False))
    return found


def _call(
    config_of: ConfigOf, problem: AttentionProblem, given: tuple[Any, ...]
) -> Callable[[], tuple[torch.Tensor, ...]]:
    q = given[4]
    with mock.patch.object(backward_plan, "backward_config", config_of):
        kernels = launch.backward_pass(problem, device.of(q.device), q.get_device(), raw_views(given), True)
    assert not kernels.copied, "candidates are timed on tensors that TMA can address"

    def run() -> tuple[torch.Tensor, ...]:
        made = kernels.run(given)
        return made["dq"], made["dk"], made["dv"]

    return run


def _differ(mine: torch.Tensor, theirs: torch.Tensor | None) -> bool:
    assert theirs is not None
    error = (mine.float() - theirs.float()).abs().max()
    return not bool(error <= AGREEMENT * theirs.float().abs().max())
