"""Every drop-in has the signature of the original, written out here as data: names, order, kinds and defaults."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import tilewise.nn
from tilewise.integrations import flash_attn, flash_attn_interface, sdpa
from tilewise.integrations.flash_attn import bert_padding
from tilewise.integrations.flash_attn.layers import rotary

REQUIRED = inspect.Parameter.empty
UNBOUNDED = (-1, -1)

TAIL = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": UNBOUNDED,
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}


def required(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), REQUIRED)


FA2: dict[str, dict[str, Any]] = {
    "flash_attn_func": {**required("q k v"), **TAIL},
    "flash_attn_qkvpacked_func": {**required("qkv"), **TAIL},
    "flash_attn_kvpacked_func": {**required("q kv"), **TAIL},
    "flash_attn_varlen_func": {
        **required("q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"),
        **TAIL,
        "block_table": None,
    },
    "flash_attn_varlen_qkvpacked_func": {**required("qkv cu_seqlens max_seqlen"), **TAIL},
    "flash_attn_varlen_kvpacked_func": {
        **required("q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"),
        **TAIL,
    },
    "flash_attn_with_kvcache": {
        **required("q k_cache v_cache"),
        "k": None,
        "v": None,
        "rotary_cos": None,
        "rotary_sin": None,
        "cache_seqlens": None,
        "cache_batch_idx": None,
        "cache_leftpad": None,
        "block_table": None,
        "softmax_scale": None,
        "causal": False,
        "window_size": UNBOUNDED,
        "softcap": 0.0,
        "rotary_interleaved": True,
        "alibi_slopes": None,
        "num_splits": 0,
        "return_softmax_lse": False,
    },
}

DESCALES = {"q_descale": None, "k_descale": None, "v_descale": None}
TUNING = {"num_splits": 1, "pack_gqa": None, "deterministic": False, "sm_margin": 0, "return_attn_probs": False}
FA3: dict[str, dict[str, Any]] = {
    "flash_attn_func": {
        **required("q k v"),
        "softmax_scale": None,
        "causal": False,
        "qv": None,
        **DESCALES,
        "window_size": UNBOUNDED,
        "attention_chunk": 0,
        "softcap": 0.0,
        **TUNING,
    },
    "flash_attn_qkvpacked_func": {
        **required("qkv"),
        "softmax_scale": None,
        "causal": False,
        **DESCALES,
        "window_size": UNBOUNDED,
        "attention_chunk": 0,
        "softcap": 0.0,
        "deterministic": False,
        "num_heads_q": None,
        "sm_margin": 0,
        "return_attn_probs": False,
    },
    "flash_attn_varlen_func": {
        **required("q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"),
        "seqused_q": None,
        "seqused_k": None,
        "softmax_scale": None,
        "causal": False,
        "qv": None,
        **DESCALES,
        "window_size": UNBOUNDED,
        "attention_chunk": 0,
        "softcap": 0.0,
        **TUNING,
    },
    "flash_attn_with_kvcache": {
        **required("q k_cache v_cache"),
        "k": None,
        "v": None,
        "qv": None,
        "rotary_cos": None,
        "rotary_sin": None,
        "cache_seqlens": None,
        "cache_batch_idx": None,
        "cache_leftpad": None,
        "page_table": None,
        "cu_seqlens_q": None,
        "cu_seqlens_k_new": None,
        "max_seqlen_q": None,
        "rotary_seqlens": None,
        **DESCALES,
        "softmax_scale": None,
        "causal": False,
        "window_size": UNBOUNDED,
        "attention_chunk": 0,
        "softcap": 0.0,
        "rotary_interleaved": True,
        "scheduler_metadata": None,
        "num_splits": 0,
        "pack_gqa": None,
        "sm_margin": 0,
        "return_softmax_lse": False,
    },
    "flash_attn_combine": {**required("out_partial lse_partial"), "out": None, "out_dtype": None},
    "get_scheduler_metadata": {
        **required("batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens"),
        "qkv_dtype": torch.bfloat16,
        "headdim_v": None,
        "cu_seqlens_q": None,
        "cu_seqlens_k_new": None,
        "cache_leftpad": None,
        "page_size": None,
        "max_seqlen_k_new": 0,
        "causal": False,
        "window_size": UNBOUNDED,
        "attention_chunk": 0,
        "has_softcap": False,
        "num_splits": 0,
        "pack_gqa": None,
        "sm_margin": 0,
    },
}

OTHERS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (bert_padding.unpad_input, {**required("hidden_states attention_mask"), "unused_mask": None}),
    (bert_padding.pad_input, required("hidden_states indices batch seqlen")),
    (bert_padding.index_first_axis, required("input indices")),
    (
        rotary.apply_rotary_emb,
        {
            **required("x cos sin"),
            "interleaved": False,
            "inplace": False,
            "seqlen_offsets": 0,
            "cu_seqlens": None,
            "max_seqlen": None,
        },
    ),
    (
        sdpa.scaled_dot_product_attention,
        {
            **required("query key value"),
            "attn_mask": None,
            "dropout_p": 0.0,
            "is_causal": False,
            "scale": None,
            "enable_gqa": False,
        },
    ),
]

CASES = [
    *((getattr(flash_attn, name), expected) for name, expected in FA2.items()),
    *((getattr(flash_attn_interface, name), expected) for name, expected in FA3.items()),
    *OTHERS,
]


@pytest.mark.parametrize(("function", "expected"), CASES, ids=[f"{f.__module__}.{f.__name__}" for f, _ in CASES])
def test_signature(function: Callable[..., Any], expected: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert list(parameters) == list(expected)
    assert {name: p.default for name, p in parameters.items()} == expected
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_torchs_own_documentation_of_sdpa_names_the_same_arguments() -> None:
    documented = (F.scaled_dot_product_attention.__doc__ or "").split(") -> Tensor")[0].split("(", 1)[1]
    names = [argument.split("=")[0].strip() for argument in documented.replace("\n", " ").split(",")]
    assert names == list(inspect.signature(sdpa.scaled_dot_product_attention).parameters)


def test_multihead_attention_has_torchs_signatures() -> None:
    for method in ("__init__", "forward"):
        mine = inspect.signature(getattr(tilewise.nn.MultiheadAttention, method)).parameters
        torchs = inspect.signature(getattr(torch.nn.MultiheadAttention, method)).parameters
        assert [(p.name, p.default, p.kind) for p in mine.values()] == [
            (p.name, p.default, p.kind) for p in torchs.values()
        ]


def test_every_public_name_of_flash_attn_2_is_there() -> None:
    assert set(FA2) <= set(flash_attn.__all__)
    assert set(FA3) <= set(flash_attn_interface.__all__)
    assert set(FA2) == set(flash_attn.flash_attn_interface.__all__)
