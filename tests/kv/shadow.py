"""Paged caches beside the dense rows that they should hold, on a CPU (tests/kv) and a GPU (tests/gpu)."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

import tilewise as tw

KV_HEADS, LAYERS, SEATS, DIFFERENT = 2, 2, 6, 5000
Rows = tuple[Tensor, Tensor]


def judge(out: Tensor, plain: Tensor, exact: Tensor) -> None:
    """At most twice the error of the plain call, and a few ulp."""
    allowed = 2 * (plain.double() - exact).abs().max() + 4 * torch.finfo(out.dtype).eps * exact.abs().max()
    assert (out.double() - exact).abs().max() <= allowed


class Shadow:
    """A cache, and the rows it should hold: K and V are functions of a token and all tokens before it. Keys of
    latents are the columns of V and those of K.
    """

    def __init__(self, page_size: int, dtype: torch.dtype, num_pages: int = 0, **options: Any) -> None:
        self.dtype, self.dims, self.heads = dtype, options.pop("dims", (16, 24)), options.pop("heads", 4)
        self.head_dim, self.device = (
            sum(self.dims) if options.get("latent") else self.dims[0],
            options.setdefault("device", "cpu"),
        )
        sizes = num_pages or 4000 // page_size + 50, page_size, LAYERS, KV_HEADS, self.head_dim
        self.cache = tw.PagedKVCache(*sizes, dtype=dtype, head_dim_v=self.dims[1], **options)
        # What nobody wrote must not matter.
        self.cache.k.fill_(torch.nan)
        self.cache.v.fill_(torch.nan)
        self.different = _different(sum(self.dims)).to(self.device, dtype)
        self.tokens: dict[int, list[int]] = {}

    def add(self, tokens: list[int]) -> int:
        request = self.cache.add(tokens)
        self.tokens[request] = list(tokens)
        return request

    def fork(self, request: int) -> int:
        child = self.cache.fork(request)
        self.tokens[child] = list(self.tokens[request])
        return child

    def rows(self, request: int, layer: int) -> Rows:
        """K and V (tokens, heads, dim) of everything the request has."""
        tokens = self.tokens[request][: self.cache.length(request)]
        states = list(itertools.accumulate(tokens, lambda before, token: hash((before, token)) % 2**40, initial=0))[1:]
        both = self.different[layer, torch.tensor(states, dtype=torch.int64, device=self.device) % DIFFERENT]
        return both[..., : self.dims[0]], both[..., self.dims[0] :]

    def step(self, requests: list[int], ids: dict[int, int] | None = None, **arguments: Any) -> list[int]:
        """One step with both layers appended; returns the new tokens of each request."""
        ids = ids or {}
        before = [self.cache.length(request) for request in requests]
        for request, token in ids.items():
            self.tokens[request].append(token)
        total = self.cache.step(requests, tokens=[ids.get(request) for request in requests], **arguments)
        counts = [self.cache.length(request) - start for request, start in zip(requests, before, strict=True)]
        assert sum(counts) == total
        for layer in range(LAYERS):
            new = [
                tuple(part[-count:] for part in self.rows(request, layer))
                for request, count in zip(requests, counts, strict=True)
            ]
            self.cache.append(torch.cat([k for k, _ in new]), torch.cat([v for _, v in new]), layer=layer)
        return counts

    def check(self, requests: list[int], counts: list[int], *, exact: bool | None = None, **flags: Any) -> None:
        """Attention over the pages is attention over the rows: of packed sequences, bit for bit if `exact` or, where
        nothing is said, on a CPU.
        """
        exact = self.device == "cpu" if exact is None else exact
        draw = torch.Generator().manual_seed(sum(counts))
        q = torch.randn(sum(counts), self.heads, self.head_dim, generator=draw).to(self.device, self.dtype)
        for layer in range(LAYERS):
            out, lse = self.cache.attention(q, layer=layer, return_lse=True, **flags)
            rows = [self.rows(request, layer) for request in requests]
            if self.cache.latent:
                rows = [(torch.cat((v, k), -1), v) for k, v in rows]
            dense, dense_lse = dense_attention(q, rows, counts, **flags)
            if exact:
                assert torch.equal(out, dense)
                assert torch.equal(lse, dense_lse)
            else:
                judge(out, dense, dense_attention(q.double(), rows, counts, **flags)[0])
                torch.testing.assert_close(lse, dense_lse, atol=1e-4, rtol=1e-4)


@functools.lru_cache(maxsize=8)
def _different(columns: int) -> Tensor:
    return torch.randn(LAYERS, DIFFERENT, KV_HEADS, columns, generator=torch.Generator().manual_seed(0))


def dense_attention(q: Tensor, rows: list[Rows], counts: list[int], **flags: Any) -> Any:
    lengths = [len(k) for k, _ in rows]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).to(q.device, torch.int32) for n in (counts, lengths))
    k, v = (torch.cat(parts).to(q.dtype) for parts in zip(*rows, strict=True))
    bounds: Any = {"max_seqlen_q": max(counts), "max_seqlen_k": max(lengths), "causal": True, "return_lse": True}
    return tw.attention_varlen(q, k, v, cu_q, cu_k, **bounds, **flags)


class Served:
    """A cache with seats, what one decoding step of all layers reads and writes, and every request's K and V again:
    (tokens, layers, 2, heads, dim).
    """

    def __init__(
        self, page_size: int = 4, dim: int = 16, heads: int = 4, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        where: Any = {"dtype": dtype, "device": device}
        most: Any = {"max_seqlen": 16 * page_size, "max_requests": SEATS}
        self.cache = tw.PagedKVCache(64, page_size, LAYERS, KV_HEADS, dim, **where, **most)
        self.cache.k.fill_(torch.nan)
        self.cache.v.fill_(torch.nan)
        self.kept: dict[int, Tensor] = {}
        self.new = torch.zeros(SEATS, LAYERS, 2, KV_HEADS, dim, **where)
        self.q, self.out = torch.zeros(2, LAYERS, SEATS, heads, dim, **where).unbind()

    def row(self, token: int, place: int) -> Tensor:
        """By token and place alone, so that a prefix that is shared has the rows it would have had."""
        draw = torch.Generator().manual_seed(97 * token + place)
        return torch.randn(self.new.shape[1:], generator=draw).to(self.new)

    def prefill(self, tokens: list[int]) -> int:
        request = self.cache.add(tokens)
        count = self.cache.step([request])
        rows = torch.stack([self.row(token, place) for place, token in enumerate(tokens)])
        for layer in range(LAYERS):
            self.cache.append(*rows[-count:, layer].unbind(1), layer=layer)
        self.kept[request] = rows
        return request

    def step(self, requests: list[int], token: int) -> None:
        """A fixed step of some requests, with new queries, keys and values in the same places."""
        tokens = [100 * request + token for request in requests]
        assert self.cache.step(requests, tokens=tokens, fixed=True) == SEATS
        self.new.fill_(torch.nan)
        for request, seat, own in zip(requests, self.cache.seats(requests), tokens, strict=True):
            self.new[seat] = self.row(own, len(self.kept[request]))
            self.kept[request] = torch.cat((self.kept[request], self.new[seat][None]))
        self.q.normal_()
        self.out.fill_(torch.nan)

    def attend(self) -> None:
        """What a graph captures."""
        for layer in range(LAYERS):
            self.cache.append(*self.new[:, layer].unbind(1), layer=layer)
            self.out[layer] = self.cache.attention(self.q[layer], layer=layer)

    def check(self, requests: list[int]) -> None:
        """Every seat in use against dense attention, the others 0."""
        seats = self.cache.seats(requests)
        for (request, seat), layer in itertools.product(zip(requests, seats, strict=True), range(LAYERS)):
            k, v = (t.transpose(0, 1)[None] for t in self.kept[request][:, layer].unbind(1))
            q = self.q[layer, seat][None, :, None]
            exact = tw.attention(q.double(), k.double(), v.double())
            judge(self.out[layer, seat], tw.attention(q, k, v)[0, :, 0], exact[0, :, 0])
        assert bool((self.out[:, [seat for seat in range(SEATS) if seat not in seats]] == 0).all())

    def decode(self, requests: list[int], token: int) -> None:
        self.step(requests, token)
        self.attend()
        self.check(requests)
