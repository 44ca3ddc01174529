"""What models of transformers make of "tilewise" and "tilewise_flash": right, or refused with a sentence."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw

pytest.importorskip("transformers")

import transformers
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tilewise.integrations import sglang
from tilewise.integrations.transformers import FLASH_NAME, NAME, forward, masks, register
from tiny_models import PLAIN, STILL, VOCABULARY, bert, build, llama, padded, tokens

pytestmark = pytest.mark.slow

NAMES = pytest.mark.parametrize("name", [NAME, FLASH_NAME])


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def model_of(cls: str, config: Any, name: str) -> Any:
    return build(config, cls, attention=name)


def output(model: Any, inputs: dict[str, Any]) -> Tensor:
    """The first output, at valid positions."""
    torch.manual_seed(0)
    with torch.no_grad():
        out: Tensor = model(**inputs, return_dict=True)[0]
    mask = inputs.get("attention_mask")
    return out if mask is None or mask.shape != out.shape[:2] else out[mask.bool()]


def compare(cls: str, config: Any, name: str, inputs: dict[str, Any]) -> Any:
    """The model under this name computes what it computes with eager attention."""
    model = model_of(cls, config, name)
    expected = output(model_of(cls, config, "eager"), inputs)
    scale = float(expected.abs().max())
    torch.testing.assert_close(output(model, inputs), expected, rtol=1e-4, atol=1e-5 * max(1.0, scale))
    return model


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often tilewise was asked."""
    asked: list[str] = []
    for name in (NAME, FLASH_NAME):
        ours = ALL_ATTENTION_FUNCTIONS[name]

        def counted(*args: Any, ours: Any = ours, name: str = name, **kwargs: Any) -> Any:
            asked.append(name)
            return ours(*args, **kwargs)

        monkeypatch.setitem(AttentionInterface._global_mapping, name, counted)
    return lambda: len(asked)


def xglm() -> Any:
    return transformers.XGLMConfig(
        vocab_size=VOCABULARY, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, layerdrop=0.0, max_position_embeddings=128,
    )  # fmt: skip


def mpnet() -> Any:
    return transformers.MPNetConfig(**PLAIN, **STILL)


def bloom() -> Any:
    return transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)


def gptj() -> Any:
    return transformers.GPTJConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip


OWN = {
    "xglm": ("XGLMForCausalLM", xglm),
    "mpnet": ("MPNetForMaskedLM", mpnet),
    "roformer": ("RoFormerForMaskedLM", lambda: transformers.RoFormerConfig(**PLAIN, **STILL, embedding_size=32)),
    "bloom": ("BloomForCausalLM", bloom),
    # It chooses its attention from a table of classes.
    "gptj": ("GPTJForCausalLM", gptj),
}


@NAMES
@pytest.mark.parametrize("kind", list(OWN))
def test_models_with_attention_of_their_own_run_eager_attention(
    kind: str, name: str, count: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They never ask tilewise, and misread its masks; so they are set to eager attention, and say so."""
    said: list[str] = []
    logger = logging.getLogger("transformers.tilewise")
    monkeypatch.setattr(logger, "warning_once", said.append, raising=False)
    cls, config = OWN[kind]
    model = compare(cls, config(), name, padded(13))
    assert count() == 0
    assert model.config._attn_implementation == "eager"
    assert any(f"{cls} computes its attention itself" in words and f'"{name}"' in words for words in said)


def test_the_future_is_hidden_in_a_model_with_attention_of_its_own() -> None:
    model = model_of("XGLMForCausalLM", xglm(), NAME)
    changed = tokens(2, 13).clone()
    changed[:, 7:] = tokens(2, 6, seed=1)
    before, after = (output(model, {"input_ids": ids})[:, :7] for ids in (tokens(2, 13), changed))
    torch.testing.assert_close(before, after)


def drawn(*shape: int) -> tuple[Tensor, ...]:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).unbind()


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_positions_that_start_again_are_sequences_under_the_flash_name(is_causal: bool, compiled: bool) -> None:
    """There models leave the mask out and mean the positions. Under the other name they make a mask."""
    q, k, v = drawn(1, 4, 12, 16)
    positions = torch.cat([torch.arange(n) for n in (3, 5, 4)])[None]
    sequence = torch.tensor([0] * 3 + [1] * 5 + [2] * 4)
    apart = tw.attention(q, k, v, causal=is_causal, mask=sequence[:, None] == sequence)
    together = tw.attention(q, k, v, causal=is_causal)

    def attend(name: str, position_ids: Tensor) -> Tensor:
        made = ALL_ATTENTION_FUNCTIONS[name]
        torch.compiler.reset()
        function: Any = torch.compile(made, backend="eager", fullgraph=True) if compiled else made
        out: Tensor = function(torch.nn.Module(), q, k, v, None, is_causal=is_causal, position_ids=position_ids)[0]
        return out.transpose(1, 2)

    torch.testing.assert_close(attend(FLASH_NAME, positions), apart)
    torch.testing.assert_close(attend(NAME, positions), together)
    torch.testing.assert_close(attend(FLASH_NAME, torch.arange(12)[None] + 5), together)
    # Coordinates of a picture of 3 x 4 patches, of which only the first has none but zeros.
    time, row, column = torch.zeros(12), torch.arange(12) // 4, torch.arange(12) % 4
    for axes in (torch.stack((time, row, column))[:, None], torch.stack((row, column), 1)):
        torch.testing.assert_close(attend(FLASH_NAME, axes), together)
    torch.testing.assert_close(attend(FLASH_NAME, positions.expand(3, 1, 12)), apart)


def test_a_mask_whose_length_is_not_that_of_the_keys_is_an_error() -> None:
    q, k, v = drawn(2, 4, 12, 16)
    made = masks.attention_mask_function(batch_size=2, q_length=12, kv_length=10)
    wrong = {
        "structure": made,
        "shorter": torch.ones(2, 1, 12, 10, dtype=torch.bool),
        "longer": torch.ones(2, 1, 12, 14, dtype=torch.bool),
        "one": torch.ones(2, 1, 12, 1, dtype=torch.bool),
        "float": torch.zeros(2, 1, 12, 10),
        "padding": torch.ones(2, 10),
        "queries": torch.ones(2, 1, 10, 12, dtype=torch.bool),
    }
    for mask in wrong.values():
        with pytest.raises(tw.InvalidProblem, match="attention_mask: expected a mask for 12 queries and 12 keys"):
            forward.attention_forward(torch.nn.Module(), q, k, v, mask)
    with pytest.raises(tw.InvalidProblem, match="position_bias: expected a bias for 12 keys, got one for 14"):
        forward.attention_forward(torch.nn.Module(), q, k, v, None, position_bias=torch.zeros(1, 4, 12, 14))


def gpt2() -> Any:
    return transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)


def opt() -> Any:
    return transformers.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=32, max_position_embeddings=64,
    )  # fmt: skip


def dinov2() -> Any:
    return transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4
    )


@NAMES
@pytest.mark.parametrize(
    ("cls", "config"),
    [
        ("LlamaForCausalLM", llama), ("BertForMaskedLM", bert), ("GPT2LMHeadModel", gpt2), ("OPTForCausalLM", opt),
        ("Dinov2Model", dinov2),
    ],
)  # fmt: skip
def test_output_attentions_is_refused(cls: str, config: Callable[[], Any], name: str) -> None:
    model = model_of(cls, config(), name)
    pixels = {"pixel_values": torch.zeros(1, 3, 16, 16)}
    inputs = pixels if cls == "Dinov2Model" else {"input_ids": tokens(1, 5)}
    with pytest.raises(tw.Unsupported, match=rf'output_attentions=True of {cls}; use attn_implementation="eager"'):
        model(**inputs, output_attentions=True)
    model(**inputs, output_attentions=False)
    if model.can_generate():
        with pytest.raises(tw.Unsupported, match="output_attentions=True"):
            model.generate(**inputs, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
    model.config._output_attentions = True  # as from a file; transformers refuses to set it
    with pytest.raises(tw.Unsupported, match="output_attentions=True"):
        model(**inputs)


def test_output_attentions_is_refused_once_the_name_is_set() -> None:
    model = model_of("GPT2LMHeadModel", gpt2(), "eager")
    inputs = {"input_ids": tokens(1, 5)}
    assert len(model(**inputs, output_attentions=True).attentions) == 2
    model.set_attn_implementation(NAME)
    with pytest.raises(tw.Unsupported, match="output_attentions=True"):
        model(**inputs, output_attentions=True)
    model.set_attn_implementation("eager")
    assert len(model(**inputs, output_attentions=True).attentions) == 2


OF_OTHERS = "guidance_scale vision_feature_select_strategy mm_token_type_ids min_new_tokens num_beams input_ids"


@pytest.mark.parametrize("argument", OF_OTHERS.split())
def test_arguments_of_other_parts_of_a_model_reach_attention(argument: str) -> None:
    """Janus, Video-LLaVA, DiffusionGemma, Parakeet and GLM-5-Next pass all of theirs on."""
    attend = ALL_ATTENTION_FUNCTIONS[NAME]
    q, k, v = drawn(1, 4, 12, 16)
    plain, _ = attend(torch.nn.Module(), q, k, v, None)
    more: dict[str, Any] = {argument: torch.ones(1, 12)}
    beside, _ = attend(torch.nn.Module(), q, k, v, None, **more)
    assert torch.equal(plain, beside)


def test_libraries_that_look_for_flash_functions_find_those_of_tilewise() -> None:
    """sentence-transformers looks for them where the name contains "flash"; without them it fails."""
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    (dense, varlen, *_), _ = lazy_import_flash_attention(FLASH_NAME)
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in drawn(2, 4, 6, 16))
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    expected = tw.attention_varlen(q, k, v, bounds, bounds, causal=True)
    torch.testing.assert_close(varlen(q, k, v, bounds, bounds, 7, 7, causal=True), expected)
    torch.testing.assert_close(
        dense(q[None], k[None], v[None])[0], varlen(q, k, v, bounds[[0, 2]], bounds[[0, 2]], 12, 12)
    )


def test_a_class_of_the_users_own_is_like_the_class_it_is_made_from() -> None:
    mine = type("Mine", (transformers.LlamaForCausalLM,), {})
    other = type("Other", (transformers.XGLMForCausalLM,), {})
    assert mine._from_config(llama(), attn_implementation=NAME).config._attn_implementation == NAME  # type: ignore[attr-defined]
    assert other._from_config(xglm(), attn_implementation=NAME).config._attn_implementation == "eager"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("offer", "words"),
    [(register, r"pip install 'tilewise\[transformers\]'"), (sglang.register, "pip install sglang")],
    ids=["transformers", "sglang"],
)
def test_a_library_that_is_not_installed_is_named(
    offer: Callable[[], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("transformers", "sglang"):
        monkeypatch.setitem(sys.modules, name, None)  # which makes its import fail
    with pytest.raises(ModuleNotFoundError, match=words):
        offer()
