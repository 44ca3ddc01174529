"""The public calls: `attention`, `attention_varlen`, `attention_paged`, `merge`, `backends`. See docs/contract.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, cast, overload

import torch
from torch import Tensor

from tilewise import calls, cascade, derivatives, dispatch, ops, sharded, tracing, validation
from tilewise.bodies import OWN_ARGUMENTS, with_body
from tilewise.errors import InvalidProblem
from tilewise.fp8.container import Fp8Tensor
from tilewise.memory import check_allocated
from tilewise.numerics import merge_partials
from tilewise.operands import ATTENDED, LENGTHS, Lengths, Operands, Options, Wanted, Window
from tilewise.problem import Kind
from tilewise.tile_masks import TileMask

if TYPE_CHECKING:
    from typing_extensions import TypedDict, TypeVar, Unpack

    # For type checkers only: they learn what return_* changes. The functions below spell out every flag.
    No = Literal[False]
    Yes = Literal[True]
    Lse = TypeVar("Lse")
    Logits = TypeVar("Logits")

    class Common(TypedDict, Generic[Lse, Logits], total=False):
        """The flags every call shares."""

        causal: bool
        window: Window | None
        bias: Tensor | None
        mask: Tensor | TileMask | None
        alibi_slopes: Tensor | None
        softcap: float | None
        sinks: Tensor | None
        scale: float | None
        deterministic: bool | Literal["batch"] | None
        backend: str
        return_lse: Lse
        return_max_logits: Logits
        out: Tensor | None

    class Random(Common[Lse, Logits], total=False):
        """`Common` and dropout."""

        dropout: float
        seed: int | Tensor | None

    class Dense(Random[Lse, Logits], total=False):
        """What `attention` takes."""

        layout: str

    class Varlen(Random[Lse, Logits], total=False):
        """What `attention_varlen` takes."""

        max_seqlen_q: int | None
        max_seqlen_k: int | None

    class Paged(Common[Lse, Logits], total=False):
        """What `attention_paged` takes."""

        cu_seqlens_q: Tensor | None
        max_seqlen_q: int | None
        shared_prefix: cascade.SharedPrefix | None


# q, k and v may be tensors, or e4m3 data (of pages also int8) with its scales.
Attended = Tensor | Fp8Tensor
MASK, SEED = Operands._fields.index("mask"), Operands._fields.index("seed")
NOTHING = (None,) * Operands._fields.index("out")
# For the bodies that are compiled: makes a named tuple of a tuple, without a Python call.
_record = tuple.__new__


@overload
def attention(q: Attended, k: Attended, v: Attended, **flags: Unpack[Dense[No, No]]) -> Tensor: ...
@overload
def attention(q: Attended, k: Attended, v: Attended, **flags: Unpack[Dense[Yes, No]]) -> tuple[Tensor, Tensor]: ...
@overload
def attention(q: Attended, k: Attended, v: Attended, **flags: Unpack[Dense[No, Yes]]) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Attended, k: Attended, v: Attended, **flags: Unpack[Dense[Yes, Yes]]
) -> tuple[Tensor, Tensor, Tensor]: ...
@with_body("dense")
def attention(
    q: Attended,
    k: Attended,
    v: Attended,
    *,
    causal: bool = False,
    window: Window | None = None,
    bias: Tensor | None = None,
    mask: Tensor | TileMask | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    deterministic: bool | Literal["batch"] | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    return_max_logits: bool = False,
    out: Tensor | None = None,
    **unknown: Any,
) -> calls.Result:
    """Exact attention of dense tensors, differentiable in q, k, v, bias, sinks and through lse.

    Shapes: q (batch, num_heads, seqlen_q, head_dim), k (batch, num_kv_heads, seqlen_k, head_dim), v (..., head_dim_v).
    With `layout="bshd"` they are (batch, seqlen, heads, dim). Returns out (like q, with head_dim_v columns), and also
    lse (batch, num_heads, seqlen_q) if `return_lse`. q, k, v may be `tilewise.fp8.Fp8Tensor`, without gradients. Raises
    InvalidProblem for invalid arguments, and Unsupported if no permitted backend can compute the call.

    causal         query i sees key j if j <= i + seqlen_k - seqlen_q: the last query sees all keys
    window         (left, right): only keys from i - left to i + right, counted like `causal`; None: no bound
    bias           added to the scores; broadcasts to (batch, num_heads, seqlen_q, seqlen_k); differentiable
    mask           boolean, True where a query may see a key; broadcasts like bias; or a TileMask, which skips tiles
    alibi_slopes   (num_heads,) or (batch, num_heads): scores lose slope * distance
    softcap        scores become softcap * tanh(score / softcap)
    sinks          (num_heads,): a logit per head that joins the denominator and has no value; differentiable
    dropout, seed  probability of dropping a key, and the number that decides which; without a seed, torch's generator
    scale          of q k^T; 1 / sqrt(head_dim) by default
    deterministic  repeatable bits of gradients; None: as torch.are_deterministic_algorithms_enabled() says; "batch":
                   also bits of a sequence that do not depend on the others, see docs/contract.md
    backend        "auto", or one of tilewise.backends(), which then computes the call or refuses it
    out            memory for the result, which is then returned; without gradients

    With `return_max_logits` the last result is max_logits (num_heads,), fp32: the largest score that each head computed
    in this call, after scale, softcap, bias and masks, before sinks; -inf if a head saw no key. It has no gradient.

        >>> q = k = v = torch.ones(1, 2, 4, 8)
        >>> attention(q, k, v, causal=True).shape
        torch.Size([1, 2, 4, 8])
    """
    if unknown:
        raise validation.unexpected(attention, unknown)
    return _attend("dense", *OWN_ARGUMENTS)


@overload
def attention_varlen(
    q: Attended, k: Attended, v: Attended, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **flags: Unpack[Varlen[No, No]]
) -> Tensor: ...
@overload
def attention_varlen(
    q: Attended, k: Attended, v: Attended, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **flags: Unpack[Varlen[Yes, No]]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Attended, k: Attended, v: Attended, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **flags: Unpack[Varlen[No, Yes]]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Attended, k: Attended, v: Attended, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **flags: Unpack[Varlen[Yes, Yes]]
) -> tuple[Tensor, Tensor, Tensor]: ...
@with_body("varlen")
def attention_varlen(
    q: Attended,
    k: Attended,
    v: Attended,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: Window | None = None,
    bias: Tensor | None = None,
    mask: Tensor | TileMask | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
    deterministic: bool | Literal["batch"] | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    return_max_logits: bool = False,
    out: Tensor | None = None,
    **unknown: Any,
) -> calls.Result:
    """Exact attention within packed sequences: sequence b is rows cu_seqlens[b] .. cu_seqlens[b+1]-1.

    Shapes: q (total_q, num_heads, head_dim), k and v (total_k, num_kv_heads, dim), cu_seqlens int32 (batch + 1,). Rows
    past the last sequence give 0 and lse -inf. Returns out (total_q, num_heads, head_dim_v), and also lse (num_heads,
    total_q) if `return_lse`. bias and mask broadcast to (batch, num_heads, max_seqlen_q, max_seqlen_k) and are indexed
    within each sequence. max_seqlen_* are the lengths of the longest sequences. Other arguments are `attention`'s.

        >>> q = k = v = torch.ones(5, 2, 8)
        >>> cu = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> attention_varlen(q, k, v, cu, cu, causal=True).shape
        torch.Size([5, 2, 8])
    """
    if unknown:
        raise validation.unexpected(attention_varlen, unknown)
    return _attend("varlen", *OWN_ARGUMENTS)


@overload
def attention_paged(
    q: Attended,
    k_pages: Attended,
    v_pages: Attended,
    block_table: Tensor,
    seqlens_k: Tensor,
    **flags: Unpack[Paged[No, No]],
) -> Tensor: ...
@overload
def attention_paged(
    q: Attended,
    k_pages: Attended,
    v_pages: Attended,
    block_table: Tensor,
    seqlens_k: Tensor,
    **flags: Unpack[Paged[Yes, No]],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_paged(
    q: Attended,
    k_pages: Attended,
    v_pages: Attended,
    block_table: Tensor,
    seqlens_k: Tensor,
    **flags: Unpack[Paged[No, Yes]],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_paged(
    q: Attended,
    k_pages: Attended,
    v_pages: Attended,
    block_table: Tensor,
    seqlens_k: Tensor,
    **flags: Unpack[Paged[Yes, Yes]],
) -> tuple[Tensor, Tensor, Tensor]: ...
@with_body("paged")
def attention_paged(
    q: Attended,
    k_pages: Attended,
    v_pages: Attended,
    block_table: Tensor,
    seqlens_k: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    shared_prefix: cascade.SharedPrefix | None = None,
    causal: bool = False,
    window: Window | None = None,
    bias: Tensor | None = None,
    mask: Tensor | TileMask | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    deterministic: bool | Literal["batch"] | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    return_max_logits: bool = False,
    out: Tensor | None = None,
    **unknown: Any,
) -> calls.Result:
    """Exact attention to a paged KV cache: token j of sequence b is slot j % page_size of page block_table[b, j //
    page_size].

    Shapes: q (batch, num_heads, head_dim) with one token per sequence, or packed (total_q, ...) with `cu_seqlens_q`, at
    most `max_seqlen_q` of each sequence; pages (num_pages, page_size, num_kv_heads, dim), block_table int32 (batch,
    max_pages), seqlens_k int32 (batch,). Returns out (total_q, num_heads, head_dim_v), and also lse (num_heads,
    total_q) if `return_lse`. bias and mask broadcast over max_pages * page_size keys. `shared_prefix` names sequences
    that start with the same pages; these pages are read once per group where that is faster (see tilewise.cascade).

        >>> pages = torch.ones(3, 4, 2, 8)
        >>> table = torch.tensor([[2, 0]], dtype=torch.int32)
        >>> attention_paged(torch.ones(1, 2, 8), pages, pages, table, torch.tensor([5], dtype=torch.int32)).shape
        torch.Size([1, 2, 8])
    """
    if unknown:
        raise validation.unexpected(attention_paged, unknown)
    return _attend("paged", *OWN_ARGUMENTS)


def _attend(
    kind: Kind,
    operands: tuple[Any, ...],
    options: Options,
    lengths: Lengths,
    seed: int | Tensor | None,
    out: Tensor | None,
    shared_prefix: Any,
) -> calls.Result:
    """Common path of the three calls: run the cached call if the signature is known, else validate and run.

    `operands` are in the order of `Operands`, as the caller passes them; trailing Nones may be left out.
    """
    tensors, groups = operands, None
    about: tuple[Any, ...] = ()
    dropout, unkept = options.dropout, seed
    if len(operands) > MASK and (mask := operands[MASK]).__class__ is TileMask:
        tensors = (*operands[:MASK], None, *operands[MASK + 1 :], *mask.parts)
        about = (mask.promises,)
        lengths = lengths._replace(mask_seqlen_q=mask.seqlen_q, mask_seqlen_k=mask.seqlen_k)
    if dropout.__class__ is float and dropout and calls.is_seeded(tensors, seed):
        # The seed is a tensor like any other. Drawn here, it decides the bits of this call alone.
        seed = validation.seed_tensor(seed, dropout)
        tensors, dropout, unkept = (*tensors, *NOTHING[len(tensors) : SEED], seed), 0.0, None
    if operands[2].__class__ is Fp8Tensor:
        tensors, scales = validation.split_scales(tensors)
        about += scales
    if out is not None:
        tensors = (*tensors, *NOTHING[len(tensors) :], out)
    count = len(tensors)
    if shared_prefix is not None and shared_prefix.__class__ is cascade.SharedPrefix:
        groups = shared_prefix.groups
        tensors += shared_prefix[1:]
    slot = None
    if groups is not None or shared_prefix is None:
        key = (kind, *options, *about)
        slot, places, sized, bounds = calls.slot_of(tensors, key, dropout, options.window, unkept, groups, lengths)
        if slot is not None and slot.call is not None:
            found: calls.Result = slot.call(tensors, places, sized, None, bounds)
            return found
    given = Operands(*operands)._replace(out=out)
    if slot is None and sharded.is_dtensor(given.q):

        def attend(parts: Operands, options: Options) -> calls.Result:
            return _attend(kind, parts[:ATTENDED], options, lengths, seed, None, shared_prefix)

        return sharded.attend(kind, attend, given, options)
    given, flags = validation.checked(kind, given, options, lengths, seed)
    if shared_prefix is None:
        return ops.result(kind, given, flags, return_lse=options.return_lse, slot=slot)
    made = cascade.attention(shared_prefix, given, flags)
    if slot is not None and not slot.is_tried:
        slot.call = cascade.bound(shared_prefix, given, flags, made[:2], count, return_lse=options.return_lse)
        slot.is_tried = True
    return ops.picked(*made, return_lse=options.return_lse)


def attention_after(
    write: Callable[[], None], kind: Literal["dense", "paged"], attended: tuple[Any, Any, Any], **others: Any
) -> tuple[Tensor, Tensor]:
    """For the caches of this package: (out, lse) of `attention` or `attention_paged` to keys that `write` stores.

    `write` is called after validation and before the computation, so a call that raises has written nothing. Compilers
    trace validation: they see `write` and the attention as separate steps. `others` are the call's tensors and options.
    """
    given, options, lengths = _sorted(attended, others)
    derivatives.refuse_tangents([t for t in given if isinstance(t, Tensor)])
    operands, flags = validation.checked(kind, given, options, lengths, cast=False, needs_grad=False)
    q, k, v = operands[:3]
    query, key, value = validation.autocast_stand_ins(q, k, v)
    if key is k and value is v and not torch.compiler.is_compiling():
        return ops.repeated(kind, operands._replace(q=validation.autocast(q)[0]), flags, write)
    ops.refuse(kind, operands._replace(q=query, k=key, v=value), flags)
    write()
    query, key, value = validation.autocast(q, k, v)
    return ops.repeated(kind, operands._replace(q=query, k=key, v=value), flags)


def attention_backward(
    kind: Literal["dense", "varlen"],
    attended: tuple[Tensor, Tensor, Tensor],
    saved: tuple[Tensor, Tensor, Tensor],
    wanted: tuple[bool, bool, bool],
    *,
    seed: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """For drop-in replacements whose callers keep what autograd would save: (dq, dk, dv) given (dout, out, lse).

    `out` and `lse` may cover more keys than k and v: they are used as given and not recomputed. A gradient that is not
    wanted is an empty tensor. `others` are the tensors and options of the call.
    """
    dout, out, lse = saved
    given, options, lengths = _sorted(attended, others)
    validation.require_tensors(dout=dout, out=out, lse=lse)
    operands, flags = validation.checked(kind, given, options, lengths, seed, cast=False, needs_grad=True)
    problem = validation.describe(kind, operands, flags)
    q = operands.q
    for name, tensor, expected, dtype in (
        ("dout", dout, problem.out_shape, q.dtype), ("out", out, problem.out_shape, q.dtype),
        ("lse", lse, problem.lse_shape, problem.accumulate_dtype),
    ):  # fmt: skip
        if tuple(tensor.shape) != tuple(expected) or tensor.dtype != dtype or tensor.device != q.device:
            got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            raise InvalidProblem(name, f"{dtype} {tuple(expected)} on {q.device}", got, "Pass what the forward gave.")
    out = out if out.stride(-1) == 1 else out.contiguous()
    at, forward = derivatives.At(kind, operands, flags), (out, lse.contiguous())
    gradients = derivatives.backward(at, forward, (dout, None), Wanted(*wanted))
    return cast("tuple[Tensor, Tensor, Tensor]", gradients[:3])


def refuse_rows(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **others: Any) -> None:
    """For the caches of this package: raise what causal `attention_varlen` would raise for such rows; compute nothing.

    A cache that knows its keys only after writing calls this before it writes. Each call signature is checked once.
    """
    none = cu_seqlens[:1]
    operands, options, _ = _sorted((q[:0], k[:0], v[:0]), {"cu_seqlens_q": none, "cu_seqlens_k": none, **others})
    options, lengths = options._replace(causal=True), Lengths(max_seqlen_q=0, max_seqlen_k=0)
    slot, *_ = calls.slot_of(operands, ("refused", *options), window=options.window)
    if slot is not None and slot.is_tried:
        return
    query, key, value = validation.autocast_stand_ins(*operands[:3])
    ops.refuse("varlen", *validation.checked("varlen", operands._replace(q=query, k=key, v=value), options, lengths))
    if slot is not None:
        slot.is_tried = True


def _sorted(attended: tuple[Any, Any, Any], others: Mapping[str, Any]) -> tuple[Operands, Options, Lengths]:
    """Splits keyword arguments into tensors, options and bounds on lengths."""
    options = {name: value for name, value in others.items() if name in Options._fields}
    lengths = {name: value for name, value in others.items() if name in LENGTHS}
    tensors = {name: value for name, value in others.items() if name not in options and name not in lengths}
    return Operands(*attended, **tensors), Options(**options), Lengths(**lengths)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, layout: str = "bhsd") -> tuple[Tensor, Tensor]:
    """Combine two partial results over disjoint keys exactly, as if all keys had been seen at once; differentiable.

    Takes the results of `attention` (in its `layout`) or `attention_varlen` with `return_lse=True`. Returns the same
    shapes.
    """
    validation.require_tensors(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    validation.check_flag("layout", layout)
    packed = out_a.dim() == 3
    heads_last = packed or layout == "bshd"
    dims = (0, 1) if packed else (1, 2)
    a, b = (lse.transpose(*dims) if heads_last and lse.dim() >= 2 else lse for lse in (lse_a, lse_b))
    names, tensors = ("out_a", "lse_a", "out_b", "lse_b"), (out_a, lse_a, out_b, lse_b)
    check_allocated(names, tensors)
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype not in validation.FLOATS or tensor.device != out_a.device:
            expected = f"a tensor of float16, bfloat16, float32 or float64 on {out_a.device}"
            raise InvalidProblem(name, expected, f"{tensor.dtype} on {tensor.device}", "Convert it with .to().")
    for name, out, lse in (("lse_a", out_a, a), ("lse_b", out_b, b)):
        if out.dim() == 0 or out.shape != out_a.shape or lse.shape != out.shape[:-1]:
            expected = f"an lse that fits out of shape {tuple(out_a.shape)} in layout {layout!r}"
            raise InvalidProblem(name, expected, tuple(lse.shape), "Merge results of one problem over different keys.")
    with tracing.span(tracing.MERGE, tensors):
        out, lse = merge_partials(out_a, a, out_b, b)
    return out, lse.transpose(*dims) if heads_last else lse


def backends() -> tuple[dispatch.Status, ...]:
    """The backends in order of preference, each with "available" or the reason why it cannot run."""
    return dispatch.statuses()


def register_backend(backend: object, *, before: str = "reference") -> None:
    """Register a backend under its `name` for `backend=<name>`, `backend="auto"`, `explain` and `backends`.

    `backend` is a `tilewise.backends.base.Backend`, or has its abstract methods and those of the others that differ
    from the defaults. "auto" asks it just before the backend
    named by `before`; by default after all backends of this package but "reference". A name that is taken is refused.
    """
    dispatch.register(backend, before=before)
    calls.forget()


def unregister_backend(name: str) -> None:
    """Remove a registered backend. The backends of this package cannot be removed."""
    dispatch.unregister(name)
    calls.forget()
