"""Speed and memory against sequence length as SVG, for light and dark pages. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from suite.cases import Case
from suite.results import CaseResult, Results
from tilewise.figures import INK, OTHERS, OURS, render

__all__ = ["write_plots"]

MOST_COLUMNS = 3


class Panel(NamedTuple):
    """One set of axes: cases that differ in length only."""

    title: str
    cases: list[CaseResult]


def write_plots(results: Results, folder: Path) -> list[Path]:
    """Write bench-<device>-<measure>[-graph].svg for every measure with two lengths or more; returns the files."""
    written = []
    for measure, graph in dict.fromkeys((r.case.measure, r.case.graph) for r in results.cases):
        panels = _panels([r for r in results.cases if (r.case.measure, r.case.graph) == (measure, graph)])
        if panels:
            path = folder / f"bench-{results.slug}-{measure}{'-graph' if graph else ''}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            title = f"{measure}{' in CUDA graphs' if graph else ''}, {results.device_name}"
            path.write_text(_svg(panels, title), encoding="utf-8")
            written.append(path)
    return written


def _panels(results: Sequence[CaseResult]) -> list[Panel]:
    """Full attention first, then causal, so that a column has one head_dim where there are as many of both."""
    families: dict[str, list[CaseResult]] = {}
    for result in sorted(results, key=lambda r: (r.case.causal, r.case.head_dim)):
        title = _family(result.case)
        if title is not None and any(m.status == "ok" for m in result.measured):
            families.setdefault(title, []).append(result)
    return [
        Panel(title, sorted(members, key=lambda r: r.case.seqlen_k))
        for title, members in families.items()
        if len({r.case.seqlen_k for r in members}) > 1
    ]


def _family(case: Case) -> str | None:
    if case.kind != "dense" or case.window is not None or case.metric not in ("flops", "memory"):
        return None
    heads = "" if case.num_heads == case.num_kv_heads else f", {case.num_heads}/{case.num_kv_heads} heads"
    mask = "causal" if case.causal else "full"
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[case.dtype]
    return f"{short}, D={case.head_dim}, {mask}{heads}"


def _svg(panels: Sequence[Panel], title: str) -> str:
    columns = 2 if len(panels) == 4 else min(MOST_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)

    def draw(figure: Any) -> None:
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        colours = _colours(panels)
        for ax, panel in zip(axes, panels, strict=False):
            _draw(ax, panel, colours)
        for ax in axes[len(panels) :]:
            ax.set_visible(False)
        handles = {line.get_label(): line for ax in axes for line in ax.get_lines()}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
        figure.suptitle(title)

    return render(draw, 3.4 * columns, 2.7 * rows + 0.6)


def _colours(panels: Sequence[Panel]) -> dict[str, str]:
    names = dict.fromkeys(m.implementation for p in panels for r in p.cases for m in r.measured if m.status == "ok")
    ours = [name for name in names if name.startswith("tilewise")]
    others = [name for name in names if not name.startswith("tilewise")]
    return {name: OURS[i % len(OURS)] for i, name in enumerate(ours)} | {
        name: OTHERS[i % len(OTHERS)] for i, name in enumerate(others)
    }


def _draw(ax: Any, panel: Panel, colours: dict[str, str]) -> None:
    case = panel.cases[0].case
    memory = case.metric == "memory"
    scale = 2.0**20 if memory else 1e12 if case.device == "cuda" else 1e9
    for name, colour in colours.items():
        points = _points(panel, name)
        if points:
            thick = 2.2 if name.startswith("tilewise") else 1.3
            heights = [height / scale for height in points.values()]
            ax.plot(list(points), heights, marker="o", markersize=3.5, linewidth=thick, color=colour, label=name)
    ax.set_xscale("log", base=2)
    lengths = _labelled(sorted({r.case.seqlen_k for r in panel.cases}))
    ax.set_xticks(lengths, [str(n) for n in lengths])
    ax.minorticks_off()
    if memory:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    ax.set_title(panel.title, fontsize=9)
    ax.set_xlabel("sequence length")
    ax.set_ylabel("MiB beyond the output" if memory else "TFLOP/s" if case.device == "cuda" else "GFLOP/s")
    ax.grid(alpha=0.25, color=INK)


def _points(panel: Panel, name: str) -> dict[int, float]:
    """Length -> what was measured; of two cases with one length (a peer may have one of its own), the first."""
    found: dict[int, float] = {}
    for result in panel.cases:
        measured = result.valid(name) if name in result.case.implementations else None
        if measured is not None:
            found.setdefault(
                result.case.seqlen_k, (measured.value if result.case.metric == "memory" else measured.rate) or 0.0
            )
    return found


def _labelled(lengths: Sequence[int]) -> list[int]:
    """Those that get a tick, from the longest down: seven steps fit the width of a panel, labels closer would touch."""
    step = max(2.0, (lengths[-1] / lengths[0]) ** (1 / 7))
    kept = [lengths[-1]]
    for length in reversed(lengths):
        if length * step <= kept[0]:
            kept.insert(0, length)
    return kept
