"""Other people's attention: FlexAttention, compiled, and the flash-attn packages where they are installed.

FA3 has no wheel of its own. FA3_LIBRARY names the file `_vllm_fa3_C.abi3.so` of a vllm wheel: its forward alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from suite.cases import Case
from suite.implementations import Implementation, NotApplicable, Prepared, heads_first_leaves, tilewise_and_torch
from suite.inputs import Inputs

__all__ = ["implementations"]

FA3_LIBRARY = "FA3_LIBRARY"
# Name, and the module with `flash_attn_func` and `flash_attn_varlen_func`. FA4 installs a package flash_attn as well.
FLASH_ATTN = {
    "fa2": "flash_attn.flash_attn_interface",
    "fa3": "flash_attn_interface",
    "fa4": "flash_attn.cute.interface",
}


def implementations(device: str) -> dict[str, Implementation]:
    """Everybody who could take part on a device, by name; those that cannot run here say why."""
    flex = Implementation("flex", _flex, _flex_missing(device), _keeping_buffers, compiles=True)
    found = [*tilewise_and_torch(device), flex]
    if device == "cuda":
        found += [
            Implementation(name, functools.partial(_flash_attn, name, module), _module_missing(module))
            for name, module in FLASH_ATTN.items()
        ]
        if FA3_LIBRARY in os.environ:
            found.append(Implementation("fa3", _fa3_library))
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


def _fa3_library(case: Case, inputs: Inputs) -> Prepared:
    """Its operator takes packed queries, or one query for each of several dense or paged sequences."""
    if case.measure == "backward":
        raise NotApplicable("the library has no backward")
    torch.ops.load_library(os.environ[FA3_LIBRARY])
    forward = torch.ops._vllm_fa3_C.fwd  # noqa: SLF001, the name that the library registers
    left, right = (-1 if side is None else side for side in case.window or (None, None))
    longest = max(case.seqlens, default=case.seqlen_q)
    keys = max(case.seqlens, default=case.seqlen_k)
    restore: Callable[[Tensor], Tensor] = lambda t: t  # noqa: E731
    table = used = cu = None
    if case.seqlen_q == 1:
        used = torch.full((case.batch,), case.seqlen_k, device=case.device, dtype=torch.int32)
        q, k, v = (t.transpose(1, 2).contiguous() for t in (inputs.q, inputs.k, inputs.v))
        if case.kind == "paged":
            assert inputs.k_pages is not None
            assert inputs.v_pages is not None
            k, v, table = inputs.k_pages, inputs.v_pages, inputs.block_table
        restore = (lambda t: t[:, 0]) if case.kind == "paged" else (lambda t: t.transpose(1, 2))
    elif case.kind == "varlen":
        q, k, v, cu = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens
    else:
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (inputs.q, inputs.k, inputs.v))
        cu = torch.arange(case.batch + 1, device=case.device, dtype=torch.int32) * case.seqlen_q
        restore = lambda t: t.unflatten(0, (case.batch, case.seqlen_q)).transpose(1, 2)  # noqa: E731
    q, k, v = (t.detach() for t in (q, k, v))
    flags = (case.head_dim**-0.5, case.causal, left, right, 0.0, True, None, 0, None, 0, None, 1, 0, None)
    lists = (cu, cu, None, None, used, longest, keys, table, None, None, None, None, None, None, None, None)

    def call() -> Tensor:
        out: Tensor = forward(q, k, v, None, None, None, None, *lists, *flags)[0]
        return out

    return Prepared(call, (inputs.q, inputs.k, inputs.v), inputs.dout, restore)


def _first(result: Any) -> Tensor:
    """Some releases return (out, lse)."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out
