"""Latent attention in transformers (DeepSeek's and its relatives'): expanded, and absorbed after `absorb(model)`."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw

pytest.importorskip("transformers")

import transformers

import tiny_models as tiny
from making import watched
from tilewise.integrations.cache import latent_of
from tilewise.integrations.transformers import FLASH_NAME, NAME, absorb, latent_cache, register
from tiny_models import attend_with, build, excess, llama, outputs_and_gradients, padded, tokens

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
NEW_TOKENS = 12
CONFIGS = ("DeepseekV2Config", "DeepseekV3Config", "Glm4MoeLiteConfig", "MiniCPM3Config", "YoutuConfig", "AXK1Config")
MODELS = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()
    tiny.register_textbook()


def config_of(name: str, **changes: Any) -> Any:
    return getattr(transformers, name)(**SIZES | changes)


def model_of(name: str = "DeepseekV3Config", **changes: Any) -> Any:
    return build(config_of(name, **changes))


def generate(model: Any, implementation: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Tokens and scores of a greedy continuation."""
    attend_with(model, implementation)
    given: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None} | options
    found = model.generate(**padded(), return_dict_in_generate=True, output_logits=True, **given)
    return found.sequences, torch.stack(found.logits)


@MODELS
@pytest.mark.parametrize("absorbed", [False, True])
def test_a_training_step_is_that_of_eager_attention(name: str, absorbed: bool) -> None:
    wide, model = build(config_of(name), dtype=torch.float64), build(config_of(name))
    inputs = padded()
    valid = inputs["attention_mask"].bool()
    exact = outputs_and_gradients(wide, "textbook", inputs, valid)
    plain = [outputs_and_gradients(model, other, inputs, valid) for other in ("eager", "sdpa")]
    if absorbed:
        absorb(model)
    assert excess(outputs_and_gradients(model, NAME, inputs, valid), plain, exact).max() <= 1


@MODELS
@pytest.mark.parametrize("implementation", [NAME, FLASH_NAME])
def test_generated_tokens_are_those_of_eager_attention(
    name: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(name)
    ids, logits = generate(model, "eager")
    expanded = watched(monkeypatch, type(model.model.layers[0].self_attn), "expand_kv")
    found = [generate(model, implementation)]
    assert absorb(model) == 2
    expanded.clear()
    found.append(generate(model, implementation))
    # The prompt is expanded in both layers, and nothing after it.
    assert [call.args[1].shape[2] for call in expanded] == [19, 19]
    cache = latent_cache(model.config, 40)
    found.append(generate(model, implementation, past_key_values=cache))
    for layer in cache.layers:
        assert latent_of(layer.values, layer.keys) is not None
    for their_ids, their_logits in found:
        assert torch.equal(their_ids, ids)
        torch.testing.assert_close(their_logits, logits, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("kind", "name", "layers"),
    [
        ("longcat_flash", "LongcatFlashForCausalLM", 4),
        ("kimi_linear", "KimiLinearForCausalLM", 1),
        ("mistral4", "Mistral4ForCausalLM", 2),
    ],
)
def test_relatives_with_other_layers_too(kind: str, name: str, layers: int) -> None:
    from zoo.tiny import tiny_config

    model = build(tiny_config(kind), name)
    ids, _ = generate(model, "eager")
    assert absorb(model) == layers
    assert torch.equal(generate(model, NAME)[0], ids)
    assert torch.equal(generate(model, NAME, past_key_values=latent_cache(model.config, 40))[0], ids)


def test_the_widths_of_the_real_models() -> None:
    """512 + 64 columns, in bfloat16: as near to float32 as eager attention is."""
    sizes: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    model = model_of(num_hidden_layers=1, first_k_dense_replace=1, **sizes).eval()
    ids = tokens(2, 40)
    exact = model(ids).logits[:, -1].detach()
    errors = {}
    model = model.bfloat16()
    for implementation in ("eager", NAME):
        attend_with(model, implementation)
        if implementation == NAME:
            absorb(model)
        with torch.no_grad():
            cache = model(ids[:, :-1]).past_key_values
            logits = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
        errors[implementation] = float((logits.float() - exact).abs().max())
    assert errors[NAME] <= 2 * errors["eager"]


def test_beams_and_compiled_graphs() -> None:
    model = model_of()
    expected = generate(model, "eager", num_beams=3)[0]
    absorb(model)
    assert torch.equal(generate(model, NAME, num_beams=3)[0], expected)
    ids = tokens(2, 19)
    with torch.no_grad():
        caches = [model(ids[:, :-1]).past_key_values for _ in range(2)]
        forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
        compiled, plain = (
            call(ids[:, -1:], past_key_values=cache).logits
            for call, cache in zip((forward, model), caches, strict=True)
        )
    torch.testing.assert_close(compiled, plain)


def test_other_attention_expands_as_before() -> None:
    model = model_of()
    ids, logits = generate(model, "sdpa")
    absorb(model)
    again = generate(model, "sdpa")
    assert torch.equal(again[0], ids)
    assert torch.equal(again[1], logits)


def test_copies_have_weights_of_their_own() -> None:
    model = model_of()
    absorb(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in other.model.layers:
            layer.self_attn.kv_b_proj.weight.neg_()
    expected = generate(other, "eager")[0]
    assert torch.equal(generate(other, NAME)[0], expected)
    assert not torch.equal(generate(model, NAME)[0], expected)


def test_a_projection_with_more_than_its_weight_is_expanded() -> None:
    """An adapter that wraps the projection later, or a hook on it, is not left out."""

    class Adapter(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(x)

    model = model_of()
    absorb(model)
    before = generate(model, NAME)[0]
    for layer in model.model.layers:
        projection = layer.self_attn.kv_b_proj
        layer.self_attn.kv_b_proj = Adapter(projection.in_features, projection.out_features, bias=False)
        layer.self_attn.kv_b_proj.weight = projection.weight
    expected = generate(model, "eager")[0]
    assert torch.equal(generate(model, NAME)[0], expected)
    assert not torch.equal(before, expected)
    with pytest.raises(tw.Unsupported, match=r"model.layers.0.self_attn: kv_b_proj is not a plain nn.Linear"):
        absorb(model)


def test_refusals() -> None:
    with pytest.raises(tw.Unsupported, match="LlamaForCausalLM has no layer with latents"):
        absorb(build(llama()))
    with pytest.raises(tw.Unsupported, match="latents of 608 columns, 600 of them values"):
        absorb(model_of(kv_lora_rank=600))
    with pytest.raises(tw.InvalidProblem, match="a model of transformers"):
        absorb(None)  # type: ignore[arg-type]
    config = config_of("DeepseekV3Config")
    for wrong in (0, 4.5):
        with pytest.raises(tw.InvalidProblem, match="max_cache_len"):
            latent_cache(config, wrong)  # type: ignore[arg-type]
    with pytest.raises(tw.InvalidProblem, match=r"Pass model\.config"):
        latent_cache(model_of(), 40)
    with pytest.raises(tw.Unsupported, match="latent_cache has no gradients"):
        model_of()(tokens(1, 5), past_key_values=latent_cache(config, 40))


def test_another_expansion_is_refused() -> None:
    """Of a class, and of one layer, which then keeps it under every attention."""
    model = model_of()
    attention = model.model.layers[0].self_attn

    class Doubled(type(attention)):  # type: ignore[misc]
        def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
            key, value = super().expand_kv(kv_nope, k_rot)
            return key, 2 * value

    attention.__class__ = Doubled
    with pytest.raises(tw.Unsupported, match="does not give the products"):
        absorb(model)
    model = model_of()
    attention = model.model.layers[0].self_attn
    plain = attention.expand_kv

    def patched(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        key, value = plain(kv_nope, k_rot)
        return key, 2 * value

    attention.expand_kv = patched
    with pytest.raises(tw.Unsupported, match="its expand_kv was replaced"):
        absorb(model)
    assert torch.equal(generate(model, NAME)[0], generate(model, "eager")[0])


@pytest.mark.skipif(importlib.util.find_spec("psutil") is None, reason="needs psutil")
def test_continuous_batching_is_refused_by_the_width_of_its_pages() -> None:
    """With every attention: transformers makes pages for heads that these models do not have."""
    from test_transformers_batching import greedy, settings

    model = model_of()
    attend_with(model, FLASH_NAME)
    results = model.generate_batch(
        inputs=[[5, 6, 7]], generation_config=greedy(), continuous_batching_config=settings(), progress_bar=False
    )
    assert ["Call model.generate" in result.error for result in results.values()] == [True]
