"""FA3's descales: fp32 factors (batch, kv_heads) of e4m3 q, k and v, one of q's for every group of heads; None is 1."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InvalidProblem
from tilewise.fp8.container import E4M3, Fp8Tensor
from tilewise.integrations.translation import places

__all__ = ["Descale", "Descales", "rescaled"]

Descale = Tensor | None
Three = tuple[Fp8Tensor, Fp8Tensor, Fp8Tensor]


class Descales(NamedTuple):
    """The three of a call."""

    q: Descale = None
    k: Descale = None
    v: Descale = None

    def containers(self, q: Tensor, k: Tensor, v: Tensor, batch: int, layout: Literal["bshd", "packed"]) -> Three:
        """Dense or packed operands with their descales."""

        def made(name: str, data: Tensor, descale: Descale) -> Fp8Tensor:
            return Fp8Tensor(data, _per_head(name, descale, batch, data), "head", layout)

        return made("q_descale", q, self.q), made("k_descale", k, self.k), made("v_descale", v, self.v)

    def paged(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: int) -> Three:
        """Packed q and pages, which sequences with different descales may share: k's factor goes to q, and v's is left
        to `rescaled`.
        """
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
        """FP8 q, k, v as bf16, and what to multiply `out` with. e4m3 fits bf16 exactly, only q * descale is rounded."""
        if q.dtype != E4M3:
            return q, k, v, None
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
        """Refuse what does not fit so many sequences of q's heads, before anything is made of it."""
        for name, descale in zip(("q_descale", "k_descale", "v_descale"), self, strict=True):
            if descale is not None:
                _check(name, descale, batch, q)


def rescaled(out: Tensor, scale: Tensor | None) -> Tensor:
    """`out` times what `widened` left to it."""
    return out if scale is None else (out.float() * scale).to(out.dtype)


def _check(name: str, descale: object, batch: int, data: Tensor) -> None:
    """(batch, kv_heads), or (1, kv_heads) for all sequences; the heads of data are a multiple."""
    heads = data.shape[-2]
    fix = "One factor for every K/V head of every sequence, or one row for all of them."
    expected = f"({batch}, kv_heads) on {data.device}, {heads} heads a multiple"
    if not isinstance(descale, Tensor):
        raise InvalidProblem(name, f"a tensor {expected}", type(descale).__name__, fix)
    fits = descale.dim() == 2 and descale.shape[0] in (1, batch) and descale.shape[1] and not heads % descale.shape[1]
    if not fits or descale.device != data.device:
        raise InvalidProblem(name, expected, f"{tuple(descale.shape)} on {descale.device}", fix)


def _per_head(name: str, descale: Descale, batch: int, data: Tensor) -> Tensor:
    """(batch, heads, 1) of a descale, repeated for the heads it serves."""
    heads = data.shape[-2]
    if descale is None:
        return torch.ones(1, 1, 1, dtype=torch.float32, device=data.device).expand(batch, heads, 1)
    _check(name, descale, batch, data)
    factors = descale.float().repeat_interleave(heads // descale.shape[1], 1)[..., None]
    return factors.expand(batch, heads, 1)


def _per_row(name: str, descale: Tensor, rows: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """A descale for every row and head of dense or packed rows, (..., heads, 1)."""
    batch = len(rows) if cu_seqlens is None else len(cu_seqlens) - 1
    factors = _per_head(name, descale, batch, rows)
    if cu_seqlens is None:
        return factors[:, None] if rows.dim() == 4 else factors
    sequence, _ = places(cu_seqlens, rows.shape[0])
    # Rows past the last sequence are nobody's: they are not scaled.
    return torch.cat((factors, factors.new_ones(1, *factors.shape[1:])))[sequence]
