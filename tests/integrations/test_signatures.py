"""Every drop-in has the signature of the original, written out here: names, order, kinds and defaults."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import tilewise.nn
from tilewise.integrations import flash_attn, flash_attn_interface, sdpa
from tilewise.integrations.flash_attn import bert_padding
from tilewise.integrations.flash_attn.layers import rotary

FA2 = """
flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False)
flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False)
flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False)
flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None)
flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False)
flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1,
    -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False)
_flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
    alibi_slopes, return_softmax)
_flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
    causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0)
_flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
    window_size_right, softcap, alibi_slopes, deterministic, rng_state=None)
_flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    deterministic, rng_state=None, zero_tensors=False)
"""
FA3 = """
flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    sm_margin=0, return_attn_probs=False)
flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0,
    return_attn_probs=False)
flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
    seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    sm_margin=0, return_attn_probs=False)
flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None,
    cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
    softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False)
flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None)
get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
    qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None,
    page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False,
    num_splits=0, pack_gqa=None, sm_margin=0)
"""
FA4 = """
flash_attn_func(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
    learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None,
    score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None,
    block_sparse_tensors_bwd=None, return_lse=False)
flash_attn_varlen_func(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None,
    causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
    deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None,
    aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None,
    disable_scheduler_metadata=False)
"""
OTHERS = """
unpad_input(hidden_states, attention_mask, unused_mask=None)
pad_input(hidden_states, indices, batch, seqlen)
index_first_axis(input, indices)
apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None)
scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False)
"""


def listed(text: str) -> dict[str, str]:
    """Name and arguments of each function; what goes on in the next line is indented."""
    joined = text.strip().replace("\n    ", " ")
    return dict(re.findall(r"^(\w+)\((.*)\)$", joined, re.MULTILINE))


CASES: list[tuple[Callable[..., Any], str]] = [
    (getattr(module, name), arguments)
    for text, modules in (
        (FA2, [flash_attn.flash_attn_interface]),
        (FA3, [flash_attn_interface]),
        (FA4, [flash_attn.cute]),
        (OTHERS, [bert_padding, rotary, sdpa]),
    )
    for name, arguments in listed(text).items()
    for module in modules
    if hasattr(module, name)
]


@pytest.mark.parametrize(("function", "expected"), CASES, ids=[f"{f.__module__}.{f.__name__}" for f, _ in CASES])
def test_signature(function: Callable[..., Any], expected: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    found = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    assert found == expected
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    if function.__name__.startswith("_"):
        # Ring attention asks `inspect.getfullargspec`, which does not look behind decorators.
        assert inspect.getfullargspec(function).args == [p.name for p in parameters]
        assert inspect.isfunction(function)


def test_every_name_of_the_originals_is_there() -> None:
    assert len(CASES) == sum(len(listed(text)) for text in (FA2, FA3, FA4, OTHERS))
    public = {name for name in listed(FA2) if not name.startswith("_")}
    assert public <= set(flash_attn.__all__)
    assert public == set(flash_attn.flash_attn_interface.__all__)
    assert set(listed(FA3)) <= set(flash_attn_interface.__all__)


def test_torchs_own_documentation_of_sdpa_names_the_same_arguments() -> None:
    documented = (F.scaled_dot_product_attention.__doc__ or "").split(") -> Tensor")[0].split("(", 1)[1]
    names = [argument.split("=")[0].strip() for argument in documented.replace("\n", " ").split(",")]
    assert names == list(inspect.signature(sdpa.scaled_dot_product_attention).parameters)


def test_multihead_attention_has_torchs_signatures() -> None:
    pairs: list[tuple[Any, Any]] = [(tilewise.nn.multi_head_attention_forward, F.multi_head_attention_forward)]
    mine_class, torchs_class = tilewise.nn.MultiheadAttention, torch.nn.MultiheadAttention
    pairs += [(getattr(mine_class, method), getattr(torchs_class, method)) for method in ("__init__", "forward")]
    for own, original in pairs:
        mine, torchs = inspect.signature(own).parameters, inspect.signature(original).parameters
        assert [(p.name, p.default, p.kind) for p in mine.values()] == [
            (p.name, p.default, p.kind) for p in torchs.values()
        ]
