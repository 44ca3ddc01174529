"""Named cases that no pair of features covers: emptiness, saturation, padding, pages, and partial gradients."""

from __future__ import annotations

import torch

from tilewise.testing.cases import Case, Values

# Many tiles for every plausible tile size, so that sums that lose digits at each tile show.
LONG = 2049
_EXTREMES: tuple[Values, ...] = ("large", "tiny")


def special_cases() -> list[Case]:
    """All of them, labelled."""
    named = {**_empty(), **_masked_rows(), **_magnitudes(), **_packed(), **_paged(), **_gradients(), **_mixtures()}
    named |= _tiled()
    return [case.but(label=label) for label, case in named.items()]


def fp8_cases() -> list[Case]:
    """Quantised operands: every granularity and kind of problem, rotated or not, and inputs that stress the scales."""
    bf16, fp16 = torch.bfloat16, torch.float16
    dense = Case(dtype=bf16, fp8="block", seqlens_q=(150,), seqlens_k=(300,), head_dim=64, head_dim_v=64)
    packed = dense.but(kind="varlen", seqlens_q=(150, 0, 7), seqlens_k=(300, 3, 140), padding=3)
    paged = packed.but(kind="paged", padding=0, fp8="kv", num_heads=4, num_kv_heads=2)
    decode = paged.but(decode=True, seqlens_q=(1,) * 3)
    named = {
        "tensor": dense.but(fp8="tensor"),
        "head": dense.but(fp8="head", dtype=fp16),
        "block": dense,
        "block_rotated": dense.but(rotation=True, causal=True),
        "tensor_rotated_96": dense.but(fp8="tensor", rotation=True, head_dim=96, head_dim_v=96),
        "head_dim_128": dense.but(head_dim=128, head_dim_v=128, causal=True),
        "head_dim_256": dense.but(head_dim=256, head_dim_v=256, window=(70, 10)),
        "bshd_window": dense.but(layout="bshd", window=(100, 20)),
        "unequal_v": dense.but(head_dim_v=40, fp8="head"),
        "features": dense.but(bias="1hqk", sinks=True, alibi="h", softcap=5.0, dropout=0.2, mask="b1qk", fp8="head"),
        "sinks": dense.but(sinks=True, causal=True),
        "tiles": dense.but(mask="1hqk", tiles=True, causal=True),
        "tiles_paged_kv": paged.but(mask="b1qk", tiles=True),
        "longer_q": dense.but(seqlens_q=(300,), seqlens_k=(150,), causal=True),
        "kv_only": dense.but(fp8="kv", causal=True),
        "kv_only_fp32": dense.but(fp8="kv", dtype=torch.float32),
        "strided": dense.but(strides="transposed"),
        "two_sequences": dense.but(seqlens_q=(65,) * 2, seqlens_k=(130,) * 2, num_heads=4),
        "no_keys": dense.but(seqlens_k=(0,)),
        "varlen_tensor": packed.but(fp8="tensor"),
        "varlen_block": packed.but(causal=True, rotation=True),
        "varlen_head_gqa": packed.but(fp8="head", num_kv_heads=1, window=(90, 0)),
        "paged_prefill": paged.but(causal=True),
        "paged_prefill_page_64": paged.but(causal=True, page_size=64, fp8="block"),
        "paged_decode": decode,
        "paged_decode_fp16_page_1": decode.but(dtype=fp16, page_size=1, sinks=True),
        "paged_decode_shared": decode.but(shared_pages=True, window=(200, 0)),
        "paged_decode_page_64": decode.but(page_size=64, fp8="head", alibi="h", softcap=4.0),
        "paged_decode_page_256_fp32": decode.but(page_size=256, dtype=torch.float32, causal=True),
        "paged_decode_head_dim_128": decode.but(page_size=128, head_dim=128, head_dim_v=80),
        "decode": dense.but(fp8="kv", seqlens_q=(1,) * 2, seqlens_k=(300,) * 2, num_heads=4),
        "decode_block": dense.but(seqlens_q=(3,), seqlens_k=(700,), causal=True, rotation=True),
        "varlen_decode": packed.but(fp8="head", seqlens_q=(1, 0, 2), seqlens_k=(300, 3, 270)),
        "odd_head_dim": dense.but(fp8="head", head_dim=33, head_dim_v=15, causal=True),
    }
    cases = [case.but(label=f"fp8_{label}") for label, case in named.items()]
    return cases + _int8_cases(paged, decode)


def _int8_cases(paged: Case, decode: Case) -> list[Case]:
    """Pages in int8: a scale for each (token, head)."""
    paged, decode = (case.but(fp8="int8") for case in (paged, decode))
    several = decode.but(decode=False, seqlens_q=(3, 0, 1), causal=True)
    named = {
        "prefill": paged.but(causal=True),
        "prefill_page_64": paged.but(causal=True, page_size=64, window=(90, 0), sinks=True),
        "prefill_features": paged.but(bias="1hqk", alibi="h", softcap=5.0, dtype=torch.float16),
        "prefill_tiles": paged.but(mask="b1qk", tiles=True),
        "prefill_large": paged.but(values="large", dtype=torch.float32),
        "decode": decode,
        "decode_fp16_page_1": decode.but(dtype=torch.float16, page_size=1, sinks=True),
        "decode_shared": decode.but(shared_pages=True, window=(200, 0)),
        "decode_page_64": decode.but(page_size=64, alibi="h", softcap=4.0),
        "decode_page_256_fp32": decode.but(page_size=256, dtype=torch.float32, causal=True),
        "decode_head_dim_128": decode.but(page_size=128, head_dim=128, head_dim_v=80),
        "decode_one_head": decode.but(num_heads=2, values="tiny"),
        "decode_odd": decode.but(head_dim=33, head_dim_v=15, num_heads=6),
        "decode_latent": decode.but(num_heads=8, num_kv_heads=1, head_dim=80, head_dim_v=64, latent=True),
        "several_tokens": several,
        "several_batch": several.but(deterministic="batch"),
    }
    return [case.but(label=f"int8_{label}") for label, case in named.items()]


def padded_cases() -> list[Case]:
    """Cases with contents outside the lengths in every tensor that can have it, for bitwise comparisons."""
    varlen = Case(
        kind="varlen", seqlens_q=(3, 0, 63), seqlens_k=(65, 1, 63), padding=7, bounds="loose", deterministic=True
    )
    paged = Case(kind="paged", seqlens_q=(3, 1, 33), seqlens_k=(65, 1, 63), padding=2, page_size=16, deterministic=True)
    every = [
        case.but(causal=True, dtype=dtype, bias=bias)
        for case in (varlen, paged)
        for dtype in (torch.float32, torch.bfloat16)
        for bias in ("", "bhqk")
    ]
    decode = Case(kind="paged", decode=True, seqlens_q=(1,) * 3, seqlens_k=(65, 0, 130), page_size=16, grad_of=())
    sliced = Case(strides="sliced", causal=True, deterministic=True)
    every += [case.but(mask="b1qk", tiles=True) for case in (varlen, paged)]
    every += [case.but(fp8="int8", dtype=torch.bfloat16) for case in (paged, decode)]
    return [*every, decode, sliced, sliced.but(strides="strided_last")]


def repeatable_cases() -> list[Case]:
    """Cases with long parallel sums, whose order of summation must not change between runs."""
    wide = Case(num_heads=6, num_kv_heads=2, head_dim=64, head_dim_v=64, causal=True, deterministic=True)
    long = wide.but(seqlens_q=(257,), seqlens_k=(515,))
    everything = long.but(bias="1h1k", sinks=True, dropout=0.2, alibi="h", softcap=5.0)
    packed = long.but(kind="varlen", seqlens_q=(257, 3, 111), seqlens_k=(257, 65, 111))
    paged = packed.but(kind="paged", shared_pages=True)
    tiled = long.but(mask="1hqk", tiles=True)
    decode = Case(kind="paged", decode=True, seqlens_q=(1, 1), seqlens_k=(1025, 63), grad_of=(), num_heads=8)
    cases = [long, everything, packed, paged, tiled, decode]
    return cases + [case.but(dtype=torch.bfloat16) for case in cases]


def written_cases() -> list[Case]:
    """Cases whose results are written into memory of the caller: every kind of kernel, and empty problems."""
    bf16 = torch.bfloat16
    dense = Case(seqlens_q=(65,) * 2, seqlens_k=(130,) * 2, num_heads=4, head_dim=64, head_dim_v=64, causal=True)
    packed = dense.but(kind="varlen", seqlens_q=(65, 0, 3), seqlens_k=(65, 2, 130), padding=7)
    paged = packed.but(kind="paged", page_size=16, padding=2)
    decode = paged.but(decode=True, seqlens_q=(1,) * 3, seqlens_k=(300, 0, 513), padding=0)
    named = {
        "dense": dense.but(dtype=bf16),
        "fp32": dense,
        "bshd": dense.but(layout="bshd", head_dim_v=40),
        "bshd_16_bits": dense.but(layout="bshd", dtype=torch.float16, num_heads=2),
        "features": dense.but(bias="1hqk", sinks=True, alibi="h", dropout=0.2),
        "narrow": dense.but(head_dim_v=1),
        "few_queries": dense.but(seqlens_q=(2,) * 2, seqlens_k=(700,) * 2, dtype=bf16),
        "varlen": packed.but(dtype=bf16),
        "varlen_fp32": packed,
        "paged": paged.but(dtype=bf16),
        "paged_decode": decode.but(dtype=bf16),
        "paged_decode_fp8": decode.but(dtype=bf16, fp8="kv"),
        "paged_decode_int8": decode.but(dtype=bf16, fp8="int8"),
        "paged_decode_fp32": decode,
        "fp8": dense.but(dtype=bf16, fp8="head"),
        "fp8_odd": dense.but(dtype=bf16, fp8="head", head_dim=33, head_dim_v=15),
        "no_keys": dense.but(seqlens_k=(0,) * 2),
        "no_batch": dense.but(seqlens_q=(), seqlens_k=()),
    }
    return [case.but(label=f"written_{label}", grad_of=()) for label, case in named.items()]


def largest_cases() -> list[Case]:
    """Cases whose largest scores are asked for: all that changes scores, hides them, or joins them later."""
    bf16 = torch.bfloat16
    dense = Case(seqlens_q=(70,) * 2, seqlens_k=(130,) * 2, num_heads=4, head_dim=64, head_dim_v=64)
    packed = dense.but(kind="varlen", seqlens_q=(65, 0, 3), seqlens_k=(65, 2, 130), padding=7)
    paged = packed.but(kind="paged", page_size=16, padding=2, grad_of=())
    decode = paged.but(decode=True, seqlens_q=(1,) * 3, seqlens_k=(300, 0, 513), padding=0)
    named = {
        "plain": dense,
        "16_bits": dense.but(dtype=bf16, num_kv_heads=1, causal=True),
        "narrow": dense.but(head_dim=24, head_dim_v=8, dtype=torch.float16),
        "wide": dense.but(head_dim=192, head_dim_v=128, dtype=bf16, causal=True),
        "window": dense.but(window=(9, 4), dtype=bf16),
        "softcap": dense.but(softcap=1.5, layout="bshd"),
        "negative_scale": dense.but(scale=-0.3, causal=True),
        "large_scale": dense.but(scale=2000.0, grad_of=()),
        "terms": dense.but(bias="1hqk", alibi="h", dropout=0.3),
        "mask": dense.but(mask="bhqk", masked_rows=True),
        "tiles": dense.but(mask="1hqk", tiles=True, dtype=bf16),
        "sinks": dense.but(sinks=True, causal=True),
        "sinks_above": dense.but(sinks=True, values="tiny", grad_of=()),
        "decode_sinks_above": decode.but(sinks=True, values="tiny"),
        "sinks_16_bits": dense.but(sinks=True, softcap=3.0, dtype=bf16, head_dim=128, head_dim_v=128),
        "varlen": packed.but(dtype=bf16, causal=True),
        "varlen_sinks": packed.but(sinks=True, num_heads=6),
        "paged": paged.but(dtype=bf16, causal=True),
        "decode": decode.but(num_heads=8),
        "decode_sinks": decode.but(dtype=bf16, sinks=True),
        "decode_fp8": decode.but(dtype=bf16, fp8="kv", sinks=True),
        "decode_int8": decode.but(dtype=bf16, fp8="int8", sinks=True),
        "fp8": dense.but(dtype=bf16, fp8="head", causal=True),
        "no_keys": dense.but(seqlens_k=(0,) * 2, sinks=True),
        "no_queries": dense.but(seqlens_q=(0,) * 2),
        "no_batch": packed.but(seqlens_q=(), seqlens_k=(), padding=3),
    }
    return [case.but(label=f"largest_{label}") for label, case in named.items()]


def latent_cases() -> list[Case]:
    """Many query heads on a latent, whose first columns are the values: every kind of problem and flag, other widths,
    and keys of 576 columns with values of their own.
    """
    bf16 = torch.bfloat16
    latent = Case(num_heads=20, num_kv_heads=1, head_dim=576, head_dim_v=512, latent=True, dtype=bf16, grad_of=())
    decode = latent.but(kind="paged", decode=True, seqlens_q=(1,) * 3, seqlens_k=(300, 0, 70), page_size=64)
    several = decode.but(decode=False, seqlens_q=(2, 0, 5), causal=True, num_heads=16, padding=2)
    dense = decode.but(kind="dense", decode=False, seqlens_q=(1,) * 2, seqlens_k=(140,) * 2)
    packed = several.but(kind="varlen", seqlens_k=(90, 3, 70))
    named = {
        "decode": decode,
        "decode_fp16_page_16": decode.but(dtype=torch.float16, page_size=16, num_heads=128),
        "decode_fp32_page_3": decode.but(dtype=torch.float32, page_size=3, num_heads=7),
        "decode_two_heads": decode.but(num_kv_heads=2),
        "decode_split": decode.but(seqlens_q=(1,), seqlens_k=(1100,), num_heads=16),
        "decode_window": decode.but(window=(40, 0), sinks=True),
        "decode_features": decode.but(softcap=4.0, alibi="h", bias="b11k", mask="bhqk"),
        "decode_shared_pages": decode.but(shared_pages=True, seqlens_k=(130, 200, 70)),
        "decode_strided": decode.but(strides="strided_last", seqlens_k=(90, 0, 70)),
        "decode_transposed": decode.but(strides="transposed", seqlens_k=(90, 0, 70)),
        "decode_batch_invariant": decode.but(deterministic="batch"),
        "several_tokens": several,
        "several_tokens_window": several.but(window=(33, 0), sinks=True, softcap=3.0),
        "dense": dense,
        "dense_bshd_causal": dense.but(layout="bshd", causal=True, seqlens_q=(3,) * 2),
        "dense_prefill": dense.but(seqlens_q=(33,), seqlens_k=(70,), causal=True, num_heads=3),
        "dense_dropout": dense.but(seqlens_q=(3,) * 2, dropout=0.3, seqlens_k=(70,) * 2),
        "dense_tiles": dense.but(seqlens_q=(3,), seqlens_k=(300,), mask="qk", tiles=True),
        "varlen": packed,
        "own_values": dense.but(latent=False),
        "own_values_paged": several.but(latent=False),
        "narrow": several.but(head_dim=80, head_dim_v=64),
        "narrow_odd": decode.but(head_dim=75, head_dim_v=51),
        "equal_widths": decode.but(head_dim=96, head_dim_v=96),
        "gradients": dense.but(seqlens_q=(5,) * 2, grad_of=None, causal=True, dtype=torch.float32),
        "gradients_narrow": packed.but(head_dim=80, head_dim_v=64, grad_of=None),
        "fp8_decode": decode.but(fp8="kv"),
        "fp8_decode_few_heads": decode.but(fp8="kv", num_heads=3, sinks=True),
        "fp8_several_tokens": several.but(fp8="kv"),
        "fp8_dense_heads": dense.but(fp8="head"),
        "int8_decode": decode.but(fp8="int8"),
        "int8_several_tokens": several.but(fp8="int8"),
    }
    return [case.but(label=f"latent_{label}") for label, case in named.items()]


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
    # Enough keys for decode kernels, the last tile not full.
    keys = Case(seqlens_q=(2, 2), seqlens_k=(300, 300), head_dim=64, head_dim_v=64)
    decode = keys.but(dtype=torch.bfloat16, grad_of=())
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
        | {f"scale_{name}_decode": decode.but(scale=scale) for name, scale in (("0", 0.0), ("negative", -0.5))}
    )


def _tiled() -> dict[str, Case]:
    """Tile masks over several tiles of 128 x 128, some empty, some full."""
    one = Case(seqlens_q=(300,), seqlens_k=(520,), mask="bhqk", tiles=True, num_heads=4)
    gqa = one.but(num_kv_heads=1, mask="1hqk")
    rich = gqa.but(bias="1hqk", sinks=True, alibi="h", softcap=4.0, dropout=0.2, causal=True, deterministic=True)
    few = gqa.but(seqlens_q=(3,), seqlens_k=(1300,), mask="qk")
    lengths = Case(kind="varlen", seqlens_q=(300, 0, 7, 131), seqlens_k=(300, 5, 260, 129), padding=3)
    packed = lengths.but(mask="b1qk", tiles=True, num_heads=4)
    paged = packed.but(kind="paged", padding=0, mask="bhqk")
    return {
        "tiles_long": one,
        "tiles_long_bf16": one.but(dtype=torch.bfloat16),
        "tiles_causal_gqa": gqa.but(causal=True),
        "tiles_window_gqa": gqa.but(window=(200, 30), dtype=torch.float16),
        "tiles_everything": rich,
        "tiles_everything_bshd": rich.but(layout="bshd", dtype=torch.bfloat16),
        "tiles_rows_masked": one.but(masked_rows=True),
        "tiles_rows_masked_sinks": gqa.but(masked_rows=True, sinks=True, cotangents=("lse",)),
        "tiles_few_queries": few,
        "tiles_one_query": few.but(seqlens_q=(1, 1), seqlens_k=(700, 700), mask="bhqk"),
        "tiles_no_keys": one.but(seqlens_k=(0,)),
        "tiles_no_queries": one.but(seqlens_q=(0,)),
        "tiles_grad_k_only": gqa.but(grad_of=("k",), causal=True),
        "tiles_grad_bias_only": gqa.but(bias="b11k", grad_of=("bias",)),
        "tiles_many_keys": one.but(seqlens_q=(130,), seqlens_k=(4500,), num_heads=1, num_kv_heads=1),
        "tiles_varlen": packed,
        "tiles_varlen_rich": packed.but(
            causal=True, bias="1hqk", sinks=True, dropout=0.1, num_kv_heads=1, dtype=torch.bfloat16
        ),
        "tiles_varlen_shared": packed.but(mask="qk", window=(150, None), bounds="loose"),
        "tiles_paged": paged,
        "tiles_paged_causal": paged.but(causal=True, num_kv_heads=2, page_size=3),
        "tiles_paged_decode": paged.but(decode=True, seqlens_q=(1,) * 4, seqlens_k=(300, 5, 700, 129), grad_of=()),
    }


def _packed() -> dict[str, Case]:
    varlen = Case(kind="varlen", seqlens_q=(3, 65, 1), seqlens_k=(65, 65, 63))
    return {
        "varlen_padding": varlen.but(padding=9, causal=True),
        "varlen_strided": varlen.but(padding=9, strides="strided_last"),
        "varlen_strided_bf16": varlen.but(strides="strided_last", head_dim=64, head_dim_v=64, dtype=torch.bfloat16),
        "varlen_no_bounds": varlen.but(padding=1, bounds="none"),
        "varlen_loose_bounds": varlen.but(bounds="loose", bias="bhqk", mask="b1qk"),
        "varlen_window_gqa": varlen.but(window=(5, 5), num_heads=4, dropout=0.1),
    }


def _paged() -> dict[str, Case]:
    prefill = Case(kind="paged", seqlens_q=(3, 65, 1), seqlens_k=(65, 65, 63), causal=True, num_heads=4)
    decode = Case(kind="paged", decode=True, seqlens_q=(1,) * 4, seqlens_k=(1, 257, 64, 17), num_heads=6, causal=True)
    wide = decode.but(head_dim=64, head_dim_v=64, grad_of=())
    bf16 = torch.bfloat16
    sizes = {
        f"paged_{name}_page_{size}": case.but(page_size=size)
        for name, case in (("prefill", prefill), ("decode", decode))
        for size in (1, 3, 16, 64)
    }
    served = {
        f"{label}_forward_{short}": case.but(grad_of=(), dtype=dtype)
        for label, case in (("prefill", prefill), ("decode", decode))
        for short, dtype in (("fp16", torch.float16), ("bf16", bf16))
    }
    others = {
        "paged_shared": prefill.but(shared_pages=True),
        "paged_shared_bf16": decode.but(shared_pages=True, dtype=bf16),
        "paged_transposed": prefill.but(strides="transposed"),
        "paged_decode_strided": decode.but(strides="strided_last"),
        "paged_decode_strided_bf16": wide.but(
            seqlens_q=(1,) * 3, seqlens_k=(300, 1, 257), dtype=bf16, strides="strided_last"
        ),
        "paged_decode_sliced": decode.but(strides="sliced"),
        "paged_decode_features": decode.but(window=(40, 0), alibi="bh", sinks=True, softcap=2.0),
        "paged_decode_long": wide.but(seqlens_q=(1, 1), seqlens_k=(2049, 3), num_heads=8),
        "paged_no_bounds": prefill.but(bounds="none"),
    }
    return sizes | served | others


def _gradients() -> dict[str, Case]:
    rich = Case(bias="1h1k", sinks=True, causal=True, num_heads=4)
    only = {f"grad_{name}_only": rich.but(grad_of=(name,)) for name in ("q", "k", "v", "bias", "sinks")}
    others = {
        "grad_through_lse": rich.but(cotangents=("lse",)),
        "grad_through_lse_varlen": Case(kind="varlen", seqlens_q=(3, 65), seqlens_k=(65, 65), cotangents=("lse",)),
        "grad_through_out": rich.but(cotangents=("out",)),
        "grad_expanded_dout": rich.but(expanded_dout=True, cotangents=("out",)),
        "grad_expanded_dout_varlen": Case(
            kind="varlen", seqlens_q=(3, 65), seqlens_k=(65, 65), expanded_dout=True, dtype=torch.bfloat16
        ),
        "grad_deterministic": rich.but(deterministic=True),
        "forward_only": rich.but(grad_of=()),
    }
    return only | others


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
    packed = wide.but(kind="varlen", seqlens_q=(65, 0, 7), seqlens_k=(111, 3, 64), causal=True)
    return {
        "everything": everything,
        "everything_bf16_bshd": everything.but(dtype=torch.bfloat16, layout="bshd"),
        "everything_varlen": everything.but(kind="varlen", seqlens_q=(65, 0, 7), seqlens_k=(111, 3, 7), padding=3),
        "everything_paged": everything.but(
            kind="paged", seqlens_q=(65, 1, 7), seqlens_k=(111, 3, 7), dropout=0.0, shared_pages=True
        ),
        "mask_and_dropout_256": dropped.but(head_dim=136, head_dim_v=136),
        "mask_and_dropout_512": dropped.but(head_dim=264, head_dim_v=264, dtype=torch.float16),
        "head_dim_512": Case(head_dim=512, head_dim_v=512, causal=True, dtype=torch.bfloat16),
        "head_dim_512_band": wide.but(window=(70, 20), softcap=5.0),
        "head_dim_512_varlen": packed.but(padding=3, dtype=torch.float16),
        "head_dim_512_paged": packed.but(kind="paged", page_size=64, grad_of=()),
        "head_dim_512_decode": packed.but(
            kind="paged", page_size=64, decode=True, seqlens_q=(1,) * 3, seqlens_k=(300, 3, 65), grad_of=()
        ),
        "head_dim_392": wide.but(head_dim=392, head_dim_v=264, causal=True),
        "head_dim_320": Case(head_dim=320, head_dim_v=260, seqlens_q=(33,), seqlens_k=(65,)),
        "fp32_bias_and_sinks": Case(bias="bhqk", sinks=True, dtype=torch.bfloat16, side_dtype=torch.float32),
        "fp64_bias": Case(bias="1hqk", dtype=torch.bfloat16, side_dtype=torch.float64),
        "fp64_sinks": Case(sinks=True, causal=True, head_dim=64, dtype=torch.bfloat16, side_dtype=torch.float64),
    }
