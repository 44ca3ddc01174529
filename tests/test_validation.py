"""Bad input: each mistake has its own message, raised before any kernel runs."""

import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import zeros

import tilewise as tw
from making import int32
from tilewise import dispatch, settings
from tilewise.cascade import Group, SharedPrefix
from tilewise.kv import append_rotated

Arguments = dict[str, Any]


def dense(**changes: Any) -> Arguments:
    return {"q": zeros(2, 4, 5, 8), "k": zeros(2, 2, 7, 8), "v": zeros(2, 2, 7, 8)} | changes


def packed(**changes: Any) -> Arguments:
    totals = {"cu_seqlens_q": int32(0, 2, 5), "cu_seqlens_k": int32(0, 3, 7)}
    return {"q": zeros(5, 4, 8), "k": zeros(7, 2, 8), "v": zeros(7, 2, 8)} | totals | changes


def paged(**changes: Any) -> Arguments:
    pages = {"k_pages": zeros(6, 4, 2, 8), "v_pages": zeros(6, 4, 2, 8)}
    return {"q": zeros(2, 4, 8), "block_table": int32([0, 1], [5, -1]), "seqlens_k": int32(6, 3)} | pages | changes


def keys(*shape: int) -> Arguments:
    """k and v."""
    return {"k": zeros(1).expand(shape), "v": zeros(1).expand(shape)}


def call_of(arguments: Arguments) -> Callable[..., Any]:
    if "k_pages" in arguments:
        return tw.attention_paged
    return tw.attention_varlen if "cu_seqlens_q" in arguments else tw.attention


LEARNT = zeros(4, requires_grad=True)
# (arguments, the one that is named, a part of what is expected, a part of what came)
MISTAKES: dict[str, tuple[Arguments, str, str, str]] = {
    "q is a list": (dense(q=[1.0]), "q", "a torch.Tensor", "list"),
    "mask is a list": (dense(mask=[True]), "mask", "a torch.Tensor, a TileMask or None", "list"),
    "rank 3 q": (dense(q=zeros(4, 5, 8)), "q", "4 dimensions", "(4, 5, 8)"),
    "rank 5 v": (dense(v=zeros(1, 2, 2, 7, 8)), "v", "4 dimensions", "(1, 2, 2, 7, 8)"),
    "rank 4 packed q": (packed(q=zeros(1, 5, 4, 8)), "q", "3 dimensions", "(1, 5, 4, 8)"),
    "batch differs": (dense(k=zeros(3, 2, 7, 8)), "k", "batch 2 as in q", "3"),
    "head_dim differs": (dense(k=zeros(2, 2, 7, 16)), "k", "head_dim 8 as in q", "16"),
    "seqlen_k differs": (dense(v=zeros(2, 2, 6, 8)), "v", "seqlen_k 7 as in k", "6"),
    "kv heads differ": (dense(v=zeros(2, 4, 7, 8)), "v", "num_kv_heads 2 as in k", "4"),
    "heads are no multiple": (dense(**keys(2, 3, 7, 8)), "num_heads", "a multiple of num_kv_heads (3)", "4"),
    "zero heads": (dense(q=zeros(2, 0, 5, 8)), "num_heads", "at least 1", "0"),
    "zero kv heads": (dense(**keys(2, 0, 7, 8)), "num_kv_heads", "at least 1", "0"),
    "head_dim 0": (dense(q=zeros(2, 4, 5, 0), k=zeros(2, 2, 7, 0)), "head_dim", "at least 1", "0"),
    "head_dim_v 0": (dense(v=zeros(2, 2, 7, 0)), "head_dim_v", "at least 1", "0"),
    "head_dim 577": (dense(q=zeros(2, 4, 5, 577), k=zeros(2, 2, 7, 577)), "head_dim", "at most 576", "577"),
    "dtypes differ": (dense(k=zeros(2, 2, 7, 8).half()), "k", "dtype torch.float32", "float16"),
    "integers": (dense(q=zeros(2, 4, 5, 8).int()), "q", "float16 or bfloat16", "int32"),
    "devices differ": (dense(v=zeros(2, 2, 7, 8, device="meta")), "v", "on cpu", "meta"),
    "mask of floats": (dense(mask=zeros(5, 7)), "mask", "dtype bool", "float32"),
    "bias of bools": (dense(bias=zeros(5, 7, dtype=torch.bool)), "bias", "float32", "bool"),
    "bias shape": (dense(bias=zeros(5, 6)), "bias", "(2, 4, 5, 7)", "(5, 6)"),
    "bias rank": (dense(bias=zeros(1, 1, 1, 5, 7)), "bias", "(2, 4, 5, 7)", "(1, 1, 1, 5, 7)"),
    "mask shape": (dense(mask=torch.ones(2, 2, 5, 7, dtype=torch.bool)), "mask", "(2, 4, 5, 7)", "(2, 2, 5, 7)"),
    "sinks shape": (dense(sinks=zeros(2)), "sinks", "(4,)", "(2,)"),
    "sinks of integers": (dense(sinks=zeros(4).int()), "sinks", "float32", "int32"),
    "slopes shape": (dense(alibi_slopes=zeros(2)), "alibi_slopes", "(4,) or (2, 4)", "(2,)"),
    "slopes dtype": (dense(alibi_slopes=zeros(4).half()), "alibi_slopes", "float32", "float16"),
    "causal is an int": (dense(causal=1), "causal", "True or False", "1"),
    "window negative": (dense(window=(-1, 0)), "window", "an integer >= 0", "(-1, 0)"),
    "window an int": (dense(window=4), "window", "a pair", "4"),
    "window of three": (dense(window=[1, 2, 3]), "window", "a pair", "[1, 2, 3]"),
    "window too large": (dense(window=(2**70, 0)), "window", "at most 31 bits", str(2**70)),
    "window of a list": (dense(window=([1], 2)), "window", "a pair", "([1], 2)"),
    "scale a list": (dense(scale=[1]), "scale", "finite number", "[1]"),
    "backend a list": (dense(backend=["cpu"]), "backend", "'cpu'", "['cpu']"),
    "sparse q": (dense(q=zeros(2, 4, 5, 8).to_sparse()), "q", "a dense tensor", "sparse_coo"),
    "dropout 1": (dense(dropout=1.0), "dropout", "[0, 1)", "1.0"),
    "dropout negative": (dense(dropout=-0.1), "dropout", "[0, 1)", "-0.1"),
    "dropout NaN": (dense(dropout=math.nan), "dropout", "[0, 1)", "nan"),
    "seed a float": (dense(dropout=0.1, seed=1.5), "seed", "64 bits", "1.5"),
    "seed too large": (dense(dropout=0.1, seed=2**64), "seed", "64 bits", str(2**64)),
    "softcap 0": (dense(softcap=0.0), "softcap", "> 0", "0.0"),
    "softcap negative": (dense(softcap=-3), "softcap", "> 0", "-3"),
    "scale past fp32": (dense(scale=1e39), "scale", "a magnitude from 1e-37 to 1e+37", "1e+39"),
    "scale below fp32": (dense(scale=-1e-50), "scale", "a magnitude from 1e-37", "-1e-50"),
    "softcap below fp32": (dense(softcap=1e-40), "softcap", "a magnitude from 1e-37", "1e-40"),
    "softcap far below scale": (
        dense(softcap=1e-30, scale=1e10),
        "softcap",
        "a magnitude from",
        "with scale 1000000000",
    ),
    "scale infinite": (dense(scale=math.inf), "scale", "finite", "inf"),
    "layout unknown": (dense(layout="sbhd"), "layout", "'bhsd' or 'bshd'", "sbhd"),
    "backend unknown": (dense(backend="cudnn"), "backend", "'reference'", "cudnn"),
    "deterministic a string": (dense(deterministic="yes"), "deterministic", "None, True", "yes"),
    "return_lse an int": (dense(return_lse=1), "return_lse", "True or False", "1"),
    "no cu_seqlens_q": (packed(cu_seqlens_q=None), "cu_seqlens_q", "a torch.Tensor", "NoneType"),
    "slopes to be learnt": (dense(alibi_slopes=LEARNT), "alibi_slopes", "requires no gradient", "one that does"),
    "cu_seqlens of floats": (packed(cu_seqlens_q=zeros(3)), "cu_seqlens_q", "dtype int32", "float32"),
    "cu_seqlens past the tensor, in int64": (
        packed(cu_seqlens_k=torch.tensor([0, 3, 2**32 + 7])),
        "cu_seqlens_k",
        "at most 7",
        "4294967303",
    ),
    "cu_seqlens of int16": (packed(cu_seqlens_k=int32(0, 3, 7).short()), "cu_seqlens_k", "int32 or int64", "int16"),
    "cu_seqlens of int64 for too many rows": (
        packed(**keys(2**31, 2, 8), cu_seqlens_k=torch.tensor([0, 3, 7])),
        "cu_seqlens_k",
        "fewer than 2^31 rows",
        "rows",
    ),
    "cu_seqlens decreasing": (packed(cu_seqlens_q=int32(0, 4, 3)), "cu_seqlens_q", "never decrease", "4 followed by 3"),
    "cu_seqlens not from 0": (packed(cu_seqlens_k=int32(1, 3, 7)), "cu_seqlens_k", "0 as its first entry", "1"),
    "cu_seqlens too short": (packed(cu_seqlens_k=int32(0, 7)), "cu_seqlens_k", "batch 2 as in cu_seqlens_q", "1"),
    "cu_seqlens empty": (packed(cu_seqlens_q=int32()), "cu_seqlens_q", "batch + 1", "empty"),
    "cu_seqlens past the tensor": (packed(cu_seqlens_q=int32(0, 2, 6)), "cu_seqlens_q", "at most 5", "6"),
    "max_seqlen too small": (packed(max_seqlen_q=2), "max_seqlen_q", "at least 3", "2"),
    "max_seqlen a float": (packed(max_seqlen_k=4.0), "max_seqlen_k", "an integer", "4.0"),
    "packed bias shape": (packed(bias=zeros(5, 7)), "bias", "(2, 4, 3, 4)", "(5, 7)"),
    "a page that does not exist": (
        paged(block_table=int32([0, 6], [5, -1])),
        "block_table",
        "below num_pages = 6",
        "6 at",
    ),
    "a negative page in use": (paged(seqlens_k=int32(6, 5)), "block_table", "below num_pages = 6", "-1 at sequence 1"),
    "longer than its table": (paged(seqlens_k=int32(9, 3)), "seqlens_k", "= 8", "9 at sequence 0"),
    "negative length": (paged(seqlens_k=int32(6, -1)), "seqlens_k", "between 0", "-1"),
    "lengths for another batch": (paged(seqlens_k=int32(6, 3, 1)), "seqlens_k", "batch 2", "3"),
    "block_table of int16": (paged(block_table=zeros(2, 2, dtype=torch.int16)), "block_table", "dtype int32", "int16"),
    "too many query rows": (paged(q=zeros(3, 4, 8)), "q", "one token a sequence", "3 rows"),
    "pages of two sizes": (paged(v_pages=zeros(6, 8, 2, 8)), "v_pages", "page_size 4 as in k_pages", "8"),
    "rank 3 pages": (paged(k_pages=zeros(6, 4, 8)), "k_pages", "4 dimensions", "(6, 4, 8)"),
}


# What comes up most, and what the message tells to do about it.
FIXES: dict[str, tuple[Arguments, str]] = {
    "a sequence without a batch": (dense(q=zeros(4, 5, 8)), "q[None]; packed ones belong in attention_varlen"),
    "heads and lengths exchanged": (dense(**keys(2, 7, 3, 8)), "heads are dimension 1, with layout='bshd' 2"),
    "a mask of padding": (dense(mask=torch.ones(2, 7, dtype=torch.bool)), "is mask[:, None, None, :]"),
    "a mask of 0 and 1": (dense(mask=torch.ones(5, 7, dtype=torch.int64)), "0 and 1 become a mask by .bool()"),
    "a window of one number": (dense(window=128), "The last n keys are (n - 1, 0)"),
    "a mask for each sequence": (dense(mask=torch.ones(2, 5, 7, dtype=torch.bool)), "is mask[:, None]"),
    "a mask of numpy": (dense(mask=np.ones((5, 7), bool)), "torch.as_tensor an array"),
    "integers": (dense(q=zeros(2, 4, 5, 8, dtype=torch.int32)), "to float16, bfloat16 or float32"),
    "wide values": (dense(v=zeros(2, 2, 7, 1024)), "join the results with torch.cat"),
    "a learnt scale": (dense(scale=torch.tensor(0.1)), "pass q * scale and scale=1.0"),
    "dense queries to pack": (packed(q=zeros(2, 5, 4, 8)), "is packed by q.flatten(0, 1)"),
    "pages with heads first": (paged(**{n: zeros(6, 2, 8, 8) for n in ("k_pages", "v_pages")}), "and 2 of pages"),
    "a negative length": (paged(seqlens_k=int32(6, -1)), "A sequence without keys has length 0"),
    "a negative page": (paged(seqlens_k=int32(6, 5)), "none negative"),
    "queries in another dtype": (paged(q=zeros(2, 4, 8).half()), "Convert q to the dtype of the pages"),
}


@pytest.mark.parametrize("name", FIXES)
def test_likely_mistakes_are_told_what_to_do(name: str) -> None:
    arguments, fix = FIXES[name]
    with pytest.raises(tw.InvalidProblem, match=re.escape(fix)):
        call_of(arguments)(**arguments)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_named(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, argument, expected, got = MISTAKES[mistake]
    monkeypatch.setattr(dispatch, "select", lambda *_, **__: pytest.fail("a kernel was about to run"))
    with pytest.raises(tw.InvalidProblem) as caught:
        call_of(arguments)(**arguments)
    error = caught.value
    assert error.argument == argument
    assert expected in error.expected
    assert got in str(error.got)
    assert error.fix.endswith(".")
    assert all(part in str(error) for part in (argument, error.expected, error.fix))
    assert isinstance(error, ValueError)


def test_the_mistakes_cover_every_message() -> None:
    assert len({(m[1], m[2]) for m in MISTAKES.values()}) >= 45


@pytest.mark.parametrize("arguments", [dense(), packed(), paged()], ids=["dense", "packed", "paged"])
def test_the_correct_call_passes(arguments: Arguments) -> None:
    assert torch.isfinite(call_of(arguments)(**arguments)).all()


def one_row_of(**changes: Any) -> Any:
    """`append_rotated` of one row to e4m3 pages of one head."""
    pages, row = zeros(1, 1, 1, 8, dtype=torch.float8_e4m3fn), zeros(1, 1, 8)
    arguments = {"k_scale": torch.ones(1), "v_scale": torch.ones(1)} | changes
    return append_rotated(row, row, row, pages, pages.clone(), int32(0).long(), int32(0), zeros(1, 8), **arguments)


def one_token_cache() -> tw.PagedKVCache:
    return tw.PagedKVCache(4, 1, 1, 1, 8, dtype=torch.float32, device="cpu", max_requests=1, max_seqlen=1)


SINGLE: dict[str, tuple[Callable[[], Any], str]] = {
    "a prompt of two tokens": (lambda: one_token_cache().add([1, 2]), "max_seqlen = 1 token,"),
    "scales of one head": (lambda: one_row_of(k_scale=zeros(3)), "one for each of 1 head,"),
    "a map of one dimension": (
        lambda: tw.tile_mask(lambda _b, _h, i, j: (i >= j)[None], 2, 2),
        "torch.bool of 1 dimension.",
    ),
    "one query of chunks": (
        lambda: tw.attention_varlen(
            zeros(1, 1, 8), zeros(4, 1, 8), zeros(4, 1, 8), int32(0, 1), int32(0, 4), mask=tw.TileMask.chunks(2, 1, 4)
        ),
        "one of 1 query x 4 keys.",
    ),
    "two tables of one group": (
        lambda: tw.attention_paged(
            **paged(
                shared_prefix=SharedPrefix(
                    (Group(2, 2, 4),), int32([0], [0]), int32(4), int32(0, 2), None, int32([1], [2]), int32(2, 2)
                )
            )
        ),
        "1 table row, one for each group,",
    ),
}


@pytest.mark.parametrize("mistake", SINGLE)
def test_errors_count_one_thing_as_one(mistake: str) -> None:
    call, words = SINGLE[mistake]
    with pytest.raises(tw.InvalidProblem, match=re.escape(words)):
        call()


def test_values_are_judged_again_after_a_good_call() -> None:
    tw.attention_varlen(**packed())
    with pytest.raises(tw.InvalidProblem, match="never decrease"):
        tw.attention_varlen(**packed(cu_seqlens_q=int32(0, 4, 3)))


def test_bias_for_packed_meta_tensors_needs_the_lengths() -> None:
    arguments = {name: t.to("meta") for name, t in packed(bias=zeros(3, 4)).items()}
    with pytest.raises(tw.InvalidProblem, match="max_seqlen_q, max_seqlen_k"):
        tw.attention_varlen(**arguments)
    assert tw.attention_varlen(**arguments, max_seqlen_q=3, max_seqlen_k=4).shape == (5, 4, 8)


def test_a_backend_is_never_replaced_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = dispatch.load("reference")
    monkeypatch.setattr(type(reference), "supports", lambda *_: "refuses on principle")
    dispatch._select.cache_clear()
    with pytest.raises(tw.Unsupported) as caught:
        tw.attention(**dense(), backend="reference")
    assert ("reference", "refuses on principle") in caught.value.reasons
    assert "refuses on principle" in str(caught.value)
    dispatch._select.cache_clear()


def test_auto_never_takes_the_reference_except_for_fp64() -> None:
    dispatch._select.cache_clear()
    with settings.overridden(backend="auto"):
        assert tw.explain(**{n: t.double() for n, t in dense().items()}).backend == "reference"
        refused = tw.explain(**dense(), device="v100")
        assert refused.backend is None
        assert any("never chosen for you" in r.reason for r in refused.rejected)


def test_merge_judges_its_layout() -> None:
    with pytest.raises(tw.InvalidProblem, match="layout"):
        tw.merge(*[zeros(1, 2, 3, 4), zeros(1, 2, 3)] * 2, layout="zzz")


def test_errors_survive_pickling() -> None:
    invalid = tw.InvalidProblem("q", "a tensor", "a list", "Convert it.")
    unsupported = tw.Unsupported("nobody takes this", [("cpu", "too odd")])
    for error in (invalid, unsupported):
        copy = pickle.loads(pickle.dumps(error))
        assert str(copy) == str(error)
        assert vars(copy) == vars(error)


def test_settings_come_from_the_environment_and_are_judged() -> None:
    read = settings.read({"TILEWISE_BACKEND": "cpu", "TILEWISE_CHECK_VALUES": "1", "TILEWISE_CACHE_DIR": "cache"})
    assert (read.backend, read.check_values, str(read.cache_dir)) == ("cpu", True, "cache")
    assert settings.read({}) == settings.Settings()
    with pytest.raises(tw.InvalidProblem, match="TILEWISE_CHECK_VALUES"):
        settings.read({"TILEWISE_CHECK_VALUES": "yes"})
    with settings.overridden(backend="reference"):
        assert settings.current().backend == "reference"
    assert settings.current().backend == "auto"


def test_backend_from_settings_applies_to_auto_and_is_judged() -> None:
    with settings.overridden(backend="reference"):
        tw.attention(**dense())
    with settings.overridden(backend="nonsense"), pytest.raises(tw.InvalidProblem, match="TILEWISE_BACKEND"):
        tw.attention(**dense())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_the_advice_about_nested_tensors_works_as_printed(layout: torch.layout) -> None:
    torch.manual_seed(0)
    lengths = (3, 1, 5)
    q, k, v = (
        torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in lengths], layout=layout, requires_grad=True)
        for _ in range(3)
    )
    with pytest.raises(tw.InvalidProblem, match="q: expected a dense tensor, got a nested one") as caught:
        tw.attention(q, k, v, layout="bshd")
    assert "x.values() to attention_varlen, with x.offsets() as its cu_seqlens" in str(caught.value)
    assert "torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged)" in str(caught.value)
    jagged = [torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged) for x in (q, k, v)]
    x, y, z = jagged  # type: Any, Any, Any
    out = tw.attention_varlen(x.values(), y.values(), z.values(), x.offsets(), y.offsets(), causal=True)
    parts = [
        tw.attention(a[None], b[None], c[None], layout="bshd", causal=True)[0]
        for a, b, c in zip(q.unbind(), k.unbind(), v.unbind(), strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(parts))
    for found, want in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(torch.cat(parts).square().sum(), (q, k, v)),
        strict=True,
    ):
        for a, b in zip(found.unbind(), want.unbind(), strict=True):
            torch.testing.assert_close(a, b)


def test_a_compiled_whole_graph_still_names_the_mistake() -> None:
    flags: Arguments = {"window": 128}
    compiled = torch.compile(lambda q: tw.attention(q, q, q, **flags), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=re.escape("The last n keys are (n - 1, 0)")):
        compiled(zeros(1, 2, 5, 8))
