"""Random tensors for a case, as the public calls take them, and the dense keys that peers and the check need."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from suite.cases import Case
from tilewise.cascade import Group, SharedPrefix

__all__ = ["SCORES", "Inputs", "make_inputs"]


def _spread(nats: float) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Scores with this standard deviation."""
    return lambda q, k: (q * math.sqrt(nats), k * math.sqrt(nats))


def _sink(nats: float) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The first key stands about so far above the others, for every row."""

    def raised(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        sink = torch.nn.functional.normalize(k[:, :, :1], dim=-1) * math.sqrt(nats * math.sqrt(k.shape[-1]))
        return q + sink, torch.cat([sink, k[:, :, 1:]], dim=2)

    return raised


def _diagonal(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """A token attends mostly to itself."""
    return q + 2.5 * k, k


def _growing(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Later keys are longer."""
    return q, k * torch.linspace(0.1, 6.0, k.shape[2], device=k.device)[:, None]


def _outliers(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Two columns are far from zero."""
    far = torch.arange(k.shape[-1], device=k.device) < 2
    return torch.where(far, 3.0 * q, q), torch.where(far, k + 12.0, k)


# Dense q and k whose scores are not those of normal data, from normal ones; as many heads of k as of q.
SCORES = {
    "spread16": _spread(16.0),
    "spread64": _spread(64.0),
    "sink20": _sink(20.0),
    "sink40": _sink(40.0),
    "sink100": _sink(100.0),
    "diagonal": _diagonal,
    "growing": _growing,
    "outliers": _outliers,
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """The operands of one call; q, k, v dense and heads-first (also where there are pages), or packed."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens: Tensor | None = None
    k_pages: Tensor | None = None
    v_pages: Tensor | None = None
    block_table: Tensor | None = None
    seqlens_k: Tensor | None = None
    shared_prefix: SharedPrefix | None = None

    @property
    def nbytes(self) -> int:
        """What a call reads, to judge whether it fits a cache."""
        return sum(t.numel() * t.element_size() for t in (self.q, self.k, self.v))


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Standard normal values, different for every seed, or those of the case's kind of scores."""
    generator = torch.Generator(case.device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=case.device, dtype=torch.float32).to(case.torch_dtype)

    heads, shared, dim = case.num_heads, case.num_kv_heads, case.head_dim
    if case.kind == "varlen":
        total = sum(case.seqlens)
        q, k, v = normal(total, heads, dim), normal(total, shared, dim), normal(total, shared, dim)
        return Inputs(q, k, v, normal(total, heads, dim), cu_seqlens=_offsets(case))
    q, dout = (normal(case.batch, heads, case.seqlen_q, dim) for _ in range(2))
    k, v = (normal(case.batch, shared, case.seqlen_k, dim) for _ in range(2))
    if case.scores != "normal":
        q, k = (t.to(case.torch_dtype) for t in SCORES[case.scores](q.float(), k.float()))
    if case.e4m3_values:
        k, v = (t.to(torch.float8_e4m3fn).to(t.dtype) for t in (k, v))
        q = q.to(torch.float8_e4m3fn).to(q.dtype) if case.kind == "dense" else q
    if case.kind == "dense":
        return Inputs(q, k, v, dout)
    table = _table(case, generator)
    for keys in (k, v):
        keys[1:, :, : case.shared_keys] = keys[:1, :, : case.shared_keys]
    seqlens_k = torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=case.device)
    prefix = _shared(case, table, seqlens_k) if case.shared_keys else None
    return Inputs(q, k, v, dout, None, _paged(case, k, table), _paged(case, v, table), table, seqlens_k, prefix)


def _offsets(case: Case) -> Tensor:
    lengths = torch.tensor((0, *case.seqlens), dtype=torch.int32)
    return lengths.cumsum(0, dtype=torch.int32).to(case.device)


def _table(case: Case, generator: torch.Generator) -> Tensor:
    """Pages in random order, as a cache in use hands them out."""
    pages = -(-case.seqlen_k // case.page_size)
    order = torch.randperm(case.batch * pages, generator=generator, device=case.device)
    table = order.view(case.batch, pages).to(torch.int32)
    table[:, : case.shared_keys // case.page_size] = table[:1, : case.shared_keys // case.page_size]
    return table


def _shared(case: Case, table: Tensor, seqlens_k: Tensor) -> SharedPrefix:
    """The hint that a cache would give: one group of all sequences."""
    pages, counts = case.shared_keys // case.page_size, torch.tensor((0, case.batch, case.shared_keys))
    counts = counts.to(case.device, torch.int32)
    group = Group(case.batch, case.batch, case.shared_keys)
    own = table[:, pages:].contiguous()
    return SharedPrefix(
        (group,), table[:1, :pages].contiguous(), counts[2:], counts[:2], None, own, seqlens_k - counts[2]
    )


def _paged(case: Case, dense: Tensor, table: Tensor) -> Tensor:
    """(batch, heads, seqlen, dim) cut into the pages (num_pages, page_size, heads, dim) that the table names."""
    tokens = dense.transpose(1, 2)
    missing = table.shape[1] * case.page_size - case.seqlen_k
    tokens = torch.nn.functional.pad(tokens, (0, 0, 0, 0, 0, missing))
    pages = torch.empty(table.numel(), case.page_size, *tokens.shape[2:], dtype=dense.dtype, device=dense.device)
    pages[table.flatten().long()] = tokens.reshape(pages.shape)
    return pages
