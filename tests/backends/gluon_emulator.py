"""A stand-in for Gluon on the CPU: roles as threads, mbarriers, TMA, wgmma that runs as late as it may.

It is adversarial where the hardware may be: shared memory starts as NaN, a product reads its operands only when
somebody waits for it, a TMA store reads its buffer only at the wait for it, and TMA loads land at once or, in the other
mode, late.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
import math
import random
import re
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from emulated_asm import computed
from emulated_memory import Box, Descriptor, Memory, Pointer, pointed
from emulated_order import Clock, Written, later

HERE = threading.local()
DEADLOCK_S = 20.0
# How late loads land at most, where they are late.
LATE_S = 1e-3
PACKAGE, SHARED = "tilewise.backends.hopper", "tilewise.backends.gpu"


class Grid:
    """What the threads of a launch share: the first error stops them all."""

    def __init__(self, programs: int, late_loads: bool) -> None:
        self.programs, self.late_loads, self.errors = programs, late_loads, list[BaseException]()
        self.atomics = threading.Lock()
        self.written = Written()

    def wait(self, condition: threading.Condition, ready: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLOCK_S
        while not condition.wait_for(ready, timeout=0.05):
            if self.errors:
                raise RuntimeError("another role failed")
            if time.monotonic() > end:
                raise RuntimeError(f"deadlock: {what}")

    def spawn(self, calls: list[Callable[[], None]]) -> None:
        """Run the calls side by side, each knowing its place in the launch."""
        place, parent = dict(vars(HERE)), getattr(HERE, "clock", None)
        clocks = [self.written.clock(parent) for _ in calls]

        def run(call: Callable[[], None], clock: Clock) -> None:
            vars(HERE).update(place, products=[], stores=[], landing=[], clock=clock)
            try:
                call()
                assert not HERE.stores, "a role ended with a TMA store in flight"
                await_writes()
            except BaseException as error:
                self.errors.append(error)

        pairs = zip(calls, clocks, strict=True)
        threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class Device:
    """A jitted function: called by others on the device, or launched with kernel[grid](...)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @property
    def arg_names(self) -> list[str]:
        return list(inspect.signature(self.function).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else lambda *args: self.function(instance, *args)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Device]:
        def launch(*args: Any, num_warps: int = 4) -> Device:
            del num_warps
            for z, y in itertools.product(range(grid[2]), range(grid[1])):
                state = Grid(grid[0], MODE.late_loads)
                arguments = [pointed(a) for a in args]

                def program(x: int, yz: Any = (y, z), state: Grid = state, arguments: list[Any] = arguments) -> None:
                    vars(HERE).update(grid=state, program=(x, *yz), programs=grid, named=NamedBarriers())
                    self.function(*arguments)

                HERE.__dict__.clear()
                for first in range(0, grid[0], 8):  # enough CTAs at once to hand tiles around, few enough threads
                    state.spawn([functools.partial(program, x) for x in range(first, min(first + 8, grid[0]))])
                    if state.errors:
                        raise next((e for e in state.errors if "another role" not in str(e)), state.errors[0])
            return self

        return launch


class EmulatedLaunch:
    """A prepared launch: the call's kernel is run with real tensors in the place of addresses."""

    is_direct = False

    def __init__(self, call: Any, *device: Any) -> None:
        del device
        self.call, self.described = call, (call.grid,)

    def start(self, stream: int, tensors: dict[str, Tensor]) -> None:
        del stream
        call = self.call
        materialised = importlib.import_module(f"{SHARED}.symbols").materialised
        call.kernel[call.grid](*(materialised(argument, tensors) for argument in call.ordered))


MODE = types.SimpleNamespace(late_loads=False)


class Barrier:
    """An mbarrier: completes a phase when all arrivals and all announced bytes are in."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.bytes = self.parity = 0
        self.published: dict[int, int] = {}

    def arrive(self, arrivals: int, announced: int = 0) -> None:
        with self.changed:
            if arrivals:  # by thread 0, behind a barrier of its role
                HERE.clock.meet()
                self.published = later(self.published, HERE.clock.published())
            self.missing -= arrivals
            self.bytes += announced
            assert self.missing >= 0, "more arrivals at an mbarrier than its count"
            if self.missing == 0 and self.bytes == 0:
                self.parity ^= 1
                self.missing = self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            HERE.grid.wait(self.changed, lambda: self.parity != parity, "mbarrier")
            HERE.clock.hear(self.published)


class NamedBarriers:
    """bar.sync and bar.arrive of a CTA."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.inside: dict[int, int] = {}
        self.rounds: dict[int, int] = {}
        self.published: dict[int, int] = {}

    def join(self, index: int, threads: int, *, waits: bool) -> None:
        with self.changed:
            HERE.clock.meet()
            self.published = later(self.published, HERE.clock.published())
            now = self.rounds.get(index, 0)
            self.inside[index] = self.inside.get(index, 0) + 128
            if self.inside[index] == threads:
                self.inside[index], self.rounds[index] = 0, now + 1
                self.changed.notify_all()
            elif waits:
                HERE.grid.wait(self.changed, lambda: self.rounds.get(index, 0) > now, "named barrier")
            if waits:
                HERE.clock.hear(self.published)


class Slots:
    """An array of mbarriers, or one."""

    def __init__(self, barriers: list[Barrier]) -> None:
        self.barriers = barriers

    def index(self, i: Any) -> Slots:
        return Slots([self.barriers[int(i)]])

    @property
    def one(self) -> Barrier:
        assert len(self.barriers) == 1
        return self.barriers[0]


class Product:
    """A wgmma that has been issued: runs when waited for."""

    def __init__(self, a: Any, b: Memory, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.result: Tensor | None = None

    def run(self) -> None:
        a = self.a.data if isinstance(self.a, Memory) else self.a
        self.result = a.float() @ self.b.data.float()
        if self.use_acc:
            self.result = self.result + (self.acc.finished() if isinstance(self.acc, Product) else self.acc)

    def finished(self) -> Tensor:
        assert self.result is not None, "a product's result is read before the wait for it"
        return self.result


def issue(a: Any, b: Memory, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    product = Product(a, b, acc, use_acc)
    HERE.products.append(product)
    return product


def wait_products(pending: int, deps: list[Any]) -> Any:
    if not HERE.grid.late_loads:
        time.sleep(2e-3)  # loads land at once: give the producer time to overwrite what is still to be read
    while len(HERE.products) > pending:
        HERE.products.pop(0).run()
    results = tuple(d.finished() if isinstance(d, Product) else d for d in deps)
    return results[0] if len(results) == 1 else results


def load_box(desc: Descriptor, corner: list[Any], barrier: Slots, target: Memory) -> None:
    grid = HERE.grid
    corner = [int(x) for x in corner]  # what a role counts on in place is known when the copy starts
    box = desc.box(corner)
    read(desc.base, box)

    def land() -> None:
        values = box.values
        if box.sizes != desc.block_shape:
            values = torch.zeros(desc.block_shape, dtype=desc.dtype)
            values[box.inside] = box.values
        target.data.copy_(values.reshape(target.data.shape))
        barrier.one.arrive(0, -desc.block_type.nbytes)

    def land_late() -> None:
        time.sleep(random.random() * LATE_S)
        try:
            land()
        except AssertionError as error:
            grid.errors.append(error)

    if grid.late_loads:
        threading.Thread(target=land_late, daemon=True).start()
    else:
        land()


def store_box(desc: Descriptor, corner: list[Any], source: Memory, add: bool = False) -> None:
    box = desc.box(corner)

    def land(values: Tensor) -> None:
        HERE.grid.written.write(HERE.clock, desc.base, box.places, adds=add)
        with HERE.grid.atomics:
            box.values.copy_(values + (box.values if add else 0))

    HERE.stores.append(lambda: HERE.landing.append((land, source.data.view(desc.block_shape)[box.inside].clone())))


def store_wait(pending: int) -> None:
    """The buffers of all but the last ones are read; what was in them arrives whenever it likes."""
    while len(HERE.stores) > pending:
        HERE.stores.pop(0)()


def await_writes(pending: int = 0) -> None:
    """All but the last ones have arrived."""
    while len(HERE.landing) + len(HERE.stores) > pending:
        if not HERE.landing:
            HERE.stores.pop(0)()
        land, values = HERE.landing.pop(0)
        land(values)


def assembly(
    text: str, constraints: str, args: list[Any], dtype: Any = None, is_pure: bool = True, pack: int = 1
) -> Any:
    del constraints, is_pure, pack
    if found := re.match(r"bar\.(sync|arrive) (\d+|\$1), (\d+);", text):
        index = int(args[0]) if found.group(2) == "$1" else int(found.group(2))
        HERE.named.join(index, int(found.group(3)), waits=found.group(1) == "sync")
    if found := re.match(r"cp\.async\.bulk\.wait_group (\d)", text):
        await_writes(int(found.group(1)))
    if text.startswith("ld.acquire"):
        return poll(args[0])
    if "st.global" in text:  # NaN for rows that are not finite
        store(args[3] + args[2].expand(args[0].shape)[~args[0].isfinite()].unique(), math.nan)
    return computed(text, args, dtype)


def atomic(change: Callable[[Any, Any], Any]) -> Callable[[Pointer, Any], Tensor]:
    def run(pointer: Pointer, operand: Any, sem: str = "acq_rel") -> Tensor:
        places, old = torch.as_tensor(pointer.offset), []
        with HERE.grid.atomics:
            for place, x in zip(places.flatten().tolist(), torch.as_tensor(operand).flatten(), strict=True):
                HERE.grid.written.atomic(HERE.clock, pointer.tensor, place, sem)
                old.append(pointer.flat[place].clone())
                pointer.flat[place] = change(old[-1], x)
        return torch.stack(old).reshape(places.shape)

    return run


def read(tensor: Tensor, places: Tensor | Box) -> None:
    """Some elements are read; a device function that is called outside of a launch has nobody beside it."""
    if hasattr(HERE, "clock"):
        HERE.grid.written.read(HERE.clock, tensor, places)


def load(pointer: Pointer, mask: Any = None, other: Any = 0.0, **caching: str) -> Tensor:
    del caching
    offsets = torch.as_tensor(pointer.offset)
    if mask is None or torch.as_tensor(mask).all():
        read(pointer.tensor, offsets)
        return pointer.flat[offsets].clone()
    mask = torch.broadcast_to(torch.as_tensor(mask), offsets.shape)
    read(pointer.tensor, offsets[mask])
    values = torch.as_tensor(other, dtype=pointer.tensor.dtype).broadcast_to(offsets.shape).clone()
    values[mask] = pointer.flat[offsets[mask]]
    return values


def poll(pointer: Pointer) -> Tensor:
    """What lies there now, for a role that asks until it is something else."""
    time.sleep(1e-4)  # the others work meanwhile
    if HERE.grid.errors:
        raise RuntimeError("another role failed")
    with HERE.grid.atomics:
        HERE.grid.written.atomic(HERE.clock, pointer.tensor, int(pointer.offset), "acquire")
        value = pointer.flat[int(pointer.offset)].clone()
    seen = int(pointer.offset), int(value)
    if seen != vars(HERE).get("seen"):
        HERE.seen, HERE.since = seen, time.monotonic()
    if time.monotonic() - HERE.since > DEADLOCK_S:
        raise RuntimeError("deadlock: polling")
    return value


def store(pointer: Pointer, value: Any, mask: Any = None, eviction_policy: str = "") -> None:
    del eviction_policy
    offsets = torch.as_tensor(pointer.offset)
    value = torch.as_tensor(value).to(pointer.tensor.dtype).expand(offsets.shape)
    if mask is not None:
        keep = torch.broadcast_to(torch.as_tensor(mask), offsets.shape)
        offsets, value = offsets[keep], value[keep]
    HERE.grid.written.write(HERE.clock, pointer.tensor, offsets)
    pointer.flat[offsets] = value


def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if isinstance(layout, BarrierLayout):
        return Slots([Barrier() for _ in range(shape[0])])
    return Memory(torch.full(shape, math.nan if dtype.is_floating_point else -7, dtype=dtype))


def specialize(roles: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    assert len(warps) == len(registers) == len(roles) - 1
    HERE.grid.spawn([functools.partial(role, *args) for role, args in roles])
    if HERE.grid.errors:
        raise HERE.grid.errors[0]


class Layout:
    """Any layout: values have no layout here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @classmethod
    def get_default_for(cls, *args: Any) -> Layout:
        return cls(*args)


class BarrierLayout(Layout): ...


def jit(function: Any = None, **options: Any) -> Any:
    return Device(function) if function is not None else jit


def init_barrier(slots: Slots, count: int) -> None:
    slots.one.count = slots.one.missing = count


def elementwise(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: f(torch.as_tensor(a), torch.as_tensor(b))


def cast(x: Any, dtype: torch.dtype, bitcast: bool = False) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.view(dtype) if bitcast else x.to(dtype)


LAYOUTS = [
    "NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "NVMMASharedLayout", "BlockedLayout",
    "SwizzledSharedLayout", "DistributedLinearLayout",
]  # fmt: skip
LANGUAGE: dict[str, Any] = {
    **dict.fromkeys(("tensor", "tuple", "shared_memory_descriptor", "dtype"), object),
    **{name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "int8", "int32", "int64", "log2")},
    **dict.fromkeys(LAYOUTS, Layout),
    "constexpr": lambda x: x,
    "to_tensor": torch.as_tensor,
    "zeros": lambda shape, dtype, _=None: torch.zeros(shape, dtype=dtype),
    "full": lambda shape, value, dtype, _=None: torch.full(shape, value, dtype=dtype),
    "arange": lambda begin, end, _=None: torch.arange(begin, end, dtype=torch.int32),
    "where": lambda condition, a, b: torch.where(torch.as_tensor(condition), a, b),
    "maximum": elementwise(torch.maximum),
    "minimum": elementwise(torch.minimum),
    "max": lambda x, axis: x.amax(axis),
    "min": lambda x, axis: x.amin(axis),
    "sum": lambda x, axis: x.sum(axis),
    "reduce": lambda x, axis, _: x.select(axis, 0),  # of equal elements
    "associative_scan": lambda x, axis, _: x.cumsum(axis),  # sums are all that is scanned
    "debug_barrier": lambda: HERE.clock.meet(),
    "dot": lambda a, b, acc=0.0: a.float() @ b.float() + acc,
    "reshape": lambda x, shape: x.reshape(shape),
    "broadcast_to": lambda x, shape: x.expand(shape),
    "permute": lambda x, order: x.permute(*order),
    "join": lambda a, b: torch.stack((a, b), -1),
    "split": lambda x: x.unbind(-1),
    "convert_layout": lambda x, _, **_asserted: x,
    "trans": lambda x: x.T,
    "broadcast": torch.broadcast_tensors,
    "float8e4nv": torch.float8_e4m3fn,
    "cast": cast,
    "abs": torch.abs,
    "fma": lambda x, y, z: (x.double() * y.double() + torch.as_tensor(z).double()).float(),
    "sqrt": torch.sqrt,
    "exp2": torch.exp2,
    "cdiv": lambda a, b: int((a + b - 1) / b),  # truncates, as the hardware does
    "load": load,
    "store": store,
    "program_id": lambda axis: torch.tensor(HERE.program[axis]),
    "num_programs": lambda axis: HERE.programs[axis],
    "static_range": range,
    "inline_asm_elementwise": assembly,
    "atomic_add": atomic(lambda old, x: old + x),
    "atomic_max": atomic(lambda old, x: torch.maximum(old, torch.as_tensor(x, dtype=old.dtype))),
    "atomic_xchg": atomic(lambda _, x: x),
    "allocate_shared_memory": allocate,
    "warp_specialize": specialize,
}  # fmt: skip
HOPPER: dict[str, Any] = {
    "mbarrier": types.SimpleNamespace(
        MBarrierLayout=BarrierLayout,
        init=init_barrier,
        wait=lambda slots, parity: slots.one.wait(int(parity)),
        arrive=lambda slots, count=1: slots.one.arrive(count),
        expect=lambda slots, count: slots.one.arrive(1, count),
    ),
    "tma": types.SimpleNamespace(store_wait=store_wait),
    "fence_async_shared": lambda: None,
    "warpgroup_mma": issue,
    "warpgroup_mma_wait": wait_products,
}
MODULES: dict[str, dict[str, Any]] = {
    "triton": {
        "jit": jit,
        "knobs": types.SimpleNamespace(runtime=types.SimpleNamespace(interpret=False)),
        "language": types.SimpleNamespace(**LANGUAGE),
        "cdiv": lambda a, b: -(-a // b),
    },
    "triton.language": LANGUAGE,
    "triton.experimental": {"gluon": types.SimpleNamespace(jit=jit, constexpr_function=lambda f: f)},
    "triton.experimental.gluon": {"language": types.SimpleNamespace(**LANGUAGE)},
    "triton.experimental.gluon.language.nvidia.hopper": HOPPER,
    "triton.experimental.gluon.nvidia.hopper": {"TensorDescriptor": Descriptor},
    f"{SHARED}.driver": {"Launch": EmulatedLaunch, "is_hooked": bool, "refused": RuntimeError},
    f"{SHARED}.releases": {
        "aggregate": dataclasses.dataclass,
        "async_load": load_box,
        "async_store": store_box,
        "barrier": lambda: HERE.clock.meet(),
        "name_in_order": bool,
        "reduce_add": lambda desc, corner, source: store_box(desc, corner, source, add=True),
        "reinterpreted": lambda buffer, *args: buffer.reinterpret(*args),
    },
}  # fmt: skip
