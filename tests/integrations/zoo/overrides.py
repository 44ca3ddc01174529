"""What single model types need beyond the rules of `tiny.py` and `inputs.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["FIELDS", "INPUTS", "Override"]


@dataclasses.dataclass(frozen=True)
class Override:
    """`fields` replace what the rules say, `without` leaves fields to their class, `parts` are types of sub configs."""

    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    without: tuple[str, ...] = ()
    parts: dict[str, str] = dataclasses.field(default_factory=dict)


def _fields(**fields: Any) -> Override:
    return Override(fields)


def _rope(*section: int, **more: Any) -> Override:
    """Rotary tables of several axes: the sections fill half of a head."""
    return _fields(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section), **more})


RESNET = Override({"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}, (), {"backbone_config": "resnet"})
SERIES = _fields(prediction_length=4, context_length=12, lags_sequence=[1, 2], num_time_features=1)

VQ = _fields(base_channels=32, channel_multiplier=[1, 1], num_res_blocks=1, embed_dim=32, num_embeddings=64, resolution=32)
_LAYER_MAP: dict[str, Any] = {"deepstack_layer_map": [[-1, 0]]}

# By model type, or by the path of a sub config ("clap.audio_config").
FIELDS: dict[str, Override] = {
    "encoder-decoder": Override(parts={"encoder": "bert", "decoder": "bert"}),
    "speech-encoder-decoder": Override(parts={"encoder": "wav2vec2", "decoder": "bert"}),
    "vision-encoder-decoder": Override(parts={"encoder": "vit", "decoder": "bert"}),
    "vision-text-dual-encoder": Override(parts={"vision_config": "vit", "text_config": "bert"}),
    "musicgen": Override(parts={"text_encoder": "t5", "audio_encoder": "encodec", "decoder": "musicgen_decoder"}),
    "musicgen_melody": Override(
        parts={"text_encoder": "t5", "audio_encoder": "encodec", "decoder": "musicgen_melody_decoder"}
    ),
    "nougat": Override(parts={"encoder": "donut-swin", "decoder": "mbart"}),
    "rag": Override(parts={"question_encoder": "dpr", "generator": "bart"}),
    "autoformer": SERIES,
    "informer": SERIES,
    "time_series_transformer": SERIES,
    "glm4v_text": _rope(2, 3, 3),
    "glm4v_moe_text": _rope(1, 1, 2, partial_rotary_factor=0.5),
    "glm_image_text": _rope(2, 3, 3),
    "glm_ocr_text": _rope(2, 3, 3),
    "paddleocr_vl_text": _rope(2, 3, 3),
    "qwen2_vl_text": _rope(2, 3, 3),
    "qwen2_5_vl_text": _rope(2, 3, 3),
    "qwen3_vl_text": _rope(2, 3, 3),
    "qwen3_vl_moe_text": _rope(2, 3, 3),
    "cosmos3_edge_text": _rope(4, 2, 2),
    "detr": RESNET,
    "conditional_detr": RESNET,
    "deformable_detr": RESNET,
    "dab-detr": RESNET,
    "gpt_neo": _fields(attention_types=[[["global", "local"], 1]], window_size=5, num_layers=2),
    "mamba2": _fields(num_heads=8, head_dim=16),
    "lilt": _fields(channel_shrink_ratio=4, hidden_size=48),
    "layoutlmv3": _fields(coordinate_size=12, shape_size=8),
    "audio-spectrogram-transformer": _fields(max_length=64, num_mel_bins=32, time_stride=8, frequency_stride=8),
    "bamba": _fields(attn_layer_indices=[1]),
    "granitemoehybrid": _fields(layer_types=["mamba", "attention"]),
    "jamba": _fields(attn_layer_period=2, attn_layer_offset=1),
    "lfm2_moe": _fields(layer_types=["conv", "full_attention"]),
    "deepseek_ocr2.text_config": _fields(mlp_layer_types=["dense", "sparse"]),
    "longcat_flash": _fields(head_dim=8),
    "mimi": _fields(
        upsample_groups=16, num_filters=8, codebook_size=64, codebook_dim=32, vector_quantization_hidden_dimension=32,
        num_quantizers=4,
    ),
    "moonshine_streaming": _fields(num_key_value_heads=4),
    "clvp.text_config": _fields(hidden_size=128),
    "clvp.speech_config": _fields(hidden_size=128),
    "glm5_next_text": _fields(index_kpool=2, index_topk=4),
    "gemma3n_text": _fields(
        num_hidden_layers=4, num_kv_shared_layers=2, intermediate_size=[96] * 4, activation_sparsity_pattern=[0.0] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gemma4_assistant": Override(parts={"text_config": "gemma4_text"}),
    "gemma4_unified_assistant": Override(parts={"text_config": "gemma4_unified_text"}),
    "granite_speech_encoder": _fields(context_size=16),
    "granite_speech_plus_encoder": _fields(context_size=16),
    "granite_speech5_encoder": _fields(context_size=16),
    "granite4_vision": Override(_LAYER_MAP, parts={"text_config": "granite"}),
    "hgnet_v2": _fields(
        stage_in_channels=[48, 64, 64, 64], stage_mid_channels=[16] * 4, stage_out_channels=[64] * 4,
        stage_num_blocks=[1] * 4, stage_numb_of_layers=[2] * 4, hidden_sizes=[64] * 4,
    ),
    "depth_pro": _fields(intermediate_hook_ids=[1, 0]),
    "donut-swin": _fields(depths=[2, 2], num_heads=[4, 4], window_size=4, patch_size=4, embed_dim=32),
    "efficientloftr": _fields(hidden_size=256),
    "chameleon": _fields(vocabulary_map={"<image>": 8}),
    "emu3": _fields(vocabulary_map={"<image>": 8, "<|extra_200|>": 9}),
    "chameleon_vqgan": VQ,
    "emu3_vqgan": VQ,
    "janus_vqgan": VQ,
    "ernie4_5_vl_moe_text": _rope(3, 3, 2),
    "hunyuan_vl_text": _rope(2, 2, 2, 2),
    "esm": _fields(pad_token_id=0, mask_token_id=3),
    "fun_asr_nano.adaptor_config": _fields(intermediate_size=16),
    "oneformer": _fields(text_encoder_vocab_size=128),
    "mobilevitv2": _fields(image_size=64),
    "levit": _fields(image_size=128, patch_size=16),
    "lw_detr_vit": _fields(image_size=64, num_windows=4),
    "cvt": _fields(depth=[1, 2, 3]),
    "dac": _fields(encoder_hidden_size=16, decoder_hidden_size=64, codebook_size=64),
    "dinov3_convnext": _fields(hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1]),
    "efficientnet": _fields(width_coefficient=0.25, depth_coefficient=0.25),
    "align_vision_model": _fields(width_coefficient=0.25, depth_coefficient=0.25),
    "clap_audio_model": _fields(spec_size=64, num_mel_bins=16, patch_size=4, window_size=4, depths=[2, 2, 2, 2]),
    "blt": _fields(encoder_hash_byte_group_vocab=64),
    "blip-2": _fields(image_token_index=5, num_query_tokens=4),
    "instructblip": _fields(image_token_index=5, num_query_tokens=4),
    "instructblipvideo": _fields(video_token_index=5, num_query_tokens=4),
    "kosmos-2": _fields(latent_query_num=4),
    "diffusion_gemma": Override(parts={"vision_config": "gemma4_vision"}),
}  # fmt: skip

Words = Callable[..., Tensor]


def _series(config: Any, words: Words) -> dict[str, Any]:
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    return {
        "past_values": _noise(2, past),
        "past_time_features": _noise(2, past, 1),
        "past_observed_mask": torch.ones(2, past),
        "future_values": _noise(2, future),
        "future_time_features": _noise(2, future, 1),
    }


def _large_picture(config: Any, words: Words) -> dict[str, Any]:
    """For backbones that shrink a picture by 32: several positions are left of it."""
    return {"pixel_values": _noise(2, 3, 96, 96)}


def _large_picture_and_words(config: Any, words: Words) -> dict[str, Any]:
    return {"pixel_values": _noise(2, 3, 96, 96), "input_ids": words(2, 13)}


def _queried_picture(config: Any, words: Words) -> dict[str, Any]:
    """A token for each query of the bridge between picture and words."""
    ids = words(2, 17)
    ids[:, : config.num_query_tokens] = config.image_token_index
    found = {"input_ids": ids, "pixel_values": _noise(2, 3, 32, 32)}
    return found | ({"qformer_input_ids": words(2, 6)} if config.model_type == "instructblip" else {})


def _queried_video(config: Any, words: Words) -> dict[str, Any]:
    ids = words(2, 21)
    ids[:, : 2 * config.num_query_tokens] = config.video_token_index
    return {"input_ids": ids, "pixel_values": _noise(2, 2, 3, 32, 32), "qformer_input_ids": words(2, 6)}


def _kosmos(config: Any, words: Words) -> dict[str, Any]:
    place = torch.zeros(2, 13, dtype=torch.long)
    place[:, 2 : 2 + config.latent_query_num] = 1
    return {"input_ids": words(2, 13), "pixel_values": _noise(2, 3, 32, 32), "image_embeds_position_mask": place}


def _idefics(config: Any, words: Words) -> dict[str, Any]:
    seen = torch.ones(2, 13, 1, dtype=torch.long)
    return {"input_ids": words(2, 13), "pixel_values": _noise(2, 1, 3, 32, 32), "image_attention_mask": seen}


def _qformer(config: Any, words: Words) -> dict[str, Any]:
    states = _noise(2, 5, config.encoder_hidden_size)
    return {"query_embeds": _noise(2, 4, config.hidden_size), "encoder_hidden_states": states}


def _dia(config: Any, words: Words) -> dict[str, Any]:
    codes = words(2, 7 * config.decoder_config.num_channels).view(2, 7, -1)
    return {"input_ids": words(2, 13), "decoder_input_ids": codes}


def _tasks(config: Any, words: Words) -> dict[str, Any]:
    return {"pixel_values": _noise(2, 3, 96, 96), "task_inputs": words(2, config.task_seq_len)}


def _pairs(config: Any, words: Words) -> dict[str, Any]:
    return {"pixel_values": _noise(2, 2, 3, 64, 64)}


# Inputs of types whose names do not say enough: of a configuration and `words(batch, seqlen)`.
INPUTS: dict[str, Callable[[Any, Words], dict[str, Any]]] = {
    "autoformer": _series,
    "informer": _series,
    "time_series_transformer": _series,
    "conditional_detr": _large_picture,
    "d_fine": _large_picture,
    "dab-detr": _large_picture,
    "deformable_detr": _large_picture,
    "deimv2": _large_picture,
    "detr": _large_picture,
    "lw_detr": _large_picture,
    "mask2former": _large_picture,
    "maskformer": _large_picture,
    "table-transformer": _large_picture,
    "grounding-dino": _large_picture_and_words,
    "mm-grounding-dino": _large_picture_and_words,
    "blip-2": _queried_picture,
    "instructblip": _queried_picture,
    "instructblipvideo": _queried_video,
    "kosmos-2": _kosmos,
    "idefics": _idefics,
    "blip_2_qformer": _qformer,
    "dia": _dia,
    "oneformer": _tasks,
    "efficientloftr": _pairs,
}


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device="cpu").manual_seed(6))
