"""A plan as text, 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

from tilewise.plan.roofline import Work
from tilewise.units import counted, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from tilewise.plan.planning import Plan

WIDTH = 80
LABEL = 12

# The rows of the comparison: title, and the text for one way of computing attention.
ROWS: tuple[tuple[str, Callable[[Work], str]], ...] = (
    ("work", lambda work: format_count(work.flops, "FLOP")),
    ("elements moved", lambda work: format_count(work.traffic.elements)),
    ("bytes moved", lambda work: format_bytes(work.bytes_moved)),
    ("... from memory", lambda work: format_bytes(work.bytes_from_memory)),
    ("extra memory", lambda work: format_bytes(work.extra_memory)),
    ("FLOP per byte", lambda work: f"{work.intensity:.1f}"),
    ("roofline time", lambda work: "unknown" if work.seconds is None else format_seconds(work.seconds)),
    ("bound by", lambda work: work.bound or "unknown"),
)


def render(plan: Plan) -> str:
    """The report: problem, chosen backend and refusals, tiles, work, traffic, memory, time."""
    passes = "forward and backward" if plan.problem.needs_grad else "forward"
    lines = [f"tilewise plan: {passes} on {plan.device.name}", ""]
    for label, text in (
        ("problem", _problem(plan)),
        ("backend", _backend(plan)),
        *((f"  not {name}", reason) for name, reason in plan.rejected),
        *(() if plan.quantised is None else (("int8" if plan.problem.int8 else "fp8", plan.quantised),)),
        *_latent(plan),
        *(() if plan.cascade is None else (("cascade", plan.cascade),)),
        *(() if plan.unordered is None else (("last bits", plan.unordered),)),
        *_higher(plan),
        ("tiles", _tiles(plan)),
        *_mask(plan),
        ("tile advice", str(plan.advice)),
        ("FLOPs", _flops(plan)),
        ("memory", _memory(plan)),
        ("device", _device(plan)),
    ):
        lines += _entry(label, text)
    return "\n".join([*lines, "", *_comparison(plan)])


def _entry(label: str, text: str) -> list[str]:
    indent = " " * (LABEL + 2)
    first = f"{label:<{LABEL}}  " if len(label) <= LABEL else f"{label}: "
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


def _problem(plan: Plan) -> str:
    problem = plan.problem
    heads = counted(problem.num_heads, "head")
    if problem.group_size > 1:
        heads += f" sharing {problem.num_kv_heads} of K/V"
    dims = f"head_dim {problem.head_dim}"
    if problem.head_dim_v != problem.head_dim:
        dims += f" (values {problem.head_dim_v})"
    dtype = str(problem.dtype).removeprefix("torch.")
    bound = "" if problem.kind == "dense" else "up to "
    tokens = f"{bound}{counted(problem.seqlen_q, 'query', 'queries')} x {counted(problem.seqlen_k, 'key')}"
    parts = [f"{problem.kind} {dtype}", f"batch {problem.batch}", heads, tokens, dims]
    features = [name for name in problem.features if name not in ("gqa", "head_dim_v")]
    return ", ".join(parts) + (f"; {', '.join(features)}" if features else "")


def _latent(plan: Plan) -> list[tuple[str, str]]:
    """What a token takes if V is a view of K."""
    problem, stored = plan.problem, plan.bytes_per_token
    if not problem.latent:
        return []
    apart = stored * (problem.head_dim + problem.head_dim_v) // problem.head_dim
    text = (
        f"a token has {stored:,} bytes: {problem.head_dim} columns, of which {problem.head_dim_v} are values too, read "
        f"for {counted(problem.group_size, 'query head')} together. Keys and values stored apart would have "
        f"{apart:,} bytes"
    )
    return [("latent", text)]


def _backend(plan: Plan) -> str:
    if plan.backend is None:
        return "none takes this problem"
    if plan.materialises:
        return f"{plan.backend}, which stores the whole score matrix (the naive column below)"
    return plan.backend


def _higher(plan: Plan) -> list[tuple[str, str]]:
    """The backend for tangents and second derivatives of a call that is differentiated, if it is another one."""
    backend, rejected = plan.higher
    if backend == plan.backend or not plan.problem.needs_grad or plan.problem.fp8:
        return []
    text = f"{backend or 'none'} for tangents (jvp) and second derivatives"
    others = [(name, reason) for name, reason in rejected if (name, reason) not in plan.rejected]
    return [("higher", text), *((f"  not {name}", reason) for name, reason in others)]


def _tiles(plan: Plan) -> str:
    tiles, total = plan.tiles, plan.tiles.visited + plan.tiles.skipped
    shape = f"{plan.tile.block_m} x {plan.tile.block_n}{' (textbook)' if plan.materialises else ''}"
    scope = ", per head" if plan.problem.batch == 1 else ", per head, over the batch"
    share = f" ({100 * tiles.visited / total:.0f} %)" if total else ""
    if plan.mask is not None:
        shape, scope = "128 x 128 of the mask, all heads", f"; the kernels' own are {shape}"
        share = f" ({100 * tiles.visited / total:.1f} %)" if total else ""
    elif plan.problem.tiles_shape is not None:
        scope += "; the tile mask has no contents here: every tile counts"
    guess = "" if plan.lengths_read else "; lengths unknown here: the most their bounds allow"
    return (
        f"{shape}: {tiles.visited:,} of {total:,} visited{share}, {tiles.partial:,} of them masked, "
        f"{tiles.skipped:,} skipped{scope}{guess}"
    )


def _mask(plan: Plan) -> list[tuple[str, str]]:
    if plan.mask is None:
        return []
    return [("tile mask", f"{format_bytes(plan.mask.nbytes)}; {plan.mask.path}")]


def _flops(plan: Plan) -> str:
    backward = f", backward {format_count(plan.flops_backward)}" if plan.problem.needs_grad else ""
    left = "causal, window and skipped tiles" if plan.mask is not None else "causal and window"
    return f"forward {format_count(plan.flops_forward)}{backward} (pairs left by {left})"


def _memory(plan: Plan) -> str:
    memory = plan.memory
    text = f"inputs {format_bytes(memory.inputs)}, outputs {format_bytes(memory.outputs)}"
    if plan.problem.needs_grad:
        text += f", saved for backward {format_bytes(memory.saved_for_backward)} (inputs, out, lse)"
        text += f", gradients {format_bytes(memory.gradients)}"
    return text


def _device(plan: Plan) -> str:
    rate = plan.device.flops.get(plan.problem.dtype)
    if rate is None:
        return "rates unknown"
    source = "measured on this machine" if plan.device.type == "cpu" else "vendor's peaks"
    return f"{format_count(rate, 'FLOP/s')}, {format_count(plan.device.bandwidth, 'B/s')} ({source})"


def _comparison(plan: Plan) -> list[str]:
    label = max(len(name) for name, _ in ROWS)
    lines = [f"{'':<{label}}  {'naive':>12}  {'tiled':>12}"]
    for name, show in ROWS:
        remark = _remark(plan, name)
        lines.append(f"{name:<{label}}  {show(plan.naive):>12}  {show(plan.tiled):>12}{remark and f'   {remark}'}")
    return lines


def _remark(plan: Plan, row: str) -> str:
    naive, tiled = plan.naive, plan.tiled
    if row == "extra memory" and 0 < plan.device.memory_bytes < plan.memory.inputs + naive.extra_memory:
        return f"naive does not fit in {format_bytes(plan.device.memory_bytes)}"
    if row == "roofline time" and naive.seconds and tiled.seconds and naive.seconds >= 1.05 * tiled.seconds:
        return f"{naive.seconds / tiled.seconds:.1f}x less"
    return ""
