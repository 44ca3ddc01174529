"""The drop-ins under what PyTorch does to models: compile, export, torch.func, checkpoints, autocast, DDP, FSDP."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from making import int32, randn
from tilewise.integrations import flash_attn, flash_attn_interface, sdpa
from tilewise.nn import CausalSelfAttention, MultiheadAttention

pytestmark = pytest.mark.slow

LENGTHS = (5, 7, 8, 11, 13, 16, 17, 19, 23, 24, 29, 31, 32, 33, 40, 47, 48, 63, 64, 65, 100)


def packed(q: Tensor) -> Any:
    flat, cu = q.flatten(0, 1), torch.arange(3, dtype=torch.int32) * q.shape[1]
    return flash_attn.flash_attn_varlen_func(flat, flat, flat, cu, cu, q.shape[1], q.shape[1], causal=True)


# One call a drop-in; q is (batch, seqlen, heads, dim).
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "sdpa": lambda q: sdpa.scaled_dot_product_attention(*(q.transpose(1, 2),) * 3, is_causal=True),
    "flash_attn_func": lambda q: flash_attn.flash_attn_func(q, q, q, causal=True, window_size=(9, 0), softcap=3.0),
    "flash_attn_qkvpacked": lambda q: flash_attn.flash_attn_qkvpacked_func(torch.stack((q, q, q), 2), causal=True),
    "flash_attn_varlen": packed,
    "fa3": lambda q: flash_attn_interface.flash_attn_func(q, q, q, causal=True),
}


@pytest.mark.parametrize("name", ["sdpa", "flash_attn_func", "flash_attn_varlen"])
def test_compile_fullgraph_with_backward_over_20_lengths_without_recompiling(name: str) -> None:
    torch._dynamo.reset()
    call = CALLS[name]
    compiled = torch.compile(lambda q: call(q).square().sum(), fullgraph=True, dynamic=True, backend="aot_eager")

    def compare(seqlen: int) -> None:
        q = randn(2, seqlen, 4, 8, seed=seqlen, grad=True)
        mine, eager = compiled(q), call(q).square().sum()
        torch.testing.assert_close(mine, eager)
        a, b = (torch.autograd.grad(loss, q)[0] for loss in (mine, eager))
        torch.testing.assert_close(a, b)

    compare(LENGTHS[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        for seqlen in LENGTHS[1:]:
            compare(seqlen)


def test_compile_of_the_cache() -> None:
    torch._dynamo.reset()
    step = torch.compile(flash_attn.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    q, new, cache = randn(2, 1, 4, 8), randn(2, 1, 2, 8, seed=1), randn(2, 12, 2, 8, seed=2)
    eager = cache.clone()
    for i in range(3):
        lengths = int32(5 + i, 2 + i)
        mine = step(q, cache, cache, new, new, cache_seqlens=lengths, causal=True)
        assert torch.equal(mine, flash_attn.flash_attn_with_kvcache(q, eager, eager, new, new, cache_seqlens=lengths))  # type: ignore[arg-type]
        assert torch.equal(cache, eager)


@pytest.mark.parametrize(
    "module", [MultiheadAttention(16, 4, batch_first=True), CausalSelfAttention(16, 4)], ids=["mha", "causal"]
)
def test_modules_compile_and_export(module: torch.nn.Module) -> None:
    torch._dynamo.reset()

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Any:
            return (
                self.inner(x, x, x, need_weights=False)[0]
                if isinstance(self.inner, MultiheadAttention)
                else self.inner(x)
            )

    model, x = Wrapped(), randn(2, 9, 16)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    seqlen = torch.export.Dim("seqlen", min=2, max=64)
    exported = torch.export.export(model, (x,), dynamic_shapes=({1: seqlen},))
    longer = randn(2, 21, 16, seed=1)
    torch.testing.assert_close(exported.module()(longer), model(longer))


def one_by_one(function: Callable[..., Tensor], *batches: Tensor) -> Tensor:
    return torch.stack([function(*example) for example in zip(*batches, strict=True)])


BIAS, SLOPES = randn(4, 5, 5), randn(4).abs()
VMAPPED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "dense": (lambda q, k: tw.attention(q, k, k, causal=True), (randn(3, 2, 4, 5, 8), randn(3, 2, 2, 7, 8))),
    "shared keys and bias": (
        lambda q: tw.attention(q, q[:1].expand_as(q), q, bias=BIAS, alibi_slopes=SLOPES),
        (randn(3, 2, 4, 5, 8),),
    ),
    "bias and slopes of each": (
        lambda q, b, s: tw.attention(q, q, q, bias=b, alibi_slopes=s),
        (randn(3, 2, 4, 5, 8), randn(3, 2, 1, 5, 5), randn(3, 4).abs()),
    ),
    "mask of each": (lambda q, m: tw.attention(q, q, q, mask=m), (randn(3, 2, 4, 5, 8), randn(3, 1, 4, 5, 5) > -1)),
    "sinks of each": (lambda q, s: tw.attention(q, q, q, sinks=s), (randn(3, 2, 4, 5, 8), randn(3, 4))),
    "dropout": (lambda q: tw.attention(q, q, q, dropout=0.4, seed=7), (randn(3, 2, 4, 5, 8),)),
    "bshd": (lambda q: tw.attention(q, q, q, layout="bshd"), (randn(3, 2, 5, 4, 8),)),
    "varlen": (lambda q: tw.attention_varlen(q, q, q, int32(0, 2, 5), int32(0, 2, 5)), (randn(3, 5, 4, 8),)),
    "paged": (
        lambda q, p: tw.attention_paged(q, p, p, int32(1, 0, 2, 2).view(2, 2), int32(3, 1)),
        (randn(3, 2, 4, 8), randn(3, 3, 2, 2, 8)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VMAPPED)
def test_vmap_equals_a_loop_also_for_gradients(name: str) -> None:
    function, batches = VMAPPED[name]
    assert torch.equal(torch.vmap(function)(*batches), one_by_one(function, *batches))
    floats = tuple(
        i for i, b in enumerate(batches) if b.is_floating_point() and not (name.startswith("bias and") and i == 2)
    )
    gradients = torch.func.grad(lambda *a: function(*a).square().sum(), argnums=floats)
    for mine, loop in zip(
        torch.vmap(gradients)(*batches),
        zip(*[gradients(*e) for e in zip(*batches, strict=True)], strict=True),
        strict=True,
    ):
        assert torch.equal(mine, torch.stack(loop))


def test_torch_func_transforms() -> None:
    q = randn(1, 2, 4, 8)
    jacobian = torch.func.jacrev(lambda q: tw.attention(q, q, q)[0, 0, 1])(q)
    rows = [torch.func.grad(lambda q, i=i: tw.attention(q, q, q)[0, 0, 1, i])(q) for i in range(8)]
    torch.testing.assert_close(jacobian, torch.stack(rows))
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda q: tw.attention(q, q, q, dropout=0.5))(randn(2, 1, 2, 4, 8))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_repeats_the_dropout(reentrant: bool) -> None:
    q = randn(2, 16, 4, 8, grad=True)

    def block(q: Tensor) -> Tensor:
        out = flash_attn.flash_attn_func(q * 2, q, q, 0.3, causal=True)
        assert isinstance(out, Tensor)
        return out

    results = []
    for run in (block, lambda q: checkpoint(block, q, use_reentrant=reentrant)):
        torch.manual_seed(5)
        out = run(q)
        results.append((out, torch.autograd.grad(out.square().sum(), q)[0] if not reentrant else backward(out, q)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def backward(out: Tensor, leaf: Tensor) -> Tensor:
    """Reentrant checkpointing knows `.backward()` only."""
    leaf.grad = None
    out.square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad.clone()


@pytest.mark.parametrize("name", CALLS)
def test_autocast_and_meta(name: str) -> None:
    q = randn(2, 9, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert CALLS[name](q).dtype is torch.bfloat16
    if name != "flash_attn_varlen":
        on_meta = CALLS[name](q.to("meta"))
        assert (on_meta.shape, on_meta.dtype) == (CALLS[name](q).shape, q.dtype)


def data_parallel(module: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(module)


def fully_sharded(module: torch.nn.Module) -> torch.nn.Module:
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    return module


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", [data_parallel, fully_sharded])
def test_parallel_wrappers_on_one_process(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    layer = CausalSelfAttention(16, 4, num_kv_heads=2)
    parallel = wrap(copy.deepcopy(layer))
    x = randn(2, 9, 16)
    for model in (layer, parallel):
        model(x).square().sum().backward()
    for a, b in zip(layer.parameters(), parallel.parameters(), strict=True):
        gradient = b.grad.to_local() if isinstance(b.grad, DTensor) else b.grad
        torch.testing.assert_close(a.grad, gradient)
