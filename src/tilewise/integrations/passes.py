"""Forward and backward as separate calls, for libraries that save what autograd would save (ring attention, context
parallelism): behind the private functions of flash-attn 2 and 3.

The dropout seed is passed in `rng_state`, int64 (2,): the seed and 0. `out` and `lse` given to a backward may cover
more keys than it sees, merged from several forwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.api import attention, attention_backward, attention_varlen
from tilewise.errors import InvalidProblem
from tilewise.integrations.probabilities import dense_dmask, draw_seed, varlen_dmask
from tilewise.integrations.translation import require_tensors

__all__ = ["Written", "forward", "gradients_into"]

Flags = dict[str, Any]
# Where the gradients of q, k and v are written; None if not wanted.
Written = tuple[Tensor | None, Tensor | None, Tensor | None]


def forward(
    q: Tensor, k: Tensor, v: Tensor, flags: Flags, totals: tuple[Tensor, Tensor] | None, *, return_softmax: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, S_dmask, rng_state) of tensors (batch, seqlen, heads, dim), or packed ones with their `totals`."""
    require_tensors(q=q, k=k, v=v)
    rng_state = torch.zeros(2, dtype=torch.int64, device="cpu")
    if flags["dropout"]:
        rng_state[0] = draw_seed()
    rng_state = rng_state.to(q.device)
    flags = {**flags, "seed": rng_state[0] if flags["dropout"] else None}
    wants_dmask = return_softmax and flags["dropout"]
    if totals is None:
        out, lse = attention(q, k, v, layout="bshd", return_lse=True, **flags)
        dmask = dense_dmask(q, k, {"layout": "bshd", **flags}) if wants_dmask else q.new_empty(0)
    else:
        out, lse = attention_varlen(q, k, v, *totals, return_lse=True, **flags)
        dmask = varlen_dmask(q, k, *totals, flags) if wants_dmask else q.new_empty(0)
    return out, lse, dmask, rng_state


@torch.no_grad()
def gradients_into(
    written: Written,
    attended: tuple[Tensor, Tensor, Tensor],
    saved: tuple[Tensor, Tensor, Tensor],
    flags: Flags,
    totals: tuple[Tensor, Tensor] | None,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write dq, dk and dv of (q, k, v) by (dout, out, lse); returns the row sums of dout * out, in lse's shape."""
    dout, out, lse = saved
    require_tensors(q=attended[0], k=attended[1], v=attended[2], dout=dout, out=out, softmax_lse=lse)
    saved = dout, out, _heads_first(lse, attended[0])
    for name, target, tensor in zip(("dq", "dk", "dv"), written, attended, strict=True):
        if target is not None and target.shape != tensor.shape:
            fix = f"It takes the gradient of {name[1]}."
            raise InvalidProblem(name, f"shape {tuple(tensor.shape)}", tuple(target.shape), fix)
    if flags["dropout"]:
        if not isinstance(rng_state, Tensor) or rng_state.dtype != torch.int64 or rng_state.numel() != 2:
            fix = "Pass the rng_state that the forward returned: it says what was dropped."
            got = f"{rng_state.dtype} {tuple(rng_state.shape)}" if isinstance(rng_state, Tensor) else rng_state
            raise InvalidProblem("rng_state", "an int64 tensor (2,), because dropout_p is not 0", got, fix)
        flags = {**flags, "seed": rng_state[0]}
    wanted = tuple(target is not None for target in written)
    packed: Flags = {"layout": "bshd"}
    if totals is not None:
        packed = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), totals, strict=True))
    kind: Any = "dense" if totals is None else "varlen"
    found = attention_backward(kind, attended, saved, wanted, **packed, **flags)  # type: ignore[arg-type]
    for target, gradient in zip(written, found, strict=True):
        if target is not None:
            target.copy_(gradient)
    sums = (dout.float() * out.float()).sum(-1)
    return sums.transpose(-1, -2).contiguous()


def _heads_first(lse: Tensor, q: Tensor) -> Tensor:
    """Lse as (..., heads, rows). flash-attn reads its memory regardless of its shape, so some callers pass a view (...,
    rows, heads) of it.
    """
    heads, rows = q.shape[-2], q.shape[-3] if q.dim() > 2 else 0
    if lse.dim() < 2 or lse.is_contiguous() or tuple(lse.shape[-2:]) not in ((heads, rows), (rows, heads)):
        return lse
    if heads == rows and heads > 1:
        fix = "With as many rows as heads a view may mean either: pass (..., heads, rows) with .contiguous()."
        raise InvalidProblem("softmax_lse", "a contiguous tensor", f"strides {lse.stride()}", fix)
    return lse if tuple(lse.shape[-2:]) == (heads, rows) else lse.transpose(-1, -2)
