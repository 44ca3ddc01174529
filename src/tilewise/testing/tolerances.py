"""How wrong a result may be, derived from the data in this one place.

For every result x with fp64 reference `ref`, plain PyTorch in the same dtype `pt`, and `terms`, the sum of absolute
values of everything that was added up to make it:

    max |x - ref| <= 2 max |pt - ref| + 4 ulp(max |ref|) + 2 eps max(terms)
    rms (x - ref) <= 2 rms (pt - ref) + ½ ulp(rms ref)   + 1 eps rms(terms)

ulp is of x's dtype, eps of the accumulation dtype. The last summand is what any order of summation in the accumulation
dtype may lose when large terms cancel, such as the gradient of a softmax over a single key, whose reference is 0.
Infinities must be where the reference has them; NaN never passes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

PT_FACTOR = 2.0
MAX_ULPS, RMS_ULPS = 4.0, 0.5
MAX_EPS, RMS_EPS = 2.0, 1.0
# Hopper's FP8 tensor cores keep about 14 bits of a sum.
COARSE_EPS = 2.0**-13
# In single precision, rounding cannot explain more than this. A tolerance derived from it would accept anything.
IMPLAUSIBLE, IMPLAUSIBLE_EPS = 1e-3, 16.0


class Measure(NamedTuple):
    """Largest and root-mean-square value of a tensor's finite elements."""

    largest: float
    rms: float


# The tolerance of a result.
Slack = Measure


def measure(values: Tensor) -> Measure:
    """Measure a tensor; an empty one has no error."""
    values = values.double()
    length = float(torch.linalg.vector_norm(values))
    if not math.isfinite(length):
        values = values[torch.isfinite(values)]
        length = float(torch.linalg.vector_norm(values))
    if values.numel() == 0:
        return Measure(0.0, 0.0)
    return Measure(float(values.abs().max()), length / math.sqrt(values.numel()))


def ulp(magnitude: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers of the dtype at that magnitude."""
    info = torch.finfo(dtype)
    return float(info.eps) * 2.0 ** math.floor(math.log2(max(magnitude, float(info.tiny))))


def slack_of(
    ref: Tensor, pt: Tensor, terms: Tensor, dtype: torch.dtype, accumulate_dtype: torch.dtype, *, coarse: bool = False
) -> Slack:
    """The tolerance of one result, see the module's docstring; `coarse` sums are those of FP8 tensor cores."""
    if not torch.equal(torch.isfinite(ref), torch.isfinite(pt)):
        raise ValueError("plain PyTorch is not finite where the reference is: no tolerance can be derived")
    error = measure(pt.double() - ref)
    size, summed = measure(ref), measure(terms)
    eps = COARSE_EPS if coarse else float(torch.finfo(accumulate_dtype).eps)
    if (
        dtype == accumulate_dtype
        and error.largest > IMPLAUSIBLE * size.largest + IMPLAUSIBLE_EPS * eps * summed.largest
    ):
        raise ValueError(f"plain PyTorch is {error.largest:.3e} away from the reference: one of them is wrong")
    return Slack(
        PT_FACTOR * error.largest + MAX_ULPS * ulp(size.largest, dtype) + MAX_EPS * eps * summed.largest,
        PT_FACTOR * error.rms + RMS_ULPS * ulp(size.rms, dtype) + RMS_EPS * eps * summed.rms,
    )


def judge(name: str, got: Tensor, ref: Tensor, slack: Slack) -> str | None:
    """None if `got` is good enough, else what is wrong with it: worst element, tolerance, RMS."""
    if got.shape != ref.shape:
        return f"{name}: shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    got = got.detach().cpu().double()
    error = (got - ref).abs()
    found = measure(error)  # of the finite ones
    finite = torch.isfinite(error)
    if not bool(finite.all()):
        strange = ~finite & (got != ref)
        if bool(strange.any()):
            return f"{name}: {int(strange.sum())} of {got.numel()} elements {_at(got, ref, strange.double())}"
        error = torch.where(finite, error, 0.0)
    if found.largest <= slack.largest and found.rms <= slack.rms:
        return None
    return (
        f"{name}: max error {found.largest:.3e} (allowed {slack.largest:.3e}), "
        f"rms {found.rms:.3e} (allowed {slack.rms:.3e}), "
        f"{int((error > slack.largest).sum())} of {got.numel()} elements too far; {_at(got, ref, error)}"
    )


def _at(got: Tensor, ref: Tensor, badness: Tensor) -> str:
    index = tuple(int(i) for i in torch.unravel_index(badness.argmax(), badness.shape))
    return f"worst at {list(index)}: got {float(got[index]):.9g}, expected {float(ref[index]):.9g}"
