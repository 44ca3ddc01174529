"""Calls that look like an earlier one are not judged again, and never get the answer to another question."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewise
from tilewise import calls, fp8
from tilewise.backends.reference import ReferenceBackend
from tilewise.errors import InvalidProblem, TilewiseError
from tilewise.kv.writing import write_rows
from tilewise.operands import Operands, Options
from tilewise.problem import AttentionProblem
from tilewise.testing import installed


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No call was seen before."""
    calls._family.cache_clear()
    calls._slot.cache_clear()
    yield
    calls._family.cache_clear()
    calls._slot.cache_clear()


def tensors(*, grad: bool = False, shape: tuple[int, ...] = (1, 2, 8, 16)) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=grad) for _ in range(3)]


def call(*args: Tensor, **flags: Any) -> Any:
    return tilewise.attention(args[0], args[1], args[2], **flags)


def exact(q: Tensor, k: Tensor, v: Tensor, **flags: Any) -> Any:
    """By the reference, which is told apart by its dtype."""
    return tilewise.attention(q.double(), k.double(), v.double(), backend="reference", **flags).float()


@pytest.mark.parametrize(
    "change",
    [
        lambda q: q[:, :, :4],
        lambda q: q.transpose(1, 2).contiguous().transpose(1, 2),
        lambda q: q.expand(1, 2, 8, 16)[:, :1].expand(1, 2, 8, 16),
        lambda q: q.repeat_interleave(2, dim=-1)[..., ::2],
    ],
    ids=["shape", "strides", "broadcast", "last stride"],
)
def test_other_shapes_and_strides_are_other_calls(change: Callable[[Tensor], Tensor]) -> None:
    q, k, v = tensors()
    call(q, k, v)
    other = change(q)
    torch.testing.assert_close(call(other, k, v), exact(other, k, v))


def test_tensors_off_the_alignment_are_other_calls() -> None:
    """Kernels are compiled, and tensor maps made, for addresses that are multiples of 16 bytes."""
    memory = torch.zeros(1 * 2 * 8 * 16 + 1)
    aligned, off = (memory[start : start + 256].view(1, 2, 8, 16) for start in (0, 1))
    slots = [calls.slot_of((q, q, q), ("dense",))[0] for q in (aligned, off, aligned)]
    assert slots[0] is slots[2]
    assert slots[0] is not slots[1]


def test_equal_flags_of_other_types_are_judged() -> None:
    q, k, v = tensors()
    for given, wrong in (
        ({"causal": True}, {"causal": 1}),
        ({"causal": False}, {"causal": 0}),
        ({"deterministic": True}, {"deterministic": 1}),
        ({"dropout": 0.0}, {"dropout": False}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"scale": 1.0}, {"scale": True}),
        ({}, {"return_lse": 0}),
        ({"window": (4, 0)}, {"window": (4.0, 0)}),
        ({"window": (1, None)}, {"window": (True, None)}),
    ):
        call(q, k, v, **given)
        call(q, k, v, **given)
        with pytest.raises(InvalidProblem):
            call(q, k, v, **wrong)


@pytest.mark.parametrize(
    "flags",
    [{"window": [1, 2]}, {"dropout": "much"}, {"dropout": [0.0]}, {"seed": "x"}, {"layout": ["bhsd"]}, {"scale": {}}],
    ids=str,
)
def test_flags_without_a_hash_are_judged(flags: dict[str, Any]) -> None:
    q, k, v = tensors()
    if "window" in flags:
        torch.testing.assert_close(call(q, k, v, **flags), call(q, k, v, window=(1, 2)))
        return
    for _ in range(2):
        with pytest.raises(InvalidProblem):
            call(q, k, v, **flags)


@pytest.mark.parametrize("wrong", [None, [1.0], torch.ones(1, 2, 8, 16).to_sparse(), torch.ones(3)], ids=type)
def test_what_is_no_operand_is_refused_every_time(wrong: Any) -> None:
    q, k, v = tensors()
    call(q, k, v)
    for _ in range(2):
        with pytest.raises(TilewiseError):
            call(q, wrong, v)


def test_recording_is_followed() -> None:
    q, k, v = tensors()
    assert not call(q, k, v).requires_grad
    v.requires_grad_()
    for _ in range(2):
        assert call(q, k, v).requires_grad
        with torch.no_grad():
            assert not call(q, k, v).requires_grad


def test_determinism_is_followed() -> None:
    class Noting(ReferenceBackend):
        name = "noting"
        seen: list[Any] = []  # noqa: RUF012

        def forward(self, problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
            self.seen.append(problem.deterministic)
            return super().forward(problem, operands)

    with installed(Noting()):
        for asked in (False, True, False, True):
            torch.use_deterministic_algorithms(asked)
            call(*tensors(), backend="noting")
            torch.use_deterministic_algorithms(False)
    assert Noting.seen == [False, True, False, True]


def test_lengths_on_a_cpu_are_read_every_time() -> None:
    q, k, v = tensors(shape=(8, 2, 16))
    for lengths in ([0, 3, 8], [0, 8, 8]):
        cu = torch.tensor(lengths, dtype=torch.int32)
        out = tilewise.attention_varlen(q, k, v, cu, cu)
        first = slice(0, lengths[1])
        alone = (t[first].transpose(0, 1)[None] for t in (q, k, v))
        torch.testing.assert_close(out[first], exact(*alone)[0].transpose(0, 1))
    with pytest.raises(InvalidProblem):
        tilewise.attention_varlen(q, k, v, cu + 5, cu)


def test_watchers_see_every_call() -> None:
    q, k, v = tensors()
    call(q, k, v)
    assert not torch.func.vmap(lambda q: call(q, k, v))(torch.stack([q, q])).isnan().any()
    assert call(q.to("meta"), k.to("meta"), v.to("meta")).is_meta

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        names: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen():  # type: ignore[no-untyped-call]
        call(q, k, v)
    assert "tilewise.dense.default" in Seen.names


def test_transforms_see_every_call() -> None:
    """The look of a call that nobody watched does not fit inside of one."""
    q, k, v = tensors()
    with torch.no_grad():
        call(q, k, v)
        call(q, k, v)
        want = torch.func.grad(lambda q: call(q, k, v).sum())(q)
    torch.testing.assert_close(want, torch.autograd.grad(call(q.requires_grad_(), k, v).sum(), q)[0])
    with FakeTensorMode() as mode:
        assert calls.slot_of([mode.from_tensor(t) for t in (q, k, v)], ("dense", *Options())) == calls.NOTHING


def test_calls_with_e4m3_operands_are_told_apart_by_what_their_containers_say() -> None:
    rows = [(t * torch.linspace(1, 9, 256)[:, None]).bfloat16() for t in tensors(shape=(1, 2, 256, 16))]
    q, k, v = (fp8.quantize(t, granularity="head") for t in rows)
    first = tilewise.attention(q, k, v)
    for _ in range(2):
        assert torch.equal(first, tilewise.attention(q, k, v))
    blocks = [fp8.quantize(t, granularity="block") for t in rows]
    assert not torch.equal(first, tilewise.attention(*blocks))
    half = [replace(t, dtype=torch.float16) for t in (q, k, v)]
    assert tilewise.attention(*half).dtype == torch.float16
    for wrong in ((q, k, rows[2]), (q, rows[1], v), (replace(q, rotated=True), k, v)):
        with pytest.raises(InvalidProblem):
            tilewise.attention(*wrong)


def test_saved_tensors_may_come_back_with_other_strides() -> None:
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2).detach().requires_grad_() for t in tensors())
    dout = torch.randn_like(q)
    want = torch.autograd.grad(call(q, k, v), (q, k, v), dout)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.detach().contiguous()):
        out = call(q, k, v)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), dout), want)


def test_a_saved_latent_may_come_back_as_two_tensors() -> None:
    """As `save_on_cpu` gives it back. A gradient of bias takes the general path, with the problem of these tensors."""
    q, k = (torch.randn(1, heads, 7, 48, requires_grad=True) for heads in (4, 1))
    bias, dout = torch.randn(7, 7, requires_grad=True), torch.randn(1, 4, 7, 32)
    call(q[:, :, 1:], k, k[..., :32], bias=bias[1:])  # from the second size on, plans are for all sizes
    want = torch.autograd.grad(call(q, k, k[..., :32], bias=bias), (q, k, bias), dout)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        out = call(q, k, k[..., :32], bias=bias)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, bias), dout), want)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("place", ["q", "k", "v", "bias", "mask", "sinks", "alibi_slopes"])
def test_a_nested_tensor_is_refused_in_every_place(place: str) -> None:
    q, k, v = tensors()
    others = {
        "bias": torch.zeros(q.shape[2], k.shape[2]),
        "mask": torch.ones(q.shape[2], k.shape[2], dtype=torch.bool),
        "sinks": torch.zeros(q.shape[1]),
        "alibi_slopes": torch.zeros(q.shape[1]),
    }
    arguments: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        **{name: other for name, other in others.items() if name == place},
    }
    nested = torch.nested.nested_tensor([q[0, :, :3], q[0]])
    with torch.no_grad():
        for _ in range(3):
            tilewise.attention(**arguments)
        with pytest.raises(InvalidProblem):
            tilewise.attention(**{**arguments, place: nested})
        tilewise.attention(**arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_rows_are_written_by_cached_calls(dtype: torch.dtype) -> None:
    """The second call with a signature writes its own rows into its own slots, and skips what has none."""
    pages = torch.zeros(2, 3, 4, 2, 16, dtype=dtype)
    expected = pages.float()
    for start in (0, 5, 7):
        k, v = ((torch.randn(2, 3, 2, 16) * 4).to(dtype)).unbind()
        write_rows(k, v, pages[0], pages[1], torch.tensor([start, -1, start + 1]))
        for new, rows in zip((k, v), expected.flatten(1, 2), strict=True):
            rows[[start, start + 1]] = new[[0, 2]].float()
    torch.testing.assert_close(pages.float(), expected)
    for _ in range(2):
        with pytest.raises(InvalidProblem, match="slots: expected an int64 tensor"):
            write_rows(k, v, pages[0], pages[1], torch.tensor([0, 1, 2], dtype=torch.int32))
