"""Operand views of a problem without tensors, for compiling kernels on a machine without a GPU."""

from __future__ import annotations

import torch

from tilewise.backends.gpu.launching import Allocation, View
from tilewise.problem import AttentionProblem
from tilewise.tiles import TILE, WORDS


def operand_views(problem: AttentionProblem, *, packed_queries: bool) -> dict[str, View]:
    """Views of contiguous canonical operands of a problem; paged queries with cu_seqlens_q if `packed_queries`."""
    codes = torch.int8 if problem.int8 else torch.float8_e4m3fn
    dtypes = dict.fromkeys("qkv", problem.dtype) | dict.fromkeys(problem.fp8, codes)
    views = {name: _contiguous(shape, dtypes[name]) for name, shape in _row_shapes(problem).items()}
    views |= {f"{name}_scale": _contiguous(_scale_shape(problem, name), torch.float32) for name in problem.fp8}
    if problem.kind == "varlen" or (problem.kind == "paged" and packed_queries):
        views["cu_seqlens_q"] = _contiguous((problem.batch + 1,), torch.int32)
    if problem.kind == "varlen":
        views["cu_seqlens_k"] = _contiguous((problem.batch + 1,), torch.int32)
    if problem.page_size is not None:
        table = (problem.batch, problem.seqlen_k // problem.page_size)
        views |= {"block_table": _contiguous(table, torch.int32), "seqlens_k": _contiguous(table[:1], torch.int32)}
    scores = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    if problem.bias_shape is not None:
        views["bias"] = _expanded(problem.bias_shape, scores, problem.bias_dtype or problem.dtype)
    if problem.mask_shape is not None:
        views["mask"] = _expanded(problem.mask_shape, scores, torch.bool)
    if problem.tiles_shape is not None:
        whole = (*scores[:2], *problem.tiles_shape[2:])
        views["tiles"] = _expanded(problem.tiles_shape, whole, torch.int32)
        views["tile_bits"] = _contiguous((1, WORDS * TILE), torch.int32)
        views["tile_lists"] = _contiguous((1,), torch.int32)
    if problem.has_alibi:
        views["alibi_slopes"] = _expanded((1, problem.num_heads), scores[:2], torch.float32)
    if problem.has_sinks:
        views["sinks"] = _contiguous((problem.num_heads,), torch.float32)
    if problem.max_logits:
        views["max_logits"] = _contiguous((problem.num_heads,), torch.float32)
    if problem.dropout > 0.0:
        views["seed"] = _contiguous((5,) if problem.dropout_origin else (), torch.int64)
    return views


def _row_shapes(problem: AttentionProblem) -> dict[str, tuple[int, ...]]:
    widths = {"k": problem.head_dim, "v": problem.head_dim_v}
    if problem.kind == "dense":
        query = (problem.batch, problem.num_heads, problem.seqlen_q, problem.head_dim)
        keys: tuple[int, ...] = (problem.batch, problem.num_kv_heads, problem.seqlen_k)
        return {"q": query, **{name: (*keys, width) for name, width in widths.items()}}
    keys = (problem.total_k, problem.num_kv_heads)
    if problem.page_size is not None:
        keys = (problem.total_k // problem.page_size, problem.page_size, problem.num_kv_heads)
    query_rows = (problem.total_q, problem.num_heads, problem.head_dim)
    return {"q": query_rows, **{name: (*keys, width) for name, width in widths.items()}}


def _scale_shape(problem: AttentionProblem, name: str) -> tuple[int, int, int]:
    """(sequences or pages, heads, blocks) of an operand in 8 bits."""
    heads = problem.num_heads if name == "q" else problem.num_kv_heads
    if name != "q" and problem.page_size is not None:
        return problem.total_k // problem.page_size, heads, problem.page_size if problem.int8 else 1
    length = problem.seqlen_q if name == "q" else problem.seqlen_k
    return problem.batch, heads, -(-length // (problem.scale_blocks["qkv".index(name)] or max(1, length)))


def _contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> View:
    return Allocation.contiguous(shape, dtype).view


def _expanded(shape: tuple[int, ...], target: tuple[int, ...], dtype: torch.dtype) -> View:
    strides = Allocation.contiguous(shape, dtype).strides
    broadcast = [0 if size != wanted else s for size, wanted, s in zip(shape, target, strides, strict=True)]
    return View(tuple(broadcast), dtype, aligned=True)
