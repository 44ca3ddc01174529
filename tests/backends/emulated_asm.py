"""What the kernels' inline PTX computes, for the stand-in for Gluon."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

EIGHT, MILLION, HALF = 0x41000000, 0x49800000, 0x47000000  # the bits of 8.0, of 2^20 and of 2^15


SHORT = {"bf16": torch.bfloat16, "f16": torch.float16}


def computed(text: str, args: list[Any], dtype: Any = None) -> Any:
    """The results of a piece of assembly; one that computes nothing gives its first argument back."""
    if "shfl" in text:
        if f"{EIGHT:#x}" in text:
            return growth(args[0])
        return exponents(args[0], HALF, 7) if f"{HALF:#x}" in text else exponents(args[0], MILLION, 0)
    if "FLOATS" in text:
        return largest(*args)
    if found := re.match(r"cvt\.rn\.(b?f16)x2\.f32", text):
        high, low = (x.to(SHORT[found.group(1)]).view(torch.int16).int() for x in args)
        return (high << 16) | (low & 0xFFFF)
    if text.startswith("mov.b32 {$0, $1}"):
        return tuple(bits.to(torch.int16).view(t) for bits, t in zip((args[0], args[0] >> 16), dtype, strict=True))
    if "sub.rn.f16x2" in text:
        return args[0].to(torch.float16)
    if "lop3" in text:
        return units_counted(args[0], args[1])
    if "selp.f32" in text:
        return only_seen(*args)
    if found := re.search(r"DONE; (mul|sub)\.f32", text):
        return applied(found.group(1), *args)
    if found := re.match(r"shr\.u32 \$0, \$1, (\d+);", text):
        return args[0] >> int(found.group(1))
    if text.startswith("mul.rn.f32"):
        return args[0] * args[1]
    known = {"ex2": torch.exp2, "lg2": torch.log2, "rcp": torch.reciprocal}
    if text[:3] not in known:
        return args[0]
    result = known[text[:3]](args[0])
    return torch.where(result.abs() < torch.finfo(torch.float32).tiny, 0.0, result)  # .ftz: no subnormals


def largest(x: Tensor, floor: Tensor) -> Tensor:
    """Maxima of the rows of quads that a thread has; in a warp of 16 rows without negative floors, of bits."""
    by_bits = x.view(torch.int32).amax((1, 3), keepdim=True).contiguous().view(torch.float32)
    warps = (floor < 0).reshape(4, 16, -1).any(2).any(1)
    compares_floats = warps.repeat_interleave(16).reshape(-1, 1, 1, 1)
    return torch.where(compares_floats, x.amax((1, 3), keepdim=True), by_bits).expand(x.shape)


def only_seen(x: Tensor, words: Tensor) -> Tensor:
    """Scores in quads (rows, groups of 8 columns, threads, 2) where a thread's bit is 1, elsewhere -inf."""
    group, pair = torch.arange(x.shape[1])[:, None, None], torch.arange(2)
    return torch.where((words >> (group % 4 * 8 + pair)) & 1 != 0, x, -torch.inf)


def units_counted(x: Tensor, units: Tensor) -> Tensor:
    """The bits of 3 + x * units, which count 2^-22, and where these are not between 2 and 4 those of two additions."""
    product = x.double() * units.double()
    quick = (product + 3.0).float()
    coarse = (product + 1536.0).float()
    fine = (product + (1539.0 - coarse).double()).float()
    exact = coarse.view(torch.int32).long() * 512 + fine.view(torch.int32).long() + 2**31
    return torch.where((quick >= 2) & (quick < 4), quick.view(torch.int32), exact.to(torch.int32))


def growth(top: Tensor) -> tuple[Tensor, Tensor]:
    """(growth, 2^-growth) of the rows of [64, 4]; the registers of a thread are those of rows 8 apart."""
    most = top.amax(1, keepdim=True).expand(top.shape)
    grown = torch.where(most > EIGHT, most, 0).contiguous().view(torch.float32)
    return grown, torch.exp2(-grown)


def exponents(total: Tensor, bound: int, kept: int) -> tuple[Tensor, Tensor]:
    """(e, 2^-e) of the rows of [64, 4], as `growth`: the exponents, less `kept`, of sums that are over a bound."""
    most = total.amax(1, keepdim=True).expand(total.shape)
    e = torch.where(most > bound, (most >> 23).clamp(max=253) - 127 - kept, 0).float()
    return e, torch.exp2(-e)


def applied(operation: str, x: Tensor, y: Tensor) -> Tensor:
    """Rows of x (in quads) with those of y; a warp of 16 rows whose y are neutral keeps its x."""
    neutral = 1.0 if operation == "mul" else 0.0
    warps = (y != neutral).reshape(4, 16, -1).any(2).any(1)
    changes = warps.repeat_interleave(16).reshape(-1, *[1] * (x.dim() - 1))
    return torch.where(changes, x * y if operation == "mul" else x - y, x)
