"""`tilewise.nn`: MultiheadAttention (test_routed.py has the numbers), and causal self-attention with a cache."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import tilewise as tw
from tilewise.nn import CausalSelfAttention, MultiheadAttention, rotary_table, rotate

pytestmark = pytest.mark.slow

BATCH, SEQLEN_Q, SEQLEN_K = 3, 5, 7


def pair_of_layers(**options: Any) -> tuple[MultiheadAttention, torch.nn.MultiheadAttention]:
    mine, torchs = MultiheadAttention(8, 2, **options), torch.nn.MultiheadAttention(8, 2, **options)
    mine.load_state_dict(torchs.state_dict())
    assert list(mine.state_dict()) == list(torchs.state_dict())
    return mine, torchs


@pytest.mark.parametrize("average", [False, True])
def test_weights_are_torchs(average: bool) -> None:
    mine, torchs = pair_of_layers(batch_first=True)
    q, k = torch.randn(BATCH, SEQLEN_Q, 8), torch.randn(BATCH, SEQLEN_K, 8)
    a, b = (layer(q, k, k, average_attn_weights=average) for layer in (mine, torchs))
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    causal, weights = mine(q, q, q, is_causal=True)
    assert weights is not None
    assert weights.triu(1).abs().max() == 0
    torch.testing.assert_close(mine(q, q, q, need_weights=False, is_causal=True)[0], causal)


def test_a_fully_masked_row_is_the_projection_of_zero() -> None:
    mine, _ = pair_of_layers(batch_first=True)
    x = torch.randn(BATCH, SEQLEN_K, 8)
    ignored = torch.zeros(BATCH, SEQLEN_K, dtype=torch.bool)
    ignored[1] = True
    out, _ = mine(x, x, x, key_padding_mask=ignored, need_weights=False)
    torch.testing.assert_close(out[1], mine.out_proj(torch.zeros(SEQLEN_K, 8)))


def test_multihead_rejections() -> None:
    mine, _ = pair_of_layers(batch_first=True)
    x = torch.randn(BATCH, SEQLEN_K, 8)
    with pytest.raises(tw.InvalidProblem, match="query: expected 2 dimensions, or 3 with a batch"):
        mine(x[None], x[None], x[None], need_weights=False)
    with pytest.raises(tw.InvalidProblem, match="attn_mask: expected shape"):
        mine(x, x, x, attn_mask=torch.zeros(2, 2), need_weights=False)
    with pytest.raises(tw.InvalidProblem, match="key_padding_mask: expected shape"):
        mine(x, x, x, key_padding_mask=torch.zeros(SEQLEN_K, BATCH), need_weights=False)


def test_multihead_copies_pickles_and_serves_inside_torchs_layer() -> None:
    mine, _ = pair_of_layers(batch_first=True)
    x = torch.randn(BATCH, SEQLEN_K, 8)
    expected = mine(x, x, x, need_weights=False)[0]
    for clone in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert torch.equal(clone(x, x, x, need_weights=False)[0], expected)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    before = layer(x)
    mine.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = mine
    torch.testing.assert_close(layer(x), before, atol=2e-6, rtol=2e-5)


def plain(layer: CausalSelfAttention, x: Tensor) -> Tensor:
    """The same layer with torch's SDPA and repeated heads."""
    q, k, v = layer.qkv(x).unflatten(-1, (-1, layer.head_dim)).split([layer.num_heads, *[layer.num_kv_heads] * 2], 2)
    cos, sin = rotary_table(x.shape[1], layer.head_dim)
    q, k, v = (t.transpose(1, 2) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    projected: Tensor = layer.out(out.transpose(1, 2).flatten(2))
    return projected


def test_causal_self_attention_equals_torch() -> None:
    torch.manual_seed(0)
    layer = CausalSelfAttention(32, 4, num_kv_heads=2, bias=True)
    x = torch.randn(2, 9, 32, requires_grad=True)
    mine, torchs = layer(x), plain(layer, x)
    torch.testing.assert_close(mine, torchs)
    a, b = (torch.autograd.grad(o.square().sum(), x)[0] for o in (mine, torchs))
    torch.testing.assert_close(a, b, atol=1e-6, rtol=2e-5)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rotary_base", [None, 100.0])
def test_generation_with_a_cache_equals_one_pass(rotary_base: float | None, window: int | None) -> None:
    torch.manual_seed(0)
    layer = CausalSelfAttention(32, 4, num_kv_heads=1, rotary_base=rotary_base, window=window)
    x = torch.randn(2, 9, 32)
    with torch.no_grad():
        whole = layer(x)
        cache = layer.make_cache(2, 9)
        pieces = [layer(part, cache) for part in x.split([4, 1, 1, 3], 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-6, rtol=1e-5)
        with pytest.raises(tw.OutOfPages, match="9 tokens, 10 are needed"):
            layer(x[:, :1], cache)
        cache.truncate(4)
        torch.testing.assert_close(layer(x[:, 4:5], cache), whole[:, 4:5], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(30, 4, 4), (32, 0, 4), (32, 4, 0), (32, 4, 3), (0, 4, 4)])
def test_sizes_that_do_not_divide_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(tw.InvalidProblem, match="embed_dim"):
        CausalSelfAttention(sizes[0], sizes[1], num_kv_heads=sizes[2])


def test_causal_self_attention_rejections() -> None:
    with pytest.raises(tw.InvalidProblem, match="even"):
        rotary_table(4, 3)
    layer = CausalSelfAttention(32, 4)
    with pytest.raises(tw.InvalidProblem, match="no_grad"):
        layer(torch.randn(1, 2, 32), layer.make_cache(1, 4))
    with pytest.raises(tw.InvalidProblem, match="length"):
        layer.make_cache(1, 4).truncate(1)


def test_a_cache_for_another_batch_is_refused_and_stays_as_it_is() -> None:
    """One row of keys would be broadcast to all sequences."""
    layer = CausalSelfAttention(16, 2)
    cache = layer.make_cache(batch=3, capacity=8)
    with torch.no_grad(), pytest.raises(tw.InvalidProblem, match="cache: expected one for a batch of 1, got one for 3"):
        layer(torch.ones(1, 4, 16), cache)
    assert cache.length == 0


def test_layers_name_what_is_wrong() -> None:
    wrong: list[tuple[str, Any]] = [("window", window) for window in (0, 2.5, True, (3, 0))]
    wrong += [("dropout", dropout) for dropout in (2, -0.5, 1.0, math.nan, None)]
    wrong += [("rotary_base", base) for base in ("x", -1, True)]
    for name, value in wrong:
        with pytest.raises(tw.InvalidProblem, match=f"^{name}: expected"):
            CausalSelfAttention(16, 2, **{name: value})
    numbers: dict[str, Any] = {"window": np.int64(4), "rotary_base": np.float32(100)}
    assert CausalSelfAttention(16, 2, **numbers).window == 4
    with pytest.raises(tw.InvalidProblem, match=r"^embed_dim / num_heads: expected an even number >= 2, got 3"):
        CausalSelfAttention(6, 2)
    assert CausalSelfAttention(6, 2, rotary_base=None).head_dim == 3
    with pytest.raises(tw.InvalidProblem, match="base: expected a number above 0"):
        rotary_table(4, 8, base=0.0)
    with pytest.raises(tw.InvalidProblem, match=r"x: expected 3 dimensions .* got \(4, 16\)"):
        CausalSelfAttention(16, 2)(torch.ones(4, 16))
    layer, x = MultiheadAttention(8, 2, batch_first=True), torch.ones(2, 4, 8)
    for name, shape in (("attn_mask", (4, 4)), ("key_padding_mask", (2, 4))):
        with pytest.raises(
            tw.InvalidProblem, match=f"{name}: expected a bool or floating-point tensor, got torch.int64"
        ):
            layer(x, x, x, need_weights=False, **{name: torch.zeros(shape, dtype=torch.int64)})
