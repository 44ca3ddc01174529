"""`tilewise explain`: the plan for a problem given by its sizes, on this machine or another."""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
import typer
from torch import Tensor

from tilewise.arguments import ROWS, Shared
from tilewise.cli.console import JsonOption, check_plot, print_json, write_plot
from tilewise.device import DEVICES
from tilewise.errors import InvalidProblem
from tilewise.operands import Window
from tilewise.plan import explain
from tilewise.plan.plots import draw_plan

# Every tile of queries is counted, so longer sequences would take too long.
LONGEST = 1 << 24

EXAMPLE = "tilewise explain --seqlen 8192 --heads 32 --kv-heads 8 --causal --backward --device h200"


class DType(str, enum.Enum):
    """The dtypes by the names torch gives them, and by their short names."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"
    fp16 = "fp16"
    bf16 = "bf16"
    fp32 = "fp32"
    fp64 = "fp64"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype."""
        long_name = self.value.replace("bf16", "bfloat16").replace("fp", "float")
        found: torch.dtype = getattr(torch, long_name)
        return found


def command(
    *,
    batch: Annotated[int, typer.Option(min=0, help="Sequences.")] = 1,
    seqlen: Annotated[int, typer.Option(parser=length, metavar="N", help="Queries and keys; 128k, 1M.")] = 4096,
    seqlen_q: Annotated[int | None, typer.Option(parser=length, metavar="N", help="Queries alone.")] = None,
    seqlen_k: Annotated[int | None, typer.Option(parser=length, metavar="N", help="Keys alone.")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 16,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="K/V heads; fewer share (GQA).")] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 128,
    head_dim_v: Annotated[int | None, typer.Option(min=1, help="Width of V, where not --head-dim.")] = None,
    page_size: Annotated[int | None, typer.Option(min=1, help="Keys and values lie in pages of N tokens.")] = None,
    dtype: Annotated[DType, typer.Option(help="Of q, k and v.")] = DType.bfloat16,
    window: Annotated[str | None, typer.Option(help="Keys seen to each side: '1024,0'; '1024,' is open.")] = None,
    alibi: Annotated[bool, typer.Option("--alibi", help="A penalty by distance, one slope per head.")] = False,
    sinks: Annotated[bool, typer.Option("--sinks", help="One extra logit per head.")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="A dense bias shared by batch and heads.")] = False,
    mask: Annotated[bool, typer.Option("--mask", help="A dense mask shared by batch and heads.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Plan the gradients too.")] = False,
    backend: Annotated[str, typer.Option(help="Ask for one backend.")] = "auto",
    device: Annotated[str | None, typer.Option(help=f"This machine, or: {', '.join(DEVICES)}.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw roofline and traffic into this .svg (matplotlib).")] = None,
    tiles: Annotated[bool, typer.Option("--tiles", help="List tile sizes: what each takes, what fits.")] = False,
    context_parallel: Annotated[int | None, typer.Option(min=1, help="Predict the sequence over N devices.")] = None,
    link: Annotated[str | None, typer.Option(help="With --context-parallel: the link between them.")] = None,
    json: JsonOption = False,
    **numbers: Any,
) -> None:
    """Show which backend would run a problem and why, its tiles, FLOPs, traffic, memory and roofline time.

    The exit status is 1 where no backend takes the problem.
    """
    alone = {"--seqlen-q": seqlen_q is not None, "--bias": bias, "--mask": mask, "--backend": backend != "auto"}
    alone |= {"--plot": plot is not None, "--tiles": tiles, "--page-size": page_size is not None}
    _check_together(context_parallel, {"--link": link is not None}, alone)
    if plot is not None:
        check_plot(plot)
    queries, keys = (seqlen if n is None else n for n in (seqlen_q, seqlen_k))
    shared = kv_heads or heads
    like = dtype.torch_dtype
    widths = head_dim, head_dim_v or head_dim
    tensors: dict[str, Any]
    if context_parallel is not None:
        # torch.distributed is slow to import.
        from tilewise.distributed.scaling import Scenario, forecast

        sizes = (context_parallel, keys, batch, heads, shared, *widths, like.itemsize)
        scenario = Scenario(*sizes, causal=numbers["causal"], window=_window(window) or (None, None))
        prediction = forecast(scenario, device=device or "h200", link=link, dtype=like)
        print_json(prediction.to_dict()) if json else typer.echo(str(prediction))
        return
    if page_size is None:
        q = _meta(batch, heads, queries, head_dim, dtype=like)
        tensors = {name: _meta(batch, shared, keys, dim, dtype=like) for name, dim in zip("kv", widths, strict=True)}
    else:
        q = _meta(batch * queries, heads, head_dim, dtype=like)
        tensors = _in_pages(batch, queries, keys, page_size, shared, widths, like)
        keys = -(-keys // page_size) * page_size
    plan = explain(
        q.requires_grad_(backward),
        **tensors,
        **numbers,
        window=_window(window),
        alibi_slopes=_meta(heads, dtype=torch.float32) if alibi else None,
        sinks=_meta(heads, dtype=like) if sinks else None,
        bias=_meta(queries, keys, dtype=like) if bias else None,
        mask=_meta(queries, keys, dtype=torch.bool) if mask else None,
        backend=backend,
        device=device,
    )
    print_json(plan.to_dict()) if json else typer.echo(str(plan))
    if tiles and not json:
        typer.echo(f"\n{plan.advice.table()}")
    if plot is not None:
        write_plot(plot, draw_plan(plan))
    if plan.backend is None:
        raise typer.Exit(1)


def _check_together(ranks: int | None, along: dict[str, bool], alone: dict[str, bool]) -> None:
    """Refuses options that need --context-parallel, or that exclude it."""
    given = [name for name, there in (along if ranks is None else alone).items() if there]
    if given and ranks is None:
        raise InvalidProblem(given[0], "--context-parallel too", "none", "Give the number of devices.")
    if given:
        fix = "Leave it out: the forecast has no part for it."
        raise InvalidProblem(given[0], "no such option with --context-parallel", "both", fix)


def length(text: str | int) -> int:
    """A number of tokens: 4096, 128k or 1M, in units of 1024; at most 16M."""
    digits, unit = (
        (text, "") if isinstance(text, int) else (text[:-1], text[-1:]) if text[-1:].isalpha() else (text, "")
    )
    scale = {"": 1, "k": 1 << 10, "m": 1 << 20}.get(unit.lower())
    # Nine digits and 1024^2 stay far below the limit of a machine integer.
    if scale is None or not str(digits).isdecimal() or len(str(digits)) > 9 or int(digits) * scale > LONGEST:
        raise typer.BadParameter(f"expected a number of tokens such as 4096, 128k or 1M, up to 16M, got {text!r}.")
    return int(digits) * scale


def _in_pages(
    batch: int, queries: int, keys: int, page_size: int, kv_heads: int, widths: tuple[int, int], dtype: torch.dtype
) -> dict[str, Any]:
    """K and V of sequences that share no page, and their tables; several queries per sequence are packed."""
    columns = -(-keys // page_size)
    pages = {
        name: _meta(batch * columns, page_size, kv_heads, n, dtype=dtype) for name, n in zip("kv", widths, strict=True)
    }
    tables = {"block_table": _meta(batch, columns, dtype=torch.int32), "seqlens_k": _meta(batch, dtype=torch.int32)}
    if queries == 1:
        return pages | tables
    return pages | tables | {"cu_seqlens_q": _meta(batch + 1, dtype=torch.int32), "max_seqlen_q": queries}


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    if math.prod(shape) * dtype.itemsize >= 1 << 63:
        fix = "Choose a smaller batch or fewer heads."
        raise InvalidProblem("sizes", "a tensor of less than 2^63 bytes", " x ".join(map(str, shape)), fix)
    return torch.empty(shape, dtype=dtype, device="meta")


def _window(text: str | None) -> Window | None:
    """'left,right'; an empty side is unbounded."""
    if text is None:
        return None
    sides = [side.strip() for side in text.split(",")]
    if len(sides) != 2 or not all(side == "" or side.isdecimal() for side in sides):
        raise InvalidProblem("--window", "'left,right' in whole numbers", repr(text), "Leave a side empty: '1024,'.")
    left, right = (int(side) if side else None for side in sides)
    return left, right


def _shared_options() -> Iterator[inspect.Parameter]:
    """An option for every number and switch of the table of arguments that has a help text."""
    for name, kind in get_type_hints(Shared).items():
        row = ROWS[name]
        option = typer.Option(*([f"--{name.replace('_', '-')}"] if kind is bool else []), help=row.cli)
        keyword = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(name, keyword, default=row.default, annotation=Annotated[kind, option])


# Typer reads the options from the signature: those that are written out, and before --window those of the table.
_written = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]
_at = [p.name for p in _written].index("window")
command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*_written[:_at], *_shared_options(), *_written[_at:]]
)
