"""The `torch.library` ops: tilewise::dense, ::varlen, ::paged and their backward ops, generated from one table.

Each op judges its operands, describes them as a problem, chooses a backend and launches it; its fake does the first
two and makes empty results. Autograd saves the inputs, `out` and `lse`: probabilities are recomputed, never stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewise import batching, device, dispatch, validation
from tilewise.canonical import canonical, contiguous_last, heads_first, restored
from tilewise.errors import Unsupported
from tilewise.operands import Flags, Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem, Kind

__all__ = ["attention", "backward"]

# The operands of each op; a question mark makes one optional.
OPERANDS: dict[Kind, str] = {
    "dense": "q k v bias? mask? alibi_slopes? sinks? seed? q_scale? k_scale? v_scale?",
    "varlen": "q k v cu_seqlens_q cu_seqlens_k bias? mask? alibi_slopes? sinks? seed? q_scale? k_scale? v_scale?",
    "paged": "q k v block_table seqlens_k cu_seqlens_q? bias? mask? alibi_slopes? sinks? q_scale? k_scale? v_scale?",
}

# The flags, in the order of `Flags`.
FLAGS = (
    "bool causal, SymInt? window_left, SymInt? window_right, float? scale, float? softcap, float dropout, str layout, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool deterministic, bool needs_grad, str backend, "
    "int? q_block, int? k_block, int? v_block, ScalarType? out_dtype"
)

# The operands that have gradients, in the order of `Wanted` and `Gradients`.
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
# Where they stand among the arguments of the autograd functions, after kind and flags.
_PLACES = tuple(2 + Operands._fields.index(name) for name in DIFFERENTIABLE)

Args = Sequence[Any]


def attention(kind: Kind, operands: Operands, flags: Flags) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable; `out` in the caller's layout."""
    if _is_plain_eager(operands):
        if not flags.needs_grad:
            return _launch(kind, operands, flags)
        return cast("tuple[Tensor, Tensor]", _EagerAttention.apply(kind, flags, *operands))  # type: ignore[no-untyped-call]
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():  # noqa: SLF001
        return cast("tuple[Tensor, Tensor]", _TransformedAttention.apply(kind, flags, *operands))  # type: ignore[no-untyped-call]
    return _call_op(kind, operands, flags)


def _is_plain_eager(operands: Operands) -> bool:
    """Whether nothing but autograd watches this call: then the dispatcher, 20 us of boxing and unboxing, is left out.

    Compilers, fake and functional tensors, vmap and modes see the registered ops instead.
    """
    if (
        torch.compiler.is_compiling()
        or operands.q.is_meta
        or torch._C._are_functorch_transforms_active()  # noqa: SLF001
        or torch._C._len_torch_dispatch_stack()  # noqa: SLF001
        or torch._C._len_torch_function_stack()  # noqa: SLF001
    ):
        return False
    for tensor in operands:
        if tensor is not None and type(tensor) is not Tensor and type(tensor) is not Parameter:
            return False
    return True


class _EagerAttention(torch.autograd.Function):
    """The same forward, saved tensors and backward as the registered autograd of the ops, called directly."""

    @staticmethod
    def forward(ctx: Any, kind: Kind, flags: Flags, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        operands = Operands(*tensors)  # type: ignore[arg-type]
        chosen = _choose(kind, operands, flags)
        out, lse = _run(*chosen, operands)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.kind, ctx.flags, ctx.chosen = kind, flags, chosen
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        # With create_graph=True the op is called, whose own autograd refuses second derivatives.
        if torch.is_grad_enabled():
            return _gradients_of(ctx, dout, dlse, backward)
        return _gradients_of(ctx, dout, dlse, functools.partial(_run_backward, *ctx.chosen))


def _gradients_of(ctx: Any, dout: Tensor | None, dlse: Tensor | None, run: Any) -> tuple[Tensor | None, ...]:
    result: list[Tensor | None] = [None] * (2 + len(Operands._fields))
    if dout is not None or dlse is not None:
        out, lse, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wanted = Wanted(*[needs[place] for place in _PLACES])
        gradients = run(ctx.kind, Operands(*tensors), ctx.flags, out, lse, dout, dlse, wanted)
        for place, gradient, want in zip(_PLACES, gradients, wanted, strict=True):
            if want:
                result[place] = gradient
    return tuple(result)


class _TransformedAttention(torch.autograd.Function):
    """`_EagerAttention` for torch.func: grad and vmap want the context filled in separately, and the ops inside."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kind: Kind, flags: Flags, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        return _call_op(kind, Operands(*tensors), flags)  # type: ignore[arg-type]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.kind, ctx.flags, *tensors = inputs
        ctx.save_for_backward(*output, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        def run(kind: Kind, operands: Operands, flags: Flags, *rest: Any) -> Any:
            return _TransformedBackward.apply(kind, flags, *rest, *operands)  # type: ignore[no-untyped-call]

        return _gradients_of(ctx, dout, dlse, run)


class _TransformedBackward(torch.autograd.Function):
    """The backward op for torch.func, whose grad always records the backward pass too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kind: Kind, flags: Flags, *rest: Any) -> tuple[Tensor, ...]:
        out, lse, dout, dlse, wanted, *tensors = rest
        return cast(
            "tuple[Tensor, ...]",
            tuple(backward(kind, Operands(*tensors), flags, out, lse, dout, dlse, wanted)),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        _refuse_second_derivatives(ctx)


def _call_op(kind: Kind, operands: Operands, flags: Flags) -> tuple[Tensor, Tensor]:
    out, lse = _OPS[kind](*(getattr(operands, name) for name in _names(kind)), *flags)
    return out, lse


def _names(kind: Kind) -> list[str]:
    return OPERANDS[kind].replace("?", "").split()


def _unpack(kind: Kind, args: Args) -> tuple[Operands, Flags]:
    names = _names(kind)
    return Operands(**dict(zip(names, args, strict=False))), Flags(*args[len(names) :])


def _choose(kind: Kind, operands: Operands, flags: Flags) -> tuple[AttentionProblem, dispatch.Selection]:
    """What is asked, and who does it."""
    problem = validation.problem_of(kind, operands, flags)
    return problem, dispatch.select(problem, device.of(operands.q.device), flags.backend)


def _run(problem: AttentionProblem, chosen: dispatch.Selection, operands: Operands) -> tuple[Tensor, Tensor]:
    out, lse = chosen.backend.forward(problem, canonical(problem, operands))
    return heads_first(problem, out), lse


def _launch(kind: Kind, operands: Operands, flags: Flags) -> tuple[Tensor, Tensor]:
    return _run(*_choose(kind, operands, flags), operands)


def _launch_backward(kind: Kind, operands: Operands, flags: Flags, *rest: Any) -> Gradients:
    return _run_backward(*_choose(kind, operands, flags), kind, operands, flags, *rest)


def _run_backward(
    problem: AttentionProblem,
    chosen: dispatch.Selection,
    kind: Kind,
    operands: Operands,
    flags: Flags,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    del kind, flags
    dout = torch.zeros_like(out) if dout is None else dout
    gradients = chosen.backend.backward(
        problem,
        canonical(problem, operands),
        heads_first(problem, out),
        lse,
        contiguous_last(heads_first(problem, dout)),
        dlse,
        wanted,
    )
    return restored(problem, operands, gradients)


def _forward(kind: Kind, *args: Any) -> tuple[Tensor, Tensor]:
    return _launch(kind, *_unpack(kind, args))


def _forward_fake(kind: Kind, *args: Any) -> tuple[Tensor, Tensor]:
    operands, flags = _unpack(kind, args)
    problem = validation.describe(kind, operands, flags)
    out = operands.q.new_empty(problem.out_shape, dtype=problem.dtype)
    return out, operands.q.new_empty(problem.lse_shape, dtype=problem.accumulate_dtype)


def _backward(
    kind: Kind, dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted: Sequence[bool], *args: Any
) -> tuple[Tensor, ...]:
    operands, flags = _unpack(kind, args)
    gradients = _launch_backward(kind, operands, flags, out, lse, dout, dlse, Wanted(*wanted))
    return _materialised(operands, gradients, Wanted(*wanted))


def _backward_fake(
    kind: Kind, dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted: Sequence[bool], *args: Any
) -> tuple[Tensor, ...]:
    del dout, dlse, out, lse
    operands, _ = _unpack(kind, args)
    like = [getattr(operands, name) for name in DIFFERENTIABLE]
    empty = Gradients(*(None if t is None else t.new_empty(t.shape) for t in like))
    return _materialised(operands, empty, Wanted(*wanted))


def _materialised(operands: Operands, gradients: Gradients, wanted: Wanted) -> tuple[Tensor, ...]:
    """Ops return tensors only: a gradient nobody wants is an empty one."""
    nothing = operands.q.new_empty
    return tuple(g if want and g is not None else nothing(0) for g, want in zip(gradients, wanted, strict=True))


def _save(kind: Kind, ctx: Any, inputs: Args, output: tuple[Tensor, Tensor]) -> None:
    count = len(_names(kind))
    ctx.save_for_backward(*output, *inputs[:count])
    ctx.flags = inputs[count:]
    ctx.set_materialize_grads(False)


def _autograd(kind: Kind, ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    names = _names(kind)
    result: dict[str, Tensor | None] = {}
    if dout is not None or dlse is not None:
        needs = dict(zip(names, ctx.needs_input_grad, strict=False))
        wanted = Wanted(*(needs[name] for name in DIFFERENTIABLE))
        out, lse, *tensors = ctx.saved_tensors
        operands = Operands(**dict(zip(names, tensors, strict=True)))
        gradients = backward(kind, operands, Flags(*ctx.flags), out, lse, dout, dlse, wanted)
        result = {n: g for n, g, want in zip(DIFFERENTIABLE, gradients, wanted, strict=True) if want}
    return (*(result.get(name) for name in names), *(None for _ in ctx.flags))


def backward(
    kind: Kind,
    operands: Operands,
    flags: Flags,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """The gradients of a saved forward, through the dispatcher; one that is not wanted is an empty tensor."""
    tensors = [getattr(operands, name) for name in _names(kind)]
    return Gradients(*_BACKWARD_OPS[kind](dout, dlse, out, lse, list(wanted), *tensors, *flags))


def _refuse_second_derivatives(*_: Any) -> None:
    raise Unsupported("second derivatives of attention are not computed; take them of a formula in plain torch instead")


def _schema(kind: Kind) -> str:
    operands = ", ".join(
        f"Tensor{'?' if n.endswith('?') else ''} {n.removesuffix('?')}" for n in OPERANDS[kind].split()
    )
    return f"{operands}, {FLAGS}"


def _register(library: torch.library.Library, kind: Kind) -> None:
    saved = "Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, bool[] wanted"
    library.define(f"{kind}({_schema(kind)}) -> (Tensor out, Tensor lse)", tags=(torch.Tag.pt2_compliant_tag,))
    library.define(
        f"{kind}_backward({saved}, {_schema(kind)}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    implementations: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        kind: (_forward, _forward_fake),
        f"{kind}_backward": (_backward, _backward_fake),
    }
    for name, (real, fake) in implementations.items():
        library.impl(name, functools.partial(real, kind), "CompositeExplicitAutograd")
        torch.library.register_fake(f"tilewise::{name}", functools.partial(fake, kind), lib=library)
    torch.library.register_autograd(
        f"tilewise::{kind}",
        functools.partial(_autograd, kind),
        setup_context=lambda ctx, inputs, output: _save(kind, ctx, inputs, output),
        lib=library,
    )
    torch.library.register_autograd(f"tilewise::{kind}_backward", _refuse_second_derivatives, lib=library)
    for name, rule in ((kind, batching.forward_rule), (f"{kind}_backward", batching.backward_rule)):
        torch.library.register_vmap(f"tilewise::{name}", functools.partial(_vmapped, kind, name, rule), lib=library)


def _vmapped(kind: Kind, name: str, rule: Callable[..., Any], info: Any, in_dims: Args, *args: Any) -> Any:
    op = getattr(torch.ops.tilewise, name).default
    return rule(op, _names(kind), info.batch_size, in_dims, args)


# The library lives as long as the process: dropping it would unregister the ops.
_LIBRARY = torch.library.Library("tilewise", "DEF")
for _kind in OPERANDS:
    _register(_LIBRARY, _kind)
_OPS: dict[Kind, Any] = {kind: getattr(torch.ops.tilewise, kind).default for kind in OPERANDS}
_BACKWARD_OPS: dict[Kind, Any] = {kind: getattr(torch.ops.tilewise, f"{kind}_backward").default for kind in OPERANDS}
