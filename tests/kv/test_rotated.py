"""`kv.append_rotated` compared with a definition in complex numbers: every option, odd memory, and what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import dispatch
from tilewise.fp8 import Fp8Tensor
from tilewise.kv import PagedKVCache, append_rotated, rotary_table, rotated
from tilewise.kv.rotated_arguments import Step

E4M3 = torch.float8_e4m3fn
HEADS, KV_HEADS, DIM, DIM_V, PAGES, PAGE_SIZE, LONGEST = 6, 2, 24, 40, 6, 4, 50
BASE = 500.0
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def exact(x: Tensor, positions: Tensor, rotary_dim: int, interleaved: bool, eps: float | None, weight: Any) -> Tensor:
    """Rotation as a product with exp(i * angle), in fp64."""
    x = x.double()
    if eps is not None:
        x = x / (x.norm(dim=-1, keepdim=True) ** 2 / x.shape[-1] + eps) ** 0.5
        x = x if weight is None else x * weight.double()
    half = rotary_dim // 2
    angle = positions[:, None].double() * BASE ** (-torch.arange(half).double() / half)
    channels = torch.arange(rotary_dim)
    left, right = (channels[::2], channels[1::2]) if interleaved else (channels[:half], channels[half:])
    turned = torch.complex(x[..., left], x[..., right]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    result = x.clone()
    result[..., left], result[..., right] = turned.real, turned.imag
    return result


def inputs(dtype: torch.dtype = torch.float32, total: int = 9, page_dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Rows in scattered slots; the fourth has none."""
    torch.manual_seed(0)
    slots = torch.randperm(PAGES * PAGE_SIZE)[:total]
    slots[3:4] = -1
    k_pages, v_pages = (
        torch.full((PAGES, PAGE_SIZE, KV_HEADS, dim), -7.0).to(page_dtype or dtype) for dim in (DIM, DIM_V)
    )
    return {
        "q": torch.randn(total, HEADS, DIM).to(dtype), "k": torch.randn(total, KV_HEADS, DIM).to(dtype),
        "v": torch.randn(total, KV_HEADS, DIM_V).to(dtype), "k_pages": k_pages, "v_pages": v_pages, "slots": slots,
        "positions": torch.randint(0, LONGEST, (total,)), "cos_sin": table(DIM),
    }  # fmt: skip


def table(rotary_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return rotary_table(LONGEST, rotary_dim, device="cpu", base=BASE, dtype=dtype)


def check(given: dict[str, Any], out: Tensor, rotary_dim: int = DIM, **options: Any) -> None:
    """Against `exact`, of rows that are as they were given; and nothing else is written."""
    interleaved, eps = options.get("interleaved", False), options.get("norm_eps")
    turned = [
        exact(given[name], given["positions"], rotary_dim, interleaved, eps, options.get(f"{name}_weight"))
        for name in ("q", "k")
    ]
    tolerance = max(TOLERANCE[out.dtype], TOLERANCE[given["k_pages"].dtype])
    torch.testing.assert_close(out.double(), turned[0], atol=tolerance, rtol=tolerance)
    slots = given["slots"]
    rows = torch.arange(len(slots))[slots >= 0]
    for want, pages in ((turned[1], given["k_pages"]), (given["v"].double(), given["v_pages"])):
        stored = pages.flatten(0, 1)
        torch.testing.assert_close(stored[slots[rows]].double(), want[rows], atol=tolerance, rtol=tolerance)
        others = torch.ones(len(stored), dtype=torch.bool)
        others[slots[rows]] = False
        assert (stored[others] == -7.0).all()


@pytest.mark.parametrize(
    ("interleaved", "norm", "rotary_dim", "in_place"),
    [*itertools.product([False, True], ["none", "plain", "weights"], [DIM, 10, 2], [False, True])],
)
def test_order_norm_and_rotary_dim(interleaved: bool, norm: str, rotary_dim: int, in_place: bool) -> None:
    given = inputs() | {"cos_sin": table(rotary_dim)}
    options: dict[str, Any] = {"interleaved": interleaved}
    if norm != "none":
        options["norm_eps"] = 0.1
    if norm == "weights":
        options |= {"q_weight": torch.rand(DIM) + 0.5, "k_weight": torch.rand(DIM) + 0.5}
    q = given["q"].clone()
    out = append_rotated(**(given | {"q": q}), out=q if in_place else None, **options)
    assert (out is q) == in_place
    assert in_place or torch.equal(q, given["q"])
    check(given, out, rotary_dim, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("page_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype, page_dtype: torch.dtype) -> None:
    """Rows, pages, weights and tables may have dtypes of their own; nothing is rounded in between."""
    given = inputs(dtype, page_dtype=page_dtype) | {"cos_sin": table(DIM, torch.float64)}
    weights = {"q_weight": torch.rand(DIM).bfloat16(), "k_weight": torch.rand(DIM).half()}
    options: dict[str, Any] = {"norm_eps": 1e-6, **weights}
    out = append_rotated(**given, **options)
    assert out.dtype == dtype
    check(given, out, **options)


def test_a_table_in_bf16_is_read_as_it_is() -> None:
    given = inputs()
    rounded = table(DIM).bfloat16()
    assert torch.equal(
        append_rotated(**(given | {"cos_sin": rounded})), append_rotated(**(given | {"cos_sin": rounded.float()}))
    )


NO_SLOT = torch.full((9,), -1)
STEPS: dict[str, tuple[int, dict[str, Any]]] = {
    "int32 positions in any order": (9, {"positions": torch.tensor([LONGEST - 1, 0, 0, 7, 7, 3, 2, 1, 0]).int()}),
    "nothing": (0, {}),
    "one row": (1, {}),
    "rows past the slots": (9, {"slots": torch.tensor([3, 9, 0, -1, 22])}),
    "only rows past the slots": (9, {"slots": NO_SLOT[:0]}),
    "no row with a slot": (9, {"slots": NO_SLOT}),
    "a page whose first rows are another's": (1, {"slots": torch.tensor([PAGE_SIZE + 2])}),
}


@pytest.mark.parametrize("name", STEPS)
def test_rows_are_rotated_and_those_with_a_slot_written(name: str) -> None:
    total, changes = STEPS[name]
    given = inputs(total=total) | changes
    out = append_rotated(**given)
    assert out.shape == (total, HEADS, DIM)
    check(given, out)


@pytest.mark.parametrize("in_place", [False, True])
def test_parts_of_one_projection_and_an_engines_cache(in_place: bool) -> None:
    """q, k and v next to each other in a row, as engines have them; K and V next to each other in heads-first pages."""
    given = inputs()
    whole = torch.cat([given[name].flatten(1) for name in ("q", "k", "v")], 1)
    sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM_V]
    parts = dict(zip(("q", "k", "v"), whole.split(sizes, 1), strict=True))
    strided = {n: p.unflatten(1, (-1, DIM_V if n == "v" else DIM)) for n, p in parts.items()}
    cache = torch.full((PAGES, KV_HEADS, PAGE_SIZE, DIM + DIM_V), -7.0).transpose(1, 2)
    strided |= {"k_pages": cache[..., :DIM], "v_pages": cache[..., DIM:]}
    out = append_rotated(**(given | strided), out=strided["q"] if in_place else None)
    check(given | {name: strided[name] for name in ("k_pages", "v_pages")}, out)
    if in_place:
        assert torch.equal(whole[:, sizes[0] :], torch.cat([given[n].flatten(1) for n in ("k", "v")], 1))


def test_strides_of_every_tensor() -> None:
    given = inputs()
    every_second = {name: given[name].repeat_interleave(2, -1)[..., ::2] for name in ("q", "k", "v", "k_pages")}
    every_second["v_pages"] = given["v_pages"].repeat_interleave(2, 0)[::2]
    every_second["slots"], every_second["positions"] = (
        given[name].repeat_interleave(2)[::2] for name in ("slots", "positions")
    )
    every_second["cos_sin"] = given["cos_sin"].repeat_interleave(2, 1)[:, ::2]
    out = torch.full((9, HEADS, 2 * DIM), torch.nan)[..., ::2]
    assert append_rotated(**every_second, out=out) is out
    check(given | {name: every_second[name] for name in ("k_pages", "v_pages")}, out)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_e4m3_with_given_scales(per_head: bool, interleaved: bool) -> None:
    given = inputs(page_dtype=E4M3)
    k_scale, v_scale = torch.tensor([0.01, 0.02]), torch.tensor(0.001)
    k_scale = k_scale if per_head else k_scale[:1]
    before = k_scale.clone()
    options: dict[str, Any] = {"interleaved": interleaved, "norm_eps": 1e-6}
    append_rotated(**given, k_scale=k_scale, v_scale=v_scale, **options)
    k = exact(given["k"], given["positions"], DIM, interleaved, 1e-6, None)
    rows = given["slots"] >= 0
    for want, pages, scale in ((k, given["k_pages"], k_scale), (given["v"], given["v_pages"], v_scale)):
        codes = (want.float() / scale.reshape(-1, 1)).clamp(-448, 448).to(E4M3)[rows]
        stored = pages.flatten(0, 1)[given["slots"][rows]]
        # A value between two codes may fall to either, after another rounding in fp32.
        close = (stored.float() - codes.float()).abs() <= 0.13 * codes.float().abs()
        assert close.all()
        assert (stored.float() == codes.float()).float().mean() > 0.99
    assert (given["v_pages"].float().abs() == 448).any(), "some values saturate"
    assert torch.equal(k_scale, before)


def test_e4m3_with_scales_that_grow() -> None:
    """The same pages and scales as rotated rows that PagedKVCache quantises."""
    torch.manual_seed(1)
    caches = [PagedKVCache(PAGES, PAGE_SIZE, 1, KV_HEADS, DIM, dtype=E4M3, device="cpu") for _ in range(2)]
    requests = [[cache.add(range(5)), cache.add(range(100, 103))] for cache in caches]
    turns = table(DIM)
    for size in (1.0, 30.0, 0.1):
        before = [caches[0].length(request) for request in requests[0]]
        rows, _ = (cache.step(mine) for cache, mine in zip(caches, requests, strict=True))
        after = [caches[0].length(request) for request in requests[0]]
        positions = torch.cat([torch.arange(*ends) for ends in zip(before, after, strict=True)])
        q, k, v = (size * torch.randn(rows, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        turned = caches[0].append_rotated(q, k, v, positions, turns)
        plain = torch.empty(2, 4 * rows, 1, KV_HEADS, DIM)
        append_rotated(q, k, v, plain[0], plain[1], torch.arange(rows), positions, turns)
        caches[1].append(plain[0, :rows, 0], v)
        want = exact(q, positions, DIM, False, None, None)
        torch.testing.assert_close(turned.double(), want, atol=2e-6 * size, rtol=2e-6)
        for mine, theirs in zip(caches[0].attended(), caches[1].attended(), strict=True):
            assert isinstance(mine, Fp8Tensor)
            assert isinstance(theirs, Fp8Tensor)
            assert torch.equal(mine.scale, theirs.scale)
            assert torch.equal(caches[0].attention(turned), caches[1].attention(turned))


@pytest.mark.parametrize("codes", [E4M3, torch.int8], ids=str)
def test_strided_slots_of_scales_that_are_written(codes: torch.dtype) -> None:
    given = inputs(page_dtype=codes)
    given["slots"] = torch.tensor([8, 9, 10, -1, 4, 5, 0, 12, 13])
    made = []
    for slots in (given["slots"], torch.stack((given["slots"], torch.full((9,), 3)), 1)[:, 0]):
        pages = {name: torch.zeros_like(given[name].float()).to(codes) for name in ("k_pages", "v_pages")}
        shape = (PAGES, KV_HEADS) if codes == E4M3 else (PAGES, KV_HEADS, PAGE_SIZE)
        scales = torch.ones(2, *shape)
        append_rotated(**(given | pages | {"slots": slots}), k_scale=scales[0], v_scale=scales[1])
        made.append([t.float() for t in (*pages.values(), scales)])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize("slots", [[0, 2], [3, 1], [0, 4, 1], [0, -1, 1], [2, 2]], ids=str)
def test_rows_of_a_page_out_of_order_for_a_scale_that_grows(slots: list[int]) -> None:
    given = inputs(total=len(slots), page_dtype=E4M3) | {"slots": torch.tensor(slots)}
    scales = torch.ones(2, PAGES, KV_HEADS)
    with pytest.raises(tw.InvalidProblem, match=r"^slots: .*page 0 in 2 parts"):
        append_rotated(**given, k_scale=scales[0], v_scale=scales[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cache_appends_and_attends(dtype: torch.dtype) -> None:
    cache = PagedKVCache(8, 4, 2, KV_HEADS, DIM, dtype=dtype, device="cpu")
    request = cache.add(range(7))
    rows = cache.step([request])
    q, k, v = (torch.randn(rows, heads, DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    positions, turns = torch.arange(rows), table(DIM)
    for layer in range(2):
        turned = cache.append_rotated(q, k, v, positions, turns, layer=layer, norm_eps=1e-6)
        out = cache.attention(turned, layer=layer)
    q_exact, k_exact = (exact(x, positions, DIM, False, 1e-6, None).transpose(0, 1)[None] for x in (q, k))
    want = tw.attention(q_exact, k_exact, v.double().transpose(0, 1)[None], causal=True)[0].transpose(0, 1)
    tolerance = 3 * TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
    assert cache.step([request], tokens=[9]) == 1, "every layer counts as written"
    with pytest.raises(tw.InvalidProblem, match=r"^k: "):
        cache.append_rotated(q, k, v, positions, turns)


def test_under_torch_compile() -> None:
    traced = inputs()
    options: dict[str, Any] = {"norm_eps": 1e-6, "interleaved": True}

    @torch.compile(backend="eager", fullgraph=True)
    def run(**tensors: Tensor) -> Tensor:
        return append_rotated(**tensors, norm_eps=1e-6, interleaved=True)

    check(traced, run(**traced), **options)


def test_the_table() -> None:
    made = rotary_table(4, 6, device="cpu", base=100.0)
    angle = 3 * 100.0 ** (-2 / 6)
    torch.testing.assert_close(made[3, [1, 4]], torch.tensor([math.cos(angle), math.sin(angle)]))
    assert made.dtype == torch.float32
    with pytest.raises(tw.InvalidProblem, match="rotary_dim"):
        rotary_table(4, 5, device="cpu")


def of(name: str, value: Any) -> dict[str, Any]:
    return {name: value}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads of k": (of("k", torch.zeros(9, 3, DIM)), "^k: .*, 2, 24"),
    "rows of v": (of("v", torch.zeros(8, KV_HEADS, DIM_V)), "^v:"),
    "dim of k": (of("k", torch.zeros(9, KV_HEADS, DIM + 1)), "^k:"),
    "batch": (of("q", torch.zeros(1, 9, HEADS, DIM)), "packed"),
    "dtype of k": (of("k", torch.zeros(9, KV_HEADS, DIM).half()), "float32"),
    "dtype of pages": (of("v_pages", torch.zeros(PAGES, PAGE_SIZE, KV_HEADS, DIM_V).half()), "v_pages"),
    "codes": (of("k_pages", torch.zeros(PAGES, PAGE_SIZE, KV_HEADS, DIM, dtype=torch.uint8)), "k_pages"),
    "int32 slots": (of("slots", torch.zeros(9, dtype=torch.int32)), "int64"),
    "more slots than rows": (of("slots", torch.zeros(10, dtype=torch.int64)), "slots"),
    "slots past the pages": (of("slots", torch.full((9,), PAGES * PAGE_SIZE)), "slots"),
    "positions of another length": (of("positions", torch.zeros(8, dtype=torch.int64)), "positions"),
    "fractional positions": (of("positions", torch.zeros(9)), "positions"),
    "positions of three axes": (of("positions", torch.zeros(3, 9, dtype=torch.int64)), "positions"),
    "positions past the table": (of("positions", torch.full((9,), LONGEST)), "positions"),
    "negative positions": (of("positions", torch.full((9,), -1)), "positions"),
    "an empty table": (of("cos_sin", torch.zeros(0, DIM)), "positions"),
    "odd rotary_dim": (of("cos_sin", torch.zeros(LONGEST, 5)), "even"),
    "wide table": (of("cos_sin", torch.zeros(LONGEST, DIM + 2)), "at most head_dim"),
    "integer table": (of("cos_sin", torch.zeros(LONGEST, DIM, dtype=torch.int64)), "cos_sin"),
    "weights without norm": (of("k_weight", torch.ones(DIM)), "norm_eps"),
    "weight of another dim": (of("q_weight", torch.ones(DIM + 1)) | of("norm_eps", 1e-6), "q_weight"),
    "negative eps": (of("norm_eps", -1.0), "norm_eps"),
    "eps in a list": (of("norm_eps", [1e-6]), "norm_eps"),
    "no bool": (of("interleaved", 1), "interleaved"),
    "NaN eps": (of("norm_eps", float("nan")), "norm_eps"),
    "scales of other pages": (of("k_scale", torch.ones(1)), "k_scale"),
    "shape of out": (of("out", torch.zeros(9, HEADS, DIM + 1)), "out"),
    "dtype of out": (of("out", torch.zeros(9, HEADS, DIM).half()), "out"),
    "shared elements of out": (of("out", torch.zeros(1, HEADS, DIM).expand(9, -1, -1)), "out"),
    "another device": (of("positions", torch.zeros(9, dtype=torch.int64, device="meta")), "meta"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changed, message = REFUSED[name]
    given = inputs()
    before = given["k_pages"].clone()
    with pytest.raises(tw.InvalidProblem, match=message):
        append_rotated(**(given | changed))
    assert torch.equal(given["k_pages"], before)


def test_scales_of_e4m3_pages_are_needed_and_checked() -> None:
    given, one, grown = inputs(page_dtype=E4M3), torch.ones(1), torch.ones(PAGES, KV_HEADS)
    for k_scale, v_scale, name in (
        (None, None, "k_scale"),
        (one, None, "v_scale"),
        (torch.ones(3), one, "k_scale"),
        (one.half(), one, "k_scale"),
        (grown[:2], grown, "k_scale"),
        (grown, one, "v_scale"),
        (torch.ones(KV_HEADS, PAGES).t(), grown, "k_scale"),
        (one, torch.tensor([1.0, 0.0]), "v_scale"),
        (one * torch.nan, one, "k_scale"),
    ):
        with pytest.raises(tw.InvalidProblem, match=name):
            append_rotated(**given, k_scale=k_scale, v_scale=v_scale)


def test_memory_of_out() -> None:
    """q itself is taken; parts of it, of k and of the pages are not."""
    given = inputs(total=6)
    given["k_pages"] = torch.zeros(PAGES, PAGE_SIZE, KV_HEADS, DIM)
    both = torch.randn(7, HEADS, DIM)
    with pytest.raises(tw.InvalidProblem, match="does not overlap q"):
        append_rotated(**(given | {"q": both[:6]}), out=both[1:])
    with pytest.raises(tw.InvalidProblem, match="does not overlap k_pages"):
        append_rotated(**given, out=given["k_pages"].flatten()[: 6 * HEADS * DIM].view(6, HEADS, DIM))


def test_memory_of_pages() -> None:
    """Two pools, or other columns of one; no operand lies in them, and in place neither k nor v lies in q."""
    given = inputs(total=6)
    width = given["v"].shape[-1]
    pool = torch.zeros(PAGES, PAGE_SIZE, KV_HEADS, DIM + width)
    parts = {"k_pages": pool[..., :DIM], "v_pages": pool[..., DIM:]}
    append_rotated(**(given | parts))
    own = {name: torch.zeros(part.shape) for name, part in parts.items()}
    append_rotated(**(given | own))
    assert all(torch.equal(parts[name], own[name]) for name in parts)
    for first in (0, DIM - 1):
        with pytest.raises(tw.InvalidProblem, match="k_pages: expected memory that does not overlap v_pages"):
            append_rotated(**(given | parts | {"v_pages": pool[..., first : first + width]}))
    with pytest.raises(tw.InvalidProblem, match="elements with memory of their own"):
        append_rotated(**(given | own | {"v_pages": own["v_pages"][:1].expand(PAGES, -1, -1, -1)}))
    with pytest.raises(tw.InvalidProblem, match="v_pages: expected memory that does not overlap v"):
        append_rotated(**(given | own | {"v": own["v_pages"].flatten(0, 1)[2:8]}))
    fused = torch.randn(6, HEADS + KV_HEADS, DIM)
    q, k = fused.split((HEADS, KV_HEADS), 1)
    want = append_rotated(**(given | own | {"q": q.clone(), "k": k.clone()}))
    torch.testing.assert_close(append_rotated(**(given | own | {"q": q, "k": k}), out=q), want)
    values = fused.view(6, -1)[:, : KV_HEADS * width].view(6, KV_HEADS, width)
    for name, wrong in (("k", fused[:, 1 : 1 + KV_HEADS]), ("v", values)):
        with pytest.raises(tw.InvalidProblem, match=f"out: expected memory that does not overlap {name}"):
            append_rotated(**(given | own | {"q": q, "k": k} | {name: wrong}), out=q)


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8])
def test_memory_of_scales_that_are_written(codes: torch.dtype) -> None:
    given = inputs(total=6) | {"slots": torch.arange(6)}
    shape = (PAGES, KV_HEADS, PAGE_SIZE) if codes == torch.int8 else (PAGES, KV_HEADS)
    for name in ("k_pages", "v_pages"):
        given[name] = torch.zeros(given[name].shape, dtype=codes)
    k_scale, v_scale = torch.ones(2, *shape)
    append_rotated(**given, k_scale=k_scale, v_scale=v_scale)
    with pytest.raises(tw.InvalidProblem, match="k_scale: expected memory that does not overlap v_scale"):
        append_rotated(**given, k_scale=k_scale, v_scale=k_scale)
    out = torch.empty(given["q"].numel() + k_scale.numel())
    scales = {"k_scale": out[: k_scale.numel()].view(shape), "v_scale": v_scale}
    with pytest.raises(tw.InvalidProblem, match="k_scale: expected memory that does not overlap out"):
        append_rotated(**given, **scales, out=out[: given["q"].numel()].view_as(given["q"]))
    for name in ("k_pages", "v_scale"):
        changed = given | {"k_scale": k_scale, "v_scale": v_scale}
        changed[name] = torch._neg_view(changed[name])
        with pytest.raises(tw.InvalidProblem, match=f"{name}: expected memory as it is, got a negated view"):
            append_rotated(**changed)


@pytest.mark.parametrize("e4m3", [False, True])
def test_negated_views(e4m3: bool) -> None:
    """What `x.conj().imag` is: the memory holds the negative of the values."""
    given = inputs(total=6) | {"slots": torch.arange(6)}
    pages = [torch.zeros(PAGES, PAGE_SIZE, KV_HEADS, dim) for dim in (DIM, DIM_V)]
    more: dict[str, Any] = {}
    if e4m3:
        pages = [x.to(torch.float8_e4m3fn) for x in pages]
        more = {name: torch.ones(PAGES, KV_HEADS) for name in ("k_scale", "v_scale")}
    results = []
    for view in (torch.neg, torch._neg_view):
        k_pages, v_pages = (x.clone() for x in pages)
        rows = {name: view(given[name]) for name in ("q", "k", "v")}
        rows |= {name: view(-given[name]) for name in ("slots", "positions")}
        scales = {name: scale.clone() for name, scale in more.items()}
        out = append_rotated(**(given | rows | {"k_pages": k_pages, "v_pages": v_pages} | scales))
        results.append((out, k_pages.float(), v_pages.float()))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_gradients_are_refused() -> None:
    given = inputs()
    given["q"].requires_grad_()
    with pytest.raises(tw.Unsupported, match="no_grad"):
        append_rotated(**given)
    with torch.no_grad():
        assert not append_rotated(**given).requires_grad


class Kernel:
    """A stand-in for a GPU's kernel, whose launches `append_rotated` keeps."""

    def __init__(self) -> None:
        self.bound = 0

    def bind(self, _step: Any, *, interleaved: bool, norm_eps: float | None, in_place: bool) -> Any:
        del in_place
        self.bound += 1
        return lambda tensors: rotated._append(Step(*tensors), interleaved, norm_eps, on_host=True)


def test_a_kept_launch_is_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that look alike are computed with their own rows, options and memory, and overlaps are seen in each."""
    kernel = Kernel()
    monkeypatch.setattr(dispatch.load("cpu"), "bind_rotated", kernel.bind)
    layers = [inputs() for _ in range(2)]
    for _ in range(3):
        for number, given in enumerate(layers):
            given["q"].normal_()
            before = given["q"].clone()
            check(given | {"q": before}, append_rotated(**given, norm_eps=0.1 * number), norm_eps=0.1 * number)
            check(given | {"q": before}, append_rotated(**given, out=given["q"]))
    assert kernel.bound == 4
    first, k_pages = layers[0], layers[0]["k_pages"]
    apart = k_pages.new_empty(PAGES, PAGE_SIZE, KV_HEADS, DIM_V)
    shared = k_pages.new_empty(2 * apart.numel())
    over = (shared[: apart.numel()].view_as(apart), shared[: k_pages.numel()].view_as(k_pages))
    with pytest.raises(tw.InvalidProblem, match="k_pages: expected memory that does not overlap v_pages"):
        append_rotated(**first | {"k_pages": over[1], "v_pages": over[0]})


WRONG: dict[str, list[Any]] = {
    "max_seqlen": [None, 2.5, -1],
    "rotary_dim": ["8", 0, 7, True],
    "base": [None, "1e4", 0.0, math.nan],
    "dtype": [torch.int32, None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_tables_that_make_no_sense(name: str, value: Any) -> None:
    given: dict[str, Any] = {"max_seqlen": 32, "rotary_dim": 8, "device": "cpu"} | {name: value}
    with pytest.raises(tw.InvalidProblem, match=f"^{name}: "):
        rotary_table(**given)
