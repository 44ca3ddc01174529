"""The CPU backend: every feature in fp32, bf16 and fp16, forward and backward, compiled for this processor on first
use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise import numerics
from tilewise.backends.base import Bound, Differentiating, Launch, QuantisedRows, Serving, TileShape
from tilewise.device import DeviceSpec
from tilewise.operands import Gradients, Operands, Tangents, Wanted
from tilewise.problem import AttentionProblem

__all__ = ["BACKEND", "CpuBackend"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 576


class CpuBackend(Serving, Differentiating):
    """Vector kernels that run on torch's own threads."""

    name = "cpu"
    # Keys are split after fixed numbers of them, whatever the batch and the threads. The largest score of a row is the
    # maximum that its softmax subtracts.
    honours = frozenset(
        (
            "causal", "window", "gqa", "head_dim_v", "alibi", "softcap", "bias", "mask", "tile mask", "sinks",
            "dropout", "fp8", "int8", "max_logits", "batch-invariant", "latent",
        )
    )  # fmt: skip

    def unavailable(self) -> str | None:
        """None if the compiler is installed."""
        from importlib.util import find_spec

        return None if find_spec("llvmlite") else "llvmlite is not installed; pip install llvmlite"

    def supports(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        """None, or the reason why not."""
        if device.type != "cpu":
            return f"runs on a CPU, the tensors are on {device.type}"
        if problem.dtype not in DTYPES:
            given = str(problem.dtype).removeprefix("torch.")
            return f"computes in fp32, so takes float32, bfloat16 and float16, not {given}"
        if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
            return f"head_dim and head_dim_v are at most {MAX_HEAD_DIM}"
        return None

    def tile_shape(self, problem: AttentionProblem, _device: DeviceSpec) -> TileShape:
        """Rows of a work item and keys of a tile."""
        from tilewise.backends.cpu.isa import host
        from tilewise.backends.cpu.schedule import Division, block_rows, bounds_of

        rows = block_rows(Division.of(problem), bounds_of(problem), torch.get_num_threads())
        return TileShape(rows, host().block_n)

    def forward(self, problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
        """(out, lse) of canonical operands."""
        from tilewise.backends.cpu import launch

        return launch.forward(problem, operands)

    def bind_forward(self, problem: AttentionProblem, operands: Operands, *, want_lse: bool) -> Bound | None:
        """A pass that reads the operands where they are: not with tile masks, and biases and sinks of other dtypes."""
        from tilewise.backends.cpu import bound

        return bound.bind_forward(problem, operands, want_lse)

    def bind_backward(
        self,
        problem: AttentionProblem,
        operands: Operands,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Bound | None:
        """A dense pass."""
        from tilewise.backends.cpu import bound

        return bound.bind_backward(problem, operands, out, lse, dout, dlse, wanted)

    def skips_tiles(self, problem: AttentionProblem) -> str:
        """How tile masks are read, for reports."""
        del problem
        return "panels of queries visit the tiles of keys that the mask lists; full tiles are not masked"

    def fp8_path(self, problem: AttentionProblem) -> str:
        """How 8-bit operands are read, for reports."""
        return f"read as {problem.codes} and multiplied by their scales in registers; computed in fp32"

    def backward(
        self,
        problem: AttentionProblem,
        operands: Operands,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Gradients:
        """Gradients of `sum(out * dout) + sum(lse * dlse)`."""
        from tilewise.backends.cpu import launch_backward

        return launch_backward.backward(problem, operands, out, lse, dout, dlse, wanted)

    def forward_tangent(
        self,
        problem: AttentionProblem,
        operands: Operands,
        tangents: Tangents,
        known: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(out, lse, out', lse'), all computed."""
        del known
        from tilewise.backends.cpu import launch_higher

        return launch_higher.forward_tangent(problem, operands, tangents)

    def backward_twice(
        self,
        problem: AttentionProblem,
        operands: Operands,
        tangents: Tangents,
        results: tuple[Tensor, Tensor, Tensor, Tensor],
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Gradients:
        """Second derivatives."""
        from tilewise.backends.cpu import launch_higher

        return launch_higher.backward_twice(problem, operands, tangents, results, dout, dlse, wanted)

    def write_rows(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
        """Writes rows of K and V into slots of pages: see tilewise.kv.writing."""
        from tilewise.backends.cpu import launch_pages

        launch_pages.write_rows(k, v, k_pages, v_pages, slots)

    def bind_write(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> Launch:
        """`write_rows` for tensors like these."""
        del slots
        from tilewise.backends.cpu import launch_pages

        return launch_pages.bind_write(k, v, k_pages, v_pages)

    def append_quantised(self, rows: QuantisedRows) -> None:
        """Writes rows of K and V, or of latents, into slots of 8-bit pages: see tilewise.kv.quantised."""
        from tilewise.backends.cpu import launch_pages

        launch_pages.append_quantised(rows)

    def splits_prefixes(self, problem: AttentionProblem, num_rows: int, device: DeviceSpec) -> bool:
        """Whether `attend_prefixes` suits such groups."""
        del num_rows
        return self.supports(problem, device) is None

    def attend_prefixes(
        self, problem: AttentionProblem, operands: Operands, num_rows: int, rows: Tensor | None, out: Tensor,
        lse: Tensor,
    ) -> None:  # fmt: skip
        """Attends groups of rows to their prefixes and merges into `out` and `lse`: see tilewise.cascade."""
        from tilewise.backends.cpu import launch

        q = operands.q[:num_rows] if rows is None else operands.q.index_select(0, rows)
        launch.forward_into(problem, operands._replace(q=q), rows, out, lse)

    def bind_prefixes(
        self, problem: AttentionProblem, operands: Operands, num_rows: int, *results: Tensor | None
    ) -> Launch:
        """`attend_prefixes` for operands, rows, out and lse with any strides."""
        del operands, results

        def attend(tensors: Sequence[Any], places: tuple[int, ...] | None = None, /) -> Sequence[Tensor]:
            del places
            given, results = tensors[: len(Operands._fields)], tensors[len(Operands._fields) :]
            self.attend_prefixes(problem, Operands(*given), num_rows, *results)
            return ()

        return attend

    def merge_rows(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | None) -> None:
        """Merges rows of a partial result over other keys into `out` and `lse`: see tilewise.cascade."""
        numerics.merge_rows(out, lse, part, part_lse, rows)

    def cache_state(self) -> Mapping[str, Any]:
        """Where compiled programs are kept, and how many of them for this version and processor."""
        from tilewise.backends.cpu import cache

        return cache.cache_state()

    def warmup(self, progress: Callable[[str, int, int], None]) -> None:
        """Compiles every program into the cache; `progress(name, done, total)` is called before each one."""
        from tilewise.backends.cpu.cache import warmup

        warmup(progress)


BACKEND = CpuBackend()
