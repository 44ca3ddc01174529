"""`S_dmask`, which flash-attn returns with `return_attn_probs=True` and dropout: probabilities, negative where dropped.

Attention to one-hot values is the matrix of probabilities, so the library itself computes them, 256 keys at a time,
with the masks, the scale and the dropout bits of the call. Quadratic in memory and without gradient: for tests and
debugging.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.api import attention, attention_varlen
from tilewise.integrations.translation import places

__all__ = ["dense_dmask", "draw_seed", "varlen_dmask"]

# Keys per pass: the width of the one-hot values, at most the largest head_dim that every backend takes.
KEYS_PER_PASS = 256


def draw_seed() -> Tensor:
    """A dropout seed, drawn like the library's own: from torch's default CPU generator."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu")


@torch.no_grad()
def dense_dmask(q: Tensor, k: Tensor, flags: dict[str, Any]) -> Tensor:
    """(batch, num_heads, seqlen_q, seqlen_k) in q's dtype, for q and k of layout "bshd"."""
    batch, seqlen_k, num_kv_heads, _ = k.shape
    if q.numel() == 0 or seqlen_k == 0:
        return q.new_zeros(batch, q.shape[2], q.shape[1], seqlen_k)
    position = torch.arange(seqlen_k, device=k.device)
    passes = []
    for keys in position.split(KEYS_PER_PASS):
        one_hot = (position[:, None] == keys).to(k.dtype)[None, :, None].expand(batch, -1, num_kv_heads, -1)
        kept = attention(q, k, one_hot, **flags)
        passes.append(_signed(attention(q, k, one_hot, **_without_dropout(flags)), kept))
    return torch.cat(passes, -1).transpose(1, 2)


@torch.no_grad()
def varlen_dmask(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, flags: dict[str, Any]) -> Tensor:
    """(batch, num_heads, max_seqlen_q, max_seqlen_k) in q's dtype; 0 outside each sequence."""
    batch, num_heads = cu_seqlens_q.numel() - 1, q.shape[1]
    max_seqlen_q, max_seqlen_k = flags["max_seqlen_q"], flags["max_seqlen_k"]
    padded = q.new_zeros(batch, max_seqlen_q, num_heads, max_seqlen_k)
    sequence, row = places(cu_seqlens_q, q.shape[0])
    _, position = places(cu_seqlens_k, k.shape[0])
    inside = sequence < batch
    for start in range(0, max_seqlen_k, KEYS_PER_PASS):
        keys = torch.arange(start, min(start + KEYS_PER_PASS, max_seqlen_k), device=k.device)
        one_hot = (position[:, None] == keys).to(k.dtype)[:, None].expand(-1, k.shape[1], -1)
        kept = attention_varlen(q, k, one_hot, cu_seqlens_q, cu_seqlens_k, **flags)
        plain = attention_varlen(q, k, one_hot, cu_seqlens_q, cu_seqlens_k, **_without_dropout(flags))
        padded[sequence[inside], row[inside], :, start : start + len(keys)] = _signed(plain, kept)[inside]
    return padded.transpose(1, 2)


def _without_dropout(flags: dict[str, Any]) -> dict[str, Any]:
    return {**flags, "dropout": 0.0, "seed": None}


def _signed(plain: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept == 0, -plain, plain)
