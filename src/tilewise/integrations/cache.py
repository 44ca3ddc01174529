"""`flash_attn_with_kvcache` of FA2 and FA3: rotate, append in place, attend.

A cache of whole sequences is a paged cache whose pages are as long as the cache, so lengths on the GPU and
`cache_batch_idx` cost neither a copy nor a synchronisation. With a left pad the pages are one token long: the table
skips the padding, which is never read. Before anything is written, positions and pages must exist, and no two rows may
share memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise import settings
from tilewise.api import attention, attention_after, attention_paged
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.fp8.container import E4M3, E4M3_MAX
from tilewise.integrations.flash import Descales
from tilewise.integrations.translation import check_integers, number_of, places, require_tensors
from tilewise.kv.writing import write_rows
from tilewise.memory import check_allocated, overlap, overlaps_itself
from tilewise.nn.rotary import check_tables, rotate
from tilewise.totals import check_totals
from tilewise.units import counted

Lengths = int | Tensor
LENGTHS = "An int for all sequences, or int32 (batch,)."
CAPACITY = "tokens of capacity"
ROOM = "Give the sequence more room in the cache, or more pages in block_table."
Write = Callable[[], None]
# K and V.
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Store:
    """Storage of keys and values: (batch_cache, capacity, kv_heads, dim), or pages if there is a table.

    `reads_lengths`: lengths on a GPU are held against the table, too, for which the host waits.
    """

    k: Tensor
    v: Tensor
    table: Tensor | None = None
    batch_idx: Tensor | None = None
    leftpad: Tensor | None = None
    reads_lengths: bool = False

    def __post_init__(self) -> None:
        given = {"cache_batch_idx": self.batch_idx, "cache_leftpad": self.leftpad, "block_table": self.table}
        there = {name: tensor for name, tensor in given.items() if tensor is not None}
        require_tensors(k_cache=self.k, v_cache=self.v, **there)
        check_allocated(("k_cache", "v_cache", *there), (self.k, self.v, *there.values()))

    def checked(self, batch: int) -> Store:
        """The store of `batch` sequences, its table with one row each: `cache_batch_idx` selects rows of the table.

        Validates shapes and dtypes, on a CPU contents too. Writes and reads through them are not checked again.
        """
        if self.k.dim() != 4 or self.v.dim() != 4 or self.k.shape[:3] != self.v.shape[:3]:
            got = f"{tuple(self.k.shape)} and {tuple(self.v.shape)}"
            fix = "(batch, capacity, kv_heads, dim), or pages with a table."
            raise InvalidProblem("k_cache, v_cache", "4 dimensions each, equal but for the last one", got, fix)
        if self.table is not None and self.table.dim() != 2:
            fix = "A row of pages a sequence."
            raise InvalidProblem("block_table", "a tensor (batch, pages)", f"shape {tuple(self.table.shape)}", fix)
        if self.table is None and self.batch_idx is None and len(self.k) < batch:
            fix = "A row for every sequence of q, or cache_batch_idx to say which it has."
            raise InvalidProblem("k_cache", f"at least {counted(batch, 'row')} as q has sequences", len(self.k), fix)
        fix = "One number a sequence, as int32."
        rows = len(self.k) if self.table is None else len(self.table)
        limits = (("cache_batch_idx", self.batch_idx, rows), ("cache_leftpad", self.leftpad, self.capacity + 1))
        for name, numbers, bound in limits:
            if numbers is not None:
                check_integers(name, numbers, (batch,), fix)
                _check_bounds(_Bound(name, numbers, bound, "rows and slots of the cache", fix))
        if self.leftpad is not None and self.k.shape[0] * self.k.shape[1] >= 2**31:
            raise Unsupported("cache_leftpad with a cache of 2^31 slots or more: slots are counted in int32")
        if self.table is None:
            return self
        shape = (batch if self.batch_idx is None else rows, *self.table.shape[1:2])
        check_integers("block_table", self.table, shape, "A row of pages a sequence.")
        if self.batch_idx is None:
            return self
        return dataclasses.replace(self, table=self.table.index_select(0, self.batch_idx), batch_idx=None)

    def joined(self) -> Store:
        """The store whose keys are [v | k], in the same memory."""
        latent = latent_of(self.k, self.v)
        if latent is None or self.leftpad is not None or self.k.dtype == E4M3:
            raise Unsupported(
                "qv with a cache: keep k right behind v, as columns of one tensor of fp16, bf16 or fp32 (v_cache = "
                "latent[..., :512], k_cache = latent[..., 512:]), and pass no cache_leftpad; otherwise every step "
                "would copy the cache"
            )
        return dataclasses.replace(self, k=latent, v=latent[..., : self.v.shape[-1]])

    @property
    def capacity(self) -> int:
        """Maximum tokens of a sequence."""
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])

    def slots(self, sequence: Tensor, position: Tensor) -> Tensor:
        """The slot of token `position` of `sequence`, counted through the first two dimensions of k and v."""
        length = self.k.shape[1]
        if self.table is not None:
            # An index out of bounds would end the CUDA context. Positions are checked before they are written.
            page = (position // max(length, 1)).clamp(0, max(self.table.shape[1] - 1, 0))
            return self.table[sequence, page].long() * length + position % max(length, 1)
        row = sequence if self.batch_idx is None else self.batch_idx[sequence].long()
        return row * length + position

    def pages(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """(k, v, block_table) for `attention_paged`, over the same memory."""
        # A cache without slots has no pages of its length, but as many of one token: none.
        if self.leftpad is None and self.k.shape[1]:
            if self.table is not None:
                return self.k, self.v, self.table
            return self.k, self.v, self._rows(batch)[:, None]
        token = torch.arange(self.capacity, dtype=torch.int32, device=self.k.device).expand(batch, -1)
        if self.leftpad is not None:
            token = (token + self.leftpad.int()[:, None]).clamp(max=self.capacity - 1)
        length = self.k.shape[1]
        if self.table is None:
            slots = self._rows(batch)[:, None] * length + token
        else:
            slots = self.table.gather(1, (token // max(length, 1)).long()) * length + token % max(length, 1)
        k, v = (t.flatten(0, 1).unsqueeze(1) for t in (self.k, self.v))
        return k, v, slots

    def _rows(self, batch: int) -> Tensor:
        """The row of every sequence, int32."""
        if self.batch_idx is not None:
            return self.batch_idx.int()
        return torch.arange(batch, dtype=torch.int32, device=self.k.device)


def latent_of(k: Tensor, v: Tensor) -> Tensor | None:
    """The rows [v | k] without a copy, where k is stored right behind v: the columns of a latent. None elsewhere."""
    same = k.dtype == v.dtype and k.stride() == v.stride() and k.shape[:-1] == v.shape[:-1] and k.stride(-1) == 1
    if not same or k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr():
        return None
    if k.storage_offset() != v.storage_offset() + v.shape[-1]:
        return None
    return v.as_strided((*v.shape[:-1], v.shape[-1] + k.shape[-1]), v.stride())


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
        """Rotate x (..., heads, dim) by the positions (...). e4m3 is rounded to e4m3 again, as in FA3."""
        if x.dtype != E4M3:
            return rotate(x, self.cos[position], self.sin[position], interleaved=self.interleaved)
        cos, sin = self.cos.float()[position], self.sin.float()[position]
        turned = rotate(x.float(), cos, sin, interleaved=self.interleaved)
        return turned.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


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
    qv: Tensor | None = None,
    **flags: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of q, dense (batch, seqlen_q, ...) or packed with `cu_seqlens_q`; the store then holds k and v too.

    `descales` belong to an e4m3 store, which cannot be attended without them. Other stores ignore them. `qv`.v is added
    to the scores; k is then stored behind v.
    """
    rank, expected = 4, "(batch, seqlen, heads, dim)"
    if cu_seqlens_q is not None:
        require_tensors(cu_seqlens_q=cu_seqlens_q)
        rank, expected = 3, "(total, heads, dim) beside cu_seqlens_q"
    if q.dim() != rank:
        raise InvalidProblem("q", f"a tensor {expected}", f"shape {tuple(q.shape)}", "Reshape it.")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    store = store.checked(batch)
    total = _checked_lengths("cache_seqlens", seqlens, batch)
    if total is None and k is None and v is None and store.table is None:
        total = store.k.shape[1]
    write: Write | None = None
    if k is None or v is None:
        if k is not v:
            raise InvalidProblem("k, v", "both or neither", "one of them", "Keys and values are appended together.")
        if rotary is not None:
            fix = "Cached keys are turned when they are appended; turn q yourself with apply_rotary_emb."
            raise InvalidProblem("rotary_cos", "None because no k and v are appended", "a tensor", fix)
    if total is None:
        raise InvalidProblem("cache_seqlens", "the tokens already in the cache", None, LENGTHS)
    if k is not None and v is not None:
        require_tensors(k=k, v=v)
        _check_new(k, v, store, batch, cu_seqlens_k_new)
        write, q = _appending(store, q, k, v, total, rotary, batch, cu_seqlens_q, cu_seqlens_k_new)
        total = total + (k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff())
    elif store.table is not None and isinstance(total, Tensor):
        _check_bounds(_Bound("cache_seqlens", total, store.capacity + 1, CAPACITY, ROOM), read=store.reads_lengths)
    if qv is not None:
        if qv.shape[:-1] != q.shape[:-1] or qv.shape[-1] != store.v.shape[-1]:
            expected = f"shape {(*q.shape[:-1], store.v.shape[-1])}, q's with the columns of v_cache"
            raise InvalidProblem("qv", expected, tuple(qv.shape), "It meets the rows of v.")
        q, store = torch.cat((qv.to(q.dtype), q), -1), store.joined()
    whole = store.table is None and store.batch_idx is None and store.leftpad is None
    how = _How(write, chunk, descales if store.k.dtype == E4M3 else None, flags)
    if whole and isinstance(total, int) and cu_seqlens_q is None:
        return _attend_dense(q, store, total, how)
    if not isinstance(total, Tensor):
        total = torch.full((batch,), total, dtype=torch.int32, device=q.device)
    return _attend_paged(q, store, total.int(), how, cu_seqlens_q, max_seqlen_q)


def _checked_lengths(name: str, seqlens: Any, batch: int) -> Any:
    """An int, or a length for each sequence. A tensor without dimensions is one for all of them; it is not read."""
    if isinstance(seqlens, Tensor):
        seqlens = seqlens if seqlens.dim() else seqlens.expand(batch)
        check_integers(name, seqlens, (batch,), LENGTHS)
        return seqlens
    number = number_of(seqlens)
    is_count = isinstance(number, int | np.integer) and not isinstance(number, bool) and number >= 0
    if number is not None and not is_count:
        raise InvalidProblem(name, "the tokens already in the cache", repr(number), LENGTHS)
    return number


def _tokens(x: Tensor, cu_seqlens: Tensor | None, base: Lengths, *, spread: bool = True) -> tuple[Tensor, Tensor]:
    """(sequence, position) of every token of x, (batch, seqlen) or (total,); unless `spread`, position is the base."""
    if cu_seqlens is None:
        sequence = torch.arange(x.shape[0], device=x.device)[:, None]
        index = torch.arange(x.shape[1], device=x.device)[None, :].expand(x.shape[0], -1)
    else:
        sequence, index = places(cu_seqlens, x.shape[0])
    # Packed rows past the last sequence take its base; their results are never read.
    start = base[sequence.clamp(max=base.numel() - 1)] if isinstance(base, Tensor) else base
    return sequence, (index if spread else torch.zeros_like(index)) + start


def _check_new(k: Tensor, v: Tensor, store: Store, batch: int, cu_seqlens: Tensor | None) -> None:
    """Check that new rows, of `batch` sequences or packed, fit the store. Contents are read on a CPU only."""
    rows: tuple[Any, ...] = (batch, "seqlen") if cu_seqlens is None else ("total",)
    for name, new, old in (("k", k, store.k), ("v", v, store.v)):
        heads = tuple(old.shape[2:])
        fits = new.dim() == len(rows) + 2 and tuple(new.shape[-2:]) == heads and new.shape[:-2] == k.shape[:-2]
        if not fits or (cu_seqlens is None and new.shape[0] != batch) or new.device != old.device:
            expected = f"({', '.join(map(str, (*rows, *heads)))}) on {old.device} as the cache is"
            fix = "Append K and V of as many tokens for every sequence of q, or pack them with cu_seqlens_k_new."
            raise InvalidProblem(name, expected, f"{tuple(new.shape)} on {new.device}", fix)
    if cu_seqlens is not None:
        check_integers("cu_seqlens_k_new", cu_seqlens, (batch + 1,), "Running totals of the new tokens, as int32.")
        if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            check_totals("cu_seqlens_k_new", cu_seqlens.tolist(), len(k))


def _appending(
    store: Store,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: Lengths,
    rotary: Rotary | None,
    batch: int,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> tuple[Write, Tensor]:
    """The write of the new tokens, checked but not yet done, and q, rotated likewise."""
    for name, new, old in (("k", k, store.k), ("v", v, store.v)):
        if new.dtype != old.dtype:
            fix = f"Convert it with .to({old.dtype})."
            raise InvalidProblem(name, f"dtype {old.dtype} as the cache has", new.dtype, fix)
    sequence, position = _tokens(k, cu_seqlens_k, before)
    turned: tuple[Tensor, Tensor] | None = None
    if rotary is not None:
        # The positions that rotate the tokens of q and of k.
        offsets = _checked_lengths("rotary_seqlens", rotary.offsets, batch)
        base = before if offsets is None else offsets
        turned = _tokens(q, cu_seqlens_q, base, spread=rotary.spread)[1], _tokens(k, cu_seqlens_k, base)[1]
    if cu_seqlens_k is not None:
        # Rows past the last sequence are not written.
        inside = (sequence < batch).nonzero().flatten()
        sequence, position, k, v = sequence[inside], position[inside], k[inside], v[inside]
        turned = None if turned is None else (turned[0], turned[1][inside])
    slots = store.slots(sequence, position)
    bounds = [_Bound("cache_seqlens", position, store.capacity, CAPACITY, ROOM)]
    if store.table is not None:
        number = store.k.shape[0] * store.k.shape[1]
        bounds.append(_Bound("block_table", slots, number, "slots of all pages", "Name pages there are."))
    if rotary is not None and turned is not None:
        fix = "Make the tables as long as the cache."
        bounds += [_Bound("rotary_cos", turns, rotary.cos.shape[0], "rows", fix) for turns in turned]
    if not _check_bounds(*bounds, read=store.table is not None) and store.table is not None:
        # In a captured or compiled graph a row without a page is skipped.
        inside = (position < store.capacity) & (slots < store.k.shape[0] * store.k.shape[1])
        slots = torch.where(inside, slots, -1)
    if rotary is not None and turned is not None:
        q, k = rotary.turn(q, turned[0]), rotary.turn(k, turned[1])
    _check_apart((store.k, store.v), (k, v), batch if store.table is None and store.batch_idx is None else None)
    rows = (k, v) if k.dim() == 3 else (k.flatten(0, 1), v.flatten(0, 1))
    return functools.partial(write_rows, *rows, store.k, store.v, slots.flatten()), q


class _How(NamedTuple):
    """What is done besides attending: the write before it, chunks of keys, the descales of an e4m3 store; and flags."""

    write: Write | None
    chunk: int
    descales: Descales | None
    flags: dict[str, Any]


def _attend_dense(q: Tensor, store: Store, total: int, how: _How) -> tuple[Tensor, Tensor]:
    if total > store.capacity:
        fix = "Pass at most the length of the cache."
        raise InvalidProblem("cache_seqlens", f"at most {store.capacity}, the capacity of the cache", total, fix)
    k, v = store.k[: len(q), :total], store.v[: len(q), :total]
    attended: Any = q, k, v
    flags = how.flags | {"layout": "bshd"}
    if how.chunk:
        ends = torch.full((1,), total, dtype=torch.int64, device=q.device)
        flags["mask"] = _same_chunk(ends, ends.new_full((1,), q.shape[1]), q.shape[1], total, how.chunk)
    if how.descales is not None:
        attended = how.descales.containers(q, k, v, len(q), "bshd")
    if how.write is not None:
        return attention_after(how.write, "dense", attended, **flags)
    return attention(*attended, return_lse=True, **flags)


def _attend_paged(
    q: Tensor, store: Store, total: Tensor, how: _How, starts: Tensor | None, longest: int | None
) -> tuple[Tensor, Tensor]:
    """Queries are packed by `starts`, their running totals, or dense without them."""
    batch, dense_q = total.numel(), starts is None
    k, v, table = store.pages(batch)
    seqlens_k = total if store.leftpad is None else (total - store.leftpad.int()).clamp(min=0)
    packed = q.flatten(0, 1) if dense_q else q
    if starts is None:
        longest = q.shape[1]
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * longest
    longest = q.shape[0] if longest is None else longest
    flags = how.flags | {"block_table": table, "seqlens_k": seqlens_k}
    if not (dense_q and longest == 1):
        flags |= {"cu_seqlens_q": starts, "max_seqlen_q": longest}
    if how.chunk:
        flags["mask"] = _same_chunk(seqlens_k, starts.diff(), longest, table.shape[1] * k.shape[1], how.chunk)
    attended: Any = (packed, k, v) if how.descales is None else how.descales.paged(packed, k, v, batch)
    if how.write is None:
        out, lse = attention_paged(*attended, return_lse=True, **flags)
    else:
        through = how.write if store.leftpad is None else functools.partial(_write_through, how.write, store, k, v)
        out, lse = attention_after(through, "paged", attended, **flags)
    if how.descales is not None:
        out = how.descales.rescaled(out, flags.get("cu_seqlens_q"))
    if not dense_q:
        return out, lse
    return out.unflatten(0, (batch, longest)), lse.unflatten(1, (batch, longest)).transpose(0, 1)


def _write_through(write: Write, store: Store, k: Tensor, v: Tensor) -> None:
    """Write, then refresh pages of one token that are a copy, because the cache is not contiguous."""
    write()
    for pages, kept in ((k, store.k), (v, store.v)):
        if min(kept.shape[:2]) > 1 and kept.stride(0) != kept.shape[1] * kept.stride(1):
            pages.view(kept.shape).copy_(kept)


def _same_chunk(seqlens_k: Tensor, seqlens_q: Tensor, rows: int, keys: int, chunk: int) -> Tensor:
    """(batch, 1, rows, keys): whether a key is in the chunk of the query's own position."""
    row = torch.arange(rows, device=seqlens_k.device)
    own = (row + (seqlens_k - seqlens_q)[:, None]).div(chunk, rounding_mode="floor")
    key = torch.arange(keys, device=seqlens_k.device) // chunk
    return (own[:, None, :, None] == key).contiguous()


class _Bound(NamedTuple):
    """The values of an argument must be at least 0 and less than `bound`."""

    name: str
    numbers: Tensor
    bound: int
    what: str
    fix: str


def _check_bounds(*bounds: _Bound, read: bool = False) -> bool:
    """Refuse values outside their bounds. Returns whether they were read.

    They are read on a CPU, where it is free, and with TILEWISE_CHECK_VALUES=1. On a GPU reading synchronises, once for
    all of them: with `read` it is done nevertheless, except while a CUDA graph is captured.
    """
    there = [each for each in bounds if each.numbers.numel()]
    if not there:
        return True
    if torch.compiler.is_compiling() or any(type(each.numbers) is not Tensor or each.numbers.is_meta for each in there):
        return False
    if there[0].numbers.device.type != "cpu" and not settings.current().check_values:
        captured = there[0].numbers.is_cuda and torch.cuda.is_current_stream_capturing()
        if not read or captured:
            return False
    ends = torch.stack([end.long() for each in there for end in each.numbers.aminmax()]).tolist()
    for (name, _, bound, what, fix), first, last in zip(there, ends[::2], ends[1::2], strict=True):
        if first < 0 or last >= bound:
            fix = fix if first >= 0 else "Numbers are counted from 0; none is negative."
            raise InvalidProblem(name, f"from 0 to {bound - 1}, within the {what}", first if first < 0 else last, fix)
    return True


def _check_apart(caches: Pair, new: Pair, rows: int | None) -> None:
    """Refuse caches of K and V in which two elements share memory; only the first `rows` if given.

    V may be a part of K, if the new rows are too: then both writes store the same values. Tensors without memory of
    their own (fake, traced) are not checked.
    """
    if torch.compiler.is_compiling() or any(type(t) is not Tensor or t.is_meta for t in (*caches, *new)):
        return
    k, v = (t[:rows] for t in caches)
    for name, cache in (("k_cache", k), ("v_cache", v)):
        if overlaps_itself(cache):
            fix = "New tokens would overwrite one another. Pass a copy (.contiguous()) and keep that."
            got = f"shape {tuple(cache.shape)}, strides {cache.stride()}"
            raise InvalidProblem(name, "rows that share no memory", got, fix)
    if k.device == v.device and overlap(k, v) and not _is_part(caches, new):
        fix = "Appending v would overwrite k: give each its own memory, or write the cache and call without k and v."
        raise InvalidProblem("v_cache", "memory that k_cache does not use", "a view of the same", fix)


def _distance(pair: Pair) -> int:
    """Bytes from the first to the second."""
    return pair[1].data_ptr() - pair[0].data_ptr()


def _is_part(caches: Pair, new: Pair) -> bool:
    """Whether V is the same part of K in the cache and in the new rows."""
    (k, v), begin = caches, _distance(caches)
    inside = 0 <= begin <= (k.shape[-1] - v.shape[-1]) * k.element_size()
    alike = all(a.dtype == b.dtype and a.stride() == b.stride() for a, b in (caches, new))
    return inside and alike and k.stride(-1) == new[0].stride(-1) == 1 and begin == _distance(new)
