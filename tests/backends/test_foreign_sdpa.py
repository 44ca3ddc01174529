"""The suite pointed at somebody else's attention: torch's SDPA conforms on the features it has, and only on those."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from tilewise.testing import Case, Nonconformance, TorchSDPA, check
from tilewise.testing.generation import pair_cases, single_cases, size_cases
from tilewise.testing.special import special_cases
from tilewise.testing.threads import one_thread


class Boastful(TorchSDPA):
    """Claims every feature."""

    def supports(self, case: Case) -> str | None:
        del case
        return None


def supported(cases: list[Case]) -> list[Case]:
    """The cases without gradient through lse that SDPA says it takes."""
    through_out = [dataclasses.replace(case, cotangents=("out",)) for case in cases]
    return [case for case in through_out if TorchSDPA().supports(case) is None]


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    """The problems are not worth a second thread."""
    with one_thread():
        yield


@pytest.mark.parametrize("case", supported(single_cases() + special_cases()), ids=lambda case: case.id)
def test_sdpa_conforms(case: Case) -> None:
    check(case, TorchSDPA())


@pytest.mark.slow
@pytest.mark.parametrize("case", supported(pair_cases() + size_cases())[::4], ids=lambda case: case.id)
def test_sdpa_conforms_in_pairs_and_sizes(case: Case) -> None:
    check(case, TorchSDPA())


def test_enough_is_compared() -> None:
    cases = supported(single_cases() + special_cases())
    labels = {case.label for case in cases}
    assert {"plain", "causal", "gqa", "mqa", "scale", "bias_bhqk", "mask_qk", "bshd", "sliced"} <= labels


def test_top_left_causal_is_found() -> None:
    case = Case(causal=True, seqlens_q=(3,), seqlens_k=(65,), cotangents=("out",))
    assert TorchSDPA().supports(case) is not None
    with pytest.raises(Nonconformance, match="out: max error"):
        check(case, Boastful())


@pytest.mark.parametrize("feature", [{"window": (3, 0)}, {"alibi": "h"}, {"softcap": 1.0}, {"sinks": True}], ids=str)
def test_missing_feature_is_found(feature: dict[str, object]) -> None:
    case = dataclasses.replace(Case(cotangents=("out",)), **feature)  # type: ignore[arg-type]
    assert TorchSDPA().supports(case) is not None
    with pytest.raises(Nonconformance):
        check(case, Boastful())
