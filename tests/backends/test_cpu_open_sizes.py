"""On a CPU a plan that was made for some sizes gives, for every size to which it applies, the bits of a call that was
planned for that size alone; few plans serve all sizes, and they take no memory.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import calls
from tilewise.backends.cpu import bound, cache, launch, launch_backward, schedule, threads
from tilewise.native import Plan
from tilewise.symbolic import Trace

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Sizes next to those where plans change: rows of decoding, of chunks and of blocks, keys of a chunk and of totals.
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 63, 64, 65, 127, 128, 129, 200, 300)
KEYS = (1, 2, 15, 64, 65, 200, 1023, 1024, 1025, 1100, 4095, 4096, 4097, 4200)
DRAWS = 25


@pytest.fixture(autouse=True)
def own_plans() -> Iterator[None]:
    """Every test makes its own plans, and leaves torch's number of threads as it was."""
    before = torch.get_num_threads()
    calls.forget()
    yield
    calls.forget()
    torch.set_num_threads(before)


class Draw(random.Random):
    """Random sizes and tensors."""

    def length(self, edges: tuple[int, ...], most: int) -> int:
        """One that is next to an edge, or any."""
        return self.choice(edges) if self.random() < 0.6 else self.randint(1, most)

    def rows(self, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
        """A tensor with a contiguous last dimension, of various strides and alignment."""
        kind, numbers = self.random(), torch.Generator().manual_seed(self.randrange(2**31))

        def new(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=numbers).to(dtype)

        if kind < 0.4:
            found = new(*shape)
        elif kind < 0.6:  # a part of longer rows
            found = new(*shape[:-1], 2 * shape[-1] + 3)[..., 1 : 1 + shape[-1]]
        elif kind < 0.75 and len(shape) == 4:  # other orders of dimensions
            found = new(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
        elif kind < 0.85:  # the first rows of a longer cache
            found = new(*shape[:-2], shape[-2] + 7, shape[-1])[..., : shape[-2], :]
        else:  # an odd address
            found = new(int(torch.Size(shape).numel()) + 1)[1:].view(shape)
        return found.requires_grad_(requires_grad)


# q, k, v (of which some cases pass more than tensors) and flags.
Made = tuple[tuple[Any, ...], dict[str, Any]]


def sizes(draw: Draw, *, square: bool = False) -> tuple[int, int, int]:
    """(batch, queries, keys), without long computations."""
    batch = draw.choice((1, 1, 2, 3, 5))
    queries = draw.length(ROWS, 320)
    keys = draw.length(KEYS, 1500 if queries < 100 else 400)
    return batch, queries, queries if square else keys


def dense(
    draw: Draw, heads: int = 4, kv: int = 2, dims: tuple[int, int] = (32, 32), dtype: torch.dtype = F32, **flags: Any
) -> Made:
    batch, queries, keys = sizes(draw)
    needs_grad = draw.random() < 0.5
    q = draw.rows((batch, heads, queries, dims[0]), dtype, needs_grad)
    k, v = (draw.rows((batch, kv, keys, dim), dtype, needs_grad) for dim in dims)
    if flags.get("layout") == "bshd":
        q, k, v = (t.detach().transpose(1, 2).requires_grad_(needs_grad) for t in (q, k, v))
    return (q, k, v), flags


def decoded(draw: Draw, **flags: Any) -> Made:
    (q, k, v), flags = dense(draw, **flags)
    return (q[:, :, :1].detach(), k.detach(), v.detach()), flags


def some_gradients(draw: Draw, **flags: Any) -> Made:
    """Of q alone, of q and k, or of q and v."""
    given, flags = dense(draw, **flags)
    which = draw.choice(((True, False, False), (True, True, False), (True, False, True)))
    return tuple([t.detach().requires_grad_(needs) for t, needs in zip(given, which, strict=True)]), flags


def scored(draw: Draw, name: str) -> Made:
    (q, k, v), _ = dense(draw)
    shape = [draw.choice((1, size)) for size in (*q.shape[:3], k.shape[2])]
    if name == "mask":
        extra = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7
    else:
        extra = draw.rows(tuple(shape), draw.choice((F32, BF16)))
    return (q, k, v), {name: extra}


def slopes(draw: Draw) -> Made:
    (q, k, v), _ = dense(draw)
    batch = q.shape[0]
    return (q, k, v), {"alibi_slopes": torch.rand(draw.choice(((4,), (batch, 4)))), "causal": True}


def in_8_bits(draw: Draw) -> Made:
    """K and V, or all three, in e4m3 with scales."""
    (q, k, v), _ = dense(draw)
    q, k, v = (t.detach().contiguous().to(BF16) for t in (q, k, v))
    quantised = [tw.fp8.quantize(t, granularity="head") for t in (q, k, v)]
    return tuple(quantised), {"causal": True}


def shared(draw: Draw) -> Made:
    """K passed as V, too."""
    (q, k, _), flags = dense(draw)
    return (q, k, k), flags


def latent(draw: Draw) -> Made:
    """V is a view of K's first columns."""
    (q, k, _), flags = dense(draw, kv=1, dims=(48, 48))
    q, k = q.detach(), k.detach()
    return (q, k, k[..., :32]), flags


def totals(draw: Draw, lengths: list[int], rows: int) -> Tensor:
    """Running totals of these lengths, which leave some rows at the end unused."""
    assert sum(lengths) <= rows
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def packed(
    draw: Draw, heads: int = 4, kv: int = 2, dims: tuple[int, int] = (32, 32), dtype: torch.dtype = F32, **flags: Any
) -> Made:
    """Sequences of any lengths, some empty, with and without bounds on them."""
    batch, most = draw.choice((1, 2, 3, 5)), draw.choice((8, 70, 200))
    queries = [draw.choice((0, 1, draw.randint(1, most), most)) for _ in range(batch - 1)] + [draw.randint(1, most)]
    same = draw.random() < 0.5
    keys = queries if same else [draw.choice((0, draw.randint(1, 1100))) for _ in range(batch - 1)] + [7]
    rows, columns = (max(1, sum(each)) + draw.choice((0, 0, 3)) for each in (queries, keys))
    needs_grad = flags.pop("grad", draw.random() < 0.5)
    q = draw.rows((rows, heads, dims[0]), dtype, needs_grad)
    k, v = (draw.rows((columns, kv, dim), dtype, needs_grad) for dim in dims)
    cu_q, cu_k = totals(draw, queries, rows), totals(draw, keys, columns)
    if draw.random() < 0.5:
        flags |= {"max_seqlen_q": max(queries) + draw.choice((0, 5)), "max_seqlen_k": max(keys)}
    return (q, k, v, cu_q, cu_k), flags | {"call": tw.attention_varlen}


def paged(draw: Draw, dtype: torch.dtype = F32, *, packs: bool = False, **flags: Any) -> Made:
    """Caches of any lengths, one token or several of each sequence."""
    batch, page_size, num_pages = draw.choice((1, 2, 3, 7)), 16, draw.randint(20, 40)
    columns = draw.randint(1, 12)
    lengths = [draw.randint(0, page_size * columns) for _ in range(batch)]
    pages = [draw.rows((num_pages, page_size, 2, 32), dtype) for _ in range(2)]
    table = torch.tensor([[draw.randrange(num_pages) for _ in range(columns)] for _ in range(batch)], dtype=torch.int32)
    queries = [draw.randint(0, 12) for _ in range(batch)] if packs else [1] * batch
    rows = max(1, sum(queries)) if packs else batch
    if packs:
        flags["cu_seqlens_q"] = totals(draw, queries, rows)
        if draw.random() < 0.5:
            flags["max_seqlen_q"] = 12
    q = draw.rows((rows, 4, 32), dtype)
    return (q, *pages, table, torch.tensor(lengths, dtype=torch.int32)), flags | {"call": tw.attention_paged}


def of_int64(draw: Draw, made: Made) -> Made:
    """The same with wider index tensors, some of them strided."""

    def wide(t: Any) -> Any:
        if not isinstance(t, Tensor) or t.dtype != torch.int32:
            return t
        t = t.to(torch.int64)
        return t.t().contiguous().t() if draw.random() < 0.3 else t.repeat_interleave(2, dim=-1)[..., ::2]

    given, flags = made
    return tuple(map(wide, given)), flags


CASES: dict[str, Callable[[Draw], Made]] = {
    "plain": dense,
    "causal": lambda d: dense(d, causal=True),
    "bshd": lambda d: dense(d, layout="bshd", causal=True),
    "equal heads": lambda d: dense(d, heads=3, kv=3, dims=(40, 24)),
    "window": lambda d: dense(d, window=(30, 20)),
    "causal window": lambda d: dense(d, window=(100, None), causal=True),
    "softcap": lambda d: dense(d, softcap=10.0, scale=-0.3),
    "bf16": lambda d: dense(d, dtype=BF16, causal=True),
    "fp16": lambda d: dense(d, dtype=F16),
    "sinks": lambda d: (dense(d)[0], {"sinks": torch.linspace(-1, 1, 4), "causal": True}),
    "lse": lambda d: dense(d, return_lse=True),
    "some gradients": lambda d: some_gradients(d, causal=True),
    "decode": decoded,
    "decode bf16": lambda d: decoded(d, heads=8, kv=1, dtype=BF16),
    "decode window": lambda d: decoded(d, window=(500, 0)),
    "bias": lambda d: scored(d, "bias"),
    "mask": lambda d: scored(d, "mask"),
    "alibi": slopes,
    "k is v": shared,
    "latent": latent,
    "logits": lambda d: dense(d, return_max_logits=True, causal=True),
    "logits of decoding": lambda d: decoded(d, return_max_logits=True, return_lse=True),
    "e4m3": in_8_bits,
    "packed": packed,
    "packed causal": lambda d: packed(d, causal=True, return_lse=True),
    "packed window": lambda d: packed(d, window=(30, 0), grad=False),
    "packed bf16": lambda d: packed(d, dtype=BF16, causal=True),
    "packed logits": lambda d: packed(d, return_max_logits=True, grad=False),
    "packed heads": lambda d: packed(d, heads=3, kv=1, dims=(40, 24), grad=False),
    "dropout": lambda d: dense(d, dropout=0.3, seed=d.randint(-9, 9)),
    "packed dropout": lambda d: packed(d, dropout=0.3, seed=torch.tensor([d.randint(0, 2**62)])),
    "pages": paged,
    "pages bf16": lambda d: paged(d, BF16, return_lse=True),
    "packed int64": lambda d: of_int64(d, packed(d, causal=True)),
    "pages int64": lambda d: of_int64(d, paged(d)),
    "pages, several tokens": lambda d: paged(d, packs=True, causal=True),
    "pages, several tokens, window": lambda d: paged(d, packs=True, window=(20, 0)),
}


def results(given: tuple[Any, ...], flags: dict[str, Any]) -> list[Tensor]:
    """Of a call, and of its backward where operands require gradients."""
    call, *others = flags.get("call", tw.attention), *flags.items()
    made = call(*given, **{name: value for name, value in others if name != "call"})
    outs = list(made) if isinstance(made, tuple) else [made]
    if not isinstance(given[0], Tensor) or not given[0].requires_grad:
        return outs
    numbers = torch.Generator().manual_seed(3)
    dout = torch.randn(outs[0].transpose(1, 2).shape, generator=numbers).to(outs[0].dtype).transpose(1, 2)
    if outs[0].dim() == 3:
        dout = torch.randn(outs[0].shape, generator=numbers).to(outs[0].dtype)
    wanted = [t for t in given if t.requires_grad]
    if len(outs) == 2 and outs[1].requires_grad:
        return outs + list(torch.autograd.grad(outs, wanted, (dout, torch.randn(outs[1].shape, generator=numbers))))
    return outs + list(torch.autograd.grad(outs[0], wanted, dout))


@pytest.mark.parametrize("name", CASES)
def test_open_plans_give_the_bits_of_each_size(name: str) -> None:
    draw = Draw(name)
    made = [CASES[name](draw) for _ in range(DRAWS)]
    threads_of = [draw.choice((1, 2, 3)) for _ in made]
    found = []
    for (given, flags), count in zip(made, threads_of, strict=True):
        torch.set_num_threads(count)
        # The first of equal calls is computed, the second kept, the third repeated.
        found.append([results(given, flags) for _ in range(3)])
    for (given, flags), repeated in zip(made, found, strict=True):
        calls.forget()
        expected = general(given, flags)
        for each in repeated:
            for a, b in zip(each, expected, strict=True):
                assert torch.equal(a, b), (given[0].shape, given[1].shape, flags)


def general(given: tuple[Any, ...], flags: dict[str, Any]) -> list[Tensor]:
    """What the general path gives, which plans every call for its sizes alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound, "bind_forward", lambda *_: None)
        patch.setattr(bound, "bind_backward", lambda *_: None)
        return results(given, flags)


@pytest.mark.parametrize("name", CASES)
def test_open_plans_are_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing above may be a call of the general path."""
    draw = Draw(name)
    for function, module in (("forward", launch), ("backward", launch_backward)):
        monkeypatch.setattr(module, function, lambda *_: pytest.fail("the general path"))
    for _ in range(5):
        results(*CASES[name](draw))
    assert all(form._plans for form in forms())


def forms() -> list[calls.Form]:
    """All that are in use."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is calls.Form]


def of_length(n: int, *, queries: int | None = None, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, 2, rows, 32, requires_grad=grad) for rows in (queries or n, n, n))
    return q, k, v


def in_packs(n: int, *, grad: bool = False, first: int = 1) -> Tensor:
    """Two sequences of n tokens together."""
    q, k, v = (torch.randn(n, 2, 32, requires_grad=grad) for _ in range(3))
    cu = torch.tensor([0, first, n], dtype=torch.int32)
    return tw.attention_varlen(q, k, v, cu, cu, causal=True)


PAGES = torch.randn(2, 80, 16, 2, 32)


def in_pages(n: int, **changes: Any) -> Tensor:
    """Two sequences, of which one has n keys, over a table that grows with them."""
    columns = -(-n // 16)
    given = {
        "block_table": torch.arange(2 * columns, dtype=torch.int32).view(2, columns) % 80,
        "seqlens_k": torch.tensor([n, n // 2], dtype=torch.int32),
    }
    return tw.attention_paged(torch.randn(2, 4, 32), *PAGES, **(given | changes))


LOOPS: dict[str, Callable[[int], object]] = {
    "decode": lambda n: tw.attention(*of_length(n, queries=1)),
    "prefill": lambda n: tw.attention(*of_length(n), causal=True),
    "training": lambda n: tw.attention(*of_length(n, grad=True), causal=True).backward(torch.ones(1, 2, n, 32)),
    "packed": in_packs,
    "pages": in_pages,
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_thousand_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled after the first ones, few plans are made, and memory does not grow."""
    call, lengths = LOOPS[name], range(2, 402) if name == "training" else range(2, 1002)
    for n in lengths[:100:10]:
        call(n)
    made, plain = [], Plan.finish

    def finish(plan: Plan) -> Plan:
        made.append(plan)
        return plain(plan)

    monkeypatch.setattr(Plan, "finish", finish)
    loaded = cache.program.cache_info().misses
    gc.collect()
    tracemalloc.start()
    begin, resident = tracemalloc.get_traced_memory()[0], pages()
    for n in lengths:
        call(n)
    gc.collect()
    end = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert end - begin < 2 * 2**20
    assert pages() - resident < 20 * 2**20
    assert cache.program.cache_info().misses == loaded
    assert len(made) <= 6


@pytest.mark.parametrize("first", [-1, 33, 31])
def test_contents_are_checked_by_every_call(first: int) -> None:
    """Of every length, after calls for which plans were made."""
    for n in (20, 22, 24, 24):
        in_packs(n)
    for n in (24, 30, 30):
        with pytest.raises(tw.InvalidProblem, match="cu_seqlens_q"):
            in_packs(n, first=first)
        in_packs(n)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seqlens_k": torch.tensor([-1, 5], dtype=torch.int32)}, "between 0 and"),
        ({"seqlens_k": torch.tensor([50, 5], dtype=torch.int32)}, "between 0 and"),
        ({"block_table": torch.tensor([[0, 80, 1], [0, 0, 0]], dtype=torch.int32)}, "below num_pages"),
        ({"block_table": torch.tensor([[0, 1, 2], [-1, 0, 0]], dtype=torch.int32)}, "none negative"),
        ({"seqlens_k": torch.tensor([50, 5, 5], dtype=torch.int32)}, "batch"),
        ({"block_table": torch.zeros(0, 3, dtype=torch.int32)}, "batch"),
    ],
)
def test_pages_are_checked_by_every_call(change: dict[str, Tensor], message: str) -> None:
    for n in (20, 36, 52, 37):
        in_pages(n)
    for n in (36, 47):
        with pytest.raises(tw.InvalidProblem, match=message):
            in_pages(n, **change)
        in_pages(n)
    # Entries past the last page in use may be anything.
    table = torch.tensor([[0, 1, -5], [2, 900, 900]], dtype=torch.int32)
    in_pages(32, block_table=table)


def test_lengths_that_change_in_place_are_read_again() -> None:
    """Also where addresses, shapes and bounds are those of the call before."""
    q, k, v = (torch.randn(60, 2, 32) for _ in range(3))
    cu = torch.tensor([0, 20, 60], dtype=torch.int32)
    for middle in (20, 20, 20, 35, 7, 7, 60, 0):
        cu[1] = middle
        made = tw.attention_varlen(q, k, v, cu, cu)
        parts = [
            tw.attention(*[t[a:b].transpose(0, 1)[None] for t in (q, k, v)]) for a, b in ((0, middle), (middle, 60))
        ]
        torch.testing.assert_close(made, torch.cat([part[0].transpose(0, 1) for part in parts]))
    cu[1] = 61
    with pytest.raises(tw.InvalidProblem, match="never decrease"):
        tw.attention_varlen(q, k, v, cu, cu)


@pytest.mark.parametrize("name", ["columns", "tiles"])
def test_plans_that_cannot_be_made_are_not_tried_for_ever(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, plain = [], Trace.__init__

    def count(trace: Trace, *given: Any) -> None:
        made.append(given)
        plain(trace, *given)

    monkeypatch.setattr(Trace, "__init__", count)
    for n in range(20, 40):
        q, k, v = (torch.randn(n, 2, 32) for _ in range(3))
        cu = torch.tensor([0, 5, n], dtype=torch.int32)
        flags: dict[str, Any] = {}
        if name == "columns":
            q = q.transpose(1, 2).contiguous().transpose(1, 2)
        else:
            flags = {"mask": tw.TileMask.chunks(8, n), "max_seqlen_q": n, "max_seqlen_k": n}
        assert tw.attention_varlen(q, k, v, cu, cu, **flags).shape == q.shape
    assert len(made) == 5


def pages() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_repeated_calls_follow_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the plan was made, and kept, for another number."""
    used, plain = [], threads.run

    def run(program: cache.Program, block: Any, count: int) -> None:
        used.append(count)
        plain(program, block, count)

    monkeypatch.setattr(threads, "run", run)
    given = (torch.randn(1, 8, 512, 64), torch.randn(1, 8, 512, 64), torch.randn(1, 8, 512, 64))
    for count in (1, 2, 1, 3, 2):
        torch.set_num_threads(count)
        for _ in range(3):
            tw.attention(*given)
    assert used == [1] * 3 + [2] * 3 + [1] * 3 + [3] * 3 + [2] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_uses_the_plans_of_its_parent() -> None:
    """On one thread, though it asks for more: a team of threads does not survive a fork."""
    torch.set_num_threads(2)
    given = [of_length(n, grad=True) for n in (300, 301)]
    expected = [results(g, {}) for g in given for _ in range(3)]
    child = os.fork()
    if child == 0:
        torch.set_num_threads(2)
        found = [results(g, {}) for g in given for _ in range(3)]
        same = all(torch.equal(a, b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True))
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_empty_tensors_after_others(empty: str) -> None:
    """A plan that was made for rows is not used where there are none."""
    tw.attention(*of_length(20))
    shapes = {"batch": (0, 5, 5), "queries": (1, 0, 5), "keys": (1, 5, 0)}[empty]
    batch, queries, keys = shapes
    q = torch.randn(batch, 2, queries, 32, requires_grad=True)
    k, v = (torch.randn(batch, 2, keys, 32, requires_grad=True) for _ in range(2))
    for _ in range(3):
        out, lse = tw.attention(q, k, v, return_lse=True)
        assert out.shape == q.shape
        assert not out.any()
        assert torch.equal(lse, torch.full((batch, 2, queries), -torch.inf))
        gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert all(not g.any() and g.shape == t.shape for g, t in zip(gradients, (q, k, v), strict=True))


def test_strides_of_one_row_may_be_of_any_size() -> None:
    """No kernel takes a step there; a plan whose numbers take more than 64 bits does not apply."""
    plain = of_length(1)
    expected = tw.attention(*plain)
    tw.attention(*of_length(30))
    for exponent in (40, 56, 57, 58, 59, 60):
        q, k, v = (t.as_strided(t.shape, (2**exponent, 32, 2**exponent, 1)) for t in plain)
        for _ in range(3):
            assert torch.equal(tw.attention(q, k, v), expected)


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_empty_latents_after_others(empty: str) -> None:
    """V is a view of K's first columns: the addresses of both are 0 where there are none."""
    for keys in (300, 301):
        k = torch.randn(2, 1, keys, 48)
        tw.attention(torch.randn(2, 4, 1, 48), k, k[..., :32])
    batch, queries, keys = {"batch": (0, 1, 300), "queries": (2, 0, 300), "keys": (2, 1, 0)}[empty]
    q, k = torch.randn(batch, 4, queries, 48), torch.randn(batch, 1, keys, 48)
    for _ in range(3):
        out = tw.attention(q, k, k[..., :32])
        assert out.shape == (batch, 4, queries, 32)
        assert not out.any()


def test_shapes_that_do_not_fit_are_refused_by_open_plans_too() -> None:
    tw.attention(*of_length(20))
    q, k, v = of_length(30)
    with pytest.raises(tw.InvalidProblem, match="v"):
        tw.attention(q, k, v[:, :, :29])
    with pytest.raises(tw.InvalidProblem, match="k"):
        tw.attention(q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1))


def test_strided_columns_are_copied() -> None:
    """Plans need a contiguous last dimension."""
    q, k, v = of_length(30)
    expected = tw.attention(q, k, v)
    strided = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k, v)]
    for _ in range(3):
        assert torch.equal(tw.attention(*strided), expected)


def test_schedules_own_every_row_once() -> None:
    """In blocks, of every chunk of keys, those with most keys first."""
    draw = Draw(5)
    for _ in range(200):
        count, group = draw.randint(1, 6), draw.choice((1, 2, 4))
        rows, keys = ([draw.randint(0, most) for _ in range(count)] for most in (150, 3000))
        few, splits = draw.random() < 0.3, draw.random() < 0.5
        rows = [min(n, 8 // group) for n in rows] if few else rows
        left, right = draw.choice(((None, None), (None, 0), (40, 10)))
        shared_heads = group if few or splits else 1
        division = schedule.Division(2 * group, 2, 64, 64, 4, left, right, few, few or splits, False, shared_heads)
        bounds = count, max(rows), max(keys)
        found = schedule.forward_schedule(division, bounds, (rows, keys), draw.randint(1, 9))
        fields = [tuple(found.entries[i : i + 4]) for i in range(0, len(found.entries), 4)]
        assert len(fields) == found.num_entries
        # What kernels make of a block at the end of a unit.
        units = [n * found.heads_per_unit for n in rows]
        entries = [
            (batch, first, min(found.block_m, units[batch] - first), chunk, chunks)
            for batch, first, chunk, chunks in fields
        ]
        chunks = [division.chunks(n) for n in keys]
        owned = sorted(
            (batch, row, chunk)
            for batch, first, size, chunk, all_chunks in entries
            for row in range(first, first + size)
            if all_chunks == chunks[batch] and size > 0
        )
        expected = [
            (batch, row, chunk)
            for batch in range(count)
            for row in range(rows[batch] * found.heads_per_unit)
            for chunk in range(chunks[batch])
        ]
        assert owned == sorted(expected)
        ends = [(first + size - 1) % rows[batch] + 1 for batch, first, size, _, _ in entries]
        costs = [
            schedule.keys_seen(left, right, end, rows[entry[0]], keys[entry[0]])
            for end, entry in zip(ends, entries, strict=True)
        ]
        assert costs == sorted(costs, reverse=True)


def test_schedules_of_equal_sequences_own_every_row_once() -> None:
    draw = Draw(6)
    for _ in range(200):
        batch, group, few, splits = draw.randint(1, 4), draw.choice((1, 2, 4)), draw.random() < 0.3, draw.random() < 0.5
        seqlen_q, seqlen_k = draw.randint(0, 8 // group if few else 500), draw.randint(0, 3000)
        left, right = draw.choice(((None, None), (None, 0), (40, 10), (40, None)))
        shared_heads = group if few or splits else 1
        division = schedule.Division(2 * group, 2, 64, 64, 4, left, right, few, few or splits, False, shared_heads)
        sizes = schedule.Blocks.of(division, (batch, seqlen_q, seqlen_k), draw.randint(1, 9))
        found = schedule.equal_schedule(division, sizes)
        rows, chunks = seqlen_q * found.heads_per_unit, division.chunks(seqlen_k)
        entries = [tuple(found.entries[i : i + 4]) for i in range(0, len(found.entries), 4)]
        owned = sorted(
            (one, row, chunk)
            for one, first, chunk, all_chunks in entries
            for row in range(first, min(first + found.block_m, rows))
            if all_chunks == chunks
        )
        assert owned == [(one, row, chunk) for one in range(batch) for row in range(rows) for chunk in range(chunks)]
        assert len(set(entries)) == len(entries) == found.num_entries
