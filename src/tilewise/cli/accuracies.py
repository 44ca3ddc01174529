"""How far attention in fp16, bf16 and FP8 is from fp64, with everything rounded as the kernels round it.

Measured on a subset of query rows against all keys. Quantising is that of tilewise.fp8; probabilities are rounded as
docs/contract.md says for tensor cores of that dtype, sums are fp32. So a CPU reproduces the rounding of an FP8 GPU, but
not the order of its sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import fp8
from tilewise.cli.activations import Sample, make_sample

__all__ = ["Measured", "Recipe", "measure", "recipes"]

HALF, BRAIN, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
# P is rounded as 2^8 P / max P.
P_UNIT = 2.0**8
# Rows of q at a time, which bounds the memory of fp64 scores.
ROWS_AT_ONCE = 256


class Recipe(NamedTuple):
    """How q, k and v are stored."""

    dtype: str
    granularity: str = ""
    rotation: bool = False

    @property
    def name(self) -> str:
        """Name in tables and plots."""
        return " ".join(
            filter(None, (self.dtype, self.granularity and f"per {self.granularity}", "rotated" * self.rotation))
        )


class Measured(NamedTuple):
    """RMS and largest error of one recipe on one distribution, and the magnitude of the exact output."""

    distribution: str
    recipe: Recipe
    rmse: float
    largest: float
    rms_out: float


def recipes() -> Iterator[Recipe]:
    """All recipes that are compared."""
    yield Recipe("fp16")
    yield Recipe("bf16")
    for granularity in ("tensor", "head", "block"):
        for rotation in (False, True):
            yield Recipe("fp8", granularity, rotation)


def measure(
    distribution: str, seqlen: int, heads: int, head_dim: int, rows: int, seed: int, announce: Callable[[str], None]
) -> tuple[list[Measured], str]:
    """Every recipe on one distribution, and a note that describes the tensors."""
    sample = make_sample(distribution, seqlen, heads, head_dim, seed, announce)
    step = max(1, seqlen // rows)
    chosen = torch.arange(step - 1, seqlen, step)
    truth = _attend(sample.q.double(), sample.k.double(), sample.v.double(), chosen, sample.causal, None)
    found = []
    for recipe in recipes():
        announce(f"{distribution}: {recipe.name}")
        error = _rounded(sample, recipe, chosen).double() - truth
        rmse, largest = float(error.square().mean().sqrt()), float(error.abs().max())
        found.append(Measured(distribution, recipe, rmse, largest, float(truth.square().mean().sqrt())))
    return found, sample.note


def _rounded(sample: Sample, recipe: Recipe, chosen: Tensor) -> Tensor:
    """The output rows as kernels would compute them, in fp16 (bf16 for bf16)."""
    if recipe.dtype != "fp8":
        dtype = HALF if recipe.dtype == "fp16" else BRAIN
        q, k, v = (t.to(dtype).float() for t in (sample.q, sample.k, sample.v))
        return _attend(q, k, v, chosen, sample.causal, dtype).to(dtype)
    options: dict[str, Any] = {"granularity": recipe.granularity}
    turned = options | {"rotation": recipe.rotation}
    q, k = (fp8.quantize(t, **turned).dequantize() for t in (sample.q, sample.k))
    v = fp8.quantize(sample.v, **options).dequantize()
    return _attend(q, k, v, chosen, sample.causal, E4M3).to(HALF)


def _attend(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, causal: bool, p_dtype: torch.dtype | None) -> Tensor:
    """Attention of the chosen rows in the dtype of its operands; P is rounded to `p_dtype` before the product
    with V.
    """
    pieces = []
    keys = torch.arange(k.shape[2])
    for rows in chosen.split(ROWS_AT_ONCE):
        s = q[:, :, rows] @ k.mT * q.shape[-1] ** -0.5
        if causal:
            s = s.masked_fill(keys > rows[:, None], -torch.inf)
        p = torch.exp(s - s.amax(-1, keepdim=True))
        total = p.sum(-1, keepdim=True)
        if p_dtype is E4M3:
            p = (p * P_UNIT).to(E4M3).to(p.dtype) / P_UNIT
        elif p_dtype is not None:
            p = p.to(p_dtype).to(p.dtype)
        pieces.append(p @ v / total)
    return torch.cat(pieces, 2)
