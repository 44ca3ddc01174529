"""The page computes by itself: its events, counters, numbers and costs are those of the simulator and the planner."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page

from tilewise.explorer.presets import PRESETS
from tilewise.explorer.questions import DTYPES, HEAD_DIMS, Phase, Question, plan_of
from tilewise.simulator import Workload, schedule, simulate
from tilewise.simulator.events import Algorithm
from tilewise.simulator.online import online_softmax
from tilewise.simulator.paging import ContiguousPool, PagePool

# One browser for all of them.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

ALGORITHMS: tuple[Algorithm, ...] = (
    "naive", "fa1", "fa2", "decode", "naive_backward", "backward", "matmul_naive", "matmul",
)  # fmt: skip

WORKLOADS = (
    Workload(6, 6, 4, 4, block_m=2, block_n=2),
    Workload(7, 7, 3, 5, block_m=2, block_n=3, right=0, scale=0.5),
    Workload(9, 9, 3, 2, block_m=4, block_n=2, left=2, right=0, scale=0.7),
    Workload(5, 11, 3, 2, block_m=4, block_n=2, left=1, right=1),
    # Queries that see no key, and tiles larger than the sequence.
    Workload(11, 5, 3, 2, block_m=2, block_n=2, left=1, right=1, itemsize=4),
    Workload(3, 3, 1, 1, block_m=8, block_n=8, right=0),
    Workload(1, 17, 2, 3, block_m=1, block_n=4),
    # A drawn mask: tiles of all kinds, a row and a key that see nothing, a tile that reaches past the end.
    Workload(5, 5, 3, 2, block_m=2, block_n=2, seen=("11000", "11000", "00000", "10110", "11110")),
)

# Text in, text out: the driver's own translation of a hundred thousand numbers takes twenty seconds.
RUN = """async (text) => {
  const cases = JSON.parse(text);
  const {naive, fa1, fa2, decode} = await import("tilewise/engine/attention.js");
  const {backward, naiveBackward} = await import("tilewise/engine/backward.js");
  const {matmulNaive, matmulTiled} = await import("tilewise/engine/matmul.js");
  const {Machine} = await import("tilewise/engine/machine.js");
  const {countSteps, countersAt} = await import("tilewise/engine/timeline.js");
  const schedules = {naive, fa1, fa2, decode, backward, naive_backward: naiveBackward, matmul_naive: matmulNaive,
                     matmul: matmulTiled};
  const finite = (_, value) => typeof value === "number" && !Number.isFinite(value) ? String(value) : value;
  return JSON.stringify(cases.map(({algorithm, workload, inputs}) => {
    const trace = schedules[algorithm](workload);
    const given = Object.fromEntries(Object.entries(inputs).map(([name, rows]) =>
      [name, {rows: rows.length, cols: rows[0].length, data: Float64Array.from(rows.flat())}]));
    const machine = new Machine(trace, given);
    for (const event of trace.events) machine.run(event);
    const results = Object.fromEntries(Array.from(machine.slow, ([name, matrix]) => [name, Array.from(matrix.data)]));
    return {events: trace.events, arrays: trace.arrays, steps: countSteps(trace), counters: countersAt(trace), results};
  }), finite);
}"""


@pytest.fixture
def engine(open_page: Any) -> Page:
    page: Page = open_page("softmax")
    return page


def _cases() -> list[tuple[Algorithm, Workload]]:
    adapted: dict[str, dict[str, Any]] = {"decode": {"num_splits": 3}, "matmul": {"block_k": 2}}
    return [
        (algorithm, dataclasses.replace(work, **adapted.get(algorithm, {})))
        for algorithm in ALGORITHMS
        for work in WORKLOADS
    ]


def test_events_counters_and_numbers_are_the_simulators(engine: Page) -> None:
    rng = np.random.default_rng(0)
    cases, simulations = [], []
    for algorithm, work in _cases():
        arrays = schedule(algorithm, work).arrays
        inputs = {name: rng.normal(size=(a.rows, a.cols)) for name, a in arrays.items() if a.fill == "input"}
        simulations.append(simulate(algorithm, work, inputs))
        plain = {name: values.tolist() for name, values in inputs.items()}
        cases.append({"algorithm": algorithm, "workload": dataclasses.asdict(work), "inputs": plain})
    answers = json.loads(engine.evaluate(RUN, json.dumps(cases)))
    for case, simulation, found in zip(cases, simulations, answers, strict=True):
        about = f"{case['algorithm']} {case['workload']}"
        expected = json.loads(simulation.trace.to_json())
        assert found["events"] == expected["events"], about
        assert found["arrays"] == expected["arrays"], about
        assert found["steps"] == simulation.trace.num_steps, about
        counts, counters = simulation.counts, found["counters"]
        assert (counters["reads"], counters["writes"], counters["wide"], counters["flops"]) == (
            counts.traffic.reads, counts.traffic.writes, counts.traffic.wide, counts.flops,
        ), about  # fmt: skip
        assert (counters["readBytes"], counters["writtenBytes"]) == (counts.bytes_read, counts.bytes_written), about
        assert counters["fast"] == 0
        for name in found["results"].keys() & simulation.results.keys():
            mine = np.array(found["results"][name], dtype=float).reshape(simulation.results[name].shape)
            np.testing.assert_allclose(mine, simulation.results[name], rtol=1e-12, atol=1e-12, err_msg=about)


def test_online_softmax_is_the_simulators(engine: Page) -> None:
    rows: list[list[float]] = [[2, 8, 1, 9, 3, 7], [1, 2, 3, 6, 2, 1], [5.5], [-3, -1e3, 0.25, 700, 699.5]]
    found = engine.evaluate(
        """async (rows) => {
          const {onlineSoftmax} = await import("tilewise/engine/softmax.js");
          return rows.flatMap((row) => [1, 2, 3].map((block) => onlineSoftmax(row, block)));
        }""",
        rows,
    )
    expected = [online_softmax(row, block) for row in rows for block in (1, 2, 3)]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["probabilities"] == pytest.approx(theirs.probabilities, rel=1e-14)
        for state, other in zip(mine["states"], theirs.states, strict=True):
            got = (state["rowMax"], state["correction"], state["rowSum"])
            assert got == pytest.approx((other.row_max, other.correction, other.row_sum), rel=1e-14)


def test_pipelines_keep_to_their_rules(engine: Page) -> None:
    """A unit does one thing at a time, and nothing starts before what it needs has ended."""
    common = {"tiles": 5, "softmax": 512}
    pipes: list[dict[str, Any]] = [
        {**common, "ping_pong": ping_pong, "product": product, "load": load, "stages": stages, "consumers": consumers}
        for ping_pong in (True, False)
        for product, load in ((512, 512), (100, 900))
        for stages, consumers in ((1, 1), (2, 2), (3, 2), (2, 3))
    ]
    found = engine.evaluate(
        """async (pipes) => {
          const {timeline, busyShare, pipeline} = await import("tilewise/engine/pipeline.js");
          const share = (changes) => busyShare(timeline(pipeline(changes)));
          return [pipes.map(timeline), [share({}), share({ping_pong: false})]];
        }""",
        pipes,
    )
    assert found[1] == pytest.approx([0.94, 0.67], abs=0.005)  # of an H100's tensor cores, with ping-pong and without
    units = {"load_k": "copy", "load_v": "copy", "softmax": "special"}
    for pipe, spans in zip(pipes, found[0], strict=True):
        at = {(span["task"], span["consumer"], span["tile"]): span for span in spans}
        assert len(at) == len(spans) == 5 * (2 + 3 * pipe["consumers"])
        for unit in ("copy", "special", "tensor"):
            used = sorted((s["start"], s["stop"]) for s in spans if units.get(s["task"], "tensor") == unit)
            assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(used))
        everybody = range(pipe["consumers"])
        for (task, consumer, tile), span in at.items():
            before = {"softmax": "scores", "values": "softmax"}.get(task)
            who = [consumer] if pipe["ping_pong"] else everybody
            needed = [(before, one, tile) for one in who if before]
            if task in ("scores", "values"):
                needed.append(("load_k" if task == "scores" else "load_v", None, tile))
            elif consumer is None and tile >= pipe["stages"]:
                user = "scores" if task == "load_k" else "values"
                needed += [(user, one, tile - pipe["stages"]) for one in everybody]
            assert all(at[need]["stop"] <= span["start"] for need in needed), (pipe, span)


def _story(seed: int) -> list[tuple[str, str, int | str]]:
    """Random requests that arrive, grow, fork and finish."""
    rng = random.Random(seed)
    actions: list[tuple[str, str, int | str]] = []
    here: list[str] = []
    for number in range(40):
        kind = rng.choice(["arrive", "append", "append", "fork", "finish"]) if here else "arrive"
        name, known = f"r{number}", rng.choice(here) if here else ""
        if kind == "arrive":
            actions.append((kind, name, rng.randint(1, 12)))
            here.append(name)
        elif kind == "append":
            actions.append((kind, known, rng.randint(1, 5)))
        elif kind == "fork":
            actions.append((kind, known, name))
            here.append(name)
        else:
            actions.append((kind, known, 0))
            here.remove(known)
    return actions


def _play(pool: PagePool | ContiguousPool, actions: list[tuple[str, str, int | str]]) -> list[dict[str, Any]]:
    for kind, request, more in actions:
        there = pool.tables if isinstance(pool, PagePool) else pool.tokens
        if kind == "arrive":
            pool.arrive(request, int(more))
        elif kind == "append" and request in there:
            pool.append(request, int(more))
        elif kind == "fork" and request in there and isinstance(pool, PagePool):
            pool.fork(request, str(more))
        elif kind == "finish" and request in there:
            pool.finish(request)
    return [event._asdict() for event in pool.events]


def test_pages_are_the_simulators(engine: Page) -> None:
    stories = [_story(seed) for seed in range(6)]
    found = engine.evaluate(
        """async (stories) => {
          const {PagePool, ContiguousPool} = await import("tilewise/engine/paging.js");
          const play = (pool, there, actions) => {
            for (const [kind, request, more] of actions) {
              if (kind === "arrive") pool.arrive(request, more);
              else if (kind === "append" && there().has(request)) pool.append(request, more);
              else if (kind === "fork" && pool.fork && there().has(request)) pool.fork(request, more);
              else if (kind === "finish" && there().has(request)) pool.finish(request);
            }
            return {events: pool.events, reserved: pool.reservedPages, utilisation: pool.utilisation};
          };
          return stories.map((actions) => {
            const [paged, contiguous] = [new PagePool(18, 3), new ContiguousPool(18, 3, 10)];
            return [play(paged, () => paged.tables, actions), play(contiguous, () => contiguous.tokens, actions)];
          });
        }""",
        stories,
    )
    for actions, both in zip(stories, found, strict=True):
        pools: tuple[PagePool | ContiguousPool, ...] = (PagePool(18, 3), ContiguousPool(18, 3, 10))
        for pool, mine in zip(pools, both, strict=True):
            assert mine["events"] == _play(pool, actions)
            assert mine["reserved"] == pool.reserved_pages
            assert mine["utilisation"] == pytest.approx(pool.utilisation)


def _questions() -> list[Question]:
    rng = random.Random(1)
    phases: tuple[Phase, ...] = ("prefill", "train", "decode")
    devices = ("v100", "a100", "rtx4090", "l40s", "h100", "h200", "b200", "rtx5090")
    common: dict[str, Any] = {
        "batch": 1, "context": 4096, "heads": 16, "kv_heads": 4, "head_dim": 64, "dtype": "bfloat16", "device": "h100",
        "phase": "prefill", "causal": True, "window": None,
    }  # fmt: skip
    # Where the table of kernels changes: short sequences of narrow heads, many query heads for a K/V head in decoding,
    # windows that cut nothing off.
    edges: list[dict[str, Any]] = [
        *({"context": n, "causal": causal} for n in (2047, 2048, 2049) for causal in (True, False)),
        *(
            {"phase": "decode", "heads": heads, "kv_heads": 1, "batch": b}
            for heads in (63, 64, 65, 71)
            for b in (1, 64)
        ),
        *({"phase": "decode", "context": n, "batch": b} for n in (255, 256) for b in (1, 3)),
        *({"head_dim": dim, "window": window} for dim in (64, 128) for window in (0, 100, 4094, 4095, 9999)),
        *({"context": 128, "head_dim": 256, "phase": phase} for phase in phases),
        {"context": 1 << 20, "head_dim": 128, "heads": 128, "kv_heads": 8, "batch": 3},
    ]
    chosen = [Question(**(common | edge)) for edge in edges]
    for _ in range(70):
        shape = rng.choice(PRESETS)
        causal = rng.random() < 0.7
        chosen.append(
            Question(
                batch=rng.choice((1, 3, 16)), context=rng.randint(128, 40_000), heads=shape.heads,
                kv_heads=shape.kv_heads, head_dim=rng.choice(HEAD_DIMS), dtype=rng.choice(DTYPES),
                device=rng.choice(devices), phase=rng.choice(phases), causal=causal,
                window=rng.choice((None, 511, 4095)) if causal else None,
            )
        )  # fmt: skip
    return chosen


def _same(mine: Any, theirs: Any, path: str) -> None:
    """Equal, to the digit where a double holds all of them."""
    if isinstance(theirs, dict):
        for key in theirs:
            _same(mine[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, list):
        assert len(mine) == len(theirs), path
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            _same(one, other, f"{path}[{index}]")
    elif isinstance(theirs, float) or (isinstance(theirs, int) and theirs >= 1 << 53):
        assert math.isclose(mine, theirs, rel_tol=1e-12), path
    else:
        assert mine == theirs, path


def test_the_exported_page_plans_as_explain_does(open_page: Any) -> None:
    page: Page = open_page("softmax")
    questions = _questions()
    found = page.evaluate(
        """async (questions) => {
          const {localPlan} = await import("tilewise/engine/localplan.js");
          const data = JSON.parse(document.getElementById("tilewise-data").textContent);
          return questions.map((question) => localPlan(question, data));
        }""",
        [dataclasses.asdict(question) for question in questions],
    )
    shown = ("backend", "rejected", "tile", "tiles", "memory", "flops_forward", "flops_backward", "naive", "tiled")
    for question, mine in zip(questions, found, strict=True):
        theirs = plan_of(question).to_dict()
        for key in shown:
            _same(mine[key], theirs[key], f"{question}: {key}")
