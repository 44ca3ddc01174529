"""The attention that models of transformers call: their arguments in the words of tilewise."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tilewise.api import attention, attention_varlen
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.integrations.transformers.masks import Structure
from tilewise.integrations.transformers.paged import Step, attend_to_cache
from tilewise.integrations.translation import Window, length

__all__ = ["attention_forward"]

# What models pass on to every attention and no attention acts on: bookkeeping of outputs, losses and caches. Positions
# are in q and k already (rotary embeddings), and where they start again is in the mask.
BOOKKEEPING = frozenset({
    "cache_position", "logits_indices", "logits_processor_args", "logits_to_keep", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "seq_idx", "use_cache",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Mask:
    """A mask in the words of `attention`."""

    causal: bool
    window: Window | None
    mask: Tensor | None = None
    bias: Tensor | None = None
    keys: int | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None


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
    ignore: frozenset[str] = frozenset(),
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query (batch, heads, seqlen_q, dim) to key, value (batch, kv_heads, seqlen_k, dim), as models of
    transformers call it. Returns (batch, seqlen_q, heads, dim) and None: there are no weights to return.

    The mask says everything where there is one; without one `is_causal` (or the module's) and `sliding_window` hold,
    the last query at the last key. `s_aux` are sinks, `position_bias` a bias; `cu_seq_lens_*` mark packed sequences,
    and `cache` is the paged cache of continuous batching. An argument that is not honoured raises Unsupported.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    shared: dict[str, Any] = {"softcap": softcap, "sinks": s_aux, "scale": scaling, "deterministic": deterministic}
    if cache is not None:
        _require_no("continuous batching", dropout=dropout, position_bias=position_bias)
        _require_causal(causal, attention_mask)
        step = Step(
            cu_seq_lens_q, cu_seq_lens_k, kwargs.pop("max_seqlen_q", max_length_q),
            kwargs.pop("max_seqlen_k", max_length_k), kwargs.pop("read_index", []), kwargs.pop("write_index", []),
            kwargs.pop("block_table", None), sliding_window,
        )  # fmt: skip
        _require_known(kwargs, ignore)
        return attend_to_cache(_layer_index(module), query, key, value, cache, step, shared), None
    _require_known(kwargs, ignore)
    flags = _flags(attention_mask, causal, sliding_window, is_packed=cu_seq_lens_q is not None)
    if cu_seq_lens_q is not None:
        _require_no("cu_seq_lens_q", attention_mask=flags.mask, float_mask=flags.bias, position_bias=position_bias)
        bounds = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        return _packed(query, key, value, bounds, flags, dropout, shared), None
    if flags.cu_seqlens is not None:
        _require_no("packed sequences", position_bias=position_bias)
        bounds = (flags.cu_seqlens, flags.cu_seqlens, flags.max_seqlen, flags.max_seqlen)
        return _packed(query, key, value, bounds, flags, dropout, shared), None
    if flags.keys is not None and flags.keys < key.shape[2]:
        key, value = key[:, :, : flags.keys], value[:, :, : flags.keys]
    out = attention(
        query, key, value, causal=flags.causal, window=flags.window, mask=flags.mask,
        bias=_bias(flags.bias, position_bias, key.shape[2]), dropout=dropout, **shared,
    )  # fmt: skip
    return out.transpose(1, 2), None


def _flags(mask: Any, causal: bool, sliding_window: int | None, is_packed: bool) -> _Mask:
    """What a mask of any kind says; where `is_packed` the bounds of the sequences are known already.

    A matrix, or a structure with a window, leaves nothing to the other arguments.
    """
    window: Window | None = (
        None if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
    )
    if mask is None:
        return _Mask(causal, window)
    if isinstance(mask, Structure):
        window = mask.window or window
        if mask.sequences is not None and not is_packed:
            return _Mask(mask.causal, window, cu_seqlens=mask.packing.cu_seqlens, max_seqlen=mask.packing.max_seqlen)
        return _Mask(mask.causal, window, mask.keep, keys=mask.keys)
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        expected = "None, a boolean mask of padding (batch, keys), or a boolean or float mask of four dimensions"
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidProblem("attention_mask", expected, got, "Leave the mask to the model, or make it one of these.")
    if mask.dim() == 2:
        return _Mask(causal, window, mask[:, None, None, :].to(torch.bool))
    if mask.dtype == torch.bool:
        return _Mask(False, None, mask)
    return _Mask(False, None, bias=mask)


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: tuple[Any, ...],
    flags: _Mask,
    dropout: float,
    shared: dict[str, Any],
) -> Tensor:
    """Packed sequences, in one row or in several."""
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    cu_seqlens_q, cu_seqlens_k = (b.to(torch.int32) for b in bounds[:2])
    max_seqlen_q, max_seqlen_k = (None if b is None else length("max_length", b) for b in bounds[2:])
    out: Tensor = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        causal=flags.causal, window=flags.window, dropout=dropout, **shared,
    )  # fmt: skip
    return out.reshape(query.shape[0], -1, *out.shape[1:])


def _layer_index(module: torch.nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise Unsupported(f"{type(module).__name__} has no layer_idx, by which the paged cache knows its layers")
    return index


def _bias(mask: Tensor | None, position_bias: Tensor | None, keys: int) -> Tensor | None:
    if position_bias is None:
        return mask
    position_bias = position_bias[..., :keys]
    return position_bias if mask is None else position_bias + mask


def _require_no(where: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and value is not False and not (isinstance(value, float) and value == 0.0):
            raise Unsupported(f"tilewise does not take {name} together with {where}; leave one of them out")


def _require_causal(causal: bool, attention_mask: Any) -> None:
    if not causal:
        raise Unsupported("continuous batching is causal, and is_causal=False was asked for; use model.generate")
    if isinstance(attention_mask, Tensor):
        fix = 'use attn_implementation="tilewise_flash", for which transformers makes no mask'
        raise Unsupported(f"tilewise reads the paged cache without a mask, and one was passed; {fix}")


def _require_known(kwargs: dict[str, Any], ignore: frozenset[str]) -> None:
    for name, value in kwargs.items():
        if value is None or value is False or name in BOOKKEEPING or name in ignore:
            continue
        if name == "output_attentions":
            fix = 'use attn_implementation="eager" to look at the weights, which tiling never forms'
        else:
            fix = f'if it does not change attention, say so with register(ignore=["{name}"])'
        raise Unsupported(f"tilewise does not honour the argument {name} of this model's attention; {fix}")
