"""Subclasses of torch.Tensor: refused wherever a tensor is taken if their memory may mean something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right

import tilewise as tw
from making import int32, prefix_of_all, randn
from tilewise import fp8
from tilewise.fp8 import Fp8Tensor
from tilewise.integrations import flash_attn, flash_attn_interface, sdpa
from tilewise.kv import PagedKVCache
from tilewise.nn import MultiheadAttention, rotate


class Overriding(Tensor):
    """Says by `__torch_function__` what its operations are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class Dispatching(Tensor):
    """Says by `__torch_dispatch__` what its operations are."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*args, **(kwargs or {}))


class Named(Tensor):
    """Only adds to a tensor."""

    label = "q"

    def twice(self) -> Tensor:
        return self * 2


class Quiet(Named):
    """The same, whose results are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


Q, ROWS, PAGES = randn(2, 4, 5, 8), randn(9, 4, 8), randn(6, 4, 4, 8)
TABLE, LENGTHS, CU = int32([0, 1], [2, 3]), int32(7, 3), int32(0, 4, 9)
KEEP = Q[:, :1, :, :1].expand(2, 1, 5, 5) < 1
OUT, LSE = tw.attention(Q, Q, Q, return_lse=True)
QUANTISED = fp8.quantize(Q)


def of_cache(k: Tensor = ROWS[:3], v: Tensor = ROWS[:3]) -> None:
    cache = PagedKVCache(
        num_layers=1, num_pages=8, page_size=4, num_kv_heads=4, head_dim=8, dtype=torch.float32, device="cpu"
    )
    cache.step([cache.add([1, 2, 3])])
    cache.append(k, v)


def of_prefix(**given: Any) -> Any:
    """Two sequences whose first page is the same."""
    table, lengths = int32([0, 1], [0, 3]), int32(7, 6)
    shared = prefix_of_all(table, lengths, 4, 4)._replace(**given)
    return tw.attention_paged(ROWS[:2], PAGES, PAGES, table, lengths, shared_prefix=shared)


def call(function: Callable[..., Any], **usual: Any) -> Callable[..., Any]:
    return lambda **given: function(**{**usual, **given})


DENSE = call(tw.attention, q=Q, k=Q, v=Q)
VARLEN = call(tw.attention_varlen, q=ROWS, k=ROWS, v=ROWS, cu_seqlens_q=CU, cu_seqlens_k=CU)
PAGED = call(tw.attention_paged, q=ROWS[:2], k_pages=PAGES, v_pages=PAGES, block_table=TABLE, seqlens_k=LENGTHS)
MERGE = call(tw.merge, out_a=OUT, lse_a=LSE, out_b=OUT, lse_b=LSE)
SDPA = call(sdpa.scaled_dot_product_attention, query=Q, key=Q, value=Q)
HEADS_LAST = Q.transpose(1, 2)
FA2 = call(flash_attn.flash_attn_func, q=HEADS_LAST, k=HEADS_LAST, v=HEADS_LAST)
FA3 = call(flash_attn_interface.flash_attn_func, q=HEADS_LAST, k=HEADS_LAST, v=HEADS_LAST)
KV = call(
    flash_attn.flash_attn_with_kvcache, q=HEADS_LAST, k_cache=HEADS_LAST.contiguous(), v_cache=HEADS_LAST.contiguous()
)
LAYER = MultiheadAttention(8, 2, batch_first=True)
ATTEND = call(LAYER.forward, query=ROWS, key=ROWS, value=ROWS, need_weights=False)
CONTAINER = call(
    Fp8Tensor, data=QUANTISED.data, scale=QUANTISED.scale, granularity=QUANTISED.granularity, layout=QUANTISED.layout
)
TAKES: list[tuple[Callable[..., Any], str, Tensor]] = [
    *((DENSE, name, Q) for name in "qkv"),
    (DENSE, "bias", randn(5, 5)),
    (DENSE, "mask", KEEP),
    (DENSE, "alibi_slopes", randn(4).abs()),
    (DENSE, "sinks", randn(4)),
    (call(DENSE, dropout=0.5), "seed", torch.tensor(3)),
    *((VARLEN, name, ROWS) for name in "qkv"),
    *((VARLEN, name, CU) for name in ("cu_seqlens_q", "cu_seqlens_k")),
    (PAGED, "q", ROWS[:2]),
    *((PAGED, name, PAGES) for name in ("k_pages", "v_pages")),
    (PAGED, "block_table", TABLE),
    (PAGED, "seqlens_k", LENGTHS),
    *((MERGE, name, OUT) for name in ("out_a", "out_b")),
    *((MERGE, name, LSE) for name in ("lse_a", "lse_b")),
    (call(tw.explain, q=Q, k=Q, v=Q), "q", Q),
    (call(tw.explain, q=Q, k=Q, v=Q), "bias", randn(5, 5)),
    (fp8.quantize, "x", Q),
    (call(fp8.quantize, x=Q), "scale", torch.ones(2, 4, 1)),
    (call(fp8.quantize, x=ROWS), "cu_seqlens", CU),
    (fp8.quantize_pages, "pages", PAGES),
    (CONTAINER, "data", QUANTISED.data),
    (CONTAINER, "scale", QUANTISED.scale),
    (of_prefix, "block_table", TABLE[:1, :1]),
    (of_prefix, "own_seqlens", int32(3, 2)),
    *((of_cache, name, ROWS[:3]) for name in "kv"),
    *((SDPA, name, Q) for name in ("query", "key", "value")),
    (SDPA, "attn_mask", KEEP),
    *((FA2, name, HEADS_LAST) for name in "qkv"),
    *((FA3, name, HEADS_LAST) for name in "qkv"),
    (KV, "q", HEADS_LAST),
    *((KV, name, HEADS_LAST.contiguous()) for name in ("k_cache", "v_cache")),
    (KV, "cache_seqlens", int32(2, 3)),
    (ATTEND, "attn_mask", randn(4, 4) > 0),
    (ATTEND, "key_padding_mask", randn(9, 4) > 9),
    (call(rotate, x=ROWS[None], sin=randn(9, 4)), "cos", randn(9, 4)),
]
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "__torch_function__": lambda t: t.as_subclass(Overriding),
    "__torch_dispatch__": lambda t: t.as_subclass(Dispatching),
    "CausalBias": lambda _: causal_lower_right(5, 5),
    "MaskedTensor": lambda t: torch.masked.masked_tensor(t, torch.ones_like(t, dtype=torch.bool)),
}
IDS = [f"{i}-{name}" for i, (_, name, _) in enumerate(TAKES)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
@pytest.mark.filterwarnings("ignore:It is not recommended to create a MaskedTensor:UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize(("function", "name", "tensor"), TAKES, ids=IDS)
def test_a_subclass_with_operations_of_its_own_is_refused(
    function: Callable[..., Any], name: str, tensor: Tensor, kind: str
) -> None:
    if kind == "CausalBias" and (function is SDPA and name == "attn_mask"):
        return  # what it is for
    if kind == "MaskedTensor" and (not tensor.is_floating_point() or tensor.dtype == torch.float8_e4m3fn):
        return  # torch makes none
    # Those of torch have other shapes and dtypes, which may be the reason that comes first.
    reason = "a subclass with no operations of its own" if kind.startswith("__") else "expected"
    with pytest.raises(tw.InvalidProblem, match=reason) as caught:
        function(**{name: REFUSED[kind](tensor)})
    assert caught.value.argument.split(".")[-1] == name


@pytest.mark.parametrize("kind", [Named, Quiet])
@pytest.mark.parametrize(("function", "name", "tensor"), TAKES, ids=IDS)
def test_a_subclass_that_only_adds_is_the_tensor_that_it_is(
    function: Callable[..., Any], name: str, tensor: Tensor, kind: type[Tensor]
) -> None:
    plain, mine = function(**{name: tensor}), function(**{name: tensor.as_subclass(kind)})
    if isinstance(plain, Tensor):
        assert torch.equal(mine.as_subclass(Tensor), plain)


def test_results_keep_the_subclass_as_those_of_torch_do() -> None:
    for kind in (Named, Quiet):
        q = Q.as_subclass(kind)
        torchs = F.scaled_dot_product_attention(q, Q, Q)
        assert type(tw.attention(q, Q, Q)) is type(torchs) is (kind if kind is Named else Tensor)


def test_gradients_of_a_subclass_that_only_adds() -> None:
    weights, plain = (randn(2, 4, 5, 8, seed=3).requires_grad_() for _ in range(2))
    tw.attention(weights.as_subclass(Named), Q, Q).square().sum().backward()
    tw.attention(plain, Q, Q).square().sum().backward()
    assert weights.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(weights.grad.as_subclass(Tensor), plain.grad)


def test_a_refused_tensor_is_refused_after_a_plain_one_that_looks_the_same() -> None:
    bias = randn(5, 5)
    for _ in range(3):
        tw.attention(Q, Q, Q, bias=bias)
    with pytest.raises(tw.InvalidProblem, match=r"bias: expected a torch.Tensor, or .* got Overriding. Convert it"):
        tw.attention(Q, Q, Q, bias=bias.as_subclass(Overriding))


def test_the_reason_names_a_way_out() -> None:
    with pytest.raises(tw.InvalidProblem, match=r"bias: .*, got CausalBias. causal=True is causal_lower_right"):
        tw.attention(Q, Q, Q, bias=causal_lower_right(5, 5))


def test_parameters_and_fake_tensors_are_taken() -> None:
    assert torch.equal(tw.attention(torch.nn.Parameter(Q), Q, Q), OUT)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(Q)
        assert tw.attention(fake, fake, fake).shape == OUT.shape
    exported = torch.export.export(Attention(), (Q,))
    assert torch.equal(exported.module()(Q), OUT)


class Attention(torch.nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return tw.attention(q, q, q)


def test_a_collective_under_way_is_taken_and_a_dtensor_refused(one_rank: Any) -> None:
    from torch.distributed import _functional_collectives as collectives
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    reduced = collectives.all_reduce(Q, "sum", one_rank)
    assert type(reduced) is collectives.AsyncCollectiveTensor
    assert torch.equal(tw.attention(reduced, Q, Q), OUT)
    whole = distribute_tensor(Q, init_device_mesh("cpu", (1,)), [Replicate()])
    with pytest.raises(tw.InvalidProblem, match=r"k: expected .* got DTensor. Pass its local part, tensor.to_local()"):
        tw.attention(Q, whole, Q)
