"""bert_padding, layers.rotary and install() of the flash-attn drop-in."""

import importlib
import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from making import randn
from tilewise.integrations import flash_attn as fa
from tilewise.integrations.flash_attn import bert_padding
from tilewise.integrations.flash_attn.layers import rotary
from tilewise.nn import rotate


def test_unpad_and_pad_are_inverse_and_differentiable() -> None:
    x = randn(3, 5, 2, 4).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert packed.shape == (8, 2, 4)
    assert indices.tolist() == [0, 1, 2, 10, 11, 12, 13, 14]
    assert (cu_seqlens.dtype, cu_seqlens.tolist()) == (torch.int32, [0, 3, 3, 8])
    assert (longest, used.tolist()) == (5, [3, 0, 5])
    padded = bert_padding.pad_input(packed, indices, 3, 5)
    assert torch.equal(padded, x * mask[..., None, None])
    (gradient,) = torch.autograd.grad(padded.square().sum(), x)
    torch.testing.assert_close(gradient, 2 * x * mask[..., None, None])
    assert torch.equal(bert_padding.unpad_input(x, mask.bool())[0], packed)


@pytest.mark.parametrize("mask", [[0.0, 0.0, -torch.inf], [1, 1, 2], [0.5, 1.0, 0.0]], ids=str)
def test_unpad_refuses_masks_that_say_something_else(mask: list[float]) -> None:
    """It packed the rows that were not to be seen, with lengths that fit nothing."""
    with pytest.raises(tw.InvalidProblem, match="attention_mask: expected True or 1"):
        bert_padding.unpad_input(torch.zeros(1, 3, 4), torch.tensor([mask]))


def test_numbers_that_add_up_in_the_end_are_refused_too() -> None:
    x, ones = torch.zeros(2, 3, 4), torch.ones(2, 3)
    with pytest.raises(tw.InvalidProblem, match="attention_mask: expected True or 1"):
        bert_padding.unpad_input(x, torch.tensor([[2.0, 2.0, 0.0], [-1.0, 1.0, 0.0]]))
    with pytest.raises(tw.InvalidProblem, match="unused_mask: expected True or 1"):
        bert_padding.unpad_input(x, ones, 2 * ones)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_tokens_both_used_and_unused_are_packed_once(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).to(dtype)
    _, indices, cu_seqlens, longest, used = bert_padding.unpad_input(torch.zeros(2, 3, 4), mask, mask)
    assert (indices.tolist(), cu_seqlens.tolist(), longest, used.tolist()) == ([0, 1, 3], [0, 2, 3], 2, [2, 1])


def test_unpad_compiles_whole() -> None:
    x, mask = randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]])
    options = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(options):
        compiled = torch.compile(bert_padding.unpad_input, fullgraph=True, backend="eager")
        found = compiled(x, mask)
    for got, wanted in zip(found, bert_padding.unpad_input(x, mask), strict=True):
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(wanted))


def test_unpad_leaves_room_for_unused_tokens() -> None:
    x = randn(2, 4, 3)
    mask, unused = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]), torch.tensor([[0, 0, 1, 0], [0, 1, 1, 0]])
    packed, _, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert (len(packed), cu_seqlens.tolist(), longest, used.tolist()) == (6, [0, 3, 6], 3, [2, 1])


def by_hand(x: Tensor, cos: Tensor, sin: Tensor, position: int, interleaved: bool) -> Tensor:
    """One token (heads, dim), feature by feature."""
    out = x.clone()
    half = cos.shape[1]
    for p in range(half):
        a, b = (2 * p, 2 * p + 1) if interleaved else (p, p + half)
        out[:, a] = x[:, a] * cos[position, p] - x[:, b] * sin[position, p]
        out[:, b] = x[:, b] * cos[position, p] + x[:, a] * sin[position, p]
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, "tensor"])
@pytest.mark.parametrize("packed", [False, True])
def test_rotary(interleaved: bool, offsets: int | str, packed: bool) -> None:
    cos, sin = randn(9, 3), randn(9, 3, seed=1)
    x = randn(2, 4, 2, 8, seed=2).requires_grad_()
    starts: int | Tensor = torch.tensor([5, 1], dtype=torch.int32) if isinstance(offsets, str) else offsets
    each = starts.tolist() if isinstance(starts, Tensor) else [starts] * 2
    if packed:
        cu_seqlens = torch.tensor([0, 4, 8], dtype=torch.int32)
        out = rotary.apply_rotary_emb(x.flatten(0, 1), cos, sin, interleaved, False, starts, cu_seqlens, 4)
        out = out.unflatten(0, (2, 4))
    else:
        out = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=starts)
    for b in range(2):
        for i in range(4):
            torch.testing.assert_close(out[b, i], by_hand(x[b, i].detach(), cos, sin, each[b] + i, interleaved))
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    undone = rotary.apply_rotary_emb(torch.ones_like(x), cos, -sin, interleaved, seqlen_offsets=starts)
    torch.testing.assert_close(gradient, undone, msg="the gradient of a rotation is the rotation back")


def test_rotary_in_place_keeps_the_gradient() -> None:
    cos, sin = randn(4, 4), randn(4, 4, seed=1)
    leaf = randn(1, 4, 2, 8, seed=2).requires_grad_()
    x = leaf * 1
    out = rotary.apply_rotary_emb(x, cos, sin, inplace=True)
    assert out.data_ptr() == x.data_ptr()
    (mine,) = torch.autograd.grad(out.square().sum(), leaf)
    (expected,) = torch.autograd.grad(rotary.apply_rotary_emb(leaf, cos, sin).square().sum(), leaf)
    torch.testing.assert_close(mine, expected)


IN_PLACE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "x": lambda x, cos, sin: rotary.apply_rotary_emb(x, cos, sin, inplace=True),
    "qkv": rotary.apply_rotary_emb_qkv_,
    "kv": rotary.apply_rotary_emb_kv_,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_rotary_writes_into_leaves_and_keeps_the_gradient(name: str) -> None:
    """Torch refuses this; flash-attn does it, and its tests expect it."""
    tables, call = (randn(4, 4), randn(4, 4, seed=1)), IN_PLACE[name]
    shape = {"x": (1, 4, 2, 8), "qkv": (1, 4, 3, 2, 8), "kv": (1, 4, 2, 2, 8)}[name]
    leaf, like = randn(*shape, grad=True), randn(*shape, grad=True)
    expected = rotary.apply_rotary_emb(like, *tables) if name == "x" else call(like * 1, *tables)
    found = call(leaf, *tables)
    assert found.data_ptr() == leaf.data_ptr()
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out, x in ((found, leaf), (expected, like))]
    torch.testing.assert_close(*gradients)


def test_rotary_of_packed_qkv_and_kv() -> None:
    cos, sin = randn(4, 4), randn(4, 4, seed=1)
    qkv = randn(1, 4, 3, 2, 8)
    turned = rotary.apply_rotary_emb(qkv[:, :, 0], cos, sin), rotary.apply_rotary_emb(qkv[:, :, 1], cos, sin)
    expected = torch.stack((*turned, qkv[:, :, 2]), 2)
    assert torch.equal(rotary.apply_rotary_emb_qkv_(qkv.clone(), cos, sin), expected)
    stacked = rotary.apply_rotary_emb_qkv_(qkv.flatten(2, 3).clone(), cos, sin, num_heads_q=2)
    assert torch.equal(stacked, expected.flatten(2, 3))
    assert torch.equal(rotary.apply_rotary_emb_kv_(qkv[:, :, 1:].clone(), cos, sin), expected[:, :, 1:])


def test_rotary_rejections() -> None:
    x = randn(1, 4, 2, 8)
    with pytest.raises(tw.InvalidProblem, match="at least 5 rows"):
        rotary.apply_rotary_emb(x, randn(4, 4), randn(4, 4), seqlen_offsets=1)
    with pytest.raises(tw.InvalidProblem, match="at most 4 columns"):
        rotary.apply_rotary_emb(x, randn(4, 5), randn(4, 5))
    for heads in (2, 5, 7):
        with pytest.raises(tw.InvalidProblem, match="num_heads_q: expected an integer that leaves an even number"):
            rotary.apply_rotary_emb_qkv_(randn(1, 4, 5, 8), randn(4, 4), randn(4, 4), num_heads_q=heads)
    cos, sin, cu_seqlens = randn(8, 4), randn(8, 4), torch.tensor([0, 1, 2, 4], dtype=torch.int32)
    wrong: tuple[Any, ...] = (-2, 1.0, torch.tensor([-1]), torch.tensor([0, 1]), torch.tensor([1.0]))
    for offsets in wrong:
        with pytest.raises(tw.InvalidProblem, match="seqlen_offsets: expected"):
            rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)
    with pytest.raises(tw.InvalidProblem, match="seqlen_offsets: expected"):
        rotary.apply_rotary_emb(x[0], cos, sin, seqlen_offsets=torch.tensor([0, 1]), cu_seqlens=cu_seqlens)
    tables: tuple[Any, ...] = (sin[:2], sin[:, :1], sin[:, :3], (10 * sin).long(), sin.tolist())
    for other in tables:
        with pytest.raises(tw.InvalidProblem, match="sin: expected"):
            rotary.apply_rotary_emb(x, cos, other)
        with pytest.raises(tw.InvalidProblem, match="sin: expected"):
            rotate(x, cos[:4], other[:4])


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_install_makes_the_import_resolve_and_uninstall_undoes_it() -> None:
    assert importlib.util.find_spec("flash_attn") is None, "this test needs a machine without flash-attn"
    fa.install()
    try:
        flash_attn = importlib.import_module("flash_attn")
        padding = importlib.import_module("flash_attn.bert_padding")
        layers = importlib.import_module("flash_attn.layers.rotary")
        interface = importlib.import_module("flash_attn.flash_attn_interface")
        assert flash_attn.flash_attn_func is fa.flash_attn_func
        assert tuple(int(n) for n in flash_attn.__version__.split("+")[0].split(".")) >= (2, 6, 0)
        assert (padding, layers, interface) == (bert_padding, rotary, fa.flash_attn_interface)
        # What other libraries import although its name begins with an underscore, and flash-attn 4's names.
        for name in ("forward", "backward", "varlen_forward", "varlen_backward"):
            assert getattr(interface, f"_flash_attn_{name}") is getattr(fa.flash_attn_interface, f"_flash_attn_{name}")
        for name in ("forward", "backward"):
            assert getattr(interface, f"_wrapped_flash_attn_{name}") is getattr(interface, f"_flash_attn_{name}")
        assert importlib.import_module("flash_attn.cute") is fa.cute
        assert importlib.import_module("flash_attn.cute.interface") is fa.cute.interface
        assert fa.cute.interface.flash_attn_func is fa.cute.flash_attn_func
        assert importlib.util.find_spec("flash_attn") is not None
        fa.install()
    finally:
        fa.uninstall()
    assert not [name for name in sys.modules if name.split(".")[0] == "flash_attn"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn")
    fa.uninstall()


def test_importing_installs_nothing_and_install_respects_a_flash_attn_that_is_already_imported() -> None:
    code = """
        import sys, types
        import torch
        from torch.nn import attention, functional
        before = functional.scaled_dot_product_attention
        import tilewise
        from tilewise.integrations import aten, flash_attn_interface, sdpa
        from tilewise.integrations import flash_attn as mine
        print("flash_attn" in sys.modules, "flash_attn_interface" in sys.modules)
        print(functional.scaled_dot_product_attention is before, torch._C._len_torch_function_stack())
        print("tilewise" in attention.list_flash_attention_impls())

        real, part = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.ops")
        real.__file__ = "/somewhere/flash_attn/__init__.py"
        sys.modules.update({"flash_attn": real, "flash_attn.ops": part})
        try:
            mine.install()
        except tilewise.TilewiseError as error:
            print("/somewhere/flash_attn" in str(error), "force=True" in str(error), sys.modules["flash_attn"] is real)
        mine.install(force=True)
        print(sys.modules["flash_attn"] is mine, "flash_attn.ops" in sys.modules)
        mine.uninstall()
        print(sys.modules["flash_attn"] is real, sys.modules["flash_attn.ops"] is part)
        print("flash_attn.layers" in sys.modules)
        flash_attn_interface.install()
        print(sys.modules["flash_attn_interface"] is flash_attn_interface, sys.modules["flash_attn"] is real)
        flash_attn_interface.uninstall()
        print("flash_attn_interface" in sys.modules)
    """
    nothing = ["False False", "True 0", "False"]
    respected = ["True True True", "True False", "True True", "False", "True True", "False"]
    assert run_python(code).splitlines() == nothing + respected
