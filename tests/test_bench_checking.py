"""That the benchmark catches a wrong result, and judges each contestant by what it may round."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch

from suite import runner
from suite.cases import Case
from suite.checking import Checker
from suite.cpu_cases import cpu_cases
from suite.implementations import Implementation, NotApplicable, Prepared, results_of
from suite.inputs import Inputs, make_inputs
from suite.peers import implementations

small = functools.partial(
    dataclasses.replace, cpu_cases("x86_64")[0], measure="forward", dtype="float32", batch=2, num_heads=4,
    num_kv_heads=2, seqlen_q=70, seqlen_k=70, head_dim=16, causal=False, bars=(), implementations=("sdpa",),
)  # fmt: skip
LIMITS = runner.Limits(seconds_per_case=0.02, max_seconds=60.0, threads=1)

KINDS = [
    small(),
    small(causal=True, window=(9, 0), seqlen_q=65, seqlen_k=130),
    small(causal=True, measure="backward"),
    small(dtype="bfloat16", measure="backward"),
    small(kind="varlen", batch=3, seqlens=(70, 1, 33), causal=True, measure="backward"),
    small(kind="varlen", batch=2, seqlens=(70, 70), causal=True, measure="backward"),
    small(kind="paged", seqlen_q=1, page_size=16, seqlen_k=50),
    small(dtype="bfloat16", causal=True, e4m3_values=True, recorded=True),
]


@pytest.mark.parametrize("case", KINDS, ids=lambda c: f"{c.kind}-{c.batch}-{c.measure}-{c.dtype}")
def test_right_results_pass_and_slightly_wrong_ones_do_not(case: Case) -> None:
    inputs = make_inputs(case)
    checker = Checker(case, inputs)
    peer = {"dense": "sdpa", "varlen": "sdpa-padded", "paged": "sdpa-gather"}[case.kind]
    as_dense = case.kind == "paged" or (case.kind == "varlen" and len({*case.seqlens}) == 1)
    for name in ("tilewise", *("tilewise-fp8",) * case.e4m3_values, *("tilewise-dense",) * as_dense, peer):
        with torch.set_grad_enabled(case.needs_grad):
            found = results_of(case, implementations("cpu")[name].prepare(case, inputs))
        assert checker.judge(found).complaint is None, name
        for result in found:
            # The last component of the last sequence (of the first one, where they are packed) is off by half.
            broken = dict(found) | {result: found[result].detach().clone()}
            broken[result][69 if case.kind == "varlen" else -1, ..., -1] *= 1.5
            assert checker.judge(broken).complaint is not None, (name, result)
            assert checker.judge(broken).error > checker.judge(found).error
    poisoned = dict(found) | {"out": torch.full_like(found["out"], torch.nan)}
    assert checker.judge(poisoned).complaint is not None


def test_only_packed_sequences_of_one_length_are_compared_with_dense_tensors() -> None:
    case = small(kind="varlen", batch=2, seqlens=(70, 33))
    with pytest.raises(NotApplicable, match="of one length"):
        implementations("cpu")["tilewise-dense"].prepare(case, make_inputs(case))


def test_only_contestants_that_round_as_fp8_tensor_cores_do_may_be_as_coarse() -> None:
    names = ("fine", "coarse", "sdpa")
    case = small(dtype="bfloat16", num_kv_heads=4, seqlen_k=300, e4m3_values=True, implementations=names)

    def rounding(case: Case, inputs: Inputs) -> Prepared:
        """Probabilities in e4m3, of which the largest of a row is 256."""
        right = implementations("cpu")["sdpa"].prepare(case, inputs)
        s = inputs.q.double() @ inputs.k.double().mT / math.sqrt(case.head_dim)
        p = torch.exp(s - s.amax(-1, keepdim=True)) * 256.0
        out = (p.to(torch.float8_e4m3fn).double() @ inputs.v.double()) / p.sum(-1, keepdim=True)
        return dataclasses.replace(right, call=lambda: out.bfloat16())

    known = {
        "fine": Implementation("fine", rounding),
        "coarse": Implementation("coarse", rounding, coarse=True),
        "sdpa": implementations("cpu")["sdpa"],
    }
    measured = next(iter(runner.run([case], known, LIMITS, lambda _: None))).measured
    assert [(m.implementation, m.status) for m in measured] == [("fine", "wrong"), ("coarse", "ok"), ("sdpa", "ok")]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_who_may_be_coarse(device: str) -> None:
    """On a CPU e4m3 operands have the bits of the dequantised tensors' attention."""
    coarse = [name for name, i in implementations(device).items() if i.coarse]
    assert coarse == ([] if device == "cpu" else ["tilewise-fp8"])
