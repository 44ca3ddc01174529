"""The vLLM backend, driven by metadata of vLLM's shape; the engine itself runs in `make test-vllm`."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import settings
from tilewise.fp8.rounding import encode_rows
from tilewise.integrations import vllm as plugin
from tilewise.integrations.engines import Batch, Layer
from vllm_stand_in import CrossAttentionSpec, FullAttentionSpec, KVQuantMode, installed, metadata_of

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 32, 16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture
def classes() -> Iterator[Any]:
    with installed():
        yield importlib.import_module("tilewise.integrations.vllm.backend")


@dataclass
class Engine:
    """As much of an engine as a backend sees: pages, requests with their keys and values, and steps."""

    module: Any
    dtype: torch.dtype = torch.float32
    heads_first: bool = False
    head_dim_v: int = DIM
    spec: Any = None
    impl_options: dict[str, Any] = field(default_factory=dict)
    blocks: int = 128
    block_size: int = BLOCK
    scales: tuple[Tensor, Tensor] | None = None
    is_int8: bool = False

    def __post_init__(self) -> None:
        self.draw = torch.Generator().manual_seed(5)
        dtype = torch.uint8 if self.scales is not None else torch.int8 if self.is_int8 else self.dtype
        columns = DIM + self.head_dim_v
        shape = (self.blocks, KV_HEADS, self.block_size, columns)
        if not self.heads_first:
            shape = (self.blocks, self.block_size, KV_HEADS, columns)
        memory = torch.zeros(shape, dtype=dtype)
        # What no request wrote is never read: NaN in every format.
        memory.fill_({torch.uint8: 127, torch.int8: -1}.get(dtype, float("nan")))
        self.cache = memory if self.heads_first else memory.transpose(1, 2)
        self.spec = self.spec or FullAttentionSpec(self.block_size)
        config = SimpleNamespace(kv_transfer_config=None)
        self.builder = self.module.TilewiseBuilder(self.spec, ["layer"], config, torch.device("cpu"))
        options = {"num_kv_heads": KV_HEADS} | self.impl_options
        self.impl = self.module.TilewiseImpl(HEADS, DIM, 0.17, **options)
        one = torch.ones(())
        k_scale, v_scale = self.scales or (one, one)
        self.layer = SimpleNamespace(_k_scale=k_scale, _v_scale=v_scale)
        self.free = torch.randperm(self.blocks, generator=self.draw).tolist()
        self.pages: list[list[int]] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw).to(self.dtype)

    def add(self, prefix_of: int | None = None, prefix: int = 0) -> int:
        """A request; of another one's it may have the first blocks, as prefix caching gives them."""
        pages, keys, values = [], self.random(0, KV_HEADS, DIM), self.random(0, KV_HEADS, self.head_dim_v)
        if prefix_of is not None:
            pages = self.pages[prefix_of][: prefix // self.block_size]
            keys, values = self.keys[prefix_of][:prefix], self.values[prefix_of][:prefix]
        self.pages.append(list(pages))
        self.keys.append(keys)
        self.values.append(values)
        return len(self.pages) - 1

    def metadata(self, requests: list[int], counts: list[int], padding: int = 0, **others: Any) -> Any:
        """A step's metadata, after its keys and values were drawn and got their slots."""
        slots = []
        for request, count in zip(requests, counts, strict=True):
            before = len(self.keys[request])
            while len(self.pages[request]) * self.block_size < before + count:
                self.pages[request].append(self.free.pop())
            places = range(before, before + count)
            slots += [self.pages[request][p // self.block_size] * self.block_size + p % self.block_size for p in places]
            self.keys[request] = torch.cat([self.keys[request], self.random(count, KV_HEADS, DIM)])
            self.values[request] = torch.cat([self.values[request], self.random(count, KV_HEADS, self.head_dim_v)])
        self.counts, self.requests = counts, requests
        lengths = [len(self.keys[r]) for r in requests]
        table = torch.zeros(len(lengths), max(len(p) for p in self.pages) + 2, dtype=torch.int32)
        for row, request in enumerate(requests):
            table[row, : len(self.pages[request])] = torch.tensor(self.pages[request], dtype=torch.int32)
        return metadata_of(lengths, counts, table, slots, padding, **others)

    def step(self, requests: list[int], counts: list[int], padding: int = 0, extra: int = 0, **others: Any) -> Tensor:
        """Runs a step as a layer of vLLM does. `extra` rows follow the step's."""
        common = self.metadata(requests, counts, padding, **others)
        batch = self.builder.build(0, common)
        rows = padding + extra
        new = [
            torch.cat([t[r][-n:] for r, n in zip(requests, counts, strict=True)] + [t[0][:1].expand(rows, -1, -1)])
            for t in (self.keys, self.values)
        ]
        q = self.random(sum(counts) + rows, HEADS, DIM)
        output = torch.full((len(q), HEADS, self.head_dim_v), 9.0, dtype=self.dtype)
        self.impl.do_kv_cache_update(self.layer, *new, self.cache, common.slot_mapping)
        self.impl.forward(self.layer, q, *new, self.cache, batch, output)
        self.batch = batch
        self.q, self.output = q, output
        return output

    def expected(self, masks: dict[int, Tensor] | None = None, **flags: Any) -> Tensor:
        """Each request alone, by the reference; `masks` are of whole requests, (length, length)."""
        parts, start = [], 0
        for request, count in zip(self.requests, self.counts, strict=True):
            q = self.q[start : start + count].transpose(0, 1)[None]
            k, v = (self.stored(t[request], s).transpose(0, 1)[None] for t, s in self._caches())
            call = {"causal": True} | flags
            if masks is not None:
                call = {"mask": masks[request][k.shape[2] - count : k.shape[2], : k.shape[2]]} | flags
            made = tw.attention(q.double(), k.double(), v.double(), scale=0.17, backend="reference", **call)
            parts.append(made[0].transpose(0, 1))
            start += count
        return torch.cat(parts)

    def _caches(self) -> list[tuple[list[Tensor], Tensor]]:
        return [(self.keys, self.layer._k_scale), (self.values, self.layer._v_scale)]

    def stored(self, rows: Tensor, scale: Tensor) -> Tensor:
        """What the cache holds of them."""
        if self.is_int8:
            codes, scales = encode_rows(rows)
            return codes.float() * scales[..., None]
        if self.scales is None:
            return rows
        scale = scale.reshape(1, -1, 1)
        return (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    def check(self, **flags: Any) -> None:
        want = self.expected(**flags)
        got = self.output[: len(want)].double()
        torch.testing.assert_close(got, want, atol=TOLERANCE[self.dtype], rtol=TOLERANCE[self.dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("heads_first", [False, True])
def test_prefill_chunks_decoding_and_mixed_steps(classes: Any, dtype: torch.dtype, heads_first: bool) -> None:
    engine = Engine(classes, dtype, heads_first)
    a, b, c = engine.add(), engine.add(), engine.add()
    engine.step([a], [37])  # a prompt
    engine.check()
    engine.step([a, b], [1, 20])  # decoding beside a chunk of a prompt
    engine.check()
    engine.step([b, a, c], [45, 1, 3])  # its next chunk, and another prompt
    engine.check()
    for _ in range(20):  # decoding over the ends of pages
        engine.step([a, b, c], [1, 1, 1])
        engine.check()
    engine.step([c, a], [4, 4])  # drafts to verify
    engine.check()


@pytest.mark.parametrize("most", [1, 3])
def test_decoding_beside_prompts_has_a_call_of_its_own_on_a_gpu(classes: Any, most: int) -> None:
    engine = Engine(classes)
    requests = [engine.add() for _ in range(7)]
    engine.step(requests[:5], [40, 3, 17, 90, 16])
    engine.builder.device, engine.builder.reorder_batch_threshold = torch.device("cuda"), most
    for counts in ([1, 1, 1, 1, 1, 33, 1], [1, 1, 1, 1, 5, 1, 1], [1] * 7, [1, 3, 1, 2, 1, 9, 1], [4] * 7):
        torch.testing.assert_close(engine.step(requests, counts).double(), engine.expected(), atol=2e-5, rtol=2e-5)
        first = next((n for n, count in enumerate(counts) if count > most), 0)
        parts = [(len(part.seqlens_k), part.is_decode) for part in engine.batch.parts]
        assert parts == ([(first, max(counts[:first]) == 1), (7 - first, False)] if first >= 4 else [])


def test_padding_is_not_the_query_of_a_sequence_without_any() -> None:
    draw = torch.Generator().manual_seed(0)
    starts, lengths = torch.tensor([0, 5, 6, 6, 7, 8, 9]).int(), torch.tensor([9, 8, 7, 6, 5, 4]).int()
    batch = Batch(10, starts, 5, lengths, torch.arange(6).int()[:, None], torch.arange(0), page_size=16)
    cache, q = torch.randn(6, 2, 16, 64, generator=draw), torch.randn(10, 4, 32, generator=draw)
    found, expected = torch.empty_like(q), torch.empty_like(q)
    Layer(4, 32, 0.2, 2).attend(q, cache, batch, expected)
    batch.part_decodes(starts)
    Layer(4, 32, 0.2, 2).attend(q, cache, batch, found)
    assert batch.parts
    torch.testing.assert_close(found, expected)


def test_drafts_that_were_trimmed_on_the_device(classes: Any) -> None:
    """Adaptive verification: the host knows how many drafts there are, not whose."""
    engine = Engine(classes)
    requests = [engine.add() for _ in range(5)]
    engine.step(requests[:4], [20] * 4)
    engine.builder.device, engine.builder.reorder_batch_threshold = torch.device("cuda"), 4
    starts = torch.tensor([0, 2, 4, 6, 8, 17], dtype=torch.int32)
    engine.step(requests, [4, 1, 1, 2, 9], query_start_loc_cpu=starts)
    engine.check()
    assert len(engine.batch.parts) == 2


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"sliding_window": 20}, {"window": (19, 0)}),
        ({"sliding_window": 1}, {"window": (0, 0)}),
        ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
        ({"logits_soft_cap": 0.0}, {}),
        ({"alibi_slopes": [0.5, 0.25, 0.1, 0.01]}, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.01])}),
        ({"sinks": torch.tensor([1.0, -2.0, 0.5, 3.0])}, {"sinks": torch.tensor([1.0, -2.0, 0.5, 3.0])}),
        (
            {"sinks": torch.tensor([1.0, -2.0, 0.5, 3.0]).bfloat16(), "sliding_window": 9},
            {"sinks": torch.tensor([1.0, -2.0, 0.5, 3.0]), "window": (8, 0)},
        ),
    ],
    ids=str,
)
def test_what_a_layer_may_ask_for(classes: Any, options: dict[str, Any], flags: dict[str, Any]) -> None:
    engine = Engine(classes, impl_options=options)
    a, b = engine.add(), engine.add()
    for counts in ([50, 7], [1, 30], [1, 1], [1, 1]):
        engine.step([a, b], counts)
        engine.check(**flags)


def test_sinks_that_are_loaded_after_the_layer_was_made(classes: Any) -> None:
    sinks = torch.zeros(HEADS)
    engine = Engine(classes, impl_options={"sinks": sinks})
    a = engine.add()
    engine.step([a], [30])
    engine.check(sinks=torch.zeros(HEADS))
    sinks.copy_(torch.tensor([3.0, 2.0, 1.0, -1.0]))
    engine.step([a], [1])
    engine.check(sinks=sinks)


def test_values_with_fewer_channels_than_keys(classes: Any) -> None:
    engine = Engine(classes, head_dim_v=16)
    engine.step([engine.add(), engine.add()], [20, 3])
    engine.check()


def test_padding_of_a_captured_step(classes: Any) -> None:
    """Requests without keys and slots of -1: nothing is written for them, and their rows are 0."""
    engine = Engine(classes)
    a, b = engine.add(), engine.add()
    engine.step([a, b], [20, 33])
    before = engine.cache.clone()
    engine.step([a, b], [1, 1], padding=3)
    engine.check()
    assert not engine.output[2:].any()
    changed = (engine.cache.nan_to_num(7.0) != before.nan_to_num(7.0)).any(3).any(1)
    assert int(changed.sum()) == 2


def test_rows_past_the_step_are_left_alone(classes: Any) -> None:
    """Piecewise graphs pad q, k, v and the output, but not the metadata."""
    engine = Engine(classes)
    a, b = engine.add(), engine.add()
    engine.step([a, b], [20, 33], extra=11)
    engine.check()
    assert (engine.output[53:] == 9.0).all()


@pytest.mark.parametrize(
    ("k", "v", "reason"),
    [
        (torch.ones(1, 2, 8), torch.ones(1, 2, 8), r"k: expected the dtype of the cache, torch\.bfloat16"),
        (torch.ones(1, 2, 8).bfloat16(), torch.ones(1, 2, 8), r"v: expected the dtype of the cache"),
        (torch.ones(1, 1, 8).bfloat16(), torch.ones(1, 2, 8).bfloat16(), r"k: expected \(1 token, 2, 8\)"),
        (torch.ones(2, 2, 8).bfloat16(), torch.ones(1, 2, 8).bfloat16(), r"v: expected \(2 tokens, 2, 8\)"),
    ],
)
def test_rows_that_do_not_fit_the_cache(k: Tensor, v: Tensor, reason: str) -> None:
    cache = torch.zeros(3, 2, 16, 16, dtype=torch.bfloat16)
    with pytest.raises(tw.InvalidProblem, match=reason):
        Layer(2, 8, 1.0, 2).write(k, v, cache, torch.tensor([5]))
    assert not cache.any()


def test_keys_and_values_of_other_dtypes() -> None:
    cache = torch.zeros(3, 16, 2, 8, dtype=torch.bfloat16), torch.zeros(3, 16, 2, 8)
    with pytest.raises(tw.InvalidProblem, match=r"kv_cache: expected values in the dtype of keys, torch\.bfloat16"):
        Layer(2, 8, 1.0, 2).pages(cache)


def test_both_directions_over_pages(classes: Any) -> None:
    engine = Engine(classes, impl_options={"sliding_window": 12})
    a, b = engine.add(), engine.add()
    engine.step([a, b], [40, 9], causal=False)
    engine.check(causal=False, window=(11, 11))


SPANS = {0: [(4, 21), (22, 30)], 1: [(0, 3)], 2: [(40, 44)]}


def seen_with_spans(request: int, window: int | None, is_clamped: bool) -> Tensor:
    i, j = torch.arange(90)[:, None], torch.arange(90)
    near = torch.ones(90, 90, dtype=torch.bool) if window is None else i - j < window
    mask = (j <= i) & near
    for first, last in SPANS[request]:
        both = (i >= first) & (i <= last) & (j >= first) & (j <= last)
        mask |= both & near if is_clamped else both
    return mask


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("is_clamped", [False, True])
@pytest.mark.parametrize("cache", ["model", "fp8", "int8"])
def test_image_tokens_see_each_other(classes: Any, cache: str, window: int | None, is_clamped: bool) -> None:
    given: dict[str, Any] = {"sliding_window": window, "sinks": torch.tensor([1.0, -2.0, 0.5, 3.0])}
    options: dict[str, Any] = {}
    if cache == "fp8":
        options = {"scales": (torch.tensor(2.0**-6), torch.tensor(2.0**-5))}
        given["kv_cache_dtype"] = "fp8"
    if cache == "int8":
        spec = FullAttentionSpec(BLOCK, DIM, DIM, KVQuantMode.INT8_PER_TOKEN_HEAD)
        options = {"spec": spec, "is_int8": True, "head_dim_v": 80 - DIM}
        given["kv_cache_dtype"] = "int8_per_token_head"
    engine = Engine(classes, impl_options=given, **options)
    engine.head_dim_v = DIM
    engine.layer.mm_prefix_clamp_sliding_window = is_clamped
    requests = [engine.add(), engine.add(), engine.add()]
    masks = {r: seen_with_spans(r, window, is_clamped) for r in requests}
    # A prompt; decoding beside prompts, of which one ends within a span; then none has a query in a span.
    for chosen, counts in (([0], [33]), ([0, 2, 1], [1, 42, 12]), ([2, 0], [7, 1]), ([1, 0, 2], [1, 1, 1])):
        spans = {row: SPANS[request] for row, request in enumerate(chosen)}
        lengths = torch.tensor([len(engine.keys[r]) + n for r, n in zip(chosen, counts, strict=True)] + [0, 0])
        engine.step(chosen, counts, 2, 3, mm_req_doc_ranges=spans, seq_lens_cpu_upper_bound=lengths)
        engine.check(masks=masks, sinks=given["sinks"])
        assert (engine.output[sum(counts) + 2 :] == 9.0).all()
    assert engine.batch.spans is None
    assert classes.TilewiseBackend.supports_mm_prefix()


def test_a_model_may_clear_the_spans_of_a_layer(classes: Any) -> None:
    """Gemma 4 does, before its layers without a window."""
    engine = Engine(classes)
    engine.step([engine.add()], [33], mm_req_doc_ranges={0: SPANS[0]})
    assert engine.batch.mm_prefix_range is not None
    engine.batch.mm_prefix_range = None
    engine.impl.forward(engine.layer, engine.q, None, None, engine.cache, engine.batch, engine.output)
    engine.check()


def test_steps_in_both_directions_of_requests_without_images(classes: Any) -> None:
    engine = Engine(classes)
    engine.step([engine.add(), engine.add()], [20, 3], causal=False, mm_req_doc_ranges={0: [], 1: []})
    engine.check(causal=False)


@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
def test_encoders_attend_to_the_step_alone(classes: Any, kind: str) -> None:
    engine = Engine(classes, impl_options={"attn_type": kind, "sliding_window": 12})
    a, b = engine.add(), engine.add()
    untouched = engine.cache.clone()
    engine.step([a, b], [40, 9], causal=False)
    engine.check(causal=False, window=(11, 11))
    assert torch.equal(engine.cache.isnan(), untouched.isnan())


def test_cross_attention_reads_all_keys_of_the_encoder(classes: Any) -> None:
    """vLLM passes the encoder's lengths, and its keys in the first step alone."""
    engine = Engine(classes, spec=CrossAttentionSpec(BLOCK), impl_options={"attn_type": "encoder_decoder"})
    a, b = engine.add(), engine.add()
    common = engine.metadata([a, b], [40, 9], causal=False)  # the encoder's rows, which get their slots
    k, v = (torch.cat([t[a], t[b]]) for t in (engine.keys, engine.values))
    for counts in ([3, 5], [1, 1]):
        totals = torch.tensor([0, *counts]).cumsum(0).int()
        common.query_start_loc = common.query_start_loc_cpu = totals
        common.num_actual_tokens, common.max_query_len = sum(counts), max(counts)
        batch = engine.builder.build(0, common)
        engine.q, engine.counts = engine.random(sum(counts), HEADS, DIM), counts
        engine.output = torch.empty_like(engine.q)
        if k is not None:
            engine.impl.do_kv_cache_update(engine.layer, k, v, engine.cache, common.slot_mapping)
        engine.impl.forward(engine.layer, engine.q, k, v, engine.cache, batch, engine.output)
        engine.check(causal=False)
        k = v = None  # type: ignore[assignment]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_a_cache_in_e4m3(classes: Any, dtype: torch.dtype, per_head: bool) -> None:
    # Powers of two, so that dividing and multiplying by the inverse round alike.
    scales = torch.tensor([2.0**-6, 2.0**-7]), torch.tensor([2.0**-5, 2.0**-8])
    if not per_head:
        scales = scales[0][0], scales[1][0]
    engine = Engine(classes, dtype, scales=scales, impl_options={"kv_cache_dtype": "fp8"})
    a, b = engine.add(), engine.add()
    for counts in ([50, 7], [1, 30], [1, 1]):
        engine.step([a, b], counts)
        engine.check()
    # Scales that vLLM calibrates later are read where they are. What was stored stays as it was written.
    if not per_head:
        codes = engine.cache.clone()
        engine.layer._k_scale.mul_(2.0)
        keys = [t.clone() for t in engine.keys]
        engine.step([a, b], [1, 1])
        for request in (a, b):  # all old keys count twice now
            engine.keys[request][:-1] = 2.0 * engine.stored(keys[request], scales[0] / 2.0).to(dtype)
        assert int((engine.cache != codes).any(3).any(1).sum()) == 2
        want, got = engine.expected(), engine.output.double()
        torch.testing.assert_close(got, want, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads_first", [False, True])
def test_a_cache_in_int8(classes: Any, dtype: torch.dtype, heads_first: bool) -> None:
    """A scale for each token and head, in the cell of its numbers; other cells and unused bytes stay as they are."""
    spec = FullAttentionSpec(BLOCK, DIM, DIM, KVQuantMode.INT8_PER_TOKEN_HEAD)
    cell = classes.TilewiseBackend.customize_spec(spec).state_content_bytes
    assert cell == 80
    assert classes.TilewiseBackend.customize_spec(FullAttentionSpec(BLOCK)).state_content_bytes is None
    given = {"kv_cache_dtype": "int8_per_token_head"}
    engine = Engine(classes, dtype, heads_first, head_dim_v=cell - DIM, spec=spec, impl_options=given, is_int8=True)
    engine.head_dim_v = DIM
    a, b = engine.add(), engine.add()
    for counts in ([50, 7], [1, 30], [1, 1]):
        engine.step([a, b], counts, padding=2)
        engine.check()
    written = engine.cache.view(torch.float32)[..., -2:]
    assert int(written.isfinite().all(-1).sum()) == KV_HEADS * (52 + 38)
    assert bool((engine.cache[..., 2 * DIM : -8] == -1).all())
    with pytest.raises(tw.InvalidProblem, match=r"kv_cache: expected int8 \(num_pages, 2, page_size, 80\)"):
        engine.impl.layer.pages(engine.cache[..., :72])
    rows, slots = torch.zeros(2, KV_HEADS, DIM), torch.tensor([0, 1])
    with pytest.raises(tw.InvalidProblem, match="k: expected float16, bfloat16 or float32"):
        engine.impl.layer.write(rows.double(), rows, engine.cache, slots)
    with pytest.raises(tw.InvalidProblem, match="slots: expected an int64 tensor"):
        engine.impl.layer.write(rows, rows, engine.cache, slots.int())


@pytest.mark.usefixtures("always_cascade")
def test_equal_first_pages_are_read_once(classes: Any) -> None:
    """The rule leaves so few keys to every request; without its price they are grouped."""
    engine = Engine(classes)
    stem = engine.add()
    engine.step([stem], [100])
    engine.check()
    sharing = [engine.add(stem, 96), engine.add(stem, 96), engine.add(stem, 48)]
    alone = engine.add()
    engine.step([*sharing, alone], [9, 30, 5, 12])
    engine.check()
    # Grouping all three saves 2 x 48 keys, as grouping two saves 96.
    assert sum((g.sequences - 1) * g.seqlen_k for g in engine.batch.shared_prefix.groups) == 96
    for _ in range(3):
        engine.step([alone, *sharing, stem], [1] * 5)
        engine.check()
        assert sum(g.sequences for g in engine.batch.shared_prefix.groups) >= 3


def test_pages_that_nobody_shares_make_no_groups(classes: Any) -> None:
    engine = Engine(classes)
    a, b = engine.add(), engine.add()
    engine.step([a, b], [40, 40])
    engine.step([a, b], [1, 1])
    assert engine.batch.shared_prefix is None


@pytest.mark.parametrize("how", ["another tensor", "data", "set_", "strides"])
def test_a_cache_that_is_replaced(classes: Any, how: str) -> None:
    """Views of the old memory are not used again, also where the tensor is the same object."""
    engine = Engine(classes)
    a = engine.add()
    engine.step([a], [20])
    old, new = engine.cache.detach(), engine.cache.clone(memory_format=torch.preserve_format)
    if how == "another tensor":
        engine.cache = new
    elif how == "data":
        engine.cache.data = new
    elif how == "set_":
        engine.cache.set_(new)  # type: ignore[call-overload]
    else:  # at the same address, heads and rows in another order
        rows = old.clone().contiguous()
        old.untyped_storage().copy_(rows.untyped_storage())
        engine.cache.as_strided_(rows.shape, rows.stride())
    kept = None if how == "strides" else old.clone()
    engine.step([a], [1])
    engine.check()
    if kept is not None:
        assert torch.equal(old.nan_to_num(9), kept.nan_to_num(9)), "the old memory was written"


def test_scales_that_move(classes: Any) -> None:
    scales = torch.tensor(2.0**-6), torch.tensor(2.0**-5)
    engine = Engine(classes, scales=scales, impl_options={"kv_cache_dtype": "fp8"})
    a = engine.add()
    engine.step([a], [20])
    engine.layer._k_scale.data = scales[0] * 2.0
    keys = engine.keys[a].clone()
    engine.step([a], [1])
    engine.keys[a][:-1] = 2.0 * engine.stored(keys, scales[0] / 2.0)  # old keys count twice now
    torch.testing.assert_close(engine.output.double(), engine.expected(), atol=0.1, rtol=0.1)


def test_a_run_without_metadata_gives_zeros(classes: Any) -> None:
    engine = Engine(classes)
    output = torch.ones(3, HEADS, DIM)
    q = engine.random(3, HEADS, DIM)
    assert engine.impl.forward(engine.layer, q, q, q, torch.empty(0), None, output) is output
    assert not output.any()


def test_refusals_name_the_reason(classes: Any) -> None:
    offered = classes.TilewiseBackend
    assert offered.supports_head_size(80)
    assert not offered.supports_head_size(576)
    rest = (16, False, False, False, False, None)
    assert "576" in offered.supports_combination(576, torch.bfloat16, "auto", *rest)
    assert "bfloat16" in offered.supports_combination(64, torch.float16, "bfloat16", *rest)
    assert offered.supports_combination(64, torch.bfloat16, "bfloat16", *rest) is None
    assert "CUSTOM_MLA" in offered.supports_combination(576, torch.bfloat16, "auto", 16, True, *rest[2:])
    assert not offered.supports_kv_cache_dtype("fp8_e5m2")
    assert offered.supports_kv_cache_dtype("int8_per_token_head")
    assert not offered.supports_kv_cache_dtype("fp8_per_token_head")
    with pytest.raises(tw.Unsupported, match="fp8_e5m2"):  # the CPU platform does not ask before
        classes.TilewiseImpl(HEADS, DIM, 1.0, KV_HEADS, kv_cache_dtype="fp8_e5m2")
    with pytest.raises(tw.Unsupported, match="head size 600"):
        classes.TilewiseImpl(HEADS, 600, 1.0, KV_HEADS)
    config = SimpleNamespace(kv_transfer_config=object())
    with pytest.raises(tw.Unsupported, match="KV connectors"):
        classes.TilewiseBuilder(FullAttentionSpec(16), [], config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"causal": torch.tensor([True])}, "some requests are causal"),
        ({"mm_req_doc_ranges": {0: [(1, 3)]}, "causal": False}, "image tokens"),
        ({"rswa_prefix_lens": torch.tensor([4])}, "R-SWA"),
        ({"dcp_local_seq_lens": torch.tensor([4])}, "context parallelism"),
    ],
    ids=str,
)
def test_steps_that_are_refused(classes: Any, asked: dict[str, Any], reason: str) -> None:
    engine = Engine(classes)
    common = engine.metadata([engine.add()], [5], **asked)
    with pytest.raises(tw.Unsupported, match=reason):
        engine.builder.build(0, common)


def test_results_in_fewer_bits_are_refused(classes: Any) -> None:
    engine = Engine(classes)
    a = engine.add()
    engine.step([a], [5])
    q = engine.random(5, HEADS, DIM)
    with pytest.raises(tw.Unsupported, match="fused output"):
        engine.impl.forward(engine.layer, q, q, q, engine.cache, engine.batch, q, output_scale=torch.ones(1))


def test_pages_of_another_size_than_the_table_counts(classes: Any) -> None:
    engine = Engine(classes, spec=FullAttentionSpec(2 * BLOCK))
    with pytest.raises(tw.InvalidProblem, match="pages of 32 rows"):
        engine.step([engine.add()], [5])


def test_captured_steps_are_those_of_equally_many_queries(classes: Any) -> None:
    """With images of one query: graphs have no spans."""
    for images, support in ((False, "UNIFORM_BATCH"), (True, "UNIFORM_SINGLE_TOKEN_DECODE")):
        config = SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=images))
        assert classes.TilewiseBuilder.get_cudagraph_support(config, None).name == support


@pytest.mark.parametrize("on_cpu", [False, True])
def test_registering(on_cpu: bool) -> None:
    with installed() as registered, settings.overridden(vllm_cpu=on_cpu):
        plugin.register()
        replaced = {"CPU_ATTN": plugin.BACKEND} | dict.fromkeys(("CPU_MLA", "AMX_MLA"), plugin.LATENT_BACKEND)
        offered = {"CUSTOM": plugin.BACKEND, "CUSTOM_MLA": plugin.LATENT_BACKEND}
        assert registered.paths == offered | (replaced if on_cpu else {})
        for backend, path in offered.items():
            module, name = path.rsplit(".", 1)
            assert getattr(importlib.import_module(module), name).get_name() == backend
