"""The cases of the suite, generated: every feature, every pair of features, every size; reproducible."""

from __future__ import annotations

import itertools
import random
import zlib
from typing import Any, NamedTuple

import torch

from tilewise.arguments import KINDS, ROWS
from tilewise.testing.cases import Case

SEQLENS = (1, 3, 63, 65, 111, 257)
HEAD_DIMS = (1, 8, 40, 64, 80, 96, 128, 160, 192, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAGE_SIZES = (1, 3, 16, 64)
# Sequences of a packed or paged case; a dense one has two.
NUM_SEQUENCES = 3


class Feature(NamedTuple):
    """One thing a problem can have. Features of one group exclude each other."""

    name: str
    group: str
    changes: dict[str, Any]


def _tried(name: str) -> dict[str, dict[str, Any]]:
    """The feature of an argument that is a number or a switch, with the value that the table of arguments has."""
    return {name: {name: ROWS[name].tried}}


def _features() -> tuple[Feature, ...]:
    groups: dict[str, dict[str, dict[str, Any]]] = {
        "causal": _tried("causal"),
        "window": {
            "window_left": {"window": (7, None)},
            "window_right": {"window": (None, 5)},
            "window_both": {"window": (9, 4)},
            "window_zero": {"window": (0, 0)},
        },
        "heads": {
            "gqa": {"num_heads": 6, "num_kv_heads": 2},
            "mqa": {"num_heads": 4, "num_kv_heads": 1},
        },
        "head_dim_v": {"wide_v": {}, "narrow_v": {}},
        "alibi": {"alibi_h": {"alibi": "h"}, "alibi_bh": {"alibi": "bh"}},
        "softcap": _tried("softcap"),
        "bias": {f"bias_{spec}": {"bias": spec} for spec in ("bhqk", "1hqk", "b1qk", "qk", "bh1k", "bhq1", "h11")},
        "mask": {f"mask_{spec}": {"mask": spec} for spec in ("bhqk", "b11k", "qk")}
        | {f"tiles_{spec}": {"mask": spec, "tiles": True} for spec in ("bhqk", "qk")},
        "sinks": {"sinks": {"sinks": True}},
        "dropout": _tried("dropout"),
        "scale": _tried("scale"),
        "layout": {"bshd": {"layout": "bshd"}},
        "strides": {
            name: {"strides": name} for name in ("transposed", "sliced", "expanded", "strided_last")
        },
        "lengths": {"longer_k": {}, "longer_q": {}},
        "kind": {"varlen": {"kind": "varlen", "padding": 2}, "paged": {"kind": "paged"}},
    }  # fmt: skip
    for name, row in ROWS.items():
        if row.tried is not None and name not in groups:
            groups[name] = _tried(name)
    return tuple(Feature(name, group, changes) for group, some in groups.items() for name, changes in some.items())


FEATURES = _features()
# Combinations that the API does not offer: arguments that a kind of call does not take.
EXCLUDED = tuple(
    {"bshd" if name == "layout" else name, kind}
    for name, row in ROWS.items()
    for kind, call in KINDS.items()
    if call not in row.calls
)


def single_cases() -> list[Case]:
    """Plain attention of every kind and every feature alone, the dtypes in turn."""
    alone = [(), *((feature,) for feature in FEATURES)]
    return [_case(features, DTYPES[index % len(DTYPES)]) for index, features in enumerate(alone)]


def pair_cases() -> list[Case]:
    """Every two features that can go together, the dtypes in turn."""
    pairs = [
        (one, two)
        for one, two in itertools.combinations(FEATURES, 2)
        if one.group != two.group and {one.name, two.name} not in EXCLUDED
    ]
    return [_case(pair, DTYPES[index % len(DTYPES)]) for index, pair in enumerate(pairs)]


def size_cases() -> list[Case]:
    """Every pair of lengths, causal; every head_dim with itself and with another head_dim_v, 64 with 24 among them."""
    lengths = [
        Case(seqlens_q=(m,), seqlens_k=(n,), causal=True, head_dim=24, head_dim_v=24, dtype=DTYPES[index % 3])
        for index, (m, n) in enumerate(itertools.product(SEQLENS, SEQLENS))
    ]
    others = HEAD_DIMS[3:] + HEAD_DIMS[:3]
    dims = [
        Case(seqlens_q=(65,), seqlens_k=(111,), num_heads=2, num_kv_heads=1, head_dim=d, head_dim_v=dv, dtype=dtype)
        for d, dv in (*zip(HEAD_DIMS, HEAD_DIMS, strict=True), *zip(HEAD_DIMS, others, strict=True), (64, 24), (24, 64))
        for dtype in DTYPES
    ]
    return lengths + dims


def _case(features: tuple[Feature, ...], dtype: torch.dtype) -> Case:
    label = "+".join(feature.name for feature in features) or "plain"
    names = {feature.name for feature in features}
    draw = random.Random(zlib.crc32(label.encode()))
    changes: dict[str, Any] = {}
    for feature in features:
        changes |= feature.changes
    seqlens_q, seqlens_k = _draw_lengths(draw, names, changes.get("kind", "dense"))
    head_dim, head_dim_v = _draw_head_dims(draw, names)
    changes |= {"head_dim": head_dim, "head_dim_v": head_dim_v, "page_size": draw.choice(PAGE_SIZES)}
    return Case(dtype=dtype, seqlens_q=seqlens_q, seqlens_k=seqlens_k, label=label, **changes)


def _draw_lengths(draw: random.Random, names: set[str], kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    count = 1 if kind == "dense" else NUM_SEQUENCES
    pairs = [(n, n) for n in draw.sample(SEQLENS, count)]
    if names & {"longer_k", "longer_q"}:
        pairs = [tuple(sorted(draw.sample(SEQLENS, 2))) for _ in range(count)]  # type: ignore[misc]
    if "longer_q" in names:
        pairs = [(long, short) for short, long in pairs]
    if kind == "dense":
        pairs = pairs * 2
    return tuple(q for q, _ in pairs), tuple(k for _, k in pairs)


def _draw_head_dims(draw: random.Random, names: set[str]) -> tuple[int, int]:
    small, large = sorted(draw.sample(HEAD_DIMS, 2))
    if "wide_v" in names:
        return small, large
    return (large, small) if "narrow_v" in names else (small, small)
