"""`torch.nn.functional.scaled_dot_product_attention`, computed by tilewise: same arguments, same meaning.

Three ways to use it, from the most explicit to the most sweeping; importing this module changes nothing:

    from tilewise.integrations.sdpa import scaled_dot_product_attention   # call it
    with sdpa.routed(): model(x)        # F.scaled_dot_product_attention and torch's layers in this block
    sdpa.register(); torch.nn.attention.activate_flash_attention_impl("tilewise")   # the flash kernels of SDPA itself

Torch aligns `is_causal` with the top-left corner (key j is seen by query i iff j <= i), tilewise with the bottom-right
one. Both are the same for equal lengths. With fewer queries than keys, no query sees the keys past the last query, and
they are sliced off; with more queries than keys, the rule is the window (None, seqlen_q - seqlen_k). Neither makes a
mask.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.backends import mha
from torch.nn import Parameter
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from tilewise.api import attention
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.integrations.translation import InvalidCall, number_of, top_left, worded
from tilewise.nn.multihead import multi_head_attention_forward
from tilewise.subclasses import check_class
from tilewise.tile_masks import TileMask
from tilewise.units import counted

__all__ = ["InvalidCall", "register", "routed", "scaled_dot_product_attention"]

# torch's names of tilewise's arguments.
NAMES = {"q": "query", "k": "key", "v": "value", "mask": "attn_mask", "bias": "attn_mask", "dropout": "dropout_p"}
PLAIN = (Tensor, Parameter)


@worded(NAMES)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | TileMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of query (..., heads, seqlen_q, dim) to key and value (..., kv_heads, seqlen_k, dim), as in torch.

    `attn_mask` is boolean (True = attend) or floating (added to the scores, differentiable) and broadcasts to (...,
    heads, seqlen_q, seqlen_k), or is a `torch.nn.attention.bias.CausalBias`, which makes no mask, or for tensors of
    four dimensions a `TileMask`. Unequal head counts need `enable_gqa`. Rejects `attn_mask` together with `is_causal`.

        >>> q = torch.ones(1, 2, 4, 8)
        >>> scaled_dot_product_attention(q, q, q, is_causal=True).shape
        torch.Size([1, 2, 4, 8])
    """
    is_causal = number_of(is_causal)
    triangle: Any = None
    plain = type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN
    if not (plain and (attn_mask is None or type(attn_mask) in PLAIN) and isinstance(is_causal, bool)):
        triangle = _checked(query, key, value, attn_mask, is_causal)
    if attn_mask is not None and is_causal:
        fix = "Fold the triangle into attn_mask, or call tilewise.attention, which takes both causal= and mask=."
        got = tuple(attn_mask.shape) if triangle is None else "a CausalBias"
        raise InvalidProblem("attn_mask", "None because is_causal is True", got, fix)
    tiles = attn_mask if isinstance(attn_mask, TileMask) else None
    if triangle is not None or isinstance(attn_mask, TileMask):
        attn_mask = None
    lead: torch.Size | None = None
    if not (query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]):
        if tiles is not None:
            fix = "Fold leading dimensions into the batch."
            raise InvalidProblem("query, key, value", "4 dimensions and one batch for a tile mask", "others", fix)
        lead, query, key, value, attn_mask = _four_dims(query, key, value, attn_mask)
    elif attn_mask is not None:
        _check_mask(attn_mask, query)
    heads = key.shape[1], value.shape[1]
    if min(heads) == 1 < max(heads):
        # A single head of either broadcasts to those of the other.
        key, value = (t.expand(-1, max(heads), -1, -1) for t in (key, value))
    _, num_heads, _, head_dim = query.shape
    num_kv_heads, head_dim_v = key.shape[1], value.shape[3]
    # Without `enable_gqa` torch only broadcasts a single head, or none, whose values are 0.
    if not enable_gqa and num_heads != num_kv_heads and not num_kv_heads == value.shape[1] <= 1:
        fix = "Pass enable_gqa=True to let several query heads share a key head."
        fix = "Expand the query to the heads of the key." if num_heads == 1 else fix
        raise InvalidProblem("key", f"{counted(num_heads, 'head')} as query has, or 1", num_kv_heads, fix)
    is_empty = not (num_heads and num_kv_heads and head_dim and head_dim_v)
    if is_empty:
        query, key, value, attn_mask = _filled(query, key, value, attn_mask)
    causal, window = False, None
    if triangle is not None:
        is_causal, causal = _alignment(triangle, query, key)
    if is_causal:
        causal, window, key, value = top_left(query, key, value)
    masked = attn_mask is not None and attn_mask.dtype == torch.bool
    mask, bias = (attn_mask, None) if masked else (tiles, attn_mask)
    flags = {"dropout": number_of(dropout_p), "scale": number_of(scale)}
    out: Tensor = attention(query, key, value, causal=causal, window=window, mask=mask, bias=bias, **flags)
    if is_empty:
        out = out[:, :num_heads, :, :head_dim_v]
    return out if lead is None else out.reshape(*lead, *out.shape[-2:])


def _checked(query: object, key: object, value: object, attn_mask: object, is_causal: object) -> Any:
    """Refuse what torch's own function refuses, and return an `attn_mask` whose alignment is known."""
    triangle = attn_mask if _is_causal_bias(attn_mask) else None
    attn_mask = None if isinstance(attn_mask, TileMask) else attn_mask
    for name, tensor in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if name == "attn_mask" and (tensor is None or triangle is not None):
            continue
        if not isinstance(tensor, Tensor):
            raise InvalidProblem(name, "a torch.Tensor", type(tensor).__name__, "Convert it with torch.as_tensor.")
        check_class(name, tensor)
    if not isinstance(is_causal, bool):
        raise InvalidProblem("is_causal", "True or False", repr(is_causal), "Pass a Python bool.")
    return triangle


def _is_causal_bias(mask: object) -> bool:
    if type(mask).__name__ != "CausalBias":
        return False
    # Imports torch's compiler, which making a CausalBias has loaded already.
    from torch.nn.attention.bias import CausalBias

    return type(mask) is CausalBias


def _alignment(triangle: Any, query: Tensor, key: Tensor) -> tuple[bool, bool]:
    """Whether a CausalBias is aligned with the top-left corner, and whether with the bottom-right one."""
    from torch.nn.attention.bias import CausalVariant

    lengths, own = (query.shape[-2], key.shape[-2]), (triangle.seq_len_q, triangle.seq_len_kv)
    if lengths != own:
        fix = "Make it for these lengths: the two corners move apart with them."
        raise InvalidProblem("attn_mask", f"a CausalBias for {lengths} (queries, keys)", f"one for {own}", fix)
    lower_right = triangle.variant == CausalVariant.LOWER_RIGHT
    return not lower_right, lower_right


def _filled(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Replace missing heads or features by one of zeros: then scores are 0, and so are the values of no head."""
    for name, size, other, owner, got in (
        ("k", "head_dim", query.shape[3], "query", key.shape[3]),
        ("v", "heads", key.shape[1], "key", value.shape[1]),
    ):
        if got != other:
            raise InvalidProblem(name, f"{size} {other} as in {owner}", got, f"Make their {size} agree.")
    if not query.shape[1]:
        key, value, mask = key[:, :1], value[:, :1], None
    padded = [F.pad(t, (0, not t.shape[3], 0, 0, 0, not t.shape[1])) for t in (query, key, value)]
    return padded[0], padded[1], padded[2], mask


def _four_dims(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[torch.Size, Tensor, Tensor, Tensor, Tensor | None]:
    """Leading dimensions broadcast and flattened into a batch, and the shape to restore."""
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
    batch = math.prod(batch_shape)
    q, k, v = (t.expand(*batch_shape, *t.shape[-3:]).reshape(batch, *t.shape[-3:]) for t in tensors)
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
    lead = mask.shape[:-3]
    # First, because an unbacked SymInt is known to equal nothing but itself.
    if len(lead) == len(batch_shape) and lead == batch_shape:
        return mask.reshape(math.prod(batch_shape), *mask.shape[-3:])
    if math.prod(lead) == 1:
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*batch_shape, *mask.shape[-3:]).reshape(math.prod(batch_shape), *mask.shape[-3:])


def _check_mask(mask: Tensor, query: Tensor) -> None:
    device = query.device.type
    # Autocast converts a mask of 16 bits with the query.
    is_cast = mask.dtype in (torch.float16, torch.bfloat16) and device != "meta" and torch.is_autocast_enabled(device)
    if mask.dtype not in (torch.bool, torch.float32, query.dtype) and not is_cast:
        fix = "Convert it: 0 and 1 by .bool(), what is added to the scores to the dtype of the query."
        raise InvalidProblem("attn_mask", f"a bool, torch.float32 or {query.dtype} tensor", mask.dtype, fix)
    if mask.dim() < 2:
        fix = "A mask of keys is attn_mask[None, :]."
        raise InvalidProblem("attn_mask", "at least 2 dimensions (seqlen_q, seqlen_k)", tuple(mask.shape), fix)


# The torch functions that are replaced, and their replacements.
ROUTES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    F.multi_head_attention_forward: worded(NAMES)(multi_head_attention_forward),
}


class _Routed(TorchFunctionMode):
    """Redirects the attention functions and leaves all others alone."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        return ROUTES.get(func, func)(*args, **(kwargs or {}))


class _FusedLayers:
    """Keeps torch's layers from their fused inference operators, which compute attention themselves, during blocks.

    In eager mode an active function mode does that. torch.compile ignores modes there, but respects torch's switch.
    """

    def __init__(self) -> None:
        self._lock, self._blocks, self._before = threading.Lock(), 0, True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        if torch.compiler.is_compiling():
            # Traced by one thread, which sees only the variable, not the function that sets it.
            before = mha.get_fastpath_enabled()
            mha._is_fastpath_enabled = False  # noqa: SLF001
            if mha.get_fastpath_enabled():
                raise Unsupported(f"routed() cannot be traced with torch {torch.__version__}: enter it around the call")
            try:
                yield
            finally:
                mha._is_fastpath_enabled = before  # noqa: SLF001
            return
        with self._lock:
            if not self._blocks:
                self._before = mha.get_fastpath_enabled()
                mha.set_fastpath_enabled(False)
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks:
                    mha.set_fastpath_enabled(self._before)


_FUSED_LAYERS = _FusedLayers()


@contextlib.contextmanager
def routed() -> Iterator[None]:
    """Within the block `F.scaled_dot_product_attention` is computed by tilewise, under any imported name.

    So is the attention of `nn.MultiheadAttention` and of torch's transformer layers: `F.multi_head_attention_forward`
    becomes `tilewise.nn.multi_head_attention_forward`. With `need_weights=True`, which asks for the matrix that tiling
    avoids, that is torch's own formula. These layers do not take their fused inference path (one operator for the whole
    layer) in the block. Its switch, `torch.backends.mha`, is off for the whole process while any thread is in a block.

    Nothing is patched: the block is a torch function mode, which belongs to the thread that entered it. Other threads,
    also ones started inside the block, keep torch's kernels; so does code that calls neither function, such as C++
    code. A call that tilewise cannot take raises; it never falls back to torch.
    """
    with _Routed(), _FUSED_LAYERS.off():
        yield


def register(name: str = "tilewise") -> None:
    """Register tilewise for `torch.nn.attention.activate_flash_attention_impl(name)`; activates nothing.

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
