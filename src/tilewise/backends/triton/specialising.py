"""The call of the forward with warps of their own for loading (forward_specialised.py), where it can run."""

from __future__ import annotations

import math
from dataclasses import replace

import triton

from tilewise.backends.gpu.symbols import KernelCall
from tilewise.backends.triton import forward_specialised
from tilewise.backends.triton.arguments import Views, box_of, key_rows, matrix_of, query_rows, stat_rows
from tilewise.backends.triton.choosing import is_specialisable
from tilewise.backends.triton.planning import Plan

__all__ = ["specialised_call"]

# Warpgroups that compute: the rows of a query tile are dealt out among them.
CONSUMERS = 2


def specialised_call(plan: Plan, views: Views) -> KernelCall | None:
    """The kernel, or None: where another one is meant, and where TMA cannot address the rows."""
    problem, config = plan.problem, plan.config("forward")
    if not config.specialised or not is_specialisable(problem):
        return None
    heads, kv_heads = problem.num_heads, problem.num_kv_heads
    q, k, v = query_rows(plan, "q", views["q"]), *(key_rows(problem, name, views[name]) for name in "kv")
    queries = matrix_of(plan, q, heads, problem.seqlen_q, config.block_m, problem.head_dim)
    k_desc = box_of(k, problem.batch, kv_heads, problem.seqlen_k, config.block_n, problem.head_dim)
    v_desc = box_of(v, problem.batch, kv_heads, problem.seqlen_k, config.block_n, problem.head_dim_v)
    if queries is None or k_desc is None or v_desc is None:
        return None
    num_blocks = triton.cdiv(problem.seqlen_q, config.block_m)
    num_items = num_blocks * heads * problem.batch
    arguments = {
        "q_desc": replace(queries[0], shares=CONSUMERS),
        "q_box": queries[1],
        "k_desc": k_desc,
        "v_desc": v_desc,
        "out": query_rows(plan, "out", views["out"]),
        "lse": stat_rows(plan, "lse", views["lse"]),
        "sizes": plan.sizes,
        "band": plan.band,
        "scalars": plan.scalars,
        "num_items": num_items,
        "T": plan.traits,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "NUM_STAGES": config.num_stages,
        "MASKED": plan.traits.HAS_LEFT or plan.traits.HAS_RIGHT or problem.seqlen_k % config.block_n != 0,
    }
    programs = min(num_items, _programs(plan.device.num_sms, num_blocks if plan.traits.HAS_RIGHT else 1))
    shape = (config.num_warps, config.num_stages, config.max_registers)
    return KernelCall(forward_specialised.specialised_forward_kernel, (programs, 1, 1), arguments, *shape)


def _programs(most: int, num_blocks: int) -> int:
    """As many as have no divisor in common with the blocks of a head: a program then gets long and short ones in turn.

    Under a causal mask a program has every count-th block; 132 of them on 4 blocks a head would each have blocks of one
    length only (D=128, N = 256 and 512: 96 and 155 us, 131 programs 74 and 98).
    """
    return next(count for count in range(most, 0, -1) if math.gcd(count, num_blocks) == 1)
