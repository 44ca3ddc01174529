"""What the drop-ins of flash-attn 2, 3 and 4 share: flags, separate passes, pieces of sequences, `S_dmask`, descales,
and their entries in `sys.modules`.

Forward and backward are separate calls for libraries that save what autograd would save (ring attention, context
parallelism). The dropout seed is passed in `rng_state`, int64 (2,): the seed and 0. `out` and `lse` given to a backward
may cover more keys than it sees, merged from several forwards.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec

import torch
from torch import Tensor

from tilewise import ops
from tilewise.api import attention, attention_backward, attention_varlen
from tilewise.errors import InvalidProblem, TilewiseError, Unsupported
from tilewise.fp8.container import E4M3, Fp8Tensor
from tilewise.integrations import translation
from tilewise.subclasses import check_class
from tilewise.totals import longest_of
from tilewise.units import counted

Flags = dict[str, Any]
# cu_seqlens_q and cu_seqlens_k of packed sequences; None for dense ones.
Totals = tuple[Tensor, Tensor] | None
# Where the gradients of q, k and v are written; None if not wanted.
Written = tuple[Tensor | None, Tensor | None, Tensor | None]
# The width of the one-hot values of `S_dmask`: at most the largest head_dim that every backend takes.
KEYS_PER_PASS = 256
NO_FP8_GRADIENT = (
    "gradients through FP8 inputs are not computed: rounding to e4m3 has none. Detach q, k, v and their descales, or "
    "pass bf16 or fp16 tensors"
)
Descale = Tensor | None
Others = ParamSpec("Others")
Three = tuple[Fp8Tensor, Fp8Tensor, Fp8Tensor]
# Modules that an installation displaced, by name. Like `sys.modules`, this is state of the process.
_displaced: dict[str, ModuleType] = {}


def flags_of(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    deterministic: bool,
    **others: Any,
) -> Flags:
    """The flags that all functions have. `deterministic=False` is a default: torch's own setting still counts."""
    return {
        "causal": translation.flag_of("causal", causal),
        "window": translation.window_of(window_size),
        "softcap": translation.softcap_of(softcap),
        "scale": translation.number_of(softmax_scale, "softmax_scale"),
        "deterministic": True if translation.flag_of("deterministic", deterministic) else None,
        **others,
    }


def lengths_of(max_seqlen_q: int | Tensor | None, max_seqlen_k: int | Tensor | None) -> Flags:
    """The longest lengths of packed sequences."""
    return {
        "max_seqlen_q": translation.length("max_seqlen_q", max_seqlen_q),
        "max_seqlen_k": translation.length("max_seqlen_k", max_seqlen_k),
    }


def forward(
    q: Tensor, k: Tensor, v: Tensor, flags: Flags, totals: Totals, *, return_softmax: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, S_dmask, rng_state) of tensors (batch, seqlen, heads, dim), or packed ones with their `totals`."""
    translation.require_tensors(q=q, k=k, v=v)
    rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if flags["dropout"]:
        # Drawn like the library's own seeds: from torch's default CPU generator.
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device="cpu")
        rng_state[:1] = seed.to(q.device)
    flags = {**flags, "seed": rng_state[0] if flags["dropout"] else None}
    wants_dmask = return_softmax and flags["dropout"]
    if totals is None:
        out, lse = attention(q, k, v, layout="bshd", return_lse=True, **flags)
    else:
        out, lse = attention_varlen(q, k, v, *totals, return_lse=True, **flags)
    return out, lse, _dmask(q, k, totals, flags) if wants_dmask else q.new_empty(0), rng_state


@torch.no_grad()
def gradients_into(
    written: Written,
    attended: tuple[Tensor, Tensor, Tensor],
    saved: tuple[Tensor, Tensor, Tensor],
    flags: Flags,
    totals: Totals,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write dq, dk and dv of (q, k, v) by (dout, out, lse); returns the row sums of dout * out, in lse's shape."""
    dout, out, lse = saved
    translation.require_tensors(q=attended[0], k=attended[1], v=attended[2], dout=dout, out=out, softmax_lse=lse)
    saved = dout, out, _heads_first(lse, attended[0])
    for name, target, tensor in zip(("dq", "dk", "dv"), written, attended, strict=True):
        if target is not None and target.shape != tensor.shape:
            fix = f"It takes the gradient of {name[1]}."
            raise InvalidProblem(name, f"shape {tuple(tensor.shape)}", tuple(target.shape), fix)
    if flags["dropout"]:
        if not isinstance(rng_state, Tensor) or rng_state.dtype != torch.int64 or rng_state.numel() != 2:
            fix = "Pass the rng_state that the forward returned: it says what was dropped."
            got = f"{rng_state.dtype} {tuple(rng_state.shape)}" if isinstance(rng_state, Tensor) else rng_state
            raise InvalidProblem("rng_state", "an int64 tensor (2,), because dropout_p is not 0", got, fix)
        flags = {**flags, "seed": rng_state[0]}
    wanted = tuple(target is not None for target in written)
    packed: Flags = {"layout": "bshd"}
    if totals is not None:
        packed = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), totals, strict=True))
    kind: Any = "dense" if totals is None else "varlen"
    found = attention_backward(kind, attended, saved, wanted, **packed, **flags)  # type: ignore[arg-type]
    for target, gradient in zip(written, found, strict=True):
        if target is not None:
            target.copy_(gradient)
    sums = (dout.float() * out.float()).sum(-1)
    return sums.transpose(-1, -2).contiguous()


def _heads_first(lse: Tensor, q: Tensor) -> Tensor:
    """Lse as (..., heads, rows). Some callers pass a view (..., rows, heads): flash-attn reads only its memory."""
    heads, rows = q.shape[-2], q.shape[-3] if q.dim() > 2 else 0
    if lse.dim() < 2 or lse.is_contiguous() or tuple(lse.shape[-2:]) not in ((heads, rows), (rows, heads)):
        return lse
    if heads == rows and heads > 1:
        fix = "With as many rows as heads a view may mean either: pass (..., heads, rows) with .contiguous()."
        raise InvalidProblem("softmax_lse", "a contiguous tensor", f"strides {lse.stride()}", fix)
    return lse if tuple(lse.shape[-2:]) == (heads, rows) else lse.transpose(-1, -2)


def cut(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    *,
    chunk: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor]:
    """(cu_seqlens_q, cu_seqlens_k) of pieces that each attend only to themselves: together the requested attention.

    How FA3's `seqused_*` and `attention_chunk` become plain sequences. A chunk of keys, and the queries whose own
    position is in it, are a sequence of their own: tokens of one chunk are neighbours, and the last query of every
    chunk but the first ones is at its last key, which is where causality, windows and ALiBi are measured from.
    Allocated but unused rows become sequences without a partner. Nothing is copied or read back from the device.
    """
    stored_q, stored_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    for name, used, stored in (("seqused_q", seqused_q, stored_q), ("seqused_k", seqused_k, stored_k)):
        if used is not None:
            _check_used(name, used, stored)
    used_q = stored_q if seqused_q is None else seqused_q.int()
    used_k = stored_k if seqused_k is None else seqused_k.int()
    none = torch.zeros_like(stored_q)[:, None]
    if chunk:
        # Query i is at key i + used_k - used_q. Queries before key 0 come first, alone; then chunk by chunk.
        starts = torch.arange(0, max_seqlen_k + chunk, chunk, dtype=torch.int32, device=cu_seqlens_q.device)
        row = (starts - (used_k - used_q)[:, None]).clamp(min=none, max=used_q[:, None])
        key = torch.minimum(starts[None, :], used_k[:, None])
    else:
        row, key = torch.cat((none, used_q[:, None]), 1), torch.cat((none, used_k[:, None]), 1)
    # Unused queries see no key, unused keys are seen by no query.
    row = torch.cat((row, stored_q[:, None], stored_q[:, None]), 1)
    key = torch.cat((key, used_k[:, None], stored_k[:, None]), 1)
    return _totals(cu_seqlens_q, row), _totals(cu_seqlens_k, key)


def most_keys(cu_seqlens_k: Tensor, rows: int, given: Any) -> int:
    """At least the keys of the longest sequence. On a CPU `given` is checked; what is no length is refused later."""
    if not isinstance(given, int):
        return rows
    if cu_seqlens_k.device.type == "cpu" and ops.is_plain_eager((cu_seqlens_k,)):
        longest_of("max_seqlen_k", "cu_seqlens_k", cu_seqlens_k.tolist(), given)
    return max(0, min(rows, given))


def _check_used(name: str, used: Any, stored: Tensor) -> None:
    """Integers, one per sequence; on a CPU also none above what is stored."""
    fix = "The rows in use of every sequence, as int32 (batch,)."
    translation.check_integers(name, used, tuple(stored.shape), fix)
    if used.device.type != "cpu" or not ops.is_plain_eager((used, stored)):
        return
    for sequence, (rows, most) in enumerate(zip(used.tolist(), stored.tolist(), strict=True)):
        if not 0 <= rows <= most:
            raise InvalidProblem(name, f"from 0 to {counted(most, 'row')}, those of sequence {sequence}", rows, fix)


def _totals(cu_seqlens: Tensor, ends: Tensor) -> Tensor:
    """Running totals from the ends of the pieces, counted within each sequence."""
    return torch.cat((cu_seqlens[:1], (cu_seqlens[:-1, None] + ends).flatten()))


@torch.no_grad()
def _dmask(q: Tensor, k: Tensor, totals: Totals, flags: Flags) -> Tensor:
    """`S_dmask`: probabilities, negative where dropped, (batch, num_heads, max_seqlen_q, max_seqlen_k) in q's dtype, 0
    outside each sequence.

    Attention to one-hot values is the matrix of probabilities, so the library itself computes them, 256 keys at a time,
    with the masks, the scale and the dropout bits of the call. Quadratic in memory and without gradient: for tests and
    debugging.
    """
    if totals is None:
        # Dense sequences are packed ones, too.
        counts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        totals = counts * q.shape[1], counts * k.shape[1]
        flags = {**flags, "max_seqlen_q": q.shape[1], "max_seqlen_k": k.shape[1]}
        q, k = q.flatten(0, 1), k.flatten(0, 1)
    given = zip(totals, (flags["max_seqlen_q"], flags["max_seqlen_k"]), strict=True)
    seqlen_q, seqlen_k = (max(t.diff().tolist(), default=0) if n is None else n for t, n in given)
    batch = totals[0].numel() - 1
    padded = q.new_zeros(batch, seqlen_q, q.shape[1], seqlen_k)
    sequence, row = translation.places(totals[0], q.shape[0])
    _, position = translation.places(totals[1], k.shape[0])
    inside = sequence < batch
    for start in range(0, seqlen_k, KEYS_PER_PASS) if q.numel() else ():
        keys = torch.arange(start, min(start + KEYS_PER_PASS, seqlen_k), device=k.device)
        one_hot = (position[:, None] == keys).to(k.dtype)[:, None].expand(-1, k.shape[1], -1)
        kept = attention_varlen(q, k, one_hot, *totals, **flags)
        plain = attention_varlen(q, k, one_hot, *totals, **{**flags, "dropout": 0.0, "seed": None})
        signed = torch.where(kept == 0, -plain, plain)
        padded[sequence[inside], row[inside], :, start : start + len(keys)] = signed[inside]
    return padded.transpose(1, 2)


class Descales(NamedTuple):
    """FA3's descales: fp32 (batch, kv_heads) of e4m3 q, k, v; with one element the factor of all, None is 1."""

    q: Descale = None
    k: Descale = None
    v: Descale = None

    def containers(self, q: Tensor, k: Tensor, v: Tensor, batch: int, layout: Literal["bshd", "packed"]) -> Three:
        """Dense or packed operands with their descales."""

        def made(name: str, data: Tensor, descale: Descale) -> Fp8Tensor:
            return Fp8Tensor(data, _per_head(name, descale, batch, data), "head", layout)

        return made("q_descale", q, self.q), made("k_descale", k, self.k), made("v_descale", v, self.v)

    def paged(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: int) -> Three:
        """Packed q and pages, which several sequences may share: k's factor is applied to q, v's left to `rescaled`."""
        for name, tensor in (("q", q), ("v_cache", v_pages)):
            if tensor.dtype != E4M3:
                fix = "FP8 caches are attended by FP8 queries."
                raise InvalidProblem(name, "float8_e4m3fn as k_cache has", tensor.dtype, fix)
        self.check(batch, q)
        one = torch.ones(1, 1, 1, dtype=torch.float32, device=q.device)
        k, v = (Fp8Tensor(t, one.expand(t.shape[0], t.shape[2], 1), "page", "paged") for t in (k_pages, v_pages))
        both = _per_head("q_descale", self.q, batch, q) * _per_head("k_descale", self.k, batch, q)
        return Fp8Tensor(q, both, "head", "packed"), k, v

    def widened(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """FP8 q, k, v as bf16, and the factor of `out`. e4m3 fits bf16 exactly; only q * descale is rounded."""
        self.check(len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1, q)
        wide = q.float()
        for name, descale in (("q_descale", self.q), ("k_descale", self.k)):
            if descale is not None:
                wide = wide * _per_row(name, descale, q, cu_seqlens_q)
        out_scale = None if self.v is None else _per_row("v_descale", self.v, q, cu_seqlens_q)
        return wide.bfloat16(), k.bfloat16(), v.bfloat16(), out_scale

    def rescaled(self, out: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
        """`out` of `paged` operands times v's factor."""
        return out if self.v is None else rescaled(out, _per_row("v_descale", self.v, out, cu_seqlens_q))

    def check(self, batch: int, q: Tensor) -> None:
        """Refuse what does not fit `batch` sequences of q's heads, before anything is computed."""
        for name, descale in zip(("q_descale", "k_descale", "v_descale"), self, strict=True):
            if descale is not None:
                _check_descale(name, descale, batch, q)


def gradients_refused(
    attend: Callable[Concatenate[Tensor, Tensor, Tensor, Others], tuple[Tensor, Tensor]],
) -> Callable[Concatenate[Tensor, Tensor, Tensor, Others], tuple[Tensor, Tensor]]:
    """Lets tensors require a gradient that nothing can compute as long as it is never asked for: that of e4m3, or of
    heads too long for this machine's backward. Asking for it raises.
    """

    @functools.wraps(attend)
    def call(q: Tensor, k: Tensor, v: Tensor, /, *others: Others.args, **flags: Others.kwargs) -> tuple[Tensor, Tensor]:
        added = [t for other in others for t in (other if isinstance(other, Descales) else (other,))]
        inputs = [t for t in (q, k, v, *added) if isinstance(t, Tensor)]
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        reason = NO_FP8_GRADIENT
        if getattr(q, "dtype", None) is not E4M3:
            try:
                return attend(q, k, v, *others, **flags)
            except Unsupported as refusal:
                if not recorded:
                    raise
                reason = str(refusal)
        with torch.no_grad():
            out, lse = attend(q, k, v, *others, **flags)
        if recorded:
            out, lse = _Refusing.apply(reason, out, lse, *inputs)  # type: ignore[no-untyped-call]
        return out, lse

    return call


class _Refusing(torch.autograd.Function):
    """Results that depend on their inputs, but have no derivative, and why."""

    @staticmethod
    def forward(ctx: Any, reason: str, out: Tensor, lse: Tensor, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        del inputs
        ctx.reason = reason
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> None:
        del gradients
        raise Unsupported(ctx.reason)


def rescaled(out: Tensor, scale: Tensor | None) -> Tensor:
    """`out` times the factor that `widened` returned."""
    return out if scale is None else (out.float() * scale).to(out.dtype)


def _check_descale(name: str, descale: object, batch: int, data: Tensor) -> None:
    """Check (batch, kv_heads), (1, kv_heads) for all sequences, or one factor; the heads of data are a multiple."""
    heads = data.shape[-2]
    fix = "One factor for every K/V head of every sequence, or one row for all of them."
    expected = f"({batch}, kv_heads) on {data.device}, {counted(heads, 'head')} a multiple"
    if not isinstance(descale, Tensor):
        raise InvalidProblem(name, f"a tensor {expected}", type(descale).__name__, fix)
    check_class(name, descale)
    fits = descale.shape.numel() == 1 or (
        descale.dim() == 2 and descale.shape[0] in (1, batch) and descale.shape[1] and not heads % descale.shape[1]
    )
    if not fits or not descale.is_floating_point() or descale.device != data.device:
        raise InvalidProblem(name, expected, f"{descale.dtype} {tuple(descale.shape)} on {descale.device}", fix)


def _per_head(name: str, descale: Descale, batch: int, data: Tensor) -> Tensor:
    """(batch, heads, 1) of a descale, repeated for the heads it serves."""
    heads = data.shape[-2]
    if descale is None:
        return torch.ones(1, 1, 1, dtype=torch.float32, device=data.device).expand(batch, heads, 1)
    _check_descale(name, descale, batch, data)
    factors = descale.float()
    if factors.numel() == 1:
        return factors.reshape(1, 1, 1).expand(batch, heads, 1)
    return factors.repeat_interleave(heads // factors.shape[1], 1)[..., None].expand(batch, heads, 1)


def _per_row(name: str, descale: Tensor, rows: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """A descale for every row and head of dense or packed rows, (..., heads, 1)."""
    batch = len(rows) if cu_seqlens is None else len(cu_seqlens) - 1
    factors = _per_head(name, descale, batch, rows)
    if cu_seqlens is None:
        return factors[:, None] if rows.dim() == 4 else factors
    sequence, _ = translation.places(cu_seqlens, rows.shape[0])
    # Rows past the last sequence belong to none and are not scaled.
    return torch.cat((factors, factors.new_ones(1, *factors.shape[1:])))[sequence]


def put_in_place(modules: Mapping[str, ModuleType], *, force: bool) -> None:
    """Enter the modules into `sys.modules`. Refuses to displace a foreign module unless `force`."""
    top, ours = next(iter(modules)).split(".")[0], list(modules.values())
    foreign = {name: m for name, m in sys.modules.items() if _is_below(name, top) and m not in ours}
    if foreign and not force:
        where = getattr(foreign.get(top), "__file__", None) or "an unknown place"
        raise TilewiseError(
            f"{top} is already imported from {where}, and code that has taken names from it keeps them. Call install() "
            "before anything imports it, or pass force=True to displace it for later imports."
        )
    for name in foreign:
        del sys.modules[name]
    _displaced.update(foreign)
    sys.modules.update(modules)


def take_out(modules: Mapping[str, ModuleType]) -> None:
    """Remove the modules from `sys.modules` and restore what they displaced."""
    for name, module in modules.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    for name in [name for name in _displaced if _is_below(name, next(iter(modules)).split(".")[0])]:
        sys.modules[name] = _displaced.pop(name)


def _is_below(name: str, top: str) -> bool:
    return name == top or name.startswith(top + ".")
