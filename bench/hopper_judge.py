"""The judgement of one case of hopper_check.py: the Hopper kernels against textbook attention in fp64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from hopper_cases import Case
from tilewise import device
from tilewise.backends.hopper import BACKEND
from tilewise.operands import Operands, Wanted
from tilewise.problem import AttentionProblem
from tilewise.testing import cases as suite
from tilewise.testing.inputs import Inputs
from tilewise.testing.oracle import summed_terms
from tilewise.testing.tolerances import judge, slack_of

__all__ = ["check_backward", "check_forward", "make_inputs", "operands_of", "problem_of"]

DEVICE = "cuda"
REPEATS = 30


def reference(case: Case, inputs: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Textbook attention of one dense sequence in `dtype`; scores and softmax at least in fp32."""
    q, k, v = (inputs[n].to(dtype) for n in "qkv")
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    s = (q @ k.transpose(-1, -2)).to(wide) * case.scale
    if case.softcap is not None:
        s = case.softcap * torch.tanh(s / case.softcap)
    i = torch.arange(q.shape[2], device=q.device)[:, None] + (k.shape[2] - q.shape[2])
    j = torch.arange(k.shape[2], device=q.device)[None, :]
    left, right = case.band
    hidden = torch.zeros_like(s[0, 0], dtype=torch.bool)
    hidden |= (j > i + right) if right is not None else hidden
    hidden |= (j < i - left) if left is not None else hidden
    s = s.masked_fill(hidden, -torch.inf)
    logits = s
    if case.sinks:
        sink = inputs["sinks"].to(wide).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        logits = torch.cat([s, sink], -1)
    lse = torch.logsumexp(logits, -1)
    p = torch.exp(s - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return p.to(dtype) @ v, lse


def make_inputs(case: Case) -> dict[str, torch.Tensor]:
    """Dense (batch, heads, rows, dim) or packed (rows, heads, dim) tensors in the storage the case asks for."""
    generator = torch.Generator(DEVICE).manual_seed(len(case.name) * 7919 + case.seqlen_q)

    def rows(heads: int, seqlen: int, dim: int, lengths: tuple[int, ...]) -> torch.Tensor:
        if case.kind == "varlen":
            shape: tuple[int, ...] = (sum(lengths) + case.padding, heads, dim)
        else:
            shape = (case.batch, heads, seqlen, dim)
        x = torch.randn(shape, device=DEVICE, generator=generator).to(case.dtype)
        if case.kind == "varlen":
            x[sum(lengths) :] = torch.nan
            return x
        if case.storage == "bshd":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if case.storage == "odd":  # neither base nor strides can be addressed by TMA
            wide = torch.full((*shape[:-1], dim + 3), torch.nan, device=DEVICE, dtype=case.dtype)
            return wide[..., 1 : dim + 1].copy_(x)
        return x

    inputs = {
        "q": rows(case.num_heads, case.seqlen_q, case.head_dim, case.lengths_q),
        "k": rows(case.num_kv_heads, case.seqlen_k, case.head_dim, case.lengths_k),
        "v": rows(case.num_kv_heads, case.seqlen_k, case.head_dim_v, case.lengths_k),
        "dout": rows(case.num_heads, case.seqlen_q, case.head_dim_v, case.lengths_q),
    }
    if case.sinks:
        inputs["sinks"] = torch.randn(case.num_heads, device=DEVICE, generator=generator)
    return inputs


class Sequence(NamedTuple):
    """One sequence of a case as dense inputs of batch 1 (or the whole dense batch), and how to cut its results out."""

    inputs: dict[str, torch.Tensor]
    rows: Callable[[torch.Tensor], torch.Tensor]
    keys: Callable[[torch.Tensor], torch.Tensor]
    lse: Callable[[torch.Tensor], torch.Tensor]


def sequences(case: Case, inputs: dict[str, torch.Tensor]) -> Iterator[Sequence]:
    """The independent parts of a case."""
    if case.kind == "dense":
        yield Sequence(inputs, lambda t: t, lambda t: t, lambda t: t)
        return
    starts_q, starts_k = case.starts(case.lengths_q), case.starts(case.lengths_k)
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):

        def rows(t: torch.Tensor, a: int = q0, b: int = q1) -> torch.Tensor:
            return t[a:b].transpose(0, 1)[None]

        def keys(t: torch.Tensor, a: int = k0, b: int = k1) -> torch.Tensor:
            return t[a:b].transpose(0, 1)[None]

        def lse(t: torch.Tensor, a: int = q0, b: int = q1) -> torch.Tensor:
            return t[:, a:b][None]

        part = {n: rows(inputs[n]) for n in ("q", "dout")} | {n: keys(inputs[n]) for n in ("k", "v")}
        yield Sequence(inputs | part, rows, keys, lse)


def problem_of(case: Case, *, needs_grad: bool) -> AttentionProblem:
    """The case as a backend sees it."""
    total_k = sum(case.lengths_k) + case.padding if case.kind == "varlen" else case.batch * case.seqlen_k
    return AttentionProblem(
        kind=case.kind if case.page_size is None else "paged",
        dtype=case.dtype,
        batch=case.batch,
        seqlen_q=case.seqlen_q,
        seqlen_k=case.seqlen_k,
        total_q=sum(case.lengths_q) + case.padding if case.kind == "varlen" else case.batch * case.seqlen_q,
        total_k=total_k if case.page_size is None else num_pages(case) * case.page_size,
        page_size=case.page_size,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        scale=case.scale,
        causal=case.causal,
        window_left=case.window[0],
        window_right=case.window[1],
        softcap=case.softcap,
        has_sinks=case.sinks,
        layout="bshd" if case.storage == "bshd" else "bhsd",
        deterministic=case.deterministic,
        needs_grad=needs_grad,
    )


def operands_of(case: Case, inputs: dict[str, torch.Tensor]) -> Operands:
    """The case's tensors as a backend gets them."""
    cu: list[Any] = [None, None]
    if case.kind == "varlen":
        cu = [torch.tensor(case.starts(n), dtype=torch.int32, device=DEVICE) for n in (case.lengths_q, case.lengths_k)]
    operands = Operands(
        inputs["q"], inputs["k"], inputs["v"], cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], sinks=inputs.get("sinks")
    )
    return operands if case.page_size is None else in_pages(case, operands, case.page_size)


def num_pages(case: Case) -> int:
    """Half of them are in nobody's table."""
    assert case.page_size is not None
    return 2 * sum(-(-n // case.page_size) for n in case.lengths_k) + 1


def in_pages(case: Case, packed: Operands, page_size: int) -> Operands:
    """Keys and values in shuffled pages, NaN in every row that no sequence has; nonsense behind a sequence's pages."""
    k, v = (
        torch.full((num_pages(case), page_size, *t.shape[1:]), torch.nan, dtype=t.dtype, device=DEVICE)
        for t in (packed.k, packed.v)
    )
    free = torch.randperm(num_pages(case), generator=torch.Generator().manual_seed(7)).tolist()
    table = torch.full((case.batch, -(-case.seqlen_k // page_size)), 1 << 30, dtype=torch.int32)
    for i, (first, length) in enumerate(zip(case.starts(case.lengths_k), case.lengths_k, strict=False)):
        for number in range(-(-length // page_size)):
            page = table[i, number] = free.pop()
            rows = slice(first + number * page_size, first + min((number + 1) * page_size, length))
            for pages, source in ((k, packed.k), (v, packed.v)):
                pages[page, : rows.stop - rows.start] = source[rows]
    lengths = torch.tensor(case.lengths_k, dtype=torch.int32, device=DEVICE)
    return packed._replace(k=k, v=v, cu_seqlens_k=None, block_table=table.to(DEVICE), seqlens_k=lengths)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Uninitialised floating-point memory is full of NaN."""
    makers = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"), (torch.Tensor, "new_empty_strided"))
    plain = [getattr(owner, name) for owner, name in makers]

    def filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            t = make(*args, **kwargs)
            return t.fill_(torch.nan) if t.is_floating_point() else t

        return made

    for (owner, name), make in zip(makers, plain, strict=True):
        setattr(owner, name, filled(make))
    try:
        yield
    finally:
        for (owner, name), make in zip(makers, plain, strict=True):
            setattr(owner, name, make)


def terms_of(case: Case, part: Sequence, dlse: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The absolute values of all that was added up in fp32 to make each result of a part, by the conformance suite."""
    q, k, v, dout = (part.inputs[n] for n in ("q", "k", "v", "dout"))
    batch = q.shape[0]
    # fp32: what rounding out to half precision before the backward costs is not added, twice plain PyTorch covers it
    # (it would allow 0.7 where dq of a single key is 0, and add 4 times the contract's tolerance to causal rows).
    dense = suite.Case(
        dtype=torch.float32,
        seqlens_q=(q.shape[2],) * batch,
        seqlens_k=(k.shape[2],) * batch,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        causal=case.causal,
        window=case.window,
        softcap=case.softcap,
        sinks=case.sinks,
        cotangents=("out",) if dlse is None else ("out", "lse"),
    )
    dlse = q.new_zeros(q.shape[:3]) if dlse is None else part.lse(dlse)
    # The suite is at home on the CPU and makes its masks on the default device; in fp64 it would take too long there.
    with torch.no_grad(), q.device:
        return summed_terms(dense, Inputs(q, k, v, dout, dlse, sinks=part.inputs.get("sinks")))


def fault(
    name: str, got: torch.Tensor, ref: torch.Tensor, plain: torch.Tensor, terms: torch.Tensor, dtype: torch.dtype
) -> str | None:
    """None if `got` is within the tolerance of the conformance suite (tilewise.testing.tolerances), else why not."""
    if bool(torch.isnan(ref).any()):
        return f"{name}: the reference is NaN"
    return judge(name, got, ref.cpu(), slack_of(ref, plain, terms, dtype, torch.float32))


def check_forward(case: Case) -> list[str]:
    """What is wrong with out and lse."""
    inputs = make_inputs(case)
    problem, operands = problem_of(case, needs_grad=False), operands_of(case, inputs)
    if reason := BACKEND.supports(problem, device.of(operands.q.device)):
        return [f"refused: {reason}"]
    with poisoned():
        runs = [BACKEND.forward(problem, operands) for _ in range(REPEATS if case.repeat else 2)]
    torch.cuda.synchronize()
    out, lse = runs[0]
    same = [torch.equal(o, out) and torch.equal(s, lse) for o, s in runs]
    wrong = [f"run {i} differs bitwise" for i, equal in enumerate(same) if not equal]
    for part in sequences(case, inputs):
        ref, ref_lse = reference(case, part.inputs, torch.float64)
        plain, _ = reference(case, part.inputs, case.dtype)
        _, plain_lse = reference(case, part.inputs, torch.float32)
        terms = terms_of(case, part, None)
        found = fault("out", part.rows(out), ref, plain, terms["out"], case.dtype)
        found_lse = fault("lse", part.lse(lse), ref_lse, plain_lse, terms["lse"], torch.float32)
        wrong += [w for w in (found, found_lse) if w]
    if case.kind == "varlen":
        end = sum(case.lengths_q)
        if not (bool((out[end:] == 0).all()) and bool((lse[:, end:] == -torch.inf).all())):
            wrong.append("rows past the last sequence are not 0 and -inf")
    return wrong


def check_backward(case: Case) -> list[str]:
    """What is wrong with the gradients of sum(out * dout) + sum(lse * dlse)."""
    inputs = make_inputs(case)
    problem, operands = problem_of(case, needs_grad=True), operands_of(case, inputs)
    if reason := BACKEND.supports(problem, device.of(operands.q.device)):
        return [f"refused: {reason}"]
    with poisoned():
        out, lse = BACKEND.forward(problem, operands)
        dlse = torch.randn(lse.shape, device=DEVICE) if case.dlse else None
        wanted = Wanted(dsinks=case.sinks)
        count = REPEATS if case.repeat else 2
        runs = [BACKEND.backward(problem, operands, out, lse, inputs["dout"], dlse, wanted) for _ in range(count)]
    torch.cuda.synchronize()
    got = runs[0]
    names = ["dq", "dk", "dv"] + (["dsinks"] if case.sinks else [])
    wrong = []
    if case.deterministic:
        pairs = [(n, i, getattr(got, n), getattr(run, n)) for i, run in enumerate(runs) for n in names]
        wrong = [f"{name} of run {i} differs bitwise" for name, i, a, b in pairs if not torch.equal(a, b)]
    for part in sequences(case, inputs):
        refs, plains = (autograd(case, part, dlse, dtype) for dtype in (torch.float64, case.dtype))
        terms = terms_of(case, part, dlse)
        cuts = {"dq": part.rows, "dk": part.keys, "dv": part.keys}
        for name, ref, plain in zip(names, refs, plains, strict=True):
            mine = getattr(got, name)
            mine = cuts[name](mine) if name in cuts else mine
            if found := fault(name, mine, ref, plain, terms[name], case.dtype):
                wrong.append(found)
    return wrong


def autograd(case: Case, part: Sequence, dlse: torch.Tensor | None, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gradients by PyTorch in `dtype`."""
    names = ["q", "k", "v"] + (["sinks"] if case.sinks else [])
    leaves = {n: part.inputs[n].detach().to(dtype).requires_grad_() for n in names}
    out, lse = reference(case, part.inputs | leaves, dtype)
    results, cotangents = [out], [part.inputs["dout"].to(dtype)]
    if dlse is not None:
        results.append(torch.where(torch.isfinite(lse), lse, 0.0))
        cotangents.append(part.lse(dlse).to(lse.dtype))
    return list(torch.autograd.grad(results, list(leaves.values()), cotangents))
