"""Stand-ins for the parts of SGLang 0.5.23 that a backend sees, so that it can be driven where SGLang is not installed.

Names, fields, defaults and shapes are SGLang's. Its wheel needs CUDA, so no test runs the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from standing_in import standing_in


class AttentionBackend:
    needs_cpu_seq_lens: bool = True
    kv_index_translator = None
    forward_metadata: object | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        pass

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        pass

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        raise NotImplementedError

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        raise NotImplementedError

    def forward(
        self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor:
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        if forward_batch.forward_mode.is_decode():
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(self, *arguments: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def forward_extend(self, *arguments: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError


class AttentionType(Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


@dataclass
class RadixAttention:
    """The attributes of a layer; the module itself adds nothing to them that a backend reads."""

    tp_q_head_num: int
    qk_head_dim: int
    scaling: float
    tp_k_head_num: int
    layer_id: int = 0
    logit_cap: float = 0.0
    v_head_dim: int = -1
    sliding_window_size: int = -1
    is_cross_attention: bool = False
    pos_encoding_mode: str = "NONE"
    logit_capping_method: str = "tanh"
    attn_type: AttentionType = AttentionType.DECODER
    use_irope: bool = False
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    xai_temperature_len: int = -1

    def __post_init__(self) -> None:
        self.head_dim, self.tp_v_head_num = self.qk_head_dim, self.tp_k_head_num
        self.v_head_dim = self.v_head_dim if self.v_head_dim != -1 else self.head_dim


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND_V2 = auto()
    PREBUILT = auto()
    SPLIT_PREFILL = auto()
    DLLM_EXTEND = auto()

    def is_decode(self) -> bool:
        return self == ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self == ForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)


@dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    batch_size: int
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    seq_lens_sum: int | None
    seq_lens_cpu: Tensor | None = None
    spec_info: Any = None
    encoder_lens: Tensor | None = None
    extend_num_tokens: int | None = None
    extend_seq_lens: Tensor | None = None
    extend_prefix_lens: Tensor | None = None
    extend_seq_lens_cpu: list[int] | None = None
    multi_item_delimiter_indices: Any = None
    attn_cp_metadata: Any = None
    attn_dcp_metadata: Any = None
    dcp_kv_mask: Tensor | None = None


class MHATokenToKVPool:
    """Keys and values of slots; one page more than `size`, of which slot 0 is for padding."""

    is_quantized_kv_cache = False

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, head_num: int, head_dim: int, layer_num: int,
        v_head_dim: int | None = None, kv_cache_layout: str = "nhd",
    ) -> None:  # fmt: skip
        self.size, self.page_size, self.dtype, self.kv_cache_layout = size, page_size, dtype, kv_cache_layout
        # torch cannot index e4m3 by slots, so such pools store bytes.
        self.store_dtype = torch.uint8 if dtype == torch.float8_e4m3fn else dtype
        self.start_layer, self.waited = 0, 0
        slots = size + page_size
        dims = (head_dim, v_head_dim or head_dim)
        shapes: list[tuple[int, ...]] = [(slots, head_num, dim) for dim in dims]
        if kv_cache_layout == "hnd":
            shapes = [(slots // page_size, head_num, page_size, dim) for dim in dims]
        # What no request wrote is never read: NaN in every format.
        fill = 127 if self.store_dtype == torch.uint8 else float("nan")
        self.k_buffer, self.v_buffer = (
            [torch.full(shape, fill, dtype=self.store_dtype) for _ in range(layer_num)] for shape in shapes
        )

    def get_key_buffer(self, layer_id: int) -> Tensor:
        self.waited += 1
        return self._viewed(self.k_buffer[layer_id - self.start_layer])

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self._viewed(self.v_buffer[layer_id - self.start_layer])

    def _viewed(self, buffer: Tensor) -> Tensor:
        return buffer if self.store_dtype == self.dtype else buffer.view(self.dtype)


class SWAKVPool:
    pass


def model_runner(pool: Any, dtype: torch.dtype, max_requests: int, context: int, **changed: Any) -> Any:
    """As much of SGLang's ModelRunner as a backend reads when it is made."""
    about = {"is_encoder_decoder": False, "is_local_attention_model": False, "context_len": context}
    config = SimpleNamespace(**(about | changed.pop("config", {})))
    # Row 0 is for requests that pad a captured step, and a few tokens follow the longest context.
    table = torch.zeros(max_requests + 1, context + 4, dtype=torch.int32)
    given = {
        "model_config": config,
        "use_mla_backend": False,
        "spec_algorithm": SimpleNamespace(is_none=lambda: True),
        "kv_index_translator": SimpleNamespace(is_translating=False),
        "token_to_kv_pool": pool,
        "req_to_token_pool": SimpleNamespace(req_to_token=table),
        "dtype": dtype,
    }  # fmt: skip
    return SimpleNamespace(**(given | changed))


class Registered:
    """What was offered to SGLang."""

    def __init__(self) -> None:
        self.backends: dict[str, Callable[[Any], Any]] = {}
        self.choices = ["triton", "fa3"]

    def register_attention_backend(self, name: str) -> Callable[[Any], Any]:
        def decorator(make: Any) -> Any:
            self.backends[name] = make
            return make

        return decorator


@contextmanager
def installed() -> Iterator[Registered]:
    """Within the block, `import sglang` finds the stand-ins."""
    registered = Registered()
    parts: dict[str, dict[str, Any]] = {
        "sglang.srt.arg_groups.choices": {"ATTENTION_BACKEND_CHOICES": registered.choices},
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "sglang.srt.layers.attention.attention_registry": {
            "register_attention_backend": registered.register_attention_backend
        },
        "sglang.srt.mem_cache.memory_pool": {"MHATokenToKVPool": MHATokenToKVPool},
    }
    with standing_in(parts, "tilewise.integrations.sglang.backend"):
        yield registered
