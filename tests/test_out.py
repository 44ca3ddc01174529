"""`out=`: results written into memory of the caller, eager, compiled and with a shared prefix; and what is refused."""

from __future__ import annotations

import mmap
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from tilewise.cascade import Group, SharedPrefix
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.kv.writing import write_rows
from tilewise.memory import overlap
from tilewise.operands import Flags

NAN = float("nan")


def dense(dtype: torch.dtype = torch.float32, **others: Any) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 33, 16, **others), torch.randn(2, 2, 40, 16, **others)
    return q.to(dtype), k.to(dtype), torch.randn(2, 2, 40, 8, **others).to(dtype)


def paged() -> tuple[Tensor, ...]:
    """Three sequences of 130, 7 and 64 keys in pages of 16 rows; one query each."""
    torch.manual_seed(0)
    pages = torch.randn(30, 16, 2, 32), torch.randn(30, 16, 2, 32)
    table = torch.randperm(30)[:27].reshape(3, 9).to(torch.int32)
    return torch.randn(3, 4, 32), *pages, table, torch.tensor([130, 7, 64], dtype=torch.int32)


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    q, k, v = dense()
    totals = torch.tensor([0, 12, 30], dtype=torch.int32), torch.tensor([0, 7, 40], dtype=torch.int32)
    packed = q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)
    return {
        "dense": (tw.attention, (q, k, v)),
        "varlen": (tw.attention_varlen, (*packed, *totals)),
        "paged": (tw.attention_paged, paged()),
    }


KINDS = ("dense", "varlen", "paged")


def test_other_sizes_are_judged_as_the_first() -> None:
    """One plan serves calls of many sizes; what it does not cover is refused or computed as ever."""
    torch.manual_seed(0)
    memory = torch.randn(200_000)
    for length in (40, 41, 57, 58):
        q, k, v = (memory[i * 20_000 :][: 4 * length * 16].view(1, 4, length, 16) for i in range(3))
        want = tw.attention(q, k, v)
        for order in ("bhsd", "bshd"):
            out = torch.empty(1, 4, length, 16) if order == "bhsd" else torch.empty(1, length, 4, 16).transpose(1, 2)
            assert tw.attention(q, k, v, out=out) is out
            torch.testing.assert_close(out, want)
        with pytest.raises(InvalidProblem, match="does not overlap v"):
            tw.attention(q, k, v, out=v)
        begin = 20_000 + 4 * length * 16 - 1  # the last element of k
        with pytest.raises(InvalidProblem, match="does not overlap k"):
            tw.attention(q, k, v, out=memory[begin:][: 4 * length * 16].view(1, 4, length, 16))
        out = memory[begin + 1 :][: 4 * length * 16].view(1, 4, length, 16)
        torch.testing.assert_close(tw.attention(q, k, v, out=out), want)
        with pytest.raises(InvalidProblem, match="memory of their own"):
            tw.attention(q, k, v, out=torch.empty(1, 4, 1, 16).expand(1, 4, length, 16))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_tensors_in_the_memory_of_the_result(dtype: torch.dtype) -> None:
    """Also for calls with a plan, which knows a converted tensor and not the one that was given."""
    for rows in (20, 24, 28, 22):
        q, k, v = torch.randn(3, rows, 2, 16)
        memory = torch.zeros(rows * 32 * 4, dtype=torch.uint8)
        totals = torch.tensor([0, rows // 2, rows], dtype=dtype)
        limits: Any = {"max_seqlen_q": rows, "max_seqlen_k": rows}
        want = tw.attention_varlen(q, k, v, totals, totals.clone(), **limits)
        out = memory.view(torch.float32).view(rows, 2, 16)
        assert torch.equal(tw.attention_varlen(q, k, v, totals, totals.clone(), out=out, **limits), want)
        inside = memory[: 3 * dtype.itemsize].view(dtype)
        inside.copy_(totals)
        with pytest.raises(InvalidProblem, match="does not overlap cu_seqlens_q"):
            tw.attention_varlen(q, k, v, inside, totals, out=out, **limits)
        assert torch.equal(inside, totals)


@pytest.mark.parametrize("name", KINDS)
def test_symbolic_sizes(name: str) -> None:
    """As traced with sizes that are not known: the same shape comes out."""
    call, given = calls()[name]
    expected = call(*given)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    *operands, out = (mode.from_tensor(t, static_shapes=False) for t in (*given, expected))
    with mode:
        assert call(*operands, out=out).shape == expected.shape


@pytest.mark.parametrize("kind", KINDS)
def test_repeated_calls_write_into_different_memory(kind: str) -> None:
    attention, tensors = calls()[kind]
    expected, lse = attention(*tensors, causal=True, return_lse=True)
    buffers = [torch.full_like(expected, NAN) for _ in range(3)]
    for out in buffers:
        before = out._version
        made, made_lse = attention(*tensors, causal=True, return_lse=True, out=out)
        assert made is out
        assert out._version > before, "autograd must know that the contents changed"
        assert torch.equal(out, expected)
        assert torch.equal(made_lse, lse)
        assert attention(*tensors, causal=True, out=out) is out
    assert len({out.data_ptr() for out in buffers}) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_under_torch_compile(kind: str, compiler: str) -> None:
    attention, tensors = calls()[kind]
    expected = attention(*tensors)

    def step(out: Tensor, *tensors: Tensor) -> Tensor:
        attention(*(t + 0 if t.is_floating_point() else t for t in tensors), out=out)
        return out * 2

    torch.compiler.reset()
    out = torch.full_like(expected, NAN)
    doubled = torch.compile(step, backend=compiler, fullgraph=True)(out, *tensors)
    assert torch.equal(out, expected)
    assert torch.equal(doubled, expected * 2)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")  # torch's own
def test_exported() -> None:
    q, k, v = dense()

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, out: Tensor) -> Tensor:
            tw.attention(q, k, v, out=out)
            return out + 1

    out = torch.empty(2, 4, 33, 8)
    program = torch.export.export(Model(), (q, out)).run_decompositions()
    out.fill_(NAN)
    assert torch.equal(program.module()(q, out), tw.attention(q, k, v) + 1)
    assert torch.equal(out, tw.attention(q, k, v))


def test_the_op_declares_what_it_writes() -> None:
    q, k, v = dense()
    args = (q, k, v, *[None] * 11, *Flags(), torch.empty(2, 4, 33, 8))
    torch.library.opcheck(torch.ops.tilewise.dense_out.default, args)


def test_a_tensor_that_autograd_saved_is_known_to_be_changed() -> None:
    q, k, v = dense()
    out = torch.randn(2, 4, 33, 8)
    weight = torch.ones_like(out, requires_grad=True)
    loss = (weight * out).sum()
    tw.attention(q, k, v, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_inference_mode_and_without_gradients() -> None:
    q, k, v = (t.requires_grad_() for t in dense())
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            out = torch.empty(2, 4, 33, 8)
            assert torch.equal(tw.attention(q, k, v, out=out), tw.attention(q, k, v))


def test_dtypes_of_autocast() -> None:
    q, k, v = dense()
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.empty(2, 4, 33, 8, dtype=torch.bfloat16)
        assert torch.equal(tw.attention(q, k, v, out=out), tw.attention(q, k, v))
        with pytest.raises(InvalidProblem, match=r"out: expected dtype torch\.bfloat16, got torch\.float32"):
            tw.attention(q, k, v, out=out.float())


@pytest.mark.usefixtures("always_cascade")
@pytest.mark.parametrize("strides", ["contiguous", "rows apart", "columns apart"])
def test_with_a_shared_prefix(strides: str) -> None:
    q, k, v, table, lengths = paged()
    table[:2, :4], lengths[1] = table[:1, :4], 80
    shared = SharedPrefix(
        (Group(2, 2, 64),), table[:1, :4].contiguous(), torch.tensor([64], dtype=torch.int32),
        torch.tensor([0, 2], dtype=torch.int32), None, torch.cat([table[:2, 4:], table[2:, :5]]),
        lengths - torch.tensor([64, 64, 0], dtype=torch.int32),
    )  # fmt: skip
    expected, lse = tw.attention_paged(q, k, v, table, lengths, return_lse=True, shared_prefix=shared)
    assert not torch.equal(expected, tw.attention_paged(q, k, v, table, lengths)), "the hint is followed"
    memory = torch.empty(3, 4, 32 if strides == "contiguous" else 64)
    for _ in range(3):
        memory.fill_(NAN)
        out, other = (memory[..., ::2], memory[..., 1::2]) if "col" in strides else (memory[..., :32], memory[..., 32:])
        made, made_lse = tw.attention_paged(q, k, v, table, lengths, return_lse=True, shared_prefix=shared, out=out)
        assert made is out
        # Columns apart are merged by another kernel.
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6 if "col" in strides else 0)
        torch.testing.assert_close(made_lse, lse, rtol=0, atol=1e-6 if "col" in strides else 0)
        assert bool(other.isnan().all())
    rows = torch.tensor([0, 1])
    there = torch.empty(0, dtype=torch.float32).set_(rows.untyped_storage())
    with pytest.raises(InvalidProblem, match=r"does not overlap shared_prefix\.rows"):
        tw.attention_paged(
            q[:, :1, :1], k[..., :1, :1], v[..., :1, :1], table, lengths,
            shared_prefix=shared._replace(rows=rows), out=there[:3].view(3, 1, 1),
        )  # fmt: skip


def test_flops_are_counted() -> None:
    q, k, v = dense()
    counted = []
    for out in (None, torch.empty(2, 4, 33, 8)):
        with FlopCounterMode(display=False) as counter:
            tw.attention(q, k, v, out=out)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


def test_fake_tensors() -> None:
    with torch._subclasses.FakeTensorMode():
        q, k, v = dense()
        out = torch.empty(2, 4, 33, 8)
        assert tw.attention(q, k, v, out=out) is out
        with pytest.raises(InvalidProblem, match="out: expected seqlen_q 33"):
            tw.attention(q, k, v, out=out[:, :, :-1])


class TestRefused:
    """What `out` may not be."""

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (str, "a torch.Tensor or None"),
            (lambda out: out.bfloat16(), r"dtype torch\.float32, got torch\.bfloat16"),
            (lambda out: out[:1], "batch 2 as in q"),
            (lambda out: out[..., :4], "head_dim_v 8 as in v"),
            (lambda out: out[0], "4 dimensions"),
            (lambda out: out.to("meta"), "a tensor on cpu as q is"),
            (lambda out: out[..., :1].expand(-1, -1, -1, 8), "elements with memory of their own"),
            (lambda out: torch.empty(9999).as_strided(out.shape, (1056, 264, 4, 1)), "memory of their own"),
            (lambda out: torch.complex(out, out).conj().imag, "a negated view"),
            (lambda out: out.to_sparse(), "a dense tensor"),
            (lambda out: out.clone().requires_grad_(), "an out that requires a gradient"),
        ],
    )
    def test_tensors(self, make: Callable[[Tensor], Any], reason: str) -> None:
        q, k, v = dense()
        with pytest.raises(InvalidProblem, match=f"out: .*{reason}"):
            tw.attention(q, k, v, out=make(torch.zeros(2, 4, 33, 8)))

    def test_gradients(self) -> None:
        q, k, v = dense(requires_grad=True)
        with pytest.raises(InvalidProblem, match="out: expected a call without gradients"):
            tw.attention(q, k, v, out=torch.empty(2, 4, 33, 8))

    @pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
    def test_memory_of_an_operand(self, name: str) -> None:
        """Also in a call whose signature is known, because addresses are not part of it."""
        torch.manual_seed(0)
        memory = torch.randn(4, 1, 4, 8, 8)
        q, k, v = memory[0], memory[1], memory[2]
        sinks = torch.randn(4 * 64)[:4]
        tw.attention(q, k, v, sinks=sinks, out=memory[3])
        place = {"q": q, "k": k, "v": v}.get(name)
        if place is None:
            place = torch.empty(0).set_(sinks.untyped_storage()).view(1, 4, 8, 8)
        before = place.clone()
        with pytest.raises(InvalidProblem, match=f"out: expected memory that does not overlap {name}"):
            tw.attention(q, k, v, sinks=sinks, out=place)
        assert torch.equal(place, before), "nothing was written"

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
    def test_transforms(self) -> None:
        q, k, v = dense()
        out = torch.empty(2, 4, 33, 8)
        with pytest.raises(Unsupported, match="out= is not computed under"):
            torch.func.vmap(lambda q: tw.attention(q, k, v, out=out))(q[None])
        with pytest.raises(Unsupported, match="out= is not computed under"):
            torch.func.jvp(lambda q: tw.attention(q, k, v, out=out), (q,), (q,))

    def test_forecasts(self) -> None:
        with pytest.raises(InvalidProblem, match="a forecast is the same without it"):
            tw.explain(*dense(), out=torch.empty(2, 4, 33, 8))


@pytest.mark.parametrize("packed", [False, True])
def test_lengths_and_pages_that_change_in_place_between_calls(packed: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    pages, q = torch.randn(8, 4, 2, 16, generator=draw), torch.randn(3, 4, 16, generator=draw)
    table = torch.tensor([[4, 1, 0], [2, 3, 5], [6, 7, 0]], dtype=torch.int32)
    lengths, out = torch.tensor([10, 3, 5], dtype=torch.int32), torch.empty(3, 4, 16)
    starts = torch.arange(4, dtype=torch.int32)
    flags: dict[str, Any] = {"cu_seqlens_q": starts, "max_seqlen_q": 2, "causal": True} if packed else {}

    def agree() -> None:
        found = tw.attention_paged(q, pages, pages, table, lengths, out=out.fill_(torch.nan), **flags)
        expected = tw.attention_paged(q, pages, pages, table, lengths, backend="reference", **flags)
        assert found is out
        torch.testing.assert_close(found, expected)

    def refused(argument: str, place: Tensor, number: int) -> None:
        good = int(place)
        place.fill_(number)
        with pytest.raises(InvalidProblem) as caught:
            agree()
        assert caught.value.argument == argument
        place.fill_(good)

    agree()
    agree()
    lengths[1] = 9
    agree()
    table[0, 0] = 5
    agree()
    refused("seqlens_k", lengths[2], 13)
    refused("block_table", table[1, 2], 8)
    if packed:
        starts.copy_(torch.tensor([0, 2, 2, 3]))
        agree()
        refused("cu_seqlens_q", starts[1], 4)
        starts.copy_(torch.tensor([0, 1, 2, 2]))
    agree()
    # The same tensors with memory of others.
    for given, others in ((lengths, [1, 12, 8]), (table, [[3, 2, 1], [0, 7, 6], [5, 4, 3]]), (starts, [0, 0, 1, 3])):
        given.data = torch.tensor(others, dtype=torch.int32)
        agree()


def test_calls_keep_no_lengths_alive() -> None:
    memory = mmap.mmap(-1, 64)
    lengths = torch.from_numpy(np.frombuffer(memory, np.int32, 1)).fill_(3)
    q, pages, table = torch.randn(1, 4, 16), torch.randn(1, 4, 2, 16), torch.zeros(1, 1, dtype=torch.int32)
    for _ in range(3):
        tw.attention_paged(q, pages, pages, table, lengths, out=torch.empty(1, 4, 16))
    del lengths
    memory.close()  # raises while an array looks into it


def test_calls_keep_no_copies_of_large_tables() -> None:
    q, pages, lengths = torch.randn(1, 1, 8), torch.randn(1, 1, 1, 8), torch.empty(1, dtype=torch.int32)
    tracemalloc.start()
    for length in range(80_000, 80_008):
        table = torch.zeros(1, length, dtype=torch.int32)
        for _ in range(2):
            tw.attention_paged(q, pages, pages, table, lengths.fill_(length), out=torch.empty(1, 1, 8))
    table[0, 7] = 1
    with pytest.raises(InvalidProblem, match="block_table"):
        tw.attention_paged(q, pages, pages, table, lengths, out=torch.empty(1, 1, 8))
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 2**21, "eight tables of 320 kB"


def test_sinks_that_share_a_number() -> None:
    draw = torch.Generator().manual_seed(0)
    pages, q = torch.randn(4, 4, 2, 16, generator=draw), torch.randn(2, 4, 16, generator=draw)
    table, lengths = torch.arange(4, dtype=torch.int32).view(2, 2), torch.tensor([7, 3], dtype=torch.int32)
    numbers = torch.tensor([2.0, 50.0, -50.0, 90.0, 3.0, 4.0, 1.0])
    for sinks in (numbers[:1].expand(4), numbers[::2], numbers[:4]):
        for _ in range(2):
            found = tw.attention_paged(q, pages, pages, table, lengths, sinks=sinks, out=torch.empty(2, 4, 16))
            torch.testing.assert_close(
                found, tw.attention_paged(q, pages, pages, table, lengths, sinks=sinks, backend="reference")
            )


def test_rows_written_through_slots_that_change_in_place() -> None:
    rows, slots = torch.randn(3, 2, 16), torch.tensor([0, 5, 7])
    pages = torch.zeros(2, 2, 4, 2, 16)
    for _ in range(2):
        write_rows(rows, -rows, pages[0], pages[1], slots)
    slots.copy_(torch.tensor([-1, 6, 1]))
    write_rows(rows, -rows, pages[0], pages[1], slots)
    flat = pages.view(2, 8, 2, 16)
    for slot, row in ((0, 0), (5, 1), (7, 2), (6, 1), (1, 2)):
        assert torch.equal(flat[0, slot], rows[row])
        assert torch.equal(flat[1, slot], -rows[row])
    assert not flat[:, 2:5].any()
    slots[2] = 8
    with pytest.raises(InvalidProblem, match="slots"):
        write_rows(rows, -rows, pages[0], pages[1], slots)


def test_overlap_is_exact_for_any_strides() -> None:
    """Against the bytes of every element, listed one by one."""
    draw = random.Random(0)
    memory, found = torch.zeros(64, dtype=torch.uint8), set()

    def view() -> Tensor:
        dtype = draw.choice((torch.uint8, torch.int16))
        shape, strides = ([draw.randint(low, 3) for _ in range(3)] for low in (1, 0))
        return memory.view(dtype).as_strided(shape, strides, draw.randint(0, 12))

    def bytes_of(t: Tensor) -> set[int]:
        places = torch.arange(64 // t.element_size()).as_strided(t.shape, t.stride(), t.storage_offset()).flatten()
        return {place * t.element_size() + byte for place in places.tolist() for byte in range(t.element_size())}

    for _ in range(500):
        a, b = view(), view()
        found.add(overlap(a, b))
        assert overlap(a, b) == bool(bytes_of(a) & bytes_of(b)), (a.shape, a.stride(), b.shape, b.stride())
    assert found == {True, False}
