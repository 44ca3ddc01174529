"""What transformers asks of a mask, as flags instead of a matrix.

transformers describes a mask by a function of (batch, head, query, key) made of a few known pieces. Where the pieces
are causality, a window, padding or packed sequences, a `Structure` says the same: flags, a (batch, 1, 1, keys) mask of
the padding, and the sequence each token belongs to. Everything else (chunks, image blocks, a model's own functions) is
a tile mask, made once for all layers, whose empty tiles are not computed; for few queries, and for whatever must keep
its shape while it is traced, it is a boolean matrix in `Structure.keep`.

Not every attention is tilewise's: some modules of transformers apply the mask themselves, and some edit it first. So
`attention_mask_function` answers with a `StructuredMask`, a tensor that is the matrix which the model's default
attention gets: a boolean one where that is sdpa, a float one where it is eager attention. The matrix is made when
someone reads it; `attention_forward` takes the structure instead.
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
from torch.utils._pytree import tree_map_only

from tilewise.integrations.translation import Window
from tilewise.tile_masks import TileMask
from tilewise.tiles import TILE

MaskFunction = Callable[..., Any]

# From so many queries on a mask without flags is a tile mask: fewer are one row of tiles.
MANY_QUERIES = 2 * TILE

# Classes of configurations whose models get booleans from transformers unless another attention is asked for.
READ_BOOLEANS: set[type] = set()


@dataclasses.dataclass(frozen=True)
class Packing:
    """Several sequences in the rows of one batch, end to end."""

    cu_seqlens: Tensor
    max_seqlen: int


def packing_of(first: Tensor) -> Packing:
    """The packed sequences by their bounds; `first` (batch, seqlen) is True where one begins.

    Counting them makes the CPU wait for a GPU.
    """
    starts = first.flatten().nonzero().flatten()
    cu_seqlens = torch.cat([starts, starts.new_tensor([first.numel()])]).to(torch.int32)
    return Packing(cu_seqlens, int(cu_seqlens.diff().max()))


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """A mask without its matrix. `shape` and `ndim` are those of the matrix, which is how transformers knows one.

    `keys`: how many keys exist; the rest of a static cache is not written yet. The last query stands at the last of
    them. `keep` broadcasts to (batch, 1, queries, keys): False where a key is hidden, for one query or for all of them.
    `sequences` (batch, seqlen): which packed sequence a token belongs to. `make` makes the matrix of any other mask.
    """

    shape: tuple[int, int, int, int]
    keys: int
    keep: Tensor | None = None
    causal: bool = False
    window: Window | None = None
    sequences: Tensor | None = None
    make: Callable[[], Tensor] | None = None

    @property
    def ndim(self) -> int:
        """Dimensions of the matrix."""
        return 4

    @property
    def rows(self) -> int:
        """For how many queries it is, 1 if it is the same for any."""
        same = self.make is None and (self.keep is None or self.keep.shape[2] == 1)
        return 1 if same and not self.causal and self.window is None and self.sequences is None else self.shape[2]

    @property
    def mask(self) -> Tensor | TileMask | None:
        """What hides keys beyond the flags."""
        return self.keep if self.make is None else self._tiles

    @functools.cached_property
    def _tiles(self) -> TileMask:
        """The tile mask of `make`, made once for all layers."""
        assert self.make is not None
        return TileMask.from_dense(self.make())

    @functools.cached_property
    def packing(self) -> Packing:
        """The packed sequences by their bounds, counted once for all layers."""
        assert self.sequences is not None
        first = torch.ones_like(self.sequences, dtype=torch.bool)
        first[:, 1:] = self.sequences[:, 1:] != self.sequences[:, :-1]
        return packing_of(first)


class StructuredMask(Tensor):
    """A mask that knows its structure: a matrix of booleans, True where a key is seen, or of numbers to add to scores.

    The matrix is made by the first operation on it.
    """

    _structure: Structure
    _make: Callable[[], Tensor]
    _matrix: Tensor | None

    @staticmethod
    def __new__(  # noqa: PYI034
        cls, structure: Structure, make: Callable[[], Tensor], dtype: torch.dtype, device: torch.device | str
    ) -> StructuredMask:
        """`make` makes the matrix."""
        mask: StructuredMask = Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, structure.shape, dtype=dtype, device=torch.device(device)
        )
        mask._structure, mask._make, mask._matrix = structure, make, None
        return mask

    @property
    def matrix(self) -> Tensor:
        """What sdpa or eager attention would get."""
        if self._matrix is None:
            self._matrix = self._make()
        return self._matrix

    @property
    def content(self) -> Structure | Tensor:
        """The structure, or the matrix once it may have been written to."""
        # Versions count writes, also those into views, but are not kept in inference mode.
        if self._matrix is None or not (self.is_inference() or self._version):
            return self._structure
        return self._matrix

    def contiguous(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002
        """Itself: `generate` says this to the masks it makes ahead."""
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StructuredMask({self._structure})"

    # Results of operations are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # noqa: SLF001

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(StructuredMask, lambda mask: mask.matrix, (args, kwargs or {}))
        return func(*args, **kwargs)


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
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | Structure | None:
    """What `attention_forward` gets as `attention_mask`; called by transformers, once per kind of layer and forward.

    Query i stands at position q_offset + i, key j at kv_offset + j; `attention_mask` (batch, positions) is False for
    padding. The answer is None only where everything is seen and eager attention gets None, too. `others` has the
    configuration of the model, by which `dtype` is chosen.
    """
    from transformers import masking_utils

    dtype = torch.bool if type(others.get("config")) in READ_BOOLEANS else dtype

    if isinstance(attention_mask, Structure):
        return attention_mask  # made by an outer model while it is traced
    mask_function = masking_utils.causal_mask_function if mask_function is None else mask_function
    is_traced = tracing(attention_mask)
    if isinstance(q_offset, Tensor):
        # The matrix may be made after the cache has counted the new tokens, which it does in place.
        q_offset = q_offset.clone()
    pieces = _pieces(mask_function, is_traced)
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    places = {"q_offset": q_offset, "kv_offset": kv_offset, "device": device}
    whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    seen = functools.partial(masking_utils.sdpa_mask, **others, **sizes, **places, **whole)
    seen = functools.partial(seen, mask_function=mask_function, attention_mask=attention_mask)
    shape = (batch_size, 1, q_length, kv_length)
    structure = None
    if pieces is not None and not pieces:
        keep = _padding(attention_mask, kv_offset, kv_length, is_traced)
        if keep is None and allow_is_bidirectional_skip:
            return None
        structure = Structure(shape, kv_length, keep)
    elif pieces is not None:
        keys = _existing_keys(q_length, kv_length, q_offset, kv_offset, is_traced)
        if keys is not None and ("causal" in pieces or keys == kv_length):
            keep = _padding(attention_mask, kv_offset, keys, is_traced)
            # Packed calls have no mask of padding, and a query for every key.
            if "sequences" not in pieces or (keep is None and q_length == kv_length):
                structure = Structure(shape, keys, keep, **pieces)
    make = functools.partial(_written, seen, dtype)
    if (
        structure is None
        and q_length >= MANY_QUERIES
        and torch.device(device).type in ("cpu", "cuda")
        and not is_traced
    ):
        structure = Structure(shape, kv_length, make=seen)
    if structure is None:
        matrix = seen()
        make = functools.partial(_written, lambda: matrix, dtype)
        if q_length == 1:
            return make()  # a row is no larger than its description, and may go into a compiled model
        structure = Structure(shape, kv_length, matrix)
    if not is_traced:
        return StructuredMask(structure, make, dtype, device)
    # A model that forbids to skip the mask reads it, and a Structure cannot be read.
    return structure if allow_is_causal_skip or allow_is_bidirectional_skip else make()


def _written(keep: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    """As booleans, or as what is added to scores: 0 where a key is seen, the lowest number where not."""
    seen = keep()
    if dtype == torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def tracing(tensor: Tensor | None) -> bool:
    """Whether values cannot be read: under torch.compile, export, fake tensors or a CUDA graph's capture."""
    if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor):
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _existing_keys(
    q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int, is_traced: bool
) -> int | None:
    """How many keys there are up to the last query, or None where that is not to be known as a number.

    A static cache counts its tokens on the device. For one query the matrix is a row, cheaper than waiting for it.
    """
    if isinstance(q_offset, Tensor):
        if is_traced or q_length == 1:
            return None
        q_offset = int(q_offset)
    keys = q_offset + q_length - kv_offset
    return keys if 0 < keys <= kv_length else None


def _padding(attention_mask: Tensor | None, kv_offset: int, keys: int, is_traced: bool) -> Tensor | None:
    """(batch, 1, 1, keys), or None where nothing is padded, read once per forward."""
    if attention_mask is None:
        return None
    keep = attention_mask[:, kv_offset : kv_offset + keys].to(torch.bool)
    if keep.shape[1] < keys:
        keep = torch.nn.functional.pad(keep, (0, keys - keep.shape[1]))
    if not is_traced and bool(keep.all()):
        return None
    return keep[:, None, None, :]


def _pieces(mask_function: MaskFunction, is_traced: bool) -> dict[str, Any] | None:
    """The known pieces that a mask function is a conjunction of, as fields of a `Structure`: none if every query sees
    every key. None if a piece is unknown.
    """
    from transformers import masking_utils

    if is_traced:
        # torch.compile does not read closures.
        if mask_function is masking_utils.causal_mask_function:
            return {"causal": True}
        return {} if mask_function is masking_utils.bidirectional_mask_function else None
    pieces: dict[str, Any] = {}
    for leaf in _conjuncts(mask_function):
        piece = _leaf(leaf)
        if piece is None or (piece.keys() & pieces.keys() - {"causal"}):
            return None
        pieces |= piece
    return pieces


def _conjuncts(mask_function: MaskFunction) -> Iterator[MaskFunction]:
    if getattr(mask_function, "__code__", None) is not _codes()["and"]:
        yield mask_function
        return
    for part in _captured(mask_function, "mask_functions") or (mask_function,):
        yield from _conjuncts(part) if part is not mask_function else (mask_function,)


def _leaf(mask_function: MaskFunction) -> dict[str, Any] | None:
    """The fields of a `Structure` that a known function sets, or None if it is unknown."""
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return {"causal": True}
    if mask_function is masking_utils.bidirectional_mask_function:
        return {}
    code = getattr(mask_function, "__code__", None)
    if code is _codes()["sequences"]:
        sequences = _captured(mask_function, "packed_sequence_mask")
        # Numbers that only grow: tokens of one number are neighbours, as in a packed call.
        is_packed = sequences is not None and bool((sequences[:, 1:] >= sequences[:, :-1]).all())
        return {"sequences": sequences} if is_packed else None
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
