"""The simulator: replayed events give exact attention, and its counts are those of the closed forms, to the element."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.masks import TileGrid
from tilewise.plan import cost
from tilewise.plan.cost import Traffic
from tilewise.simulator import Algorithm, Machine, Trace, Workload, count, events, replay, schedule, simulate

EXACT = 1e-12


def workload(seqlen_q: int = 7, seqlen_k: int = 9, **changes: Any) -> Workload:
    sizes = {"head_dim": 5, "head_dim_v": 3, "block_m": 2, "block_n": 3, "scale": 0.4} | changes
    return Workload(seqlen_q, seqlen_k, **sizes)


def random_inputs(trace_or_work: Workload, seed: int = 0) -> dict[str, Any]:
    work, rng = trace_or_work, np.random.default_rng(seed)
    return {
        "q": rng.normal(size=(work.seqlen_q, work.head_dim)) * 2,
        "k": rng.normal(size=(work.seqlen_k, work.head_dim)) * 2,
        "v": rng.normal(size=(work.seqlen_k, work.head_dim_v)),
        "dout": rng.normal(size=(work.seqlen_q, work.head_dim_v)),
    }


def reference(work: Workload, inputs: dict[str, Any]) -> dict[str, Any]:
    """The library's fp64 reference: out, lse, and the gradients for dout."""
    tensors = {name: torch.from_numpy(inputs[name])[None, None] for name in ("q", "k", "v", "dout")}
    q, k, v = (tensors[name].requires_grad_() for name in "qkv")
    flags: dict[str, Any] = {"window": (work.left, work.right), "scale": work.scale, "backend": "reference"}
    out, lse = tw.attention(q, k, v, return_lse=True, **flags)
    gradients = torch.autograd.grad(out, (q, k, v), tensors["dout"])
    results = {"out": out, "lse": lse[..., None], **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    return {name: tensor[0, 0].detach().numpy() for name, tensor in results.items()}


def assert_close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=EXACT, atol=EXACT)


sizes = st.integers(1, 13)
sides = st.none() | st.integers(0, 6)
workloads = st.builds(
    Workload,
    seqlen_q=sizes,
    seqlen_k=sizes,
    head_dim=st.integers(1, 6),
    head_dim_v=st.integers(1, 6),
    block_m=st.integers(1, 5),
    block_n=st.integers(1, 5),
    left=sides,
    right=sides,
    scale=st.sampled_from([1.0, 0.3]),
    num_splits=st.integers(1, 4),
    block_k=st.integers(1, 4),
)
FEW = hypothesis_settings(max_examples=15, deadline=None)


# --- exact results


@FEW
@given(work=workloads)
@pytest.mark.parametrize("algorithm", ["naive", "fa1", "fa2", "decode"])
def test_every_order_gives_the_attention_of_the_reference(algorithm: Algorithm, work: Workload) -> None:
    inputs = random_inputs(work)
    expected = reference(work, inputs)
    results = simulate(algorithm, work, inputs).results
    assert_close(results["out"], expected["out"])
    if algorithm != "naive":
        assert_close(results["lse"], expected["lse"])


@FEW
@given(work=workloads)
def test_the_recomputing_backward_gives_the_gradients_of_the_reference(work: Workload) -> None:
    inputs = random_inputs(work)
    expected = reference(work, inputs)
    kept = simulate("fa2", work, inputs).results
    gradients = simulate("backward", work, inputs | {"out": kept["out"], "lse": kept["lse"]}).results
    stored = simulate("naive_backward", work, inputs | {"p": simulate("naive", work, inputs).results["p"]}).results
    for name in ("dq", "dk", "dv"):
        assert_close(gradients[name], expected[name])
        assert_close(stored[name], expected[name])


@FEW
@given(work=workloads, data=st.data())
def test_paged_decoding_reads_nothing_but_the_slots_in_use(work: Workload, data: st.DataObject) -> None:
    pages = -(-work.seqlen_k // work.block_n)
    table = tuple(data.draw(st.permutations(range(pages + 2)))[:pages])
    work = dataclasses.replace(work, block_table=table)
    inputs = random_inputs(work)
    expected = reference(work, inputs)
    for name in "kv":
        poisoned = np.full(((pages + 2) * work.block_n, inputs[name].shape[1]), math.nan)
        for token in range(work.seqlen_k):
            poisoned[table[token // work.block_n] * work.block_n + token % work.block_n] = inputs[name][token]
        inputs[f"{name}_pages"] = poisoned
    results = simulate("paged", work, inputs).results
    assert_close(results["out"], expected["out"])
    assert_close(results["lse"], expected["lse"])


@FEW
@given(work=workloads)
@pytest.mark.parametrize("algorithm", ["matmul_naive", "matmul"])
def test_matmul(algorithm: Algorithm, work: Workload) -> None:
    inputs = random_inputs(work)
    a, b = inputs["q"], inputs["k"].T
    done = simulate(algorithm, work, {"a": a, "b": b})
    assert_close(done.results["c"], a @ b)
    assert done.counts.flops == 2 * work.seqlen_q * work.seqlen_k * work.head_dim


def test_a_trace_that_went_through_json_replays_to_the_same_bits() -> None:
    work = workload(left=4, right=0, num_splits=2)
    inputs = random_inputs(work)
    for algorithm in ("naive", "fa1", "fa2", "decode"):
        trace = schedule(algorithm, work)
        again = Trace.from_json(trace.to_json())
        assert again == trace
        assert all(np.array_equal(replay(again, inputs)[name], found) for name, found in replay(trace, inputs).items())


# --- counts agree with the closed forms


def closed_form(algorithm: str, work: Workload) -> Traffic:
    band, grid, dims = work.band, work.grid, (work.head_dim, work.head_dim_v)
    product = work.seqlen_q, work.seqlen_k, work.head_dim
    forms = {
        "naive": lambda: cost.naive_forward(band, *dims),
        "fa1": lambda: cost.fa1_forward(band, grid, *dims),
        "fa2": lambda: cost.tiled_forward(band, grid, *dims),
        "naive_backward": lambda: cost.naive_backward(band, *dims),
        "backward": lambda: cost.tiled_backward(band, grid, *dims),
        "decode": lambda: cost.split_forward(band, grid, work.num_splits, *dims),
        "matmul_naive": lambda: cost.naive_matmul(*product),
        "matmul": lambda: cost.tiled_matmul(*product, grid),
    }
    return forms[algorithm]()


@FEW
@given(work=workloads)
@pytest.mark.parametrize(
    "algorithm", ["naive", "fa1", "fa2", "naive_backward", "backward", "decode", "matmul_naive", "matmul"]
)
def test_simulated_traffic_is_the_closed_form(algorithm: Algorithm, work: Workload) -> None:
    counts = count(schedule(algorithm, work))
    traffic = closed_form(algorithm, work)
    assert counts.traffic == traffic
    assert counts.bytes_read + counts.bytes_written == traffic.bytes(work.itemsize, work.wide_itemsize)
    assert counts.fast_bytes == counts.fast_elements == 0


@FEW
@given(work=workloads)
def test_simulated_work_is_the_closed_form(work: Workload) -> None:
    dims = work.head_dim, work.head_dim_v
    scores = cost.scores_computed(work.band, work.grid)
    for algorithm in ("fa1", "fa2", "decode"):
        counts = count(schedule(algorithm, work))
        assert counts.scores == scores
        assert counts.scores + counts.skipped == work.seqlen_q * work.seqlen_k
        assert counts.flops == cost.forward_flops(scores, *dims)
    backward = count(schedule("backward", work))
    assert (backward.scores, backward.flops) == (scores, cost.backward_flops(scores, *dims))
    pairs = work.seqlen_q * work.seqlen_k
    assert count(schedule("naive", work)).flops == cost.forward_flops(pairs, *dims)
    assert count(schedule("naive_backward", work)).flops == cost.naive_backward_flops(pairs, *dims)


@FEW
@given(work=workloads)
def test_the_peak_of_fast_memory_is_the_closed_form(work: Workload) -> None:
    work = dataclasses.replace(work, left=None, right=None)
    grid = TileGrid(min(work.block_m, work.seqlen_q), min(work.block_n, work.seqlen_k))
    need = cost.fast_memory_bytes(grid, work.head_dim, work.head_dim_v, work.itemsize, work.wide_itemsize)
    assert count(schedule("fa2", work)).peak_bytes == need
    assert schedule("fa2", work, sram_bytes=need).num_steps == 3 * work.band.count_tiles(work.grid).visited
    with pytest.raises(tw.InvalidProblem, match=f"at least {need} for fa2"):
        schedule("fa2", work, sram_bytes=need - 1)


# --- the model itself


def test_too_little_fast_memory_is_refused_with_the_need_and_its_holders() -> None:
    with pytest.raises(tw.InvalidProblem, match=r"sram_bytes: expected at least \d+ for fa2 .*q 20 B.*k 30 B.*got 64"):
        simulate("fa2", workload(), random_inputs(workload()), sram_bytes=64)


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ("fa3", {}, "algorithm: expected one of naive, fa1"),
        ("fa2", {"block_m": 0}, "block_m: expected a whole number of at least 1"),
        ("fa2", {"head_dim": 2.5}, "head_dim: expected a whole number"),
        ("fa2", {"left": -1}, "left: expected a whole number of at least 0"),
        ("fa2", {"scale": math.nan}, "scale: expected a finite number"),
        ("paged", {}, "block_table: expected a table for 'paged' alone"),
        ("fa2", {"block_table": (0,)}, "block_table: expected a table for 'paged' alone"),
        ("paged", {"block_table": (0, 1)}, "block_table: expected 3 pages"),
        ("matmul_naive", {"seqlen_q": 1000, "seqlen_k": 1000}, "workload: expected at most 100,000 tiles"),
    ],
)
def test_bad_workloads_are_refused(algorithm: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(tw.InvalidProblem, match=message.replace("(", r"\(")):
        schedule(algorithm, dataclasses.replace(workload(), **changes))


def test_inputs_must_fit_the_workload() -> None:
    work = workload()
    with pytest.raises(tw.InvalidProblem, match="dout: expected an array of shape"):
        simulate("backward", work, {"q": np.zeros((7, 5)), "k": np.zeros((9, 5)), "v": np.zeros((9, 3)),
                                    "out": np.zeros((7, 3)), "lse": np.zeros(7)})  # fmt: skip
    with pytest.raises(tw.InvalidProblem, match="q: expected an array of shape"):
        simulate("fa2", work, random_inputs(work) | {"q": np.zeros((7, 4))})


def without(trace: Trace, index: int) -> Trace:
    return dataclasses.replace(trace, events=(*trace.events[:index], *trace.events[index + 1 :]))


def test_the_machine_does_only_what_events_tell() -> None:
    work = workload()
    trace, inputs = schedule("fa2", work), random_inputs(work)
    first_load = next(i for i, event in enumerate(trace.events) if isinstance(event, events.Load))
    with pytest.raises(tw.InvalidProblem, match="events: expected an event that fits what came before"):
        replay(without(trace, first_load), inputs)
    for forgotten in (events.Rescale, events.Store):
        last = max(i for i, event in enumerate(trace.events) if isinstance(event, forgotten))
        changed = replay(without(trace, last), inputs)
        assert any(not np.allclose(changed[name], found) for name, found in replay(trace, inputs).items())
    machine = Machine(work, trace.arrays, inputs)
    with pytest.raises(tw.InvalidProblem, match="an event that fits what came before"):
        machine.execute(events.Free(phase="finish", buffer="q"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"algorithm": "fa2", "workload": {}}'])
def test_foreign_json_is_refused(text: str) -> None:
    with pytest.raises(tw.InvalidProblem, match="text: expected a trace as JSON"):
        Trace.from_json(text)


def test_a_drawn_mask_is_a_band_where_it_says_the_same() -> None:
    """Tile by tile, and in the events of every schedule; other forms are right in numbers."""
    band = Workload(7, 9, 3, 2, block_m=2, block_n=4, left=3, right=1)
    rows = tuple("".join("01"[band.band.sees(m, n)] for n in range(9)) for m in range(7))
    drawn = dataclasses.replace(band, left=None, right=None, seen=rows)
    algorithms: tuple[Algorithm, ...] = ("naive", "fa1", "fa2", "backward")
    for algorithm in algorithms:
        assert schedule(algorithm, drawn).events == schedule(algorithm, band).events
    assert Trace.from_json(schedule("fa2", drawn).to_json()).workload == drawn


@pytest.mark.parametrize("algorithm", ["naive", "fa1", "fa2"])
def test_a_mask_of_any_form(algorithm: Algorithm) -> None:
    rng = np.random.default_rng(0)
    seen = rng.random((6, 6)) < 0.5
    seen[2] = False
    rows = tuple("".join("01"[int(x)] for x in row) for row in seen)
    q, k, v = (rng.standard_normal((6, 3)) for _ in range(3))
    found = simulate(algorithm, Workload(6, 6, 3, 3, block_m=2, block_n=2, seen=rows), {"q": q, "k": k, "v": v})
    weights = np.where(seen, np.exp(q @ k.T), 0.0)
    expected = weights @ v / np.maximum(weights.sum(1, keepdims=True), 1e-30)
    np.testing.assert_allclose(found.results["out"], expected, atol=1e-12)


@pytest.mark.parametrize("wrong", [{"seen": ("11", "11")}, {"seen": ("110", "11x", "111")}, {"right": 0}])
def test_a_drawn_mask_that_does_not_fit(wrong: dict[str, Any]) -> None:
    work = Workload(3, 3, 2, 2, block_m=2, block_n=2, seen=("111",) * 3)
    with pytest.raises(tw.InvalidProblem, match="seen"):
        schedule("fa2", dataclasses.replace(work, **wrong))
