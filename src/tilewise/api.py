"""The calls: `attention`, `attention_varlen`, `attention_paged`, `merge`, `backends`. docs/contract.md defines them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from tilewise import calls, cascade, dispatch, ops, sharded, tracing, validation
from tilewise.backends.base import Backend
from tilewise.errors import InvalidProblem
from tilewise.fp8.container import Fp8Tensor
from tilewise.numerics import merge_partials
from tilewise.operands import Operands, Wanted
from tilewise.validation.flags import Window, seed_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

    # For type checkers only, which thus know what return_lse changes; the functions below spell every flag out.
    class Common(TypedDict, total=False):
        """The flags every call shares."""

        causal: bool
        window: Window | None
        bias: Tensor | None
        mask: Tensor | None
        alibi_slopes: Tensor | None
        softcap: float | None
        sinks: Tensor | None
        scale: float | None
        deterministic: bool | None
        backend: str

    class Random(Common, total=False):
        """`Common` and dropout."""

        dropout: float
        seed: int | Tensor | None

    class Dense(Random, total=False):
        """What `attention` takes."""

        layout: str

    class Varlen(Random, total=False):
        """What `attention_varlen` takes."""

        max_seqlen_q: int | None
        max_seqlen_k: int | None

    class Paged(Common, total=False):
        """What `attention_paged` takes."""

        cu_seqlens_q: Tensor | None
        max_seqlen_q: int | None
        shared_prefix: cascade.SharedPrefix | None


__all__ = [
    "attention",
    "attention_after",
    "attention_backward",
    "attention_paged",
    "attention_varlen",
    "backends",
    "merge",
    "refuse_rows",
    "register_backend",
    "unregister_backend",
]

# q, k and v: tensors, or e4m3 data with its scales.
Attended = Tensor | Fp8Tensor


@overload
def attention(
    q: Attended, k: Attended, v: Attended, *, return_lse: Literal[False] = ..., **flags: Unpack[Dense]
) -> Tensor: ...
@overload
def attention(
    q: Attended, k: Attended, v: Attended, *, return_lse: Literal[True], **flags: Unpack[Dense]
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Attended,
    k: Attended,
    v: Attended,
    *,
    causal: bool = False,
    window: Window | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
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
) -> calls.Result:
    """Exact attention of dense tensors, differentiable in q, k, v, bias, sinks and through lse.

    q (batch, num_heads, seqlen_q, head_dim), k (batch, num_kv_heads, seqlen_k, head_dim), v (..., head_dim_v); with
    `layout="bshd"` (batch, seqlen, heads, dim). Returns out like q with head_dim_v, and lse (batch, num_heads,
    seqlen_q) if `return_lse`. q, k, v may be `tilewise.fp8.Fp8Tensor`, without gradients. Rejects with InvalidProblem
    what makes no sense and with Unsupported what no permitted backend can do.

        >>> q = k = v = torch.ones(1, 2, 4, 8)
        >>> attention(q, k, v, causal=True).shape
        torch.Size([1, 2, 4, 8])
    """
    if unknown:
        raise validation.unexpected(attention, unknown)
    given = (q, k, v)
    if bias is not None or mask is not None or alibi_slopes is not None or sinks is not None:
        given = (q, k, v, None, None, None, None, bias, mask, alibi_slopes, sinks)  # type: ignore[assignment]
    about: tuple[Any, ...] = ()
    if v.__class__ is Fp8Tensor:
        given, about = validation.taken_apart(given)
    slot, places = calls.slot_of(
        given, "dense", dropout, seed, causal, softcap, scale, layout, deterministic, backend, return_lse, *about,
        window=window,
    )  # fmt: skip
    if slot is not None and slot.call is not None:
        return slot.call(given, places)
    if slot is None and sharded.is_dtensor(q):
        validation.check_flag("layout", layout)
        call = functools.partial(
            attention, causal=causal, window=window, softcap=softcap, seed=seed, scale=scale, layout=layout,
            deterministic=deterministic, backend=backend,
        )  # fmt: skip
        return sharded.attend(
            "dense", call, return_lse=return_lse, layout=layout, dropout=dropout, q=q, k=k, v=v, bias=bias, mask=mask,
            alibi_slopes=alibi_slopes, sinks=sinks,
        )  # fmt: skip
    (query, key, value), scales = validation.unwrapped(q, k, v, layout)
    validation.require_tensors(q=query, k=key, v=value, bias=bias, mask=mask, alibi_slopes=alibi_slopes, sinks=sinks)
    query, key, value = validation.autocast(query, key, value)
    flags = validation.normalise(
        causal=causal, window=window, softcap=softcap, scale=scale, dropout=dropout, layout=layout,
        deterministic=deterministic, backend=backend, return_lse=return_lse,
        needs_grad=validation.needs_grad(query, key, value, bias, sinks),
    )  # fmt: skip
    seed = seed_tensor(seed, dropout)
    operands = Operands(query, key, value, bias=bias, mask=mask, alibi_slopes=alibi_slopes, sinks=sinks, seed=seed)
    return ops.result("dense", *validation.with_scales(operands, flags, scales), return_lse=return_lse, slot=slot)


@overload
def attention_varlen(
    q: Attended,
    k: Attended,
    v: Attended,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **flags: Unpack[Varlen],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Attended,
    k: Attended,
    v: Attended,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[True],
    **flags: Unpack[Varlen],
) -> tuple[Tensor, Tensor]: ...
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
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    **unknown: Any,
) -> calls.Result:
    """Exact attention of packed sequences, each to itself: sequence b is rows cu_seqlens[b] .. cu_seqlens[b+1]-1.

    q (total_q, num_heads, head_dim), k and v (total_k, num_kv_heads, dim), cu_seqlens int32 (batch + 1,). Rows past
    the last sequence give 0 and lse -inf. Returns out (total_q, num_heads, head_dim_v), and lse (num_heads, total_q)
    if `return_lse`. bias and mask broadcast to (batch, num_heads, max_seqlen_q, max_seqlen_k), indexed within each
    sequence.

        >>> q = k = v = torch.ones(5, 2, 8)
        >>> cu = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> attention_varlen(q, k, v, cu, cu, causal=True).shape
        torch.Size([5, 2, 8])
    """
    if unknown:
        raise validation.unexpected(attention_varlen, unknown)
    given = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    if bias is not None or mask is not None or alibi_slopes is not None or sinks is not None:
        given = (*given, None, None, bias, mask, alibi_slopes, sinks)  # type: ignore[assignment]
    about: tuple[Any, ...] = ()
    if v.__class__ is Fp8Tensor:
        given, about = validation.taken_apart(given)
    slot, places = calls.slot_of(
        given, "varlen", dropout, seed, causal, softcap, scale, deterministic, backend, return_lse, max_seqlen_q,
        max_seqlen_k, *about, window=window,
    )  # fmt: skip
    if slot is not None and slot.call is not None:
        return slot.call(given, places)
    if slot is None and sharded.is_dtensor(q):
        call = functools.partial(
            attention_varlen, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal, window=window,
            softcap=softcap, seed=seed, scale=scale, deterministic=deterministic, backend=backend,
        )  # fmt: skip
        return sharded.attend(
            "varlen", call, return_lse=return_lse, dropout=dropout, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, bias=bias, mask=mask, alibi_slopes=alibi_slopes, sinks=sinks,
        )  # fmt: skip
    (query, key, value), scales = validation.unwrapped(q, k, v, "packed")
    validation.require_tensors(
        q=query, k=key, v=value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, bias=bias, mask=mask,
        alibi_slopes=alibi_slopes, sinks=sinks,
    )  # fmt: skip
    query, key, value = validation.autocast(query, key, value)
    flags = validation.normalise(
        causal=causal, window=window, softcap=softcap, scale=scale, dropout=dropout, deterministic=deterministic,
        backend=backend, return_lse=return_lse, needs_grad=validation.needs_grad(query, key, value, bias, sinks),
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    operands = Operands(
        query, key, value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, bias=bias, mask=mask,
        alibi_slopes=alibi_slopes, sinks=sinks, seed=seed_tensor(seed, dropout),
    )  # fmt: skip
    return ops.result("varlen", *validation.with_scales(operands, flags, scales), return_lse=return_lse, slot=slot)


@overload
def attention_paged(
    q: Attended,
    k_pages: Attended,
    v_pages: Attended,
    block_table: Tensor,
    seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **flags: Unpack[Paged],
) -> Tensor: ...
@overload
def attention_paged(
    q: Attended,
    k_pages: Attended,
    v_pages: Attended,
    block_table: Tensor,
    seqlens_k: Tensor,
    *,
    return_lse: Literal[True],
    **flags: Unpack[Paged],
) -> tuple[Tensor, Tensor]: ...
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
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    **unknown: Any,
) -> calls.Result:
    """Exact attention to keys and values kept in pages: token j of sequence b is slot j % page_size of page
    block_table[b, j // page_size].

    q (batch, num_heads, head_dim), one token a sequence, or packed (total_q, ...) with `cu_seqlens_q`; pages
    (num_pages, page_size, num_kv_heads, dim), block_table int32 (batch, max_pages), seqlens_k int32 (batch,). Returns
    out (total_q, num_heads, head_dim_v), and lse (num_heads, total_q) if `return_lse`. bias and mask broadcast over
    max_pages * page_size keys. `shared_prefix` names sequences that start with the same pages, which are then
    attended once where that pays: see tilewise.cascade.

        >>> pages = torch.ones(3, 4, 2, 8)
        >>> table = torch.tensor([[2, 0]], dtype=torch.int32)
        >>> attention_paged(torch.ones(1, 2, 8), pages, pages, table, torch.tensor([5], dtype=torch.int32)).shape
        torch.Size([1, 2, 8])
    """
    if unknown:
        raise validation.unexpected(attention_paged, unknown)
    given = (q, k_pages, v_pages, cu_seqlens_q, None, block_table, seqlens_k)
    if bias is not None or mask is not None or alibi_slopes is not None or sinks is not None:
        given = (*given, bias, mask, alibi_slopes, sinks)  # type: ignore[assignment]
    slot: calls.Slot | None = None
    places: calls.Places | None = None
    about: tuple[Any, ...] = ()
    if v_pages.__class__ is Fp8Tensor:
        given, about = validation.taken_apart(given)
    count, groups = len(given), None
    if isinstance(shared_prefix, cascade.SharedPrefix):
        groups = shared_prefix[0]
        given += shared_prefix[1:]  # type: ignore[assignment]
    if groups is not None or shared_prefix is None:
        slot, places = calls.slot_of(
            given, "paged", 0.0, None, causal, softcap, scale, deterministic, backend, return_lse, max_seqlen_q,
            *about, window=window, groups=groups,
        )  # fmt: skip
    if slot is not None and slot.call is not None:
        return slot.call(given, places)
    if slot is None and sharded.is_dtensor(q):
        call = functools.partial(
            attention_paged, max_seqlen_q=max_seqlen_q, shared_prefix=shared_prefix, causal=causal, window=window,
            softcap=softcap, scale=scale, deterministic=deterministic, backend=backend,
        )  # fmt: skip
        return sharded.attend(
            "paged", call, return_lse=return_lse, q=q, k_pages=k_pages, v_pages=v_pages, block_table=block_table,
            seqlens_k=seqlens_k, cu_seqlens_q=cu_seqlens_q, bias=bias, mask=mask, alibi_slopes=alibi_slopes,
            sinks=sinks,
        )  # fmt: skip
    (query, key, value), scales = validation.unwrapped(q, k_pages, v_pages, "packed", "paged")
    validation.require_tensors(
        q=query, k_pages=key, v_pages=value, block_table=block_table, seqlens_k=seqlens_k, cu_seqlens_q=cu_seqlens_q,
        bias=bias, mask=mask, alibi_slopes=alibi_slopes, sinks=sinks, optional=validation.OPTIONAL_PAGED,
    )  # fmt: skip
    query, key, value = validation.autocast(query, key, value)
    flags = validation.normalise(
        causal=causal, window=window, softcap=softcap, scale=scale, dropout=0.0, deterministic=deterministic,
        backend=backend, return_lse=return_lse, needs_grad=validation.needs_grad(query, key, value, bias, sinks),
        max_seqlen_q=max_seqlen_q,
    )  # fmt: skip
    operands = Operands(
        query, key, value, cu_seqlens_q=cu_seqlens_q, block_table=block_table, seqlens_k=seqlens_k, bias=bias,
        mask=mask, alibi_slopes=alibi_slopes, sinks=sinks,
    )  # fmt: skip
    operands, flags = validation.with_scales(operands, flags, scales)
    if shared_prefix is None:
        return ops.result("paged", operands, flags, return_lse=return_lse, slot=slot)
    out, lse = cascade.attention(shared_prefix, operands, flags)
    if slot is not None and not slot.is_tried:
        slot.call = cascade.bound(shared_prefix, operands, flags, (out, lse), count, return_lse=return_lse)
        slot.is_tried = True
    return (out, lse) if return_lse else out


def attention_after(
    write: Callable[[], None],
    kind: Literal["dense", "paged"],
    attended: tuple[Any, Any, Any],
    *,
    layout: str = "bhsd",
    max_seqlen_q: int | None = None,
    causal: bool,
    window: Window | None,
    softcap: float | None,
    scale: float | None,
    deterministic: bool | None = None,
    **others: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """For caches of this package: (out, lse) of `attention` or `attention_paged` to keys that `write` brings.

    It is called between judging, so that a call that raises has written nothing, and computing. Compilers judge as they
    trace: they see both, one by one.
    """
    (q, k, v), scales = validation.unwrapped(*attended, *((layout,) if kind == "dense" else ("packed", "paged")))
    validation.require_tensors(q=q, k=k, v=v, optional=validation.OPTIONAL_PAGED, **others)
    flags = validation.normalise(
        causal=causal, window=window, softcap=softcap, scale=scale, dropout=0.0, layout=layout,
        deterministic=deterministic, backend="auto", return_lse=True, needs_grad=False, max_seqlen_q=max_seqlen_q,
    )  # fmt: skip
    operands, flags = validation.with_scales(Operands(q, k, v, **others), flags, scales)
    query, key, value = validation.autocast_looks(q, k, v)
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
    causal: bool,
    window: Window | None,
    softcap: float | None,
    scale: float | None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    deterministic: bool | None = None,
    layout: str = "bhsd",
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **others: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """For drop-ins whose callers keep what autograd would: (dq, dk, dv) of q, k, v, given (dout, out, lse).

    `out` and `lse` may be those of more keys than these: what they say is used, not computed again. A gradient that is
    not wanted is an empty tensor.
    """
    q, k, v = attended
    dout, out, lse = saved
    validation.require_tensors(q=q, k=k, v=v, dout=dout, out=out, lse=lse, optional=validation.OPTIONAL_PAGED, **others)
    flags = validation.normalise(
        causal=causal, window=window, softcap=softcap, scale=scale, dropout=dropout, layout=layout,
        deterministic=deterministic, backend="auto", return_lse=True, needs_grad=True, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    operands = Operands(q, k, v, seed=seed_tensor(seed, dropout), **others)
    problem = validation.describe(kind, operands, flags)
    for name, tensor, expected, dtype in (
        ("dout", dout, problem.out_shape, q.dtype), ("out", out, problem.out_shape, q.dtype),
        ("lse", lse, problem.lse_shape, problem.accumulate_dtype),
    ):  # fmt: skip
        if tuple(tensor.shape) != tuple(expected) or tensor.dtype != dtype or tensor.device != q.device:
            got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            raise InvalidProblem(name, f"{dtype} {tuple(expected)} on {q.device}", got, "Pass what the forward gave.")
    out = out if out.stride(-1) == 1 else out.contiguous()
    dq, dk, dv, *_ = ops.backward(kind, operands, flags, out, lse.contiguous(), dout, None, Wanted(*wanted))
    assert dq is not None
    assert dk is not None
    assert dv is not None
    return dq, dk, dv


def refuse_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    window: Window | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    deterministic: bool | None = None,
) -> None:
    """For caches of this package: raise what causal `attention_varlen` to such rows would, with nothing computed.

    For a cache that says which keys there are only once it is written. Rows that look the same are judged once.
    """
    none = cu_seqlens[:1]
    given = (q[:0], k[:0], v[:0], none, none)
    given = given if sinks is None else (*given, None, None, None, None, None, sinks)  # type: ignore[assignment]
    slot, _ = calls.slot_of(given, "judged", 0.0, None, softcap, scale, deterministic, window=window)
    if slot is not None and slot.is_tried:
        return
    validation.require_tensors(q=q, k=k, v=v, sinks=sinks)
    query, key, value = validation.autocast_looks(*given[:3])
    flags = validation.normalise(
        causal=True, window=window, softcap=softcap, scale=scale, dropout=0.0, deterministic=deterministic,
        backend="auto", return_lse=False, needs_grad=validation.needs_grad(query, key, value, sinks), max_seqlen_q=0,
        max_seqlen_k=0,
    )  # fmt: skip
    operands = Operands(query, key, value, cu_seqlens_q=none, cu_seqlens_k=none, sinks=sinks)
    ops.refuse("varlen", operands, flags)
    if slot is not None:
        slot.is_tried = True


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, layout: str = "bhsd") -> tuple[Tensor, Tensor]:
    """Combine two partial results over disjoint keys exactly, as if all keys had been seen at once; differentiable.

    Takes what `attention` (in its `layout`) or `attention_varlen` return with `return_lse=True`, and returns the same
    shapes.
    """
    validation.require_tensors(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    validation.check_flag("layout", layout)
    packed = out_a.dim() == 3
    heads_last = packed or layout == "bshd"
    dims = (0, 1) if packed else (1, 2)
    a, b = (lse.transpose(*dims) if heads_last and lse.dim() >= 2 else lse for lse in (lse_a, lse_b))
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if tensor.dtype not in validation.FLOATS or tensor.device != out_a.device:
            expected = f"a tensor of float16, bfloat16, float32 or float64 on {out_a.device}"
            raise InvalidProblem(name, expected, f"{tensor.dtype} on {tensor.device}", "Convert it with .to().")
    for name, out, lse in (("lse_a", out_a, a), ("lse_b", out_b, b)):
        if out.dim() == 0 or out.shape != out_a.shape or lse.shape != out.shape[:-1]:
            expected = f"an lse that fits out of shape {tuple(out_a.shape)} in layout {layout!r}"
            raise InvalidProblem(name, expected, tuple(lse.shape), "Merge results of one problem over different keys.")
    with tracing.span(tracing.MERGE, (out_a, lse_a, out_b, lse_b)):
        out, lse = merge_partials(out_a, a, out_b, b)
    return out, lse.transpose(*dims) if heads_last else lse


def backends() -> tuple[dispatch.Status, ...]:
    """The backends in order of preference, each "available" or with the reason why not."""
    return dispatch.statuses()


def register_backend(backend: Backend, *, before: str = "reference") -> None:
    """Offer a backend of your own under its `name`: to `backend=<name>`, to `backend="auto"`, `explain` and `backends`.

    `backend` is an object with the methods of `tilewise.backends.base.Backend`. "auto" asks it just before the backend
    named by `before`: after all those of this package unless told otherwise. A name that is taken is refused.
    """
    dispatch.register(backend, before=before)
    calls.forget()


def unregister_backend(name: str) -> None:
    """Take a backend back that was registered; the backends of this package stay."""
    dispatch.unregister(name)
    calls.forget()
