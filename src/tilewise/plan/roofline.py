"""The cost of a whole problem on a device: FLOPs, bytes and memory of naive and of tiled attention, and a time.

The roofline time is an estimate: the larger of FLOPs / peak rate and bytes / bandwidth. Kernels usually take longer. A
call can also be faster, if its inputs are still in a cache, or if a rate was measured on a busier machine. Bytes are
counted behind the last-level cache: tiles of queries that run at the same time stream the same keys together, so those
come from memory once for all of them.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from tilewise.device import DeviceSpec
from tilewise.masks import Band, TileGrid
from tilewise.plan import cost
from tilewise.plan.cost import Traffic
from tilewise.problem import AttentionProblem

# The score matrices of each sequence and how many sequences have that one.
Bands = Counter[Band]


@dataclass(frozen=True, slots=True)
class Work:
    """The cost of one way of computing attention, for all heads and sequences, with its backward if gradients are
    needed.

    `bytes_moved` enter or leave the fast memory (registers, shared memory, a core's own cache); `bytes_from_memory` is
    the part that the last-level cache does not serve. `extra_memory` is the peak allocation in addition to the inputs.
    `seconds` and `bound` are None for a device whose rates are unknown.
    """

    flops: int
    traffic: Traffic
    bytes_moved: int
    bytes_from_memory: int
    extra_memory: int
    seconds: float | None
    bound: Literal["compute", "memory"] | None

    @property
    def intensity(self) -> float:
        """FLOPs per byte from memory."""
        return self.flops / max(1, self.bytes_from_memory)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the tensors themselves: inputs, results, tensors saved for the backward, and gradients."""

    inputs: int
    outputs: int
    saved_for_backward: int
    gradients: int


def memory_of(problem: AttentionProblem, inputs: Iterable[int], learnt: Iterable[int] = ()) -> Memory:
    """Memory of a problem whose input tensors have these sizes in bytes. `learnt` are those of a bias and sinks that
    require gradients; q, k and v all count as requiring them where any does.
    """
    stored = sum(inputs)
    out = problem.total_q * problem.num_heads * problem.head_dim_v * problem.dtype.itemsize
    lse = problem.total_q * problem.num_heads * problem.accumulate_dtype.itemsize
    if not problem.needs_grad:
        return Memory(stored, out + lse, 0, 0)
    q = problem.total_q * problem.num_heads * problem.head_dim
    kv = problem.total_k * problem.num_kv_heads * (problem.head_dim + problem.head_dim_v)
    return Memory(stored, out + lse, stored + out + lse, (q + kv) * problem.dtype.itemsize + sum(learnt))


def naive_work(problem: AttentionProblem, bands: Bands, memory: Memory, spec: DeviceSpec) -> Work:
    """Attention with stored score matrices: every pair is computed, masked or not."""
    traffic = _total_traffic(problem, bands, cost.naive_forward, cost.naive_backward)
    scores = _total(bands, lambda band: band.seqlen_q * band.seqlen_k) * problem.num_heads
    moved = _bytes(problem, traffic, scores)
    # Scores and probabilities at the same time in the forward; P, dP and dS in the backward.
    matrices = 3 if problem.needs_grad else 2
    extra = memory.outputs + memory.gradients + matrices * scores * problem.dtype.itemsize
    flops = _flops(problem, scores, cost.naive_backward_flops)
    return _work(problem, spec, flops, traffic, moved, moved, extra)


def tiled_work(
    problem: AttentionProblem,
    bands: Bands,
    grid: TileGrid,
    memory: Memory,
    spec: DeviceSpec,
    share: float = 1.0,
    tile_share: float = 1.0,
) -> Work:
    """Attention tile by tile: visible pairs count as work, of which a tile mask leaves a `share`, and of the tiles that
    are moved a `tile_share`. In addition to the results there is one delta per row. Behind the last-level cache all
    keys count.
    """
    traffic = _total_traffic(
        problem,
        bands,
        lambda band, dim, dim_v: cost.tiled_forward(band, grid, dim, dim_v, tile_share),
        lambda band, dim, dim_v: cost.tiled_backward(band, grid, dim, dim_v, tile_share),
    )
    pairs = round(_total(bands, Band.count_pairs) * problem.num_heads * share)
    scores = _total(bands, lambda band: cost.scores_computed(band, grid)) * problem.num_heads
    moved = _bytes(problem, traffic, round(tile_share * scores))
    from_memory = min(moved, _behind_cache(problem, bands, grid, spec))
    delta = problem.total_q * problem.num_heads * problem.accumulate_dtype.itemsize if problem.needs_grad else 0
    extra = memory.outputs + memory.gradients + delta
    flops = _flops(problem, pairs, cost.backward_flops)
    return _work(problem, spec, flops, traffic, moved, from_memory, extra)


def _flops(problem: AttentionProblem, pairs: int, backward: Callable[[int, int, int], int]) -> int:
    dims = problem.head_dim, problem.head_dim_v
    return cost.forward_flops(pairs, *dims) + (backward(pairs, *dims) if problem.needs_grad else 0)


def _work(
    problem: AttentionProblem, spec: DeviceSpec, flops: int, traffic: Traffic, moved: int, from_memory: int, extra: int
) -> Work:
    rate = spec.flops.get(problem.dtype)
    if rate is None or spec.bandwidth <= 0:
        return Work(flops, traffic, moved, from_memory, extra, None, None)
    compute, memory = flops / rate, from_memory / spec.bandwidth
    bound: Literal["compute", "memory"] = "compute" if compute >= memory else "memory"
    return Work(flops, traffic, moved, from_memory, extra, max(compute, memory), bound)


def _total(bands: Bands, count: Callable[[Band], int]) -> int:
    return sum(count(band) * times for band, times in bands.items())


def _total_traffic(
    problem: AttentionProblem,
    bands: Bands,
    forward: Callable[[Band, int, int], Traffic],
    backward: Callable[[Band, int, int], Traffic],
) -> Traffic:
    passes = (forward, backward) if problem.needs_grad else (forward,)
    parts = [
        one_pass(band, problem.head_dim, problem.head_dim_v) * (times * problem.num_heads)
        for band, times in bands.items()
        for one_pass in passes
    ]
    return functools.reduce(Traffic.__add__, parts, Traffic())


def _bytes(problem: AttentionProblem, traffic: Traffic, scores: int) -> int:
    """Traffic in bytes, with one element of bias and of mask read per score and pass."""
    extra = (problem.bias_dtype.itemsize if problem.bias_dtype else 0) + (1 if problem.mask_shape else 0)
    passes = 2 if problem.needs_grad else 1
    return traffic.bytes(problem.dtype.itemsize, problem.accumulate_dtype.itemsize) + extra * scores * passes


def _behind_cache(problem: AttentionProblem, bands: Bands, grid: TileGrid, spec: DeviceSpec) -> int:
    """Bytes that tiled attention takes from memory: everything once, and streamed rows once per wave of tiles."""
    size, heads, kv_heads = problem.dtype.itemsize, problem.num_heads, problem.num_kv_heads
    q_size = 1 if "q" in problem.fp8 else size
    # Bias and mask as they are stored, not expanded.
    stored = math.prod(problem.mask_shape) if problem.mask_shape else 0
    if problem.bias_shape is not None and problem.bias_dtype is not None:
        stored += math.prod(problem.bias_shape) * problem.bias_dtype.itemsize
    total = stored * (2 if problem.needs_grad else 1)
    for band, times in bands.items():
        q, out = band.seqlen_q * heads * problem.head_dim * q_size, band.seqlen_q * heads * problem.head_dim_v * size
        lse = band.seqlen_q * heads * problem.accumulate_dtype.itemsize
        keys = len(band.keys_seen(0, band.seqlen_q))
        kv = keys * problem.kv_bytes
        m_blocks, n_blocks = -(-band.seqlen_q // grid.block_m), -(-band.seqlen_k // grid.block_n)
        one = q + kv * _waves(kv // kv_heads, m_blocks * problem.group_size, spec) + out + lse
        if problem.needs_grad:
            # In: q, dout, lse, and out for delta; dq goes out. The keys come in and their gradients go out once.
            one += (q + out) * _waves((q + out) // heads, n_blocks, spec) + lse + out + q + 2 * kv
        total += one * times
    return total


def _waves(streamed: int, consumers: int, spec: DeviceSpec) -> int:
    """How often a stream comes from memory: once if the cache holds it, else once per wave of tiles."""
    return 1 if streamed <= spec.l2_bytes else max(1, -(-consumers // max(1, spec.num_sms)))
