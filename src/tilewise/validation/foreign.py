"""Argument names of other libraries: refused with an error that gives the name used here."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from tilewise.errors import UnexpectedArgument

# Foreign names and their equivalent here. A name maps to itself where some call takes it.
MEANT = {
    # torch.nn.functional.scaled_dot_product_attention, torch.nn.MultiheadAttention, FlexAttention
    "attn_mask": "mask= if it is boolean (True = attend), bias= if its numbers are added to the scores",
    "is_causal": "causal=; where q and k differ in length, SDPA aligns to the upper left corner and causal= to the "
    "lower right one (tilewise.integrations.sdpa keeps SDPA's)",
    "dropout_p": "dropout=",
    "enable_gqa": "no argument: q may have more heads than k and v",
    "key_padding_mask": "mask=~key_padding_mask[:, None, None, :], as True means attend here",
    "need_weights": "no argument: weights are never computed; tilewise.nn.MultiheadAttention returns them",
    "score_mod": "bias=, softcap=, alibi_slopes= or window=, whichever it computes",
    "mask_mod": "mask=, causal= or window=, whichever it computes",
    "block_mask": "mask=, causal= or window=, whichever it stands for",
    # flash-attn, and serving engines
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "window_size": "window=, whose unbounded side is None instead of -1",
    "return_attn_probs": "return_lse=; probabilities are never kept",
    "return_softmax_lse": "return_lse=",
    "return_softmax": "return_lse=; probabilities are never kept",
    "return_max_logit": "return_max_logits=",
    "return_max_score": "return_max_logits=",
    "cache_seqlens": "seqlens_k= of attention_paged",
    "seqused_k": "seqlens_k= of attention_paged",
    "seq_lens": "seqlens_k= of attention_paged",
    "context_lens": "seqlens_k= of attention_paged",
    "page_table": "block_table= of attention_paged",
    "block_tables": "block_table= of attention_paged",
    "k_cache": "k_pages= of attention_paged",
    "v_cache": "v_pages= of attention_paged",
    "cu_seqlens": "cu_seqlens_q= and cu_seqlens_k= of attention_varlen",
    "max_seqlen": "max_seqlen_q= and max_seqlen_k= of attention_varlen",
    "logits_soft_cap": "softcap=",
    "logit_cap": "softcap=",
    "soft_cap": "softcap=",
    "softcapping": "softcap=",
    "s_aux": "sinks=",
    "sink": "sinks=",
    "learnable_sink": "sinks=",
    "attention_sink": "sinks=",
    "num_splits": "no argument: the backend splits keys where that is faster",
    "q_descale": "q=, a tilewise.fp8.Fp8Tensor, which holds its scales",
    "k_descale": "k=, a tilewise.fp8.Fp8Tensor, which holds its scales",
    "v_descale": "v=, a tilewise.fp8.Fp8Tensor, which holds its scales",
    # xFormers, transformers, JAX
    "attn_bias": "bias=, or causal=True, window= and attention_varlen for what xFormers has classes for",
    "p": "dropout=",
    "op": "backend=",
    "implementation": "backend=",
    "attention_mask": "mask=attention_mask.bool()[:, None, None, :] if it marks the tokens in use (True = attend)",
    "scaling": "scale=",
    "sliding_window": "window=(sliding_window - 1, 0)",
    "local_window_size": "window=",
    "position_bias": "bias=",
    "tensor_layout": "layout='bhsd' or 'bshd'",
    "kv_layout": "layout='bhsd' or 'bshd'",
    "qkv_format": "layout='bhsd' or 'bshd'",
}
# Arguments that only some calls take.
ELSEWHERE = {
    "cu_seqlens_q": "taken by attention_varlen and attention_paged",
    "cu_seqlens_k": "taken by attention_varlen",
    "max_seqlen_q": "taken by attention_varlen and attention_paged",
    "max_seqlen_k": "taken by attention_varlen",
    "block_table": "taken by attention_paged",
    "seqlens_k": "taken by attention_paged",
    "k_pages": "taken by attention_paged",
    "v_pages": "taken by attention_paged",
    "shared_prefix": "taken by attention_paged",
    "layout": "taken by attention: packed and paged tensors have one layout",
    "dropout": "taken by attention and attention_varlen: pages are for serving and have no dropout",
    "seed": "taken by attention and attention_varlen: pages are for serving and have no dropout",
    "device": "taken by explain: a call runs where q is",
    "out": "taken by attention, attention_varlen and attention_paged; a forecast is the same without it",
}


def unexpected(function: Callable[..., Any], names: Iterable[str]) -> UnexpectedArgument:
    """The error for keyword arguments that a function does not take. It names the first one."""
    taken = [name for name, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]
    name = next(iter(names))
    if name in MEANT:
        fix = f"Here it is {MEANT[name]}."
    elif name in ELSEWHERE:
        fix = f"It is {ELSEWHERE[name]}."
    else:
        close = difflib.get_close_matches(name, taken, 1)
        fix = f"Did you mean {close[0]}=?" if close else "docs/contract.md says what each of them does."
    return UnexpectedArgument(name, f"an argument of {function.__name__} ({', '.join(taken)})", "another name", fix)
