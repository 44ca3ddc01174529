"""The ops under everything PyTorch does to them: opcheck, compile, export, autocast, fake and meta tensors."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewise as tw
from making import int32, prefix_of_all
from tilewise import calls, derivatives, fp8, ops, schemas, validation
from tilewise.operands import Flags, Operands
from tilewise.problem import Kind


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_(grad)


def mapped(operands: Operands, change: Callable[[Tensor], Tensor]) -> Operands:
    changed: list[Any] = [None if t is None else change(t) for t in operands]
    return Operands(*changed)


def samples() -> dict[str, tuple[Kind, Operands, Flags]]:
    """One rich call of each kind."""
    extras = {"sinks": randn(4), "alibi_slopes": randn(4, grad=False)}
    q, k, v = randn(2, 4, 5, 8), randn(2, 2, 7, 8, seed=1), randn(2, 2, 7, 6, seed=2)
    dense = Operands(q, k, v, bias=randn(1, 4, 5, 7), mask=torch.ones(7).bool(), seed=torch.tensor(5), **extras)
    q, k, v = randn(5, 4, 8), randn(7, 2, 8, seed=1), randn(7, 2, 6, seed=2)
    varlen = Operands(q, k, v, cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 3, 7), **extras)
    q, k, v = randn(2, 4, 8), randn(6, 4, 2, 8, seed=1), randn(6, 4, 2, 6, seed=2)
    paged = Operands(q, k, v, block_table=int32([0, 1], [5, -1]), seqlens_k=int32(6, 3), **extras)
    rich = Flags(causal=True, window_left=3, softcap=5.0, needs_grad=True)
    return {
        "dense": ("dense", dense, rich._replace(dropout=0.2)),
        "dense bshd": (
            "dense",
            # The bias has fewer dimensions than the scores; so has its gradient.
            dense._replace(q=randn(2, 5, 4, 8), k=randn(2, 7, 2, 8), v=randn(2, 7, 2, 6), bias=randn(5, 7)),
            rich._replace(layout="bshd"),
        ),
        "varlen": ("varlen", varlen, rich),
        "paged": ("paged", paged, rich._replace(causal=False)),
    }


def op_arguments(kind: Kind, operands: Operands, flags: Flags) -> tuple[Any, ...]:
    names = schemas.operand_names(kind)
    return (*(getattr(operands, name) for name in names), *flags)


@pytest.mark.parametrize("sample", samples())
def test_opcheck_forward(sample: str) -> None:
    kind, operands, flags = samples()[sample]
    torch.library.opcheck(getattr(torch.ops.tilewise, kind).default, op_arguments(kind, operands, flags))


@pytest.mark.parametrize("sample", samples())
def test_opcheck_backward(sample: str) -> None:
    kind, operands, flags = samples()[sample]
    detached = mapped(operands, Tensor.detach)
    out, lse = ops.attention(kind, detached, flags._replace(needs_grad=False))
    wanted = [True, True, True, operands.bias is not None, True]
    arguments = (torch.ones_like(out), torch.ones_like(lse), out, lse, wanted, *op_arguments(kind, detached, flags))
    torch.library.opcheck(getattr(torch.ops.tilewise, f"{kind}_backward").default, arguments)


@pytest.mark.parametrize("sample", samples())
def test_the_direct_path_and_the_ops_agree_bit_for_bit(sample: str) -> None:
    kind, operands, flags = samples()[sample]
    leaves = [t for t in operands if t is not None and t.requires_grad]
    direct = ops.attention(kind, operands, flags)
    through_op = getattr(torch.ops.tilewise, kind)(*op_arguments(kind, operands, flags))
    for a, b in zip(direct, through_op, strict=True):
        assert torch.equal(a, b)
    grads = [torch.autograd.grad(out.sum() + lse.sum(), leaves) for out, lse in (direct, through_op)]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_compile_varlen_paged_and_dropout() -> None:
    torch._dynamo.reset()
    cu = int32(0, 2, 5)
    q, k, v = (randn(5, 2, 8, seed=i) for i in range(3))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return tw.attention_varlen(q, k, v, cu, cu, causal=True, dropout=0.3, seed=11)

    assert torch.equal(packed(q, k, v), tw.attention_varlen(q, k, v, cu, cu, causal=True, dropout=0.3, seed=11))
    q, k, v = randn(2, 4, 8), randn(6, 4, 2, 8, seed=1), randn(6, 4, 2, 6, seed=2)
    table, lengths = torch.tensor([[0, 1], [5, -1]], dtype=torch.int32), int32(6, 3)

    run = torch.compile(tw.attention_paged, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(q, k, v, table, lengths), tw.attention_paged(q, k, v, table, lengths))


@pytest.mark.usefixtures("always_cascade")
def test_compile_pages_in_8_bits_and_shared_prefixes() -> None:
    torch._dynamo.reset()
    q, k, v = (randn(*shape, grad=False, seed=i) for i, shape in enumerate(((2, 4, 8), (6, 4, 2, 8), (6, 4, 2, 8))))
    table, lengths = torch.tensor([[0, 1], [0, 5]], dtype=torch.int32), int32(6, 5)
    narrow = [fp8.quantize_pages(t.bfloat16()) for t in (k, v)]
    tokens = [fp8.quantize_pages(t.bfloat16(), dtype=torch.int8) for t in (k, v)]
    shared = prefix_of_all(table, lengths, 4, 4)
    runs: list[Callable[[Tensor], Any]] = [
        lambda q: tw.attention_paged(q.bfloat16(), narrow[0], narrow[1], table, lengths),
        lambda q: tw.attention_paged(q * 2, k, v, table, lengths, shared_prefix=shared),
        lambda q: tw.attention_paged(q.bfloat16(), tokens[0], tokens[1], table, lengths, shared_prefix=shared),
    ]
    for run in runs:
        torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(q), run(q))


def test_compile_draws_a_fresh_seed_every_call() -> None:
    torch._dynamo.reset()
    fn = torch.compile(lambda q: tw.attention(q, q, q, dropout=0.5), fullgraph=True, backend="aot_eager")
    q = randn(1, 1, 32, 8, grad=False)
    assert not torch.equal(fn(q), fn(q))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "sinks"])
def test_a_gradient_alone_equals_it_among_all(wanted: str) -> None:
    _, operands, flags = samples()["dense"]
    names = ("q", "k", "v", "bias", "sinks")
    full = torch.autograd.grad(ops.attention("dense", operands, flags)[0].sum(), [getattr(operands, n) for n in names])
    alone = mapped(operands, Tensor.detach)
    alone = alone._replace(**{wanted: getattr(operands, wanted)})
    (gradient,) = torch.autograd.grad(ops.attention("dense", alone, flags)[0].sum(), getattr(alone, wanted))
    assert torch.equal(gradient, full[names.index(wanted)])


def test_autograd_keeps_inputs_out_and_lse_only() -> None:
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    q, k, v = (randn(2, 2, 64, 8, seed=i) for i in range(3))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        tw.attention(q, k, v, causal=True)
    assert sum(t.numel() for t in saved) == 4 * q.numel() + 2 * 2 * 64


def test_autocast_casts_q_k_v_only() -> None:
    q, sinks = randn(1, 2, 4, 8), randn(2)
    with torch.autocast("cpu", torch.bfloat16):
        out = tw.attention(q, q, q, sinks=sinks)
    assert out.dtype is torch.bfloat16
    dq, dsinks = torch.autograd.grad(out.float().sum(), (q, sinks))
    assert (dq.dtype, dsinks.dtype) == (torch.float32, torch.float32)
    low = q.bfloat16()
    assert torch.equal(out, tw.attention(low, low, low, sinks=sinks))
    with torch.autocast("cpu", torch.bfloat16):  # fp64 is asked for on purpose
        assert tw.attention(q.double(), q.double(), q.double()).dtype is torch.float64


def test_fake_and_meta_tensors_have_the_real_shapes() -> None:
    for kind, operands, flags in samples().values():
        real = ops.attention(kind, operands, flags)
        with FakeTensorMode() as mode:
            fakes = mapped(operands, mode.from_tensor)
            faked = ops.attention(kind, fakes, flags)
        metas = mapped(operands, lambda t: t.detach().to("meta"))
        meta = ops.attention(kind, metas, flags)
        for a, b, c in zip(real, faked, meta, strict=True):
            assert a.shape == b.shape == c.shape
            assert a.dtype == b.dtype == c.dtype


def test_seed_is_drawn_from_torch_and_reproducible() -> None:
    q = randn(1, 1, 32, 8, grad=False)
    torch.manual_seed(3)
    a = tw.attention(q, q, q, dropout=0.5)
    b = tw.attention(q, q, q, dropout=0.5)
    torch.manual_seed(3)
    c = tw.attention(q, q, q, dropout=0.5)
    assert torch.equal(a, c)
    assert not torch.equal(a, b)
    d, e = (tw.attention(q, q, q, dropout=0.5, seed=s) for s in (2**64 - 1, torch.tensor([-1])))
    assert torch.equal(d, e)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# What a program sets for tensors of its own. Nothing on "meta" has memory, so what lands there by mistake is noticed.
DEFAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "device": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
}


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("sample", samples())
def test_torch_s_defaults_change_nothing(sample: str, name: str) -> None:
    kind, operands, flags = samples()[sample]
    leaves = [t for t in operands if t is not None and t.requires_grad]

    def results() -> tuple[Tensor, ...]:
        out, lse = ops.attention(kind, operands, flags)
        return out, lse, *torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])

    expected = results()
    with DEFAULTS[name]():
        found = results()
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
def test_views_that_torch_negates_lazily(name: str) -> None:
    tensors: dict[str, Any] = {"q": randn(1, 2, 5, 8), "k": randn(1, 2, 7, 8), "v": randn(1, 2, 7, 8, seed=1)}
    tensors |= {"bias": randn(5, 7), "sinks": randn(2)}
    turned = torch.complex(tensors[name], -tensors[name]).detach().conj().imag.requires_grad_()
    assert turned.is_neg()

    def results(given: Tensor) -> tuple[Tensor, ...]:
        out = tw.attention(**{**tensors, name: given})
        return out, *torch.autograd.grad(out, given, torch.complex(out, out).detach().conj().imag)

    expected, found = results(tensors[name]), results(turned)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)


def test_gradients_that_memory_does_not_hold() -> None:
    q, g = randn(1, 2, 5, 8).requires_grad_(), randn(1, 2, 5, 8, seed=1)
    out = tw.attention(q, q, q)
    for given, means in ((torch._neg_view(g), -g), (torch._efficientzerotensor(1, 2, 5, 8), torch.zeros_like(g))):
        found, expected = (torch.autograd.grad(out, q, dout, retain_graph=True)[0] for dout in (given, means))
        assert torch.equal(found, expected)
    assert not tw.attention(q, q, torch._efficientzerotensor(1, 2, 5, 8)).any()


@pytest.fixture
def no_plans() -> Iterator[None]:
    """No call was seen before."""
    calls.forget()
    yield
    calls.forget()


def trained(call: Callable[..., tuple[Tensor, Tensor]], *leaves: Tensor) -> list[Tensor]:
    """Results and gradients."""
    out, lse = call(*leaves)
    cotangents = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape) for t in (out, lse)]
    return [out, lse, *torch.autograd.grad((out, lse), leaves, cotangents)]


@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize("by_op", [True, False], ids=["op", "call"])
def test_plans_for_some_head_dims_and_heads_serve_no_others(by_op: bool) -> None:
    """Whatever was planned before, for its own sizes or for all; so do plans of the backward."""

    def through_op(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return derivatives.call_op("dense", Operands(q, k, v), Flags(causal=True, needs_grad=True))

    def called(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tw.attention(q, k, v, causal=True, return_lse=True)

    sizes = [(2, 2, 16, 16), (2, 2, 8, 16), (2, 1, 16, 16), (4, 2, 16, 24), (2, 2, 32, 8), (2, 2, 16, 16)]
    for rows in (5, 5, 9, 7):
        for heads, kv, dim, dim_v in sizes:
            q, k, v = randn(1, heads, rows, dim), randn(1, kv, rows, dim, seed=1), randn(1, kv, rows, dim_v, seed=2)
            found = trained(through_op if by_op else called, q, k, v)
            expected = trained(called, *[t.detach().double().requires_grad_() for t in (q, k, v)])
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b.float())


@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize("how", ["forward", "training", "out", "logits", "compiled", "compiled training"])
def test_ops_with_new_lengths_are_not_validated_again(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(q, k, v, causal=True)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")

    def run(rows: int) -> None:
        q, k, v = (randn(1, 2, rows, 16, grad="training" in how, seed=i) for i in range(3))
        operands, flags = Operands(q, k, v), Flags(causal=True, needs_grad="training" in how)
        expected = attend(q, k, v)
        if how == "out":
            found = derivatives.call_more("dense", operands._replace(out=torch.empty_like(q)), flags)[0]
        elif how == "logits":
            found, _, logits = derivatives.call_more("dense", operands, flags._replace(max_logits=True))
            assert torch.equal(logits, tw.attention(q, k, v, causal=True, return_max_logits=True)[1])
        else:
            found = compiled(q, k, v) if "compiled" in how else derivatives.call_op("dense", operands, flags)[0]
        assert torch.equal(found, expected)
        if q.requires_grad:
            dout = randn(*q.shape, grad=False)
            for a, b in zip(*[torch.autograd.grad(t, (q, k, v), dout) for t in (found, expected)], strict=True):
                assert torch.equal(a, b)

    for rows in (5, 17, 30, 33, 40):
        run(rows)
    for name in ("problem_of", "traced_problem"):
        monkeypatch.setattr(validation, name, lambda *_: pytest.fail("validated"))
    for rows in (18, 41, 60):
        run(rows)


@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize("how", ["autocast", "list of sides", "dropout"])
def test_calls_that_have_no_key_of_their_own_have_plans(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are looked up by what validation made of their arguments."""

    def run(rows: int) -> None:
        q, k, v = (randn(1, 2, rows, 16, grad=False, seed=i) for i in range(3))
        if how == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                made = tw.attention(q, k, v)
            expected = tw.attention(*[t.bfloat16() for t in (q, k, v)])
        elif how == "dropout":
            made = tw.attention(q, k, v, dropout=0.5, seed=rows)
            expected = tw.attention(q, k, v, dropout=0.5, seed=torch.tensor([rows]))
            assert not torch.equal(made, tw.attention(q, k, v, dropout=0.5, seed=rows + 1))
        else:
            sides: Any = [3, 4]
            made = tw.attention(q, k, v, window=sides)
            expected = tw.attention(q, k, v, window=(3, 4))
        assert torch.equal(made, expected)

    for rows in (15, 17, 30):
        run(rows)
    for name in ("problem_of", "traced_problem"):
        monkeypatch.setattr(validation, name, lambda *_: pytest.fail("validated"))
    for rows in (16, 30, 45):
        run(rows)


@pytest.mark.usefixtures("no_plans")
def test_ops_read_lengths_on_a_cpu_every_time() -> None:
    q, k, v = (randn(9, 2, 8, grad=False, seed=i) for i in range(3))
    for totals in ([0, 4, 9], [0, 5, 9], [0, 5, 9], [0, 9, 9]):
        cu = int32(*totals)
        out, _ = derivatives.call_op("varlen", Operands(q, k, v, cu, cu), Flags())
        assert torch.equal(out, tw.attention_varlen(q, k, v, cu, cu))
    for totals in ([0, 4, 10], [0, 5, 4], [1, 4, 9]):
        with pytest.raises(tw.InvalidProblem, match="cu_seqlens_q"):
            derivatives.call_op("varlen", Operands(q, k, v, int32(*totals), int32(*totals)), Flags())
