"""Draw the scaling model (and, with --results, how far measured CPU ranks are from it) for docs/distributed.md.

python bench/plot_scaling.py docs/images/context-parallel-scaling.svg
python bench/plot_scaling.py docs/images/context-parallel-measured.svg --results bench/results/FILE.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tilewise import figures
from tilewise.distributed.scaling import Rates, Scenario, link_between, predict

WORLDS = tuple(1 << n for n in range(11))
SEQLENS = {"8k": 1 << 13, "128k": 1 << 17, "1M": 1 << 20, "10M": 10 << 20}
DEVICE, DEVICE_BYTES = "h200", 141e9


def main() -> None:
    """Write the picture that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--results", type=Path, help="a result of bench/context_parallel.py")
    options = parser.parse_args()
    if options.results is None:
        options.output.write_text(figures.render(draw_model, 9.0, 3.6))
    else:
        report = json.loads(options.results.read_text())
        options.output.write_text(figures.render(lambda figure: draw_measured(figure, report), 9.0, 3.4))


def draw_model(figure: Any) -> None:
    """Efficiency and memory of a rank over the number of GPUs, one line per length."""
    left, right = figure.subplots(1, 2)
    rates = Rates.of_device(DEVICE)
    for (label, seqlen), colour in zip(SEQLENS.items(), (*figures.OTHERS[:3], figures.OURS[0]), strict=True):
        found = [predict(Scenario(w, seqlen, causal=True), rates, link_between(DEVICE, w)) for w in WORLDS]
        shares = [(p.forward.ideal + p.backward.ideal) / p.seconds for p in found]
        left.plot(WORLDS, shares, marker="o", markersize=3, color=colour, label=f"{label} tokens")
        right.plot(WORLDS, [p.memory_bytes / 1e9 for p in found], marker="o", markersize=3, color=colour)
    left.axhline(0.9, color=figures.INK, linewidth=0.8, linestyle=":")
    right.axhline(DEVICE_BYTES / 1e9, color=figures.INK, linewidth=0.8, linestyle=":")
    right.annotate("one H200", (WORLDS[-1], DEVICE_BYTES / 1e9), (0, 3), textcoords="offset points", ha="right")
    left.set(xscale="log", xlabel="H200 GPUs", ylabel="of ideal, forward and backward", ylim=(0, 1.03))
    right.set(xscale="log", yscale="log", xlabel="H200 GPUs", ylabel="GB a rank, one layer's attention")
    for axes in (left, right):
        axes.set_xticks(WORLDS[::2], [str(w) for w in WORLDS[::2]])
        axes.minorticks_off()
    left.legend(frameon=False)
    figure.suptitle("Ring with zigzag shards, causal, 32 heads, 8 K/V heads of 128, bf16: predicted", fontsize=9)


def draw_measured(figure: Any, report: dict[str, Any]) -> None:
    """Wall seconds and memory of 1, 2 and 4 CPU ranks, measured and predicted."""
    panels = figure.subplots(1, 3)
    for axes, (name, unit, scale) in zip(
        panels, (("forward", "s", 1.0), ("backward", "s", 1.0), ("memory", "MiB a rank", 2**20)), strict=True
    ):
        worlds = list(report["model"])
        for offset, kind, colour in ((-0.2, "measured", figures.OURS[0]), (0.2, "predicted", figures.OTHERS[0])):
            heights = [report["model"][world][name][kind] / scale for world in worlds]
            bars = axes.bar([i + offset for i in range(len(worlds))], heights, 0.38, color=colour, label=kind)
            axes.bar_label(bars, fmt="%.3g", fontsize=7)
        axes.set(title=name, ylabel=unit, xlabel="ranks", xticks=range(len(worlds)), xticklabels=worlds)
    panels[0].legend(frameon=False)
    options, machine = report["options"], report["machine"]
    figure.suptitle(
        f"{options['seqlen']} tokens, causal, fp32, {machine['cpu']}: seconds a rank on a core of its own", fontsize=9
    )


if __name__ == "__main__":
    main()
