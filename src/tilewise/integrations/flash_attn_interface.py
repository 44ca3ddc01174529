"""flash-attn 3 by its own names (the module users import as `flash_attn_interface`).

Tensors as in FA2. `num_splits`, `pack_gqa`, `sm_margin` and `scheduler_metadata` tune FA3's own kernels: they are
accepted and change nothing, results do not depend on them. FP8 (e4m3) inputs with their descales run as tilewise's own
FP8, widened to bf16 only beside `attention_chunk` or `seqused_*`, and give bf16 out, as in FA3; descales of other
dtypes are ignored, as in FA3. `qv` adds qv.v to the scores by lengthening the keys, so head_dim + head_dim_v may be at
most 512. `attention_chunk` and `seqused_*` are exact and have gradients.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from tilewise.api import attention, attention_varlen, merge
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.integrations import aliases, cache, pieces
from tilewise.integrations.descales import Descale, Descales, rescaled
from tilewise.integrations.translation import (
    CACHE_NAMES,
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
    attention_chunk = _chunk_of(attention_chunk)
    fp8 = q.dtype == torch.float8_e4m3fn
    if fp8 and qv is None and not attention_chunk:
        made = Descales(q_descale, k_descale, v_descale).containers(q, k, v, len(q), "bshd")
        out, lse = attention(*made, layout="bshd", return_lse=True, **flags)
        return (out, lse) if return_attn_probs else out
    q, k, v, out_scale = Descales(q_descale, k_descale, v_descale).widened(q, k, v)
    q, k = _lengthened(q, k, v, qv, fp8)
    if attention_chunk:
        out, lse = _dense_chunks(q, k, v, attention_chunk, flags)
    else:
        out, lse = attention(q, k, v, layout="bshd", return_lse=True, **flags)
    out = rescaled(out, out_scale)
    return (out, lse) if return_attn_probs else out


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
    attention_chunk = _chunk_of(attention_chunk)
    fp8 = q.dtype == torch.float8_e4m3fn
    max_seqlen_q, max_seqlen_k = length("max_seqlen_q", max_seqlen_q), length("max_seqlen_k", max_seqlen_k)
    if fp8 and qv is None and not attention_chunk and seqused_q is None and seqused_k is None:
        made = Descales(q_descale, k_descale, v_descale).containers(q, k, v, len(cu_seqlens_q) - 1, "packed")
        flags |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        out, lse = attention_varlen(*made, cu_seqlens_q, cu_seqlens_k, return_lse=True, **flags)
        return (out, lse) if return_attn_probs else out
    q, k, v, out_scale = Descales(q_descale, k_descale, v_descale).widened(q, k, v, cu_seqlens_q)
    q, k = _lengthened(q, k, v, qv, fp8)
    if attention_chunk or seqused_q is not None or seqused_k is not None:
        cu_seqlens_q, cu_seqlens_k = pieces.cut(
            cu_seqlens_q, cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k, chunk=attention_chunk,
            max_seqlen_k=max_seqlen_k,
        )  # fmt: skip
    flags |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, **flags)
    out = rescaled(out, out_scale)
    return (out, lse) if return_attn_probs else out


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
    because splits are merged before they leave the kernel. FP8 q, k, v and caches come with their descales, are
    appended as they are and give bf16 out. Rejects `qv`, which would copy the whole cache at every step, and rotary
    tables beside FP8.
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
        max_seqlen_q=None if max_seqlen_q is None else length("max_seqlen_q", max_seqlen_q), chunk=attention_chunk,
        descales=Descales(q_descale, k_descale, v_descale), causal=causal, window=window, softcap=softcap_of(softcap),
        scale=number_of(softmax_scale),
    )  # fmt: skip
    nothing = torch.empty(0, dtype=torch.float32, device=out.device)
    return (out, lse, nothing, nothing) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of partial results over disjoint keys: (splits, ..., heads, dim) with lse (splits, ..., heads)."""
    if lse_partial.shape != out_partial.shape[:-1] or out_partial.shape[0] == 0:
        expected = f"shape {tuple(out_partial.shape[:-1])}, out_partial's without its last dimension, one split or more"
        raise InvalidProblem("lse_partial", expected, tuple(lse_partial.shape), "Transpose it to (splits, ..., heads).")
    # Flattened to (rows, 1, 1, dim) and (rows, 1, 1): merge asks for four dimensions, the rows are independent.
    shape = out_partial.shape[1:]
    parts = zip(
        out_partial.reshape(-1, shape[:-1].numel(), 1, 1, shape[-1]),
        lse_partial.flatten(1)[..., None, None],
        strict=True,
    )
    merged, lse = functools.reduce(lambda a, b: merge(*a, *b), parts)
    merged = merged.view(shape).to(out_partial.dtype if out_dtype is None else out_dtype)
    return merged if out is None else out.copy_(merged), lse.view(shape[:-1])


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
        "scale": number_of(softmax_scale),
        "deterministic": True if flag_of("deterministic", deterministic) else None,
    }


def _chunk_of(attention_chunk: object) -> int:
    chunk = number_of(attention_chunk)
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
    return out.view(batch, seqlen_q, *out.shape[1:]), lse.view(-1, batch, seqlen_q).transpose(0, 1)


def _reject_for_caches(q: Tensor, qv: Tensor | None, rotary_cos: Tensor | None) -> None:
    if qv is not None:
        raise Unsupported(
            "qv with a cache: concatenate k and v once when they are written, store that as k_cache, and pass q with "
            "qv appended to it"
        )
    if q.dtype == torch.float8_e4m3fn and rotary_cos is not None:
        raise Unsupported("rotary tables with FP8: turn q and k before they are quantised")
