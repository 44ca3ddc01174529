"""What every rank runs for DTensors: attention of DTensors against attention of the whole tensors."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from outcomes import outcomes_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import tilewise as tw
from tilewise.errors import InvalidProblem

CHECKS: dict[str, Callable[[DeviceMesh], None]] = {}


def check(function: Callable[[DeviceMesh], None]) -> Callable[[DeviceMesh], None]:
    CHECKS[function.__name__] = function
    return function


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def placing(names: Iterable[str], *placements: Any) -> dict[str, list[Any]]:
    return {name: list(placements) for name in names}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(
    call: Callable[..., Any], tensors: dict[str, Tensor], placed: dict[str, list[Any]], mesh: DeviceMesh, result: Any
) -> None:
    """out, lse and all gradients, of the whole tensors and of these placements; and how the result is placed."""
    leaves = {n: t.clone().requires_grad_(t.is_floating_point() and n != "alibi_slopes") for n, t in tensors.items()}
    spread = {
        n: distribute_tensor(t.detach(), mesh, placed[n]).requires_grad_(leaves[n].requires_grad) if n in placed else t
        for n, t in tensors.items()
    }
    results = []
    for given in (leaves, spread):
        out, lse = call(**given, return_lse=True)
        loss = (out * out).sum() + lse.sum()
        (whole(loss) if given is leaves else loss.full_tensor()).backward()
        grads = {n: t.grad for n, t in given.items() if t.requires_grad}
        results.append((out, lse, grads))
    (out, lse, grads), (found, found_lse, found_grads) = results
    assert isinstance(found, DTensor)
    assert list(found.placements) == result, found.placements
    assert found.shape == out.shape
    assert found_lse.shape == lse.shape
    torch.testing.assert_close(whole(found), out)
    torch.testing.assert_close(whole(found_lse), lse)
    for name, grad in grads.items():
        assert isinstance(found_grads[name], DTensor) == (name in placed)
        assert not any(p.is_partial() for p in getattr(found_grads[name], "placements", ())), name
        found_grad: Any = found_grads[name]
        torch.testing.assert_close(whole(found_grad), grad, msg=f"gradient of {name}")
    # Calls that look the same, and without gradients.
    with torch.no_grad():
        torch.testing.assert_close(whole(call(**spread, return_lse=False)), out)


DENSE = {"q": randn(3, 4, 6, 8), "k": randn(3, 2, 7, 8, seed=1), "v": randn(3, 2, 7, 16, seed=2)}
HEADS_LAST = {name: tensor.transpose(1, 2).contiguous() for name, tensor in DENSE.items()}


def dense(**given: Any) -> Any:
    return tw.attention(**given, causal=True)


def heads_last(**given: Any) -> Any:
    return tw.attention(**given, layout="bshd")


@check
def by_batch(mesh: DeviceMesh) -> None:
    """Three sequences for two ranks."""
    compare(dense, DENSE, placing("qkv", Shard(0)), mesh, [Shard(0)])
    compare(heads_last, HEADS_LAST, placing("qkv", Shard(0)), mesh, [Shard(0)])


@check
def by_heads(mesh: DeviceMesh) -> None:
    compare(dense, DENSE, placing("qkv", Shard(1)), mesh, [Shard(1)])
    compare(heads_last, HEADS_LAST, placing("qkv", Shard(2)), mesh, [Shard(2)])


@check
def replicated(mesh: DeviceMesh) -> None:
    compare(dense, DENSE, placing("qkv", Replicate()), mesh, [Replicate()])


@check
def replicated_beside_shards(mesh: DeviceMesh) -> None:
    compare(dense, DENSE, {"q": [Shard(0)], "k": [Replicate()], "v": [Shard(0)]}, mesh, [Shard(0)])
    compare(dense, DENSE, {"q": [Replicate()], "k": [Shard(1)], "v": [Replicate()]}, mesh, [Shard(1)])


@check
def one_head_for_all(mesh: DeviceMesh) -> None:
    tensors = {"q": DENSE["q"], "k": DENSE["k"][:, :1], "v": DENSE["v"][:, :1]}
    compare(dense, tensors, {"q": [Shard(1)], "k": [Replicate()], "v": [Replicate()]}, mesh, [Shard(1)])


@check
def operands_beside(mesh: DeviceMesh) -> None:
    """Some are cut with the rest, others are needed whole: their gradients are sums over the ranks."""
    beside = {
        "bias": randn(4, 1, 7, seed=3),
        "sinks": randn(4, seed=4),
        "alibi_slopes": randn(4, seed=5).abs(),
        "mask": torch.ones(3, 1, 6, 7, dtype=torch.bool).tril(),
    }
    everything = DENSE | beside
    for shard, placed in ((Shard(0), {"mask": [Shard(0)]}), (Shard(1), {"bias": [Shard(0)], "sinks": [Shard(0)]})):
        places = placing(everything, Replicate()) | placing("qkv", shard) | placed
        compare(dense, everything, places, mesh, [shard])


@check
def two_dimensions(mesh: DeviceMesh) -> None:
    if mesh.size() == 2:
        square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
        compare(dense, DENSE, placing("qkv", Shard(0), Shard(1)), square, [Shard(0), Shard(1)])


@check
def packed(mesh: DeviceMesh) -> None:
    tensors = {"q": randn(9, 4, 8), "k": randn(9, 2, 8, seed=1), "v": randn(9, 2, 8, seed=2)}
    totals = int32(0, 4, 9)
    call = lambda **given: tw.attention_varlen(**{"cu_seqlens_q": totals, "cu_seqlens_k": totals} | given)  # noqa: E731
    compare(call, tensors, placing("qkv", Shard(1)), mesh, [Shard(1)])
    compare(call, tensors, placing("qkv", Replicate()), mesh, [Replicate()])
    indices = {"cu_seqlens_q": totals, "cu_seqlens_k": totals}
    places = placing("qkv", Shard(1)) | placing(indices, Replicate())
    compare(call, tensors | indices, places, mesh, [Shard(1)])
    refused(lambda given: tw.attention_varlen(given, given, given, totals, totals), tensors["q"], [Shard(0)], mesh, "q")


@check
def paged(mesh: DeviceMesh) -> None:
    tensors = {"q": randn(2, 4, 8), "k_pages": randn(6, 4, 2, 8, seed=1), "v_pages": randn(6, 4, 2, 8, seed=2)}
    call = lambda **given: tw.attention_paged(  # noqa: E731
        **given, block_table=int32([4, 1, 0], [2, 3, 5]), seqlens_k=int32(10, 3)
    )
    places = {"q": [Shard(1)], "k_pages": [Shard(2)], "v_pages": [Shard(2)]}
    compare(call, tensors, places, mesh, [Shard(1)])


@check
def compiled(mesh: DeviceMesh) -> None:
    spread = [distribute_tensor(t, mesh, [Shard(1)]) for t in DENSE.values()]
    call = torch.compile(lambda q, k, v: tw.attention(q, k, v, causal=True), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(whole(call(*spread)), dense(**DENSE))


def refused(call: Callable[[Any], Any], tensor: Tensor, places: list[Any], mesh: DeviceMesh, name: str) -> None:
    partial = places == [Partial()]
    given = DTensor.from_local(tensor, mesh, places) if partial else distribute_tensor(tensor, mesh, places)
    with pytest.raises(InvalidProblem) as caught:
        call(given)
    assert caught.value.argument == name, caught.value
    assert "Replicate()" in caught.value.expected, caught.value
    assert "redistribute" in caught.value.fix, caught.value


@check
def other_placements(mesh: DeviceMesh) -> None:
    """Along the sequence, along head_dim, and sums that are not finished."""
    x = DENSE["q"]
    for places in ([Shard(2)], [Shard(3)], [Partial()]):
        refused(lambda given: tw.attention(given, given, given), x, places, mesh, "q")
    cut = distribute_tensor(x, mesh, [Shard(0)])
    for places in ([Shard(2)], [Partial()]):
        refused(lambda given: tw.attention(cut, cut, given), x, places, mesh, "v")
    refused(lambda given: tw.attention(cut, cut, cut, sinks=given), randn(4), [Shard(0)], mesh, "sinks")
    refused(lambda given: tw.attention(cut, cut, cut, bias=given), randn(6, 6), [Shard(1)], mesh, "bias")


def says(words: str, error: type[Exception], call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=words):
        call()


@check
def what_does_not_fit(mesh: DeviceMesh) -> None:
    by_heads, x = (distribute_tensor(DENSE["q"], mesh, [Shard(dim)]) for dim in (1, 0))
    says("k: expected to be cut by heads", InvalidProblem, lambda: tw.attention(by_heads, x, x))
    says("k: expected a DTensor", InvalidProblem, lambda: tw.attention(x, DENSE["q"], DENSE["q"]))
    says("sinks: expected a DTensor", InvalidProblem, lambda: tw.attention(x, x, x, sinks=randn(4)))
    says("dropout of DTensors", tw.Unsupported, lambda: tw.attention(x, x, x, dropout=0.1))
    says("q: expected 4 dimensions", InvalidProblem, lambda: tw.attention(by_heads[0], by_heads, by_heads))
    odd = distribute_tensor(randn(1, 3, 4, 8), mesh, [Shard(1)])
    says("multiple of 2 heads", InvalidProblem, lambda: tw.attention(odd, odd, odd))
    single = distribute_tensor(randn(1, 1, 4, 8), mesh, [Shard(1)])
    even = distribute_tensor(randn(1, 4, 4, 8), mesh, [Shard(1)])
    says("multiple of 2 heads", InvalidProblem, lambda: tw.attention(even, single, single))


def checks(world: int) -> Iterator[tuple[str, Callable[[], None]]]:
    mesh = init_device_mesh("cpu", (world,))
    for name, function in CHECKS.items():
        yield name, functools.partial(function, mesh)


def main(report: Path, place: str, rank: int, world: int) -> None:
    """Run the checks, of which rank 0 writes the report."""
    outcomes = outcomes_of(checks(world), place, rank, world)
    if rank == 0:
        report.write_text(json.dumps(outcomes))
    dist.destroy_process_group()
