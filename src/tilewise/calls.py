"""Finds the plan of a call.

Plans are found by flags and whatever else decides the result (`Family`: grad mode, determinism, settings, a device
override), then by what torch knows of the tensors except sizes and addresses (`Form`). A call that has no plan for all
sizes is kept with its sizes, strides and each address modulo 16 (`Slot`). Calls that something observes (compilers,
modes, transforms, subclasses of Tensor) are not looked up.

Host times behind the choices of this file are in bench/results/host-costs.csv, by name.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._device import DeviceContext

from tilewise import device, settings
from tilewise.memory import LOWEST, are_there
from tilewise.operands import NO_LENGTHS
from tilewise.operands import Lengths as Lengths

# Bounds host memory: a cached call takes a few KiB, more with bound passes.
MAX_CALLS, MAX_FAMILIES = 1024, 256
# Forms of a family, and plans of a form: few are needed, since each serves many sizes.
MAX_FORMS, MAX_PLANS = 16, 32
# Kernels are specialised by the alignment of addresses up to this many bytes.
ALIGNMENT = 16
NUMBERS = (float, int, bool)
PLAIN = (Tensor, Parameter)
INTEGERS, SIDES = frozenset((int,)), frozenset((int, type(None)))
# The C functions behind torch's wrappers, which are slower.
_num_function_modes = torch._C._len_torch_function_stack  # noqa: SLF001
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled  # noqa: SLF001
_is_deterministic = torch._C._get_deterministic_algorithms  # noqa: SLF001
_address = Tensor.data_ptr

Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
# Addresses of tensors.
Places = tuple[int, ...]
# Result of `slot_of`: where the call is cached, the addresses of its tensors, what its plan needs for their sizes, and
# the bounds on its lengths: those that the caller left open may have been read from index tensors.
Found = tuple["Slot | None", Places | None, Any, Lengths]
NOTHING: Found = (None, None, None, NO_LENGTHS)


class Signature:
    """The signature of a list of tensors: all that torch knows of them except addresses and contents, in one
    comparison.

    Dynamo's guards compare in C, which is several times faster than hashing shapes and strides in Python. They also
    compare the active dispatch keys, so nothing matches while a mode or a transform is active. Each address must have
    the same offset modulo ALIGNMENT as at first. Offsets other than 0 are common: the tensors of a shared-prefix hint
    are slices of one allocation.
    """

    __slots__ = ("_absent", "_check", "_distinct", "_filled", "_latent", "_offsets", "_present", "_twins", "count")

    def __init__(self, tensors: Sequence[Tensor | None], is_open: Sequence[Sequence[bool]] | None = None) -> None:
        """`is_open` marks the sizes of each tensor that may differ; then strides and addresses may, too."""
        self.count = len(tensors)
        places = [i for i, tensor in enumerate(tensors) if tensor is not None]
        absent = [i for i, tensor in enumerate(tensors) if tensor is None]
        self._absent = _picker(absent) if absent else None
        self._present = _picker(places)
        present = [tensor for tensor in tensors if tensor is not None]
        # The guards refuse a tensor that is passed twice.
        same = [id(tensor) for tensor in present]
        firsts = [same.index(number) for number in same]
        self._twins = [(i, j) for i, j in enumerate(firsts) if i != j]
        distinct = sorted(set(firsts))
        self._distinct = _picker(distinct)
        sizes: list[list[int | None]] = [list(present[i].shape) for i in distinct]
        strides: list[list[int | None]] = [list(present[i].stride()) for i in distinct]
        # None where all are open.
        self._offsets = [tensor.data_ptr() % ALIGNMENT for tensor in present] if is_open is None else None
        if is_open is not None:
            opened = [is_open[places[i]] for i in distinct]
            sizes = [
                [None if free else n for n, free in zip(s, o, strict=True)] for s, o in zip(sizes, opened, strict=True)
            ]
            strides = [[None] * len(each) for each in strides]
        self._latent = _is_latent([tensor.data_ptr() for tensor in present])
        # Those with elements, which have an address; None if all have some, or none has.
        filled = [i for i, tensor in enumerate(present) if tensor.numel()]
        self._filled = _picker(filled) if 0 < len(filled) < len(present) else None
        guards: Any = torch._C._dynamo.guards  # noqa: SLF001
        self._check = guards.TensorGuards(
            *[present[i] for i in distinct], dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check

    def matched(self, tensors: Sequence[Any]) -> Any:
        """None if the signature does not match. Else the addresses of the tensors that are not None, or, where sizes
        are open, these tensors: their plan reads the rest.
        """
        if len(tensors) != self.count:
            return None
        if self._absent is not None:
            for tensor in self._absent(tensors):
                if tensor is not None:
                    return None
            tensors = self._present(tensors)
        distinct = tensors
        if self._twins:
            for i, j in self._twins:
                if tensors[i] is not tensors[j]:
                    return None
            distinct = self._distinct(tensors)
        # The guards crash the process on a nested tensor, which has no strides.
        for tensor in distinct:
            if tensor is None or tensor.is_nested:
                return None
        if not self._check(*distinct):
            return None
        if self._offsets is None:
            return tensors
        places = tuple(map(_address, tensors))
        # If storage was freed, the call is validated, which names the tensor. Compared here to save a Python call.
        filled = places if self._filled is None else self._filled(places)
        if min(filled) < LOWEST and not are_there(tensors, places):
            return None
        if len(places) > 2 and (places[1] == places[2]) is not self._latent:
            return None
        return places if [place % ALIGNMENT for place in places] == self._offsets else None


def _is_latent(places: Sequence[int]) -> bool:
    """Whether the second and third address, those of k and v, are the same: v may then be a view of k's columns."""
    return len(places) > 2 and places[1] == places[2]


def _picker(places: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    return operator.itemgetter(*places) if len(places) > 1 else lambda values: tuple([values[i] for i in places])


@dataclass(slots=True, eq=False)
class Slot:
    """Cache entry of one signature and one tuple of shared-prefix `groups`. `call` is None until a call was validated,
    and stays None if every call must be: then `is_tried` is set.
    """

    groups: Any
    # Where plans for other sizes are kept; None for calls that have none.
    family: Family | None = None
    lengths: Lengths = NO_LENGTHS
    call: Callable[..., Any] | None = None
    signature: Signature | None = None
    is_tried: bool = False


# Computes what a plan needs for the sizes of tensors (those that are not None) and lengths. None if the plan does not
# apply to them.
Measure = Callable[[Sequence[Any], Lengths], Any]


class Contents(Protocol):
    """The contents of index tensors, which decide whether a call is valid, and on its sizes."""

    def bounds(self, tensors: Sequence[Any], given: Lengths, /) -> Lengths | None:
        """The bounds on lengths, given those that the caller passed. None if the contents are not valid."""


class Form:
    """Calls that differ in sizes and addresses alone, and their plans (tilewise.native)."""

    __slots__ = ("_contents", "_missed", "_plans", "_signature")

    def __init__(
        self, tensors: Sequence[Tensor | None], is_open: Sequence[Sequence[bool]], contents: Contents | None = None
    ) -> None:
        """`contents` are looked at in every call, if that is needed."""
        self._contents = contents
        # Calls without a plan since one was added.
        self._missed = 0
        self._signature = Signature(tensors, is_open)
        self._plans: list[tuple[Measure, Any]] = []

    def add(self, measure: Measure, plan: Any) -> None:
        """A plan, and the function that computes what it needs."""
        self._plans, self._missed = [(measure, plan), *self._plans[: MAX_PLANS - 1]], 0

    def is_due(self) -> bool:
        """Whether to try to make a plan for a call that has none, which takes a millisecond and may fail: for the
        first one since a plan was added, the second, the fourth, the eighth and so on.
        """
        self._missed += 1
        return self._missed & (self._missed - 1) == 0

    def takes(self, tensors: Sequence[Any]) -> bool:
        """Whether such a call is of this form."""
        return self._signature.matched(tensors) is not None

    def find(self, tensors: Sequence[Any], lengths: Lengths) -> tuple[Any, None, Any, Lengths] | None:
        """(plan, no addresses, what the plan needs for these sizes, bounds on lengths) of a call, or None."""
        if not self._plans:
            return None
        present = self._signature.matched(tensors)
        if present is None:
            return None
        if self._contents is not None:
            bounds = self._contents.bounds(tensors, lengths)
            if bounds is None:
                return None
            lengths = bounds
        for known in self._plans:
            measure, plan = known
            sized = measure(present, lengths)
            if sized is not None:
                if known is not self._plans[0]:  # the next call most often uses it, too
                    self._plans = [known, *[other for other in self._plans if other is not known]]
                return plan, None, sized, lengths
        return None


@dataclass(slots=True, eq=False)
class Family:
    """Calls with equal flags. `last` is the slot used last, which the next call most often uses too. A plan for all
    sizes takes several times as long to make as one for a call's own: it is made when sizes differ for the first time.
    """

    last: Slot | None = None
    is_met: bool = False
    forms: list[Form] = field(default_factory=list)


def are_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Whether the tensors hold their own data: none is fake, of a subclass, or a batched wrapper of vmap."""
    return all(t is None or (type(t) in PLAIN and not t.is_meta and not _is_wrapped(t)) for t in tensors)


def are_stored(tensors: Sequence[Tensor | None]) -> bool:
    """Whether memory holds the values. It does not for a negated view, such as `x.conj().imag`, nor for a tensor of
    zeros that autograd made without memory; the dispatcher resolves both.
    """
    return not any(t is not None and (t.is_neg() or t._is_zerotensor()) for t in tensors)  # noqa: SLF001


def _is_wrapped(tensor: Tensor) -> bool:
    """By torch.func, or by the legacy vmap behind `is_grads_batched=True`."""
    functorch = torch._C._functorch  # noqa: SLF001
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def is_seeded(tensors: Sequence[Any], seed: Any) -> bool:
    """Whether the seed of a call with dropout may be made before the call is looked up: nothing but autograd sees it.
    Of e4m3 operands, scales would follow the seed.
    """
    if torch.compiler.is_compiling() or seed.__class__ not in (int, Tensor, type(None)):
        return False
    return tensors[0].__class__ in PLAIN and tensors[2].__class__ in PLAIN and not is_watched()


def is_watched() -> bool:
    """Whether something besides autograd observes calls now: compilers, vmap, modes, torch.jit.trace."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()  # noqa: SLF001
        or torch._C._len_torch_dispatch_stack()  # noqa: SLF001
        or torch._C._is_tracing()  # noqa: SLF001
        or (torch._C._len_torch_function_stack() and _function_modes_watch())  # noqa: SLF001
    )


def _function_modes_watch() -> bool:
    """Whether an active mode observes calls. A default device is a mode too, but only decides where new tensors go.

    So calls under `torch.set_default_device` stay cached; without this they would take the slow path.
    """
    modes = [torch._C._get_function_stack_at(i) for i in range(_num_function_modes())]  # noqa: SLF001
    return any(type(mode) is not DeviceContext for mode in modes)


def slot_of(
    tensors: Sequence[Any],
    key: tuple[Any, ...],
    dropout: Any = 0.0,
    window: Any = None,
    seed: Any = None,
    groups: Any = None,
    lengths: Lengths = NO_LENGTHS,
) -> Found:
    """The slot of a call and the addresses of its tensors that are not None, or NOTHING for a call that is not cached.

    `tensors` are in the order of `Operands`, without trailing Nones; `key` is the rest of the signature. `dropout`,
    `window` and `seed` are inspected: with dropout, a call is cached if its seed is one of the tensors. `groups`, the
    numbers of a shared prefix, change every step, so they are kept out of the flags' key, where they would evict other
    calls. Arguments may be of any type: what cannot be hashed is not cached.
    """
    # Other compilers run under modes, where no signature matches. A signature does not include forward-mode tangents.
    if torch.compiler.is_dynamo_compiling() or (_num_function_modes() and _function_modes_watch()):
        return NOTHING
    if forward_ad._current_level >= 0:  # noqa: SLF001
        return NOTHING
    if seed is not None or dropout.__class__ not in NUMBERS or dropout:
        return NOTHING
    if _is_any_autocast_enabled() and _is_cast(tensors[:3]):
        return NOTHING
    current = settings.current()
    try:
        # 4.0 == 4 would hit the cache, but a float must be refused.
        if window is not None and not SIDES.issuperset(map(type, window)):
            return NOTHING
        if lengths is not NO_LENGTHS and not SIDES.issuperset(map(type, lengths)):
            return NOTHING
        family = _family(
            torch.is_grad_enabled(),
            _is_deterministic(),
            current.backend,
            current.check_values,
            current.nvtx,
            device.override(),
            # The cost rule for shared prefixes depends on the number of threads.
            None if groups is None else torch.get_num_threads(),
            None if lengths is NO_LENGTHS else _are_open(*lengths),
            *key,
        )
        last = family.last
        # Floats and plain tuples would compare equal too, and must be refused. Within a step the groups are the same
        # object.
        if groups is not None and (last is None or last.groups is not groups) and not _are_plain(groups):
            return NOTHING
        if groups is None:
            for form in family.forms:
                found = form.find(tensors, lengths)
                if found is not None:
                    return found
        if last is not None and last.signature is not None and (last.groups is groups or last.groups == groups):
            places = last.signature.matched(tensors)
            if places is not None and last.lengths == lengths:
                return last, places, None, lengths
        return NOTHING if is_watched() else _looked_up(family, tensors, groups, lengths)
    # Unhashable flags, tensors without strides or storage, or no tensors at all: validated on every call.
    except (TypeError, RuntimeError, AttributeError):
        return NOTHING


def _are_open(q: Any, k: Any, mask_q: Any, mask_k: Any) -> tuple[bool, ...]:
    """Which lengths have no bound. Written out, because a call with bounds asks every time."""
    return q is None, k is None, mask_q is None, mask_k is None


def _are_plain(groups: Any) -> bool:
    return tuple not in map(type, groups) and INTEGERS.issuperset(map(type, itertools.chain.from_iterable(groups)))


def _looked_up(family: Family, tensors: Sequence[Any], groups: Any, lengths: Lengths) -> Found:
    looks: list[Any] = []
    places: list[int] = []
    present = [tensor for tensor in tensors if tensor is not None]
    for tensor in tensors:
        if tensor is None:
            looks.append(None)
        elif type(tensor) in PLAIN and are_stored((tensor,)) and not tensor.is_nested:
            looks += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
            places.append(tensor.data_ptr())
            looks.append(places[-1] % ALIGNMENT)
        else:
            return NOTHING
    if not are_there(present, places):
        return NOTHING
    slot = _slot(family, groups, lengths, _is_latent(places), *looks)
    # Rebuilt where the guards reject tensors with an equal key: autocast, inference mode, or other tensors repeated.
    if slot.signature is None or slot.signature.matched(tensors) is None:
        slot.signature = Signature(tensors)
    family.last = slot
    return slot, tuple(places), None, lengths


def _is_cast(tensors: Sequence[Any]) -> bool:
    """Whether autocast would convert any of these."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            return True
        kind = tensor.device.type
        if kind == "meta" or (torch.is_autocast_enabled(kind) and tensor.dtype != torch.get_autocast_dtype(kind)):
            return True
    return False


# Typed, so that causal=1 does not hit the entry of causal=True.
@functools.lru_cache(maxsize=MAX_FAMILIES, typed=True)
def _family(*flags: Any) -> Family:
    del flags
    return Family()


@functools.lru_cache(maxsize=MAX_CALLS)
def _slot(family: Family, groups: Any, lengths: Lengths, *looks: Any) -> Slot:
    del looks
    return Slot(groups, family if groups is None else None, lengths)


def form_of(
    forms: list[Form],
    tensors: Sequence[Any],
    is_open: Sequence[Sequence[bool]],
    contents: Callable[[], Contents] | None = None,
) -> Form:
    """The form of some tensors among others; a new one if there is none, which looks at `contents()`."""
    for form in forms:
        if form.takes(tensors):
            return form
    new = Form(tensors, is_open, None if contents is None else contents())
    forms[:] = [new, *forms[: MAX_FORMS - 1]]
    return new


def forget() -> None:
    """Drop all cached calls, because another backend may compute them now."""
    _family.cache_clear()
    _slot.cache_clear()
