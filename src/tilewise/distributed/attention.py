"""The public call: attention over a sequence that is spread over ranks. See docs/distributed.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise import derivatives, validation
from tilewise.distributed.agreement import refuse
from tilewise.distributed.heads import heads_attention
from tilewise.distributed.operators import FLAGGED, Settings, Tensors, context_parallel, whole_lengths
from tilewise.distributed.scaling import best_method
from tilewise.distributed.sharding import Sharding, check_documents, is_count
from tilewise.distributed.transport import Group, MeshOrGroup, group_of
from tilewise.errors import InvalidProblem, TilewiseError, Unsupported
from tilewise.memory import check_allocated
from tilewise.operands import Options, Window
from tilewise.validation.flags import seed_tensor

Method = Literal["auto", "ring", "all_gather", "heads"]

if TYPE_CHECKING:
    from typing_extensions import TypedDict, TypeVar, Unpack

    # For type checkers only: they learn what return_lse changes. The function below spells out every flag.
    Lse = TypeVar("Lse")

    class Keywords(TypedDict, Generic[Lse], total=False):
        """The flags of `context_parallel_attention`."""

        method: Method
        sharding: Sharding
        cu_seqlens: Tensor | None
        seqlen: int | None
        seqlen_k: int | None
        causal: bool
        window: Window | None
        alibi_slopes: Tensor | None
        softcap: float | None
        sinks: Tensor | None
        dropout: float
        seed: int | Tensor | None
        scale: float | None
        layout: str
        deterministic: bool | None
        backend: str
        return_lse: Lse


CHOICES = {"method": ("auto", "ring", "all_gather", "heads"), "sharding": ("zigzag", "contiguous")}


@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh_or_group: MeshOrGroup = ..., **flags: Unpack[Keywords[Literal[False]]]
) -> Tensor: ...
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh_or_group: MeshOrGroup = ..., **flags: Unpack[Keywords[Literal[True]]]
) -> tuple[Tensor, Tensor]: ...
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh_or_group: MeshOrGroup = None,
    *,
    method: Method = "auto",
    sharding: Sharding = "zigzag",
    cu_seqlens: Tensor | None = None,
    seqlen: int | None = None,
    seqlen_k: int | None = None,
    causal: bool = False,
    window: Window | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    deterministic: bool | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of this rank's queries to the keys of all ranks of a group or one-dimensional DeviceMesh.

    q, k, v are this rank's shards, as made by `shard`: laid out as for `tilewise.attention`, or, with the `cu_seqlens`
    of all documents (the same on every rank), packed rows (rows, heads, dim). All ranks hold the same number of rows.
    `seqlen` is the length of the whole sequence before `shard`, and `seqlen_k` that of the keys if it is another:
    required without `cu_seqlens`, because rows behind it are padding, which must not count as keys. Returns this rank's
    rows of out, and of lse if `return_lse`; rows of padding are 0 and -inf. Differentiable in q, k, v, sinks (each rank
    gets its rows' part) and through lse; every rank must take part in the backward. Raises if arguments differ between
    ranks.

        >>> out = context_parallel_attention(q, k, v, mesh["context"], seqlen=8192, causal=True)  # doctest: +SKIP
    """
    if unknown:
        raise validation.unexpected(context_parallel_attention, unknown)
    group = group_of(mesh_or_group)
    try:
        tensors = Tensors(q, k, v, alibi_slopes, sinks, None, cu_seqlens)
        options = Options(
            causal=causal, window=window, softcap=softcap, scale=scale, dropout=dropout, layout=layout,
            deterministic=deterministic, backend=backend, return_lse=return_lse,
        )  # fmt: skip
        tensors, settings = _checked(tensors, seed, options, method, sharding, (seqlen, seqlen_k), group)
    except TilewiseError as error:
        refuse(error, group, getattr(q, "device", torch.device("cpu")))
    if settings.method == "heads":
        out, lse = _by_heads(tensors, settings, group)
    else:
        if cu_seqlens is not None and not torch.compiler.is_compiling():
            # The host reads it in forward and backward: copied once, or not at all if it is on the host.
            tensors = tensors._replace(cu_seqlens=cu_seqlens.cpu())
        out, lse = context_parallel(tensors, settings)
    return (out, lse) if return_lse else out


def _checked(
    tensors: Tensors,
    seed: int | Tensor | None,
    options: Options,
    method: str,
    sharding: str,
    lengths: tuple[int | None, int | None],
    group: Group,
) -> tuple[Tensors, Settings]:
    """The arguments as the op takes them. Raises InvalidProblem."""
    for name, value in (("method", method), ("sharding", sharding)):
        if value not in CHOICES[name]:
            expected = "one of " + ", ".join(map(repr, CHOICES[name]))
            raise InvalidProblem(name, expected, repr(value), "Name one of them.")
    length: Any
    for name, length in zip(("seqlen", "seqlen_k"), lengths, strict=True):
        if length is not None and not is_count(length):
            raise InvalidProblem(name, "None or an integer >= 0", repr(length), "It is the length without padding.")
    q, k, v, slopes, sinks, _, cu_seqlens = tensors
    validation.require_tensors(q=q, k=k, v=v, alibi_slopes=slopes, sinks=sinks)
    if cu_seqlens is not None:
        check_documents(cu_seqlens)
    elif lengths[0] is None:
        fix = "Rows of padding count as keys otherwise. If nothing was padded, it is the rows of all ranks together."
        raise InvalidProblem("seqlen", "the length of the whole sequence before `shard`", None, fix)
    check_allocated(("q", "k", "v", "alibi_slopes", "sinks", "cu_seqlens"), (q, k, v, slopes, sinks, cu_seqlens))
    derivatives.refuse_tangents((q, k, v, slopes, sinks))
    derivatives.refuse_tracing()
    q, k, v = validation.autocast(q, k, v)
    grads = [validation.any_needs_grad(t) for t in (q, k, v, sinks)]
    flags = validation.normalise(options, needs_grad=any(grads))
    if flags.batch_invariant:
        raise Unsupported("deterministic='batch' on several ranks: parts of a sequence are summed as ranks hold them")
    if flags.dropout > 0.0 and seed is None:
        fix = "Every rank drops what one device would; draw a seed on one rank and broadcast it."
        raise InvalidProblem("seed", "an integer, the same on every rank, because dropout is on", None, fix)
    rank, beside = (4, "without") if cu_seqlens is None else (3, "with")
    if q.dim() != rank:
        expected, fix = f"{rank} dimensions {beside} cu_seqlens", "Packed rows are (rows, heads, dim)."
        raise InvalidProblem("q", expected, f"shape {tuple(q.shape)}", fix)
    layout = options.layout if cu_seqlens is None else "packed"
    tensors = Tensors(q, k, v, slopes, sinks, seed_tensor(seed, flags.dropout), cu_seqlens)
    world, num_heads = dist.get_world_size(group), q.shape[2 if layout == "bshd" else 1]
    if method == "auto":
        method = _best(tensors, layout, flags.causal, world)
    elif method == "heads" and num_heads < world:
        reason = f"method='heads' needs at least as many query heads as ranks, {num_heads} < {world}"
        raise Unsupported(f"{reason}; method='ring' and method='all_gather' do not")
    spread = (layout, *lengths, method, sharding)
    how = (flags.deterministic, options.backend, grads, options.return_lse, group.group_name)
    given = [getattr(flags, name) for name in FLAGGED]
    return tensors, Settings._make((*given, *spread, *how))


def _best(tensors: Tensors, layout: str, causal: bool, world: int) -> str:
    q, k = tensors.q, tensors.k
    rows, heads = {"bhsd": (2, 1), "bshd": (1, 2), "packed": (0, 1)}[layout]
    sizes = (world, q.shape[heads], k.shape[heads], q.shape[rows], q.shape[-1])
    return best_method(*sizes, causal=causal, device="h200" if q.is_cuda else "cpu", itemsize=q.dtype.itemsize)


def _by_heads(tensors: Tensors, settings: Settings, group: Group) -> tuple[Tensor, Tensor]:
    rows = {"bhsd": 2, "bshd": 1, "packed": 0}[settings.layout]
    sizes = (dist.get_world_size(group), tensors.q.shape[rows], tensors.k.shape[rows])
    return heads_attention(tensors, settings, group, whole_lengths(settings, *sizes))
