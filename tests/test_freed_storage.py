"""A tensor whose storage was freed or cut is refused by name, before a kernel reads its memory. FSDP frees storages."""

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import calls
from tilewise.errors import InvalidProblem
from tilewise.integrations import flash_attn, flex, sdpa
from tilewise.kv import append_rotated, rotary_table
from tilewise.kv.writing import write_rows
from tilewise.operands import Operands

DENSE, ROWS = (1, 2, 40, 16), (10, 2, 16)
TOTALS = [0, 4, 10]


def free(tensor: Tensor, size: int = 0) -> None:
    tensor.untyped_storage().resize_(size)


def refused(name: str) -> Any:
    return pytest.raises(
        InvalidProblem, match=rf"^{re.escape(name)}: expected a storage of .* bytes or more, got one of 0"
    )


def new(*shape: int) -> Tensor:
    return torch.randn(shape)


def ints(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def documents() -> tw.TileMask:
    return tw.TileMask.documents(torch.arange(40) // 10)


# What reads the tiles and bits of a mask outside of a call.
MADE_OF_MASKS: dict[str, Callable[[tw.TileMask], Any]] = {
    "and": lambda mask: documents() & mask,
    "or": lambda mask: mask | documents(),
    "not": lambda mask: ~mask,
    "cut": lambda mask: mask.cut((0, 10), (0, 40)),
    "cut inside a tile": lambda mask: mask.cut((5, 10), (5, 40)),
    "grow": lambda mask: mask.grow(torch.ones(1, 41, dtype=torch.bool)),
    "stack": lambda mask: tw.TileMask.stack([documents(), mask]),
    "longer": lambda mask: tw.TileMask.stack([mask], seqlen_k=200),
    "dense": lambda mask: mask.dense(),
    "pickle": pickle.dumps,
}


def dense(**flags: Any) -> dict[str, Any]:
    return {"q": new(*DENSE), "k": new(*DENSE), "v": new(*DENSE)} | flags


def packed(**flags: Any) -> dict[str, Any]:
    totals = {"cu_seqlens_q": ints(*TOTALS), "cu_seqlens_k": ints(*TOTALS)}
    return {"q": new(*ROWS), "k": new(*ROWS), "v": new(*ROWS)} | totals | flags


def paged(**flags: Any) -> dict[str, Any]:
    pages = {"k_pages": new(4, 8, 2, 16), "v_pages": new(4, 8, 2, 16)}
    return {"q": new(2, 2, 16)} | pages | {"block_table": ints([0, 1], [2, 3]), "seqlens_k": ints(9, 16)} | flags


def rotated() -> dict[str, Any]:
    given = {"q": new(10, 4, 16), "k": new(*ROWS), "v": new(*ROWS)}
    given |= {"k_pages": new(4, 8, 2, 16), "v_pages": new(4, 8, 2, 16), "slots": torch.arange(10)}
    given |= {"positions": torch.arange(10), "cos_sin": rotary_table(32, 16, device="cpu"), "out": new(10, 4, 16)}
    return given | {"norm_eps": 1e-6, "q_weight": new(16), "k_weight": new(16)}


def partial() -> dict[str, Any]:
    return {"out_a": new(*DENSE), "lse_a": new(*DENSE[:3]), "out_b": new(*DENSE), "lse_b": new(*DENSE[:3])}


def written() -> dict[str, Any]:
    pages = {"k_pages": new(4, 8, 2, 16), "v_pages": new(4, 8, 2, 16)}
    return {"k": new(*ROWS), "v": new(*ROWS)} | pages | {"slots": torch.arange(10)}


CALLS: list[tuple[str, Callable[..., Any], Callable[[], dict[str, Any]], tuple[str, ...]]] = [
    ("dense", tw.attention, dense, ("q", "k", "v")),
    ("reference", tw.attention, lambda: dense(backend="reference"), ("k",)),
    ("bshd", tw.attention, lambda: dense(layout="bshd"), ("v",)),
    ("out", tw.attention, lambda: dense(out=new(*DENSE)), ("out", "k")),
    ("bias", tw.attention, lambda: dense(bias=new(40, 40)), ("bias",)),
    ("mask", tw.attention, lambda: dense(mask=torch.ones(40, 40, dtype=torch.bool)), ("mask",)),
    ("sinks", tw.attention, lambda: dense(sinks=new(2), alibi_slopes=new(2)), ("sinks", "alibi_slopes")),
    ("seed", tw.attention, lambda: dense(dropout=0.5, seed=torch.tensor([3])), ("seed", "k")),
    ("varlen", tw.attention_varlen, packed, ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")),
    ("bounded", tw.attention_varlen, lambda: packed(max_seqlen_q=6, max_seqlen_k=6), ("v", "cu_seqlens_k")),
    ("paged", tw.attention_paged, paged, ("q", "k_pages", "v_pages", "block_table", "seqlens_k")),
    ("paged out", tw.attention_paged, lambda: paged(out=new(2, 2, 16)), ("out", "k_pages")),
    ("merge", tw.merge, partial, ("out_a", "lse_a", "out_b", "lse_b")),
    ("quantize", tw.fp8.quantize, lambda: {"x": new(*DENSE), "scale": torch.ones(1, 2, 1)}, ("x", "scale")),
    ("packed", tw.fp8.quantize, lambda: {"x": new(*ROWS), "cu_seqlens": ints(*TOTALS)}, ("x", "cu_seqlens")),
    ("pages", tw.fp8.quantize_pages, lambda: {"pages": new(4, 8, 2, 16)}, ("pages",)),
    ("rotated", append_rotated, rotated, tuple(name for name in rotated() if name != "norm_eps")),
    ("write", write_rows, written, ("k", "v", "k_pages", "v_pages", "slots")),
    ("documents", tw.TileMask.documents, lambda: {"ids": torch.arange(40)}, ("ids",)),
    ("explain", tw.explain, dense, ("k",)),
]


# Validated in every call, which only looks at addresses.
UNCUT = ("seed", "varlen", "explain")


@pytest.mark.parametrize(
    ("call", "make", "name", "sizes"),
    [
        pytest.param(call, make, name, (0,) if label in UNCUT else (0, 4), id=f"{label}-{name}")
        for label, call, make, names in CALLS
        for name in names
    ],
)
def test_freed_and_cut_storages_are_refused(
    call: Any, make: Callable[[], dict[str, Any]], name: str, sizes: tuple[int, ...]
) -> None:
    for size in sizes:
        given = make()
        if given[name].nbytes <= size:
            continue
        free(given[name], size)
        with pytest.raises(InvalidProblem, match=f"^{name}: expected a storage of .* or more, got one of {size}"):
            call(**given)


# Not index tensors: reading them as arrays makes torch keep their storage.
@pytest.mark.parametrize(
    ("call", "make", "name"),
    [
        pytest.param(call, make, name, id=f"{label}-{name}")
        for label, call, make, names in CALLS
        if call in (tw.attention, tw.attention_varlen, tw.attention_paged, write_rows)
        for name in names
        if name not in ("cu_seqlens_q", "cu_seqlens_k", "block_table", "seqlens_k")
    ],
)
def test_freed_storages_are_refused_in_repeated_calls(call: Any, make: Callable[[], dict[str, Any]], name: str) -> None:
    given = make()
    for _ in range(2):
        call(**given)
    free(given[name])
    for _ in range(2):
        with refused(name):
            call(**given)


def test_views_at_an_offset_of_freed_storage_are_refused() -> None:
    """Their address is not 0."""
    both, q = new(2, *DENSE), new(*DENSE)
    k, v = both
    for _ in range(2):
        tw.attention(q, k, v)
    free(both)
    assert v.data_ptr() != 0
    with refused("k"):
        tw.attention(q, k, v)
    with refused("v"):
        tw.attention(q, q, v)


def test_tensors_without_elements_need_no_storage() -> None:
    q = new(1, 2, 0, 16)
    free(q)
    for _ in range(3):
        assert tw.attention(q, *new(2, *DENSE)).shape == q.shape


def test_freed_storages_are_refused_where_a_call_without_elements_came_first() -> None:
    """The plans of both calls are of one form."""
    calls.forget()
    q, k, v = (new(*DENSE) for _ in range(3))
    for keys in (39, 0, 40):  # the second call is planned for all sizes
        tw.attention(q, k[:, :, :keys], v[:, :, :keys])
    free(k)
    with refused("k"):
        tw.attention(q, k, v)


@pytest.mark.parametrize("part", ["tiles", "bits"])
def test_freed_tile_masks_are_refused(part: str) -> None:
    given = dense(mask=documents())
    for _ in range(2):
        tw.attention(**given)
    free(getattr(given["mask"], part))
    with refused("mask"):
        tw.attention(**given)


@pytest.mark.parametrize("part", ["tiles", "bits"])
@pytest.mark.parametrize("made", MADE_OF_MASKS)
def test_freed_tile_masks_are_refused_where_masks_are_made_of_them(made: str, part: str) -> None:
    mask = documents()
    free(getattr(mask, part))
    with refused(f"TileMask.{part}"):
        MADE_OF_MASKS[made](mask)


def test_freed_tile_masks_are_refused_where_they_are_shown() -> None:
    mask = documents()
    free(mask.tiles)
    for show in (repr, tw.TileMask.plot):
        with refused("TileMask.tiles"):
            show(mask)


@pytest.mark.parametrize("part", ["data", "scale"])
def test_freed_containers_are_refused(part: str) -> None:
    q, k, v = (tw.fp8.quantize(new(*DENSE)) for _ in range(3))
    for _ in range(2):
        tw.attention(q, k, v)
    free(getattr(k, part))
    with refused("k" if part == "data" else "k_scale"):
        tw.attention(q, k, v)
    with refused(f"Fp8Tensor.{part}"):
        k.dequantize()


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse", "dout"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_what_a_backward_reads_is_checked(name: str, dropout: float) -> None:
    """FSDP frees parameters between forward and backward."""
    given = dense()
    for tensor in given.values():
        tensor.requires_grad_()
    for repeat in range(3):
        out, lse = tw.attention(**given, dropout=dropout, return_lse=True)
        dout = new(*DENSE)
        if repeat == 2:
            free((given | {"out": out, "lse": lse, "dout": dout})[name])
            with refused(name):
                out.backward(dout)
        else:
            out.backward(dout)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_what_derivatives_read_is_checked() -> None:
    q, k, v = (new(*DENSE) for _ in range(3))
    (dq,) = torch.autograd.grad(tw.attention(q.requires_grad_(), k, v).sum(), q, create_graph=True)
    once = tw.attention(q, k, v)
    free(k)
    with refused("k"):
        dq.sum().backward()
    with refused("k"):
        torch.autograd.grad(once.sum(), q, create_graph=True)
    with refused("k"):
        torch.func.jvp(lambda q: tw.attention(q, k, v), (q.detach(),), (v,))


def test_modes_refuse_too() -> None:
    q, k, v = (new(*DENSE) for _ in range(3))
    compiled = torch.compile(tw.attention, backend="aot_eager", fullgraph=True)
    compiled(q, k, v)
    with torch.inference_mode():
        tw.attention(q, k, v)
    free(k)
    with refused("k"):
        compiled(q, k, v)
    with torch.inference_mode(), refused("k"):
        tw.attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16), refused("k"):
        tw.attention(q, k, v)


def test_registered_ops_refuse_too() -> None:
    q, k, v = (new(*DENSE) for _ in range(3))
    names = [argument.name for argument in torch.ops.tilewise.dense.default._schema.arguments]
    rest = {name: None for name in names if name in Operands._fields[3:]}
    flags = {"causal": False, "dropout": 0.0, "layout": "bhsd", "deterministic": False, "needs_grad": False}
    flags |= {"backend": "auto", "max_logits": False, "batch_invariant": False}
    given = rest | {name: flags.get(name) for name in names if name not in Operands._fields}
    free(v)
    with refused("v"):
        torch.ops.tilewise.dense(q=q, k=k, v=v, **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int8])
def test_caches_refuse_freed_rows_and_pages(dtype: torch.dtype) -> None:
    cache = tw.PagedKVCache(8, 4, 1, 2, 16, dtype=dtype, device="cpu")
    request = cache.add([1, 2, 3, 4, 5])
    cache.step([request])
    q, k, v, freed = (new(5, 2, 16) for _ in range(4))
    free(freed)
    with refused("k"):
        cache.append(freed, v)
    cache.append(k, v)
    with refused("q"):
        cache.attention(freed)
    cache.attention(q)
    free(cache.v)
    for call in (lambda: cache.append(k, v), lambda: cache.attention(q), lambda: cache.step([request])):
        with refused("PagedKVCache.v"):
            call()
    assert cache.length(request) == 5


def test_caches_refuse_freed_scales() -> None:
    cache = tw.PagedKVCache(8, 4, 1, 2, 16, dtype=torch.int8, device="cpu")
    request = cache.add([1, 2, 3, 4, 5])
    _, v = cache.attended()
    assert isinstance(v, tw.fp8.Fp8Tensor)
    free(v.scale)
    with refused("the scales of PagedKVCache.v"):
        cache.step([request])


def test_drop_ins_refuse_in_their_words() -> None:
    q, k, v = (new(1, 40, 2, 16) for _ in range(3))
    lengths = ints(9)
    for _ in range(2):
        flash_attn.flash_attn_func(q, k, v)
    free(lengths)
    with refused("cache_seqlens"):
        flash_attn.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=lengths)
    free(k)
    with refused("k"):
        flash_attn.flash_attn_func(q, k, v)
    with refused("k_cache"):
        flash_attn.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=9)
    rows = new(1, 8, 3, 2, 16)
    free(rows)
    with refused("qkv"):
        flash_attn.flash_attn_qkvpacked_func(rows)
    for call in (sdpa.scaled_dot_product_attention, flex.flex_attention):
        with refused("key"):
            call(q, k, v)
