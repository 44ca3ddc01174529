"""Stand-ins for the parts of vLLM 0.33 that a backend imports, so that it can be driven where vLLM is not installed.

Names, arguments and defaults are vLLM's. `make test-vllm` runs the real engine.
"""

# Stand-ins have arguments that they do not use.
# ruff: noqa: ARG002

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from standing_in import standing_in

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


class QueryLenSupport(enum.Enum):
    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"


class MLACommonBackend(AttentionBackend):
    @classmethod
    def is_mla(cls) -> bool:
        return True


class AttentionMetadataBuilder(Generic[Metadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    def _init_reorder_batch_threshold(self, threshold: int, supports_spec_as_decode: bool = False) -> None:
        drafts = getattr(self.vllm_config, "num_speculative_tokens", 0) if supports_spec_as_decode else 0
        self.reorder_batch_threshold = max(threshold, 1 + drafts)


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
    seq_lens_cpu_upper_bound: Tensor | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_prefix_lens: Tensor | None = None


class KVQuantMode(enum.IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2


@dataclass
class FullAttentionSpec:
    block_size: int
    head_size: int = 64
    head_size_v: int = 64
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    state_content_bytes: int | None = None


@dataclass
class CrossAttentionSpec:
    block_size: int


@dataclass
class MLACommonDecodeMetadata:
    block_table: Tensor
    seq_lens: Tensor
    dcp_tot_seq_lens: Tensor | None


@dataclass
class MLACommonMetadata:
    num_decode_tokens: int
    num_prefills: int
    decode: Any


class MLACommonMetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Requests with at most `reorder_batch_threshold` queries come first, and are decoded."""

    reorder_batch_threshold: int = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page_size = kv_cache_spec.block_size

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> MLACommonMetadata:
        common = common_attn_metadata
        counts = common.query_start_loc_cpu.diff().tolist()
        decodes = next((n for n, count in enumerate(counts) if count > self.reorder_batch_threshold), len(counts))
        tokens = int(common.query_start_loc_cpu[decodes])
        if decodes == len(counts):
            tokens = common.num_actual_tokens
        decode = None
        if decodes:
            decode = self._build_decode(  # type: ignore[attr-defined]
                block_table_tensor=common.block_table_tensor[:decodes],
                seq_lens_device=common.seq_lens[:decodes],
                max_seq_len=common.max_seq_len,
                query_start_loc_cpu=common.query_start_loc_cpu[: decodes + 1],
                query_start_loc_device=common.query_start_loc[: decodes + 1],
                num_decode_tokens=tokens,
                max_query_len=min(common.max_query_len, self.reorder_batch_threshold),
                dcp_tot_seq_lens_device=None,
            )
        return MLACommonMetadata(tokens, len(counts) - decodes, decode)


class MLACommonImpl(Generic[Metadata]):
    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: Any, sliding_window: Any,
        kv_cache_dtype: str, logits_soft_cap: Any, attn_type: str, kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None, kv_lora_rank: int, qk_nope_head_dim: int, qk_rope_head_dim: int, qk_head_dim: int,
        v_head_dim: int, kv_b_proj: Any, indexer: object | None = None, q_pad_num_heads: int | None = None,
    ) -> None:  # fmt: skip
        self.num_heads, self.kv_lora_rank = num_heads, kv_lora_rank
        self.supports_quant_query_input = True


class AttentionBackendEnum(enum.Enum):
    CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    CPU_MLA = "vllm.v1.attention.backends.mla.cpu_mla.CPUMLABackend"
    AMX_MLA = "vllm.v1.attention.backends.mla.amx_mla.AMXMLABackend"
    CUSTOM = None


class Registered:
    """What `register_backend` was called with."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}

    def register_backend(self, backend: AttentionBackendEnum | str, class_path: str) -> None:
        self.paths[backend if isinstance(backend, str) else backend.name] = class_path


def metadata_of(
    lengths: list[int], counts: list[int], table: Tensor, slots: list[int], padding: int = 0, **others: Any
) -> CommonAttentionMetadata:
    """Of a step of requests of these lengths, the last `counts` tokens of which are new, and of some that pad it."""
    totals = torch.tensor([0, *counts, *[0] * padding]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=totals,
        query_start_loc_cpu=others.pop("query_start_loc_cpu", totals),
        seq_lens=torch.tensor([*lengths, *[0] * padding], dtype=torch.int32),
        num_reqs=len(lengths) + padding,
        num_actual_tokens=sum(counts) + padding,
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        block_table_tensor=torch.cat((table[: len(lengths)], table.new_zeros(padding, table.shape[1]))),
        slot_mapping=torch.tensor([*slots, *[-1] * padding], dtype=torch.int64),
        **others,
    )


@contextmanager
def installed() -> Iterator[Registered]:
    """Within the block, `import vllm` finds the stand-ins."""
    registered = Registered()

    def named(*parts: Any) -> dict[str, Any]:
        return {part.__name__: part for part in parts}

    of_latents = [part for name, part in globals().items() if name.startswith("MLACommon")]
    modules = {
        "vllm.v1.attention.backend": named(
            AttentionType,
            AttentionCGSupport,
            MultipleOf,
            AttentionBackend,
            AttentionMetadataBuilder,
            AttentionImpl,
            CommonAttentionMetadata,
        ),
        "vllm.model_executor.layers.attention.mla_attention": named(QueryLenSupport, *of_latents),
        "vllm.v1.kv_cache_interface": named(FullAttentionSpec, KVQuantMode),
        "vllm.v1.attention.backends.registry": named(AttentionBackendEnum, registered.register_backend),
    }
    with standing_in(modules, *(f"tilewise.integrations.vllm.{name}" for name in ("backend", "latent"))):
        yield registered
