"""The list of packed blocks that the persistent Hopper kernels walk: complete, and heavy blocks first."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from emulated_backend import Emulated
from tilewise.problem import AttentionProblem

pytestmark = pytest.mark.slow

BLOCK = 128


class Entry(NamedTuple):
    """What an entry of the list says."""

    block: int
    head: int
    sequence: int
    q_first: int
    q_rows: int
    k_first: int
    keys: int


def listed(
    lengths: tuple[list[int], list[int]],
    module: Emulated,
    others: dict[str, torch.Tensor] | None = None,
    *,
    slack: tuple[int, int],
    **options: Any,
) -> list[Entry]:
    """Run the kernel; the bounds of the lengths are `slack` too large."""
    problem = AttentionProblem(
        kind="varlen", dtype=torch.bfloat16, batch=len(lengths[0]),
        seqlen_q=max(lengths[0]) + slack[0], seqlen_k=max(lengths[1]) + slack[1], total_q=sum(lengths[0]) + 3,
        total_k=sum(lengths[1]) + 2, num_heads=2, num_kv_heads=1, head_dim=64, head_dim_v=64, scale=1.0,
    )  # fmt: skip
    listing = module("work_list")
    cu = [torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in lengths]
    tensors = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]}
    tensors |= others or {}
    total = problem.total_k if options.get("of_keys") else problem.total_q
    most = listing.most_blocks(total, BLOCK, problem.batch) * options.get("heads", 1)
    tensors["work"] = torch.full((listing.list_size(most),), -1, dtype=torch.int32)
    call = listing.list_call(problem, listing.Address("work", torch.int32), BLOCK, **options)
    call.kernel[call.grid](*[tensors[a.name] if hasattr(a, "name") else a for a in call.ordered])
    words = tensors["work"].view(-1, 8).tolist()
    assert words[0][0] >= 0  # written, also when there is nothing to list
    return [Entry(*w[1:]) for w in words[1 : 1 + words[0][0]]]


@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("together", [0, 1000], ids=["full", "banded"])
def test_bounds_that_are_too_small_leave_no_entry_unwritten(together: int, of_keys: bool, emulated: Emulated) -> None:
    """Rows past what is listed are left out of everything, also of what is waited for: kernels read what the list has
    for addresses.
    """
    lengths, most = ([9000, 3, 4097, 700], [9000, 5, 4096, 800]), 4096
    bounds = (100 - 9000, 100 - 9000)
    said = torch.full((len(lengths[0]) * 2,), -1, dtype=torch.int32)
    beside = (emulated("work_list").Address("said", torch.int32), 40) if of_keys else None
    options: Any = {"together": together, "of_keys": of_keys, "beside": beside}
    entries = listed(lengths, emulated, {"said": said}, slack=bounds, **options)
    wanted = [(i, b) for i, n in enumerate(lengths[of_keys]) for b in range(-(-min(n, most) // BLOCK))]
    assert sorted((e.sequence, e.block) for e in entries) == wanted
    for e in entries:
        whole = [lengths[0][e.sequence], lengths[1][e.sequence]]
        whole[of_keys] = min(whole[of_keys], most)
        assert [e.q_rows, e.keys] == whole
        assert (e.q_first, e.k_first) == tuple(sum(n[: e.sequence]) for n in lengths)
    assert not of_keys or all(0 <= mark <= 1 for mark in said.view(-1, 2)[:, 0].tolist())


@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
def test_nothing_to_list_is_said(of_keys: bool, emulated: Emulated) -> None:
    """Bounds of 0: kernels that find no number would take what the memory held for blocks."""
    lengths = ([5, 0, 0], [0, 0, 0]) if of_keys else ([0, 0], [7, 0])
    assert listed(lengths, emulated, slack=(0, 0), together=0, of_keys=of_keys) == []
