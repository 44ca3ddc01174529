"""The drop-in for FlexAttention against torch's own, uncompiled."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs

import tilewise as tw
from making import watched
from tilewise.integrations import flex
from tilewise.integrations.flex import ScoreMod, create_block_mask, flex_attention

# Uncompiled, which is torch's reference.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

DOCUMENTS = torch.arange(300) // 110


def prefix_lm(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) | (j < 40)


def documents(_b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (DOCUMENTS[i] == DOCUMENTS[j]) & ((i >= j) | (h == 1))


def nothing_for_some(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i % 7 != 0) & (j > b * 20)


def operands(seqlen_q: int = 300, seqlen_k: int = 300, kv_heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, seqlen_q, 16, generator=draw)
    k, v = (torch.randn(2, kv_heads, seqlen_k, 16, generator=draw) for _ in range(2))
    return q, k, v


def both(qkv: tuple[Tensor, Tensor, Tensor], theirs_mask: Any, mine: Any, **flags: Any) -> None:
    """Outputs and lse of the two; torch's has no backward on a CPU."""
    asked = theirs.AuxRequest(lse=True)
    attends: list[tuple[Any, Any]] = [(theirs.flex_attention, theirs_mask), (flex_attention, mine)]
    expected, found = (attend(*qkv, block_mask=mask, return_aux=asked, **flags) for attend, mask in attends)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1].lse, expected[1].lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mask_mod", [prefix_lm, documents, nothing_for_some])
def test_masks(mask_mod: Any) -> None:
    sizes = 2, 4, 300, 300
    block = theirs.create_block_mask(mask_mod, *sizes, device="cpu")
    both(operands(), block, create_block_mask(mask_mod, *sizes, device="cpu"))
    both(operands(), block, block)


def test_grouped_heads_scale_and_other_lengths() -> None:
    block = theirs.create_block_mask(prefix_lm, None, None, 130, 300, device="cpu")
    both(operands(130, 300, 2), block, block, enable_gqa=True, scale=0.3)


@pytest.mark.parametrize(
    "mod",
    [
        ScoreMod(softcap=2.0),
        ScoreMod(alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.0])),
        ScoreMod(alibi_slopes=torch.rand(2, 4, generator=torch.Generator().manual_seed(0))),
        ScoreMod(bias=torch.randn(4, 300, 300, generator=torch.Generator().manual_seed(1))),
        ScoreMod(
            3.0, torch.tensor([0.5, 0.25, 0.1, 0.0]), torch.randn(300, generator=torch.Generator().manual_seed(2))
        ),
    ],
    ids=["softcap", "alibi", "alibi of sequences", "bias", "all"],
)
def test_score_mods(mod: ScoreMod) -> None:
    block = theirs.create_block_mask(prefix_lm, None, None, 300, 300, device="cpu")
    both(operands(), block, block, score_mod=mod)


def test_a_block_mask_is_converted_once_and_forgotten_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = watched(monkeypatch, tw.TileMask, "from_block_mask")
    block = theirs.create_block_mask(prefix_lm, None, None, 300, 300, device="cpu")
    for _ in range(3):
        flex_attention(*operands(), block_mask=block)
    assert len(conversions) == 1
    conversions.clear()
    before = len(flex._CONVERTED)
    del block
    assert len(flex._CONVERTED) == before - 1


def test_a_block_mask_of_inference_mode_is_one_for_training_too() -> None:
    q, k, v = operands()
    block = theirs.create_block_mask(prefix_lm, None, None, 300, 300, device="cpu")
    with torch.inference_mode():
        before = flex_attention(q, k, v, block_mask=block)
    out = flex_attention(q.requires_grad_(), k, v, block_mask=block)
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert torch.equal(out, before)  # type: ignore[arg-type]


def test_lists_that_sequences_and_heads_share_under_a_mask_mod_of_each() -> None:
    starts = torch.tensor([3, 50])

    def apart(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (j >= starts[b]) & ((i - j < 90) | (h > 1))

    for batch, heads in ((None, None), (2, None), (None, 4)):
        block = theirs.create_block_mask(apart, batch, heads, 120, 120, device="cpu")
        both(operands(120, 120), block, block)
        with pytest.raises(tw.InvalidProblem, match=f"{'H' if batch else 'B'}: expected a number, because"):
            create_block_mask(apart, batch, heads, 120, 120, device="cpu")
    block = theirs.create_block_mask(apart, None, None, 120, 120, device="cpu")
    q, k, v = operands(120, 120)
    flex_attention(q[:1], k[:1], v[:1], block_mask=block)
    both((q, k, v), block, block)
    assert create_block_mask(theirs.noop_mask, None, None, 120, 120, device="cpu").density == 1


@pytest.mark.parametrize("joined", [theirs.and_masks, theirs.or_masks])
def test_masks_that_torch_joins_depend_on_no_sequence(joined: Any) -> None:
    """torch starts with a tensor in the likeness of b."""
    args = (joined(prefix_lm, lambda _b, _h, i, j: i - j < 90), None, None, 300, 300)
    both(operands(), theirs.create_block_mask(*args, device="cpu"), create_block_mask(*args, device="cpu"))


class Offset:
    by = torch.tensor(5)


class Listed(list[int]):
    by = 5


def shifted(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i + shifted.by >= j  # type: ignore[attr-defined,no-any-return]


def imported(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    import types

    return i + types.by >= j  # type: ignore[attr-defined,no-any-return]


CHANGES = ["captured", "global", "rebound", "attribute", "own", "import", "data", "function", "lists"]
CHANGES += ["of a list", "of a tensor"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_mask_is_converted_again_when_what_it_reads_changes(change: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(f"{__name__}.DOCUMENTS", DOCUMENTS.clone())
    documents_here, shift, offset, data = torch.arange(300) // 110, 5, Offset(), torch.tensor(5)
    shifted.by, listed, tensor = 5, Listed(), torch.zeros(2)  # type: ignore[attr-defined]
    tensor.by = 5  # type: ignore[attr-defined]
    monkeypatch.setattr("types.by", 5, raising=False)
    mods: dict[str, Any] = {
        "captured": theirs.and_masks(prefix_lm, lambda _b, _h, i, j: documents_here[i] == documents_here[j], prefix_lm),
        "global": documents,
        "rebound": lambda _b, _h, i, j: i + shift >= j,
        "attribute": lambda _b, _h, i, j: i + offset.by >= j,
        "own": shifted,
        "import": imported,
        "data": lambda _b, _h, i, j: i + data >= j,
        "of a list": lambda _b, _h, i, j: i + listed.by >= j,
        "of a tensor": lambda _b, _h, i, j: i + tensor.by >= j,  # type: ignore[attr-defined]
    }
    block = theirs.create_block_mask(mods.get(change, prefix_lm), None, 4, 300, 300, device="cpu")
    both(operands(), block, block)
    if change in ("captured", "global"):
        (documents_here if change == "captured" else DOCUMENTS).copy_(torch.arange(300) // 120)
    elif change == "function":
        block.mask_mod = lambda _b, _h, i, j: (i >= j) | (j < 30)
    elif change == "lists":
        block.kv_num_blocks.zero_()
        assert block.full_kv_num_blocks is not None
        block.full_kv_num_blocks.zero_()
        # Torch's uncompiled reference reads no lists.
        torch.testing.assert_close(flex_attention(*operands(), block_mask=block), torch.zeros(2, 4, 300, 16))
        return
    shift, offset.by, data.data = 3, torch.tensor(3), torch.tensor(3)
    shifted.by = listed.by = tensor.by = 3  # type: ignore[attr-defined]
    monkeypatch.setattr("types.by", 3)
    both(operands(), block, block)


def test_results_as_torch_returns_them() -> None:
    q, k, v = operands()
    out = flex_attention(q, k, v)
    assert isinstance(out, Tensor)
    again, aux = flex_attention(q, k, v, return_aux=theirs.AuxRequest(lse=True))
    assert torch.equal(again, out)
    assert isinstance(aux, theirs.AuxOutput)
    assert aux.max_scores is None
    _, lse = flex_attention(q, k, v, return_lse=True)
    assert isinstance(lse, Tensor)
    assert aux.lse is not None
    assert torch.equal(aux.lse, lse)


@pytest.mark.parametrize("name", ["flex_attention", "create_block_mask"])
def test_the_signatures_are_torchs(name: str) -> None:
    """Of this release of torch; what a later one added may follow."""
    mine = inspect.signature(getattr(flex, name)).parameters
    torchs = inspect.signature(getattr(theirs, name)).parameters
    shapes = [[(p.name, p.default, p.kind) for p in each.values()] for each in (mine, torchs)]
    if name == "create_block_mask":
        assert shapes[0][: len(shapes[1])] == shapes[1]
    else:
        assert shapes[0] == shapes[1]


def test_what_tunes_torchs_kernels_changes_nothing() -> None:
    q, k, v = operands()
    documented = theirs.FlexKernelOptions.__annotations__  # by this release of torch
    others = ("SPLIT_KV", "PARTITION_SIZE", "num_consumer_groups", "num_buffers_warp_spec")
    options = {prefix + name: 64 for name in (*documented, *others) for prefix in ("", "fwd_", "bwd_")}
    assert "fwd_BLOCK_M" in options
    found, want = flex_attention(q, k, v, kernel_options=options), flex_attention(q, k, v)
    assert torch.equal(found, want)  # type: ignore[arg-type]
    want_mask = create_block_mask(prefix_lm, None, None, 300, 300, device="cpu").dense()
    stored = {"separate_full_blocks": False, "compute_dq_write_order": True, "dq_kv_order": False, "_compile": True}
    for size in (64, (32, 256), [128, 64]):
        mask = create_block_mask(prefix_lm, None, None, 300, 300, "cpu", size, **stored)  # type: ignore[arg-type]
        assert torch.equal(mask.dense(), want_mask)


def test_what_is_refused_says_what_to_do() -> None:
    q, k, v = operands()
    with pytest.raises(tw.Unsupported, match=r"ScoreMod\(softcap="):
        flex_attention(q, k, v, score_mod=lambda score, *_: score * 2)
    with pytest.raises(tw.Unsupported, match="AuxRequest"):
        flex_attention(q, k, v, return_aux=theirs.AuxRequest(max_scores=True))
    with pytest.raises(tw.InvalidProblem, match="return_lse: expected False"):
        flex_attention(q, k, v, return_lse=True, return_aux=theirs.AuxRequest(lse=True))
    with pytest.raises(tw.InvalidProblem, match="return_aux: expected an AuxRequest"):
        flex_attention(q, k, v, return_aux=True)  # type: ignore[arg-type]
    for name in ("SM_SCALE", "OUTPUT_MAX", "FLOAT32_PRECISION", "fwd_V_HEAD_DIM", "new in some release"):
        with pytest.raises(tw.InvalidProblem, match=rf"kernel_options: .*got \['{name}'\]"):
            flex_attention(q, k, v, kernel_options={"BLOCK_M": 64, name: 1})
    with pytest.raises(tw.InvalidProblem, match="kernel_options: expected a dict"):
        flex_attention(q, k, v, kernel_options=["BLOCK_M"])  # type: ignore[arg-type]
    with pytest.raises(tw.InvalidProblem, match="enable_gqa"):
        flex_attention(q, k[:, :2], v[:, :2])
    for size in (0, (128,), (128, -1), 1.5, None):
        with pytest.raises(tw.InvalidProblem, match="BLOCK_SIZE"):
            create_block_mask(prefix_lm, None, None, 5, 5, device="cpu", BLOCK_SIZE=size)  # type: ignore[arg-type]
    with pytest.raises(tw.InvalidProblem, match="KV_LEN"):
        create_block_mask(prefix_lm, None, None, 5, -5, device="cpu")
    with pytest.raises(tw.InvalidProblem, match="block_mask: expected a tile mask of 300"):
        flex_attention(q, k, v, block_mask=create_block_mask(prefix_lm, None, None, 5, 5, device="cpu"))
    with pytest.raises(tw.InvalidProblem, match="offset -1"):
        flex_attention(q, k[:, :, :299], v[:, :, :299], score_mod=ScoreMod(alibi_slopes=torch.zeros(4)))
    whole: Any = theirs.create_block_mask(prefix_lm, None, None, 300, 300, device="cpu")
    part = whole[:, :, 1:2]
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("query: expected .batch, heads, seqlen, dim.", {"query": q[0]}),
        ("key: expected a torch.Tensor", {"key": None}),
        ("TileMask.from_dense", {"block_mask": torch.ones(300, 300, dtype=torch.bool)}),
        ("set its seq_lengths", {"block_mask": part}),
    ]
    for message, change in wrong:
        with pytest.raises(tw.InvalidProblem, match=message):
            flex_attention(**{"query": q, "key": k, "value": v, **change})
