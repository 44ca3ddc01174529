"""Tensors for a case: random but reproducible values, odd strides, and NaN wherever the contract forbids reading."""

from __future__ import annotations

import dataclasses
import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.testing.cases import Case
from tilewise.testing.threads import one_thread
from tilewise.tiles import TILE

# Standard deviation of q and k: "large" makes most rows of softmax one-hot, "tiny" makes them uniform.
SPREAD = {"normal": 1.0, "large": 12.0, "tiny": 1e-4}
MASK_KEEPS = 0.7
HOLES_IN_BIAS = 0.3
SPARE_PAGES = 3
# Page numbers that no kernel may read; each would be out of bounds.
GARBAGE_PAGES = (-1, 2**31 - 1, -(2**31), 10**6)


@dataclass(frozen=True)
class Inputs:
    """The operands of one call, as the public API takes them, and the cotangents of its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    block_table: Tensor | None = None
    seqlens_k: Tensor | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None

    def map(self, change: Any) -> Inputs:
        """The inputs with every tensor replaced by `change(name, tensor)`."""
        changed = {
            f.name: change(f.name, getattr(self, f.name))
            for f in dataclasses.fields(self)
            if getattr(self, f.name) is not None
        }
        return dataclasses.replace(self, **changed)

    def double(self) -> Inputs:
        """Contiguous fp64 copies of the same (rounded) values; index tensors, masks and slopes keep their dtype."""
        return self.map(
            lambda name, t: t.double().contiguous() if t.is_floating_point() and name != "alibi_slopes" else t
        )

    def float(self) -> Inputs:
        """As `double`, in fp32."""
        return self.map(lambda _, t: t.float() if t.is_floating_point() else t)


def make_inputs(
    case: Case, device: torch.device | str = "cpu", *, padding_value: float = math.nan, drawn: bool = True
) -> Inputs:
    """The tensors of a case. Equal cases give equal values on every device.

    `padding_value` fills everything outside the lengths: rows past the last sequence, unused slots and pages, bias
    beyond a sequence, gaps of odd strides. Unless `drawn`, numbers are 0, for callers that need shapes alone.
    """
    factory = _Factory(case, torch.device(device), padding_value, drawn)
    make = {"dense": factory.dense, "varlen": factory.packed, "paged": factory.paged}[case.kind]
    with one_thread():
        return make()


class _Factory:
    """Draws the tensors of one case in a fixed order from one generator."""

    def __init__(self, case: Case, device: torch.device, padding_value: float, drawn: bool) -> None:
        self.case, self.device, self.padding_value, self.drawn = case, device, padding_value, drawn
        self.generator = torch.Generator().manual_seed(zlib.crc32(repr(case_values(case)).encode()))

    def dense(self) -> Inputs:
        case = self.case
        shapes = {
            "q": (case.batch, case.num_heads, case.seqlen_q, case.head_dim),
            "k": (case.batch, case.num_kv_heads, case.seqlen_k, case.head_dim),
            "v": (case.batch, case.num_kv_heads, case.seqlen_k, case.head_dim_v),
            "dout": (case.batch, case.num_heads, case.seqlen_q, case.head_dim_v),
        }
        tensors = {name: self.normal(shape, name) for name, shape in shapes.items()}
        if case.layout == "bshd":
            tensors = {name: t.transpose(1, 2).contiguous() for name, t in tensors.items()}
        tensors = {name: self.laid_out(t, expand=0, swap=(1, 2)) for name, t in tensors.items()}
        dlse = self.normal((case.batch, case.num_heads, case.seqlen_q), "dlse")
        return self.finished(Inputs(**tensors, dlse=dlse.to(self.device)))

    def packed(self) -> Inputs:
        case = self.case
        q, dout, dlse = self.packed_queries()
        total_k = sum(case.seqlens_k)
        k, v = (
            self.laid_out(self.padded(self.normal((total_k, case.num_kv_heads, dim), name)), expand=1, swap=(0, 1))
            for name, dim in (("k", case.head_dim), ("v", case.head_dim_v))
        )
        cu_seqlens_q, cu_seqlens_k = (self.cumulative(lengths) for lengths in (case.seqlens_q, case.seqlens_k))
        return self.finished(Inputs(q, k, v, dout, dlse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k))

    def paged(self) -> Inputs:
        case = self.case
        q, dout, dlse = self.packed_queries()
        table, num_pages = self.block_table()
        slots = torch.arange(case.max_pages * case.page_size)
        used = torch.zeros(num_pages * case.page_size, dtype=torch.bool)
        for pages, length in zip(table, case.seqlens_k, strict=True):
            position = slots[:length]
            used[pages.long()[position // case.page_size] * case.page_size + position % case.page_size] = True
        unused = ~used.view(num_pages, case.page_size, 1, 1)
        k, v = (
            self.laid_out(
                self.normal((num_pages, case.page_size, case.num_kv_heads, dim), name).masked_fill(
                    unused, self.padding_value
                ),
                expand=2,
                swap=(1, 2),
            )
            for name, dim in (("k", case.head_dim), ("v", case.head_dim_v))
        )
        seqlens_k = self.counts(torch.tensor(case.seqlens_k, dtype=torch.int32))
        cu_seqlens_q = None if case.decode else self.cumulative(case.seqlens_q)
        table = self.counts(table)
        inputs = Inputs(q, k, v, dout, dlse, cu_seqlens_q=cu_seqlens_q, block_table=table, seqlens_k=seqlens_k)
        return self.finished(inputs)

    def packed_queries(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, dout and dlse; rows past the last sequence are padding in all of them."""
        case = self.case
        total = sum(case.seqlens_q)
        q, dout = (
            self.laid_out(self.padded(self.normal((total, case.num_heads, dim), name)), expand=1, swap=(0, 1))
            for name, dim in (("q", case.head_dim), ("dout", case.head_dim_v))
        )
        dlse = self.padded(self.normal((total, case.num_heads), "dlse")).transpose(0, 1).contiguous()
        return q, dout, dlse.to(self.device)

    def block_table(self) -> tuple[Tensor, int]:
        """Random pages, garbage past a sequence's last one. Shared: the first sequence's full pages come first."""
        case = self.case
        needed = [math.ceil(length / case.page_size) for length in case.seqlens_k]
        num_pages = sum(needed) + SPARE_PAGES
        order = torch.randperm(num_pages, generator=self.generator).to(torch.int32)
        table = torch.empty(case.batch, case.max_pages, dtype=torch.int32)
        start = 0
        for row, count in enumerate(needed):
            table[row] = torch.tensor([GARBAGE_PAGES[(row + i) % len(GARBAGE_PAGES)] for i in range(case.max_pages)])
            table[row, :count] = order[start : start + count]
            if case.shared_pages:
                shared = min(case.seqlens_k[0], case.seqlens_k[row]) // case.page_size
                table[row, :shared] = table[0, :shared]
            start += count
        return table, num_pages

    def finished(self, inputs: Inputs) -> Inputs:
        """Add the operands that every kind may have: bias, mask, slopes, sinks; the odd dout; the v of a latent."""
        case = self.case
        if case.latent:
            inputs = dataclasses.replace(inputs, v=inputs.k[..., : case.head_dim_v])
        extra: dict[str, Tensor] = {}
        if case.bias:
            extra["bias"] = self.bias()
        if case.mask:
            extra["mask"] = self.mask()
        if case.alibi:
            shape = (case.num_heads,) if case.alibi == "h" else (case.batch, case.num_heads)
            slopes = torch.rand(shape, generator=self.generator) / 8
            extra["alibi_slopes"] = self.laid_out(slopes, expand=None, swap=(-2, -1))
        if case.sinks:
            sinks = torch.randn(case.num_heads, generator=self.generator)
            extra["sinks"] = self.laid_out(sinks.to(case.side_dtype or case.dtype), expand=None, swap=(-2, -1))
        if case.expanded_dout:
            extra["dout"] = inputs.dout.new_full((), 0.5).expand(inputs.dout.shape)
        return dataclasses.replace(inputs, **extra)

    def bias(self) -> Tensor:
        case = self.case
        shape = self.named_shape(case.bias)
        bias = torch.randn(shape, generator=self.generator)
        if case.bias_holes:
            holes = torch.rand(shape, generator=self.generator) < HOLES_IN_BIAS
            bias = bias.masked_fill(holes, -math.inf)
        bias = bias.masked_fill(~self.used_scores(case.bias), self.padding_value)
        return self.laid_out(bias.to(case.side_dtype or case.dtype), expand=None, swap=(-2, -1))

    def mask(self) -> Tensor:
        case = self.case
        shape = self.named_shape(case.mask)
        mask = torch.rand(shape, generator=self.generator) < MASK_KEEPS
        if case.tiles and mask.dim() >= 2:
            # Of the tiles, a third is empty and a third full.
            blocks = [-(-size // TILE) if size > 1 else 1 for size in shape[-2:]]
            kinds = torch.randint(3, (*shape[:-2], *blocks), generator=self.generator)
            for dim, size in zip((-2, -1), shape[-2:], strict=True):
                kinds = kinds.repeat_interleave(TILE, dim).narrow(dim, 0, size)
            mask = (mask & (kinds > 0)) | (kinds == 2)
        if case.masked_rows:
            mask[..., ::3, :] = False
        return self.laid_out(mask, expand=None, swap=(-2, -1))

    def used_scores(self, spec: str) -> Tensor:
        """Which elements of a bias of that shape belong to a score of some sequence."""
        case = self.case
        rows, cols = torch.arange(case.seqlen_q)[:, None], torch.arange(case.seqlen_k)[None, :]
        used = torch.zeros(case.batch, case.num_heads, case.seqlen_q, case.seqlen_k, dtype=torch.bool)
        if case.kind == "dense":
            used[:] = True
        else:
            for index, (seqlen_q, seqlen_k) in enumerate(zip(case.seqlens_q, case.seqlens_k, strict=True)):
                used[index] = (rows < seqlen_q) & (cols < seqlen_k)
        for dim, letter in enumerate(spec.rjust(4, "1")):
            used = used.any(dim, keepdim=True) if letter == "1" else used
        return used.reshape(self.named_shape(spec))

    def named_shape(self, spec: str) -> tuple[int, ...]:
        case = self.case
        sizes = {"b": case.batch, "h": case.num_heads, "q": case.seqlen_q, "k": case.seqlen_k, "1": 1}
        return tuple(sizes[letter] for letter in spec)

    def cumulative(self, lengths: tuple[int, ...]) -> Tensor:
        return self.counts(torch.tensor((0, *lengths)).cumsum(0).to(torch.int32))

    def counts(self, numbers: Tensor) -> Tensor:
        """Lengths or page ids with the strides the case asks for; gaps hold other numbers."""
        numbers, others = numbers.to(self.device), numbers.to(self.device) + 1
        if self.case.strides == "sliced":
            return torch.cat((numbers, others), -1)[..., : numbers.shape[-1]]
        return torch.stack((numbers, others), -1)[..., 0] if self.case.strides == "strided_last" else numbers

    def normal(self, shape: tuple[int, ...], name: str) -> Tensor:
        spread = SPREAD[self.case.values] if name in ("q", "k") else 1.0
        values = torch.randn(shape, generator=self.generator) * spread if self.drawn else torch.zeros(shape)
        return values.to(self.case.accumulate_dtype if name == "dlse" else self.case.dtype)

    def padded(self, rows: Tensor) -> Tensor:
        """Rows past the last sequence, which must not be read."""
        return torch.cat([rows, rows.new_full((self.case.padding, *rows.shape[1:]), self.padding_value)])

    def laid_out(self, values: Tensor, *, expand: int | None, swap: tuple[int, int]) -> Tensor:
        """The same values with the strides the case asks for; gaps hold the padding value."""
        strides = self.case.strides
        values = values.to(self.device)
        if strides == "transposed" and values.dim() >= 2:
            return values.transpose(*swap).contiguous().transpose(*swap)
        if strides == "sliced":
            grown = self.gaps(values, tuple(size + 3 for size in values.shape))
            return _fill(grown[tuple(slice(1, 1 + size) for size in values.shape)], values)
        if strides == "strided_last":
            return _fill(self.gaps(values, (*values.shape[:-1], 2 * values.shape[-1]))[..., ::2], values)
        if strides == "expanded" and expand is not None and values.shape[expand] > 0:
            return values.narrow(expand, 0, 1).clone().expand(values.shape)
        return values

    def gaps(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        fill = True if like.dtype == torch.bool else self.padding_value
        return torch.full(shape, fill, dtype=like.dtype, device=like.device)


def _fill(view: Tensor, values: Tensor) -> Tensor:
    return view.copy_(values)


def case_values(case: Case) -> Case:
    """The case without what must not change the values drawn: dtype, strides, and the requested gradients."""
    return dataclasses.replace(
        case, dtype=torch.float32, side_dtype=None, strides="contiguous", layout="bhsd", grad_of=None,
        cotangents=("out", "lse"), deterministic=False, expanded_dout=False,
    )  # fmt: skip
