"""One suite for every backend: the same cases, the same oracle, the same derived tolerances (docs/contract.md)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tilewise import ops, testing
from tilewise.arguments import KINDS, ROWS, Shared
from tilewise.errors import Unsupported
from tilewise.numerics import dropout_keep
from tilewise.operands import Flags, Operands
from tilewise.problem import Kind, Layout
from tilewise.testing import BackendImplementation, Case, check, find_faults, make_inputs, run, special
from tilewise.testing.generation import pair_cases, single_cases, size_cases
from tilewise.testing.higher import higher_cases
from tilewise.testing.results import dropout_seed

pytestmark = [
    pytest.mark.usefixtures("reference_is_single_threaded"),
    # Triton 3.6's interpreter does this to itself.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning:triton"),
]

Test = TypeVar("Test", bound=Callable[..., None])


def over(cases: Callable[[], list[Case]]) -> Callable[[Test], Test]:
    """Run the test over (case, backend); tests/conftest.py expands it."""

    def mark(test: Test) -> Test:
        test.cases = cases  # type: ignore[attr-defined]
        return test

    return mark


def runnable(case: Case, backend: str, device: str) -> tuple[Case, BackendImplementation]:
    """The case, or its forward alone where the backend refuses gradients; skips with the reason if it refuses both."""
    implementation = BackendImplementation(backend, device)
    reason = implementation.supports(case)
    if reason is None:
        return case, implementation
    if implementation.supports(case.forward_only()) is None:
        return case.forward_only(), implementation
    pytest.skip(reason)


# The numbers of the table of arguments, and values of some beside the one that it has.
NUMBERS = [ROWS[field.name] for field in dataclasses.fields(Shared)]
VALUES = {"softcap": (0.5, 20.0), "dropout": (0.1, 0.9)}


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """Small problems with any combination of features."""
    kind: Kind = draw(st.sampled_from(("dense", "varlen", "paged")))
    length = st.integers(0, 40)
    count = draw(st.integers(1, 3))
    lengths = [(draw(length), draw(length)) for _ in range(1 if kind == "dense" else count)]
    lengths = lengths * count if kind == "dense" else lengths
    num_kv_heads = draw(st.integers(1, 2))
    shapes = st.sampled_from(("", "", "bhqk", "1h1k", "b1q1", "qk", "h11", "k"))
    bound = st.none() | st.integers(0, 20)
    rows = [row for row in NUMBERS if KINDS[kind] in row.calls]
    return Case(
        kind=kind,
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))),
        seqlens_q=tuple(q for q, _ in lengths),
        seqlens_k=tuple(k for _, k in lengths),
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.integers(1, 70)),
        head_dim_v=draw(st.integers(1, 70)),
        window=draw(st.none() | st.tuples(bound, bound)),
        alibi=draw(st.sampled_from(("", "h", "bh"))),
        bias=draw(shapes),
        bias_holes=draw(st.booleans()),
        mask=draw(shapes),
        tiles=draw(st.booleans()),
        sinks=draw(st.booleans()),
        scale=draw(st.sampled_from((None, 0.1, 1.0))),
        layout=draw(st.sampled_from(("bhsd", "bshd"))) if kind == "dense" else "bhsd",
        strides=draw(st.sampled_from(("contiguous", "transposed", "sliced", "expanded", "strided_last"))),
        page_size=draw(st.sampled_from((1, 3, 16))),
        shared_pages=draw(st.booleans()),
        padding=0 if kind == "dense" else draw(st.integers(0, 3)),
        bounds=draw(st.sampled_from(("exact", "loose"))),
        seed=draw(st.integers(0, 3)),
        **{
            row.name: draw(st.sampled_from((row.default, row.default, *VALUES.get(row.name, (row.tried,)))))
            for row in rows
        },
    )


def judged(cases: Callable[[], list[Case]], judge: Callable[..., object] = check) -> Callable[..., None]:
    """A test of every case and backend."""

    @over(cases)
    def test(case: Case, backend: str, device: str) -> None:
        judge(*runnable(case, backend, device))

    return test


def judged_higher(cases: Callable[[], list[Case]], judge: Callable[..., object]) -> Callable[..., None]:
    """A test of the tangents and second derivatives of every case and backend."""

    @over(cases)
    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
    def test(case: Case, backend: str, device: str) -> None:
        implementation = BackendImplementation(backend, device)
        reason = implementation.supports(case, higher=True)
        if reason is not None:
            pytest.skip(reason)
        judge(case, implementation)

    return test


def trained_cases() -> list[Case]:
    return [case for case in special.repeatable_cases() if case.wants_grad]


test_single_features = judged(single_cases)
test_special_cases = judged(special.special_cases)
test_fp8 = judged(special.fp8_cases)
test_latents = judged(special.latent_cases)
test_pairs_of_features = pytest.mark.slow(judged(pair_cases))
test_sizes = pytest.mark.slow(judged(size_cases))
test_nothing_outside_the_lengths_is_read = judged(special.padded_cases, testing.check_unread)
test_runs_repeat_bit_for_bit = judged(special.repeatable_cases, testing.check_repeatable)
test_inputs_are_left_alone = judged(special.padded_cases, testing.check_untouched)
test_results_are_written_into_memory_of_the_caller = judged(special.written_cases, testing.check_written)
test_tangents_and_second_derivatives = judged_higher(lambda: [*single_cases(), *higher_cases()], testing.check_higher)
test_tangents_and_second_derivatives_repeat_their_bits = judged_higher(trained_cases, testing.check_higher_repeatable)


@pytest.mark.slow
@settings(max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=[*HealthCheck])
@given(case=random_cases())
def test_random_problems(case: Case, backend: str, device: str) -> None:
    implementation = BackendImplementation(backend, device)
    # Not assume(): a backend that takes few of these (16-bit, large head_dim) would leave hypothesis unsatisfied.
    if implementation.supports(case) is None:
        check(case, implementation)


@pytest.mark.parametrize("kind", ["bhsd", "bshd", "varlen"])
def test_dropout_bits_are_the_contract_s(kind: str, backend: str, device: str) -> None:
    """With uniform scores and the identity as values, out shows which probabilities were kept."""
    seqlen, dropout = 65, 0.4
    case = Case(
        kind="varlen" if kind == "varlen" else "dense", layout="bshd" if kind == "bshd" else "bhsd", dropout=dropout,
        seqlens_q=(seqlen,) * 2, seqlens_k=(seqlen,) * 2, head_dim=8, head_dim_v=seqlen, grad_of=(), scale=0.0,
    )  # fmt: skip
    case, implementation = runnable(case, backend, device)
    inputs = make_inputs(case, device)
    identity = torch.eye(seqlen, device=device)
    v = identity[:, None].repeat(2, 2, 1) if kind == "varlen" else identity.expand(2, 2, seqlen, seqlen)
    v = v.transpose(1, 2) if kind == "bshd" else v
    out = implementation.run(case, dataclasses.replace(inputs, v=v))["out"].cpu()
    out = out.unflatten(0, (2, seqlen)) if kind == "varlen" else out
    kept = (out if kind == "bhsd" else out.transpose(1, 2)) != 0.0
    positions = np.arange(seqlen)
    for index, head in itertools.product(range(2), range(2)):
        expected = dropout_keep(dropout_seed(case), dropout, index, head, positions, positions)
        assert np.array_equal(kept[index, head].numpy(), expected)


@pytest.mark.parametrize(("kind", "rows"), [("dense", 21), ("dense", 1), ("varlen", 21)])
def test_dropout_counts_from_its_origin(kind: Kind, rows: int, backend: str, device: str) -> None:
    """A part of a larger problem drops what the whole would: its bits start at a batch entry, head, row and key."""
    seed, origin, keys, dropout = 5 << 40, (3, 2, 1000, 4 << 20), 21, 0.4
    shapes = [(2, heads, n, 16) for heads, n in ((2, rows), (1, keys))]
    q, k = (torch.randn(shape, device=device).requires_grad_() for shape in shapes)
    v = torch.eye(keys, device=device).expand(2, 1, keys, keys).clone().requires_grad_()
    counts = torch.tensor([seed, *origin], device=device)

    def results(name: str) -> list[Tensor]:
        flags = Flags(dropout=dropout, needs_grad=True, backend=name)
        operands = Operands(q, k, v, seed=counts)
        if kind == "varlen":
            packed = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
            lengths = torch.tensor([0, keys, 2 * keys], dtype=torch.int32, device=device)
            operands = Operands(packed[0], packed[1], packed[2], lengths, lengths, seed=counts)
        out, lse = ops.attention(kind, operands, flags)
        out = out.unflatten(0, (2, keys)).transpose(1, 2) if kind == "varlen" else out
        return [out, lse, *torch.autograd.grad((out.square().sum(), lse.sum()), (q, k, v))]

    try:
        found = results(backend)
    except Unsupported as refusal:
        pytest.skip(str(refusal))
    at_rows, at_keys = np.arange(rows) + origin[2], np.arange(keys) + origin[3]
    for entry, head in itertools.product(range(2), range(2)):
        expected = dropout_keep(seed, dropout, entry + origin[0], head + origin[1], at_rows, at_keys)
        assert np.array_equal((found[0][entry, head] != 0.0).cpu().numpy(), expected)
    # One wrong bit moves a gradient by about 0.1; products in TF32 move it by up to 0.005.
    for mine, theirs in zip(found, results("reference"), strict=True):
        torch.testing.assert_close(mine, theirs.to(mine.dtype), atol=1e-2, rtol=1e-2)


HALF = Case(dtype=torch.bfloat16, head_dim=64, head_dim_v=64, sinks=True)
ENDLESS_SINKS = {
    "causal": dataclasses.replace(HALF, causal=True),
    "softcap": dataclasses.replace(HALF, softcap=5.0),
    "decode": dataclasses.replace(HALF, seqlens_q=(1, 1), seqlens_k=(700, 700), grad_of=()),
    "rows without keys": dataclasses.replace(HALF, seqlens_q=(70, 70), seqlens_k=(30, 30), causal=True),
}


@pytest.mark.parametrize("name", ENDLESS_SINKS)
def test_a_sink_of_plus_infinity_takes_all(name: str, backend: str, device: str) -> None:
    """Its head has out 0, lse +inf and passes no gradient on; the other one keeps every bit of its own."""
    case, implementation = runnable(ENDLESS_SINKS[name], backend, device)
    inputs = make_inputs(case, device)
    assert inputs.sinks is not None
    endless = inputs.sinks.clone()
    endless[0] = torch.inf
    usual, found = (implementation.run(case, dataclasses.replace(inputs, sinks=s)) for s in (inputs.sinks, endless))
    assert bool((found["lse"][:, 0] == torch.inf).all())
    assert torch.equal(found["lse"][:, 1], usual["lse"][:, 1])
    assert torch.equal(found["out"][:, 1], usual["out"][:, 1])
    for result in ("out", "dq", "dk", "dv"):
        if result in found:
            assert int(found[result][:, 0].count_nonzero()) == 0, result
            assert bool(found[result][:, 1].isfinite().all()), result


PLAIN = dataclasses.replace(HALF, sinks=False)
LARGE_SCORES = {
    "full": PLAIN,
    "causal": dataclasses.replace(PLAIN, seqlens_q=(200, 200), seqlens_k=(300, 300), causal=True),
    "window": dataclasses.replace(PLAIN, seqlens_q=(130, 130), seqlens_k=(300, 300), window=(100, 20)),
    "decode": dataclasses.replace(PLAIN, seqlens_q=(1, 1), seqlens_k=(700, 700), grad_of=()),
    "128 columns": dataclasses.replace(PLAIN, head_dim=128, head_dim_v=128, seqlens_q=(70, 70), seqlens_k=(260, 260)),
    "fp16": dataclasses.replace(PLAIN, dtype=torch.float16, seqlens_q=(70, 70), seqlens_k=(260, 260), causal=True),
    "many keys": dataclasses.replace(PLAIN, seqlens_q=(66,), seqlens_k=(1200,), num_heads=1, num_kv_heads=1),
}


# In Triton's backward, interpreted, P of a key that is hidden is infinite before it is masked.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("scale", [1e6, 1e9, 1e10, 1e15, 1e30])
@pytest.mark.parametrize("name", LARGE_SCORES)
def test_large_scores_take_all_or_share(name: str, scale: float, backend: str, device: str) -> None:
    """Every key is there twice. A fused multiply-add left of the largest score what its product had lost: NaN, or 0."""
    case, implementation = runnable(dataclasses.replace(LARGE_SCORES[name], scale=scale), backend, device)
    inputs = make_inputs(case, device)
    k = inputs.k.clone()
    k[:, :, 1::2] = k[:, :, 0 : k.shape[2] // 2 * 2 : 2]
    found = implementation.run(case, dataclasses.replace(inputs, k=k))
    q, k, v = (t.double().cpu() for t in (inputs.q, k, inputs.v))
    k, v = (t.repeat_interleave(case.num_heads // case.num_kv_heads, 1) for t in (k, v))
    scores = q @ k.mT
    own = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
    left, right = case.window or (None, 0 if case.causal else None)
    keys = torch.arange(k.shape[2])
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    seen &= (keys <= own + right) if right is not None else True
    seen &= (keys >= own - left) if left is not None else True
    scores = scores.masked_fill(~seen, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    # Others are so much smaller that fp32 sees it.
    clear = scores.masked_fill(scores == top, -torch.inf).amax(-1) < (top - top.abs() * 1e-5)[..., 0]
    assert float(clear.double().mean()) > 0.9
    shares = (scores == top).double()
    expected = shares @ v / shares.sum(-1, keepdim=True)
    torch.testing.assert_close(found["out"].double().cpu()[clear], expected[clear], rtol=0.02, atol=1e-3)
    torch.testing.assert_close(found["lse"].double().cpu(), top[..., 0] * scale, rtol=3e-6, atol=1.0)
    # Times such a scale, dQ and dK may pass what 16 bits hold.
    assert not any(bool(result.isnan().any()) for result in found.values())
    assert "dv" not in found or bool(found["dv"].isfinite().all())


PEAKS = {
    "full": dataclasses.replace(PLAIN, seqlens_q=(130, 130), seqlens_k=(300, 300)),
    "causal": dataclasses.replace(PLAIN, seqlens_q=(300, 300), seqlens_k=(300, 300), causal=True),
    "128 columns": dataclasses.replace(PLAIN, seqlens_q=(130,), seqlens_k=(300,), head_dim=128, head_dim_v=128),
    "256 columns": dataclasses.replace(PLAIN, seqlens_q=(70,), seqlens_k=(300,), head_dim=256, head_dim_v=256),
    "fp16": dataclasses.replace(PLAIN, dtype=torch.float16, seqlens_q=(300,), seqlens_k=(300,), causal=True),
    "shared heads": dataclasses.replace(PLAIN, seqlens_q=(130,), seqlens_k=(300,), num_heads=4, num_kv_heads=1),
    "packed": dataclasses.replace(PLAIN, kind="varlen", seqlens_q=(130, 130), seqlens_k=(300, 300)),
    "pages": dataclasses.replace(PLAIN, kind="paged", seqlens_q=(130, 130), seqlens_k=(300, 300), grad_of=()),
    "decode": dataclasses.replace(PLAIN, seqlens_q=(1, 1), seqlens_k=(700, 700), grad_of=()),
}


# As above: P of a key that is hidden is infinite in Triton's backward before it is masked.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("nats", [20, 40, 60])
@pytest.mark.parametrize("peak", ["first key", "a key in the middle", "own key"])
@pytest.mark.parametrize("name", PEAKS)
def test_a_key_that_takes_all_is_taken_exactly(name: str, peak: str, nats: int, backend: str, device: str) -> None:
    """One key's score is `nats` above all others: its P is 1, so out is its value and dP - delta cancels.

    The other keys together weigh at most n exp(-nats), which bounds how far out may be from that value. What is left of
    dS is rounding of fp32 sums; a P that is off by one rounding to 16 bits would leave a thousand times more.
    """
    asked = dataclasses.replace(PEAKS[name], cotangents=("out",))
    case, implementation = runnable(asked, backend, device)
    inputs, heads = make_inputs(case, device), case.num_heads
    rows, keys = case.seqlens_q[0], case.seqlens_k[0]
    q, dout = (_by_head(t, case.batch, rows).clone() for t in (inputs.q, inputs.dout))
    k, v = (_keys_by_head(t, inputs.block_table, case).clone() for t in (inputs.k, inputs.v))
    own = torch.arange(rows, device=device) + keys - rows
    at = own if peak == "own key" else torch.full_like(own, 0 if peak == "first key" else keys - rows)
    if peak == "own key":
        q = k[:, :, at].repeat_interleave(heads // case.num_kv_heads, 1) * nats
    else:
        q[..., 0], k[..., 0] = nats + 12, 0
        k[:, :, int(at[0]), 0] = case.head_dim**0.5
    shaped = {"q": _like(q, inputs.q), "k": _paged_like(k, inputs.k, inputs.block_table, case)}
    shaped |= {"v": _paged_like(v, inputs.v, inputs.block_table, case)}
    found = implementation.run(case, dataclasses.replace(inputs, **shaped))

    q, k, v, dout = (t.double() for t in (q, k, v, dout))
    k, v = (t.repeat_interleave(heads // case.num_kv_heads, 1) for t in (k, v))
    scores = q @ k.mT / case.head_dim**0.5
    if case.causal:
        scores = scores.masked_fill(torch.arange(keys, device=device) > own[:, None], -torch.inf)
    top = scores.gather(-1, at[:, None].expand(*scores.shape[:-1], 1))
    others = scores.scatter(-1, at[:, None].expand(*scores.shape[:-1], 1), -torch.inf)
    # A few rows of random keys are nearer to another key than asked for.
    sure = (others.amax(-1, keepdim=True) < top - nats)[..., 0]
    assert float(sure.double().mean()) > 0.9
    out = _by_head(found["out"], case.batch, rows).double()
    bound = 4 * keys * np.exp(-nats) * float(v.abs().max()) + 1e-9
    assert float((out - v[:, :, at])[sure].abs().max()) <= bound
    if "dq" in found:
        p = scores.softmax(-1)
        ds = p * (dout @ v.mT - (p @ v * dout).sum(-1, keepdim=True)) / case.head_dim**0.5
        wrong = (_by_head(found["dq"], case.batch, rows).double() - ds @ k)[sure]
        assert float(wrong.square().mean().sqrt()) <= 1e-5
    if "dk" in found and bool(sure.all()):
        grouped = (ds.mT @ q).unflatten(1, (case.num_kv_heads, -1)).sum(2)
        wrong = _by_head(found["dk"], case.batch, keys).double() - grouped
        assert float(wrong.square().mean().sqrt()) <= 1e-5 * float(q.square().mean().sqrt())


def _by_head(tensor: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, heads, seqlen, dim) of a dense or packed tensor of equal sequences."""
    return tensor if tensor.dim() == 4 else tensor.unflatten(0, (batch, seqlen)).transpose(1, 2)


def _like(tensor: Tensor, packed: Tensor) -> Tensor:
    """The other way, contiguous."""
    shaped = tensor if packed.dim() == 4 else tensor.transpose(1, 2).flatten(0, 1)
    return shaped.contiguous()


def _slots(table: Tensor, case: Case) -> Tensor:
    """(batch, keys): where each key lies in the pages laid end to end."""
    keys = torch.arange(case.seqlens_k[0], device=table.device)
    return table[:, keys // case.page_size].long() * case.page_size + keys % case.page_size


def _keys_by_head(tensor: Tensor, table: Tensor | None, case: Case) -> Tensor:
    if table is None:
        return _by_head(tensor, case.batch, case.seqlens_k[0])
    return tensor.flatten(0, 1)[_slots(table, case)].transpose(1, 2)


def _paged_like(tensor: Tensor, given: Tensor, table: Tensor | None, case: Case) -> Tensor:
    if table is None:
        return _like(tensor, given)
    pages = given.clone()
    pages.flatten(0, 1)[_slots(table, case)] = tensor.transpose(1, 2)
    return pages


HIDING = {
    "causal": dataclasses.replace(PLAIN, seqlens_q=(100, 100), seqlens_k=(100, 100), causal=True),
    "window": dataclasses.replace(PLAIN, seqlens_q=(100, 100), seqlens_k=(100, 100), window=(None, 0)),
    "mask": dataclasses.replace(PLAIN, seqlens_q=(100, 100), seqlens_k=(100, 100), mask="qk"),
    "bias": dataclasses.replace(PLAIN, seqlens_q=(100, 100), seqlens_k=(100, 100), bias="qk", grad_of=("q", "k", "v")),
    "fp32": dataclasses.replace(PLAIN, dtype=torch.float32, seqlens_q=(100,), seqlens_k=(300,), causal=True),
    "fp16": dataclasses.replace(PLAIN, dtype=torch.float16, seqlens_q=(100,), seqlens_k=(300,), causal=True),
    "decode": dataclasses.replace(PLAIN, seqlens_q=(3, 3), seqlens_k=(700, 700), causal=True, grad_of=()),
}


# As above: P of a key that is hidden is infinite in Triton's backward before it is masked.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("name", HIDING)
def test_hidden_values_of_any_finite_size_change_nothing(name: str, backend: str, device: str) -> None:
    """The last row alone sees the last key, which is 30000 in one of two runs. Its own results do not count."""
    case, implementation = runnable(HIDING[name], backend, device)
    inputs = make_inputs(case, device)
    seqlen_q, seqlen_k = case.seqlens_q[0], case.seqlens_k[0]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    visible[:-1, -1] = False
    if inputs.mask is not None:
        inputs = dataclasses.replace(inputs, mask=visible)
    if inputs.bias is not None:
        hidden = torch.zeros_like(inputs.bias).masked_fill(~visible, -torch.inf)
        inputs = dataclasses.replace(inputs, bias=hidden)
    for cotangent in (inputs.dout, inputs.dlse):
        if cotangent is not None:
            cotangent[:, :, -1] = 0.0
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, :, -1], v[:, :, -1] = 30000.0, -30000.0
    usual, found = (implementation.run(case, x) for x in (inputs, dataclasses.replace(inputs, k=k, v=v)))
    for result in case.results:
        rows = slice(None) if result in ("dk", "dv") else slice(seqlen_q - 1)
        # dq and dk of other keys are sums that some backends form in any order.
        mine, theirs = (x[result][:, :, rows].double() for x in (found, usual))
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


NEIGHBOURS = {
    "dense": dataclasses.replace(PLAIN, num_heads=4, num_kv_heads=2),
    "packed": dataclasses.replace(PLAIN, kind="varlen", seqlens_q=(70, 30, 130), seqlens_k=(70, 50, 130), causal=True),
    "packed, fp32": dataclasses.replace(
        PLAIN, kind="varlen", dtype=torch.float32, seqlens_q=(5, 1, 9), seqlens_k=(5, 8, 9)
    ),
    "paged": dataclasses.replace(
        PLAIN, kind="paged", seqlens_q=(1, 1, 1), seqlens_k=(70, 30, 130), page_size=16, grad_of=()
    ),
    "paged, int8": dataclasses.replace(
        PLAIN, kind="paged", seqlens_q=(3, 1, 9), seqlens_k=(70, 30, 130), page_size=16, fp8="int8"
    ),
}


# Of numpy, in Triton's interpreter.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_nan_and_infinity_stay_in_their_sequence_and_head(name: str, value: float, backend: str, device: str) -> None:
    """In all of K and V of the middle (or last) sequence's first head, other results are as without them."""
    case, implementation = runnable(NEIGHBOURS[name], backend, device)
    inputs = make_inputs(case, device)
    index, group = len(case.seqlens_k) // 2, case.num_heads // case.num_kv_heads
    k, v = inputs.k.clone(), inputs.v.clone()
    if case.kind == "dense":
        k[index, 0], v[index, 0] = value, value
    elif case.kind == "varlen":
        rows = slice(sum(case.seqlens_k[:index]), sum(case.seqlens_k[: index + 1]))
        k[rows, 0], v[rows, 0] = value, value
    else:
        assert inputs.block_table is not None
        pages = inputs.block_table[index, : -(-case.seqlens_k[index] // case.page_size)].long()
        k[pages, :, 0], v[pages, :, 0] = value, value
    usual, found = (implementation.run(case, x) for x in (inputs, dataclasses.replace(inputs, k=k, v=v)))
    for result in case.results:
        mine, theirs = found[result].double(), usual[result].double()
        heads = slice(0, group if result in ("out", "lse", "dq") else 1)
        lengths = case.seqlens_k if result in ("dk", "dv") else case.seqlens_q
        own = slice(sum(lengths[:index]), sum(lengths[: index + 1]))
        at = (index, heads) if case.kind == "dense" else (heads, own) if result == "lse" else (own, heads)
        assert not bool(mine[at].isfinite().all()), result
        mine[at] = theirs[at]
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


LARGE_VALUES = {
    "bf16": dataclasses.replace(PLAIN, seqlens_q=(70, 70), seqlens_k=(70, 70)),
    "fp16": dataclasses.replace(PLAIN, dtype=torch.float16, seqlens_q=(70, 70), seqlens_k=(70, 70)),
    "fp32": dataclasses.replace(PLAIN, dtype=torch.float32, seqlens_q=(70, 70), seqlens_k=(70, 70)),
    "decode": dataclasses.replace(PLAIN, seqlens_q=(1, 1), seqlens_k=(700, 700)),
}


@pytest.mark.parametrize("name", LARGE_VALUES)
def test_values_are_weighed_up_to_the_documented_size(name: str, backend: str, device: str) -> None:
    """Sums before the division hold 256 times the largest value times the number of keys; fp16 ends before that."""
    case, implementation = runnable(dataclasses.replace(LARGE_VALUES[name], grad_of=(), scale=0.0), backend, device)
    inputs = make_inputs(case, device)
    largest = min(torch.finfo(torch.float32).max / 256 / case.seqlens_k[0], torch.finfo(case.dtype).max) * 0.9
    found = implementation.run(case, dataclasses.replace(inputs, v=torch.full_like(inputs.v, largest)))
    expected = torch.full_like(found["out"], largest)
    torch.testing.assert_close(found["out"], expected, rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_results_are_contiguous_in_the_callers_layout(layout: Layout, backend: str, device: str) -> None:
    case, implementation = runnable(Case(layout=layout, strides="transposed"), backend, device)
    results = run(case, implementation)
    assert [name for name in case.results if not results[name].is_contiguous()] == []


@over(special.largest_cases)
def test_the_largest_score_of_each_head(case: Case, backend: str, device: str) -> None:
    """Hopper's kernels for decoding and e4m3 operands refuse this; the others are in tests/gpu by name."""
    case, implementation = runnable(case, backend, device)
    try:
        testing.check_largest(case, implementation)
    except Unsupported as refusal:
        pytest.skip(str(refusal))


@pytest.mark.slow
@pytest.mark.parametrize("operand", ["q", "k", "v", "dout"])
def test_offsets_past_32_bits(operand: str, backend: str, device: str) -> None:
    """The second sequence lies 2^31 elements behind the first: 4 GiB, of which only the two are ever touched."""
    case = Case(dtype=torch.bfloat16, causal=True, cotangents=("out",))
    case, implementation = runnable(case, backend, device)
    inputs = make_inputs(case, device)
    near = getattr(inputs, operand)
    memory = torch.empty(2**31 + near[0].numel(), dtype=near.dtype, device=device)
    far = memory.as_strided(near.shape, (2**31, *near.stride()[1:])).copy_(near)
    results = implementation.run(case, dataclasses.replace(inputs, **{operand: far}))
    assert find_faults(case, results) == []
