"""The `torch.library` ops: tilewise::dense, ::varlen, ::paged and their backward ops, generated from one table.

Each op validates its operands, describes them as a problem, chooses a backend and launches it. Its fake only validates,
describes and allocates results. Autograd saves the inputs, `out` and `lse`; probabilities are recomputed, never stored.
Plain eager calls skip the dispatcher and run through `Call`, with the same results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import batching, calls, derivatives, device, dispatch, settings, tracing, validation
from tilewise.backends.base import Bound
from tilewise.canonical import COUNTS, canonical, contiguous_last, heads_first, restored
from tilewise.derivatives import DIFFERENTIABLE, At, backward, call_more, call_op, scattered, wanted_of
from tilewise.errors import Unsupported
from tilewise.memory import check_allocated, check_there, touch
from tilewise.operands import LENGTHS, Flags, Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem, Kind
from tilewise.schemas import OPERANDS, operand_names, schema, unpack
from tilewise.symbolic import Sketch, Trace, replaced

# Indices of the index tensors, which kernels read as int32.
_COUNTS = tuple(Operands._fields.index(name) for name in COUNTS)
_OUT, _LOGITS = Operands._fields.index("out"), Operands._fields.index("max_logits")
_NOTHING = (None,) * _LOGITS
# What a backward pass is given besides the operands.
_SAVED = ("dout", "dlse", "out", "lse")
_GIVEN = (*_SAVED, *Operands._fields)

Args = Sequence[Any]


def attention(kind: Kind, operands: Operands, flags: Flags) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable; `out` in the caller's layout."""
    return cast("tuple[Tensor, Tensor]", result(kind, operands, flags, return_lse=True))


def repeated(
    kind: Kind, operands: Operands, flags: Flags, before: Callable[[], None] | None = None
) -> tuple[Tensor, Tensor]:
    """`attention` without dropout, cached per call signature. `before` is called between validation and computing."""
    key = tuple([value for name, value in zip(Flags._fields, flags, strict=True) if name not in LENGTHS])
    slot, places, sized = calls.slot_of(operands, (kind, *key), flags.dropout, lengths=flags.lengths)
    if slot is not None and slot.call is not None:
        return cast("tuple[Tensor, Tensor]", slot.call(operands, places, sized, before))
    return cast("tuple[Tensor, Tensor]", result(kind, operands, flags, return_lse=True, slot=slot, before=before))


def refuse(kind: Kind, operands: Operands, flags: Flags) -> None:
    """Raise what `attention` would raise. Fake and batched tensors are only checked by the call itself."""
    plain = not torch.compiler.is_compiling() and calls.are_plain(operands)
    if plain and not torch._C._are_functorch_transforms_active():  # noqa: SLF001
        _choose(kind, operands, flags)


def described(kind: Kind, operands: Operands, flags: Flags) -> tuple[AttentionProblem, Operands]:
    """The validated problem and its canonical operands, for passes that only some backends have."""
    problem = validation.problem_of(kind, operands, flags)
    return problem, canonical(problem, operands)


def result(
    kind: Kind,
    operands: Operands,
    flags: Flags,
    *,
    return_lse: bool,
    slot: calls.Slot | None = None,
    before: Callable[[], None] | None = None,
) -> calls.Result:
    """`attention`, without lse unless `return_lse`; `flags.max_logits` adds the largest score of each head. The call is
    stored in `slot`, where its signature allows that.
    """
    derivatives.refuse_tracing()
    dual = derivatives.is_dual(operands)
    if operands.out is not None or flags.max_logits:
        _refuse_transforms("out=" if operands.out is not None else "return_max_logits=True", dual=dual)
    if not dual and is_plain_eager(operands):
        lasting = slot is not None and validation.lasts(kind, operands, flags)
        call = Call(kind, operands, flags, return_lse=return_lse, lasting=lasting)
        sized = None
        if slot is not None and lasting:
            sized = call.opened(operands, slot)
            if sized is None:
                slot.call = call
        return call(operands, None, sized, before)
    if before is not None:
        refuse(kind, operands, flags)
        before()
    if dual:
        out, lse = derivatives.attend_dual(kind, operands, flags)
    elif torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():  # noqa: SLF001
        out, lse = derivatives.attend_transformed(kind, operands, flags)
    elif operands.out is not None or flags.max_logits:
        return picked(*call_more(kind, operands, flags), return_lse=return_lse)
    else:
        out, lse = call_op(kind, operands, flags)
    return (out, lse) if return_lse else out


def picked(out: Tensor, lse: Tensor, *logits: Tensor, return_lse: bool) -> calls.Result:
    """What the caller asked for of (out, lse), and max_logits if they were made."""
    results = (out, lse, *logits) if return_lse else (out, *logits)
    return cast("calls.Result", results if len(results) > 1 else out)


def _refuse_transforms(name: str, *, dual: bool) -> None:
    """Raise for an argument under a transform: its result would have to hold a batch or a tangent."""
    if dual or torch._C._are_functorch_transforms_active():  # noqa: SLF001
        raise Unsupported(
            f"{name} is not computed under torch.func transforms and forward-mode derivatives: leave it out there"
        )


def is_plain_eager(tensors: Sequence[Tensor | None]) -> bool:
    """Whether only autograd observes a call with these tensors. Then the dispatcher and its boxing are skipped.

    Compilers, fake and functional tensors, vmap and modes get the registered ops instead.
    """
    return not calls.is_watched() and calls.are_plain(tensors) and calls.are_stored(tensors)


class Call:
    """A validated call. If it is `lasting`, it is also bound to the strides and alignment of its tensors (see calls).

    Called with the tensors in the order of `Operands`; trailing Nones may be left out.
    """

    __slots__ = (
        "_backwards", "_chosen", "_contents", "_disjoint", "_lasting", "_nvtx", "_record", "_recorded", "_trace",
        "_writes", "bound", "flags", "kind", "problem", "return_lse", "wide",
    )  # fmt: skip

    def __init__(self, kind: Kind, operands: Operands, flags: Flags, *, return_lse: bool, lasting: bool) -> None:
        self.kind, self.flags, self.return_lse = kind, flags, return_lse
        if lasting:
            validation.check_storage(kind, operands)
        self.problem, self._chosen = _choose(kind, operands, flags)
        self._recorded = flags.needs_grad
        # int64 index tensors are converted before the pass; the bound pass takes int32.
        self.wide = tuple([i for i in _COUNTS if (t := operands[i]) is not None and t.dtype == torch.int64])
        # The bound forward pass, or None.
        self.bound: Bound | None = None
        # The record of sizes, if they are open; the problem then holds numbers of it.
        self._trace: Trace | None = None
        self._lasting, self._nvtx = lasting, settings.current().nvtx
        named = operands._replace(max_logits=None)
        # The check of a given `out`; plans for all sizes have their own.
        self._disjoint = None if operands.out is None else validation.Disjoint(Operands._fields, named)
        self._writes = operands.out is not None
        reads = lasting and validation.reads_contents(kind, operands)
        self._contents = validation.Contents(self.problem, flags) if reads else None
        self._backwards: dict[tuple[bool, ...], list[calls.Form]] = {}
        # The Python wrapper of torch's `apply` unwraps functorch leftovers, which a lasting call never has: skip it.
        self._record: Any = super(torch.autograd.Function, _Recorded).apply if lasting else _Recorded.apply

    def opened(self, operands: Operands, slot: calls.Slot) -> Any:
        """Prepare the call for all sizes, if calls with its flags were met with others, or else for those of its first
        operands alone. What the plan needs for these, or None if sizes are not open.
        """
        named = operands._replace(max_logits=None)
        assert slot.signature is not None
        assert slot.family is not None
        count = slot.signature.count
        lengths, tensors = self.flags.lengths, named[:count]
        found = None
        if self._disjoint is not None:
            self._disjoint.check(tensors)
        is_met, slot.family.is_met = slot.family.is_met, True
        if is_met and self._contents is None and not self.wide:
            found = _opened(self.kind, Operands._fields[:count], tensors, self.flags, self._bound_forward)
        if found is None:
            self.bind(operands)
            return None
        self._trace, self.problem, self.bound, measure, is_open = found
        self._disjoint = None
        form = calls.form_of(slot.family.forms, tensors, is_open, keeps=not self._writes)
        form.add(measure, calls.Slot(None, call=self))
        return measure(*[tensor for tensor in tensors if tensor is not None], *lengths)

    def bind(self, operands: Operands) -> None:
        """Prepare the call for operands with these sizes, strides and alignment."""
        operands = Operands(*self._narrowed(operands))
        if self.problem.max_logits:
            operands = operands._replace(max_logits=_no_logits(self.problem, operands.q.device))
        self.bound = self._bound_forward(self.problem, operands)

    def problem_of(self, tensors: Sequence[Tensor | None], lengths: calls.Lengths) -> AttentionProblem:
        """The problem of a call."""
        if self._trace is None:
            return self.problem
        given = tensors[:_LOGITS]
        values = self._trace.values(*[tensor for tensor in given if tensor is not None], *lengths)
        if values is None:  # hooks of saved tensors may give a backward other strides and addresses
            operands = Operands(*cast("Any", given))
            return validation.problem_of(self.kind, operands, self.flags.with_lengths(lengths))
        return cast("AttentionProblem", replaced(self.problem, values))

    def __call__(
        self, tensors: Sequence[Tensor | None], places: calls.Places | None = None, sized: Any = None,
        before: Callable[[], None] | None = None, lengths: calls.Lengths | None = None, traced: bool = False,
    ) -> calls.Result:  # fmt: skip
        """(out, lse), or out alone without `return_lse`. `places` and `sized` are what `calls.slot_of` returned,
        `lengths` the bounds that were passed, if they are not those of the first call.
        """
        if lengths is None:
            lengths = self.flags.lengths
        if (tracing.profiler._is_profiler_enabled or self._nvtx) and not traced:  # noqa: SLF001
            problem = self.problem_of(tensors, lengths)
            with tracing.span(tracing.FORWARD, tensors, self._chosen.backend.name, problem):
                return self(tensors, places, sized, before, lengths, True)
        if self._contents is not None:
            self._contents.check(tensors)
        if self._disjoint is not None:
            self._disjoint.check(tensors, places)
        if before is not None:
            before()
        if self.wide:
            tensors, places = self._narrowed(tensors), None
        if self.problem.max_logits:
            return self._with_logits(tensors, sized, lengths)
        if self._writes:
            return self._written(tensors, places, sized, lengths)
        if self._recorded:
            recorded: calls.Result = self._record(_Once(self, places, sized, lengths), *tensors)
            return recorded
        # The body of `forward`, inlined to save a Python call.
        bound = self.bound
        made: Sequence[Tensor] | None = None if bound is None else bound(tensors, places, sized)
        if made is None:
            made = _run(self.problem_of(tensors, lengths), self._chosen, Operands(*tensors))  # type: ignore[arg-type]
        return (made[0], made[1]) if self.return_lse else made[0]

    def _with_logits(self, tensors: Sequence[Tensor | None], sized: Any, lengths: calls.Lengths) -> calls.Result:
        """The results of a call that also wants the largest score of each head."""
        q: Any = tensors[0]
        logits = _no_logits(self.problem, q.device)
        tensors = (*tensors[:_LOGITS], *_NOTHING[len(tensors) :], logits)
        if self._recorded:
            result: Any = self._record(_Once(self, None, sized, lengths), *tensors)
        elif self._writes:
            result = self._written(tensors, None, sized, lengths)
        else:
            made = self.forward(tensors, None, sized, lengths)
            result = (made[0], made[1]) if self.return_lse else made[0]
        return (*result, logits) if self.return_lse else (result, logits)

    def _written(
        self, tensors: Sequence[Tensor | None], places: calls.Places | None, sized: Any, lengths: calls.Lengths
    ) -> calls.Result:
        """The results of a call with `out`."""
        out: Any = tensors[_OUT]
        made: Sequence[Any] | None = None if self.bound is None else self.bound(tensors, places, sized)
        if made is None:
            given: Any = Operands(*tensors)  # type: ignore[arg-type]
            made = _run(self.problem_of(tensors, lengths), self._chosen, given)[1:]
        touch(out)
        return (out, made[0]) if self.return_lse else out

    def forward(
        self, tensors: Sequence[Tensor | None], places: calls.Places | None, sized: Any, lengths: calls.Lengths
    ) -> Sequence[Tensor]:
        """out, lse (if it is returned or recorded) and anything else the pass made; not recorded by autograd."""
        made = None if self.bound is None else self.bound(tensors, places, sized)
        if made is None:
            return _run(self.problem_of(tensors, lengths), self._chosen, Operands(*tensors))  # type: ignore[arg-type]
        return made

    def gradients(
        self, given: tuple[Any, ...], needs: tuple[bool, ...], lengths: calls.Lengths, traced: bool = False
    ) -> Sequence[Tensor | None]:
        """The gradient of each tensor that `needs` one. `given` is dout, dlse, out, lse and then the call's tensors."""
        flags = self.flags
        if lengths != flags.lengths:
            flags = flags.with_lengths(lengths)
        if forward_ad._current_level >= 0 and derivatives.is_dual(given):  # noqa: SLF001
            wanted = wanted_of(needs)
            return scattered(derivatives.gradients_of_dual(self.kind, flags, given, wanted), wanted, len(needs))
        # With create_graph=True the op is called, whose autograd has the second derivatives. Modes must see the op.
        by_op = torch.is_grad_enabled() or bool(torch._C._len_torch_dispatch_stack())  # noqa: SLF001
        watched = tracing.profiler._is_profiler_enabled or self._nvtx  # noqa: SLF001
        if watched and not traced and not by_op and calls.are_plain(given[:2]):
            problem = self.problem_of(given[4:], lengths)
            with tracing.span(tracing.BACKWARD, given[4:], self._chosen.backend.name, problem):
                return self.gradients(given, needs, lengths, True)
        plain = not by_op and calls.are_plain(given[:2]) and calls.are_stored(given[:2])
        known = self._backward(given, needs, lengths) if self._lasting and plain else None
        if known is not None:
            slot, places, sized = known
            backward_pass: _BoundBackward = slot
            made = None if backward_pass.bound is None else backward_pass.bound(given, places, sized or None)
            if made is not None:
                return [None if place is None else made[place] for place in backward_pass.results]
        dout, dlse, out, lse, *tensors = given
        wanted = wanted_of(needs)
        # With is_grads_batched=True the gradients are batched wrappers, which only the op accepts.
        if not plain:
            found = backward(At(self.kind, Operands(*tensors), flags), (out, lse), (dout, dlse), wanted)
        else:
            if known is None:
                check_there(_GIVEN, given)
            problem = self.problem_of(tensors, lengths)
            found = _run_backward(problem, self._chosen, Operands(*tensors), out, lse, dout, dlse, wanted)
        return scattered(found, wanted, len(tensors))

    def _narrowed(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Every index tensor as int32. Contents were validated before the conversion."""
        return [t.to(torch.int32) if i in self.wide else t for i, t in enumerate(tensors)] if self.wide else tensors

    def _bound_forward(self, problem: AttentionProblem, operands: Operands) -> Bound | None:
        """The pass of the backend; `operands` may be those of a trace."""
        backend = self._chosen.backend
        if problem.is_traced and problem.max_logits:
            sketch = Sketch((problem.num_heads,), (1,), 0, problem.accumulate_dtype, operands.q.device, 0)
            operands = operands._replace(max_logits=cast("Tensor", sketch))
        if problem.is_traced and _chosen_for(problem, operands, self.flags).backend is not backend:
            return None  # never so: the choice is made again to be recorded
        ready = canonical(problem, operands)
        if _is_moved(operands, ready):
            return None
        bound = backend.bind_forward(problem, ready, want_lse=self.return_lse or self.flags.needs_grad)
        # A pass that allocates its own `out` would need a copy in every call, which the general path makes.
        return None if bound is not None and operands.out is not None and "out" in bound.made else bound

    def _backward(
        self, given: tuple[Any, ...], needs: tuple[bool, ...], lengths: calls.Lengths
    ) -> tuple[Any, calls.Places | None, Any] | None:
        """(pass, addresses, what it needs for these sizes) of a backward."""
        forms = self._backwards.get(needs)
        if forms is None:
            forms = self._backwards[needs] = []
        for form in forms:
            known = form.find(given, lengths)
            if known is not None:
                return known
        if given[0] is None:
            return None
        check_allocated(_GIVEN, given)
        found, bound = None, cast("Bound | None", None)
        if self._trace is not None:
            flags = self.flags.with_lengths(lengths)
            prepare = functools.partial(self._bound_backward, wanted_of(needs))
            found = _opened(self.kind, _GIVEN[: len(given)], given, flags, prepare)
        if found is not None:
            _, _, bound, measure, is_open = found
        else:
            problem = self.problem_of(given[4:], lengths)
            bound = self._bound_backward(wanted_of(needs), problem, given)
            measure, is_open = _exactly(given, lengths), [[True] * t.dim() if t is not None else [] for t in given]
        made = () if bound is None else bound.made
        wanted = zip(("dq", "dk", "dv"), needs, strict=False)
        results = [made.index(name) if need and name in made else None for name, need in wanted]
        new = _BoundBackward(bound, (*results, *[None] * (len(needs) - len(results))))
        calls.form_of(forms, given, is_open).add(measure, new)
        return new, None, measure(*[tensor for tensor in given if tensor is not None], *lengths)

    def _bound_backward(self, wanted: Wanted, problem: AttentionProblem, given: Sequence[Any]) -> Bound | None:
        dout, dlse, out, lse, *tensors = given
        if dout is None:
            return None
        operands = Operands(*tensors)
        ready = canonical(problem, operands)
        dout_ready = contiguous_last(heads_first(problem, dout))
        if _is_moved((dout, *operands), (dout_ready, *ready)):
            return None
        bind = self._chosen.backend.bind_backward
        return bind(problem, ready, heads_first(problem, out), lse, dout_ready, dlse, wanted)


class _BoundBackward(NamedTuple):
    """A cached backward pass; `bound` is None if each call must take the general path. `results[i]` is the index of
    operand i's gradient among the tensors that the pass makes.
    """

    bound: Bound | None
    results: tuple[int | None, ...]


class _Opened(NamedTuple):
    """A pass that serves all sizes to which its trace applies: the record, the problem with its numbers, the pass, the
    function that computes what it needs for other sizes, and which sizes of each tensor are open.
    """

    trace: Trace
    problem: AttentionProblem
    bound: Bound
    measure: Callable[..., Any]
    is_open: list[list[bool]]


def _opened(
    kind: Kind,
    names: Sequence[str],
    tensors: Sequence[Tensor | None],
    flags: Flags,
    prepare: Callable[[AttentionProblem, Any], Bound | None],
) -> _Opened | None:
    """What `prepare` makes of a problem and operands with numbers in place of sizes. None if it cannot. `names` and
    `tensors` are the operands, in a backward behind those of _SAVED.
    """
    present = [name for name, tensor in zip(names, tensors, strict=True) if tensor is not None]
    trace = Trace([*present, *LENGTHS])
    is_open = [
        [] if t is None else validation.open_sizes(kind, flags.layout, n, t.dim())
        for n, t in zip(names, tensors, strict=True)
    ]
    sketches = [
        None if t is None else Sketch.of(trace, name, t, opened)
        for name, t, opened in zip(names, tensors, is_open, strict=True)
    ]
    bounds = [
        None if value is None else trace.leaf(name, value) for name, value in zip(LENGTHS, flags.lengths, strict=True)
    ]
    operands = Operands(*cast("Any", sketches[names.index("q") :]))
    try:
        problem = validation.traced_problem(kind, operands, flags.with_lengths(bounds))
        bound = prepare(problem, sketches if names[0] != "q" else operands)
    # The call was validated, and its backend chosen, without numbers. What fails with them is planned for its own
    # sizes: a backend of another package may do with a size what only integers can.
    except Exception:
        return None
    # A pass from outside may serve one size only, and lack it.
    opened = getattr(bound, "open", None)
    return None if bound is None or opened is None else _Opened(trace, problem, bound, opened(trace), is_open)


class _Exact(NamedTuple):
    """Sizes of a pass that serves no others."""

    def kept(self) -> None:
        """Nothing is computed for sizes that come again."""


def _exactly(given: Sequence[Any], lengths: calls.Lengths) -> Callable[..., Any]:
    """A function that tells whether tensors have the signature of these, for passes whose sizes are not open."""
    signature = calls.Signature([tensor for tensor in given if tensor is not None])

    def measure(*arguments: Any) -> _Exact | None:
        tensors, others = arguments[: -len(LENGTHS)], arguments[-len(LENGTHS) :]
        return _Exact() if others == lengths and signature.places(tensors) is not None else None

    return measure


def _is_moved(given: Sequence[Tensor | None], ready: Sequence[Tensor | None]) -> bool:
    """Whether any tensor in `ready` is a copy of the one in `given`."""
    return given is not ready and any(
        a is not b and a is not None and b is not None and a.data_ptr() != b.data_ptr()
        for a, b in zip(given, ready, strict=True)
    )


class _Once:
    """A call and what is known of one run of it. Not a tuple: profilers look into tuples that autograd gets."""

    __slots__ = ("call", "lengths", "places", "sized")

    def __init__(self, call: Call, places: calls.Places | None, sized: Any, lengths: calls.Lengths) -> None:
        self.call, self.places, self.sized, self.lengths = call, places, sized, lengths


class _Recorded(torch.autograd.Function):
    """Autograd of plain eager calls: the same forward, saved tensors and backward as the registered ops."""

    @staticmethod
    def forward(ctx: Any, once: _Once, *tensors: Tensor | None) -> calls.Result:
        call = once.call
        made = call.forward(tensors, once.places, once.sized, once.lengths)
        out, lse = made[0], made[1]
        # Not max_logits, which the caller may change.
        ctx.save_for_backward(out, lse, *tensors[:_LOGITS])
        ctx.call, ctx.lengths = call, once.lengths
        ctx.set_materialize_grads(False)
        return (out, lse) if call.return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * len(needs)
        gradients = ctx.call.gradients((dout, dlse, *ctx.saved_tensors), needs[1 : 1 + _LOGITS], ctx.lengths)
        return None, *gradients, *[None] * (len(needs) - 1 - _LOGITS)


def _choose(kind: Kind, operands: Operands, flags: Flags) -> tuple[AttentionProblem, dispatch.Selection]:
    """The problem, and the backend that computes it."""
    problem = validation.problem_of(kind, operands, flags)
    return problem, _chosen_for(problem, operands, flags)


def _chosen_for(problem: AttentionProblem, operands: Operands, flags: Flags) -> dispatch.Selection:
    return dispatch.select(problem, device.of(operands.q.device), flags.backend)


def _run(problem: AttentionProblem, chosen: dispatch.Selection, operands: Operands) -> tuple[Tensor, Tensor]:
    out, lse = chosen.backend.forward(problem, canonical(problem, operands))
    out, target = heads_first(problem, out), operands.out
    if target is None:
        return out, lse
    # A backend may write into the given memory, or return a result of its own.
    return target if out.data_ptr() == target.data_ptr() else target.copy_(out), lse


def _no_logits(problem: AttentionProblem, device: torch.device) -> Tensor:
    """The largest score of each head before any was computed."""
    return torch.full((problem.num_heads,), -torch.inf, dtype=problem.accumulate_dtype, device=device)


def _launch(kind: Kind, operands: Operands, flags: Flags) -> tuple[Tensor, ...]:
    """(out, lse), and max_logits if they are wanted."""
    problem, chosen = _choose(kind, operands, flags)
    if problem.max_logits:
        operands = operands._replace(max_logits=_no_logits(problem, operands.q.device))
    with tracing.span(tracing.FORWARD, operands, chosen.backend.name, problem):
        out, lse = _run(problem, chosen, operands)
    return (out, lse) if operands.max_logits is None else (out, lse, operands.max_logits)


def _run_backward(
    problem: AttentionProblem,
    chosen: dispatch.Selection,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
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


def _forward(count: int, kind: Kind, *args: Any) -> tuple[Tensor, ...]:
    return _launch(kind, *unpack(kind, args))[:count]


def _forward_out(kind: Kind, *args: Any) -> tuple[Tensor, Tensor]:
    operands, flags = unpack(kind, args[:-1])
    operands = operands._replace(out=args[-1])
    validation.check_result(operands)
    _, lse, *logits = _launch(kind, operands, flags)
    touch(args[-1])
    return lse, logits[0] if logits else lse.new_empty(0)


def _forward_out_fake(kind: Kind, *args: Any) -> tuple[Tensor, Tensor]:
    operands, flags = unpack(kind, args[:-1])
    _, lse, logits = _results_fake(kind, operands._replace(out=args[-1]), flags)
    return lse, logits if flags.max_logits else lse.new_empty(0)


def _forward_fake(count: int, kind: Kind, *args: Any) -> tuple[Tensor, ...]:
    return _results_fake(kind, *unpack(kind, args))[:count]


def _results_fake(kind: Kind, operands: Operands, flags: Flags) -> tuple[Tensor, Tensor, Tensor]:
    dispatch.require(flags.backend)
    problem = validation.describe(kind, operands, flags)
    out = operands.q.new_empty(problem.out_shape, dtype=problem.dtype)
    lse, logits = (
        operands.q.new_empty(shape, dtype=problem.accumulate_dtype)
        for shape in (problem.lse_shape, (problem.num_heads,))
    )
    return out, lse, logits


def _backward(
    kind: Kind, dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted: Sequence[bool], *args: Any
) -> tuple[Tensor, ...]:
    operands, flags = unpack(kind, args)
    check_there(_SAVED, (dout, dlse, out, lse))
    problem, chosen = _choose(kind, operands, flags)
    with tracing.span(tracing.BACKWARD, operands, chosen.backend.name, problem):
        gradients = _run_backward(problem, chosen, operands, out, lse, dout, dlse, Wanted(*wanted))
    return derivatives.materialised(operands, gradients, Wanted(*wanted))


def _backward_fake(kind: Kind, *args: Any) -> tuple[Tensor, ...]:
    operands, _ = unpack(kind, args[5:])
    return derivatives.fake_gradients(operands, Wanted(*args[4]))


def _save(kind: Kind, ctx: Any, inputs: Args, output: tuple[Tensor, ...]) -> None:
    count = len(operand_names(kind))
    ctx.save_for_backward(*output[:2], *inputs[:count])
    ctx.mark_non_differentiable(*output[2:])
    ctx.flags = inputs[count:]
    ctx.set_materialize_grads(False)


def _autograd(
    kind: Kind, ctx: Any, dout: Tensor | None, dlse: Tensor | None, dlogits: None = None
) -> tuple[Tensor | None, ...]:
    del dlogits  # max_logits have no gradient
    names = operand_names(kind)
    result: dict[str, Tensor | None] = {}
    if dout is not None or dlse is not None:
        needs = dict(zip(names, ctx.needs_input_grad, strict=False))
        wanted = Wanted(*(needs[name] for name in DIFFERENTIABLE))
        out, lse, *tensors = ctx.saved_tensors
        operands = Operands(**dict(zip(names, tensors, strict=True)))
        gradients = backward(At(kind, operands, Flags(*ctx.flags)), (out, lse), (dout, dlse), wanted)
        result = {n: g for n, g, want in zip(DIFFERENTIABLE, gradients, wanted, strict=True) if want}
    return (*(result.get(name) for name in names), *(None for _ in ctx.flags))


def _register(library: torch.library.Library, kind: Kind) -> None:
    given, saved = schema(kind), "Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, bool[] wanted"
    logits, gradients = "Tensor lse, Tensor max_logits", "Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks"
    define = functools.partial(derivatives.define, library)
    define(kind, f"({given}) -> (Tensor out, Tensor lse)", _forward, _forward_fake, 2, kind)
    define(f"{kind}_logits", f"({given}) -> (Tensor out, {logits})", _forward, _forward_fake, 3, kind)
    define(f"{kind}_out", f"({given}, Tensor(a!) out) -> ({logits})", _forward_out, _forward_out_fake, kind)
    define(f"{kind}_backward", f"({saved}, {given}) -> ({gradients})", _backward, _backward_fake, kind)
    for name in (kind, f"{kind}_logits"):
        torch.library.register_autograd(
            f"tilewise::{name}",
            functools.partial(_autograd, kind),
            setup_context=lambda ctx, inputs, output: _save(kind, ctx, inputs, output),
            lib=library,
        )
    for suffix, asked in (("out", "out="), ("logits", "return_max_logits=True")):
        refuse_it = functools.partial(lambda name, *_: _refuse_transforms(name, dual=True), asked)
        torch.library.register_vmap(f"tilewise::{kind}_{suffix}", refuse_it, lib=library)
    rule = functools.partial(batching.vmapped, operand_names(kind), kind, "")
    torch.library.register_vmap(f"tilewise::{kind}", rule, lib=library)
    derivatives.register(library, kind)


# The library must live as long as the process: dropping it would unregister the ops.
_LIBRARY = torch.library.Library("tilewise", "DEF")
for _kind in OPERANDS:
    _register(_LIBRARY, _kind)
