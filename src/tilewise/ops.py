"""The `torch.library` ops: tilewise::dense, ::varlen, ::paged and their backward ops, generated from one table.

Each op validates its operands, describes them as a problem, chooses a backend and launches it. Its fake only validates,
describes and allocates results. Autograd saves the inputs, `out` and `lse`; probabilities are recomputed, never stored.
Plain eager calls skip the dispatcher. They and the ops run through `Call`, with the same results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import batching, calls, derivatives, device, dispatch, settings, tracing, validation
from tilewise.backends.base import Bound
from tilewise.canonical import COUNTS, canonical, contiguous_last, heads_first, restored
from tilewise.derivatives import DIFFERENTIABLE, INDICES, At, backward, call_more, call_op, scattered, wanted_of
from tilewise.errors import Unsupported
from tilewise.memory import check_allocated, check_there, touch
from tilewise.operands import LENGTHS, Flags, Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem, Kind
from tilewise.schemas import OPERANDS, operand_names, schema, unpack
from tilewise.symbolic import Sketch, Trace

if TYPE_CHECKING:
    from tilewise.native import Filled

# Indices of the index tensors, which kernels read as int32.
_COUNTS = tuple(Operands._fields.index(name) for name in COUNTS)
_OUT, _LOGITS = Operands._fields.index("out"), Operands._fields.index("max_logits")
_NOTHING = (None,) * _LOGITS
# What a backward pass is given besides the operands.
_SAVED = ("dout", "dlse", "out", "lse")
_GIVEN = (*_SAVED, *Operands._fields)
# Indices of the flags without bounds on lengths.
_MEANING = tuple([i for i, name in enumerate(Flags._fields) if name not in LENGTHS])
# Signatures would tell apart who calls an operator, autograd or compiled code: by this key, which kernels are below.
_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)  # noqa: SLF001

Args = Sequence[Any]
Use = Literal["record", "op", "backward"]


def attention(kind: Kind, operands: Operands, flags: Flags) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable; `out` in the caller's layout."""
    return cast("tuple[Tensor, Tensor]", result(kind, operands, flags, return_lse=True))


def repeated(
    kind: Kind, operands: Operands, flags: Flags, before: Callable[[], None] | None = None
) -> tuple[Tensor, Tensor]:
    """`attention` without dropout, cached per call signature. `before` is called between validation and computing."""
    key = kind, True, "record", *[flags[i] for i in _MEANING]
    slot, places, sized, bounds = calls.slot_of(operands, key, flags.dropout, lengths=flags.lengths)
    if slot is not None and slot.call is not None:
        return cast("tuple[Tensor, Tensor]", slot.call(operands, places, sized, before, bounds))
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
        call, places, sized, bounds = _found(kind, operands, flags, slot, return_lse=return_lse)
        return call(operands, places, sized, before, bounds)
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
    """A validated call. If it is `lasting`, later calls use it too: those with the strides and alignment of its
    tensors, or of all sizes (see calls).

    Called with the tensors in the order of `Operands`; trailing Nones may be left out. `use` is "record" if autograd
    learns of calls that need gradients; it knows already what an op does, which has "op". A call that is only asked for
    its gradients has "backward".
    """

    __slots__ = (
        "_backwards", "_chosen", "_contents", "_disjoint", "_lasting", "_nvtx", "_problem_for", "_reads", "_record",
        "_recorded", "_use", "_writes", "bound", "flags", "kind", "problem", "return_lse", "wide",
    )  # fmt: skip

    def __init__(
        self, kind: Kind, operands: Operands, flags: Flags, *, return_lse: bool, lasting: bool, use: Use = "record"
    ) -> None:
        self.kind, self.flags, self.return_lse = kind, flags, return_lse
        if lasting:
            validation.check_storage(kind, operands)
        self.problem, self._chosen = _choose(kind, operands, flags)
        self._use, self._recorded = use, flags.needs_grad and use == "record"
        # int64 index tensors are converted before the pass; the bound pass takes int32.
        self.wide = tuple([i for i in _COUNTS if (t := operands[i]) is not None and t.dtype == torch.int64])
        # The bound forward pass, or None.
        self.bound: Bound | None = None
        # If sizes are open, the problem holds numbers of a trace, and this computes that of a call.
        self._problem_for: Filled | None = None
        self._lasting, self._nvtx = lasting, settings.current().nvtx
        named = operands._replace(max_logits=None)
        # The check of a given `out`; plans for all sizes have their own.
        self._disjoint = None if operands.out is None else validation.Disjoint(Operands._fields, named)
        self._writes = operands.out is not None
        # The check of contents; plans for all sizes have their own.
        self._reads = lasting and validation.reads_contents(kind, operands)
        self._contents = validation.Contents() if self._reads and operands.q.is_cpu else None
        self._backwards: dict[tuple[bool, ...], list[calls.Form]] = {}
        # The Python wrapper of torch's `apply` unwraps functorch leftovers, which a lasting call never has: skip it.
        self._record: Any = super(torch.autograd.Function, _Recorded).apply if lasting else _Recorded.apply

    def prepared(self, operands: Operands, slot: calls.Slot) -> Any:
        """Prepare the call for all sizes, if calls with its flags were met with others, or else for those of its first
        operands alone. What the plan needs for these, or None if sizes are not open.
        """
        named = operands._replace(max_logits=None)
        assert slot.signature is not None
        assert slot.family is not None
        count = slot.signature.count
        tensors = named[:count]
        if self._disjoint is not None:
            self._disjoint.check(tensors)
        # Lengths that are read from contents are no part of the signature: then a plan for these sizes serves no other.
        lasts = validation.lasts(self.kind, operands, self.flags)
        is_met, slot.family.is_met = slot.family.is_met or not lasts, True
        if is_met and (self._contents is not None or not self._reads):
            sized = self._opened(tensors, slot.family)
            if sized is not None:
                return sized
        if lasts:
            self.bind(operands)
            slot.call = self
        return None

    def _opened(self, tensors: tuple[Any, ...], family: calls.Family) -> Any:
        """Prepare the call for all sizes. What the plan needs for those of these tensors, or None if they are not
        open.
        """
        bounds = self.flags.lengths
        if self._contents is not None:
            found_bounds = self._contents.bounds(tensors, bounds)
            if found_bounds is None:
                return None
            bounds = found_bounds
        flags, names = self.flags.with_lengths(bounds), Operands._fields[: len(tensors)]
        is_open = _open_sizes(self.kind, flags, names, tensors)
        contents = None if self._contents is None else validation.Contents
        form = calls.form_of(family.forms, tensors, is_open, contents)
        found = _opened(self.kind, names, tensors, flags, self._bound_forward) if form.is_due() else None
        if found is None:
            return None
        self._problem_for, self.bound, self.problem = found.problem_for, found.bound, found.problem_for.record
        self.flags, self._disjoint, self._contents, self._reads = flags, None, None, False
        form.add(found.measure, calls.Slot(None, call=self))
        return found.sized

    def bind(self, operands: Operands) -> None:
        """Prepare the call for operands with these sizes, strides and alignment."""
        operands = Operands(*self._narrowed(operands))
        if self.problem.max_logits:
            operands = operands._replace(max_logits=_no_logits(self.problem, operands.q.device))
        self.bound = self._bound_forward(self.problem, operands)

    def problem_of(self, tensors: Sequence[Tensor | None], lengths: calls.Lengths) -> AttentionProblem:
        """The problem of a call."""
        if self._problem_for is None:
            return self.problem
        given = tensors[:_LOGITS]
        found = self._problem_for([tensor for tensor in given if tensor is not None], lengths)
        if found is None:  # hooks of saved tensors may give a backward other strides and addresses
            operands = Operands(*cast("Any", given))
            return validation.problem_of(self.kind, operands, self.flags.with_lengths(lengths))
        return cast("AttentionProblem", found)

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
        if self._reads:
            self.check_contents(tensors, lengths)
        if self._disjoint is not None:
            self._disjoint.check(tensors, places)
        if before is not None:
            before()
        if self.wide:
            tensors = self._narrowed(tensors)
            places = tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])
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

    def check_contents(self, tensors: Sequence[Tensor | None], lengths: calls.Lengths) -> None:
        """Raise if index tensors do not hold what they must. Where a plan serves all sizes, it was found by them."""
        if not self._reads:
            return
        operands = Operands(*tensors)  # type: ignore[arg-type]
        if self._contents is None:
            validation.check_contents(operands, self.flags)
        elif self._contents.bounds(tensors, lengths) is None:
            validation.problem_of(self.kind, operands, self.flags)

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
        self, given: tuple[Any, ...], needs: tuple[bool, ...], lengths: calls.Lengths
    ) -> Sequence[Tensor | None]:
        """The gradient of each tensor that `needs` one, for autograd. `given` is dout, dlse, out, lse and then the
        call's tensors.
        """
        # With create_graph=True the op is called, whose autograd has the second derivatives. Modes must see the op.
        by_op = torch.is_grad_enabled() or bool(torch._C._len_torch_dispatch_stack())  # noqa: SLF001
        # With is_grads_batched=True the gradients are batched wrappers, which only the op accepts.
        by_op = by_op or not (calls.are_plain(given[:2]) and calls.are_stored(given[:2]))
        is_dual = forward_ad._current_level >= 0 and derivatives.is_dual(given)  # noqa: SLF001
        if not by_op and not is_dual:
            return self.differentiated(given, needs, lengths)
        flags, wanted = self.flags.with_lengths(lengths), wanted_of(needs)
        if is_dual:
            found = derivatives.gradients_of_dual(self.kind, flags, given, wanted)
        else:
            dout, dlse, out, lse, *tensors = given
            found = backward(At(self.kind, Operands(*tensors), flags), (out, lse), (dout, dlse), wanted)
        return scattered(found, wanted, len(needs))

    def differentiated(
        self, given: tuple[Any, ...], needs: tuple[bool, ...], lengths: calls.Lengths, traced: bool = False
    ) -> Sequence[Tensor | None]:
        """The gradient of each tensor that `needs` one, of tensors that hold their own data. `given` as in
        `gradients`.
        """
        if (tracing.profiler._is_profiler_enabled or self._nvtx) and not traced:  # noqa: SLF001
            problem = self.problem_of(given[4:], lengths)
            with tracing.span(tracing.BACKWARD, given[4:], self._chosen.backend.name, problem):
                return self.differentiated(given, needs, lengths, True)
        if self.wide:
            given = (*given[:4], *self._narrowed(given[4:]))
        known = self._backward(given, needs, lengths) if self._lasting else None
        if known is not None:
            slot, places, sized, _ = known
            backward_pass: _BoundBackward = slot
            made = backward_pass.bound(given, places, sized or None)
            if made is not None:
                return [None if place is None else made[place] for place in backward_pass.results]
        else:
            check_there(_GIVEN, given)
        dout, dlse, out, lse, *tensors = given
        problem, wanted = self.problem_of(tensors, lengths), wanted_of(needs)
        found = _run_backward(problem, self._chosen, Operands(*tensors), out, lse, dout, dlse, wanted)
        return scattered(found, wanted, len(tensors))

    def _narrowed(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Every index tensor as int32, contiguous. Contents were validated before the conversion."""
        if not self.wide:
            return tensors
        whole = torch.contiguous_format
        return [t.to(torch.int32, memory_format=whole) if i in self.wide else t for i, t in enumerate(tensors)]

    def _bound_forward(self, problem: AttentionProblem, operands: Operands) -> Bound | None:
        """The pass of the backend; `operands` may be those of a trace."""
        backend = self._chosen.backend
        if problem.is_traced and problem.max_logits:
            sketch = Sketch((problem.num_heads,), (1,), 0, problem.accumulate_dtype, operands.q.device, 0)
            operands = operands._replace(max_logits=cast("Tensor", sketch))
        if problem.is_traced and _chosen_for(problem, operands, self.flags).backend is not backend:
            return None  # never so: the choice is made again to be recorded
        if self._use == "backward":
            return _NoPass()
        ready = canonical(problem, operands)
        if _is_moved(operands, ready):
            return None
        bound = backend.bind_forward(problem, ready, want_lse=self.return_lse or self.flags.needs_grad)
        # A pass that allocates its own `out` would need a copy in every call, which the general path makes.
        return None if bound is not None and operands.out is not None and "out" in bound.made else bound

    def _backward(
        self, given: tuple[Any, ...], needs: tuple[bool, ...], lengths: calls.Lengths
    ) -> tuple[Any, calls.Places | None, Any, calls.Lengths] | None:
        """(pass, addresses, what it needs for these sizes, bounds on lengths) of a backward."""
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
        names = _GIVEN[: len(given)]
        form = calls.form_of(forms, given, _open_sizes(self.kind, self.flags, names, given))
        if not form.is_due():
            return None
        if self._problem_for is not None:
            flags = self.flags.with_lengths(lengths)
            prepare = functools.partial(self._bound_backward, wanted_of(needs))
            found = _opened(self.kind, names, given, flags, prepare)
        if found is not None:
            _, bound, measure, sized = found
        else:
            problem = self.problem_of(given[4:], lengths)
            bound = self._bound_backward(wanted_of(needs), problem, given)
            measure, sized = _exactly(given, lengths), None
        if bound is None:
            return None
        made = bound.made
        wanted = zip(("dq", "dk", "dv"), needs, strict=False)
        results = [made.index(name) if need and name in made else None for name, need in wanted]
        new = _BoundBackward(bound, (*results, *[None] * (len(needs) - len(results))))
        form.add(measure, new)
        return new, None, sized, lengths

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


class _NoPass:
    """The forward pass of a call that is only asked for its gradients."""

    made = ()

    def __call__(self, *_: Any) -> None:
        """Makes nothing."""

    def open(self, trace: Trace) -> Callable[..., Any]:
        """See tilewise.backends.base.Bound."""
        from tilewise.native import Filled

        return Filled(trace, ())


class _BoundBackward(NamedTuple):
    """A cached backward pass. `results[i]` is the index of operand i's gradient among the tensors that it makes."""

    bound: Bound
    results: tuple[int | None, ...]


class _Opened(NamedTuple):
    """A pass that serves all sizes to which its trace applies: the problem for any sizes, the pass, the function that
    computes what it needs, and the result for the first sizes.
    """

    problem_for: Filled
    bound: Bound
    measure: calls.Measure
    sized: Any


def _open_sizes(kind: Kind, flags: Flags, names: Sequence[str], tensors: Sequence[Tensor | None]) -> list[list[bool]]:
    """Which sizes of each tensor may differ between calls of one form: the same for each of its plans, which rely on it
    for the others.
    """
    return [
        [] if tensor is None else validation.open_sizes(kind, flags.layout, name, tensor.dim())
        for name, tensor in zip(names, tensors, strict=True)
    ]


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
    from tilewise.native import Filled  # not with the package: it imports ctypes

    present = [_traced(name, t) for name, t in zip(names, tensors, strict=True) if t is not None]
    trace = Trace(present, LENGTHS)
    is_open = _open_sizes(kind, flags, names, tensors)
    sketches = [
        None if t is None else _sketched(trace, name, t, opened)
        for name, t, opened in zip(names, tensors, is_open, strict=True)
    ]
    bounds = [
        None if value is None else trace.length(name, value) for name, value in zip(LENGTHS, flags.lengths, strict=True)
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
    if bound is None or opened is None:
        return None
    measure = opened(trace)
    sized = measure([tensor for tensor in tensors if tensor is not None], flags.lengths)
    # A plan does not apply to sizes of more than 64 bits, not even to its own.
    return None if sized is None else _Opened(Filled(trace, problem), bound, measure, sized)


def _traced(name: str, tensor: Tensor) -> str:
    """The name of a tensor in a trace. An int64 index tensor is converted before the pass, into memory of its own: the
    trace has the address of what is given, not of what the pass reads.
    """
    return f"{name} in int64" if name in COUNTS and tensor.dtype == torch.int64 else name


def _sketched(trace: Trace, name: str, tensor: Tensor, is_open: Sequence[bool]) -> Sketch:
    """The tensor of a trace, as the pass gets it."""
    given = _traced(name, tensor)
    sketch = Sketch.of(trace, given, tensor, is_open)
    if given == name:
        return sketch
    strides = (1,) if len(sketch.shape) == 1 else (sketch.shape[1], 1)
    return Sketch(sketch.shape, strides, 0, torch.int32, sketch.device, sketch.get_device())


def _exactly(given: Sequence[Any], lengths: calls.Lengths) -> calls.Measure:
    """For passes whose sizes are not open: nothing is needed for tensors with the signature of these, and no others
    are taken.
    """
    signature = calls.Signature([tensor for tensor in given if tensor is not None])
    return lambda tensors, others: () if others == lengths and signature.matched(tensors) is not None else None


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


def _found(
    kind: Kind,
    operands: Operands,
    flags: Flags,
    slot: calls.Slot | None = None,
    *,
    return_lse: bool = True,
    use: Use = "record",
) -> tuple[Call, calls.Places | None, Any, calls.Lengths]:
    """The call that computes these operands, and what `calls.slot_of` says of it. Without a `slot`, one is looked up by
    the flags: for ops, and for calls that autocast has converted or whose options were no key.
    """
    if slot is None:
        key = kind, return_lse, use, *[flags[i] for i in _MEANING]
        slot, places, sized, bounds = calls.slot_of(operands, key, lengths=flags.lengths)
        if slot is not None and slot.call is not None:
            return cast("Call", slot.call), places, sized, bounds
    call = Call(kind, operands, flags, return_lse=return_lse, lasting=slot is not None, use=use)
    sized = None if slot is None else call.prepared(operands, slot)
    return call, None, sized, call.flags.lengths


def _computed(kind: Kind, operands: Operands, flags: Flags) -> tuple[Tensor, ...]:
    """(out, lse), and max_logits if they are wanted, of an op."""
    with torch._C._ExcludeDispatchKeyGuard(_BELOW):  # noqa: SLF001
        call, places, sized, bounds = _found(kind, operands, flags, use="op")
        return cast("tuple[Tensor, ...]", call(operands, places, sized, None, bounds))


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
    return _computed(kind, *unpack(kind, args))[:count]


def _forward_out(kind: Kind, *args: Any) -> tuple[Tensor, Tensor]:
    operands, flags = unpack(kind, args[:-1])
    operands = operands._replace(out=args[-1])
    validation.check_result(operands)
    _, lse, *logits = _computed(kind, operands, flags)
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
    needs = [False] * len(Operands._fields)
    for place, want in zip(INDICES, wanted, strict=True):
        needs[place] = want
    with torch._C._ExcludeDispatchKeyGuard(_BELOW):  # noqa: SLF001
        call, *_, bounds = _found(kind, operands, flags, use="backward")
        call.check_contents(operands, bounds)
        found = call.differentiated((dout, dlse, out, lse, *operands), tuple(needs), bounds)
        gradients = Gradients(*[found[place] for place in INDICES])
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
    for suffix in ("", "_logits"):
        derivatives.differentiate(library, kind, suffix, _save, _autograd)
    for suffix, asked in (("out", "out="), ("logits", "return_max_logits=True")):
        refuse_it = functools.partial(lambda name, *_: _refuse_transforms(name, dual=True), asked)
        library.impl(f"{kind}_{suffix}", refuse_it, "FuncTorchBatched")
    rule = functools.partial(batching.vmapped, operand_names(kind), kind, "")
    torch.library.register_vmap(f"tilewise::{kind}", rule, lib=library)
    derivatives.register(library, kind)


# The library must live as long as the process: dropping it would unregister the ops.
_LIBRARY = torch.library.Library("tilewise", "DEF")
for _kind in OPERANDS:
    _register(_LIBRARY, _kind)
