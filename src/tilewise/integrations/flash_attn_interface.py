"""flash-attn 3 by its own names (the module users import as `flash_attn_interface`).

Tensors as in FA2. `num_splits`, `pack_gqa`, `sm_margin` and `scheduler_metadata` tune FA3's own kernels: they are
accepted and change nothing. FP8 (e4m3) inputs with their descales run as tilewise's own FP8, widened to bf16 only
together with `attention_chunk` or `seqused_*`, and give bf16 out, as in FA3; descales of other dtypes are ignored, as
in FA3. `qv` adds qv.v to the scores: the keys are [v | k], without a copy where k is stored right behind v (a latent).
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
from tilewise.integrations import cache, flash, flash_operators, translation
from tilewise.integrations.flash import Descale, Descales, gradients_refused, rescaled
from tilewise.integrations.translation import CACHE_NAMES, FLASH_NAMES, UNBOUNDED, worded
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
    """Make `import flash_attn_interface` resolve to this module in this process, until `uninstall`.

    The operators `torch.ops.flash_attn_3` are registered too, as FA3's module does, unless flash-attn 3 is installed:
    then they are its own.
    """
    flash.put_in_place({"flash_attn_interface": sys.modules[__name__]}, force=force)
    register_operators()


def uninstall() -> None:
    """Undo `install`; a displaced flash_attn_interface comes back."""
    flash_operators.unregister()
    flash.take_out({"flash_attn_interface": sys.modules[__name__]})


def register_operators() -> bool:
    """Register `torch.ops.flash_attn_3`. False if flash-attn 3 is installed, whose own they are."""
    if flash_operators.is_installed():
        return False
    flash_operators.register(_flash_attn_forward, _flash_attn_backward, flash_attn_combine)
    return True


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
    flags = flash.flags_of(softmax_scale, causal, window_size, softcap, deterministic)
    descales = Descales(q_descale, k_descale, v_descale)
    out, lse = attend(q, k, v, qv, descales, None, _chunk_of(attention_chunk), flags)
    return (out, lse) if return_attn_probs else out


class Packed(NamedTuple):
    """Where packed sequences begin, and how many of their rows count."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None


@gradients_refused
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    descales: Descales,
    packed: Packed | None,
    chunk: int,
    flags: flash.Flags,
) -> tuple[Tensor, Tensor]:
    """(out, lse) with FA3's additions; `flags` are those of `attention`, or of `attention_varlen` if `packed`."""
    translation.require_tensors(q=q, k=k, v=v)
    fp8, dense = q.dtype is E4M3, packed is None
    shape, totals = q.shape[:2], None if packed is None else packed[:2]
    is_cut = chunk > 0 or (packed is not None and any(used is not None for used in packed[2:]))
    out_scale = None
    if fp8 and qv is None and not is_cut:
        batch = len(q) if totals is None else len(totals[0]) - 1
        q, k, v = descales.containers(q, k, v, batch, "bshd" if dense else "packed")  # type: ignore[assignment]
    else:
        if fp8:
            q, k, v, out_scale = descales.widened(q, k, v, None if totals is None else totals[0])
        q, k, v = _lengthened(q, k, v, qv, fp8)
    if is_cut:
        if packed is None:
            # Chunks of dense sequences are packed sequences, too.
            counts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
            packed = Packed(counts * q.shape[1], counts * k.shape[1])
            flags = flags | {"max_seqlen_q": q.shape[1], "max_seqlen_k": k.shape[1]}
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        most = flash.most_keys(packed[1], len(k), flags["max_seqlen_k"]) if chunk else 0
        totals = flash.cut(*packed, chunk=chunk, max_seqlen_k=most)
    if totals is None:
        out, lse = attention(q, k, v, layout="bshd", return_lse=True, **flags)
    else:
        out, lse = attention_varlen(q, k, v, *totals, return_lse=True, **flags)
        if dense:
            out, lse = out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1)
    return rescaled(out, out_scale), lse


@worded()
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
    """`flash_attn_func` of qkv (batch, seqlen, 3, heads, dim), or (batch, seqlen, heads + 2 kv_heads, dim)."""
    if qkv.dim() != 4:
        q, k, v = translation.stacked("qkv", qkv, 3, 2)
    else:
        num_kv_heads, rest = divmod(qkv.shape[2] - (num_heads_q or 0), 2)
        if num_heads_q is None or rest or num_kv_heads < 1:
            fix = "It says how many of the stacked heads are query heads; those of k and v are as many each."
            expected = f"an integer that leaves an even number of qkv's {qkv.shape[2]} stacked heads"
            raise InvalidProblem("num_heads_q", expected, num_heads_q, fix)
        q, k, v = qkv.split([num_heads_q, num_kv_heads, num_kv_heads], 2)
    del sm_margin
    given = (softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap)
    return flash_attn_func(q, k, v, *given, deterministic=deterministic, return_attn_probs=return_attn_probs)


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
    translation.require_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    flags = flash.flags_of(softmax_scale, causal, window_size, softcap, deterministic)
    flags |= flash.lengths_of(max_seqlen_q, max_seqlen_k)
    packed = Packed(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    descales = Descales(q_descale, k_descale, v_descale)
    out, lse = attend(q, k, v, qv, descales, packed, _chunk_of(attention_chunk), flags)
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
    because splits are merged inside the kernel. FP8 q, k, v and caches come with their descales, are appended unchanged
    and give bf16 out; rotary tables turn them in fp32, and they are rounded to e4m3 again. `qv` needs a cache that
    holds k right behind v, as columns of one tensor.
    """
    del scheduler_metadata, num_splits, pack_gqa, sm_margin
    translation.require_tensors(q=q)
    if qv is not None:
        translation.require_tensors(qv=qv)
    attention_chunk = _chunk_of(attention_chunk)
    store = cache.Store(k_cache, v_cache, page_table, cache_batch_idx, cache_leftpad)
    flags = flash.flags_of(softmax_scale, causal, window_size, softcap, False)
    spread = flags["causal"] or flags["window"] is not None or attention_chunk > 0
    rotary = cache.Rotary.of(rotary_cos, rotary_sin, rotary_interleaved, spread=spread, offsets=rotary_seqlens)
    out, lse = cache.append_and_attend(
        *(q, k, v, store, cache_seqlens, rotary),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=translation.length("max_seqlen_q", max_seqlen_q),
        chunk=attention_chunk,
        descales=Descales(q_descale, k_descale, v_descale),
        qv=qv,
        **flags,
    )
    return (out, lse, *_accumulators(out)) if return_softmax_lse else out


@worded()
def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of partial results over disjoint keys: (splits, ..., heads, dim) with lse (splits, ..., heads).

    A partial result with lse -inf is ignored, even if it holds NaN. If all are, out is 0.
    """
    translation.require_tensors(out_partial=out_partial, lse_partial=lse_partial)
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


@worded()
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
    if qv is not None and softmax_scale is None:
        # FA3's default here takes no account of qv; that of its public functions does.
        softmax_scale = q.shape[-1] ** -0.5
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    flags: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "qv": qv, "softcap": softcap, **descales}
    flags |= {"window_size": (window_size_left, window_size_right), "attention_chunk": attention_chunk}
    # Of these only caches know, under their names there.
    cached = {
        "k": ("k_new", k_new),
        "v": ("v_new", v_new),
        "cu_seqlens_k_new": ("cu_seqlens_k_new", cu_seqlens_k_new),
        "page_table": ("page_table", page_table),
        "cache_batch_idx": ("kv_batch_idx", kv_batch_idx),
        "cache_leftpad": ("leftpad_k", leftpad_k),
        "rotary_cos": ("rotary_cos", rotary_cos),
        "rotary_sin": ("rotary_sin", rotary_sin),
        "rotary_seqlens": ("seqlens_rotary", seqlens_rotary),
    }
    given = [name for name, tensor in cached.values() if tensor is not None]
    result: Any
    if cu_seqlens_k is not None:
        if given or cu_seqlens_q is None:
            names = ", ".join(given) or "queries that are not packed"
            raise Unsupported(f"cu_seqlens_k with {names}: packed keys are attended by packed queries alone")
        packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
        result = flash_attn_varlen_func(q, k, v, *packed, return_attn_probs=True, **flags)  # type: ignore[arg-type]
    elif seqused_q is not None:
        raise Unsupported("seqused_q without cu_seqlens_q: pass running totals of the rows that are stored")
    elif given or seqused_k is not None or cu_seqlens_q is not None:
        flags |= {name: tensor for name, (_, tensor) in cached.items()}
        flags |= {"cache_seqlens": seqused_k, "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
        flags["rotary_interleaved"] = rotary_interleaved
        result = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **flags)
    else:
        result = flash_attn_func(q, k, v, return_attn_probs=True, **flags)
    out, lse = result[:2]
    if out_ is not None:
        if out_.shape != out.shape or out_.dtype != out.dtype:
            got = f"{out_.dtype} {tuple(out_.shape)}"
            raise InvalidProblem("out_", f"{out.dtype} {tuple(out.shape)}", got, "It takes the result.")
        out = out_.copy_(out)
    return (out, lse, *_accumulators(out))


def _accumulators(out: Tensor) -> tuple[Tensor, Tensor]:
    """Empty, because splits are merged inside the kernel."""
    nothing = torch.empty(0, dtype=torch.float32, device=out.device)
    return nothing, nothing


@worded(FLASH_NAMES | {"lse": "softmax_lse"})
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
    window_size = window_size_left, window_size_right
    flags = flash.flags_of(softmax_scale, is_causal, window_size, softcap, deterministic, dropout=0.0)
    totals: flash.Totals = None
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        translation.require_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        flags |= flash.lengths_of(max_seqlen_q, max_seqlen_k)
        totals = cu_seqlens_q, cu_seqlens_k  # type: ignore[assignment]
    if sequed_q is not None or sequed_k is not None:
        if totals is None:
            raise Unsupported("sequed_q, sequed_k without cu_seqlens: pass running totals of the rows that are stored")
        totals = flash.cut(*totals, sequed_q, sequed_k)
    return flash.gradients_into((dq, dk, dv), (q, k, v), (dout, out, softmax_lse), flags, totals)


def _chunk_of(attention_chunk: object) -> int:
    chunk = translation.number_of(attention_chunk, "attention_chunk")
    if not isinstance(chunk, int) or chunk < 0:
        raise InvalidProblem("attention_chunk", "an integer >= 0", repr(attention_chunk), "0 switches it off.")
    return chunk


def _lengthened(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, fp8: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Scores q.k + qv.v are (qv, q).(v, k). The result's v is a view of its k."""
    if qv is None:
        return q, k, v
    if fp8:
        raise Unsupported("qv with FP8: pass q, k, v and qv in bf16")
    translation.require_tensors(qv=qv)
    if qv.shape != q.shape[:-1] + v.shape[-1:] or k.shape[:-1] != v.shape[:-1]:
        expected = "q's shape with the columns of v, beside k and v of as many rows"
        got = ", ".join(str(tuple(t.shape)) for t in (qv, q, k, v))
        raise InvalidProblem("qv", expected, f"qv, q, k and v of shapes {got}", "qv.v is added to q.k.")
    head_dim = q.shape[-1] + qv.shape[-1]
    if head_dim > MAX_HEAD_DIM:
        raise Unsupported(
            f"qv: head_dim + head_dim_v is {head_dim}, above {MAX_HEAD_DIM}; call flash_attn_func on the expanded keys "
            "(each head with its own k and v) instead of the latent ones"
        )
    # Gradients and compilers follow a copy, not memory that two tensors share.
    followed = (torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)) or torch.compiler.is_compiling()
    latent = None if followed else cache.latent_of(k, v)
    if latent is None:
        latent = torch.cat((v, k), -1)
    return torch.cat((qv.to(q.dtype), q), -1), latent, latent[..., : v.shape[-1]]
