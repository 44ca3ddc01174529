"""The kernel calls of a problem, described without tensors, for compiling ahead of time."""

from __future__ import annotations

from tilewise.backends.gpu.offline import operand_views
from tilewise.backends.gpu.symbols import KernelCall
from tilewise.backends.hopper import decodes
from tilewise.backends.hopper.configs import BackwardConfig
from tilewise.backends.hopper.launch import forward_calls, result_allocations
from tilewise.backends.hopper.launch_backward import backward_calls, backward_plan, gradient_allocations
from tilewise.backends.hopper.launch_decode import decode_calls
from tilewise.backends.hopper.launch_fp8 import fp8_allocations, fp8_calls
from tilewise.device import DeviceSpec
from tilewise.problem import AttentionProblem

__all__ = ["calls_of"]


def calls_of(problem: AttentionProblem, device: DeviceSpec, config: BackwardConfig | None = None) -> list[KernelCall]:
    """Forward, and backward if the problem needs gradients, with contiguous operands; `config` replaces the backward's
    configuration.
    """
    decoding = decodes(problem)
    views = operand_views(problem, packed_queries=problem.seqlen_q > 1 or not decoding)
    views |= {name: made.view for name, made in result_allocations(problem).items()}
    if decoding:
        return decode_calls(problem, device, views)
    if problem.fp8:
        return fp8_calls(problem, device, views | {name: made.view for name, made in fp8_allocations(problem).items()})
    calls = forward_calls(problem, device, views)
    if problem.needs_grad:
        views["dout"] = views["out"]
        views |= {name: made.view for name, made in gradient_allocations(problem).items()}
        plan = backward_plan(problem, device)
        calls += backward_calls(plan if config is None else plan._replace(config=config), views)
    return calls
