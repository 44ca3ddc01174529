"""Long sequences on a Hopper GPU: what short ones never take, every element against fp64.

P steep and rows that it loses, fixed point, odd lengths, windows, packed rows.
The cases and their judge are in tests/backends/long_sequences.py; test_long_sequences.py tests them without a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from long_sequences import CASES, Long, faults_of, make_long_inputs, misplaced, plan_of, run_long
from tilewise.testing import BackendImplementation, Inputs
from tilewise.testing.implementations import call_api

pytestmark = pytest.mark.hopper

REPEATS = 200
CUDA = torch.device("cuda")
# Packed ones get their tiles from a list.
REPEATED_FORWARDS = ["d128 steep, causal, sinks", "d64 steep", "d64 steep, four warpgroups", "d64 steep, packed"]
# dQ of the first is summed in no fixed order.
REPEATED_BACKWARDS = {"d128 causal": ("dk", "dv"), "deterministic": ("dq", "dk", "dv")}


@pytest.fixture(autouse=True)
def exact_sums() -> Iterator[None]:
    """Plain PyTorch in 16 bits adds in fp32, as the tolerance supposes."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = settings.allow_fp16_reduced_precision_reduction = False
    yield
    settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction = before


@pytest.mark.parametrize("name", CASES)
def test_against_fp64(name: str) -> None:
    long = CASES[name]
    assert misplaced(long, plan_of(long, CUDA)) == []
    inputs = make_long_inputs(long, CUDA)
    faults = faults_of(long, inputs, run_long(long, inputs, BackendImplementation("hopper", CUDA)))
    assert faults == [], "\n".join(faults[:6])


def assert_repeats(compute: Callable[[], tuple[Tensor, ...]]) -> None:
    """To the bit: NaN is not equal to itself."""
    first, different = compute(), torch.zeros((), dtype=torch.int64, device=CUDA)
    for _ in range(REPEATS):
        pairs = zip(first, compute(), strict=True)
        different += torch.stack([(a.view(torch.uint8) != b.view(torch.uint8)).any() for a, b in pairs]).any()
    assert int(different) == 0


@pytest.mark.parametrize("name", REPEATED_FORWARDS)
def test_forwards_are_equal_to_the_bit(name: str) -> None:
    long = CASES[name]
    inputs = make_long_inputs(long, CUDA)
    assert_repeats(functools.partial(call_api, long.case, inputs, "hopper"))


@pytest.mark.parametrize("name", REPEATED_BACKWARDS)
def test_backwards_are_equal_to_the_bit(name: str) -> None:
    long = CASES[name]
    inputs = make_long_inputs(long, CUDA)
    leaves: Inputs = inputs.map(lambda name, t: t.requires_grad_(name in ("q", "k", "v")))
    out, _ = call_api(long.case, leaves, "hopper")
    count = len(REPEATED_BACKWARDS[name])

    def gradients() -> tuple[Tensor, ...]:
        every = torch.autograd.grad(out, (leaves.q, leaves.k, leaves.v), inputs.dout, retain_graph=True)
        return every[3 - count :]

    assert_repeats(gradients)


def test_a_planted_error_is_found_here_as_well() -> None:
    """The judge on this device: one row, one query tile of dQ and one key that nobody looks at."""
    long: Long = CASES["d128 causal, odd"]
    inputs = make_long_inputs(long, CUDA)
    results = run_long(long, inputs, BackendImplementation("hopper", CUDA))
    results["out"][0, 0, 4001] = results["out"][0, 0, 4000]
    results["dq"][0, 15, 4032:4096] = 0.0
    hidden = inputs.k.clone()
    faults = faults_of(long, inputs, results)
    assert any("K/V head 0: out" in fault for fault in faults)
    assert any("K/V head 15: dq" in fault for fault in faults)
    hidden[0, 0, 5000] = -inputs.k[0, 0, 5000]
    other = call_api(long.case, inputs.map(lambda name, t: hidden if name == "k" else t), "hopper")
    faults = faults_of(long, inputs, results | {"out": other[0], "lse": other[1]})
    assert any("K/V head 0: out" in fault for fault in faults)
