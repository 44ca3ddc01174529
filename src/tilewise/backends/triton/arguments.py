"""Tensors as kernel arguments: addresses with strides, TMA descriptors where strides allow, and the score terms.

Only two facts about strides are compiled in: whether an operand is aligned (its address and all its strides are
multiples of 16 bytes), and whether the columns of a bias, mask or statistic are adjacent.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from tilewise.backends.gpu.arguments import Views, lengths_of, paging_of, scales_of, single_address
from tilewise.backends.gpu.launching import View
from tilewise.backends.gpu.records import Grid, Rows, Terms
from tilewise.backends.gpu.symbols import ALIGNMENT, Address, Fixed, Multiple, Tile
from tilewise.backends.gpu.work_list import heads_per_wave, list_size, listed_parts, most_blocks, rows_together
from tilewise.backends.triton.configs import Config, Pass
from tilewise.backends.triton.planning import Listed, Plan, Tail
from tilewise.backends.triton.primitives import ROWS_APART
from tilewise.problem import AttentionProblem
from tilewise.tiles import sections

# The dimensions whose strides are those of (sequence, head, token); None stands for a stride of 0.
Dims = tuple[int | None, int | None, int | None]
DENSE: Dims = (0, 1, 2)
PACKED: Dims = (None, 1, 0)
PACKED_STATS: Dims = (None, 0, 1)
PAGES: Dims = (0, 2, 1)
# Paged queries with one token per sequence are a batch of sequences of length 1.
SINGLE: Dims = (0, 1, None)
SINGLE_STATS: Dims = (1, 0, None)
# The backward's statistics of a sequence fill whole tiles (see primitives.STAT_TILE). Those of single tokens start at
# an aligned address for every head.
STAT_TILE, STAT_ROWS = 128, 16
# Rows of the largest tile.
MOST_ROWS = 256
# Tensors of token rows that are as wide as V. The others are as wide as q.
LIKE_VALUES = ("v", "out", "dout", "dot_v", "dot_out")
# Passes whose programs own keys.
OF_KEYS: tuple[Pass, ...] = ("dkdv", "twice_dkdv")


class Passes(NamedTuple):
    """The passes of a backward: the one for dQ, the one for dK and dV, and the numbers of a row that they read."""

    dq: Pass
    dkdv: Pass
    num_stats: int


# The backward reads lse and delta, the second derivative lse' and dout . out' too.
ONCE, TWICE = Passes("dq", "dkdv", 2), Passes("twice_dq", "twice_dkdv", 4)
# The numbers of a row in the order of the workspace: `mean` is lse', `rate` is dout . out'.
STATISTICS = ("lse", "delta", "mean", "rate")


def _rows(name: str, view: View, dims: Dims, sizes: tuple[int, int], reach: int = MOST_ROWS) -> Rows:
    """A tensor of token rows. A stride of a dimension of size 1 in `sizes` (sequences, heads) is ignored.

    Kernels address up to `reach` rows from a 64-bit base with 32-bit offsets, unless the row stride is too large for
    that.
    """
    strides = [0 if dim is None else view.strides[dim] for dim in dims]
    strides[:2] = [0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=False)]
    unit = ALIGNMENT // view.dtype.itemsize
    aligned = view.aligned and not any(stride % unit for stride in strides)
    unit, wide = unit if aligned else 1, reach * strides[2] >= 2**31
    found: list[int | Multiple] = [Multiple(stride, unit) if aligned else stride for stride in strides]
    found[2] = Multiple(strides[2], unit, wide) if wide else found[2]
    return Rows(Address(name, view.dtype, aligned=aligned), *found)


def _paired(view: View) -> View:
    """e4m3 and int8 as 16-bit pairs of columns (see quantised.py), other tensors unchanged."""
    if view.dtype not in (torch.float8_e4m3fn, torch.int8):
        return view
    return View((*(stride // 2 for stride in view.strides[:-1]), 1), torch.uint16, view.aligned)


def dense_rows(problem: AttentionProblem, name: str, view: View, heads: int) -> Rows:
    """Rows of a heads-first dense tensor."""
    return _rows(name, view, DENSE, (problem.batch, heads))


def packed_rows(name: str, view: View, heads: int) -> Rows:
    """Rows of a packed (total, heads, dim) tensor."""
    return _rows(name, view, PACKED, (0, heads))


def page_rows(problem: AttentionProblem, name: str, view: View) -> Rows:
    """Rows of (pages, page_size, num_kv_heads, dim); pages are addressed like sequences."""
    return _rows(name, view, PAGES, (0, problem.num_kv_heads), max(MOST_ROWS, problem.page_size or 0))


def key_rows(problem: AttentionProblem, name: str, view: View) -> Rows:
    """Rows of k or v, or of dense or packed dk or dv; 8-bit codes as pairs of columns."""
    view = _paired(view)
    if problem.kind == "paged":
        return page_rows(problem, name, view)
    if problem.kind == "varlen":
        return packed_rows(name, view, problem.num_kv_heads)
    return dense_rows(problem, name, view, problem.num_kv_heads)


def query_rows(plan: Plan, name: str, view: View) -> Rows:
    """Rows of q, out, dout or dq; e4m3 as pairs of columns."""
    problem, view = plan.problem, _paired(view)
    if problem.kind == "dense":
        return dense_rows(problem, name, view, problem.num_heads)
    if plan.traits.PACKED_Q:
        return packed_rows(name, view, problem.num_heads)
    return _rows(name, view, SINGLE, (problem.batch, problem.num_heads))


def stat_rows(plan: Plan, name: str, view: View, *, packed: bool | None = None) -> Rows:
    """Rows of lse or dlse. `packed` addresses single tokens as one long sequence."""
    dense = plan.problem.kind == "dense"
    packed = plan.traits.PACKED_Q if packed is None else packed
    dims = DENSE if dense else PACKED_STATS if packed else SINGLE_STATS
    batch, head, row = (0 if dim is None else view.strides[dim] for dim in dims)
    # Lengths are among these strides, so only adjacency is compiled in.
    return Rows(Address(name, view.dtype, aligned=False), batch, head, Fixed(1) if row == 1 else row)


def stored_rows(plan: Plan) -> int:
    """Rows of statistics per head in the backward; for packed sequences see primitives.sequence_of."""
    problem = plan.problem
    if problem.kind == "dense":
        return -(-problem.seqlen_q // STAT_TILE) * STAT_TILE
    if plan.traits.PACKED_Q:
        return (problem.total_q // STAT_TILE + problem.batch) * STAT_TILE
    return -(-problem.total_q // STAT_ROWS) * STAT_ROWS


def workspace_rows(plan: Plan, index: int, *, packed: bool | None = None) -> tuple[Rows, int]:
    """(the `index`-th statistic in the backward's workspace, elements it takes)."""
    problem = plan.problem
    dense = problem.kind == "dense"
    stride = stored_rows(plan)
    count = problem.num_heads * stride * (problem.batch if dense else 1)
    address = Address("workspace", torch.float32, offset=index * count * 4)
    head, one = Multiple(stride, STAT_ROWS), Fixed(1)
    packed = plan.traits.PACKED_Q if packed is None else packed
    if dense:
        strides: tuple[Any, Any, Any] = (Multiple(problem.num_heads * stride, STAT_ROWS), head, one)
    else:
        strides = (0, head, one) if packed else (1, head, 0)
    return Rows(address, *strides), count


def box_descriptors(
    plan: Plan,
    arguments: dict[str, Any],
    config: Config,
    queries: Sequence[str] = ("q", "out"),
    keys: Sequence[str] = ("k", "v"),
    *,
    pads: bool = False,
) -> dict[str, Any]:
    """Descriptors of rows of queries and of keys as boxes (see primitives.py), or None for all. With them every tile is
    loaded and stored by TMA; rows past the end of a sequence are zeros, and with `pads` columns up to the width of a
    tile. An argument that is None has none.
    """
    problem, traits, packed = plan.problem, plan.traits, plan.traits.PACKED_Q
    nothing: dict[str, Any] = dict.fromkeys(f"{name}_desc" for name in (*queries, *keys))
    # Pages have no boxes of rows, nor do single tokens.
    in_rows = problem.kind != "paged" or (packed and not keys)
    if not config.boxes or not in_rows or problem.fp8 or not (plan.is_unpadded or pads):
        return nothing
    found: dict[str, Tile | None] = {}
    for name in (*queries, *keys):
        if arguments[name] is None:
            continue
        of_keys, like_v = name in keys, name in LIKE_VALUES
        dim, width = (problem.head_dim_v, traits.BLOCK_DV) if like_v else (problem.head_dim, traits.BLOCK_D)
        heads, block = (problem.num_kv_heads, config.block_n) if of_keys else (problem.num_heads, config.block_m)
        if packed:
            total = problem.total_k if of_keys else problem.total_q
            found[f"{name}_desc"] = packed_box_of(arguments[name], heads, total, (block, width), dim)
        else:
            length = problem.seqlen_k if of_keys else problem.seqlen_q
            found[f"{name}_desc"] = box_of(arguments[name], problem.batch, heads, length, (block, width), dim)
    return nothing if None in found.values() else nothing | found


def box_of(rows: Rows, batch: int, heads: int, num_rows: int, block: tuple[int, int], dim: int) -> Tile | None:
    """The rows as a (batch, heads, rows, columns) tensor map, if TMA can address them."""
    if not rows.ptr.aligned or 0 in (batch, heads, num_rows):
        return None
    strides = [stride.value for stride in (rows.stride_batch, rows.stride_head, rows.stride_row)]
    # A dimension of size 1 needs a valid stride, though it is not used.
    strides = [dim if size == 1 else stride for size, stride in zip((batch, heads, num_rows), strides, strict=True)]
    if (
        any(stride < 0 for stride in strides) or strides[2] == 0
    ):  # a stride of 0 is fine for heads and sequences, not for rows
        return None
    return Tile(rows.ptr, (batch, heads, num_rows, dim), (*strides, 1), (1, 1, *block))


def packed_box_of(rows: Rows, heads: int, num_rows: int, block: tuple[int, int], dim: int) -> Tile | None:
    """Packed rows as a (ROWS_APART, ends, heads, rows, columns) tensor map (see primitives.py), if TMA can address
    them.
    """
    apart = int(ROWS_APART)
    box = box_of(rows, 1, heads, num_rows, block, dim)
    if box is None or num_rows >= apart:
        return None
    head, row = box.strides[1:3]
    strides = (2**64 // apart - row, row, head, row, 1)
    return Tile(rows.ptr, (apart + 1, num_rows + 1, heads, apart, dim), strides, (1, *box.block))


def page_box(problem: AttentionProblem, rows: Rows, block: int, dim: int, width: int | None = None) -> Tile | None:
    """Pages as a (pages, heads, rows of a page, columns) tensor map, if each holds whole tiles and TMA can address it.
    Tiles have `width` of the `dim` columns; None: all.
    """
    if problem.page_size is None or problem.page_size % block:
        return None
    pages = problem.total_k // problem.page_size
    return box_of(rows, pages, problem.num_kv_heads, problem.page_size, (block, width or dim), dim)


def part_boxes(plan: Plan, arguments: dict[str, Any], config: Config) -> dict[str, Any]:
    """Boxes of both parts of K in pages (see Traits.BLOCK_TAIL); None without."""
    problem, traits = plan.problem, plan.traits
    whole = (traits.FIRST_DIM, problem.head_dim - traits.FIRST_DIM) == (traits.BLOCK_D, traits.BLOCK_TAIL)
    found: list[Tile | None] = [None, None]
    if config.boxes and whole:
        widths = (traits.BLOCK_D, traits.BLOCK_TAIL)
        found = [page_box(problem, arguments["k"], config.block_n, problem.head_dim, width) for width in widths]
    return {"k_desc": found[0], "tail_desc": found[1]}


def stat_descriptors(plan: Plan, config: Config, passes: Passes = ONCE) -> dict[str, Any]:
    """Descriptors of the backward's statistics, or None for all. Used under a causal mask or window and for heads up
    to 64 wide, where they are faster (times in bench/results/triton-tiles.csv), and under a tile mask, where fewer
    registers spill; if whole tiles are stored.
    """
    statistics, traits = STATISTICS[: passes.num_stats], plan.traits
    count = workspace_rows(plan, 0)[1]
    masked = traits.HAS_LEFT or traits.HAS_RIGHT or plan.problem.tiles_shape is not None
    pays = masked or max(traits.BLOCK_D, traits.BLOCK_DV) <= 64
    whole = plan.problem.kind == "dense" or traits.PACKED_Q
    on = config.boxes and pays and whole and count < 2**31
    return {
        f"{name}_desc": Tile(workspace_rows(plan, i)[0].ptr, (count,), (1,), (config.block_m,)) if on else None
        for i, name in enumerate(statistics)
    }


def stat_arguments(plan: Plan, passes: Passes = ONCE, *, packed: bool | None = None) -> dict[str, Any]:
    """The statistics in the workspace."""
    names = STATISTICS[: passes.num_stats]
    return {arg: workspace_rows(plan, i, packed=packed)[0] for i, arg in enumerate(("lse_unit", *names[1:]))}


def score_arguments(plan: Plan, views: Views) -> dict[str, Any]:
    """Arguments of every kernel that computes scores."""
    problem = plan.problem
    slopes = views.get("alibi_slopes")
    return {
        "q": query_rows(plan, "q", views["q"]),
        "k": key_rows(problem, "k", views["k"]),
        "v": key_rows(problem, "v", views["v"]),
        "terms": Terms(
            *_rows_and_columns(grid_argument(views, "bias")),
            *_rows_and_columns(grid_argument(views, "mask")),
            alibi_slopes=None
            if slopes is None
            else Rows(single_address(views, "alibi_slopes"), slopes.strides[0], slopes.strides[1], 0),
            seed=single_address(views, "seed") if problem.dropout > 0.0 else None,
        ),
        "tile_map": grid_argument(views, "tiles"),
        "tile_bits": single_address(views, "tile_bits"),
        **_list_rows(problem),
        "scales": scales_of(problem, views),
        "lengths": lengths_of(views),
        "paging": paging_of(views),
        "sizes": plan.sizes,
        "window": plan.window,
        "scalars": plan.scalars,
        "T": plan.traits,
    }


def _list_rows(problem: AttentionProblem) -> dict[str, Any]:
    """The lists of a tile mask (see tilewise.tiles) as rows of (sequence, head, row or column of tiles)."""
    if problem.tiles_shape is None:
        return {"tile_rows": None, "tile_columns": None}
    batch, heads, _, _ = problem.tiles_shape
    parts = sections(problem.tiles_shape)
    strides = heads * parts.head if batch > 1 else 0, parts.head if heads > 1 else 0

    def from_word(word: int) -> Address:
        return Address("tile_lists", torch.int32, aligned=False, offset=4 * word)

    return {
        "tile_rows": Rows(from_word(0), *strides, parts.row),
        "tile_columns": Rows(from_word(parts.columns), *strides, parts.column),
    }


def grid_argument(views: Views, name: str) -> Grid | None:
    """A bias, its tangent or a mask; None without one."""
    view = views.get(name)
    if view is None:
        return None
    dtype = torch.uint8 if view.dtype == torch.bool else view.dtype
    unit = ALIGNMENT // dtype.itemsize
    batch, head, row, column = view.strides
    last: Any = Fixed(column) if column in (0, 1) else column
    if not view.aligned or any(stride % unit for stride in (batch, head, row)):
        return Grid(Address(name, dtype, aligned=False), batch, head, row, last)
    return Grid(Address(name, dtype), Multiple(batch, unit), Multiple(head, unit), Multiple(row, unit), last)


def _rows_and_columns(grid: Grid | None) -> tuple[Rows | None, Any]:
    """The rows of a bias or mask, and the stride of its columns (see Terms)."""
    return (None, None) if grid is None else (Rows(*grid[:4]), grid.stride_col)


def is_listed(plan: Plan, direction: Pass) -> bool:
    """Whether the programs of dQ or dK/dV come from a list: where the rows they own are packed."""
    return plan.traits.PACKED_K if direction in OF_KEYS else plan.traits.PACKED_Q


def listed_tiles(plan: Plan, direction: Pass) -> int:
    """The maximum number of tiles in a list. Kernels compute the same."""
    problem, config = plan.problem, plan.config(direction)
    if direction in OF_KEYS:
        return most_blocks(problem.total_k, config.block_n, problem.batch)
    return most_blocks(problem.total_q, config.block_m, problem.batch)


def list_words(plan: Plan, passes: Passes = ONCE) -> int:
    """32-bit words of all lists."""
    return sum(list_size(listed_tiles(plan, one)) for one in passes[:2] if is_listed(plan, one))


def workspace_words(plan: Plan, passes: Passes = ONCE) -> int:
    """32-bit words of a backward's workspace: statistics, then lists."""
    return passes.num_stats * workspace_rows(plan, 0)[1] + list_words(plan, passes)


def work_address(plan: Plan, direction: Pass, passes: Passes = ONCE) -> Address | None:
    """The address of the list, or None."""
    if not is_listed(plan, direction):
        return None
    words = passes.num_stats * workspace_rows(plan, 0)[1]
    if direction == passes.dkdv:
        words += list_size(listed_tiles(plan, passes.dq))
    return Address("workspace", torch.int32, offset=4 * words)


def listed_heads(plan: Plan, direction: Pass) -> int:
    """Heads that are walked together. Query heads come in whole groups, because these share K and V."""
    problem, config = plan.problem, plan.config(direction)
    if config.heads_per_wave is not None:
        return config.heads_per_wave
    if direction in OF_KEYS:
        tiles = -(-problem.seqlen_k // config.block_n)
        return heads_per_wave(problem.num_kv_heads, max(1, tiles), problem.seqlen_q * row_bytes(plan, direction))
    tiles = -(-problem.seqlen_q // config.block_m) * problem.group_size
    groups = heads_per_wave(problem.num_kv_heads, tiles, max(1, problem.seqlen_k) * row_bytes(plan, direction))
    return groups * problem.group_size


def row_bytes(plan: Plan, direction: Pass) -> int:
    """Bytes of a streamed row of one K/V head: q and dout of its group, or K and V, with their tangents."""
    problem = plan.problem
    row = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    if direction in ("tangent", "tangent_only", TWICE.dq):
        return 2 * row
    if direction == TWICE.dkdv:
        row += problem.head_dim * problem.dtype.itemsize
    return row * problem.group_size if direction in OF_KEYS else row


def listing_arguments(plan: Plan, made: Collection[str], passes: Passes = ONCE) -> dict[str, Any]:
    """What the row-statistics kernel lists and clears for the gradients in `made`."""
    problem, paged = plan.problem, plan.problem.kind == "paged"
    queries = "dq" in made and is_listed(plan, passes.dq)
    keys = "dk" in made and is_listed(plan, passes.dkdv)
    sizes = {
        "dq": (problem.total_q, problem.num_heads * problem.head_dim),
        "dk": (problem.total_k, problem.num_kv_heads * problem.head_dim),
        "dv": (problem.total_k, problem.num_kv_heads * problem.head_dim_v),
    }
    cleared = {
        n: Tail(Address(n, problem.dtype, aligned=False), *sizes[n]) for n in sizes if (queries if n == "dq" else keys)
    }
    any_list, lengths = queries or keys, "seqlens_k" if paged else "cu_seqlens_k"
    return (
        dict.fromkeys(sizes)
        | cleared
        | {
            "seqlens_k": Address(lengths, torch.int32, aligned=False) if any_list else None,
            "queries": _listed(plan, passes.dq, passes) if queries else None,
            "keys": _listed(plan, passes.dkdv, passes) if keys else None,
            "TILE_Q": plan.config(passes.dq).block_m if queries else 0,
            "TILE_K": plan.config(passes.dkdv).block_n if keys else 0,
            "IS_PAGED": paged and any_list,
        }
    )


def _listed(plan: Plan, direction: Pass, passes: Passes) -> Listed:
    problem, config = plan.problem, plan.config(direction)
    of_keys = direction in OF_KEYS
    longest, block = (problem.seqlen_k, config.block_n) if of_keys else (problem.seqlen_q, config.block_m)
    return Listed(
        work=work_address(plan, direction, passes),
        parts=listed_parts(longest, block),
        rows_together=walked_together(plan, direction),
    )


def walked_together(plan: Plan, direction: Pass) -> int:
    """Rows of equally long sequences that a list walks together."""
    heads = listed_heads(plan, direction) // (1 if direction in OF_KEYS else plan.problem.group_size)
    banded = plan.traits.HAS_LEFT or plan.traits.HAS_RIGHT
    return rows_together(row_bytes(plan, direction), max(1, heads), banded=banded)
