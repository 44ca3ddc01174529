"""Speed and memory against sequence length as SVG, for light and dark pages. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tilewise.bench.cases import Case
from tilewise.bench.results import CaseResult, Results
from tilewise.figures import INK, OTHERS, OURS, render

__all__ = ["write_plots"]

MOST_COLUMNS = 3


class Panel(NamedTuple):
    """One set of axes: cases that differ in length only."""

    title: str
    cases: list[CaseResult]


def write_plots(results: Results, folder: Path) -> list[Path]:
    """Write bench-<device>-<measure>.svg for every measure with two lengths or more; returns the files."""
    written = []
    for measure in dict.fromkeys(r.case.measure for r in results.cases):
        panels = _panels([r for r in results.cases if r.case.measure == measure])
        if panels:
            path = folder / f"bench-{results.slug}-{measure}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_svg(panels, measure, results.device_name), encoding="utf-8")
            written.append(path)
    return written


def _panels(results: Sequence[CaseResult]) -> list[Panel]:
    families: dict[str, list[CaseResult]] = {}
    for result in results:
        title = _family(result.case)
        if title is not None and any(m.status == "ok" for m in result.measured):
            families.setdefault(title, []).append(result)
    return [
        Panel(title, sorted(members, key=lambda r: r.case.seqlen_k))
        for title, members in families.items()
        if len(members) > 1
    ]


def _family(case: Case) -> str | None:
    if case.kind != "dense" or case.window is not None or case.metric not in ("flops", "memory"):
        return None
    heads = "" if case.num_heads == case.num_kv_heads else f", {case.num_heads}/{case.num_kv_heads} heads"
    mask = "causal" if case.causal else "full"
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[case.dtype]
    return f"{short}, D={case.head_dim}, {mask}{heads}{', CUDA graph' if case.graph else ''}"


def _svg(panels: Sequence[Panel], measure: str, device: str) -> str:
    columns = min(MOST_COLUMNS, len(panels))
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
        figure.suptitle(f"{measure}, {device}")

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
        points = [(r.case.seqlen_k, r.valid(name)) for r in panel.cases if name in r.case.implementations]
        xy = [(n, ((m.value if memory else m.rate) or 0.0) / scale) for n, m in points if m is not None]
        if xy:
            thick = 2.2 if name.startswith("tilewise") else 1.3
            ax.plot(*zip(*xy, strict=True), marker="o", markersize=3.5, linewidth=thick, color=colour, label=name)
    lengths = [r.case.seqlen_k for r in panel.cases]
    ax.set_xscale("log", base=2)
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
