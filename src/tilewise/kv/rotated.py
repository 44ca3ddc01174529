"""What a decoder layer does between its projections and attention, in one call: q and k are normalised and rotated, k
and v are written into pages.

    x       = q or k of a token and head, in fp32
    x       = x / sqrt(mean(x^2) + norm_eps) * weight              RMSNorm, if norm_eps is given; weight if given
    (a, b)  = (a cos - b sin, b cos + a sin)                       for each pair of the first rotary_dim channels
    q       is rounded to its dtype
    k, v    are rounded to the dtype of the pages, or quantised to e4m3 or int8

Nothing is rounded between these steps. On an NVIDIA GPU this is one launch (backends/triton/rotating.py). A call with
the signature and the addresses of an earlier one is neither checked nor planned again. Elsewhere, and where torch
records operations, the torch operations below compute the same, and writing.py and quantised.py write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewise import calls, dispatch, settings
from tilewise.backends.base import QuantisedRows
from tilewise.canonical import contiguous_last
from tilewise.errors import InvalidProblem
from tilewise.fp8.rounding import encode
from tilewise.kv.book import within
from tilewise.kv.quantised import append_quantised
from tilewise.kv.rotated_arguments import DTYPES, Step, check_arguments, check_memory, check_pages, is_dense
from tilewise.kv.writing import write_rows
from tilewise.memory import touch

# Rows that a CPU rotates at a time.
ROWS = 64
# The launch of a call, by signature and addresses, for which overlaps were checked; as many as layers times batch sizes
# of an engine.
MAX_BOUND = 4096
_bound: dict[tuple[calls.Slot, calls.Places], Callable[[Sequence[Tensor | None]], object]] = {}


def rotary_table(
    max_seqlen: int,
    rotary_dim: int,
    *,
    device: torch.device | str,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(max_seqlen, rotary_dim): cosines, then sines, of position * base^(-2 i / rotary_dim), as engines store them."""
    rows, columns = (None if isinstance(size, bool) else within(size, 2**31 - 1) for size in (max_seqlen, rotary_dim))
    if rows is None:
        raise InvalidProblem("max_seqlen", "a whole number", repr(max_seqlen), "Pass the number of positions.")
    if not columns or columns % 2:
        raise InvalidProblem(
            "rotary_dim", "an even number from 2 on", repr(rotary_dim), "Channels are rotated in pairs."
        )
    given: Any = base
    number = float(given) if isinstance(given, Real) and not isinstance(given, bool) else math.nan
    if not 0 < number < math.inf:
        raise InvalidProblem("base", "a positive number", repr(base), "Pass the model's rope_theta.")
    if dtype not in DTYPES:
        expected = " or ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise InvalidProblem("dtype", expected, dtype, "Kernels read cosines and sines in these.")
    pairs = torch.arange(0, columns, 2, dtype=torch.float64, device="cpu")
    angle = torch.arange(rows, dtype=torch.float64, device="cpu")[:, None] * number ** (-pairs / columns)
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
    k_pages      (num_pages, page_size, num_kv_heads, dim) in fp32, bf16, fp16, e4m3 or int8, as attention_paged takes
                 them
    slots        int64, for each row its slot counted through all pages, or negative: not written. Rows past the last
                 entry are not written either. No two rows have the same slot
    positions    int32 or int64 (total,): rows of `cos_sin`
    cos_sin      (max_seqlen, rotary_dim): cosines of the rotary_dim / 2 pairs, then sines (see `rotary_table`).
                 Channels from rotary_dim on are not rotated
    interleaved  pairs are neighbours (GPT-J), else i and i + rotary_dim / 2 (NeoX, Llama)
    norm_eps     RMSNorm of each head of q and k with this epsilon; q_weight and k_weight (head_dim,) are optional
    k_scale      of e4m3 pages. fp32 with one element, or one per K/V head: given; beyond 448 * scale values saturate.
                 Or (num_pages, num_kv_heads), contiguous: scales that grow, as tilewise.kv.quantised defines them; the
                 rows of one page are then next to each other, in consecutive slots. Of int8 pages: contiguous
                 (num_pages, num_kv_heads, page_size), which are written with the rows
    out          memory for the result; `out=q` computes in place

    A position outside of `cos_sin` is refused on a CPU. On a GPU reading positions would wait for the device: without
    TILEWISE_CHECK_VALUES=1 the rotated channels of such a row are NaN. Refused likewise, and unchecked on a GPU, are
    slots outside of the pages, slots in another order than scales that grow need, and given scales beyond 1e-37 to
    1e37.

        >>> table, pages = rotary_table(32, 16, device="cpu"), torch.zeros(2, 3, 4, 2, 16)
        >>> q, k, v = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
        >>> append_rotated(q, k, v, *pages, torch.arange(5), torch.arange(5), table).shape
        torch.Size([5, 4, 16])
    """
    if not isinstance(interleaved, bool):
        raise InvalidProblem("interleaved", "True or False", repr(interleaved), "Pass a Python bool.")
    rest = (k_pages, v_pages, slots, positions, cos_sin, q_weight, k_weight, k_scale, v_scale)
    slot, places, *_ = calls.slot_of((q, k, v, out, *rest), ("rotated", interleaved, norm_eps))
    key = None if slot is None or places is None or settings.current().check_values else (slot, places)
    if key is not None and (run := _bound.get(key)) is not None:
        made = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        run((q, k, v, made, *rest))
        touch(made, k_pages, v_pages)
        return made
    check_arguments((q, k, v, out, *rest), norm_eps)
    with torch.no_grad():
        in_place = out is not None and _are_same(out, q)
        made = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        step = Step(q, k, v, made, *rest)
        plain = not torch.compiler.is_compiling()
        if plain:
            check_pages(step)
        if plain and out is not None:
            check_memory(step, in_place=in_place)
        backend = dispatch.serving(q.device.type) if plain and _takes(step) else None
        on_host, run, packed = plain and q.device.type == "cpu", None, step
        if backend is not None:
            packed, eps = step if on_host else _packed(step), None if norm_eps is None else float(norm_eps)
            run = backend.bind_rotated(packed, interleaved=interleaved, norm_eps=eps, in_place=in_place)
        if run is not None:
            run(packed)
            touch(made, k_pages, v_pages)
            if key is not None and _places(packed) == _places(step):
                if len(_bound) >= MAX_BOUND:
                    _bound.pop(next(iter(_bound)))  # the oldest
                _bound[key] = run
        else:
            _append(step, interleaved, norm_eps, on_host=on_host)
    return made


def _places(step: Step) -> list[int | None]:
    return [None if t is None else t.data_ptr() for t in step]


def _append(step: Step, interleaved: bool, norm_eps: float | None, *, on_host: bool) -> None:
    """With torch operations: the definition. `on_host`: a CPU runs them now, and positions were checked."""
    # Torch indexes with the memory of a negated view.
    step = step._replace(slots=step.slots.resolve_neg(), positions=step.positions.resolve_neg())
    total, heads, count, slots = len(step.q), step.q.shape[1], len(step.slots), step.slots
    new = torch.empty(
        step.k.shape, dtype=step.k_pages.dtype if step.k_scale is None else torch.float32, device=step.k.device
    )
    # A few rows at a time stay in a CPU's caches.
    size = ROWS if on_host else max(1, total)
    for first in range(0, total, size):
        rows = slice(first, first + size)
        x = torch.cat((step.q[rows], step.k[rows]), 1)
        x = x if x.dtype == torch.float64 else x.float()
        if norm_eps is not None:
            x *= torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)
            for part, weight in ((x[:, :heads], step.q_weight), (x[:, heads:], step.k_weight)):
                if weight is not None:
                    part *= weight
        positions = step.positions[rows]
        turns = step.cos_sin[positions] if on_host else _turns(step.cos_sin, positions)
        x = _rotated(x, turns.to(x.dtype), interleaved)
        step.out[rows], new[rows] = x[:, :heads], x[:, heads:]
    k, v = new[:count], step.v[:count]
    if step.k_scale is None or step.v_scale is None:
        write_rows(k, v.to(step.v_pages.dtype), step.k_pages, step.v_pages, slots)
    elif step.k_scale.dim() >= 2:
        append_quantised(QuantisedRows(k, v.float(), step.k_pages, step.v_pages, step.k_scale, step.v_scale, slots))
    else:
        k, v = (encode(x.float(), 1.0 / s.reshape(-1, 1)) for x, s in ((k, step.k_scale), (v, step.v_scale)))
        write_rows(k, v, step.k_pages, step.v_pages, slots)


def _turns(cos_sin: Tensor, positions: Tensor) -> Tensor:
    """The rows of the table at these positions; NaN where there are none."""
    if not len(cos_sin):
        return cos_sin.new_full((len(positions), cos_sin.shape[1]), torch.nan)
    known = (positions >= 0) & (positions < len(cos_sin))
    turns = cos_sin[positions.clamp(0, len(cos_sin) - 1).long()]
    return torch.where(known[:, None], turns, torch.nan)


def _rotated(x: Tensor, turns: Tensor, interleaved: bool) -> Tensor:
    """Rows (total, heads, dim) with their first channels rotated by the cosines and sines of their row."""
    cos, sin = turns[:, None].chunk(2, -1)
    turned, rest = x[..., : turns.shape[1]], x[..., turns.shape[1] :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    a, b = (a * cos).addcmul_(b, sin, value=-1), (b * cos).addcmul_(a, sin)
    if interleaved:
        pairs = torch.stack((a, b), -1).flatten(-2)
        return torch.cat((pairs, rest), -1) if rest.shape[-1] else pairs
    return torch.cat((a, b, rest), -1)


def _packed(step: Step) -> Step:
    """What the kernel takes: a contiguous last dimension, and scales with one entry per head."""
    packed: dict[str, Any] = {name: contiguous_last(getattr(step, name)) for name in ("q", "k", "v", "cos_sin")}
    for name in ("slots", "positions", "q_weight", "k_weight"):
        tensor = getattr(step, name)
        packed[name] = None if tensor is None else tensor.contiguous()
    if step.k_scale is not None and step.k_scale.dim() < 2:
        for name in ("k_scale", "v_scale"):
            packed[name] = getattr(step, name).reshape(-1).expand(step.k_pages.shape[2])
    return step._replace(**packed)


def _takes(step: Step) -> bool:
    """Whether a kernel can take these tensors."""
    if step.q.dtype == torch.float64 or step.k_pages.dtype == torch.float64:
        return False
    for tensor in step:
        if tensor is None:
            continue
        # Kernels read memory, which a negated view does not hold.
        if (tensor.__class__ is not Tensor and tensor.__class__ is not Parameter) or tensor.is_neg():
            return False
    return is_dense(step.out) and is_dense(step.k_pages) and is_dense(step.v_pages)


def _are_same(out: Tensor, q: Tensor) -> bool:
    """Whether `out` is the memory of q, element by element."""
    if torch.compiler.is_compiling():
        return out is q
    return out.data_ptr() == q.data_ptr() and out.stride() == q.stride() and out.shape == q.shape
