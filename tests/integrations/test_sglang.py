"""The SGLang backend, driven by stand-ins of SGLang's batches, layers and pools; the engine itself needs CUDA."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import sglang_stand_in as stand_in
import tilewise as tw
from sglang_stand_in import AttentionType, ForwardBatch, ForwardMode, MHATokenToKVPool, RadixAttention, installed
from tilewise.integrations import sglang as plugin

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 8
CONTEXT, REQUESTS, SCALE = 200, 12, 0.17
E4M3 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def engine_is_there() -> Iterator[None]:
    with installed():
        yield


@dataclass
class Engine:
    """As much of SGLang as a backend sees: a pool of slots, requests, and steps."""

    dtype: torch.dtype = torch.float32
    page_size: int = PAGE
    layout: str = "nhd"
    v_head_dim: int = DIM
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    is_e4m3: bool = False
    layer_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draw = torch.Generator().manual_seed(5)
        dtype = E4M3 if self.is_e4m3 else self.dtype
        pages = 64 if self.page_size > 1 else 128
        size = pages * self.page_size
        self.pool = MHATokenToKVPool(size, self.page_size, dtype, KV_HEADS, DIM, 2, self.v_head_dim, self.layout)
        self.runner = stand_in.model_runner(self.pool, self.dtype, REQUESTS, CONTEXT)
        self.table = self.runner.req_to_token_pool.req_to_token
        self.backend: Any = _made(self.runner)
        options = {"v_head_dim": self.v_head_dim} | self.layer_options
        self.layers = [RadixAttention(HEADS, DIM, SCALE, KV_HEADS, n, **options) for n in range(2)]
        for layer in self.layers:
            layer.k_scale, layer.v_scale = self.scales
        # Page 0 is for padding.
        self.free = (torch.randperm(pages - 1, generator=self.draw) + 1).tolist()
        self.keys = [[self.random(0, KV_HEADS, DIM)] * (REQUESTS + 1) for _ in self.layers]
        self.values = [[self.random(0, KV_HEADS, self.v_head_dim)] * (REQUESTS + 1) for _ in self.layers]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw).to(self.dtype)

    def batch(self, mode: ForwardMode, requests: list[int], counts: list[int], **changed: Any) -> ForwardBatch:
        """A step, after its keys and values were drawn and got their slots."""
        slots = []
        self.mode, self.requests, self.counts = mode, requests, counts
        for request, count in zip(requests, counts, strict=True):
            before = len(self.keys[0][request])
            for position in range(before, before + count):
                if position % self.page_size == 0:
                    self.page = self.free.pop()
                    self.table[request, position] = self.page * self.page_size
                else:
                    self.table[request, position] = self.table[request, position - 1] + 1
                slots.append(int(self.table[request, position]))
            for stored, dim in ((self.keys, DIM), (self.values, self.v_head_dim)):
                for rows in stored:
                    rows[request] = torch.cat([rows[request], self.random(count, KV_HEADS, dim)])
        lengths = torch.tensor([len(self.keys[0][request]) for request in requests])
        given: dict[str, Any] = {"seq_lens_cpu": lengths.clone(), "seq_lens_sum": int(lengths.sum())}
        if not mode.is_decode_or_idle():
            given |= {"extend_seq_lens_cpu": counts, "extend_num_tokens": sum(counts)}
            given |= {"extend_seq_lens": torch.tensor(counts, dtype=torch.int32)}
            given |= {"extend_prefix_lens": (lengths - torch.tensor(counts)).int()}
        indices = torch.tensor(requests)
        return ForwardBatch(mode, len(requests), indices, lengths, torch.tensor(slots), **(given | changed))

    def run(self, batch: ForwardBatch, extra: int = 0, **kwargs: Any) -> None:
        """All layers, as models call them: q as flat rows, of which `extra` are padding."""
        self.q, self.out = [], []
        for layer in self.layers:
            n = layer.layer_id
            new = [
                torch.cat([t[n][r][len(t[n][r]) - c :] for r, c in zip(self.requests, self.counts, strict=True)])
                for t in (self.keys, self.values)
            ]
            k, v = (torch.cat([t, t[:1].expand(extra, -1, -1)]) for t in new)
            q = self.random(sum(self.counts) + extra, HEADS * DIM)
            self.q.append(q)
            self.out.append(self.backend.forward(q, k, v, layer, batch, **kwargs))

    def step(self, mode: ForwardMode, requests: list[int], counts: list[int], extra: int = 0, **kwargs: Any) -> None:
        batch = self.batch(mode, requests, counts)
        self.backend.init_forward_metadata(batch)
        self.run(batch, extra, **kwargs)

    def stored(self, rows: Tensor, scale: Tensor | None) -> Tensor:
        """What the pool holds of rows."""
        if not self.is_e4m3:
            return rows.double()
        factor = 1.0 if scale is None else float(scale)
        return ((rows.float() / factor).clamp(-448, 448).to(E4M3).float() * factor).double()

    def check(self, **flags: Any) -> None:
        """Each request alone, by the reference."""
        for n, (q, out) in enumerate(zip(self.q, self.out, strict=True)):
            total, start = sum(self.counts), 0
            assert out.shape == (len(q), HEADS * self.v_head_dim)
            assert not out[total:].any()
            for request, count in zip(self.requests, self.counts, strict=True):
                mine = q[start : start + count].view(count, HEADS, DIM).double()
                k, v = (
                    self.stored(t[n][request], s).transpose(0, 1)[None]
                    for t, s in zip((self.keys, self.values), self.scales, strict=True)
                )
                given = {"causal": True, "scale": SCALE} | flags
                want = tw.attention(mine.transpose(0, 1)[None], k, v, backend="reference", **given)
                got = out[start : start + count].view(count, HEADS, -1).double()
                close = TOLERANCE[self.dtype]
                torch.testing.assert_close(got, want[0].transpose(0, 1), atol=close, rtol=close)
                start += count


def _made(runner: Any) -> Any:
    return importlib.import_module("tilewise.integrations.sglang.backend").TilewiseAttnBackend(runner)


def live(engine: Engine, **flags: Any) -> None:
    """Prompts, a chunk together with decoding, decoding over page borders, and a request that starts later."""
    kwargs = {"sinks": flags["sinks"]} if "sinks" in flags else {}
    engine.step(ForwardMode.EXTEND, [1, 5, 2], [19, 1, 8], **kwargs)
    engine.check(**flags)
    engine.step(ForwardMode.MIXED, [1, 5, 2, 7], [13, 1, 1, 3], extra=4, **kwargs)
    engine.check(**flags)
    for _ in range(9):
        engine.step(ForwardMode.DECODE, [7, 1, 2], [1, 1, 1], **kwargs)
        engine.check(**flags)


@pytest.mark.parametrize("page_size", [1, PAGE])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_prefill_mixed_steps_and_decoding(dtype: torch.dtype, layout: str, page_size: int) -> None:
    live(Engine(dtype, page_size, layout))


def test_decoding_beside_prompts_has_a_call_of_its_own_on_a_gpu() -> None:
    engine = Engine()
    engine.step(ForwardMode.EXTEND, [1, 2, 3, 4, 5], [9, 1, 12, 8, 3])
    engine.backend.device = torch.device("cuda")
    steps = {
        (2, 3, 1, 1, 1, 1, 1): [2, 5], (4, 1, 2, 1, 1, 1): [], (1, 1, 1, 1, 7, 1): [4, 2], (1, 1, 1, 1, 1): [],
        (5, 6): [], (1, 1, 1, 1, 9, 1, 1, 1, 1, 1): [4, 1, 5],
    }  # fmt: skip
    for counts, sizes in steps.items():
        engine.step(ForwardMode.MIXED, [6, 7, 1, 2, 3, 4, 5, 8, 9, 10][: len(counts)], list(counts), extra=2)
        engine.check()
        parts = engine.backend.forward_metadata.parts
        assert [len(part.seqlens_k) for part in parts] == sizes
        assert [part.is_decode for part in parts] == [size >= 4 for size in sizes]


# What layers may ask for, and the flags of attention that it means.
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another head_dim of values": ({"v_head_dim": 16}, {}),
    "a window counts the keys before the query": ({"layer_options": {"sliding_window_size": 6}}, {"window": (6, 0)}),
    "softcap": ({"layer_options": {"logit_cap": 2.0}}, {"softcap": 2.0}),
    "sinks": ({}, {"sinks": torch.linspace(-1, 3, HEADS)}),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_layers_may_ask_for(name: str) -> None:
    options, flags = ASKED[name]
    live(Engine(**options), **flags)


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("scales", [(None, None), (torch.tensor(0.02), torch.tensor([0.01]))])
def test_a_cache_in_e4m3(scales: tuple[Tensor | None, Tensor | None], layout: str) -> None:
    live(Engine(torch.bfloat16, is_e4m3=True, scales=scales, layout=layout))


@pytest.mark.parametrize("how", ["data", "set_", "another tensor"])
def test_a_pool_that_moves(how: str) -> None:
    """A pool that is offloaded and comes back may have other memory."""
    engine = Engine()
    engine.step(ForwardMode.EXTEND, [1, 2], [19, 4])
    old = [buffer.detach() for buffer in (*engine.pool.k_buffer, *engine.pool.v_buffer)]
    for buffers in (engine.pool.k_buffer, engine.pool.v_buffer):
        for n, buffer in enumerate(buffers):
            if how == "data":
                buffer.data = buffer.clone()
            elif how == "set_":
                buffer.set_(buffer.clone())  # type: ignore[call-overload]
            else:
                buffers[n] = buffer.clone()
    kept = [buffer.clone() for buffer in old]
    engine.step(ForwardMode.DECODE, [1, 2], [1, 1])
    engine.check()
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(old, kept, strict=True))


@pytest.mark.parametrize("how", ["in place", "data", "in place, bf16"])
def test_scales_that_change(how: str) -> None:
    scale = torch.tensor(2.0**-6, dtype=torch.bfloat16 if "bf16" in how else torch.float32)
    engine = Engine(torch.bfloat16, is_e4m3=True, scales=(scale, torch.tensor(2.0**-6)))
    engine.step(ForwardMode.EXTEND, [1], [19])
    if how == "data":
        scale.data = scale * 2.0
    else:
        scale.mul_(2.0)
    before = [rows[1].clone() for rows in engine.keys]
    engine.step(ForwardMode.DECODE, [1], [1])
    for rows, old in zip(engine.keys, before, strict=True):  # old keys count twice now
        rows[1][:-1] = 2.0 * engine.stored(old, scale / 2.0).bfloat16()
    engine.check()


def test_encoders_see_both_directions() -> None:
    engine = Engine(layer_options={"attn_type": AttentionType.ENCODER_ONLY})
    engine.step(ForwardMode.EXTEND, [1, 2], [11, 3])
    engine.check(causal=False)


def test_layers_that_share_keys_write_none() -> None:
    engine = Engine()
    engine.step(ForwardMode.EXTEND, [1], [10])
    before = [buffer.clone() for buffer in engine.pool.k_buffer]
    batch = engine.batch(ForwardMode.DECODE, [1], [1])
    engine.backend.init_forward_metadata(batch)
    engine.run(batch)
    kept = [buffer.clone() for buffer in engine.pool.k_buffer]
    assert not torch.equal(before[0].nan_to_num(), kept[0].nan_to_num())
    q = engine.q[0]
    same = engine.backend.forward(q, None, None, engine.layers[0], batch)
    torch.testing.assert_close(same, engine.out[0])
    same = engine.backend.forward(q, q[:, :1], q[:, :1], engine.layers[0], batch, save_kv_cache=False)
    torch.testing.assert_close(same, engine.out[0])
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(kept, engine.pool.k_buffer, strict=True))
    assert engine.pool.waited >= 4, "the pool is asked each time, because keys may still be loading"


def test_idle_steps() -> None:
    engine = Engine()
    batch = engine.batch(ForwardMode.IDLE, [], [])
    engine.backend.init_forward_metadata(batch)
    assert engine.backend.forward(torch.empty(0, HEADS * DIM), None, None, engine.layers[0], batch).shape == (0, 128)


def test_lengths_on_the_device_alone() -> None:
    engine = Engine()
    engine.step(ForwardMode.EXTEND, [3], [21])
    batch = engine.batch(ForwardMode.DECODE, [3], [1], seq_lens_cpu=None, seq_lens_sum=None)
    engine.backend.init_forward_metadata(batch)
    engine.run(batch)
    engine.check()


def test_captured_steps_read_the_same_memory() -> None:
    """The order of a graph runner: state, capture at each size, then replays with other requests and padding."""
    engine = Engine()
    backend = engine.backend
    engine.step(ForwardMode.EXTEND, [1, 2, 3, 4], [30, 7, 1, 16])
    backend.init_cuda_graph_state(4, 4)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    static = {
        "req_pool_indices": torch.zeros(4).long(),
        "seq_lens": torch.full((4,), fill),
        "slots": torch.zeros(4).long(),
    }
    seen: dict[int, Any] = {}
    for size in (4, 2):
        batch = ForwardBatch(
            ForwardMode.DECODE, size, static["req_pool_indices"][:size], static["seq_lens"][:size],
            static["slots"][:size], size, static["seq_lens"][:size],
        )  # fmt: skip
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
        seen[size] = backend.forward_metadata
    for size, requests in ((4, [3, 1, 2]), (2, [4, 1]), (4, [1, 2, 3, 4])):
        real = engine.batch(ForwardMode.DECODE, requests, [1] * len(requests))
        padding = size - len(requests)
        values = {"req_pool_indices": real.req_pool_indices, "seq_lens": real.seq_lens, "slots": real.out_cache_loc}
        for name, tensor in values.items():
            static[name][:size] = torch.nn.functional.pad(tensor, (0, padding), value=fill if name == "seq_lens" else 0)
        batch = ForwardBatch(
            ForwardMode.DECODE, size, static["req_pool_indices"][:size], static["seq_lens"][:size],
            static["slots"][:size], int(real.seq_lens.sum()), static["seq_lens"][:size].clone(),
        )  # fmt: skip
        backend.init_forward_metadata_out_graph(batch)
        metadata, before = backend.forward_metadata, seen[size]
        for name in ("block_table", "seqlens_k"):
            a, b = getattr(metadata, name), getattr(before, name)
            assert (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())
        # What a graph does: the calls of the captured step, with the batch of its capture.
        backend.forward_metadata = before
        engine.run(batch, extra=padding)
        total = len(requests)
        engine.out = [out[:total] for out in engine.out]
        engine.q = [q[:total] for q in engine.q]
        engine.check()


def test_registered_by_name() -> None:
    with installed() as registered:
        plugin.register()
        plugin.register()
        assert registered.choices == ["triton", "fa3", "tilewise"]
        pool = MHATokenToKVPool(64, PAGE, torch.float32, KV_HEADS, DIM, 1)
        made = registered.backends["tilewise"](stand_in.model_runner(pool, torch.float32, REQUESTS, CONTEXT))
        assert type(made).__name__ == "TilewiseAttnBackend"


def test_importing_the_plugin_imports_nothing_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert importlib.reload(plugin).NAME == "tilewise"


POOL = (64, PAGE, torch.float32, KV_HEADS, DIM, 1)
RUNNERS: dict[str, tuple[dict[str, Any], str]] = {
    "latent attention": ({"use_mla_backend": True}, "latent"),
    "encoder-decoder": ({"config": {"is_encoder_decoder": True}}, "encoder-decoder"),
    "chunks": ({"config": {"is_local_attention_model": True}}, "chunk"),
    "drafts": ({"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "speculative"),
    "unified memory": ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "--enable-unified-memory"),
    "two pools": ({"token_to_kv_pool": stand_in.SWAKVPool()}, "--disable-hybrid-swa-memory"),
    "another dtype": ({"dtype": torch.bfloat16}, "torch.bfloat16"),
    "e5m2": ({"token_to_kv_pool": MHATokenToKVPool(*POOL[:2], torch.float8_e5m2, *POOL[3:])}, "e5m2"),
    "layout": ({"token_to_kv_pool": MHATokenToKVPool(*POOL, kv_cache_layout="vectorized_5d")}, "vectorized_5d"),
}


@pytest.mark.parametrize("name", RUNNERS)
def test_servers_that_are_refused(name: str) -> None:
    changed, words = RUNNERS[name]
    given: dict[str, Any] = {"pool": MHATokenToKVPool(*POOL), "dtype": torch.float32} | changed
    with pytest.raises(tw.Unsupported, match=words):
        _made(stand_in.model_runner(max_requests=REQUESTS, context=CONTEXT, **given))


LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    "cross attention": ({"is_cross_attention": True}, "cross"),
    "bidirectional decoder": ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "decoder_bidirectional"),
    "positions": ({"pos_encoding_mode": "ALIBI"}, "ALIBI"),
    "capping": ({"logit_cap": 5.0, "logit_capping_method": "clip"}, "clip"),
    "temperature": ({"xai_temperature_len": 1024}, "temperature"),
    "wide values": ({"v_head_dim": 1024}, "1024"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_are_refused(name: str) -> None:
    changed, words = LAYERS[name]
    engine = Engine()
    batch = engine.batch(ForwardMode.EXTEND, [1], [3])
    engine.backend.init_forward_metadata(batch)
    layer = RadixAttention(HEADS, DIM, SCALE, KV_HEADS, **changed)
    with pytest.raises(tw.Unsupported, match=words):
        engine.backend.forward(torch.zeros(3, HEADS * DIM), None, None, layer, batch)


STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "drafts": ({"spec_info": object()}, "speculative"),
    "prefill context parallelism": ({"attn_cp_metadata": object()}, "context parallelism"),
    "decode context parallelism": ({"dcp_kv_mask": torch.zeros(1)}, "context parallelism"),
    "multi-item scoring": ({"multi_item_delimiter_indices": []}, "multi-item"),
    "verification": ({"forward_mode": ForwardMode.TARGET_VERIFY}, "TARGET_VERIFY"),
    "diffusion": ({"forward_mode": ForwardMode.DLLM_EXTEND}, "DLLM_EXTEND"),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_that_are_refused(name: str) -> None:
    changed, words = STEPS[name]
    engine = Engine()
    batch = engine.batch(ForwardMode.EXTEND, [1], [3])
    for attribute, value in changed.items():
        setattr(batch, attribute, value)
    for prepare in (engine.backend.init_forward_metadata, engine.backend.init_forward_metadata_out_graph):
        with pytest.raises(tw.Unsupported, match=words):
            prepare(batch)


def test_arguments_graphs_and_missing_steps_are_refused() -> None:
    engine = Engine()
    batch = engine.batch(ForwardMode.EXTEND, [1], [3])
    q = torch.zeros(3, HEADS * DIM)
    with pytest.raises(tw.InvalidProblem, match="init_forward_metadata"):
        engine.backend.forward(q, None, None, engine.layers[0], batch)
    engine.backend.init_forward_metadata(batch)
    with pytest.raises(tw.Unsupported, match="rel_bias"):
        engine.backend.forward(q, None, None, engine.layers[0], batch, rel_bias=q, return_lse=False, k_rope=None)
    engine.backend.init_cuda_graph_state(2, 2)
    with pytest.raises(tw.Unsupported, match="--disable-prefill-cuda-graph"):
        engine.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    decode = engine.batch(ForwardMode.DECODE, [1, 2, 3], [1, 1, 1])
    with pytest.raises(tw.InvalidProblem, match="at most 2"):
        engine.backend.init_forward_metadata_out_graph(decode)
