"""What transformers asks of a mask, as flags instead of a matrix.

transformers describes a mask by a function of (batch, head, query, key) made of a few known pieces. Where the pieces
are causality, a window, padding or packed sequences, `attention_mask_function` answers with nothing (None), with the
padding as a view (bidirectional), or with a `Structure`: flags, a (batch, 1, 1, keys) mask of the padding, and the
sequence each token belongs to. Everything else (chunks, image blocks, a model's own functions), and whatever must
keep its shape while it is traced, becomes the boolean matrix that transformers makes for SDPA, which is then all of
the mask.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tilewise.integrations.translation import Window

__all__ = ["Packing", "Structure", "attention_mask_function"]

MaskFunction = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Packing:
    """Several sequences in the rows of one batch, end to end."""

    cu_seqlens: Tensor
    max_seqlen: int


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """A mask without its matrix. `shape` and `ndim` are those of the matrix, which is how transformers knows one.

    `keys`: how many keys exist; the rest of a static cache is not written yet. The last query stands at the last of
    them. `keep` (batch, 1, 1, keys): False where a key is padding. `sequences` (batch, seqlen): which packed sequence
    a token belongs to.
    """

    shape: tuple[int, int, int, int]
    causal: bool
    window: Window | None
    keys: int
    keep: Tensor | None = None
    sequences: Tensor | None = None

    @property
    def ndim(self) -> int:
        """Dimensions of the matrix."""
        return 4

    def contiguous(self) -> Structure:
        """Itself: `generate` says this to the masks it makes ahead."""
        return self

    @functools.cached_property
    def packing(self) -> Packing:
        """The packed sequences by their bounds. Counting them makes the CPU wait for a GPU, once for all layers."""
        assert self.sequences is not None
        first = torch.ones_like(self.sequences, dtype=torch.bool)
        first[:, 1:] = self.sequences[:, 1:] != self.sequences[:, :-1]
        starts = first.flatten().nonzero().flatten()
        cu_seqlens = torch.cat([starts, starts.new_tensor([first.numel()])]).to(torch.int32)
        return Packing(cu_seqlens, int(cu_seqlens.diff().max()))


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """The known pieces that a mask function is a conjunction of."""

    causal: bool = False
    window: Window | None = None
    sequences: Tensor | None = None

    @property
    def everything(self) -> bool:
        """Whether every query sees every key, wherever the two stand."""
        return not self.causal and self.window is None and self.sequences is None


def attention_mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | Structure | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **others: Any,
) -> Tensor | Structure | None:
    """What `attention_forward` gets as `attention_mask`; called by transformers, once per kind of layer and forward.

    Query i stands at position q_offset + i, key j at kv_offset + j; `attention_mask` (batch, positions) is False for
    padding.
    """
    from transformers import masking_utils

    if isinstance(attention_mask, Structure):
        return attention_mask  # `generate` makes masks ahead and sends them through the model
    mask_function = masking_utils.causal_mask_function if mask_function is None else mask_function
    tracing = _tracing(attention_mask)
    pieces = _pieces(mask_function, tracing)
    shape = (batch_size, 1, q_length, kv_length)
    if pieces is not None and pieces.everything:
        keep = _padding(attention_mask, kv_offset, kv_length, tracing)
        if keep is not None or allow_is_bidirectional_skip:
            return None if keep is None else keep.expand(shape)
    elif pieces is not None:
        keys = _existing_keys(q_length, kv_length, q_offset, kv_offset, tracing)
        skip = allow_is_causal_skip if pieces.causal else allow_is_bidirectional_skip and keys == kv_length
        if keys is not None and (skip or pieces.sequences is not None):
            keep = _padding(attention_mask, kv_offset, keys, tracing)
            trivial = keep is None and pieces.sequences is None and keys == kv_length and _moot(pieces.window, keys)
            return None if trivial else Structure(shape, pieces.causal, pieces.window, keys, keep, pieces.sequences)
    # Where a matrix is wanted, all of it: a skipped one would mean something else to SDPA than to tilewise.
    matrix: Tensor = masking_utils.sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False, **others,
    )  # fmt: skip
    return matrix


def _tracing(attention_mask: Tensor | None) -> bool:
    """Whether values cannot be looked at: under torch.compile, export, fake tensors or a CUDA graph's capture."""
    if torch.compiler.is_compiling() or isinstance(attention_mask, FakeTensor):
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _existing_keys(q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int, tracing: bool) -> int | None:
    """How many keys there are up to the last query, or None where that is not to be known as a number.

    A static cache counts its tokens on the device. For one query the matrix is a row, cheaper than waiting for it.
    """
    if isinstance(q_offset, Tensor):
        if tracing or q_length == 1:
            return None
        q_offset = int(q_offset)
    keys = q_offset + q_length - kv_offset
    return keys if 0 < keys <= kv_length else None


def _padding(attention_mask: Tensor | None, kv_offset: int, keys: int, tracing: bool) -> Tensor | None:
    """(batch, 1, 1, keys), or None where nothing is padded, which one look per forward tells."""
    if attention_mask is None:
        return None
    keep = attention_mask[:, kv_offset : kv_offset + keys].to(torch.bool)
    if keep.shape[1] < keys:
        keep = torch.nn.functional.pad(keep, (0, keys - keep.shape[1]))
    if not tracing and bool(keep.all()):
        return None
    return keep[:, None, None, :]


def _moot(window: Window | None, keys: int) -> bool:
    """Whether a window hides nothing, nor the `sliding_window` that takes its place where there is no mask.

    In causal models that is the same window. To both sides it may be one key narrower: some models pass the W of
    their mask |i - j| <= W, which attention takes for W - 1 to each side.
    """
    if window is None:
        return True
    reach = keys - 1 if window[1] is None else keys
    return all(side is None or side >= reach for side in window)


def _pieces(mask_function: MaskFunction, tracing: bool) -> _Pieces | None:
    """The pieces of a mask function, or None if one of them is unknown."""
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return _Pieces(causal=True)
    if mask_function is masking_utils.bidirectional_mask_function:
        return _Pieces()
    if tracing:
        return None  # torch.compile does not look into closures
    pieces = _Pieces()
    for leaf in _conjuncts(mask_function):
        piece = _leaf(leaf)
        if (
            piece is None
            or (pieces.window and "window" in piece)
            or (pieces.sequences is not None and "sequences" in piece)
        ):
            return None
        pieces = dataclasses.replace(pieces, **piece)
    return pieces


def _conjuncts(mask_function: MaskFunction) -> Iterator[MaskFunction]:
    if getattr(mask_function, "__code__", None) is not _codes()["and"]:
        yield mask_function
        return
    for part in _captured(mask_function, "mask_functions") or (mask_function,):
        yield from _conjuncts(part) if part is not mask_function else (mask_function,)


def _leaf(mask_function: MaskFunction) -> dict[str, Any] | None:
    """The fields of `_Pieces` that a known function sets, or None if it is unknown."""
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return {"causal": True}
    if mask_function is masking_utils.bidirectional_mask_function:
        return {}
    code = getattr(mask_function, "__code__", None)
    if code is _codes()["sequences"]:
        sequences = _captured(mask_function, "packed_sequence_mask")
        return None if sequences is None else {"sequences": sequences}
    size = _captured(mask_function, "sliding_window")
    if code is _codes()["window"] and size is not None:
        return {"window": (size - 1, None)}
    if code is _codes()["symmetric window"] and size is not None:
        return {"window": (size, size)}
    return None


@functools.cache
def _codes() -> dict[str, CodeType]:
    """The bodies of the functions that transformers makes; closures of one kind share theirs."""
    from transformers import masking_utils

    made = {
        "and": masking_utils.and_masks(masking_utils.causal_mask_function),
        "window": masking_utils.sliding_window_overlay(1),
        "symmetric window": masking_utils.sliding_window_bidirectional_overlay(1),
        "sequences": masking_utils.packed_sequence_mask_function(torch.zeros(1, 1, dtype=torch.int64, device="cpu")),
    }
    return {name: function.__code__ for name, function in made.items()}


def _captured(function: MaskFunction, name: str) -> Any:
    """The value of a variable that a function has captured, or None."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(names, (cell.cell_contents for cell in cells), strict=True)).get(name)
