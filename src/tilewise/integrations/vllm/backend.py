"""The classes that vLLM 0.32 and 0.33 ask a backend for. vLLM imports this module by name when the backend is chosen.

`TilewiseBackend` answers what it supports, `TilewiseBuilder` prepares a step once for all layers, `TilewiseImpl` is
called by each layer. They only translate: `tilewise.integrations.engines` computes. What vLLM's CPU platform does not
ask before it starts is refused by the constructors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from tilewise.errors import Unsupported
from tilewise.integrations.engines import DTYPES, Batch, Layer, Role, Spans, int8_cell
from tilewise.integrations.vllm import refusals

__all__ = ["TilewiseBackend", "TilewiseBuilder", "TilewiseImpl"]

ROLES: dict[str, Role] = {
    AttentionType.DECODER: "decoder",
    AttentionType.ENCODER: "encoder",
    AttentionType.ENCODER_ONLY: "encoder",
    AttentionType.ENCODER_DECODER: "cross",
}
# Pages that the Hopper kernels read in prefill as in decoding.
PREFERRED_BLOCK_SIZE = 64


class TilewiseBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM may ask of tilewise."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(refusals.KV_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enum that is kept free for plug-ins."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TilewiseImpl]:
        """The class of a layer's calls."""
        return TilewiseImpl

    @staticmethod
    def get_builder_cls() -> type[TilewiseBuilder]:
        """The class that prepares steps."""
        return TilewiseBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[MultipleOf]:  # noqa: ARG004
        """Pages of any multiple of 16 tokens."""
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The page size where the user names none."""
        return max(default_block_size, PREFERRED_BLOCK_SIZE)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The layout of a cache: cells of int8 end with their scales."""
        if spec.kv_quant_mode != KVQuantMode.INT8_PER_TOKEN_HEAD or spec.state_content_bytes is not None:
            return spec
        return replace(spec, state_content_bytes=int8_cell(spec.head_size, spec.head_size_v))

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether heads may have this many channels."""
        return refusals.why_not_head_size(head_size) is None

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None = None,
        use_mla: bool = False,
        *others: Any,
        **more: Any,
    ) -> str | None:
        """The reason against a combination, for vLLM's list of reasons."""
        del block_size, others, more
        if use_mla:
            return "latent attention (MLA) has a backend of its own: --attention-backend CUSTOM_MLA"
        return refusals.why_not_head_size(head_size) or refusals.why_not_cache_dtype(kv_cache_dtype, dtype)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """GPUs from Ampere on."""
        return bool(capability.major >= 8)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders, encoders and cross attention."""
        return attn_type in ROLES

    @classmethod
    def supports_sink(cls) -> bool:
        """A logit per head that joins the denominator."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows of any size."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Attention in both directions over pages."""
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Image tokens that see each other in both directions."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """An e4m3 cache may have a scale for each K/V head."""
        return True


class Step(Batch):
    """A batch whose spans have the name under which models of vLLM clear them: Gemma 4, for layers without a window."""

    @property
    def mm_prefix_range(self) -> Spans | None:
        """The batch's `spans`."""
        return self.spans

    @mm_prefix_range.setter
    def mm_prefix_range(self, spans: Spans | None) -> None:
        self.spans = spans


class TilewiseBuilder(AttentionMetadataBuilder[Batch]):  # type: ignore[misc]
    """Prepares a step."""

    # Steps whose requests have equally many queries: decoding, and the verification of drafts.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Which steps a graph may replay. A replay knows no spans: it would take the end of a prompt with an image,
        of as many queries as drafts are verified, for decoding. A single query sees the same without them.
        """
        del kv_cache_spec
        if vllm_config.model_config.is_mm_prefix_lm:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refusals.refuse_cache(device, vllm_config.kv_transfer_config)
        # Requests that decode, or verify drafts, come first in a batch.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._page_size: int = kv_cache_spec.block_size
        # Other kinds of cache name a page that nobody reads where they keep none, or hold keys that no two share.
        self._shares = type(kv_cache_spec) is FullAttentionSpec

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Batch:
        """The batch of a step; `common_prefix_len` is always 0, shared prefixes are found in the block table."""
        del common_prefix_len
        common = common_attn_metadata
        refusals.refuse_batch(common, takes_spans=True)
        batch = Step(
            common.num_actual_tokens,
            common.query_start_loc,
            common.max_query_len,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            bool(common.causal),
            self._page_size,
        )
        spans = refusals.spans_of(common)
        if spans:
            # Exact while a prompt is computed; the spans of a prompt end before its first token is decoded.
            lengths = common.seq_lens if common.seq_lens_cpu_upper_bound is None else common.seq_lens_cpu_upper_bound
            batch.add_spans(spans, common.query_start_loc_cpu.tolist(), lengths.tolist())
        if batch.spans is None and self._shares and not fast_build:
            batch.share_prefixes()
        # The CPU's kernels tell sequences apart by themselves.
        if batch.spans is None and self.device.type != "cpu" and common.max_query_len > self.reorder_batch_threshold:
            batch.part_decodes(common.query_start_loc_cpu, self.reorder_batch_threshold)
        return batch


class TilewiseImpl(AttentionImpl[Batch]):  # type: ignore[misc]
    """A layer's calls."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        dtype = torch.get_default_dtype()
        reason = refusals.why_not_head_size(head_size) or refusals.why_not_cache_dtype(kv_cache_dtype, dtype)
        if reason is not None:
            raise Unsupported(reason)
        # vLLM reads these.
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks, self.sliding_window = sinks, sliding_window
        role = ROLES[attn_type]
        self._is_e4m3 = kv_cache_dtype.startswith("fp8") and role != "encoder"
        self._attends_pages = role != "encoder"
        self.layer = Layer(
            num_heads,
            head_size,
            scale,
            self.num_kv_heads,
            alibi_slopes=alibi_slopes,
            window=sliding_window,
            softcap=logits_soft_cap,
            sinks=sinks,
            is_e4m3=self._is_e4m3,
            is_int8=kv_cache_dtype == refusals.INT8 and role != "encoder",
            role=role,
        )

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store the step's keys and values."""
        if self._attends_pages:
            self.layer.write(key, value, kv_cache, slot_mapping, *self._scales(layer))

    def _scales(self, layer: Any) -> tuple[Tensor, ...]:
        return (layer._k_scale, layer._v_scale) if self._is_e4m3 else ()  # noqa: SLF001

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Batch | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of a step, written into `output`. Without metadata, a run that measures memory: zeros."""
        if attn_metadata is None:
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("results in FP8 (fused output quantisation): tilewise writes them in the model's dtype")
        if self._attends_pages:
            clamps = getattr(layer, "mm_prefix_clamp_sliding_window", False)
            self.layer.attend(query, kv_cache, attn_metadata, output, *self._scales(layer), clamps_spans=clamps)
        else:
            self.layer.attend_unpaged(query, key, value, attn_metadata, output)
        return output
