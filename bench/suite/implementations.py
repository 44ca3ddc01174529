"""Who is measured: tilewise's backends through the public calls, and torch's own attention; peers.py has the others.

An implementation prepares a case once (layouts, masks, compilation) and hands back the call that is timed.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from suite.cases import Case
from suite.inputs import Inputs
from tilewise import api, dispatch
from tilewise.fp8.container import BLOCK, E4M3, Fp8Tensor
from tilewise.masks import Band
from tilewise.plan import explain
from tilewise.units import format_bytes

__all__ = [
    "Implementation",
    "NotApplicable",
    "Prepared",
    "chosen_backend",
    "heads_first_leaves",
    "results_of",
    "tilewise_and_torch",
]

# Materialised attention is left out beyond this: it would measure the allocator, or the machine's limit.
MOST_SCORE_BYTES = {"cpu": 3 << 29, "cuda": 8 << 30}
# The fp64 specification may stand in for a missing backend where its score matrices are small.
MOST_REFERENCE_BYTES = 64 << 20

Call = Callable[[], Tensor]
Leaves = tuple[Tensor, Tensor, Tensor]


class NotApplicable(Exception):
    """An implementation does not take part in a case."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call ready to be timed, its differentiable inputs, the cotangent, and the way back to the case's own layout."""

    call: Call
    leaves: Leaves
    dout: Tensor
    restore: Callable[[Tensor], Tensor] = lambda t: t


@dataclass(frozen=True, slots=True)
class Implementation:
    """A contestant; `missing` says why it cannot run here, `scope` is entered around every batch of calls, `compiles`
    for seconds in every case and keeps that on disk, `coarse` rounds probabilities to e4m3, as docs/contract.md allows
    FP8 tensor cores to.
    """

    name: str
    prepare: Callable[[Case, Inputs], Prepared]
    missing: str | None = None
    scope: Callable[[], contextlib.AbstractContextManager[object]] = field(default=contextlib.nullcontext)
    compiles: bool = False
    coarse: bool = False


def results_of(case: Case, prepared: Prepared) -> dict[str, Tensor]:
    """One call, and its gradients where the case times those, in the case's own layout."""
    out = prepared.call()
    results = {"out": prepared.restore(out)}
    if case.measure == "backward":
        gradients = torch.autograd.grad(out, prepared.leaves, prepared.dout)
        results |= {name: prepared.restore(g) for name, g in zip(("dq", "dk", "dv"), gradients, strict=True)}
    return results


def tilewise_and_torch(device: str) -> list[Implementation]:
    """What comes with tilewise and torch."""
    if device == "cpu":
        return [
            Implementation("tilewise", functools.partial(_tilewise, "auto", None)),
            Implementation("tilewise-cascade", _tilewise_cascade),
            Implementation("tilewise-fp8", _tilewise_fp8),
            Implementation("tilewise-fp8-pages", _tilewise_fp8_pages),
            Implementation("tilewise-dense", _tilewise_dense),
            Implementation("sdpa", _sdpa),
            Implementation("sdpa-fp32", _sdpa_fp32),
            Implementation("sdpa-padded", _sdpa_padded),
            Implementation("sdpa-gather", _sdpa_gather),
            Implementation("naive", _naive),
        ]
    flash = functools.partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
    cudnn = functools.partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
    return [
        *_gpu_backends(),
        Implementation("tilewise-cascade", _tilewise_cascade),
        Implementation("tilewise-fp8", _tilewise_fp8, coarse=True),
        Implementation("tilewise-fp8-pages", _tilewise_fp8_pages),
        Implementation("tilewise-dense", _tilewise_dense),
        Implementation("sdpa-flash", _sdpa, scope=flash),
        Implementation("sdpa-cudnn", _sdpa, scope=cudnn),
        Implementation("sdpa-padded", _sdpa_padded),
        Implementation("sdpa-gather", _sdpa_gather),
        Implementation("naive", _naive),
    ]


def _gpu_backends() -> list[Implementation]:
    found = []
    for status in dispatch.statuses():
        if status.name not in ("cpu", "reference"):
            for suffix, deterministic in (("", None), ("-deterministic", True)):
                prepare = functools.partial(_tilewise, status.name, deterministic)
                found.append(Implementation(f"tilewise-{status.name}{suffix}", prepare, status.reason))
    return found


def chosen_backend(case: Case, inputs: Inputs) -> str | None:
    """The backend that `backend="auto"` gives the case, None if there is none."""
    q, k, v = _leaves(case, inputs)
    if case.kind == "paged":
        q, k, v = q[:, :, 0], _there(inputs.k_pages), _there(inputs.v_pages)
    plan = explain(
        q, k, v, causal=case.causal, window=case.window, cu_seqlens_q=inputs.cu_seqlens, cu_seqlens_k=inputs.cu_seqlens,
        block_table=inputs.block_table, seqlens_k=inputs.seqlens_k,
    )  # fmt: skip
    return plan.backend


def _tilewise(backend: str, deterministic: bool | None, case: Case, inputs: Inputs) -> Prepared:
    """The public call, as a user writes it."""
    if backend == "auto" and chosen_backend(case, inputs) == "reference":
        needed = 2 * case.score_bytes * 8 // case.torch_dtype.itemsize
        if needed > MOST_REFERENCE_BYTES:
            raise NotApplicable(f"no compiled backend takes it; the fp64 reference would hold {format_bytes(needed)}")
    q, k, v = _leaves(case, inputs)
    flags: dict[str, Any] = {"causal": case.causal, "window": case.window}
    flags |= {"backend": backend, "deterministic": deterministic}
    if case.kind == "dense":
        return Prepared(lambda: api.attention(q, k, v, **flags), (q, k, v), inputs.dout)
    if case.kind == "varlen":
        cu, longest = _there(inputs.cu_seqlens), max(case.seqlens)
        flags |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        return Prepared(lambda: api.attention_varlen(q, k, v, cu, cu, **flags), (q, k, v), inputs.dout)
    token, k_pages, v_pages = q[:, :, 0], _there(inputs.k_pages), _there(inputs.v_pages)
    table, lengths = _there(inputs.block_table), _there(inputs.seqlens_k)
    return Prepared(
        lambda: api.attention_paged(token, k_pages, v_pages, table, lengths, **flags), (q, k, v), inputs.dout
    )


def _tilewise_cascade(case: Case, inputs: Inputs) -> Prepared:
    """The paged call with the hint that sequences share a prefix."""
    if case.kind != "paged" or inputs.shared_prefix is None:
        raise NotApplicable("for paged sequences that share a prefix")
    q, k_pages, v_pages = inputs.q[:, :, 0], _there(inputs.k_pages), _there(inputs.v_pages)
    table, lengths, shared = _there(inputs.block_table), _there(inputs.seqlens_k), inputs.shared_prefix
    return Prepared(
        lambda: api.attention_paged(q, k_pages, v_pages, table, lengths, shared_prefix=shared),
        (inputs.q, inputs.k, inputs.v),
        inputs.dout,
    )


def _tilewise_fp8_pages(case: Case, inputs: Inputs) -> Prepared:
    """The paged call with pages in e4m3, converted outside the timing."""
    if case.kind != "paged" or not case.e4m3_values:
        raise NotApplicable("for pages whose values e4m3 holds")
    data = [_there(pages).to(E4M3) for pages in (inputs.k_pages, inputs.v_pages)]
    scales = torch.ones(len(data[0]), case.num_kv_heads, 1, device=case.device)
    k_pages, v_pages = (Fp8Tensor(pages, scales, "page", "paged") for pages in data)
    q, table, lengths = inputs.q[:, :, 0], _there(inputs.block_table), _there(inputs.seqlens_k)
    return Prepared(
        lambda: api.attention_paged(q, k_pages, v_pages, table, lengths), (inputs.q, inputs.k, inputs.v), inputs.dout
    )


def _tilewise_fp8(case: Case, inputs: Inputs) -> Prepared:
    """The dense call with q, k and v in e4m3, a scale for each block of rows, converted outside the timing."""
    if case.kind != "dense" or not case.e4m3_values:
        raise NotApplicable("for dense tensors whose values e4m3 holds")
    q, k, v = (_in_e4m3(t) for t in (inputs.q, inputs.k, inputs.v))
    return Prepared(lambda: api.attention(q, k, v, causal=case.causal), (inputs.q, inputs.k, inputs.v), inputs.dout)


def _in_e4m3(tensor: Tensor) -> Fp8Tensor:
    batch, heads, rows, _ = tensor.shape
    scales = torch.ones(batch, heads, -(-rows // BLOCK), device=tensor.device)
    return Fp8Tensor(tensor.to(E4M3), scales, "block", "bhsd", BLOCK)


def _tilewise_dense(case: Case, inputs: Inputs) -> Prepared:
    """What pages or packing cost, with caches and clocks in the same state: the same rows as dense tensors."""
    if case.kind == "paged":
        q, k, v = inputs.q, inputs.k, inputs.v
        return Prepared(lambda: api.attention(q, k, v), (q, k, v), inputs.dout, lambda out: out[:, :, 0])
    if case.kind != "varlen" or len({*case.seqlens}) > 1:
        raise NotApplicable("for paged keys and packed sequences of one length")
    rows = (len(case.seqlens), case.seqlens[0])
    packed = (inputs.q, inputs.k, inputs.v, inputs.dout)
    q, k, v, dout = (t.detach().unflatten(0, rows).transpose(1, 2).contiguous() for t in packed)
    leaves = (q.requires_grad_(case.needs_grad), k.requires_grad_(case.needs_grad), v.requires_grad_(case.needs_grad))
    call = functools.partial(api.attention, *leaves, causal=case.causal, window=case.window)
    return Prepared(call, leaves, dout, lambda out: out.transpose(1, 2).flatten(0, 1))


def _leaves(case: Case, inputs: Inputs) -> Leaves:
    q, k, v = (t.detach().requires_grad_(case.needs_grad) for t in (inputs.q, inputs.k, inputs.v))
    return q, k, v


def heads_first_leaves(case: Case, inputs: Inputs) -> Leaves:
    """q, k, v as torch's attention takes them."""
    if case.kind != "dense":
        raise NotApplicable(f"takes dense tensors only, this is {case.kind}")
    return _leaves(case, inputs)


def _there(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError("the case's inputs lack a tensor that its kind has")
    return tensor


def _sdpa(case: Case, inputs: Inputs) -> Prepared:
    q, k, v = heads_first_leaves(case, inputs)
    flags = _sdpa_flags(case)
    return Prepared(lambda: scaled_dot_product_attention(q, k, v, **flags), (q, k, v), inputs.dout)


def _sdpa_flags(case: Case) -> dict[str, Any]:
    """Flags of torch's call, which knows causal; a window needs a mask."""
    mask = None if case.window is None else _mask(case.band(case.seqlen_q, case.seqlen_k), case.device)
    return {
        "attn_mask": mask,
        "is_causal": case.causal and mask is None,
        "enable_gqa": case.num_heads != case.num_kv_heads,
    }


def _mask(band: Band, device: str) -> Tensor:
    """The visible pairs as a boolean matrix."""
    rows, keys = torch.arange(band.seqlen_q, device=device)[:, None], torch.arange(band.seqlen_k, device=device)
    distance = keys - (rows + band.offset)
    left = -band.seqlen_k if band.left is None else -band.left
    right = band.seqlen_k if band.right is None else band.right
    return (distance >= left) & (distance <= right)


def _sdpa_fp32(case: Case, inputs: Inputs) -> Prepared:
    """Converted to fp32 and back within the call: the way around a slow 16-bit path."""
    q, k, v = heads_first_leaves(case, inputs)
    flags, dtype = _sdpa_flags(case), case.torch_dtype
    return Prepared(
        lambda: scaled_dot_product_attention(q.float(), k.float(), v.float(), **flags).to(dtype), (q, k, v), inputs.dout
    )


def _sdpa_padded(case: Case, inputs: Inputs) -> Prepared:
    """Packed sequences padded to the longest and masked; the padding itself is not timed."""
    if case.kind != "varlen":
        raise NotApplicable("for packed sequences")
    longest, lengths = max(case.seqlens), list(case.seqlens)

    def padded(packed: Tensor) -> Tensor:
        parts = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, longest - len(t))) for t in packed.split(lengths)]
        return torch.stack(parts).transpose(1, 2).contiguous()

    def packed(result: Tensor) -> Tensor:
        return torch.cat([r[:, :n].transpose(0, 1) for r, n in zip(result, lengths, strict=True)])

    q, k, v = (padded(t).requires_grad_(case.needs_grad) for t in (inputs.q, inputs.k, inputs.v))
    keys = torch.arange(longest, device=case.device)
    mask = keys < torch.tensor(lengths, device=case.device)[:, None, None, None]
    if case.causal:
        mask = mask & (keys <= keys[:, None])
    gqa = case.num_heads != case.num_kv_heads
    call = lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)  # noqa: E731
    return Prepared(call, (q, k, v), padded(inputs.dout), packed)


def _sdpa_gather(case: Case, inputs: Inputs) -> Prepared:
    """Pages gathered into dense keys within the call: what one does without a paged kernel."""
    if case.kind != "paged":
        raise NotApplicable("for paged keys")
    k_pages, v_pages, table = _there(inputs.k_pages), _there(inputs.v_pages), _there(inputs.block_table).long()
    gqa, length = case.num_heads != case.num_kv_heads, case.seqlen_k

    def call() -> Tensor:
        k, v = (pages[table].flatten(1, 2)[:, :length].transpose(1, 2) for pages in (k_pages, v_pages))
        return scaled_dot_product_attention(inputs.q, k, v, enable_gqa=gqa)

    return Prepared(call, (inputs.q, inputs.k, inputs.v), inputs.dout)


def _naive(case: Case, inputs: Inputs) -> Prepared:
    """The formula as written, with the whole score matrix."""
    limit = MOST_SCORE_BYTES[case.device]
    if case.score_bytes > limit:
        raise NotApplicable(f"its score matrices would take {format_bytes(case.score_bytes)}")
    q, k, v = heads_first_leaves(case, inputs)
    groups, scale = case.num_heads // case.num_kv_heads, 1.0 / math.sqrt(case.head_dim)
    masked = case.causal or case.window is not None
    hidden = ~_mask(case.band(case.seqlen_q, case.seqlen_k), case.device) if masked else None

    def call() -> Tensor:
        s = (q.unflatten(1, (-1, groups)) * scale) @ k[:, :, None].mT
        s = s if hidden is None else s.masked_fill(hidden, -math.inf)
        return (torch.softmax(s, -1) @ v[:, :, None]).flatten(1, 2)

    return Prepared(call, (q, k, v), inputs.dout)
