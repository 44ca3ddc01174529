"""What every rank runs for context parallelism: the checks for its world size, of which rank 0 writes the report."""

from __future__ import annotations

import itertools
import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import behaviour
import torch.distributed as dist
from implementation import ContextParallel
from outcomes import outcomes_of

from tilewise.testing import Case, find_faults, make_inputs, uninitialised_is_nan
from tilewise.testing.generation import single_cases

METHODS = list(itertools.product(("ring", "all_gather", "heads"), ("zigzag", "contiguous")))
# Documents that cross borders of ranks and chunks, are empty, or end where one ends.
PACKED = Case(
    kind="varlen", seqlens_q=(40, 1, 0, 65, 9, 13), seqlens_k=(40, 1, 0, 65, 9, 13), head_dim=24, head_dim_v=8
)
SPECIAL: tuple[tuple[str, Case, dict[str, Any]], ...] = (
    ("documents", PACKED, {"causal": True, "padding": 3}),
    ("documents, alibi", PACKED, {"alibi": "bh", "sinks": True}),
    ("documents, dropout", PACKED, {"dropout": 0.3, "window": (17, 3)}),
    ("documents, all", PACKED, {"causal": True, "alibi": "h", "dropout": 0.2, "softcap": 2.0, "sinks": True}),
    ("gqa, few heads", Case(), {"num_heads": 4, "num_kv_heads": 1, "causal": True}),
    ("gqa, odd groups", Case(), {"num_heads": 8, "num_kv_heads": 2, "dropout": 0.3, "causal": True}),
    ("far window", Case(), {"causal": True, "window": (3, None), "seqlens_q": (257,), "seqlens_k": (257,)}),
    ("cross, alibi", Case(), {"alibi": "h", "seqlens_q": (111,), "seqlens_k": (65,), "window": (90, 31)}),
    (
        "cross, dropout",
        Case(),
        {"dropout": 0.5, "seqlens_q": (33,), "seqlens_k": (111,), "causal": True, "alibi": "bh"},
    ),
    ("one token", Case(), {"seqlens_q": (1,), "seqlens_k": (1,), "causal": True, "sinks": True}),
    ("nothing", Case(), {"seqlens_q": (0,), "seqlens_k": (0,)}),
)


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every check by its name, the same in the same order on every rank."""
    world = dist.get_world_size()
    cases = [case for case in single_cases() if not (case.bias or case.mask or case.kind == "paged")]
    # Two ranks and three share most of the cases, one and four see a few.
    share = {1: slice(5, None, 12), 2: slice(0, None, 3), 3: slice(1, None, 3), 4: slice(2, None, 12)}[world]
    for index, case in enumerate(cases[share]):
        yield from conformance(f"single {case.label}", case, METHODS[index % len(METHODS)])
    for index, (label, base, changes) in enumerate(SPECIAL):
        case = Case(**{**base.__dict__, **changes})
        # Four of six ways of every special case on two ranks or three, one of them on one and on four.
        apart = 3 if world in (2, 3) else len(METHODS)
        for method in METHODS[(index + world) % apart :: apart]:
            yield from conformance(f"special {label}", case, method)
    yield from behaviour.checks(world)


def conformance(name: str, case: Case, way: tuple[str, str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """A case of the suite, judged on rank 0."""
    implementation = ContextParallel(*way)
    if implementation.supports(case) is not None:
        implementation = ContextParallel("ring", way[1])
        if implementation.supports(case) is not None:
            return

    def check() -> None:
        with uninitialised_is_nan():
            results = implementation.run(case, make_inputs(case))
        faults = find_faults(case, results) if dist.get_rank() == 0 else []
        if faults:
            raise AssertionError("\n".join(faults) + f"\n{case!r}")

    yield f"{name}, {implementation.method} {implementation.sharding}", check


def main(report: Path, place: str, rank: int, world: int) -> None:
    """Run the checks; a failure on any rank is reported with its rank."""
    outcomes = outcomes_of(checks(), place, rank, world)
    if world == 2:
        outcomes["a peer dies"] = "ok"
        try:
            behaviour.peer_dies()
        except Exception:  # as above
            outcomes["a peer dies"] = traceback.format_exc()
    if rank == 0:
        report.write_text(json.dumps(outcomes))
    if world != 2:  # of a group without its peer the rest would wait
        dist.barrier()
        dist.destroy_process_group()
