"""The classes that vLLM 0.32 and 0.33 ask for to serve latent attention (MLA), of DeepSeek, Kimi K2 and others.

vLLM does the model's projections. Steps of few queries a request (decoding, and the verification of drafts) come to
`TilewiseMLAImpl.forward_mqa` in the absorbed form, and are attended from the cache of latents in place. Prompts are
expanded into keys and values by vLLM and go to its own prefill kernels.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

from tilewise.errors import Unsupported
from tilewise.integrations.engines import DTYPES, Batch, Layer
from tilewise.integrations.vllm import LATENT_NAME, refusals
from tilewise.problem import MAX_HEAD_DIM

__all__ = ["TilewiseMLABackend", "TilewiseMLABuilder", "TilewiseMLAImpl"]


class TilewiseMLABackend(MLACommonBackend):  # type: ignore[misc]
    """What vLLM may ask of tilewise."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(refusals.LATENT_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """The name under which it is registered."""
        return LATENT_NAME

    @staticmethod
    def get_impl_cls() -> type[TilewiseMLAImpl]:
        """The class of a layer's calls."""
        return TilewiseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TilewiseMLABuilder]:
        """The class that prepares steps."""
        return TilewiseMLABuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[MultipleOf]:  # noqa: ARG004
        """Pages of any multiple of 16 tokens."""
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether latents may have this many columns."""
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **more: Any
    ) -> str | None:
        """The reason against a combination, for vLLM's list of reasons."""
        del head_size, others, more
        return refusals.why_not_cache_dtype(kv_cache_dtype, dtype, refusals.LATENT_CACHE_DTYPES)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """GPUs from Ampere on."""
        return bool(capability.major >= 8)


@dataclasses.dataclass
class DecodeMetadata(MLACommonDecodeMetadata):  # type: ignore[misc]
    """The requests of a step that are attended in the absorbed form."""

    batch: Batch


class TilewiseMLABuilder(MLACommonMetadataBuilder[MLACommonMetadata]):  # type: ignore[misc]
    """Prepares a step."""

    # Steps whose requests have equally many queries: decoding, and the verification of drafts.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refusals.refuse_cache(device, vllm_config.kv_transfer_config)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> MLACommonMetadata:
        """Metadata of a step as vLLM makes it, with the batch of `_build_decode` in it."""
        refusals.refuse_batch(common_attn_metadata)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> DecodeMetadata:
        """The batch of the step's first requests, as vLLM orders them."""
        del max_seq_len, query_start_loc_cpu
        # Slots are another call's: vLLM stores the latents of all requests before it attends.
        slots = torch.empty(0, dtype=torch.int64, device=seq_lens_device.device)
        batch = Batch(
            num_decode_tokens,
            query_start_loc_device,
            max(1, max_query_len),
            seq_lens_device,
            block_table_tensor,
            slots,
            page_size=self.page_size,
        )
        batch.share_prefixes()
        return DecodeMetadata(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, batch)


class TilewiseMLAImpl(MLACommonImpl[MLACommonMetadata]):  # type: ignore[misc]
    """A layer's calls."""

    can_return_lse_for_decode = False
    supports_dcp = False
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **latents: Any,
    ) -> None:
        reason = refusals.why_not_cache_dtype(
            kv_cache_dtype, torch.get_default_dtype(), refusals.LATENT_CACHE_DTYPES
        ) or refusals.why_not_latent_layer(
            is_decoder=attn_type == AttentionType.DECODER,
            indexer=latents.get("indexer"),
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
        )
        if reason is not None:
            raise Unsupported(reason)
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **latents,
        )
        # Queries stay in the model's dtype, also where the cache is e4m3.
        self.supports_quant_query_input = False
        self._is_e4m3 = kv_cache_dtype.startswith("fp8")
        self.layer = Layer(num_heads, head_size, scale, 1, is_e4m3=self._is_e4m3, latent_values=latents["kv_lora_rank"])

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Store the step's latents: `kv_c_normed` (tokens, values) and `k_pe` (tokens, 1, the other columns).

        vLLM 0.33 passes `skip_scale` where the scale is 1, which changes nothing here.
        """
        del kv_cache_dtype, skip_scale
        if kv_cache.numel():
            scales = (k_scale, k_scale) if self._is_e4m3 else ()
            self.layer.write(k_pe, kv_c_normed[:, None], kv_cache, slot_mapping.flatten(), *scales)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, None]:
        """Attention of absorbed queries (tokens, heads, columns) to latents: (tokens, heads, values)."""
        if isinstance(q, tuple):
            q = torch.cat(q, -1)
        out = q.new_empty((*q.shape[:2], self.kv_lora_rank))
        scales = (layer._k_scale, layer._k_scale) if self._is_e4m3 else ()  # noqa: SLF001
        self.layer.attend(q, kv_c_and_k_pe_cache, attn_metadata.decode.batch, out, *scales)
        return out, None
