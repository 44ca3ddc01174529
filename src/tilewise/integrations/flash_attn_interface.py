"""flash-attn 3 by its own names (the module users import as `flash_attn_interface`).

Tensors as in FA2. `num_splits`, `pack_gqa`, `sm_margin` and `scheduler_metadata` tune FA3's own kernels: they are
accepted and change nothing. FP8 (e4m3) inputs with their descales run as tilewise's own FP8, widened to bf16 only
together with `attention_chunk` or `seqused_*`, and give bf16 out, as in FA3; descales of other dtypes are ignored, as
in FA3. `qv` adds qv.v to the scores by lengthening the keys, so head_dim + head_dim_v may be at most 512.
`attention_chunk` and `seqused_*` are exact and have gradients. The functions that begin with an underscore are imported
by libraries with a backward of their own.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.api import attention, attention_varlen
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.fp8.container import E4M3
from tilewise.integrations import aliases, cache, passes, pieces
from tilewise.integrations.descales import Descale, Descales, rescaled, without_gradients
from tilewise.integrations.translation import (
    CACHE_NAMES,
    FLASH_NAMES,
    UNBOUNDED,
    flag_of,
    length,
    number_of,
    require_tensors,
    softcap_of,
    stacked,
    window_of,
    worded,
)
from tilewise.numerics import merge_all
from tilewise.problem import MAX_HEAD_DIM

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "install",
    "uninstall",
]

Result = Tensor | tuple[Tensor, Tensor]


def install(*, force: bool = False) -> None:
    """Make `import flash_attn_interface` resolve to this module in this process, until `uninstall`."""
    aliases.put_in_place({"flash_attn_interface": sys.modules[__name__]}, force=force)


def uninstall() -> None:
    """Undo `install`; a displaced flash_attn_interface comes back."""
    aliases.take_out({"flash_attn_interface": sys.modules[__name__]})


@worded()
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    window_size: tuple[int, int] = UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q (batch, seqlen_q, heads, dim) to k, v; (out, lse) with `return_attn_probs`."""
    del num_splits, pack_gqa, sm_margin
    flags = _flags(softmax_scale, causal, window_size, softcap, deterministic)
    given = (q, k, v, qv, Descales(q_descale, k_descale, v_descale), _chunk_of(attention_chunk), flags)
    out, lse = without_gradients(attend_dense, *given) if _is_fp8(q) else attend_dense(*given)
    return (out, lse) if return_attn_probs else out


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, descales: Descales, chunk: int, flags: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(out, lse) with FA3's additions to dense attention; `flags` are those of `tilewise.attention`."""
    fp8 = _is_fp8(q)
    if fp8 and qv is None and not chunk:
        made = descales.containers(q, k, v, len(q), "bshd")
        return attention(*made, layout="bshd", return_lse=True, **flags)
    q, k, v, out_scale = descales.widened(q, k, v) if fp8 else (q, k, v, None)
    q, k = _lengthened(q, k, v, qv, fp8)
    if chunk:
        out, lse = _dense_chunks(q, k, v, chunk, flags)
    else:
        out, lse = attention(q, k, v, layout="bshd", return_lse=True, **flags)
    return rescaled(out, out_scale), lse


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    window_size: tuple[int, int] = UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of qkv (batch, seqlen, 3, heads, dim), or of stacked heads (batch, seqlen, heads + 2
    kv_heads, dim).
    """
    if qkv.dim() != 4:
        q, k, v = stacked("qkv", qkv, 3, 2)
    else:
        num_kv_heads, rest = divmod(qkv.shape[2] - (num_heads_q or 0), 2)
        if num_heads_q is None or rest or num_kv_heads < 1:
            fix = "It says how many of the stacked heads are query heads; those of k and v are as many each."
            expected = f"an integer that leaves an even number of qkv's {qkv.shape[2]} stacked heads"
            raise InvalidProblem("num_heads_q", expected, num_heads_q, fix)
        q, k, v = qkv.split([num_heads_q, num_kv_heads, num_kv_heads], 2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


@worded()
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    window_size: tuple[int, int] = UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of packed sequences, of which the first `seqused_*` rows count; other rows give 0 and lse -inf."""
    del num_splits, pack_gqa, sm_margin
    flags = _flags(softmax_scale, causal, window_size, softcap, deterministic)
    require_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    for name, number in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        flags[name] = length(name, number)
    packed = Packed(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    descales = Descales(q_descale, k_descale, v_descale)
    given = (q, k, v, qv, descales, packed, _chunk_of(attention_chunk), flags)
    out, lse = without_gradients(attend_packed, *given) if _is_fp8(q) else attend_packed(*given)
    return (out, lse) if return_attn_probs else out


class Packed(NamedTuple):
    """Where packed sequences begin, and how many of their rows count."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    descales: Descales,
    packed: Packed,
    chunk: int,
    flags: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """(out, lse) with FA3's additions to packed attention; `flags` are those of `tilewise.attention_varlen`."""
    fp8 = _is_fp8(q)
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = packed
    if fp8 and qv is None and not chunk and seqused_q is None and seqused_k is None:
        made = descales.containers(q, k, v, len(cu_seqlens_q) - 1, "packed")
        return attention_varlen(*made, cu_seqlens_q, cu_seqlens_k, return_lse=True, **flags)
    q, k, v, out_scale = descales.widened(q, k, v, cu_seqlens_q) if fp8 else (q, k, v, None)
    q, k = _lengthened(q, k, v, qv, fp8)
    if chunk or seqused_q is not None or seqused_k is not None:
        cu_seqlens_q, cu_seqlens_k = pieces.cut(
            cu_seqlens_q, cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k, chunk=chunk,
            max_seqlen_k=len(k) if flags["max_seqlen_k"] is None else flags["max_seqlen_k"],
        )  # fmt: skip
    out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, **flags)
    return rescaled(out, out_scale), lse


@worded(CACHE_NAMES | {"block_table": "page_table"})
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """FA2's `flash_attn_with_kvcache` with `page_table` for `block_table`, packed q and new k, and rotary offsets.

    With `return_softmax_lse` the result is (out, lse, out_accum, lse_accum) as in FA3; the accumulators are empty,
    because splits are merged inside the kernel. FP8 q, k, v and caches come with their descales, are appended unchanged
    and give bf16 out. Rejects `qv`, which would copy the whole cache at every step, and rotary tables together with
    FP8.
    """
    del scheduler_metadata, num_splits, pack_gqa, sm_margin
    require_tensors(q=q)
    _reject_for_caches(q, qv, rotary_cos)
    attention_chunk = _chunk_of(attention_chunk)
    store = cache.Store(k_cache, v_cache, page_table, cache_batch_idx, cache_leftpad)
    causal, window = flag_of("causal", causal), window_of(window_size)
    spread = causal or window is not None or attention_chunk > 0
    rotary = cache.Rotary.of(rotary_cos, rotary_sin, rotary_interleaved, spread=spread, offsets=rotary_seqlens)
    out, lse = cache.append_and_attend(
        q, k, v, store, cache_seqlens, rotary,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=length("max_seqlen_q", max_seqlen_q), chunk=attention_chunk,
        descales=Descales(q_descale, k_descale, v_descale), causal=causal, window=window, softcap=softcap_of(softcap),
        scale=number_of(softmax_scale, "softmax_scale"),
    )  # fmt: skip
    nothing = torch.empty(0, dtype=torch.float32, device=out.device)
    return (out, lse, nothing, nothing) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of partial results over disjoint keys: (splits, ..., heads, dim) with lse (splits, ..., heads).

    A partial result with lse -inf is ignored, even if it holds NaN. If all are, out is 0.
    """
    require_tensors(out_partial=out_partial, lse_partial=lse_partial)
    if lse_partial.shape != out_partial.shape[:-1] or out_partial.shape[0] == 0:
        expected = f"shape {tuple(out_partial.shape[:-1])}, out_partial's without its last dimension, one split or more"
        raise InvalidProblem("lse_partial", expected, tuple(lse_partial.shape), "Transpose it to (splits, ..., heads).")
    for name, tensor in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            fix = "Partial results have a floating-point dtype of 16 bits or more."
            raise InvalidProblem(name, "float32, bfloat16 or float16", tensor.dtype, fix)
    if out is not None and out.shape != out_partial.shape[1:]:
        fix = "It takes the merged result: out_partial's shape without the splits."
        raise InvalidProblem("out", f"shape {tuple(out_partial.shape[1:])}", tuple(out.shape), fix)
    # In fp32 for every dtype: the result is rounded once, at the end.
    parts = [part if part.dtype == torch.float64 else part.float() for part in out_partial.unbind()]
    merged, lse = merge_all(parts, lse_partial.unbind())
    merged = merged.to(out_partial.dtype if out_dtype is None else out_dtype)
    return merged if out is None else out.copy_(merged), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """An empty int32 tensor: tilewise plans inside the call, so there is nothing to prepare."""
    del batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, qkv_dtype, headdim_v, cu_seqlens_q
    del cu_seqlens_k_new, cache_leftpad, page_size, max_seqlen_k_new, causal, window_size, attention_chunk, has_softcap
    del num_splits, pack_gqa, sm_margin
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, out_accum, lse_accum) of dense, packed or cached keys; the accumulators are empty.

    Keys (batch, seqlen, ...) with `seqused_k`, `cu_seqlens_q` alone, pages, or new rows make it a call of
    `flash_attn_with_kvcache`, which has no gradient.
    """
    del scheduler_metadata, num_splits, pack_gqa, sm_margin
    window_size = window_size_left, window_size_right
    packed = cu_seqlens_k is not None
    cached: dict[str, Any] = {
        "k_new": k_new, "v_new": v_new, "cu_seqlens_k_new": cu_seqlens_k_new, "page_table": page_table,
        "kv_batch_idx": kv_batch_idx, "leftpad_k": leftpad_k, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin,
        "seqlens_rotary": seqlens_rotary,
    }  # fmt: skip
    is_cached = any(tensor is not None for tensor in cached.values())
    if packed and (is_cached or cu_seqlens_q is None):
        names = (
            ", ".join(name for name, tensor in cached.items() if tensor is not None) or "queries that are not packed"
        )
        raise Unsupported(f"cu_seqlens_k with {names}: packed keys are attended by packed queries alone")
    shared: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": causal, "qv": qv, "q_descale": q_descale, "k_descale": k_descale,
        "v_descale": v_descale, "window_size": window_size, "attention_chunk": attention_chunk, "softcap": softcap,
    }  # fmt: skip
    result: Any
    if packed:
        sequences: dict[str, Any] = {
            "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k, "seqused_q": seqused_q, "seqused_k": seqused_k,
        }  # fmt: skip
        result = flash_attn_varlen_func(q, k, v, return_attn_probs=True, **sequences, **shared)
    elif seqused_q is not None:
        raise Unsupported("seqused_q without cu_seqlens_q: pass running totals of the rows that are stored")
    elif is_cached or seqused_k is not None or cu_seqlens_q is not None:
        result = flash_attn_with_kvcache(
            q, k, v, k_new, v_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_seqlens=seqused_k,
            cache_batch_idx=kv_batch_idx, cache_leftpad=leftpad_k, page_table=page_table, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q, rotary_seqlens=seqlens_rotary,
            rotary_interleaved=rotary_interleaved, return_softmax_lse=True, **shared,
        )  # fmt: skip
    else:
        result = flash_attn_func(q, k, v, return_attn_probs=True, **shared)
    out, lse = result[:2]
    if out_ is not None:
        if out_.shape != out.shape or out_.dtype != out.dtype:
            got = f"{out_.dtype} {tuple(out_.shape)}"
            raise InvalidProblem("out_", f"{out.dtype} {tuple(out.shape)}", got, "It takes the result.")
        out = out_.copy_(out)
    nothing = torch.empty(0, dtype=torch.float32, device=out.device)
    return out, lse, nothing, nothing


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Writes dq, dk and dv of dense or packed sequences; returns softmax_d, the row sums of dout * out in lse's shape.

    With `sequed_q` and `sequed_k` (FA3's spelling) only the first rows of each sequence count; the gradients of others
    are 0.
    """
    del sm_margin
    packed = Packed(cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k)  # type: ignore[arg-type]
    given = (softmax_scale, is_causal, (window_size_left, window_size_right), softcap, deterministic)
    lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return _backward((dq, dk, dv), (q, k, v), (dout, out, softmax_lse), given, packed, lengths)


@worded(FLASH_NAMES | {"lse": "softmax_lse"})
def _backward(
    written: passes.Written,
    attended: tuple[Tensor, Tensor, Tensor],
    saved: tuple[Tensor, Tensor, Tensor],
    given: tuple[Any, ...],
    packed: Packed,
    lengths: dict[str, int | None],
) -> Tensor:
    flags = {**_flags(*given), "dropout": 0.0}
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = packed
    if cu_seqlens_q is None and cu_seqlens_k is None:
        if seqused_q is not None or seqused_k is not None:
            raise Unsupported("sequed_q, sequed_k without cu_seqlens: pass running totals of the rows that are stored")
        return passes.gradients_into(written, attended, saved, flags, None)
    require_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    flags |= {name: length(name, number) for name, number in lengths.items()}
    totals = cu_seqlens_q, cu_seqlens_k
    if seqused_q is not None or seqused_k is not None:
        totals = pieces.cut(*totals, seqused_q=seqused_q, seqused_k=seqused_k)
    return passes.gradients_into(written, attended, saved, flags, totals)


def _flags(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    deterministic: bool,
) -> dict[str, Any]:
    return {
        "causal": flag_of("causal", causal),
        "window": window_of(window_size),
        "softcap": softcap_of(softcap),
        "scale": number_of(softmax_scale, "softmax_scale"),
        "deterministic": True if flag_of("deterministic", deterministic) else None,
    }


def _is_fp8(q: object) -> bool:
    return getattr(q, "dtype", None) is E4M3


def _chunk_of(attention_chunk: object) -> int:
    chunk = attention_chunk if attention_chunk.__class__ is int else number_of(attention_chunk, "attention_chunk")
    if not isinstance(chunk, int) or chunk < 0:
        raise InvalidProblem("attention_chunk", "an integer >= 0", repr(attention_chunk), "0 switches it off.")
    return chunk


def _lengthened(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, fp8: bool) -> tuple[Tensor, Tensor]:
    """Scores q.k + qv.v are (q, qv).(k, v)."""
    if qv is None:
        return q, k
    if fp8:
        raise Unsupported("qv with FP8: pass q, k, v and qv in bf16")
    head_dim = q.shape[-1] + qv.shape[-1]
    if head_dim > MAX_HEAD_DIM:
        raise Unsupported(
            f"qv: head_dim + head_dim_v is {head_dim}, above {MAX_HEAD_DIM}; call flash_attn_func on the expanded keys "
            "(each head with its own k and v) instead of the latent ones"
        )
    return torch.cat((q, qv.to(q.dtype)), -1), torch.cat((k, v), -1)


def _dense_chunks(q: Tensor, k: Tensor, v: Tensor, chunk: int, flags: dict[str, Any]) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    totals = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    cuts = pieces.cut(totals * seqlen_q, totals * seqlen_k, chunk=chunk, max_seqlen_k=seqlen_k)
    out, lse = attention_varlen(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *cuts, max_seqlen_q=seqlen_q, max_seqlen_k=seqlen_k,
        return_lse=True, **flags,
    )  # fmt: skip
    return out.unflatten(0, (batch, seqlen_q)), lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)


def _reject_for_caches(q: Tensor, qv: Tensor | None, rotary_cos: Tensor | None) -> None:
    if qv is not None:
        raise Unsupported(
            "qv with a cache: concatenate k and v once when they are written, store that as k_cache, and pass q with "
            "qv appended to it"
        )
    if q.dtype == E4M3 and rotary_cos is not None:
        raise Unsupported("rotary tables with FP8: turn q and k before they are quantised")
