"""Decoding with keys on several ranks: page j of every sequence is on rank j % world, as that rank's page j // world.

    local_seqlens   how many of a sequence's keys a rank has
    local_slots     where a rank writes new tokens; -1 for tokens of other ranks
    context_parallel_decode   attention of the same queries on every rank to the keys of all of them

Each rank attends to its own pages. One exchange brings the partial results of all ranks together, which are merged
through lse. A rank has at most one page more of a sequence than another, so all have the same work.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, overload
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise import settings, validation
from tilewise.api import attention_paged
from tilewise.distributed.agreement import agree, refuse
from tilewise.distributed.sharding import in_words
from tilewise.distributed.transport import Group, MeshOrGroup, PeerFailure, all_gather, group_of
from tilewise.errors import InvalidProblem, TilewiseError, Unsupported
from tilewise.fp8.container import Fp8Tensor
from tilewise.memory import check_allocated
from tilewise.numerics import merge_all
from tilewise.operands import Options, Window
from tilewise.totals import check_totals
from tilewise.units import counted

Pages = Tensor | Fp8Tensor


def local_seqlens(seqlens_k: Tensor, page_size: int, mesh_or_group: MeshOrGroup = None) -> Tensor:
    """How many of the first `seqlens_k` keys of each sequence are on this rank; of any shape, on any device."""
    group = group_of(mesh_or_group)
    _check_integers(seqlens_k=seqlens_k)
    _check_page_size(page_size)
    return _count(seqlens_k, page_size, dist.get_rank(group), dist.get_world_size(group))


def local_slots(
    block_table: Tensor,
    positions: Tensor,
    page_size: int,
    mesh_or_group: MeshOrGroup = None,
    *,
    sequences: Tensor | None = None,
) -> Tensor:
    """The slots of tokens at `positions` (total,) in this rank's pages, int64; -1 for tokens that are on other ranks,
    and for padding, whose position is negative.

    `block_table` (batch, columns) names this rank's pages. Token i belongs to sequence `sequences[i]`, or i. The
    result is what `tilewise.kv.append_rotated` takes. A position past the table is an error on a CPU and under
    TILEWISE_CHECK_VALUES=1, and has slot -1 otherwise. One whose page is negative is an error likewise, and otherwise
    has a negative slot.
    """
    group = group_of(mesh_or_group)
    _check_integers(block_table=block_table, positions=positions)
    _check_page_size(page_size)
    if block_table.dim() != 2 or positions.dim() != 1:
        got = f"{tuple(block_table.shape)} and {tuple(positions.shape)}"
        raise InvalidProblem("block_table, positions", "(batch, columns) and (total,)", got, "One position per token.")
    if sequences is None:
        sequences = torch.arange(len(positions), device=positions.device)
    _check_integers(sequences=sequences)
    if sequences.shape != positions.shape:
        expected = f"shape {tuple(positions.shape)} as positions has"
        raise InvalidProblem("sequences", expected, tuple(sequences.shape), "One sequence per token.")
    batch, columns = block_table.shape
    page, place = positions.long() // page_size, positions.long() % page_size
    owner, column = page % dist.get_world_size(group), page // dist.get_world_size(group)
    mine = (owner == dist.get_rank(group)) & (positions >= 0)
    on_host = positions.device.type == "cpu" or settings.current().check_values
    if on_host:
        if bool((mine & (column >= columns)).any()):
            expected = f"positions within the {counted(columns, 'page')} that the table has of a sequence here"
            raise InvalidProblem("positions", expected, int(positions.max()), "Add pages to the table.")
        if len(positions) and bool(((sequences < 0) | (sequences >= batch)).any()):
            raise InvalidProblem(
                "sequences", f"numbers from 0 to {batch - 1}", sequences.tolist(), "Rows of the table."
            )
    if not columns or not batch:
        return torch.full_like(positions, -1, dtype=torch.int64)
    inside = block_table[sequences.long(), column.clamp(0, columns - 1)].long()
    mine &= column < columns
    if on_host and bool((mine & (inside < 0)).any()):
        fix = "A token needs a page before it is written."
        raise InvalidProblem("block_table", "a page for every position", int(inside[mine].min()), fix)
    return torch.where(mine, inside * page_size + place, -1)


def _check_integers(**tensors: Any) -> None:
    validation.require_tensors(**tensors)
    for name, numbers in tensors.items():
        if numbers.dtype not in (torch.int32, torch.int64):
            raise InvalidProblem(name, "an int32 or int64 tensor", numbers.dtype, "Convert it with .int().")


def _check_page_size(page_size: Any) -> None:
    if not isinstance(page_size, int) or page_size < 1:
        raise InvalidProblem("page_size", "a whole number from 1 on", page_size, "Rows of a page.")


@overload
def context_parallel_decode(
    q: Tensor, k_pages: Pages, v_pages: Pages, block_table: Tensor, seqlens_k: Tensor,
    mesh_or_group: MeshOrGroup = ..., *, cu_seqlens_q: Tensor | None = ..., causal: bool = ...,
    window: Window | None = ..., softcap: float | None = ..., sinks: Tensor | None = ..., scale: float | None = ...,
    backend: str = ..., return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel_decode(
    q: Tensor, k_pages: Pages, v_pages: Pages, block_table: Tensor, seqlens_k: Tensor,
    mesh_or_group: MeshOrGroup = ..., *, cu_seqlens_q: Tensor | None = ..., causal: bool = ...,
    window: Window | None = ..., softcap: float | None = ..., sinks: Tensor | None = ..., scale: float | None = ...,
    backend: str = ..., return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def context_parallel_decode(
    q: Tensor,
    k_pages: Pages,
    v_pages: Pages,
    block_table: Tensor,
    seqlens_k: Tensor,
    mesh_or_group: MeshOrGroup = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a step's queries, the same on every rank, to pages that are dealt out to the ranks of a group.

    As `tilewise.attention_paged`, but k_pages, v_pages and block_table are this rank's: column c of its table is page
    c * world + rank of the sequence. `seqlens_k` counts the keys of whole sequences. q, seqlens_k, cu_seqlens_q, sinks
    and the flags are the same on every rank, and so is the result, which every rank gets. Several queries of a sequence
    (`cu_seqlens_q`) read its keys once each: it is meant for drafts, not for prompts. Without gradients.
    """
    if unknown:
        raise validation.unexpected(context_parallel_decode, unknown)
    group = group_of(mesh_or_group)
    # Refused calls count: where one rank alone refuses one, the others see its next result with another number.
    _numbers()[group] = number = _numbers().get(group, 0) + 1
    try:
        tensors = (q, k_pages, v_pages, block_table, seqlens_k, cu_seqlens_q, sinks)
        options = Options(causal=causal, window=window, softcap=softcap, scale=scale, backend=backend)
        rows = _checked(tensors, options, group)
        # The sinks count once: in the result of the first rank, also where it has no key.
        mine = sinks if dist.get_rank(group) == 0 else None
        out, lse = attention_paged(
            q, k_pages, v_pages, rows.table, rows.seqlens, mask=rows.mask, softcap=softcap, sinks=mine, scale=scale,
            backend=backend, return_lse=True,
        )  # fmt: skip
    except TilewiseError as error:
        refuse(error, group, getattr(q, "device", torch.device("cpu")))
    described = {
        "call": "context_parallel_decode", "q": in_words(q), "k_pages": _pages(k_pages), "v_pages": _pages(v_pages),
        "seqlens_k": _shape(seqlens_k), "cu_seqlens_q": _shape(cu_seqlens_q),
        "causal": causal, "window": window, "softcap": softcap, "scale": scale, "sinks": in_words(sinks),
    }  # fmt: skip
    agree(tuple((name, str(value)) for name, value in described.items()), group, q.device)
    if rows.padding is not None:
        # Rows of no sequence see no sink either.
        lse = lse.masked_fill(rows.padding, float("-inf"))
    out, lse = _merged(out, lse, number, group)
    return (out, lse) if return_lse else out


@functools.cache
def _numbers() -> WeakKeyDictionary[Group, int]:
    """How many calls this rank has made with each group."""
    return WeakKeyDictionary()


class _Rows(NamedTuple):
    """This rank's part of the problem, with one sequence for each query."""

    table: Tensor
    seqlens: Tensor
    mask: Tensor | None
    padding: Tensor | None


def _checked(tensors: tuple[Any, ...], options: Options, group: Group) -> _Rows:
    """This rank's keys of every query. Raises InvalidProblem for what attention_paged does not see."""
    q, k_pages, v_pages, table, seqlens, cu_seqlens_q, sinks = tensors
    given = {"q": q, "block_table": table, "seqlens_k": seqlens, "sinks": sinks, "cu_seqlens_q": cu_seqlens_q}
    validation.require_tensors(**{name: tensor for name, tensor in given.items() if tensor is not None})
    check_allocated(given, given.values())
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        raise Unsupported("context_parallel_decode has no gradients: call it under torch.no_grad()")
    if q.dim() != 3 or table.dim() != 2 or seqlens.dim() != 1 or len(table) != len(seqlens):
        got = f"{tuple(q.shape)}, {tuple(table.shape)} and {tuple(seqlens.shape)}"
        expected = "(rows, heads, dim), (batch, columns) and (batch,)"
        raise InvalidProblem("q, block_table, seqlens_k", expected, got, "See attention_paged.")
    if cu_seqlens_q is None and len(q) != len(seqlens):
        fix = "Pass cu_seqlens_q if sequences have other than one query."
        raise InvalidProblem("q", f"one row for each of {counted(len(seqlens), 'sequence')}", len(q), fix)
    _check_lengths(seqlens, cu_seqlens_q, len(q))
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if not isinstance(pages, (Tensor, Fp8Tensor)):
            raise InvalidProblem(name, "a tensor of pages", type(pages).__name__, "See attention_paged.")
        if len(pages.shape) != 4:
            expected = "(num_pages, page_size, num_kv_heads, dim)"
            raise InvalidProblem(name, expected, tuple(pages.shape), "See attention_paged.")
    flags = validation.normalise(options, needs_grad=False)
    left, right = flags.window_left, flags.window_right
    if flags.causal:
        right = 0 if right is None else min(right, 0)
    rank, world, page_size = dist.get_rank(group), dist.get_world_size(group), k_pages.shape[1]
    index = torch.arange(len(q), device=q.device)
    last, padding = seqlens.long() - 1, None
    if cu_seqlens_q is not None:
        totals = cu_seqlens_q.long()
        padding, row = index >= totals[-1], index
        index = torch.bucketize(row, totals[1:], right=True).clamp(max=len(seqlens) - 1)
        last = seqlens.long()[index] - totals[index + 1] + row
    ends = seqlens.long()[index]
    ends = ends if right is None else torch.minimum(ends, last + right + 1).clamp(min=0)
    ends = ends if padding is None else ends.masked_fill(padding, 0)
    table, held = table[index] if cu_seqlens_q is not None else table, _count(ends, page_size, rank, world)
    on_host = seqlens.device.type == "cpu" or settings.current().check_values
    if on_host and len(held) and int(held.max()) > table.shape[1] * page_size:
        expected = (
            f"at most {counted(table.shape[1], 'page')} of {counted(page_size, 'key')} on this rank, as block_table has"
        )
        raise InvalidProblem("seqlens_k", expected, counted(int(held.max()), "key"), "Add pages to the table.")
    if left is None:
        return _Rows(table, held.int(), None, padding)
    # Of a window only the pages that it reaches are read, and of the first of these the keys in it.
    start = (last - left).clamp(min=0)
    first = ((start // page_size - rank + world - 1) // world).clamp(min=0)
    columns = table.shape[1]
    if right is not None:
        reached = (left + right) // page_size + 2
        columns = min(columns, -(-reached // world))
    offsets = torch.arange(columns, device=q.device)
    places = (first[:, None] + offsets).clamp(max=max(0, table.shape[1] - 1))
    keys = torch.arange(columns * page_size, device=q.device)
    position = ((first[:, None] + keys // page_size) * world + rank) * page_size + keys % page_size
    held = (held - first * page_size).clamp(min=0)
    return _Rows(table.gather(1, places), held.int(), (position >= start[:, None])[:, None, None], padding)


def _check_lengths(seqlens: Tensor, cu_seqlens_q: Tensor | None, rows: int) -> None:
    """As attention_paged checks them: it sees only this rank's part."""
    _check_integers(seqlens_k=seqlens, **({} if cu_seqlens_q is None else {"cu_seqlens_q": cu_seqlens_q}))
    if cu_seqlens_q is not None and (cu_seqlens_q.shape != (len(seqlens) + 1,) or not len(seqlens)):
        expected = "shape (batch + 1,), with at least one sequence"
        raise InvalidProblem("cu_seqlens_q", expected, tuple(cu_seqlens_q.shape), "Running totals of queries, from 0.")
    if seqlens.device.type == "cpu" or settings.current().check_values:
        if len(seqlens) and int(seqlens.min()) < 0:
            raise InvalidProblem("seqlens_k", "lengths from 0 on", int(seqlens.min()), "Padding has length 0.")
        if cu_seqlens_q is not None:
            check_totals("cu_seqlens_q", cu_seqlens_q.tolist(), rows)


def _count(seqlens: Tensor, page_size: int, rank: int, world: int) -> Tensor:
    whole, rest = seqlens // page_size, seqlens % page_size
    pages = (whole - rank + world - 1) // world
    return pages.clamp(min=0) * page_size + torch.where(whole % world == rank, rest, 0)


def _shape(tensor: Tensor | None) -> str:
    """Of lengths, whose dtype may differ between ranks."""
    return "None" if tensor is None else str(tuple(tensor.shape))


def _pages(pages: Pages) -> str:
    """Their dtype and shape but for their number, in which ranks may differ."""
    dtype = (pages.data if isinstance(pages, Fp8Tensor) else pages).dtype
    return f"{str(dtype).removeprefix('torch.')} (num_pages, {', '.join(map(str, pages.shape[1:]))})"


def _merged(out: Tensor, lse: Tensor, number: int, group: Group) -> tuple[Tensor, Tensor]:
    """The results of all ranks, exchanged as bytes in one message and merged; equal on every rank. Results of different
    calls are refused, or NaN on a GPU, where nothing is read back.
    """
    world = dist.get_world_size(group)
    if world == 1 or not len(out):
        return out, lse
    stamp = float(number % (1 << 24))
    rows = torch.stack((lse.mT, torch.full_like(lse.mT, stamp)), -1)
    sent = torch.cat((out.contiguous().view(torch.uint8), rows.view(torch.uint8)), -1)
    parts = all_gather(sent, group).unflatten(0, (world, len(out)))
    width = out.shape[-1] * out.element_size()
    outs, lses = parts[..., :width].contiguous().view(out.dtype), parts[..., width:].contiguous().view(lse.dtype)
    apart = (lses[..., 1] != stamp).any()
    if out.device.type == "cpu" and bool(apart):
        raise PeerFailure("ranks are in different calls of context_parallel_decode: one of them refused a call alone")
    out, merged = merge_all(outs.unbind(), lses[..., 0].unbind())
    if out.device.type != "cpu":
        out, merged = (x.masked_fill(apart, float("nan")) for x in (out, merged))
    return out, merged.mT
