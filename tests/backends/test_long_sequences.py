"""Cases of tests/gpu/test_long_sequences_on_device.py: what they are for and, smaller, that their judge is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from long_sequences import BLOCK, CASES, LATE_KEYS, Long, faults_of, make_long_inputs, misplaced, plan_of, run_long
from tilewise.testing import BackendImplementation, Inputs
from tilewise.testing.implementations import call_api
from tilewise.testing.results import Results, differentiate

CPU = BackendImplementation("cpu")


@pytest.mark.parametrize("long", CASES.values(), ids=CASES.keys())
def test_every_case_is_for_the_kernel_it_says(long: Long) -> None:
    assert misplaced(long, plan_of(long, "h200")) == []


@pytest.mark.parametrize("name", CASES)
def test_smaller_cases_on_the_cpu(name: str) -> None:
    long = dataclasses.replace(CASES[name].smaller(), heads=1)
    inputs = make_long_inputs(long, "cpu")
    assert faults_of(long, inputs, run_long(long, inputs, CPU)) == []


# ---- what must be found


def without_key(key: int, of: slice = slice(None)) -> Callable[[Long, Inputs], Results]:
    """The results of an implementation whose queries overlook a key."""

    def compute(long: Long, inputs: Inputs) -> Results:
        case = long.case
        mask = torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool)
        mask[of, key] = False
        return differentiate(case, inputs, lambda leaves: call_api(case, dataclasses.replace(leaves, mask=mask), "cpu"))

    return compute


def changed(name: str, change: Callable[[torch.Tensor], object]) -> Callable[[Long, Inputs], Results]:
    """Right results but for a change to one of them."""

    def compute(long: Long, inputs: Inputs) -> Results:
        results = run_long(long, inputs, CPU)
        change(results[name])
        return results

    return compute


# Of a block whose rows are lost; of one whose rows have keys of their own.
ROW, OWN_ROW = 3 * BLOCK + 5, 5
PLANTED: dict[str, tuple[str, str, Callable[[Long, Inputs], Results]]] = {
    "a row of another query": ("d128 steep", "out", changed("out", lambda x: x[0, 1, OWN_ROW].copy_(x[0, 1, 6]))),
    "a row not written": ("d128 steep", "out", changed("out", lambda x: x[0, 1, ROW].fill_(torch.nan))),
    "a row lost": ("d64 steep", "out", changed("out", lambda x: x[0, 1, ROW].zero_())),
    "an lse off by a bit of the exponent": ("d64 steep", "lse", changed("lse", lambda x: x[0, 1, ROW].sub_(0.7))),
    "a late key overlooked": ("d64 steep, causal, sinks", "out", without_key(LATE_KEYS.start)),
    "a late key, by one block": ("d128 steep", "out", without_key(LATE_KEYS.start, slice(BLOCK, 2 * BLOCK))),
    "a key overlooked": ("d128 grouped", "out", without_key(200)),
    "the last key, causal": ("d128 grouped, causal, sinks", "out", without_key(454)),
    "its gradient": ("d128 grouped, causal, sinks", "dk", without_key(454)),
    "a tile of dq not finished": ("d128 causal, odd", "dq", changed("dq", lambda x: x[0, 1, 64:128].zero_())),
    "dq finished twice": ("d128 causal, odd", "dq", changed("dq", lambda x: x[0, 0, 64:128].mul_(2.0))),
    "dq of another head": ("d128 causal", "dq", changed("dq", lambda x: x[1, 1].copy_(x[1, 0]))),
    "a tile without dk": ("d64 grouped, causal, sinks", "dk", changed("dk", lambda x: x[0, 1, 128:].zero_())),
    "one dv half": ("window", "dv", changed("dv", lambda x: x[0, 1, 300].mul_(0.5))),
    "rows of no sequence": ("packed", "out", changed("out", lambda x: x[-1].fill_(1.0))),
    "infinities where none are": ("infinite V", "out", changed("out", lambda x: x[0, -1, ROW, 3].fill_(torch.inf))),
    "an infinity lost": ("infinite V", "out", changed("out", lambda x: x[0, 0, ROW, 7].fill_(0.0))),
    "a NaN lost": ("NaN in V", "out", changed("out", lambda x: x[0, 0, ROW, 7].fill_(0.0))),
}  # fmt: skip


@pytest.mark.parametrize(("name", "result", "compute"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_error_is_found(name: str, result: str, compute: Callable[[Long, Inputs], Results]) -> None:
    long = dataclasses.replace(CASES[name].smaller(), heads=None)
    inputs = make_long_inputs(long, "cpu")
    assert any(f"{result}: " in fault for fault in faults_of(long, inputs, compute(long, inputs)))
