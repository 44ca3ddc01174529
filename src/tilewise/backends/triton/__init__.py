"""The portable GPU backend: every feature of the contract in plain Triton, on NVIDIA GPUs from Ampere on.

With TRITON_INTERPRET=1 the kernels run on CPU tensors in Triton's interpreter: slowly, for tests.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import Bound, Differentiating, Launch, QuantisedRows, Serving, TileShape
from tilewise.backends.gpu import releases, trial
from tilewise.backends.gpu.backend import GpuBackend, too_long
from tilewise.dequantising import dequantised
from tilewise.device import DeviceSpec
from tilewise.operands import Gradients, Operands, Tangents, Wanted
from tilewise.problem import AttentionProblem

__all__ = ["BACKEND", "TritonBackend"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM, MAX_HEAD_DIM_V = 576, 512
# Of tangents and second derivatives, which hold twice as many tiles.
MAX_HIGHER_DIM = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}
# Shared memory of the smallest dK/dV tile (16 x 16) in fp32 at a padded head_dim of 512, as compiled.
WIDE_SINGLE_SMEM = 132096


class TritonBackend(GpuBackend, Serving, Differentiating):
    """Forward, backward, tangents, second derivatives and split-KV decode for dense, packed and paged problems."""

    name = "triton"
    # For a batch-invariant problem, decoding splits keys after a fixed number of them. Programs raise the largest score
    # of their head with the maximum of their rows.
    honours = frozenset(
        (
            "causal", "window", "gqa", "head_dim_v", "alibi", "softcap", "bias", "mask", "tile mask", "sinks",
            "dropout", "fp8", "int8", "max_logits", "batch-invariant", "latent",
        )
    )  # fmt: skip

    def unavailable(self) -> str | None:
        """What is missing on this machine, if anything."""
        if (missing := releases.missing()) is not None:
            return missing
        if _interpreted():
            return None
        if not torch.cuda.is_available():
            return "no CUDA device is visible to torch (TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"
        return trial.failure(self)

    def supports(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        """Everything in the contract but fp64, on compute capability 8.0 or newer."""
        if (outdated := releases.outdated()) is not None:
            return outdated
        if problem.dtype not in DTYPES:
            return f"dtype {problem.dtype} is not one of float16, bfloat16, float32"
        if problem.head_dim > MAX_HEAD_DIM or problem.head_dim_v > MAX_HEAD_DIM_V:
            given = f"{problem.head_dim} and {problem.head_dim_v}"
            return f"head_dim and head_dim_v are at most {MAX_HEAD_DIM} and {MAX_HEAD_DIM_V}, not {given}"
        if problem.head_dim > MAX_HEAD_DIM_V and (problem.needs_grad or problem.tiles_shape is not None):
            asked = "gradients" if problem.needs_grad else "tile masks"
            fix = ": expand latents into keys and values of each head" if problem.latent else ""
            return f"{asked} take head_dim up to {MAX_HEAD_DIM_V}, not {problem.head_dim}{fix}"
        if problem.higher and (widest := max(problem.head_dim, problem.head_dim_v)) > MAX_HIGHER_DIM[problem.dtype]:
            return (
                f"tangents (jvp) and second derivatives in {problem.dtype} take head_dim up to "
                f"{MAX_HIGHER_DIM[problem.dtype]}, not {widest}: their tiles do not fit registers and shared memory"
            )
        if problem.batch_invariant and problem.needs_grad:
            return "deterministic='batch' is for results without gradients, whose sums are cut by the batch"
        if (reason := too_long(problem)) is not None:
            return reason
        if device.type == "cpu":
            return (
                None
                if _interpreted()
                else "the tensors are on the CPU (TRITON_INTERPRET=1 would interpret the kernels there)"
            )
        if device.type != "cuda" or device.capability is None:
            return f"device type {device.type!r} is not an NVIDIA GPU"
        if device.capability < (8, 0):
            return f"{device.name} has compute capability {device.capability[0]}.{device.capability[1]}, 8.0 is needed"
        wide = max(problem.head_dim, problem.head_dim_v) > 256 and problem.dtype == torch.float32
        if wide and problem.needs_grad and device.smem_bytes < WIDE_SINGLE_SMEM:
            return (
                f"fp32 gradients with head_dim over 256 need {WIDE_SINGLE_SMEM} bytes of shared memory in {device.name}"
            )
        return None

    def tile_shape(self, problem: AttentionProblem, device: DeviceSpec) -> TileShape:
        """The forward tile."""
        from tilewise.backends.triton.configs import config_of, is_parted, latent_config

        if is_parted(problem):
            config = latent_config(problem, device, problem.seqlen_q * problem.group_size)
        else:
            config = config_of(problem, device, "forward")
        return TileShape(config.block_m, config.block_n)

    def fp8_path(self, problem: AttentionProblem) -> str:
        """How 8-bit operands are computed, for `explain()`."""
        if problem.head_dim % 2 or problem.head_dim_v % 2:
            return (
                "dequantised to fp32 before the kernels: rows of an odd head_dim cannot be read two columns at a time"
            )
        dtype = "fp32" if problem.dtype == torch.float32 else "fp16"
        read = f"{', '.join(problem.fp8)} read as {problem.codes} and widened to {dtype} in registers"
        return f"{read}; scales go into scores and sums"

    def skips_tiles(self, problem: AttentionProblem) -> str:
        """How tile masks are read, for `explain()`."""
        del problem
        return "programs walk the tiles that the mask lists; bits are read in tiles that are visible in part"

    def forward(self, problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
        """(out, lse); see Backend."""
        if problem.fp8 and not _read_in_pairs(operands):
            # In fp32: bf16 would round lse visibly, and fp16 may overflow on a code times its scale.
            plain, operands = dequantised(problem, operands._replace(out=None), torch.float32)
            out, lse = super().forward(plain, operands)
            return out.to(problem.dtype), lse
        return super().forward(problem, operands)

    def bind_forward(self, problem: AttentionProblem, operands: Operands, *, want_lse: bool) -> Bound | None:
        """See Backend."""
        if problem.fp8 and not _read_in_pairs(operands):
            return None
        return super().bind_forward(problem, operands, want_lse=want_lse)

    def forward_tangent(
        self,
        problem: AttentionProblem,
        operands: Operands,
        tangents: Tangents,
        known: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(out, lse, out', lse'); see Differentiating."""
        from tilewise.backends.triton import launch_higher

        return launch_higher.forward_tangent(problem, operands, tangents, known)

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
        """Second derivatives; see Differentiating."""
        from tilewise.backends.triton import launch_higher

        return launch_higher.backward_twice(problem, operands, tangents, results, dout, dlse, wanted)

    def write_rows(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
        """Writes rows of K and V into slots of pages: see tilewise.kv.writing."""
        from tilewise.backends.triton import serving

        serving.write_rows(k, v, k_pages, v_pages, slots)

    def bind_write(self, *tensors: Tensor) -> Launch:
        """`write_rows` for tensors like these."""
        from tilewise.backends.triton import serving

        return serving.bind_write(*tensors)

    def quantize(self, x: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """(data, scale) in e4m3: see tilewise.fp8.quantisation."""
        from tilewise.backends.triton import quantising

        return quantising.quantize(x, *arguments, **options)

    def append_quantised(self, rows: QuantisedRows) -> None:
        """Writes rows of K and V, or of latents, into slots of 8-bit pages: see tilewise.kv.quantised."""
        from tilewise.backends.triton import serving

        serving.append_quantised(rows)

    def bind_rotated(
        self, tensors: Sequence[Tensor | None], *, interleaved: bool, norm_eps: float | None, in_place: bool
    ) -> Launch:
        """A launch that normalises and rotates q and k, writes k and v: see tilewise.kv.rotated."""
        from tilewise.backends.triton import rotating

        return rotating.bind_rotated(tensors, interleaved=interleaved, norm_eps=norm_eps, in_place=in_place)

    def splits_prefixes(self, problem: AttentionProblem, num_rows: int, device: DeviceSpec) -> bool:
        """Whether `attend_prefixes` suits such groups. Where rows alone fill the device, the ordinary kernels do."""
        launch = importlib.import_module("tilewise.backends.triton.prefix")
        if problem.head_dim > MAX_HEAD_DIM_V or self.supports(problem, device) is not None:
            return False
        return bool(launch.num_splits(problem, num_rows, device) > 1)

    def attend_prefixes(
        self,
        problem: AttentionProblem,
        operands: Operands,
        num_rows: int,
        rows: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Attends rows to the prefixes of their groups and merges into `out` and `lse`: see tilewise.cascade."""
        from tilewise.backends.triton import prefix

        if problem.fp8 and not _read_in_pairs(operands):
            problem, operands = dequantised(problem, operands, torch.float32)
        prefix.attend_prefixes(problem, operands, num_rows, rows, out, lse)

    def bind_prefixes(
        self, problem: AttentionProblem, operands: Operands, num_rows: int, *results: Tensor | None
    ) -> Launch | None:
        """`attend_prefixes` bound to operands, rows, out and lse with such strides. None if e4m3 is converted first."""
        if problem.fp8 and not _read_in_pairs(operands):
            return None
        bound: Launch = importlib.import_module("tilewise.backends.triton.prefix").bind_prefixes(
            problem, operands, num_rows, *results
        )
        return bound

    def bind_after(
        self, own: Bound, prefixes: Launch, count: int, unread: Sequence[str], problem: AttentionProblem
    ) -> Bound | None:
        """One pass for the own keys (`problem`; of any GPU backend) and the prefixes. It takes the first `count`
        operands and the tensors of a hint, and does not make the results in `unread`.
        """
        both: Bound = importlib.import_module("tilewise.backends.triton.prefix").bind_after(
            own, prefixes, count, unread, problem
        )
        return both

    def merge_rows(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | None) -> None:
        """Merges rows of a partial result over other keys into `out` and `lse`: see tilewise.cascade."""
        from tilewise.backends.triton import serving

        serving.merge_rows(out, lse, part, part_lse, rows)


def _read_in_pairs(operands: Operands) -> bool:
    """Whether two columns of every 8-bit row can be read as one 16-bit number: no odd head_dim, stride or address."""
    quantised = [t for t in operands[:3] if t.dtype in (torch.float8_e4m3fn, torch.int8)]
    return all(t.shape[-1] % 2 == 0 and t.data_ptr() % 2 == 0 and _even(t.stride()[:-1]) for t in quantised)


def _even(strides: tuple[int, ...]) -> bool:
    return not any(stride % 2 for stride in strides)


def _interpreted() -> bool:
    if releases.missing() is not None:
        return False
    knobs = importlib.import_module("triton").knobs
    return bool(knobs.runtime.interpret)


BACKEND = TritonBackend()
