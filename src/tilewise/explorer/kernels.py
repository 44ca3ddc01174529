"""Which kernel answers which question, as a table for the exported page, which has no server to ask.

For every combination of choices the table says from which size on which row holds; the size is the number of tokens,
in decoding the number of query heads of a K/V head. Between sizes that answer alike the backends are taken to answer
alike; where they do not, the boundary is found by halving. Decoding also asks whether there are few keys, and whether
a K/V head has more query rows than there are (sequence, K/V head) pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from tilewise import dispatch
from tilewise.device import DEVICES, DeviceSpec
from tilewise.errors import Unsupported
from tilewise.explorer.questions import DTYPES, HEAD_DIMS, LIMITS, PHASES, Phase
from tilewise.plan.planning import TEXTBOOK_TILE
from tilewise.problem import AttentionProblem

__all__ = ["kernel_table"]

# (backend or None, (block_m, block_n), ((backend, reason), ...))
Row = tuple[str | None, tuple[int, int], tuple[tuple[str, str], ...]]
DECODING = tuple(itertools.product(("few", "many"), ("crowded", "apart")))


def kernel_table() -> dict[str, Any]:
    """{"rows": the distinct answers, "few_keys": below how many they are few, "pieces": the distinct lists of
    [from, row], "steps": {"device dtype head_dim phase": numbers of the lists}}.

    The numbers of a phase are in the order of `_variants`: by mask, by window, in decoding by keys and by heads.
    """
    rows: dict[Row, int] = {}
    pieces: dict[tuple[tuple[int, int], ...], int] = {}
    steps: dict[str, list[int]] = {}
    for (key, spec), dtype, dim, phase in itertools.product(DEVICES.items(), DTYPES, HEAD_DIMS, PHASES):
        sizes = (1, LIMITS["heads"][1]) if phase == "decode" else LIMITS["context"]
        numbers = steps.setdefault(f"{key} {dtype} {dim} {phase}", [])
        for causal, windowed, ending in _variants(phase):

            def answer(size: int, about: tuple[Any, ...] = (spec, phase, ending, dtype, dim, causal, windowed)) -> Row:
                spec, phase, ending, *rest = about
                return _row(_problem(phase, ending, size, *rest), spec)

            found = tuple((start, rows.setdefault(row, len(rows))) for start, row in _pieces(answer, *sizes))
            numbers.append(pieces.setdefault(found, len(pieces)))
    plain = [{"backend": backend, "tile": tile, "rejected": rejected} for backend, tile, rejected in rows]
    return {"rows": plain, "few_keys": _many_keys(), "pieces": list(pieces), "steps": steps}


def _variants(phase: Phase) -> list[tuple[bool, bool, tuple[str, ...]]]:
    """Causal or not, with a window or without, and in decoding how many keys and how crowded the heads."""
    endings: tuple[tuple[str, ...], ...] = DECODING if phase == "decode" else ((),)
    return list(itertools.product((True, False), (True, False), endings))


def _many_keys() -> int:
    """The number of keys from which on a split-KV kernel pays for its merge."""
    many: int = dispatch.load("hopper").many_keys  # type: ignore[attr-defined]
    return many


def _pieces(answer: Callable[[int], Row], low: int, high: int) -> list[tuple[int, Row]]:
    """Where the answer changes from `low` to `high`; sizes are tried in steps of four times."""
    probes = [min(high, low * 4**power) for power in range(math.ceil(math.log(high / low, 4)) + 1)]
    pieces = [(low, answer(low))]
    for before, after in itertools.pairwise(probes):
        old, new = pieces[-1][1], answer(after)
        if new != old:
            pieces.append((_boundary(answer, before, after, old), new))
    return pieces


def _boundary(answer: Callable[[int], Row], low: int, high: int, old: Row) -> int:
    """The first size in (low, high] that is not answered as `low` is."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if answer(middle) == old else (low, middle)
    return high


def _problem(
    phase: Phase, ending: tuple[str, ...], size: int, dtype: str, dim: int, causal: bool, windowed: bool
) -> AttentionProblem:
    batch, tokens, queries, heads = 1, size, size, 1
    if phase == "decode":
        # Well over what any tile takes for few keys, which are fewer than 513.
        tokens = LIMITS["context"][0] if "few" in ending else 4 * _many_keys()
        batch, queries, heads = 1 if "crowded" in ending else size, 1, size
    kind: torch.dtype = getattr(torch, dtype)
    return AttentionProblem(
        kind="dense", dtype=kind, batch=batch, seqlen_q=queries, seqlen_k=tokens, total_q=batch * queries,
        total_k=batch * tokens,
        num_heads=heads, num_kv_heads=1, head_dim=dim, head_dim_v=dim, scale=dim**-0.5, causal=causal,
        window_left=tokens // 2 if windowed else None, needs_grad=phase == "train",
    )  # fmt: skip


def _row(problem: AttentionProblem, spec: DeviceSpec) -> Row:
    try:
        selection = dispatch.select(problem, spec, "auto", here=False)
    except Unsupported as refusal:
        return None, (TEXTBOOK_TILE.block_m, TEXTBOOK_TILE.block_n), tuple(refusal.reasons)
    tile = selection.backend.tile_shape(problem, spec)
    return selection.backend.name, (tile[0], tile[1]), tuple((name, reason) for name, reason in selection.rejected)
