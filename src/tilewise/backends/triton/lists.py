"""The tiles of packed sequences as lists in the backward's workspace, behind its statistics: (statistics | tiles of
queries | tiles of keys). See gpu/work_list.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from tilewise.backends.gpu.listing import heads_per_wave, list_size, listed_parts, most_blocks, rows_together
from tilewise.backends.gpu.symbols import Address
from tilewise.backends.triton.arguments import workspace_rows
from tilewise.backends.triton.configs import Pass
from tilewise.backends.triton.planning import Plan
from tilewise.backends.triton.traits import Listed, Tail

__all__ = ["is_listed", "list_words", "listed_heads", "listed_tiles", "listing_arguments", "work_address"]


def is_listed(plan: Plan, direction: Pass) -> bool:
    """Whether the programs of dQ or of dK/dV are taken from a list: where the rows they own are packed."""
    return plan.traits.PACKED_K if direction == "dkdv" else plan.traits.PACKED_Q


def listed_tiles(plan: Plan, direction: Pass) -> int:
    """The most tiles a list can have; kernels compute the same."""
    problem, config = plan.problem, plan.config(direction)
    if direction == "dkdv":
        return most_blocks(problem.total_k, config.block_n, problem.batch)
    return most_blocks(problem.total_q, config.block_m, problem.batch)


def list_words(plan: Plan) -> int:
    """32-bit words of all lists."""
    directions: tuple[Pass, Pass] = ("dq", "dkdv")
    return sum(list_size(listed_tiles(plan, one)) for one in directions if is_listed(plan, one))


def work_address(plan: Plan, direction: Pass) -> Address | None:
    """Where the list is, None where there is none."""
    if not is_listed(plan, direction):
        return None
    words = 2 * workspace_rows(plan, 0)[1]
    if direction == "dkdv":
        words += list_size(listed_tiles(plan, "dq"))
    return Address("workspace", torch.int32, offset=4 * words)


def listed_heads(plan: Plan, direction: Pass) -> int:
    """Heads that are walked together: of queries in whole groups, for they share K and V."""
    problem, config = plan.problem, plan.config(direction)
    if config.heads_per_wave is not None:
        return config.heads_per_wave
    if direction == "dkdv":
        tiles = -(-problem.seqlen_k // config.block_n)
        return heads_per_wave(problem.num_kv_heads, max(1, tiles), problem.seqlen_q * _row_bytes(plan, direction))
    tiles = -(-problem.seqlen_q // config.block_m) * problem.group_size
    groups = heads_per_wave(problem.num_kv_heads, tiles, max(1, problem.seqlen_k) * _row_bytes(plan, direction))
    return groups * problem.group_size


def _row_bytes(plan: Plan, direction: Pass) -> int:
    """Bytes of a streamed row of one K/V head: of q and dout of its group, or of K and V."""
    problem = plan.problem
    row = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    return row * problem.group_size if direction == "dkdv" else row


def listing_arguments(plan: Plan, made: Collection[str]) -> dict[str, Any]:
    """What the kernel of the row statistics lists and clears for those of dq, dk and dv that are `made`."""
    problem, paged = plan.problem, plan.problem.kind == "paged"
    on = {"dq": "dq" in made and is_listed(plan, "dq"), "dkdv": "dk" in made and is_listed(plan, "dkdv")}
    keys = "seqlens_k" if paged else "cu_seqlens_k"
    sizes = {
        "dq": (problem.total_q, problem.num_heads * problem.head_dim),
        "dk": (problem.total_k, problem.num_kv_heads * problem.head_dim),
        "dv": (problem.total_k, problem.num_kv_heads * problem.head_dim_v),
    }
    cleared = {
        n: Tail(Address(n, problem.dtype, aligned=False), *sizes[n]) for n in sizes if on["dq" if n == "dq" else "dkdv"]
    }
    return (
        dict.fromkeys(sizes)
        | cleared
        | {
            "seqlens_k": Address(keys, torch.int32, aligned=False) if any(on.values()) else None,
            "queries": _listed(plan, "dq") if on["dq"] else None,
            "keys": _listed(plan, "dkdv") if on["dkdv"] else None,
            "TILE_Q": plan.config("dq").block_m if on["dq"] else 0,
            "TILE_K": plan.config("dkdv").block_n if on["dkdv"] else 0,
            "IS_PAGED": paged and any(on.values()),
        }
    )


def _listed(plan: Plan, direction: Pass) -> Listed:
    problem, config = plan.problem, plan.config(direction)
    of_keys = direction == "dkdv"
    heads = listed_heads(plan, direction) // (1 if of_keys else problem.group_size)
    banded = plan.traits.HAS_LEFT or plan.traits.HAS_RIGHT
    longest, block = (problem.seqlen_k, config.block_n) if of_keys else (problem.seqlen_q, config.block_m)
    return Listed(
        work=work_address(plan, direction),
        parts=listed_parts(longest, block),
        rows_together=rows_together(_row_bytes(plan, direction), heads, banded=banded),
    )
