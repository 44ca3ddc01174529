"""What can be tested: backends of tilewise through its public API, and foreign implementations through adapters."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewise import api, dispatch, validation
from tilewise import device as devices
from tilewise.backends.base import Differentiating
from tilewise.operands import Flags, Operands
from tilewise.problem import AttentionProblem
from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs, make_inputs
from tilewise.testing.quantised import attended
from tilewise.testing.results import Results, differentiate, dropout_seed

__all__ = ["BackendImplementation", "Implementation", "TorchSDPA", "call_api"]


class Implementation(Protocol):
    """Anything that computes attention: says which cases it takes, then computes them with gradients."""

    @property
    def name(self) -> str:
        """Its name in reports."""

    @property
    def device(self) -> torch.device:
        """The device of its inputs."""

    def supports(self, case: Case) -> str | None:
        """None if it takes the case, else the reason why not."""

    def run(self, case: Case, inputs: Inputs) -> Results:
        """out, lse (if it has one) and the gradients the case asks for, by name."""


class BackendImplementation:
    """A backend of tilewise, called by name through `attention`, `attention_varlen` and `attention_paged`.

    >>> BackendImplementation("reference").supports(Case()) is None
    True
    """

    def __init__(self, name: str, device: torch.device | str = "cpu") -> None:
        self.name = name
        self.device = torch.device(device)

    def rounds_p(self, case: Case) -> bool:
        """Whether probabilities are rounded to e4m3, as docs/contract.md allows for FP8 tensor cores."""
        return self.name == "hopper" and case.fp8 not in ("", "kv")

    def supports(self, case: Case, *, higher: bool = False) -> str | None:
        """The backend's answer for the problem of the case, or for tangents and second derivatives of it."""
        backend = dispatch.load(self.name)
        inputs = make_inputs(case, self.device)
        spec = devices.of(self.device)
        problem = dataclasses.replace(_problem(case, inputs, self.name), higher=higher)
        if higher and not isinstance(backend, Differentiating):
            return "has no tangents (jvp) and no second derivatives"
        return backend.unavailable() or backend.supports(problem, spec)

    def run(self, case: Case, inputs: Inputs) -> Results:
        """The public API with `backend=` this one."""
        return differentiate(case, inputs, lambda leaves: call_api(case, leaves, self.name))


class TorchSDPA:
    """torch.nn.functional.scaled_dot_product_attention, on the features it has; it returns no lse."""

    name = "torch SDPA"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def supports(self, case: Case) -> str | None:
        """Dense attention with mask or bias, scale, GQA, and causal where top-left and bottom-right are the same."""
        refusals = {
            "only dense tensors": case.kind != "dense",
            "no window": case.window is not None,
            "no ALiBi": bool(case.alibi),
            "no softcap": case.softcap is not None,
            "no sinks": case.sinks,
            "no FP8": bool(case.fp8),
            "its dropout has another random number generator": case.dropout > 0.0,
            "no lse, so no gradient through it": case.cotangents != ("out",) and bool(case.wants_grad),
            "causal is top-left, which is another mask for unequal lengths": case.causal
            and case.seqlen_q != case.seqlen_k,
            "causal excludes a mask": case.causal and bool(case.mask or case.bias),
            "one of mask and bias": bool(case.mask and case.bias),
            "a bias of another dtype": case.side_dtype not in (None, case.dtype) and bool(case.bias),
            "causal with a negative scale turns its -inf into inf": case.causal and (case.scale or 1.0) < 0.0,
        }
        return next((reason for reason, refused in refusals.items() if refused), None)

    def run(self, case: Case, inputs: Inputs) -> Results:
        """SDPA with heads-first tensors; the results lack lse."""

        def attend(leaves: Inputs) -> tuple[Tensor, Tensor]:
            swap = case.layout == "bshd"
            q, k, v = (t.transpose(1, 2) if swap else t for t in (leaves.q, leaves.k, leaves.v))
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=leaves.bias if leaves.mask is None else leaves.mask, is_causal=case.causal,
                scale=case.scale, enable_gqa=case.num_heads != case.num_kv_heads,
            )  # fmt: skip
            return (out.transpose(1, 2) if swap else out), out.new_zeros(())

        results = differentiate(case, inputs, attend)
        del results["lse"]
        return results


def call_api(case: Case, inputs: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    """(out, lse) of the case's public function."""
    max_seqlen_q, max_seqlen_k = _bounds(case)
    q, k, v = attended(case, inputs)
    named: dict[str, Any] = {
        "causal": case.causal, "window": case.window, "bias": inputs.bias, "mask": inputs.mask,
        "alibi_slopes": inputs.alibi_slopes, "softcap": case.softcap, "sinks": inputs.sinks, "scale": case.scale,
        "deterministic": case.deterministic, "backend": backend,
    }  # fmt: skip
    if case.kind != "paged":
        named |= {"dropout": case.dropout, "seed": dropout_seed(case)}
    if case.kind == "dense":
        return api.attention(q, k, v, layout=case.layout, return_lse=True, **named)
    named |= {"cu_seqlens_q": inputs.cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
    if case.kind == "varlen":
        named |= {"cu_seqlens_k": inputs.cu_seqlens_k, "max_seqlen_k": max_seqlen_k}
        return api.attention_varlen(q, k, v, return_lse=True, **named)
    named |= {"block_table": inputs.block_table, "seqlens_k": inputs.seqlens_k}
    return api.attention_paged(q, k, v, return_lse=True, **named)


def _bounds(case: Case) -> tuple[int | None, int | None]:
    """The longest lengths as the call gets them: dense and decoding calls take none, pages none for keys."""
    if case.kind == "dense" or case.bounds == "none":
        return None, None
    return None if case.decode else case.seqlen_q, None if case.kind == "paged" else case.seqlen_k


def _problem(case: Case, inputs: Inputs, backend: str) -> AttentionProblem:
    left, right = case.window or (None, None)
    max_seqlen_q, max_seqlen_k = _bounds(case)
    flags = Flags(
        causal=case.causal, window_left=left, window_right=right, scale=case.scale, softcap=case.softcap,
        dropout=case.dropout, layout=case.layout, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        deterministic=case.deterministic, needs_grad=bool(case.wants_grad), backend=backend,
    )  # fmt: skip
    packed = "paged" if case.kind == "paged" else "packed"
    layouts = (case.layout,) if case.kind == "dense" else ("packed", packed)
    qkv, scales = validation.unwrapped(*attended(case, inputs), *layouts)
    named = {name: getattr(inputs, name) for name in Operands._fields[3:] if hasattr(inputs, name)}
    operands, flags = validation.with_scales(Operands(*qkv, **named), flags, scales)
    return validation.problem_of(case.kind, operands, flags)
