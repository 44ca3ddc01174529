"""Other people's attention: FlexAttention, compiled, and the flash-attn packages where they are installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from suite.cases import Case
from suite.implementations import (
    Implementation,
    NotApplicable,
    Prepared,
    heads_first_leaves,
    tilewise_and_torch,
)
from suite.inputs import Inputs

__all__ = ["implementations"]

# Name, and the module with `flash_attn_func` and `flash_attn_varlen_func`.
FLASH_ATTN = {"fa2": "flash_attn", "fa3": "flash_attn_interface", "fa4": "flash_attn.cute.interface"}


def implementations(device: str) -> dict[str, Implementation]:
    """Everybody who could take part on a device, by name; those that cannot run here say why."""
    flex = Implementation("flex", _flex, _flex_missing(device), _keeping_buffers, compiles=True)
    found = [*tilewise_and_torch(device), flex]
    if device == "cuda":
        found += [
            Implementation(name, functools.partial(_flash_attn, name, module), _module_missing(module))
            for name, module in FLASH_ATTN.items()
        ]
    return {implementation.name: implementation for implementation in found}


def _module_missing(module: str) -> str | None:
    try:
        there = importlib.util.find_spec(module) is not None
    except ImportError:
        there = False
    return None if there else f"package {module} is not installed"


def _flex_missing(device: str) -> str | None:
    needed = "triton" if device == "cuda" else None
    return _module_missing(needed) if needed else None


def _keeping_buffers() -> Any:
    """Compiled backward passes may be run more than once, as the timing does."""
    from torch._functorch import config  # no public switch exists for this

    return config.patch(donated_buffer=False)


def _flex(case: Case, inputs: Inputs) -> Prepared:
    """Compiled for the shape; the block mask is made outside the timing."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if case.device == "cpu" and case.measure == "backward":
        raise NotApplicable("FlexAttention has no backward on the CPU")
    q, k, v = heads_first_leaves(case, inputs)
    torch.compiler.reset()  # else a ninth shape would silently run uncompiled
    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = None
    if case.causal or case.window is not None:
        block_mask = create_block_mask(_sees(case), None, None, case.seqlen_q, case.seqlen_k, device=case.device)
    gqa = case.num_heads != case.num_kv_heads
    return Prepared(lambda: compiled(q, k, v, block_mask=block_mask, enable_gqa=gqa), (q, k, v), inputs.dout)


def _sees(case: Case) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    band = case.band(case.seqlen_q, case.seqlen_k)
    left = band.seqlen_k if band.left is None else band.left
    right = band.seqlen_k if band.right is None else band.right
    offset = band.offset

    def sees(_b: Tensor, _h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return (n >= m + (offset - left)) & (n <= m + (offset + right))

    return sees


def _flash_attn(name: str, module: str, case: Case, inputs: Inputs) -> Prepared:
    """Sequence-first tensors, made so outside the timing."""
    library = importlib.import_module(module)
    unbounded = None if name == "fa4" else -1
    left, right = (unbounded if side is None else side for side in case.window or (None, None))
    flags = {"causal": case.causal, "window_size": (left, right)}
    if case.kind == "paged":
        raise NotApplicable("compared on dense keys")
    if case.kind == "varlen":
        q, k, v = (t.detach().requires_grad_(case.needs_grad) for t in (inputs.q, inputs.k, inputs.v))
        cu, longest = inputs.cu_seqlens, max(case.seqlens)
        packed = functools.partial(library.flash_attn_varlen_func, q, k, v, cu, cu, longest, longest, **flags)
        return Prepared(lambda: _first(packed()), (q, k, v), inputs.dout)
    dense = [t.transpose(1, 2).contiguous() for t in (inputs.q, inputs.k, inputs.v, inputs.dout)]
    q, k, v = (t.requires_grad_(case.needs_grad) for t in dense[:3])
    call = functools.partial(library.flash_attn_func, q, k, v, **flags)
    return Prepared(lambda: _first(call()), (q, k, v), dense[3], lambda t: t.transpose(1, 2))


def _first(result: Any) -> Tensor:
    """Some releases return (out, lse)."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out
