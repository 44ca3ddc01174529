"""Tiny models of transformers with random weights: every kind of attention the integration must get right."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 64
WINDOW = 6
NARROW = 3

# Random weights of this size make attention matter: a wrong mask moves logits by more than 1 (see the tests).
SPREAD = 0.3

Results = tuple[list[Tensor], list[Tensor]]

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip

BOTH = ["sliding_attention", "full_attention"]


def config(name: str, **options: Any) -> Any:
    """A configuration of transformers, which is imported by whoever has it."""
    return getattr(importlib.import_module("transformers"), name)(**options)


# Neither grouped heads nor a head_dim of their own.
PLAIN = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# A softcap, and a window in every other layer.
CAPPED = {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8, "layer_types": BOTH}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": BOTH, "rope_parameters": ROPE}


def llama() -> Any:
    """Grouped heads."""
    return config("LlamaConfig", **SIZES)


CAUSAL: dict[str, Callable[[], Any]] = {
    "llama": llama,
    # Normalised queries and keys.
    "qwen": lambda: config("Qwen3Config", **SIZES),
    "gemma2": lambda: config("Gemma2Config", **SIZES, **CAPPED, sliding_window=WINDOW),
    # Other rotary tables in layers with a window.
    "gemma3": lambda: config(
        "Gemma3TextConfig", **SIZES, sliding_window=WINDOW, query_pre_attn_scalar=8, layer_types=BOTH
    ),
    # A window in every layer.
    "mistral": lambda: config("MistralConfig", **SIZES, sliding_window=WINDOW),
    # Sinks.
    "gpt_oss": lambda: config("GptOssConfig", **SIZES, **EXPERTS, sliding_window=WINDOW),
}


def bert() -> Any:
    """Bidirectional, with padding."""
    return config("BertConfig", **PLAIN, **STILL)


def vit() -> Any:
    """Bidirectional, 17 tokens, no mask at all."""
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    return config("ViTConfig", **sizes, **STILL, num_attention_heads=4, image_size=16, patch_size=4, num_labels=5)


def t5() -> Any:
    """A learned bias of positions, and attention across."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return config("T5Config", **sizes, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0)


def t5gemma() -> Any:
    """A window to both sides in the encoder, to one in the decoder, and attention across."""
    sizes = {name: size for name, size in SIZES.items() if name != "tie_word_embeddings"} | CAPPED
    parts = {part: config("T5GemmaModuleConfig", **sizes, sliding_window=NARROW) for part in ("encoder", "decoder")}
    return config("T5GemmaConfig", **parts, vocab_size=VOCABULARY, dropout_rate=0.0, tie_word_embeddings=False)


def modernbert() -> Any:
    """A window to both sides, said otherwise."""
    return config("ModernBertConfig", **PLAIN, local_attention=2 * NARROW, global_attn_every_n_layers=2)


def build(config: Any, kind: str = "AutoModelForCausalLM", *, seed: int = 0, **options: Any) -> Any:
    """A model with the weights of a seed; `device`, `dtype`, and `attention`, which is eager unless told otherwise."""
    device, dtype = options.get("device", "cpu"), options.get("dtype", torch.float32)
    maker = getattr(importlib.import_module("transformers"), kind)
    make = getattr(maker, "from_config", None) or maker._from_config
    model = make(copy.deepcopy(config), attn_implementation=options.get("attention", "eager")).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * SPREAD)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the only one that takes it
    return model.to(device=device, dtype=dtype)


def padded(length: int = 19, device: str = "cpu") -> dict[str, Tensor]:
    """Two prompts, the first of them with four or five tokens of padding on the left."""
    ids = tokens(2, length, device=device)
    attention_mask = torch.ones_like(ids)
    attention_mask[0, : -(-length // 4)] = 0
    return {"input_ids": ids, "attention_mask": attention_mask}


def tokens(batch: int, seqlen: int, *, seed: int = 0, device: str = "cpu") -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, VOCABULARY, (batch, seqlen), generator=torch.Generator().manual_seed(seed)).to(device)


def textbook(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **flags: Any
) -> tuple[Tensor, None]:
    """The formula, in the dtype of its inputs: transformers' eager attention takes its softmax in float32."""
    softcap, s_aux, position_bias = (flags.get(name) for name in ("softcap", "s_aux", "position_bias"))
    key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (key, value))
    scores = query @ key.mT * flags.get("scaling", 1.0)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    columns = [scores] if s_aux is None else [scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)]
    weights = torch.softmax(torch.cat(columns, dim=-1), dim=-1)[..., : key.shape[2]]
    if attention_mask is not None:
        weights = weights.masked_fill(~attention_mask.any(-1, keepdim=True), 0.0)
    return (weights @ value).transpose(1, 2), None


def textbook_mask(**arguments: Any) -> Tensor:
    """Always the whole matrix."""
    from transformers.masking_utils import sdpa_mask

    matrix: Tensor = sdpa_mask(**arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return matrix


def register_textbook() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("textbook", textbook)
    AttentionMaskInterface.register("textbook", textbook_mask)


def attend_with(model: Any, implementation: str) -> None:
    """Set the attention of a model and of the models in it: up to 5.21 transformers leaves out those with a copy of its
    config, such as T5's encoder and decoder.
    """
    from transformers import PreTrainedModel

    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation(implementation)
            assert part.config._attn_implementation == implementation


def outputs_and_gradients(model: Any, implementation: str, inputs: dict[str, Any], valid: Tensor | None) -> Results:
    """The logits (of valid positions) and the gradient of every parameter, under one attention."""
    attend_with(model, implementation)
    model.zero_grad()
    logits = model(**inputs).logits
    logits = logits if valid is None else logits[valid]
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype, device=logits.device).view_as(logits)
    (logits * weights).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [logits.detach()], [gradient.clone() for gradient in gradients]


def excess(ours: Results, plain: list[Results], exact: Results, *, ulps: float = 8.0) -> Tensor:
    """By how much each tensor exceeds the rule of docs/contract.md: its error over twice that of plain PyTorch in the
    same dtype and a few ulp. The worst of several plain ones counts.
    """
    theirs = torch.stack([errors(results, exact) for results in plain]).amax(0)
    sizes = torch.stack([truth.abs().max().double() for part in exact for truth in part])
    mine = errors(ours, exact)
    # A router that chooses among one has no gradient at all.
    return torch.where(mine == 0, 0, mine / (2 * theirs + ulps * torch.finfo(ours[0][0].dtype).eps * sizes))


def errors(results: Results, exact: Results) -> Tensor:
    """The largest error of every tensor."""
    pairs = [pair for parts in zip(results, exact, strict=True) for pair in zip(*parts, strict=True)]
    return torch.stack([(result.double() - truth.double()).abs().max() for result, truth in pairs])
