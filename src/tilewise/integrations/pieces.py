"""Cuts packed sequences into more sequences: how FA3's `seqused_*` and `attention_chunk` become plain `cu_seqlens`.

A chunk of keys, and the queries whose own position is in it, are a sequence of their own: tokens of one chunk are
neighbours, and the last query of every chunk but the first ones is at its last key, which is where causality, windows
and ALiBi are measured from. Allocated but unused rows become sequences without a partner. Nothing is copied, and
nothing is read back from the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise import ops
from tilewise.errors import InvalidProblem
from tilewise.integrations.translation import check_integers

__all__ = ["cut"]


def cut(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    chunk: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor]:
    """(cu_seqlens_q, cu_seqlens_k) of pieces that each attend only to themselves: together the requested attention."""
    stored_q, stored_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    for name, used, stored in (("seqused_q", seqused_q, stored_q), ("seqused_k", seqused_k, stored_k)):
        if used is not None:
            _check_used(name, used, stored)
    used_q = stored_q if seqused_q is None else seqused_q.int()
    used_k = stored_k if seqused_k is None else seqused_k.int()
    none = torch.zeros_like(stored_q)[:, None]
    if chunk:
        # Query i is at key i + used_k - used_q. Queries before key 0 come first, alone; then chunk by chunk.
        starts = torch.arange(0, max_seqlen_k + chunk, chunk, dtype=torch.int32, device=cu_seqlens_q.device)
        row = (starts - (used_k - used_q)[:, None]).clamp(min=none, max=used_q[:, None])
        key = torch.minimum(starts[None, :], used_k[:, None])
    else:
        row, key = torch.cat((none, used_q[:, None]), 1), torch.cat((none, used_k[:, None]), 1)
    # Unused queries see no key, unused keys are seen by no query.
    row = torch.cat((row, stored_q[:, None], stored_q[:, None]), 1)
    key = torch.cat((key, used_k[:, None], stored_k[:, None]), 1)
    return _totals(cu_seqlens_q, row), _totals(cu_seqlens_k, key)


def _check_used(name: str, used: Any, stored: Tensor) -> None:
    """Integers, one per sequence; on a CPU also none above what is stored."""
    fix = "The rows in use of every sequence, as int32 (batch,)."
    check_integers(name, used, tuple(stored.shape), fix)
    if used.device.type != "cpu" or not ops.is_plain_eager((used, stored)):
        return
    for sequence, (rows, most) in enumerate(zip(used.tolist(), stored.tolist(), strict=True)):
        if not 0 <= rows <= most:
            raise InvalidProblem(name, f"from 0 to {most} rows, those of sequence {sequence}", rows, fix)


def _totals(cu_seqlens: Tensor, ends: Tensor) -> Tensor:
    """Running totals from the ends of the pieces, counted within each sequence."""
    return torch.cat((cu_seqlens[:1], (cu_seqlens[:-1, None] + ends).flatten()))
