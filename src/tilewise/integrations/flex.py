"""`torch.nn.attention.flex_attention`, computed by tilewise without compiling anything: same arguments, same meaning.

    from tilewise.integrations.flex import create_block_mask, flex_attention

`create_block_mask` returns a TileMask. A BlockMask of torch is taken too, and converted at its first use. A mask_mod
is any function; a score_mod must be a `ScoreMod`, which names what the kernels have: softcap, ALiBi, a bias.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from tilewise.api import attention
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.integrations.translation import worded
from tilewise.tile_masks import TileMask, tile_mask
from tilewise.tiles import TILE

__all__ = ["ScoreMod", "create_block_mask", "flex_attention"]

# torch's names of tilewise's arguments.
NAMES = {
    "q": "query", "k": "key", "v": "value", "mask": "block_mask", "fn": "mask_mod", "seqlen_q": "Q_LEN",
    "seqlen_k": "KV_LEN", "batch": "B", "heads": "H",
}  # fmt: skip
# Tile masks of BlockMasks that are alive: a model passes one to all of its layers.
_CONVERTED: weakref.WeakKeyDictionary[BlockMask, TileMask] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """A score_mod that tilewise computes: softcap, then ALiBi, then a bias, as docs/contract.md defines them.

    It is a function of torch's signature as well, so that FlexAttention computes the same. `offset` is seqlen_k -
    seqlen_q, for ALiBi of unequal lengths.
    """

    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    offset: int = 0

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The changed score of one pair."""
        if self.softcap is not None:
            score = self.softcap * torch.tanh(score / self.softcap)
        if self.alibi_slopes is not None:
            slope = self.alibi_slopes[h] if self.alibi_slopes.dim() == 1 else self.alibi_slopes[b, h]
            score = score - slope * (kv_idx - q_idx - self.offset).abs()
        if self.bias is not None:
            shape = (1,) * (4 - self.bias.dim()) + tuple(self.bias.shape)
            at = [
                index if size > 1 else torch.zeros_like(index)
                for index, size in zip((b, h, q_idx, kv_idx), shape, strict=True)
            ]
            score = score + self.bias.reshape(shape)[at[0], at[1], at[2], at[3]]
        return score


@worded(NAMES)
def create_block_mask(
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    B: int | None,  # noqa: N803
    H: int | None,  # noqa: N803
    Q_LEN: int,  # noqa: N803
    KV_LEN: int,  # noqa: N803
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = TILE,  # noqa: N803
    _compile: bool = False,
) -> TileMask:
    """The tile mask of a mask_mod. `device` is the accelerator if there is one, as in torch; blocks are 128 x 128.

    Nothing is compiled, whatever `_compile` says: the function is evaluated once, some hundred tiles at a time.
    """
    if BLOCK_SIZE not in (TILE, (TILE, TILE)):
        raise InvalidProblem("BLOCK_SIZE", f"{TILE}", BLOCK_SIZE, "Leave it out: the mask means the same.")
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    return tile_mask(mask_mod, Q_LEN, KV_LEN, batch=B, heads=H, device=device)


@worded(NAMES)
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: TileMask | BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention of query (batch, heads, seqlen_q, dim) to key and value (batch, kv_heads, seqlen_k, dim), as in torch.

    `block_mask` is a TileMask or torch's BlockMask, `score_mod` a `ScoreMod` or None. `kernel_options` are those of
    torch's kernels and are refused, and so is the largest score in `return_aux`.

        >>> q = torch.ones(1, 2, 4, 8)
        >>> mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 4, 4, device="cpu")
        >>> flex_attention(q, q, q, block_mask=mask).shape
        torch.Size([1, 2, 4, 8])
    """
    if kernel_options:
        fix = "Leave them out: they tune torch's kernels, and tilewise chooses its own tiles."
        raise InvalidProblem("kernel_options", "None", sorted(kernel_options), fix)
    if return_aux is not None and return_aux.max_scores:
        raise Unsupported("the largest score of a row is not returned: ask for AuxRequest(lse=True) alone")
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        fix = "Pass enable_gqa=True to let several query heads share a key head."
        raise InvalidProblem("key", f"{query.shape[-3]} heads as query has", key.shape[-3], fix)
    flags = _score_flags(score_mod, key.shape[-2] - query.shape[-2])
    out, lse = attention(query, key, value, mask=_mask(block_mask), scale=scale, return_lse=True, **flags)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _score_flags(score_mod: Any, offset: int) -> dict[str, Any]:
    if score_mod is None:
        return {}
    if not isinstance(score_mod, ScoreMod):
        raise Unsupported(
            f"score_mod {getattr(score_mod, '__name__', score_mod)!r} is a function, which kernels would have to be "
            "compiled for. Softcap, ALiBi and a bias, which may be any function of the indices, are "
            "tilewise.integrations.flex.ScoreMod(softcap=..., alibi_slopes=..., bias=...); a condition belongs in the "
            "mask_mod"
        )
    if score_mod.alibi_slopes is not None and score_mod.offset != offset:
        expected = f"offset {offset}, which is seqlen_k - seqlen_q"
        fix = "The last query is aligned with the last key."
        raise InvalidProblem("score_mod", expected, score_mod.offset, fix)
    return {"softcap": score_mod.softcap, "alibi_slopes": score_mod.alibi_slopes, "bias": score_mod.bias}


def _mask(block_mask: TileMask | BlockMask | None) -> TileMask | None:
    if block_mask is None or isinstance(block_mask, TileMask):
        return block_mask
    if torch.compiler.is_compiling():
        raise Unsupported(
            "a BlockMask cannot be converted while torch.compile traces: convert it before, with "
            "tilewise.TileMask.from_block_mask(block_mask)"
        )
    found = _CONVERTED.get(block_mask)
    if found is None:
        found = _CONVERTED[block_mask] = TileMask.from_block_mask(block_mask)
    return found
