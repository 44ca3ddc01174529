"""`set_attention_backend("tilewise")` for Hugging Face diffusers.

    from tilewise.integrations.diffusers import register
    register()
    pipeline.transformer.set_attention_backend("tilewise")

Arguments mean what they mean to diffusers' "native" backend, which is torch's SDPA; `window_size`, `softcap` and
`return_lse` what they mean to its flash backends. Importing this module changes nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from tilewise.api import attention
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.integrations import translation
from tilewise.integrations.translation import UNBOUNDED, worded
from tilewise.units import counted

__all__ = ["NAME", "attend", "register"]

NAME, MEMBER = "tilewise", "TILEWISE"
# The oldest release whose arguments are known and tested.
OLDEST = (0, 42)
# diffusers' names of tilewise's arguments.
NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "mask": "attn_mask",
    "bias": "attn_mask",
    "dropout": "dropout_p",
    "window": "window_size",
}


def register() -> None:
    """Register tilewise with diffusers under the name "tilewise"; may be called again. Rejects releases before 0.42."""
    import diffusers

    if tuple(int(part) for part in diffusers.__version__.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise Unsupported(f"diffusers {diffusers.__version__} is older than {oldest}; upgrade diffusers")
    dispatch: Any = importlib.import_module("diffusers.models.attention_dispatch")
    names = dispatch.AttentionBackendName
    if NAME not in {name.value for name in names}:
        _add_member(names)
    dispatch._AttentionBackendRegistry.register(names(NAME))(attend)  # noqa: SLF001


def _add_member(names: Any) -> None:
    """Does what the class statement of an enumeration would: enumerations cannot be extended officially."""
    member: Any = str.__new__(names, NAME)
    member._name_, member._value_, member.__objclass__ = MEMBER, NAME, names
    member._sort_order_ = len(names)
    names._member_names_.append(MEMBER)
    names._member_map_[MEMBER] = names._value2member_map_[NAME] = member
    type.__setattr__(names, MEMBER, member)


@worded(NAMES)
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    _parallel_config: object = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of query (batch, seqlen_q, heads, dim) to key and value, for diffusers' dispatcher; with `return_lse`
    (out, lse), lse (batch, heads, seqlen_q).

    Every argument that a backend of diffusers takes is named here, because the dispatcher drops others. A mask is
    (batch, seqlen_k), or broadcasts to (batch, heads, seqlen_q, seqlen_k); a boolean one keeps what is True, a floating
    one is added. `is_causal` is aligned with the top-left corner, `window_size` with the bottom-right one.
    """
    if _parallel_config is not None:
        raise Unsupported(
            "context parallelism of diffusers: it is made for the backends that diffusers brings. Choose one of those, "
            "or see tilewise.distributed"
        )
    if return_attn_probs:
        raise Unsupported("return_attn_probs: pass return_lse=True, which is what diffusers' own kernels return by it")
    translation.require_tensors(query=query, key=key, value=value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            fix = "Reshape it."
            raise InvalidProblem(name, "(batch, seqlen, heads, dim)", f"shape {tuple(tensor.shape)}", fix)
    if not translation.flag_of("enable_gqa", enable_gqa) and query.shape[2] != key.shape[2]:
        fix = "Pass enable_gqa=True to let several query heads share a key head."
        raise InvalidProblem("key", f"{counted(query.shape[2], 'head')} as query has", key.shape[2], fix)
    window = translation.window_of(window_size)
    causal = translation.flag_of("is_causal", is_causal)
    if causal:
        if attn_mask is not None:
            fix = "Fold the triangle into attn_mask."
            raise InvalidProblem("attn_mask", "None because is_causal is True", "a mask", fix)
        if window is not None and query.shape[1] != key.shape[1]:
            fix = "They are aligned with different corners: pass a mask instead."
            raise InvalidProblem("window_size", "no window beside is_causal for unequal lengths", window, fix)
        causal, wide, key, value = translation.top_left(query, key, value, 1)
        window = wide or window
    flags: dict[str, Any] = {"causal": causal, "window": window, "softcap": translation.softcap_of(softcap)}
    flags |= {"dropout": translation.number_of(dropout_p, "dropout_p"), "scale": translation.number_of(scale, "scale")}
    flags["deterministic"] = True if translation.flag_of("deterministic", deterministic) else None
    if attn_mask is not None:
        translation.require_tensors(attn_mask=attn_mask)
        is_padding = tuple(attn_mask.shape) == (query.shape[0], key.shape[1])
        mask = attn_mask[:, None, None, :] if is_padding else attn_mask
        flags["bias" if mask.is_floating_point() else "mask"] = mask
    out, lse = attention(query, key, value, layout="bshd", return_lse=True, **flags)
    return (out, lse) if return_lse else out
