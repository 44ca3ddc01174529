"""The operators of flash-attn 3, `torch.ops.flash_attn_3`, made of the functions of its drop-in.

Schemas are those of FA3: `fwd`, `bwd`, `fwd_combine` and `get_scheduler_metadata`. They run on CPUs too and have no
gradient, as in FA3. Nor can torch.compile trace them: an output that may be an input (`out`) is in FA3's schema.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "flash_attn_3"
SCHEMAS = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None) "
    "-> (Tensor(out!), Tensor)",
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? leftpad_k=None, "
    "int? page_size=None, int max_seqlen_k_new=0, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, bool has_softcap=False, int num_splits=0, bool? pack_gqa=None, "
    "int sm_margin=0) -> Tensor",
)

# What was registered. Like the operators, this is state of the process.
_registered: list[torch.library.Library] = []


def is_installed() -> bool:
    """Whether flash-attn 3 itself is installed, or its operators are registered by others."""
    if _registered:
        return False
    return hasattr(getattr(torch.ops, NAMESPACE), "fwd") or importlib.util.find_spec(NAMESPACE) is not None


def register(
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., Tensor],
    combine: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    """Register the operators, made of FA3's `_flash_attn_forward`, `_flash_attn_backward` and `flash_attn_combine`,
    until `unregister`. A second call does nothing.
    """
    if _registered:
        return

    def fwd(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        given = _named("fwd", args, kwargs)
        return forward(**{_RENAMED.get(name, name): value for name, value in given.items()})

    def bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        given = _named("bwd", args, kwargs)
        given["sequed_q"], given["sequed_k"] = given.pop("seqused_q"), given.pop("seqused_k")
        softmax_d = backward(**given)
        return softmax_d, *(softmax_d.new_empty(0) for _ in range(4))

    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for schema, function in zip(SCHEMAS, (fwd, bwd, combine, _get_scheduler_metadata), strict=True):
        library.define(schema)
        library.impl(schema.split("(")[0], torch.no_grad()(function), "CompositeExplicitAutograd")
    _registered.append(library)


def unregister() -> None:
    """Undo `register`. Harmless when nothing is registered."""
    while _registered:
        _registered.pop()._destroy()  # noqa: SLF001
    # Operators that were looked up stay attributes of the namespace.
    namespace = getattr(torch.ops, NAMESPACE)
    for schema in SCHEMAS:
        namespace.__dict__.pop(schema.split("(")[0], None)


# The arguments of `_flash_attn_forward` that have another name in the operator.
_RENAMED = {"q_v": "qv", "out": "out_", "is_causal": "causal", "is_rotary_interleaved": "rotary_interleaved"}


def _named(schema: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with the defaults of the schema."""
    arguments = getattr(getattr(torch.ops, NAMESPACE), schema).default._schema.arguments  # noqa: SLF001
    names = [argument.name for argument in arguments]
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return defaults | dict(zip(names, args, strict=False)) | kwargs


def _get_scheduler_metadata(*args: Any, **kwargs: Any) -> Tensor:
    lengths: Tensor = _named("get_scheduler_metadata", args, kwargs)["seqused_k"]
    return torch.empty(0, dtype=torch.int32, device=lengths.device)
