"""Long sequences, judged whole: which kernels they are for, values that make every key count, and fp64 on the device.

`make test` computes the same cases with smaller lengths on the CPU, a GPU as they are. The oracle goes head by head, so
that the scores of one group of heads in fp64 are all it needs: 2 GB a matrix at 16384 x 16384.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import tilewise as tw
from tilewise.backends.hopper import configs
from tilewise.testing import Case, Implementation, Inputs, uninitialised_is_nan
from tilewise.testing.oracle import plain_results, summed_terms
from tilewise.testing.plain import plain_attention
from tilewise.testing.results import Results, differentiate
from tilewise.testing.tolerances import judge, slack_of

# How much the score of a query's own key is above the others: it weighs about as much as 8192 of them, so that one key
# less is an error of the size of V.
OWN_SCORE = 10.0
# Rows of a warpgroup.
BLOCK = 64
# Keys of the tile that is visited last: what a row has seen before them says nothing of their scores.
LATE_KEYS = slice(3, 11)
# What the scores of a block of rows do.
#   None          every query has its own key
#   a number      so many nats lie between the late keys and all others: without the row's maximum the smallest would
#                 leave finite sums, the next ones sums past fp32's range, and the last P past it
#   "one"         the same of a single row
#   "rising"      RISE more in every tile of keys: the number subtracted before the exponential moves in every tile
#   ("middle", x) x nats in a tile after which more come
Scores = float | str | tuple[str, float] | None
BLOCKS: tuple[Scores, ...] = (None, 60.0, "one", 88.0, "rising", ("middle", 72.0), ("middle", 100.0), 2048.0, 72.0)
RISE, RISING_KEYS = 16.0, 128
# Beside each of them a sink that weighs as much; and beside the keys of queries.
STEEP_SINKS, SINKS = (2.0, 61.0, 73.0, 89.0), (1.0, 9.0)
# With it all scores of these rows are numbers that bf16 has, so that plain PyTorch is exact there.
SCALE = 0.125
# The element of V that is not finite, which every query sees.
SPOT = (5, 7)


@dataclass(frozen=True)
class Long:
    """A problem, its values, and what of the kernels' configuration must hold for the test to show what it is for.

    `values`: "own" gives every query a key of its own, "steep" scores that lie far apart, block by block (see
    BLOCKS), "infinite" and "nan" an element of V. `heads`: how many K/V heads of each sequence are judged (None: all).
    """

    case: Case
    values: Literal["own", "steep", "infinite", "nan"] = "own"
    forward: dict[str, Any] = field(default_factory=dict)
    backward: dict[str, Any] = field(default_factory=dict)
    heads: int | None = None

    def smaller(self, by: int = 18) -> Long:
        """The same with shorter sequences and at most two K/V heads of two query heads."""
        case = self.case
        group, kv_heads = min(case.num_heads // case.num_kv_heads, 2), min(case.num_kv_heads, 2)
        sizes: dict[str, Any] = {"num_heads": group * kv_heads, "num_kv_heads": kv_heads}
        for name in ("seqlens_q", "seqlens_k", "window"):
            lengths = getattr(case, name)
            sizes[name] = lengths and tuple(n and -(-n // by) for n in lengths)
        return dataclasses.replace(self, case=dataclasses.replace(case, **sizes))


def _long(seqlen_q: int, seqlen_k: int, heads: tuple[int, int], head_dim: int = 128, **flags: Any) -> Case:
    batch = flags.pop("batch", 1)
    lengths = {"seqlens_q": (seqlen_q,) * batch, "seqlens_k": (seqlen_k,) * batch}
    return Case(**{
        "dtype": torch.bfloat16, "num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim,
        "head_dim_v": head_dim, "cotangents": ("out",), **lengths, **flags,
    })  # fmt: skip


def _steep(seqlen_q: int, seqlen_k: int, heads: tuple[int, int], head_dim: int = 128, **flags: Any) -> Case:
    return _long(seqlen_q, seqlen_k, heads, head_dim, grad_of=(), scale=SCALE, **flags)


WITHOUT_LEAD = {"AHEAD": False}
THREE = {"NUM_WARPGROUPS": 3, "CTAS_PER_SM": 1}
PACKED: dict[str, Any] = {
    "kind": "varlen",
    "seqlens_q": (4097, 5, 8190),
    "seqlens_k": (4097, 70, 8190),
    "padding": 3,
    "causal": True,
}
CASES = {
    "d128 steep": Long(_steep(4097, 8190, (8, 2)), "steep", {"HAS_RIGHT": False}),
    "d128 steep, causal, sinks": Long(_steep(8190, 8190, (8, 4), causal=True, sinks=True), "steep"),
    "d64 steep": Long(_steep(4097, 8190, (4, 4), 64), "steep", THREE | {"HAS_RIGHT": False}),
    "d64 steep, causal, sinks": Long(_steep(4097, 8190, (8, 2), 64, causal=True, sinks=True), "steep", THREE),
    "d64 steep, four warpgroups": Long(
        _steep(4000, 4096, (8, 4), 64, causal=True, sinks=True), "steep", {"CTAS_PER_SM": 2}
    ),
    "d64 steep, packed": Long(
        dataclasses.replace(_steep(0, 0, (4, 2), 64), **PACKED), "steep", THREE | {"IS_VARLEN": True}
    ),
    "d128 steep, packed": Long(
        dataclasses.replace(_steep(0, 0, (4, 2)), **PACKED), "steep", {"IS_VARLEN": True}
    ),
    "d192 steep, sinks": Long(_steep(1100, 2100, (4, 2), 192, sinks=True), "steep", {"D_REST": 64}),
    "d64 steep, window": Long(
        _steep(4000, 4096, (4, 2), 64, causal=True, window=(1500, None)), "steep", {"HAS_LEFT": True}
    ),
    "infinite V": Long(_steep(4097, 8190, (8, 2)), "infinite"),
    "NaN in V": Long(_steep(4097, 8190, (8, 2), 64, causal=True, sinks=True), "nan", THREE),
    "d128 causal": Long(_long(4224, 4224, (12, 12), batch=2, causal=True), "own", {}, WITHOUT_LEAD, 5),
    "d128 causal, odd": Long(_long(8190, 8192, (16, 16), causal=True), "own", {}, WITHOUT_LEAD, 8),
    "d128 causal, few queries": Long(
        _long(1000, 8192, (40, 40), causal=True, cotangents=("out", "lse")), "own", {}, WITHOUT_LEAD, 10
    ),
    "d128 grouped, causal, sinks": Long(
        _long(4097, 8190, (8, 2), causal=True, sinks=True, cotangents=("out", "lse")), "own", {},
        {"EVEN_K": False, "AHEAD": False},
    ),
    "d128 grouped": Long(_long(4097, 8190, (8, 2)), "own", {}, {"EVEN_K": False, "HAS_RIGHT": False}),
    "d64 grouped, causal, sinks": Long(
        _long(4097, 4097, (8, 2), 64, causal=True, sinks=True), "own", THREE, {"EVEN_K": False, "AHEAD": False}
    ),
    "window": Long(
        _long(4097, 8190, (8, 2), causal=True, window=(1000, None)), "own", {"HAS_LEFT": True},
        {"HAS_LEFT": True},
    ),
    "packed": Long(
        dataclasses.replace(_long(0, 0, (4, 2)), **PACKED), "own", {"IS_VARLEN": True},
        {"IS_VARLEN": True},
    ),
    "deterministic": Long(
        _long(8190, 8192, (8, 8), causal=True, deterministic=True), "own", {},
        {"FIXED_POINT": True}, 4,
    ),
    "d192 steep, causal, sinks": Long(
        _steep(3000, 3100, (4, 2), 192, causal=True, sinks=True), "steep", {"IS_CAUSAL": True}
    ),
}  # fmt: skip
# In fp16 a P over 2^16 would be infinite.
HALF = (
    "d128 steep", "d128 steep, causal, sinks", "d64 steep", "d64 steep, causal, sinks",
    "d64 steep, four warpgroups", "d64 steep, packed", "d64 steep, window", "d192 steep, causal, sinks",
    "infinite V",
)  # fmt: skip
CASES |= {
    f"{name}, fp16": dataclasses.replace(CASES[name], case=dataclasses.replace(CASES[name].case, dtype=torch.float16))
    for name in HALF
}


# ---- values


def make_long_inputs(long: Long, device: torch.device | str) -> Inputs:
    """The tensors of a case, made where they are used: one thread would take seconds for 60 million numbers."""
    case = long.case
    generator = torch.Generator(device).manual_seed(sum(case.seqlens_q) + case.head_dim)
    sequences = [_sequence(long, *lengths, generator) for lengths in zip(case.seqlens_q, case.seqlens_k, strict=True)]
    if case.kind == "dense":
        inputs = Inputs(*(torch.stack(parts) for parts in zip(*sequences, strict=True)))
    else:
        q, k, v, dout, dlse = (_packed(parts, case.padding) for parts in zip(*sequences, strict=True))
        cu_seqlens_q, cu_seqlens_k = (
            torch.tensor([0, *lengths], device=device).cumsum(0).int() for lengths in (case.seqlens_q, case.seqlens_k)
        )
        q, k, v, dout = (t.transpose(0, 1).contiguous() for t in (q, k, v, dout))
        inputs = Inputs(q, k, v, dout, dlse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if not case.sinks:
        return inputs
    sinks = STEEP_SINKS if long.values == "steep" else SINKS
    values = torch.tensor([sinks[head % len(sinks)] for head in range(case.num_heads)], device=device)
    return dataclasses.replace(inputs, sinks=values.to(case.dtype))


def _packed(sequences: Sequence[Tensor], padding: int) -> Tensor:
    """Heads first, one sequence after the other, then rows of no sequence: NaN."""
    last = sequences[-1][:, :1].expand(-1, padding, *sequences[-1].shape[2:])
    return torch.cat([*sequences, torch.full_like(last, math.nan)], 1)


def _sequence(long: Long, seqlen_q: int, seqlen_k: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """q, k, v, dout and dlse of one sequence, heads first."""
    case, device = long.case, generator.device
    group, scale = case.num_heads // case.num_kv_heads, case.scale or 1.0 / math.sqrt(case.head_dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    k, v = (normal(case.num_kv_heads, seqlen_k, dim) for dim in (case.head_dim, case.head_dim_v))
    if long.values == "steep":
        k[..., :4] = 0.0
    chosen = _own_keys(case, seqlen_q, seqlen_k, generator)[..., None].expand(-1, -1, case.head_dim)
    q = k.repeat_interleave(group, 0).gather(1, chosen) * (OWN_SCORE / (case.head_dim * scale))
    if long.values == "steep":
        _lose_rows(q, k, scale)
    elif long.values != "own":
        v[0, SPOT[0], SPOT[1]] = math.inf if long.values == "infinite" else math.nan
    dout, dlse = normal(case.num_heads, seqlen_q, case.head_dim_v), normal(case.num_heads, seqlen_q)
    return (*(t.to(case.dtype) for t in (q, k, v, dout)), dlse)


def _own_keys(case: Case, seqlen_q: int, seqlen_k: int, generator: torch.Generator) -> Tensor:
    """A key for every head and query: any that it sees, or one at an edge of what it sees."""
    device = generator.device
    queries = torch.arange(seqlen_q, device=device)
    own = queries + (seqlen_k - seqlen_q)
    left = None if case.window is None else case.window[0]
    first = torch.zeros_like(own) if left is None else (own - left).clamp_min(0)
    last = own if case.causal else torch.full_like(own, seqlen_k - 1)
    some = torch.rand(case.num_heads, seqlen_q, generator=generator, device=device)
    keys = first + (some * (last - first + 1)).long()
    turn = queries + torch.arange(case.num_heads, device=device)[:, None]
    if case.causal:
        keys = torch.where(turn % 2 == 0, last, keys)
    if left is not None:
        keys = torch.where(turn % 4 == 1, first, keys)
    return keys.clamp(0, seqlen_k - 1)


def _lose_rows(q: Tensor, k: Tensor, scale: float) -> None:
    """Scores out of four columns: the late keys', small differences, what rises from tile to tile, the middle keys'."""
    keys = torch.arange(k.shape[1], device=k.device)
    middle = slice(k.shape[1] // 2, k.shape[1] // 2 + 8)
    k[:, LATE_KEYS, 0] = k[:, middle, 3] = 1.0
    for late in (LATE_KEYS, middle):
        k[:, late, 1] = (keys[late] % 3).float()
    k[..., 2] = ((k.shape[1] - 1 - keys) // RISING_KEYS).float()
    for begin in range(0, q.shape[1], BLOCK):
        kind = BLOCKS[begin // BLOCK % len(BLOCKS)]
        if kind is None:
            continue
        rows = q[:, begin + 17 : begin + 18] if kind == "one" else q[:, begin : begin + BLOCK]
        rows.zero_()
        if kind == "rising":
            rows[..., 2] = RISE / scale
            continue
        top = kind[1] if isinstance(kind, tuple) else 88.0 if isinstance(kind, str) else kind
        rows[..., 3 if isinstance(kind, tuple) else 0] = top / scale
        # bf16 has no number between 2048 and 2064.
        rows[..., 1] = 1.0 / scale if top < 128.0 else 0.0


# ---- what is chosen


def plan_of(long: Long, where: torch.device | str) -> tw.Plan:
    """What the public call would do on a device, without a backend named."""
    case = long.case

    def shaped(heads: int, dim: int, lengths: tuple[int, ...]) -> Tensor:
        rows = sum(lengths) + case.padding
        shape = (case.batch, heads, lengths[0], dim) if case.kind == "dense" else (rows, heads, dim)
        return torch.empty(shape, dtype=case.dtype, device="meta", requires_grad=bool(case.wants_grad))

    q = shaped(case.num_heads, case.head_dim, case.seqlens_q)
    k, v = (shaped(case.num_kv_heads, dim, case.seqlens_k) for dim in (case.head_dim, case.head_dim_v))
    packed: dict[str, Any] = {}
    if case.kind == "varlen":
        starts = torch.empty(case.batch + 1, dtype=torch.int32, device="meta")
        packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        packed |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
    sinks = torch.empty(case.num_heads, dtype=case.dtype, device="meta") if case.sinks else None
    return tw.explain(
        q, k, v, causal=case.causal, window=case.window, sinks=sinks, scale=case.scale, return_lse=True,
        deterministic=case.deterministic, device=where, **packed,
    )  # fmt: skip


def misplaced(long: Long, plan: tw.Plan) -> list[str]:
    """What of the plan is not what the case is for."""
    wrong = [] if plan.backend == "hopper" else [f"backend {plan.backend}"]
    chosen: dict[str, tuple[dict[str, Any], Any]] = {"forward": (long.forward, configs.forward_config(plan.problem))}
    if long.case.wants_grad:
        chosen["backward"] = (long.backward, configs.backward_config(plan.problem))
    for direction, (expected, config) in chosen.items():
        wrong += [f"{direction}: {n}={getattr(config, n)}" for n, x in expected.items() if getattr(config, n) != x]
    return wrong


# ---- the judge


class Piece(NamedTuple):
    """One K/V head of one sequence and its queries, as a dense case of its own; which results are its own."""

    case: Case
    inputs: Inputs
    sequence: int
    kv_head: int
    rows: slice
    keys: slice


def run_long(long: Long, inputs: Inputs, implementation: Implementation) -> Results:
    """The implementation's results, with NaN in all that it leaves unwritten."""
    with uninitialised_is_nan():
        return implementation.run(long.case, inputs)


def faults_of(long: Long, inputs: Inputs, results: Results) -> list[str]:
    """Everything that is wrong with results of these inputs, by the tolerance of the conformance suite."""
    case = long.case
    faults = []
    for piece in _pieces(long, inputs):
        name = f"sequence {piece.sequence}, K/V head {piece.kv_head}"
        faults += [f"{name}: {fault}" for fault in _piece_faults(long, piece, _results_of(case, piece, results))]
    checked = dict(results)
    if long.values in ("infinite", "nan"):
        checked["out"] = results["out"].clone()
        _spotted(case, checked["out"]).zero_()
    faults += [f"{name}: not finite" for name, x in checked.items() if not _finite(case, name, x)]
    if case.padding:
        faults += [f"{n}: rows of no sequence" for n, x in results.items() if not _is_empty(n, x, case.padding)]
    return faults


def _finite(case: Case, name: str, x: Tensor) -> bool:
    """Of heads that are not judged, too."""
    x = x[:, : x.shape[1] - case.padding] if name == "lse" and case.padding else x
    return bool(torch.isfinite(x).all())


def _is_empty(name: str, x: Tensor, padding: int) -> bool:
    if name == "dsinks":
        return True
    return bool((x[:, -padding:] == -math.inf).all() if name == "lse" else (x[-padding:] == 0.0).all())


def _spotted(case: Case, out: Tensor) -> Tensor:
    """The column of the results that the element of V reaches."""
    group = case.num_heads // case.num_kv_heads
    return out[:, :group, :, SPOT[1]]


def _pieces(long: Long, inputs: Inputs) -> Iterator[Piece]:
    case, group = long.case, long.case.num_heads // long.case.num_kv_heads
    start_q = start_k = 0
    count = long.heads or case.num_kv_heads
    judged = sorted(
        {round(i * (case.num_kv_heads - 1) / max(count - 1, 1)) for i in range(min(count, case.num_kv_heads))}
    )
    for index, (seqlen_q, seqlen_k) in enumerate(zip(case.seqlens_q, case.seqlens_k, strict=True)):
        rows, keys = slice(start_q, start_q + seqlen_q), slice(start_k, start_k + seqlen_k)
        alone = dataclasses.replace(
            case, kind="dense", seqlens_q=(seqlen_q,), seqlens_k=(seqlen_k,), num_heads=group, num_kv_heads=1, padding=0
        )
        for kv_head in judged:
            whole = Piece(alone, inputs, index, kv_head, rows, keys)
            named = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(Inputs)}
            named = {n: _of(case, whole, n, t) for n, t in named.items() if t is not None and "cu_" not in n}
            yield whole._replace(inputs=Inputs(**{n: t if n == "sinks" else t[None] for n, t in named.items()}))
        start_q, start_k = rows.stop, keys.stop


def _of(case: Case, piece: Piece, name: str, x: Tensor) -> Tensor:
    """What of an operand or a result belongs to a piece, heads first."""
    group = case.num_heads // case.num_kv_heads
    of_keys = name in ("k", "v", "dk", "dv")
    heads = (
        slice(piece.kv_head, piece.kv_head + 1)
        if of_keys
        else slice(piece.kv_head * group, (piece.kv_head + 1) * group)
    )
    if name in ("sinks", "dsinks"):
        return x[heads]
    if case.kind == "dense":
        return x[piece.sequence, heads]
    within = piece.keys if of_keys else piece.rows
    return x[heads, within] if name in ("lse", "dlse") else x[within, heads].transpose(0, 1)


def _results_of(case: Case, piece: Piece, results: Results) -> Results:
    own = {name: _of(case, piece, name, x) for name, x in results.items()}
    return {name: x if name == "dsinks" else x[None] for name, x in own.items()}


def _piece_faults(long: Long, piece: Piece, results: Results) -> list[str]:
    case, inputs = piece.case, piece.inputs
    spoiled = long.values == "nan" and piece.kv_head == 0
    if spoiled:
        inputs = dataclasses.replace(inputs, v=torch.where(inputs.v.isnan(), 0.0, inputs.v))
    exact = differentiate(case, inputs.double(), lambda leaves: plain_attention(case, leaves, 0))
    plain = plain_results(case, inputs)
    terms = summed_terms(case, inputs)
    faults = []
    for name, ref in exact.items():
        dtype = case.accumulate_dtype if name == "lse" else case.dtype
        got = results[name]
        if spoiled and name == "out":
            if not bool(got[..., SPOT[1]].isnan().all()):
                faults.append("out: NaN in V is not seen by every query")
            got = torch.where(torch.arange(got.shape[-1], device=got.device) == SPOT[1], ref.to(got.dtype), got)
        slack = slack_of(ref, plain[name], terms[name], dtype, case.accumulate_dtype)
        fault = judge(name, got, ref.cpu(), slack)
        faults += [] if fault is None else [fault]
    return faults
