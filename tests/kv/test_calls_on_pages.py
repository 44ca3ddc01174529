"""Calls on a CPU, dense and paged, with shared prefixes and without: one that was seen before answers as if nothing had
been, whatever changed since, and hints that make no sense are refused.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import tilewise as tw
from making import check_merging
from tilewise import calls, cascade, device, settings, validation
from tilewise.testing.threads import one_thread

BATCH, HEADS, KV_HEADS, DIM, SIZE, SHARED, OWN = 4, 4, 2, 16, 8, 3, 2


class Batch:
    """Four sequences with three pages in common and two of their own, decoded with a hint ("shared") or without
    ("plain"); or "dense" ones.
    """

    def __init__(self, kind: str) -> None:
        make, pages = torch.Generator().manual_seed(0), SHARED + BATCH * OWN
        self.k, self.v = torch.randn(2, pages, SIZE, KV_HEADS, DIM, generator=make).unbind()
        self.q = torch.randn(BATCH, HEADS, DIM, generator=make)
        self.prefix = torch.arange(SHARED, dtype=torch.int32)[None]
        self.own = torch.arange(SHARED, pages, dtype=torch.int32).view(BATCH, OWN)
        self.table = torch.cat((self.prefix.expand(BATCH, -1), self.own), 1)
        self.lengths = torch.full((BATCH,), (SHARED + OWN) * SIZE - 3, dtype=torch.int32)
        self.own_lengths = self.lengths - SHARED * SIZE
        self.groups: tuple[Any, ...] = (cascade.Group(BATCH, BATCH, SHARED * SIZE),)
        self.keys = torch.tensor([SHARED * SIZE], dtype=torch.int32)
        self.starts = torch.tensor([0, BATCH], dtype=torch.int32)
        self.rows: Any = torch.arange(BATCH)
        self.kind, self.flags = kind, dict[str, Any]()
        if kind == "dense":
            self.q, self.k, self.v = (torch.randn(2, n, 9, DIM, generator=make) for n in (HEADS, KV_HEADS, KV_HEADS))

    @property
    def hint(self) -> cascade.SharedPrefix:
        tensors = (self.prefix, self.keys, self.starts, self.rows, self.own, self.own_lengths)
        return cascade.SharedPrefix(self.groups, *tensors)

    def attend(self, **flags: Any) -> Tensor:
        flags = {**({"shared_prefix": self.hint} if self.kind == "shared" else {}), **self.flags, **flags}
        tables = () if self.kind == "dense" else (self.table, self.lengths)
        call: Any = tw.attention if self.kind == "dense" else tw.attention_paged
        out: Tensor = call(self.q, self.k, self.v, *tables, **flags)
        return out


def forget() -> None:
    calls._family.cache_clear()
    calls._slot.cache_clear()


@pytest.fixture(autouse=True)
def nothing_seen(always_cascade: None) -> Iterator[None]:
    """No call was seen before."""
    forget()
    yield
    forget()


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Batch], None]:
    """Another tensor in the place of one, or one changed in place."""

    def change_it(batch: Batch) -> None:
        found = change(getattr(batch, name))
        if found is not None:
            setattr(batch, name, found)

    return change_it


def in_place(name: str, change: Callable[[Any], Any]) -> Callable[[Batch], None]:
    def change_it(batch: Batch) -> None:
        change(getattr(batch, name))

    return change_it


def flagged(**flags: Any) -> Callable[[Batch], None]:
    return lambda batch: batch.flags.update(flags)


def longs(tensor: Tensor) -> Tensor:
    return tensor.long()


# What becomes of the batch between two calls, and what the second one meets: None is a result.
CHANGES: dict[str, tuple[Callable[[Batch], None], str | None]] = {
    "nothing": (lambda _: None, None),
    "other keys": (in_place("k", lambda t: t.copy_(t.flip(0))), None),
    "keys set_ to other memory": (in_place("k", lambda t: t.set_(t.flip(0))), None),
    "keys set_ to fewer pages": (in_place("k", lambda t: t.set_(t[:2].clone())), "expected num_pages 2"),
    "keys of another dtype": (lambda b: setattr(b.k, "data", b.k.data.half()), "k_pages: expected dtype"),
    "q resized": (in_place("q", lambda t: t.resize_(2, HEADS, DIM)), "expected"),
    "a shorter table": (in_place("table", lambda t: t.resize_(BATCH, 1)), None),
    "a shorter table of its own": (in_place("own", lambda t: t.resize_(BATCH, 1)), None),
    "fewer lengths": (in_place("own_lengths", lambda t: t.resize_(2)), None),
    "int64 table": (changed("table", longs), None),
    "int64 lengths": (changed("lengths", longs), None),
    "int64 table of its own": (changed("own", longs), None),
    "int64 totals": (changed("starts", longs), None),
    "int32 rows": (changed("rows", lambda t: t.int()), None),
    "rows of floats": (changed("rows", lambda t: t.float()), None),
    "rows elsewhere": (changed("rows", lambda t: t.to("meta")), None),
    "other rows": (in_place("rows", lambda t: t.copy_(t.flip(0))), None),
    "a row twice": (in_place("rows", lambda t: t.zero_()), None),
    "no rows": (lambda b: setattr(b, "rows", None), None),
    "groups without a name": (lambda b: setattr(b, "groups", tuple(map(tuple, b.groups))), None),
    "halves": (lambda b: setattr(b, "groups", (cascade.Group(4, 4, 24.0),)), None),  # type: ignore[arg-type]
    "no groups": (lambda b: setattr(b, "groups", ()), None),
    "a last dimension with strides": (changed("q", lambda t: t.mT.contiguous().mT), None),
    "tables with strides": (changed("table", lambda t: t.t().contiguous().t()), None),
    "tables of its own with strides": (changed("own", lambda t: t.t().contiguous().t()), None),
    "q off the alignment": (changed("q", lambda t: torch.zeros(t.numel() + 1)[1:].view(t.shape).copy_(t)), None),
    "a parameter": (changed("q", torch.nn.Parameter), None),
    "q with a gradient": (in_place("q", lambda t: t.requires_grad_()), None),
    "keys with a gradient": (in_place("k", lambda t: t.requires_grad_()), None),
    "reference": (flagged(backend="reference"), None),
    "one that is not there": (flagged(backend="hopper"), "backend 'hopper' does not take"),
    "lse": (flagged(return_lse=True), None),
    "an integer for causal": (flagged(causal=0), "causal: expected True or False"),
    "a window": (flagged(window=(5, 0)), None),
    "half a window": (flagged(window=(5.0, 0)), "window: expected None or a pair"),
    "nobody": (
        lambda b: b.__dict__.update(
            q=b.q[:0], table=b.table[:0], lengths=b.lengths[:0], own=b.own[:0], own_lengths=b.own_lengths[:0],
            rows=b.rows[:0], groups=(cascade.Group(0, 0, SHARED * SIZE),), starts=b.starts * 0,
        ),
        None,
    ),
}  # fmt: skip

# Those that need no pages.
PAGED = re.compile("table|length|rows|row twice|totals|groups|halves|nobody|fewer pages|dtype|resized")
DENSE = [name for name in CHANGES if not PAGED.search(name)]
KINDS = [*((kind, name) for kind in ("shared", "plain") for name in CHANGES), *(("dense", name) for name in DENSE)]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# What is in force during a call.
AROUND: dict[str, Callable[[], Any]] = {
    "one thread": one_thread,
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast to bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to fp16": lambda: torch.autocast("cpu", torch.float16),
    "contents read": lambda: settings.overridden(check_values=True),
    "deterministic algorithms": deterministic,
    "another backend": lambda: settings.overridden(backend="reference"),
    "no backend": lambda: settings.overridden(backend="hopper"),
    "another device": lambda: device.overridden(device.named("h200")),
}


def outcome(batch: Batch) -> Any:
    """What a call answers, as far as a caller can tell."""
    try:
        answer: Any = batch.attend()
    except (tw.TilewiseError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    results = answer if isinstance(answer, tuple) else (answer,)
    return [(t.tolist(), t.dtype, t.requires_grad, t.is_inference()) for t in results]


def judge(kind: str, change: Callable[[Batch], None], around: Callable[[], Any]) -> Any:
    """The outcome, the same with nothing remembered and after calls with the batch as it was and as it became."""
    found = []
    for seen in (False, True):
        batch = Batch(kind)
        for _ in range(3 if seen else 0):
            batch.attend()
        change(batch)
        for _ in range(2):
            if not seen:
                forget()
                validation.flags._checked_once.cache_clear()
            with around():
                found.append(outcome(batch))
        # Back to what it was: nothing of the change is left.
        if seen:
            assert outcome(Batch(kind)) == outcome(Batch(kind)) == base(kind)
    assert found[0] == found[1] == found[2] == found[3]
    return found[0]


def base(kind: str) -> Any:
    forget()
    return outcome(Batch(kind))


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_what_changed_since_is_followed(kind: str, name: str) -> None:
    change, message = CHANGES[name]
    found = judge(kind, change, contextlib.nullcontext)
    if message is not None:
        assert isinstance(found, str)
        assert message in found


@pytest.mark.parametrize("kind", ["shared", "plain", "dense"])
@pytest.mark.parametrize("name", AROUND)
def test_what_is_in_force_is_followed(name: str, kind: str) -> None:
    if name == "another device" and torch.cuda.is_available():
        pytest.skip("its kernels would run, and take addresses of host memory for the device's")
    judge(kind, lambda _: None, AROUND[name])


def test_packed_calls_with_bounds_read_their_lengths_every_time() -> None:
    """Sequences of any lengths up to the bound, forward and backward, packed and paged."""
    make = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 24, 2, 16, generator=make).unbind()
    pages, table = torch.randn(9, 4, 2, 16, generator=make), torch.randperm(9, generator=make).view(3, 3).int()
    for totals in ([0, 8, 16, 24], [0, 1, 12, 24], [0, 0, 0, 0], [0, 12, 24, 24], [0, 8, 16, 24]):
        cu = torch.tensor(totals, dtype=torch.int32)
        lengths = torch.tensor([12, totals[1], 7], dtype=torch.int32)
        found: dict[str, list[Tensor]] = {}
        for backend in ("cpu", "reference"):
            leaves = [t.clone().requires_grad_() for t in (q, k, v, pages)]
            flags: dict[str, Any] = {"max_seqlen_q": 12, "causal": True, "backend": backend}
            a, b, c, cache = leaves
            packed = tw.attention_varlen(a, b, c, cu, cu, max_seqlen_k=12, **flags)
            paged = tw.attention_paged(a, cache, cache, table, lengths, cu_seqlens_q=cu, **flags)
            (packed.square().sum() + paged.square().sum()).backward()
            found[backend] = [packed, paged, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        assert len(found["cpu"]) == 6
        for mine, exact in zip(*found.values(), strict=True):
            torch.testing.assert_close(mine, exact, atol=1e-5, rtol=1e-4)
    too_long = torch.tensor([0, 13, 16, 24], dtype=torch.int32)
    bounded: dict[str, Any] = {"max_seqlen_q": 12, "causal": True}
    with pytest.raises(tw.InvalidProblem, match="max_seqlen_q: expected at least 13"):
        tw.attention_varlen(q, k, v, too_long, too_long, max_seqlen_k=12, **bounded)
    with pytest.raises(tw.InvalidProblem, match="max_seqlen_q: expected at least 13"):
        tw.attention_paged(q, pages, pages, table, lengths, cu_seqlens_q=too_long, **bounded)


# --- hints that nobody's cache made, and who merges what


def test_a_group_without_rows_changes_nothing() -> None:
    batch, expected = Batch("shared"), Batch("plain").attend()
    batch.rows = None
    hint = batch.hint
    more = hint._replace(
        groups=(*hint.groups, cascade.Group(0, 0, SHARED * SIZE)), block_table=hint.block_table.repeat(2, 1),
        seqlens_k=hint.seqlens_k.repeat(2), cu_seqlens_q=torch.tensor([0, BATCH, BATCH], dtype=torch.int32),
    )  # fmt: skip
    nobody = hint._replace(groups=(cascade.Group(0, 0, SHARED * SIZE),), cu_seqlens_q=hint.cu_seqlens_q * 0)
    for given in (hint, more, nobody):
        torch.testing.assert_close(batch.attend(shared_prefix=given), expected)


def test_what_is_not_a_number_stays_so_and_nothing_else() -> None:
    """In the prefix, which all sequences see, and behind it."""
    for page, rows in ((SHARED - 1, set(range(BATCH))), (SHARED + OWN, {1})):
        batch = Batch("shared")
        batch.k[page] = torch.nan
        out = batch.attend()
        assert set(out.isnan().flatten(1).any(1).nonzero().flatten().tolist()) == rows


def test_fake_tensors_leave_nothing_behind() -> None:
    """Under a mode torch's own operations merge, and later calls with real tensors do not meet what it made."""
    real = Batch("shared")
    for _ in range(2):
        with FakeTensorMode(allow_non_fake_inputs=False):
            fake = Batch("shared")
            assert type(fake.q) is not Tensor
            assert fake.attend().shape == real.q.shape
        torch.testing.assert_close(real.attend(), Batch("plain").attend())


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "half a row": ({"groups": (cascade.Group(4, 4, cast("Any", 24.0)),)}, "shared_prefix.groups: expected integers"),
    "fewer than none": ({"groups": (cascade.Group(4, 4, -1),)}, "shared_prefix.groups: expected integers of at least"),
    "totals past the rows": (
        {"cu_seqlens_q": torch.tensor([0, 9], dtype=torch.int32)},
        "shared_prefix.cu_seqlens_q: expected 2 running totals up to 4, the rows of the groups, got [0, 9]",
    ),
    "no totals": ({"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)}, "shared_prefix.cu_seqlens_q: expected 2"),
    "totals from 1": (
        {"cu_seqlens_q": torch.tensor([1, 4], dtype=torch.int32)},
        "shared_prefix.cu_seqlens_q: expected 2",
    ),
    "a row past q": ({"rows": torch.tensor([0, 1, 2, 4])}, "shared_prefix.rows: expected distinct rows of q"),
    "a negative row": ({"rows": torch.tensor([0, 1, 2, -1])}, "shared_prefix.rows: expected distinct rows of q"),
    "a row twice": ({"rows": torch.tensor([0, 1, 2, 2])}, "shared_prefix.rows: expected distinct rows of q"),
    "rows of floats": ({"rows": torch.arange(4.0)}, "shared_prefix.rows: expected distinct rows of q"),
    "no groups": ({"groups": (3,)}, "shared_prefix.groups: expected a tuple of tilewise.cascade.Group"),
    "a list": ({"groups": [cascade.Group(4, 4, 24)]}, "shared_prefix.groups: expected a tuple"),
    "more rows than queries": ({"groups": (cascade.Group(4, 5, 24),)}, "shared_prefix.groups: expected rows of q"),
    "rows without a name": ({"rows": torch.arange(3)}, "shared_prefix.groups: expected rows of q, which has 4, got 4"),
    "no table": ({"block_table": None}, "shared_prefix.block_table: expected a torch.Tensor, got NoneType"),
    "lengths of another step": (
        {"own_seqlens": torch.full((BATCH,), OWN * SIZE - 4, dtype=torch.int32)},
        "shared_prefix: expected keys of prefixes and own ones that add up to seqlens_k",
    ),
    "a group without a table": (
        {"block_table": torch.zeros(2, 3, dtype=torch.int32)},
        "shared_prefix.block_table: expected 1 table row, one for each group, got 2",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_hints_that_make_no_sense_are_refused(name: str) -> None:
    batch = Batch("shared")
    changes, message = BAD[name]
    # Also where a call of the same signature was right.
    for _ in range(2):
        with pytest.raises(tw.InvalidProblem, match=re.escape(message)):
            batch.attend(shared_prefix=batch.hint._replace(**({"rows": None} | changes)))
        batch.attend(shared_prefix=batch.hint._replace(rows=None))


@pytest.mark.parametrize("some", [False, True], ids=["first rows", "named rows"])
def test_what_no_kernel_merges_is_merged_by_the_contract(some: bool) -> None:
    check_merging(cascade._merged, torch.float64, some)
