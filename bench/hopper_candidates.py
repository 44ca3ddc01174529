"""Backward configurations that are timed beside the one that is used: to choose by measurement, to state a price."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from tilewise import device
from tilewise.backends.gpu.launching import raw_views
from tilewise.backends.hopper import launch_backward
from tilewise.backends.hopper.configs import BackwardConfig, backward_config, split_config
from tilewise.backends.hopper.launching import counter_for
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem

__all__ = ["backward_candidates"]


def backward_candidates(
    problem: AttentionProblem, operands: Operands, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> dict[str, Callable[[], Any]]:
    """Calls by name: of a deterministic problem the unordered sum and, up to 128 columns, the sum in a fixed order."""
    found: dict[str, Callable[[AttentionProblem], BackwardConfig]] = {}
    if problem.deterministic:
        found["fused"] = lambda p: backward_config(replace(p, deterministic=False))
        if not backward_config(problem).WIDE:
            found["split"] = lambda p: split_config(backward_config(p))
    return {name: _call(config_of, problem, (*operands, out, lse, dout, None)) for name, config_of in found.items()}


def _call(
    config_of: Callable[[AttentionProblem], BackwardConfig], problem: AttentionProblem, given: tuple[Any, ...]
) -> Callable[[], Any]:
    q = given[0]
    with mock.patch.object(launch_backward, "backward_config", config_of):
        ready = launch_backward.backward_pass.__wrapped__(
            problem, device.of(q.device), q.get_device(), raw_views(given), True
        )
    assert not ready.copies, "candidates are timed on tensors that TMA can address"
    made = [ready.workspace, ready.dq, ready.dk, ready.dv]

    def run() -> None:
        ready.launches.run((*given, *(a.new(q) for a in made if a is not None), counter_for(q)))

    return run
