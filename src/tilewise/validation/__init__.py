"""Validates user input: Python flags in `flags`, tensors in `tensors`, contents of index tensors in `values`.

`normalise` runs where the call enters (and is traced by torch.compile), `describe` inside the op: the same rules hold
for eager, compiled and exported graphs. Contents of GPU tensors are checked only if `settings` asks for it, because
reading them would synchronise with the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tilewise import settings
from tilewise.arguments import ROWS
from tilewise.errors import InvalidProblem
from tilewise.memory import check_allocated, check_there
from tilewise.operands import NO_LENGTHS, Flags, Lengths, Operands, Options
from tilewise.problem import AttentionProblem, Kind
from tilewise.schemas import OPERANDS, operand_names
from tilewise.subclasses import check_class
from tilewise.tile_masks import PROMISES, TileMask
from tilewise.units import counted
from tilewise.validation.flags import (
    OPTIONAL,
    OPTIONAL_PAGED,
    any_needs_grad,
    autocast,
    autocast_stand_ins,
    check_flag,
    is_autocast,
    normalise,
    require_tensors,
    seed_tensor,
)
from tilewise.validation.foreign import unexpected
from tilewise.validation.quantised import split_scales, unwrapped
from tilewise.validation.results import Disjoint, check_out, check_result, check_traced_result
from tilewise.validation.tensors import FLOATS, TILE_MASK, describe, open_sizes, public_names
from tilewise.validation.values import check_values, first_columns, longest_sequences, longest_within, pages_in_use

__all__ = [
    "FLOATS",
    "OPTIONAL_PAGED",
    "Contents",
    "Disjoint",
    "any_needs_grad",
    "autocast",
    "autocast_stand_ins",
    "check_class",
    "check_contents",
    "check_flag",
    "check_result",
    "check_storage",
    "check_structure",
    "checked",
    "describe",
    "is_latent",
    "lasts",
    "normalise",
    "open_sizes",
    "problem_of",
    "reads_contents",
    "require_tensors",
    "seed_tensor",
    "split_scales",
    "traced_problem",
    "unexpected",
]


# By kind: the layouts that FP8 containers of q, and of k and v, must have, and the tensors that a caller passes.
_LAYOUTS: dict[Kind, tuple[str, ...]] = {"varlen": ("packed",), "paged": ("packed", "paged")}
_SHOWN = {kind: [(public_names(kind) | TILE_MASK).get(name, name) for name in Operands._fields] for kind in OPERANDS}
_PASSED = {kind: tuple([n for n in operand_names(kind) if n in ROWS and n != "seed"]) for kind in OPERANDS}


def checked(
    kind: Kind,
    operands: Operands,
    options: Options,
    lengths: Lengths = NO_LENGTHS,
    seed: int | Tensor | None = None,
    *,
    cast: bool = True,
    needs_grad: bool | None = None,
) -> tuple[Operands, Flags]:
    """The arguments of a call as the op takes them: plain tensors, cast by autocast, and flags.

    Without `cast`, the caller applies autocast. `needs_grad` is derived from the tensors unless it is given.
    """
    (q, k, v), (scales, blocks) = unwrapped(*operands[:3], *_LAYOUTS.get(kind, (options.layout,)))
    operands, tile_mask = _with_tiles(Operands(q, k, v, *operands[3:]))
    shown = public_names(kind)
    named = {shown.get(name, name): getattr(operands, name) for name in _PASSED[kind]}
    require_tensors(optional=OPTIONAL_PAGED if kind == "paged" else OPTIONAL, **named, out=operands.out)
    if cast:
        if is_autocast(q):  # it reads them
            check_allocated(named, named.values())
        q, k, v = autocast(q, k, v)
    if needs_grad is None:
        needs_grad = any_needs_grad(q, k, v, operands.bias, operands.sinks)
    flags = normalise(options, lengths, needs_grad=needs_grad)
    if flags.batch_invariant:
        _check_bounds(operands, flags)
    if tile_mask is not None:
        _check_promises(kind, tile_mask, flags)
        flags = flags._replace(mask_seqlen_q=tile_mask.seqlen_q, mask_seqlen_k=tile_mask.seqlen_k)
    if operands.out is not None:
        check_out(operands.out, needs_grad=needs_grad)
    operands = operands._replace(q=q, k=k, v=v, seed=seed_tensor(seed, options.dropout), **scales)
    return operands, flags._replace(**blocks) if scales else flags


def _check_bounds(operands: Operands, flags: Flags) -> None:
    """Left open, the longest lengths would be those of the batch, and they choose between kernels."""
    sides = (("q", operands.cu_seqlens_q, flags.max_seqlen_q), ("k", operands.cu_seqlens_k, flags.max_seqlen_k))
    for side, totals, given in sides:
        if totals is not None and given is None:
            fix = "Pass the same bound in every call, such as the longest context."
            raise InvalidProblem(f"max_seqlen_{side}", "an integer, because of deterministic='batch'", None, fix)


def _check_promises(kind: Kind, mask: TileMask, flags: Flags) -> None:
    """A mask whose constructor promises more than the flags would leave of it is refused."""
    for promise in [PROMISES[name] for name in mask.promises]:
        if promise.ends and kind == "paged":
            continue
        beside = f"with {promise.by}, because {promise.what}"
        if promise.right and flags.causal:
            raise InvalidProblem("causal", f"False {beside}", True, promise.fix)
        left, right = flags.window_left, flags.window_right
        if (promise.left and left is not None) or (promise.right and right is not None):
            raise InvalidProblem("window", f"None {beside}", (left, right), promise.fix)
        if kind != "dense" and (promise.lengths or (promise.unequal and mask.seqlen_q != mask.seqlen_k)):
            got = f"one of {counted(mask.seqlen_q, 'query', 'queries')} x {counted(mask.seqlen_k, 'key')}"
            raise InvalidProblem("mask", f"one per sequence {beside}", got, promise.fix)


def _with_tiles(operands: Operands) -> tuple[Operands, TileMask | None]:
    """A tile mask given as `mask` becomes its tensors; and the mask."""
    mask: Any = operands.mask
    if not isinstance(mask, TileMask):
        return operands, None
    tiles, bits, lists = mask.parts
    return operands._replace(mask=None, tiles=tiles, tile_bits=bits, tile_lists=lists), mask


def problem_of(kind: Kind, operands: Operands, flags: Flags) -> AttentionProblem:
    """Validate real tensors and describe them."""
    check_there(_SHOWN[kind], operands)
    reads = reads_contents(kind, operands)
    if reads:
        # Structure first: contents are read only from index tensors of the right rank and dtype.
        check_structure(kind, operands, flags)
        flags = flags.with_lengths(longest_sequences(operands, flags.lengths))
    problem = describe(kind, operands, flags)
    if reads:
        check_values(operands)
    return dataclasses.replace(problem, latent=True) if is_latent(operands.k, operands.v) else problem


def traced_problem(kind: Kind, operands: Operands, flags: Flags) -> AttentionProblem:
    """The problem of operands without memory. Contents are checked elsewhere."""
    problem = describe(kind, operands, flags)
    if operands.out is not None:
        check_traced_result(operands)
    k, v = operands.k, operands.v
    narrower = v.shape[-1] < k.shape[-1] and k.dtype == v.dtype
    latent = narrower and k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and k.shape[:-1] == v.shape[:-1]
    return dataclasses.replace(problem, latent=True) if latent else problem


def check_storage(kind: Kind, operands: Operands) -> None:
    """Raise unless every storage holds its tensor. `problem_of` only finds storage that was freed."""
    check_allocated(_SHOWN[kind], operands)


def check_structure(kind: Kind, operands: Operands, flags: Flags) -> None:
    """The part of `problem_of` that does not read index tensors."""
    lengths_open = flags._replace(max_seqlen_q=None, max_seqlen_k=None)
    # bias and masks are checked against the longest sequence, which may be known only after lengths are read.
    describe(kind, operands._replace(bias=None, mask=None, tiles=None), lengths_open)


def check_contents(operands: Operands, flags: Flags) -> None:
    """The part of `problem_of` that reads index tensors, for a call whose signature was validated before."""
    longest_sequences(operands, flags.lengths)
    check_values(operands)


# Larger tables are checked in every call: comparing would hardly be faster, and each form would keep a copy.
MAX_KEPT_BYTES = 2**17


class _Seen(NamedTuple):
    """Contents that were valid: what they were checked against, the lengths, the columns of the block table in use,
    these in bytes, and the bounds on lengths.
    """

    about: tuple[Any, ...]
    lengths: list[list[int] | None]
    columns: int
    table: bytes
    bounds: Lengths


class Contents:
    """Checks the index tensors of calls on a CPU that agree in dtypes and ranks, in every call. The layers of a step
    pass the same contents, which are then only compared with those of the last call.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: _Seen | None = None

    def bounds(self, tensors: Sequence[Any], given: Lengths) -> Lengths | None:
        """The bounds on lengths, with the longest lengths where the caller left them open. None if the contents are
        not valid: the general path says why.
        """
        count = len(tensors)
        q, k, table = tensors[0], tensors[1], tensors[TABLE] if count > TABLE else None
        about = given, q.shape[0], k.shape[:2], None if table is None else table.shape
        indices = [tensors[i] if i < count else None for i in LENGTHS]
        lengths = [None if t is None else t.tolist() for t in indices]
        last = self._last
        if (
            last is not None
            and last.lengths == lengths
            and last.about == about
            and (table is None or first_columns(table, last.columns) == last.table)
        ):
            return last.bounds
        try:
            bounds = longest_within(lengths[:2], (q.shape[0], k.shape[0]), given)
            columns, entries = (0, b"") if table is None else pages_in_use(Operands(*tensors), lengths[2] or ())
        except (ValueError, IndexError):
            return None
        if len(entries) <= MAX_KEPT_BYTES:
            self._last = _Seen(about, lengths, columns, entries, bounds)
        return bounds


def lasts(kind: Kind, operands: Operands, flags: Flags) -> bool:
    """Whether the problem depends on the signature alone: no length must be read from contents."""
    given = (operands.cu_seqlens_q, flags.max_seqlen_q), (operands.cu_seqlens_k, flags.max_seqlen_k)
    is_open = any(totals is not None and longest is None for totals, longest in given)
    return not (is_open and reads_contents(kind, operands))


def reads_contents(kind: Kind, operands: Operands) -> bool:
    """Whether every call must validate the contents of its index tensors."""
    return kind != "dense" and (operands.q.device.type == "cpu" or settings.current().check_values)


# Index tensors that hold lengths, and the block table.
LENGTHS = tuple(Operands._fields.index(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k"))
TABLE = Operands._fields.index("block_table")


def is_latent(k: Tensor, v: Tensor) -> bool:
    """Whether v is a view of the first columns of k, but not of all: k passed twice often stands in for tensors of the
    same shape. Storages are compared, which fake and meta tensors have too.
    """
    if v.shape[-1:] >= k.shape[-1:] or k.stride() != v.stride() or k.shape[:-1] != v.shape[:-1] or k.dtype != v.dtype:
        return False
    same = k.untyped_storage()._cdata == v.untyped_storage()._cdata  # noqa: SLF001
    return same and k.storage_offset() == v.storage_offset()
