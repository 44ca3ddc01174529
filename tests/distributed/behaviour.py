"""What the ranks check beyond numbers: repeatability, sub-groups and meshes, compilation, data parallelism beside it,
and that disagreeing ranks are told so.
"""

from __future__ import annotations

import copy
import datetime as dt
import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from implementation import ContextParallel
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tilewise as tw
from tilewise.distributed import PeerFailure, agreement, context_parallel_attention, position_ids, shard, unshard
from tilewise.distributed.transport import group_of
from tilewise.testing import Case, find_faults, make_inputs

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
SEQLEN = 54
# Untyped: much of what is passed here is wrong on purpose.
attend: Any = context_parallel_attention


def checks(world: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """The checks for a world size, by name."""
    for method in ("ring", "all_gather", "heads"):
        yield f"repeatable, {method}", lambda method=method: repeatable(method)  # type: ignore[misc]
    yield "shards come back", shards_come_back
    yield "code of the page", code_of_the_page
    yield "nothing is padded unasked", nothing_is_padded_unasked
    yield "the length is asked for", the_length_is_asked_for
    yield "padding gets no gradient", padding_gets_no_gradient
    yield "no key and no sink", no_key_and_no_sink
    yield "auto runs", auto_runs
    yield "bad arguments", bad_arguments
    yield "inputs as they come", inputs_as_they_come
    if world == 2:
        yield "compiled", compiled
        yield "beside DDP", lambda: data_parallel(ddp=True)
        yield "beside FSDP", lambda: data_parallel(ddp=False)
        yield "what was agreed on is bounded", agreements_are_bounded
        yield "a later disagreement", later_disagreement
    if world > 1:
        yield "whole sequences are refused", whole_sequences_are_refused
    if world in (2, 3):
        # In a group of their own: one that has agreed once raises at once on a bad rank.
        for name in DISAGREEMENTS:
            yield f"disagreement: {name}", lambda name=name: disagreement(name)  # type: ignore[misc]
        yield "disagreement: unshard", disagreement_of_unshard
        yield "disagreement: methods", disagreement_of_methods
        yield "disagreement: a rank with bad arguments", one_bad_rank
        yield "a rank without lse in its loss", lse_of_one_rank
    if world == 4:
        yield "sub-groups", sub_groups
        yield "mesh of two dimensions", two_dimensions


def tensors(*, heads: int = 4, grad: bool = False, seqlen: int = SEQLEN) -> tuple[Tensor, Tensor, Tensor]:
    """The same whole q, k, v on every rank."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, heads, seqlen, 16, generator=generator).requires_grad_(grad) for _ in range(3))
    return q, k, v


def repeatable(method: Any) -> None:
    q, k, v = (shard(t, pad=0).requires_grad_() for t in tensors())
    runs = []
    for _ in range(2):
        out, lse = attend(q, k, v, causal=True, seqlen=SEQLEN, method=method, return_lse=True)
        runs.append((out, lse, *torch.autograd.grad(out.sum() + lse[..., :2].sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def shards_come_back() -> None:
    whole = torch.arange(2 * 3 * 37).view(2, 3, 37)
    for sharding in ("zigzag", "contiguous"):
        local = shard(whole, dim=2, sharding=sharding, pad=-1)
        assert torch.equal(unshard(local, dim=2, seqlen=37, sharding=sharding), whole)
        positions = position_ids(local.shape[2], sharding=sharding)
        inside = positions < 37
        assert torch.equal(local[0, 0], torch.where(inside, positions, -1))
    documents = position_ids(8, cu_seqlens=torch.tensor([0, 3, 8]), sharding="contiguous")
    if dist.get_rank() == 0:
        assert documents.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


def code_of_the_page() -> None:
    """As it stands, and without the causal mask, with a length that has to be padded."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    world = dist.get_world_size()
    code = code.replace('"cuda", (8,)', f'"cpu", ({world},)')
    for causal in (True, False):
        q, k, v = tensors(seqlen=61)
        names: dict[str, Any] = {"tokens": torch.arange(61)[None]}
        names |= {name: shard(t, pad=0) for name, t in (("q", q), ("k", k), ("v", v))}
        exec(compile(code.replace("causal=True", f"causal={causal}"), "distributed.md", "exec"), names)
        torch.testing.assert_close(names["whole"], tw.attention(q, k, v, causal=causal))
        kept = names["positions"] < 61
        assert torch.equal(names["tokens"][0], torch.where(kept, names["positions"], 0))


def nothing_is_padded_unasked() -> None:
    """A length that does not divide: with zeros for targets, padding would count in a loss."""
    tokens, world = torch.arange(8 * dist.get_world_size() + 1)[None], dist.get_world_size()
    raises(tw.InvalidProblem, f"a multiple of {8 * world} along dim 1", lambda: shard(tokens, dim=1))
    raises(tw.InvalidProblem, f"a multiple of {4 * world}", lambda: shard(tokens[:, :-2], dim=1, sharding="contiguous"))
    assert shard(tokens[:, :-1], dim=1).shape == (1, 8)
    number: Any = 0.5
    raises(tw.InvalidProblem, "pad", lambda: shard(tokens, dim=1, pad=number))


def the_length_is_asked_for() -> None:
    """Without it padding would count as keys, or shift the diagonal where queries and keys have different lengths."""
    q, k, v = (shard(t, pad=0) for t in tensors(seqlen=61))
    for method in ("auto", "ring", "all_gather", "heads"):
        raises(tw.InvalidProblem, "seqlen: expected the length", lambda m=method: attend(q, k, v, method=m))  # type: ignore[misc]
        few = [shard(t[:, :, :30], pad=0) for t in tensors()[1:]]
        words = "seqlen_k: expected the length"
        raises(tw.InvalidProblem, words, lambda m=method, few=few: attend(q, *few, seqlen=61, method=m))  # type: ignore[misc]
    missing: Any = unshard
    raises(TypeError, "seqlen", lambda: missing(q))
    for seqlen in (-1, 10**6, True, None):
        raises(tw.InvalidProblem, "seqlen", lambda seqlen=seqlen: missing(q, seqlen=seqlen))  # type: ignore[misc]
    packed = [t[0].transpose(0, 1) for t in (q, k, v)]
    documents = torch.tensor([0, 40, 61])
    raises(tw.InvalidProblem, "the last of cu_seqlens", lambda: attend(*packed, cu_seqlens=documents, seqlen=60))


def whole_sequences_are_refused() -> None:
    """Tensors that were not cut, or along another dimension, and the length of a shard for that of the sequence."""
    q, k, v = tensors(heads=16 * dist.get_world_size(), seqlen=64)
    words = "one rank's rows"
    raises(tw.InvalidProblem, words, lambda: attend(q, k, v, seqlen=64))
    along_heads = [shard(t.transpose(1, 2)) for t in (q, k, v)]
    raises(tw.InvalidProblem, words, lambda: attend(*along_heads, layout="bshd", seqlen=64))
    local = [shard(t, pad=0) for t in (q, k, v)]
    raises(tw.InvalidProblem, words, lambda: attend(*local, seqlen=local[0].shape[2]))
    packed = [t[0].transpose(0, 1) for t in (q, k, v)]
    raises(tw.InvalidProblem, words, lambda: attend(*packed, cu_seqlens=torch.tensor([0, 3, 64])))


def lse_of_one_rank() -> None:
    """The loss of rank 0 alone depends on lse: all ranks still exchange the same in the backward."""
    whole = tensors(grad=True, seqlen=64)
    local = [shard(t.detach(), pad=0).requires_grad_() for t in whole]
    positions = position_ids(local[0].shape[2])
    dist.broadcast(positions, 0)
    out, lse = tw.attention(*whole, causal=True, return_lse=True)
    expected = torch.autograd.grad(out.sum() + lse[:, :, positions[positions < 64]].sum(), whole)
    for method in ("ring", "heads"):
        out, lse = attend(*local, causal=True, seqlen=64, method=method, return_lse=True)
        loss = out[:, :, position_ids(out.shape[2]) < 64].sum()
        if dist.get_rank() == 0:
            loss = loss + lse.masked_fill(lse == -torch.inf, 0.0).sum()
        for mine, theirs in zip(torch.autograd.grad(loss, local), expected, strict=True):
            torch.testing.assert_close(unshard(mine, seqlen=64), theirs, atol=2e-5, rtol=2e-5)


def padding_gets_no_gradient() -> None:
    sinks = torch.zeros(4, requires_grad=True)
    for method in ("ring", "all_gather", "heads"):
        q, k, v = (shard(t, pad=torch.nan).requires_grad_() for t in tensors(seqlen=37))
        out, lse = attend(q, k, v, causal=True, seqlen=37, sinks=sinks, method=method, return_lse=True)
        padding = position_ids(q.shape[2]) >= 37
        gradients = torch.autograd.grad((out, lse), (q, k, v, sinks), (torch.ones_like(out), torch.ones_like(lse)))
        assert not out[:, :, padding].any()
        assert bool((lse[:, :, padding] == -torch.inf).all())
        assert not any(bool(g[:, :, padding].any()) for g in gradients[:3])
        assert bool(torch.isfinite(torch.cat([g.flatten() for g in gradients])).all())


def no_key_and_no_sink() -> None:
    """Queries before the first key, of heads whose sinks are -inf."""
    q, k, v = tensors(seqlen=40)
    k, v, sinks = k[:, :, :8], v[:, :, :8], torch.full((q.shape[1],), -torch.inf)
    for method in ("ring", "all_gather", "heads"):
        local = [shard(t, pad=0) for t in (q, k, v)]
        mine = attend(*local, seqlen=40, seqlen_k=8, causal=True, sinks=sinks, method=method)
        torch.testing.assert_close(unshard(mine, seqlen=40), tw.attention(q, k, v, causal=True))


def auto_runs() -> None:
    q, k, v = tensors()
    out = attend(*(shard(t, pad=0) for t in (q, k, v)), causal=True, seqlen=SEQLEN)
    torch.testing.assert_close(unshard(out, seqlen=SEQLEN), tw.attention(q, k, v, causal=True))


def raises(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    """The call raises, naming what is wrong."""
    # Without pytest, whose import every rank would pay for.
    said = ""
    try:
        call()
    except kind as error:
        said = str(error)
    assert words in said, f"{kind.__name__} with {words!r} was not raised, {said!r}"


def bad_arguments() -> None:
    """The same mistake on every rank: named, and the group works afterwards."""
    q, k, v = (shard(t, pad=0) for t in tensors())
    attend = functools.partial(context_parallel_attention, seqlen=SEQLEN)
    raises(tw.InvalidProblem, "method", lambda: attend(q, k, v, method="star"))
    raises(tw.InvalidProblem, "sharding", lambda: attend(q, k, v, sharding="random"))
    misspelt: Any = "zig-zag"
    raises(tw.InvalidProblem, "sharding", lambda: position_ids(8, sharding=misspelt))
    raises(tw.InvalidProblem, "an even number of rows", lambda: unshard(torch.zeros(5), dim=0, seqlen=5))
    for documents in (torch.tensor([0.0, 8.0]), torch.tensor([0, 8, 4]), torch.tensor([[0, 8]])):
        raises(tw.InvalidProblem, "cu_seqlens", lambda d=documents: position_ids(8, cu_seqlens=d))  # type: ignore[misc]
    raises(tw.InvalidProblem, "seed", lambda: attend(q, k, v, dropout=0.1))
    raises(tw.InvalidProblem, "seqlen", lambda: attend(q, k, v, seqlen=10**6))
    raises(tw.InvalidProblem, "even number of rows", lambda: attend(q[:, :, :7], k, v, method="ring"))
    raises(tw.InvalidProblem, "cu_seqlens", lambda: attend(q, k, v, cu_seqlens=torch.tensor([0, 3])))
    packed = [t[0].transpose(0, 1) for t in (q, k, v)]
    for borders in ([1, 3], [0, 5, 3], [0, 10**6], [], [0.0, 5.5]):
        raises(
            tw.InvalidProblem,
            "cu_seqlens",
            lambda b=borders: attend(*packed, cu_seqlens=torch.tensor(b), seqlen=None),  # type: ignore[misc]
        )
    raises(tw.InvalidProblem, "one-dimensional", lambda: group_of(_Mesh2.mesh()))
    few = [shard(t, pad=0) for t in tensors(heads=1)]
    if dist.get_world_size() > 1:
        raises(tw.Unsupported, "ring", lambda: attend(*few, method="heads"))
    raises(tw.Unsupported, "several ranks", lambda: attend(q, k, v, deterministic="batch"))


class _Mesh2:
    """A mesh of two dimensions over whatever is there."""

    @staticmethod
    def mesh() -> Any:
        return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))


# What rank 0 and the others call with, and what the error says of both.
DISAGREEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "causal": ({"causal": True}, {}, "True", "False"),
    "window": ({"window": (3, None)}, {"window": (4, None)}, "(3, None)", "(4, None)"),
    "scale": ({}, {"scale": 0.5}, "None", "0.5"),
    "softcap": ({"softcap": 5.0}, {}, "5.0", "None"),
    "dropout": ({"dropout": 0.1, "seed": 1}, {}, "0.1", "0.0"),
    "deterministic": ({"deterministic": True}, {"deterministic": False}, "True", "False"),
    "backend": ({"backend": "cpu"}, {"backend": "reference"}, "cpu", "reference"),
    "sharding": ({"sharding": "contiguous"}, {}, "contiguous", "zigzag"),
    "layout": ({"shape": (1, 8, 8, 16)}, {"shape": (1, 8, 8, 16), "layout": "bshd"}, "bhsd", "bshd"),
    # A rank that takes heads for rows has too few of them for the whole sequence.
    "layout ": ({}, {"layout": "bshd"}, "bhsd", "bshd"),
    "seqlen": ({"seqlen": 13}, {"seqlen": 14}, "13", "14"),
    "seqlen_k": ({"seqlen": 13}, {"seqlen": 13, "seqlen_k": 12}, "13", "12"),
    "q": ({"shape": (1, 4, 8, 16)}, {"shape": (1, 4, 16, 16)}, "float32 (1, 4, 8, 16)", "float32 (1, 4, 16, 16)"),
    "q ": ({}, {"dtype": torch.bfloat16}, "float32 (1, 4, 8, 16)", "bfloat16 (1, 4, 8, 16)"),
    "v": ({}, {"dim_v": 8}, "float32 (1, 4, 8, 16)", "float32 (1, 4, 8, 8)"),
    "alibi_slopes": ({"alibi_slopes": torch.ones(4)}, {}, "float32 (4,)", "None"),
    "sinks": ({}, {"sinks": torch.ones(4)}, "None", "float32 (4,)"),
    "requires_grad": ({"grad": True}, {}, "q k v", "none"),
    "return_lse": ({"return_lse": True}, {}, "True", "False"),
    "cu_seqlens": ({"cu_seqlens": torch.tensor([0, 5, 11])}, {"cu_seqlens": torch.tensor([0, 6, 11])},
                   "(0, 5, 11)", "(0, 6, 11)"),
}  # fmt: skip


@functools.cache
def never_agreed() -> Any:
    """A group in which no call ever succeeds."""
    return dist.new_group(timeout=dt.timedelta(seconds=60))


def difference(first: str, others: str) -> str:
    """What an error says of rank 0 and the others."""
    rest = range(1, dist.get_world_size())
    plural = "s" if len(rest) > 1 else ""
    return (
        f": expected the same on every rank of the group, got {first} on rank 0, "
        f"{others} on rank{plural} {', '.join(map(str, rest))}."
    )


def disagreement(name: str) -> None:
    """Every rank names the argument, whichever method it is for."""
    *flags, first, others = DISAGREEMENTS[name]
    for method in ("auto", "ring", "all_gather", "heads"):
        given: dict[str, Any] = {"method": method, "seqlen": None, **flags[min(1, dist.get_rank())]}
        shape = given.pop("shape", (1, 4, 8, 16))
        like = {"dtype": given.pop("dtype", torch.float32), "requires_grad": given.pop("grad", False)}
        q, k, v = (torch.ones(shape, **like) for _ in range(3))
        v = v[..., : given.pop("dim_v", 16)]
        if "cu_seqlens" in given:
            q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
        else:
            given["seqlen"] = given["seqlen"] or 13
        words = name.strip() + difference(first, others)
        raises(tw.InvalidProblem, words, lambda t=(q, k, v), given=given: attend(*t, never_agreed(), **given))  # type: ignore[misc]


def disagreement_of_unshard() -> None:
    """Shapes above all: of gathered shards of different lengths the bytes would be mixed up."""
    group, rank = never_agreed(), min(1, dist.get_rank())
    rows = torch.zeros(16 - 8 * rank)
    words = "tensor" + difference("float32 (16,)", "float32 (8,)")
    raises(tw.InvalidProblem, words, lambda: unshard(rows, group, dim=0, seqlen=16))
    words = "seqlen" + difference("5", "6")
    raises(tw.InvalidProblem, words, lambda: unshard(torch.zeros(8), group, dim=0, seqlen=5 + rank))
    q = torch.ones(1, 4, 8, 16)
    words = "call" + difference("unshard", "context_parallel_attention")
    call = (lambda: attend(q, q, q, group, seqlen=13)) if rank else (lambda: unshard(q, group, seqlen=13))
    raises(tw.InvalidProblem, words, call)
    wrong: dict[str, Any] = {"dim": 7, "sharding": "random", "seqlen": 10**6}
    for name, value in wrong.items():
        given = {"seqlen": 13} | ({name: value} if rank else {})
        words = f"{name}: expected" if rank else f"on rank 1 InvalidProblem: {name}: expected"
        raises(tw.InvalidProblem, words, lambda given=given: unshard(q, group, **given))  # type: ignore[misc]


def disagreement_of_methods() -> None:
    """Named only if nothing else differs: flags that differ make "auto" choose differently."""
    group, rank, q = never_agreed(), min(1, dist.get_rank()), torch.ones(1, 4, 8, 16)
    for methods in (("ring", "all_gather"), ("heads", "ring")):
        flags: dict[str, Any] = {"seqlen": 13, "method": methods[rank]}
        words = "method" + difference(*methods)
        raises(tw.InvalidProblem, words, lambda flags=flags: attend(q, q, q, group, **flags))  # type: ignore[misc]
        flags["causal"] = rank == 0
        words = "causal" + difference("True", "False")
        raises(tw.InvalidProblem, words, lambda flags=flags: attend(q, q, q, group, **flags))  # type: ignore[misc]


def one_bad_rank() -> None:
    """A rank whose own arguments are wrong tells the others instead of leaving them to wait."""
    q, k, v = (shard(t, pad=0) for t in tensors())
    group = never_agreed()
    for method in ("ring", "heads"):
        flags: dict[str, Any] = {"seqlen": SEQLEN, "method": method}
        if dist.get_rank() == 1:
            raises(tw.InvalidProblem, "head_dim", lambda flags=flags: attend(q, k[..., :3], v, group, **flags))  # type: ignore[misc]
        else:
            raises(tw.InvalidProblem, "on rank 1", lambda flags=flags: attend(q, k, v, group, **flags))  # type: ignore[misc]
    few = [t[:, :1] for t in (q, k, v)] if dist.get_rank() == 1 else [q, k, v]
    if dist.get_rank() == 1:
        raises(tw.Unsupported, "ring", lambda: attend(*few, group, seqlen=SEQLEN, method="heads"))
    else:
        raises(tw.InvalidProblem, "on rank 1", lambda: attend(*few, group, seqlen=SEQLEN, method="heads"))


def inputs_as_they_come() -> None:
    """Gradients for some inputs only, rows that do not lie side by side, and autocast."""
    q, k, v = tensors()
    whole = k.clone().requires_grad_()
    (expected,) = torch.autograd.grad(tw.attention(q, whole, v, causal=True).square().sum(), whole)
    local = [shard(t, dim=2, pad=0).transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    for method in ("ring", "all_gather", "heads"):
        mine = local[1].detach().requires_grad_()
        out = attend(local[0], mine, local[2], causal=True, seqlen=SEQLEN, method=method)
        (gradient,) = torch.autograd.grad(out.square().sum(), mine)
        torch.testing.assert_close(unshard(gradient, seqlen=SEQLEN), expected, atol=2e-5, rtol=2e-5)
        with torch.no_grad():
            assert not attend(local[0], mine, local[2], seqlen=SEQLEN, method=method).requires_grad
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert attend(*local, seqlen=SEQLEN, method=method).dtype == torch.bfloat16


def agreements_are_bounded() -> None:
    """Packed batches bring a new description every step; the oldest are forgotten, on every rank the same ones."""
    group = dist.new_group(timeout=dt.timedelta(seconds=60))
    with mock.patch.object(agreement, "MAX_REMEMBERED", 4):
        for step in (0, 1, 2, 3, 0, 4, 5, 0, 1):
            agreement.agree((("cu_seqlens", str(step)),), group, torch.device("cpu"))
    assert len(agreement._agreed()[group]) == 4


def later_disagreement() -> None:
    """Past the comparison, a rank that calls otherwise is not waited for longer than the group's timeout."""
    seconds = 3
    group = dist.new_group(timeout=dt.timedelta(seconds=seconds))
    q, k, v = (shard(t, pad=0) for t in tensors())
    flags: dict[str, Any] = {"method": "ring", "seqlen": SEQLEN}
    attend(q, k, v, group, **flags)
    start = time.monotonic()
    # Rank 0 compares what is new to it, rank 1 is already passing keys around.
    raises(PeerFailure, "timeout", lambda: attend(q, k, v, group, causal=dist.get_rank() == 0, **flags))
    assert time.monotonic() - start < 3 * seconds


def peer_dies() -> None:
    """Rank 1 is gone in the middle of a ring: rank 0 sees an error, and soon. Nothing can follow this check."""
    q, k, v = (shard(t, pad=0) for t in tensors())
    attend(q, k, v, causal=True, method="ring", seqlen=SEQLEN)
    if dist.get_rank() == 1:
        os._exit(0)
    start = time.monotonic()

    def endless() -> None:
        while True:
            attend(q, k, v, causal=True, method="ring", seqlen=SEQLEN)

    raises(PeerFailure, "a peer died", endless)
    assert time.monotonic() - start < 60


def compiled() -> None:
    """One graph, forward and backward, the same bits. The all-gather is the ring's op with another constant."""
    q, k, v = (shard(t, pad=0).requires_grad_() for t in tensors())
    for method in ("ring", "heads"):

        def squared(q: Tensor, k: Tensor, v: Tensor, method: Any = method) -> Any:
            return attend(2 * q, k, v, causal=True, seqlen=SEQLEN, method=method).square()

        torch._dynamo.reset()
        results = []
        for call in (squared, torch.compile(squared, fullgraph=True, backend="aot_eager")):
            out = call(q, k, v)
            results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    missing: Any = torch.compile(attend, fullgraph=True, backend="eager")
    raises(torch._dynamo.exc.Unsupported, "seqlen', 'the length of the whole sequence", lambda: missing(q, k, v))


class Model(torch.nn.Module):
    """A layer of attention over whichever tokens it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Any:
        """x (batch, rows, 16)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return x + self.out(attend(q, k, v, causal=True, layout="bshd").flatten(2))


def data_parallel(*, ddp: bool) -> None:
    """Gradients averaged over the ranks that share a sequence are those of the whole sequence over their number."""
    generator = torch.Generator().manual_seed(5)
    x, target = (torch.randn(1, 32, 16, generator=generator) for _ in range(2))
    single = Model()
    whole = copy.deepcopy(single)
    (single(x, tw.attention) - target).square().sum().backward()
    if ddp:
        wrapped: Any = torch.nn.parallel.DistributedDataParallel(whole)
    else:
        from torch.distributed.fsdp import fully_shard

        wrapped = fully_shard(whole, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    local, wish = (shard(t, dim=1) for t in (x, target))
    (wrapped(local, functools.partial(attend, seqlen=32)) - wish).square().sum().backward()
    for (name, mine), theirs in zip(whole.named_parameters(), single.parameters(), strict=True):
        gradient: Any = mine.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(gradient * dist.get_world_size(), theirs.grad, atol=2e-5, rtol=2e-5, msg=name)


def sub_groups() -> None:
    """Two pairs of ranks, each with a sequence of its own."""
    group, _ = dist.new_subgroups(2)
    case = Case(causal=True, seed=dist.get_rank() // 2, seqlens_q=(37,), seqlens_k=(37,), alibi="h")
    results = ContextParallel("ring", "zigzag", group).run(case, make_inputs(case))
    assert find_faults(case, results) == []


def two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    q, k, v = tensors()
    q = q + mesh["data"].get_local_rank()
    local = [shard(t, mesh["context"], pad=0) for t in (q, k, v)]
    out = attend(*local, mesh["context"], causal=True, seqlen=SEQLEN)
    torch.testing.assert_close(unshard(out, mesh["context"], seqlen=SEQLEN), tw.attention(q, k, v, causal=True))
