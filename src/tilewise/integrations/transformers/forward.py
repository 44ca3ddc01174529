"""The attention that models of transformers call: their arguments in the words of tilewise."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.api import attention, attention_varlen
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.integrations.transformers.masks import Packing, Structure, StructuredMask, packing_of, tracing
from tilewise.integrations.transformers.paged import Step, attend_to_cache
from tilewise.integrations.translation import Window, length
from tilewise.tile_masks import TileMask
from tilewise.units import counted

__all__ = ["attention_forward"]

# What models pass on to every attention and no attention acts on, under any name:
BOOKKEEPING = frozenset({
    # outputs, losses and caches
    "cache_position", "logits_indices", "logits_processor_args", "logits_to_keep", "num_items_in_batch",
    "output_router_logits", "return_dict",
    # the words themselves, by which some models choose experts
    "input_ids",
    # the sequences of Mamba's layers; attention has cu_seq_lens_q for the same
    "seq_idx",
    # pictures, which the vision tower takes, and which of their features it gives; their part in a mask is in the mask
    "image_position_ids", "mm_token_type_ids", "pixel_values", "pixel_values_videos", "video_position_ids",
    "vision_feature_layer", "vision_feature_select_strategy",
})  # fmt: skip


class _Mask(NamedTuple):
    """A mask in the words of `attention`."""

    causal: bool
    window: Window | None
    mask: Tensor | TileMask | None = None
    bias: Tensor | None = None
    keys: int | None = None
    packing: Packing | None = None


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Structure | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    position_bias: Tensor | None = None,
    deterministic: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Any = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: Any = None,
    position_ids: Tensor | None = None,
    as_flash: bool = False,
    ignore: frozenset[str] = frozenset(),
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query (batch, heads, seqlen_q, dim) to key, value (batch, kv_heads, seqlen_k, dim), as models of
    transformers call it. Returns (batch, seqlen_q, heads, dim) and None: there are no weights to return.

    The mask says everything where there is one; without one everything is seen unless `is_causal`, the last query at
    the last key. `s_aux` are sinks, `position_bias` a bias; `cu_seq_lens_*` mark packed sequences, and `cache` is the
    paged cache of continuous batching. `sliding_window` counts with a mask of padding, packed sequences and that
    cache, which cannot say it; elsewhere the mask does. Positions are in q and k already (rotary embeddings). Under a
    name that contains "flash" (`as_flash`) models leave masks out and mean the positions: then a sequence begins at
    every position 0. An argument that is not honoured raises Unsupported.
    """
    if is_causal is None:
        # Causal masks are never left out for tilewise: no mask means everything, as in eager attention. What only
        # flash-attn takes has no room for causality and leaves it to the module.
        leaves_out = as_flash or cache is not None or cu_seq_lens_q is not None or attention_mask is not None
        is_causal = leaves_out and getattr(module, "is_causal", True)
    causal = bool(is_causal)
    shared: dict[str, Any] = {"softcap": softcap, "sinks": s_aux, "scale": scaling, "deterministic": deterministic}
    if cache is not None:
        _require_no("continuous batching", dropout=dropout, position_bias=position_bias)
        if not causal:
            raise Unsupported("continuous batching is causal, and is_causal=False was asked for; use model.generate")
        if isinstance(attention_mask, Tensor) and not isinstance(attention_mask, StructuredMask):
            fix = 'use attn_implementation="tilewise_flash", for which transformers makes no mask'
            raise Unsupported(f"tilewise reads the paged cache without a mask, and one was passed; {fix}")
        longest = kwargs.pop("max_seqlen_q", max_length_q), kwargs.pop("max_seqlen_k", max_length_k)
        indices = kwargs.pop("read_index", []), kwargs.pop("write_index", []), kwargs.pop("block_table", None)
        _require_known(kwargs, ignore)
        layer_idx = getattr(module, "layer_idx", None)
        if not isinstance(layer_idx, int):
            raise Unsupported(f"{type(module).__name__} has no layer_idx, by which the paged cache knows its layers")
        step = Step(cu_seq_lens_q, cu_seq_lens_k, *longest, *indices, sliding_window)
        return attend_to_cache(layer_idx, query, key, value, cache, step, shared), None
    _require_known(kwargs, ignore)
    if query.shape[0] == 1 != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)  # learned queries, the same for every example
    mask = attention_mask.content if isinstance(attention_mask, StructuredMask) else attention_mask
    flags = _flags(mask, causal, sliding_window, query.shape[2], key.shape[2], is_packed=cu_seq_lens_q is not None)
    if cu_seq_lens_q is not None:
        _require_no("cu_seq_lens_q", attention_mask=flags.mask, float_mask=flags.bias, position_bias=position_bias)
        bounds = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        return _packed(query, key, value, bounds, flags, shared | {"dropout": dropout}), None
    if as_flash and mask is None:
        if sliding_window is not None and sliding_window < key.shape[2]:
            # Eager attention takes no notice of this argument, flash-attn does: one of them is wrong about this model.
            what = f"this model asks for a window of {sliding_window} under names that contain"
            raise Unsupported(f'{what} "flash" and for none elsewhere; use attn_implementation="tilewise"')
        flags = _packed_by_position(flags, position_ids, query, key)
    if flags.packing is not None:
        _require_no("packed sequences", position_bias=position_bias)
        bounds = (flags.packing.cu_seqlens,) * 2 + (flags.packing.max_seqlen,) * 2
        return _packed(query, key, value, bounds, flags, shared | {"dropout": dropout}), None
    bias = _bias(flags.bias, position_bias, key.shape[2], flags.keys)
    if flags.keys is not None and flags.keys < key.shape[2]:
        key, value = key[:, :, : flags.keys], value[:, :, : flags.keys]
    masks: dict[str, Any] = {"causal": flags.causal, "window": flags.window, "mask": flags.mask, "bias": bias}
    if query.shape[2] == 1:
        out = attention(query, key, value, dropout=dropout, **masks, **shared)
        return out.transpose(1, 2).contiguous(), None
    # The result is made in the order that models want, so that nothing is copied.
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out = attention(query, key, value, dropout=dropout, layout="bshd", **masks, **shared)
    return out.contiguous(), None


def _flags(mask: Any, causal: bool, sliding_window: int | None, queries: int, keys: int, is_packed: bool) -> _Mask:
    """What a mask of any kind says; where `is_packed` the bounds of the sequences are known already.

    A matrix or a structure leaves nothing to the other arguments.
    """
    window: Window | None = (
        None if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
    )
    if mask is None:
        return _Mask(causal, window if is_packed else None)
    if isinstance(mask, Structure):
        _require_length(mask.rows, mask.shape[3], queries, keys)
        if mask.sequences is not None and not is_packed:
            return _Mask(mask.causal, mask.window, packing=mask.packing)
        return _Mask(mask.causal, mask.window, mask.mask, keys=mask.keys)
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        expected = "None, a boolean mask of padding (batch, keys), or a boolean or float mask of four dimensions"
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidProblem("attention_mask", expected, got, "Leave the mask to the model, or make it one of these.")
    if mask.dim() == 2:
        _require_length(1, mask.shape[1], queries, keys)
        return _Mask(causal, window, mask[:, None, None, :].to(torch.bool))
    _require_length(mask.shape[2], mask.shape[3], queries, keys)
    if mask.dtype == torch.bool:
        return _Mask(False, None, mask)
    return _Mask(False, None, bias=mask)


def _require_length(rows: int, columns: int, queries: int, keys: int) -> None:
    """A mask that is shorter or longer than what it masks was made for something else."""
    if columns != keys or rows not in (1, queries):
        fix = (
            "Pass one for all keys. If it is, this model changes its queries or keys after it made the mask: "
            'use attn_implementation="eager".'
        )
        expected = f"a mask for {counted(queries, 'query', 'queries')} and {counted(keys, 'key')}"
        raise InvalidProblem("attention_mask", expected, f"one for {rows} and {columns}", fix)


def _packed_by_position(flags: _Mask, position_ids: Tensor | None, query: Tensor, key: Tensor) -> _Mask:
    """The sequences in one row of tokens that their positions (1, tokens), or coordinates (tokens, axes) or (axes, 1,
    tokens), tell apart.

    Reading positions makes the CPU wait for a GPU in every layer, as transformers' own path for flash-attn does.
    While a model is traced they cannot be read, and the sequences become a mask.
    """
    tokens = query.shape[2]
    if position_ids is None or query.shape[0] != 1 or tokens != key.shape[2] or position_ids.numel() % tokens:
        return flags  # a batch has a row for each sequence, and attention across has other positions
    is_pairs = position_ids.dim() == 2 and position_ids.shape[0] == tokens
    first = (position_ids == 0).all(-1) if is_pairs else (position_ids.reshape(-1, tokens) == 0).all(0)
    if tracing(position_ids):
        sequence = first.cumsum(0)
        return flags._replace(mask=(sequence[:, None] == sequence)[None, None])
    if not bool(first[1:].any()):
        return flags
    first[0] = True
    return flags._replace(packing=packing_of(first[None]))


def _packed(
    query: Tensor, key: Tensor, value: Tensor, bounds: tuple[Any, ...], flags: _Mask, shared: dict[str, Any]
) -> Tensor:
    """Packed sequences, in one row or in several."""
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    cu_seqlens_q, cu_seqlens_k = (b.to(torch.int32) for b in bounds[:2])
    max_seqlen_q, max_seqlen_k = (None if b is None else length("max_length", b) for b in bounds[2:])
    shared |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    shared |= {"causal": flags.causal, "window": flags.window}
    out: Tensor = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **shared)
    return out.reshape(query.shape[0], -1, *out.shape[1:])


def _bias(mask: Tensor | None, position_bias: Tensor | None, keys: int, existing: int | None) -> Tensor | None:
    """The sum of what is added to scores, for the keys that exist."""
    if position_bias is None:
        return mask
    if position_bias.shape[-1] not in (1, keys):
        fix = 'This model changes its keys after it made the bias: use attn_implementation="eager".'
        raise InvalidProblem(
            "position_bias", f"a bias for {counted(keys, 'key')}", f"one for {position_bias.shape[-1]}", fix
        )
    position_bias = position_bias[..., :existing]
    return position_bias if mask is None else position_bias + mask


def _require_no(where: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and value is not False and not (isinstance(value, float) and value == 0.0):
            raise Unsupported(f"tilewise does not take {name} together with {where}; leave one of them out")


def _require_known(kwargs: dict[str, Any], ignore: frozenset[str]) -> None:
    for name, value in kwargs.items():
        if value is None or value is False or name in BOOKKEEPING or name in ignore:
            continue
        if name == "output_attentions":
            fix = 'use attn_implementation="eager" to look at the weights, which tiling never forms'
        else:
            fix = f'if it does not change attention, say so with register(ignore=["{name}"])'
        raise Unsupported(f"tilewise does not honour the argument {name} of this model's attention; {fix}")
