"""`flash_attn.bert_padding`: converts between padded (batch, seqlen, ...) tensors and packed (total, ...) ones."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tilewise.errors import InvalidProblem
from tilewise.integrations.translation import worded

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


@worded({})
def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """(packed, indices, cu_seqlens, max_seqlen, seqused) of hidden_states (batch, seqlen, ...).

    `attention_mask` (batch, seqlen), bool or 0/1, marks the valid tokens. Tokens of `unused_mask` are packed too, as
    unused room: cu_seqlens and max_seqlen then include them, seqused (batch,) does not.
    """
    masks = {"attention_mask": attention_mask} | ({} if unused_mask is None else {"unused_mask": unused_mask})
    for name, mask in masks.items():
        if mask.shape != hidden_states.shape[:2]:
            fix = "It marks tokens of hidden_states."
            raise InvalidProblem(name, f"shape {tuple(hidden_states.shape[:2])}", tuple(mask.shape), fix)
    allotted = functools.reduce(torch.logical_or, masks.values())
    seqlens = allotted.sum(-1, dtype=torch.int32)
    max_seqlen = _longest(seqlens, masks) if seqlens.numel() else 0
    indices = allotted.flatten().nonzero().flatten()
    cu_seqlens = F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, cu_seqlens, max_seqlen, attention_mask.sum(-1, dtype=torch.int32)


def _longest(seqlens: Tensor, masks: dict[str, Tensor]) -> int:
    """The longest sequence. Raises if a mask has other numbers than 0 and 1; both are read from the device at once."""
    if torch.compiler.is_compiling():  # a graph cannot branch on the contents of a mask
        return int(seqlens.max())
    others = torch.stack([(mask != mask.bool()).any() for mask in masks.values()])
    longest, *strange = torch.cat((seqlens.max().unsqueeze(0), others.to(torch.int32))).tolist()
    for name, is_strange in zip(masks, strange, strict=True):
        if is_strange:
            fix = "Of a mask to be added (0 and -inf) pass mask == 0, of numbers of sequences mask > 0."
            raise InvalidProblem(name, "True or 1 for tokens that count, else 0", "other numbers", fix)
    return int(longest)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, ...) with the packed rows at `indices` and zeros elsewhere: the inverse of `unpad_input`."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).view(batch, seqlen, *hidden_states.shape[1:])


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:  # noqa: A002
    """The rows of `input` at `indices`."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros with `first_axis_dim` rows, and `values` at `indices`."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)
