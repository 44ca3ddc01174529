"""What the backends for serving engines share: the batch of one step, and the calls of one attention layer.

An engine plans a step once and then runs every layer of the model. `Batch` holds what all layers of the step share, so
that a layer's call only passes tensors on. `Layer` writes the step's new keys and values into the engine's pages and
attends to them. Neither imports an engine.

The engine's cache of a layer is one tensor (num_pages, num_kv_heads, page_size, head_dim + head_dim_v) with the keys
and values of a token next to each other, in any physical order of the first three dimensions; or two, of keys and of
values (num_pages, page_size, num_kv_heads, dim). A cache of latents is (num_pages, page_size, columns), whose first
columns are the values. It is read and written in place, through two strided views. In int8, a cell of a token and
head is `int8_cell` bytes: its keys, its values, and at the end their two scales in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tilewise.api import attention_paged, attention_varlen
from tilewise.cascade import SharedPrefix
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.fp8.container import E4M3, Fp8Tensor
from tilewise.fp8.quantisation import quantize
from tilewise.kv.quantised import QuantisedRows, append_quantised
from tilewise.kv.tables import shared_prefix_of
from tilewise.kv.writing import write_rows
from tilewise.problem import MAX_HEAD_DIM, MAX_HEAD_DIM_V
from tilewise.tile_masks import TileMask
from tilewise.units import counted

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# What a layer attends to: pages of its own sequence, the step's own keys without a cache, or pages of an encoder.
Role = Literal["decoder", "encoder", "cross"]
Pages = Tensor | Fp8Tensor
Cache = Tensor | tuple[Tensor, Tensor]
# Address, shape, strides and dtype of tensors.
Memory = list[tuple[int, torch.Size, tuple[int, ...], torch.dtype] | None]
# Cells of an int8 cache are multiples of this, so that kernels load 16 bytes at a time.
CELL_BYTES, SCALE_BYTES = 16, 4
# With fewer sequences that decode, a second call takes longer than they do beside prompts.
FEWEST_DECODES = 4


@dataclass
class Batch:
    """One step: `num_tokens` query rows of `len(seqlens_k)` sequences, packed; rows past the last one are padding.

    cu_seqlens_q  int32 (batch + 1,): where each sequence's queries start
    max_seqlen_q  upper bound of the number of queries of a sequence
    seqlens_k     int32 (batch,): keys of each sequence, including those of this step; 0 for padding
    block_table   int32 (batch, max_pages)
    slot_mapping  int64: where the step's keys and values go, counted through all pages; negative for padding
    causal        whether a query sees only keys up to its own
    page_size     rows of a page, if known
    shared_prefix sequences that start with the same pages, if any are known
    spans         sequences in which some tokens see each other in both directions, if there are any
    is_decode     every sequence has one query (padding included), so cu_seqlens_q is not needed
    parts         batches of some of the sequences each, in order, that are attended one by one instead
    """

    num_tokens: int
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    seqlens_k: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool = True
    page_size: int | None = None
    shared_prefix: SharedPrefix | None = None
    spans: Spans | None = None
    is_decode: bool = False
    parts: tuple[Batch, ...] = ()

    def __post_init__(self) -> None:
        self.is_decode = self.max_seqlen_q == 1 and self.num_tokens == len(self.seqlens_k)

    def share_prefixes(self) -> None:
        """Find sequences that start with the same pages. Only for tables in host memory: others would be waited for."""
        table, count = self.block_table, len(self.seqlens_k)
        if table.device.type != "cpu" or not (self.page_size and self.causal and table.shape[1]):
            return
        # Most often, all begin with different pages.
        if len(set(table[:count, 0].tolist())) < count:
            counts = self.cu_seqlens_q.diff().numpy()
            before = self.seqlens_k.numpy() - counts
            self.shared_prefix = shared_prefix_of(table.numpy(), before, counts, self.page_size)

    def part_decodes(self, starts: Tensor, most: int = 1) -> None:
        """Attend to sequences with at most so many queries, where they come first or last, in calls of their own: a
        GPU's kernel for prompts would read their keys for each query head. `starts` is cu_seqlens_q in host memory.
        Between these sequences it may divide their queries otherwise than the device's does, if each has at least one.
        """
        counts = starts.diff()
        longer = (counts > most).nonzero().flatten().tolist()
        if not longer:
            return
        count = len(counts)
        first = longer[0] if longer[0] >= FEWEST_DECODES else 0
        last = longer[-1] + 1 if count - 1 - longer[-1] >= FEWEST_DECODES else count
        ranges = (0, first, most), (first, last, self.max_seqlen_q), (last, count, most)
        parts = tuple([self._part(starts, *each) for each in ranges if each[0] < each[1]])
        self.parts = parts if len(parts) > 1 else ()

    def _part(self, starts: Tensor, first: int, last: int, longest: int) -> Batch:
        """The sequences first .. last-1, with at most `longest` queries each. Padding rows go to the last sequences."""
        counts, before = starts[first : last + 1].diff(), int(starts[first])
        tokens = self.num_tokens if last == len(starts) - 1 else int(starts[last])
        totals = self.cu_seqlens_q[first : last + 1]
        part = replace(
            self, num_tokens=tokens - before, cu_seqlens_q=totals - before if first else totals,
            max_seqlen_q=longest if int(counts.max()) > 1 else 1, seqlens_k=self.seqlens_k[first:last],
            block_table=self.block_table[first:last], shared_prefix=None,
        )  # fmt: skip
        # A row of padding is not the query of a sequence that has none.
        part.is_decode = part.is_decode and int(counts.min()) == 1
        return part

    def add_spans(
        self, spans: Mapping[int, Sequence[tuple[int, int]]], starts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Let the tokens of each span, from its first to its last, see each other in both directions: an image.

        `spans` are those of each sequence, by its number; `starts` and `lengths` are cu_seqlens_q and seqlens_k in host
        memory. A span changes nothing unless one of the step's queries is in it. Sequences with such spans are attended
        in a call of their own, with a mask.
        """
        assert self.page_size
        assert self.causal
        found = {}
        for n, ranges in spans.items():
            before = lengths[n] - (starts[n + 1] - starts[n])
            found[n] = [
                (first, last) for first, last in ranges if first < last and before <= last and first < lengths[n]
            ]
        chosen = [n for n, ranges in found.items() if ranges and starts[n] < starts[n + 1]]
        if not chosen:
            return
        device, most = self.seqlens_k.device, max(len(found[n]) for n in chosen)
        index = torch.tensor(chosen, device=device)
        counts = torch.tensor([starts[n + 1] - starts[n] for n in chosen], device="cpu")
        rows = torch.cat([torch.arange(starts[n], starts[n + 1], device=device) for n in chosen])
        padded = torch.tensor([found[n] + [(0, -1)] * (most - len(found[n])) for n in chosen], device=device)
        pages = -(-max(lengths[n] for n in chosen) // self.page_size)
        part = replace(
            self,
            num_tokens=len(rows),
            cu_seqlens_q=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int().to(device),
            max_seqlen_q=int(counts.max()),
            seqlens_k=self.seqlens_k[index],
            block_table=self.block_table[index, :pages],
            causal=False,
        )
        rest = None
        if len(rows) < self.num_tokens:
            # The call for the rest gives sequences without keys zeros, which the call for spans overwrites.
            rest = replace(self, seqlens_k=self.seqlens_k.index_fill(0, index, 0))
        self.spans = Spans(rows, part, rest, padded)


@dataclass
class Spans:
    """The sequences of a step with tokens that see each other in both directions: their query `rows`, the `batch` of
    them alone, the step without them (None if there are no others), and the `ranges` (first, last) of each.
    """

    rows: Tensor
    batch: Batch
    rest: Batch | None
    ranges: Tensor
    masks: dict[tuple[int | None, bool], TileMask] = field(default_factory=dict)

    def mask(self, left: int | None, is_clamped: bool) -> TileMask:
        """Keys up to the query's own, the `left` ones before it and no others if it is given, and those of the query's
        span: all of them, or, if `is_clamped`, none further back than `left`.
        """
        if (left, is_clamped) not in self.masks:
            batch, ranges = self.batch, self.ranges[:, None, None]
            assert batch.page_size
            position = torch.arange(batch.max_seqlen_q, device=ranges.device)
            before = batch.seqlens_k - batch.cu_seqlens_q.diff()
            position = (position + before[:, None])[:, None, :, None]
            first, last = ranges.unbind(-1)
            inside = (first <= position) & (position <= last)
            # A query sees one interval: its window and its spans all contain its own position.
            starts = torch.zeros_like(position) if left is None else (position - left).clamp_min(0)
            if not is_clamped:
                starts = torch.minimum(starts, torch.where(inside, first, position).amin(-1, keepdim=True))
            ends = torch.where(inside, last, position).amax(-1, keepdim=True) + 1
            keys = batch.block_table.shape[1] * batch.page_size
            self.masks[left, is_clamped] = TileMask.from_intervals(starts, ends, keys)
        return self.masks[left, is_clamped]


class _Pages(NamedTuple):
    """The views of a cache: `written` takes new rows, as bytes of e4m3 codes, `attended` is what attention reads,
    `scales` are those of 8 bits.
    """

    written: tuple[Tensor, Tensor]
    attended: tuple[Pages, Pages]
    scales: tuple[Tensor, ...]
    row_shapes: tuple[torch.Size, ...]
    page_size: int


class Layer:
    """One attention layer of a model, with what never changes between steps."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scale: float,
        num_kv_heads: int,
        *,
        alibi_slopes: Sequence[float] | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        is_e4m3: bool = False,
        is_int8: bool = False,
        role: Role = "decoder",
        latent_values: int | None = None,
    ) -> None:
        """`window` counts the keys that a query sees, itself included. A cache in e4m3 has scales, given per call; one
        in int8 holds its own. `latent_values`: the cache holds latents, and so many of their `head_dim` columns are V.
        """
        most = MAX_HEAD_DIM_V if latent_values is None else MAX_HEAD_DIM
        if not 1 <= head_dim <= most:
            raise Unsupported(f"head_dim {head_dim}: tilewise takes 1 to {most}")
        if latent_values is not None and not 1 <= latent_values <= min(MAX_HEAD_DIM_V, head_dim - 1):
            raise Unsupported(f"latents of {head_dim} columns, {latent_values} of them V: at most {MAX_HEAD_DIM_V} are")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            fix = "Each K/V head serves the same number of query heads."
            raise InvalidProblem("num_heads", f"a multiple of num_kv_heads = {num_kv_heads}", num_heads, fix)
        if window is not None and window < 1:
            raise InvalidProblem("window", "at least 1 key", window, "Pass None for a layer without a window.")
        if (is_e4m3 or is_int8) and role == "encoder":
            raise Unsupported("an encoder layer has no cache; its keys and values are not stored in 8 bits")
        if is_int8 and (is_e4m3 or latent_values is not None):
            raise Unsupported("an int8 cache holds keys and values of their own, not latents or e4m3")
        self.num_heads, self.head_dim, self.num_kv_heads = num_heads, head_dim, num_kv_heads
        self.role, self.is_e4m3, self.is_int8, self.latent_values = role, is_e4m3, is_int8, latent_values
        self._flags: dict[str, Any] = {
            "softcap": float(softcap) if softcap else None,
            "scale": float(scale),
            "sinks": sinks,
        }
        self._slopes = None if alibi_slopes is None else [float(slope) for slope in alibi_slopes]
        self._alibi: Tensor | None = None
        left = None if window is None else window - 1
        self._windows = {True: None if left is None else (left, 0), False: None if left is None else (left, left)}
        self._seen: _Pages | None = None
        self._memory: Memory = []

    def pages(self, kv_cache: Cache, k_scale: Tensor | None = None, v_scale: Tensor | None = None) -> _Pages:
        """The views of a cache that `write` and `attend` use."""
        k, v = kv_cache if isinstance(kv_cache, tuple) else self._apart(kv_cache)
        if k.dtype != v.dtype:
            raise InvalidProblem("kv_cache", f"values in the dtype of keys, {k.dtype}", v.dtype, "Store both alike.")
        attended: tuple[Pages, Pages] = (k, v)
        scales: tuple[Tensor, ...] = ()
        if self.is_e4m3:
            if k_scale is None or v_scale is None:
                fix = "Pass the layer's scales."
                raise InvalidProblem("k_scale, v_scale", "the scales of an e4m3 cache", None, fix)
            k, v = k.view(E4M3), v.view(E4M3)
            attended, scales = (self._scaled(k, k_scale), self._scaled(v, v_scale)), (k_scale, v_scale)
        if self.is_int8:
            assert isinstance(kv_cache, Tensor)
            scales = kv_cache.view(torch.float32)[..., -2:].unbind(-1)
            k_tokens, v_tokens = (
                Fp8Tensor(t, scale, "token", "paged", 1) for t, scale in zip((k, v), scales, strict=True)
            )
            attended = k_tokens, v_tokens
        # New rows of latents come in two parts, those past V as k.
        rows = (k if self.latent_values is None else k[..., self.latent_values :], v)
        written = (rows[0].view(torch.uint8), v.view(torch.uint8)) if self.is_e4m3 else rows
        row_shapes = tuple(pages.shape[2:] for pages in rows)
        return _Pages(written, attended, scales, row_shapes, k.shape[1])

    def _apart(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a tensor that has both."""
        if self.latent_values is not None:
            if kv_cache.dim() != 3 or kv_cache.shape[2] != self.head_dim:
                expected = f"(num_pages, page_size, {self.head_dim})"
                raise InvalidProblem("kv_cache", expected, tuple(kv_cache.shape), "A latent serves all heads.")
            rows = kv_cache[:, :, None]
            return rows, rows[..., : self.latent_values]
        if self.is_int8:
            cell = (self.num_kv_heads, int8_cell(self.head_dim, self.head_dim))
            if kv_cache.dtype != torch.int8 or kv_cache.dim() != 4 or kv_cache.shape[1::2] != cell:
                expected = f"int8 (num_pages, {cell[0]}, page_size, {cell[1]})"
                got = f"{kv_cache.dtype} {tuple(kv_cache.shape)}"
                raise InvalidProblem("kv_cache", expected, got, "A cell holds keys, values and their scales.")
            rows = kv_cache.transpose(1, 2)
            return rows[..., : self.head_dim], rows[..., self.head_dim : 2 * self.head_dim]
        if kv_cache.dim() != 4 or kv_cache.shape[1] != self.num_kv_heads or kv_cache.shape[3] <= self.head_dim:
            expected = f"(num_pages, {self.num_kv_heads}, page_size, {self.head_dim} + the head dim of V)"
            raise InvalidProblem("kv_cache", expected, tuple(kv_cache.shape), "Keys and values lie next to each other.")
        rows = kv_cache.transpose(1, 2)
        return rows[..., : self.head_dim], rows[..., self.head_dim :]

    def _scaled(self, pages: Tensor, scale: Tensor) -> Fp8Tensor:
        """Pages with one scale for the layer, or one per K/V head; not copied, so later updates in place are seen."""
        if scale.numel() not in (1, self.num_kv_heads):
            expected = f"one scale, or one for each of {counted(self.num_kv_heads, 'K/V head')}"
            raise InvalidProblem("k_scale, v_scale", expected, tuple(scale.shape), "Quantise per tensor or per head.")
        shape = (len(pages), self.num_kv_heads, 1)
        return Fp8Tensor(pages, scale.reshape(1, -1, 1).expand(shape), "page", "paged")

    def _of(self, kv_cache: Cache, k_scale: Tensor | None = None, v_scale: Tensor | None = None) -> _Pages:
        """`pages`, remembered while the cache and its scales have the same memory, which the views keep allocated."""
        if self.is_e4m3 or isinstance(kv_cache, tuple):
            memory = memory_of(*(kv_cache if isinstance(kv_cache, tuple) else (kv_cache,)), k_scale, v_scale)
        else:  # written out, because each layer asks twice in each step
            memory = [(kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride(), kv_cache.dtype)]
        if self._seen is None or self._memory != memory:
            self._seen, self._memory = self.pages(kv_cache, k_scale, v_scale), memory
        return self._seen

    def write(self, k: Tensor, v: Tensor, kv_cache: Cache, slots: Tensor, *scales: Tensor) -> None:
        """Store rows of k and v (tokens, num_kv_heads, dim) in their slots. Rows past the slots are padding."""
        pages = self._of(kv_cache, *scales)
        rows, count, dtype = k.shape[0], slots.shape[0], pages.written[0].dtype
        for name, given, shape in (("k", k, pages.row_shapes[0]), ("v", v, pages.row_shapes[1])):
            if given.shape != (rows, *shape):
                expected = f"({counted(rows, 'token')}, {shape[0]}, {shape[1]})"
                raise InvalidProblem(name, expected, tuple(given.shape), "Rows have the heads of the cache.")
            if self.is_int8 and given.dtype not in DTYPES:
                raise InvalidProblem(name, "float16, bfloat16 or float32", given.dtype, "They are quantised here.")
            if given.dtype != dtype and not (self.is_e4m3 or self.is_int8):
                raise InvalidProblem(name, f"the dtype of the cache, {dtype}", given.dtype, "Convert the rows.")
        if rows != count:
            if rows < count:
                raise InvalidProblem(
                    "slots", f"one for each of {counted(rows, 'row')} of k", count, "Cut the padding off."
                )
            k, v = k[:count], v[:count]
        if self.is_int8:
            if slots.dtype != torch.int64:
                raise InvalidProblem("slots", "an int64 tensor", slots.dtype, "Convert it with .long().")
            k_scale, v_scale = pages.scales
            append_quantised(QuantisedRows(k, v, *pages.written, k_scale, v_scale, slots))
            return
        if self.is_e4m3:
            if not count:
                return
            k, v = (_encoded(rows, scale) for rows, scale in zip((k, v), pages.scales, strict=True))
        write_rows(k, v, *pages.written, slots)

    def attend(
        self,
        q: Tensor,
        kv_cache: Cache,
        batch: Batch,
        out: Tensor,
        *scales: Tensor,
        mask: TileMask | None = None,
        clamps_spans: bool = False,
    ) -> None:
        """Attention of the step's queries (tokens, num_heads, head_dim) to the pages, written into `out`.

        `mask` replaces the layer's window. With `clamps_spans`, the window also ends what tokens of a span see.
        """
        if batch.spans is not None and self.role == "decoder":
            self._attend_spans(q, kv_cache, batch.spans, out, *scales, is_clamped=clamps_spans)
            return
        if batch.parts:
            self._attend_parts(q, kv_cache, batch.parts, out, *scales)
            return
        pages = self._of(kv_cache, *scales)
        k, v = pages.attended
        if batch.page_size is not None and batch.page_size != pages.page_size:
            fix = "The block table counts pages of another size."
            raise InvalidProblem("kv_cache", f"pages of {counted(batch.page_size, 'row')}", pages.page_size, fix)
        count, causal = batch.num_tokens, batch.causal and self.role == "decoder"
        if q.shape[0] != count:
            q, out = q[:count], out[:count]
        if out.dim() != 3:
            out = out.view(count, q.shape[1], v.shape[-1])
        packed, longest = (None, None) if batch.is_decode else (batch.cu_seqlens_q, batch.max_seqlen_q)
        attention_paged(
            *(q, k, v, batch.block_table, batch.seqlens_k),
            cu_seqlens_q=packed,
            max_seqlen_q=longest,
            shared_prefix=batch.shared_prefix,
            causal=causal,
            window=self._windows[causal] if mask is None else None,
            mask=mask,
            alibi_slopes=None if self._slopes is None else self._alibi_on(q.device),
            out=out,
            **self._flags,
        )

    def _attend_parts(self, q: Tensor, kv_cache: Cache, parts: Sequence[Batch], out: Tensor, *scales: Tensor) -> None:
        """Attend to the parts of a batch, whose rows follow each other."""
        first = 0
        for part in parts:
            rows = slice(first, first + part.num_tokens)
            self.attend(q[rows], kv_cache, part, out[rows], *scales)
            first += part.num_tokens

    def _attend_spans(
        self, q: Tensor, kv_cache: Cache, spans: Spans, out: Tensor, *scales: Tensor, is_clamped: bool
    ) -> None:
        """Attend to sequences without spans first, then, with a mask, to those with spans."""
        if spans.rest is not None:
            self.attend(q, kv_cache, spans.rest, out, *scales)
        window = self._windows[True]
        mask = spans.mask(None if window is None else window[0], is_clamped)
        found = out.new_empty((len(spans.rows), *out.shape[1:]))
        self.attend(q[spans.rows], kv_cache, spans.batch, found, *scales, mask=mask)
        out[spans.rows] = found

    def attend_unpaged(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, out: Tensor) -> None:
        """Attention within the step's own sequences, in both directions, without a cache: for encoders."""
        count = batch.num_tokens
        totals, longest = batch.cu_seqlens_q, batch.max_seqlen_q
        attention_varlen(
            *(q[:count], k[:count], v[:count], totals, totals),
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            window=self._windows[False],
            alibi_slopes=self._alibi_on(q.device),
            out=out[:count].view(count, q.shape[1], v.shape[-1]),
            **self._flags,
        )

    def _alibi_on(self, device: torch.device) -> Tensor | None:
        if self._slopes is None:
            return None
        if self._alibi is None or self._alibi.device != device:
            self._alibi = torch.tensor(self._slopes, dtype=torch.float32, device=device)
        return self._alibi


def memory_of(*tensors: Tensor | None) -> Memory:
    """The memory that tensors have now. A tensor may get another: by `.data = `, `set_` or `as_strided_`."""
    return [None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]


def int8_cell(head_dim: int, head_dim_v: int) -> int:
    """Bytes of a token and head in an int8 cache: keys, values, unused ones, and two scales."""
    return -(-(head_dim + head_dim_v + 2 * SCALE_BYTES) // CELL_BYTES) * CELL_BYTES


def _encoded(rows: Tensor, scale: Tensor) -> Tensor:
    """e4m3 codes of rows / scale, as bytes; values beyond 448 * scale saturate."""
    given = scale.reshape(1, -1, 1)
    return quantize(rows[None], granularity="head", layout="bshd", scale=given).data[0].view(torch.uint8)
