"""vmap rules of the ops: examples are folded into the batch where that is the same computation.

Folding is exact for dense problems without dropout (whose bits are counted by batch), and for gradients that are not
summed over the batch. Everything else runs example by example, in a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.operands import Flags, Operands, Tangents, Wanted

Op = Callable[..., tuple[Tensor, ...]]
Batched = tuple[tuple[Tensor, ...], tuple[int | None, ...]]
# Arguments before the operands in a backward op: dout, dlse, out, lse, wanted.
SAVED = 5
BIAS = Wanted._fields.index("dbias")
# The same for a twice op: dout, dlse, out, lse and their tangents, wanted. Tangents follow, as in a tangent op.
SAVED_TWICE, ALONG = 7, len(Tangents._fields)
# And for a tangent op: out and lse, or None for both where they are not known.
KNOWN = 2


def vmapped(
    names: Sequence[str], name: str, rule: Callable[..., Batched], info: Any, in_dims: Any, *args: Any
) -> Batched:
    """The rule of the op tilewise::<name>, as `torch.library.register_vmap` calls it."""
    return rule(getattr(torch.ops.tilewise, name).default, names, info.batch_size, in_dims, args)


def forward_rule(op: Op, names: Sequence[str], examples: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Batched:
    """(results, their vmapped dimensions) of a forward op called on `examples` examples at once."""
    operands, flags = Operands(**dict(zip(names, args, strict=False))), Flags(*args[len(names) :])
    dims = dict(zip(names, in_dims, strict=False))
    if not _folds(names, flags, dims):
        return _one_by_one(op, examples, in_dims, args)
    batch = _batch(operands, dims)
    results = op(*(_folded(n, getattr(operands, n), dims[n], examples, batch) for n in names), *flags)
    return tuple(_unfolded(r, examples, batch) for r in results), (0,) * len(results)


def backward_rule(op: Op, names: Sequence[str], examples: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Batched:
    """As `forward_rule`, for a backward op."""
    saved, tensors = args[:SAVED], args[SAVED:]
    operands, flags = Operands(**dict(zip(names, tensors, strict=False))), Flags(*tensors[len(names) :])
    dims = dict(zip(names, in_dims[SAVED:], strict=False))
    wanted = Wanted(*saved[-1])
    if not _folds(names, flags, dims) or wanted.dsinks:
        return _one_by_one(op, examples, in_dims, args)
    batch = _batch(operands, dims)
    results = [_folded("out", t, d, examples, batch) for t, d in zip(saved[:-1], in_dims, strict=False)]
    folded = {n: _folded(n, getattr(operands, n), dims[n], examples, batch) for n in names}
    if wanted.dbias:
        # Each example needs its own gradient of a bias, even of one that the examples share.
        folded["bias"] = _spread(operands.bias, dims["bias"], examples, batch)
    gradients = op(*results, list(wanted), *folded.values(), *flags)
    found = [_unfolded(g, examples, batch) if want else g for g, want in zip(gradients, wanted, strict=True)]
    if wanted.dbias and operands.bias is not None:
        found[BIAS] = _reduced(found[BIAS], operands.bias, dims["bias"])
    return tuple(found), tuple([0 if want else None for want in wanted])


def tangent_rule(op: Op, names: Sequence[str], examples: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Batched:
    """As `forward_rule`, for a tangent op."""
    batch, folded = _folded_with_tangents(names, examples, in_dims[KNOWN:], args[KNOWN:])
    if folded is None:
        return _one_by_one(op, examples, in_dims, args)
    known = [_folded("out", t, d, examples, batch) for t, d in zip(args[:KNOWN], in_dims, strict=False)]
    results = op(*known, *folded)
    # Results that were passed in are returned empty.
    first = KNOWN if known[0] is not None else 0
    found = [r if i < first else _unfolded(r, examples, batch) for i, r in enumerate(results)]
    return tuple(found), tuple([None if i < first else 0 for i in range(len(found))])


def twice_rule(op: Op, names: Sequence[str], examples: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Batched:
    """As `backward_rule`, for a twice op."""
    saved, rest = args[:SAVED_TWICE], args[SAVED_TWICE:]
    wanted = Wanted(*saved[-1])
    dims = in_dims[SAVED_TWICE:]
    batch, folded = _folded_with_tangents(names, examples, dims, rest, spread_bias=wanted.dbias)
    if folded is None or wanted.dsinks:
        return _one_by_one(op, examples, in_dims, args)
    results = [_folded("out", t, d, examples, batch) for t, d in zip(saved[:-1], in_dims, strict=False)]
    gradients = op(*results, list(wanted), *folded)
    found = [_unfolded(g, examples, batch) if want else g for g, want in zip(gradients, wanted, strict=True)]
    place = ALONG + list(names).index("bias")
    if wanted.dbias and rest[place] is not None:
        found[BIAS] = _reduced(found[BIAS], rest[place], dims[place])
    return tuple(found), tuple([0 if want else None for want in wanted])


def _folded_with_tangents(
    names: Sequence[str], examples: int, in_dims: Sequence[Any], args: Sequence[Any], *, spread_bias: bool = False
) -> tuple[int, list[Any] | None]:
    """The batch of one example, and tangents, operands and flags with the examples folded in: None if that is not the
    same computation.
    """
    every = [f"{name} tangent" for name in Tangents._fields] + list(names)
    given, dims = dict(zip(every, args, strict=False)), dict(zip(every, in_dims, strict=False))
    flags = Flags(*args[len(every) :])
    batch = given["q"].shape[1 if dims["q"] == 0 else 0]
    if not _folds(names, flags, dims) or dims["sinks tangent"] is not None:
        return batch, None
    folded: dict[str, Any] = {
        name: _folded(name.split()[0], given[name], dims[name], examples, batch) for name in every
    }
    if spread_bias or dims["bias tangent"] is not None or dims["bias"] is not None:
        # Bias and tangent have one shape; each example has its own gradient.
        for name in ("bias", "bias tangent"):
            folded[name] = _spread(given[name], dims[name], examples, batch)
    return batch, [*folded.values(), *flags]


def _folds(names: Sequence[str], flags: Flags, dims: dict[str, int | None]) -> bool:
    dense = "cu_seqlens_q" not in names and "block_table" not in names
    shared = all(dims[name] is None for name in ("sinks", "tiles", "tile_bits", "tile_lists"))
    return dense and flags.dropout == 0.0 and shared


def _batch(operands: Operands, dims: dict[str, int | None]) -> int:
    """The batch of one example: the first dimension of q that is not vmapped."""
    return operands.q.shape[1 if dims["q"] == 0 else 0]


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


def _unfolded(result: Tensor, examples: int, batch: int) -> Tensor:
    return result.reshape(examples, batch, *result.shape[1:])


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
