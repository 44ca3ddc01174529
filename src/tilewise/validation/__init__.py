"""The only place that judges user input: Python flags in `flags`, tensors in `tensors`, contents of index tensors in
`values`.

`normalise` runs where the call enters (and is traced by torch.compile), `describe` inside the op: the same rules hold
for eager, compiled and exported graphs. What needs the contents of a GPU tensor is checked only when `settings` asks
for it, because reading them would make the CPU wait for the device.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tilewise import settings
from tilewise.operands import Flags, Operands, Options
from tilewise.problem import AttentionProblem, Kind
from tilewise.schemas import OPERANDS, operand_names
from tilewise.subclasses import check_class
from tilewise.validation.flags import (
    OPTIONAL,
    OPTIONAL_PAGED,
    any_needs_grad,
    autocast,
    autocast_looks,
    check_flag,
    normalise,
    require_tensors,
    seed_tensor,
)
from tilewise.validation.foreign import unexpected
from tilewise.validation.quantised import taken_apart, unwrapped, with_scales
from tilewise.validation.tensors import FLOATS, TensorSpec, describe, public_names
from tilewise.validation.values import check_values, longest_sequences

__all__ = [
    "FLOATS",
    "OPTIONAL_PAGED",
    "any_needs_grad",
    "autocast",
    "autocast_looks",
    "check_class",
    "check_contents",
    "check_flag",
    "check_structure",
    "checked",
    "describe",
    "lasts",
    "normalise",
    "problem_of",
    "reads_contents",
    "require_tensors",
    "taken_apart",
    "unexpected",
    "unwrapped",
    "with_scales",
]


# By kind: the layouts of q, and of k and v, that FP8 containers must have, and the tensors that a caller passes.
_LAYOUTS: dict[Kind, tuple[str, ...]] = {"varlen": ("packed",), "paged": ("packed", "paged")}
_PASSED = {kind: tuple(names[: names.index("sinks") + 1]) for kind in OPERANDS for names in [operand_names(kind)]}


def checked(
    kind: Kind,
    operands: Operands,
    options: Options,
    seed: int | Tensor | None = None,
    *,
    cast: bool = True,
    needs_grad: bool | None = None,
) -> tuple[Operands, Flags]:
    """The arguments of a call as the op takes them: plain tensors, cast by autocast, and flags.

    Without `cast` autocast is left to the caller. `needs_grad` is found from the tensors unless it is given.
    """
    (q, k, v), scales = unwrapped(*operands[:3], *_LAYOUTS.get(kind, (options.layout,)))
    operands = Operands(q, k, v, *operands[3:])
    shown = public_names(kind)
    named = {shown.get(name, name): getattr(operands, name) for name in _PASSED[kind]}
    require_tensors(optional=OPTIONAL_PAGED if kind == "paged" else OPTIONAL, **named)
    if cast:
        q, k, v = autocast(q, k, v)
    if needs_grad is None:
        needs_grad = any_needs_grad(q, k, v, operands.bias, operands.sinks)
    flags = normalise(options, needs_grad=needs_grad)
    seed = seed_tensor(seed, options.dropout)
    return with_scales(Operands(q, k, v, *operands[3:11], seed), flags, scales)


def problem_of(kind: Kind, operands: Operands, flags: Flags) -> AttentionProblem:
    """Judge real tensors and describe them; the structural part is remembered per combination of specs and flags."""
    specs = _specs(operands)
    if not reads_contents(kind, operands):
        return _describe(kind, specs, flags)
    # The structure comes first: contents are only read from index tensors of the right rank and dtype.
    check_structure(kind, operands, flags)
    problem = _describe(kind, specs, longest_sequences(operands, flags))
    check_values(problem, operands)
    return problem


def check_structure(kind: Kind, operands: Operands, flags: Flags) -> None:
    """What `problem_of` judges without a look into index tensors."""
    lengths_open = flags._replace(max_seqlen_q=None, max_seqlen_k=None)
    specs = [None if i in _LENGTH_BOUND else spec for i, spec in enumerate(_specs(operands))]
    _describe(kind, tuple(specs), lengths_open)


def check_contents(problem: AttentionProblem, operands: Operands, flags: Flags) -> None:
    """What `problem_of` reads from index tensors, for a call that looks like one whose structure was judged."""
    longest_sequences(operands, flags)
    check_values(problem, operands)


def lasts(kind: Kind, operands: Operands, flags: Flags) -> bool:
    """Whether the problem is that of all calls that look the same: no length is left for contents to tell."""
    given = (operands.cu_seqlens_q, flags.max_seqlen_q), (operands.cu_seqlens_k, flags.max_seqlen_k)
    is_open = any(totals is not None and longest is None for totals, longest in given)
    return not (is_open and reads_contents(kind, operands))


def reads_contents(kind: Kind, operands: Operands) -> bool:
    """Whether what is in index tensors is judged, too, in every call."""
    return kind != "dense" and (operands.q.device.type == "cpu" or settings.current().check_values)


# bias and mask are measured against the longest sequence, which is known only once the lengths have been read.
_LENGTH_BOUND = (Operands._fields.index("bias"), Operands._fields.index("mask"))

Spec = tuple[torch.Size, torch.dtype, torch.device] | None


def _specs(operands: Operands) -> tuple[Spec, ...]:
    return tuple([None if t is None else (t.shape, t.dtype, t.device) for t in operands])


@functools.lru_cache(maxsize=4096)
def _describe(kind: Kind, specs: tuple[Spec, ...], flags: Flags) -> AttentionProblem:
    return describe(kind, [None if spec is None else TensorSpec(*spec) for spec in specs], flags)
