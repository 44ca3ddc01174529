"""Derivatives beyond one backward pass: tangents (forward mode) and second derivatives, and what is refused.

With operands x, their tangents x' and cotangents y of the results F(x) = (out, lse), there are three maps, each an op:

    tangent   T(x, x')     = F'(x) x'
    backward  B(x, y)      = F'(x)^T y
    twice     D(x, x', y)  = the gradient of <y, F'(x) x'> with respect to x

Their derivatives are one another: the cotangent x' of B gives T(x, x') for y and D(x, x', y) for x; a tangent of B is
D(x, x', y) + B(x, y'); and the cotangents (y of out and lse, z of out' and lse') of T give B(x, z) for x' and
B(x, y) + D(x, x', z) for x. So nothing else has to be computed, and D itself is not differentiable: third derivatives
are refused. See docs/derivatives.md.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import batching, calls, device, dispatch, flops, tracing, validation
from tilewise.backends.base import Differentiating
from tilewise.canonical import canonical, canonical_tangents, contiguous_last, heads_first, restored
from tilewise.errors import Unsupported
from tilewise.memory import check_there
from tilewise.operands import Flags, Gradients, Operands, Tangents, Wanted
from tilewise.problem import AttentionProblem, Kind
from tilewise.schemas import operand_names, schema, unpack

# The operands that have derivatives, in the order of `Wanted`, `Gradients` and `Tangents`.
DIFFERENTIABLE = Tangents._fields
# Their indices in `Operands`.
INDICES = tuple(Operands._fields.index(name) for name in DIFFERENTIABLE)
COUNT = len(DIFFERENTIABLE)
TANGENTS = tuple(f"{name}_tangent" for name in DIFFERENTIABLE)
# Floating-point operands without a derivative.
FIXED = tuple(i for i, name in enumerate(Operands._fields) if name in ("alibi_slopes", "q_scale", "k_scale", "v_scale"))

_registering = threading.Lock()

Four = tuple[Tensor, Tensor, Tensor, Tensor]
# (out, lse) where a forward made them.
Known = tuple[Tensor, Tensor]
# Cotangents of out and lse, or tangents of such.
Pair = tuple[Tensor | None, Tensor | None]
Sources = tuple[Tensor | None, ...]


class At(NamedTuple):
    """A call: where derivatives are taken."""

    kind: Kind
    operands: Operands
    flags: Flags


class Maps(NamedTuple):
    """The three maps, by the ops or by the functions that torch.func understands."""

    backward: Callable[[At, Known, Pair, Wanted], Gradients]
    tangent: Callable[[At, Tangents, Known | None], Four]
    twice: Callable[[At, Tangents, Four, Pair, Wanted], Gradients]


# Duals and refusals


def is_dual(tensors: Sequence[Tensor | None]) -> bool:
    """Whether torch asks for a forward-mode derivative (torch.func.jvp, dual tensors) along any of these."""
    if forward_ad._current_level < 0:  # noqa: SLF001
        return False
    for tensor in tensors:
        if tensor is not None and _unpacked(tensor)[1] is not None:
            return True
    if torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():  # noqa: SLF001
        raise Unsupported(
            "torch.compile does not show the tangents of dual tensors to what it compiles, so forward-mode derivatives "
            "would be lost; call torch.func.jvp inside the compiled function instead"
        )
    return False


def _unpacked(tensor: Tensor) -> Any:
    """(primal, tangent) of a tensor."""
    try:
        return forward_ad.unpack_dual(tensor)
    except RuntimeError as error:
        if "_unpack_dual" not in str(error):
            raise
        # torch has no rule for it under a vmap that is inside of the jvp.
        what = "forward-mode derivatives of vmapped attention (jvp of vmap) are not computed; take vmap of jvp instead"
        raise Unsupported(what) from error


def split_dual(tensors: Sequence[Tensor | None]) -> tuple[Sources, Sources]:
    """Primals and tangents. A tangent that torch knows to be zero becomes None."""
    pairs = [(None, None) if t is None else _unpacked(t) for t in tensors]
    if torch.compiler.is_compiling():
        return tuple([primal for primal, _ in pairs]), tuple([tangent for _, tangent in pairs])
    tangents = [None if t is None or t._is_zerotensor() else t for _, t in pairs]  # noqa: SLF001
    return tuple([primal for primal, _ in pairs]), tuple(tangents)


def refuse_tangents(tensors: Sequence[Tensor | None]) -> None:
    """Raise if torch asks for a forward-mode derivative: the caller has none, and would drop the tangent."""
    if is_dual(tensors):
        raise Unsupported(
            "forward-mode derivatives (jvp) of this call are not computed; take vjp or backward() instead"
        )


def _refusing(what: str) -> Callable[..., None]:
    """A rule of autograd that always raises."""

    def refuse(*_: Any) -> None:
        raise Unsupported(what)

    return refuse


refuse_second = _refusing(
    "second derivatives of this call are not computed; take them of a formula in plain torch instead"
)
refuse_third = _refusing(
    "third derivatives of attention are not computed, only first and second ones; take them of a formula in plain "
    "torch instead (torch.autograd.functional.hvp asks for them: take vhp, or torch.func.jvp of a gradient)"
)
_refuse_forward_twice = _refusing(
    "forward-mode derivatives of a forward-mode derivative (jvp of jvp) of attention are not computed; take jvp of "
    "grad, or grad of jvp instead"
)


def refuse_tracing() -> None:
    """Raise while torch.jit.trace (or an exporter based on it) records: it would bake the result, or this call's flags
    and lengths, into the graph as constants.
    """
    if not torch.compiler.is_compiling() and torch._C._is_tracing():  # noqa: SLF001
        raise Unsupported(
            "torch.jit.trace cannot record attention: the kernels are not operators of TorchScript. Use torch.compile "
            "or torch.export. ONNX has no such operators either: export the model with torch's own attention"
        )


def attend_dual(kind: Kind, operands: Operands, flags: Flags) -> tuple[Tensor, Tensor]:
    """(out, lse) with their tangents, of operands of which some have one; results and tangents from one pass."""
    primals, given = split_dual(operands)
    if any(given[i] is not None for i in FIXED):
        raise Unsupported(
            "forward-mode derivatives with respect to alibi_slopes or scales are not computed: they have no gradient "
            "either. Add the slopes as a bias, which has both"
        )
    at, tangents = At(kind, Operands(*primals), flags), Tangents(*[given[i] for i in INDICES])  # type: ignore[arg-type]
    compiling = torch.compiler.is_compiling()
    if compiling or torch._C._are_functorch_transforms_active():  # noqa: SLF001
        # torch.func separates tangents from what autograd records, so the primals may be used directly. Compilers take
        # ops only.
        tangent = _tangent_by_op if compiling else _tangent_transformed
        out, lse, dot_out, dot_lse = tangent(at, tangents)
        return forward_ad.make_dual(out, dot_out), forward_ad.make_dual(lse, dot_lse)
    if not calls.are_plain(tangents):
        # The legacy vmap behind torch.autograd.functional makes every result batched, and no batched one dual.
        out, lse = call_op(*at)
        _, _, dot_out, dot_lse = _tangent_by_op(at, tangents)
        return forward_ad.make_dual(out, dot_out), forward_ad.make_dual(lse, dot_lse)
    with torch.no_grad():
        made = _tangent_by_op(at, tangents)
    out, lse = _Dual.apply(made, kind, flags, *operands)  # type: ignore[no-untyped-call]
    return out, lse


def gradients_of_dual(kind: Kind, flags: Flags, given: Sequence[Tensor | None], wanted: Wanted) -> Gradients:
    """`backward` where `given` (dout, dlse, out, lse, then operands) has tangents: gradients that have them too."""
    (dout, dlse, out, lse, *tensors), (dot_dout, dot_dlse, _, _, *directions) = split_dual(given)
    assert out is not None
    assert lse is not None
    at, tangents = At(kind, Operands(*tensors), flags), Tangents(*_differentiable_of(directions))  # type: ignore[arg-type]
    found = backward(at, (out, lse), (dout, dlse), wanted)
    pushed = _push_backward(BY_OP, at, tangents, (out, lse), (dout, dlse), (dot_dout, dot_dlse), wanted)
    dual = [forward_ad.make_dual(g, t) if w else g for g, t, w in zip(found, pushed, wanted, strict=True)]
    return Gradients(*dual)


class _Dual(torch.autograd.Function):
    """Eager attention of dual tensors whose results and tangents are `made` already."""

    @staticmethod
    def forward(ctx: Any, made: Four, kind: Kind, flags: Flags, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.made, ctx.kind, ctx.flags = made, kind, flags
        out, lse = made[0], made[1]
        ctx.save_for_backward(out, lse, *tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def jvp(ctx: Any, _made: None, _kind: None, _flags: None, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        made, ctx.made = ctx.made, None
        tangents = [given[i] if i < len(given) else None for i in INDICES]
        found = _Linear.apply(made, ctx.kind, ctx.flags, *tangents, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return cast("tuple[Tensor, Tensor]", found)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[3:]
        if dout is None and dlse is None:
            return (None,) * (3 + len(needs))
        wanted = wanted_of(needs)
        given = (dout, dlse, *ctx.saved_tensors)
        if is_dual(given):
            found = gradients_of_dual(ctx.kind, ctx.flags, given, wanted)
        else:
            out, lse, *tensors = ctx.saved_tensors
            found = backward(At(ctx.kind, Operands(*tensors), ctx.flags), (out, lse), (dout, dlse), wanted)
        return None, None, None, *scattered(found, wanted, len(needs))


class _Linear(torch.autograd.Function):
    """(out', lse') as a function of tangents and operands, `made` already."""

    @staticmethod
    def forward(ctx: Any, made: Four, kind: Kind, flags: Flags, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.kind, ctx.flags = kind, flags
        ctx.save_for_backward(*made, *tensors)
        ctx.set_materialize_grads(False)
        return made[2], made[3]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        results, tensors = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
        given, needs = (None, None, *cotangents), ctx.needs_input_grad[3:]
        return None, None, None, *_pull_tangent(BY_OP, ctx.kind, ctx.flags, tensors, results, given, needs)

    jvp = staticmethod(_refuse_forward_twice)


# The derivatives of the maps


def _pull_backward(
    maps: Maps, at: At, cotangents: Sequence[Tensor | None], saved: Known, sources: Pair, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None, Gradients]:
    """The gradients of B with respect to dout, dlse (`sources`) and the operands; `saved` are out and lse."""
    if all(c is None for c in cotangents):
        return None, None, Gradients()
    along = Tangents(*cotangents)
    results = maps.tangent(at, along, saved)
    found = maps.twice(at, along, results, sources, wanted) if any(wanted) else Gradients()
    dout, dlse = sources
    return None if dout is None else results[2], None if dlse is None else results[3], found


def _push_backward(
    maps: Maps, at: At, tangents: Tangents, saved: Known, sources: Pair, directions: Pair, wanted: Wanted
) -> list[Tensor | None]:
    """The tangents of B's results along `tangents` of the operands and `directions` of dout and dlse (`sources`)."""
    parts: list[Gradients] = []
    if any(d is not None for d in directions):
        parts.append(maps.backward(at, saved, directions, wanted))
    if any(t is not None for t in tangents):
        results = maps.tangent(at, tangents, saved)
        parts.append(maps.twice(at, tangents, results, sources, wanted))
    return _summed(parts, wanted)


def _pull_tangent(
    maps: Maps,
    kind: Kind,
    flags: Flags,
    tensors: Sequence[Tensor | None],
    results: Four,
    cotangents: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of T with respect to its tangents and operands (`tensors`), of which those in `needs` are needed;
    `cotangents` are those of out, lse, out' and lse'.
    """
    tangents, at = Tangents(*tensors[:COUNT]), At(kind, Operands(*tensors[COUNT:]), flags)  # type: ignore[arg-type]
    of_tangents, of_operands = Wanted(*needs[:COUNT]), wanted_of(needs[COUNT:])
    plain, dotted = (cotangents[0], cotangents[1]), (cotangents[2], cotangents[3])
    has_plain, has_dotted = (any(c is not None for c in pair) for pair in (plain, dotted))
    linear: list[Tensor | None] = [None] * COUNT
    if has_dotted and any(of_tangents):
        linear = _summed([maps.backward(at, results[:2], dotted, of_tangents)], of_tangents)
    parts: list[Gradients] = []
    if has_plain and any(of_operands):
        parts.append(maps.backward(at, results[:2], plain, of_operands))
    if has_dotted and any(of_operands):
        parts.append(maps.twice(at, tangents, results, dotted, of_operands))
    found = _summed(parts, of_operands)
    return [*linear, *scattered(Gradients(*found), of_operands, len(needs) - COUNT)]


def _summed(parts: Sequence[Gradients], wanted: Wanted) -> list[Tensor | None]:
    """The sum of the parts of each wanted gradient, None elsewhere."""
    if not parts:
        return [None] * COUNT
    columns = zip(zip(*parts, strict=True), wanted, strict=True)
    return [functools.reduce(torch.add, column) if want else None for column, want in columns]


def _differentiable_of(tensors: Sequence[Any]) -> list[Any]:
    """The entries of the differentiable operands; trailing ones may be missing."""
    return [tensors[i] if i < len(tensors) else None for i in INDICES]


def wanted_of(needs: Sequence[bool]) -> Wanted:
    """The wanted gradients, from flags in the order of `Operands`."""
    return Wanted(*[bool(need) for need in _differentiable_of(needs)])


def scattered(gradients: Gradients, wanted: Wanted, count: int) -> list[Tensor | None]:
    """The wanted gradients at the positions of their operands, None elsewhere."""
    found: list[Tensor | None] = [None] * count
    for place, gradient, want in zip(INDICES, gradients, wanted, strict=True):
        if want:
            found[place] = gradient
    return found


# The maps as ops


def call_op(kind: Kind, operands: Operands, flags: Flags) -> tuple[Tensor, Tensor]:
    """(out, lse), through the dispatcher."""
    out, lse = _op(kind)(*_tensors(kind, operands), *flags)
    return out, lse


def call_more(kind: Kind, operands: Operands, flags: Flags) -> tuple[Tensor, ...]:
    """(out, lse), and max_logits if they are wanted: a call that has `out` or wants them, through the dispatcher."""
    if operands.out is None:
        return tuple(_op(kind, "_logits")(*_tensors(kind, operands), *flags))
    made = _op(kind, "_out")(*_tensors(kind, operands), *flags, operands.out)
    return (operands.out, *made) if flags.max_logits else (operands.out, made[0])


def backward(at: At, saved: Known, sources: Pair, wanted: Wanted) -> Gradients:
    """The gradients of a saved forward for the cotangents of its results, through the dispatcher. One that is not
    wanted is an empty tensor.
    """
    op = _op(at.kind, "_backward")
    return Gradients(*op(*sources, *saved, list(wanted), *_tensors(at.kind, at.operands), *at.flags))


def _tangent_by_op(at: At, tangents: Tangents, known: Known | None = None) -> Four:
    op, tensors = _op(at.kind, "_tangent"), _tensors(at.kind, at.operands)
    out, lse, *dots = op(*(known or (None, None)), *tangents, *tensors, *at.flags)
    return cast("Four", (*(known or (out, lse)), *dots))


def _twice_by_op(at: At, tangents: Tangents, results: Four, sources: Pair, wanted: Wanted) -> Gradients:
    op, tensors = _op(at.kind, "_twice"), _tensors(at.kind, at.operands)
    return Gradients(*op(*sources, *results, list(wanted), *tangents, *tensors, *at.flags))


def _op(kind: Kind, suffix: str = "") -> Any:
    if not torch.compiler.is_compiling():
        flops.tell_counters()
    if suffix in LATE:
        _complete(kind, suffix)
    return getattr(torch.ops.tilewise, f"{kind}{suffix}").default


def _tensors(kind: Kind, operands: Operands) -> list[Tensor | None]:
    return [getattr(operands, name) for name in operand_names(kind)]


BY_OP = Maps(backward, _tangent_by_op, _twice_by_op)


# The maps for torch.func, whose grad and vmap need `setup_context` and the ops


@dataclasses.dataclass(frozen=True)
class _About:
    """What is not a tensor: one object, because torch flattens tuples and then miscounts tangents."""

    kind: Kind
    flags: Flags
    wanted: Wanted = dataclasses.field(default_factory=Wanted)


class _Attention(torch.autograd.Function):
    """(out, lse)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(about: _About, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        return call_op(about.kind, Operands(*tensors), about.flags)  # type: ignore[arg-type]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.about, *tensors = inputs
        _save(ctx, *output, *tensors)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        needs, about = ctx.needs_input_grad[1:], ctx.about
        if dout is None and dlse is None:
            return (None,) * (1 + len(needs))
        out, lse, *tensors = ctx.saved_tensors
        at, wanted = At(about.kind, Operands(*tensors), about.flags), wanted_of(needs)
        found = _backward_transformed(at, (out, lse), (dout, dlse), wanted)
        return None, *scattered(found, wanted, len(needs))

    @staticmethod
    def jvp(ctx: Any, _about: None, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        _, _, *tensors = ctx.saved_tensors
        at = At(ctx.about.kind, Operands(*tensors), ctx.about.flags)
        return _tangent_transformed(at, Tangents(*_differentiable_of(given)))[2:]


class _Backward(torch.autograd.Function):
    """The gradients of `_Attention`. torch.func's grad always records the backward pass too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(about: _About, *rest: Any) -> tuple[Tensor, ...]:
        dout, dlse, out, lse, *tensors = rest
        at = At(about.kind, Operands(*tensors), about.flags)
        return cast("tuple[Tensor, ...]", tuple(backward(at, (out, lse), (dout, dlse), about.wanted)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        del output
        ctx.about, *rest = inputs
        _save(ctx, *rest)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        dout, dlse, out, lse, *tensors = ctx.saved_tensors
        needs, at = ctx.needs_input_grad[5:], At(ctx.about.kind, Operands(*tensors), ctx.about.flags)
        wanted = wanted_of(needs)
        ddout, ddlse, found = _pull_backward(TRANSFORMED, at, cotangents, (out, lse), (dout, dlse), wanted)
        return None, ddout, ddlse, None, None, *scattered(found, wanted, len(needs))

    @staticmethod
    def jvp(ctx: Any, _about: None, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        dout, dlse, out, lse, *tensors = ctx.saved_tensors
        dot_dout, dot_dlse, _, _, *directions = given
        at, tangents = (
            At(ctx.about.kind, Operands(*tensors), ctx.about.flags),
            Tangents(*_differentiable_of(directions)),
        )
        sources, dots = (dout, dlse), (dot_dout, dot_dlse)
        pushed = _push_backward(TRANSFORMED, at, tangents, (out, lse), sources, dots, ctx.about.wanted)
        nothing = out.new_empty(0)
        return tuple(nothing if tangent is None else tangent for tangent in pushed)


class _Tangent(torch.autograd.Function):
    """(out, lse, out', lse'), the first two empty where they are known."""

    generate_vmap_rule = True

    @staticmethod
    def forward(about: _About, *given: Any) -> Four:
        known, tensors = given[:2], given[2:]
        tangents, operands = tensors[:COUNT], _tensors(about.kind, Operands(*tensors[COUNT:]))
        return cast("Four", tuple(_op(about.kind, "_tangent")(*known, *tangents, *operands, *about.flags)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Four) -> None:
        ctx.about, out, lse, *tensors = inputs
        plain = output[:2] if out is None else (out, lse)
        _save(ctx, *plain, *output[2:], *tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        results, tensors = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
        needs, about = ctx.needs_input_grad[3:], ctx.about
        pulled = _pull_tangent(TRANSFORMED, about.kind, about.flags, tensors, results, cotangents, needs)
        return None, None, None, *pulled

    jvp = staticmethod(_refuse_forward_twice)


class _Twice(torch.autograd.Function):
    """The second derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(about: _About, *rest: Any) -> tuple[Tensor, ...]:
        dout, dlse, results, tangents, tensors = rest[0], rest[1], rest[2:6], rest[6 : 6 + COUNT], rest[6 + COUNT :]
        at = At(about.kind, Operands(*tensors), about.flags)
        found = _twice_by_op(at, Tangents(*tangents), results, (dout, dlse), about.wanted)
        return cast("tuple[Tensor, ...]", tuple(found))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        del ctx, inputs, output

    backward = jvp = staticmethod(refuse_third)


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    """The same tensors for both directions: under vmap torch keeps one list of batched dimensions for them."""
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def attend_transformed(kind: Kind, operands: Operands, flags: Flags) -> tuple[Tensor, Tensor]:
    """(out, lse) under torch.func."""
    return cast("tuple[Tensor, Tensor]", _Attention.apply(_About(kind, flags), *operands))  # type: ignore[no-untyped-call]


def _backward_transformed(at: At, saved: Known, sources: Pair, wanted: Wanted) -> Gradients:
    about = _About(at.kind, at.flags, wanted)
    return Gradients(*_Backward.apply(about, *sources, *saved, *at.operands))  # type: ignore[no-untyped-call]


def _tangent_transformed(at: At, tangents: Tangents, known: Known | None = None) -> Four:
    about, given = _About(at.kind, at.flags), known or (None, None)
    out, lse, *dots = _Tangent.apply(about, *given, *tangents, *at.operands)  # type: ignore[no-untyped-call]
    return cast("Four", (*(known or (out, lse)), *dots))


def _twice_transformed(at: At, tangents: Tangents, results: Four, sources: Pair, wanted: Wanted) -> Gradients:
    about = _About(at.kind, at.flags, wanted)
    return Gradients(*_Twice.apply(about, *sources, *results, *tangents, *at.operands))  # type: ignore[no-untyped-call]


TRANSFORMED = Maps(_backward_transformed, _tangent_transformed, _twice_transformed)


# The ops


def register(library: torch.library.Library, kind: Kind) -> None:
    """Define the ops tilewise::<kind>_tangent and tilewise::<kind>_twice."""
    given = ", ".join([*(f"Tensor? {name}" for name in TANGENTS), schema(kind)])
    results = "Tensor out, Tensor lse, Tensor out_tangent, Tensor lse_tangent"
    gradients = "Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks"
    saved = f"Tensor? dout, Tensor? dlse, {results}, bool[] wanted"
    known = "Tensor? out, Tensor? lse"
    define(library, f"{kind}_tangent", f"({known}, {given}) -> ({results})", _tangent, _tangent_fake, kind)
    define(library, f"{kind}_twice", f"({saved}, {given}) -> ({gradients})", _twice, _twice_fake, kind)
    for suffix, (save, pull) in LATE.items():
        differentiate(library, kind, suffix, save, pull)


def differentiate(
    library: torch.library.Library, kind: Kind, suffix: str, save: Callable[..., None] | None, pull: Callable[..., Any]
) -> None:
    """Give an op a derivative: what it saves for it, and the derivative. What torch.library.register_autograd makes of
    one, which takes long, is made when the op is called.
    """
    late = functools.partial(_differentiable, kind, suffix, save, pull)
    library.impl(f"{kind}{suffix}", late, "Autograd", with_keyset=True)


def define(
    library: torch.library.Library,
    name: str,
    schema: str,
    real: Callable[..., Any],
    fake: Callable[..., Any],
    *first: Any,
) -> None:
    """Define the op tilewise::<name>, of which `schema` are the arguments and results. `real` and `fake` get `first`
    and then its arguments.
    """
    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, functools.partial(real, *first), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{name}", functools.partial(fake, *first), lib=library)


@device.constant_in_traces
def _complete(kind: Kind, suffix: str) -> bool:
    """Register vmap of an op, once. Autograd calls from threads of its own. Before, torch would loop over samples."""
    with _registering:
        return _completed(kind, suffix)


@functools.cache
def _completed(kind: Kind, suffix: str) -> bool:
    rule = functools.partial(batching.vmapped, operand_names(kind), kind, suffix)
    torch.library.register_vmap(f"tilewise::{kind}{suffix}", rule)
    return True


def _differentiable(kind: Kind, suffix: str, save: Any, pull: Any, *args: Any, **more: Any) -> Any:
    return _with_derivative(kind, suffix, save, pull)(*args, **more)


@functools.cache
def _with_derivative(
    kind: Kind, suffix: str, save: Callable[..., None] | None, pull: Callable[..., Any]
) -> Callable[..., Any]:
    setup = None if save is None else functools.partial(save, kind)
    rules: Any = torch._library.autograd  # noqa: SLF001
    op = getattr(torch.ops.tilewise, f"{kind}{suffix}").default
    made: Callable[..., Any] = rules.make_autograd_impl(op, rules.Info(functools.partial(pull, kind), setup))
    return made


def _save_tangent_op(kind: Kind, ctx: Any, inputs: tuple[Any, ...], output: Four) -> None:
    out, lse, *rest = inputs
    count = COUNT + len(operand_names(kind))
    plain = output[:2] if out is None else (out, lse)
    ctx.save_for_backward(*plain, *output[2:], *rest[:count])
    ctx.flags = rest[count:]
    ctx.set_materialize_grads(False)


def _pull_tangent_op(kind: Kind, ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    names = operand_names(kind)
    results, tangents, given = ctx.saved_tensors[:4], ctx.saved_tensors[4 : 4 + COUNT], ctx.saved_tensors[4 + COUNT :]
    operands = Operands(**dict(zip(names, given, strict=True)))
    of_tangents, of_operands = ctx.needs_input_grad[2 : 2 + COUNT], ctx.needs_input_grad[2 + COUNT :]
    needs = dict(zip(names, of_operands, strict=False))
    every = [*of_tangents, *[needs.get(name, False) for name in Operands._fields]]
    pulled = _pull_tangent(BY_OP, kind, Flags(*ctx.flags), (*tangents, *operands), results, cotangents, every)
    found = dict(zip(Operands._fields, pulled[COUNT:], strict=True))
    return (None, None, *pulled[:COUNT], *[found[name] for name in names], *[None for _ in ctx.flags])


def _save_backward_op(kind: Kind, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save what the second derivatives of a backward op need."""
    del output
    dout, dlse, out, lse, wanted, *rest = inputs
    count = len(operand_names(kind))
    ctx.save_for_backward(dout, dlse, out, lse, *rest[:count])
    ctx.flags, ctx.num_wanted = rest[count:], len(wanted)
    ctx.set_materialize_grads(False)


def _pull_backward_op(kind: Kind, ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    """The gradients of a backward op."""
    names = operand_names(kind)
    dout, dlse, out, lse, *given = ctx.saved_tensors
    operands = Operands(**dict(zip(names, given, strict=True)))
    needs = dict(zip(names, ctx.needs_input_grad[5:], strict=False))
    wanted = Wanted(*(needs[name] for name in DIFFERENTIABLE))
    at = At(kind, operands, Flags(*ctx.flags))
    ddout, ddlse, found = _pull_backward(BY_OP, at, cotangents, (out, lse), (dout, dlse), wanted)
    result = {n: g for n, g, want in zip(DIFFERENTIABLE, found, wanted, strict=True) if want}
    return (ddout, ddlse, None, None, None, *[result.get(name) for name in names], *[None for _ in ctx.flags])


# What is saved, and the derivative, of ops that torch gets on first use with their rule of vmap, because that takes as
# long as half of `import tilewise`.
LATE: dict[str, tuple[Callable[..., None] | None, Callable[..., Any]]] = {
    "_backward": (_save_backward_op, _pull_backward_op),
    "_tangent": (_save_tangent_op, _pull_tangent_op),
    "_twice": (None, refuse_third),
}


def _choose(kind: Kind, operands: Operands, flags: Flags) -> tuple[AttentionProblem, Differentiating]:
    problem = dataclasses.replace(validation.problem_of(kind, operands, flags), higher=True)
    chosen = dispatch.select(problem, device.of(operands.q.device), flags.backend).backend
    # Dispatch chooses no other for such a problem. Asking a protocol takes as long as validation.
    return problem, cast("Differentiating", chosen)


def _tangent(kind: Kind, out: Tensor | None, lse: Tensor | None, *args: Any) -> Four:
    tangents, (operands, flags) = Tangents(*args[:COUNT]), unpack(kind, args[COUNT:])
    check_there(("out", "lse", *TANGENTS), (out, lse, *tangents))
    problem, chosen = _choose(kind, operands, flags)
    known = None if out is None or lse is None else (contiguous_last(heads_first(problem, out)), lse)
    with tracing.span(tracing.TANGENT, operands, chosen.name, problem):
        found, found_lse, dot_out, dot_lse = chosen.forward_tangent(
            problem, canonical(problem, operands), canonical_tangents(problem, tangents), known
        )
    dots = heads_first(problem, dot_out), dot_lse
    if known is not None:  # ops must not return what they are given
        return operands.q.new_empty(0), operands.q.new_empty(0, dtype=problem.accumulate_dtype), *dots
    return heads_first(problem, found), found_lse, *dots


def _tangent_fake(kind: Kind, out: Tensor | None, lse: Tensor | None, *args: Any) -> Four:
    del lse
    operands, flags = unpack(kind, args[COUNT:])
    dispatch.require(flags.backend)
    problem = validation.describe(kind, operands, flags)
    new = operands.q.new_empty
    shapes = (problem.out_shape, problem.lse_shape)
    dtypes = (problem.dtype, problem.accumulate_dtype)
    dot_out, dot_lse = (new(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    plain = [new(0 if out is not None else shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return plain[0], plain[1], dot_out, dot_lse


def _twice(
    kind: Kind,
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dot_out: Tensor,
    dot_lse: Tensor,
    wanted: Sequence[bool],
    *args: Any,
) -> tuple[Tensor, ...]:
    tangents, (operands, flags) = Tangents(*args[:COUNT]), unpack(kind, args[COUNT:])
    names = ("dout", "dlse", "out", "lse", "out_tangent", "lse_tangent", *TANGENTS)
    check_there(names, (dout, dlse, out, lse, dot_out, dot_lse, *tangents))
    problem, chosen = _choose(kind, operands, flags)
    ready = contiguous_last(heads_first(problem, torch.zeros_like(out) if dout is None else dout))
    results = heads_first(problem, out), lse, heads_first(problem, dot_out), dot_lse
    with tracing.span(tracing.TWICE, operands, chosen.name, problem):
        gradients = chosen.backward_twice(
            problem, canonical(problem, operands), canonical_tangents(problem, tangents), results, ready, dlse,
            Wanted(*wanted),
        )  # fmt: skip
    return materialised(operands, restored(problem, operands, gradients), Wanted(*wanted))


def _twice_fake(kind: Kind, *args: Any) -> tuple[Tensor, ...]:
    operands, _ = unpack(kind, args[7 + COUNT :])
    return fake_gradients(operands, Wanted(*args[6]))


def fake_gradients(operands: Operands, wanted: Wanted) -> tuple[Tensor, ...]:
    """Gradients without contents."""
    like = [getattr(operands, name) for name in DIFFERENTIABLE]
    empty = Gradients(*(None if t is None else t.new_empty(t.shape) for t in like))
    return materialised(operands, empty, wanted)


def materialised(operands: Operands, gradients: Gradients, wanted: Wanted) -> tuple[Tensor, ...]:
    """Ops must return tensors: a gradient that is not wanted becomes an empty one."""
    nothing = operands.q.new_empty
    return tuple(g if want and g is not None else nothing(0) for g, want in zip(gradients, wanted, strict=True))
