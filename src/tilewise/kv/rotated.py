"""What a decoder layer does between its projections and attention, in one call: q and k are normalised and rotated, k
and v are written into pages.

    x       = q or k of a token and head, in fp32
    x       = x / sqrt(mean(x^2) + norm_eps) * weight              RMSNorm, if norm_eps is given; weight if given
    (a, b)  = (a cos - b sin, b cos + a sin)                       for each pair of the first rotary_dim channels
    q       is rounded to its dtype
    k, v    are rounded to the dtype of the pages, or e4m3(x / scale)

Nothing is rounded between these steps. On an NVIDIA GPU this is one launch (backends/triton/rotating.py). Elsewhere,
and where torch records operations, the torch operations below compute the same, and writing.py and quantised.py write.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewise import dispatch, settings
from tilewise.backends.base import Rotating
from tilewise.canonical import contiguous_last
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.fp8.container import E4M3
from tilewise.fp8.rounding import encode
from tilewise.kv.quantised import append_quantised
from tilewise.kv.writing import write_rows
from tilewise.problem import MAX_HEAD_DIM
from tilewise.subclasses import check_class
from tilewise.validation.results import Apart, check_strides

__all__ = ["append_rotated", "rotary_table"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)
NAMES = ("q", "k", "v", "out", "k_pages", "v_pages")
# Rows that a CPU rotates at a time.
ROWS = 64


class Step(NamedTuple):
    """The tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    k_pages: Tensor
    v_pages: Tensor
    slots: Tensor
    positions: Tensor
    cos_sin: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None


def rotary_table(
    max_seqlen: int,
    rotary_dim: int,
    *,
    device: torch.device | str,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(max_seqlen, rotary_dim): cosines, then sines, of position * base^(-2 i / rotary_dim), as engines store them."""
    if rotary_dim < 2 or rotary_dim % 2:
        raise InvalidProblem("rotary_dim", "an even number from 2 on", rotary_dim, "Channels are rotated in pairs.")
    pairs = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu")
    angle = torch.arange(max_seqlen, dtype=torch.float64, device="cpu")[:, None] * float(base) ** (-pairs / rotary_dim)
    return torch.cat((angle.cos(), angle.sin()), -1).to(device=device, dtype=dtype)


def append_rotated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    interleaved: bool = False,
    norm_eps: float | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Normalise and rotate q and k, write k and v into pages, and return q.

    q            (total, num_heads, head_dim); k and v (total, num_kv_heads, head_dim and head_dim_v), any strides
    k_pages      (num_pages, page_size, num_kv_heads, dim) in fp32, bf16, fp16 or e4m3, as attention_paged takes them
    slots        int64, for each row its slot counted through all pages, or negative: not written. Rows past the last
                 entry are not written either. No two rows have the same slot
    positions    int32 or int64 (total,): rows of `cos_sin`
    cos_sin      (max_seqlen, rotary_dim): cosines of the rotary_dim / 2 pairs, then sines (see `rotary_table`).
                 Channels from rotary_dim on are not rotated
    interleaved  pairs are neighbours (GPT-J), else i and i + rotary_dim / 2 (NeoX, Llama)
    norm_eps     RMSNorm of each head of q and k with this epsilon; q_weight and k_weight (head_dim,) are optional
    k_scale      of e4m3 pages. fp32 with one element, or one per K/V head: given; beyond 448 * scale values saturate.
                 Or (num_pages, num_kv_heads), contiguous: scales that grow, as tilewise.kv.quantised defines them; the
                 rows of one page are then consecutive, in the order of their slots
    out          memory for the result; `out=q` computes in place

    A position outside of `cos_sin` is refused on a CPU. On a GPU reading positions would wait for the device: without
    TILEWISE_CHECK_VALUES=1 the rotated channels of such a row are NaN. Slots outside of the pages are refused likewise,
    and unchecked on a GPU.

        >>> table, pages = rotary_table(32, 16, device="cpu"), torch.zeros(2, 3, 4, 2, 16)
        >>> q, k, v = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
        >>> append_rotated(q, k, v, *pages, torch.arange(5), torch.arange(5), table).shape
        torch.Size([5, 4, 16])
    """
    given = (q, k, v, k_pages, v_pages, slots, positions, cos_sin, q_weight, k_weight, k_scale, v_scale, out)
    _check(*given, norm_eps)
    with torch.no_grad():
        in_place = out is not None and _are_same(out, q)
        made = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        step = Step(q, k, v, made, k_pages, v_pages, slots, positions, cos_sin, q_weight, k_weight, k_scale, v_scale)
        plain = not torch.compiler.is_compiling()
        if plain:
            _check_memory(step, in_place=in_place, is_new=out is None)
        backend = dispatch.serving(q.device.type) if plain and _takes(step) else None
        if isinstance(backend, Rotating):
            backend.append_rotated(_packed(step), interleaved=interleaved, norm_eps=norm_eps, in_place=in_place)
        else:
            _append(step, interleaved, norm_eps)
    return made


def _append(step: Step, interleaved: bool, norm_eps: float | None) -> None:
    """With torch operations: the definition."""
    count, slots, is_e4m3 = len(step.slots), step.slots, step.k_scale is not None
    new = torch.empty(step.k.shape, dtype=torch.float32 if is_e4m3 else step.k_pages.dtype, device=step.k.device)
    # On a CPU a few rows at a time, which stay in its caches.
    in_parts = step.q.device.type == "cpu" and not torch.compiler.is_compiling()
    for x, weight, result in ((step.q, step.q_weight, step.out), (step.k, step.k_weight, new)):
        size = ROWS if in_parts else max(1, len(x))
        for part in range(0, len(x), size):
            rows = slice(part, part + size)
            result[rows] = rotated(x[rows], step.positions[rows], step.cos_sin, interleaved, norm_eps, weight)
    k, v = new[:count], step.v[:count]
    if step.k_scale is None or step.v_scale is None:
        write_rows(k, v.to(step.v_pages.dtype), step.k_pages, step.v_pages, slots)
    elif step.k_scale.dim() == 2:
        append_quantised((k, v.float()), (step.k_pages, step.v_pages), (step.k_scale, step.v_scale), slots)
    else:
        k, v = (encode(x.float(), 1.0 / s.reshape(-1, 1)) for x, s in ((k, step.k_scale), (v, step.v_scale)))
        write_rows(k, v, step.k_pages, step.v_pages, slots)


def rotated(
    x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool, norm_eps: float | None, weight: Tensor | None
) -> Tensor:
    """Rows of q or k, normalised and rotated, in fp32 (or fp64)."""
    wide, rotary_dim = torch.float64 if x.dtype == torch.float64 else torch.float32, cos_sin.shape[1]
    x = x.to(wide)
    if norm_eps is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)
        x = x if weight is None else x.mul_(weight)
    if not len(cos_sin):
        cos_sin, positions = cos_sin.new_empty((1, rotary_dim)), torch.full_like(positions, -1)
    known = (positions >= 0) & (positions < len(cos_sin))
    turns = cos_sin[positions.clamp(0, len(cos_sin) - 1).long()].to(wide)
    cos, sin = torch.where(known[:, None], turns, torch.nan)[:, None].chunk(2, -1)
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    a, b = (a * cos).addcmul_(b, sin, value=-1), (b * cos).addcmul_(a, sin)
    pairs = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((pairs, rest), -1) if rest.shape[-1] else pairs


def _packed(step: Step) -> Step:
    """What the kernel takes: a contiguous last dimension, and scales with one entry per head."""
    q, k, v, table = map(contiguous_last, (step.q, step.k, step.v, step.cos_sin))
    heads = step.k_pages.shape[2]
    k_scale, v_scale = (
        s.reshape(-1).expand(heads) if s is not None and s.dim() < 2 else s for s in (step.k_scale, step.v_scale)
    )
    slots, positions = step.slots.contiguous(), step.positions.contiguous()
    q_weight, k_weight = (None if w is None else w.contiguous() for w in (step.q_weight, step.k_weight))
    return Step(
        q, k, v, step.out, step.k_pages, step.v_pages, slots, positions, table, q_weight, k_weight, k_scale, v_scale
    )


def _takes(step: Step) -> bool:
    """Whether a kernel can take these tensors."""
    if step.q.dtype == torch.float64 or step.k_pages.dtype == torch.float64:
        return False
    plain = all(type(t) in (Tensor, Parameter) for t in step if t is not None)
    return plain and all(_is_dense(t) for t in (step.out, step.k_pages, step.v_pages))


def _is_dense(tensor: Tensor) -> bool:
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1


def _are_same(out: Tensor, q: Tensor) -> bool:
    """Whether `out` is the memory of q, element by element."""
    if torch.compiler.is_compiling():
        return out is q
    return out.data_ptr() == q.data_ptr() and out.stride() == q.stride() and out.shape == q.shape


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
    norm_eps: float | None,
) -> None:
    """Shapes, dtypes and devices."""
    named = {
        "q": q, "k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages, "slots": slots, "positions": positions,
        "cos_sin": cos_sin, "q_weight": q_weight, "k_weight": k_weight, "k_scale": k_scale, "v_scale": v_scale,
        "out": out,
    }  # fmt: skip
    device = q.device
    recorded = torch.is_grad_enabled()
    for name, tensor in named.items():
        if tensor is None:
            continue
        check_class(name, tensor)
        if tensor.device != device:
            raise InvalidProblem(name, f"a tensor on {device} as q is", tensor.device, "Move it with .to().")
        # Weights of a model may require gradients where nothing is recorded of them.
        if recorded and tensor.requires_grad:
            raise Unsupported(f"{name} requires a gradient, and append_rotated has none: call it under torch.no_grad()")
    for name, tensor, dims in (("q", q, 3), ("k", k, 3), ("v", v, 3), ("k_pages", k_pages, 4), ("v_pages", v_pages, 4)):
        if tensor.dim() != dims:
            wanted = "(total, heads, dim)" if dims == 3 else "(num_pages, page_size, num_kv_heads, dim)"
            raise InvalidProblem(name, wanted, tuple(tensor.shape), "Rows are packed, without a batch dimension.")
    total, dim = q.shape[0], q.shape[2]
    num_pages, page_size, heads = k_pages.shape[:3]
    shapes: tuple[tuple[str, Tensor | None, tuple[int, ...]], ...] = (
        ("k", k, (total, heads, dim)),
        ("v", v, (total, heads, v.shape[2])),
        ("k_pages", k_pages, (num_pages, page_size, heads, dim)),
        ("v_pages", v_pages, (num_pages, page_size, heads, v.shape[2])),
        ("positions", positions, (total,)),
        ("q_weight", q_weight, (dim,)),
        ("k_weight", k_weight, (dim,)),
        ("out", out, tuple(q.shape)),
    )
    for name, part, shape in shapes:
        if part is not None and tuple(part.shape) != shape:
            raise InvalidProblem(name, f"shape {shape}, by q, v and k_pages", tuple(part.shape), "See append_rotated.")
    if not 1 <= max(dim, v.shape[2]) <= MAX_HEAD_DIM or min(dim, v.shape[2]) < 1:
        raise InvalidProblem("head_dim", f"1 to {MAX_HEAD_DIM}", (dim, v.shape[2]), "Split the heads.")
    if slots.dim() != 1 or len(slots) > total:
        raise InvalidProblem("slots", f"(at most {total},), one per row", tuple(slots.shape), "Cut the padding off.")
    if slots.dtype != torch.int64:
        raise InvalidProblem("slots", "an int64 tensor", slots.dtype, "Convert it with .long().")
    if positions.dtype not in INTEGERS:
        raise InvalidProblem("positions", "an int32 or int64 tensor", positions.dtype, "Convert it with .long().")
    if cos_sin.dim() != 2 or cos_sin.shape[1] % 2 or not 2 <= cos_sin.shape[1] <= dim:
        expected = f"(max_seqlen, rotary_dim), rotary_dim even and at most head_dim = {dim}"
        raise InvalidProblem("cos_sin", expected, tuple(cos_sin.shape), "Cosines of each pair, then sines.")
    _check_dtypes(named)
    if norm_eps is None and (q_weight is not None or k_weight is not None):
        raise InvalidProblem("norm_eps", "a number, as weights are given", None, "Pass the epsilon of the RMSNorm.")
    if norm_eps is not None and (isinstance(norm_eps, (bool, Tensor)) or not norm_eps >= 0.0):
        raise InvalidProblem("norm_eps", "None or a number >= 0", norm_eps, "Pass the epsilon of the RMSNorm.")
    _check_scales(k_pages, v_pages, k_scale, v_scale)
    if not torch.compiler.is_compiling() and (device.type == "cpu" or settings.current().check_values):
        _check_within("positions", positions, 0, len(cos_sin), "the rows of cos_sin")
        _check_within("slots", slots, None, num_pages * page_size, "the slots of the pages")


def _check_dtypes(named: dict[str, Tensor | None]) -> None:
    q, k_pages = named["q"], named["k_pages"]
    assert q is not None
    assert k_pages is not None
    for name, tensor in named.items():
        if tensor is None or name in ("slots", "positions"):
            continue
        expected: tuple[torch.dtype, ...] = DTYPES
        if name in ("k", "v", "out"):
            expected = (q.dtype,)
        elif name in ("k_pages", "v_pages"):
            expected = (k_pages.dtype,) if k_pages.dtype in (*DTYPES, E4M3) else (*DTYPES, E4M3)
        elif name in ("k_scale", "v_scale"):
            expected = (torch.float32,)
        if tensor.dtype not in expected:
            wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in expected)
            raise InvalidProblem(
                name, wanted, tensor.dtype, "Convert it: q, k, v and out have one dtype, pages another."
            )


def _check_scales(pages: Tensor, v_pages: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    is_e4m3, heads = pages.dtype == E4M3, pages.shape[2]
    both = {"k_scale": k_scale, "v_scale": v_scale}
    for name, scale in both.items():
        if (scale is not None) != is_e4m3:
            expected = "the scales of e4m3 pages" if is_e4m3 else f"None, as pages are {pages.dtype}"
            raise InvalidProblem(name, expected, "None" if scale is None else "a tensor", "See append_rotated.")
        if scale is None:
            continue
        grows = tuple(scale.shape) == (len(pages), heads) and scale.is_contiguous()
        if not grows and (scale.dim() > 1 or scale.numel() not in (1, heads)):
            expected = f"one scale, one for each of {heads} heads, or contiguous {(len(pages), heads)}"
            raise InvalidProblem(name, expected, tuple(scale.shape), "Scales are given, or grow with each page.")
    if k_scale is None or v_scale is None:
        return
    if (k_scale.dim() == 2) != (v_scale.dim() == 2):
        shapes = f"{tuple(k_scale.shape)} and {tuple(v_scale.shape)}"
        raise InvalidProblem("v_scale", "scales of the kind of k_scale", shapes, "Both are given, or both grow.")
    if k_scale.dim() == 2 and not (_is_dense(pages) and _is_dense(v_pages)):
        strides = f"strides {pages.stride()} and {v_pages.stride()}"
        raise InvalidProblem(
            "k_pages, v_pages", "a last stride of 1", strides, "Growing scales need adjacent channels."
        )


def _check_within(name: str, numbers: Tensor, least: int | None, end: int, what: str) -> None:
    if not len(numbers):
        return
    low, high = (int(n) for n in torch.aminmax(numbers))
    if high >= end or (least is not None and low < least):
        got = high if high >= end else low
        raise InvalidProblem(name, f"numbers below {end}, {what}", got, f"Check the {name}, or make more of them.")


def _check_memory(step: Step, *, in_place: bool, is_new: bool) -> None:
    """The result has memory of its own, or that of q."""
    if is_new:
        return
    check_strides(step.out)
    # In place, q and k may be parts of one projection: rows of k then lie between those of q.
    if not in_place:
        Apart(NAMES, step[: len(NAMES)]).check(step[: len(NAMES)])
