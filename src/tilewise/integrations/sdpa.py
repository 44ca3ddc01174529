"""`torch.nn.functional.scaled_dot_product_attention`, answered by tilewise: same arguments, same meaning.

Three ways in, from the most explicit to the most sweeping; importing this module changes nothing:

    from tilewise.integrations.sdpa import scaled_dot_product_attention   # call it
    with sdpa.routed(): model(x)        # F.scaled_dot_product_attention in this block
    sdpa.register(); torch.nn.attention.activate_flash_attention_impl("tilewise")   # the flash kernels of SDPA itself

Torch aligns `is_causal` with the top-left corner (key j is seen by query i iff j <= i), tilewise with the
bottom-right one. Both are the same triangle for equal lengths. With fewer queries than keys the keys past the last
query are seen by nobody and are sliced off; with more queries than keys the rule is the window (None, seqlen_q -
seqlen_k). Neither makes a mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from tilewise.api import attention
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.integrations.translation import number_of, renamed

__all__ = ["register", "routed", "scaled_dot_product_attention", "top_left"]

# What torch calls the arguments of tilewise.
NAMES = {"q": "query", "k": "key", "v": "value", "mask": "attn_mask", "bias": "attn_mask", "dropout": "dropout_p"}


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of query (..., heads, seqlen_q, dim) to key and value (..., kv_heads, seqlen_k, dim), as in torch.

    `attn_mask` is boolean (True = attend) or floating (added to the scores, differentiable) and broadcasts to (...,
    heads, seqlen_q, seqlen_k). Unequal head counts need `enable_gqa`. Rejects `attn_mask` together with `is_causal`.

        >>> q = torch.ones(1, 2, 4, 8)
        >>> scaled_dot_product_attention(q, q, q, is_causal=True).shape
        torch.Size([1, 2, 4, 8])
    """
    is_causal = number_of(is_causal)
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if not (all(isinstance(tensor, Tensor) for tensor in tensors) and isinstance(is_causal, bool)):
        _refuse(query, key, value, attn_mask, is_causal)
    if attn_mask is not None and is_causal:
        fix = "Fold the triangle into attn_mask, or call tilewise.attention, which takes both causal= and mask=."
        raise InvalidProblem("attn_mask", "None because is_causal is True", tuple(attn_mask.shape), fix)
    lead: torch.Size | None = None
    if not (query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]):
        lead, query, key, value, attn_mask = _four_dims(query, key, value, attn_mask)
    elif attn_mask is not None:
        _check_mask(attn_mask, query)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        key, value = _one_head_for_all(query, key, value)
    window: tuple[int | None, int | None] | None = None
    if is_causal:
        is_causal, window, key, value = top_left(query, key, value)
    masked = attn_mask is not None and attn_mask.dtype == torch.bool
    try:
        out = attention(
            query, key, value, causal=is_causal, window=window, mask=attn_mask if masked else None,
            bias=None if masked else attn_mask, dropout=number_of(dropout_p), scale=number_of(scale),
        )  # fmt: skip
    except InvalidProblem as error:
        raise renamed(error, NAMES) from None
    return out if lead is None else out.reshape(*lead, *out.shape[-2:])


def _refuse(query: object, key: object, value: object, attn_mask: object, is_causal: object) -> NoReturn:
    """Say which of these is of another type than torch's own function takes."""
    for name, tensor in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(tensor, Tensor) and not (name == "attn_mask" and tensor is None):
            raise InvalidProblem(name, "a torch.Tensor", type(tensor).__name__, "Convert it with torch.as_tensor.")
    raise InvalidProblem("is_causal", "True or False", repr(is_causal), "Pass a Python bool.")


def top_left(q: Tensor, k: Tensor, v: Tensor) -> tuple[bool, tuple[int | None, int | None] | None, Tensor, Tensor]:
    """(causal, window, k, v) that keep key j for query i iff j <= i. Heads-first tensors."""
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    if seqlen_q > seqlen_k:
        return False, (None, seqlen_q - seqlen_k), k, v
    if seqlen_q < seqlen_k:
        k, v = k[..., :seqlen_q, :], v[..., :seqlen_q, :]
    return True, None, k, v


def _four_dims(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[torch.Size, Tensor, Tensor, Tensor, Tensor | None]:
    """Leading dimensions broadcast and flattened into a batch, and the shape to give back."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise InvalidProblem(
                name, "at least 2 dimensions (seqlen, dim)", f"shape {tuple(tensor.shape)}", "Add them."
            )
    tensors = [t[None] if t.dim() == 2 else t for t in (query, key, value)]
    shapes = [tuple(t.shape[:-3]) for t in tensors]
    try:
        batch_shape = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        fix = "Make the leading dimensions of query, key and value agree, or be 1."
        raise InvalidProblem("query, key, value", "leading dimensions that broadcast", shapes, fix) from None
    lead = torch.Size((*batch_shape, *tensors[0].shape[-3:-2]))
    q, k, v = (t.expand(*batch_shape, *t.shape[-3:]).reshape(-1, *t.shape[-3:]) for t in tensors)
    if max(query.dim(), key.dim(), value.dim()) == 2:
        lead = torch.Size(())
    if mask is not None:
        _check_mask(mask, query)
        mask = _four_dims_mask(mask, batch_shape)
    return lead, q, k, v, mask


def _four_dims_mask(mask: Tensor, batch_shape: torch.Size) -> Tensor:
    if mask.dim() > len(batch_shape) + 3:
        fix = "A mask has no more dimensions than the scores (..., heads, seqlen_q, seqlen_k)."
        raise InvalidProblem("attn_mask", f"at most {len(batch_shape) + 3} dimensions", tuple(mask.shape), fix)
    if mask.dim() <= 3:
        return mask
    if mask.shape[:-3].numel() == 1:
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*batch_shape, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])


def _check_mask(mask: Tensor, query: Tensor) -> None:
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        fix = "Convert it: 0 and 1 by .bool(), what is added to the scores to the dtype of the query."
        raise InvalidProblem("attn_mask", f"a bool, torch.float32 or {query.dtype} tensor", mask.dtype, fix)
    if mask.dim() < 2:
        fix = "A mask of keys is attn_mask[None, :]."
        raise InvalidProblem("attn_mask", "at least 2 dimensions (seqlen_q, seqlen_k)", tuple(mask.shape), fix)


def _one_head_for_all(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Without `enable_gqa` torch only broadcasts a single head."""
    if key.shape[1] == value.shape[1] == 1:
        return key, value
    if query.shape[1] == 1:
        fix = "Expand the query to the heads of the key."
    else:
        fix = "Pass enable_gqa=True to let several query heads share a key head."
    raise InvalidProblem("key", f"{query.shape[1]} heads as query has, or 1", key.shape[1], fix)


class _Routed(TorchFunctionMode):
    """Sends one torch function elsewhere and leaves all others alone."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        target = scaled_dot_product_attention if func is F.scaled_dot_product_attention else func
        return target(*args, **(kwargs or {}))


@contextlib.contextmanager
def routed() -> Iterator[None]:
    """Within the block `F.scaled_dot_product_attention` is computed by tilewise, under whatever name it was imported.

    Nothing is patched: the block is a torch function mode, which belongs to the thread that entered it. Other
    threads, also ones started inside the block, keep torch's kernels; so does what never calls the Python function,
    such as the fused inference path of `nn.TransformerEncoderLayer`. A call tilewise cannot take raises; it is never
    handed back.
    """
    with _Routed():
        yield


def register(name: str = "tilewise") -> None:
    """Offer tilewise to `torch.nn.attention.activate_flash_attention_impl(name)`; activates nothing.

    Once activated, the flash kernels behind SDPA (also in C++ callers) are tilewise's, on CUDA and CPU, until
    `torch.nn.attention.restore_flash_attention_impl()`. Rejects a torch without that registry.
    """
    offer = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if offer is None:
        raise Unsupported(
            f"torch {torch.__version__} has no register_flash_attention_impl; use sdpa.routed() or call "
            "sdpa.scaled_dot_product_attention"
        )
    from tilewise.integrations.aten import activate

    offer(name, register_fn=activate)
