"""Shapes of well-known models, to start from."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PRESETS", "Preset"]


class Preset(NamedTuple):
    """The attention of a model; `window` counts the keys before its own that a query sees, None is all."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    window: int | None = None


PRESETS = (
    Preset("7B, every head its own K/V (Llama 2 7B)", 32, 32, 128, 32),
    Preset("8B, GQA 4:1 (Llama 3 8B)", 32, 8, 128, 32),
    Preset("70B, GQA 8:1 (Llama 3 70B)", 64, 8, 128, 80),
    Preset("405B, GQA 16:1 (Llama 3.1 405B)", 128, 8, 128, 126),
    Preset("7B, sliding window 4096 (Mistral 7B v0.1)", 32, 8, 128, 32, window=4095),
    Preset("7B, MQA 71:1 (Falcon 7B)", 71, 1, 64, 32),
    Preset("9B, wide heads (Gemma 2 9B)", 16, 8, 256, 42),
    Preset("0.1B (GPT-2)", 12, 12, 64, 12),
)
