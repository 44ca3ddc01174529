"""The class that SGLang 0.5.23 asks for: it prepares a step once for all layers, and is called by each layer.

It only translates: `tilewise.integrations.engines` computes. SGLang keeps keys and values in one buffer each, of slots
(slots, num_kv_heads, dim); the slots of a page follow each other, so that a buffer is also pages. `req_to_token` has
the slot of every token of a request, of which the first one of each page gives the block table.

A captured decoding step reads a table and lengths that stay at their address: `init_forward_metadata_out_graph` fills
them before the capture and before each replay.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

from tilewise.errors import InvalidProblem
from tilewise.fp8.container import E4M3
from tilewise.integrations.engines import Batch, Layer, Memory, memory_of
from tilewise.integrations.sglang import refusals
from tilewise.units import counted


class TilewiseAttnBackend(AttentionBackend):  # type: ignore[misc]
    """Prefill, chunked prefill, decoding and mixed steps over SGLang's plain KV pool."""

    # The longest sequence of a step says how many pages the table needs.
    needs_cpu_seq_lens = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        refusals.refuse_runner(model_runner)
        pool = model_runner.token_to_kv_pool
        refusals.refuse_pool(pool, MHATokenToKVPool, model_runner.dtype)
        self.token_to_kv_pool = pool
        self.req_to_token: Tensor = model_runner.req_to_token_pool.req_to_token
        self.device = self.req_to_token.device
        self.page_size: int = pool.page_size
        self.forward_metadata: Batch | None = None
        self._layers: dict[int, _Attention] = {}
        # Of captured steps: their table and lengths, and the batches over these by number of requests.
        self._table = self._seqlens = self._totals = self.req_to_token.new_empty(0)
        self._captured: dict[int, Batch] = {}

    # A step

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a step that is not captured."""
        refusals.refuse_batch(forward_batch)
        if forward_batch.forward_mode.is_idle():
            self.forward_metadata = None
            return
        seqlens = forward_batch.seq_lens.int()
        table = self._first_slots(forward_batch, self._columns(forward_batch)) // self.page_size
        if forward_batch.forward_mode.is_decode():
            count, longest = forward_batch.batch_size, 1
            totals = torch.arange(count + 1, dtype=torch.int32, device=seqlens.device)
        else:
            counts = forward_batch.extend_seq_lens_cpu
            count, longest = sum(counts), max(counts, default=0)
            totals = torch.nn.functional.pad(forward_batch.extend_seq_lens.cumsum(0), (1, 0)).int()
        slots, page_size = forward_batch.out_cache_loc, self.page_size
        batch = Batch(count, totals, longest, seqlens, table, slots, causal=True, page_size=page_size)
        batch.share_prefixes()
        # The CPU's kernels tell sequences apart by themselves. A mixed step has its decoding requests last.
        if longest > 1 and self.device.type != "cpu":
            batch.part_decodes(torch.tensor([0, *itertools.accumulate(counts)], device="cpu"))
        self.forward_metadata = batch

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured steps read: a table for sequences of any length, and lengths."""
        del max_num_tokens
        device = self.device
        columns = -(-self.req_to_token.shape[1] // self.page_size)
        self._table = torch.zeros((max_bs, columns), dtype=torch.int32, device=device)
        self._seqlens = torch.zeros((max_bs,), dtype=torch.int32, device=device)
        self._totals = torch.arange(max_bs + 1, dtype=torch.int32, device=device)
        self._captured = {}

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the table and lengths of a decoding step before it is captured, and before each replay."""
        refusals.refuse_batch(forward_batch)
        refusals.refuse_captured_mode(forward_batch)
        count = forward_batch.batch_size
        if count > len(self._seqlens):
            fix = "SGLang calls init_cuda_graph_state with the largest batch first."
            raise InvalidProblem("batch_size", f"at most {counted(len(self._seqlens), 'captured request')}", count, fix)
        columns = self._table.shape[1] if in_capture else self._columns(forward_batch)
        pages = self._first_slots(forward_batch, columns) // self.page_size
        self._table[:count, : pages.shape[1]].copy_(pages)
        self._seqlens[:count].copy_(forward_batch.seq_lens[:count])
        if count not in self._captured:
            table, seqlens, totals = self._table[:count], self._seqlens[:count], self._totals[: count + 1]
            slots, page_size = forward_batch.out_cache_loc, self.page_size
            self._captured[count] = Batch(count, totals, 1, seqlens, table, slots, causal=True, page_size=page_size)
        self.forward_metadata = self._captured[count]

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that pad a captured step: one key, in the slot that SGLang keeps for padding."""
        return 1

    def _columns(self, forward_batch: Any) -> int:
        """Pages of the longest sequence, rounded up to a power of two: a table of another width is validated anew. Of
        any sequence if SGLang has no lengths on the host.
        """
        most = max(1, -(-self.req_to_token.shape[1] // self.page_size))
        if forward_batch.seq_lens_sum is None or forward_batch.seq_lens_cpu is None:
            return most
        pages = -(-int(forward_batch.seq_lens_cpu[: forward_batch.batch_size].max()) // self.page_size)
        return min(most, 1 << max(pages - 1, 0).bit_length())

    def _first_slots(self, forward_batch: Any, columns: int) -> Tensor:
        """The first slot of each page of a step's requests, int32."""
        requests = forward_batch.req_pool_indices[: forward_batch.batch_size].long()
        return self.req_to_token[:, :: self.page_size][:, :columns].index_select(0, requests).int()

    # A layer

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Prompts, chunks of prompts, single queries, and such together."""
        refusals.refuse_others(others)
        batch = self.forward_metadata
        if batch is None:
            fix = "SGLang calls init_forward_metadata before the layers of a step."
            raise InvalidProblem("forward_metadata", "a prepared step", None, fix)
        attention = self._layers.get(layer.layer_id)
        if attention is None or attention.sinks is not sinks:
            attention = self._layers[layer.layer_id] = _Attention(layer, sinks, self.token_to_kv_pool)
        attention.refresh(layer, self.token_to_kv_pool)
        calls, cache, scales = attention.calls, attention.cache, attention.scales
        if save_kv_cache and k is not None and v is not None:
            rows = k.reshape(-1, *cache[0].shape[2:]), v.reshape(-1, *cache[1].shape[2:])
            calls.write(*rows, cache, forward_batch.out_cache_loc[: len(k)], *scales)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty((len(q), layer.tp_q_head_num, layer.v_head_dim))
        calls.attend(q, cache, batch, out, *scales)
        # Rows of padding.
        out[batch.num_tokens :] = 0
        return out.view(len(q), -1)

    forward_decode = forward_extend


class _Attention:
    """A layer's calls, and its part of the pool as pages."""

    def __init__(self, layer: Any, sinks: Tensor | None, pool: Any) -> None:
        refusals.refuse_layer(layer)
        window = layer.sliding_window_size
        self.sinks = sinks
        self.calls = Layer(
            layer.tp_q_head_num,
            layer.qk_head_dim,
            layer.scaling,
            layer.tp_k_head_num,
            # SGLang counts the keys before the query.
            window=None if window is None or window < 0 else window + 1,
            softcap=layer.logit_cap or None,
            sinks=sinks,
            is_e4m3=pool.dtype == E4M3,
            # Layers of encoders attend to their own pages in both directions.
            role="cross" if layer.attn_type.value == "encoder_only" else "decoder",
        )
        self.cache: tuple[Tensor, Tensor] = (torch.empty(0, device="cpu", dtype=pool.dtype),) * 2
        self.scales: tuple[Tensor, ...] = ()
        # What the above were made of.
        self._memory: Memory = []

    def refresh(self, layer: Any, pool: Any) -> None:
        """Follow the pool and the scales where they changed. Asking the pool also waits for keys that are loaded."""
        buffers = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        scales = layer.k_scale, layer.v_scale
        # Scales of other dtypes are converted in each step: a copy would not follow what is written into them.
        is_copied = any(scale is not None and scale.dtype != torch.float32 for scale in scales)
        memory = memory_of(*buffers, *scales)
        if not is_copied and memory == self._memory:
            return
        k, v = (_pages(buffer, pool) for buffer in buffers)
        self.cache, self._memory = (k, v), memory
        if pool.dtype == E4M3:
            one = torch.ones((), dtype=torch.float32, device=k.device)
            self.scales = tuple(one if scale is None else scale.detach().float() for scale in scales)


def _pages(buffer: Tensor, pool: Any) -> Tensor:
    """A buffer as pages (num_pages, page_size, num_kv_heads, dim)."""
    if pool.kv_cache_layout == "hnd":
        return buffer.transpose(1, 2)
    count = len(buffer) // pool.page_size
    return buffer[: count * pool.page_size].view(count, pool.page_size, *buffer.shape[1:])
