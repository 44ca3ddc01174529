"""The functions of flash-attn 2. Tensors are (batch, seqlen, heads, dim), or packed (total, heads, dim).

Common to all: `window_size` sides below 0 and `softcap` 0.0 mean "off"; `causal` and the window are aligned with the
bottom-right corner; the number of query heads is a multiple of the K/V heads. With `return_attn_probs` the result is
(out, softmax_lse, S_dmask): lse (batch, heads, seqlen_q) or (heads, total_q); S_dmask as in flash-attn, probabilities
that are negative where dropped, (batch, heads, seqlen_q, seqlen_k), or an empty tensor without dropout.

The functions that begin with an underscore are private in flash-attn too, but libraries with a backward of their own
(ring attention, context parallelism) import them. They have the signatures of releases 2.7 and 2.8.
"""

from __future__ import annotations

from torch import Tensor

from tilewise.api import attention, attention_varlen
from tilewise.integrations import cache, flash, translation
from tilewise.integrations.flash_attn import flash_attn_gpu
from tilewise.integrations.flash_attn.flash_attn_gpu import BACKWARD_NAMES, PAGED_NAMES, attend_pages, flags_of
from tilewise.integrations.translation import CACHE_NAMES, UNBOUNDED, worded

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, Tensor]
# (out, softmax_lse, S_dmask, rng_state)
Pass = tuple[Tensor, Tensor, Tensor, Tensor]


@worded()
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q (batch, seqlen_q, heads, dim) to k, v (batch, seqlen_k, kv_heads, dim)."""
    flags = flags_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    if not return_attn_probs:
        return attention(q, k, v, layout="bshd", return_lse=False, **flags)
    return flash.forward(q, k, v, flags, None, return_softmax=True)[:3]


@worded()
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of qkv (batch, seqlen, 3, heads, dim), without copying it apart."""
    q, k, v = translation.stacked("qkv", qkv, 3, 2)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *tail)


@worded()
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of q and kv (batch, seqlen_k, 2, kv_heads, dim)."""
    k, v = translation.stacked("kv", kv, 2, 2)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *tail)


@worded(PAGED_NAMES)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention of packed sequences; with `block_table` k and v are pages (num_pages, page_size, kv_heads, dim)."""
    flags = flags_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    flags |= flash.lengths_of(max_seqlen_q, max_seqlen_k)
    if block_table is not None:
        translation.require_tensors(cu_seqlens_k=cu_seqlens_k)
        out, lse = attend_pages(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k.diff().int(), flags)
        return (out, lse, q.new_empty(0)) if return_attn_probs else out
    if not return_attn_probs:
        return attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=False, **flags)
    return flash.forward(q, k, v, flags, (cu_seqlens_q, cu_seqlens_k), return_softmax=True)[:3]


@worded()
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of qkv (total, 3, heads, dim)."""
    q, k, v = translation.stacked("qkv", qkv, 3, 1)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *tail)


@worded()
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of q and kv (total_k, 2, kv_heads, dim)."""
    k, v = translation.stacked("kv", kv, 2, 1)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *tail)


@worded(CACHE_NAMES)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (batch, seqlen_q, heads, dim) to a cache, after appending k, v (batch, seqlen_new, ...) to it in
    place.

    The cache is (batch_cache, capacity, kv_heads, dim), or pages (num_pages, page_size, kv_heads, dim) with
    `block_table`. New tokens go to positions cache_seqlens, cache_seqlens + 1, ...; rotary rotates them and q by those
    positions (all of q by cache_seqlens itself when neither causal nor windowed). No gradient, as in flash-attn.
    `num_splits` is accepted: the backend chooses its own splits, and the result does not depend on it.
    """
    del num_splits
    translation.require_tensors(q=q)
    store = cache.Store(k_cache, v_cache, block_table, cache_batch_idx, cache_leftpad, reads_lengths=True)
    flags = flash.flags_of(softmax_scale, causal, window_size, softcap, False, alibi_slopes=alibi_slopes)
    spread = flags["causal"] or flags["window"] is not None
    rotary = cache.Rotary.of(rotary_cos, rotary_sin, rotary_interleaved, spread=spread)
    out, lse = cache.append_and_attend(q, k, v, store, cache_seqlens, rotary, **flags)
    return (out, lse) if return_softmax_lse else out


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Pass:
    """(out, softmax_lse, S_dmask, rng_state); imported by libraries with a backward of their own."""
    flags = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, return_softmax)
    out, lse, dmask, rng_state = flash_attn_gpu.fwd(q, k, v, None, alibi_slopes, *flags, None)
    return out, lse, dmask, rng_state


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Pass:
    """(out, softmax_lse, S_dmask, rng_state) of packed sequences, or of pages with `block_table`.

    `seqused_k` says how many keys of each count. Rows of no sequence are 0, with and without `zero_tensors`. The
    backend chooses the number of splits: `num_splits` is 0 or 1, as in flash-attn.
    """
    lengths = (max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, zero_tensors)
    flags = (causal, window_size_left, window_size_right, softcap, return_softmax)
    keys = (cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table)
    found = flash_attn_gpu.varlen_fwd(q, k, v, None, *keys, alibi_slopes, *lengths, *flags, None, num_splits)
    out, lse, dmask, rng_state = found
    return out, lse, dmask, rng_state


@worded(BACKWARD_NAMES)
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes dq, dk and dv; returns softmax_d, the row sums of dout * out (batch, heads, seqlen_q), without padding."""
    window_size = window_size_left, window_size_right
    flags = flags_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash.gradients_into((dq, dk, dv), (q, k, v), (dout, out, softmax_lse), flags, None, rng_state)


@worded(BACKWARD_NAMES)
def _flash_attn_varlen_backward(
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
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Writes dq, dk and dv of packed sequences; returns softmax_d (heads, total_q), without padding."""
    del zero_tensors
    window_size = window_size_left, window_size_right
    flags = flags_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    flags |= flash.lengths_of(max_seqlen_q, max_seqlen_k)
    totals = cu_seqlens_q, cu_seqlens_k
    return flash.gradients_into((dq, dk, dv), (q, k, v), (dout, out, softmax_lse), flags, totals, rng_state)


# flash-attn's own names for these as registered operators.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
