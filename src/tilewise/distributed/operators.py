"""The `torch.library` ops: tilewise::context_parallel with its backward, tilewise::agree and tilewise::exchange_heads.

Communication stays inside ops with their own fakes and autograd, so that torch.compile(fullgraph=True) sees one opaque
node and every rank runs the same sequence of exchanges. Groups are passed by name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise import derivatives, validation
from tilewise.arguments import FLAGS
from tilewise.distributed import blocks
from tilewise.distributed.agreement import Description, agree, refuse
from tilewise.distributed.blocks import Call, Saved, accumulator, sink_gradient
from tilewise.distributed.pieces import Layout
from tilewise.distributed.sharding import chunk_size, chunks_per_rank, in_words
from tilewise.distributed.transport import all_to_all, group_named
from tilewise.distributed.visits import Heads, Shards, Sums, gathered, ring
from tilewise.errors import InvalidProblem, TilewiseError
from tilewise.memory import check_there
from tilewise.operands import Flags, Operands, Wanted
from tilewise.totals import check_totals
from tilewise.units import counted


class Tensors(NamedTuple):
    """The tensors of a call, in the order of the op's schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    seed: Tensor | None = None
    cu_seqlens: Tensor | None = None


class Settings(NamedTuple):
    """Everything about a call that is not a tensor, in the order of the op's schema; before `layout` flags of the plain
    call, under their names.

    `layout` is "packed" for packed rows; `grads` says which of q, k, v, sinks need a gradient.
    """

    causal: bool
    window_left: int | None
    window_right: int | None
    scale: float | None
    softcap: float | None
    dropout: float
    layout: str
    seqlen: int | None
    seqlen_k: int | None
    method: str
    sharding: str
    deterministic: bool
    backend: str
    grads: Sequence[bool]
    return_lse: bool
    group: str

    def flags(self, layout: str = "bhsd") -> Flags:
        """Those of a plain call."""
        needs_grad = any(self.grads)
        given = {name: getattr(self, name) for name in (*FLAGGED, "deterministic", "backend")}
        return Flags(**given, layout=layout, needs_grad=needs_grad)


# The flags of the plain call that every piece gets.
FLAGGED = Settings._fields[: Settings._fields.index("layout")]
# The types of what the plain call has not.
_TYPES = {"seqlen": "SymInt?", "seqlen_k": "SymInt?", "method": "str", "sharding": "str", "grads": "bool[]"} | {
    "return_lse": "bool", "group": "str",
}  # fmt: skip
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, Tensor? sinks, Tensor? seed, Tensor? cu_seqlens"
SCHEMA = ", ".join([_TENSORS, *[f"{(FLAGS | _TYPES)[name]} {name}" for name in Settings._fields]])
COUNT = len(Tensors._fields)
CALL = "context_parallel_attention"


def heads_of(layout: str) -> Heads:
    """From the caller's layout to (batch, heads, rows, dim), as a view."""
    if layout == "bhsd":
        return lambda t: t
    if layout == "bshd":
        return lambda t: t.transpose(1, 2)
    return lambda t: t.transpose(0, 1).unsqueeze(0)


def context_parallel(tensors: Tensors, settings: Settings) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries, differentiable."""
    return cast("tuple[Tensor, Tensor]", _OP(*tensors, *settings))


def agreed(tensors: Tensors, settings: Settings) -> Tensor | None:
    """Validate this rank's arguments and compare them with the other ranks': now, or in a compiled graph before what
    uses the result.
    """
    if not torch.compiler.is_compiling():
        _checked(tensors, settings)
        return None
    return cast("Tensor", _AGREE(*(None if t is None else t.detach() for t in tensors), *settings))


def exchange_heads(
    tensor: Tensor, send: Sequence[int], receive: Sequence[int], group: str, after: Tensor | None = None
) -> Tensor:
    """Exchange rows between ranks, see `transport.all_to_all`; differentiable. A compiler keeps it behind the op that
    makes `after`.
    """
    return cast("Tensor", _EXCHANGE(tensor, list(send), list(receive), group, after))


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, settings = Tensors(*args[:COUNT]), Settings(*args[COUNT:])
    shards, call = _checked(tensors, settings)
    visits = gathered if settings.method == "all_gather" else ring
    running = blocks.forward(call, shards.heads(tensors.q), tensors.v.shape[-1], visits(shards))
    if tensors.sinks is not None:
        # Rows of padding see neither keys nor the sink.
        for chunk in shards.layout.q_shard(dist.get_rank(shards.group)):
            running.rows(chunk.row, chunk.row + chunk.stop - chunk.start).add_sinks(tensors.sinks)
    return _as_given(running.out, tensors.q, settings), running.lse[0] if settings.layout == "packed" else running.lse


def _backward(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors, settings = Tensors(*args[:COUNT]), Settings(*args[COUNT:])
    check_there(("dout", "dlse", "out", "lse"), (dout, dlse, out, lse))
    shards, call = _checked(tensors, settings)
    q, k, v = tensors[:3]
    heads, packed = shards.heads, settings.layout == "packed"
    dout = torch.zeros_like(out) if dout is None else dout
    rows = (heads(out), lse.unsqueeze(0) if packed else lse, heads(dout))
    saved = Saved(*rows, dlse.unsqueeze(0) if packed and dlse is not None else dlse)
    wanted = Wanted(*settings.grads[:3])
    visits = gathered if settings.method == "all_gather" else ring
    found: Sums = []
    sums = blocks.backward(call, heads(q), saved, wanted, visits(shards, wanted, found))
    dq = q.new_empty(0) if sums is None else _as_given(sums, q, settings)
    dk, dv = (t.new_empty(0) if g is None else g.to(t.dtype) for t, g in zip((k, v), found, strict=True))
    dsinks = q.new_empty(0)
    if settings.grads[3] and tensors.sinks is not None:
        dsinks = sink_gradient(tensors.sinks, saved)
    return dq, dk, dv, dsinks


def _agree(*args: Any) -> Tensor:
    tensors = Tensors(*args[:COUNT])
    _checked(tensors, Settings(*args[COUNT:]))
    return tensors.q.new_empty(0)


def _agree_fake(*args: Any) -> Tensor:
    return Tensors(*args[:COUNT]).q.new_empty(0)


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, settings = Tensors(*args[:COUNT]), Settings(*args[COUNT:])
    q, v = tensors.q, tensors.v
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    shape = heads_of(settings.layout)(q).shape[:3]
    return out, q.new_empty(shape[1:] if settings.layout == "packed" else shape, dtype=accumulator(q.dtype))


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    tensors, settings = Tensors(*args[4 : 4 + COUNT]), Settings(*args[4 + COUNT :])
    sources = (tensors.q, tensors.k, tensors.v, tensors.sinks)
    return tuple(
        t.new_empty(t.shape) if want and t is not None else tensors.q.new_empty(0)
        for t, want in zip(sources, settings.grads, strict=True)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:COUNT])
    ctx.settings = inputs[COUNT:]
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    # Takes part even if no gradient came in: peers may wait for this rank's gradients of their keys.
    out, lse, *tensors = ctx.saved_tensors
    settings = Settings(*ctx.settings)
    dq, dk, dv, dsinks = (
        gradient if want else None
        for gradient, want in zip(_BACKWARD(dout, dlse, out, lse, *tensors, *settings), settings.grads, strict=True)
    )
    return (dq, dk, dv, None, dsinks, None, None, *(None for _ in settings))


def _as_given(rows: Tensor, like: Tensor, settings: Settings) -> Tensor:
    """Heads-first rows in the caller's layout and dtype; copied only if one of them differs."""
    if rows.dtype == like.dtype and settings.layout == "bhsd":
        return rows
    given = like.new_empty((*like.shape[:-1], rows.shape[-1]))
    heads_of(settings.layout)(given).copy_(rows)
    return given


def _checked(tensors: Tensors, settings: Settings) -> tuple[Shards, Call]:
    """Validate this rank's arguments, compare them with the other ranks', and describe the whole problem."""
    where, group = tensors.q.device, group_named(settings.group)
    try:
        check_there(Tensors._fields, tensors)
        layout, call = _describe(tensors, settings, dist.get_world_size(group))
    except TilewiseError as error:
        refuse(error, group, where, _in_words({"call": CALL, **_flags(settings)}))
    agree(_description(tensors, settings, layout), group, where)
    return Shards(layout, *tensors[:3], heads_of(settings.layout), group), call


def _describe(tensors: Tensors, settings: Settings, world: int) -> tuple[Layout, Call]:
    """The layout over ranks, and what all its pieces share. Raises InvalidProblem for an invalid call."""
    q, k, v = tensors[:3]
    packed = settings.layout == "packed"
    documents: tuple[int, ...] | None = None
    local = [t.unsqueeze(0) if packed else t for t in (q, k, v)]
    slopes = tensors.alibi_slopes
    # Slopes of packed documents have one row per document; the rest is validated like the local call.
    own = None if packed and slopes is not None and slopes.dim() == 2 else slopes
    operands = Operands(local[0], local[1], local[2], alibi_slopes=own, sinks=tensors.sinks, seed=tensors.seed)
    problem = validation.describe("dense", operands, settings.flags("bshd" if packed else settings.layout))
    rows_q, rows_k = problem.seqlen_q, problem.seqlen_k
    _check_lengths(settings, world, rows_q, rows_k)
    seqlen, seqlen_k = whole_lengths(settings, world, rows_q, rows_k)
    if packed:
        documents = _checked_documents(tensors, settings, world, rows_q, rows_k)
        seqlen = seqlen_k = documents[-1]
    left, right = problem.band
    sizes = (world, settings.sharding, rows_q, rows_k, seqlen, seqlen_k, left, right, documents)
    layout = Layout(*sizes, tilted=slopes is not None, random=settings.dropout > 0.0)
    seed = tensors.seed
    if seed is not None and seed.device != q.device and seed.device.type == "cpu":
        # A fill, which unlike a copy does not block the host.
        seed = torch.full((), int(seed), dtype=torch.int64, device=q.device)
    return layout, Call(settings.flags()._replace(scale=problem.scale), layout.offset, packed, slopes, seed)


def whole_lengths(settings: Settings, world: int, rows_q: int, rows_k: int) -> tuple[int, int]:
    """The lengths of the whole sequences of queries and keys: without padding, but for packed rows, whose documents say
    where it begins.
    """
    if settings.seqlen is None:
        return world * rows_q, world * rows_k
    return settings.seqlen, settings.seqlen if settings.seqlen_k is None else settings.seqlen_k


def _check_lengths(settings: Settings, world: int, rows_q: int, rows_k: int) -> None:
    lengths = whole_lengths(settings, world, rows_q, rows_k)
    for name, length, rows in (("seqlen", lengths[0], rows_q), ("seqlen_k", lengths[1], rows_k)):
        if rows % chunks_per_rank(settings.sharding):
            fix = "Pad the shards: `shard` does, with pad=."
            raise InvalidProblem("q" if name == "seqlen" else "k", "an even number of rows for zigzag", rows, fix)
        if name == "seqlen_k" and settings.seqlen is not None and settings.seqlen_k is None and rows_q != rows_k:
            expected = f"the length of all keys before `shard`, because k has {counted(rows_k, 'row')} and q {rows_q}"
            raise InvalidProblem(name, expected, None, "Without it, keys are as many as queries.")
        if not 0 <= length <= world * rows:
            expected = f"at most {counted(world, 'rank')} x {counted(rows, 'row')} = {world * rows}"
            raise InvalidProblem(name, expected, length, "It is the length of the whole sequence without padding.")
        _check_sharded(name, length, rows, world, settings.sharding)


def _check_sharded(name: str, length: int, rows: int, world: int, sharding: str) -> None:
    """Refuse as many rows on one rank as the whole sequence has, unless `shard` makes them so."""
    if length == rows > chunk_size(length, world, sharding) * chunks_per_rank(sharding):
        fix = (
            "If every rank has the whole sequence, `shard` it first, along the dimension of tokens; if not, pass the "
            "length from before `shard`. If that is the length, cut off some padding before `shard`."
        )
        raise InvalidProblem(
            name, f"the length of the sequence over {counted(world, 'rank')}", f"{rows}, one rank's rows", fix
        )


def _checked_documents(tensors: Tensors, settings: Settings, world: int, rows_q: int, rows_k: int) -> tuple[int, ...]:
    """The document boundaries in the whole sequence."""
    assert tensors.cu_seqlens is not None
    documents = tuple(tensors.cu_seqlens.tolist())
    if rows_q != rows_k:
        raise InvalidProblem(
            "k", f"{counted(rows_q, 'row')} as q has", rows_k, "Packed documents attend to themselves."
        )
    check_totals("cu_seqlens", documents, world * rows_q)
    _check_sharded("cu_seqlens", documents[-1], rows_q, world, settings.sharding)
    for name, length in (("seqlen", settings.seqlen), ("seqlen_k", settings.seqlen_k)):
        if length not in (None, documents[-1]):
            fix = "Leave it out: the documents say it."
            raise InvalidProblem(name, f"None or {documents[-1]}, the last of cu_seqlens", length, fix)
    slopes = tensors.alibi_slopes
    shapes = ((tensors.q.shape[1],), (len(documents) - 1, tensors.q.shape[1]))
    if slopes is not None and tuple(slopes.shape) not in shapes:
        expected = f"shape {shapes[0]} or {shapes[1]}"
        raise InvalidProblem("alibi_slopes", expected, tuple(slopes.shape), "Give one slope per head or document.")
    return documents


def _description(tensors: Tensors, settings: Settings, layout: Layout) -> Description:
    """The call in words, by argument, without what may differ between ranks (the seed's value, the group's name).

    The same fields for every method, which is the last: the choice of "auto" depends on others.
    """
    s, wanted = settings, [name for name, want in zip(("q", "k", "v", "sinks"), settings.grads, strict=True) if want]
    return _in_words({
        "call": CALL,
        "q": in_words(tensors.q), "k": in_words(tensors.k), "v": in_words(tensors.v),
        "alibi_slopes": in_words(tensors.alibi_slopes), "sinks": in_words(tensors.sinks), **_flags(s),
        "cu_seqlens": layout.documents, "seqlen": layout.seqlen_q, "seqlen_k": layout.seqlen_k,
        "requires_grad": " ".join(wanted) or "none", "return_lse": s.return_lse, "method": s.method,
    })  # fmt: skip


def _flags(settings: Settings) -> dict[str, object]:
    """What can be compared of a call that is not valid."""
    s = settings
    return {
        "causal": s.causal, "window": (s.window_left, s.window_right), "scale": s.scale, "softcap": s.softcap,
        "dropout": s.dropout, "layout": s.layout, "sharding": s.sharding, "deterministic": s.deterministic,
        "backend": s.backend,
    }  # fmt: skip


def _in_words(described: dict[str, object]) -> Description:
    return tuple((name, str(value)) for name, value in described.items())


def _exchange(tensor: Tensor, send: list[int], receive: list[int], group: str, _after: Tensor | None) -> Tensor:
    return all_to_all(tensor.contiguous(), send, receive, group_named(group))


def _exchange_fake(tensor: Tensor, _send: list[int], receive: list[int], _group: str, _after: Tensor | None) -> Tensor:
    return tensor.new_empty((sum(receive), *tensor.shape[1:]))


def _exchange_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, ctx.send, ctx.receive, ctx.group, _ = inputs


def _exchange_autograd(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _EXCHANGE(gradient, ctx.receive, ctx.send, ctx.group, None), None, None, None, None


def _register(library: torch.library.Library) -> None:
    gradients = "Tensor dq, Tensor dk, Tensor dv, Tensor dsinks"
    backward = f"(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, {SCHEMA}) -> ({gradients})"
    exchange = "(Tensor tensor, SymInt[] send, SymInt[] receive, str group, Tensor? after) -> Tensor"
    define = functools.partial(derivatives.define, library)
    define("context_parallel", f"({SCHEMA}) -> (Tensor out, Tensor lse)", _forward, _forward_fake)
    define("context_parallel_backward", backward, _backward, _backward_fake)
    define("agree", f"({SCHEMA}) -> Tensor", _agree, _agree_fake)
    define("exchange_heads", exchange, _exchange, _exchange_fake)
    register = torch.library.register_autograd
    register("tilewise::context_parallel", _autograd, setup_context=_save, lib=library)
    register("tilewise::context_parallel_backward", derivatives.refuse_second, lib=library)
    register("tilewise::exchange_heads", _exchange_autograd, setup_context=_exchange_save, lib=library)


# The library must live as long as the process: dropping it would unregister the ops.
_LIBRARY = torch.library.Library("tilewise", "FRAGMENT")
_register(_LIBRARY)
_OP: Any = torch.ops.tilewise.context_parallel.default
_BACKWARD: Any = torch.ops.tilewise.context_parallel_backward.default
_AGREE: Any = torch.ops.tilewise.agree.default
_EXCHANGE: Any = torch.ops.tilewise.exchange_heads.default
