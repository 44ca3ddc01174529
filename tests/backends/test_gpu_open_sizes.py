"""A plan that was made for one size and applies to another has exactly what a plan made for that size has.

Kernels are described, not compiled: for these tests a kernel is the types that it would be compiled for.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import calls, dispatch, ops, symbolic, validation
from tilewise import device as devices
from tilewise.canonical import canonical, contiguous_last, heads_first
from tilewise.operands import LENGTHS, Flags, Operands, Wanted
from tilewise.problem import AttentionProblem, Kind
from tilewise.tiles import num_tiles, sections

pytest.importorskip("triton", minversion="3.6")
driver = pytest.importorskip("tilewise.backends.gpu.driver")
launching = pytest.importorskip("tilewise.backends.gpu.launching")

H200 = devices.named("h200")
BF16, F32 = torch.bfloat16, torch.float32
# Sizes next to those where tables change, and others.
EDGES = (1, 2, 16, 63, 64, 65, 127, 128, 129, 255, 256, 512, 513, 640, 1024, 1025, 1280, 2048, 2049, 4096, 4097, 8192)
DRAWS = 60
# Kernels by what they are compiled for. Passes that are cached refer to them.
KNOWN: dict[Any, Any] = {}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every device is an H200, and a compiled kernel is only told apart from others."""

    def compile_call(call: Any, _device: Any, _index: int, types: Any) -> Any:
        ranks = [kind[: kind.index("]")].count(",") + 1 for kind in driver.kinds_of(types.signature) if "[" in kind]
        maps = [{"block_size": [1] * rank, "swizzle": 0} for rank in ranks]
        about = SimpleNamespace(num_warps=4, shared=0, tensordesc_meta=maps)
        made = SimpleNamespace(metadata=about, function=1, run=None)
        return KNOWN.setdefault((call.kernel, types, tuple(call.options.items())), made)

    monkeypatch.setattr(driver, "compile_call", compile_call)
    monkeypatch.setattr(driver, "_kinds", lambda _, signature: list(driver.kinds_of(signature)))
    monkeypatch.setattr(validation, "reads_contents", lambda *_: False)
    with devices.overridden(H200):
        yield


class Draw(random.Random):
    """Random sizes; with `plain`, all tensors are contiguous."""

    plain = False


def length(draw: Draw) -> int:
    """One that is next to an edge of a table, or any."""
    return draw.choice(EDGES) if draw.random() < 0.6 else draw.randint(1, 10000)


def tensor(draw: Draw, *shape: int, dtype: torch.dtype = BF16, plain: bool = False) -> Tensor:
    """Memory that is never read, of various strides and alignment."""
    kind = 0.0 if plain or draw.plain else draw.random()
    if kind < 0.7:
        return torch.empty(shape, dtype=dtype)
    if kind < 0.8:  # a part of longer rows
        return torch.empty(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., : shape[-1]]
    if kind < 0.9 and len(shape) == 4:  # other orders of dimensions
        return torch.empty(shape[0], shape[2], shape[1], shape[3], dtype=dtype).transpose(1, 2)
    return torch.empty(int(torch.Size(shape).numel()) + 1, dtype=dtype)[1:].view(shape)


Made = tuple[Kind, Operands, Flags]


def dense(draw: Draw, *, heads: int = 8, kv: int = 2, dims: tuple[int, int] = (128, 128), **flags: Any) -> Made:
    batch, queries, keys = draw.choice((1, 2, 3, 16)), length(draw), length(draw)
    if draw.random() < 0.5:
        queries = keys
    dtype = flags.pop("dtype", BF16)
    q = tensor(draw, batch, heads, queries, dims[0], dtype=dtype)
    k, v = (tensor(draw, batch, kv, keys, dim, dtype=dtype) for dim in dims)
    if flags.get("layout") == "bshd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return "dense", Operands(q, k, v), Flags(**flags)


def decoded(draw: Draw, **flags: Any) -> Made:
    kind, operands, found = dense(draw, **flags)
    return kind, operands._replace(q=tensor(draw, len(operands.q), operands.q.shape[1], 1, operands.q.shape[3])), found


def biased(draw: Draw, **flags: Any) -> Made:
    kind, operands, found = dense(draw, **flags)
    (batch, heads, queries, _), keys = operands.q.shape, operands.k.shape[2]
    shape = [draw.choice((1, size)) for size in (batch, heads, queries, keys)]
    name, dtype = draw.choice((("bias", BF16), ("mask", torch.bool)))
    return kind, operands._replace(**{name: tensor(draw, *shape, dtype=dtype, plain=True)}), found


def masked(draw: Draw, **flags: Any) -> Made:
    kind, operands, found = dense(draw, **flags)
    (batch, heads, queries, _), keys = operands.q.shape, operands.k.shape[2]
    shape = (draw.choice((1, batch)), draw.choice((1, heads)), num_tiles(queries), num_tiles(keys))
    lists = torch.empty(sections(shape).words, dtype=torch.int32)
    tiles, bits = torch.empty(shape, dtype=torch.int32), torch.empty(5, 512, dtype=torch.int32)
    found = found._replace(mask_seqlen_q=queries, mask_seqlen_k=keys)
    return kind, operands._replace(tiles=tiles, tile_bits=bits, tile_lists=lists), found


def packed(draw: Draw, **flags: Any) -> Made:
    batch, longest = draw.choice((1, 2, 3, 4, 5, 40)), length(draw)
    total = max(longest, draw.randint(1, longest * batch))
    dim = flags.pop("dim", 128)
    q, k, v = (tensor(draw, total, heads, dim) for heads in (4, 2, 2))
    cu = torch.empty(batch + 1, dtype=torch.int32)
    bounds: dict[str, Any] = {"max_seqlen_q": longest, "max_seqlen_k": longest} if draw.random() < 0.8 else {}
    return "varlen", Operands(q, k, v, cu, cu.clone()), Flags(**flags)._replace(**bounds)


def paged(draw: Draw, *, page: int = 64, one: bool = True, **flags: Any) -> Made:
    batch, width, dim = draw.randint(1, 70), draw.choice((1, 4, 5, 32, 100)), flags.pop("dim", 128)
    total = batch if one else batch + draw.randint(0, 500)
    k = tensor(draw, draw.choice((1, 40, 999)), page, 2, dim)
    cu = None if one else torch.empty(batch + 1, dtype=torch.int32)
    table, lengths = torch.empty(batch, width, dtype=torch.int32), torch.empty(batch, dtype=torch.int32)
    return (
        "paged",
        Operands(tensor(draw, total, 8, dim), k, torch.empty_like(k), cu, None, table, lengths),
        Flags(**flags),
    )


def written(draw: Draw, made: Made) -> Made:
    """The same call with a given result."""
    kind, operands, flags = made
    shape = (*operands.q.shape[:-1], operands.v.shape[-1])
    return kind, operands._replace(out=tensor(draw, *shape)), flags


# Every kernel of the GPU backends, and every feature that changes what it is called with.
CASES: dict[str, Callable[[Draw], Made]] = {
    "hopper-d128 causal": lambda d: dense(d, causal=True),
    "hopper-d128 full": lambda d: dense(d),
    "hopper-d64 bshd": lambda d: dense(d, dims=(64, 64), layout="bshd", causal=True),
    "hopper-d64 full": lambda d: dense(d, dims=(64, 64), kv=8),
    "hopper-d192/128": lambda d: dense(d, dims=(192, 128), causal=True),
    "hopper-d256": lambda d: dense(d, dims=(256, 256)),
    "hopper-d512": lambda d: dense(d, dims=(512, 512)),
    "hopper-window": lambda d: dense(d, window_left=300, window_right=40),
    "hopper-softcap": lambda d: dense(d, causal=True, softcap=20.0),
    "hopper-logits": lambda d: dense(d, causal=True, max_logits=True),
    "hopper-decode": decoded,
    "hopper-decode window": lambda d: decoded(d, window_left=500, causal=True),
    "hopper-tile mask": lambda d: masked(d, kv=8),
    "hopper-packed": lambda d: packed(d, causal=True),
    "hopper-packed d64": lambda d: packed(d, dim=64),
    "hopper-pages": paged,
    "hopper-pages prefill": lambda d: paged(d, one=False, causal=True),
    "hopper-given out": lambda d: written(d, dense(d, causal=True)),
    "hopper-given out bshd": lambda d: written(d, dense(d, dims=(64, 64), layout="bshd")),
    "hopper-given out packed": lambda d: written(d, packed(d, causal=True)),
    "hopper-given out pages": lambda d: written(d, paged(d)),
    "triton-given out pages": lambda d: written(d, paged(d, page=16, one=False)),
    "triton-fp32": lambda d: dense(d, dims=(64, 64), dtype=F32, causal=True),
    "triton-d128": lambda d: dense(d, causal=True),
    "triton-d80": lambda d: dense(d, dims=(80, 80)),
    "triton-decode": decoded,
    "triton-bias or mask": biased,
    "triton-tile mask": masked,
    "triton-packed": lambda d: packed(d, causal=True),
    "triton-pages": lambda d: paged(d, page=16),
    "triton-pages invariant": lambda d: paged(d, page=16, batch_invariant=True),
}


class Plan(NamedTuple):
    """A pass, the function that computes what it needs for other sizes, and for which calls it is."""

    form: tuple[Any, ...]
    bound: Any
    measure: Any


def form_of(names: Sequence[str], tensors: Sequence[Tensor | None], lengths: Sequence[int | None]) -> tuple[Any, ...]:
    """What calls of one plan have in common besides dtypes: the tensors and the bounds that are given."""
    given = [name for name, tensor in zip(names, tensors, strict=True) if tensor is not None]
    return (*given, *[length is None for length in lengths])


def bound(backend: Any, problem: AttentionProblem, operands: Any) -> Any:
    """The forward pass, if the backend computes the problem."""
    if backend.supports(problem, H200) is not None:
        return None
    if problem.max_logits:
        operands = operands._replace(max_logits=torch.empty(problem.num_heads))
    found = backend.bind_forward(problem, canonical(problem, operands), want_lse=True)
    # Copied by the general path.
    return None if found is not None and operands.out is not None and "out" in found.made else found


def applies(found: Any, sized: Any) -> bool:
    """Whether the numbers of an open pass for certain sizes fit into the parameters of its kernels."""
    if sized is None:
        return False
    found, words = found._laid_out, len(found._laid_out.names)
    # Watched launches are laid out, and not started. All addresses are aligned.
    found.put(sized.words, found.first, 0, True, *[4096] * words)
    for word in found.plan.addresses.values():
        struct.pack_into("=q", sized.words, 8 * word, 4096)
    return bool(found.plan.start(*sized.starting) == -1)


def differences(found: Any, sized: Any, exact: Any) -> list[Any]:
    """What an open pass has for certain sizes that an exact one has not."""
    plan = found._laid_out.plan
    values = {number.at: plan.value(sized, number) for number in symbolic.numbers_in(found.described)}
    pairs = list(zip(symbolic.replaced(found.described, values), exact.described, strict=True))
    kernels = zip(found._launches, exact._launches, strict=True)
    return [pair for pair in pairs if pair[0] != pair[1]] + [
        a.call.kernel for a, b in kernels if a.compiled is not b.compiled
    ]


@pytest.mark.parametrize("plain", [True, False], ids=["contiguous", "strided"])
@pytest.mark.parametrize("name", CASES)
def test_open_forwards_are_those_of_each_size(name: str, plain: bool) -> None:
    draw, backend = Draw(name), dispatch.load(name.split("-")[0])
    draw.plain = plain
    plans: list[Any] = []
    used = 0
    for _ in range(DRAWS):
        kind, operands, flags = CASES[name](draw)
        problem = validation.problem_of(kind, operands, flags)
        exact = bound(backend, problem, operands)
        present = [t for t in operands if t is not None]
        lengths = flags.lengths
        applying = []
        for plan in plans:
            if plan.form != form_of(Operands._fields, operands, lengths):
                continue
            sized = plan.measure(present, lengths)
            if applies(plan.bound, sized):
                applying.append(plan)
                assert exact is not None, problem
                assert differences(plan.bound, sized, exact) == [], problem
        used += bool(applying)
        if not applying and exact is not None:
            opened = ops._opened(
                kind, Operands._fields, operands, flags, lambda problem, given: bound(backend, problem, given)
            )
            if opened is not None:
                sized = opened.measure(present, lengths)
                assert differences(opened.bound, sized, exact) == [], problem
                plans.append(Plan(form_of(Operands._fields, operands, lengths), opened.bound, opened.measure))
    assert len(plans) > 0
    assert used > 0


WITHOUT_GRADIENT = ("pages", "decode", "logits", "d512", "out")
BACKWARDS = [name for name in CASES if not any(word in name for word in WITHOUT_GRADIENT)]


@pytest.mark.parametrize("plain", [True, False], ids=["contiguous", "strided"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "fixed order"])
@pytest.mark.parametrize("name", BACKWARDS)
def test_open_backwards_are_those_of_each_size(name: str, deterministic: bool, plain: bool) -> None:
    draw = Draw(name)
    backend: Any = dispatch.load(name.split("-")[0])
    draw.plain = plain
    plans: list[Any] = []
    names = ops._GIVEN

    def prepare(problem: AttentionProblem, given: Any) -> Any:
        dout, dlse, out, lse, *tensors = given
        operands = Operands(*tensors)
        ready, dout = canonical(problem, operands), contiguous_last(heads_first(problem, dout))
        if backend.supports(problem, H200) is not None:
            return None
        return backend.bind_backward(problem, ready, heads_first(problem, out), lse, dout, dlse, Wanted())

    for _ in range(DRAWS // 2):
        kind, operands, flags = CASES[name](draw)
        flags = flags._replace(needs_grad=True, deterministic=deterministic)
        problem = validation.problem_of(kind, operands, flags)
        out = torch.empty(problem.out_shape, dtype=problem.dtype)
        dlse = draw.choice((None, torch.empty(problem.lse_shape)))
        given = (torch.empty_like(out), dlse, out, torch.empty(problem.lse_shape), *operands)
        exact = prepare(problem, given)
        present, lengths = [t for t in given if t is not None], flags.lengths
        form = form_of(names, given, lengths)
        sizes = [(p, p.measure(present, lengths)) for p in plans if p.form == form]
        for plan, sized in sizes:
            if applies(plan.bound, sized):
                assert exact is not None, problem
                assert differences(plan.bound, sized, exact) == [], problem
        if exact is not None and not any(applies(plan.bound, sized) for plan, sized in sizes):
            opened = ops._opened(kind, names, given, flags, prepare)
            if opened is not None:
                assert differences(opened.bound, opened.measure(present, lengths), exact) == [], problem
                plans.append(Plan(form, opened.bound, opened.measure))
    assert len(plans) > 0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The backends whose passes public calls started; they allocate their results and launch nothing."""
    used: list[str] = []

    def called(found: Any, tensors: Any, _places: Any = None, _sized: Any = None) -> Any:
        used.append(found.calls[0].kernel.__module__.split(".")[2])
        return [torch.empty_like(tensors[0]), torch.empty(tensors[0].shape[:3])]

    monkeypatch.setattr(launching.Pass, "__call__", called)
    for name in ("hopper", "triton"):
        monkeypatch.setattr(type(dispatch.load(name)), "unavailable", lambda _: None)
    for forget in (calls.forget, dispatch._select.cache_clear):
        forget()
    yield used
    for forget in (calls.forget, dispatch._select.cache_clear):
        forget()


@pytest.mark.parametrize("batches", [(2, 16, 2), (16, 2, 16)])
def test_plans_serve_no_size_for_which_another_backend_is_chosen(batches: Sequence[int], started: list[str]) -> None:
    """Two tokens of few sequences are too much to merge for the decode kernel of Hopper."""
    for batch in batches:
        tw.attention(*[torch.empty(batch, heads, n, 128, dtype=BF16) for heads, n in ((8, 2), (2, 300), (2, 300))])
    assert started == [{2: "triton", 16: "hopper"}[batch] for batch in batches]


@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_plans_serve_no_size_that_their_backend_refuses(name: str, started: list[str]) -> None:
    """Longer sequences than 32-bit positions take."""
    for length, fits in ((2**29 - 8, True), (2**29, True), (2**29 + 8, False), (2**29 + 8, False)):
        k = torch.empty(1, 1, 1, 64, dtype=BF16).expand(1, 1, length, 64)
        q = torch.empty(1, 1, 100, 64, dtype=BF16)
        if fits:
            tw.attention(q, k, k, backend=name)
        else:
            with pytest.raises(tw.Unsupported, match="32-bit positions"):
                tw.attention(q, k, k, backend=name)
    assert started == [name] * 2


def lengths_of_prompts() -> list[tuple[int, int]]:
    """(batch, length) of calls as programs make them: every length for a while, then longer ones."""
    return [(1, n) for n in (*range(300, 500), *range(500, 3000, 37))]


def of_length(batch: int, queries: int, keys: int, dim: int, dtype: torch.dtype = BF16) -> Operands:
    return Operands(
        *[torch.empty(batch, heads, n, dim, dtype=dtype) for heads, n in ((16, queries), (8, keys), (8, keys))]
    )


SWEEPS: dict[str, tuple[str, Callable[[int, int], Operands], dict[str, Any], list[tuple[int, int]], int]] = {
    "prefill": ("hopper", lambda b, n: of_length(b, n, n, 128), {"causal": True}, lengths_of_prompts(), 2),
    "prefill d64": ("hopper", lambda b, n: of_length(b, n, n, 64), {"causal": True}, lengths_of_prompts(), 4),
    "decoding": ("hopper", lambda b, n: of_length(b, 1, n, 128), {}, lengths_of_prompts(), 3),
    "batches": ("hopper", lambda b, n: of_length(b, 1, n, 128), {}, [(b, 2048) for b in range(1, 65)], 4),
    "fp32": ("triton", lambda b, n: of_length(b, n, n, 64, F32), {"causal": True}, lengths_of_prompts(), 4),
    "fp32 decoding": ("triton", lambda b, n: of_length(b, 1, n, 64, F32), {}, lengths_of_prompts(), 4),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_few_plans_serve_many_lengths(name: str) -> None:
    which, make, flags, sizes, most = SWEEPS[name]
    backend, plans = dispatch.load(which), list[Any]()
    for batch, length in sizes:
        operands = make(batch, length)
        if any(plan.measure(operands[:3], [None] * len(LENGTHS)) is not None for plan in plans):
            continue
        opened = ops._opened(
            "dense", Operands._fields, operands, Flags(**flags), lambda problem, given: bound(backend, problem, given)
        )
        assert opened is not None
        plans.append(opened)
    assert len(plans) <= most
