"""`PagedKVCache`: keys and values of many requests in one pool of pages, shared where their prefixes are equal.

One step of a batch is three calls: `step` reserves slots for the new tokens, `append` writes the K and V of one layer,
`attention` reads them.

    cache = PagedKVCache(num_pages, 64, num_layers, num_kv_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    request = cache.add(prompt)
    cache.step([request])                            # the part of the prompt that is not cached yet
    for layer in range(num_layers):
        q, k, v = ...                                # packed rows of the step's tokens
        cache.append(k, v, layer=layer)
        out = cache.attention(q, layer=layer)
    cache.step([request], tokens=[next_token])       # and so on, one token a step
    cache.free(request)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise import derivatives
from tilewise.api import attention_paged
from tilewise.backends.base import QuantisedRows
from tilewise.cascade import SharedPrefix
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.fp8.container import Fp8Tensor
from tilewise.kv.book import CacheStats, PageBook, Step, Undo, sizes_of, within
from tilewise.kv.groups import PrefixGroups
from tilewise.kv.quantised import SOURCES, append_quantised, new_scales
from tilewise.kv.rotated import append_rotated
from tilewise.kv.tables import BatchTables, HostTables, StagedTables, Tables
from tilewise.kv.writing import copy_pages, write_rows
from tilewise.memory import LOWEST, check_allocated
from tilewise.problem import MAX_HEAD_DIM, MAX_HEAD_DIM_V
from tilewise.subclasses import check_class
from tilewise.units import counted

if TYPE_CHECKING:
    from tilewise.plan import Plan

__all__ = ["PagedKVCache"]

Tokens = Sequence[int] | Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int8)
# Arguments of attention_paged that the cache passes itself.
OWN = ("k_pages", "v_pages", "block_table", "seqlens_k", "cu_seqlens_q", "max_seqlen_q", "shared_prefix")


@dataclass(slots=True, eq=False)
class _Running:
    """The step that runs, its tensors, and how far it is."""

    step: Step
    batch: BatchTables
    # Until the step is complete.
    undo: Undo | None
    # The layers that are appended.
    written: set[int] = field(default_factory=set)
    # The layer that is being appended to e4m3 pages, and after an interrupt was: its pages may be half rescaled.
    rescaled: int | None = None
    # Found when first needed: once per step, not once per layer.
    shared: SharedPrefix | None = None
    looked: bool = False


class PagedKVCache:
    """Pages of K and V for every layer, with the requests that hold them.

    A request is a number that `add` returns. Pages are taken when tokens come and go back when the request is freed;
    full pages of equal prefixes are stored once; `fork` shares all pages and copies one when it is written to. Every
    method either does all it is asked or raises (`InvalidProblem`, `OutOfPages`) and leaves the cache unchanged, also
    if it is interrupted. A cache is used by one thread at a time.
    `max_seqlen` bounds a request (default: the whole pool), `head_dim_v` is `head_dim` unless given. With
    `dtype=torch.float8_e4m3fn` rows are quantised as they are appended, with one scale for each (page, head), with
    `torch.int8` with one for each (token, head).
    With `latent=True` a page holds one row of `head_dim` columns for K and V together: V is the first `head_dim_v` of
    them (512 of DeepSeek's 576), and `append` takes the other columns as its k and these as its v.
    `max_requests` gives every request a fixed row ("seat") and allocates the tables once, (max_requests, max_seqlen /
    page_size): steps with `fixed=True` then use the same tensors every time, for CUDA graphs.

        >>> cache = PagedKVCache(8, 4, 1, 2, 16, dtype=torch.float32, device="cpu")
        >>> request = cache.add([1, 2, 3, 4, 5])
        >>> cache.step([request])
        5
        >>> cache.append(torch.ones(5, 2, 16), torch.ones(5, 2, 16))
        >>> cache.attention(torch.ones(5, 2, 16)).shape
        torch.Size([5, 2, 16])
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        head_dim_v: int | None = None,
        latent: bool = False,
        max_seqlen: int | None = None,
        max_requests: int | None = None,
        prefix_sharing: bool = True,
    ) -> None:
        width_v = head_dim if head_dim_v is None else head_dim_v
        num_layers, num_kv_heads, head_dim, width_v = sizes_of(
            num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, head_dim_v=width_v
        )
        for name, width, most in (("head_dim", head_dim, MAX_HEAD_DIM), ("head_dim_v", width_v, MAX_HEAD_DIM_V)):
            if width > most:
                raise InvalidProblem(name, f"at most {most}", width, "Attention takes no wider heads.")
        if not isinstance(latent, bool):
            raise InvalidProblem("latent", "True or False", repr(latent), "head_dim_v= says how many columns are V.")
        if latent and width_v >= head_dim:
            fix = "Give the columns of V in head_dim_v=, and those of the whole row in head_dim."
            raise InvalidProblem("head_dim_v", f"less than head_dim = {head_dim} of a latent", width_v, fix)
        if latent and dtype == torch.int8:
            raise Unsupported("latents are not stored in int8; use dtype=torch.float8_e4m3fn or a wider one")
        if dtype not in DTYPES:
            expected = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
            raise InvalidProblem("dtype", f"one of {expected}", dtype, "Pages hold what attention reads.")
        self.book = PageBook(
            num_pages, page_size, max_seqlen=max_seqlen, max_requests=max_requests, prefix_sharing=prefix_sharing
        )
        shape = (num_layers, self.book.pages.num_pages, self.book.page_size, num_kv_heads)
        self.latent = latent
        # Scales of 8-bit pages, see new_scales: of K and of V, or of latents.
        self._scales: tuple[Tensor, ...] = ()
        # Inference tensors could only be written in inference mode.
        with torch.inference_mode(False):
            self.k = torch.empty((*shape, head_dim), dtype=dtype, device=device)
            self.v = self.k[..., :width_v] if latent else torch.empty((*shape, width_v), dtype=dtype, device=device)
            if dtype in (torch.float8_e4m3fn, torch.int8):
                rows = self.book.page_size if dtype == torch.int8 else None
                self._scales = tuple(
                    new_scales(num_layers, shape[1], num_kv_heads, self.device, rows) for _ in self._stored
                )
        self._tables: Tables = (HostTables if self.device.type == "cpu" else StagedTables)(self.book, self.device)
        self._groups = PrefixGroups()
        self._now: _Running | None = None

    def __repr__(self) -> str:
        layers, pages, page_size, heads, head_dim = self.k.shape
        columns = f"{head_dim} (latents)" if self.latent else head_dim
        pool = f"{counted(pages, 'page')} of {counted(page_size, 'token')}"
        sizes = f"{pool}, {counted(layers, 'layer')} of {heads} x {columns}"
        requests = counted(self.book.num_requests, "request")
        held = f"{counted(self.book.pages.held, 'page')} held by {requests}"
        return f"<PagedKVCache: {sizes}, {self.k.dtype} on {self.device}; {held}>"

    def __getstate__(self) -> dict[str, Any]:
        if (now := self._last()) is not None:
            now.undo = None
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.latent:  # pickle gives every tensor memory of its own
            self.v = self.k[..., : self.v.shape[-1]]

    @property
    def _stored(self) -> tuple[Tensor, ...]:
        """The tensors that have memory of their own."""
        return (self.k,) if self.latent else (self.k, self.v)

    # Requests

    def add(self, tokens: Tokens) -> int:
        """A new request with its prompt; returns its number. Cached pages of the prompt are shared at once.

        No new page is taken yet. `length` says how many tokens were found; at least the last one is always left to
        compute.
        """
        return self.book.add(_listed(tokens))

    def reuse(self, request: int) -> int:
        """Look again for cached pages of a waiting request's prompt; returns the tokens it has now."""
        return self.book.reuse(request)

    def fork(self, request: int) -> int:
        """Another request with the same tokens over the same pages, for beams and parallel samples."""
        self._refuse_unwritten(request)
        return self.book.fork(request)

    def truncate(self, request: int, length: int) -> None:
        """Drop the tokens of a request past `length`, such as rejected drafts."""
        self._refuse_unwritten(request)
        self.book.truncate(request, length)

    def free(self, request: int) -> None:
        """Finish a request. Its pages can be taken at once, and can be found by their prefix until they are."""
        self.book.free(request)

    def requests(self) -> list[int]:
        """The active requests. After an interrupt, one that `add` or `fork` could not return any more may be there."""
        return self.book.requests()

    def seats(self, requests: Sequence[int]) -> list[int]:
        """The rows of requests in fixed steps. A request keeps its seat from `add` or `fork` to `free`."""
        return [self.book.row(request) for request in requests]

    def length(self, request: int) -> int:
        """Tokens of a request in the cache, those of the running step included."""
        return self.book.length(request)

    def pending(self, request: int) -> int:
        """Tokens of a request's prompt that are still to come."""
        return self.book.pending(request)

    # A step

    def step(
        self,
        requests: Sequence[int],
        counts: Sequence[int] | None = None,
        *,
        tokens: Sequence[int | None] | Tensor | None = None,
        fixed: bool = False,
    ) -> int:
        """Reserve slots for the next tokens of a batch; returns how many rows q, k and v of this step have.

        `counts[i]` tokens of requests[i] come next: tokens of its prompt while that is not done (a chunk of it), then
        new ones. Default: the rest of the prompt, or one token. `tokens[i]` is the id of a new token, None for a
        request whose prompt continues; without ids, other requests cannot find the pages of new tokens. Prompts and
        single tokens may be mixed. Raises OutOfPages before anything is changed if the pages do not suffice.

        A `fixed` step has one token for each of its requests and one row for every seat (`seats(requests)`). The rows
        of other seats are ignored: they are not written, and their `out` is 0. All fixed steps use the same tensors, so
        `append` and `attention` can be captured in a CUDA graph and replayed; after a replay call `mark_written`, which
        does the bookkeeping of `append`. Fixed steps treat shared prefixes like any keys.
        """
        self._refuse_unwritten(None)
        if min(map(Tensor.data_ptr, (*self._stored, *self._scales))) < LOWEST:
            self._refuse_freed()
        other = isinstance(requests, (str, bytes, Tensor)) or getattr(requests, "ndim", 1) != 1
        if other or not isinstance(requests, Collection):
            fix = "Pass what add() returned, in a list."
            raise InvalidProblem("requests", "a list of request numbers", repr(requests), fix)
        tokens = _listed(tokens) if isinstance(tokens, Tensor) else tokens
        # The tensors of the step before may change from here on.
        self._now = None
        step = self.book.begin(requests, self._fixed_counts(requests, counts) if fixed else counts, tokens)
        self._groups.follow(step, self.book.page_size)
        if step.copies:
            self._copy(step.copies)
        batch = self._tables.fixed(step) if fixed else self._tables.batch(step)
        self._now = _Running(step, batch, self.book.undo, looked=fixed)
        self.book.undo = None
        self._now.undo = None
        return len(batch.slots)

    def append(self, k: Tensor, v: Tensor, *, layer: int = 0) -> None:
        """Write one layer's K and V of the step: (rows, num_kv_heads, dim), packed in the order of its requests.

        Of latents, v is the first `head_dim_v` columns and k the others.
        Rows of a request that was freed in the meantime are still expected; a step without any request left is refused.
        Once every layer is written, a layer may be written again (to warm up, or after an error), also under graph
        capture, as long as its pages belong to their requests alone.
        """
        now, layer = self._ready(layer, k, v)
        slots = now.batch.slots
        if not self._scales:
            write_rows(k, v, *self._targets(layer), slots)
        else:
            latents = torch.cat((v, k), -1) if self.latent else None
            rows = self._quantised(k, v, layer, slots) if latents is None else self._latents(latents, layer, slots)
            with self._rescaling(now, layer):
                append_quantised(rows)
        self._note_written(now, layer)

    def append_rotated(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        *,
        layer: int = 0,
        interleaved: bool = False,
        norm_eps: float | None = None,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`append` with k normalised and rotated; returns q likewise. See `tilewise.kv.append_rotated`.

        Of latents, q too is only the columns past `head_dim_v`.
        """
        now, layer = self._ready(layer, k, v)
        targets, places = self._targets(layer), now.batch.slots
        k_scale = v_scale = new = None
        if self._scales and self.latent:
            # Both parts share a scale, so the rows are put together in fp32 before they are quantised.
            new = torch.empty((len(k), 1, *self.k.shape[3:]), dtype=torch.float32, device=self.device)
            targets, places = self._parts(new), torch.arange(len(k), device=self.device)
        elif self._scales:
            k_scale, v_scale = self._of_layer(self._scales, layer)
        with self._rescaling(now, layer):
            turned = append_rotated(
                q,
                k,
                v,
                *targets,
                places,
                positions,
                cos_sin,
                interleaved=interleaved,
                norm_eps=norm_eps,
                q_weight=q_weight,
                k_weight=k_weight,
                k_scale=k_scale,
                v_scale=v_scale,
                out=out,
            )
            if new is not None:
                append_quantised(self._latents(new[:, 0], layer, now.batch.slots))
        self._note_written(now, layer)
        return turned

    def mark_written(self) -> None:
        """Tells the cache that a replayed graph appended every layer of the running step, on the current stream."""
        now = self._running()
        self._refuse_finished(now)
        now.written, now.rescaled = set(range(len(self.k))), None
        self.book.commit()

    def attention(self, q: Tensor, *, layer: int = 0, causal: bool = True, **flags: Any) -> Any:
        """`attention_paged` of the step's queries (rows, num_heads, head_dim) to one layer of their requests' pages.

        Takes the same flags and returns the same results. A prefix that several requests share is attended once where
        that is faster (see `explain`). `append` the step's K and V of the layer first. `deterministic="batch"` is
        refused: the longest prompt of a step and the width of its table are the batch's.
        """
        if flags.get("deterministic") == "batch":
            reason = "deterministic='batch' in a step of a cache, whose lengths are those of the batch"
            raise Unsupported(f"{reason}. Call attention_paged with a table and a max_seqlen_q that never change")
        layer = self._number(layer)
        k_pages, v_pages = self.attended(layer)
        now = self._running()
        self._refuse_torn(now)
        if layer not in now.written and not self._capturing():
            fix = f"Call append(k, v, layer={layer}) before."
            raise InvalidProblem("layer", "one whose K and V of this step are appended", layer, fix)
        return attention_paged(
            q, k_pages, v_pages, self.block_table(), self.seqlens(), causal=causal, **self._batch_flags(flags), **flags
        )

    def explain(self, q: Tensor, *, layer: int = 0, causal: bool = True, **flags: Any) -> Plan:
        """What `attention` would do with the step."""
        from tilewise.plan import explain

        k_pages, v_pages = self.attended(layer)
        batch = {"block_table": self.block_table(), "seqlens_k": self.seqlens()} | self._batch_flags(flags)
        return explain(q, k_pages, v_pages, causal=causal, **batch, **flags)

    # Tensors

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.k.device

    @property
    def num_layers(self) -> int:
        """Layers that have pages of their own."""
        return len(self.k)

    @property
    def nbytes(self) -> int:
        """Memory of all pages, and of their scales if any."""
        return sum(tensor.nbytes for tensor in (*self._stored, *self._scales))

    def pages(self, layer: int = 0) -> tuple[Tensor, Tensor]:
        """K and V of a layer: (num_pages, page_size, num_kv_heads, dim), to be read in place. Of latents, V is a view
        of K.
        """
        k, v = self._of_layer((self.k, self.v), self._number(layer))
        return k, v

    def attended(self, layer: int = 0) -> tuple[Tensor | Fp8Tensor, Tensor | Fp8Tensor]:
        """K and V of a layer as `attention_paged` takes them: 8-bit pages with their scales."""
        k_pages, v_pages = self.pages(layer)
        if not self._scales:
            return k_pages, v_pages
        scales = self._of_layer(self._scales, layer)
        if k_pages.dtype == torch.int8:
            k_tokens = Fp8Tensor(k_pages, scales[0], "token", "paged", block=1)
            return k_tokens, Fp8Tensor(v_pages, scales[1], "token", "paged", block=1)
        k = Fp8Tensor(k_pages, scales[0][..., None], "page", "paged")
        if self.latent:
            return k, k.first_columns(v_pages.shape[-1])
        return k, Fp8Tensor(v_pages, scales[1][..., None], "page", "paged")

    def block_table(self) -> Tensor:
        """int32 (batch, columns) on the device: the pages of the step's requests, of a fixed step (seats, columns).

        Later steps may return the same tensor, unless a user wrote to it in a way that torch counts: an edit stays in
        its step.
        """
        return self._running().batch.block_table

    def seqlens(self) -> Tensor:
        """int32 (batch,) on the device: tokens of the step's requests, the new ones included."""
        return self._running().batch.seqlens_k

    def cu_seqlens_q(self) -> Tensor | None:
        """int32 (batch + 1,) on the device: running totals of the step's rows; None where each request has one row."""
        return self._running().batch.cu_seqlens_q

    def slots(self) -> Tensor:
        """int64 (rows,) on the device: the slot of each row of the step, through all pages; -1 for unused seats."""
        return self._running().batch.slots

    def shared_prefix(self) -> SharedPrefix | None:
        """The requests of the step that start with the same pages, for `attention_paged`; None if there are none.

        Later steps may return the same tensors, unless a user wrote to them.
        """
        now = self._running()
        if not now.looked:
            groups = self._groups.of(self.book.table, now.step, self.book.page_size)
            now.shared = self._tables.shared(now.step, groups) if groups else None
            now.looked = True
        return now.shared

    # Numbers

    def stats(self) -> CacheStats:
        """Pages, slots, hits: see `CacheStats`."""
        return self.book.stats()

    def available_pages(self) -> int:
        """Pages that could be taken now."""
        return self.book.available_pages()

    def pages_for(self, tokens: Tokens) -> int:
        """How many of the available pages a prompt would take, given the cached prefixes: for admission."""
        return self.book.pages_for(_listed(tokens))

    # Inside

    def _number(self, layer: int) -> int:
        if (number := within(layer, len(self.k) - 1)) is None:
            expected = f"an integer between 0 and {len(self.k) - 1}"
            raise InvalidProblem("layer", expected, repr(layer), "Layers are counted from 0.")
        return number

    def _last(self) -> _Running | None:
        """The step that runs, if there is one and it was not undone."""
        self.book.settle()
        if self._now is not None and self._now.undo is not None and self._now.undo.was_undone:
            self._now = None
        return self._now

    def _running(self) -> _Running:
        if (now := self._last()) is None:
            raise InvalidProblem("step", "a step() before its tensors are asked for", None, "Call step(requests).")
        return now

    def _capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _fixed_counts(self, requests: Sequence[int], counts: Sequence[int] | None) -> list[int]:
        if self.book.rows.max_requests is None:
            fix = "Make the cache with max_requests=."
            raise InvalidProblem("fixed", "False, because the cache has no seats", True, fix)
        given: Any = counts
        if given is not None and not (isinstance(given, Collection) and all(count == 1 for count in given)):
            fix = "Prompts take ordinary steps, or one token a step."
            raise InvalidProblem("counts", "None or ones in a fixed step", counts, fix)
        return [1] * len(requests)

    def _batch_flags(self, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments that describe the step. Refuse `given` flags that the cache passes itself."""
        for name in OWN:
            if name in given:
                raise InvalidProblem(name, "no argument here", "one", "The cache passes that of its step.")
        flags: dict[str, Any] = {"shared_prefix": self.shared_prefix()}
        if self.cu_seqlens_q() is not None:
            flags |= {"cu_seqlens_q": self.cu_seqlens_q(), "max_seqlen_q": int(self._running().step.counts.max())}
        return flags

    def _refuse_unwritten(self, only: int | None) -> None:
        """Refuse if a step was never written: its requests (or the `only` one) would read uninitialised slots."""
        now = self._last()
        if now is None or (len(now.written) == len(self.k) and now.rescaled is None):
            return
        waiting = [request for request in now.step.requests if request in self.book and only in (None, request)]
        if waiting:
            self._refuse_torn(now)
            missing = sorted(set(range(len(self.k))) - now.written)
            fix = f"Append layers {missing}, or free request {waiting[0]}."
            raise InvalidProblem("step", "every layer of the step before appended", f"{len(missing)} missing", fix)

    def _refuse_torn(self, now: _Running) -> None:
        """Refuse if pages of a step may be half rescaled."""
        if now.rescaled is not None:
            got = f"one that was interrupted in layer {now.rescaled}, whose e4m3 pages may be half rescaled"
            fix = f"Free the requests of the step: {list(now.step.requests)}."
            raise InvalidProblem("step", "a step whose append() came to its end", got, fix)

    def _ready(self, layer: int, k: Tensor, v: Tensor) -> tuple[_Running, int]:
        """Check that these rows of a layer can be appended; returns the running step and the layer's number."""
        now, layer = self._running(), self._number(layer)
        self._refuse_finished(now)
        self._refuse_torn(now)
        for name, new, pages in zip(("k", "v"), (k, v), self._targets(layer), strict=True):
            self._check_rows(name, new, pages, len(now.batch.slots))
        if len(now.written) == len(self.k) and not self._capturing() and not self.book.owns(now.step):
            fix = "Call step(requests) for their next tokens, or truncate them first."
            raise InvalidProblem("layer", "one of a step whose pages nobody shares yet", f"{layer} once more", fix)
        return now, layer

    def _targets(self, layer: int) -> tuple[Tensor, Tensor]:
        """Where new rows of k and v go in the pages of a layer."""
        k, v = self._of_layer((self.k, self.v), layer)
        return self._parts(k) if self.latent else (k, v)

    def _parts(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of latents that `append` takes as k, and as v."""
        values = self.v.shape[-1]
        return latents[..., values:], latents[..., :values]

    def _quantised(self, k: Tensor, v: Tensor, layer: int, slots: Tensor) -> QuantisedRows:
        """Rows for the 8-bit pages of a layer."""
        (k_pages, v_pages), (k_scale, v_scale) = (self._of_layer(t, layer) for t in (self._stored, self._scales))
        return QuantisedRows(k, v, k_pages, v_pages, k_scale, v_scale, slots)

    def _latents(self, rows: Tensor, layer: int, slots: Tensor) -> QuantisedRows:
        (pages,), (scale,) = (self._of_layer(t, layer) for t in (self._stored, self._scales))
        return QuantisedRows(rows, None, pages, None, scale, None, slots)

    def _of_layer(self, tensors: Sequence[Tensor], layer: int) -> list[Tensor]:
        """A layer of each tensor. Torch makes no view of freed storage; its error names no tensor."""
        try:
            return [tensor[layer] for tensor in tensors]
        except RuntimeError:
            self._refuse_freed()
            raise

    def _rescaling(self, now: _Running, layer: int) -> _Rescaling:
        return _Rescaling(now, layer if self.k.dtype == torch.float8_e4m3fn else None)

    def _note_written(self, now: _Running, layer: int) -> None:
        if not self._capturing():
            now.written.add(layer)
            if len(now.written) == len(self.k):
                self.book.commit()

    def _refuse_freed(self) -> None:
        """Refuse if somebody freed the storage of pages or scales."""
        held = (*self._stored, *self._scales)
        sides = ("k",) if self.latent else ("k", "v")
        names = (*(f"PagedKVCache.{side}" for side in sides), *(f"the scales of PagedKVCache.{side}" for side in sides))
        check_allocated(names, held)

    def _refuse_finished(self, now: _Running) -> None:
        requests = now.step.requests
        if requests and not any(request in self.book for request in requests):
            raise InvalidProblem("step", "a step with a request that goes on", "all finished", "Call step(requests).")

    def _check_rows(self, name: str, new: Any, pages: Tensor, rows: int) -> None:
        expected = (rows, *pages.shape[2:])
        if not isinstance(new, Tensor) or (new.requires_grad and torch.is_grad_enabled()):
            got, fix = type(new).__name__, "Convert it with torch.as_tensor."
            if isinstance(new, Tensor):
                got, fix = "one that requires a gradient", "Write under torch.no_grad(): pages have none."
            raise InvalidProblem(name, "a tensor without gradient", got, fix)
        derivatives.refuse_tangents((new,))
        if new.is_nested or new.layout != torch.strided:
            raise InvalidProblem(name, "a dense tensor", "a nested or sparse one", "Pack its rows.")
        check_class(name, new)
        if tuple(new.shape) != expected:
            fix = "Pack the rows of the step's requests in their order."
            raise InvalidProblem(name, f"shape {expected}", tuple(new.shape), fix)
        if self._scales and new.dtype not in SOURCES:
            raise InvalidProblem(name, "float32, bfloat16 or float16, to be quantised", new.dtype, "Convert it first.")
        dtype = new.dtype if self._scales else pages.dtype
        for what, mine, theirs in (("dtype", dtype, new.dtype), ("device", pages.device, new.device)):
            if mine != theirs:
                raise InvalidProblem(name, f"{what} {mine} as the cache has", theirs, f"Convert it with .to({mine}).")

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        there = torch.tensor(copies, dtype=torch.int64, device="cpu", pin_memory=self.device.type == "cuda")
        source, target = there.to(self.device, non_blocking=True).unbind(1)
        for tensor in (*self._stored, *self._scales):
            copy_pages(tensor, source, target)


class _Rescaling:
    """While rows are appended to a layer of e4m3 pages: rows that are there are rescaled in several operations."""

    def __init__(self, now: _Running, layer: int | None) -> None:
        self.now, self.layer = now, layer

    def __enter__(self) -> None:
        self.now.rescaled = self.layer

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # What is refused was not begun.
        if kind is None or issubclass(kind, (InvalidProblem, Unsupported)):
            self.now.rescaled = None


def _listed(tokens: Tokens) -> Sequence[int]:
    if isinstance(tokens, Tensor):
        check_class("tokens", tokens)
        if tokens.dim() != 1 or tokens.is_floating_point():
            raise InvalidProblem("tokens", "a 1-D tensor of ids, or a list", tuple(tokens.shape), "One prompt a call.")
        listed: list[int] = tokens.tolist()
        return listed
    return tokens
