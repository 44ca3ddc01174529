"""Tiny models of transformers with random weights: every kind of attention the integration must get right."""

from __future__ import annotations

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


def llama() -> Any:
    """Grouped heads."""
    from transformers import LlamaConfig

    return LlamaConfig(**SIZES)


def qwen() -> Any:
    """Normalised queries and keys."""
    from transformers import Qwen3Config

    return Qwen3Config(**SIZES)


def gemma2() -> Any:
    """Softcap, and a window in every other layer."""
    from transformers import Gemma2Config

    extra = {"sliding_window": WINDOW, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8, "layer_types": BOTH}
    return Gemma2Config(**SIZES, **extra)


def gemma3() -> Any:
    """Other rotary tables in layers with a window."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(**SIZES, sliding_window=WINDOW, query_pre_attn_scalar=8, layer_types=BOTH)


def mistral() -> Any:
    """A window in every layer."""
    from transformers import MistralConfig

    return MistralConfig(**SIZES, sliding_window=WINDOW)


def gpt_oss() -> Any:
    """Sinks."""
    from transformers import GptOssConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    extra = {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": BOTH, "rope_parameters": rope}
    return GptOssConfig(**SIZES, sliding_window=WINDOW, **extra)


CAUSAL: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (llama, qwen, gemma2, gemma3, mistral, gpt_oss)
}  # fmt: skip


def bert() -> Any:
    """Bidirectional, with padding."""
    from transformers import BertConfig

    sizes = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
    return BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def vit() -> Any:
    """Bidirectional, 17 tokens, no mask at all."""
    from transformers import ViTConfig

    sizes = {
        name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTConfig(**sizes, **dropout, image_size=16, patch_size=4, num_labels=5)


def t5() -> Any:
    """A learned bias of positions, and attention across."""
    from transformers import T5Config

    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5Config(**sizes, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0)


def t5gemma() -> Any:
    """A window to both sides in the encoder, to one in the decoder, and attention across."""
    from transformers import T5GemmaConfig, T5GemmaModuleConfig

    sizes = {name: size for name, size in SIZES.items() if name != "tie_word_embeddings"}
    extra = {"sliding_window": NARROW, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8, "layer_types": BOTH}
    parts = {part: T5GemmaModuleConfig(**sizes, **extra) for part in ("encoder", "decoder")}
    return T5GemmaConfig(**parts, vocab_size=VOCABULARY, dropout_rate=0.0, tie_word_embeddings=False)


def modernbert() -> Any:
    """A window to both sides, said otherwise."""
    from transformers import ModernBertConfig

    sizes = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
    return ModernBertConfig(**sizes, local_attention=2 * NARROW, global_attn_every_n_layers=2)


def build(
    config: Any,
    kind: str = "AutoModelForCausalLM",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Any:
    """A model with the weights of a seed, on eager attention."""
    import transformers

    maker = getattr(transformers, kind)
    make = getattr(maker, "from_config", None) or maker._from_config
    model = make(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * SPREAD)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the only one that takes it
    return model.to(device=device, dtype=dtype)


def tokens(batch: int, seqlen: int, *, seed: int = 0, device: str = "cpu") -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, VOCABULARY, (batch, seqlen), generator=torch.Generator().manual_seed(seed)).to(device)


def textbook(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float = 1.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The formula, in the dtype of its inputs: transformers' eager attention takes its softmax in float32."""
    key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (key, value))
    scores = query @ key.mT * scaling
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
