"""Shared-prefix (cascade) attention: what a group of sequences has in common is attended once for all of them.

Sequences of a paged batch whose tables start with the same pages read the same keys again and again. Here the query
rows of such a group are taken together as one long query over the shared pages; each sequence attends to the rest of
its own keys as ever; the two results are merged through lse, exactly.

    without   q0 x [prefix | own 0]   q1 x [prefix | own 1]   ...      the prefix is read by every sequence
    cascade   [q0 q1 ...] x prefix    q0 x own 0   q1 x own 1  ...     the prefix is read once a group

`SharedPrefix` is a hint that changes no result beyond rounding; `tilewise.PagedKVCache` makes it from its own tables,
so nothing is read back from a device. It is followed when `refusal` has nothing against it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise import dispatch, ops
from tilewise.device import DeviceSpec
from tilewise.errors import InvalidProblem
from tilewise.operands import Flags, Operands

__all__ = ["Group", "SharedPrefix", "attention", "describe", "price_seconds", "refusal", "saved_seconds"]

# The rule's rates. A GPU pays for three more launches and saves reads, most of which L2 would have answered: an H200
# takes 115 us for 64 sequences with 4096 keys in common and 128 of their own (8 heads on 8 or 32), 9.6 TB/s.
# A CPU thread (AVX-512, fp32 and bf16, 8 and 32 heads on 8, dim 128; bench/serving_cost.py) gains a second for every
# 20 to 34 GB it need not read again, where 8 or 64 sequences share 512 keys or more; taken as 60, since short prefixes
# stay in its caches. It pays 0.3 ms, and 2 ns for every element of the rows, of which merging is 0.4 to 0.5 (64
# sequences with 64 keys in common gain 10 % with 8 heads and lose 3 % with 32).
LAUNCH_SECONDS = {"cpu": 3e-4, "cuda": 25e-6}
CPU_BYTES_PER_SECOND = 60e9
L2_SPEED = 2.0
CPU_MERGE_SECONDS = 2e-9
# Query rows of a K/V head up to which a GPU's decode kernels, which split keys over processors, take a call. A group
# with more is cut into up to MOST_PARTS parts of PART_ROWS, which read the prefix from L2. Microseconds on an H200, 32
# heads on 8, for 32 / 64 / 128 / 256 sequences with 4096 keys in common: 20 / 29 / 46 / 87 in parts, 51 to 52 whole;
# 1024 keys: 13 / 15 / 17 / 29 and 19. In Triton's kernels 24 / 40 / 72 / 137 and 50 for 4096.
DECODE_ROWS, PART_ROWS, MOST_PARTS = 64, 32, 8
# Whose kernel merges on a device, and what it takes; the fp64 reference is merged by torch.
MERGERS = {"cpu": "cpu", "cuda": "triton"}
MERGE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Group(NamedTuple):
    """Sequences that share their first `seqlen_k` keys, and how many query rows they have together."""

    sequences: int
    rows: int
    seqlen_k: int


class SharedPrefix(NamedTuple):
    """Which sequences of a paged batch start with the same pages.

    `groups` says so in numbers; group g has the query rows cu_seqlens_q[g] .. cu_seqlens_q[g+1]-1 of `rows`, which
    names rows of the packed q (None: they are its first ones), and its prefix is block_table[g] up to seqlens_k[g].
    Every query of a group stands behind the prefix. `own_table`, `own_seqlens` are the batch's tables without the
    prefixes, in the batch's order.
    """

    groups: tuple[Group, ...]
    block_table: Tensor
    seqlens_k: Tensor
    cu_seqlens_q: Tensor
    rows: Tensor | None
    own_table: Tensor
    own_seqlens: Tensor

    @property
    def num_rows(self) -> int:
        """Query rows that belong to a group."""
        return sum(group.rows for group in self.groups)

    @property
    def keys_saved(self) -> int:
        """Keys that are not read again, for each K/V head."""
        return sum((group.sequences - 1) * group.seqlen_k for group in self.groups)


def saved_seconds(shared: SharedPrefix, operands: Operands, spec: DeviceSpec) -> float:
    """The time the keys that are not read again would have taken."""
    k, v = operands.k, operands.v
    per_key = k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
    rate = CPU_BYTES_PER_SECOND * _num_threads() if spec.type == "cpu" else L2_SPEED * spec.bandwidth
    return shared.keys_saved * per_key / rate


def price_seconds(shared: SharedPrefix, operands: Operands, spec: DeviceSpec) -> float:
    """The time that a second call and the merge take."""
    elements = shared.num_rows * operands.q.shape[1] * operands.v.shape[3]
    merge = elements * CPU_MERGE_SECONDS / _num_threads() if spec.type == "cpu" else 0.0
    return LAUNCH_SECONDS.get(spec.type, 0.0) + merge


@devices.constant_in_traces
def _num_threads() -> int:
    return torch.get_num_threads()


def refusal(shared: SharedPrefix, operands: Operands, flags: Flags, spec: DeviceSpec) -> str | None:
    """Why the prefix is not attended apart, or None if it is."""
    if flags.window_left is not None or (flags.window_right is not None and not flags.causal):
        return "a window ends in another place of the prefix for every sequence"
    for name in ("alibi_slopes", "bias", "mask"):
        if getattr(operands, name) is not None:
            return f"{name} is another one for every sequence of a group"
    if operands.q_scale is not None:
        return "q in e4m3 has scales of its sequences, not of the groups"
    if flags.needs_grad:
        return "gradients go to every sequence's pages in one pass"
    if not shared.groups:
        return "no two sequences start with the same page"
    saved, price = saved_seconds(shared, operands, spec), price_seconds(shared, operands, spec)
    if saved < price:
        return (
            f"reading the shared keys once saves {saved * 1e6:.0f} us, merging the results costs {price * 1e6:.0f} us"
        )
    return None


def describe(shared: SharedPrefix, operands: Operands, flags: Flags, spec: DeviceSpec) -> str:
    """What becomes of the hint, for `explain`."""
    reason = refusal(shared, operands, flags, spec)
    if reason is not None:
        return f"no: {reason}"
    saved = saved_seconds(shared, operands, spec)
    groups = ", ".join(f"{g.seqlen_k} keys once for {g.rows} queries of {g.sequences} sequences" for g in shared.groups)
    return f"{groups}; saves about {saved * 1e6:.0f} us"


def attention(shared: SharedPrefix | None, operands: Operands, flags: Flags) -> tuple[Tensor, Tensor]:
    """(out, lse) of a paged problem; the shared prefix, if there is one, is attended apart where that pays."""
    if shared is not None and not isinstance(shared, SharedPrefix):
        fix = "PagedKVCache.shared_prefix() makes it."
        raise InvalidProblem("shared_prefix", "a tilewise.cascade.SharedPrefix or None", type(shared).__name__, fix)
    if shared is None or refusal(shared, operands, flags, devices.of(operands.q.device)) is not None:
        return ops.attention("paged", operands, flags)
    return _apart(shared, operands, flags)


def _apart(shared: SharedPrefix, operands: Operands, flags: Flags) -> tuple[Tensor, Tensor]:
    """Prefixes once a group, the rest as ever, merged."""
    own = operands._replace(block_table=shared.own_table, seqlens_k=shared.own_seqlens)
    out, lse = ops.attention("paged", own, flags)
    rows = shared.rows
    q = operands.q[: shared.num_rows] if rows is None else operands.q.index_select(0, rows)
    # A sink counts once, with each sequence's own keys.
    prefix = Operands(
        q, operands.k, operands.v, cu_seqlens_q=shared.cu_seqlens_q, block_table=shared.block_table,
        seqlens_k=shared.seqlens_k, k_scale=operands.k_scale, v_scale=operands.v_scale,
    )  # fmt: skip
    longest = max(group.rows for group in shared.groups)
    if _cuts_groups(q.device):
        prefix, longest = _in_parts(shared.groups, prefix)
    everything = flags._replace(causal=False, window_left=None, window_right=None, max_seqlen_q=longest)
    return _merged(out, lse, *ops.attention("paged", prefix, everything), rows)


def _cuts_groups(device: torch.device) -> bool:
    """Whether groups with many rows are cut: on a GPU; compiled code keeps nothing between calls."""
    return device.type == "cuda" and not torch.compiler.is_compiling()


class _Parts(NamedTuple):
    """Groups cut into parts: `groups[i]` is the one that part i belongs to, `longest` the rows of the longest part."""

    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    groups: Tensor
    longest: int


def _in_parts(groups: tuple[Group, ...], prefix: Operands) -> tuple[Operands, int]:
    """The prefixes' operands, groups with many rows cut where that helps, and the rows of the longest one."""
    longest = max(group.rows for group in groups)
    group_size = prefix.q.shape[1] // prefix.k.shape[2]
    most = max(1, PART_ROWS // group_size)
    if longest * group_size <= DECODE_ROWS or longest > MOST_PARTS * most:
        return prefix, longest
    # A graph must not be left with tensors that are forgotten some day.
    capturing = prefix.q.is_cuda and torch.cuda.is_current_stream_capturing()
    parts = (_new_parts if capturing else _known_parts)(groups, most, prefix.q.device)
    assert prefix.block_table is not None
    if len(groups) == 1:
        table = prefix.block_table.expand(len(parts.seqlens_k), -1)
    else:
        table = prefix.block_table.index_select(0, parts.groups)
    cut = prefix._replace(cu_seqlens_q=parts.cu_seqlens_q, seqlens_k=parts.seqlens_k, block_table=table)
    return cut, parts.longest


def _new_parts(groups: tuple[Group, ...], most: int, device: torch.device) -> _Parts:
    """Parts of at most `most` rows, those of a group as long as each other but for the last; made on the device."""
    counts = [-(-group.rows // most) for group in groups]
    sizes = [-(-group.rows // count) for group, count in zip(groups, counts, strict=True)]
    ends = list(itertools.accumulate(group.rows for group in groups))
    starts = [
        torch.arange(end - group.rows, end, size, dtype=torch.int32, device=device)
        for group, end, size in zip(groups, ends, sizes, strict=True)
    ]
    starts.append(torch.full((1,), ends[-1], dtype=torch.int32, device=device))
    counts = [len(part) for part in starts[:-1]]
    lengths, owners = (
        torch.cat([torch.full((n,), x, dtype=torch.int32, device=device) for n, x in zip(counts, values, strict=True)])
        for values in ([group.seqlen_k for group in groups], range(len(groups)))
    )
    return _Parts(torch.cat(starts), lengths, owners, max(sizes))


_known_parts = functools.lru_cache(maxsize=64)(_new_parts)


def _merged(
    out: Tensor, lse: Tensor, prefix_out: Tensor, prefix_lse: Tensor, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`out` (rows, heads, dim) and `lse` (heads, rows) with the prefixes' results worked in; both are overwritten."""
    merge = _merger(out.device.type) if out.dtype in MERGE_DTYPES and not torch.compiler.is_compiling() else None
    if merge is not None:
        merge(out, lse, prefix_out, prefix_lse, rows)
        return out, lse
    count = prefix_out.shape[0]
    mine, mine_lse = (out[:count], lse[:, :count]) if rows is None else (out[rows], lse[:, rows])
    # `numerics.merge_partials` in one pass over the rows, which have no gradient here: it takes 12, and 2 ms for
    # 64 rows of 32 heads. Where neither side has a key the share is no number, and both are 0.
    share = torch.sigmoid(prefix_lse - mine_lse).nan_to_num_(0.0).mT.unsqueeze(-1)
    both = torch.lerp(mine.to(lse.dtype), prefix_out.to(lse.dtype), share)
    both_lse = torch.logaddexp(mine_lse, prefix_lse)
    if rows is None:
        mine.copy_(both)
        mine_lse.copy_(both_lse)
    else:
        out.index_copy_(0, rows, both.to(out.dtype))
        lse.index_copy_(1, rows, both_lse)
    return out, lse


@functools.cache
def _merger(device_type: str) -> Callable[..., None] | None:
    """The kernel that merges on a device; asked once, as finding a package takes longer than a call."""
    if device_type not in MERGERS:
        return None
    backend: Any = dispatch.load(MERGERS[device_type])
    return backend.merge_rows if backend.unavailable() is None else None
