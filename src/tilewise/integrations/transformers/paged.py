"""Continuous batching: attention to transformers' PagedAttentionCache where it lies.

Two shapes of that cache are known: of release 5.17 (one tensor per layer of a group) and from 5.18 on (one
tensor for all, with an allocator per kind of layer). Both tell, for every step, the slots to write and, in order, the
slots to read; a slot divided by the page size is its page, so the table of pages is a slice of what is to be read.

Layers with a sliding window keep a ring of as many tokens as the window has. New tokens overwrite old ones that
earlier queries of the same step may still see, so these layers are read by the cache itself, before it writes: a copy
of at most window - 1 tokens a request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tilewise.api import attention_after, attention_paged, attention_varlen, refuse_rows
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.integrations.translation import Window

__all__ = ["Step", "attend_to_cache"]


@dataclasses.dataclass(frozen=True)
class Step:
    """What continuous batching says about one forward pass, under transformers' names.

    What concerns keys comes per kind of layer (a dictionary, or the value itself if there is one kind), indices and
    block tables per group of layers.
    """

    cu_seq_lens_q: Any
    cu_seq_lens_k: Any
    max_length_q: int
    max_length_k: Any
    read_index: list[Tensor]
    write_index: list[Tensor]
    block_table: Tensor | None
    sliding_window: int | None = None


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Where one layer's keys and values lie.

    `pages` (num_pages, page_size, num_kv_heads, head_dim), or None in a ring. `update` writes new keys and values
    (tokens, num_kv_heads, head_dim) and returns them with the older ones that are to be read.
    """

    kind: str
    group: int
    window: int | None
    write_trash: int
    pages: tuple[Tensor, Tensor] | None
    update: Callable[[Tensor, Tensor, Step], tuple[Tensor, Tensor]]


def attend_to_cache(
    layer_idx: int, query: Tensor, key: Tensor, value: Tensor, cache: Any, step: Step, flags: dict[str, Any]
) -> Tensor:
    """Store key and value (1, kv_heads, tokens, dim) in the cache and attend to it: (1, tokens, heads, dim)."""
    layer = (_layer_of_allocator if hasattr(cache, "layer_to_allocator") else _layer_of_group)(cache, layer_idx)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    head_dim_v = v.shape[-1]
    if layer.pages is not None and head_dim_v < layer.pages[1].shape[-1]:
        v = F.pad(v, (0, layer.pages[1].shape[-1] - head_dim_v))  # the cache has one width for keys and values
    if layer.pages is not None and k.shape[1:] != layer.pages[0].shape[2:]:
        fix = "transformers sizes pages by config.head_dim, which latent attention does not use. Call model.generate."
        raise InvalidProblem(
            "key", f"heads and columns of the pages, {tuple(layer.pages[0].shape[2:])}", tuple(k.shape[1:]), fix
        )
    window = _window(layer, step)
    reads = step.block_table is not None or step.read_index[layer.group].numel() > 0
    if layer.pages is not None and reads:
        out = _in_place(q, k, v, layer.pages, layer, step, flags | {"window": window})
    else:
        # The cache writes before it says what there is to read.
        flags, starts = flags | {"window": window}, step.cu_seq_lens_q.to(torch.int32)
        refuse_rows(q, k, v, starts, **flags)
        k, v = layer.update(k, v, step)
        ends, most = _of(step.cu_seq_lens_k, layer).to(torch.int32), _of(step.max_length_k, layer)
        flags |= {"causal": True, "max_seqlen_q": step.max_length_q, "max_seqlen_k": most}
        out = attention_varlen(q, k, v, starts, ends, **flags)
    return out[None, ..., :head_dim_v]


def _in_place(
    q: Tensor, k: Tensor, v: Tensor, pages: tuple[Tensor, Tensor], layer: _Layer, step: Step, flags: dict[str, Any]
) -> Tensor:
    """Write the new tokens, once the call is validated, then read all of them through a table of pages."""
    k_pages, v_pages = pages
    page_size = k_pages.shape[1]
    cu_seqlens_k = _of(step.cu_seq_lens_k, layer)
    seqlens_k = cu_seqlens_k.diff().to(torch.int32)
    if step.block_table is not None:
        block_table = step.block_table[layer.group].clamp_min(0)
        slots = _last_slots(block_table, seqlens_k, page_size, layer.write_trash)
    else:
        block_table = _block_table(step.read_index[layer.group], cu_seqlens_k, _of(step.max_length_k, layer), page_size)
        slots = step.write_index[layer.group]
    for name, new, kept in (("key", k, k_pages), ("value", v, v_pages)):
        shape = (len(slots), *kept.shape[2:])
        if new.shape != shape or new.dtype != kept.dtype:
            fix = "Make the cache for the model whose keys and values it keeps."
            expected = f"{shape} of {kept.dtype} for the slots"
            raise InvalidProblem(name, expected, f"{tuple(new.shape)}, {new.dtype}", fix)

    def write() -> None:
        # Views, never copies, which `flatten` would make of pages with gaps.
        k_pages.view(-1, *k_pages.shape[2:]).index_copy_(0, slots, k)
        v_pages.view(-1, *v_pages.shape[2:]).index_copy_(0, slots, v)

    sizes: dict[str, Any] = {"causal": True, "max_seqlen_q": step.max_length_q}
    where = {"block_table": block_table, "seqlens_k": seqlens_k, "cu_seqlens_q": step.cu_seq_lens_q.to(torch.int32)}
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, flags.get("sinks"))):
        refuse_rows(q, k, v, where["cu_seqlens_q"], **flags)
        write()
        out: Tensor = attention_paged(q, k_pages, v_pages, **where, **flags, **sizes)
        return out
    return attention_after(write, "paged", (q, k_pages, v_pages), **where, **flags, **sizes)[0]


def _block_table(read_index: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int, page_size: int) -> Tensor:
    """The page of every page_size-th slot to read, (batch, max_pages); past a sequence's end any page that exists."""
    firsts = torch.arange(0, max_seqlen_k, page_size, device=read_index.device)
    places = (cu_seqlens_k[:-1, None] + firsts).clamp_max(read_index.numel() - 1)
    return (read_index[places] // page_size).to(torch.int32)


def _last_slots(block_table: Tensor, seqlens_k: Tensor, page_size: int, write_trash: int) -> Tensor:
    """Where each sequence's newest token goes; those without a token only fill up the batch and go to the trash."""
    last = seqlens_k.long() - 1
    page = block_table.gather(1, (last.clamp_min(0) // page_size)[:, None])[:, 0]
    return torch.where(last < 0, write_trash, page * page_size + last % page_size)


def _window(layer: _Layer, step: Step) -> Window | None:
    """The model's window or the cache's; two that differ cannot both be right."""
    sizes = {size for size in (layer.window, step.sliding_window) if size is not None}
    if len(sizes) > 1:
        what = f"the model's window, {step.sliding_window}, and the cache's, {layer.window}, differ"
        raise Unsupported(f"{what}; transformers sizes its rings by config.sliding_window")
    return (sizes.pop() - 1, 0) if sizes else None


def _of(value: Any, layer: _Layer) -> Any:
    return value[layer.kind] if isinstance(value, dict) else value


def _layer_of_allocator(cache: Any, layer_idx: int) -> _Layer:
    """From release 5.18 on, whose allocators do not say their kind of layer and take rows as models have them."""
    allocator = cache.layer_to_allocator[layer_idx]
    window, named = getattr(allocator, "sliding_window", None), getattr(allocator, "layer_type", None)

    def update(k: Tensor, v: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        read, write = step.read_index[allocator.index], step.write_index[allocator.index]
        new = (k, v) if named is not None else (_heads_first(k), _heads_first(v))
        both: tuple[Tensor, Tensor] = allocator.update(*new, layer_idx, read, write)
        return both

    kind = named or ("full_attention" if window is None else "sliding_attention")
    pages = allocator.get_cache_for_block_table(layer_idx) if window is None else None
    return _Layer(kind, allocator.index, window, allocator.write_trash_index, pages, update)


def _layer_of_group(cache: Any, layer_idx: int) -> _Layer:
    """Of release 5.17, where a window of 1 means none."""
    group, place = cache.layer_index_to_group_indices[layer_idx]

    def update(k: Tensor, v: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        both: tuple[Tensor, Tensor] = cache.update(
            _heads_first(k), _heads_first(v), layer_idx, step.read_index, step.write_index
        )
        return both

    if cache.sliding_windows[layer_idx] > 1:
        window = cache.sliding_windows[layer_idx]
        return _Layer("sliding_attention", group, window, cache.write_trash_index, None, update)
    k, v = (t[place].unflatten(0, (-1, cache.block_size)) for t in (cache.key_cache, cache.value_cache))
    return _Layer("full_attention", group, None, cache.write_trash_index, (k, v), update)


def _heads_first(rows: Tensor) -> Tensor:
    """(1, num_kv_heads, tokens, head_dim) of (tokens, num_kv_heads, head_dim)."""
    return rows.transpose(0, 1)[None]
