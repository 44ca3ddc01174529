"""DTensors: each rank computes its part, where the parts are attention problems of their own.

On every mesh dimension q, k and v are replicated, or sharded by batch (dense calls) or by heads. A replicated tensor
next to sharded ones is sliced locally; nothing is gathered. The gradient of a tensor that every rank needs whole, such
as a bias shared by all sequences, is summed over the ranks. Sharded sequences or columns, and partial sums, are
refused: tilewise.distributed computes attention over sequences that are spread over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InvalidProblem, Unsupported
from tilewise.operands import Operands, Options
from tilewise.problem import Kind
from tilewise.validation.flags import check_flag
from tilewise.validation.tensors import public_names

Cuts = dict[str, dict[str, int]]
# How a call may be sharded, and the dimension of each tensor that is sliced for it.
CUTS: dict[str, Cuts] = {
    "dense bhsd": {
        "batch": {"q": 0, "k": 0, "v": 0, "out": 0, "lse": 0},
        "heads": {"q": 1, "k": 1, "v": 1, "out": 1, "lse": 1},
    },
    "dense bshd": {
        "batch": {"q": 0, "k": 0, "v": 0, "out": 0, "lse": 0},
        "heads": {"q": 2, "k": 2, "v": 2, "out": 2, "lse": 1},
    },
    "varlen": {"heads": {"q": 1, "k": 1, "v": 1, "out": 1, "lse": 0}},
    "paged": {"heads": {"q": 1, "k_pages": 2, "v_pages": 2, "out": 1, "lse": 0}},
}
ATTENDED = ("q", "k", "v", "k_pages", "v_pages")
# Equal on every rank, as plain or replicated tensors.
INDICES = frozenset(("cu_seqlens_q", "cu_seqlens_k", "block_table", "seqlens_k"))


class _Cut(NamedTuple):
    """The role of one mesh dimension: `part` is "batch", "heads" or None, over `ranks` ranks."""

    part: str | None
    ranks: int


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a DTensor. Does not import the module: a DTensor can exist only if it is loaded."""
    return type(tensor).__name__ == "DTensor" and hasattr(tensor, "placements")


def attend(
    kind: Kind, attention: Callable[[Operands, Options], Any], operands: Operands, options: Options
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of this rank's parts. q is a DTensor; results are sharded like it."""
    check_flag("layout", options.layout)
    if options.dropout:
        raise Unsupported("dropout of DTensors is not computed: ranks would have to draw the bits of the whole tensor")
    if options.deterministic == "batch":
        raise Unsupported("deterministic='batch' of DTensors was not tested: call it with the local parts")
    if options.return_max_logits:
        raise Unsupported(
            "return_max_logits of DTensors is not computed: call it with the local parts, and reduce over the ranks"
        )
    if operands.out is not None:
        raise Unsupported("out= of DTensors is not written: call it with the local parts, or copy the result")
    if operands.mask is not None and not isinstance(operands.mask, Tensor):
        raise Unsupported("a tile mask of DTensors is not sharded: pass mask.dense() as a DTensor, placed as q is")
    cuts = CUTS[f"dense {options.layout}" if kind == "dense" else kind]
    shown = public_names(kind)
    given = {shown.get(name, name): t for name, t in operands._asdict().items() if t is not None}
    _check_types(given, {"k_pages": 4, "v_pages": 4} if kind == "paged" else {}, 4 if kind == "dense" else 3)
    plan = _plan(given, cuts)
    _check_heads(given, cuts, plan)
    local = {name: _local(name, tensor, cuts, plan) for name, tensor in given.items()}
    parts = Operands(*[local.get(shown.get(name, name)) for name in Operands._fields])  # type: ignore[arg-type]
    out, lse = attention(parts, options._replace(return_lse=True))
    q, values = given["q"], given["v_pages" if kind == "paged" else "v"]
    whole = _whole(out, "out", (*q.shape[:-1], values.shape[-1]), cuts, plan, q)
    if not options.return_lse:
        return whole
    heads = cuts["heads"]
    rows = [size for dim, size in enumerate(q.shape[:-1]) if dim != heads["q"]]
    rows.insert(heads["lse"], q.shape[heads["q"]])
    return whole, _whole(lse, "lse", tuple(rows), cuts, plan, q)


def _check_types(given: Mapping[str, Any], dims: Mapping[str, int], others: int) -> None:
    mesh = given["q"].device_mesh
    for name, tensor in given.items():
        expected = dims.get(name, others)
        if name in ATTENDED and getattr(tensor, "ndim", expected) != expected:
            raise InvalidProblem(name, f"{expected} dimensions", f"shape {tuple(tensor.shape)}", "Reshape it.")
        if not is_dtensor(tensor):
            if name in INDICES:
                continue
            fix = "Make it one with torch.distributed.tensor.distribute_tensor, replicated or cut as q is."
            raise InvalidProblem(name, "a DTensor, as q is", type(tensor).__name__, fix)
        if tensor.device_mesh != mesh:
            raise InvalidProblem(name, f"a DTensor on q's mesh {mesh}", tensor.device_mesh, "Distribute it there.")


def _plan(given: Mapping[str, Any], cuts: Cuts) -> list[_Cut]:
    """The role of each mesh dimension, from how q, k or v are sharded there."""
    mesh, plan = given["q"].device_mesh, []
    for dim in range(mesh.ndim):
        part: str | None = None
        for name in (name for name in ATTENDED if name in given):
            placement = given[name].placements[dim]
            if placement.is_replicate():
                continue
            found = next((p for p, dims in cuts.items() if _is_shard(placement, dims[name])), None)
            if found is None:
                raise _refusal(name, given[name], dim, [dims[name] for dims in cuts.values()])
            if part is not None and found != part:
                expected = f"to be cut by {part} on dimension {dim} of the mesh, as others are"
                fix = "Redistribute them alike, with tensor.redistribute()."
                raise InvalidProblem(name, expected, f"placements {given[name].placements}", fix)
            part = found
        plan.append(_Cut(part, mesh.size(dim)))
    return plan


def _is_shard(placement: Any, dim: int) -> bool:
    """Equal pieces in order: a subclass of Shard may distribute them differently."""
    return type(placement).__name__ == "Shard" and placement.dim == dim


def _refusal(name: str, tensor: Any, dim: int, allowed: Sequence[int]) -> InvalidProblem:
    placements = " or ".join(["Replicate()", *(f"Shard({where})" for where in allowed)])
    expected = f"{placements} on dimension {dim} of the mesh"
    fix = (
        "Redistribute it with tensor.redistribute(); for sequences that are spread over ranks there is "
        "tilewise.distributed.context_parallel_attention."
    )
    return InvalidProblem(name, expected, f"placements {tuple(tensor.placements)}", fix)


def _check_heads(given: Mapping[str, Any], cuts: Cuts, plan: Sequence[_Cut]) -> None:
    """Query heads and the K/V heads that serve them must be on the same rank."""
    ranks = _product([cut.ranks for cut in plan if cut.part == "heads"])
    if ranks == 1:
        return
    for name, tensor in given.items():
        dim = cuts["heads"].get(name)
        if dim is None:
            continue
        heads = tensor.shape[dim]
        sharded = any(cut.part == "heads" and p.is_shard() for cut, p in zip(plan, tensor.placements, strict=True))
        # A single K/V head serves all query heads and is replicated.
        if heads % ranks and not (name != "q" and heads == 1 and not sharded):
            fix = "Replicate a single K/V head; else let the heads of q, k and v be multiples of the ranks."
            raise InvalidProblem(name, f"a multiple of {ranks} heads for {ranks} ranks", heads, fix)


def _local(name: str, tensor: Any, cuts: Cuts, plan: Sequence[_Cut]) -> Tensor:
    """This rank's part of an operand. Its gradient is a part of a tensor or of a sum."""
    if not is_dtensor(tensor):
        return tensor  # type: ignore[no-any-return]
    from torch.distributed.tensor import Partial, Replicate, Shard

    wanted: list[Any] = []
    gradient: list[Any] = []
    for dim, cut in enumerate(plan):
        where = None if cut.part is None else _dimension(name, tensor, cut.part, cuts)
        target = Replicate() if where is None else Shard(where)
        placement = tensor.placements[dim]
        if not placement.is_replicate() and (where is None or not _is_shard(placement, where)):
            raise _refusal(name, tensor, dim, [] if where is None else [where])
        wanted.append(target)
        gradient.append(Partial() if where is None and cut.part is not None else target)
    part = tensor.redistribute(placements=wanted)
    return part.to_local(grad_placements=gradient)  # type: ignore[no-any-return]


def _dimension(name: str, tensor: Any, part: str, cuts: Cuts) -> int | None:
    """The dimension in which a tensor is sliced, or None if every rank needs all of it."""
    size: int = tensor.dim()
    if name in cuts[part]:
        dim = cuts[part][name]
        single = part == "heads" and name != "q" and tensor.shape[dim] == 1
        return None if single else dim
    if name in ("bias", "mask"):
        dim = size - (4 if part == "batch" else 3)
        return dim if dim >= 0 and tensor.shape[dim] != 1 else None
    if name == "alibi_slopes":
        return size - 1 if part == "heads" else 0 if size == 2 else None
    return 0 if name == "sinks" and part == "heads" else None


def _whole(local: Tensor, name: str, shape: tuple[int, ...], cuts: Cuts, plan: Sequence[_Cut], q: Any) -> Tensor:
    """The DTensor result of which `local` is this rank's part."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [Replicate() if cut.part is None else Shard(cuts[cut.part][name]) for cut in plan]
    stride = [_product(shape[dim + 1 :]) for dim in range(len(shape))]
    return DTensor.from_local(
        local, q.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )  # fmt: skip


def _product(numbers: Sequence[int]) -> int:
    # Not math.prod, which torch.compile cannot trace.
    product = 1
    for number in numbers:
        product *= number
    return product
