"""`flash_attn.layers.rotary`: rotary embedding of (batch, seqlen, heads, dim) or packed (total, heads, dim) tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.errors import InvalidProblem
from tilewise.integrations.translation import check_integers, places, worded
from tilewise.nn.rotary import check_tables, rotate
from tilewise.units import counted

__all__ = ["apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_kv_", "apply_rotary_emb_qkv_"]


@worded({})
def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate x by the rows of cos and sin (seqlen_rotary, rotary_dim / 2) at each token's position.

    A token's position is its index in the sequence plus `seqlen_offsets`, an int or one per sequence. With `cu_seqlens`
    x is packed; `max_seqlen` is then accepted and ignored. `inplace` writes into x and returns it.
    """
    del max_seqlen
    check_tables(cos, sin)
    _check_offsets(seqlen_offsets, len(x) if cu_seqlens is None else len(cu_seqlens) - 1)
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    _check_positions(positions, cos.shape[0])
    turned = rotate(x, cos[positions], sin[positions], interleaved=interleaved)
    return _writable(x).copy_(turned) if inplace else turned


apply_rotary_emb_func = apply_rotary_emb


@worded({})
def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k of qkv (batch, seqlen, 3, heads, dim), or (batch, seqlen, heads + 2 kv_heads, dim), in place."""
    qkv = _writable(qkv)
    if qkv.dim() == 5:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif num_heads_q is None:
        fix = "It says how many of the stacked heads are query heads."
        raise InvalidProblem("num_heads_q", "an integer, because qkv has 4 dimensions", None, fix)
    else:
        num_kv_heads, rest = divmod(qkv.shape[2] - num_heads_q, 2)
        if rest or num_kv_heads < 1:
            expected = f"an integer that leaves an even number of qkv's {qkv.shape[2]} stacked heads"
            raise InvalidProblem("num_heads_q", expected, num_heads_q, "k and v have equally many.")
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + num_kv_heads]
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(
        k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, interleaved, True, seqlen_offsets
    )
    return qkv


@worded({})
def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate k of kv (batch, seqlen, 2, heads, dim) in place."""
    kv = _writable(kv)
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class _Same(torch.autograd.Function):
    """A tensor in the same memory, which is not a leaf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        return gradient


def _writable(x: Tensor) -> Tensor:
    """Autograd refuses to write into a leaf that requires a gradient; flash-attn writes, and returns what has one. In a
    compiled function, which would lose the gradient, it is refused.
    """
    is_refused = x.is_leaf and x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return _Same.apply(x) if is_refused else x  # type: ignore[no-untyped-call]


def _positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """One position per token: (seqlen,), (batch, seqlen) or (total,)."""
    if cu_seqlens is not None:
        sequence, position = places(cu_seqlens, x.shape[0])
        batch = cu_seqlens.numel() - 1
        if isinstance(offsets, Tensor) and batch:
            offsets = offsets[sequence.clamp(max=batch - 1)]
        # Rows past the last sequence belong to none; any position does.
        return torch.where(sequence < batch, position + offsets, 0)
    position = torch.arange(x.shape[1], device=x.device)
    return offsets[:, None] + position if isinstance(offsets, Tensor) else offsets + position


def _check_offsets(offsets: object, batch: int) -> None:
    fix = "An int for all sequences, or an integer tensor (batch,); none below 0."
    if isinstance(offsets, Tensor):
        check_integers("seqlen_offsets", offsets, (batch,), fix)
    elif not isinstance(offsets, int | np.integer) or offsets < 0:
        raise InvalidProblem("seqlen_offsets", "an integer >= 0 or a tensor", repr(offsets), fix)


def _check_positions(positions: Tensor, rows: int) -> None:
    """Contents are read on a CPU only; on a GPU that would synchronise."""
    if positions.device.type != "cpu" or torch.compiler.is_compiling() or positions.numel() == 0:
        return
    first, last = (int(end) for end in positions.aminmax())
    if first < 0:
        raise InvalidProblem("seqlen_offsets", "no position before the first", first, "Offsets are 0 or more.")
    if last >= rows:
        fix = "Make cos and sin as long as the longest sequence with its offset."
        raise InvalidProblem("cos", f"at least {counted(last + 1, 'row')} for the last position", rows, fix)
