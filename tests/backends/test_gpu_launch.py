"""The host side of a GPU call, without a GPU: what is compiled when, and what reaches the driver.

Tensors on the CPU stand in for those on a GPU and kernels are compiled for an H200 that is not there; Triton's own C
launcher runs, against a driver that launches nothing (fake_cuda).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import tilewise
from fake_cuda import FakeCuda, fake_cuda
from fake_gpus import nothing_prepared
from tilewise import calls, ops, settings, validation
from tilewise import device as devices
from tilewise.backends.hopper import BACKEND as HOPPER
from tilewise.backends.triton import BACKEND as TRITON
from tilewise.backends.triton.configs import SHORT_KEYS
from tilewise.canonical import canonical
from tilewise.operands import NO_LENGTHS, Flags, Operands, Wanted
from tilewise.problem import AttentionProblem
from tilewise.tile_masks import tile_mask
from tilewise.tiles import bits_by_queries, lists_of

__all__ = ["fake_cuda"]

triton = pytest.importorskip("triton", minversion="3.6")
compilation = pytest.importorskip("tilewise.backends.gpu.compilation")
driver = pytest.importorskip("tilewise.backends.gpu.driver")
gpu_counters = pytest.importorskip("tilewise.backends.gpu.counters")
launching = pytest.importorskip("tilewise.backends.gpu.launching")

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16
# 1, multiples of 16 and neighbours of tile sizes: what Triton would specialise on.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 48, 63, 64, 65, 100, 112, 128, 129, 240, 256, 333, 512, 1000)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch, fake_cuda: FakeCuda) -> Iterator[FakeCuda]:
    """Every device is an H200, nothing is prepared yet."""
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(gpu_counters.HostCounters, "current", lambda *_: counter)
    fake_cuda.expect()
    with nothing_prepared():
        yield fake_cuda


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were compiled since the test began."""
    seen, plain = list[str](), triton.compile

    def counting(source: Any, **options: Any) -> Any:
        seen.append(source.fn.__name__)
        return plain(source, **options)

    monkeypatch.setattr(triton, "compile", counting)
    return seen


def operands_of(length: int, *, dim: int = 64, heads: int = 2, batch: int = 1) -> Operands:
    """q, k, v of equal length, of zeros."""
    q, k, v = (torch.zeros(batch, heads, length, dim, dtype=BF16) for _ in range(3))
    return Operands(q, k, v)


def problem_of(operands: Operands, **flags: Any) -> tuple[AttentionProblem, Operands]:
    """The problem and its canonical operands."""
    problem = validation.problem_of("dense", operands, Flags(**flags))
    return problem, canonical(problem, operands)


def train(backend: Any, operands: Operands, **flags: Any) -> None:
    """Forward and backward."""
    problem, ready = problem_of(operands, **flags, needs_grad=True)
    out, lse = backend.forward(problem, ready)
    backend.backward(problem, ready, out, lse, torch.zeros_like(out), None, Wanted())


def test_twenty_lengths_compile_each_triton_kernel_once(h200: FakeCuda, compiled: list[str]) -> None:
    short = [length for length in LENGTHS if length <= SHORT_KEYS]
    for length in short:
        train(TRITON, operands_of(length), causal=True)
    assert sorted(compiled) == [
        "forward_kernel", "key_gradient_kernel", "query_gradient_kernel", "row_stats_kernel",
    ]  # fmt: skip
    before = len(compiled)
    for length in (513, 528, 1000, 1024):  # few keys have a tile of their own in the forward
        train(TRITON, operands_of(length), causal=True)
    assert compiled[before:] == ["forward_kernel"]


class Seen:
    """Functions of the driver that keep what they are given for the launches of a pass, instead of starting them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = driver._address_of
        self._kinds: list[list[str]] = []
        self.launches: list[tuple[bytes, ...]] = []
        # Lives as long as the plans that have its address.
        self._launch = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(self._keep)
        address = ctypes.cast(self._launch, ctypes.c_void_p).value
        monkeypatch.setattr(driver, "_address_of", lambda n: address if n == "cuLaunchKernelEx" else plain(n))

    def _keep(self, config: int, _kernel: int, parameters: int, _extra: int) -> int:
        kinds = self._kinds[len(self.launches)]
        pointers = (ctypes.c_uint64 * (len(kinds) + driver.NUM_SCRATCH)).from_address(parameters)
        sizes = [driver.MAP_BYTES if k.startswith("tensordesc") else driver.SIZES.get(k, driver.WORD) for k in kinds]
        assert all(pointer % driver.MAP_ALIGNMENT == 0 for pointer, n in zip(pointers, sizes, strict=False) if n > 8)
        values = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, [*sizes, 8, 8], strict=True)]
        self.launches.append((ctypes.string_at(config, 8 * driver.ATTRIBUTES), *values))
        return 0

    def of(self, bound: Any, tensors: Sequence[Tensor | None], frame: Any = None) -> list[tuple[bytes, ...]]:
        """The launches of a pass with these tensors, where what it makes has made-up addresses."""
        given = {name: t for name, t in zip(bound._given, tensors, strict=False) if t is not None}
        found = bound._laid_out or bound._lay_out(None, list(given))
        made = {name: 1 << 20 << i for i, name in enumerate((*bound.made, launching.BLOCK, "counter"))}
        addresses = {name: tensor.data_ptr() for name, tensor in given.items()} | made
        frame = frame or found.plan.frame()
        self._kinds, self.launches = [launch._kinds for launch in bound._launches], []
        found.put(frame.words, found.first, 7, False, *[addresses[name] for name in found.names])
        assert found.plan.start(*frame.starting) == 1
        return self.launches


@pytest.mark.parametrize("which", [HOPPER, TRITON], ids=lambda backend: backend.name)
def test_plans_that_serve_other_lengths_lay_out_the_same_bytes(
    which: Any, h200: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards and backwards of lengths that one plan serves, beside passes made for each of them."""

    def forward(problem: AttentionProblem, operands: Any) -> Any:
        return which.bind_forward(problem, canonical(problem, operands), want_lse=True)

    def backward(problem: AttentionProblem, given: Any) -> Any:
        dout, dlse, out, lse, *rest = given
        return which.bind_backward(problem, canonical(problem, Operands(*rest)), out, lse, dout, dlse, Wanted())

    def given_of(length: int) -> tuple[Tensor | None, ...]:
        operands = operands_of(length, dim=128, heads=4)
        out, lse = torch.zeros_like(operands.q), torch.zeros(operands.q.shape[:3])
        return (torch.zeros_like(out), None, out, lse, *operands)

    seen = Seen(monkeypatch)
    flags, lengths = Flags(causal=True, needs_grad=True), (600, 601, 999, 1000, 777, 600)
    for prepare, names, first in ((forward, Operands._fields, 4), (backward, ops._GIVEN, 0)):
        given = given_of(lengths[0])[first:]
        opened = ops._opened("dense", names, given, flags, prepare)
        assert opened is not None
        served = 0
        for length in lengths:
            given = given_of(length)[first:]
            sized = opened.measure([t for t in given if t is not None], NO_LENGTHS)
            if sized is None:
                continue
            operands = operands_of(length, dim=128, heads=4)
            exact = prepare(validation.problem_of("dense", operands, flags), operands if first else given)
            found = seen.of(opened.bound, given, sized)
            assert found == seen.of(exact, given)
            assert len(found) == len(exact.calls) > 0
            cast("Any", opened.bound)._laid_out.plan.release(sized)  # the next length gets the same words
            served += 1
        assert served > 2


@pytest.mark.parametrize("case", ["decode", "prefill", "training"])
@pytest.mark.parametrize("which", [HOPPER, TRITON], ids=lambda backend: backend.name)
def test_a_thousand_lengths(
    which: Any, case: str, h200: FakeCuda, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of new lengths compile nothing after the first few, and keep no memory."""
    monkeypatch.setattr(type(which), "unavailable", lambda _: None)
    calls.forget()

    def call(length: int) -> None:
        operands = operands_of(length, dim=128, heads=4)
        q, k, v = (t.requires_grad_(case == "training") for t in operands[:3])
        q = q[:, :, :1] if case == "decode" else q
        out = tilewise.attention(q, k, v, causal=case != "decode", backend=which.name)
        if case == "training":
            torch.autograd.grad(out, (q, k, v), out)

    for length in (*range(257, 1400, 37), *range(384, 1400, 128)):
        call(length)
    gc.collect()
    before = len(compiled)
    tracemalloc.start()
    for length in range(300, 1300):
        call(length)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert compiled[before:] == []
    assert grown < 2 << 20
    calls.forget()


@pytest.mark.parametrize("which", [HOPPER, TRITON], ids=lambda backend: backend.name)
def test_profilers_see_repeated_calls(which: Any, h200: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what autograd is given beside tensors, which the profiler converts where it can."""
    monkeypatch.setattr(type(which), "unavailable", lambda _: None)
    calls.forget()
    q, k, v = (t.requires_grad_() for t in operands_of(600, dim=128)[:3])

    def train() -> None:
        out = tilewise.attention(q, k, v, causal=True, backend=which.name)
        torch.autograd.grad(out, (q, k, v), out)

    for _ in range(4):
        train()
    with settings.quiet_profiler(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        train()
        train()
    names = [event.name for event in seen.events() or ()]
    assert names.count("tilewise::attention") == names.count("tilewise::attention_backward") == 2
    calls.forget()


def test_a_tile_mask_is_data(h200: FakeCuda, compiled: list[str]) -> None:
    """Masks of any pattern, length and number of heads compile each kernel once; a bound call launches one kernel."""
    for length, heads in ((100, 1), (300, 2), (513, 1), (1024, 2)):
        mask = tile_mask(lambda _b, h, i, j: (i >= j) & (i + h > 90), length, length, heads=heads)
        tensors = {"tiles": mask.tiles, "tile_bits": bits_by_queries(mask.bits), "tile_lists": lists_of(mask.tiles)}
        operands = operands_of(length)._replace(**tensors)
        sizes = {"mask_seqlen_q": length, "mask_seqlen_k": length}
        train(TRITON, operands, **sizes)
        problem, ready = problem_of(operands, **sizes)
        bound = TRITON.bind_forward(problem, ready, want_lse=False)
        assert bound is not None
        h200.expect()
        bound(operands)
        assert h200.launches == 1
        assert TRITON.bind_forward(problem, ready._replace(tile_lists=None), want_lse=False) is None
    assert sorted(compiled) == [
        "forward_kernel", "key_gradient_kernel", "query_gradient_kernel", "row_stats_kernel",
    ]  # fmt: skip


def test_twenty_lengths_compile_each_hopper_kernel_once(h200: FakeCuda, compiled: list[str]) -> None:
    for length in LENGTHS:  # of head_dim 128: 64 has one kernel for short sequences and one for long ones
        problem, ready = problem_of(operands_of(length, dim=128))
        HOPPER.forward(problem, ready)
    assert compiled == ["forward_kernel"]


def test_decoding_compiles_once_for_all_numbers_of_keys(h200: FakeCuda, compiled: list[str]) -> None:
    for keys in (300, 1024, 4097, 8192, 65536):  # from 3 splits to 128
        q, k = torch.zeros(1, 8, 1, 64, dtype=BF16), torch.zeros(1, 2, keys, 64, dtype=BF16)
        problem, ready = problem_of(Operands(q, k, k))
        TRITON.forward(problem, ready)
    assert compiled == ["decode_kernel", "combine_kernel"]


def shifted(tensor: Tensor, elements: int) -> Tensor:
    """The same values at an address that is `elements` further."""
    memory = torch.zeros(tensor.numel() + 64, dtype=tensor.dtype)
    start = -(memory.data_ptr() // tensor.element_size()) % 16 + elements
    return memory[start : start + tensor.numel()].view(tensor.shape)


def test_an_address_that_is_not_aligned_gets_a_kernel_of_its_own(h200: FakeCuda, compiled: list[str]) -> None:
    operands = operands_of(200)
    for elements in (0, 8, 1, 3):  # 16 bytes are 8 elements
        problem, ready = problem_of(operands._replace(k=shifted(operands.k, elements)))
        TRITON.forward(problem, ready)
    assert compiled == ["forward_kernel"] * 2


@pytest.mark.parametrize("gpu", [TRITON, HOPPER], ids=["triton", "hopper"])
def test_what_is_compiled_offline_is_what_runs(gpu: Any, h200: FakeCuda, compiled: list[str]) -> None:
    """Described without tensors or prepared for them, a problem has the same kernels: none is compiled twice."""
    operands = operands_of(300, heads=2)
    train(gpu, operands, causal=True)
    before = list(compiled)
    train(gpu, operands, causal=True)
    problem, _ = problem_of(operands, causal=True, needs_grad=True)
    launch = importlib.import_module(f"tilewise.backends.{gpu.name}.launch")
    calls = launch.calls_of(problem, devices.named("h200"))
    for call in calls:
        compilation.compile_call(call, devices.named("h200"), -1)
    assert compiled == before
    assert [call.kernel.__name__ for call in calls] == before


def test_hooks_see_direct_launches(h200: FakeCuda) -> None:
    problem, ready = problem_of(operands_of(200))
    TRITON.forward(problem, ready)
    seen: list[str] = []
    hooks = triton.knobs.runtime.launch_enter_hook
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    hooks.add(hook)
    try:
        TRITON.forward(problem, ready)
    finally:
        hooks.remove(hook)
    TRITON.forward(problem, ready)
    assert seen == ["forward_kernel"]


@pytest.mark.parametrize("gpu", [TRITON, HOPPER], ids=["triton", "hopper"])
def test_a_launch_that_the_driver_refuses_is_started_in_the_public_way(gpu: Any, h200: FakeCuda) -> None:
    """A thread may have no context yet, which the public way makes current; other errors it has words for."""
    problem, ready = problem_of(operands_of(300), causal=True)
    bound = gpu.bind_forward(problem, ready, want_lse=True)
    runs: list[Callable[[], Any]] = [lambda: bound(ready[:3]), lambda: gpu.forward(problem, ready)]
    for run in runs:
        run()
        h200.expect()
        h200.refuse(1)
        run()
        assert h200.launches == 1
        h200.refuse(2)
        with pytest.raises(RuntimeError, match="fake"):
            run()
    assert h200.launches == 1


def test_bound_passes_refuse_addresses_that_are_not_aligned(h200: FakeCuda) -> None:
    operands = operands_of(300)
    problem, ready = problem_of(operands)
    for gpu in (TRITON, HOPPER):
        bound = gpu.bind_forward(problem, ready, want_lse=True)
        assert bound is not None
        h200.expect()
        assert bound((shifted(ready.q, 1), *ready[1:3])) is None
        assert h200.launches == 0
        assert bound((shifted(ready.q, 8), *ready[1:3])) is not None
    # One bound for them takes them, and others.
    unaligned = ready._replace(q=shifted(ready.q, 1))
    bound = TRITON.bind_forward(problem, unaligned, want_lse=True)
    assert bound is not None
    assert bound(ready[:3]) is not None
    assert bound(unaligned[:3]) is not None


def test_threads_share_prepared_launches(h200: FakeCuda, compiled: list[str]) -> None:
    problem, ready = problem_of(operands_of(200))
    TRITON.forward(problem, ready)
    h200.expect()

    def work(_: int) -> None:
        with devices.overridden(devices.named("h200")):
            for _ in range(50):
                TRITON.forward(problem, ready)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert compiled == ["forward_kernel"]


@pytest.mark.parametrize("which", [HOPPER, TRITON], ids=lambda backend: backend.name)
def test_threads_share_a_plan_for_all_lengths(which: Any, h200: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has the words of its own launch: the driver runs without the GIL."""
    monkeypatch.setattr(type(which), "unavailable", lambda _: None)
    calls.forget()
    tensors = {n: operands_of(n, dim=128, heads=4)[:3] for n in range(600, 640)}

    def attend(n: int) -> None:
        with devices.overridden(devices.named("h200")):
            out, lse = tilewise.attention(*tensors[n], causal=True, backend=which.name, return_lse=True)
        assert out.shape == tensors[n][0].shape
        assert lse.shape == (1, 4, n)

    for n in (600, 601, 602):
        attend(n)
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(attend, [n for _ in range(20) for n in tensors]):
            pass
    calls.forget()


@pytest.mark.parametrize("which", [HOPPER, TRITON], ids=lambda backend: backend.name)
def test_calls_of_odd_sizes_after_others(which: Any, h200: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row with a stride that takes all bits, and empty latents, once there are plans."""
    monkeypatch.setattr(type(which), "unavailable", lambda _: None)
    calls.forget()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> None:
        for _ in range(3):
            out = tilewise.attention(q, k, v, backend=which.name)
            assert out.shape == (*q.shape[:-1], v.shape[-1])

    for n in (300, 301):
        k = torch.zeros(2, 1, n, 576, dtype=BF16)
        attend(*operands_of(n, dim=128)[:3])
        attend(torch.zeros(2, 16, 1, 576, dtype=BF16), k, k[..., :512])
    for exponent in (40, 56, 58, 59):
        k = torch.zeros(1, 2, 300, 128, dtype=BF16).as_strided((1, 2, 300, 128), (2**exponent, 300 * 128, 128, 1))
        q = torch.zeros(1, 2, 1, 128, dtype=BF16).as_strided((1, 2, 1, 128), (2**exponent, 128, 2**exponent, 1))
        attend(q, k, k)
    for batch, queries, keys in ((0, 1, 300), (2, 0, 300), (2, 1, 0)) if which is TRITON else ():
        k = torch.zeros(batch, 1, keys, 576, dtype=BF16)
        attend(torch.zeros(batch, 16, queries, 576, dtype=BF16), k, k[..., :512])
    calls.forget()


def test_a_map_that_the_driver_refuses(h200: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what it was to be made of, in every call."""
    refuse = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)
    address, plain = ctypes.cast(refuse, ctypes.c_void_p).value, driver._address_of
    monkeypatch.setattr(driver, "_address_of", lambda n: address if n == "cuTensorMapEncodeTiled" else plain(n))
    problem, ready = problem_of(operands_of(300, dim=128), causal=True)
    bound = HOPPER.bind_forward(problem, ready, want_lse=True)
    assert bound is not None
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"error 1\) at address \d+ with shape .*300, 128\) and strides"):
            bound(ready[:3])
    assert h200.launches == 0


def test_masks_and_their_lists_are_made_without_a_word_of_the_compiler(h200: FakeCuda, compiled: list[str]) -> None:
    """Like all kernels, those that make masks state every option whose default a release of Triton announces to change:
    the warning would be an error here. One compiled kernel serves every length.
    """
    making, listing = (importlib.import_module(f"tilewise.backends.gpu.{name}") for name in ("mask_making", "listing"))
    for length in LENGTHS:
        ids = torch.zeros(2, length, dtype=torch.int64)
        making.documents(ids, ids)
        making.ranges(*torch.zeros(2, 1, 1, 2, length, dtype=torch.int64), length, of_queries=length % 2 == 0)
        listing.listed(torch.zeros(1, 2, length, 3, dtype=torch.int32))
    assert h200.launches >= 4 * len(LENGTHS)
    assert len(compiled) <= 8  # masks of documents, of ranges of queries and of keys in two kernels each; lists in two
