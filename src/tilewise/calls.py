"""Calls seen before: what was judged, chosen and prepared for one serves every later one that looks the same.

A call looks the same if its flags, all that torch knows of its tensors but their addresses and contents, and what else
the answer depends on (recording of gradients, determinism, settings, a device spelt out) are equal. Then a GPU call is
a look-up here, the making of its results, and the launch. What watches calls (compilers, modes, transforms, subclasses
of Tensor) sees none of this.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._device import DeviceContext

from tilewise import device, settings

__all__ = ["MAX_CALLS", "Look", "Places", "Slot", "are_plain", "forget", "is_watched", "slot_of"]

# Kept at a time: 3 KiB each, on a GPU 19 with a forward pass for one set of addresses and 50 with a backward. What is
# laid out for more addresses is bounded for all calls together (backends/gpu/launching.py).
MAX_CALLS, MAX_FAMILIES = 1024, 256
# Alignment of addresses that kernels are told apart by, in bytes.
ALIGNMENT = 16
NUMBERS = (float, int, bool)
INTEGERS, SIDES = frozenset((int,)), frozenset((int, type(None)))
# What is behind torch's own wrappers, which take longer.
_num_function_modes = torch._C._len_torch_function_stack  # noqa: SLF001
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled  # noqa: SLF001
_is_deterministic = torch._C._get_deterministic_algorithms  # noqa: SLF001
_address = Tensor.data_ptr

Result = Tensor | tuple[Tensor, Tensor]
# Addresses.
Places = tuple[int, ...]
# What `slot_of` finds.
Found = tuple["Slot | None", Places | None]
NOTHING: Found = (None, None)


class Look:
    """How tensors look: all that torch knows of them but their addresses and contents, compared in one call.

    Dynamo's guards do that in C: 0.6 us for three tensors, while asking for shapes, strides and so on and hashing them
    takes 3.5. They compare the dispatch keys in force too, so tensors never fit while a mode or a transform is active.
    Addresses lie as far behind a multiple of ALIGNMENT as those seen first: 4 and 8 bytes in the hint of a shared
    prefix cut out of one tensor, whose calls took 24.8 us of an x86 host instead of 13.4 when such ones never fitted.
    """

    __slots__ = ("_absent", "_check", "_count", "_distinct", "_offsets", "_present", "_twins")

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._count = len(tensors)
        places = [i for i, tensor in enumerate(tensors) if tensor is not None]
        absent = [i for i, tensor in enumerate(tensors) if tensor is None]
        self._absent = _picker(absent) if absent else None
        self._present = _picker(places)
        present = [tensor for tensor in tensors if tensor is not None]
        # The guards take no tensor twice.
        firsts = [next(j for j, other in enumerate(present) if other is tensor) for tensor in present]
        self._twins = [(i, j) for i, j in enumerate(firsts) if i != j]
        self._distinct = _picker(sorted(set(firsts)))
        distinct = self._distinct(present)
        self._offsets = [tensor.data_ptr() % ALIGNMENT for tensor in present]
        guards: Any = torch._C._dynamo.guards  # noqa: SLF001
        self._check = guards.TensorGuards(
            *distinct,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in distinct],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in distinct],
        ).check

    def places(self, tensors: Sequence[Any]) -> Places | None:
        """The addresses of those that are there, if these surely look the same; else None."""
        if len(tensors) != self._count:
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
        # The guards end the process at a nested tensor, which has no strides.
        for tensor in distinct:
            if tensor is None or tensor.is_nested:
                return None
        if not self._check(*distinct):
            return None
        places = tuple(map(_address, tensors))
        return places if [place % ALIGNMENT for place in places] == self._offsets else None


def _picker(places: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    return operator.itemgetter(*places) if len(places) > 1 else lambda values: tuple([values[i] for i in places])


class Slot:
    """The place of calls that look the same and hint at the same `groups` of sequences; `call` is None until one was
    judged, and stays so if each must be: `is_tried` says that this is known.
    """

    __slots__ = ("call", "groups", "is_tried", "look")

    def __init__(self, groups: Any) -> None:
        self.call: Callable[..., Result] | None = None
        self.look: Look | None = None
        self.groups, self.is_tried = groups, False


class Family:
    """Calls with equal flags; `last` is the slot of the latest, most often of the next one too."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: Slot | None = None


def are_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Whether these hold their own numbers: none is a fake, of a subclass, or stands for the examples of a vmap."""
    return all(
        t is None or ((type(t) is Tensor or type(t) is Parameter) and not t.is_meta and not _is_wrapped(t))
        for t in tensors
    )


def _is_wrapped(tensor: Tensor) -> bool:
    """By torch.func, or by the older vmap that `is_grads_batched=True` is made of."""
    functorch = torch._C._functorch  # noqa: SLF001
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def is_watched() -> bool:
    """Whether something beside autograd watches what happens now: compilers, vmap, modes, torch.jit.trace."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()  # noqa: SLF001
        or torch._C._len_torch_dispatch_stack()  # noqa: SLF001
        or torch._C._is_tracing()  # noqa: SLF001
        or (torch._C._len_torch_function_stack() and _function_modes_watch())  # noqa: SLF001
    )


def _function_modes_watch() -> bool:
    """A default device is a mode, too, but only says where tensors are made that do not say it themselves.

    Taken for a watcher, `torch.set_default_device` made a call of 30 us one of 170, and one of 53 with autograd of 710.
    """
    modes = [torch._C._get_function_stack_at(i) for i in range(_num_function_modes())]  # noqa: SLF001
    return any(type(mode) is not DeviceContext for mode in modes)


def slot_of(
    tensors: Sequence[Any], *key: Any, dropout: Any = 0.0, seed: Any = None, window: Any = None, groups: Any = None
) -> Found:
    """The slot of a call, None for one that is not remembered: then there may be anything among the arguments. With it
    come the addresses of the tensors that are there, if it was found at once.

    `tensors` are in the order of `Operands`, without the Nones at its end; `key` is what else tells calls apart. Of
    that `dropout`, `seed` and `window` are looked at: a call with dropout draws or has a seed, and is not remembered.
    `groups`, the numbers of a shared prefix, change from step to step: in the key they would drive other calls out.
    """
    # Other compilers are at work under modes, in which no look fits; of a tensor's tangent no look knows.
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
        # 4.0 equals a 4 seen before, and is to be refused all the same.
        if window is not None and not SIDES.issuperset(map(type, window)):
            return NOTHING
        family = _family(
            torch.is_grad_enabled(),
            _is_deterministic(),
            current.backend,
            current.check_values,
            current.nvtx,
            device.override(),
            # Whether a prefix is attended apart is a question of cost, which counts the threads.
            None if groups is None else torch.get_num_threads(),
            *key,
        )
        last = family.last
        # So are numbers of floats and plain tuples in the place of a Group; a step hands out the same groups.
        if groups is not None and (last is None or last.groups is not groups) and not _are_plain(groups):
            return NOTHING
        if last is not None and last.look is not None and (last.groups is groups or last.groups == groups):
            places = last.look.places(tensors)
            if places is not None:
                return last, places
        return NOTHING if is_watched() else (_looked_up(family, tensors, groups), None)
    # A flag that has no hash, a tensor without strides or memory, no tensor: judged every time.
    except (TypeError, RuntimeError, AttributeError):
        return NOTHING


def _are_plain(groups: Any) -> bool:
    return tuple not in map(type, groups) and INTEGERS.issuperset(map(type, itertools.chain.from_iterable(groups)))


def _looked_up(family: Family, tensors: Sequence[Any], groups: Any) -> Slot | None:
    looks: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            looks.append(None)
        elif (type(tensor) is Tensor or type(tensor) is Parameter) and not (tensor.is_neg() or tensor.is_nested):
            looks += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
            looks.append(tensor.data_ptr() % ALIGNMENT)
        else:
            return None
    slot = _slot(family, groups, *looks)
    # Made anew where tensors equal in all this do not fit: under autocast, in inference mode, others of them the same.
    if slot.look is None or slot.look.places(tensors) is None:
        slot.look = Look(tensors)
    family.last = slot
    return slot


def _is_cast(tensors: Sequence[Any]) -> bool:
    """Whether autocast would make other tensors of these."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            return True
        kind = tensor.device.type
        if kind == "meta" or (torch.is_autocast_enabled(kind) and tensor.dtype != torch.get_autocast_dtype(kind)):
            return True
    return False


# Typed, so that causal=1 is not taken for the causal=True seen before.
@functools.lru_cache(maxsize=MAX_FAMILIES, typed=True)
def _family(*flags: Any) -> Family:
    del flags
    return Family()


@functools.lru_cache(maxsize=MAX_CALLS)
def _slot(family: Family, groups: Any, *looks: Any) -> Slot:
    del family, looks
    return Slot(groups)


def forget() -> None:
    """Forget every call: who computes it may have changed."""
    _family.cache_clear()
    _slot.cache_clear()
