"""The public call: attention over a sequence that is spread over ranks. See docs/distributed.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise import derivatives, validation
from tilewise.distributed.agreement import refuse
from tilewise.distributed.heads import heads_attention
from tilewise.distributed.operators import Settings, Tensors, context_parallel, describe, whole_lengths
from tilewise.distributed.scaling import best_method
from tilewise.distributed.sharding import Sharding
from tilewise.distributed.transport import Group, MeshOrGroup, group_of
from tilewise.errors import InvalidProblem, TilewiseError
from tilewise.operands import Options, Window
from tilewise.validation.flags import seed_tensor

__all__ = ["Method", "context_parallel_attention"]

Method = Literal["auto", "ring", "all_gather", "heads"]

if TYPE_CHECKING:
    from typing_extensions import Unpack

    # For type checkers only: they learn what return_lse changes. The function below spells out every flag.
    class Keywords(TypedDict, total=False):
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


CHOICES = {"method": ("auto", "ring", "all_gather", "heads"), "sharding": ("zigzag", "contiguous")}


@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh_or_group: MeshOrGroup = ...,
    *,
    return_lse: Literal[False] = ...,
    **flags: Unpack[Keywords],
) -> Tensor: ...
@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh_or_group: MeshOrGroup = ...,
    *,
    return_lse: Literal[True],
    **flags: Unpack[Keywords],
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
    of all documents (the same on every rank), packed rows (rows, heads, dim). All ranks hold the same number of rows;
    `seqlen` (and `seqlen_k`, if keys differ) is the length of the whole sequence without padding. Returns this rank's
    rows of out, and of lse if `return_lse`; rows of padding are 0 and -inf. Differentiable in q, k, v, sinks (each rank
    gets its rows' part) and through lse; every rank must take part in the backward. Raises if arguments differ between
    ranks.

        >>> out = context_parallel_attention(q, k, v, mesh["context"], causal=True)  # doctest: +SKIP
    """
    if unknown:
        raise validation.unexpected(context_parallel_attention, unknown)
    group = group_of(mesh_or_group)
    try:
        tensors, settings = _judged(
            q, k, v, group, method=method, sharding=sharding, cu_seqlens=cu_seqlens, seqlen=seqlen, seqlen_k=seqlen_k,
            causal=causal, window=window, alibi_slopes=alibi_slopes, softcap=softcap, sinks=sinks, dropout=dropout,
            seed=seed, scale=scale, layout=layout, deterministic=deterministic, backend=backend, return_lse=return_lse,
        )  # fmt: skip
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


def _judged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    *,
    method: str,
    sharding: str,
    cu_seqlens: Tensor | None,
    seqlen: int | None,
    seqlen_k: int | None,
    causal: bool,
    window: Window | None,
    alibi_slopes: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
    seed: int | Tensor | None,
    scale: float | None,
    layout: str,
    deterministic: bool | None,
    backend: str,
    return_lse: bool,
) -> tuple[Tensors, Settings]:
    """The arguments as the op takes them. Raises InvalidProblem."""
    _check_choice("method", method)
    _check_choice("sharding", sharding)
    _check_length("seqlen", seqlen)
    _check_length("seqlen_k", seqlen_k)
    validation.require_tensors(q=q, k=k, v=v, alibi_slopes=alibi_slopes, sinks=sinks)
    if cu_seqlens is not None:
        validation.require_tensors(cu_seqlens=cu_seqlens)
    derivatives.refuse_tangents((q, k, v, alibi_slopes, sinks))
    derivatives.refuse_tracing()
    q, k, v = validation.autocast(q, k, v)
    grads = [validation.any_needs_grad(t) for t in (q, k, v, sinks)]
    options = Options(causal, window, softcap, scale, dropout, layout, deterministic, backend, return_lse)
    flags = validation.normalise(options, needs_grad=any(grads))
    if dropout > 0.0 and seed is None:
        fix = "Every rank drops what one device would; draw a seed on one rank and broadcast it."
        raise InvalidProblem("seed", "an integer, the same on every rank, because dropout is on", None, fix)
    _check_rank(q, packed=cu_seqlens is not None)
    layout = layout if cu_seqlens is None else "packed"
    tensors = Tensors(q, k, v, alibi_slopes, sinks, seed_tensor(seed, dropout), cu_seqlens)
    if method == "auto":
        method = _best(tensors, layout, flags.causal, dist.get_world_size(group))
    settings = Settings(
        flags.causal, flags.window_left, flags.window_right, flags.scale, flags.softcap, flags.dropout,
        layout, seqlen, seqlen_k, method, sharding, flags.deterministic, backend, grads, group.group_name,
    )  # fmt: skip
    return tensors, settings


def _check_choice(name: str, value: str) -> None:
    if value not in CHOICES[name]:
        raise InvalidProblem(name, "one of " + ", ".join(map(repr, CHOICES[name])), repr(value), "Name one of them.")


def _check_rank(q: Tensor, *, packed: bool) -> None:
    rank = 3 if packed else 4
    if q.dim() != rank:
        expected = f"{rank} dimensions {'with' if packed else 'without'} cu_seqlens"
        raise InvalidProblem("q", expected, f"shape {tuple(q.shape)}", "Packed rows are (rows, heads, dim).")


def _check_length(name: str, length: Any) -> None:
    if length is None:
        return
    if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)) or length < 0:
        raise InvalidProblem(name, "None or an integer >= 0", repr(length), "It is the length without padding.")


def _best(tensors: Tensors, layout: str, causal: bool, world: int) -> str:
    q, k = tensors.q, tensors.k
    rows, heads = {"bhsd": (2, 1), "bshd": (1, 2), "packed": (0, 1)}[layout]
    device = "h200" if q.is_cuda else "cpu"
    return best_method(
        world, q.shape[heads], k.shape[heads], q.shape[rows], q.shape[-1], causal=causal, device=device,
        itemsize=q.dtype.itemsize,
    )  # fmt: skip


def _by_heads(tensors: Tensors, settings: Settings, group: Group) -> tuple[Tensor, Tensor]:
    world = dist.get_world_size(group)
    documents: tuple[int, ...] | None = None
    if not torch.compiler.is_compiling():
        try:
            documents = describe(tensors, settings, world)[0].documents
        except TilewiseError as error:
            refuse(error, group, tensors.q.device)
    rows = {"bhsd": 2, "bshd": 1, "packed": 0}[settings.layout]
    lengths = whole_lengths(settings, world, tensors.q.shape[rows], tensors.k.shape[rows])
    return heads_attention(tensors, settings, group, lengths, documents)
