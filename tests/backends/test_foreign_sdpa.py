"""The suite pointed at somebody else's attention: torch's SDPA conforms on the features it has, and only on those."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tilewise.testing import Case, Inputs, Nonconformance, check
from tilewise.testing.generation import single_cases
from tilewise.testing.results import Results, differentiate
from tilewise.testing.special import special_cases
from tilewise.testing.threads import one_thread


class TorchSDPA:
    """torch.nn.functional.scaled_dot_product_attention, on the features it has; it returns no lse."""

    name = "torch SDPA"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def supports(self, case: Case) -> str | None:
        """Dense attention with mask or bias, scale, GQA, and causal where top-left and bottom-right are the same."""
        refusals = {
            "only dense tensors": case.kind != "dense",
            "no window": case.window is not None,
            "no ALiBi": bool(case.alibi),
            "no softcap": case.softcap is not None,
            "no sinks": case.sinks,
            "no FP8": bool(case.fp8),
            "its dropout has another random number generator": case.dropout > 0.0,
            "no lse, so no gradient through it": case.cotangents != ("out",) and bool(case.wants_grad),
            "causal is top-left, which is another mask for unequal lengths": case.causal
            and case.seqlen_q != case.seqlen_k,
            "causal excludes a mask": case.causal and bool(case.mask or case.bias),
            "one of mask and bias": bool(case.mask and case.bias),
            "a bias of another dtype": case.side_dtype not in (None, case.dtype) and bool(case.bias),
            "causal with a negative scale turns its -inf into inf": case.causal and (case.scale or 1.0) < 0.0,
        }
        return next((reason for reason, refused in refusals.items() if refused), None)

    def run(self, case: Case, inputs: Inputs) -> Results:
        """SDPA with heads-first tensors; the results lack lse."""

        def attend(leaves: Inputs) -> tuple[Tensor, Tensor]:
            swap = case.layout == "bshd"
            q, k, v = (t.transpose(1, 2) if swap else t for t in (leaves.q, leaves.k, leaves.v))
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=leaves.bias if leaves.mask is None else leaves.mask, is_causal=case.causal,
                scale=case.scale, enable_gqa=case.num_heads != case.num_kv_heads,
            )  # fmt: skip
            return (out.transpose(1, 2) if swap else out), out.new_zeros(())

        results = differentiate(case, inputs, attend)
        del results["lse"]
        return results


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
