"""The kernels of a problem, described without tensors, for ahead-of-time compilation."""

from __future__ import annotations

from tilewise.backends.gpu.offline import operand_views
from tilewise.backends.gpu.symbols import KernelCall
from tilewise.backends.triton import launch
from tilewise.device import DeviceSpec
from tilewise.operands import Wanted
from tilewise.problem import AttentionProblem

__all__ = ["calls_of"]


def calls_of(problem: AttentionProblem, device: DeviceSpec) -> list[KernelCall]:
    """Forward, and backward if the problem wants gradients, with contiguous operands."""
    views = operand_views(problem, packed_queries=problem.seqlen_q > 1)
    results = launch.result_allocations(problem, views)
    views |= {name: allocation.view for name, allocation in results.items()}
    calls = launch.forward_calls(problem, device, views)
    if problem.needs_grad:
        views["dout"] = views["out"]
        wanted = Wanted(dbias=problem.bias_shape is not None, dsinks=problem.has_sinks)
        calls += launch.backward_calls(problem, device, views, wanted)
    return calls
