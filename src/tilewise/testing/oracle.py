"""Expected results: fp64 results of the reference backend on a case's rounded inputs, and the tolerances."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.testing.cases import GRADIENTS, Case
from tilewise.testing.implementations import call_api
from tilewise.testing.inputs import Inputs, make_inputs
from tilewise.testing.plain import SequenceView, dropout_factor, masked_scores, plain_attention, sequence_views
from tilewise.testing.quantised import dequantised
from tilewise.testing.results import Results, differentiate, dropout_seed
from tilewise.testing.threads import one_thread
from tilewise.testing.tolerances import Slack, slack_of


class Expectation(NamedTuple):
    """The reference (fp64, on the CPU), the tolerance of each result, and the dtype it must have."""

    reference: Results
    slack: dict[str, Slack]
    dtypes: dict[str, torch.dtype]


@functools.lru_cache(maxsize=8)
def expect(case: Case, coarse: bool = False) -> Expectation:
    """What an implementation must compute for a case; cached, because several are tested with the same cases.

    FP8 cases are compared with attention of the dequantised tensors; `coarse` adds the rounding of FP8 tensor cores.
    """
    inputs = dequantised(case, make_inputs(case))
    case = case.unquantised()
    dtypes = {"out": case.dtype, "lse": case.accumulate_dtype}
    dtypes |= {GRADIENTS[name]: getattr(inputs, name).dtype for name in case.wants_grad}
    with one_thread():
        reference = reference_results(case, inputs)
        plain = plain_results(case, inputs, coarse=coarse)
        terms = summed_terms(case, inputs)
        slack = {
            name: slack_of(
                reference[name], plain[name], terms[name], dtypes[name], case.accumulate_dtype, coarse=coarse
            )
            for name in case.results
        }
    return Expectation(reference, slack, dtypes)


def reference_results(case: Case, inputs: Inputs) -> Results:
    """The fp64 reference backend on fp64 copies of the inputs. Of tile masks it gets the dense tensor they are made
    of, so that making them is judged too.
    """
    case = dataclasses.replace(case, tiles=False)
    return differentiate(case, inputs.double(), lambda leaves: call_api(case, leaves, "reference"))


def plain_results(case: Case, inputs: Inputs, *, coarse: bool = False) -> Results:
    """Plain PyTorch in the case's dtype. lse comes from fp32 scores, because it is never rounded to half precision."""
    seed = dropout_seed(case)
    rounded = inputs.map(lambda name, t: t.to(case.dtype) if name in ("q", "k", "v") else t)
    results = differentiate(case, rounded, lambda leaves: plain_attention(case, leaves, seed, coarse=coarse))
    if case.dtype in (torch.float16, torch.bfloat16):
        with torch.no_grad():
            results["lse"] = plain_attention(case, inputs.float(), seed)[1]
    return results


def summed_terms(case: Case, inputs: Inputs) -> Results:
    """For every result the sum of the absolute values of its terms, in fp64: rounding errors are relative to it."""
    inputs = inputs.double()
    parts = [_terms_of(case, inputs, view) for view in sequence_views(case, inputs)]
    every = ("out", "lse", *GRADIENTS.values())
    return {name: torch.cat([p[name].flatten() for p in parts] or [torch.zeros(0)]) for name in every}


class Weights(NamedTuple):
    """The probabilities of a sequence, also as large as the rounding of their scores can make them; the shares of the
    sinks; the sum of the absolute terms of each score; and the factor of dropout.
    """

    exact: Tensor
    p: Tensor
    sinks: Tensor
    sizes: Tensor
    keep: Tensor | float


def weights_of(case: Case, inputs: Inputs, view: SequenceView) -> Weights:
    """A score is off by eps times its own terms, and a probability by that much relatively."""
    s = masked_scores(case, inputs, view)
    terms = scale_of(case) * (view.q.abs() @ view.k.abs().transpose(1, 2)) + s.abs()
    sizes = torch.where(s == -math.inf, 0.0, terms)
    sinks = s.new_full((case.num_heads,), -math.inf) if inputs.sinks is None else inputs.sinks
    lse = torch.logsumexp(torch.cat([s, sinks[:, None, None].expand(-1, s.shape[1], 1)], -1), -1)
    shift = torch.where(lse == -math.inf, 0.0, lse)
    exact = torch.exp(s - shift[..., None])
    keep = dropout_factor(case, view, dropout_seed(case)) if case.dropout > 0.0 else 1.0
    return Weights(exact, exact * (1.0 + sizes), torch.exp(sinks[:, None] - shift), sizes, keep)


def scale_of(case: Case) -> float:
    """The size of the factor of the scores."""
    return abs(1.0 / math.sqrt(case.head_dim) if case.scale is None else case.scale)


def _terms_of(case: Case, inputs: Inputs, view: SequenceView) -> Results:
    q, k, v = (t.abs() for t in (view.q, view.k, view.v))
    dout, dlse = (t.abs() for t in sequence_cotangents(case, inputs, view))
    exact, p, sink_p, sizes, keep = weights_of(case, inputs, view)
    out, kept, scale = (exact * keep) @ view.v, p * keep, scale_of(case)
    dp = dout @ v.transpose(1, 2)
    # delta = rowsum(dout * out) uses the saved out, which is rounded to its dtype in every element.
    rounding = torch.finfo(case.dtype).eps / torch.finfo(case.accumulate_dtype).eps
    saved = rounding * torch.linalg.vector_norm(dout * out, dim=-1, keepdim=True)
    pull = (kept * dp).sum(-1, keepdim=True) + dlse[..., None]
    ds = kept * dp + p * pull + exact * saved
    per_kv_head = (case.num_kv_heads, case.num_heads // case.num_kv_heads)
    return {
        "out": kept @ v,
        "lse": sizes.amax(-1, keepdim=True) if sizes.shape[-1] else sizes.new_zeros(1),
        "dq": scale * (ds @ k),
        "dk": scale * (ds.transpose(1, 2) @ q).unflatten(0, per_kv_head).sum(1),
        "dv": (kept.transpose(1, 2) @ dout).unflatten(0, per_kv_head).sum(1),
        "dbias": reduced(case, ds),
        "dsinks": (sink_p * (pull + saved).squeeze(-1)).sum(-1),
    }


def largest_scores(case: Case) -> tuple[Tensor, Tensor]:
    """(the largest score of each head, how far it may be off), in fp64 by plain PyTorch."""
    inputs = dequantised(case, make_inputs(case)).double()
    case = case.unquantised()
    largest = torch.full((case.num_heads,), -math.inf, dtype=torch.float64)
    sizes = torch.zeros(case.num_heads, dtype=torch.float64)
    scale = scale_of(case)
    for view in sequence_views(case, inputs):
        s = masked_scores(case, inputs, view)
        if s.numel():
            largest = torch.maximum(largest, s.amax((1, 2)))
            terms = scale * (view.q.abs() @ view.k.abs().transpose(1, 2)) + s.nan_to_num(neginf=0.0).abs()
            sizes = torch.maximum(sizes, terms.amax((1, 2)))
    # The tanh instruction of GPUs is off by 2^-11 of the cap.
    return largest, 8 * torch.finfo(case.accumulate_dtype).eps * sizes + (case.softcap or 0.0) * 2.0**-11


def sequence_cotangents(case: Case, inputs: Inputs, view: SequenceView) -> tuple[Tensor, Tensor]:
    """Dout and dlse of one sequence, zeros for those the case has not."""
    if case.kind == "dense":
        dout = inputs.dout[view.sequence]
        dout, dlse = dout.transpose(0, 1) if case.layout == "bshd" else dout, inputs.dlse[view.sequence]
    else:
        dout, dlse = inputs.dout[view.rows].transpose(0, 1), inputs.dlse[:, view.rows]
    zero = torch.zeros((), device=dout.device)
    return (
        dout if "out" in case.cotangents else zero.expand(dout.shape).double(),
        dlse if "lse" in case.cotangents else zero.expand(dlse.shape).double(),
    )


def reduced(case: Case, ds: Tensor) -> Tensor:
    """Summed along the dimensions that bias broadcasts over (within the sequence)."""
    for dim, letter in enumerate(case.bias.rjust(4, "1")[1:]):
        ds = ds.sum(dim, keepdim=True) if letter == "1" else ds
    return ds
