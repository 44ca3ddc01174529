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
    return _fields(
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section), **more}
    )


RESNET = Override({"use_timm_backbone": False}, (), {"backbone_config": "resnet"})
SERIES = _fields(prediction_length=4, context_length=12, lags_sequence=[1, 2], num_time_features=1)

SWIN = _fields(window_size=3, embed_dim=16, patch_size=4, image_size=96)  # 24, 12, 6 and 3 positions a side
VQ = _fields(
    base_channels=32, channel_multiplier=[1, 1], num_res_blocks=1, embed_dim=32, num_embeddings=64, resolution=32
)

_CONVOLUTIONS = _fields(num_filters=4, hidden_size=64, depths=[1, 1, 1, 1, 1, 1, 1])

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
    "mobilebert": _fields(normalization_type="layer_norm"),  # without norms, random weights leave one key to a query
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
    "encodec": _fields(num_filters=4, hidden_size=32, codebook_size=64, codebook_dim=32),
    "mimi": _fields(
        upsample_groups=16, num_filters=8, codebook_size=64, codebook_dim=32, vector_quantization_hidden_dimension=32,
        num_quantizers=4,
    ),
    "moonshine_streaming": _fields(num_key_value_heads=4),
    "clvp.text_config": _fields(hidden_size=128),
    "clvp.speech_config": _fields(hidden_size=128),
    "glm5_next_text": _fields(index_kpool=2, index_topk=4, qk_rope_head_dim=0),
    "gemma3n_text": _fields(
        num_hidden_layers=4, num_kv_shared_layers=2, intermediate_size=[96] * 4, activation_sparsity_pattern=[0.0] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gemma4_assistant": Override(parts={"text_config": "gemma4_text"}),
    "gemma4_unified_assistant": Override(parts={"text_config": "gemma4_unified_text"}),
    "granite_speech_encoder": _fields(context_size=16),
    "granite_speech_plus_encoder": _fields(context_size=16),
    "granite_speech5_encoder": _fields(context_size=16),
    "granite4_vision": Override(
        {
            "deepstack_layer_map": [[-1, 0]], "downsample_rate": "2/4", "spatial_target_layers": [0, 1, 0, 1],
            "vision_feature_select_strategy": "full",
        },
        parts={"text_config": "granite"},
    ),
    "hgnet_v2": _fields(
        stage_in_channels=[48, 64, 64, 64], stage_mid_channels=[16] * 4, stage_out_channels=[64] * 4,
        stage_num_blocks=[1] * 4, stage_numb_of_layers=[2] * 4, hidden_sizes=[64] * 4,
    ),
    "depth_pro": _fields(intermediate_hook_ids=[1, 0]),
    "donut-swin": _fields(depths=[2, 2], num_heads=[4, 4], window_size=4, patch_size=4, embed_dim=32),
    "efficientloftr": _fields(hidden_size=256, num_attention_heads=8),
    "chameleon": _fields(vocabulary_map={"<image>": 8}),
    "emu3": _fields(vocabulary_map={"<image>": 8, "<|extra_200|>": 9}),
    "chameleon_vqgan": VQ,
    "emu3_vqgan": VQ,
    "janus_vqgan": VQ,
    "ernie4_5_vl_moe_text": _rope(3, 3, 2),
    "hunyuan_vl_text": _rope(2, 2, 2, 2),
    "esm": _fields(pad_token_id=0, mask_token_id=3),
    "fun_asr_nano.adaptor_config": _fields(intermediate_size=16),
    "mobilevitv2": _fields(image_size=64),
    "levit": _fields(image_size=128, patch_size=16),
    "lw_detr_vit": _fields(image_size=64, num_windows=4),
    "cvt": _fields(depth=[1, 2, 3]),
    "dac": _fields(encoder_hidden_size=16, decoder_hidden_size=64, codebook_size=64),
    "dinov3_convnext": _fields(hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1]),
    "efficientnet": _fields(width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320),
    "align_vision_model": _fields(width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320),
    "clap_audio_model": _fields(
        spec_size=64, num_mel_bins=16, patch_size=4, window_size=4, depths=[2, 2], num_attention_heads=[4, 4],
        hidden_size=128,
    ),
    "blt": _fields(encoder_hash_byte_group_vocab=64, num_hidden_layers=2),
    "blip-2": _fields(image_token_index=5, num_query_tokens=4),
    "instructblip": _fields(image_token_index=5, num_query_tokens=4),
    "instructblipvideo": _fields(video_token_index=5, num_query_tokens=4),
    "kosmos-2": _fields(latent_query_num=4),
    "dbrx.attn_config": _fields(rope_theta=10000.0, clip_qkv=8.0),
    "cohere_compass_text": _fields(
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}}
    ),
    "chmv2.backbone_config": _fields(return_class_token=True, apply_layernorm=True, reshape_hidden_states=True),
    "gemma4_assistant.text_config": _fields(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0),
    "gemma4_unified_assistant.text_config": _fields(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0),
    "lw_detr": _fields(projector_scale_factors=[1.0]),
    "perceiver": _fields(
        d_latents=64, num_latents=8, num_self_attends_per_block=2, qk_channels=64, v_channels=64, d_model=64
    ),
    "pix2struct_vision_model": _fields(patch_embed_hidden_size=192, seq_len=64),
    "pp_doclayout_v2": _fields(class_thresholds=[0.5, 0.5]),
    "qwen2_5_omni_text": _rope(2, 3, 3),
    "qwen2_5_omni_bigvgan": _fields(upsample_initial_channel=64),
    "qwen3_omni_moe.talker_config.text_config": _fields(shared_expert_intermediate_size=96),
    "qwen3_omni_moe_thinker": _fields(vision_start_token_id=20, vision_end_token_id=21, audio_start_token_id=22),
    "qwen4_exp_text": _fields(
        indexer_budget=4, indexer_compress_ratio=2, indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=16
    ),
    "recurrent_gemma": _fields(num_hidden_layers=3, attention_window_size=5),
    "reformer": _fields(
        is_decoder=True, axial_pos_embds=False, attn_layers=["local", "lsh"], local_attn_chunk_length=4,
        lsh_attn_chunk_length=4, num_buckets=2, num_hashes=1, feed_forward_size=96,
    ),
    "sam2_hiera_det_model": _fields(
        hidden_size=16, blocks_per_stage=[1, 1, 2, 1], embed_dim_per_stage=[16, 32, 64, 128], image_size=[64, 64],
        num_attention_heads_per_stage=[1, 2, 4, 8], global_attention_blocks=[3], window_size_per_stage=[4, 2, 4, 2],
    ),
    "sam2_vision_model": _fields(
        backbone_channel_list=[128, 64, 32, 16], backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]], fpn_hidden_size=64
    ),
    "sam2": _fields(image_size=64),
    "sam2.prompt_encoder_config": _fields(image_size=64, patch_size=16),
    "sam_vision_model": _fields(num_pos_feats=32),
    "sam_hq_vision_model": _fields(num_pos_feats=32),
    "superglue": _fields(hidden_size=256),
    "seggpt": _fields(image_size=[64, 32]),
    "qwen2_5_omni_thinker": _fields(vision_start_token_id=20, vision_end_token_id=21, audio_start_token_id=22),
    "qwen3_omni_moe.code2wav_config": _fields(decoder_dim=64),
    "qwen3_omni_moe.talker_config": _fields(spatial_merge_size=2),
    "blt.encoder_config": _fields(hidden_size_global=64),
    "blt.decoder_config": _fields(hidden_size_global=64),
    "step3p7.text_config": _fields(sliding_window=5),
    "swin": _fields(depths=[2, 2], num_heads=[4, 4], window_size=4, patch_size=4, embed_dim=32),
    "aria": _fields(projector_patch_to_query_dict={16: 4}),
    "gemma4": Override(parts={"vision_config": "gemma4_vision", "audio_config": "gemma4_audio"}),
    "glmasr_encoder": _fields(intermediate_size=256),
    "vits": _fields(
        use_stochastic_duration_prediction=False, upsample_initial_channel=32, spectrogram_bins=33, flow_size=64
    ),
    "led": _fields(attention_window=4),
    "grounding-dino.backbone_config": SWIN,
    "mm-grounding-dino.backbone_config": SWIN,
    "mask2former.backbone_config": SWIN,
    "maskformer.backbone_config": SWIN,
    "oneformer.backbone_config": SWIN,
    "t5gemma2_encoder.text_config": _fields(dropout_rate=0.0),
    "table-transformer": RESNET,
    "tvp": _fields(max_img_size=96, visual_prompt_size=4, num_frames=2),
    "vibevoice_acoustic_tokenizer": _CONVOLUTIONS,
    "vibevoice_acoustic_tokenizer_encoder": _CONVOLUTIONS,
    "vibevoice_acoustic_tokenizer_decoder": _CONVOLUTIONS,
    "bit": _fields(embedding_size=32, hidden_sizes=[32, 32, 32, 32], depths=[1, 1, 1, 1], num_groups=4),
    "decision_transformer": _fields(hidden_size=64, n_layer=2, n_head=4, state_dim=6, act_dim=3, max_ep_len=32),
    "moshi": _fields(num_codebooks=4),
    "moshi_depth": _fields(num_codebooks=4),
    "muse_spark_audio": _fields(num_hidden_layers=4),
    "oneformer": _fields(text_encoder_vocab_size=128, conv_dim=64, mask_dim=64),
    "patchtst": _fields(context_length=32, patch_length=4, patch_stride=4, num_input_channels=2),
    "patchtsmixer": _fields(context_length=32, patch_length=4, patch_stride=4, num_input_channels=2),
    "pocket_tts.flow_head_config": _fields(condition_dim=64),
    "gradium_phonon_tts.flow_head_config": _fields(condition_dim=64),
    "timesfm": _fields(context_length=64, patch_length=8, horizon_length=8, hidden_size=64),
    "timesfm2_5": _fields(context_length=64, patch_length=8, horizon_length=8, output_patch_length=8),
    "vitmatte": Override(
        {"convstream_hidden_sizes": [16, 16, 16], "fusion_hidden_sizes": [32, 16, 16, 16]},
        parts={"backbone_config": "vitdet"},
    ),
    "vitmatte.backbone_config": _fields(num_channels=4, image_size=64, patch_size=16, out_features=["stage2"]),
    "molmo2.vision_config": _fields(image_size=[32, 32], num_position_embeddings=16),
    "molmo2.adapter_config": _fields(vision_feature_layer=[-1, 0], text_hidden_size=64),
    "nemotron_h_omni.vision_config": _fields(video_temporal_patch_size=2),
    "mimi_decoder": _fields(upsample_groups=16, num_filters=8),
    "pocket_tts_audio_tokenizer": _fields(upsample_groups=16, num_filters=8),
    "pocket_tts_audio_tokenizer_decoder": _fields(upsample_groups=16, num_filters=8),
    "muse_spark.audio_config": _fields(num_hidden_layers=4),
    "pi0": _fields(chunk_size=4, max_state_dim=8, max_action_dim=8),
    "align": _fields(projection_dim=80),
    "xlstm": _fields(qk_dim_factor=1.0),
    "xmod": _fields(default_language="en_XX", languages=["en_XX", "de_DE"]),
    "zamba": _fields(layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], num_hidden_layers=4),
    "zoedepth": _fields(bottleneck_features=64),
    "diffusion_gemma": Override({"canvas_length": 8}, parts={"vision_config": "gemma4_vision"}),
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


def _codes(config: Any, words: Words) -> dict[str, Any]:
    """A token of text and one of each codebook at each position."""
    return {"input_ids": words(2, 13 * (config.num_codebooks + 1)).view(2, 13, -1)}


def _songs(config: Any, words: Words) -> dict[str, Any]:
    """A row for each codebook."""
    return {"input_ids": words(2, 13), "decoder_input_ids": words(2 * config.decoder.num_codebooks, 7)}


def _medium_picture(config: Any, words: Words) -> dict[str, Any]:
    return {"pixel_values": _noise(2, 3, 64, 64)}


def _frames(config: Any, words: Words) -> dict[str, Any]:
    return {"input_ids": words(2, 13), "pixel_values": _noise(2, 2, 3, 96, 96), "attention_mask": torch.ones(2, 13)}


def _tasks(config: Any, words: Words) -> dict[str, Any]:
    return {"pixel_values": _noise(2, 3, 96, 96), "task_inputs": words(2, config.task_seq_len)}


def _pairs(config: Any, words: Words) -> dict[str, Any]:
    return {"pixel_values": _noise(2, 2, 3, 64, 64)}


def _inputs(config: Any, words: Words) -> dict[str, Any]:
    return {"inputs": words(2, 13)}


def _flattened(config: Any, words: Words) -> dict[str, Any]:
    """Patches with their row and column in front."""
    places = torch.stack(torch.meshgrid(torch.arange(1, 5), torch.arange(1, 5), indexing="ij"), -1).flatten(0, 1)
    patches = torch.cat(
        [places.expand(2, 16, 2).float(), _noise(2, 16, config.vision_config.patch_embed_hidden_size)], -1
    )
    return {"flattened_patches": patches, "decoder_input_ids": words(2, 7)}


def _line(config: Any, words: Words) -> dict[str, Any]:
    """A picture of one line of text."""
    return {"pixel_values": _noise(2, 3, 48, 96)}


def _prompted(config: Any, words: Words) -> dict[str, Any]:
    picture = _noise(2, 3, config.image_size[0] // 2, config.image_size[1])
    return {"pixel_values": picture, "prompt_pixel_values": picture.flip(0), "prompt_masks": picture.flip(2)}


def _picture_and_words(config: Any, words: Words) -> dict[str, Any]:
    return {"input_ids": words(2, 13), "pixel_values": _noise(2, 3, 32, 32)}


def _spectrum_and_words(config: Any, words: Words) -> dict[str, Any]:
    audio = config.audio_config
    frames = audio.spec_size * audio.spec_size // audio.num_mel_bins
    return {"input_ids": words(2, 13), "input_features": _noise(2, 1, frames, audio.num_mel_bins)}


def _decisions(config: Any, words: Words) -> dict[str, Any]:
    return {
        "states": _noise(2, 5, config.state_dim), "actions": _noise(2, 5, config.act_dim), "rewards": _noise(2, 5, 1),
        "returns_to_go": _noise(2, 5, 1), "timesteps": torch.arange(5).expand(2, 5),
    }  # fmt: skip


def _channels(config: Any, words: Words) -> dict[str, Any]:
    return {"past_values": _noise(2, config.context_length, config.num_input_channels)}


def _past(config: Any, words: Words) -> dict[str, Any]:
    values = _noise(2, config.context_length)
    found = {"past_values": values, "past_values_padding": torch.zeros_like(values, dtype=torch.long)}
    return found if config.model_type == "timesfm2_5" else found | {"freq": torch.zeros(2, 1, dtype=torch.long)}


def _frames_of_sound(config: Any, words: Words) -> dict[str, Any]:
    return {"input_features": _noise(2, 20, config.input_size), "input_features_mask": torch.ones(2, 20).long()}


def _trimap(config: Any, words: Words) -> dict[str, Any]:
    return {"pixel_values": _noise(2, 4, 64, 64)}


def _samples(config: Any, words: Words) -> dict[str, Any]:
    return {"hidden_states": _noise(2, config.channels, 4000)}


def _latents(config: Any, words: Words) -> dict[str, Any]:
    return {"hidden_states": _noise(2, config.hidden_size, 4)}


def _merged_patches(config: Any, words: Words) -> dict[str, Any]:
    patches = _noise(32, config.num_channels * config.patch_size**2)
    grid = torch.tensor([[1, 4, 4]] * 2)
    return {"pixel_values": patches, "grid_thw": grid, "merge_sizes": torch.tensor([2, 2])}


def _sound_and_words(config: Any, words: Words) -> dict[str, Any]:
    """A word for every few frames."""
    frames = 7 * config.audio_length_per_tok
    return {"input_ids": words(2, 7), "input_features": _noise(2, config.audio_config.num_mel_bins, frames)}


def _shared_states(config: Any, words: Words) -> dict[str, Any]:
    """Keys and values of the model that this one drafts for, which has one kind of layer behind the other."""
    text = config.get_text_config()
    found = {}
    for index, kind in enumerate(text.layer_types):
        layer = text.per_layer_config[index] if hasattr(text, "per_layer_config") else text
        dim = getattr(text, "global_head_dim", layer.head_dim) if kind == "full_attention" else layer.head_dim
        found[kind] = (_noise(2, layer.num_key_value_heads, 9, dim), _noise(2, layer.num_key_value_heads, 9, dim))
    width = 2 * getattr(config, "backbone_hidden_size", text.hidden_size)
    return {"inputs_embeds": _noise(2, 1, width), "shared_kv_states": found, "position_ids": torch.full((2, 1), 8)}


def _grids(config: Any, words: Words) -> dict[str, Any]:
    patch = config.patch_size
    return {"pixel_values": _noise(1, 3, patch, 2 * 16 * patch), "target_sizes": torch.tensor([[4, 4], [4, 4]])}


def _latent_frames(config: Any, words: Words) -> dict[str, Any]:
    return {"latents": _noise(2, config.hidden_size, 6)}


def _whole_frames(config: Any, words: Words) -> dict[str, Any]:
    return {"input_values": _noise(2, 3840)}


def _robot(config: Any, words: Words) -> dict[str, Any]:
    vlm = config.vlm_config
    side = vlm.vision_config.image_size // vlm.vision_config.patch_size
    ids = words(2, 13 + side * side)
    ids[:, : side * side] = vlm.image_token_id
    picture = _noise(2, 1, 3, vlm.vision_config.image_size, vlm.vision_config.image_size)
    return {
        "state": _noise(2, config.max_state_dim), "noise": _noise(2, config.chunk_size, config.max_action_dim),
        "timestep": torch.tensor([0.3, 0.6]), "input_ids": ids, "pixel_values": picture,
        "pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool), "attention_mask": torch.ones_like(ids),
    }  # fmt: skip


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
    "kyutai_speech_to_text": _codes,
    "csm": _codes,
    "oneformer": _tasks,
    "efficientloftr": _pairs,
    "superglue": _pairs,
    "musicgen": _songs,
    "musicgen_melody": _songs,
    "sam2": _medium_picture,
    "sam2_vision_model": _medium_picture,
    "sam2_hiera_det_model": _medium_picture,
    "tvp": _frames,
    "perceiver": _inputs,
    "pix2struct": _flattened,
    "pp_ocrv5_mobile_rec": _line,
    "pp_ocrv5_server_rec": _line,
    "pp_ocrv6_small_rec": _line,
    "pp_ocrv6_tiny_rec": _line,
    "seggpt": _prompted,
    "align": _picture_and_words,
    "mimi_decoder": _latent_frames,
    "pocket_tts_audio_tokenizer_decoder": _latent_frames,
    "muse_spark_audio": _whole_frames,
    "pi0": _robot,
    "voxtral_realtime": _sound_and_words,
    "gemma4_assistant": _shared_states,
    "gemma4_unified_assistant": _shared_states,
    "minicpm_ocr_vision": _grids,
    "minicpmv4_7_vision": _grids,
    "clap": _spectrum_and_words,
    "decision_transformer": _decisions,
    "patchtst": _channels,
    "patchtsmixer": _channels,
    "timesfm": _past,
    "timesfm2_5": _past,
    "fun_asr_nano_encoder": _frames_of_sound,
    "vitmatte": _trimap,
    "vibevoice_acoustic_tokenizer_encoder": _samples,
    "vibevoice_acoustic_tokenizer_decoder": _latents,
    "video_llama_3_vision": _merged_patches,
}


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device="cpu").manual_seed(6))
