"""The functions of flash-attn 4 (4.0.0 beta), which users import from `flash_attn.cute` or `flash_attn.cute.interface`.

Tensors as in FA2; every function returns (out, lse), and lse is differentiable. Features without a counterpart in
tilewise are refused by name: `score_mod`, `mask_mod` and their arguments, `block_sparse_tensors`, `gather_kv_indices`.
`num_splits`, `pack_gqa`, `min_seqlen_k` and the scheduler's metadata tune FA4's own kernels: they are accepted and
change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.api import attention_paged
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.fp8.container import E4M3
from tilewise.integrations import flash
from tilewise.integrations import flash_attn_interface as fa3
from tilewise.integrations.flash import Descales
from tilewise.integrations.translation import FLASH_NAMES, UNBOUNDED, Window, length, number_of, require_tensors, worded

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func"]

Sides = tuple[int | None, int | None]
OPEN: Sides = (None, None)
NAMES = FLASH_NAMES | {"sinks": "learnable_sink", "block_table": "page_table", "seqlens_k": "seqused_k"}
# Refused arguments, and what to do instead.
ADVICE = {
    "gather_kv_indices": "gather the keys and values before the call",
    "score_mod": "tilewise.attention takes softcap, alibi_slopes and a bias with its gradient",
    "score_mod_bwd": "tilewise.attention takes softcap, alibi_slopes and a bias with its gradient",
    "mask_mod": "tilewise.attention takes a boolean mask, causal and a window",
    "aux_tensors": "it belongs to score_mod and mask_mod",
    "aux_scalars": "it belongs to score_mod and mask_mod",
    "block_sparse_tensors": "tilewise.attention takes a boolean mask",
    "block_sparse_tensors_bwd": "tilewise.attention takes a boolean mask",
}


@worded(NAMES)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = OPEN,
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of q (batch, seqlen_q, heads, dim) to k, v; lse is returned with and without `return_lse`.

    lse is (batch, heads, seqlen_q), with `qv` (batch, seqlen_q, heads), as in FA4. So it is where k is v and has 512
    columns, which FA4 takes as a call with `qv` alone.
    """
    del num_splits, pack_gqa, return_lse
    modifiers = (gather_kv_indices, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars)
    _refuse(*modifiers, block_sparse_tensors, block_sparse_tensors_bwd)
    flags = _flags(softmax_scale, causal, window_size, softcap, deterministic, learnable_sink)
    _check_operands(q, k, v, qv, learnable_sink)
    out, lse = fa3.attend(q, k, v, qv, Descales(), None, 0, flags)
    return out, lse.transpose(-1, -2) if _is_latent(k, v, qv) else lse


@worded(NAMES)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = OPEN,
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of sequences of different lengths. q and k are each packed (total, heads, dim) with `cu_seqlens_*`, or
    (batch, seqlen, heads, dim), of which the first `seqused_*` rows count; with `page_table` k and v are pages, and
    `seqused_k` their lengths.

    lse is (heads, total_q) or (batch, heads, seqlen_q); its last two dimensions are swapped where `flash_attn_func`
    swaps them.
    """
    del num_splits, pack_gqa, return_lse, min_seqlen_k, scheduler_metadata, seqlen_k_per_split
    del disable_scheduler_metadata
    modifiers = (gather_kv_indices, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars)
    _refuse(*modifiers, block_sparse_tensors, None)
    flags = _flags(softmax_scale, causal, window_size, softcap, deterministic, learnable_sink)
    _check_operands(q, k, v, qv, learnable_sink)
    shape = q.shape[:-1]
    dense_q = cu_seqlens_q is None
    queries, totals_q, longest_q = _packed("q", q, cu_seqlens_q, max_seqlen_q)
    flags["max_seqlen_q"] = longest_q
    if page_table is not None:
        for name, given in (("qv", qv), ("cu_seqlens_k", cu_seqlens_k), ("seqused_q", seqused_q)):
            if given is not None:
                raise Unsupported(f"{name} with page_table: pages are attended by q alone, all of its rows")
        if q.dtype is E4M3:
            instead = "flash_attn_with_kvcache of tilewise.integrations.flash_attn_interface"
            raise Unsupported(f"FP8 with page_table: call {instead}")
        if seqused_k is None:
            fix = "Pass int32 (batch,)."
            raise InvalidProblem("seqused_k", "the tokens in the pages, beside page_table", None, fix)
        flags["cu_seqlens_q"] = totals_q
        out, lse = attention_paged(queries, k, v, page_table, seqused_k, return_lse=True, **flags)
    else:
        keys, totals_k, longest_k = _packed("k", k, cu_seqlens_k, max_seqlen_k)
        values, _, _ = _packed("v", v, cu_seqlens_k, max_seqlen_k)
        flags["max_seqlen_k"] = longest_k
        extra = None if qv is None else _packed("qv", qv, cu_seqlens_q, max_seqlen_q)[0]
        packed = fa3.Packed(totals_q, totals_k, seqused_q, seqused_k)
        out, lse = fa3.attend(queries, keys, values, extra, Descales(), packed, 0, flags)
    if dense_q:
        out, lse = out.unflatten(0, shape[:2]), lse.unflatten(1, shape[:2]).transpose(0, 1)
    return out, lse.transpose(-1, -2) if _is_latent(k, v, qv) else lse


@worded(NAMES)
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """FA3's `flash_attn_combine`. Every row is combined, so `cu_seqlens` changes nothing."""
    del cu_seqlens
    for name, given in (("seqused", seqused), ("virtual_batch_idx", virtual_batch_idx)):
        if given is not None:
            raise Unsupported(f"{name}: combine all rows, in the order of the batch")
    combined, lse = fa3.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    return combined, lse if return_lse else None


def _refuse(*given: object) -> None:
    """Refuse what is given of the arguments in ADVICE, in their order."""
    for (name, advice), value in zip(ADVICE.items(), given, strict=True):
        if value is not None:
            raise Unsupported(f"{name} of flash-attn 4: {advice}")


def _flags(
    softmax_scale: float | None,
    causal: bool,
    window_size: Sides,
    softcap: float | None,
    deterministic: bool,
    learnable_sink: Tensor | None,
) -> dict[str, Any]:
    cap = 0.0 if softcap is None else softcap
    flags = flash.flags_of(softmax_scale, causal, UNBOUNDED, cap, deterministic, sinks=learnable_sink)
    return flags | {"window": _window(window_size, flags["causal"])}


def _window(window_size: Sides, causal: bool) -> Window | None:
    """None is an unbounded side. As in FA4, (-1, -1) is unbounded too, and with `causal` a left side of -1."""
    try:
        left, right = map(number_of, window_size)
        right = None if causal else right
        negative = [side is not None and bool(side < 0) for side in (left, right)]
    except (TypeError, ValueError, RuntimeError):
        fix = "A causal window of the last n keys is (n - 1, 0); None is an unbounded side."
        raise InvalidProblem("window_size", "a pair (left, right)", repr(window_size), fix) from None
    if all(negative) or (causal and negative[0]):
        return None
    if any(negative):
        fix = "Write an unbounded side as None: flash-attn 4 has another rule for -1 beside a number than flash-attn 2."
        raise InvalidProblem("window_size", "sides of 0 or more, or None", repr(window_size), fix)
    return None if left is None and right is None else (left, right)


def _check_operands(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, sinks: Tensor | None) -> None:
    require_tensors(q=q, k=k, v=v)
    if qv is not None:
        require_tensors(qv=qv)
        if k is v:
            raise Unsupported("qv where k is v: flash-attn 4 then leaves q and k out; pass qv as q, without qv")
    if q.dtype is E4M3 and sinks is not None and sinks.requires_grad and torch.is_grad_enabled():
        raise Unsupported("a gradient of learnable_sink beside FP8 inputs: pass it detached, or bf16 tensors")


def _is_latent(k: Tensor, v: Tensor, qv: Tensor | None) -> bool:
    """Whether FA4 runs its kernel for latents, whose lse has the heads last."""
    return qv is not None or (k is v and v.shape[-1] == 512)


def _packed(
    name: str, tensor: Tensor, cu_seqlens: Tensor | None, longest: int | None
) -> tuple[Tensor, Tensor, int | None]:
    """(rows, running totals, longest length) of packed rows, or of (batch, seqlen, ...) without totals."""
    side = "k" if name in ("k", "v") else "q"
    if cu_seqlens is not None:
        require_tensors(**{f"cu_seqlens_{side}": cu_seqlens})
        return tensor, cu_seqlens, length(f"max_seqlen_{side}", longest)
    if tensor.dim() != 4:
        fix = f"Packed rows come with cu_seqlens_{side}."
        raise InvalidProblem(name, "(batch, seqlen, heads, dim)", f"shape {tuple(tensor.shape)}", fix)
    batch, seqlen = tensor.shape[:2]
    totals = torch.arange(batch + 1, dtype=torch.int32, device=tensor.device) * seqlen
    return tensor.flatten(0, 1), totals, seqlen
