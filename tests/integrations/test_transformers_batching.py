"""Continuous batching of transformers on tilewise: token for token what `generate` gives, cache read where it lies."""

from __future__ import annotations

import dataclasses
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw

pytest.importorskip("transformers")

import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from making import watched
from tilewise.integrations.transformers import FLASH_NAME, NAME, paged, register
from tiny_models import CAUSAL, build, llama, tokens

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

# transformers asks psutil for the free memory of a CPU.
needs_psutil = pytest.mark.skipif(importlib.util.find_spec("psutil") is None, reason="needs psutil")
CPU = pytest.param("cpu", marks=needs_psutil)
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)

# Up to 5.18 every name can batch, by a prefix; from 5.19 on only those that contain "flash".
RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
NAMES = (NAME, FLASH_NAME) if RELEASE < (5, 19) else (FLASH_NAME,)
PAGE = "block_size" if RELEASE < (5, 18) else "page_size"

NEW_TOKENS = 9


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


def settings(**changes: Any) -> ContinuousBatchingConfig:
    """Pages of 8 tokens and steps of at most 24, so that the longer prompts come in chunks beside decoding ones."""
    options = {PAGE: 8, "num_blocks": 64, "max_batch_tokens": 24, "use_cuda_graph": False}
    return ContinuousBatchingConfig(**options | changes)


def greedy() -> transformers.GenerationConfig:
    return transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=2, pad_token_id=0)


def one_by_one(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    where = model.device
    rows = (model.generate(torch.tensor([prompt], device=where), generation_config=greedy())[0] for prompt in prompts)
    return [row[len(prompt) :].tolist() for row, prompt in zip(rows, prompts, strict=True)]


def batched(model: Any, prompts: list[list[int]], config: ContinuousBatchingConfig) -> list[list[int]]:
    results = model.generate_batch(
        inputs=prompts, generation_config=greedy(), continuous_batching_config=config, progress_bar=False
    )
    assert [result.error for result in results.values()] == [None] * len(prompts)
    return [results[key].generated_tokens for key in sorted(results)]


def prompts_of(*lengths: int) -> list[list[int]]:
    return [tokens(1, n, seed=n)[0].tolist() for n in lengths]


@pytest.mark.parametrize("where", [CPU, CUDA])
@pytest.mark.parametrize("name", list(CAUSAL))
def test_batched_generation_is_that_of_each_prompt_alone(name: str, where: str) -> None:
    model = build(CAUSAL[name](), device=where)
    prompts = prompts_of(5, 17, 9, 30)
    expected = one_by_one(model, prompts)
    for implementation in NAMES if name == "llama" else (FLASH_NAME,):
        model.set_attn_implementation(implementation)
        assert batched(model, prompts, settings()) == expected
        assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("where", [CUDA])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_steps_recorded_as_cuda_graphs(name: str, where: str) -> None:
    """transformers' default on a GPU: steps padded to a few sizes, recorded once and replayed."""
    model = build(CAUSAL[name](), device=where)
    prompts = prompts_of(5, 17, 9, 30)
    expected = one_by_one(model, prompts)
    model.set_attn_implementation(FLASH_NAME)
    assert batched(model, prompts, settings(use_cuda_graph=True)) == expected


@needs_psutil
def test_the_cache_is_read_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    in_pages, packed = watched(monkeypatch, paged, "attention_after"), watched(monkeypatch, paged, "attention_varlen")
    model = build(llama())
    model.set_attn_implementation(FLASH_NAME)
    batched(model, prompts_of(5, 17, 9, 30), settings())
    pages = [call.args[2][1] for call in in_pages]
    storages = {keys.data_ptr() for keys in pages}
    assert len(storages) == model.config.num_hidden_layers, "the same storage in every step, nothing gathered"
    assert all(keys.shape[1] == 8 for keys in pages)
    assert len(packed) == model.config.num_hidden_layers, "only the first step has nothing to read"


@needs_psutil
def test_prefixes_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with a common prompt read the same pages."""
    watch = watched(monkeypatch, paged, "attention_after")
    model = build(llama())
    system = prompts_of(16)[0]
    prompts = [system + tail for tail in prompts_of(3, 4, 5)]
    expected = one_by_one(model, prompts)
    model.set_attn_implementation(FLASH_NAME)
    assert batched(model, prompts, settings(max_batch_tokens=19)) == expected
    last = watch[-1].named["block_table"]
    assert last.shape[0] > 1
    assert bool((last[:, :2] == last[0, :2]).all()), "two pages of the system prompt"


@needs_psutil
def test_tables_of_blocks_as_decoding_passes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other form of a step: a table of blocks, and new tokens that the attention writes itself.

    transformers offers it to flash-attn alone, so its question whether that is there is answered for it.
    """
    from transformers.generation.continuous_batching import initialization

    def available(config: Any, cb_config: Any, user_requested: bool) -> None:
        cb_config.max_blocks_per_request = 8

    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", available)
    watch = watched(monkeypatch, paged, "_last_slots")
    model = build(llama())
    prompts = prompts_of(5, 17, 9, 30)
    expected = one_by_one(model, prompts)
    model.set_attn_implementation(FLASH_NAME)
    assert batched(model, prompts, settings()) == expected
    assert watch


TRASH, SLOTS = 39, [8, 9, 10, 11, 4, 5, 16, 17, 18]


def step_of(fill: int) -> paged.Step:
    """Two requests with 6 and 3 keys, of which the last 2 and 1 are new; `fill` more of each to a fixed size."""
    cu_seqlens_q, cu_seqlens_k = (torch.tensor(x + x[-1:] * fill, dtype=torch.int32) for x in ([0, 2, 3], [0, 6, 9]))
    write = [SLOTS[4], SLOTS[5], SLOTS[8], *[TRASH] * fill]
    return paged.Step(
        cu_seqlens_q, {"full_attention": cu_seqlens_k}, 3 + fill, {"full_attention": 8},
        [torch.tensor(SLOTS + [0] * fill)], [torch.tensor(write)], None,
    )  # fmt: skip


def cache_of(k: Tensor, v: Tensor, window: int = 1, **more: Any) -> SimpleNamespace:
    """What is read of transformers' cache."""
    given = {"layer_index_to_group_indices": {0: (0, 0)}, "sliding_windows": {0: window}, "write_trash_index": TRASH}
    return SimpleNamespace(**given, block_size=4, key_cache=[k], value_cache=[v], **more)


def test_what_fills_up_a_step_changes_nothing() -> None:
    """Steps of a fixed size have more rows than tokens, more sequences than requests, and slots nobody reads."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 40, 2, 8, generator=generator)
    q, new_k, new_v = (torch.randn(1, heads, 7, 8, generator=generator) for heads in (4, 2, 2))
    outs = []
    for fill in (0, 4):
        cache = cache_of(k.clone(), v.clone())
        rows = [t[:, :, : 3 + fill] for t in (q, new_k, new_v)]
        outs.append(paged.attend_to_cache(0, rows[0], rows[1], rows[2], cache, step_of(fill), {}))
        assert torch.equal(cache.key_cache[0][SLOTS[8]], new_k[0, :, 2])
    torch.testing.assert_close(outs[1][:, :3], outs[0])
    assert not outs[1][:, 3:].any()
    keys = torch.cat([k[SLOTS[:4]], new_k[0, :, :2].transpose(0, 1)])
    values = torch.cat([v[SLOTS[:4]], new_v[0, :, :2].transpose(0, 1)])
    expected = tw.attention(q[:, :, :2], *(t.transpose(0, 1)[None] for t in (keys, values)), causal=True)
    torch.testing.assert_close(outs[0][:, :2], expected.transpose(1, 2))


def test_gradients_reach_the_queries_of_a_step() -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 40, 2, 8, generator=generator)
    q, new_k, new_v = (torch.randn(1, heads, 3, 8, generator=generator) for heads in (4, 2, 2))
    cache = cache_of(k, v)
    out = paged.attend_to_cache(0, q.requires_grad_(), new_k, new_v, cache, step_of(0), {})
    keys, values = (t[SLOTS[:6]].transpose(0, 1)[None] for t in (cache.key_cache[0], cache.value_cache[0]))
    expected = tw.attention(q[:, :, :2], keys, values, causal=True).transpose(1, 2)
    torch.testing.assert_close(out[:, :2], expected)
    found, wanted = (torch.autograd.grad(x.square().sum(), q)[0][:, :, :2] for x in (out[:, :2], expected))
    torch.testing.assert_close(found, wanted)


REFUSED: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": -1.0},
    "deterministic": {"deterministic": "yes"},
    "sinks": {"sinks": torch.zeros(3)},
    "scale": {"scale": torch.nan},
    "window": {"sliding_window": 0},
    "q": {"query": torch.zeros(1, 4, 3, 16)},
    "value": {"value": torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("ring", [False, True], ids=["pages", "ring"])
@pytest.mark.parametrize("wrong", REFUSED)
def test_what_is_refused_writes_nothing(wrong: str, ring: bool) -> None:
    """A cache that was written before the call is refused would hold tokens nobody has attended to."""
    changes = dict(REFUSED[wrong])
    k, v = torch.full((2, 40, 2, 8), 5.0)
    written: list[Any] = []
    cache = cache_of(k, v, 4 if ring else 1, update=lambda *given: written.append(given))
    step = step_of(0)
    full = {"cu_seq_lens_k": step.cu_seq_lens_k["full_attention"], "max_length_k": 8}
    step = dataclasses.replace(step, **full, sliding_window=changes.pop("sliding_window", None))
    rows = [changes.pop(name, torch.zeros(1, n, 3, 8)) for name, n in (("query", 4), ("key", 2), ("value", 2))]
    with pytest.raises(tw.TilewiseError):
        paged.attend_to_cache(0, rows[0], rows[1], rows[2], cache, step, changes)
    assert written == []
    assert bool((k == 5.0).all())
    assert bool((v == 5.0).all())


@pytest.mark.skipif(NAME in NAMES, reason="up to 5.18 both names batch")
def test_the_plain_name_is_refused_by_transformers() -> None:
    model = build(llama())
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="tilewise is not supported for continuous batching"):
        model.generate_batch(inputs=prompts_of(5), generation_config=greedy(), continuous_batching_config=settings())


def test_a_module_without_a_number_is_refused() -> None:
    from tilewise.integrations.transformers.forward import attention_forward

    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(tw.Unsupported, match="Identity has no layer_idx"):
        attention_forward(torch.nn.Identity(), q, q, q, None, cache=object())
