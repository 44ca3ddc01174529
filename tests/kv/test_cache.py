"""`PagedKVCache` with its tensors: appending, forking, attention over pages against dense attention, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import tilewise as tw
from shadow import KV_HEADS, LAYERS, Shadow
from tilewise import cascade

HEADS, DIM, DIM_V = 4, 16, 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_life_of_latents_equals_dense_attention(page_size: int, dtype: torch.dtype) -> None:
    live(Shadow(page_size, dtype, prefix_sharing=page_size != 1, latent=True), page_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("page_size", [1, 16, 64, 128, 256])
def test_a_life_of_requests_equals_dense_attention(page_size: int, dtype: torch.dtype) -> None:
    live(Shadow(page_size, dtype, prefix_sharing=page_size != 1), page_size)


def live(shadow: Shadow, page_size: int) -> None:
    a, b, c = shadow.add(list(range(300))), shadow.add(list(range(7))), shadow.add(list(range(290)) + [1] * 41)
    # Prefill, in chunks, together with a short prompt.
    shadow.check([a, b], shadow.step([a, b], counts=[150, 7]))
    # A prompt's second chunk, a decoding request, and a prompt that finds what is there.
    shadow.cache.reuse(c)
    shadow.check([a, b, c], shadow.step([a, b, c], {b: 77}, counts=[150, 1, shadow.cache.pending(c)]))
    # Decoding only, in another order, over a page's end.
    for number in range(3):
        shadow.check([c, a, b], shadow.step([c, a, b], dict.fromkeys((a, b, c), number)))
    child = shadow.fork(b)
    shadow.check([b, child], shadow.step([b, child], {b: 5, child: 6}))
    shadow.cache.free(a)
    shadow.check([child], shadow.step([child], {child: 9}))
    assert shadow.cache.stats().copies == (1 if page_size > 1 else 0)
    for request in (b, c, child):
        shadow.cache.free(request)
    assert shadow.cache.stats().pages_held == 0


def shared_batch(page_size: int = 16, dtype: torch.dtype = torch.float32) -> tuple[Shadow, list[int]]:
    """Five requests: three with one prefix of 100 tokens, two with another of 50, in no order."""
    shadow = Shadow(page_size, dtype)
    first, second = shadow.add([*range(100), 1]), shadow.add([*range(1000, 1050), 1])
    shadow.step([first, second])
    others = [shadow.add([*range(100), n]) for n in (2, 3)] + [shadow.add([*range(1000, 1050), 4, 5])]
    shadow.step(others)
    return shadow, [first, second, others[2], others[0], others[1]]


@pytest.mark.usefixtures("always_cascade")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("flags", [{}, {"softcap": 2.0}, {"sinks": True}], ids=["plain", "softcap", "sinks"])
def test_shared_prefixes_are_attended_once(dtype: torch.dtype, flags: dict[str, Any]) -> None:
    shadow, requests = shared_batch(dtype=dtype)
    flags = {**flags, "sinks": torch.linspace(-1, 2, HEADS).to(dtype)} if "sinks" in flags else flags
    counts = shadow.step(requests, dict.fromkeys(requests, 8))
    shared = shadow.cache.shared_prefix()
    assert shared is not None
    assert shared.groups == (cascade.Group(3, 3, 96), cascade.Group(2, 2, 48))
    assert shared.keys_saved == 2 * 96 + 48
    shadow.check(requests, counts, exact=False, **flags)
    # One alone shares nothing and is exact.
    shadow.check(requests[:1], shadow.step(requests[:1], {requests[0]: 3}))
    assert shadow.cache.shared_prefix() is None


@pytest.mark.usefixtures("always_cascade")
def test_prompts_behind_a_shared_prefix() -> None:
    shadow, requests = shared_batch()
    late = [shadow.add(list(range(100)) + [50 + n] * (20 + n)) for n in range(3)]
    batch = [*late, requests[1]]
    counts = shadow.step(batch, {requests[1]: 2})
    assert max(counts) > 20
    shared = shadow.cache.shared_prefix()
    assert shared is not None
    assert shared.rows is None
    shadow.check(batch, counts, exact=False)


def test_the_plan_says_what_becomes_of_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    shadow, requests = shared_batch()
    shadow.step(requests)
    q = torch.randn(5, HEADS, DIM)
    small = shadow.cache.explain(q)
    assert small.cascade is not None
    assert small.cascade.startswith("no: reading the shared keys once saves")
    monkeypatch.setattr(cascade, "price_seconds", lambda *_: 0.0)
    plan = shadow.cache.explain(q)
    assert plan.cascade is not None
    assert plan.cascade.startswith("96 keys once for 3 queries of 3 sequences, 48 keys once for 2 queries of 2")
    assert "cascade" in str(plan)
    assert plan.to_dict()["cascade"] == plan.cascade
    refused = shadow.cache.explain(q, window=(30, 0)).cascade
    assert refused == "no: a window ends in another place of the prefix for every sequence"
    slopes = torch.ones(HEADS)
    assert (
        shadow.cache.explain(q, alibi_slopes=slopes).cascade
        == "no: alibi_slopes is another one for every sequence of a group"
    )


@pytest.mark.usefixtures("always_cascade")
@pytest.mark.parametrize("flags", [{"window": (30, 0)}, {"alibi_slopes": torch.linspace(0.1, 1, HEADS)}])
def test_what_cannot_be_shared_is_computed_as_ever(flags: dict[str, Any]) -> None:
    shadow, requests = shared_batch()
    shadow.check(requests, shadow.step(requests, dict.fromkeys(requests, 8)), **flags)


def rows_of(count: int, dim: int = DIM, **options: Any) -> Tensor:
    return torch.zeros(count, KV_HEADS, dim, **options)


@pytest.mark.parametrize("wide", [{"head_dim": 513}, {"head_dim": 512, "head_dim_v": 513}], ids=str)
def test_heads_that_nobody_attends_are_refused_at_once(wide: dict[str, Any]) -> None:
    with pytest.raises(tw.InvalidProblem, match=r"head_dim(_v)?: expected at most 512, got 513"):
        tw.PagedKVCache(4, 4, 1, 1, dtype=torch.float32, device="cpu", **wide)


BAD: dict[str, tuple[Callable[[tw.PagedKVCache], object], str]] = {
    "rows": (lambda c: c.append(rows_of(3), rows_of(3, DIM_V)), "k: expected shape .4, 2, 16."),
    "dtype": (lambda c: c.append(rows_of(4).double(), rows_of(4, DIM_V)), "k: expected dtype torch.float32"),
    "device": (lambda c: c.append(rows_of(4), rows_of(4, DIM_V, device="meta")), "v: expected device cpu"),
    "no rows": (lambda c: c.append(cast("Any", None), rows_of(4, DIM_V)), "k: expected a tensor without gradient"),
    "gradient": (
        lambda c: c.append(rows_of(4, requires_grad=True), rows_of(4, DIM_V)), "k: .* got one that requires a gradient"
    ),
    "no number": (lambda c: c.free(cast("Any", "a")), "request: expected a request that was .* got 'a'"),
    "no layer": (lambda c: c.pages(cast("Any", "a")), "layer: expected an integer between 0 and 1, got 'a'"),
    "layer": (lambda c: c.append(rows_of(4), rows_of(4, DIM_V), layer=2), "layer: expected an integer between 0 and 1"),
    "step before append": (lambda c: c.step([0]), r"every layer of the step before appended, got 2 missing"),
    "truncate before append": (lambda c: c.truncate(0, 1), "every layer of the step before appended"),
    "attention before append": (
        lambda c: c.attention(torch.zeros(4, HEADS, DIM)), "layer: expected one whose K and V of this step are appended"
    ),
    "fork before append": (lambda c: c.fork(0), "every layer of the step before appended"),
    "float tokens": (lambda c: c.add(torch.ones(3)), "tokens: expected a 1-D tensor of ids"),
    "finished": (lambda c: c.fork(1), "1, which is finished"),
    "table elsewhere": (
        lambda c: tw.attention_paged(
            torch.zeros(1, HEADS, DIM), *c.pages(), c.block_table().to("meta"), c.seqlens()
        ),
        "block_table: expected",
    ),
    "hint": (
        lambda c: tw.attention_paged(
            torch.zeros(1, HEADS, DIM), *c.pages(), c.block_table(), c.seqlens(), shared_prefix=cast("Any", [0])
        ),
        "shared_prefix: expected a tilewise.cascade.SharedPrefix",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_changes_nothing(name: str) -> None:
    call, message = BAD[name]
    cache = Shadow(4, torch.float32).cache
    request = cache.add(torch.arange(4))
    cache.free(cache.add([1, 2]))
    cache.step([request])
    before, contents = cache.stats(), cache.k.clone()
    with pytest.raises(tw.InvalidProblem, match=message):
        call(cache)
    assert cache.stats() == before
    assert torch.equal(cache.k.isnan(), contents.isnan())
    for layer in range(LAYERS):
        cache.append(rows_of(4), rows_of(4, DIM_V), layer=layer)
    assert cache.length(request) == 4
    assert cache.step([request]) == 1


def test_bits_that_do_not_depend_on_the_batch_are_refused() -> None:
    """The longest prompt of a step and the width of its table are the batch's."""
    cache = Shadow(4, torch.float32).cache
    cache.step([cache.add([1, 2, 3])])
    for layer in range(LAYERS):
        cache.append(rows_of(3), rows_of(3, DIM_V), layer=layer)
    with pytest.raises(tw.Unsupported, match="Call attention_paged"):
        cache.attention(torch.zeros(3, HEADS, DIM), deterministic="batch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_autograd_sees_that_pages_are_written(dtype: torch.dtype) -> None:
    """A backward of an earlier step would read the new keys."""
    cache = tw.PagedKVCache(8, 4, 1, 2, 16, dtype=dtype, device="cpu")
    rows = torch.randn(2, 3, 2, 16).to(dtype)
    cache.step([cache.add([1, 2, 3])])
    for _ in range(2):  # the second time by a launch that is kept
        cache.append(*rows)
        out = cache.attention(torch.randn(3, 4, 16, dtype=dtype, requires_grad=True))
        cache.append(*rows.flip(0))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_tensors_of_a_step_need_a_step() -> None:
    cache = tw.PagedKVCache(4, 4, 1, 1, 8, dtype=torch.float32, device="cpu")
    for call in (cache.block_table, cache.seqlens, cache.cu_seqlens_q, cache.slots, cache.shared_prefix):
        with pytest.raises(tw.InvalidProblem, match="before its tensors are asked for"):
            call()
    with pytest.raises(tw.InvalidProblem, match=r"dtype: expected one of float16, .*, got torch\.uint8"):
        tw.PagedKVCache(4, 4, 1, 2, 8, dtype=torch.uint8, device="cpu")
    with pytest.raises(tw.InvalidProblem, match="num_layers: expected an integer of at least 1"):
        tw.PagedKVCache(4, 4, 0, 1, 8, dtype=torch.float32, device="cpu")


def test_a_failed_step_is_left_by_freeing_its_requests() -> None:
    shadow = Shadow(4, torch.float32)
    doomed, other = shadow.add(list(range(9))), shadow.add(list(range(9)))
    shadow.cache.step([doomed])
    shadow.cache.free(doomed)
    shadow.check([other], shadow.step([other]))


def test_nothing_is_appended_to_a_step_whose_requests_are_finished() -> None:
    shadow = Shadow(4, torch.float32)
    one, other = shadow.add([1, 2]), shadow.add([3, 4, 5])
    assert shadow.cache.step([one, other]) == 5
    shadow.cache.append(rows_of(5), rows_of(5, DIM_V), layer=0)
    shadow.cache.free(one)
    # The forward pass of the others goes on.
    shadow.cache.append(rows_of(5), rows_of(5, DIM_V), layer=1)
    shadow.cache.free(other)
    with pytest.raises(tw.InvalidProblem, match="step: expected a step with a request that goes on"):
        shadow.cache.append(rows_of(5), rows_of(5, DIM_V), layer=0)


@pytest.mark.parametrize("name", ["shared_prefix", "block_table", "max_seqlen_q"])
def test_what_the_cache_passes_itself_is_refused(name: str) -> None:
    shadow = Shadow(4, torch.float32)
    request = shadow.add([1, 2, 3])
    shadow.step([request])
    given: dict[str, Any] = {name: 3}
    for call in (shadow.cache.attention, shadow.cache.explain):
        with pytest.raises(tw.InvalidProblem, match=f"{name}: expected no argument here, got one"):
            call(rows_of(3), **given)


def test_out_of_pages_leaves_everything_as_it_was() -> None:
    shadow = Shadow(4, torch.float32, num_pages=3)
    request = shadow.add(list(range(8)))
    counts = shadow.step([request])
    shadow.check([request], counts)
    other = shadow.add([5] * 5)
    before = shadow.cache.stats()
    with pytest.raises(tw.OutOfPages, match="takes 3 pages, and 1 of 3"):
        shadow.cache.step([request, other])
    assert shadow.cache.stats() == before
    assert shadow.cache.pages_for([5] * 5) == 2 > shadow.cache.available_pages()
    shadow.check([request], shadow.step([request], {request: 3}))
