"""Replacements of the flash kernels behind torch's SDPA, for `torch.nn.attention.activate_flash_attention_impl`.

Four aten kernels, forward and backward for CUDA and for CPU. Torch still chooses which calls are flash calls (on CUDA:
fp16 or bf16, no mask); only those come here. Results have the memory layout that torch's meta kernels promise, so
compiled graphs stay valid.

`is_causal` means different alignments in the two pairs. Torch's CUDA kernels align it with the bottom-right corner:
SDPA, which means the top-left one, sends them equal lengths only, and `causal_lower_right` sends them the others. The
CPU kernels align it with the top-left corner, and get both from SDPA.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tilewise.api import attention, attention_backward
from tilewise.errors import Unsupported
from tilewise.integrations.translation import top_left

FlashResult = tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]
DenseGradients = tuple[Tensor, Tensor, Tensor]


class Activation(NamedTuple):
    """Keeps the kernels registered until `remove`, which torch calls when another implementation is chosen."""

    libraries: list[torch.library.Library]

    def remove(self) -> None:
        """Restore torch's own kernels."""
        while self.libraries:
            self.libraries.pop()._destroy()  # noqa: SLF001


def activate() -> Activation:
    """Replace torch's flash kernels on CUDA and CPU."""
    cuda, cpu = (torch.library.Library("aten", "IMPL", key) for key in ("CUDA", "CPU"))
    with warnings.catch_warnings():
        # Torch warns that a kernel is being replaced, which is what the user asked for.
        warnings.simplefilter("ignore", UserWarning)
        cuda.impl("_scaled_dot_product_flash_attention", flash_forward)
        cuda.impl("_scaled_dot_product_flash_attention_backward", flash_backward)
        cpu.impl("_scaled_dot_product_flash_attention_for_cpu", cpu_forward)
        cpu.impl("_scaled_dot_product_flash_attention_for_cpu_backward", cpu_backward)
    return Activation([cuda, cpu])


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> FlashResult:
    """aten::_scaled_dot_product_flash_attention; the dropout seed is returned in `rng_state`."""
    if return_debug_mask:
        raise Unsupported("return_debug_mask: the debug mask is flash-attn's own; use return_attn_probs of the drop-in")
    rng_state = torch.zeros(2, dtype=torch.int64, device="cpu")
    if dropout_p:
        rng_state.random_(-(2**63), 2**63 - 1)
    rng_state = rng_state.to(query.device)
    flags: dict[str, Any] = {"causal": is_causal, "scale": scale, "dropout": dropout_p, "seed": rng_state[0]}
    out, lse = attention(query, key, value, return_lse=True, **flags)
    out = _laid_out_like(out, torch.empty_like(query))
    unused = rng_state.new_zeros(()).view(torch.uint64)
    return out, lse, None, None, query.shape[2], key.shape[2], rng_state.view(torch.uint64), unused, query.new_empty(0)


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    _cum_seq_q: Tensor | None,
    _cum_seq_k: Tensor | None,
    _max_q: int,
    _max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    _philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> DenseGradients:
    """aten::_scaled_dot_product_flash_attention_backward."""
    seed = philox_seed.view(torch.int64)[0] if dropout_p else None
    flags: dict[str, Any] = {"causal": is_causal, "scale": scale, "dropout": dropout_p, "seed": seed}
    given, saved = (query, key, value), (grad_out, out, logsumexp)
    gradients = attention_backward("dense", given, saved, (True, True, True), **flags)
    dq, dk, dv = (_laid_out_like(g, torch.empty_like(t)) for g, t in zip(gradients, given, strict=True))
    return dq, dk, dv


def cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_for_cpu; torch calls it without dropout."""
    key, value, flags = _as_flags(query, key, value, is_causal, attn_mask)
    out, lse = attention(query, key, value, return_lse=True, scale=scale, dropout=dropout_p, **flags)
    out = _laid_out_like(out, torch.empty_like(query))
    batch, num_heads, seqlen_q = lse.shape
    return out, _laid_out_like(lse, lse.new_empty(batch, seqlen_q, num_heads).transpose(1, 2))


def cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> DenseGradients:
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward."""
    seen, values, flags = _as_flags(query, key, value, is_causal, attn_mask)
    given, saved = (query, seen, values), (grad_out, out, logsumexp)
    flags |= {"scale": scale, "dropout": dropout_p}
    dq, dk, dv = attention_backward("dense", given, saved, (True, True, True), **flags)
    if unseen := key.shape[2] - seen.shape[2]:
        dk, dv = (F.pad(g, (0, 0, 0, unseen)) for g in (dk, dv))
    dq, dk, dv = (
        _laid_out_like(g, torch.empty_permuted(g.shape, (0, 2, 1, 3), dtype=g.dtype, device=g.device))
        for g in (dq, dk, dv)
    )
    return dq, dk, dv


def _as_flags(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The keys and values that some query sees, and the flags of masks aligned with the top-left corner."""
    flags: dict[str, Any] = {}
    if is_causal:
        flags["causal"], flags["window"], key, value = top_left(query, key, value)
    if mask is not None:
        flags["mask" if mask.dtype == torch.bool else "bias"] = mask
    return key, value, flags


def _laid_out_like(result: Tensor, empty: Tensor) -> Tensor:
    """`result` with the strides of `empty`, copied only if they differ."""
    return result if result.stride() == empty.stride() else empty.copy_(result)
