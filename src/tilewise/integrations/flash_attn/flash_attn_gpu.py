"""The functions of flash-attn's compiled extension, which its Python interface imports as `flash_attn_gpu`.

Arguments are given by position, in the order of flash-attn 2.8. `gen` must be None. Results are lists, as there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.api import attention_paged
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.integrations import cache, flash, translation
from tilewise.integrations.flash import Flags
from tilewise.integrations.translation import CACHE_NAMES, FLASH_NAMES, worded

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]

PAGED_NAMES = FLASH_NAMES | {"k_pages": "k", "v_pages": "v", "seqlens_k": "cu_seqlens_k"}
BACKWARD_NAMES = FLASH_NAMES | {"lse": "softmax_lse"}


@worded(PAGED_NAMES)
def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: object,
) -> list[Tensor]:
    """[out, softmax_lse, S_dmask, rng_state] of tensors (batch, seqlen, heads, dim)."""
    _refuse_generator(gen)
    window_size = window_size_left, window_size_right
    flags = flags_of(p_dropout, softmax_scale, is_causal, window_size, softcap, alibi_slopes, False)
    return_softmax = translation.flag_of("return_softmax", return_softmax)
    found, *others = flash.forward(q, k, v, flags, None, return_softmax=return_softmax)
    return [_into(out, found), *others]


@worded(PAGED_NAMES)
def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: object,
    num_splits: int = 0,
) -> list[Tensor]:
    """[out, softmax_lse, S_dmask, rng_state] of packed sequences, or of pages with `block_table`."""
    del zero_tensors
    _refuse_generator(gen)
    if num_splits > 1:
        raise Unsupported("num_splits > 1 is not supported here, nor in flash-attn: pass 0, the backend decides")
    if leftpad_k is not None:
        raise Unsupported(
            "leftpad_k: begin the sequences of cu_seqlens_k, or the rows of block_table, after the padding"
        )
    window_size = window_size_left, window_size_right
    flags = flags_of(p_dropout, softmax_scale, is_causal, window_size, softcap, alibi_slopes, False)
    flags |= flash.lengths_of(max_seqlen_q, max_seqlen_k)
    return_softmax = translation.flag_of("return_softmax", return_softmax)
    translation.require_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if block_table is not None:
        seqlens_k = cu_seqlens_k.diff().int() if seqused_k is None else seqused_k
        found, lse = attend_pages(q, k, v, block_table, cu_seqlens_q, seqlens_k, flags)
        return [_into(out, found), lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64, device=q.device)]
    totals = cu_seqlens_q, cu_seqlens_k
    if seqused_k is not None:
        # There are more sequences than the caller's: what is indexed by sequence would be wrong.
        if flags["dropout"] or (alibi_slopes is not None and alibi_slopes.dim() > 1):
            raise Unsupported("seqused_k with dropout_p, or with alibi_slopes for every sequence: pack the used keys")
        totals = flash.cut(*totals, seqused_k=seqused_k)
    found, *others = flash.forward(q, k, v, flags, totals, return_softmax=return_softmax)
    return [_into(out, found), *others]


@worded(BACKWARD_NAMES)
def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: object,
    rng_state: Tensor | None,
) -> list[Tensor]:
    """[dq, dk, dv, softmax_d]; gradients are written where given, else allocated."""
    _refuse_generator(gen)
    written = _allocated((dq, dk, dv), (q, k, v))
    window_size = window_size_left, window_size_right
    flags = flags_of(p_dropout, softmax_scale, is_causal, window_size, softcap, alibi_slopes, deterministic)
    return [*written, flash.gradients_into(written, (q, k, v), (dout, out, softmax_lse), flags, None, rng_state)]


@worded(BACKWARD_NAMES)
def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: object,
    rng_state: Tensor | None,
) -> list[Tensor]:
    """[dq, dk, dv, softmax_d] of packed sequences."""
    del zero_tensors
    _refuse_generator(gen)
    written = _allocated((dq, dk, dv), (q, k, v))
    window_size = window_size_left, window_size_right
    flags = flags_of(p_dropout, softmax_scale, is_causal, window_size, softcap, alibi_slopes, deterministic)
    flags |= flash.lengths_of(max_seqlen_q, max_seqlen_k)
    totals = cu_seqlens_q, cu_seqlens_k
    return [*written, flash.gradients_into(written, (q, k, v), (dout, out, softmax_lse), flags, totals, rng_state)]


@worded(CACHE_NAMES | {"k_cache": "kcache", "v_cache": "vcache"})
def fwd_kvcache(
    q: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    seqlens_k: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_batch_idx: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    num_splits: int,
) -> list[Tensor]:
    """[out, softmax_lse] of a cache, after k and v were appended to it."""
    del num_splits
    translation.require_tensors(q=q)
    store = cache.Store(kcache, vcache, block_table, cache_batch_idx, leftpad_k, reads_lengths=True)
    window_size = window_size_left, window_size_right
    flags = flash.flags_of(softmax_scale, is_causal, window_size, softcap, False, alibi_slopes=alibi_slopes)
    spread = flags["causal"] or flags["window"] is not None
    rotary = cache.Rotary.of(rotary_cos, rotary_sin, is_rotary_interleaved, spread=spread)
    found, lse = cache.append_and_attend(q, k, v, store, seqlens_k, rotary, **flags)
    return [_into(out, found), lse]


def _refuse_generator(gen: object) -> None:
    if gen is not None:
        raise Unsupported(
            "the `generator` argument is no longer supported, nor in flash-attn: seed dropout with torch.manual_seed"
        )


def _into(out: Tensor | None, found: Tensor) -> Tensor:
    """The result, in the caller's tensor if there is one."""
    if out is None:
        return found
    if out.shape != found.shape or out.dtype != found.dtype:
        got = f"{out.dtype} {tuple(out.shape)}"
        raise InvalidProblem("out", f"{found.dtype} {tuple(found.shape)}", got, "It takes the result.")
    return out.copy_(found)


def _allocated(written: flash.Written, like: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(t) if target is None else target for target, t in zip(written, like, strict=True))
    return dq, dk, dv


def flags_of(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> Flags:
    """The flags of flash-attn 2 as those of `attention`."""
    dropout = translation.number_of(dropout_p, "dropout_p")
    given = (softmax_scale, causal, window_size, softcap, deterministic)
    return flash.flags_of(*given, alibi_slopes=alibi_slopes, dropout=dropout)


def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, flags: Flags
) -> tuple[Tensor, Tensor]:
    """(out, lse) of packed queries and keys in pages."""
    if flags.pop("dropout"):
        raise Unsupported(
            "dropout_p with block_table: pages are for serving and have no dropout; gather them into packed k and v "
            "and call flash_attn_varlen_func without block_table"
        )
    del flags["max_seqlen_k"]
    return attention_paged(q, k, v, block_table, seqlens_k, cu_seqlens_q=cu_seqlens_q, return_lse=True, **flags)
