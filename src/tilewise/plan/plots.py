"""A plan as a picture: naive and tiled attention under the device's roofline, and traffic as N grows."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise import figures
from tilewise.errors import InvalidProblem
from tilewise.masks import Band
from tilewise.plan.roofline import Work, naive_work, tiled_work
from tilewise.units import counted, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from tilewise.plan.planning import Plan

NAIVE, TILED = figures.OTHERS[0], figures.OURS[0]
SHORTEST, OCTAVES_BEYOND = 256, 3
# The fields of `LengthTraffic` that are drawn.
LINES = (
    (1, "naive", NAIVE, "-"),
    (2, "tiled, into fast memory", TILED, ":"),
    (3, "tiled, from memory (behind the cache)", TILED, "-"),
)


def draw_plan(plan: Plan) -> str:
    """The picture as SVG text; rejects a device whose rates are unknown."""
    if plan.naive.flops == 0:
        raise InvalidProblem("plot", "a problem with work to do", "no scores at all", "Make every size at least 1.")
    if plan.tiled.seconds is None:
        fix = "Name a device whose rates are known, such as h100."
        raise InvalidProblem("device", "one with known rates", plan.device.name, fix)

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        _roofline(left, plan)
        _traffic(right, plan)
        problem = plan.problem
        passes = "forward and backward" if problem.needs_grad else "forward"
        features = "".join(f", {name}" for name in problem.features)
        dtype = str(problem.dtype).removeprefix("torch.")
        heads = counted(problem.num_heads, "head")
        sizes = f"{problem.seqlen_q} x {problem.seqlen_k} tokens, {heads}, head_dim {problem.head_dim}"
        figure.suptitle(f"{plan.device.name}: {passes}, {dtype}, batch {problem.batch}, {sizes}{features}", fontsize=9)

    return figures.render(draw, 9.0, 3.9)


class LengthTraffic(NamedTuple):
    """Bytes moved at one length: naive, tiled, and the part of the tiled that the last-level cache does not serve."""

    keys: int
    naive: int
    tiled: int
    tiled_from_memory: int


def traffic_by_length(plan: Plan) -> list[LengthTraffic]:
    """The traffic of the whole batch, at powers of two around the plan's length.

    Queries grow with the keys if there are equally many of them, and are constant otherwise (decoding). A tile mask
    leaves the plan's share at every length.
    """
    longest = max(plan.problem.seqlen_k, SHORTEST) << OCTAVES_BEYOND
    lengths = itertools.takewhile(lambda n: n <= longest, (SHORTEST << i for i in itertools.count()))
    return [_traffic_at(plan, keys) for keys in lengths]


def _traffic_at(plan: Plan, keys: int) -> LengthTraffic:
    problem = plan.problem
    queries = keys if problem.seqlen_q == problem.seqlen_k else problem.seqlen_q
    bands = Counter({Band(queries, keys, *problem.band): problem.batch})
    naive = naive_work(problem, bands, plan.memory, plan.device)
    shares = () if plan.mask is None else (plan.mask.share, plan.mask.tile_share)
    tiled = tiled_work(problem, bands, plan.tile, plan.memory, plan.device, *shares)
    return LengthTraffic(keys, naive.bytes_moved, tiled.bytes_moved, tiled.bytes_from_memory)


def _roofline(ax: Any, plan: Plan) -> None:
    """Attainable rate over intensity: the memory's slope, the roof, and the two points below it."""
    peak, bandwidth = plan.device.flops[plan.problem.dtype], plan.device.bandwidth
    ridge = peak / bandwidth
    points = [("naive", plan.naive, NAIVE), ("tiled", plan.tiled, TILED)]
    intensities = [work.intensity for _, work, _ in points if work.intensity > 0]
    low, high = min([ridge, *intensities]) / 30, max([ridge, *intensities]) * 30
    ax.plot([low, ridge, high], [low * bandwidth, peak, peak], color=figures.INK, linewidth=1.4)
    for name, work, colour in points:
        if work.intensity > 0:
            ax.plot(work.intensity, min(peak, work.intensity * bandwidth), "o", color=colour, markersize=8)
            _label_point(ax, name, work, min(peak, work.intensity * bandwidth), colour)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(low * bandwidth / 2, peak * 6)
    _ticks(ax.yaxis, lambda value: format_count(value, "FLOP/s"))
    ax.set_xlabel("FLOP per byte from memory")
    ax.set_title(f"roofline: {format_count(peak, 'FLOP/s')}, {format_count(bandwidth, 'B/s')}", fontsize=9)
    ax.grid(alpha=0.25, color=figures.INK)


def _label_point(ax: Any, name: str, work: Work, rate: float, colour: str) -> None:
    text = f"{name}\n{format_seconds(work.seconds or 0.0)}, {work.bound}-bound"
    # The slope rises to the right, so there is room below it on the right and above it on the left.
    below = name == "naive"
    ax.annotate(
        text, (work.intensity, rate), xytext=(9, -3) if below else (-4, 7), textcoords="offset points",
        ha="left" if below else "right" if work.bound == "memory" else "center",
        va="top" if below else "bottom", color=colour, fontsize=8,
    )  # fmt: skip


def _traffic(ax: Any, plan: Plan) -> None:
    series = traffic_by_length(plan)
    lengths = [entry[0] for entry in series]
    for index, name, colour, line in LINES:
        values = [entry[index] for entry in series]
        ax.plot(lengths, values, line, marker="o", markersize=3.5, color=colour, label=name)
    here = plan.problem.seqlen_k
    ax.axvline(here, color=figures.INK, linewidth=0.8, linestyle=":")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    shown = lengths[:: max(1, -(-len(lengths) // 6))]
    ax.set_xticks(shown, [_tokens(n) for n in shown])
    sizes = [size for entry in series for size in entry[1:]]
    ax.set_yticks([1 << power for power in range(0, 80, 4) if min(sizes) / 4 <= 1 << power <= max(sizes) * 4])
    ax.minorticks_off()
    _ticks(ax.yaxis, format_bytes)
    ax.set_xlabel(f"keys per sequence (here: {here})")
    ax.set_title(f"bytes moved, tiles of {plan.tile.block_m} x {plan.tile.block_n}", fontsize=9)
    ax.legend(frameon=False, fontsize=8)
    ax.grid(alpha=0.25, color=figures.INK)


def _ticks(axis: Any, show: Callable[[float], str]) -> None:
    axis.set_major_formatter(lambda value, _: show(value))
    axis.set_minor_formatter(lambda *_: "")


def _tokens(count: int) -> str:
    return f"{count >> 10}K" if count >= 1024 else str(count)
