"""Stand-ins for the parts of vLLM 0.32 that a backend imports, so that it can be driven where vLLM is not installed.

Names, arguments and defaults are vLLM's. `make test-vllm` runs the real engine.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["CommonAttentionMetadata", "CrossAttentionSpec", "FullAttentionSpec", "Registered", "installed"]

Metadata = TypeVar("Metadata")


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class AttentionBackend:
    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes  # type: ignore[attr-defined]

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False


class AttentionMetadataBuilder(Generic[Metadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device


class AttentionImpl(Generic[Metadata]):
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True
    dcp_local_seq_lens: Tensor | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_prefix_lens: Tensor | None = None


@dataclass
class FullAttentionSpec:
    block_size: int


@dataclass
class CrossAttentionSpec:
    block_size: int


class AttentionBackendEnum(enum.Enum):
    CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    CUSTOM = None


class Registered:
    """What `register_backend` was called with."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}

    def register_backend(self, backend: AttentionBackendEnum, class_path: str) -> None:
        self.paths[backend.name] = class_path


@contextmanager
def installed() -> Iterator[Registered]:
    """Within the block, `import vllm` finds the stand-ins."""
    registered = Registered()
    backend = types.ModuleType("vllm.v1.attention.backend")
    for part in (
        AttentionType, AttentionCGSupport, MultipleOf, AttentionBackend, AttentionMetadataBuilder, AttentionImpl,
        CommonAttentionMetadata,
    ):  # fmt: skip
        setattr(backend, part.__name__, part)
    specs = types.ModuleType("vllm.v1.kv_cache_interface")
    specs.FullAttentionSpec = FullAttentionSpec  # type: ignore[attr-defined]
    registry = types.ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = AttentionBackendEnum  # type: ignore[attr-defined]
    registry.register_backend = registered.register_backend  # type: ignore[attr-defined]
    names = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends")
    modules = {name: types.ModuleType(name) for name in names} | {m.__name__: m for m in (backend, specs, registry)}
    before = {name: sys.modules.get(name) for name in (*modules, "tilewise.integrations.vllm.backend")}
    sys.modules.update(modules)
    try:
        yield registered
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
