"""`flash_attn_with_kvcache` of FA2 and FA3: rotate, append in place, attend.

A cache of whole sequences is a paged cache whose pages are as long as the cache, so lengths that live on the GPU, and
`cache_batch_idx`, cost neither a copy nor a synchronisation. With a left pad the pages are one token long: the table
skips the padding, which is never read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.api import attention, attention_after, attention_paged
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.fp8.container import E4M3
from tilewise.integrations.descales import Descales
from tilewise.integrations.translation import check_integers, number_of, places, require_tensors
from tilewise.kv.writing import write_rows
from tilewise.nn.rotary import check_tables, rotate

__all__ = ["Rotary", "Store", "append_and_attend"]

Lengths = int | Tensor
Write = Callable[[], None]


@dataclass(frozen=True)
class Store:
    """Where keys and values are kept: (batch_cache, capacity, kv_heads, dim), or pages if there is a table."""

    k: Tensor
    v: Tensor
    table: Tensor | None = None
    batch_idx: Tensor | None = None
    leftpad: Tensor | None = None

    def __post_init__(self) -> None:
        given = {"cache_batch_idx": self.batch_idx, "cache_leftpad": self.leftpad, "block_table": self.table}
        there = {name: tensor for name, tensor in given.items() if tensor is not None}
        require_tensors(k_cache=self.k, v_cache=self.v, **there)
        if self.table is not None and (self.batch_idx is not None or self.leftpad is not None):
            name = "cache_batch_idx" if self.batch_idx is not None else "cache_leftpad"
            raise Unsupported(f"{name} with a paged cache: permute or shift the rows of the page table instead")

    def check(self, batch: int) -> None:
        """Shapes and dtypes, on a CPU contents too: what is written or read through them is not judged again."""
        if self.k.dim() != 4 or self.v.dim() != 4 or self.k.shape[:3] != self.v.shape[:3]:
            got = f"{tuple(self.k.shape)} and {tuple(self.v.shape)}"
            fix = "(batch, capacity, kv_heads, dim), or pages with a table."
            raise InvalidProblem("k_cache, v_cache", "4 dimensions each, equal but for the last one", got, fix)
        if self.table is None and self.batch_idx is None and len(self.k) < batch:
            fix = "A row for every sequence of q, or cache_batch_idx to say which it has."
            raise InvalidProblem("k_cache", f"at least {batch} rows as q has sequences", len(self.k), fix)
        fix = "One number a sequence, as int32."
        for name, numbers, bound in (
            ("cache_batch_idx", self.batch_idx, len(self.k)), ("cache_leftpad", self.leftpad, self.capacity + 1)
        ):  # fmt: skip
            if numbers is not None:
                check_integers(name, numbers, (batch,), fix)
                _check_bound(name, numbers, bound, "rows and slots of the cache", fix)
        if self.table is not None:
            check_integers("block_table", self.table, (batch, *self.table.shape[1:2]), "A row of pages a sequence.")

    @property
    def capacity(self) -> int:
        """Tokens a sequence may have."""
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])

    def slots(self, sequence: Tensor, position: Tensor) -> Tensor:
        """The slot of token `position` of `sequence`, counted through the first two dimensions of k and v."""
        length = self.k.shape[1]
        if self.table is not None:
            return self.table[sequence, position // length].long() * length + position % length
        row = sequence if self.batch_idx is None else self.batch_idx[sequence].long()
        return row * length + position

    def pages(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """(k, v, block_table) for `attention_paged`, over the same memory."""
        if self.table is not None:
            return self.k, self.v, self.table
        device = self.k.device
        row = torch.arange(batch, dtype=torch.int32, device=device) if self.batch_idx is None else self.batch_idx.int()
        if self.leftpad is None:
            return self.k, self.v, row[:, None]
        tokens = torch.arange(self.capacity, dtype=torch.int32, device=device) + self.leftpad.int()[:, None]
        k, v = (t.flatten(0, 1).unsqueeze(1) for t in (self.k, self.v))
        return k, v, row[:, None] * self.capacity + tokens


class Rotary(NamedTuple):
    """Tables (seqlen, rotary_dim / 2) and how to apply them; `spread`: query tokens have positions of their own."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    spread: bool
    offsets: Tensor | None = None

    @classmethod
    def of(
        cls, cos: Tensor | None, sin: Tensor | None, interleaved: bool, *, spread: bool, offsets: Tensor | None = None
    ) -> Rotary | None:
        """None without cos and sin; rejects one without the other."""
        if cos is None or sin is None:
            if cos is not sin:
                raise InvalidProblem("rotary_cos, rotary_sin", "both or neither", "one of them", "Pass both tables.")
            return None
        check_tables(cos, sin, ("rotary_cos", "rotary_sin"))
        return cls(cos, sin, interleaved, spread, offsets)

    def turn(self, x: Tensor, position: Tensor) -> Tensor:
        """Turn x (..., heads, dim) by the positions (...)."""
        _check_bound("rotary_cos", position, self.cos.shape[0], "rows", "Make the tables as long as the cache.")
        return rotate(x, self.cos[position], self.sin[position], interleaved=self.interleaved)


@torch.no_grad()
def append_and_attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    store: Store,
    seqlens: Lengths | None,
    rotary: Rotary | None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    chunk: int = 0,
    descales: Descales | None = None,
    **flags: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of q, dense (batch, seqlen_q, ...) or packed with `cu_seqlens_q`; the store then holds k and v too.

    `descales` belong to a store in e4m3, which is not attended without them, and mean nothing to another one.
    """
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    store.check(batch)
    seqlens = number_of(seqlens)
    _check_lengths("cache_seqlens", seqlens, batch)
    write: Write | None = None
    if k is None or v is None:
        _reject_without_new_tokens(k, v, rotary)
        total: Lengths = store.k.shape[1] if seqlens is None and store.table is None else _given(seqlens)
    else:
        before = _given(seqlens)
        _check_new(k, v, store, None if cu_seqlens_k_new is not None else batch)
        _check_offsets(cu_seqlens_k_new, batch, len(k))
        if rotary is not None:
            base = before if rotary.offsets is None else rotary.offsets
            _check_lengths("rotary_seqlens", rotary.offsets, batch)
            q = rotary.turn(q, _tokens(q, cu_seqlens_q, base, spread=rotary.spread)[1])
            k = rotary.turn(k, _tokens(k, cu_seqlens_k_new, base)[1])
        write = _appending(store, k, v, _tokens(k, cu_seqlens_k_new, before), batch)
        total = before + (k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff())
    whole = store.table is None and store.batch_idx is None and store.leftpad is None
    if whole and isinstance(total, int) and cu_seqlens_q is None:
        return _attend_dense(q, store, total, write, chunk, descales, flags)
    lengths = _per_sequence(total, batch, q)
    return _attend_paged(q, store, lengths, write, cu_seqlens_q, max_seqlen_q, chunk, descales, flags)


def _given(seqlens: Lengths | None) -> Lengths:
    if seqlens is None:
        fix = "An int for all sequences, or int32 (batch,)."
        raise InvalidProblem("cache_seqlens", "the tokens already in the cache", None, fix)
    return seqlens


def _reject_without_new_tokens(k: Tensor | None, v: Tensor | None, rotary: Rotary | None) -> None:
    if k is not None or v is not None:
        raise InvalidProblem("k, v", "both or neither", "one of them", "Keys and values are appended together.")
    if rotary is not None:
        fix = "Cached keys are turned when they are appended; turn q yourself with apply_rotary_emb."
        raise InvalidProblem("rotary_cos", "None because no k and v are appended", "a tensor", fix)


def _tokens(x: Tensor, cu_seqlens: Tensor | None, base: Lengths, *, spread: bool = True) -> tuple[Tensor, Tensor]:
    """(sequence, position) of every token of x, (batch, seqlen) or (total,); unless `spread`, position is the base."""
    if cu_seqlens is None:
        sequence = torch.arange(x.shape[0], device=x.device)[:, None]
        index = torch.arange(x.shape[1], device=x.device)[None, :].expand(x.shape[0], -1)
    else:
        sequence, index = places(cu_seqlens, x.shape[0])
    # Packed rows past the last sequence take its base; nobody reads what comes of them.
    start = base[sequence.clamp(max=base.numel() - 1)] if isinstance(base, Tensor) else base
    return sequence, (index if spread else torch.zeros_like(index)) + start


def _check_lengths(name: str, seqlens: Any, batch: int) -> None:
    fix = "An int for all sequences, or int32 (batch,)."
    if isinstance(seqlens, Tensor):
        check_integers(name, seqlens, (batch,), fix)
    elif seqlens is not None and (
        not isinstance(seqlens, int | np.integer) or isinstance(seqlens, bool) or seqlens < 0
    ):
        raise InvalidProblem(name, "the tokens already in the cache", repr(seqlens), fix)


def _check_new(k: Tensor, v: Tensor, store: Store, batch: int | None) -> None:
    """New rows as the store has them, of so many sequences or packed."""
    for name, new, old in (("k", k, store.k), ("v", v, store.v)):
        rows = ("total",) if batch is None else (batch, "seqlen")
        heads = tuple(old.shape[2:])
        fits = new.dim() == len(rows) + 2 and tuple(new.shape[-2:]) == heads and new.shape[:-2] == k.shape[:-2]
        if not fits or (batch is not None and new.shape[0] != batch) or new.device != old.device:
            expected = f"({', '.join(map(str, (*rows, *heads)))}) on {old.device} as the cache is"
            fix = "Append K and V of as many tokens for every sequence of q, or pack them with cu_seqlens_k_new."
            raise InvalidProblem(name, expected, f"{tuple(new.shape)} on {new.device}", fix)


def _check_offsets(cu_seqlens: Tensor | None, batch: int, rows: int) -> None:
    """Where the new rows of every sequence begin; what they say is looked at on a CPU only."""
    if cu_seqlens is None:
        return
    check_integers("cu_seqlens_k_new", cu_seqlens, (batch + 1,), "Running totals of the new tokens, as int32.")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        entries = cu_seqlens.tolist()
        if entries[0] != 0 or entries[-1] > rows or entries != sorted(entries):
            expected = f"running totals that start with 0 and end at {rows}, the rows of k, at most"
            raise InvalidProblem("cu_seqlens_k_new", expected, entries, "Pass running totals, not lengths.")


def _appending(store: Store, k: Tensor, v: Tensor, tokens: tuple[Tensor, Tensor], batch: int) -> Write:
    """What writes the new tokens, judged but not yet done."""
    sequence, position = tokens
    for name, new, old in (("k", k, store.k), ("v", v, store.v)):
        if new.dtype != old.dtype:
            fix = f"Convert it with .to({old.dtype})."
            raise InvalidProblem(name, f"dtype {old.dtype} as the cache has", new.dtype, fix)
    if k.dim() == 3:
        inside = (sequence < batch).nonzero().flatten()
        sequence, position, k, v = sequence[inside], position[inside], k[inside], v[inside]
    fix = "Give the sequence more room in the cache (or more pages in its table)."
    _check_bound("cache_seqlens", position, store.capacity, "tokens of capacity", fix)
    rows = (k, v) if k.dim() == 3 else (k.flatten(0, 1), v.flatten(0, 1))
    slots = store.slots(sequence, position).flatten()
    _check_bound(
        "block_table", slots, store.k.shape[0] * store.k.shape[1], "slots of all pages", "Name pages there are."
    )
    return functools.partial(write_rows, *rows, store.k, store.v, slots)


def _check_bound(name: str, position: Tensor, bound: int, what: str, fix: str) -> None:
    """Contents are looked at on a CPU only; on a GPU that would make the CPU wait."""
    if position.device.type != "cpu" or torch.compiler.is_compiling() or position.numel() == 0:
        return
    first, last = (int(end) for end in position.aminmax())
    if first < 0 or last >= bound:
        got = first if first < 0 else last
        raise InvalidProblem(name, f"positions below {bound}, the {what}", got, fix)


def _per_sequence(total: Lengths, batch: int, q: Tensor) -> Tensor:
    if isinstance(total, Tensor):
        return total.int()
    return torch.full((batch,), total, dtype=torch.int32, device=q.device)


def _attend_dense(
    q: Tensor,
    store: Store,
    total: int,
    write: Write | None,
    chunk: int,
    descales: Descales | None,
    flags: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    if total > store.capacity:
        fix = "Pass at most the length of the cache."
        raise InvalidProblem("cache_seqlens", f"at most {store.capacity}, the capacity of the cache", total, fix)
    k, v = store.k[: len(q), :total], store.v[: len(q), :total]
    if chunk:
        ends = torch.full((1,), total, dtype=torch.int64, device=q.device)
        flags = {**flags, "mask": _same_chunk(ends, ends.new_full((1,), q.shape[1]), q.shape[1], total, chunk)}
    attended: Any = q, k, v
    if descales is not None and k.dtype == E4M3:
        attended = descales.containers(q, k, v, len(q), "bshd")
    if write is not None:
        return attention_after(write, "dense", attended, layout="bshd", **flags)
    return attention(*attended, layout="bshd", return_lse=True, **flags)


def _attend_paged(
    q: Tensor,
    store: Store,
    total: Tensor,
    write: Write | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    chunk: int,
    descales: Descales | None,
    flags: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    batch = total.numel()
    k, v, table = store.pages(batch)
    seqlens_k = total if store.leftpad is None else (total - store.leftpad.int()).clamp(min=0)
    dense_q = cu_seqlens_q is None
    longest = q.shape[1] if dense_q else q.shape[0] if max_seqlen_q is None else max_seqlen_q
    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * longest
    if chunk:
        keys = table.shape[1] * k.shape[1]
        flags = {**flags, "mask": _same_chunk(seqlens_k, cu_seqlens_q.diff(), longest, keys, chunk)}
    packed = q.flatten(0, 1) if dense_q else q
    if not (dense_q and longest == 1):
        flags = {**flags, "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": longest}
    fp8 = descales if k.dtype == E4M3 else None
    attended: Any = (packed, k, v) if fp8 is None else fp8.paged(packed, k, v, batch)
    if write is None:
        query, keys_in, values_in = attended
        out, lse = attention_paged(query, keys_in, values_in, table, seqlens_k, return_lse=True, **flags)
    else:
        through = write if store.leftpad is None else functools.partial(_write_through, write, store, k, v)
        out, lse = attention_after(through, "paged", attended, block_table=table, seqlens_k=seqlens_k, **flags)
    if fp8 is not None:
        out = fp8.rescaled(out, flags.get("cu_seqlens_q"))
    if not dense_q:
        return out, lse
    return out.unflatten(0, (batch, longest)), lse.unflatten(1, (batch, longest)).transpose(0, 1)


def _write_through(write: Write, store: Store, k: Tensor, v: Tensor) -> None:
    """Of a cache that is not contiguous, pages of one token are a copy."""
    write()
    for pages, kept in ((k, store.k), (v, store.v)):
        if kept.stride(0) != kept.shape[1] * kept.stride(1):
            pages.view(kept.shape).copy_(kept)


def _same_chunk(seqlens_k: Tensor, seqlens_q: Tensor, rows: int, keys: int, chunk: int) -> Tensor:
    """(batch, 1, rows, keys): whether a key lies in the chunk of the query's own position."""
    row = torch.arange(rows, device=seqlens_k.device)
    own = (row + (seqlens_k - seqlens_q)[:, None]).div(chunk, rounding_mode="floor")
    key = torch.arange(keys, device=seqlens_k.device) // chunk
    return (own[:, None, :, None] == key).contiguous()
