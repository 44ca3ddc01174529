"""Conformance of tangents and second derivatives: as `check`, by the double backward of a case.

A case's gradients g = F'(x)^T (dout, dlse) are pulled back along random tangents x' of its operands. That gives out'
and lse' (the gradients of dout and dlse) and the second derivatives (the gradients of the operands).
"""

from __future__ import annotations

import dataclasses
import functools
import zlib

import torch
from torch import Tensor

from tilewise.testing.cases import GRADIENTS, Case
from tilewise.testing.conformance import Nonconformance, same_bits
from tilewise.testing.implementations import BackendImplementation, call_api
from tilewise.testing.inputs import Inputs, case_values, make_inputs
from tilewise.testing.oracle import Expectation, reduced, scale_of, sequence_cotangents, weights_of
from tilewise.testing.plain import SequenceView, plain_attention, sequence_views
from tilewise.testing.poison import uninitialised_is_nan
from tilewise.testing.results import Attend, Results, dropout_seed
from tilewise.testing.special import special_cases
from tilewise.testing.threads import one_thread
from tilewise.testing.tolerances import judge, slack_of

TANGENTS = {"out": "out'", "lse": "lse'"}
# Special cases that say nothing new about these passes, or take minutes: long sums, single gradients, decoding.
LEFT_OUT = ("long_", "grad_", "forward_only", "scale_0_decode", "scale_negative_decode", "window_of_31")


def higher_cases() -> list[Case]:
    """The special cases that have gradients: empty sequences, masked rows, magnitudes, packed, paged, mixtures."""
    return [case for case in special_cases() if case.wants_grad and not case.label.startswith(LEFT_OUT)]


def make_tangents(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """A random direction for every operand that has a gradient; NaN where the operand must not be read, and with
    other strides than the operand's where a case asks for odd ones.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"tangents of {case_values(case)!r}".encode()))
    found = {}
    for name in case.wants_grad:
        operand: Tensor = getattr(inputs, name)
        drawn = torch.randn(operand.shape, generator=generator).to(operand.dtype).to(operand.device)
        drawn = torch.where(operand.isnan(), operand, drawn)
        if case.strides != "contiguous" and drawn.dim() >= 2:
            drawn = drawn.transpose(-1, -2).contiguous().transpose(-1, -2)
        found[name] = drawn
    return found


def check_higher(case: Case, implementation: BackendImplementation) -> None:
    """Raise Nonconformance unless tangents and second derivatives are within the derived tolerance."""
    results = _run(case, implementation)
    with one_thread():
        expected = _expect(case)
        faults = [_fault(name, results[name], expected) for name in expected.reference]
    found = [fault for fault in faults if fault is not None]
    if found:
        raise Nonconformance(case, implementation, found)


def check_higher_repeatable(case: Case, implementation: BackendImplementation) -> None:
    """Raise Nonconformance unless two runs agree bit by bit."""
    one, two = _run(case, implementation), _run(case, implementation)
    faults = [f"{name}: a second run changes bits" for name in one if not same_bits(one[name], two[name])]
    if faults:
        raise Nonconformance(case, implementation, faults)


def _run(case: Case, implementation: BackendImplementation) -> Results:
    inputs = make_inputs(case, implementation.device)
    tangents = make_tangents(case, inputs)
    with uninitialised_is_nan():
        return _differentiate_twice(case, inputs, tangents, lambda leaves: call_api(case, leaves, implementation.name))


def _differentiate_twice(case: Case, inputs: Inputs, tangents: dict[str, Tensor], attend: Attend) -> Results:
    wanted = case.wants_grad
    leaves = inputs.map(lambda name, t: t.detach().requires_grad_(name in wanted))
    sources = [getattr(leaves, name) for name in wanted]
    results = dict(zip(("out", "lse"), attend(leaves), strict=True))
    given = {"out": inputs.dout, "lse": inputs.dlse}
    cotangents = {name: given[name].to(results[name].dtype).detach().requires_grad_() for name in case.cotangents}
    pulled = [name for name in cotangents if results[name].requires_grad]
    inner = [*cotangents.values(), *sources]
    names = [*(TANGENTS[name] for name in cotangents), *(GRADIENTS[name] for name in wanted)]
    zeros = {name: torch.zeros_like(t) for name, t in zip(names, inner, strict=True)}
    if not pulled:
        return zeros
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
        [results[name] for name in pulled],
        sources,
        [cotangents[name] for name in pulled],
        create_graph=True,
        allow_unused=True,
    )
    pairs = [
        (gradient, tangents[name].to(gradient.dtype))
        for name, gradient in zip(wanted, gradients, strict=True)
        if gradient is not None and gradient.requires_grad
    ]
    if not pairs:
        return zeros
    second = torch.autograd.grad(
        [gradient for gradient, _ in pairs],
        inner,
        [tangent for _, tangent in pairs],
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(names, second, strict=True))


@functools.lru_cache(maxsize=8)
def _expect(case: Case) -> Expectation:
    inputs = make_inputs(case)
    tangents = make_tangents(case, inputs)
    wide = {name: t.double().contiguous() for name, t in tangents.items()}
    dense = dataclasses.replace(case, tiles=False)
    reference = _differentiate_twice(case, inputs.double(), wide, lambda leaves: call_api(dense, leaves, "reference"))
    plain = _differentiate_twice(
        case, inputs, tangents, lambda leaves: plain_attention(case, leaves, dropout_seed(case))
    )
    if case.dtype in (torch.float16, torch.bfloat16) and "lse'" in reference:
        # lse' is summed in fp32, never in half precision.
        plain["lse'"] = _differentiate_twice(
            case,
            inputs.float(),
            {name: t.float() for name, t in tangents.items()},
            lambda leaves: plain_attention(case, leaves, dropout_seed(case)),
        )["lse'"]
    parts = [_terms(case, inputs.double(), wide, view) for view in sequence_views(case, inputs.double())]
    dtypes = {"out'": case.dtype, "lse'": case.accumulate_dtype}
    dtypes |= {GRADIENTS[name]: getattr(inputs, name).dtype for name in case.wants_grad}
    slack = {}
    for name, expected in reference.items():
        terms = torch.cat([part[name].flatten() for part in parts] or [torch.zeros(0)])
        slack[name] = slack_of(expected, plain[name], terms, dtypes[name], case.accumulate_dtype)
    return Expectation(reference, slack, dtypes)


def _terms(case: Case, inputs: Inputs, tangents: dict[str, Tensor], view: SequenceView) -> Results:
    """For every result the sum of the absolute values of its terms (docs/derivatives.md with every sign positive)."""
    along = _along(case, inputs, tangents, view)
    q, k, v, dot_q, dot_k, dot_v = (t.abs() for t in (view.q, view.k, view.v, along.q, along.k, along.v))
    dout, dlse = (t.abs() for t in sequence_cotangents(case, inputs, view))
    exact, p, sink_p, _, keep = weights_of(case, inputs, view)
    scale = scale_of(case)
    raw = scale * (dot_q @ k.transpose(1, 2) + q @ dot_k.transpose(1, 2))
    dot_s = raw
    if "bias" in tangents and inputs.bias is not None:
        shape = (case.batch, case.num_heads, case.seqlen_q, case.seqlen_k)
        dot_s = dot_s + tangents["bias"].expand(shape)[view.sequence, :, : p.shape[1], : p.shape[2]].abs()
    dot_sinks = tangents["sinks"].abs()[:, None] if "sinks" in tangents else p.new_zeros(case.num_heads, 1)
    m = ((p * dot_s).sum(-1) + sink_p * dot_sinks)[..., None]
    centred = p * (dot_s + m)
    x, y = keep * (dout @ v.transpose(1, 2)), keep * (dout @ dot_v.transpose(1, 2))
    dot_out = (centred * keep) @ v + (p * keep) @ dot_v
    # out and out' are read back as they were rounded to their dtype.
    rounding = torch.finfo(case.dtype).eps / torch.finfo(case.accumulate_dtype).eps
    delta = (p * x).sum(-1, keepdim=True) + dlse[..., None]
    rate = (centred * x + p * y).sum(-1, keepdim=True)
    delta = delta + rounding * torch.linalg.vector_norm(dout * ((exact * keep) @ view.v), dim=-1, keepdim=True)
    rate = rate + rounding * torch.linalg.vector_norm(dout * dot_out, dim=-1, keepdim=True)
    pull = x + delta
    ds, h = p * pull, centred * pull + p * (y + rate)
    w = h if case.softcap is None else h + 2.0 * ds * raw / case.softcap
    per_kv_head = (case.num_kv_heads, case.num_heads // case.num_kv_heads)
    return {
        "out'": dot_out,
        "lse'": m,
        "dq": scale * (w @ k + ds @ dot_k),
        "dk": scale * (w.transpose(1, 2) @ q + ds.transpose(1, 2) @ dot_q).unflatten(0, per_kv_head).sum(1),
        "dv": ((centred * keep).transpose(1, 2) @ dout).unflatten(0, per_kv_head).sum(1),
        "dbias": reduced(case, h),
        "dsinks": (sink_p * (delta * (dot_sinks[..., None] + m) + rate).squeeze(-1)).sum(-1),
    }


def _along(case: Case, inputs: Inputs, tangents: dict[str, Tensor], view: SequenceView) -> SequenceView:
    """The tangents of one sequence's q, k and v."""
    zeros = {name: torch.zeros_like(getattr(inputs, name)) for name in ("q", "k", "v")}
    moved = inputs.map(lambda name, t: tangents.get(name, zeros[name]) if name in zeros else t)
    return next(found for found in sequence_views(case, moved) if found.sequence == view.sequence)


def _fault(name: str, got: Tensor, expected: Expectation) -> str | None:
    if got.dtype != expected.dtypes[name]:
        return f"{name}: dtype {got.dtype}, expected {expected.dtypes[name]}"
    return judge(
        f"second {name}" if name.startswith("d") else name, got, expected.reference[name], expected.slack[name]
    )
