"""The paged cache on a real GPU: the same results as dense attention, no synchronisation, graphs, and the cascade."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from making import NoWaiting
from making import cuda_randn as randn
from shadow import KV_HEADS, LAYERS, Served, Shadow
from tilewise import settings

BF16 = torch.bfloat16
HEADS, DIM = 8, 64


def shadow_of(page_size: int) -> Shadow:
    return Shadow(page_size, BF16, heads=HEADS, dims=(DIM, DIM), device="cuda")


@pytest.mark.parametrize("page_size", [1, 16, 64, 128, 256])
def test_a_life_of_requests_equals_dense_attention(page_size: int) -> None:
    shadow = shadow_of(page_size)
    a, b = shadow.add(list(range(600))), shadow.add(list(range(7)))
    shadow.check([a, b], shadow.step([a, b], counts=[350, 7]))
    c = shadow.add([*range(300), *[1] * 41])
    shadow.check([a, b, c], shadow.step([a, b, c], {b: 77}, counts=[250, 1, shadow.cache.pending(c)]))
    for number in range(5):
        shadow.check([c, a, b], shadow.step([c, a, b], dict.fromkeys((a, b, c), number)))
    child = shadow.fork(b)
    shadow.check([b, child], shadow.step([b, child], {b: 5, child: 6}))
    for request in (a, b, c, child):
        shadow.cache.free(request)
    # Rows of the table are used again, and it grows.
    many = [shadow.add([number, *range(30)]) for number in range(40)]
    shadow.check(many, shadow.step(many))
    assert shadow.cache.stats().requests == 40


@pytest.mark.usefixtures("always_cascade")
@pytest.mark.parametrize("flags", [{}, {"softcap": 2.0}, {"sinks": True}], ids=["plain", "softcap", "sinks"])
def test_shared_prefixes_are_attended_once(flags: dict[str, Any]) -> None:
    flags = {**flags, "sinks": torch.linspace(-1, 2, HEADS, device="cuda", dtype=BF16)} if "sinks" in flags else flags
    shadow = shadow_of(16)
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
    shadow = shadow_of(16)
    requests = [shadow.add([*range(200), n]) for n in range(8)]
    shadow.step(requests[:1])
    for request in requests[1:]:
        shadow.cache.reuse(request)
    shadow.step(requests[1:])
    return shadow, requests


@pytest.mark.usefixtures("always_cascade")
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


@pytest.mark.usefixtures("always_cascade")
def test_a_step_does_not_wait_for_the_device(no_waiting: NoWaiting) -> None:
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


@pytest.mark.usefixtures("always_cascade")
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


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_decode_step_is_captured_once_and_replayed_while_requests_come_and_go(page_size: int) -> None:
    """40 replays of one graph: sequences cross page borders, two requests join, one ends, all equal dense attention."""
    run = Served(page_size, DIM, heads=HEADS, dtype=BF16, device="cuda")
    cache = run.cache
    live = [run.prefill(list(range(70))), run.prefill([9] * 15)]
    # Nobody moves while kernels are compiled and the graph is captured.
    cache.step([], fixed=True)
    run.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.attend()
    cache.step([], fixed=True)
    cache.mark_written()
    for number in range(40):
        if number == 10:
            live.append(run.prefill([*range(65), 3, 4]))
        if number == 20:
            cache.free(live.pop(0))
            live.append(run.prefill([5]))
        run.step(live, number)
        graph.replay()
        cache.mark_written()
        run.check(live)


def test_tables_on_another_device_are_named() -> None:
    shadow = shadow_of(16)
    request = shadow.add([1, 2, 3])
    shadow.step([request])
    shadow.step([request])
    cache = shadow.cache
    with pytest.raises(tw.InvalidProblem, match="block_table"):
        tw.attention_paged(randn(1, HEADS, DIM), *cache.pages(), cache.block_table().cpu(), cache.seqlens())
    cache.step([request])
    with pytest.raises(tw.InvalidProblem, match="k: expected device cuda"):
        cache.append(torch.zeros(1, KV_HEADS, DIM, dtype=BF16), randn(1, KV_HEADS, DIM))
