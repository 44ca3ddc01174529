"""Named cases that no pair of features covers: emptiness, saturation, padding, pages, and partial gradients."""

from __future__ import annotations

import dataclasses

import torch

from tilewise.testing.cases import Case, Values

# Many tiles for every plausible tile size, so that sums that lose digits at each tile show.
LONG = 2049
_EXTREMES: tuple[Values, ...] = ("large", "tiny")


def special_cases() -> list[Case]:
    """All of them, labelled."""
    named = {**_empty(), **_masked_rows(), **_magnitudes(), **_packed(), **_paged(), **_gradients(), **_mixtures()}
    named |= _tiled()
    return [dataclasses.replace(case, label=label) for label, case in named.items()]


def fp8_cases() -> list[Case]:
    """Quantised operands: every granularity and kind of problem, rotated or not, and inputs that stress the scales."""
    bf16, fp16 = torch.bfloat16, torch.float16
    sizes = {"seqlens_q": (150,), "seqlens_k": (300,), "num_heads": 2, "head_dim": 64, "head_dim_v": 64}
    dense = Case(dtype=bf16, fp8="block", **sizes)  # type: ignore[arg-type]
    packed = dataclasses.replace(dense, kind="varlen", seqlens_q=(150, 0, 7), seqlens_k=(300, 3, 140), padding=3)
    paged = dataclasses.replace(packed, kind="paged", padding=0, fp8="kv", num_heads=4, num_kv_heads=2)
    decode = dataclasses.replace(paged, decode=True, seqlens_q=(1,) * 3)
    named = {
        "tensor": dataclasses.replace(dense, fp8="tensor"),
        "head": dataclasses.replace(dense, fp8="head", dtype=fp16),
        "block": dense,
        "block_rotated": dataclasses.replace(dense, rotation=True, causal=True),
        "tensor_rotated_96": dataclasses.replace(dense, fp8="tensor", rotation=True, head_dim=96, head_dim_v=96),
        "head_dim_128": dataclasses.replace(dense, head_dim=128, head_dim_v=128, causal=True),
        "head_dim_256": dataclasses.replace(dense, head_dim=256, head_dim_v=256, window=(70, 10)),
        "bshd_window": dataclasses.replace(dense, layout="bshd", window=(100, 20)),
        "unequal_v": dataclasses.replace(dense, head_dim_v=40, fp8="head"),
        "features": dataclasses.replace(
            dense, bias="1hqk", sinks=True, alibi="h", softcap=5.0, dropout=0.2, mask="b1qk", fp8="head"
        ),
        "sinks": dataclasses.replace(dense, sinks=True, causal=True),
        "tiles": dataclasses.replace(dense, mask="1hqk", tiles=True, causal=True),
        "tiles_paged_kv": dataclasses.replace(paged, mask="b1qk", tiles=True),
        "longer_q": dataclasses.replace(dense, seqlens_q=(300,), seqlens_k=(150,), causal=True),
        "kv_only": dataclasses.replace(dense, fp8="kv", causal=True),
        "kv_only_fp32": dataclasses.replace(dense, fp8="kv", dtype=torch.float32),
        "strided": dataclasses.replace(dense, strides="transposed"),
        "two_sequences": dataclasses.replace(dense, seqlens_q=(65,) * 2, seqlens_k=(130,) * 2, num_heads=4),
        "no_keys": dataclasses.replace(dense, seqlens_k=(0,)),
        "varlen_tensor": dataclasses.replace(packed, fp8="tensor"),
        "varlen_block": dataclasses.replace(packed, causal=True, rotation=True),
        "varlen_head_gqa": dataclasses.replace(packed, fp8="head", num_kv_heads=1, window=(90, 0)),
        "paged_prefill": dataclasses.replace(paged, causal=True),
        "paged_prefill_page_64": dataclasses.replace(paged, causal=True, page_size=64, fp8="block"),
        "paged_decode": decode,
        "paged_decode_fp16_page_1": dataclasses.replace(decode, dtype=fp16, page_size=1, sinks=True),
        "paged_decode_shared": dataclasses.replace(decode, shared_pages=True, window=(200, 0)),
        "paged_decode_page_64": dataclasses.replace(decode, page_size=64, fp8="head", alibi="h", softcap=4.0),
        "paged_decode_page_256_fp32": dataclasses.replace(decode, page_size=256, dtype=torch.float32, causal=True),
        "paged_decode_head_dim_128": dataclasses.replace(decode, page_size=128, head_dim=128, head_dim_v=80),
        "decode": dataclasses.replace(dense, fp8="kv", seqlens_q=(1,) * 2, seqlens_k=(300,) * 2, num_heads=4),
        "decode_block": dataclasses.replace(dense, seqlens_q=(3,), seqlens_k=(700,), causal=True, rotation=True),
        "varlen_decode": dataclasses.replace(packed, fp8="head", seqlens_q=(1, 0, 2), seqlens_k=(300, 3, 270)),
        "odd_head_dim": dataclasses.replace(dense, fp8="head", head_dim=33, head_dim_v=15, causal=True),
    }
    cases = [dataclasses.replace(case, label=f"fp8_{label}") for label, case in named.items()]
    return cases + _int8_cases(paged, decode)


def _int8_cases(paged: Case, decode: Case) -> list[Case]:
    """Pages in int8: a scale for each (token, head)."""
    paged, decode = (dataclasses.replace(case, fp8="int8") for case in (paged, decode))
    several = dataclasses.replace(decode, decode=False, seqlens_q=(3, 0, 1), causal=True)
    named = {
        "prefill": dataclasses.replace(paged, causal=True),
        "prefill_page_64": dataclasses.replace(paged, causal=True, page_size=64, window=(90, 0), sinks=True),
        "prefill_features": dataclasses.replace(paged, bias="1hqk", alibi="h", softcap=5.0, dtype=torch.float16),
        "prefill_tiles": dataclasses.replace(paged, mask="b1qk", tiles=True),
        "prefill_large": dataclasses.replace(paged, values="large", dtype=torch.float32),
        "decode": decode,
        "decode_fp16_page_1": dataclasses.replace(decode, dtype=torch.float16, page_size=1, sinks=True),
        "decode_shared": dataclasses.replace(decode, shared_pages=True, window=(200, 0)),
        "decode_page_64": dataclasses.replace(decode, page_size=64, alibi="h", softcap=4.0),
        "decode_page_256_fp32": dataclasses.replace(decode, page_size=256, dtype=torch.float32, causal=True),
        "decode_head_dim_128": dataclasses.replace(decode, page_size=128, head_dim=128, head_dim_v=80),
        "decode_one_head": dataclasses.replace(decode, num_heads=2, values="tiny"),
        "decode_odd": dataclasses.replace(decode, head_dim=33, head_dim_v=15, num_heads=6),
        "decode_latent": dataclasses.replace(
            decode, num_heads=8, num_kv_heads=1, head_dim=80, head_dim_v=64, latent=True
        ),
        "several_tokens": several,
        "several_batch": dataclasses.replace(several, deterministic="batch"),
    }
    return [dataclasses.replace(case, label=f"int8_{label}") for label, case in named.items()]


def padded_cases() -> list[Case]:
    """Cases with contents outside the lengths in every tensor that can have it, for bitwise comparisons."""
    varlen = Case(
        kind="varlen", seqlens_q=(3, 0, 63), seqlens_k=(65, 1, 63), padding=7, bounds="loose", deterministic=True
    )
    paged = Case(kind="paged", seqlens_q=(3, 1, 33), seqlens_k=(65, 1, 63), padding=2, page_size=16, deterministic=True)
    every = [
        dataclasses.replace(case, causal=True, dtype=dtype, bias=bias)
        for case in (varlen, paged)
        for dtype in (torch.float32, torch.bfloat16)
        for bias in ("", "bhqk")
    ]
    decode = Case(kind="paged", decode=True, seqlens_q=(1,) * 3, seqlens_k=(65, 0, 130), page_size=16, grad_of=())
    sliced = Case(strides="sliced", causal=True, deterministic=True)
    every += [dataclasses.replace(case, mask="b1qk", tiles=True) for case in (varlen, paged)]
    every += [dataclasses.replace(case, fp8="int8", dtype=torch.bfloat16) for case in (paged, decode)]
    return [*every, decode, sliced, dataclasses.replace(sliced, strides="strided_last")]


def repeatable_cases() -> list[Case]:
    """Cases with long parallel sums, whose order of summation must not change between runs."""
    long = Case(
        seqlens_q=(257,), seqlens_k=(515,), num_heads=6, num_kv_heads=2, causal=True, deterministic=True, head_dim=64,
        head_dim_v=64,
    )  # fmt: skip
    everything = dataclasses.replace(long, bias="1h1k", sinks=True, dropout=0.2, alibi="h", softcap=5.0)
    packed = dataclasses.replace(long, kind="varlen", seqlens_q=(257, 3, 111), seqlens_k=(257, 65, 111))
    paged = dataclasses.replace(packed, kind="paged", shared_pages=True)
    tiled = dataclasses.replace(long, mask="1hqk", tiles=True)
    decode = Case(kind="paged", decode=True, seqlens_q=(1, 1), seqlens_k=(1025, 63), grad_of=(), num_heads=8)
    cases = [long, everything, packed, paged, tiled, decode]
    return cases + [dataclasses.replace(case, dtype=torch.bfloat16) for case in cases]


def written_cases() -> list[Case]:
    """Cases whose results are written into memory of the caller: every kind of kernel, and empty problems."""
    bf16 = torch.bfloat16
    dense = Case(seqlens_q=(65,) * 2, seqlens_k=(130,) * 2, num_heads=4, head_dim=64, head_dim_v=64, causal=True)
    packed = dataclasses.replace(dense, kind="varlen", seqlens_q=(65, 0, 3), seqlens_k=(65, 2, 130), padding=7)
    paged = dataclasses.replace(packed, kind="paged", page_size=16, padding=2)
    decode = dataclasses.replace(paged, decode=True, seqlens_q=(1,) * 3, seqlens_k=(300, 0, 513), padding=0)
    named = {
        "dense": dataclasses.replace(dense, dtype=bf16),
        "fp32": dense,
        "bshd": dataclasses.replace(dense, layout="bshd", head_dim_v=40),
        "bshd_16_bits": dataclasses.replace(dense, layout="bshd", dtype=torch.float16, num_heads=2),
        "features": dataclasses.replace(dense, bias="1hqk", sinks=True, alibi="h", dropout=0.2),
        "narrow": dataclasses.replace(dense, head_dim_v=1),
        "few_queries": dataclasses.replace(dense, seqlens_q=(2,) * 2, seqlens_k=(700,) * 2, dtype=bf16),
        "varlen": dataclasses.replace(packed, dtype=bf16),
        "varlen_fp32": packed,
        "paged": dataclasses.replace(paged, dtype=bf16),
        "paged_decode": dataclasses.replace(decode, dtype=bf16),
        "paged_decode_fp8": dataclasses.replace(decode, dtype=bf16, fp8="kv"),
        "paged_decode_int8": dataclasses.replace(decode, dtype=bf16, fp8="int8"),
        "paged_decode_fp32": decode,
        "fp8": dataclasses.replace(dense, dtype=bf16, fp8="head"),
        "fp8_odd": dataclasses.replace(dense, dtype=bf16, fp8="head", head_dim=33, head_dim_v=15),
        "no_keys": dataclasses.replace(dense, seqlens_k=(0,) * 2),
        "no_batch": dataclasses.replace(dense, seqlens_q=(), seqlens_k=()),
    }
    return [dataclasses.replace(case, label=f"written_{label}", grad_of=()) for label, case in named.items()]


def largest_cases() -> list[Case]:
    """Cases whose largest scores are asked for: all that changes scores, hides them, or joins them later."""
    bf16 = torch.bfloat16
    dense = Case(seqlens_q=(70,) * 2, seqlens_k=(130,) * 2, num_heads=4, head_dim=64, head_dim_v=64)
    packed = dataclasses.replace(dense, kind="varlen", seqlens_q=(65, 0, 3), seqlens_k=(65, 2, 130), padding=7)
    paged = dataclasses.replace(packed, kind="paged", page_size=16, padding=2, grad_of=())
    decode = dataclasses.replace(paged, decode=True, seqlens_q=(1,) * 3, seqlens_k=(300, 0, 513), padding=0)
    named = {
        "plain": dense,
        "16_bits": dataclasses.replace(dense, dtype=bf16, num_kv_heads=1, causal=True),
        "narrow": dataclasses.replace(dense, head_dim=24, head_dim_v=8, dtype=torch.float16),
        "wide": dataclasses.replace(dense, head_dim=192, head_dim_v=128, dtype=bf16, causal=True),
        "window": dataclasses.replace(dense, window=(9, 4), dtype=bf16),
        "softcap": dataclasses.replace(dense, softcap=1.5, layout="bshd"),
        "negative_scale": dataclasses.replace(dense, scale=-0.3, causal=True),
        "large_scale": dataclasses.replace(dense, scale=2000.0, grad_of=()),
        "terms": dataclasses.replace(dense, bias="1hqk", alibi="h", dropout=0.3),
        "mask": dataclasses.replace(dense, mask="bhqk", masked_rows=True),
        "tiles": dataclasses.replace(dense, mask="1hqk", tiles=True, dtype=bf16),
        "sinks": dataclasses.replace(dense, sinks=True, causal=True),
        "sinks_above": dataclasses.replace(dense, sinks=True, values="tiny", grad_of=()),
        "decode_sinks_above": dataclasses.replace(decode, sinks=True, values="tiny"),
        "sinks_16_bits": dataclasses.replace(dense, sinks=True, softcap=3.0, dtype=bf16, head_dim=128, head_dim_v=128),
        "varlen": dataclasses.replace(packed, dtype=bf16, causal=True),
        "varlen_sinks": dataclasses.replace(packed, sinks=True, num_heads=6),
        "paged": dataclasses.replace(paged, dtype=bf16, causal=True),
        "decode": dataclasses.replace(decode, num_heads=8),
        "decode_sinks": dataclasses.replace(decode, dtype=bf16, sinks=True),
        "decode_fp8": dataclasses.replace(decode, dtype=bf16, fp8="kv", sinks=True),
        "decode_int8": dataclasses.replace(decode, dtype=bf16, fp8="int8", sinks=True),
        "fp8": dataclasses.replace(dense, dtype=bf16, fp8="head", causal=True),
        "no_keys": dataclasses.replace(dense, seqlens_k=(0,) * 2, sinks=True),
        "no_queries": dataclasses.replace(dense, seqlens_q=(0,) * 2),
        "no_batch": dataclasses.replace(packed, seqlens_q=(), seqlens_k=(), padding=3),
    }
    return [dataclasses.replace(case, label=f"largest_{label}") for label, case in named.items()]


def latent_cases() -> list[Case]:
    """Many query heads on a latent, whose first columns are the values: every kind of problem and flag, other widths,
    and keys of 576 columns with values of their own.
    """
    bf16 = torch.bfloat16
    sizes = {"num_heads": 20, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512}
    decode = Case(
        kind="paged", decode=True, seqlens_q=(1,) * 3, seqlens_k=(300, 0, 70), page_size=64, latent=True, dtype=bf16,
        grad_of=(), **sizes,  # type: ignore[arg-type]
    )  # fmt: skip
    several = dataclasses.replace(decode, decode=False, seqlens_q=(2, 0, 5), causal=True, num_heads=16, padding=2)
    dense = dataclasses.replace(decode, kind="dense", decode=False, seqlens_q=(1,) * 2, seqlens_k=(140,) * 2)
    packed = dataclasses.replace(several, kind="varlen", seqlens_k=(90, 3, 70))
    named = {
        "decode": decode,
        "decode_fp16_page_16": dataclasses.replace(decode, dtype=torch.float16, page_size=16, num_heads=128),
        "decode_fp32_page_3": dataclasses.replace(decode, dtype=torch.float32, page_size=3, num_heads=7),
        "decode_two_heads": dataclasses.replace(decode, num_kv_heads=2),
        "decode_split": dataclasses.replace(decode, seqlens_q=(1,), seqlens_k=(1100,), num_heads=16),
        "decode_window": dataclasses.replace(decode, window=(40, 0), sinks=True),
        "decode_features": dataclasses.replace(decode, softcap=4.0, alibi="h", bias="b11k", mask="bhqk"),
        "decode_shared_pages": dataclasses.replace(decode, shared_pages=True, seqlens_k=(130, 200, 70)),
        "decode_strided": dataclasses.replace(decode, strides="strided_last", seqlens_k=(90, 0, 70)),
        "decode_transposed": dataclasses.replace(decode, strides="transposed", seqlens_k=(90, 0, 70)),
        "decode_batch_invariant": dataclasses.replace(decode, deterministic="batch"),
        "several_tokens": several,
        "several_tokens_window": dataclasses.replace(several, window=(33, 0), sinks=True, softcap=3.0),
        "dense": dense,
        "dense_bshd_causal": dataclasses.replace(dense, layout="bshd", causal=True, seqlens_q=(3,) * 2),
        "dense_prefill": dataclasses.replace(dense, seqlens_q=(33,), seqlens_k=(70,), causal=True, num_heads=3),
        "dense_dropout": dataclasses.replace(dense, seqlens_q=(3,) * 2, dropout=0.3, seqlens_k=(70,) * 2),
        "dense_tiles": dataclasses.replace(dense, seqlens_q=(3,), seqlens_k=(300,), mask="qk", tiles=True),
        "varlen": packed,
        "own_values": dataclasses.replace(dense, latent=False),
        "own_values_paged": dataclasses.replace(several, latent=False),
        "narrow": dataclasses.replace(several, head_dim=80, head_dim_v=64),
        "narrow_odd": dataclasses.replace(decode, head_dim=75, head_dim_v=51),
        "equal_widths": dataclasses.replace(decode, head_dim=96, head_dim_v=96),
        "gradients": dataclasses.replace(dense, seqlens_q=(5,) * 2, grad_of=None, causal=True, dtype=torch.float32),
        "gradients_narrow": dataclasses.replace(packed, head_dim=80, head_dim_v=64, grad_of=None),
        "fp8_decode": dataclasses.replace(decode, fp8="kv"),
        "fp8_decode_few_heads": dataclasses.replace(decode, fp8="kv", num_heads=3, sinks=True),
        "fp8_several_tokens": dataclasses.replace(several, fp8="kv"),
        "fp8_dense_heads": dataclasses.replace(dense, fp8="head"),
        "int8_decode": dataclasses.replace(decode, fp8="int8"),
        "int8_several_tokens": dataclasses.replace(several, fp8="int8"),
    }
    return [dataclasses.replace(case, label=f"latent_{label}") for label, case in named.items()]


def _empty() -> dict[str, Case]:
    dense = {
        "batch_0": Case(seqlens_q=(), seqlens_k=(), bias="1hqk", sinks=True),
        "batch_0_bshd": Case(seqlens_q=(), seqlens_k=(), layout="bshd"),
        "seqlen_k_0": Case(seqlens_q=(3, 3), seqlens_k=(0, 0)),
        "seqlen_k_0_sinks": Case(seqlens_q=(3, 3), seqlens_k=(0, 0), sinks=True, causal=True),
        "seqlen_k_0_bias": Case(seqlens_q=(3, 3), seqlens_k=(0, 0), bias="bhqk", dropout=0.5),
        "seqlen_q_0": Case(seqlens_q=(0, 0), seqlens_k=(65, 65), bias="bh1k", sinks=True),
        "seqlen_both_0": Case(seqlens_q=(0,), seqlens_k=(0,)),
        "length_1": Case(seqlens_q=(1,), seqlens_k=(1,), causal=True, num_kv_heads=1),
        "length_1_dim_1": Case(seqlens_q=(1,), seqlens_k=(1,), head_dim=1, head_dim_v=1, sinks=True),
    }
    packed = {
        "varlen_batch_0": Case(kind="varlen", seqlens_q=(), seqlens_k=(), padding=3),
        "varlen_batch_0_bias": Case(
            kind="varlen", seqlens_q=(), seqlens_k=(), padding=3, bounds="loose", bias="1hqk", sinks=True
        ),
        "varlen_nothing": Case(kind="varlen", seqlens_q=(), seqlens_k=()),
        "varlen_all_empty": Case(kind="varlen", seqlens_q=(0, 0), seqlens_k=(0, 0), padding=2),
        "varlen_no_keys": Case(kind="varlen", seqlens_q=(5, 0, 70), seqlens_k=(0, 0, 0)),
        "varlen_no_queries": Case(kind="varlen", seqlens_q=(0, 0), seqlens_k=(7, 130)),
        "varlen_some_empty": Case(
            kind="varlen", seqlens_q=(0, 65, 3, 0), seqlens_k=(5, 65, 0, 0), causal=True, bias="1hqk"
        ),
        "varlen_some_empty_sinks": Case(kind="varlen", seqlens_q=(0, 65, 3), seqlens_k=(5, 65, 0), sinks=True),
        "varlen_length_1": Case(kind="varlen", seqlens_q=(1, 1, 1), seqlens_k=(1, 1, 1), causal=True),
        "paged_batch_0": Case(kind="paged", seqlens_q=(), seqlens_k=(), decode=True),
        "paged_empty": Case(kind="paged", seqlens_q=(1, 1, 1), seqlens_k=(0, 17, 0), decode=True),
        "paged_idle_bias": Case(kind="paged", seqlens_q=(0, 1, 0), seqlens_k=(33, 40, 20), bias="bhqk", mask="b1qk"),
    }
    return dense | packed


def _masked_rows() -> dict[str, Case]:
    return {
        "rows_masked": Case(mask="bhqk", masked_rows=True),
        "rows_masked_sinks": Case(mask="qk", masked_rows=True, sinks=True),
        "rows_masked_bf16": Case(mask="b1qk", masked_rows=True, dtype=torch.bfloat16, dropout=0.2),
        "rows_masked_bias": Case(mask="qk", masked_rows=True, bias="1hqk"),
        "rows_causal": Case(seqlens_q=(111,), seqlens_k=(65,), causal=True),
        "rows_window": Case(seqlens_q=(111,), seqlens_k=(3,), window=(4, 0)),
        "rows_window_right": Case(seqlens_q=(257,), seqlens_k=(63,), window=(None, 2), dtype=torch.float16),
        "bias_minus_inf": Case(bias="bhqk", bias_holes=True),
        "bias_minus_inf_rows": Case(bias="bhq1", bias_holes=True, sinks=True),
        "bias_minus_inf_rows_no_sinks": Case(bias="bhq1", bias_holes=True, dtype=torch.bfloat16),
        "bias_minus_inf_columns": Case(bias="b11k", bias_holes=True, causal=True),
    }


def _magnitudes() -> dict[str, Case]:
    return (
        {
            f"{values}_{dtype}".replace("torch.", ""): Case(values=values, dtype=dtype, causal=True)
            for values in _EXTREMES
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }
        | {
            f"long_{side}_{dtype}".replace("torch.", ""): Case(
                seqlens_q=(m,), seqlens_k=(n,), dtype=dtype, num_kv_heads=1
            )
            for side, m, n in (("k", 17, LONG), ("q", LONG, 17))
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }
        | {
            "large_softcap": Case(values="large", softcap=30.0),
            "large_sinks": Case(values="large", sinks=True, window=(20, 0)),
            "window_of_31_bits": Case(window=(2**31 - 1, 2**31 - 1)),
            "window_of_31_bits_right": Case(window=(None, 2**31 - 1), seqlens_q=(20,), seqlens_k=(70,)),
            "window_of_31_bits_causal": Case(window=(2**31 - 1, 0), causal=True, seqlens_q=(20,), seqlens_k=(10,)),
            "scale_0": Case(scale=0.0),
            "scale_negative": Case(scale=-0.5, causal=True),
        }
        | {
            # Enough keys for decode kernels, the last tile not full.
            f"scale_{name}_decode": Case(
                scale=scale,
                seqlens_q=(2, 2),
                seqlens_k=(300, 300),
                head_dim=64,
                head_dim_v=64,
                dtype=torch.bfloat16,
                grad_of=(),
            )
            for name, scale in (("0", 0.0), ("negative", -0.5))
        }
    )


def _tiled() -> dict[str, Case]:
    """Tile masks over several tiles of 128 x 128, some empty, some full."""
    one = Case(seqlens_q=(300,), seqlens_k=(520,), mask="bhqk", tiles=True, num_heads=4)
    gqa = dataclasses.replace(one, num_kv_heads=1, mask="1hqk")
    rich = dataclasses.replace(
        gqa, bias="1hqk", sinks=True, alibi="h", softcap=4.0, dropout=0.2, causal=True, deterministic=True
    )
    few = dataclasses.replace(gqa, seqlens_q=(3,), seqlens_k=(1300,), mask="qk")
    packed = Case(
        kind="varlen", seqlens_q=(300, 0, 7, 131), seqlens_k=(300, 5, 260, 129), mask="b1qk", tiles=True, num_heads=4,
        padding=3,
    )  # fmt: skip
    paged = dataclasses.replace(packed, kind="paged", padding=0, mask="bhqk")
    return {
        "tiles_long": one,
        "tiles_long_bf16": dataclasses.replace(one, dtype=torch.bfloat16),
        "tiles_causal_gqa": dataclasses.replace(gqa, causal=True),
        "tiles_window_gqa": dataclasses.replace(gqa, window=(200, 30), dtype=torch.float16),
        "tiles_everything": rich,
        "tiles_everything_bshd": dataclasses.replace(rich, layout="bshd", dtype=torch.bfloat16),
        "tiles_rows_masked": dataclasses.replace(one, masked_rows=True),
        "tiles_rows_masked_sinks": dataclasses.replace(gqa, masked_rows=True, sinks=True, cotangents=("lse",)),
        "tiles_few_queries": few,
        "tiles_one_query": dataclasses.replace(few, seqlens_q=(1, 1), seqlens_k=(700, 700), mask="bhqk"),
        "tiles_no_keys": dataclasses.replace(one, seqlens_k=(0,)),
        "tiles_no_queries": dataclasses.replace(one, seqlens_q=(0,)),
        "tiles_grad_k_only": dataclasses.replace(gqa, grad_of=("k",), causal=True),
        "tiles_grad_bias_only": dataclasses.replace(gqa, bias="b11k", grad_of=("bias",)),
        "tiles_many_keys": dataclasses.replace(one, seqlens_q=(130,), seqlens_k=(4500,), num_heads=1, num_kv_heads=1),
        "tiles_varlen": packed,
        "tiles_varlen_rich": dataclasses.replace(
            packed, causal=True, bias="1hqk", sinks=True, dropout=0.1, num_kv_heads=1, dtype=torch.bfloat16
        ),
        "tiles_varlen_shared": dataclasses.replace(packed, mask="qk", window=(150, None), bounds="loose"),
        "tiles_paged": paged,
        "tiles_paged_causal": dataclasses.replace(paged, causal=True, num_kv_heads=2, page_size=3),
        "tiles_paged_decode": dataclasses.replace(
            paged, decode=True, seqlens_q=(1,) * 4, seqlens_k=(300, 5, 700, 129), grad_of=()
        ),
    }


def _packed() -> dict[str, Case]:
    lengths = {"seqlens_q": (3, 65, 1), "seqlens_k": (65, 65, 63)}
    return {
        "varlen_padding": Case(kind="varlen", **lengths, padding=9, causal=True),  # type: ignore[arg-type]
        "varlen_strided": Case(kind="varlen", **lengths, padding=9, strides="strided_last"),  # type: ignore[arg-type]
        "varlen_strided_bf16": Case(
            kind="varlen", seqlens_q=(3, 65, 1), seqlens_k=(65, 65, 63), strides="strided_last", head_dim=64,
            head_dim_v=64, dtype=torch.bfloat16,
        ),
        "varlen_no_bounds": Case(kind="varlen", **lengths, padding=1, bounds="none"),  # type: ignore[arg-type]
        "varlen_loose_bounds": Case(kind="varlen", **lengths, bounds="loose", bias="bhqk", mask="b1qk"),  # type: ignore[arg-type]
        "varlen_window_gqa": Case(kind="varlen", **lengths, window=(5, 5), num_heads=4, dropout=0.1),  # type: ignore[arg-type]
    }  # fmt: skip


def _paged() -> dict[str, Case]:
    prefill = Case(kind="paged", seqlens_q=(3, 65, 1), seqlens_k=(65, 65, 63), causal=True, num_heads=4)
    decode = Case(kind="paged", decode=True, seqlens_q=(1,) * 4, seqlens_k=(1, 257, 64, 17), num_heads=6, causal=True)
    sizes = {
        f"paged_{name}_page_{size}": dataclasses.replace(case, page_size=size)
        for name, case in (("prefill", prefill), ("decode", decode))
        for size in (1, 3, 16, 64)
    }
    served = {
        f"{label}_forward_{short}": dataclasses.replace(case, grad_of=(), dtype=dtype)
        for label, case in (("prefill", prefill), ("decode", decode))
        for short, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))
    }
    return sizes | served | {
        "paged_shared": dataclasses.replace(prefill, shared_pages=True),
        "paged_shared_bf16": dataclasses.replace(decode, shared_pages=True, dtype=torch.bfloat16),
        "paged_transposed": dataclasses.replace(prefill, strides="transposed"),
        "paged_decode_strided": dataclasses.replace(decode, strides="strided_last"),
        "paged_decode_strided_bf16": dataclasses.replace(
            decode, seqlens_q=(1,) * 3, seqlens_k=(300, 1, 257), head_dim=64, head_dim_v=64, dtype=torch.bfloat16,
            strides="strided_last", grad_of=(),
        ),
        "paged_decode_sliced": dataclasses.replace(decode, strides="sliced"),
        "paged_decode_features": dataclasses.replace(decode, window=(40, 0), alibi="bh", sinks=True, softcap=2.0),
        "paged_decode_long": dataclasses.replace(
            decode, seqlens_q=(1, 1), seqlens_k=(2049, 3), num_heads=8, grad_of=(), head_dim=64, head_dim_v=64
        ),
        "paged_no_bounds": dataclasses.replace(prefill, bounds="none"),
    }  # fmt: skip


def _gradients() -> dict[str, Case]:
    rich = Case(bias="1h1k", sinks=True, causal=True, num_heads=4)
    only = {
        f"grad_{name}_only": dataclasses.replace(rich, grad_of=(name,)) for name in ("q", "k", "v", "bias", "sinks")
    }
    return only | {
        "grad_through_lse": dataclasses.replace(rich, cotangents=("lse",)),
        "grad_through_lse_varlen": Case(kind="varlen", seqlens_q=(3, 65), seqlens_k=(65, 65), cotangents=("lse",)),
        "grad_through_out": dataclasses.replace(rich, cotangents=("out",)),
        "grad_expanded_dout": dataclasses.replace(rich, expanded_dout=True, cotangents=("out",)),
        "grad_expanded_dout_varlen": Case(
            kind="varlen", seqlens_q=(3, 65), seqlens_k=(65, 65), expanded_dout=True, dtype=torch.bfloat16
        ),
        "grad_deterministic": dataclasses.replace(rich, deterministic=True),
        "forward_only": dataclasses.replace(rich, grad_of=()),
    }  # fmt: skip


def _mixtures() -> dict[str, Case]:
    everything = Case(
        seqlens_q=(65, 65), seqlens_k=(111, 111), num_heads=6, head_dim=48, head_dim_v=72, causal=True,
        window=(50, None), alibi="bh", softcap=4.0, bias="1hqk", mask="b1qk", sinks=True, dropout=0.2,
        scale=0.158,
    )  # fmt: skip
    dropped = Case(mask="bhqk", dropout=0.2, dtype=torch.bfloat16, seqlens_q=(33,), seqlens_k=(65,))
    wide = Case(
        seqlens_q=(65,), seqlens_k=(150,), num_heads=4, head_dim=512, head_dim_v=512, dtype=torch.bfloat16, sinks=True
    )
    packed = dataclasses.replace(wide, kind="varlen", seqlens_q=(65, 0, 7), seqlens_k=(111, 3, 64), causal=True)
    return {
        "everything": everything,
        "everything_bf16_bshd": dataclasses.replace(everything, dtype=torch.bfloat16, layout="bshd"),
        "everything_varlen": dataclasses.replace(
            everything, kind="varlen", seqlens_q=(65, 0, 7), seqlens_k=(111, 3, 7), padding=3
        ),
        "everything_paged": dataclasses.replace(
            everything, kind="paged", seqlens_q=(65, 1, 7), seqlens_k=(111, 3, 7), dropout=0.0, shared_pages=True
        ),
        "mask_and_dropout_256": dataclasses.replace(dropped, head_dim=136, head_dim_v=136),
        "mask_and_dropout_512": dataclasses.replace(dropped, head_dim=264, head_dim_v=264, dtype=torch.float16),
        "head_dim_512": Case(head_dim=512, head_dim_v=512, causal=True, dtype=torch.bfloat16),
        "head_dim_512_band": dataclasses.replace(wide, window=(70, 20), softcap=5.0),
        "head_dim_512_varlen": dataclasses.replace(packed, padding=3, dtype=torch.float16),
        "head_dim_512_paged": dataclasses.replace(packed, kind="paged", page_size=64, grad_of=()),
        "head_dim_512_decode": dataclasses.replace(
            packed, kind="paged", page_size=64, decode=True, seqlens_q=(1,) * 3, seqlens_k=(300, 3, 65), grad_of=()
        ),
        "head_dim_392": dataclasses.replace(wide, head_dim=392, head_dim_v=264, causal=True),
        "head_dim_320": Case(head_dim=320, head_dim_v=260, seqlens_q=(33,), seqlens_k=(65,)),
        "fp32_bias_and_sinks": Case(bias="bhqk", sinks=True, dtype=torch.bfloat16, side_dtype=torch.float32),
        "fp64_bias": Case(bias="1hqk", dtype=torch.bfloat16, side_dtype=torch.float64),
        "fp64_sinks": Case(sinks=True, causal=True, head_dim=64, dtype=torch.bfloat16, side_dtype=torch.float64),
    }
