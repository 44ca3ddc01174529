"""`return_max_logits`: the largest score of each head, as a training step that clips query and key weights calls it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.operands import Flags


def inputs(**others: Any) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 4, 33, 16, **others), torch.randn(2, 2, 40, 16, **others), torch.randn(2, 2, 40, 8, **others)


def expected(q: Tensor, k: Tensor) -> Tensor:
    """Of causal attention."""
    scores = q @ k.repeat_interleave(2, 1).mT / math.sqrt(q.shape[-1])
    shown = torch.ones(33, 40, dtype=torch.bool).tril(40 - 33)
    return scores.masked_fill(~shown, -math.inf).amax((0, 2, 3)).detach()


def test_results_in_order() -> None:
    q, k, v = inputs()
    out, lse = tw.attention(q, k, v, causal=True, return_lse=True)
    for _ in range(3):
        all_three = tw.attention(q, k, v, causal=True, return_lse=True, return_max_logits=True)
        two = tw.attention(q, k, v, causal=True, return_max_logits=True)
        memory = torch.empty_like(out)
        written = tw.attention(q, k, v, causal=True, return_max_logits=True, out=memory)
        assert written[0] is memory
        assert torch.equal(all_three[1], lse)
        for result in (all_three, two, written):
            assert torch.equal(result[0], out)
            torch.testing.assert_close(result[-1], expected(q, k))
            assert result[-1].dtype == torch.float32


def test_each_call_has_its_own() -> None:
    """A second call of the same signature changes nothing that the first returned."""
    q, k, v = inputs()
    _, first = tw.attention(q, k, v, causal=True, return_max_logits=True)
    kept = first.clone()
    _, second = tw.attention(2 * q, k, v, causal=True, return_max_logits=True)
    assert torch.equal(first, kept)
    torch.testing.assert_close(second, 2 * first)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_without_it(compiled: bool) -> None:
    found = []
    for asked in (False, True):
        q, k, v = (t.requires_grad_() for t in inputs())

        def step(q: Tensor, k: Tensor, v: Tensor, asked: bool = asked) -> Any:
            return tw.attention(q, k, v, causal=True, return_lse=True, return_max_logits=asked)  # type: ignore[call-overload]

        torch.compiler.reset()
        result = (torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step)(q, k, v)
        if asked:
            torch.testing.assert_close(result[2], expected(q, k))
            assert not result[2].requires_grad
            result[2].mul_(2)  # a caller may change it before the backward
        (result[0].sin().sum() + result[1].cos().sum()).backward()
        found.append([t.grad for t in (q, k, v)])
    for a, b in zip(*found, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_compiled_into_given_memory() -> None:
    q, k, v = inputs()

    def step(out: Tensor) -> Tensor:
        return tw.attention(q, k, v, causal=True, return_max_logits=True, out=out)[1]

    torch.compiler.reset()
    out = torch.empty(2, 4, 33, 8)
    torch.testing.assert_close(torch.compile(step, backend="aot_eager", fullgraph=True)(out), expected(q, k))
    assert torch.equal(out, tw.attention(q, k, v, causal=True))


def test_the_op_is_well_formed() -> None:
    args = (*inputs(requires_grad=True), *[None] * 11, *Flags(causal=True, needs_grad=True, max_logits=True))
    torch.library.opcheck(torch.ops.tilewise.dense_logits.default, args)


def test_packed_and_paged() -> None:
    q, k, v = inputs()
    q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
    queries, keys = torch.tensor([0, 12, 30], dtype=torch.int32), torch.tensor([0, 7, 40], dtype=torch.int32)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / 4
    largest = torch.maximum(scores[:, :12, :7].amax((1, 2)), scores[:, 12:30, 7:].amax((1, 2)))
    torch.testing.assert_close(tw.attention_varlen(q, k, v, queries, keys, return_max_logits=True)[1], largest)
    pages = [t.reshape(5, 8, 2, -1) for t in (k, v)]
    table, lengths = torch.tensor([[4, 1], [2, 9]], dtype=torch.int32), torch.tensor([11, 5], dtype=torch.int32)
    one, two = torch.cat([k[32:40], k[8:11]]), k[16:21]
    largest = torch.maximum(*(
        torch.einsum("hd,khd->hk", q[i], seen.repeat_interleave(2, 1)).amax(1) / 4 for i, seen in enumerate((one, two))
    ))  # fmt: skip
    found = tw.attention_paged(q[:2], *pages, table, lengths, return_max_logits=True)[1]  # type: ignore[call-overload]
    torch.testing.assert_close(found, largest)


def test_no_key() -> None:
    q, k, v = inputs()
    hidden = torch.zeros(4, 1, 1, dtype=torch.bool)
    hidden[1] = True
    largest = tw.attention(q, k, v, mask=hidden, sinks=torch.ones(4), return_max_logits=True)[1]
    assert (largest > -math.inf).tolist() == [False, True, False, False]


def test_flops_are_counted() -> None:
    with FlopCounterMode(display=False) as counter:
        tw.attention(*inputs(), return_max_logits=True)
    assert counter.get_total_flops() == 2 * 2 * 4 * 33 * 40 * (16 + 8)


def test_refused() -> None:
    q, k, v = inputs()
    with pytest.raises(InvalidProblem, match="return_max_logits: expected True or False"):
        tw.attention(q, k, v, return_max_logits=1)  # type: ignore[call-overload]
    with pytest.raises(Unsupported, match=r"return_max_logits=True is not computed under torch\.func transforms"):
        torch.func.vmap(lambda q: tw.attention(q, k, v, return_max_logits=True))(q[None])


def test_explain_says_who_refuses() -> None:
    """Hopper's decoding does not keep the maximum, so another backend computes such calls."""
    q, k = (torch.empty(16, 8, n, 128, dtype=torch.bfloat16, device="meta") for n in (1, 8192))
    plain, asked = (tw.explain(q, k, k, device="h200", return_max_logits=flag) for flag in (False, True))
    assert (plain.backend, asked.backend) == ("hopper", "triton")
    assert "max_logits of few query rows" in dict(asked.rejected)["hopper"]
