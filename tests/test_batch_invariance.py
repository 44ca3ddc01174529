"""`deterministic="batch"`: the bits of a sequence's results do not depend on the batch that it is in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from making import prefix_of_all
from tilewise.errors import InvalidProblem
from tilewise.testing.conformance import same_bits
from tilewise.testing.invariance import Sequences, check_invariant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "varlen", "paged", "decode", "mixed"])
def test_random_batches(kind: str, dtype: torch.dtype) -> None:
    flags: dict[str, Any] = {"causal": True} if kind != "decode" else {}
    check_invariant(Sequences(kind, dtype, lengths=(1, 700, 33, 1500, 5000, 64), page_size=16), rounds=6, **flags)


@pytest.mark.parametrize("flags", [{"window": (100, 0)}, {"softcap": 2.0}, {"scale": -0.2}])
def test_features(flags: dict[str, Any]) -> None:
    check_invariant(Sequences("decode", torch.bfloat16, lengths=(1, 700, 5000), page_size=64), rounds=4, **flags)


def test_the_number_of_threads_changes_nothing() -> None:
    made = []
    threads = torch.get_num_threads()
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        torch.manual_seed(0)
        q, k, v = torch.randn(2, 4, 3, 64), torch.randn(2, 2, 5000, 64), torch.randn(2, 2, 5000, 64)
        made.append(tw.attention(q, k, v, deterministic="batch"))
    torch.set_num_threads(threads)
    assert same_bits(made[0], made[1])
    assert same_bits(made[0], made[2])


@pytest.mark.usefixtures("always_cascade")
def test_a_shared_prefix_is_not_merged() -> None:
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 4, 32), torch.randn(2, 20, 16, 2, 32)
    table = torch.tensor([[3, 4, 5, 6, 7], [3, 4, 5, 6, 9]], dtype=torch.int32)
    lengths = torch.tensor([80, 70], dtype=torch.int32)
    shared = prefix_of_all(table, lengths, 64, 16)
    call: Any = {"deterministic": "batch"}
    plain = tw.attention_paged(q, k, v, table, lengths, **call)
    assert same_bits(tw.attention_paged(q, k, v, table, lengths, shared_prefix=shared, **call), plain)
    assert not same_bits(tw.attention_paged(q, k, v, table, lengths, shared_prefix=shared), plain)
    explained = tw.explain(q, k, v, block_table=table, seqlens_k=lengths, shared_prefix=shared, **call)
    assert explained.cascade == "no: merging it would make bits depend on the batch"


def test_gradients_on_a_cpu() -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(3, 2, 100, 16) for _ in range(4))

    def gradients(rows: slice) -> list[Tensor]:
        leaves = [t[rows].clone().requires_grad_() for t in (q, k, v)]
        tw.attention(*leaves, causal=True, deterministic="batch").backward(dout[rows])
        return [t.grad for t in leaves if t.grad is not None]

    for whole, alone in zip(gradients(slice(0, 3)), gradients(slice(1, 2)), strict=True):
        assert same_bits(whole[1:2], alone)


def test_compiled() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 33, 16) for _ in range(3))
    torch.compiler.reset()
    step = torch.compile(lambda q: tw.attention(q, k, v, deterministic="batch"), backend="aot_eager", fullgraph=True)
    assert same_bits(step(q), tw.attention(q, k, v, deterministic="batch"))


def test_on_a_gpu_decoding_goes_to_fixed_splits() -> None:
    q, k = (torch.empty(16, 8, n, 128, dtype=torch.bfloat16, device="meta") for n in (1, 8192))
    plan = tw.explain(q, k, k, device="h200", deterministic="batch")
    assert plan.backend == "triton"
    assert "shares of the keys that its programs read depend on the batch" in dict(plan.rejected)["hopper"]
    long = torch.empty(2, 8, 4096, 128, dtype=torch.bfloat16, device="meta")
    assert tw.explain(long, long, long, device="h200", deterministic="batch").backend == "hopper"


def test_calls_whose_bits_would_depend_on_the_batch_are_refused() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(InvalidProblem, match="deterministic: expected None, True, False or 'batch'"):
        tw.attention(q, q, q, deterministic="always")  # type: ignore[call-overload]
    with pytest.raises(InvalidProblem, match="dropout: expected 0 next to deterministic='batch'"):
        tw.attention(q, q, q, deterministic="batch", dropout=0.1)
    rows, cu = torch.randn(5, 2, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    with pytest.raises(InvalidProblem, match="max_seqlen_q: expected an integer, because of deterministic='batch'"):
        tw.attention_varlen(rows, rows, rows, cu, cu, deterministic="batch", max_seqlen_k=3)
    there = torch.empty(1, 2, 512, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    plan = tw.explain(there, there, there, device="h200", deterministic="batch")
    assert plan.backend is None
    assert "results without gradients" in str(plan)


def test_the_check_finds_a_dependence() -> None:
    sequences = Sequences("decode", torch.float32, lengths=(700, 1500), page_size=16)
    with pytest.raises(AssertionError, match="has other bits"):
        check_invariant(sequences, rounds=3, planted=True)
