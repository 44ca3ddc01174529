"""vmap rules of the ops: examples are folded into the batch where that is the same computation.

Folding is exact for dense problems without dropout (whose bits are counted by batch), and for gradients that are not
summed over the batch. Everything else runs example by example, in a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.operands import Flags, Tangents, Wanted

Op = Callable[..., tuple[Tensor, ...]]
Batched = tuple[tuple[Tensor, ...], tuple[int | None, ...]]
BIAS = Wanted._fields.index("dbias")
TANGENTS = tuple(f"{name} tangent" for name in Tangents._fields)


class Pass(NamedTuple):
    """The arguments of an op before its operands and flags: `results` of earlier passes with their cotangents, all
    shaped like out or lse; then which gradients are wanted; then tangents.
    """

    results: int = 0
    has_wanted: bool = False
    has_tangents: bool = False


# By the end of an op's name. A tangent op gets None for out and lse where they are not known.
PASSES = {
    "": Pass(),
    "_backward": Pass(4, has_wanted=True),
    "_tangent": Pass(2, has_tangents=True),
    "_twice": Pass(6, has_wanted=True, has_tangents=True),
}


def vmapped(names: Sequence[str], kind: str, suffix: str, info: Any, in_dims: Any, *args: Any) -> Batched:
    """The rule of the op tilewise::<kind><suffix>, as `torch.library.register_vmap` calls it: (results, their vmapped
    dimensions). `names` are the kind's operands.
    """
    op: Op = getattr(torch.ops.tilewise, f"{kind}{suffix}").default
    count, has_wanted, has_tangents = PASSES[suffix]
    examples, first = info.batch_size, count + has_wanted
    wanted = Wanted(*args[count]) if has_wanted else None
    every = [*(TANGENTS if has_tangents else ()), *names]
    given, dims = (dict(zip(every, some[first:], strict=False)) for some in (args, in_dims))
    flags = Flags(*args[first + len(every) :])
    if not _folds(names, flags, dims) or (wanted is not None and wanted.dsinks):
        return _one_by_one(op, examples, in_dims, args)
    # The batch of one example: the first dimension of q that is not vmapped.
    batch = given["q"].shape[1 if dims["q"] == 0 else 0]
    results = [_folded("out", t, d, examples, batch) for t, d in zip(args[:count], in_dims, strict=False)]
    folded = {name: _folded(name.split()[0], given[name], dims[name], examples, batch) for name in every}
    wants_bias = wanted is not None and wanted.dbias
    if wants_bias or (has_tangents and (dims["bias tangent"] is not None or dims["bias"] is not None)):
        # Each example has its own gradient of a bias, even of one that the examples share. A tangent has its shape.
        for name in ("bias", "bias tangent") if has_tangents else ("bias",):
            folded[name] = _spread(given[name], dims[name], examples, batch)
    made = op(*results, *(() if wanted is None else (list(wanted),)), *folded.values(), *flags)
    # Not unfolded: gradients that are not wanted, and results that were passed to a tangent op, which are empty.
    here = [True] * len(made) if wanted is None else list(wanted)
    if suffix == "_tangent" and results[0] is not None:
        here[:count] = [False] * count
    found = [r.unflatten(0, (examples, batch)) if there else r for r, there in zip(made, here, strict=True)]
    if wants_bias and given["bias"] is not None:
        found[BIAS] = _reduced(found[BIAS], given["bias"], dims["bias"])
    return tuple(found), tuple([0 if there else None for there in here])


def _folds(names: Sequence[str], flags: Flags, dims: dict[str, int | None]) -> bool:
    dense = "cu_seqlens_q" not in names and "block_table" not in names
    shared = all(dims.get(name) is None for name in ("sinks", "sinks tangent", "tiles", "tile_bits", "tile_lists"))
    return dense and flags.dropout == 0.0 and shared


def _folded(name: str, tensor: Tensor | None, dim: int | None, examples: int, batch: int) -> Tensor | None:
    """The operand with `examples` folded into its batch. One that is shared and broadcast stays unchanged."""
    if tensor is None or (dim is None and name in ("sinks", "seed", "tile_bits")):
        return tensor
    if name == "tile_lists":
        return None  # those of the folded map are made when it is read
    if name in ("bias", "mask", "tiles"):
        shared = dim is None and (tensor.dim() < 4 or tensor.shape[0] == 1)
        return tensor if shared else _spread(tensor, dim, examples, batch)
    if name == "alibi_slopes":
        if dim is None and tensor.dim() == 1:
            return tensor
        rows = tensor.movedim(dim, 0) if dim is not None else tensor.unsqueeze(0)
        rows = rows.unsqueeze(1) if rows.dim() == 2 else rows
        return rows.expand(examples, batch, -1).flatten(0, 1)
    moved = tensor.expand(examples, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return moved.flatten(0, 1)


def _spread(tensor: Tensor | None, dim: int | None, examples: int, batch: int) -> Tensor | None:
    """A bias or mask as (examples * batch, heads, rows, keys), the last three broadcast as before."""
    if tensor is None:
        return None
    moved = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
    four = moved.reshape(moved.shape[0], *(1,) * (5 - moved.dim()), *moved.shape[1:])
    return four.expand(examples, batch, -1, -1, -1).flatten(0, 1)


def _reduced(gradient: Tensor, bias: Tensor, dim: int | None) -> Tensor:
    """The gradient of every example, in the shape the bias has in one."""
    shape = list(bias.shape)
    if dim is not None:
        del shape[dim]
    if len(shape) < 4 or shape[0] == 1:
        gradient = gradient.sum(1, keepdim=True)
    return gradient.reshape(gradient.shape[0], *shape)


def _one_by_one(op: Op, examples: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Batched:
    def example(index: int) -> list[Any]:
        pairs = zip(args, in_dims, strict=True)
        return [a.select(d, index) if isinstance(a, Tensor) and d is not None else a for a, d in pairs]

    def any_example() -> list[Any]:
        """With zero examples, one of zeros gives the shapes of the results."""
        pairs = zip(args, in_dims, strict=True)
        return [
            a.new_zeros(a.movedim(d, 0).shape[1:]) if isinstance(a, Tensor) and d is not None else a for a, d in pairs
        ]

    results = [op(*example(index)) for index in range(examples)] or [op(*any_example())]
    stacked = tuple(torch.stack(column)[:examples] for column in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)
