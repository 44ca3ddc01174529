"""The paged cache on a real GPU: the same results as dense attention, no synchronisation, graphs, and the cascade."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import cascade, settings

BF16 = torch.bfloat16
HEADS, KV_HEADS, DIM, LAYERS = 8, 2, 64, 2


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cascade at any size."""
    monkeypatch.setattr(cascade, "price_seconds", lambda *_: 0.0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


class Shadow:
    """A cache and the dense rows it should hold, which are functions of a request's tokens."""

    def __init__(self, page_size: int, num_pages: int = 0) -> None:
        pages = num_pages or 4000 // page_size + 50
        self.cache = tw.PagedKVCache(pages, page_size, LAYERS, KV_HEADS, DIM, dtype=BF16, device="cuda")
        self.cache.k.fill_(torch.nan)
        self.cache.v.fill_(torch.nan)
        self.rows = randn(LAYERS, 5000, KV_HEADS, 2 * DIM)
        self.tokens: dict[int, list[int]] = {}

    def add(self, tokens: list[int]) -> int:
        request = self.cache.add(tokens)
        self.tokens[request] = list(tokens)
        return request

    def step(self, requests: list[int], ids: dict[int, int] | None = None, **arguments: Any) -> list[int]:
        ids = ids or {}
        before = [self.cache.length(request) for request in requests]
        for request, token in ids.items():
            self.tokens[request].append(token)
        self.cache.step(requests, tokens=[ids.get(request) for request in requests], **arguments)
        counts = [self.cache.length(request) - start for request, start in zip(requests, before, strict=True)]
        for layer in range(LAYERS):
            new = torch.cat([self.dense(r, layer)[-count:] for r, count in zip(requests, counts, strict=True)])
            self.cache.append(new[..., :DIM], new[..., DIM:], layer=layer)
        return counts

    def dense(self, request: int, layer: int) -> Tensor:
        """K and V of a request; the same token in the same place gives the same row."""
        tokens = torch.tensor(self.tokens[request][: self.cache.length(request)], device="cuda")
        return self.rows[layer, (tokens * 31 + torch.arange(len(tokens), device="cuda")) % 5000]

    def check(self, requests: list[int], counts: list[int], **flags: Any) -> None:
        q = randn(sum(counts), HEADS, DIM)
        for layer in range(LAYERS):
            out, lse = self.cache.attention(q, layer=layer, return_lse=True, **flags)
            rows = [self.dense(request, layer) for request in requests]
            lengths = torch.tensor([len(r) for r in rows])
            cu_q, cu_k = (
                torch.cat((torch.zeros(1), n.cumsum(0))).int().cuda() for n in (torch.tensor(counts), lengths)
            )
            k, v = torch.cat(rows).split(DIM, -1)
            bounds = {"max_seqlen_q": max(counts), "max_seqlen_k": int(lengths.max()), "causal": True, **flags}
            dense, dense_lse = tw.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **bounds)
            exact = tw.attention_varlen(q.double(), k.double(), v.double(), cu_q, cu_k, **bounds)
            allowed = 2 * (dense.double() - exact).abs().max() + 4 * torch.finfo(BF16).eps * exact.abs().max()
            assert (out.double() - exact).abs().max() <= allowed
            torch.testing.assert_close(lse, dense_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("page_size", [1, 16, 64, 128, 256])
def test_a_life_of_requests_equals_dense_attention(page_size: int) -> None:
    shadow = Shadow(page_size)
    a, b = shadow.add(list(range(600))), shadow.add(list(range(7)))
    shadow.check([a, b], shadow.step([a, b], counts=[350, 7]))
    c = shadow.add([*range(300), *[1] * 41])
    shadow.check([a, b, c], shadow.step([a, b, c], {b: 77}, counts=[250, 1, shadow.cache.pending(c)]))
    for number in range(5):
        shadow.check([c, a, b], shadow.step([c, a, b], dict.fromkeys((a, b, c), number)))
    child = shadow.cache.fork(b)
    shadow.tokens[child] = list(shadow.tokens[b])
    shadow.check([b, child], shadow.step([b, child], {b: 5, child: 6}))
    for request in (a, b, c, child):
        shadow.cache.free(request)
    # Rows of the table are used again, and it grows.
    many = [shadow.add([number, *range(30)]) for number in range(40)]
    shadow.check(many, shadow.step(many))
    assert shadow.cache.stats().requests == 40


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("flags", [{}, {"softcap": 2.0}, {"sinks": True}], ids=["plain", "softcap", "sinks"])
def test_shared_prefixes_are_attended_once(flags: dict[str, Any]) -> None:
    flags = {**flags, "sinks": torch.linspace(-1, 2, HEADS, device="cuda", dtype=BF16)} if "sinks" in flags else flags
    shadow = Shadow(16)
    first, second = shadow.add([*range(1000), 1]), shadow.add([*range(2000, 2500), 1])
    shadow.step([first, second])
    more = [shadow.add([*range(1000), n]) for n in range(2, 9)] + [shadow.add([*range(2000, 2500), 4, 5])]
    batch = [first, second, *more]
    counts = shadow.step(more)
    shadow.check(more, counts, **flags)
    counts = shadow.step(batch, dict.fromkeys(batch, 8))
    shared = shadow.cache.shared_prefix()
    assert shared is not None
    assert [group.sequences for group in shared.groups] == [8, 2]
    assert shared.rows is not None
    shadow.check(batch, counts, **flags)


def eight_with_a_prefix() -> tuple[Shadow, list[int]]:
    """Eight requests on the pages of their first 200 tokens."""
    shadow = Shadow(16)
    requests = [shadow.add([*range(200), n]) for n in range(8)]
    shadow.step(requests[:1])
    for request in requests[1:]:
        shadow.cache.reuse(request)
    shadow.step(requests[1:])
    return shadow, requests


@pytest.mark.usefixtures("eager")
def test_rows_of_a_hint_are_judged_where_settings_ask_for_it() -> None:
    """In the first call and in those that look like it; what somebody wrote to them is gone in the next step."""
    shadow, requests = eight_with_a_prefix()
    batch = [shadow.add([7] * 5), *requests]
    shadow.step(batch[:1])
    shadow.step(batch, dict.fromkeys(batch, 3))
    q, hint = randn(9, HEADS, DIM), shadow.cache.shared_prefix()
    assert hint is not None
    assert hint.rows is not None
    want = shadow.cache.attention(q)
    with settings.overridden(check_values=True):
        for _ in range(3):
            assert torch.equal(shadow.cache.attention(q), want)
        hint.rows[0] = hint.rows[1]
        with pytest.raises(tw.InvalidProblem, match=r"shared_prefix\.rows: expected distinct rows"):
            shadow.cache.attention(q)
        shadow.cache.block_table().fill_(-1)
        shadow.check(batch, shadow.step(batch, dict.fromkeys(batch, 4)))


@pytest.mark.usefixtures("eager")
def test_a_step_does_not_wait_for_the_device(no_waiting: Callable[[], AbstractContextManager[None]]) -> None:
    shadow, requests = eight_with_a_prefix()
    q, k = randn(8, HEADS, DIM), randn(8, KV_HEADS, DIM)

    def decode() -> None:
        shadow.cache.step(requests, tokens=[3] * 8)
        for layer in range(LAYERS):
            shadow.cache.append(k, k, layer=layer)
            shadow.cache.attention(q, layer=layer)

    # Kernels are compiled and pinned memory is allocated the first time.
    for _ in range(3):
        decode()
    with no_waiting():
        for _ in range(20):
            decode()


@pytest.mark.usefixtures("eager")
def test_a_layer_is_captured_in_a_graph() -> None:
    shadow, requests = eight_with_a_prefix()
    cache, q, k, v = shadow.cache, randn(8, HEADS, DIM), randn(8, KV_HEADS, DIM), randn(8, KV_HEADS, DIM)
    cache.step(requests)
    cache.append(k, v)
    cache.attention(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(k, v)
        captured = cache.attention(q)
    for tensor in (q, k, v):
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    assert torch.equal(captured, cache.attention(q))


class Decoding:
    """A cache with seats, what one decoding step of all layers reads and writes, and every request's K and V again."""

    def __init__(self, page_size: int, seats: int) -> None:
        self.cache = tw.PagedKVCache(
            40, page_size, LAYERS, KV_HEADS, DIM, dtype=BF16, device="cuda", max_seqlen=256, max_requests=seats
        )
        self.cache.k.fill_(torch.nan)
        self.cache.v.fill_(torch.nan)
        self.kept: dict[int, Tensor] = {}
        self.q, self.new = randn(LAYERS, seats, HEADS, DIM), randn(LAYERS, 2, seats, KV_HEADS, DIM)
        self.out = torch.full_like(self.q, torch.nan)

    def prefill(self, tokens: list[int]) -> int:
        """A request with its prompt; what is found of it is request 0's."""
        request = self.cache.add(tokens)
        found = len(tokens) - self.cache.step([request])
        rows = randn(LAYERS, 2, len(tokens), KV_HEADS, DIM)
        if found:
            rows[:, :, :found] = self.kept[0][:, :, :found]
        for layer in range(LAYERS):
            self.cache.append(*rows[layer, :, found:].unbind(), layer=layer)
        self.kept[request] = rows
        return request

    def decode(self) -> None:
        """What is captured."""
        for layer in range(LAYERS):
            self.cache.append(*self.new[layer].unbind(), layer=layer)
            self.out[layer] = self.cache.attention(self.q[layer], layer=layer)

    def renew(self) -> None:
        """Other numbers in the same places."""
        self.q.copy_(torch.randn_like(self.q))
        self.new.copy_(torch.randn_like(self.new))
        self.out.fill_(torch.nan)

    def check(self, live: list[int]) -> None:
        """Every seat in use against dense attention, the others 0."""
        places = self.cache.seats(live)
        for request, seat in zip(live, places, strict=True):
            self.kept[request] = torch.cat((self.kept[request], self.new[:, :, seat, None]), 2)
            for layer in range(LAYERS):
                assert_near_dense(self.out[layer, seat], self.q[layer, seat], *self.kept[request][layer])
        rest = [seat for seat in range(self.q.shape[1]) if seat not in places]
        assert bool((self.out[:, rest] == 0).all())


def assert_near_dense(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """One token's out (heads, dim) against fp64 and dense attention to its k and v (keys, heads, dim)."""
    q, k, v = q[None, :, None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    dense, exact = tw.attention(q, k, v), tw.attention(q.double(), k.double(), v.double())
    allowed = 2 * (dense.double() - exact).abs().max() + 4 * torch.finfo(BF16).eps * exact.abs().max()
    assert (out.double() - exact[0, :, 0]).abs().max() <= allowed


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_decode_step_is_captured_once_and_replayed_while_requests_come_and_go(page_size: int) -> None:
    """40 replays of one graph: sequences cross page borders, two requests join, one ends, all equal dense attention."""
    run = Decoding(page_size, seats=6)
    cache = run.cache
    live = [run.prefill(list(range(70))), run.prefill([9] * 15)]
    assert live[0] == 0
    # Nobody moves while kernels are compiled and the graph is captured.
    cache.step([], fixed=True)
    run.decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.decode()
    cache.step([], fixed=True)
    cache.mark_written()
    for number in range(40):
        if number == 10:
            live.append(run.prefill([*range(65), 3, 4]))
        if number == 20:
            cache.free(live.pop(0))
            live.append(run.prefill([5]))
        run.renew()
        cache.step(live, tokens=[number] * len(live), fixed=True)
        graph.replay()
        cache.mark_written()
        run.check(live)


def test_tables_on_another_device_are_named() -> None:
    shadow = Shadow(16)
    request = shadow.add([1, 2, 3])
    shadow.step([request])
    shadow.step([request])
    cache = shadow.cache
    with pytest.raises(tw.InvalidProblem, match="block_table"):
        tw.attention_paged(randn(1, HEADS, DIM), *cache.pages(), cache.block_table().cpu(), cache.seqlens())
    cache.step([request])
    with pytest.raises(tw.InvalidProblem, match="k: expected device cuda"):
        cache.append(torch.zeros(1, KV_HEADS, DIM, dtype=BF16), randn(1, KV_HEADS, DIM))
