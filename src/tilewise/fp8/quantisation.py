"""Quantising, defined in plain torch; on a GPU fused kernels compute the same bits.

For a group of values that share a scale:

    amax  = the largest finite magnitude, at least 2^-96
    scale = amax / 448                                            fp32, rounded to nearest
    data  = e4m3(clamp(x * (448 / amax), -448, 448))              fp32 products, e4m3 to nearest, ties to even;
                                                                  of rotated rows as rounding.py says

e4m3 numbers from 2^-9 to 448 thus cover magnitudes from scale / 512 to amax; values below 2^-10 of the scale become 0.

With a scale of its own a group cannot overflow. With given scales (a calibrated `scale=`) finite values beyond them
saturate at +-448 * scale. NaN and infinities have no e4m3 number and become NaN, which attention carries into the rows
that see it, while the scale of their group comes from its finite values; `nonfinite="raise"` refuses them instead, at
the price of a device synchronisation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from tilewise import settings
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.fp8 import rounding
from tilewise.fp8.container import BLOCK, E4M3, E4M3_MAX, Fp8Layout, Fp8Tensor, Granularity
from tilewise.fp8.rotation import rotate
from tilewise.memory import check_allocated
from tilewise.subclasses import check_class
from tilewise.totals import check_totals, longest_of

__all__ = ["quantize", "quantize_pages"]

# Range of a given scale: it and its inverse are normal fp32 numbers.
SCALE_RANGE = (1e-37, 1e37)
SOURCES = (torch.float32, torch.bfloat16, torch.float16)
# Tensor types that are plain memory.
PLAIN = (Tensor, torch.nn.Parameter)


def quantize(
    x: Tensor,
    *,
    granularity: Literal["tensor", "head", "block"] = "head",
    rotation: bool = False,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    block: int | None = None,
    scale: Tensor | float | None = None,
    nonfinite: Literal["nan", "raise"] = "nan",
) -> Fp8Tensor:
    """q, k or v in e4m3, with one scale per tensor, per (sequence, head), or per `block` rows of a head.

    x is (batch, heads, seqlen, dim), with `layout="bshd"` (batch, seqlen, heads, dim), or packed (total, heads, dim)
    with `cu_seqlens`; rows past the last sequence become 0 and do not affect scales. `max_seqlen`, the longest length,
    keeps block scales short where reading it would synchronise. `rotation` rotates the rows first: use it for q and k,
    or for neither. `scale` is a calibrated one (a number, or fp32 that broadcasts to (batch, heads, blocks)) instead of
    the tensor's own. Raises for tensors that require a gradient: rounding to e4m3 has none. `cu_seqlens` and scales are
    checked as in `attention_varlen`: contents on a CPU, on a GPU with TILEWISE_CHECK_VALUES=1.

        >>> k = quantize(torch.randn(1, 2, 300, 64), granularity="block", rotation=True)
        >>> k.dequantize().shape
        torch.Size([1, 2, 300, 64])
    """
    _check_call(x, granularity, layout, cu_seqlens, block, nonfinite)
    if not isinstance(rotation, bool):
        raise InvalidProblem("rotation", "True or False", repr(rotation), "Pass a Python bool.")
    if rotation and x.shape[-1] > 1 << rounding.INDEX_BITS:
        fix = "Quantise wider rows, such as latents, without rotation."
        expected = f"False for rows of more than {1 << rounding.INDEX_BITS} columns"
        raise InvalidProblem("rotation", expected, x.shape[-1], fix)
    rows = int(block or BLOCK) if granularity == "block" else None
    kind: Fp8Layout = layout if cu_seqlens is None else "packed"
    if cu_seqlens is not None:
        cu_seqlens, max_seqlen = _checked_totals(x, cu_seqlens, max_seqlen)
    if nonfinite == "raise" and not bool(torch.isfinite(_inside(x, cu_seqlens)).all()):
        fix = 'Find where it came from, or let it become NaN with nonfinite="nan".'
        raise InvalidProblem("x", "finite numbers", "NaN or infinity", fix)
    given = None if scale is None else _checked_scale(x, scale)
    options: dict[str, Any] = {"rotation": rotation, "given": given, "max_seqlen": max_seqlen}
    # Where torch records operations, it records these below.
    kernel = None if type(x) not in PLAIN or torch.compiler.is_compiling() else _kernel(x.device.type)
    made = None if kernel is None else kernel(x, granularity, rows, kind, cu_seqlens, **options)
    if made is None:
        with torch.no_grad():
            made = _quantized(x, granularity, rows, kind, cu_seqlens, **options)
    data, found = made
    dtype = torch.float16 if x.dtype == torch.float16 else torch.bfloat16
    return Fp8Tensor(data, found, cast("Granularity", granularity), kind, rows, rotation, dtype)


def quantize_pages(pages: Tensor, *, dtype: torch.dtype = E4M3) -> Fp8Tensor:
    """Pages (num_pages, page_size, heads, dim) of keys or values in e4m3, with one scale per (page, head), or with
    `dtype=torch.int8` in int8, with one per (token, head): see `rounding.encode_rows`.

    >>> quantize_pages(torch.randn(8, 16, 2, 64)).scale.shape
    torch.Size([8, 2, 1])
    >>> quantize_pages(torch.randn(8, 16, 2, 64), dtype=torch.int8).scale.shape
    torch.Size([8, 2, 16])
    """
    _check_source("pages", pages)
    if dtype not in (E4M3, torch.int8):
        raise InvalidProblem("dtype", "torch.float8_e4m3fn or torch.int8", dtype, "Plain pages need no quantising.")
    if pages.dim() != 4:
        fix = "Pages are (num_pages, page_size, heads, dim)."
        raise InvalidProblem("pages", "4 dimensions", f"shape {tuple(pages.shape)}", fix)
    made_from = torch.float16 if pages.dtype == torch.float16 else torch.bfloat16
    if dtype == torch.int8:
        codes, scales = rounding.encode_rows(pages.detach())
        return Fp8Tensor(
            codes.contiguous(), scales.transpose(1, 2).contiguous(), "token", "paged", block=1, dtype=made_from
        )
    values = pages.detach().float().transpose(1, 2)
    data, scale = _dense(_Rows(values), "head", None, None)
    return Fp8Tensor(data.transpose(1, 2).contiguous(), scale, "page", "paged", dtype=made_from)


@functools.cache
def _kernel(device_type: str) -> Callable[..., tuple[Tensor, Tensor] | None] | None:
    """`Serving.quantize` of such devices, if there is one. Cached, because an import in each call takes long."""
    from tilewise import dispatch

    backend = dispatch.serving(device_type)
    return None if backend is None else backend.quantize


def _quantized(
    x: Tensor,
    granularity: str,
    block: int | None,
    layout: Fp8Layout,
    cu_seqlens: Tensor | None,
    *,
    rotation: bool,
    given: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor]:
    """(data, scale) with torch operations; packed rows sequence by sequence, as dense ones with one batch entry."""
    if cu_seqlens is None:
        heads_first = x.transpose(1, 2) if layout == "bshd" else x
        data, scale = _dense(_prepared(heads_first, rotation), granularity, block, given)
        return (data.transpose(1, 2) if layout == "bshd" else data).contiguous(), scale
    bounds = cu_seqlens.tolist()
    rows = [_prepared(x[a:b].transpose(0, 1)[None], rotation) for a, b in itertools.pairwise(bounds)]
    longest = max([0, *(each.values.shape[2] for each in rows)]) if max_seqlen is None else max_seqlen
    shape = (len(rows), x.shape[1], -(-longest // block) if block else 1)
    scale = x.new_full(shape, rounding.AMAX_FLOOR / E4M3_MAX, dtype=torch.float32)
    amax: Tensor | None = None
    if given is not None:
        given = scale = rounding.broadcast_scale(given, shape)
    elif granularity == "tensor":
        amax = torch.stack([x.new_zeros(1, 1, 1).float(), *(_amax(r.values, "tensor", None, 1) for r in rows)]).amax(0)
        scale = rounding.scale_of(amax).expand(shape)
    data = torch.zeros(x.shape, dtype=torch.uint8, device=x.device).view(E4M3)
    for i, each in enumerate(rows):
        used = -(-each.values.shape[2] // block) if block else 1
        piece, found = _dense(each, granularity, block, None if given is None else given[i : i + 1, :, :used], amax)
        data[bounds[i] : bounds[i + 1]] = piece[0].transpose(0, 1)
        if given is None and amax is None:
            scale[i, :, :used] = found[0]
    return data, scale


class _Rows(NamedTuple):
    """Heads-first fp32 (batch, heads, rows, dim): the values to round, and the values before rotation, if any."""

    values: Tensor
    before: Tensor | None = None

    def encoded(self, inverse: Tensor) -> Tensor:
        """The rows in e4m3."""
        if self.before is None:
            return rounding.encode(self.values, inverse)
        return rounding.encode_rotated(self.before, self.values, inverse)


def _prepared(heads_first: Tensor, rotation: bool) -> _Rows:
    return _Rows(rotate(heads_first), heads_first) if rotation else _Rows(heads_first.float())


def _dense(
    rows: _Rows, granularity: str, block: int | None, given: Tensor | None, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """e4m3 and (batch, heads, blocks) scales: the given ones, those of `amax`, or those of the rows themselves."""
    values = rows.values
    batch, heads, length, _ = values.shape
    blocks = -(-length // block) if block else 1
    if given is not None:
        scale = rounding.broadcast_scale(given, (batch, heads, blocks))
        inverse = torch.ones_like(scale) / scale
    else:
        amax = _amax(values, granularity, block, blocks) if amax is None else amax
        scale, inverse = (f(amax).expand(batch, heads, blocks) for f in (rounding.scale_of, rounding.inverse_of))
    index = torch.arange(length, device=values.device) // (block or max(length, 1))
    return rows.encoded(inverse[:, :, index, None]), scale


def _amax(values: Tensor, granularity: str, block: int | None, blocks: int) -> Tensor:
    sizes = torch.where(torch.isfinite(values), values.abs(), 0.0)
    if granularity == "tensor":
        return (sizes.amax() if sizes.numel() else sizes.new_zeros(())).reshape(1, 1, 1)
    per_row = sizes.amax(-1) if sizes.shape[-1] else sizes.new_zeros(sizes.shape[:-1])
    if block is None:
        return per_row.amax(-1, keepdim=True) if per_row.shape[-1] else per_row.new_zeros(*per_row.shape[:2], 1)
    missing = blocks * block - per_row.shape[-1]
    padded: Tensor = torch.nn.functional.pad(per_row, (0, missing))
    grouped: Tensor = padded.unflatten(-1, (blocks, block))
    return grouped.amax(-1)


def _inside(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return x if cu_seqlens is None else x[: int(cu_seqlens[-1])]


def _check_call(
    x: Any, granularity: str, layout: str, cu_seqlens: Tensor | None, block: int | None, nonfinite: str
) -> None:
    _check_source("x", x)
    kinds, layouts = ("tensor", "head", "block"), ("bhsd", "bshd")
    choices = (("granularity", granularity, kinds), ("layout", layout, layouts))
    for name, value, allowed in (*choices, ("nonfinite", nonfinite, ("nan", "raise"))):
        if value not in allowed:
            raise InvalidProblem(name, "one of " + ", ".join(map(repr, allowed)), repr(value), "See its docstring.")
    rank = 4 if cu_seqlens is None else 3
    if x.dim() != rank:
        fix = "Packed rows come with cu_seqlens, dense tensors without."
        raise InvalidProblem("x", f"{rank} dimensions", f"shape {tuple(x.shape)}", fix)
    if block is not None and (granularity != "block" or not _is_count(block) or block < 1):
        fix = 'It is the number of rows that share a scale with granularity="block".'
        raise InvalidProblem("block", "a positive number of rows", block, fix)


def _check_source(name: str, x: Any) -> None:
    if not isinstance(x, Tensor) or x.dtype not in SOURCES:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InvalidProblem(name, "a tensor of float32, bfloat16 or float16", got, "Convert it first.")
    if x.dim() and not x.is_nested and x.shape[-1] == 0:
        raise InvalidProblem(name, "a head_dim of at least 1", f"shape {tuple(x.shape)}", "Check its last dimension.")
    if x.is_nested or x.layout != torch.strided:
        got = "a nested one" if x.is_nested else f"layout {x.layout}"
        raise InvalidProblem(name, "a dense tensor", got, "Convert it, or pass packed rows with cu_seqlens.")
    check_class(name, x)
    check_allocated((name,), (x,))
    if x.requires_grad and torch.is_grad_enabled():
        raise Unsupported(
            "quantising to e4m3 has no gradient: detach the tensor, quantise under torch.no_grad(), "
            "or train with bf16 tensors"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _checked_totals(x: Tensor, cu_seqlens: Any, max_seqlen: Any) -> tuple[Tensor, int | None]:
    """(cu_seqlens, max_seqlen) by the rules of `attention_varlen`, which say when contents are read."""
    fix = "int32 or int64 running totals from 0, as attention_varlen takes them."
    if not isinstance(cu_seqlens, Tensor):
        raise InvalidProblem("cu_seqlens", "a tensor", type(cu_seqlens).__name__, fix)
    check_class("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or not len(cu_seqlens):
        got = f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        raise InvalidProblem("cu_seqlens", "integers (batch + 1,)", got, fix)
    if cu_seqlens.device != x.device:
        fix = f"Move it with .to({str(x.device)!r})."
        raise InvalidProblem("cu_seqlens", f"a tensor on {x.device} as x is", cu_seqlens.device, fix)
    check_allocated(("cu_seqlens",), (cu_seqlens,))
    if max_seqlen is not None:
        if not _is_count(max_seqlen) or max_seqlen < 0:
            fix = "Pass the length of the longest sequence."
            raise InvalidProblem("max_seqlen", "None or an integer >= 0", repr(max_seqlen), fix)
        max_seqlen = int(max_seqlen)
    if _are_read(cu_seqlens):
        entries = cu_seqlens.tolist()
        check_totals("cu_seqlens", entries, len(x))
        longest_of("max_seqlen", "cu_seqlens", entries, max_seqlen)
    return cu_seqlens.to(torch.int32), max_seqlen


def _checked_scale(x: Tensor, scale: Any) -> Tensor:
    """A calibrated scale as a tensor on x's device."""
    least, most = SCALE_RANGE
    expected = f"each from {least} to {most}"
    fix = "A scale is what e4m3 numbers are multiplied with: the largest magnitude / 448."
    if not isinstance(scale, Tensor):
        number = scale.item() if isinstance(scale, np.generic) else scale
        if not isinstance(number, int | float) or isinstance(number, bool) or not least <= number <= most:
            raise InvalidProblem("scale", f"a tensor or a number, {expected}", repr(scale), fix)
        return torch.full((), number, dtype=torch.float32, device=x.device)
    check_class("scale", scale)
    if scale.dtype != torch.float32 or scale.device != x.device or scale.layout != torch.strided:
        got = f"{scale.dtype} on {scale.device}, layout {scale.layout}"
        raise InvalidProblem("scale", f"a dense float32 tensor on {x.device} as x is", got, "Convert it with .to().")
    if scale.requires_grad and torch.is_grad_enabled():
        raise Unsupported("quantising to e4m3 has no gradient, not for its scale either: pass scale.detach()")
    check_allocated(("scale",), (scale,))
    # NaN compares false.
    if _are_read(scale) and not bool(((scale >= least) & (scale <= most)).all()):
        raise InvalidProblem("scale", expected, f"{scale.amin().item()} to {scale.amax().item()}", fix)
    return scale


def _are_read(tensor: Tensor) -> bool:
    """Whether contents are validated: free on a CPU, a synchronisation on a GPU; a traced tensor has none."""
    if type(tensor) not in PLAIN or tensor.is_meta or torch.compiler.is_compiling():
        return False
    return tensor.device.type == "cpu" or settings.current().check_values
