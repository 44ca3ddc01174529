"""FP8 and int8 cases: their operands as containers, and as the exact values that the containers represent."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tilewise import fp8
from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs


def attended(case: Case, inputs: Inputs) -> tuple[Any, Any, Any]:
    """q, k and v as the call takes them: containers where the case says so."""
    if not case.fp8:
        return inputs.q, inputs.k, inputs.v
    k = _keys(case, inputs.k, inputs.cu_seqlens_k, rotates=True)
    v = k.first_columns(case.head_dim_v) if case.latent else _keys(case, inputs.v, inputs.cu_seqlens_k, rotates=False)
    return (inputs.q if case.fp8 in ("kv", "int8") else _queries(case, inputs)), k, v


def dequantised(case: Case, inputs: Inputs) -> Inputs:
    """The inputs with q, k and v replaced by the values of their containers, in fp32 (exactly)."""
    if not case.fp8:
        return inputs
    q, k, v = attended(case, inputs)
    paged = case.kind == "paged"
    return dataclasses.replace(
        inputs,
        q=q.float() if isinstance(q, Tensor) else q.dequantize(_lengths(case, inputs)),
        k=k.dequantize(None if paged else inputs.cu_seqlens_k),
        v=v.dequantize(None if paged else inputs.cu_seqlens_k),
    )


def _lengths(case: Case, inputs: Inputs) -> Tensor | None:
    """Running totals of q's lengths. A decoding call has one row per sequence and passes none."""
    if not case.decode:
        return inputs.cu_seqlens_q
    assert inputs.seqlens_k is not None
    return inputs.seqlens_k.new_ones(case.batch + 1).cumsum(0).int() - 1


def _queries(case: Case, inputs: Inputs) -> fp8.Fp8Tensor:
    granularity: Any = case.fp8
    if case.kind == "dense":
        return fp8.quantize(inputs.q, granularity=granularity, rotation=case.rotation, layout=case.layout)
    longest = 1 if case.decode else case.seqlen_q
    return fp8.quantize(
        inputs.q, granularity=granularity, rotation=case.rotation, cu_seqlens=_lengths(case, inputs), max_seqlen=longest
    )


def _keys(case: Case, tensor: Tensor, cu_seqlens: Tensor | None, *, rotates: bool) -> fp8.Fp8Tensor:
    if case.kind == "paged":
        return fp8.quantize_pages(tensor, dtype=torch.int8 if case.fp8 == "int8" else torch.float8_e4m3fn)
    granularity: Any = "head" if case.fp8 == "kv" else case.fp8
    rotation = rotates and case.rotation
    if case.kind == "dense":
        return fp8.quantize(tensor, granularity=granularity, rotation=rotation, layout=case.layout)
    return fp8.quantize(
        tensor, granularity=granularity, rotation=rotation, cu_seqlens=cu_seqlens, max_seqlen=case.seqlen_k
    )
