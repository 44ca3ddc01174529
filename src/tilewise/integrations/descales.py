"""FA3's descales: fp32 (batch, kv_heads) of e4m3 q, k, v; with one element the factor of all, None is 1."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec

import torch
from torch import Tensor

from tilewise.errors import InvalidProblem, Unsupported
from tilewise.fp8.container import E4M3, Fp8Tensor
from tilewise.integrations.translation import places
from tilewise.subclasses import check_class

__all__ = ["Descale", "Descales", "gradients_refused", "rescaled"]

Descale = Tensor | None
Others = ParamSpec("Others")
Three = tuple[Fp8Tensor, Fp8Tensor, Fp8Tensor]


class Descales(NamedTuple):
    """The three descales of a call."""

    q: Descale = None
    k: Descale = None
    v: Descale = None

    def containers(self, q: Tensor, k: Tensor, v: Tensor, batch: int, layout: Literal["bshd", "packed"]) -> Three:
        """Dense or packed operands with their descales."""

        def made(name: str, data: Tensor, descale: Descale) -> Fp8Tensor:
            return Fp8Tensor(data, _per_head(name, descale, batch, data), "head", layout)

        return made("q_descale", q, self.q), made("k_descale", k, self.k), made("v_descale", v, self.v)

    def paged(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: int) -> Three:
        """Packed q and pages, which several sequences may share: k's factor is applied to q, v's left to `rescaled`."""
        for name, tensor in (("q", q), ("v_cache", v_pages)):
            if tensor.dtype != E4M3:
                fix = "FP8 caches are attended by FP8 queries."
                raise InvalidProblem(name, "float8_e4m3fn as k_cache has", tensor.dtype, fix)
        self.check(batch, q)
        one = torch.ones(1, 1, 1, dtype=torch.float32, device=q.device)
        k, v = (Fp8Tensor(t, one.expand(t.shape[0], t.shape[2], 1), "page", "paged") for t in (k_pages, v_pages))
        both = _per_head("q_descale", self.q, batch, q) * _per_head("k_descale", self.k, batch, q)
        return Fp8Tensor(q, both, "head", "packed"), k, v

    def widened(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """FP8 q, k, v as bf16, and the factor of `out`. e4m3 fits bf16 exactly; only q * descale is rounded."""
        self.check(len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1, q)
        wide = q.float()
        for name, descale in (("q_descale", self.q), ("k_descale", self.k)):
            if descale is not None:
                wide = wide * _per_row(name, descale, q, cu_seqlens_q)
        out_scale = None if self.v is None else _per_row("v_descale", self.v, q, cu_seqlens_q)
        return wide.bfloat16(), k.bfloat16(), v.bfloat16(), out_scale

    def rescaled(self, out: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
        """`out` of `paged` operands times v's factor."""
        return out if self.v is None else rescaled(out, _per_row("v_descale", self.v, out, cu_seqlens_q))

    def check(self, batch: int, q: Tensor) -> None:
        """Refuse what does not fit `batch` sequences of q's heads, before anything is computed."""
        for name, descale in zip(("q_descale", "k_descale", "v_descale"), self, strict=True):
            if descale is not None:
                _check(name, descale, batch, q)


def gradients_refused(
    attend: Callable[Concatenate[Tensor, Tensor, Tensor, Others], tuple[Tensor, Tensor]],
) -> Callable[Concatenate[Tensor, Tensor, Tensor, Others], tuple[Tensor, Tensor]]:
    """Lets e4m3 q, k and v require a gradient as long as it is never asked for. Asking for it raises."""

    @functools.wraps(attend)
    def call(q: Tensor, k: Tensor, v: Tensor, /, *others: Others.args, **flags: Others.kwargs) -> tuple[Tensor, Tensor]:
        if getattr(q, "dtype", None) is not E4M3:
            return attend(q, k, v, *others, **flags)
        with torch.no_grad():
            out, lse = attend(q, k, v, *others, **flags)
        factors = [factor for other in others if isinstance(other, Descales) for factor in other]
        inputs = [t for t in (q, k, v, *factors) if isinstance(t, Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
            out, lse = _Refusing.apply(out, lse, *inputs)  # type: ignore[no-untyped-call]
        return out, lse

    return call


class _Refusing(torch.autograd.Function):
    """Results that depend on FP8 inputs, but have no derivative."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        del ctx, inputs
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> None:
        del ctx, gradients
        raise Unsupported(
            "gradients through FP8 inputs are not computed: rounding to e4m3 has none. Detach q, k, v and their "
            "descales, or pass bf16 or fp16 tensors"
        )


def rescaled(out: Tensor, scale: Tensor | None) -> Tensor:
    """`out` times the factor that `widened` returned."""
    return out if scale is None else (out.float() * scale).to(out.dtype)


def _check(name: str, descale: object, batch: int, data: Tensor) -> None:
    """Check (batch, kv_heads), (1, kv_heads) for all sequences, or one factor; the heads of data are a multiple."""
    heads = data.shape[-2]
    fix = "One factor for every K/V head of every sequence, or one row for all of them."
    expected = f"({batch}, kv_heads) on {data.device}, {heads} heads a multiple"
    if not isinstance(descale, Tensor):
        raise InvalidProblem(name, f"a tensor {expected}", type(descale).__name__, fix)
    check_class(name, descale)
    fits = descale.shape.numel() == 1 or (
        descale.dim() == 2 and descale.shape[0] in (1, batch) and descale.shape[1] and not heads % descale.shape[1]
    )
    if not fits or not descale.is_floating_point() or descale.device != data.device:
        raise InvalidProblem(name, expected, f"{descale.dtype} {tuple(descale.shape)} on {descale.device}", fix)


def _per_head(name: str, descale: Descale, batch: int, data: Tensor) -> Tensor:
    """(batch, heads, 1) of a descale, repeated for the heads it serves."""
    heads = data.shape[-2]
    if descale is None:
        return torch.ones(1, 1, 1, dtype=torch.float32, device=data.device).expand(batch, heads, 1)
    _check(name, descale, batch, data)
    factors = descale.float()
    if factors.numel() == 1:
        return factors.reshape(1, 1, 1).expand(batch, heads, 1)
    return factors.repeat_interleave(heads // factors.shape[1], 1)[..., None].expand(batch, heads, 1)


def _per_row(name: str, descale: Tensor, rows: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """A descale for every row and head of dense or packed rows, (..., heads, 1)."""
    batch = len(rows) if cu_seqlens is None else len(cu_seqlens) - 1
    factors = _per_head(name, descale, batch, rows)
    if cu_seqlens is None:
        return factors[:, None] if rows.dim() == 4 else factors
    sequence, _ = places(cu_seqlens, rows.shape[0])
    # Rows past the last sequence belong to none and are not scaled.
    return torch.cat((factors, factors.new_ones(1, *factors.shape[1:])))[sequence]
