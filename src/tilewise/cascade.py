"""Shared-prefix (cascade) attention: keys that a group of sequences shares are read once for the group.

Sequences of a paged batch whose tables start with the same pages would each read the same keys. Here the query rows of
such a group attend to the shared pages together, as one long query; each sequence attends to its remaining keys on its
own; the two results are merged through lse, exactly.

    without   q0 x [prefix | own 0]   q1 x [prefix | own 1]   ...      the prefix is read by every sequence
    cascade   [q0 q1 ...] x prefix    q0 x own 0   q1 x own 1  ...     the prefix is read once a group

`SharedPrefix` is a hint that changes results only by rounding. `tilewise.PagedKVCache` makes it from its host tables,
so nothing is read back from a device. The hint is followed unless `refusal` gives a reason against it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise import derivatives, dispatch, ops, settings, tracing, validation
from tilewise import device as devices
from tilewise.backends.base import Serving
from tilewise.device import DeviceSpec
from tilewise.errors import InvalidProblem
from tilewise.memory import check_allocated, touch
from tilewise.numerics import merge_rows
from tilewise.operands import Flags, Operands
from tilewise.problem import AttentionProblem
from tilewise.units import counted

# Rates of the cost rule; measurements by name in bench/results/cascade-costs.csv. A GPU pays for two more launches and
# the prefix's products, and saves reads, most of which L2 would have served. The launch cost counts host time, so some
# groups are left out that would gain inside a CUDA graph only. A CPU thread pays a fixed cost and a cost for each
# element of the rows, mostly outside the merge. Its bandwidth is set above the measured one, because short prefixes
# stay in its caches.
LAUNCH_SECONDS = {"cpu": 3e-4, "cuda": 25e-6}
CPU_BYTES_PER_SECOND = 60e9
L2_SPEED = 2.0
CPU_MERGE_SECONDS = 2e-9
# Dtypes that kernels merge. Results of the fp64 reference are merged by torch.
MERGE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OUT = Operands._fields.index("out")
HINT_MAKER = "PagedKVCache.shared_prefix() makes it."


class Group(NamedTuple):
    """Sequences that share their first `seqlen_k` keys, and the number of query rows they have together."""

    sequences: int
    rows: int
    seqlen_k: int


class SharedPrefix(NamedTuple):
    """Which sequences of a paged batch start with the same pages.

    `groups` holds the sizes as Python numbers. Group g has the query rows cu_seqlens_q[g] .. cu_seqlens_q[g+1]-1 of
    `rows`, an index into the packed q (None: its first rows). Its prefix is block_table[g] up to seqlens_k[g]. Every
    query of a group comes after the prefix. `own_table` and `own_seqlens` are the batch's tables without the prefixes,
    in the batch's order.
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
        """Keys whose repeated reads are saved, per K/V head."""
        return sum((group.sequences - 1) * group.seqlen_k for group in self.groups)


def saved_seconds(shared: SharedPrefix, operands: Operands, spec: DeviceSpec) -> float:
    """Estimated time to read the keys that are saved."""
    k, v = operands.k, operands.v
    columns = k.shape[3] + (0 if validation.is_latent(k, v) else v.shape[3])
    per_key = k.shape[2] * columns * k.element_size()
    rate = CPU_BYTES_PER_SECOND * _num_threads() if spec.type == "cpu" else L2_SPEED * spec.bandwidth
    return shared.keys_saved * per_key / rate


def price_seconds(shared: SharedPrefix, operands: Operands, spec: DeviceSpec) -> float:
    """Estimated time of the second pass and the merge."""
    elements = shared.num_rows * operands.q.shape[1] * operands.v.shape[3]
    merge = elements * CPU_MERGE_SECONDS / _num_threads() if spec.type == "cpu" else 0.0
    return LAUNCH_SECONDS.get(spec.type, 0.0) + merge


@devices.constant_in_traces
def _num_threads() -> int:
    return torch.get_num_threads()


def refusal(shared: SharedPrefix, operands: Operands, flags: Flags, spec: DeviceSpec) -> str | None:
    """Why the prefix is not attended separately, or None if it is."""
    if flags.window_left is not None or (flags.window_right is not None and not flags.causal):
        return "a window ends in another place of the prefix for every sequence"
    for name in ("alibi_slopes", "bias", "mask", "tiles"):
        if getattr(operands, name) is not None:
            name = "mask" if name == "tiles" else name
            return f"{name} is another one for every sequence of a group"
    if flags.batch_invariant:
        return "merging it would make bits depend on the batch"
    if flags.max_logits:
        return "the largest score of a head is that of one pass over all keys"
    if operands.q_scale is not None:
        return "q in e4m3 has scales of its sequences, not of the groups"
    if flags.needs_grad or derivatives.is_dual(operands):
        return "derivatives go to every sequence's pages in one pass"
    if not shared.groups:
        return "no two sequences start with the same page"
    saved, price = saved_seconds(shared, operands, spec), price_seconds(shared, operands, spec)
    if saved < price:
        return (
            f"reading the shared keys once saves {saved * 1e6:.0f} us, merging the results costs {price * 1e6:.0f} us"
        )
    return None


def describe(shared: SharedPrefix, operands: Operands, flags: Flags, spec: DeviceSpec) -> str:
    """What happens to the hint, for `explain`."""
    reason = refusal(shared, operands, flags, spec)
    if reason is not None:
        return f"no: {reason}"
    saved = saved_seconds(shared, operands, spec)
    groups = ", ".join(
        f"{counted(g.seqlen_k, 'key')} once for {counted(g.rows, 'query', 'queries')} of {g.sequences} sequences"
        for g in shared.groups
    )
    return f"{groups}; saves about {saved * 1e6:.0f} us"


def attention(shared: SharedPrefix | None, operands: Operands, flags: Flags) -> tuple[Tensor, Tensor]:
    """(out, lse) of a paged problem. A shared prefix is attended separately where that is faster."""
    if shared is not None:
        _check(shared, operands)
        if operands.out is not None and ops.is_plain_eager(operands):
            _disjoint_memory(shared, operands, len(operands)).check((*operands, *shared[1:]))
    if shared is None or refusal(shared, operands, flags, devices.of(operands.q.device)) is not None:
        return ops.repeated("paged", operands, flags)
    if ops.is_plain_eager(operands):
        # The batch's own tables are not read when the hint is followed. A call that is invalid without it stays
        # invalid.
        validation.check_structure("paged", operands, flags)
        if ops.is_plain_eager(shared[1:]) and validation.reads_contents("paged", operands):
            _check_lengths(shared, operands)
    return _attend_separately(shared, operands, flags)


def _disjoint_memory(shared: SharedPrefix, operands: Operands, count: int) -> validation.Disjoint:
    """The check that `out` shares no memory with the first `count` operands and the tensors of the hint."""
    names = (*Operands._fields[:count], *[f"shared_prefix.{name}" for name in shared._fields[1:]])
    return validation.Disjoint(names, (*operands[:count], *shared[1:]))


def _check(shared: Any, operands: Operands) -> None:
    """Checks types and the sizes known on the host. The ops validate the tensors themselves."""
    fix, num_queries = HINT_MAKER, len(operands.q)
    if not isinstance(shared, SharedPrefix):
        raise InvalidProblem("shared_prefix", "a tilewise.cascade.SharedPrefix or None", type(shared).__name__, fix)
    groups: Any = shared.groups
    if not isinstance(groups, tuple) or not all(isinstance(group, Group) for group in groups):
        raise InvalidProblem("shared_prefix.groups", "a tuple of tilewise.cascade.Group", repr(groups), fix)
    if not all(
        isinstance(number, int | np.integer | torch.SymInt) and number >= 0 for group in groups for number in group
    ):
        raise InvalidProblem("shared_prefix.groups", "integers of at least 0 in each Group", repr(groups), fix)
    for name, tensor in zip(shared._fields[1:], shared[1:], strict=True):
        if not isinstance(tensor, Tensor) and not (name == "rows" and tensor is None):
            raise InvalidProblem(f"shared_prefix.{name}", "a torch.Tensor", type(tensor).__name__, fix)
        if tensor is not None:
            validation.check_class(f"shared_prefix.{name}", tensor)
            check_allocated((f"shared_prefix.{name}",), (tensor,))
    rows = shared.num_rows
    if rows > num_queries or (shared.rows is not None and shared.rows.shape != (rows,)):
        got = rows if shared.rows is None else f"{rows}, of which rows names {tuple(shared.rows.shape)}"
        raise InvalidProblem("shared_prefix.groups", f"rows of q, which has {num_queries}", got, fix)
    if shared.rows is not None and shared.rows.device != operands.q.device:
        raise InvalidProblem("shared_prefix.rows", f"a tensor on {operands.q.device}", shared.rows.device, fix)
    if len(shared.block_table) != len(groups):
        expected = f"{counted(len(groups), 'table row')}, one for each group"
        raise InvalidProblem("shared_prefix.block_table", expected, len(shared.block_table), fix)
    if ops.is_plain_eager(shared[1:]) and validation.reads_contents("paged", operands):
        _check_contents(shared, num_queries)


def _check_contents(shared: SharedPrefix, num_queries: int) -> None:
    """Checks the contents: on a CPU, where reading is free, and on a GPU if `settings` asks for it."""
    totals, rows = shared.cu_seqlens_q.tolist(), shared.rows
    running = shared.cu_seqlens_q.shape == (len(shared.groups) + 1,) and totals == sorted(totals)
    if not running or (totals[0], totals[-1]) != (0, shared.num_rows):
        expected = f"{len(shared.groups) + 1} running totals up to {shared.num_rows}, the rows of the groups"
        raise InvalidProblem("shared_prefix.cu_seqlens_q", expected, totals, HINT_MAKER)
    if rows is None or not len(rows):
        return
    whole = rows.dtype in (torch.int32, torch.int64)
    if not whole or not 0 <= int(rows.min()) <= int(rows.max()) < num_queries or int(rows.bincount().max()) > 1:
        expected = f"distinct rows of q, which has {num_queries}"
        raise InvalidProblem("shared_prefix.rows", expected, rows.tolist(), HINT_MAKER)


def _check_lengths(shared: SharedPrefix, operands: Operands) -> None:
    """Checks that the keys of each sequence with queries are those of its prefix and its own: not so in a hint of
    another step.
    """
    lengths, totals = operands.seqlens_k, operands.cu_seqlens_q
    assert lengths is not None
    shapes, expected = (shared.seqlens_k.shape, shared.own_seqlens.shape), ((len(shared.groups),), lengths.shape)
    if shapes != expected:
        raise InvalidProblem("shared_prefix.seqlens_k, own_seqlens", f"shapes {expected}", shapes, HINT_MAKER)
    # By NumPy, whose calls are shorter than torch's.
    keys, own, of_groups, starts = (
        t.cpu().numpy() for t in (lengths, shared.own_seqlens, shared.seqlens_k, shared.cu_seqlens_q)
    )
    sequences = np.arange(shared.num_rows) if shared.rows is None else shared.rows.cpu().numpy()
    # The last entry is that of queries without a sequence.
    prefix, is_read = np.zeros(len(keys) + 1, keys.dtype), np.ones(len(keys), np.bool_)
    if totals is not None:
        ends = totals.cpu().numpy()
        sequences, is_read = np.searchsorted(ends[1:], sequences, side="right"), np.diff(ends) > 0
    prefix[sequences] = np.repeat(of_groups, np.diff(starts))
    wrong = is_read & (prefix[:-1] + own != keys)
    if prefix[-1] or wrong.any():
        first = (f"{prefix[at]} and {own[at]} for {keys[at]} of sequence {at}" for at in wrong.nonzero()[0])
        got = next(first, "queries of no sequence")
        wanted = "keys of prefixes and own ones that add up to seqlens_k"
        raise InvalidProblem("shared_prefix", wanted, got, "Ask shared_prefix() in every step.")


def bound(
    shared: SharedPrefix, operands: Operands, flags: Flags, result: Sequence[Tensor], count: int, *, return_lse: bool
) -> Callable[..., Any] | None:
    """The prepared call for later calls with this signature, given the `result` of the first (see calls). None if each
    call must be validated.

    It is called with the first `count` operands and the tensors of the hint, in their order.
    """
    if dispatch.serving(operands.q.device.type) is None or not validation.lasts("paged", operands, flags):
        return None
    reads = validation.reads_contents("paged", operands)
    if refusal(shared, operands, flags, devices.of(operands.q.device)) is not None:
        plain = ops.Call("paged", operands, flags, return_lse=return_lse, lasting=True)
        plain.bind(operands)
        present = sum(tensor is not None for tensor in operands[:count])
        return functools.partial(_unshared, plain, shared.groups if reads else None, count, present)
    prefix = _direct(shared, operands, flags)
    # Operands that had to be copied would have to be copied in every call.
    given = (*_prefix(shared, operands, flags)[0], shared.rows)
    if prefix is None or any(a is not b for a, b in zip((*prefix.operands, _rows(shared)), given, strict=True)):
        return None
    attend = prefix.backend.bind_prefixes(prefix.problem, prefix.operands, shared.num_rows, shared.rows, *result)
    if attend is None:
        return None
    own = ops.Call("paged", _own(shared, operands), flags, return_lse=True, lasting=True)
    own.bind(_own(shared, operands))
    backend, problem, _, everything = prefix
    memory = None if operands.out is None else _disjoint_memory(shared, operands, count)
    return _Shared(shared.groups, backend, problem, everything, own, attend, count, reads, return_lse, memory)


@dataclass(slots=True)
class _Shared:
    """A call whose prefixes are attended separately. It outlives the tensors it was made with and holds none."""

    _groups: tuple[Group, ...]
    _backend: Serving
    _problem: AttentionProblem
    _flags: Flags
    _own: ops.Call
    _attend: Any
    _count: int
    _reads: bool
    _with_lse: bool
    _memory: validation.Disjoint | None
    _nvtx: bool = field(init=False)
    _both: Any = field(init=False)

    def __post_init__(self) -> None:
        self._nvtx, own = settings.current().nvtx, self._own
        # Launch all kernels as one pass, which saves host time. This needs a bound pass for the own keys, and no
        # contents to check or convert before it.
        unread, first = () if self._with_lse else ("lse",), None if self._reads or own.wide else own.bound
        bind = self._backend.bind_after
        self._both = None if first is None else bind(first, self._attend, self._count, unread, own.problem)

    def __call__(self, tensors: Sequence[Tensor | None], places: tuple[int, ...] | None = None, *_others: Any) -> Any:
        if self._reads:
            self._check(tensors)
        if self._memory is not None:
            self._memory.check(tensors, places)
        made: Sequence[Tensor] | None = None
        if self._both is None:
            pass
        elif tracing.profiler._is_profiler_enabled or self._nvtx:  # noqa: SLF001
            with tracing.span(tracing.FORWARD, tensors, self._backend.name, self._own.problem):
                made = self._both(tensors, places)
        else:
            made = self._both(tensors, places)
        if made is None:
            made = self._one_by_one(tensors)
        elif self._memory is not None:
            out: Any = tensors[OUT]
            touch(out)
            made = (out, *made)
        return (made[0], made[1]) if self._with_lse else made[0]

    def _check(self, tensors: Sequence[Any]) -> None:
        shared, operands = self._sorted(tensors)
        _check_contents(shared, len(operands.q))
        _check_lengths(shared, operands)
        validation.check_contents(_prefix(shared, operands, self._flags)[0], self._flags)

    def _sorted(self, tensors: Sequence[Any]) -> tuple[SharedPrefix, Operands]:
        return SharedPrefix(self._groups, *tensors[self._count :]), Operands(*tensors[: self._count])

    def _one_by_one(self, tensors: Sequence[Any]) -> tuple[Tensor, Tensor]:
        shared, operands = self._sorted(tensors)
        made: Any = self._own(_own(shared, operands))
        prefix, _ = _prefix(shared, operands, self._flags)
        with tracing.span(tracing.FORWARD, prefix, self._backend.name, self._problem):
            if self._attend((*prefix, shared.rows, *made)) is None:
                self._backend.attend_prefixes(self._problem, prefix, shared.num_rows, shared.rows, *made)
        out, lse = made
        return out, lse


def _unshared(
    plain: ops.Call,
    read: tuple[Group, ...] | None,
    count: int,
    present: int,
    tensors: Sequence[Any],
    places: tuple[int, ...] | None = None,
    *_others: Any,
) -> Any:
    """A cached call whose hint is not followed; its contents are checked if the groups are passed as `read`.

    The first `count` tensors, `present` of them not None, are those of the call without the hint.
    """
    if read is not None:
        _check_contents(SharedPrefix(read, *tensors[count:]), len(tensors[0]))
    return plain(tensors[:count], None if places is None else places[:present])


def _attend_separately(shared: SharedPrefix, operands: Operands, flags: Flags) -> tuple[Tensor, Tensor]:
    """Attends own keys and prefixes separately and merges the results."""
    out, lse = ops.repeated("paged", _own(shared, operands), flags)
    direct, rows = _direct(shared, operands, flags), _rows(shared)
    if direct is not None:
        with tracing.span(tracing.FORWARD, direct.operands, direct.backend.name, direct.problem):
            direct.backend.attend_prefixes(direct.problem, direct.operands, shared.num_rows, rows, out, lse)
        return out, lse
    q = operands.q[: shared.num_rows] if rows is None else operands.q.index_select(0, rows)
    prefix, everything = _prefix(shared, operands, flags)
    return _merged(out, lse, *ops.attention("paged", prefix._replace(q=q), everything), rows)


def _rows(shared: SharedPrefix) -> Tensor | None:
    """Contiguous, as kernels index it by address."""
    return None if shared.rows is None else shared.rows.contiguous()


def _own(shared: SharedPrefix, operands: Operands) -> Operands:
    """Operands whose keys are each sequence's own keys after its prefix."""
    return operands._replace(block_table=shared.own_table, seqlens_k=shared.own_seqlens)


def _prefix(shared: SharedPrefix, operands: Operands, flags: Flags) -> tuple[Operands, Flags]:
    """Operands whose sequences are the groups, with all of q. A sink counts once, with each sequence's own keys."""
    tables = (shared.cu_seqlens_q, None, shared.block_table, shared.seqlens_k)
    prefix = Operands(*operands[:3], *tables, k_scale=operands.k_scale, v_scale=operands.v_scale)
    longest = max(group.rows for group in shared.groups)
    return prefix, flags._replace(causal=False, window_left=None, window_right=None, max_seqlen_q=longest)


class _Direct(NamedTuple):
    """A backend that attends prefixes and merges them in one pass, and its arguments."""

    backend: Serving
    problem: AttentionProblem
    operands: Operands
    flags: Flags


def _direct(shared: SharedPrefix, operands: Operands, flags: Flags) -> _Direct | None:
    """None if no backend attends prefixes directly, or another backend was requested."""
    if not ops.is_plain_eager((*operands, *shared[1:])):
        return None
    out = operands.out
    if out is not None and out.shape[-1] > 1 and out.stride(-1) != 1:  # kernels merge into adjacent columns
        return None
    backend = dispatch.serving(operands.q.device.type)
    if backend is None or flags.backend not in ("auto", backend.name):
        return None
    prefix, everything = _prefix(shared, operands, flags)
    problem, prefix = ops.described("paged", prefix, everything)
    fits = dispatch.unknown_feature(backend, problem) is None
    fits = fits and backend.splits_prefixes(problem, shared.num_rows, devices.of(operands.q.device))
    return _Direct(backend, problem, prefix, everything) if fits else None


def _merged(
    out: Tensor, lse: Tensor, prefix_out: Tensor, prefix_lse: Tensor, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`out` (rows, heads, dim) and `lse` (heads, rows) merged in place with the results of the prefixes."""
    kernel = out.dtype in MERGE_DTYPES and out.is_contiguous() and ops.is_plain_eager((out, lse, prefix_out))
    backend = dispatch.serving(out.device.type) if kernel else None
    merge = merge_rows if backend is None else backend.merge_rows
    merge(out, lse, prefix_out, prefix_lse, rows)
    return out, lse
