"""FA3's descales: fp32 factors (batch, kv_heads) of e4m3 q, k and v, one of q's for every group of heads; None is 1."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InvalidProblem
from tilewise.fp8.container import E4M3, Fp8Tensor
from tilewise.integrations.translation import places

__all__ = ["Descale", "Descales", "rescaled"]

NAMES = "q_descale, k_descale, v_descale"
Descale = Tensor | None
Three = tuple[Fp8Tensor, Fp8Tensor, Fp8Tensor]


class Descales(NamedTuple):
    """The three of a call."""

    q: Descale = None
    k: Descale = None
    v: Descale = None

    def containers(self, q: Tensor, k: Tensor, v: Tensor, batch: int, layout: Literal["bshd", "packed"]) -> Three:
        """Dense or packed operands with their descales."""

        def made(data: Tensor, descale: Descale) -> Fp8Tensor:
            return Fp8Tensor(data, _per_head([descale], batch, data), "head", layout)

        return made(q, self.q), made(k, self.k), made(v, self.v)

    def paged(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: int) -> Three:
        """Packed q and pages, which sequences with different descales may share: k's factor goes to q, and v's is left
        to `rescaled`.
        """
        for name, tensor in (("q", q), ("v_cache", v_pages)):
            if tensor.dtype != E4M3:
                fix = "FP8 caches are attended by FP8 queries."
                raise InvalidProblem(name, "float8_e4m3fn as k_cache has", tensor.dtype, fix)
        one = torch.ones(1, 1, 1, dtype=torch.float32, device=q.device)
        k, v = (Fp8Tensor(t, one.expand(t.shape[0], t.shape[2], 1), "page", "paged") for t in (k_pages, v_pages))
        return Fp8Tensor(q, _per_head([self.q, self.k], batch, q), "head", "packed"), k, v

    def widened(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """FP8 q, k, v as bf16, and what to multiply `out` with. e4m3 fits bf16 exactly, only q * descale is rounded."""
        if q.dtype != E4M3:
            return q, k, v, None
        wide = q.float()
        for descale in (self.q, self.k):
            if descale is not None:
                wide = wide * _per_row(descale, q, cu_seqlens_q)
        out_scale = None if self.v is None else _per_row(self.v, q, cu_seqlens_q)
        return wide.bfloat16(), k.bfloat16(), v.bfloat16(), out_scale

    def rescaled(self, out: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
        """`out` of `paged` operands times v's factor."""
        return out if self.v is None else rescaled(out, _per_row(self.v, out, cu_seqlens_q))


def rescaled(out: Tensor, scale: Tensor | None) -> Tensor:
    """`out` times what `widened` left to it."""
    return out if scale is None else (out.float() * scale).to(out.dtype)


def _repeated(descale: Tensor, heads: int) -> Tensor:
    """(batch, heads, 1) of descales (batch, kv_heads)."""
    if descale.dim() != 2 or not descale.shape[1] or heads % descale.shape[1]:
        fix = "One factor for every K/V head of every sequence."
        raise InvalidProblem(NAMES, f"(batch, kv_heads), {heads} heads a multiple", tuple(descale.shape), fix)
    return descale.repeat_interleave(heads // descale.shape[1], 1)[..., None]


def _per_head(descales: list[Descale], batch: int, data: Tensor) -> Tensor:
    """(batch, heads, 1): the product of descales, each repeated for the heads it serves."""
    heads = data.shape[-2]
    given = [_repeated(d.float(), heads) for d in descales if d is not None]
    if any(len(factor) not in (1, batch) for factor in given):
        fix = "A row a sequence, or one for all."
        raise InvalidProblem(NAMES, f"{batch} rows or 1", [len(factor) for factor in given], fix)
    product = torch.ones(1, 1, 1, dtype=torch.float32, device=data.device)
    for factor in given:
        product = product * factor
    return product.expand(batch, heads, 1)


def _per_row(descale: Tensor, rows: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Descales for every row and head of dense or packed rows, (..., heads, 1)."""
    descale = _repeated(descale, rows.shape[-2])
    if cu_seqlens is None:
        return descale[:, None] if rows.dim() == 4 else descale
    sequence, _ = places(cu_seqlens, rows.shape[0])
    return descale[sequence.clamp(max=descale.shape[0] - 1)]
