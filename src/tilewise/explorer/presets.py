"""Shapes of well-known models, to start from, and the chips whose memories the lesson compares."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise.device import DEVICES

__all__ = ["CHIPS", "PRESETS", "Chip", "Preset"]


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


class Chip(NamedTuple):
    """A chip's two memories and its arithmetic: bytes, bytes a second, operations a second."""

    key: str
    name: str
    cores: int
    slow_name: str
    slow_bytes: int
    bandwidth: float
    fast_name: str
    fast_bytes: int
    fast_bandwidth: float
    flops: float


# An SM reads 128 bytes of shared memory a cycle; the cycles are those at which the datasheet's FLOP/s are reached.
SHARED_BYTES_PER_CYCLE = 128
FLOPS_PER_CYCLE = {"a100": 2048, "h100": 4096, "h200": 4096}


def _gpu(key: str, slow_name: str) -> Chip:
    spec = DEVICES[key]
    rate = spec.flops[torch.float16]
    slow, shared = (slow_name, spec.memory_bytes, spec.bandwidth), SHARED_BYTES_PER_CYCLE * rate / FLOPS_PER_CYCLE[key]
    return Chip(key, spec.name, spec.num_sms, *slow, "SRAM", spec.smem_bytes, shared, rate)


# Eight cores of 3.5 GHz with two 32-byte multiply-adds a cycle, two channels of LPDDR5-6400.
LAPTOP = Chip(
    key="laptop",
    name="Laptop CPU, 8 cores, fp32",
    cores=8,
    slow_name="DRAM",
    slow_bytes=16 * 10**9,
    bandwidth=102.4e9,
    fast_name="L2 cache",
    fast_bytes=1280 << 10,
    fast_bandwidth=8 * 3.5e9 * 64,
    flops=8 * 3.5e9 * 32,
)
CHIPS = (_gpu("a100", "HBM"), _gpu("h100", "HBM"), _gpu("h200", "HBM"), LAPTOP)
