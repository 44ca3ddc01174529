"""Runs an implementation on a case and reports everything that is wrong with its results."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor

from tilewise.errors import TilewiseError
from tilewise.testing.cases import Case
from tilewise.testing.implementations import BackendImplementation, Implementation, call_api
from tilewise.testing.inputs import Inputs, make_inputs
from tilewise.testing.oracle import Expectation, expect, largest_scores
from tilewise.testing.poison import uninitialised_is_nan
from tilewise.testing.results import Results, differentiate
from tilewise.testing.threads import one_thread
from tilewise.testing.tolerances import judge

# A number that no case computes.
NOT_WRITTEN = -12345.0


class Nonconformance(TilewiseError, AssertionError):
    """An implementation broke the contract. The message lists every wrong result and the code to reproduce it."""

    def __init__(self, case: Case, implementation: Implementation, faults: list[str]) -> None:
        lines = "".join(f"\n  {fault}" for fault in faults)
        kind = type(implementation).__name__
        named = f"{implementation.name!r}, " if kind == "BackendImplementation" else ""
        again = f"check({case!r}, {kind}({named}{str(implementation.device)!r}))"
        super().__init__(f"{implementation.name} on {case.id}:{lines}\n  again: {again}")
        self.case = case
        self.faults = tuple(faults)


def check(case: Case, implementation: Implementation) -> Results:
    """Raise Nonconformance unless every result is within the derived tolerance, in the right shape and dtype.

    Output memory is poisoned while it runs. Results an implementation does not have (a foreign one may lack lse) are
    not checked.
    """
    results = run(case, implementation)
    rounds_p = getattr(implementation, "rounds_p", None)
    faults = find_faults(case, results, coarse=rounds_p is not None and rounds_p(case))
    if faults:
        raise Nonconformance(case, implementation, faults)
    return results


def find_faults(case: Case, results: Results, *, coarse: bool = False) -> list[str]:
    """Everything wrong with results that were computed from the case's inputs; empty if they conform.

    `coarse` allows for the rounding of probabilities and sums in FP8 tensor cores.
    """
    with one_thread():
        expected = expect(case, coarse)
        faults = [fault for name in results if (fault := _fault(name, results[name], expected)) is not None]
    return faults + [f"{name}: missing" for name in case.results if name not in results and name != "lse"]


def run(case: Case, implementation: Implementation, *, padding_value: float = float("nan")) -> Results:
    """The implementation's results with poisoned outputs."""
    inputs = make_inputs(case, implementation.device, padding_value=padding_value)
    with uninitialised_is_nan():
        return implementation.run(case, inputs)


def check_repeatable(case: Case, implementation: Implementation) -> None:
    """Raise Nonconformance unless two runs agree bit by bit: the forward always, gradients if `case.deterministic`."""
    names = case.results if case.deterministic else ("out", "lse")
    _check_equal_bits(case, implementation, run(case, implementation), run(case, implementation), names, "a second run")


def check_unread(case: Case, implementation: Implementation) -> None:
    """Raise Nonconformance unless results have the same bits for any contents outside the lengths."""
    names = case.results if case.deterministic else ("out", "lse")
    zeros = run(case, implementation, padding_value=0.0)
    for value in (float("nan"), float("inf"), 1e4):
        other = run(case, implementation, padding_value=value)
        _check_equal_bits(case, implementation, other, zeros, names, f"padding of {value} against 0")


def check_untouched(case: Case, implementation: Implementation) -> None:
    """Raise Nonconformance if the implementation writes into its inputs."""
    inputs, expected = (make_inputs(case, implementation.device) for _ in range(2))
    implementation.run(case, inputs)
    faults = [
        f"{field.name}: an input, was written to"
        for field in dataclasses.fields(inputs)
        if (before := getattr(expected, field.name)) is not None and not same_bits(getattr(inputs, field.name), before)
    ]
    if faults:
        raise Nonconformance(case, implementation, faults)


def check_written(case: Case, implementation: BackendImplementation) -> None:
    """Raise Nonconformance unless a backend writes the same bits into memory of the caller (`out=`): contiguous, a part
    of rows that are wider, and every second column of them. The other columns keep theirs.
    """
    case = case.forward_only()
    expected = run(case, implementation)
    shape, faults = expected["out"].shape, []
    for name, width, step in (("contiguous", 1, 1), ("a part of wider rows", 2, 1), ("every second column", 2, 2)):
        memory = expected["out"].new_full((*shape[:-1], width * shape[-1]), NOT_WRITTEN)
        given = memory[..., ::step] if step > 1 else memory[..., : shape[-1]]
        inputs = make_inputs(case, implementation.device)
        with uninitialised_is_nan():
            out, lse = call_api(case, inputs, implementation.name, out=given)
        if out is not given:
            faults.append(f"out: not the tensor that was given ({name})")
        for which, got in (("out", given), ("lse", lse)):
            if not same_bits(got, expected[which]):
                faults.append(f"{which}: other bits than without out= ({name})")
        given.fill_(NOT_WRITTEN)
        if not bool((memory == NOT_WRITTEN).all()):
            faults.append(f"out: columns between its own were written ({name})")
    if faults:
        raise Nonconformance(case, implementation, faults)


def check_largest(case: Case, implementation: BackendImplementation) -> None:
    """Raise Nonconformance unless `return_max_logits` gives the largest score of each head, next to results and
    gradients as without it.
    """
    found: list[Tensor] = []

    def attend(leaves: Inputs) -> tuple[Tensor, Tensor]:
        out, lse, largest = cast("Any", call_api(case, leaves, implementation.name, return_max_logits=True))
        found.append(largest)
        return out, lse

    inputs = make_inputs(case, implementation.device)
    with uninitialised_is_nan():
        faults = find_faults(case, differentiate(case, inputs, attend))
    expected, slack = largest_scores(case)
    got = found[0].detach().cpu()
    if got.dtype != case.accumulate_dtype or got.shape != expected.shape or got.requires_grad:
        faults.append(f"max_logits: {got.dtype} {tuple(got.shape)}, expected {case.accumulate_dtype} per head")
    elif not bool(((got.double() == expected) | ((got.double() - expected).abs() <= slack)).all()):
        faults.append(f"max_logits: {got.tolist()}, expected {expected.tolist()} within {slack.tolist()}")
    if faults:
        raise Nonconformance(case, implementation, faults)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    if a.numel() == 0:
        return True
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _check_equal_bits(
    case: Case, implementation: Implementation, one: Results, two: Results, names: tuple[str, ...], what: str
) -> None:
    faults = []
    for name in names:
        if not same_bits(one[name], two[name]):
            worst = float((one[name].double() - two[name].double()).abs().max())
            faults.append(f"{name}: {what} changes bits, by up to {worst:.3e}")
    if faults:
        raise Nonconformance(case, implementation, faults)


def _fault(name: str, got: torch.Tensor, expected: Expectation) -> str | None:
    if got.dtype != expected.dtypes[name]:
        return f"{name}: dtype {got.dtype}, expected {expected.dtypes[name]}"
    return judge(name, got, expected.reference[name], expected.slack[name])
