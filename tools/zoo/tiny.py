"""Tiny configurations of every model type, made from the defaults of its configuration class.

A field is shrunk by its name. Sizes that must agree get one value everywhere: hidden states are 64 wide, with 4 heads
of 16. Lists with one entry per layer keep an entry of each kind. What this does not fit stands in `overrides.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

from zoo.overrides import FIELDS, Override

__all__ = ["FIRST_WORD", "VOCABULARY", "NotBuilt", "first_line", "tiny_config"]

VOCABULARY = 128
FIRST_WORD = 64  # ids below are special
HIDDEN, HEADS, HEAD_DIM, WIDE = 64, 4, 16, 96
EXPERTS = 4
LAYERS = 2
POSITIONS = 64
IMAGE, PATCH = 32, 8
WINDOW = 5


class NotBuilt(Exception):
    """A type has no tiny model here; the message says why."""


def _same(value: int) -> Callable[[int], int]:
    return lambda _: value


def _at_most(value: int) -> Callable[[int], int]:
    return lambda size: min(size, value)


def _names(*names: str) -> str:
    """These names, also behind a prefix."""
    return rf"(.*_)?({'|'.join(names)})"


# The first pattern that matches the whole name decides about a number.
RULES: list[tuple[str, Callable[[int], int]]] = [
    ("vocab_size", _same(VOCABULARY)),
    (r".*_vocab_size|vocab_size_.*", _at_most(VOCABULARY)),
    ("mamba_chunk_size|chunk_size", _at_most(8)),
    ("mamba_n_heads|mamba_num_heads", _same(8)),  # times 16 is twice the hidden size
    ("mamba_d_ssm", _same(2 * HIDDEN)),
    (_names("attention_heads", "num_heads", "n_heads?", "query_heads"), _at_most(HEADS)),
    ("qk_rope_head_dim|rotary_dim", _same(HEAD_DIM // 2)),
    (_names("head_dim", "head_size", "dim_head", "d_kv", "d_head", "kv_channels"), _same(HEAD_DIM)),
    (_names("lora_rank"), _same(2 * HEAD_DIM)),
    (_names("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts"), _at_most(EXPERTS)),
    (_names("num_experts_per_tok", "topk", "moe_k", "top_k", "num_experts_per_token", "top_k_experts"), _at_most(2)),
    ("n_group", _at_most(2)),
    ("topk_group", _same(1)),
    (_names("hidden_layers", "num_layers", "n_layers?", "encoder_layers", "decoder_layers"), _at_most(LAYERS)),
    ("num_blocks", _at_most(LAYERS)),
    ("depth", _at_most(LAYERS)),
    (_names("intermediate_size", "ffn_dim", "d_ff", "ff_dim", "mlp_dim", "d_inner", "ffn_hidden_size"), _at_most(WIDE)),
    (_names("n_inner", "feed_forward_size", "dim_feedforward", "feedforward_dim", "intermediate_dim"), _at_most(WIDE)),
    (_names("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim", "projection_dim", "emb_dim"), _same(HIDDEN)),
    (_names("embedding_size", "embedding_dim", "dim_model", "model_dim"), _same(HIDDEN)),
    ("dim|width|conv_dim|word_embed_proj_dim|output_proj_dims|hidden_size_per_layer_input", _at_most(HIDDEN)),
    (_names("position_embeddings", "n_positions", "source_positions", "target_positions"), _at_most(POSITIONS)),
    ("n_ctx|max_seq_length|max_seq_len", _at_most(POSITIONS)),
    (_names("image_size", "input_size"), _at_most(IMAGE)),
    (_names("patch_size"), _at_most(PATCH)),
    ("sliding_window|local_attention|local_window_size", _same(WINDOW)),
    ("output_channels", _at_most(HIDDEN)),
    ("mm_tokens_per_image|image_seq_length|audio_seq_length", _at_most(4)),
    ("attention_chunk_size", _same(8)),
    ("num_queries|num_object_queries|num_query_tokens", _at_most(6)),
]  # fmt: skip

# Lists with an entry per stage of a hierarchical model.
STAGES: list[tuple[str, Callable[[int], int]]] = [
    ("depths|num_blocks|layers|depth|num_layers|layer_depths", _at_most(2)),
    (_names("num_heads", "attention_heads", "num_attention_heads"), _same(HEADS)),
    (_names("hidden_sizes", "embed_dims?", "hidden_size", "encoder_in_channels", "decoder_in_channels"), _same(HIDDEN)),
    ("conv_dim", _at_most(32)),
    (_names("image_size"), _at_most(IMAGE)),
    (_names("patch_size"), _at_most(PATCH)),
]

# Fields that some classes leave at None although their models need a number.
NEEDED = {
    "head_dim": HEAD_DIM, "num_key_value_heads": HEADS, "num_experts": EXPERTS, "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2, "top_k_experts": 2, "n_shared_experts": 1, "moe_intermediate_size": WIDE,
    "vocab_size": VOCABULARY,
}  # fmt: skip

SPECIAL = re.compile(r".*_token_(id|index|ids)$")
FIXED = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types", "layers_block_type")


def tiny_config(model_type: str) -> Any:
    """A configuration of this type whose model takes a fraction of a second."""
    from transformers import CONFIG_MAPPING

    try:
        cls = CONFIG_MAPPING[model_type]
        return _shrink(cls, model_type, {})
    except Exception as error:
        raise NotBuilt(f"its configuration: {first_line(error)}") from error


def _shrink(cls: Any, path: str, ids: dict[str, int], default: Any = None) -> Any:
    from transformers import CONFIG_MAPPING

    kind = getattr(cls, "model_type", "")
    override = FIELDS.get(path) or FIELDS.get(kind) or Override()
    parts = {
        name: _as_dict(_shrink(CONFIG_MAPPING[part], f"{path}.{name}", ids)) for name, part in override.parts.items()
    }
    if default is None:
        default = cls(**copy.deepcopy(parts))
    known = {field.name for field in dataclasses.fields(cls)}
    values = {name: value for name, value in vars(default).items() if name in known or _is_config(value)}
    fields = _stages(default)
    layers = _layers_to_keep(values)
    declared = _declared(cls)
    for name, value in values.items():
        if name in parts or name in override.fields or name in override.without:
            continue
        if _is_config(value):
            fields[name] = _as_dict(_shrink(type(value), f"{path}.{name}", ids, value))
            continue
        tiny = _tiny_value(name, values, declared.get(name), layers, ids)
        if tiny is not None:
            fields.setdefault(name, tiny)
    fields |= copy.deepcopy(parts) | copy.deepcopy(override.fields)
    return cls(**fields)


def _as_dict(config: Any) -> dict[str, Any]:
    """To build it again as a part; the names left out are no arguments of some classes."""
    return {
        name: value for name, value in config.to_dict().items() if name not in ("_name_or_path", "output_attentions")
    }


def _stages(default: Any) -> dict[str, Any]:
    """A backbone whose outputs are taken from many layers has one layer for each of them."""
    taken = getattr(default, "_out_indices", None) or ()
    if "num_hidden_layers" in vars(default) and len(taken) and max(taken) > LAYERS:
        count = max(LAYERS, len(taken))
        return {"num_hidden_layers": count, "out_indices": list(range(count - len(taken) + 1, count + 1))}
    return {"out_features": list(getattr(default, "_out_features", None) or ())} if len(taken) > 1 else {}


def _declared(cls: Any) -> dict[str, Any]:
    """Defaults as the class states them; what is derived from other fields is None there."""
    found = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


def _is_config(value: Any) -> bool:
    from transformers import PreTrainedConfig

    return isinstance(value, PreTrainedConfig)


def _layers_to_keep(values: dict[str, Any]) -> list[int]:
    """Indices of layers such that every kind of layer is among them."""
    lists = [values[name] for name in PER_LAYER if isinstance(values.get(name), (list, tuple)) and values[name]]
    if not lists:
        return []
    count = min(len(kinds) for kinds in lists)
    kept: list[int] = []
    seen: set[Any] = set()
    for index, kinds in enumerate(zip(*(kinds[:count] for kinds in lists), strict=True)):
        if not set(enumerate(kinds)) <= seen:
            seen |= set(enumerate(kinds))
            kept.append(index)
    kept += [index for index in range(count) if index not in kept][: max(0, LAYERS - len(kept))]
    return sorted(kept)


def _tiny_value(name: str, values: dict[str, Any], declared: Any, layers: list[int], ids: dict[str, int]) -> Any:
    """The value to pass, or None to leave the field to its class."""
    value = values[name]
    if SPECIAL.match(name) and not isinstance(value, bool):
        return _special(name, value, ids)
    if layers and isinstance(value, (list, tuple)) and len(value) > max(layers) and name in PER_LAYER:
        return [value[index] for index in layers]
    if layers and name in ("num_hidden_layers", "num_layers", "n_layers", "n_layer"):
        return len(layers)
    if name == "rope_parameters" and isinstance(value, dict) and "mrope_section" in value:
        return value | {"mrope_section": [2, 3, 3]}
    if name == "image_grid_pinpoints":
        return [[2 * IMAGE, 2 * IMAGE]]
    if value is None:
        return NEEDED.get(name)
    if isinstance(value, (bool, str, float)):
        return value if isinstance(declared, (bool, str, float)) and value != declared else None
    if declared is None:
        return None
    if isinstance(value, int):
        if re.fullmatch(_names("key_value_heads", "kv_heads", "head_kv", "multi_query_group_num"), name):
            return _key_value_heads(name, values)
        return _number(name, value, RULES)
    if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
        tiny = [_number(name, v, STAGES) for v in value]
        return None if None in tiny else type(value)(tiny)
    return None


def _key_value_heads(name: str, values: dict[str, Any]) -> int:
    """One, as many as heads, or grouped, as by default."""
    heads = values.get(name.replace("key_value", "attention").replace("kv_heads", "heads"), values.get("num_heads"))
    return {1: 1, heads: HEADS}.get(values[name], HEADS // 2)


def _number(name: str, value: int, rules: list[tuple[str, Callable[[int], int]]]) -> int | None:
    return next((rule(value) for pattern, rule in rules if re.fullmatch(pattern, name)), None)


def _special(name: str, value: Any, ids: dict[str, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return [FIXED.get(name, 2)]
    if not isinstance(value, int):
        return None
    if name in FIXED:
        return FIXED[name]
    if not re.search(r"token", name):
        return None
    return ids.setdefault(name, 3 + len(ids))


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()[:200] if lines else ''}"
