"""The drop-ins on a GPU: every call gives there what it gives on the CPU, where it is held against the originals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils import _pytree as pytree

import tilewise as tw
from making import int32
from operators import Operators, activated, needs_registry
from tilewise import fp8
from tilewise.integrations import flash_attn, flash_attn_interface, sdpa
from tilewise.nn import CausalSelfAttention, MultiheadAttention

HALF = torch.float16


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 31 * sum(shape))).to(dtype)


def on(device: str, tree: Any) -> Any:
    """A copy of every tensor, on the device."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone().to(device), tree)


def close(mine: Any, expected: Any, factor: float = 1.0) -> None:
    for a, b in zip(pytree.tree_leaves(mine), pytree.tree_leaves(expected), strict=True):
        tolerance = (3e-3 if a.dtype is HALF else 2e-5) * factor
        torch.testing.assert_close(a.cpu(), b, atol=tolerance, rtol=tolerance)


Q, K, V = randn(2, 70, 8, 64), randn(2, 90, 2, 64, seed=1), randn(2, 90, 2, 64, seed=2)
SLOPES = 2.0 ** -torch.arange(1.0, 9.0)
ROWS, KEYS = (int32(0, 30, 30, 140), int32(0, 80, 100, 180))
PACKED = (Q.flatten(0, 1), K.flatten(0, 1), V.flatten(0, 1), ROWS, KEYS, 110, 80)
TABLE = int32([5, 0, 7], [2, 11, 1])
FA3 = flash_attn_interface
DENSE: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "fa2": (flash_attn.flash_attn_func, (Q, K, V), {"causal": True, "window_size": (20, 3)}),
    "fa2 softcap alibi": (flash_attn.flash_attn_func, (Q, K, V), {"softcap": 2.0, "alibi_slopes": SLOPES}),
    "fa2 qkvpacked": (flash_attn.flash_attn_qkvpacked_func, (randn(2, 70, 3, 4, 64),), {"causal": True}),
    "fa2 varlen": (flash_attn.flash_attn_varlen_func, PACKED, {"causal": True}),
    "fa3": (FA3.flash_attn_func, (Q, K, V), {"causal": True, "num_splits": 3, "pack_gqa": True}),
    "fa3 chunk": (FA3.flash_attn_func, (Q, K, V), {"attention_chunk": 16, "causal": True}),
    "fa3 qv": (FA3.flash_attn_func, (Q, K, V), {"qv": randn(2, 70, 8, 64, seed=5)}),
    "sdpa": (
        sdpa.scaled_dot_product_attention,
        (Q.transpose(1, 2), K.transpose(1, 2), V.transpose(1, 2)),
        {"is_causal": True, "enable_gqa": True},
    ),
    "sdpa mask": (
        sdpa.scaled_dot_product_attention,
        (randn(3, 4, 33, 40), randn(3, 4, 50, 40, seed=1), randn(3, 4, 50, 40, seed=2)),
        {"attn_mask": randn(33, 50) > 0},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("name", DENSE)
def test_dropins_and_their_gradients(name: str, dtype: torch.dtype) -> None:
    function, args, flags = DENSE[name]
    args = pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, args)
    if "qv" in flags:
        flags = {**flags, "qv": flags["qv"].to(dtype)}

    def run(device: str) -> tuple[Tensor, ...]:
        moved, keywords = on(device, args), on(device, flags)
        inputs = [t.requires_grad_() for t in moved if isinstance(t, Tensor) and t.is_floating_point()]
        out = function(*moved, **keywords)
        return (out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs))

    close(run("cuda"), run("cpu"), factor=4.0)


CACHE = randn(4, 12, 2, 8, seed=3)
ROTARY = {"rotary_cos": randn(32, 3).cos(), "rotary_sin": randn(32, 3).sin()}
FRESH = {"k": randn(2, 2, 2, 8, seed=1), "v": randn(2, 2, 2, 8, seed=2), **ROTARY}
CACHED: dict[str, tuple[Tensor, dict[str, Any]]] = {
    "whole": (CACHE[:2], {**FRESH, "cache_seqlens": int32(6, 3)}),
    "length as int": (CACHE[:2], {**FRESH, "cache_seqlens": 6}),
    "batch index and padding": (
        CACHE,
        {**FRESH, "cache_seqlens": int32(6, 3), "cache_batch_idx": int32(3, 1), "cache_leftpad": int32(2, 1)},
    ),
    "pages": (CACHE.reshape(12, 4, 2, 8), {**FRESH, "cache_seqlens": int32(6, 3), "block_table": TABLE}),
    "pages of one token": (
        CACHE.reshape(48, 1, 2, 8),
        {**FRESH, "cache_seqlens": int32(6, 3), "block_table": torch.arange(48, dtype=torch.int32).view(2, 24).flip(1)},
    ),
    "pages of rows and padding": (
        CACHE.reshape(12, 4, 2, 8),
        {
            **FRESH, "cache_seqlens": int32(6, 3), "block_table": TABLE.flip(0), "cache_batch_idx": int32(1, 0),
            "cache_leftpad": int32(2, 1),
        },
    ),
    "read only": (CACHE[:2], {"cache_seqlens": int32(6, 3)}),
}  # fmt: skip


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface], ids=["fa2", "fa3"])
@pytest.mark.parametrize("name", CACHED)
def test_caches_are_read_and_written_in_place(name: str, module: Any) -> None:
    store, flags = CACHED[name]
    if module is flash_attn_interface and "block_table" in flags:
        flags = {("page_table" if n == "block_table" else n): t for n, t in flags.items()}

    def run(device: str) -> tuple[Tensor, ...]:
        q, k_cache, v_cache = on(device, (randn(2, 2, 4, 8), store, store))
        result = module.flash_attn_with_kvcache(
            q, k_cache, v_cache, **on(device, flags), causal=True, return_softmax_lse=True
        )
        return result[0], result[1], k_cache, v_cache

    close(run("cuda"), run("cpu"))


OUTSIDE: dict[str, tuple[dict[str, Any], str]] = {
    "a page too high": ({"block_table": int32([1, 3], [5, 12])}, "block_table: expected from 0 to 47"),
    "a page far away": ({"block_table": int32([1, 3], [5, 2**30])}, "block_table: expected from 0 to 47"),
    "a page below 0": ({"block_table": int32([1, -1], [5, 0])}, "block_table: expected from 0 to 47"),
    "a length too high": ({"cache_seqlens": int32(6, 8)}, "cache_seqlens: expected from 0 to 7"),
    "a short table of angles": (
        {"rotary_cos": ROTARY["rotary_cos"][:6], "rotary_sin": ROTARY["rotary_sin"][:6]},
        "rotary_cos: expected from 0 to 5",
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_pages_that_do_not_exist_are_named_before_rows_are_scattered(name: str) -> None:
    """A device assert would end the CUDA context, and with it all tests after this one."""
    change, message = OUTSIDE[name]
    flags = {**FRESH, "cache_seqlens": int32(5, 4), "block_table": int32([1, 3], [5, 0]), **change}
    k_cache, v_cache = (CACHE.reshape(12, 4, 2, 8).cuda() for _ in range(2))
    with pytest.raises(tw.InvalidProblem, match=message):
        flash_attn.flash_attn_with_kvcache(randn(2, 1, 4, 8).cuda(), k_cache, v_cache, **on("cuda", flags))
    torch.cuda.synchronize()
    assert torch.equal(k_cache.cpu(), CACHE.reshape(12, 4, 2, 8))
    assert torch.equal(v_cache.cpu(), CACHE.reshape(12, 4, 2, 8))


def test_lengths_past_the_table_are_refused_as_in_flash_attn(
    no_waiting: Callable[[], AbstractContextManager[None]],
) -> None:
    """Nothing is appended, so nothing is written: flash-attn 2 reads these lengths, flash-attn 3 does not wait."""
    pages, table = CACHE.reshape(12, 4, 2, 8).cuda(), int32([1, 3], [5, 0]).cuda()
    q, lengths = randn(2, 1, 4, 8).cuda(), int32(8, 9).cuda()
    with pytest.raises(RuntimeError, match=r"cache_seqlens: expected from 0 to 8.*block_table"):
        flash_attn.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=table)
    flash_attn.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths.clamp(max=8), block_table=table)
    flash_attn_interface.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths - 1, page_table=table)
    with no_waiting():
        flash_attn_interface.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths - 1, page_table=table)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_long_latents_are_refused_when_they_are_asked_for(packed: bool) -> None:
    q, qv, k, v = (randn(1, 5, *shape).bfloat16().cuda() for shape in ((16, 64), (16, 512), (1, 64), (1, 512)))
    totals: Any = int32(0, 5).cuda()

    def attend(q: Tensor) -> Any:
        if not packed:
            return flash_attn_interface.flash_attn_func(q, k, v, qv=qv)
        packed_q, packed_k, packed_v, packed_qv = (t.flatten(0, 1) for t in (q, k, v, qv))
        return flash_attn_interface.flash_attn_varlen_func(
            packed_q, packed_k, packed_v, totals, totals, 5, 5, qv=packed_qv
        )

    out = attend(q.clone().requires_grad_())
    assert torch.equal(out, attend(q))
    with pytest.raises(tw.Unsupported, match="gradients take head_dim up to 512, not 576"):
        out.sum().backward()


@pytest.mark.parametrize("paged", [False, True])
def test_a_captured_step_writes_what_an_eager_one_does(paged: bool) -> None:
    q, new, lengths = randn(2, 1, 4, 8).cuda(), randn(2, 1, 2, 8, seed=1).cuda(), int32(5, 4).cuda()
    k_cache, v_cache = ((CACHE.reshape(12, 4, 2, 8) if paged else CACHE[:2]).clone().cuda() for _ in range(2))
    options: Any = {"block_table": int32([1, 3], [5, 0]).cuda()} if paged else {}

    def step() -> Any:
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, new, new, cache_seqlens=lengths, causal=True, **options
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    lengths.add_(1)
    graph.replay()
    captured, written = out.clone(), k_cache.clone()
    assert torch.equal(step(), captured)
    assert torch.equal(k_cache, written)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_totals_of_int64_are_those_of_int32(dtype: torch.dtype) -> None:
    q, k, v = (
        randn(n, h, 64, seed=i).to("cuda", dtype).requires_grad_()
        for i, (n, h) in enumerate(((200, 4), (300, 2), (300, 2)))
    )
    totals = int32(0, 70, 70, 190).cuda(), int32(0, 100, 180, 290).cuda()
    results: list[list[Tensor]] = []
    for wide in (False, True, True):
        given = [t.long() if wide else t for t in totals]
        out = tw.attention_varlen(q, k, v, *given, max_seqlen_q=120, max_seqlen_k=110, causal=True, deterministic=True)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    codes = [fp8.quantize(q.detach(), cu_seqlens=t, max_seqlen=120) for t in (totals[0], totals[0].long())]
    assert torch.equal(codes[0].data.view(torch.uint8), codes[1].data.view(torch.uint8))
    with pytest.raises(tw.InvalidProblem, match="scale: expected a shape that broadcasts"):
        fp8.quantize(q.detach(), cu_seqlens=totals[0], max_seqlen=120, scale=torch.ones(5, device="cuda"))


def test_private_passes_are_those_of_the_public_functions() -> None:
    private: Any = flash_attn.flash_attn_interface
    q, k, v = (randn(2, n, 4, 64, seed=i).to("cuda", HALF).requires_grad_() for i, n in enumerate((70, 90, 90)))
    flags = (0.3, 0.125, True, -1, -1, 0.0, None)
    torch.manual_seed(0)
    want: Any = flash_attn.flash_attn_func(q, k, v, 0.3, 0.125, True)
    torch.manual_seed(0)
    with torch.no_grad():
        out, lse, _, rng_state = private._flash_attn_forward(q, k, v, *flags, False)
    assert torch.equal(out, want)
    assert rng_state.is_cuda
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    dout = randn(*out.shape, seed=5).to(out)
    tensors = (q.detach(), k.detach(), v.detach())
    private._flash_attn_backward(dout, *tensors, out, lse, dq, dk, dv, *flags, False, rng_state=rng_state)
    for a, b in zip((dq, dk, dv), torch.autograd.grad(want, (q, k, v), dout), strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_dropout_follows_the_seed() -> None:
    def run(device: str) -> Any:
        torch.manual_seed(7)
        q, k, v = on(device, (Q, K, V))
        return flash_attn.flash_attn_func(q, k, v, 0.3, causal=True, return_attn_probs=True)

    mine, again = run("cuda"), run("cuda")
    assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))
    assert (mine[2] < 0).any()


@needs_registry
@pytest.mark.parametrize("lengths", [(96, 96), (40, 96), (96, 40)], ids=str)
def test_torchs_flash_kernels_are_replaced_on_cuda(lengths: tuple[int, int]) -> None:
    q, k, v = (
        randn(2, 4, n, 64, seed=i, dtype=HALF).cuda().requires_grad_() for i, n in enumerate((*lengths, lengths[1]))
    )

    def run() -> list[Tensor]:
        results = []
        with torch_attention.sdpa_kernel(torch_attention.SDPBackend.FLASH_ATTENTION):
            for causal in (False, lengths[0] == lengths[1]):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                results += [out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))]
        return results

    before = run()
    with activated():
        active = run()
    for a, b in zip(active, before, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=1e-2)
        assert a.stride() == b.stride()
    assert not all(torch.equal(a, b) for a, b in zip(active, before, strict=True))


# Torch warns that rows without a key are NaN; here they are 0.
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs:UserWarning")
@needs_registry
@pytest.mark.parametrize("lengths", [(64, 200), (200, 64), (96, 96)], ids=str)
def test_causal_alignment_with_torchs_flash_kernels_replaced(lengths: tuple[int, int]) -> None:
    """The kernels align causal with the bottom-right corner, SDPA with the top-left one."""
    seqlen_q, seqlen_k = lengths
    q, k, v = (
        randn(2, 4, n, 64, seed=i, dtype=HALF).cuda().requires_grad_() for i, n in enumerate((*lengths, seqlen_k))
    )
    calls: list[tuple[int, dict[str, Any]]] = [
        (0, {"is_causal": True}),
        (0, {"attn_mask": causal_upper_left(*lengths)}),
        (seqlen_k - seqlen_q, {"attn_mask": causal_lower_right(*lengths)}),
    ]

    def run(function: Callable[..., Tensor], **flags: Any) -> list[Tensor]:
        out = function(q, k, v, **flags)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    for diagonal, flags in calls:
        mask = torch.ones(lengths, dtype=torch.bool, device="cuda").tril(diagonal)
        expected = run(sdpa.scaled_dot_product_attention, attn_mask=mask)
        with activated():
            active = run(F.scaled_dot_product_attention, **flags)
        for found in (active, run(sdpa.scaled_dot_product_attention, **flags)):
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, atol=2e-2, rtol=1e-2)


def test_routed_reaches_torchs_modules() -> None:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0, device="cuda")
    x = randn(2, 70, 64).cuda().requires_grad_()
    plain = torch.autograd.grad(layer(x).square().sum(), x)[0]
    with sdpa.routed():
        routed = torch.autograd.grad(layer(x).square().sum(), x)[0]
    torch.testing.assert_close(plain, routed, atol=1e-3, rtol=1e-3)
    layer.eval()
    with torch.no_grad():
        fused = layer(x)
        with sdpa.routed(), Operators() as operators:
            found = layer(x)
    torch.testing.assert_close(found, fused, atol=1e-3, rtol=1e-3)
    assert [name for name in operators.names if "tilewise" in name or "scaled_dot" in name] == [
        "tilewise.dense.default"
    ]


@pytest.mark.parametrize(
    "make", [lambda: MultiheadAttention(64, 4, batch_first=True), lambda: CausalSelfAttention(64, 4)]
)
def test_modules(make: Callable[[], torch.nn.Module]) -> None:
    torch.manual_seed(0)
    module, x = make(), randn(2, 33, 64)

    def run(device: str) -> Any:
        moved = module.to(device)
        inputs = on(device, (x,) * 3) if isinstance(module, MultiheadAttention) else on(device, (x,))
        keywords = {"need_weights": False} if isinstance(module, MultiheadAttention) else {}
        return pytree.tree_leaves(moved(*inputs, **keywords))[0].detach()

    expected = run("cpu")
    close(run("cuda"), expected, factor=2.0)


# Importing torch's compiler warns about its own use of torch.jit.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_compiles_by_inductor_with_dynamic_lengths() -> None:
    torch._dynamo.reset()

    def loss(q: Tensor) -> Tensor:
        out = flash_attn.flash_attn_func(q * 1.5, q, q, causal=True)
        assert isinstance(out, Tensor)
        return (out.float() + 1).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for i, seqlen in enumerate((40, 72, 129, 300)):
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            q = randn(2, seqlen, 4, 64, dtype=HALF).cuda().requires_grad_()
            mine, eager = (torch.autograd.grad(f(q), q)[0] for f in (compiled, loss))
            torch.testing.assert_close(mine, eager, atol=2e-2, rtol=2e-2)
