"""`torch.nn.attention.flex_attention`, computed by tilewise without compiling anything: same arguments, same meaning.

    from tilewise.integrations.flex import create_block_mask, flex_attention

`create_block_mask` returns a TileMask. A BlockMask of torch is taken too, and converted at its first use. A mask_mod
is any function; a score_mod must be a `ScoreMod`, which names what the kernels have: softcap, ALiBi, a bias.
"""

from __future__ import annotations

import dis
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from tilewise.api import attention
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.integrations.translation import require_tensors, worded
from tilewise.tile_masks import TileMask, tile_mask
from tilewise.tiles import TILE
from tilewise.units import counted

__all__ = ["ScoreMod", "create_block_mask", "flex_attention"]

# torch's names of tilewise's arguments.
NAMES = {
    "q": "query", "k": "key", "v": "value", "mask": "block_mask", "fn": "mask_mod", "seqlen_q": "Q_LEN",
    "seqlen_k": "KV_LEN", "batch": "B", "heads": "H",
}  # fmt: skip
# Options of torch's kernels that change speed and rounding, not results. Some are promises about the mask; tilewise is
# right without them. With the prefix fwd_ or bwd_ they hold for one pass.
TUNING = frozenset({
    "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_warps", "num_stages",
    "num_consumer_groups", "num_buffers_warp_spec", "SPLIT_KV", "PARTITION_SIZE", "USE_TMA", "WRITE_DQ", "PRESCALE_QK",
    "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "FORCE_USE_FLEX_ATTENTION", "BACKEND", "kpack",
    "matrix_instr_nonkdim", "waves_per_eu",
})  # fmt: skip
# What cannot change, as far as masks read it.
FIXED = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# A function that imports may read what is neither captured nor global.
IMPORT = dis.opmap["IMPORT_NAME"]
# An object that is read, and its version or value.
Reading = tuple[object, object]
# Tile masks of BlockMasks that are alive, with what they were made of: a model passes one to all of its layers.
_CONVERTED: weakref.WeakKeyDictionary[BlockMask, tuple[list[Reading], TileMask]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """A score_mod that tilewise computes: softcap, then ALiBi, then a bias, as docs/contract.md defines them.

    It is a function of torch's signature as well, so that FlexAttention computes the same. `offset` is seqlen_k -
    seqlen_q, for ALiBi of unequal lengths.
    """

    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    offset: int = 0

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The changed score of one pair."""
        if self.softcap is not None:
            score = self.softcap * torch.tanh(score / self.softcap)
        if self.alibi_slopes is not None:
            slope = self.alibi_slopes[h] if self.alibi_slopes.dim() == 1 else self.alibi_slopes[b, h]
            score = score - slope * (kv_idx - q_idx - self.offset).abs()
        if self.bias is not None:
            shape = (1,) * (4 - self.bias.dim()) + tuple(self.bias.shape)
            at = [
                index if size > 1 else torch.zeros_like(index)
                for index, size in zip((b, h, q_idx, kv_idx), shape, strict=True)
            ]
            score = score + self.bias.reshape(shape)[at[0], at[1], at[2], at[3]]
        return score


@worded(NAMES)
def create_block_mask(
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    B: int | None,  # noqa: N803
    H: int | None,  # noqa: N803
    Q_LEN: int,  # noqa: N803
    KV_LEN: int,  # noqa: N803
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = TILE,  # noqa: N803
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> TileMask:
    """The tile mask of a mask_mod. `device` is the accelerator if there is one, as in torch.

    The arguments from `BLOCK_SIZE` on say how torch stores a mask and runs its kernels, not what it means. They are
    accepted and change nothing: tiles are 128 x 128, full ones are stored apart, and nothing is compiled. The function
    is evaluated once, some hundred tiles at a time.
    """
    del _compile, separate_full_blocks, compute_dq_write_order, dq_kv_order
    sizes: Any = BLOCK_SIZE if isinstance(BLOCK_SIZE, tuple | list) else (BLOCK_SIZE, BLOCK_SIZE)
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        fix = "Leave it out: the mask means the same."
        raise InvalidProblem("BLOCK_SIZE", "a positive integer, or two", repr(BLOCK_SIZE), fix)
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    return tile_mask(mask_mod, Q_LEN, KV_LEN, batch=B, heads=H, device=device)


@worded(NAMES)
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: TileMask | BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention of query (batch, heads, seqlen_q, dim) to key and value (batch, kv_heads, seqlen_k, dim), as in torch.

    `block_mask` is a TileMask or torch's BlockMask, `score_mod` a `ScoreMod` or None. `kernel_options` that tune
    torch's kernels are accepted and change nothing; others are refused, and so is the largest score in `return_aux`.

        >>> q = torch.ones(1, 2, 4, 8)
        >>> mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 4, 4, device="cpu")
        >>> flex_attention(q, q, q, block_mask=mask).shape
        torch.Size([1, 2, 4, 8])
    """
    require_tensors(query=query, key=key, value=value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise InvalidProblem(name, "(batch, heads, seqlen, dim)", f"shape {tuple(tensor.shape)}", "Reshape it.")
    if kernel_options:
        _check_options(kernel_options)
    if return_aux is not None:
        _check_aux(return_aux, return_lse)
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        fix = "Pass enable_gqa=True to let several query heads share a key head."
        raise InvalidProblem("key", f"{counted(query.shape[-3], 'head')} as query has", key.shape[-3], fix)
    flags = _score_flags(score_mod, key.shape[-2] - query.shape[-2])
    out, lse = attention(query, key, value, mask=_mask(block_mask, query), scale=scale, return_lse=True, **flags)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _check_options(kernel_options: Any) -> None:
    if not isinstance(kernel_options, dict):
        got = type(kernel_options).__name__
        raise InvalidProblem("kernel_options", "a dict or None", got, "They tune torch's kernels: leave them out.")
    known = (str(name).removeprefix("fwd_").removeprefix("bwd_") in TUNING for name in kernel_options)
    others = [name for name, is_known in zip(kernel_options, known, strict=True) if not is_known]
    if others:
        fix = "Leave these out: they may change results. scale= sets the scale, return_aux= what is returned."
        raise InvalidProblem("kernel_options", f"some of {', '.join(sorted(TUNING))}", others, fix)


def _check_aux(return_aux: Any, return_lse: bool) -> None:
    if not isinstance(return_aux, AuxRequest):
        raise InvalidProblem("return_aux", "an AuxRequest or None", repr(return_aux), "Pass AuxRequest(lse=True).")
    if return_lse:
        fix = "Ask for AuxRequest(lse=True) alone."
        raise InvalidProblem("return_lse", "False because return_aux is given", return_lse, fix)
    if return_aux.max_scores:
        raise Unsupported("the largest score of a row is not returned: ask for AuxRequest(lse=True) alone")


def _score_flags(score_mod: Any, offset: int) -> dict[str, Any]:
    if score_mod is None:
        return {}
    if not isinstance(score_mod, ScoreMod):
        raise Unsupported(
            f"score_mod {getattr(score_mod, '__name__', score_mod)!r} is a function, which kernels would have to be "
            "compiled for. Softcap, ALiBi and a bias, which may be any function of the indices, are "
            "tilewise.integrations.flex.ScoreMod(softcap=..., alibi_slopes=..., bias=...); a condition belongs in the "
            "mask_mod"
        )
    if score_mod.alibi_slopes is not None and score_mod.offset != offset:
        expected = f"offset {offset}, which is seqlen_k - seqlen_q"
        fix = "The last query is aligned with the last key."
        raise InvalidProblem("score_mod", expected, score_mod.offset, fix)
    return {"softcap": score_mod.softcap, "alibi_slopes": score_mod.alibi_slopes, "bias": score_mod.bias}


def _mask(block_mask: TileMask | BlockMask | None, query: Tensor) -> TileMask | None:
    if block_mask is None or isinstance(block_mask, TileMask):
        return block_mask
    if not isinstance(block_mask, BlockMask):
        fix = "Of a boolean tensor, tilewise.TileMask.from_dense makes one."
        raise InvalidProblem("block_mask", "a TileMask, a BlockMask or None", type(block_mask).__name__, fix)
    if torch.compiler.is_compiling():
        raise Unsupported(
            "a BlockMask cannot be converted while torch.compile traces: convert it before, with "
            "tilewise.TileMask.from_block_mask(block_mask)"
        )
    lists = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    sizes = {"batch": query.shape[0], "heads": query.shape[1]}
    readings: list[Reading] = [(None, (block_mask.seq_lengths, block_mask.BLOCK_SIZE, sizes))]
    try:
        _read((*lists, block_mask.mask_mod), readings, {})
    except (_UnknownError, ValueError):  # a cell without contents
        return TileMask.from_block_mask(block_mask, **sizes)
    before, found = _CONVERTED.get(block_mask, ([], None))
    same = len(before) == len(readings) and all(
        old is new and then == now for (old, then), (new, now) in zip(before, readings, strict=True)
    )
    if found is None or not same:
        with torch.inference_mode(mode=False):  # a later call may save it for its backward
            found = TileMask.from_block_mask(block_mask, **sizes)
        _CONVERTED[block_mask] = readings, found
    return found


class _UnknownError(Exception):
    """A mask_mod reads something that may change without notice."""


def _read(value: Any, readings: list[Reading], seen: dict[int, tuple[int, object]]) -> None:
    """Adds what a mask is made of: its lists, its mask_mod, and all that this function captures or takes from globals.

    torch evaluates a mask_mod in every call, so a new value of any of these must be noticed.
    """
    if type(value) is not Tensor and isinstance(value, FIXED):
        readings.append((type(value), value))
    elif id(value) in seen:
        readings.append((None, seen[id(value)][0]))
    else:
        seen[id(value)] = len(seen), value  # kept alive, so that no other object gets its id
        # Objects of a subclass may have attributes and methods of their own.
        if type(value) in (Tensor, Parameter) and not value.is_inference():
            memory = value.data_ptr(), value.shape, value.stride()
            readings.append((weakref.ref(value), (value._version, memory)))  # noqa: SLF001
            _read(value.__dict__, readings, seen)
        elif type(value) in (tuple, list):
            readings.append((type(value), len(value)))
            for item in value:
                _read(item, readings, seen)
        elif type(value) is dict:
            _read([*value.keys(), *value.values()], readings, seen)
        elif isinstance(value, FunctionType):
            readings.append((value.__code__, None))
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            names = () if (value.__module__ or "").split(".")[0] == "torch" else _names(value.__code__)
            named = [value.__globals__[name] for name in names if name in value.__globals__]
            _read((*cells, *named, value.__defaults__, value.__kwdefaults__, value.__dict__), readings, seen)
        elif isinstance(value, ModuleType) and value.__name__.split(".")[0] in ("torch", "math"):
            readings.append((value, None))
        else:
            raise _UnknownError


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function and those defined inside it may take from globals."""
    if IMPORT in code.co_code[::2]:
        raise _UnknownError
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
