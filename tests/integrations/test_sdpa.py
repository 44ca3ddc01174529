"""SDPA against torch's own on the CPU: every argument combination, then the ways to route torch to tilewise."""

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

import tilewise as tw
from making import randn
from operators import activated, needs_registry
from tilewise.integrations import aten, sdpa

pytestmark = pytest.mark.slow

MASKS = (None, "bool", "bool keys", "float", "float heads", "-inf row")
NAMES = ("lead", "lengths", "mask", "causal", "scale", "kv_heads")
LENGTHS = ((6, 6), (4, 9), (9, 4), (1, 7), (5, 1))


def make_mask(kind: str | None, lead: tuple[int, ...], heads: int, seqlen_q: int, seqlen_k: int) -> Tensor | None:
    if kind is None:
        return None
    if kind == "bool":
        return randn(*lead, 1, seqlen_q, seqlen_k, seed=5) > -0.5
    if kind == "bool keys":
        return randn(1, seqlen_k, seed=5) > -0.5
    if kind == "float":
        return randn(seqlen_q, seqlen_k, seed=5)
    if kind == "float heads":
        return randn(heads, seqlen_q, seqlen_k, seed=5)
    mask = torch.zeros(seqlen_q, seqlen_k)
    mask[0] = -torch.inf
    return mask


def arguments() -> Iterator[dict[str, Any]]:
    for lead, (seqlen_q, seqlen_k), mask, causal, scale, kv_heads in itertools.product(
        ((), (2,), (2, 3)), LENGTHS, MASKS, (False, True), (None, 0.3), (4, 2, 1)
    ):
        if mask is None or not causal:
            yield dict(zip(NAMES, (lead, (seqlen_q, seqlen_k), mask, causal, scale, kv_heads), strict=True))


def both(case: dict[str, Any], grad: bool) -> tuple[list[Tensor], list[Tensor]]:
    lead, (seqlen_q, seqlen_k), kv_heads = case["lead"], case["lengths"], case["kv_heads"]
    q = randn(*lead, 4, seqlen_q, 8).requires_grad_(grad)
    k = randn(*lead, kv_heads, seqlen_k, 8, seed=1).requires_grad_(grad)
    v = randn(*lead, kv_heads, seqlen_k, 6, seed=2).requires_grad_(grad)
    mask = make_mask(case["mask"], lead, 4, seqlen_q, seqlen_k)
    results = []
    for function in (sdpa.scaled_dot_product_attention, F.scaled_dot_product_attention):
        out = function(q, k, v, mask, 0.0, case["causal"], scale=case["scale"], enable_gqa=kv_heads != 4)
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v)) if grad else ()
        results.append([out, *gradients])
    return results[0], results[1]


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=["3-D", "4-D", "5-D"])
def test_every_combination_equals_torch(lead: tuple[int, ...]) -> None:
    cases = [case for case in arguments() if case["lead"] == lead]
    assert len(cases) > 100
    for index, case in enumerate(cases):
        mine, torchs = both(case, grad=index % 7 == 0)
        for a, b in zip(mine, torchs, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5, msg=str(case))


def test_leading_dimensions_and_a_single_head_broadcast() -> None:
    for q, k in ((randn(2, 4, 5, 8), randn(1, 1, 7, 8, seed=1)), (randn(5, 8), randn(7, 8, seed=1))):
        mine, torchs = (f(q, k, k) for f in (sdpa.scaled_dot_product_attention, F.scaled_dot_product_attention))
        torch.testing.assert_close(mine, torchs)
    for heads_k, heads_v in ((1, 4), (4, 1)):
        given = randn(2, 4, 5, 8), randn(2, heads_k, 7, 8, seed=1), randn(2, heads_v, 7, 8, seed=2)
        mine, torchs = (f(*given) for f in (sdpa.scaled_dot_product_attention, F.scaled_dot_product_attention))
        torch.testing.assert_close(mine, torchs)


def test_autocast_takes_a_mask_of_16_bits() -> None:
    given = randn(1, 2, 5, 8), randn(1, 2, 5, 8, seed=1), randn(1, 2, 5, 8, seed=2), randn(5, 5, seed=3).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        mine, torchs = (f(*given) for f in (sdpa.scaled_dot_product_attention, F.scaled_dot_product_attention))
    assert mine.dtype == torchs.dtype == torch.bfloat16
    torch.testing.assert_close(mine, torchs, atol=2e-2, rtol=2e-2)


def test_dropout_keeps_the_mean_and_follows_the_seed() -> None:
    q, v = randn(1, 1, 64, 8), torch.ones(1, 1, 64, 8)
    torch.manual_seed(1)
    dropped = sdpa.scaled_dot_product_attention(q, q, v, dropout_p=0.25)
    torch.manual_seed(1)
    assert torch.equal(dropped, sdpa.scaled_dot_product_attention(q, q, v, dropout_p=0.25))
    assert not torch.equal(dropped, torch.ones_like(dropped))
    assert abs(dropped.mean().item() - 1.0) < 0.1


REJECTED: list[tuple[str, str, dict[str, Any]]] = [
    ("mask and causal", "attn_mask: expected None", {"attn_mask": torch.ones(5, 5), "is_causal": True}),
    ("unequal heads", "enable_gqa=True", {"key": randn(1, 2, 5, 8), "value": randn(1, 2, 5, 8)}),
    ("integer mask", "attn_mask: expected a bool", {"attn_mask": torch.ones(5, 5, dtype=torch.int64)}),
    ("mask of another float", "attn_mask: expected a bool", {"attn_mask": torch.ones(5, 5, dtype=torch.float64)}),
    ("mask of one dimension", "at least 2 dimensions", {"attn_mask": torch.ones(5, dtype=torch.bool)}),
    ("mask of another shape", "attn_mask: expected a shape", {"attn_mask": torch.ones(4, 5)}),
    ("vectors", "at least 2 dimensions", {"query": randn(8)}),
    ("dropout of everything", "dropout_p: expected a probability", {"dropout_p": 1.0}),
    ("no tensor", "attn_mask: expected a torch.Tensor, got list", {"attn_mask": [[True]]}),
    ("no flag", "is_causal: expected True or False, got 'no'", {"is_causal": "no"}),
    ("another head_dim", "key: expected head_dim 8", {"key": randn(1, 4, 5, 9)}),
    ("no value", "value: expected a torch.Tensor, got NoneType", {"value": None}),
    ("other sequences", "leading dimensions that broadcast", {"query": randn(2, 4, 5, 8), "key": randn(3, 4, 5, 8)}),
]


@pytest.mark.parametrize(("what", "message", "change"), REJECTED, ids=[r[0] for r in REJECTED])
def test_rejections(what: str, message: str, change: dict[str, Any]) -> None:
    call: dict[str, Any] = {"query": randn(1, 4, 5, 8), "key": randn(1, 4, 5, 8), "value": randn(1, 4, 5, 8)}
    with pytest.raises(tw.InvalidProblem, match=message) as caught:
        sdpa.scaled_dot_product_attention(**{**call, **change})
    assert isinstance(caught.value, RuntimeError), "code that catches torch's errors catches these"


def test_routed_sends_torchs_function_to_tilewise_in_this_thread_only() -> None:
    q = randn(2, 4, 50, 8)
    torchs, mine = F.scaled_dot_product_attention(q, q, q), sdpa.scaled_dot_product_attention(q, q, q)
    assert not torch.equal(torchs, mine), "the two must differ in rounding for this test to see anything"
    seen: list[Tensor] = []
    with sdpa.routed():
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), mine)
        thread = threading.Thread(target=lambda: seen.append(F.scaled_dot_product_attention(q, q, q)))
        thread.start()
        thread.join()
        with pytest.raises(tw.InvalidProblem):
            F.scaled_dot_product_attention(q, q, q, torch.ones(50, 50), is_causal=True)
    assert torch.equal(seen[0], torchs)
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), torchs)


def test_routed_under_compile() -> None:
    torch._dynamo.reset()
    q = randn(2, 4, 9, 8)

    def inside(q: Tensor) -> Tensor:
        with sdpa.routed():
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    expected = sdpa.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.equal(torch.compile(inside, fullgraph=True, backend="aot_eager")(q), expected)
    outside = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), backend="aot_eager")
    with sdpa.routed():
        assert torch.equal(outside(q), expected)


CORNERS = {"upper left": causal_upper_left, "lower right": causal_lower_right}


def triangle(corner: str, seqlen_q: int, seqlen_k: int) -> Tensor:
    """What a CausalBias stands for, as a mask."""
    diagonal = seqlen_k - seqlen_q if corner == "lower right" else 0
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(diagonal)


# Torch warns that rows without a key are NaN; here they are 0.
ROWS_WITHOUT_KEYS = pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs:UserWarning")


@ROWS_WITHOUT_KEYS
@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize(
    ("way", "lengths"),
    [
        *(("called", lengths) for lengths in (*LENGTHS[:3], (64, 200))),
        *itertools.product(("routed", "compiled", "active"), (LENGTHS[2], (64, 200))),
    ],
)
def test_a_causal_bias_is_the_triangle_it_stands_for(way: str, corner: str, lengths: tuple[int, int]) -> None:
    seqlen_q, seqlen_k = lengths
    q = randn(2, 4, seqlen_q, 8).requires_grad_()
    k, v = (randn(2, 2, seqlen_k, 8, seed=i).requires_grad_() for i in (1, 2))
    bias = CORNERS[corner](seqlen_q, seqlen_k)

    def run(function: Any, mask: Any) -> list[Tensor]:
        out = function(q, k, v, mask, scale=0.3, enable_gqa=True)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    expected = run(sdpa.scaled_dot_product_attention, triangle(corner, seqlen_q, seqlen_k))
    if way == "called":
        found = run(sdpa.scaled_dot_product_attention, bias)
    elif way == "routed":
        with sdpa.routed():
            found = run(F.scaled_dot_product_attention, bias)
    elif way == "active":
        with activated():
            found = run(F.scaled_dot_product_attention, bias)
    else:
        torch._dynamo.reset()
        compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
        with sdpa.routed():
            found = run(compiled, bias)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=2e-5)
    if seqlen_q <= seqlen_k or corner == "upper left":
        for mine, other in zip(found, run(F.scaled_dot_product_attention, bias), strict=True):
            torch.testing.assert_close(mine, other, atol=2e-5, rtol=2e-5)


def test_a_tile_mask() -> None:
    q, k = randn(2, 4, 150, 8), randn(2, 2, 150, 8)
    mask = tw.TileMask.documents(torch.arange(150) // 60)
    expected = F.scaled_dot_product_attention(q, k, k, mask.dense(), enable_gqa=True)
    found = sdpa.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    with pytest.raises(tw.InvalidProblem, match="attn_mask: expected None because is_causal is True"):
        sdpa.scaled_dot_product_attention(q, q, q, mask, is_causal=True)
    with pytest.raises(tw.InvalidProblem, match="attn_mask: expected a tile mask of 100 queries"):
        sdpa.scaled_dot_product_attention(q[:, :, :100], q, q, mask)
    with pytest.raises(tw.InvalidProblem, match="4 dimensions and one batch for a tile mask"):
        sdpa.scaled_dot_product_attention(q[0], q[0], q[0], mask)


def test_a_causal_bias_for_other_lengths_or_beside_is_causal_is_refused() -> None:
    q, k = randn(1, 2, 3, 8), randn(1, 2, 7, 8)
    for bias in (causal_lower_right(3, 6), causal_upper_left(4, 7), causal_lower_right(7, 7)):
        with pytest.raises(tw.InvalidProblem, match=r"attn_mask: expected a CausalBias for \(3, 7\) \(queries, keys\)"):
            sdpa.scaled_dot_product_attention(q, k, k, bias)
    with pytest.raises(tw.InvalidProblem, match="attn_mask: expected None because is_causal is True, got a CausalBias"):
        sdpa.scaled_dot_product_attention(q, k, k, causal_lower_right(3, 7), is_causal=True)

    class Mine(CausalBias):
        pass

    mine = causal_lower_right(3, 7).as_subclass(Mine)
    with pytest.raises(tw.InvalidProblem, match=r"attn_mask: expected a torch\.Tensor, or .*, got Mine"):
        sdpa.scaled_dot_product_attention(q, k, k, mine)


@pytest.mark.parametrize("lengths", [(64, 200), (40, 40), (200, 64), (1, 7)], ids=str)
def test_the_cuda_flash_kernels_align_causal_with_the_bottom_right_corner(lengths: tuple[int, int]) -> None:
    """As those of torch do: SDPA sends them equal lengths, `causal_lower_right` any. Called on a CPU here."""
    seqlen_q, seqlen_k = lengths
    q, k, v = (randn(2, 4, n, 16, seed=i).requires_grad_() for i, n in enumerate((seqlen_q, seqlen_k, seqlen_k)))
    expected = sdpa.scaled_dot_product_attention(q, k, v, triangle("lower right", seqlen_q, seqlen_k))
    dout = randn(*q.shape, seed=5)
    gradients = torch.autograd.grad(expected, (q, k, v), dout)
    with torch.no_grad():
        out, lse, _, _, _, _, seed, offset, _ = aten.flash_forward(q, k, v, is_causal=True)
        found = aten.flash_backward(
            dout, q, k, v, out, lse, None, None, seqlen_q, seqlen_k, 0.0, True, seed, offset
        )  # fmt: skip
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-5)
    for mine, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-6, rtol=2e-5)


EMPTY: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "no heads": ((2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 6), {}),
    "no heads, 3-D": ((0, 5, 8), (0, 7, 8), (0, 7, 6), {"is_causal": True}),
    "no heads, 5-D": ((3, 2, 0, 5, 8), (3, 2, 0, 7, 8), (3, 2, 0, 7, 6), {}),
    "no heads, mask": ((2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 6), {"attn_mask": torch.ones(2, 0, 5, 7)}),
    "no query heads": ((2, 0, 5, 8), (2, 1, 7, 8), (2, 1, 7, 6), {}),
    "no query heads, grouped": ((2, 0, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6), {"enable_gqa": True}),
    "no key heads": ((2, 4, 5, 8), (2, 0, 7, 8), (2, 0, 7, 6), {}),
    "no key heads, grouped": ((2, 4, 5, 8), (2, 0, 7, 8), (2, 0, 7, 6), {"enable_gqa": True}),
    "head_dim 0": ((2, 4, 5, 0), (2, 4, 7, 0), (2, 4, 7, 0), {}),
    "head_dim 0, values": ((2, 4, 5, 0), (2, 4, 7, 0), (2, 4, 7, 6), {}),
    "head_dim 0, values, causal": ((2, 4, 5, 0), (2, 4, 7, 0), (2, 4, 7, 6), {"is_causal": True}),
    "head_dim 0, values, mask": ((2, 4, 5, 0), (2, 4, 7, 0), (2, 4, 7, 6), {"attn_mask": randn(5, 7), "scale": 0.5}),
    "head_dim_v 0": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 0), {}),
    "no keys": ((2, 4, 5, 8), (2, 4, 0, 8), (2, 4, 0, 6), {}),
    "no keys, head_dim 0": ((2, 4, 5, 0), (2, 4, 0, 0), (2, 4, 0, 6), {}),
    "no batch": ((0, 4, 5, 8), (0, 4, 7, 8), (0, 4, 7, 6), {}),
    "nothing": ((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
}


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, False) for name in EMPTY),
        *(
            (name, True)
            for name in ("no heads, mask", "no key heads, grouped", "head_dim 0, values, causal", "no keys")
        ),
    ],
)
def test_no_heads_and_no_features_are_as_in_torch(name: str, compiled: bool) -> None:
    *shapes, flags = EMPTY[name]
    q, k, v = inputs = [randn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    mine: Any = sdpa.scaled_dot_product_attention
    if compiled:
        torch._dynamo.reset()
        mine = torch.compile(mine, fullgraph=True, backend="aot_eager")
    found, expected = (f(q, k, v, **flags) for f in (mine, F.scaled_dot_product_attention))
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(out.square().sum() + out.sum(), inputs) for out in (found, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_sizes_that_disagree_are_refused_where_one_of_them_is_0() -> None:
    shapes = [
        ("key: expected head_dim 0", (2, 4, 5, 0), (2, 4, 7, 1), (2, 4, 7, 6)),
        ("key: expected head_dim 1", (2, 4, 5, 1), (2, 4, 7, 0), (2, 4, 7, 6)),
        ("key: expected head_dim 0", (2, 4, 5, 0), (2, 4, 7, 1), (2, 4, 7, 0)),
        ("value: expected heads 0", (2, 0, 5, 8), (2, 0, 7, 8), (2, 1, 7, 6)),
        ("value: expected seqlen_k 7", (2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 6, 8)),
        ("key: expected 0 heads", (2, 0, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)),
    ]
    for message, q, k, v in shapes:
        with pytest.raises(tw.InvalidProblem, match=message):
            sdpa.scaled_dot_product_attention(torch.zeros(q), torch.zeros(k), torch.zeros(v))


def test_what_torch_raises_as_a_runtime_error_is_one_here() -> None:
    q, k = randn(1, 4, 5, 8), randn(1, 4, 5, 9)
    for function in (F.scaled_dot_product_attention, sdpa.scaled_dot_product_attention):
        with pytest.raises(RuntimeError):
            function(q, k, k)
    with sdpa.routed(), pytest.raises(RuntimeError, match="key: expected head_dim 8"):
        F.scaled_dot_product_attention(q, k, k)


class OfSomeSequences(torch.nn.Module):
    """Attention of the first n sequences and of a mask of theirs: a batch that only the run tells."""

    def __init__(self, lead: tuple[int, ...], *, shared: bool, added: bool) -> None:
        super().__init__()
        self.lead, self.shared, self.added = lead, shared, added

    def forward(self, q: Tensor, mask: Tensor, count: Tensor) -> Tensor:
        batch = count.item()
        assert isinstance(batch, int | torch.SymInt)
        torch._check(batch >= 0)
        torch._check(batch <= q.shape[0])
        q = q.narrow(0, 0, batch).unflatten(0, (-1, *self.lead))
        mask = mask[:1] if self.shared else mask.narrow(0, 0, batch).unflatten(0, (-1, *self.lead))
        return sdpa.scaled_dot_product_attention(q, q, q, mask.float() if self.added else mask)


@pytest.mark.parametrize(
    ("strict", "lead", "shared", "added"),
    [(False, (), False, True), (True, (), True, False), (False, (1,), True, True), (True, (1,), False, False)],
)
def test_export_with_an_unbacked_batch_and_a_mask_of_that_batch(
    strict: bool, lead: tuple[int, ...], shared: bool, added: bool
) -> None:
    model = OfSomeSequences(lead, shared=shared, added=added)
    q, mask = randn(6, 4, 9, 8), randn(6, 1, 9, 9) > -0.5
    exported = torch.export.export(model, (q, mask, torch.tensor(4)), strict=strict).module()
    for count in (0, 1, 3, 6):
        torch.testing.assert_close(exported(q, mask, torch.tensor(count)), model(q, mask, torch.tensor(count)))


@needs_registry
def test_register_offers_and_activation_replaces_the_flash_kernels() -> None:
    q, k = randn(2, 4, 9, 8).requires_grad_(), randn(2, 4, 5, 8, seed=1).requires_grad_()
    mask = randn(9, 5, seed=2)

    def run() -> list[Tensor]:
        results = []
        for flags in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.2}):
            out = F.scaled_dot_product_attention(q, k, k, **flags)
            results += [out, *torch.autograd.grad(out.square().sum(), (q, k))]
        short = F.scaled_dot_product_attention(k, q, q, is_causal=True)
        return [*results, short, *torch.autograd.grad(short.square().sum(), (q, k))]

    before = run()
    sdpa.register()
    assert all(torch.equal(a, b) for a, b in zip(run(), before, strict=True)), "registering must activate nothing"
    with activated():
        active = run()
    assert not all(torch.equal(a, b) for a, b in zip(active, before, strict=True))
    for a, b in zip(active, before, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
        assert a.stride() == b.stride()
    assert all(torch.equal(a, b) for a, b in zip(run(), before, strict=True))
