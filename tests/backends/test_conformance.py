"""One suite for every backend: the same cases, the same oracle, the same derived tolerances (docs/contract.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from tilewise.testing import BackendImplementation, Case, check, check_repeatable, check_unread
from tilewise.testing.generation import pair_cases, single_cases, size_cases
from tilewise.testing.special import padded_cases, repeatable_cases, special_cases

pytestmark = pytest.mark.usefixtures("reference_is_single_threaded")

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


@over(single_cases)
def test_single_features(case: Case, backend: str, device: str) -> None:
    check(*runnable(case, backend, device))


@over(special_cases)
def test_special_cases(case: Case, backend: str, device: str) -> None:
    check(*runnable(case, backend, device))


@over(lambda: single_cases((torch.float64,)))
def test_double_precision(case: Case, backend: str, device: str) -> None:
    check(*runnable(case, backend, device))


@pytest.mark.slow
@over(pair_cases)
def test_pairs_of_features(case: Case, backend: str, device: str) -> None:
    check(*runnable(case, backend, device))


@pytest.mark.slow
@over(size_cases)
def test_sizes(case: Case, backend: str, device: str) -> None:
    check(*runnable(case, backend, device))


@over(padded_cases)
def test_nothing_outside_the_lengths_is_read(case: Case, backend: str, device: str) -> None:
    check_unread(*runnable(case, backend, device))


@over(repeatable_cases)
def test_runs_repeat_bit_for_bit(case: Case, backend: str, device: str) -> None:
    check_repeatable(*runnable(case, backend, device))
