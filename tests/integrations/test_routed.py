"""Torch's own layers inside `sdpa.routed()`: their attention is tilewise's, and their results are torch's. So are those
of `tilewise.nn.MultiheadAttention`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F  # noqa: N812

import tilewise as tw
from making import randn
from operators import Operators
from sampling import marks_of
from tilewise.integrations import sdpa

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

BATCH, SEQLEN_Q, SEQLEN_K, EMBED, HEADS = 3, 5, 7, 16, 4
# Operators that compute attention by kernels of torch's.
FUSED = ("_scaled_dot_product", "_transformer_encoder_layer_fwd", "_native_multi_head_attention")


def attention_operators(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("tilewise.") or any(fused in name for fused in FUSED)]


def close(mine: Any, torchs: Any) -> None:
    torch.testing.assert_close(mine, torchs, atol=2e-5, rtol=2e-5)


def padding(kind: str | None, batch: int | None = BATCH) -> Tensor | None:
    if kind is None:
        return None
    ignored = torch.zeros(BATCH, SEQLEN_K, dtype=torch.bool)
    ignored[0, -2:] = True
    mask = ignored if kind == "bool" else torch.zeros(BATCH, SEQLEN_K).masked_fill(ignored, -torch.inf)
    return mask if batch else mask[0]


def attention_mask(kind: str | None, batch: int = BATCH) -> Tensor | None:
    if kind in (None, "causal"):
        return None if kind is None else torch.ones(SEQLEN_Q, SEQLEN_K, dtype=torch.bool).triu(1)
    if kind == "causal float":
        return torch.full((SEQLEN_Q, SEQLEN_K), -torch.inf).triu(1)
    shape = (SEQLEN_Q, SEQLEN_K) if kind in ("bool", "float") else (batch * HEADS, SEQLEN_Q, SEQLEN_K)
    scores = randn(*shape, seed=8)
    if kind.startswith("float"):
        return scores.requires_grad_()
    ignored = scores < -0.5
    ignored[..., 0] = False
    return ignored


def calls(layer: nn.MultiheadAttention, batched: bool) -> Iterator[dict[str, Any]]:
    sizes = ((SEQLEN_Q, EMBED), (SEQLEN_K, layer.kdim), (SEQLEN_K, layer.vdim))
    q, k, v = (randn(BATCH, *s, seed=i) if batched else randn(*s, seed=i) for i, s in enumerate(sizes))
    if batched and not layer.batch_first:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    if layer.kdim == layer.vdim:
        v = k
    kinds = (None, "bool", "float", "bool heads", "float heads", "causal", "causal float")
    for pad, mask in itertools.product((None, "bool", "float"), kinds):
        inputs = {"query": q.clone().requires_grad_(), "key": k, "value": v}
        masks = {
            "key_padding_mask": padding(pad, BATCH if batched else None),
            "attn_mask": attention_mask(mask, BATCH if batched else 1),
        }
        yield {**inputs, **masks, "is_causal": mask in ("causal", "causal float")}


def results(layer: nn.Module, **call: Any) -> list[Tensor]:
    """Output, weights if there are any, and the gradients of everything that has one."""
    out, weights = layer(**call)
    found = [out] if weights is None else [out, weights]
    inputs = [t for t in call.values() if isinstance(t, Tensor) and t.requires_grad]
    wanted = [*inputs, *layer.parameters()]
    return [*found, *torch.autograd.grad(sum(t.square().sum() for t in found), wanted, materialize_grads=True)]


OPTIONS = [
    {"batch_first": a, "add_bias_kv": b, "add_zero_attn": c, "kdim": d, "vdim": d and d + 2, "bias": e}
    for a, b, c, d, e in itertools.product((False, True), (False, True), (False, True), (None, 6), (False, True))
]


@pytest.mark.parametrize(
    ("options", "batched"),
    [
        pytest.param(
            o, batched, id="-".join(map(str, (*o.values(), batched))), marks=marks_of(number % 6 == 5 * batched)
        )
        for number, o in enumerate(OPTIONS)
        for batched in (True, False)
    ],
)
def test_multihead_attention_is_torchs(options: dict[str, Any], batched: bool) -> None:
    """Causal ones too, where torch's shortcut hides the keys of add_bias_kv and add_zero_attn."""
    torch.manual_seed(0)
    layer, module = nn.MultiheadAttention(EMBED, HEADS, **options), tw.nn.MultiheadAttention(EMBED, HEADS, **options)
    module.load_state_dict(layer.state_dict())
    for call in calls(layer, batched):
        # The module hides no key that the mask shows.
        torchs = results(layer, **call | {"is_causal": False}, need_weights=False)
        close(results(module, **call, need_weights=False), torchs)
        for weights in ({"need_weights": False}, {"need_weights": True, "average_attn_weights": False}):
            torchs = results(layer, **call, **weights)
            with sdpa.routed():
                mine = results(layer, **call, **weights)
            close(mine, torchs)
            assert [t.stride() for t in mine[:1]] == [t.stride() for t in torchs[:1]]


def test_multihead_attention_runs_tilewise_in_training_and_inference() -> None:
    x = randn(BATCH, SEQLEN_Q, EMBED)
    for training, batch_first in itertools.product((True, False), (True, False)):
        layer = nn.MultiheadAttention(EMBED, HEADS, batch_first=batch_first).train(training)
        for grad in (True, False):
            with torch.set_grad_enabled(grad), sdpa.routed(), Operators() as operators:
                layer(x, x, x, need_weights=False)
            assert attention_operators(operators.names) == ["tilewise.dense.default"]


def test_weights_are_torchs_formula() -> None:
    """They are the matrix that tiling avoids, so no kernel of attention runs."""
    layer, x = nn.MultiheadAttention(EMBED, HEADS), randn(BATCH, SEQLEN_Q, EMBED)
    for average in (True, False):
        expected = layer(x, x, x, average_attn_weights=average)
        with sdpa.routed(), Operators() as operators:
            found = layer(x, x, x, average_attn_weights=average)
        assert all(map(torch.equal, found, expected))
        assert attention_operators(operators.names) == []


Model = tuple[nn.Module, tuple[Tensor, ...], int]


def encoder(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(EMBED, HEADS, 32, dropout=0.0, batch_first=True, **options)


def decoder() -> nn.TransformerDecoderLayer:
    return nn.TransformerDecoderLayer(EMBED, HEADS, 32, dropout=0.0, batch_first=True)


X, Y = randn(2, 7, EMBED), randn(2, 5, EMBED)
# A model, its inputs, and how often it attends.
MODELS: dict[str, Callable[[], Model]] = {
    "encoder layer": lambda: (encoder(), (X,), 1),
    "encoder layer, norm first": lambda: (encoder(norm_first=True, activation="gelu"), (X,), 1),
    "encoder": lambda: (nn.TransformerEncoder(encoder(), 2), (X,), 2),
    "decoder layer": lambda: (decoder(), (Y, X), 2),
    "transformer": lambda: (
        nn.Transformer(EMBED, HEADS, 1, 1, 32, dropout=0.0),
        (X.transpose(0, 1), Y.transpose(0, 1)),
        3,
    ),
}


def masks_of(name: str, kind: str) -> dict[str, Any]:
    lengths = {"transformer": (7, "src"), "encoder": (7, ""), "decoder layer": (5, "tgt")}
    seqlen, prefix = lengths.get(name, (7, "src"))
    mask_name, padding_name = (f"{prefix}_mask".lstrip("_"), f"{prefix or 'src'}_key_padding_mask")
    ignored = torch.zeros(2, seqlen, dtype=torch.bool)
    ignored[1, -2:] = True
    if kind == "padding":
        return {padding_name: ignored}
    causal_name = f"{prefix}_is_causal" if name in ("transformer", "decoder layer") else "is_causal"
    triangle = nn.Transformer.generate_square_subsequent_mask(seqlen)
    if kind == "none":
        return {}
    return {mask_name: triangle, causal_name: True} if kind == "causal" else {mask_name: triangle}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", ["none", "causal", "mask", "padding"])
@pytest.mark.parametrize("name", MODELS)
def test_transformer_layers_are_torchs(name: str, kind: str, training: bool) -> None:
    torch.manual_seed(0)
    model, inputs, count = MODELS[name]()
    model.train(training)
    leaves = [t.clone().requires_grad_() for t in inputs]
    masks = masks_of(name, kind)

    def run() -> list[Tensor]:
        out = model(*leaves, **masks)
        return [out, *torch.autograd.grad(out.square().sum(), [*leaves, *model.parameters()])]

    torchs = run()
    with sdpa.routed():
        close(run(), torchs)
    with torch.no_grad():
        expected = model(*inputs, **masks)
        with sdpa.routed(), Operators() as operators:
            mine = model(*inputs, **masks)
    # Torch's fused path for padded batches leaves zeros at the padding.
    hidden = next((m for n, m in masks.items() if "padding" in n), None)
    rows = ~hidden if hidden is not None and name == "encoder" else slice(None)
    close(mine[rows], expected[rows])
    assert attention_operators(operators.names) == ["tilewise.dense.default"] * count


def compiled_operators(function: Callable[..., Any], *inputs: Tensor) -> tuple[Any, list[str]]:
    """What a compiled function returns, and the operators of its graphs."""
    names: list[str] = []

    def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=aot_autograd(fw_compiler=forward), fullgraph=True)
    return compiled(*inputs), names


@pytest.mark.parametrize(
    ("name", "where", "training"),
    [("encoder layer", "around", True), ("encoder layer", "within", False), ("encoder", "within", True),
     ("decoder layer", "around", False)],
)  # fmt: skip
def test_compiled_transformer_layers(name: str, where: str, training: bool) -> None:
    model, inputs, count = MODELS[name]()
    model.train(training)

    def within(*inputs: Tensor) -> Any:
        with sdpa.routed():
            return model(*inputs)

    with torch.set_grad_enabled(training):
        expected = model(*inputs)
        if where == "within":
            mine, names = compiled_operators(within, *inputs)
        else:
            with sdpa.routed():
                mine, names = compiled_operators(lambda *inputs: model(*inputs), *inputs)
    close(mine, expected)
    assert attention_operators(names) == ["tilewise.dense.default"] * count
    assert torch.backends.mha.get_fastpath_enabled()


def functional(layer: nn.MultiheadAttention, x: Tensor, **change: Any) -> Any:
    call: dict[str, Any] = {
        "query": x, "key": x, "value": x, "embed_dim_to_check": EMBED, "num_heads": HEADS,
        "in_proj_weight": layer.in_proj_weight, "in_proj_bias": layer.in_proj_bias, "bias_k": None, "bias_v": None,
        "add_zero_attn": False, "dropout_p": 0.0, "out_proj_weight": layer.out_proj.weight,
        "out_proj_bias": layer.out_proj.bias, "need_weights": False,
    }  # fmt: skip
    return F.multi_head_attention_forward(**{**call, **change})


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("attn_mask: expected shape", {"attn_mask": torch.zeros(2, 2)}),
        ("attn_mask: expected a bool or floating", {"attn_mask": torch.zeros(5, 5, dtype=torch.int32)}),
        ("key_padding_mask: expected shape", {"key_padding_mask": torch.zeros(BATCH, 4)}),
        ("attn_mask: expected the triangle", {"is_causal": True}),
        ("query: expected an embedding of 24", {"embed_dim_to_check": 24}),
        ("query: expected an embedding of 16, a multiple of 3", {"num_heads": 3}),
        ("value: expected shape", {"value": torch.zeros(4, BATCH, EMBED)}),
        ("key: expected 3 dimensions", {"key": torch.zeros(5, EMBED)}),
        ("query: expected 2 dimensions", {"query": torch.zeros(EMBED)}),
        ("key: expected batch 3", {"key": torch.zeros(5, 2, EMBED), "value": torch.zeros(5, 2, EMBED)}),
        ("bias_k, bias_v: expected both", {"bias_k": torch.zeros(1, 1, EMBED)}),
        ("in_proj_weight: expected a tensor", {"in_proj_weight": None}),
        ("k_proj_weight: expected a tensor", {"use_separate_proj_weight": True, "q_proj_weight": torch.eye(EMBED)}),
        ("static_k: expected shape", {"static_k": torch.zeros(2, 5, 4)}),
        ("dropout_p: expected a probability", {"dropout_p": 1.0}),
    ],
)
def test_wrong_arguments_are_refused_with_a_reason_where_torch_raises(message: str, change: dict[str, Any]) -> None:
    layer, x = nn.MultiheadAttention(EMBED, HEADS), randn(SEQLEN_Q, BATCH, EMBED)
    if "dropout_p" not in change:
        with pytest.raises((AssertionError, RuntimeError)):
            functional(layer, x, **change)
    with sdpa.routed(), pytest.raises(tw.InvalidProblem, match=message) as caught:
        functional(layer, x, **change)
    assert isinstance(caught.value, RuntimeError)


@contextmanager
def without_fused_layers() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_the_switch_of_fused_layers_is_as_before_once_every_block_is_left() -> None:
    enabled = torch.backends.mha.get_fastpath_enabled
    assert enabled()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with sdpa.routed():
            inside.set()
            leave.wait(30)

    with sdpa.routed():
        assert not enabled()
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait(30)
    assert not enabled()
    leave.set()
    thread.join()
    assert enabled()
    with without_fused_layers():
        with sdpa.routed(), sdpa.routed():
            assert not enabled()
        assert not enabled()
    with pytest.raises(ZeroDivisionError), sdpa.routed():
        raise ZeroDivisionError
    assert enabled()
