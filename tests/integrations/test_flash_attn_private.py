"""The functions of flash-attn that other libraries import although their names begin with an underscore: forward and
backward as calls of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from making import int32, randn
from tilewise.integrations import flash_attn, flash_attn_3, flash_attn_interface

# Called with arguments put together by name.
fa2: Any = flash_attn.flash_attn_interface
fa3: Any = flash_attn_interface


FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "causal window": {"causal": True, "window_size": (2, -1)},
    "softcap and slopes": {"softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.7])},
    "dropout": {"dropout_p": 0.3, "causal": True},
    "scale": {"softmax_scale": 0.2},
}
TOTALS = int32(0, 2, 2, 7), int32(0, 4, 6, 11)


def private(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags of a public function as the private ones take them."""
    left, right = flags.get("window_size", (-1, -1))
    default = {"dropout_p": 0.0, "softmax_scale": 8**-0.5, "causal": False, "softcap": 0.0, "alibi_slopes": None}
    given = {**default, **{n: f for n, f in flags.items() if n != "window_size"}}
    return {**given, "window_size_left": left, "window_size_right": right}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FLAGS)
def test_forward_and_backward_are_those_of_the_public_functions(name: str, packed: bool) -> None:
    flags = FLAGS[name]
    lengths = (*TOTALS, 5, 5) if packed else ()
    # The last row of packed ones belongs to no sequence.
    shape_q, shape_k = ((8, 4, 8), (12, 2, 8)) if packed else ((2, 5, 4, 8), (2, 7, 2, 8))
    q, k, v = (randn(*shape, seed=i).requires_grad_() for i, shape in enumerate((shape_q, shape_k, shape_k)))
    public: Any = flash_attn.flash_attn_varlen_func if packed else flash_attn.flash_attn_func
    torch.manual_seed(0)
    want: Any = public(q, k, v, *lengths, return_attn_probs=True, **flags)
    forward: Any = fa2._flash_attn_varlen_forward if packed else fa2._flash_attn_forward
    torch.manual_seed(0)
    with torch.no_grad():
        out, lse, dmask, rng_state = forward(q, k, v, *lengths, **private(flags), return_softmax=True)
    for a, b in zip((out, lse, dmask), want, strict=True):
        assert torch.equal(a, b)
    assert (rng_state.dtype, rng_state.shape) == (torch.int64, (2,))
    dout = randn(*want[0].shape, seed=9)
    gradients = torch.autograd.grad(want[0], (q, k, v), dout)
    # Into views, whose rows do not follow one another.
    dq, dk, dv = (torch.full((*t.shape[:-1], 3 * t.shape[-1]), math.nan)[..., 8:16] for t in (q, k, v))
    backward: Any = fa2._flash_attn_varlen_backward if packed else fa2._flash_attn_backward
    given = (dout, q.detach(), k.detach(), v.detach(), out, lse, dq, dk, dv, *lengths)
    softmax_d = backward(*given, **private(flags), deterministic=False, rng_state=rng_state)
    for a, b in zip((dq, dk, dv), gradients, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(softmax_d, (dout * out).sum(-1).transpose(-1, -2))
    assert softmax_d.shape == lse.shape


@pytest.mark.parametrize("packed", [False, True])
def test_a_ring_of_blocks_is_the_whole(packed: bool) -> None:
    """What ring attention does: out and lse are merged over blocks of keys, and every block's backward gets those."""
    q, k, v = (randn(1, 6, 4, 8, seed=i) for i in range(3))
    dout = randn(1, 6, 4, 8, seed=7)
    cuts = (0, 2, 6)
    plain = private({})

    def pack(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t[0].contiguous() for t in tensors) if packed else tensors

    def totals(keys: int) -> tuple[Any, ...]:
        return (int32(0, 6), int32(0, keys), 6, keys) if packed else ()

    forward: Any = fa2._flash_attn_varlen_forward if packed else fa2._flash_attn_forward
    backward: Any = fa2._flash_attn_varlen_backward if packed else fa2._flash_attn_backward
    q_, dout_ = pack(q, dout)
    blocks = [pack(k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(cuts)]
    results = [forward(q_, *b, *totals(b[0].shape[-3]), **plain, return_softmax=False)[:2] for b in blocks]
    out, lse = tw.merge(*results[0], *results[1], layout="bshd")
    dq, found = torch.zeros_like(q_), []
    for block in blocks:
        part, dk, dv = torch.empty_like(q_), torch.empty_like(block[0]), torch.empty_like(block[1])
        lengths = totals(block[0].shape[-3])
        backward(dout_, q_, *block, out, lse, part, dk, dv, *lengths, **plain, deterministic=True)
        dq += part
        found.append((dk, dv))
    tensors = [t.clone().requires_grad_() for t in (q, k, v)]
    whole = fa2.flash_attn_func(*tensors)
    want_q, want_k, want_v = pack(*torch.autograd.grad(whole, tensors, dout))
    torch.testing.assert_close(out, pack(whole.detach())[0])
    torch.testing.assert_close(dq, want_q)
    torch.testing.assert_close(torch.cat([dk for dk, _ in found], -3), want_k)
    torch.testing.assert_close(torch.cat([dv for _, dv in found], -3), want_v)


def test_a_gradient_that_is_none_is_not_computed() -> None:
    q, k, v = randn(1, 3, 2, 8), randn(1, 5, 2, 8), randn(1, 5, 2, 8, seed=1)
    out, lse, _, _ = fa2._flash_attn_forward(q, k, v, **private({}), return_softmax=False)
    dq, all_dq = torch.empty_like(q), torch.empty_like(q)
    given = (out.clone(), q, k, v, out, lse)
    fa2._flash_attn_backward(*given, dq, None, None, **private({}), deterministic=False)
    fa2._flash_attn_backward(
        *given, all_dq, torch.empty_like(k), torch.empty_like(v), **private({}), deterministic=False
    )
    assert torch.equal(dq, all_dq)


def test_pages_and_used_lengths() -> None:
    q, pages = randn(5, 4, 8), randn(6, 4, 2, 8)
    table, used = torch.tensor([[1, 3], [5, 0]], dtype=torch.int32), int32(6, 3)
    totals = int32(0, 2, 5), int32(0, 8, 16)
    out, lse, _, _ = fa2._flash_attn_varlen_forward(
        q, pages, pages, *totals, 3, 8, 0.0, 0.3, True, block_table=table, seqused_k=used
    )
    want = tw.attention_paged(
        q, pages, pages, table, used, cu_seqlens_q=totals[0], max_seqlen_q=3, causal=True, scale=0.3, return_lse=True
    )
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    keys = pages[table.long()].view(16, 2, 8)
    packed, packed_lse, _, _ = fa2._flash_attn_varlen_forward(
        q, keys, keys, *totals, 3, 8, 0.0, 0.3, True, seqused_k=used
    )
    torch.testing.assert_close(packed, out)
    torch.testing.assert_close(packed_lse, lse)


def test_what_is_missing_or_does_not_fit_is_named() -> None:
    q, k = randn(2, 3, 4, 8), randn(2, 5, 4, 8)
    flags = private({})
    out, lse, _, rng_state = fa2._flash_attn_forward(q, k, k, **flags, return_softmax=False)
    buffers = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
    dropped = {**flags, "dropout_p": 0.5, "deterministic": False}

    def backward(*given: Any, **others: Any) -> None:
        fa2._flash_attn_backward(*given, **{**flags, "deterministic": False, **others})

    with pytest.raises(tw.InvalidProblem, match="rng_state: expected an int64 tensor"):
        backward(out, q, k, k, out, lse, *buffers, **dropped)
    with pytest.raises(tw.InvalidProblem, match=r"softmax_lse: expected torch.float32 \(2, 4, 3\) on cpu"):
        backward(out, q, k, k, out, torch.zeros(2, 4, 128), *buffers, rng_state=rng_state)
    with pytest.raises(tw.InvalidProblem, match=r"out: expected torch.float32 \(2, 3, 4, 8\) on cpu"):
        backward(out, q, k, k, out.transpose(1, 2), lse, *buffers)
    with pytest.raises(tw.InvalidProblem, match="dq: expected shape"):
        backward(out, q, k, k, out, lse, torch.empty(4, 2, 3, 4, 8), *buffers[1:])
    with pytest.raises(tw.InvalidProblem, match="softmax_scale: expected None or a finite number"):
        backward(out, q, k, k, out, lse, *buffers, softmax_scale=math.nan)
    with pytest.raises(tw.Unsupported, match="leftpad_k"):
        fa2._flash_attn_varlen_forward(
            q[0], k[0], k[0], int32(0, 3), int32(0, 5), 3, 5, 0.0, 0.3, False, leftpad_k=int32(1)
        )
    with pytest.raises(tw.Unsupported, match="seqused_k with dropout_p"):
        fa2._flash_attn_varlen_forward(
            q[0], k[0], k[0], int32(0, 3), int32(0, 5), 3, 5, 0.1, 0.3, False, seqused_k=int32(2)
        )


@pytest.mark.parametrize("rows", [3, 4])
def test_an_lse_whose_last_dimensions_are_swapped_is_taken_for_what_it_is(rows: int) -> None:
    """diffusers passes a view (batch, rows, heads) of lse; with as many rows as heads it may mean either."""
    q, k = randn(2, rows, 4, 8), randn(2, 5, 4, 8)
    out, lse, _, _ = fa2._flash_attn_forward(q, k, k, **private({}), return_softmax=False)

    def backward(lse: Tensor) -> Tensor:
        dq = torch.empty_like(q)
        fa2._flash_attn_backward(out, q, k, k, out, lse, dq, None, None, **private({}), deterministic=False)
        return dq

    want = backward(lse)
    spread = lse.transpose(1, 2).contiguous().transpose(1, 2)
    if rows == 4:
        for ambiguous in (lse.permute(0, 2, 1), spread):
            with pytest.raises(tw.InvalidProblem, match="softmax_lse: expected a contiguous tensor"):
                backward(ambiguous)
    else:
        assert torch.equal(backward(lse.permute(0, 2, 1)), want)
        assert torch.equal(backward(spread), want)


@pytest.mark.parametrize("name", [name for name in FLAGS if name not in ("dropout", "softcap and slopes")])
@pytest.mark.parametrize("form", ["dense", "packed", "used"])
def test_forward_and_backward_of_fa3(name: str, form: str) -> None:
    flags = FLAGS[name]
    private3 = {n: f for n, f in private(flags).items() if n not in ("dropout_p", "alibi_slopes")}
    shape_q, shape_k = ((2, 5, 4, 8), (2, 7, 2, 8)) if form == "dense" else ((8, 4, 8), (12, 2, 8))
    q, k, v = (randn(*shape, seed=i).requires_grad_() for i, shape in enumerate((shape_q, shape_k, shape_k)))
    used = {"seqused_q": int32(1, 0, 4), "seqused_k": int32(4, 1, 3)} if form == "used" else {}
    lengths: dict[str, Any] = {}
    if form == "dense":
        want: Any = fa3.flash_attn_func(q, k, v, return_attn_probs=True, **flags)
    else:
        lengths = {"cu_seqlens_q": TOTALS[0], "cu_seqlens_k": TOTALS[1], "max_seqlen_q": 5, "max_seqlen_k": 5}
        want = fa3.flash_attn_varlen_func(q, k, v, **lengths, **used, return_attn_probs=True, **flags)
    with torch.no_grad():
        out, lse, *rest = fa3._flash_attn_forward(q, k, v, **lengths, **used, **private3)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    assert [t.numel() for t in rest] == [0, 0]
    into = torch.empty_like(out)
    with torch.no_grad():
        assert fa3._flash_attn_forward(q, k, v, out_=into, **lengths, **used, **private3)[0] is into
    assert torch.equal(into, out)
    dout = randn(*out.shape, seed=9)
    gradients = torch.autograd.grad(want[0], (q, k, v), dout)
    dq, dk, dv = (torch.full_like(t, math.nan) for t in (q, k, v))
    sequed = {name.replace("used", "ued"): t for name, t in used.items()}
    private3["is_causal"] = private3.pop("causal")
    fa3._flash_attn_backward(
        dout, q.detach(), k.detach(), v.detach(), out, lse, **lengths, **sequed, dq=dq, dk=dk, dv=dv, **private3
    )
    for a, b in zip((dq, dk, dv), gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_forward_of_fa3_appends_to_caches_and_reads_pages() -> None:
    q, new = randn(2, 1, 4, 8), randn(2, 1, 2, 8)
    pages, table = randn(6, 4, 2, 8), torch.tensor([[1, 3], [5, 0]], dtype=torch.int32)
    caches = [pages.clone() for _ in range(4)]
    lengths = int32(6, 3)
    want: Any = fa3.flash_attn_with_kvcache(
        q, *caches[:2], new, new, cache_seqlens=lengths, page_table=table, return_softmax_lse=True
    )
    out, lse, _, _ = fa3._flash_attn_forward(q, *caches[2:], new, new, seqused_k=lengths, page_table=table)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    assert all(torch.equal(cache, caches[0]) for cache in caches[1:])
    with pytest.raises(tw.Unsupported, match="cu_seqlens_k with page_table"):
        fa3._flash_attn_forward(q, pages, pages, cu_seqlens_k=lengths, page_table=table)
    with pytest.raises(tw.Unsupported, match="seqused_q without cu_seqlens_q"):
        fa3._flash_attn_forward(q, new, new, seqused_q=lengths)
    with pytest.raises(tw.InvalidProblem, match="out_: expected"):
        fa3._flash_attn_forward(q, new, new, out_=torch.empty(1))


def test_the_number_of_splits_of_packed_sequences() -> None:
    """flash-attn takes 0 and 1 here, and refuses more."""
    q, pages = randn(3, 4, 8), randn(4, 2, 2, 8)
    given: dict[str, Any] = private({}) | {"cu_seqlens_q": int32(0, 2, 3), "cu_seqlens_k": int32(0, 3, 5)}
    given |= {"max_seqlen_q": 2, "max_seqlen_k": 3, "block_table": int32([0, 1], [3, 2])}
    want = fa2._flash_attn_varlen_forward(q, pages, pages, **given)[0]
    for number in (0, 1):
        assert torch.equal(fa2._flash_attn_varlen_forward(q, pages, pages, **given, num_splits=number)[0], want)
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        fa2._flash_attn_varlen_forward(q, pages, pages, **given, num_splits=2)


@pytest.mark.parametrize("packed", [False, True])
def test_functions_of_the_compiled_extension(packed: bool) -> None:
    """What flash-attn's interface imports as flash_attn_gpu."""
    gpu = fa2.flash_attn_gpu
    flags = {"causal": True, "window_size": (2, 1), "softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.7])}
    given = private(flags)
    sides = given["window_size_left"], given["window_size_right"]
    shape_q, shape_k = ((7, 4, 8), (11, 2, 8)) if packed else ((2, 5, 4, 8), (2, 7, 2, 8))
    q, k, v, dout = (randn(*s, seed=i) for i, s in enumerate((shape_q, shape_k, shape_k, shape_q)))
    head: tuple[Any, ...]
    into, slopes, scale = torch.empty_like(q), given["alibi_slopes"], given["softmax_scale"]
    if packed:
        want = fa2._flash_attn_varlen_forward(q, k, v, *TOTALS, 5, 5, **given)
        head, tail = (*TOTALS, None, None, None, slopes, 5, 5, 0.0, scale, False), (True, *sides, 2.0, False)
        found = gpu.varlen_fwd(q, k, v, into, *head, *tail, None)
        lengths: tuple[Any, ...] = (*TOTALS, slopes, 5, 5, 0.0, scale, False)
    else:
        want = fa2._flash_attn_forward(q, k, v, **given, return_softmax=False)
        head, tail = (slopes, 0.0, scale), (True, *sides, 2.0, False)
        found = gpu.fwd(q, k, v, into, *head, *tail, None)
        lengths = (slopes, 0.0, scale)
    assert found[0] is into
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)
    saved = (dout, q, k, v, *want[:2])
    written = [torch.empty_like(t) for t in (q, k, v)]
    private_backward = fa2._flash_attn_varlen_backward if packed else fa2._flash_attn_backward
    totals = (*TOTALS, 5, 5) if packed else ()
    softmax_d = private_backward(*saved, *written, *totals, **given, deterministic=False)
    backward = gpu.varlen_bwd if packed else gpu.bwd
    *gradients, sums = backward(*saved, None, None, None, *lengths, *tail, None, None)
    for a, b in zip((*gradients, sums), (*written, softmax_d), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="generator` argument is no longer supported"):
        backward(*saved, None, None, None, *lengths, *tail, 1, None)
    with pytest.raises(RuntimeError, match="generator` argument is no longer supported"):
        (gpu.varlen_fwd if packed else gpu.fwd)(q, k, v, None, *head, *tail, 1)


def test_a_cache_of_the_compiled_extension() -> None:
    q, new, cache = randn(2, 1, 4, 8), randn(2, 1, 2, 8, seed=1), randn(2, 6, 2, 8, seed=2)
    angles = randn(6, 4)
    into, lengths, a, b = torch.empty_like(q), int32(3, 5), cache.clone(), cache.clone()
    rotary = angles.cos(), angles.sin()
    out, lse = fa2.flash_attn_gpu.fwd_kvcache(
        *(q, a, a.clone(), new, new, lengths, *rotary, None, None, None, None, into, 0.3, True, -1, -1, 0.0, False, 0)
    )
    want = fa2.flash_attn_with_kvcache(
        q, b, b.clone(), new, new, *rotary, lengths, softmax_scale=0.3, causal=True, rotary_interleaved=False,
        return_softmax_lse=True,
    )  # fmt: skip
    assert out is into
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    assert torch.equal(a, b)


@pytest.fixture
def operators() -> Iterator[Any]:
    flash_attn_3.register_ops()
    yield torch.ops.flash_attn_3
    flash_attn_3.unregister_ops()


def test_the_operators_of_fa3_are_registered_by_a_call_and_never_by_an_import() -> None:
    assert not hasattr(torch.ops.flash_attn_3, "fwd")
    flash_attn_3.register_ops()
    flash_attn_3.register_ops()
    assert hasattr(torch.ops.flash_attn_3, "fwd")
    flash_attn_3.unregister_ops()
    flash_attn_3.unregister_ops()
    assert not hasattr(torch.ops.flash_attn_3, "fwd")


def test_installing_fa3s_module_registers_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """As importing FA3's does; libraries that import it call the operators."""
    flash_attn_interface.install()
    assert hasattr(torch.ops.flash_attn_3, "fwd")
    flash_attn_interface.install()
    flash_attn_interface.uninstall()
    assert not hasattr(torch.ops.flash_attn_3, "fwd")
    monkeypatch.setattr("tilewise.integrations.flash_operators.is_installed", lambda: True)
    flash_attn_interface.install()
    assert not hasattr(torch.ops.flash_attn_3, "fwd"), "those of an installed FA3 are its own"
    flash_attn_interface.uninstall()


def test_the_operators_of_an_installed_fa3_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn_3").mkdir()
    (tmp_path / "flash_attn_3" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(tw.TilewiseError, match="flash-attn 3 is installed"):
        flash_attn_3.register_ops()
    assert not hasattr(torch.ops.flash_attn_3, "fwd")
    monkeypatch.undo()
    foreign = torch.library.Library("flash_attn_3", "FRAGMENT")
    foreign.define("fwd(Tensor q) -> Tensor")
    try:
        with pytest.raises(tw.TilewiseError, match="flash-attn 3 is installed"):
            flash_attn_3.register_ops()
    finally:
        foreign._destroy()
        torch.ops.flash_attn_3.__dict__.pop("fwd", None)


def test_the_operators_of_fa3_compute(operators: Any) -> None:
    q, k, v = randn(2, 5, 4, 8), randn(2, 7, 2, 8), randn(2, 7, 2, 8, seed=1)
    out, lse, *rest = operators.fwd(q, k, v, is_causal=True, window_size_left=3, softmax_scale=0.3)
    flags: dict[str, Any] = {"causal": True, "window_size": (3, -1), "softmax_scale": 0.3}
    want: Any = fa3.flash_attn_func(q, k, v, return_attn_probs=True, **flags)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    assert [t.numel() for t in rest] == [0, 0]
    buffers = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    given: dict[str, Any] = {"is_causal": True, "window_size_left": 3, "softmax_scale": 0.3}
    assert len(operators.bwd(out, q, k, v, out, lse, *buffers, **given)) == 5
    tensors = [t.clone().requires_grad_() for t in (q, k, v)]
    gradients = torch.autograd.grad(fa3.flash_attn_func(*tensors, **flags), tensors, out)
    for a, b in zip(buffers, gradients, strict=True):
        torch.testing.assert_close(a, b)
    into = torch.empty_like(q)
    assert operators.fwd(q, k, v, out=into, **given)[0] is into
    assert torch.equal(into, out)
    # Rotary tables are not interleaved unless asked for, other than in flash_attn_with_kvcache.
    cos, sin = randn(16, 4).cos(), randn(16, 4).sin()
    caches = [k.clone(), v.clone(), k.clone(), v.clone()]
    row = randn(2, 1, 2, 8)
    mine = operators.fwd(
        q[:, :1], caches[0], caches[1], row, row, seqused_k=int32(3, 5), rotary_cos=cos, rotary_sin=sin
    )
    other: Any = fa3.flash_attn_with_kvcache(
        q[:, :1], caches[2], caches[3], row, row, None, cos, sin, int32(3, 5), rotary_interleaved=False
    )
    assert torch.equal(mine[0], other)
    parts, lses = randn(3, 6, 4, 8), randn(3, 6, 4)
    assert torch.equal(operators.fwd_combine(parts, lses)[0], fa3.flash_attn_combine(parts, lses)[0])
    assert operators.get_scheduler_metadata(2, 1, 7, 4, 2, 8, 8, torch.bfloat16, int32(3, 5)).numel() == 0
    with pytest.raises(tw.InvalidProblem, match="attention_chunk"):
        operators.fwd(q, k, v, attention_chunk=-1)
