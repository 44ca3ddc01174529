"""The cases of hopper_check.py, in groups that run in a process each, named by direction, head dim and kind."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch

__all__ = ["CASES", "Case", "groups"]

# (batch, num_heads, num_kv_heads, seqlen_q, seqlen_k): odd lengths, one tile, fewer and more keys than queries, groups.
SHAPES = (
    (1, 2, 2, 128, 128),
    (2, 3, 3, 200, 200),
    (1, 4, 2, 333, 457),
    (2, 4, 1, 1000, 1000),
    (1, 2, 2, 65, 1000),
    (1, 2, 2, 1000, 100),
    (1, 1, 1, 65, 1),
    (2, 16, 4, 1100, 1100),
    (2, 8, 8, 2048, 2048),
)
SMALL_SHAPES = SHAPES[1:6]
# More keys than four warpgroups an SM take under a causal mask at head dim 64.
LONG_SHAPE = (1, 2, 1, 2300, 4300)
WINDOWS: tuple[tuple[int | None, int | None], ...] = ((0, 0), (64, None), (100, 30), (None, 50), (300, 0))
PACKED_Q, PACKED_K = (130, 0, 1, 700, 64), (200, 33, 0, 700, 1)


@dataclass(frozen=True)
class Case:
    """One call; the defaults are a plain bf16 head of 128."""

    name: str
    batch: int = 1
    num_heads: int = 2
    num_kv_heads: int = 2
    seqlen_q: int = 128
    seqlen_k: int = 128
    head_dim: int = 128
    head_dim_v: int = 128
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    sinks: bool = False
    kind: Literal["dense", "varlen"] = "dense"
    lengths_q: tuple[int, ...] = ()
    lengths_k: tuple[int, ...] = ()
    padding: int = 0
    page_size: int | None = None
    dtype: torch.dtype = torch.bfloat16
    storage: str = "bhsd"
    repeat: bool = False
    backward: bool = False
    deterministic: bool = False
    dlse: bool = False

    @property
    def scale(self) -> float:
        """The default one."""
        return float(self.head_dim**-0.5)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """The window with causality folded in."""
        left, right = self.window
        return left, (0 if right is None else min(0, right)) if self.causal else right

    @staticmethod
    def starts(lengths: tuple[int, ...]) -> list[int]:
        """cu_seqlens of packed lengths."""
        return [0, *accumulate(lengths)]

    def replace(self, **changes: Any) -> Case:
        """The case with other values."""
        return dataclasses.replace(self, **changes)


def _shaped(shape: tuple[int, int, int, int, int], head_dim: int, **values: Any) -> Case:
    batch, num_heads, num_kv_heads, seqlen_q, seqlen_k = shape
    case = Case(
        "", batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, values.pop("head_dim_v", head_dim), **values
    )
    changed = {
        f.name: getattr(case, f.name)
        for f in dataclasses.fields(Case)[8:]
        if getattr(case, f.name) != f.default and f.name not in ("lengths_q", "lengths_k")
    }
    return case.replace(name=f"D={head_dim} {shape} " + " ".join(f"{k}={v}" for k, v in changed.items()))


def _packed(head_dim: int, **values: Any) -> Case:
    shape = (len(PACKED_Q), 4, 2, max(PACKED_Q), max(PACKED_K))
    return _shaped(shape, head_dim, kind="varlen", lengths_q=PACKED_Q, lengths_k=PACKED_K, **values)


def _forward_groups(d: int) -> dict[str, list[Case]]:
    storages = [_shaped(SHAPES[i], d, storage=s) for i in (1, 3) for s in ("bshd", "odd")]
    return {
        f"forward-d{d}-full": [_shaped(s, d) for s in SHAPES] + storages,
        f"forward-d{d}-causal": [_shaped(s, d, causal=True, repeat=s[0] == 2) for s in SHAPES]
        + [_shaped(SHAPES[i], d, causal=True, dtype=torch.float16) for i in (2, 8)]
        + [_shaped(LONG_SHAPE, d, causal=True)],
        f"forward-d{d}-window": [_shaped(s, d, window=w, causal=w[1] is None) for s in SMALL_SHAPES for w in WINDOWS],
        f"forward-d{d}-sinks": [_shaped(s, d, sinks=True, causal=c) for s in SMALL_SHAPES for c in (False, True)],
        f"forward-d{d}-softcap": [_shaped(s, d, softcap=3.0, causal=c) for s in SMALL_SHAPES for c in (False, True)]
        + [_shaped(SHAPES[3], d, softcap=20.0, window=(100, 30), sinks=True)],
        f"forward-d{d}-varlen": [_packed(d, causal=c, padding=p) for c in (False, True) for p in (0, 5)]
        + [_packed(d, causal=True, window=(70, None), sinks=True), _packed(d, window=(20, 30), padding=3)],
    }


def _backward_groups(d: int) -> dict[str, list[Case]]:
    shapes = [(1, 2, 2, 256, 256), *SMALL_SHAPES, (1, 16, 4, 1152, 1152)]
    common: dict[str, Any] = {"backward": True}
    return {
        f"backward-d{d}-full": [_shaped(s, d, **common) for s in shapes]
        + [_shaped(shapes[3], d, storage=x, **common) for x in ("bshd", "odd")],
        f"backward-d{d}-causal": [_shaped(s, d, causal=True, **common) for s in shapes]
        + [_shaped(shapes[4], d, causal=True, dtype=torch.float16, **common)],
        f"backward-d{d}-dlse": [
            _shaped(s, d, causal=c, dlse=True, sinks=True, **common) for s in SMALL_SHAPES for c in (False, True)
        ],
        f"backward-d{d}-window": [
            _shaped(s, d, window=w, causal=w[1] is None, **common) for s in SMALL_SHAPES[:3] for w in WINDOWS
        ],
        f"backward-d{d}-varlen": [
            _packed(d, causal=c, padding=p, deterministic=x, **common)
            for c in (False, True)
            for p, x in ((0, False), (5, False), (3, True))
        ],
        f"backward-d{d}-softcap": [
            _shaped(s, d, softcap=3.0, causal=c, deterministic=c, **common)
            for s in SMALL_SHAPES[1:4]
            for c in (False, True)
        ]
        + [_shaped(SHAPES[3], d, softcap=20.0, window=(100, 30), sinks=True, dlse=True, **common)],
        f"deterministic-d{d}": [
            _shaped(s, d, causal=c, deterministic=True, repeat=s == shapes[-1], **common)
            for s in shapes
            for c in (False, True)
        ],
    }


def _all_groups() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for head_dim in (128, 64, 256, 192, 96, 512, 384):
        found |= _forward_groups(head_dim)
    for head_dim in (128, 64, 96, 256, 192):
        found |= _backward_groups(head_dim)
    for head_dim in (128, 64, 256, 192, 96, 512, 384):
        found[f"paged-d{head_dim}"] = [
            _packed(head_dim, causal=causal, padding=padding, page_size=page_size)
            for causal, padding in ((False, 3), (True, 0))
            for page_size in (64, 128, 192, 256)
        ] + [_packed(head_dim, causal=True, window=(70, None), sinks=True, softcap=20.0, page_size=64)]
    unequal = ((192, 128), (128, 64), (64, 128), (256, 128))
    found["backward-unequal"] = [
        _shaped(s, d, head_dim_v=dv, causal=c, deterministic=not c, dlse=c, backward=True)
        for d, dv in unequal
        for s in SHAPES[2:4]
        for c in (False, True)
    ] + [_packed(192, head_dim_v=128, causal=True, padding=5, backward=True)]
    found["forward-unequal"] = [
        _shaped(s, d, head_dim_v=dv, causal=c)
        for d, dv in (*unequal, (392, 264), (320, 512))
        for s in SHAPES[2:4]
        for c in (False, True)
    ]
    tokens = [(5, 8, 2, 1, 1000), (5, 8, 2, 2, 457), (40, 16, 1, 1, 300), (2, 4, 4, 1, 5000)]
    packed: dict[str, Any] = {"kind": "varlen", "lengths_q": (1, 1, 2, 1, 0), "lengths_k": PACKED_K, "causal": True}
    found["decode-d512"] = [
        *(_shaped(shape, 512, causal=True, sinks=shape[3] == 2) for shape in tokens),
        *(_shaped(tokens[0], d, head_dim_v=dv, softcap=20.0, window=(300, 0)) for d, dv in ((320, 512), (392, 264))),
        *(_shaped((5, 8, 2, 2, 700), 512, page_size=page_size, **packed) for page_size in (None, 16, 64, 256)),
    ]
    return found


CASES: dict[str, list[Case]] = _all_groups()


def groups() -> list[str]:
    """Group names, the plain ones first: what matters most is judged before time runs out."""
    return sorted(CASES, key=lambda g: (not g.endswith(("full", "causal")), g.startswith("deterministic")))
