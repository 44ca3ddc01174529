"""The suite's own parts: the oracle has a second opinion, the cases cover what they claim, the judge judges."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tilewise import testing
from tilewise.problem import Kind
from tilewise.testing import BackendImplementation, Case, Inputs, Nonconformance, check, make_inputs
from tilewise.testing.cases import GRADIENTS
from tilewise.testing.generation import FEATURES, HEAD_DIMS, PAGE_SIZES, SEQLENS, pair_cases, single_cases, size_cases
from tilewise.testing.oracle import plain_results, reference_results
from tilewise.testing.poison import uninitialised_is_nan
from tilewise.testing.results import Results
from tilewise.testing.special import special_cases
from tilewise.testing.tolerances import Slack, judge, slack_of, ulp


def assert_oracles_agree(case: Case) -> None:
    """Two implementations written apart, one with a hand-written backward, one with autograd."""
    case = dataclasses.replace(case, dtype=torch.float64, side_dtype=None)
    inputs = make_inputs(case)
    reference, plain = reference_results(case, inputs), plain_results(case, inputs)
    assert plain.keys() == reference.keys()
    torch.testing.assert_close(plain, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", single_cases() + special_cases(), ids=lambda case: case.id)
def test_reference_and_plain_torch_agree_in_fp64(case: Case) -> None:
    assert_oracles_agree(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.id, marks=() if number % 4 == 0 else pytest.mark.exhaustive)
        for number, case in enumerate(pair_cases())
    ],
)
def test_reference_and_plain_torch_agree_in_fp64_in_pairs(case: Case) -> None:
    assert_oracles_agree(case)


def test_every_pair_of_features_has_a_case() -> None:
    labels = {case.label for case in pair_cases()}
    names = {feature.name for feature in FEATURES}
    together = {frozenset(label.split("+")) for label in labels}
    assert len(together) == len(labels)
    assert {name for pair in together for name in pair} == names
    assert frozenset({"causal", "dropout"}) in together
    assert frozenset({"gqa", "paged"}) in together


def test_pairs_cover_every_size_and_dtype() -> None:
    cases = pair_cases()
    assert {n for case in cases for n in case.seqlens_q} == set(SEQLENS)
    assert {n for case in cases for n in case.seqlens_k} == set(SEQLENS)
    assert {case.head_dim for case in cases} == set(HEAD_DIMS)
    assert {case.head_dim_v for case in cases} == set(HEAD_DIMS)
    assert {case.page_size for case in cases if case.kind == "paged"} == set(PAGE_SIZES)
    assert len({case.dtype for case in cases}) == 3


def test_case_ids_are_unique_and_cases_print_as_code() -> None:
    for cases in (single_cases(), pair_cases(), size_cases(), special_cases()):
        assert len({case.id for case in cases}) == len(cases)
        for case in cases:
            assert eval(repr(case), {"Case": Case, "torch": torch}) == case


@pytest.mark.parametrize("kind", ["dense", "varlen", "paged"])
def test_strides_do_not_change_values(kind: Kind) -> None:
    plain = Case(kind=kind, bias="bhqk", mask="qk", padding=0 if kind == "dense" else 2)
    expected = make_inputs(plain, padding_value=0.0)
    for strides in ("transposed", "sliced", "strided_last"):
        odd = make_inputs(dataclasses.replace(plain, strides=strides), padding_value=0.0)
        assert not odd.q.is_contiguous()
        for field in dataclasses.fields(Inputs):
            one, two = getattr(odd, field.name), getattr(expected, field.name)
            assert one is two or torch.equal(one, two), field.name


def test_padding_is_poisoned() -> None:
    case = Case(kind="varlen", seqlens_q=(3, 2), seqlens_k=(2, 5), padding=4, bias="bhqk", bounds="loose")
    inputs = make_inputs(case)
    assert inputs.bias is not None
    for rows in (inputs.q[5:], inputs.k[7:], inputs.v[7:], inputs.dout[5:], inputs.dlse[:, 5:], inputs.bias[1, :, 2:]):
        assert rows.numel() > 0
        assert rows.isnan().all()
    assert not inputs.q[:5].isnan().any()
    paged = make_inputs(Case(kind="paged", seqlens_q=(1,), seqlens_k=(17,), page_size=16))
    assert int((~paged.k.isnan()).all(-1).all(-1).sum()) == 17
    assert paged.block_table is not None
    assert int(paged.block_table[0, -1]) not in range(paged.k.shape[0])


def test_uninitialised_memory_is_poisoned_only_within_the_block() -> None:
    makers = ("empty", "empty_like", "empty_strided")
    before = [getattr(torch, name) for name in makers]
    like = torch.ones(3)
    with uninitialised_is_nan():
        made = [torch.empty(3), torch.empty_like(like), torch.empty_strided((3,), (2,)), like.new_empty(3)]
        made.append(torch._C._dynamo.guards._empty_strided_cpu((3,), (1,), torch.float32))  # type: ignore[attr-defined]
        counts = torch.empty(3, dtype=torch.int32)
        learnt = torch.empty(3, requires_grad=True)
    assert all(tensor.isnan().all() for tensor in made)
    assert counts.eq(2**31 - 1).all()
    assert learnt.requires_grad
    assert [getattr(torch, name) for name in makers] == before
    assert "new_empty" not in vars(torch.Tensor)


def test_tolerance_follows_the_rule() -> None:
    ref = torch.tensor([1.5, -1.0, 0.0], dtype=torch.float64)
    off = 2.0**-12
    pt = torch.tensor([1.5, -1.0 - off, 0.0])
    slack = slack_of(ref, pt, torch.tensor([8.0]), torch.float32, torch.float32)
    eps = 2.0**-23
    assert slack.largest == 2 * off + 4 * eps + 2 * eps * 8.0
    assert ulp(1.5, torch.bfloat16) == 2.0**-7
    with pytest.raises(ValueError, match="no tolerance"):
        slack_of(ref, torch.full((3,), math.nan), torch.zeros(1), torch.float32, torch.float32)
    with pytest.raises(ValueError, match="one of them is wrong"):
        slack_of(ref, torch.zeros(3), torch.zeros(1), torch.float32, torch.float32)


def test_judge_reports_the_worst_element() -> None:
    ref = torch.zeros(2, 3, dtype=torch.float64)
    got = torch.zeros(2, 3)
    assert judge("dq", got, ref, Slack(0.0, 0.0)) is None
    got[1, 2] = 0.5
    fault = judge("dq", got, ref, Slack(0.1, 1.0))
    assert fault is not None
    assert "dq" in fault
    assert "worst at [1, 2]: got 0.5, expected 0" in fault
    assert "allowed 1.000e-01" in fault
    assert judge("dq", got, ref, Slack(1.0, 0.01)) is not None


@pytest.mark.parametrize(("got", "ref"), [(math.nan, 0.0), (math.nan, -math.inf), (0.0, -math.inf), (-math.inf, 0.0)])
def test_judge_lets_no_infinity_or_nan_pass(got: float, ref: float) -> None:
    generous = Slack(math.inf, math.inf)
    assert judge("lse", torch.tensor([got]), torch.tensor([ref], dtype=torch.float64), generous) is not None
    same = torch.tensor([-math.inf])
    assert judge("lse", same, same.double(), generous) is None


class _Reference(BackendImplementation):
    """The reference, spoilt in one result."""

    def __init__(self, spoilt: str) -> None:
        super().__init__("reference")
        self.spoilt = spoilt

    def run(self, case: Case, inputs: Inputs) -> Results:
        results = super().run(case, inputs)
        spoilt = results[self.spoilt].clone()
        spoilt.view(-1)[spoilt.numel() // 2] += 0.1
        return results | {self.spoilt: spoilt}


@pytest.mark.parametrize("spoilt", ["out", "lse", *GRADIENTS.values()])
def test_one_wrong_element_of_any_result_is_found(spoilt: str) -> None:
    case = Case(bias="1hqk", sinks=True)
    check(case, BackendImplementation("reference"))
    with pytest.raises(Nonconformance, match=f"{spoilt}: max error 1.000e-01") as caught:
        check(case, _Reference(spoilt))
    assert len(caught.value.faults) == 1
    assert f"again: check({case!r}, " in str(caught.value)


class _Vandal(BackendImplementation):
    """Computes rightly, then writes into q."""

    def run(self, case: Case, inputs: Inputs) -> Results:
        results = super().run(case, inputs)
        inputs.q[0] = 0.0
        return results


class _Nosy(BackendImplementation):
    """Lets the padding behind the last sequence into its result."""

    def run(self, case: Case, inputs: Inputs) -> Results:
        results = super().run(case, inputs)
        return results | {"out": results["out"] + inputs.q[-1, 0, 0]}


class _Restless(BackendImplementation):
    """Never gives the same result twice."""

    runs = 0

    def run(self, case: Case, inputs: Inputs) -> Results:
        self.runs += 1
        results = super().run(case, inputs)
        return results | {"dv": results["dv"] * (1.0 + 2.0**-20 * self.runs)}


def test_writing_to_inputs_reading_padding_and_unrepeatable_results_are_found() -> None:
    case = Case(kind="varlen", padding=1, deterministic=True)
    with pytest.raises(Nonconformance, match="q: an input, was written to"):
        testing.check_untouched(case, _Vandal("reference"))
    with pytest.raises(Nonconformance, match="out: padding of nan against 0 changes bits"):
        testing.check_unread(case, _Nosy("reference"))
    with pytest.raises(Nonconformance, match="dv: a second run changes bits"):
        testing.check_repeatable(case, _Restless("reference"))
