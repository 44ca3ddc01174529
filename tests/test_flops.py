"""torch.utils.flop_counter counts the ops as it counts torch's own attention."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import tilewise as tw
from tilewise import nn
from tilewise.flops import tell_counters


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def counted(counter: FlopCounterMode, *ops: str) -> list[int]:
    """What a counter has for these ops, and that it has nothing else."""
    found = {op._qualified_op_name: number for op, number in counter.get_flop_counts()["Global"].items()}
    assert set(found) == {f"tilewise::{op}" for op in ops}
    return [found[f"tilewise::{op}"] for op in ops]


@pytest.mark.parametrize("flags", [{}, {"causal": True}, {"window": (3, 0)}], ids=["full", "causal", "window"])
@pytest.mark.parametrize("head_dim_v", [16, 8])
def test_dense_counts_as_torch_counts_its_own(flags: dict[str, Any], head_dim_v: int) -> None:
    shapes = ((2, 4, 33, 16), (2, 4, 41, 16), (2, 4, 41, head_dim_v))
    with FlopCounterMode(display=False) as counter:
        tw.attention(*leaves(*shapes), **flags).sum().backward()
    theirs = [sdpa_flop_count(*shapes), sdpa_backward_flop_count((2, 4, 33, head_dim_v), *shapes)]
    assert counted(counter, "dense", "dense_backward") == theirs
    assert theirs[0] == 2 * 2 * 4 * 33 * 41 * (16 + head_dim_v)


def test_shared_heads_count_once_for_each_query_head_in_either_layout() -> None:
    q, k, v = leaves((2, 33, 4, 16), (2, 41, 2, 16), (2, 41, 2, 16))
    for watched in (True, False):
        with FlopCounterMode(display=False) if watched else contextlib.nullcontext() as forward:
            out = tw.attention(q, k, v, layout="bshd")
        # A call that nobody watched leaves its own backward, which is counted none the less.
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        if forward is not None:
            assert counted(forward, "dense") == [4 * 2 * 4 * 33 * 41 * 16]
        assert counted(backward, "dense_backward") == [10 * 2 * 4 * 33 * 41 * 16]


def test_packed_and_paged_sequences_count_by_their_lengths() -> None:
    q, k = leaves((12, 4, 16), (30, 2, 16))
    starts_q, starts_k = (torch.tensor(starts, dtype=torch.int32) for starts in ([0, 5, 5, 12], [0, 20, 23, 30]))
    with FlopCounterMode(display=False) as packed:
        tw.attention_varlen(q, k, k, starts_q, starts_k).sum().backward()
    pairs = 5 * 20 + 7 * 7
    assert counted(packed, "varlen", "varlen_backward") == [4 * 4 * pairs * 16, 10 * 4 * pairs * 16]
    pages, table = torch.randn(8, 16, 2, 16), torch.arange(6, dtype=torch.int32).view(2, 3)
    lengths = torch.tensor([37, 0], dtype=torch.int32)
    with FlopCounterMode(display=False) as paged, torch.no_grad():
        tw.attention_paged(torch.randn(2, 4, 16), pages, pages, table, lengths)
    assert counted(paged, "paged") == [4 * 4 * 37 * 16]


def test_what_is_not_known_counts_as_the_longest() -> None:
    q = torch.randn(12, 4, 16, device="meta")
    starts = torch.empty(4, dtype=torch.int32, device="meta")
    with FlopCounterMode(display=False) as packed:
        tw.attention_varlen(q, q, q, starts, starts, max_seqlen_q=7, max_seqlen_k=6)
    assert counted(packed, "varlen") == [4 * 4 * 3 * 7 * 6 * 16]


def test_a_counter_that_was_made_before_learns_it() -> None:
    """And one that was given a formula keeps that."""
    tell_counters()
    q = torch.randn(1, 2, 9, 16)
    early = FlopCounterMode(display=False)
    for op in [op for op in early.flop_registry if "tilewise" in str(op)]:
        del early.flop_registry[op]
    with early:
        tw.attention(q, q, q)
    assert counted(early, "dense") == [4 * 2 * 81 * 16]
    mapping: Any = {torch.ops.tilewise.dense: lambda *_, **__: 7}
    with FlopCounterMode(display=False, custom_mapping=mapping) as own:
        tw.attention(q, q, q)
    assert counted(own, "dense") == [7]


def test_modules_show_where_it_was() -> None:
    block = nn.CausalSelfAttention(32, 2)
    with FlopCounterMode(display=False) as counter:
        block(torch.randn(1, 9, 32))
    projections = 2 * 9 * 32 * (96 + 32)
    assert counter.get_flop_counts()["CausalSelfAttention"][torch.ops.tilewise.dense] == 4 * 2 * 81 * 16
    assert counter.get_total_flops() == projections + 4 * 2 * 81 * 16
