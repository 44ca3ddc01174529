"""Validates the arguments of `append_rotated`. What shapes, strides, dtypes and devices say is cached per signature."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewise import settings
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.fp8.container import E4M3
from tilewise.fp8.quantisation import SCALE_RANGE
from tilewise.memory import check_allocated, extent, overlap, overlaps_itself
from tilewise.problem import MAX_HEAD_DIM
from tilewise.subclasses import check_class
from tilewise.units import counted
from tilewise.validation.results import Disjoint, check_strides

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)
OPTIONAL = ("out", "q_weight", "k_weight", "k_scale", "v_scale")
# Tensors between which `out` may not lie.
APART = 6
MAX_SIGNATURES = 512


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


class View(NamedTuple):
    """What is known of a tensor without its contents."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool


def check_arguments(tensors: Sequence[Any], norm_eps: Any) -> None:
    """Raise unless `tensors`, in the order of Step, fit together. `out` may be None."""
    if norm_eps is not None and (not isinstance(norm_eps, (int, float)) or isinstance(norm_eps, bool)):
        raise InvalidProblem("norm_eps", "None or a number >= 0", repr(norm_eps), "Pass the epsilon of the RMSNorm.")
    views: list[tuple[Any, ...] | None] = []
    for i, t in enumerate(tensors):
        if t.__class__ is not Tensor and t.__class__ is not Parameter:
            if t is None and Step._fields[i] in OPTIONAL:
                views.append(None)
                continue
            if not isinstance(t, Tensor):
                raise InvalidProblem(Step._fields[i], "a tensor", type(t).__name__, "See append_rotated.")
            check_class(Step._fields[i], t)
        views.append((t.shape, t.stride(), t.dtype, t.device, t.requires_grad))
    compiling = torch.compiler.is_compiling()
    check = _check_views.__wrapped__ if compiling else _check_views
    check(tuple(views), norm_eps, torch.is_grad_enabled())
    check_allocated(Step._fields, tensors)
    if not compiling and (tensors[0].device.type == "cpu" or settings.current().check_values):
        given = Step(*tensors)
        _check_within("positions", given.positions, 0, len(given.cos_sin), "the rows of cos_sin")
        num_slots = given.k_pages.shape[0] * given.k_pages.shape[1]
        _check_within("slots", given.slots, None, num_slots, "the slots of the pages")
        if given.k_pages.dtype == E4M3 and given.k_scale is not None and given.v_scale is not None:
            if given.k_scale.dim() > 1:
                _check_order(given.slots, given.k_pages.shape[1])
            else:
                _check_given_scales(given.k_scale, given.v_scale)


@functools.lru_cache(maxsize=MAX_SIGNATURES)
def _check_views(views: tuple[tuple[Any, ...] | None, ...], norm_eps: float | None, recorded: bool) -> None:
    """Shapes, dtypes and devices. `recorded`: autograd would record the call."""
    given = {name: View(*view) for name, view in zip(Step._fields, views, strict=True) if view is not None}
    q, k_pages, v = given["q"], given["k_pages"], given["v"]
    for name, view in given.items():
        if view.device != q.device:
            raise InvalidProblem(name, f"a tensor on {q.device} as q is", view.device, "Move it with .to().")
        if recorded and view.needs_grad:
            raise Unsupported(f"{name} requires a gradient, and append_rotated has none: call it under torch.no_grad()")
    for name, dims in (("q", 3), ("k", 3), ("v", 3), ("k_pages", 4), ("v_pages", 4)):
        if len(given[name].shape) != dims:
            wanted = "(total, heads, dim)" if dims == 3 else "(num_pages, page_size, num_kv_heads, dim)"
            raise InvalidProblem(name, wanted, given[name].shape, "Rows are packed, without a batch dimension.")
    total, _, dim = q.shape
    num_pages, page_size, heads, _ = k_pages.shape
    dim_v = v.shape[2]
    shapes: dict[str, tuple[int, ...]] = {
        "k": (total, heads, dim),
        "v": (total, heads, dim_v),
        "k_pages": (num_pages, page_size, heads, dim),
        "v_pages": (num_pages, page_size, heads, dim_v),
        "positions": (total,),
        "q_weight": (dim,),
        "k_weight": (dim,),
        "out": tuple(q.shape),
    }
    for name, shape in shapes.items():
        if name in given and tuple(given[name].shape) != shape:
            got = tuple(given[name].shape)
            raise InvalidProblem(name, f"shape {shape}, by q, v and k_pages", got, "See append_rotated.")
    if not (1 <= dim <= MAX_HEAD_DIM and 1 <= dim_v <= MAX_HEAD_DIM):
        raise InvalidProblem("head_dim", f"1 to {MAX_HEAD_DIM}", (dim, dim_v), "Attention takes no wider heads.")
    slots, table = given["slots"].shape, given["cos_sin"].shape
    if len(slots) != 1 or slots[0] > total:
        raise InvalidProblem("slots", f"(at most {total},), one per row", tuple(slots), "Cut the padding off.")
    if len(table) != 2 or table[1] % 2 or not 2 <= table[1] <= dim:
        expected = f"(max_seqlen, rotary_dim), rotary_dim even and at most head_dim = {dim}"
        raise InvalidProblem("cos_sin", expected, tuple(table), "Cosines of each pair, then sines.")
    _check_dtypes(given)
    if norm_eps is None and ("q_weight" in given or "k_weight" in given):
        raise InvalidProblem("norm_eps", "a number, as weights are given", None, "Pass the epsilon of the RMSNorm.")
    if norm_eps is not None and not norm_eps >= 0.0:
        raise InvalidProblem("norm_eps", "None or a number >= 0", norm_eps, "Pass the epsilon of the RMSNorm.")
    _check_scales(given)


def _check_dtypes(given: dict[str, View]) -> None:
    pages = given["k_pages"].dtype
    expected: dict[str, tuple[torch.dtype, ...]] = dict.fromkeys(given, DTYPES)
    expected |= dict.fromkeys(("k", "v", "out"), (given["q"].dtype,))
    expected |= {
        "k_pages": (*DTYPES, E4M3, torch.int8),
        "v_pages": (pages,),
        "slots": (torch.int64,),
        "positions": INTEGERS,
    }
    expected |= dict.fromkeys(("k_scale", "v_scale"), (torch.float32,))
    for name, view in given.items():
        if view.dtype not in expected[name]:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected[name])
            fix = "Convert it with .to(): q, k, v and out have one dtype, the pages another."
            raise InvalidProblem(name, wanted, view.dtype, fix)


def _check_scales(given: dict[str, View]) -> None:
    """Scales are given, or of pages and then written with the rows."""
    num_pages, page_size, heads, _ = given["k_pages"].shape
    pages = given["k_pages"].dtype
    constant: tuple[tuple[int, ...], ...] = ((), (1,), (heads,)) if pages == E4M3 else ()
    written: tuple[int, ...] = (num_pages, heads) if pages == E4M3 else (num_pages, heads, page_size)
    for name in ("k_scale", "v_scale"):
        view = given.get(name)
        if pages not in (E4M3, torch.int8):
            if view is not None:
                raise InvalidProblem(name, f"None, as pages are {pages}", "a tensor", "See append_rotated.")
        elif view is None or (tuple(view.shape) not in constant and not _is_contiguous(view, written)):
            kinds = f"one scale, one for each of {counted(heads, 'head')}, or contiguous" if constant else "contiguous"
            got = None if view is None else f"{tuple(view.shape)}, strides {view.strides}"
            codes = "e4m3" if constant else "int8"
            fix = "They are given, or grow with each page." if constant else "They are written with the rows."
            raise InvalidProblem(name, f"{kinds} {written} of {codes} pages", got, fix)
    if "k_scale" not in given:
        return
    sides = [len(given[name].shape) > 1 for name in ("k_scale", "v_scale")]
    if sides[0] != sides[1]:
        shapes = f"{tuple(given['k_scale'].shape)} and {tuple(given['v_scale'].shape)}"
        raise InvalidProblem("v_scale", "scales of the kind of k_scale", shapes, "Both are given, or both grow.")
    for name in ("k_pages", "v_pages"):
        if sides[0] and given[name].strides[-1] != 1 and given[name].shape[-1] > 1:
            fix = "Scales that are written need channels next to each other."
            raise InvalidProblem(name, "a last stride of 1", given[name].strides, fix)


def _is_contiguous(view: View, shape: tuple[int, ...]) -> bool:
    """Whether it has this shape and no gaps."""
    dense = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    sides = zip(shape, view.strides, dense, strict=False)
    return tuple(view.shape) == shape and all(size <= 1 or stride == step for size, stride, step in sides)


def _check_within(name: str, numbers: Tensor, least: int | None, end: int, what: str) -> None:
    if not len(numbers):
        return
    low, high = (int(n) for n in torch.aminmax(numbers))
    if high >= end or (least is not None and low < least):
        got = high if high >= end else low
        raise InvalidProblem(name, f"numbers below {end}, {what}", got, f"Check the {name}, or make more of them.")


def _check_order(slots: Tensor, page_size: int) -> None:
    """The rows of a page follow each other without a gap: kernels raise its scale once, for all of them."""
    page = slots.div(page_size, rounding_mode="floor")
    starts = slots >= 0
    starts[1:] &= (slots[1:] != slots[:-1] + 1) | (page[1:] != page[:-1])
    pages, counts = page[starts].unique(return_counts=True)
    if len(pages) < int(counts.sum()):
        expected = "the rows of a page next to each other, in consecutive slots, as its scale grows"
        got = f"page {int(pages[counts.argmax()])} in {int(counts.max())} parts"
        raise InvalidProblem("slots", expected, got, "Sort the rows by slot, or make several calls.")


def _check_given_scales(k_scale: Tensor, v_scale: Tensor) -> None:
    """As fp8.quantize checks them."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        low, high = (float(n) for n in torch.aminmax(scale))
        # NaN compares false.
        if not (SCALE_RANGE[0] <= low and high <= SCALE_RANGE[1]):
            fix = "A scale is what e4m3 numbers are multiplied with: the largest magnitude / 448."
            raise InvalidProblem(name, f"each from {SCALE_RANGE[0]} to {SCALE_RANGE[1]}", f"{low} to {high}", fix)


def check_memory(step: Step, *, in_place: bool) -> None:
    """The given `out` has memory of its own, or that of q."""
    check_strides(step.out)
    if not in_place:
        Disjoint(Step._fields[:APART], step[:APART]).check(step[:APART])
        return
    for name, rows in (("k", step.k), ("v", step.v)):
        _check_apart("out", step.out, name, rows, "Copy the operand, or leave out= away.")


def check_pages(step: Step) -> None:
    """Both kinds of pages have memory of their own, in which no operand lies."""
    rows = {x.untyped_storage().data_ptr() for x in (step.q, step.k, step.v)}
    pools = [x.untyped_storage().data_ptr() for x in (step.k_pages, step.v_pages)]
    fix = "Allocate both pools; of a latent pass k_pages[..., dim_v:] and k_pages[..., :dim_v]."
    for name, pages in (("k_pages", step.k_pages), ("v_pages", step.v_pages)):
        if overlaps_itself(pages):
            got = f"strides {tuple(pages.stride())}"
            raise InvalidProblem(name, "elements with memory of their own", got, "Allocate it, as torch.empty does.")
        if pages.untyped_storage().data_ptr() in rows:
            for operand, given in (("q", step.q), ("k", step.k), ("v", step.v)):
                _check_apart(name, pages, operand, given, "Copy the operand: its rows may be overwritten first.")
    if pools[0] == pools[1]:
        _check_apart("k_pages", step.k_pages, "v_pages", step.v_pages, fix)
    if step.k_scale is not None:
        for name in ("k_pages", "v_pages", "k_scale", "v_scale"):
            if getattr(step, name).is_neg():
                raise InvalidProblem(name, "memory as it is", "a negated view", "Pass the tensor itself.")
        if step.k_scale.dim() > 1:
            _check_written_scales(step)


def _check_written_scales(step: Step) -> None:
    """Scales that are written have memory of their own."""
    names = ("k_scale", "v_scale", "q", "k", "v", "out", "k_pages", "v_pages", "cos_sin")
    tensors = [getattr(step, name) for name in names]
    begins = [t.data_ptr() for t in tensors]
    ends = [begin + extent(t) for begin, t in zip(begins, tensors, strict=True)]
    for one in range(2):
        for other in range(one + 1, len(names)):
            if begins[one] < ends[other] and begins[other] < ends[one]:
                fix = "Allocate scales by themselves."
                _check_apart(names[one], tensors[one], names[other], tensors[other], fix)


def _check_apart(name: str, one: Tensor, other_name: str, other: Tensor, fix: str) -> None:
    """No element in common. Other columns of the same rows are taken."""
    if overlap(one, other):
        raise InvalidProblem(name, f"memory that does not overlap {other_name}", "addresses that both have", fix)


def is_dense(tensor: Tensor) -> bool:
    """Whether channels are next to each other."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1
