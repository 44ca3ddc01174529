"""Modules: torch's MultiheadAttention on tilewise, and causal self-attention with rotary embedding and a KV cache."""

from tilewise.nn.causal import CausalSelfAttention, KVCache
from tilewise.nn.multihead import MultiheadAttention, multi_head_attention_forward
from tilewise.nn.rotary import rotary_table, rotate

__all__ = [
    "CausalSelfAttention",
    "KVCache",
    "MultiheadAttention",
    "multi_head_attention_forward",
    "rotary_table",
    "rotate",
]
