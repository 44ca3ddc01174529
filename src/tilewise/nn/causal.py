"""Causal self-attention with grouped heads, rotary positions and a cache for generation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tilewise.api import attention
from tilewise.errors import InvalidProblem, OutOfPages
from tilewise.nn.rotary import check_rotary, rotary_table, rotate
from tilewise.units import counted
from tilewise.validation import check_flag


class KVCache:
    """Keys and values of the tokens seen so far, (batch, capacity, num_kv_heads, head_dim), of which `length` are
    valid.

    Made by `CausalSelfAttention.make_cache` and filled by its forward. `truncate` drops the latest tokens.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v, self.length = k, v, 0

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return self.k.shape[1]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (batch, seqlen, num_kv_heads, head_dim) and return everything stored, without a copy."""
        end = self.length + k.shape[1]
        if k.shape[0] != self.k.shape[0]:  # a single row would be broadcast
            fix = "Call make_cache with the batch that is attended."
            raise InvalidProblem("cache", f"one for a batch of {k.shape[0]}", f"one for {self.k.shape[0]}", fix)
        if end > self.capacity:
            raise OutOfPages(
                f"the cache holds {counted(self.capacity, 'token')}, {end} are needed; make_cache with more capacity"
            )
        self.k[:, self.length : end] = k
        self.v[:, self.length : end] = v
        self.length = end
        return self.k[:, :end], self.v[:, :end]

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        if not 0 <= length <= self.length:
            fix = "Tokens once forgotten cannot be brought back."
            raise InvalidProblem("length", f"0 to {self.length}, the tokens stored", length, fix)
        self.length = length


class CausalSelfAttention(torch.nn.Module):
    """Self-attention of x (batch, seqlen, embed_dim), each token to itself and the ones before it.

    `num_kv_heads` below `num_heads` shares keys and values (GQA); `rotary_base` None leaves positions out; `window`
    limits how many earlier tokens are seen. With a cache the tokens of x continue those already in it.

        >>> layer = CausalSelfAttention(8, 4, num_kv_heads=2)
        >>> cache = layer.make_cache(batch=1, capacity=16)
        >>> with torch.no_grad():
        ...     prompt, token = layer(torch.ones(1, 4, 8), cache), layer(torch.ones(1, 1, 8), cache)
        >>> cache.length
        5
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        rotary_base: float | None = 10000.0,
        window: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = (embed_dim, num_heads, num_kv_heads)
        if min(sizes) < 1 or embed_dim % num_heads or num_heads % num_kv_heads:
            expected = "embed_dim a multiple of num_heads, and num_heads of num_kv_heads"
            raise InvalidProblem("embed_dim", expected, sizes, "Choose sizes that divide.")
        is_count = isinstance(window, int | np.integer) and not isinstance(window, bool) and window >= 1
        if window is not None and not is_count:
            expected = "None or an integer of at least 1, the token itself"
            raise InvalidProblem("window", expected, window, "None sees all earlier tokens.")
        # Checked here, because a module that only evaluates would never pass it to a call.
        check_flag("dropout", dropout)
        if rotary_base is not None:
            check_rotary(embed_dim // num_heads, rotary_base, ("embed_dim / num_heads", "rotary_base"))
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, embed_dim // num_heads
        self.dropout, self.rotary_base = dropout, rotary_base
        self.window = None if window is None else int(window)
        width = (num_heads + 2 * num_kv_heads) * self.head_dim
        self.qkv = torch.nn.Linear(embed_dim, width, bias=bias, device=device, dtype=dtype)
        self.out = torch.nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def make_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache on the device and in the dtype of the weights."""
        shape = (batch, capacity, self.num_kv_heads, self.head_dim)
        k, v = (self.qkv.weight.new_empty(shape) for _ in "kv")
        return KVCache(k.detach(), v.detach())

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """The attention output for x, (batch, seqlen, embed_dim). Rejects a cache while gradients are recorded."""
        if x.dim() != 3:
            fix = "A single sequence is x[None]."
            raise InvalidProblem("x", "3 dimensions (batch, seqlen, embed_dim)", tuple(x.shape), fix)
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], 2)
        start = 0 if cache is None else cache.length
        if self.rotary_base is not None:
            cos, sin = rotary_table(x.shape[1], self.head_dim, start=start, base=self.rotary_base, device=x.device)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            if k.requires_grad:
                fix = "Generate under torch.no_grad(), or train without a cache."
                raise InvalidProblem("cache", "None while gradients are recorded", "a KVCache", fix)
            k, v = cache.append(k, v)
        window = None if self.window is None else (self.window - 1, 0)
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, causal=True, window=window, dropout=dropout, layout="bshd")
        projected: Tensor = self.out(out.flatten(2))
        return projected
