"""CPU kernels on memory that ends, or begins, at a page nobody may touch: a program, run by test_guard_pages.py.

    python guarded_memory.py cases SHARE [--isa NEON]      a share of the conformance cases, and the other programs
    python guarded_memory.py masks                         tile masks that were written into behind torch's back
    python guarded_memory.py faults                        mistakes made on purpose, each in a process of its own

Inputs, outputs, tables, schedules and every buffer of a workspace lie so, once at the end and once at the beginning of
their pages. Cases (drawn with a fixed seed) run through the public API, forward and backward, and must give the bits
that they give on ordinary memory. Each is printed before it runs: an access beyond the memory ends the process by
SIGSEGV, and the last line names the case.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import itertools
import mmap
import os
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import tilewise as tw
from tilewise import calls, cascade
from tilewise.backends.cpu import BACKEND, cache, isa, launch, launch_backward, launch_higher, schedule, threads
from tilewise.backends.cpu import params as f
from tilewise.cascade import Group, SharedPrefix
from tilewise.fp8.container import Fp8Tensor
from tilewise.kv import PagedKVCache
from tilewise.kv.writing import write_rows
from tilewise.problem import Kind
from tilewise.testing import BackendImplementation, Case, generation, implementations, make_inputs, special
from tilewise.testing.implementations import mask_of
from tilewise.testing.quantised import attended
from tilewise.tiles import EMPTY, FULL

PAGE = mmap.PAGESIZE
FORBIDDEN = 0  # PROT_NONE
# What memory holds before it is written: NaN in every floating-point type.
FILL = 0xFF
SEED = 20
# Longer ones take seconds, and reach no other loop.
MOST_SCORES = 300 * 300
PLAIN: dict[str, Callable[..., Tensor]] = {name: getattr(torch, name) for name in ("empty", "from_numpy")}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def protect(address: int, size: int) -> None:
    """Nobody may touch these pages from now on."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), FORBIDDEN) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


class Table(NamedTuple):
    """An array of numbers, and the memory that kernels read them from."""

    numbers: array[int]
    memory: Tensor

    def buffer_info(self) -> tuple[int, int]:
        """As of an array."""
        return self.memory.data_ptr(), len(self.numbers)


class Guarded:
    """Makes tensors whose memory ends right before a forbidden page, or begins right behind one."""

    def __init__(self) -> None:
        self.at_end = True
        # Sizes of workspaces -> offsets of the pages between their buffers.
        self.workspaces: dict[int, list[int]] = {}

    def memory(self, size: int, forbidden: list[int] | None = None) -> Tensor:
        """Bytes between forbidden pages; with `forbidden` ones within, at these offsets, it begins with a page."""
        room = -(-size // PAGE) * PAGE
        mapped = mmap.mmap(-1, room + 2 * PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        begin = PAGE + (room - size if self.at_end and forbidden is None else 0)
        # The tensor keeps the mapping, which goes with it.
        found = torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=begin)
        found.fill_(FILL)
        for offset in (0, room + PAGE, *(begin + within for within in forbidden or ())):
            protect(address + offset, PAGE)
        return found

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What torch.empty makes."""
        size = dtype.itemsize * functools.reduce(lambda a, b: a * b, shape, 1)
        if size == 0:
            return PLAIN["empty"](shape, dtype=dtype)
        return self.memory(size).view(dtype).view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """The same values with the same strides, from the first to the last element and no further."""
        if tensor.numel() == 0:
            return tensor
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat = self.empty((extent,), tensor.dtype)
        flat.copy_(tensor.detach().as_strided((extent,), (1,)))
        return flat.as_strided(tensor.shape, tensor.stride())

    def places(self, floats: dict[int, int]) -> tuple[dict[int, int], int]:
        """As `launch.places`, but every buffer has pages of its own, and a forbidden one behind or before it."""
        offsets, forbidden, end = {}, [], 0
        for position, count in floats.items():
            size = -(-4 * count // 64) * 64
            room = -(-size // PAGE) * PAGE
            offsets[position] = end + (room - size if self.at_end else 0)
            end += room
            forbidden.append(end)
            end += PAGE
        # The size is all that is known where the memory is made: another one for another layout, odd as no other.
        size = end + 1
        while self.workspaces.setdefault(size, forbidden) != forbidden:
            size += 2
        return offsets, size

    def allocate(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What `launch.allocate` makes."""
        if shape[0] in self.workspaces and dtype == torch.uint8:
            return self.memory(shape[0], self.workspaces[shape[0]])
        return self.empty(shape, dtype).as_strided(shape, strides)

    def table(self, numbers: Sequence[int]) -> Table:
        """What `schedule.table` makes."""
        found = array("q", numbers)
        return Table(found, self.copy(torch.tensor(found.tolist(), dtype=torch.int64)))

    def install(self) -> None:
        """From now on torch makes such tensors, in this process, wherever kernels get theirs from."""

        def empty(*shape: Any, dtype: torch.dtype | None = None, device: Any = None, **other: Any) -> Tensor:
            if dtype is None or str(device) != "cpu" or other:
                return PLAIN["empty"](*shape, dtype=dtype, device=device, **other)
            if shape[0] in self.workspaces and dtype == torch.uint8:
                return self.memory(shape[0], self.workspaces[shape[0]])
            return self.empty(tuple(shape[0]) if not isinstance(shape[0], int) else shape, dtype)

        def zeros(*shape: Any, dtype: torch.dtype | None = None, device: Any = None, **other: Any) -> Tensor:
            return empty(*shape, dtype=dtype, device=device, **other).zero_()

        torch.empty, torch.zeros = empty, zeros
        torch.from_numpy = lambda ndarray: self.copy(PLAIN["from_numpy"](ndarray))
        for name in ("contiguous", "to"):
            setattr(Tensor, name, self._copied(getattr(Tensor, name)))
        launch.places, schedule.table = self.places, self.table  # type: ignore[assignment]
        launch.allocate = self.allocate
        judged: Any = implementations
        judged.mask_of = lambda case, inputs: self.mask(mask_of(case, inputs))
        judged.attended = lambda case, inputs: tuple(self.operand(x) for x in attended(case, inputs))

    def operand(self, given: Any) -> Any:
        """q, k or v, which may be e4m3 data with scales."""
        if isinstance(given, Fp8Tensor):
            return dataclasses.replace(given, data=self.copy(given.data), scale=self.copy(given.scale))
        return given

    def mask(self, given: Any) -> Any:
        """A mask, which may be a tile mask."""
        if isinstance(given, tw.TileMask):
            return dataclasses.replace(given, tiles=self.copy(given.tiles), bits=self.copy(given.bits))
        return given

    def _copied(self, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            found = method(tensor, *args, **kwargs)
            is_new = found.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
            return self.copy(found) if is_new and not found.requires_grad and found.device.type == "cpu" else found

        return call


Results = dict[str, Tensor]
Work = Callable[[Callable[[Tensor], Tensor]], Results]


def conformance_cases(share: float) -> list[Case]:
    """Some of the suite's cases; those of lengths and head dims, of FP8 and of decoding are drawn from like others."""
    every = [
        *generation.single_cases(), *generation.pair_cases(), *generation.size_cases(), *special.special_cases(),
        *special.fp8_cases(), *special.latent_cases(), *decoding_cases(),
    ]  # fmt: skip
    small = [case for case in every if max(case.seqlens_q, default=0) * max(case.seqlens_k, default=0) <= MOST_SCORES]
    return random.Random(SEED).sample(small, round(share * len(small)))


def decoding_cases() -> list[Case]:
    """Few rows against many keys, which are split into chunks and merged; heads together."""
    sizes = [(1, 1500, 33, 33), (1, 3001, 64, 40), (5, 2100, 7, 128), (40, 2500, 24, 17), (2, 1025, 100, 100)]
    kinds: tuple[Kind, ...] = ("dense", "varlen", "paged")
    cases = []
    for (rows, keys, dim, dim_v), kind, dtype in itertools.product(sizes, kinds, DTYPES):
        case = Case(
            kind=kind, dtype=dtype, seqlens_q=(rows, rows), seqlens_k=(keys, keys), num_heads=6, num_kv_heads=3,
            head_dim=dim, head_dim_v=dim_v, causal=rows > 1, page_size=7, grad_of=(),
        )  # fmt: skip
        others: dict[str, Any] = {"layout": "bshd"} if kind == "dense" else {"seqlens_k": (keys, keys // 3)}
        cases.append(dataclasses.replace(case, **others))
    return cases


def of_case(case: Case) -> Work:
    return lambda guarded: BackendImplementation("cpu").run(case, make_inputs(case).map(lambda _, t: guarded(t)))


def other_programs() -> Iterator[tuple[str, Work]]:
    """Rows into pages, rows into 8-bit pages, partial rows merged, prefixes, tangents and second derivatives."""
    for dtype in DTYPES:
        for dim, dim_v in ((1, 3), (33, 40), (64, 64), (100, 7)):
            name = f"{dtype} {dim}:{dim_v}"
            yield f"write_rows {name}", functools.partial(written, dtype, dim, dim_v)
            for codes in (torch.float8_e4m3fn, torch.int8):
                yield f"append {codes} {name}", functools.partial(appended, codes, dtype, dim, dim_v)
            yield (
                f"append {name} latents",
                functools.partial(appended, torch.float8_e4m3fn, dtype, dim, dim_v, latent=True),
            )
            yield f"merge_rows {name}", functools.partial(merged, dtype, dim)
            yield f"prefixes {name}", functools.partial(prefixed, dtype, dim, dim_v)
            yield f"derivatives {name}", functools.partial(differentiated, dtype, dim, dim_v)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def written(dtype: torch.dtype, dim: int, dim_v: int, guarded: Callable[[Tensor], Tensor]) -> Results:
    k, v = (guarded(normal(19, 3, d, dtype=dtype)) for d in (dim, dim_v))
    pages = [guarded(torch.zeros(4, 5, 3, d, dtype=dtype, device="cpu")) for d in (dim, dim_v)]
    slots = guarded(torch.tensor([19, 0, -1, *range(2, 18)]))
    write_rows(k, v, pages[0], pages[1], slots)
    return {"k_pages": pages[0], "v_pages": pages[1]}


def appended(
    codes: torch.dtype,
    dtype: torch.dtype,
    dim: int,
    dim_v: int,
    guarded: Callable[[Tensor], Tensor],
    latent: bool = False,
) -> Results:
    width = dim + dim_v if latent else dim
    cache = PagedKVCache(5, 7, 1, 3, width, head_dim_v=dim_v, latent=latent, dtype=codes, device="cpu")
    cache.k, cache.v = (guarded(x.view(torch.uint8).zero_().view(x.dtype)) for x in (cache.k, cache.v))
    if latent:
        cache.v = cache.k[..., :dim_v]
    else:
        assert cache._scales is not None
        k_scale, v_scale = map(guarded, cache._scales)
        cache._scales = k_scale, v_scale
    request = cache.add(list(range(33)))
    for rows in (20, 13):
        cache.step([request], [rows])
        cache.append(*(guarded(normal(rows, 3, d, dtype=dtype)) for d in (dim, dim_v)))
    query = guarded(normal(13, 6, width, dtype=dtype))
    pages = {"k": cache.k.view(torch.uint8)} | ({} if latent else {"v": cache.v.view(torch.uint8)})
    return {**pages, "out": cache.attention(query)}


def merged(dtype: torch.dtype, dim: int, guarded: Callable[[Tensor], Tensor]) -> Results:
    out, part = (guarded(normal(rows, 3, dim, dtype=dtype)) for rows in (13, 9))
    lse, part_lse = (guarded(normal(3, rows)) for rows in (13, 9))
    for rows in (None, guarded(torch.tensor([12, 0, 3, 4, 5, 6, 7, 8, 9]))):
        BACKEND.merge_rows(out, lse, part, part_lse, rows)
    return {"out": out, "lse": lse}


def prefixed(dtype: torch.dtype, dim: int, dim_v: int, guarded: Callable[[Tensor], Tensor]) -> Results:
    batch, prefix, own, page = 11, 3, 2, 5  # the first sequence is alone
    pages = [guarded(normal(prefix + own * batch, page, 2, d, dtype=dtype)) for d in (dim, dim_v)]
    behind = torch.arange(prefix, prefix + own * batch, dtype=torch.int32).view(batch, own)
    shared = torch.arange(prefix, dtype=torch.int32).expand(batch, prefix)
    table, lengths = torch.cat((shared, behind), 1), torch.full((batch,), (prefix + own) * page - 2, dtype=torch.int32)
    own_table = torch.cat((table[:1], torch.nn.functional.pad(behind[1:], (0, prefix))))
    own_lengths = torch.cat((lengths[:1], lengths[1:] - prefix * page))
    hint = SharedPrefix(
        (Group(batch - 1, batch - 1, prefix * page),),
        *(
            guarded(torch.tensor(numbers, dtype=torch.int32))
            for numbers in ([[0, 1, 2]], [prefix * page], [0, batch - 1])
        ),
        *(guarded(tensor) for tensor in (torch.arange(1, batch), own_table, own_lengths)),
    )
    query = guarded(normal(batch, 6, dim, dtype=dtype))
    out, lse = tw.attention_paged(
        query, pages[0], pages[1], guarded(table), guarded(lengths), shared_prefix=hint, return_lse=True
    )
    return {"out": out, "lse": lse}


def differentiated(dtype: torch.dtype, dim: int, dim_v: int, guarded: Callable[[Tensor], Tensor]) -> Results:
    given = tuple(guarded(normal(1, heads, 21, d, dtype=dtype)) for heads, d in ((4, dim), (2, dim), (2, dim_v)))
    along = tuple(guarded(x.sin()) for x in given)
    pushed = torch.func.jvp(lambda q, k, v: tw.attention(q, k, v, causal=True), given, along)
    leaves = [x.detach().requires_grad_() for x in given]
    first = torch.autograd.grad(tw.attention(*leaves, causal=True).sin().sum(), leaves, create_graph=True)
    second = torch.autograd.grad([x.sin().sum() for x in first], leaves)
    return {"out": pushed[0], "tangent": pushed[1], **dict(zip(("q", "k", "v"), second, strict=True))}


# Numbers that name no tile's bits (or, -1, all of them), written where torch does not count writes.
PARTS, WRITTEN = ("tiles", "bits"), (2**30, -1, -(2**31), 2**31 - 1)


def tile_masks() -> Iterator[tuple[str, tw.TileMask]]:
    """One of each constructor, of 150 queries x 200 keys where it has a choice."""
    ids, rows = torch.arange(200) // 30, torch.arange(150)
    within = functools.partial(create_block_mask, B=None, H=None, Q_LEN=150, KV_LEN=200, device="cpu")
    yield "function", tw.tile_mask(lambda b, h, i, j: (i + b * h) % 3 < j % 5, 150, 200, batch=2, heads=4)
    yield "dense", tw.TileMask.from_dense(torch.rand(150, 200, generator=torch.Generator().manual_seed(0)) < 0.5)
    yield "intervals", tw.TileMask.from_intervals(rows, rows + 40, 200)
    yield "documents", tw.TileMask.documents(ids[50:], ids)
    yield "cu_seqlens", tw.TileMask.from_cu_seqlens(torch.tensor([0, 30, 200]), 200)
    yield "prefix", tw.TileMask.stack([tw.TileMask.prefix(n, 150, 200) for n in (20, 130)])
    yield "chunks", tw.TileMask.stack([tw.TileMask.chunks(n, 150, 200) for n in (70, 100)])
    yield "neighbourhood", tw.TileMask.stack([tw.TileMask.neighbourhood((10, 20), (5, 7))] * 2)
    yield "tree", tw.TileMask.stack([tw.TileMask.tree([-1, *range(149)], 50)] * 2)
    yield "BlockMask", tw.TileMask.from_block_mask(within(lambda _b, _h, i, j: i >= j))


def masked(mask: tw.TileMask, kind: Kind, guarded: Callable[[Tensor], Tensor]) -> Results:
    """A call with a tile mask, forward and backward; dense ones also twice."""
    batch, (rows, keys), dtype = 2, mask.shape[2:], torch.bfloat16 if kind == "varlen" else torch.float32
    lengths = [torch.arange(batch + 1, dtype=torch.int32) * n for n in (rows, keys)]
    if kind == "paged":
        k, v = (guarded(normal(batch, keys, 2, 16, dtype=dtype)) for _ in range(2))
        table, ends = (guarded(torch.tensor(x, dtype=torch.int32)) for x in ([[0], [1]], [keys] * batch))
        query, totals = guarded(normal(batch * rows, 4, 16, dtype=dtype)), guarded(lengths[0])
        out = tw.attention_paged(query, k, v, table, ends, cu_seqlens_q=totals, max_seqlen_q=rows, mask=mask)
        return {"out": out}
    shapes = [(4, rows), (2, keys), (2, keys)]
    tensors = [
        normal(batch, heads, n, 16, dtype=dtype) if kind == "dense" else normal(batch * n, heads, 16, dtype=dtype)
        for heads, n in shapes
    ]
    leaves = [guarded(x).requires_grad_() for x in tensors]
    if kind == "varlen":
        out = tw.attention_varlen(*leaves, *map(guarded, lengths), mask=mask)
        return dict(zip("oqkv", (out, *torch.autograd.grad(out.sum(), leaves)), strict=True))
    out = tw.attention(*leaves, mask=mask)
    first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
    second = torch.autograd.grad([x.sin().sum() for x in first], leaves)
    return {"out": out, **dict(zip("qkv", first, strict=True)), **dict(zip("123", second, strict=True))}


def run_masks() -> None:
    """What a mask names that is not there is hidden; nothing beyond its memory is read."""
    guarded, works = Guarded(), list(itertools.product(tile_masks(), PARTS, WRITTEN))
    guarded.install()
    kinds: tuple[Kind, ...] = ("dense", "varlen", "paged")
    # Every mask gets every kind of call at both ends of its memory, and every number in both parts.
    for ((name, mask), part, number), (kind, guarded.at_end) in zip(
        works, itertools.cycle(itertools.product(kinds, (True, False))), strict=False
    ):
        say("end" if guarded.at_end else "begin", name, part, number, kind)
        changed = getattr(mask, part).clone()
        changed[..., ::2] = EMPTY if part == "tiles" and number != FULL else number
        wanted, given = dataclasses.replace(mask, **{part: changed}), guarded.mask(mask)
        getattr(given, part).numpy()[..., ::2] = number
        if not same_bits(*(masked(x, kind, guarded.copy) for x in (given, wanted))):
            raise SystemExit(f"other bits: {name} {part} {number} {kind}")
    say(len(works), "done")


def same_bits(a: Results, b: Results) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name].contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8)) for name in a
    )


# Mistakes made on purpose: a row or a key too many, an element too early, dk an element and a buffer of the workspace a
# cache line too far.


def make_fault(name: str) -> None:
    plain_run, plain_places = threads.run, launch.places
    changed = {"row": (f.SEQLEN_Q, 1), "key": (f.SEQLEN_K, 1), "element": (f.Q, -4), "gradient": (f.DK, 4)}

    def run(program: cache.Program, values: Any, *rest: Any) -> None:
        position, step = changed[name]
        # What is not there stays so, as dk in a forward.
        values[position] += step if values[position] else 0
        plain_run(program, values, *rest)

    def places(floats: dict[int, int]) -> tuple[dict[int, int], int]:
        offsets, size = plain_places(floats)
        return offsets | {f.WS_SCORES: offsets[f.WS_SCORES] + 64}, size

    if name in changed:
        threads.run = run  # type: ignore[assignment]
    elif name == "workspace":
        launch.places = places


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def forget_plans() -> None:
    """Launch plans and schedules in other memory are not used again."""
    calls.forget()
    for module in (launch, launch_backward, launch_higher, schedule):
        for function in list(vars(module).values()):
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def run_cases(share: float) -> None:
    works = [(case.id, of_case(case)) for case in conformance_cases(share)] + list(other_programs())
    expected = [work(lambda tensor: tensor) for _, work in works]
    guarded = Guarded()
    guarded.install()
    for guarded.at_end in (True, False):
        forget_plans()
        for (name, work), wanted in zip(works, expected, strict=True):
            say("end" if guarded.at_end else "begin", name)
            if not same_bits(work(guarded.copy), wanted):
                raise SystemExit(f"other bits: {name}")
        assert cache.program.cache_info().currsize == len(cache.programs()), "every program ran"
    say(len(works), "done")


def run_faults() -> None:
    plain = of_case(Case(seqlens_q=(256,), seqlens_k=(256,), head_dim=64, head_dim_v=64))
    plain(lambda tensor: tensor)
    for name in ("none", "row", "key", "element", "workspace", "gradient"):
        child = os.fork()
        if child == 0:
            guarded = Guarded()
            guarded.install()
            forget_plans()
            make_fault(name)
            for guarded.at_end in (True, False):
                plain(guarded.copy)
            os._exit(0)
        say(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("cases", "masks", "faults"))
    parser.add_argument("share", type=float, nargs="?", default=1.0)
    parser.add_argument("--isa")
    given = parser.parse_args()
    if given.isa:
        table = getattr(isa, given.isa)
        isa.choose = lambda *_: table
    torch.set_num_threads(1)
    cascade.price_seconds = lambda *_: 0.0  # prefixes are attended apart, whether it pays or not
    if given.what == "cases":
        run_cases(given.share)
    elif given.what == "masks":
        run_masks()
    else:
        run_faults()


if __name__ == "__main__":
    main()
