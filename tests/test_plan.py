"""explain(): the costs against published figures and brute force, the plan for real, fake, meta and absent devices."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewise as tw
from tilewise import device
from tilewise.device import DeviceSpec
from tilewise.masks import Band, TileGrid, TileKind
from tilewise.plan import Plan, cost
from tilewise.plan.cost import Traffic


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


# --- closed forms


BANDS = [
    Band(m, n, left, right) for m in (1, 5, 9) for n in (1, 6, 11) for left in (None, 0, 3) for right in (None, 0, 2)
]


@pytest.mark.parametrize("grid", [TileGrid(1, 1), TileGrid(2, 3), TileGrid(4, 2), TileGrid(16, 16)])
def test_tiled_costs_against_a_walk_over_all_tiles(grid: TileGrid) -> None:
    for band in BANDS:
        scores = key_loads = row_loads = 0
        for m_block in range(-(-band.seqlen_q // grid.block_m)):
            rows = min(grid.block_m, band.seqlen_q - m_block * grid.block_m)
            for n_block in range(-(-band.seqlen_k // grid.block_n)):
                if band.tile_kind(m_block, n_block, grid) is not TileKind.SKIP:
                    keys = min(grid.block_n, band.seqlen_k - n_block * grid.block_n)
                    scores, key_loads, row_loads = scores + rows * keys, key_loads + keys, row_loads + rows
        assert cost.scores_computed(band, grid) == scores
        forward = cost.tiled_forward(band, grid, 5, 7)
        assert forward == Traffic(band.seqlen_q * 5 + key_loads * 12, band.seqlen_q * 7, band.seqlen_q)
        backward = cost.tiled_backward(band, grid, 5, 7)
        assert backward.reads == band.seqlen_q * 14 + band.seqlen_k * 12 + row_loads * 12
        assert backward.writes == band.seqlen_k * 12 + band.seqlen_q * 5
        assert backward.wide == band.seqlen_q * (1 + 5) + row_loads * (2 * 5 + 2)


def test_flops() -> None:
    assert cost.forward_flops(1000, 64, 64) == 4 * 1000 * 64
    assert cost.backward_flops(1000, 64, 64) == 2.5 * cost.forward_flops(1000, 64, 64)
    assert cost.forward_flops(10, 3, 5) == 2 * 10 * 8
    assert cost.backward_flops(10, 3, 5) == 2 * 10 * (9 + 10)


# --- plans


def test_plan_of_a_causal_training_step() -> None:
    q, kv = meta(2, 8, 1024, 64, grad=True), meta(2, 2, 1024, 64)
    plan = tw.explain(q, kv, kv, causal=True, device="h200", backend="reference")
    pairs = 1024 * 1025 // 2 * 2 * 8
    assert plan.flops_forward == 4 * pairs * 64
    assert plan.flops_backward == 10 * pairs * 64
    assert plan.tiled.flops == plan.flops_forward + plan.flops_backward
    # It stores P: four products in its backward, not five.
    assert plan.naive.flops == 12 * 1024**2 * 2 * 8 * 64
    # 8 query tiles of 128: the diagonal is masked, what is above is never touched, and there are two sequences.
    assert (plan.tiles.full, plan.tiles.partial, plan.tiles.skipped) == (2 * 28, 2 * 8, 2 * 28)
    inputs, out, lse = 2 * (8 + 2 + 2) * 1024 * 64 * 2, 2 * 8 * 1024 * 64 * 2, 2 * 8 * 1024 * 4
    assert plan.memory.inputs == plan.memory.gradients == inputs
    assert plan.memory.outputs == out + lse
    assert plan.memory.saved_for_backward == inputs + out + lse
    assert plan.naive.extra_memory == 3 * 16 * 1024**2 * 2 + out + lse + inputs
    assert plan.tiled.extra_memory == out + 2 * lse + inputs


def test_gradients_of_bias_and_sinks_take_memory() -> None:
    q = meta(1, 4, 64, 8, grad=True)
    bias, sinks = meta(4, 64, 64, grad=True), meta(4, grad=True)
    plain = tw.explain(q, q, q, bias=bias.detach(), sinks=sinks.detach(), device="h200")
    learnt = tw.explain(q, q, q, bias=bias, sinks=sinks, device="h200")
    assert learnt.memory.gradients == plain.memory.gradients + bias.nbytes + sinks.nbytes
    assert learnt.tiled.extra_memory == plain.tiled.extra_memory + bias.nbytes + sinks.nbytes


def test_roofline_is_the_slower_of_computing_and_moving() -> None:
    q, kv = meta(1, 32, 1, 128), meta(1, 32, 8192, 128)
    decode = tw.explain(q, kv, kv, device="h200").tiled
    once = (2 * 32 * 128 + 2 * 32 * 8192 * 128) * 2 + 32 * 4
    assert decode.bound == "memory"
    assert decode.bytes_from_memory == decode.bytes_moved == once
    assert decode.seconds == pytest.approx(once / 4.8e12)
    assert decode.intensity == pytest.approx(decode.flops / once)
    prefill = tw.explain(kv, kv, kv, device="h200").tiled
    assert prefill.bound == "compute"
    assert prefill.seconds == pytest.approx(4 * 32 * 8192**2 * 128 / 989e12)


def packed(lengths_q: list[int], lengths_k: list[int], **flags: Any) -> Plan:
    q, k = torch.zeros(sum(lengths_q), 2, 8), torch.zeros(sum(lengths_k), 2, 8)
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (lengths_q, lengths_k))
    return tw.explain(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **flags)


def test_packed_sequences_are_counted_one_by_one() -> None:
    plan = packed([3, 0, 300], [5, 7, 300], causal=True, backend="reference")
    assert plan.problem.kind == "varlen"
    assert plan.lengths_read
    assert plan.flops_forward == 4 * 8 * 2 * ((3 + 4 + 5) + 300 * 301 // 2)
    assert plan.tiles.visited == 1 + 0 + 6
    assert plan.tiles.skipped == 3


def test_paged_keys_are_counted_by_their_lengths() -> None:
    pages = torch.zeros(10, 4, 2, 8)
    table = torch.arange(10, dtype=torch.int32).view(2, 5)
    lengths = torch.tensor([5, 17], dtype=torch.int32)
    decode = tw.explain(torch.zeros(2, 2, 8), pages, pages, block_table=table, seqlens_k=lengths)
    assert decode.problem.kind == "paged"
    assert decode.flops_forward == 4 * 8 * 2 * (5 + 17)
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    prefill = tw.explain(
        torch.zeros(5, 2, 8), pages, pages, block_table=table, seqlens_k=lengths, cu_seqlens_q=cu, causal=True
    )
    assert prefill.flops_forward == 4 * 8 * 2 * ((4 + 5) + (15 + 16 + 17))


def test_unreadable_lengths_are_bounded() -> None:
    q, cu = meta(100, 2, 8), meta(4, dtype=torch.int32)
    plan = tw.explain(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=40, max_seqlen_k=40)
    assert not plan.lengths_read
    assert plan.flops_forward == 4 * 8 * 2 * (40 * 40 + 40 * 40 + 20 * 20)
    assert "lengths unknown" in str(plan)


@pytest.mark.parametrize("kind", ["dense", "varlen", "paged"])
def test_fake_tensors(kind: str) -> None:
    with FakeTensorMode():
        index = torch.empty(3, dtype=torch.int32)
        q = torch.empty(2, 2, 64, 8) if kind == "dense" else torch.empty(64, 2, 8)
        flags: dict[str, Any] = {}
        if kind == "varlen":
            flags = {"cu_seqlens_q": index, "cu_seqlens_k": index}
        pages = torch.empty(4, 16, 2, 8)
        if kind == "paged":
            flags = {"block_table": torch.empty(2, 2, dtype=torch.int32), "seqlens_k": index[:2], "cu_seqlens_q": index}
        k = pages if kind == "paged" else q
        plan = tw.explain(q, k, k, **flags)
    assert plan.problem.kind == kind
    assert plan.lengths_read is (kind == "dense")
    assert plan.tiled.flops > 0


def test_explaining_draws_no_random_numbers_and_reads_autocast() -> None:
    q = torch.zeros(1, 1, 4, 8)
    before = torch.get_rng_state()
    device.measured_cpu.cache_clear()  # the first plan of a process measures the CPU
    with torch.autocast("cpu", torch.bfloat16):
        plan = tw.explain(q, q, q, dropout=0.1)
    assert plan.problem.dtype == torch.bfloat16
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_cpu_is_measured_with_real_fp32_tensors_whoever_asks_first(mode: Any, monkeypatch: Any) -> None:
    made: list[Tensor] = []

    def timed(run: Callable[[], Tensor]) -> float:
        made.append(run())
        return 1.0

    monkeypatch.setattr(device, "_best_seconds", timed)
    with mode():
        device.measured_cpu.__wrapped__()
    assert [(type(t), t.dtype) for t in made] == [(Tensor, torch.float32)] * 2


def test_gradients_are_planned_only_where_they_would_be_taken() -> None:
    q, k = meta(1, 1, 64, 8, grad=True), meta(1, 1, 64, 8)
    assert tw.explain(q, k, k).problem.needs_grad
    assert tw.explain(k, k, k).flops_backward == 0
    with torch.no_grad():
        assert not tw.explain(q, k, k).problem.needs_grad


def test_a_backward_that_does_not_repeat_is_named() -> None:
    q, k = meta(1, 8, 512, 128, grad=True), meta(1, 8, 512, 128)
    assert "dq" in str(tw.explain(q, k, k, device="h200").unordered)
    assert "last bits     of dq" in str(tw.explain(q, k, k, device="h200"))
    assert tw.explain(q, k, k, deterministic=True, device="h200").unordered is None
    assert tw.explain(k, k, k, device="h200").unordered is None
    assert tw.explain(q, k, k, device="a100").unordered is None
    wide = meta(1, 8, 512, 192, grad=True)
    assert tw.explain(wide, wide, wide, device="h200").unordered is None


def test_the_cpu_is_measured() -> None:
    q = torch.zeros(1, 1, 64, 8)
    plan = tw.explain(q, q, q)
    assert plan.device.type == "cpu"
    assert plan.device.bandwidth > 1e8
    assert plan.tiled.seconds is not None
    assert tw.explain(q, q, q, device="cpu").device == tw.explain(q, q, q, device=torch.device("cpu")).device


def test_every_named_device_makes_a_plan() -> None:
    q = meta(1, 4, 512, 64, dtype=torch.float16)
    for name in device.DEVICES:
        plan = tw.explain(q, q, q, device=name)
        assert plan.device == device.DEVICES[name]
        assert plan.tiled.seconds is not None
        assert plan.naive.seconds is not None
        assert plan.naive.seconds > plan.tiled.seconds


def test_unknown_rates_give_no_time() -> None:
    q = meta(1, 1, 64, 8)
    plan = tw.explain(q, q, q, device=DeviceSpec("odd", "xpu", None, 1, 0, 0, 0, 1.0, {}))
    assert plan.tiled.seconds is None
    assert plan.tiled.bound is None
    assert "unknown" in str(plan)


def test_refused_problems_still_print_with_every_reason() -> None:
    q = meta(1, 1, 64, 8)
    plan = tw.explain(q, q, q, device=DeviceSpec("Apple M3", "mps", None, 1, 0, 0, 0, 1.0, {}))
    assert plan.backend is None
    assert [name for name, _ in plan.rejected] == [status.name for status in tw.backends()]
    text = str(plan)
    assert "none takes this problem" in text
    assert "needs fp64" in text


def test_plans_pickle_hash_and_serialise() -> None:
    plan = tw.explain(meta(1, 4, 512, 64, grad=True), meta(1, 2, 512, 64), meta(1, 2, 512, 32), device="b200")
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(plan) == hash(pickle.loads(pickle.dumps(plan)))
    read = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert read["problem"]["dtype"] == "bfloat16"
    assert read["tiled"]["flops"] == plan.tiled.flops
    assert read["tiles"]["visited"] == plan.tiles.visited
    assert read["features"] == ["gqa", "head_dim_v"]
    assert read["device"]["flops"]["bfloat16"] == 2250e12
    with pytest.raises(AttributeError):
        plan.backend = "x"  # type: ignore[misc]


def test_the_report_fits_80_columns_and_says_what_matters() -> None:
    q = meta(4, 32, 16384, 128, grad=True)
    k = meta(4, 8, 16384, 128)
    text = str(tw.explain(q, k, k, causal=True, window=(4096, 0), softcap=30.0, device="h100"))
    assert max(map(len, text.splitlines())) <= 80
    for part in ("NVIDIA H100", "32 heads sharing 8", "causal, window, softcap", "visited", "skipped", "bound by"):
        assert part in " ".join(text.split())
    assert "naive does not fit" in text


@pytest.mark.parametrize(
    ("flags", "argument"),
    [
        ({"device": "h300"}, "device"),
        ({"device": "cuda"}, "device"),
        ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, "cu_seqlens_k"),
        ({"cu_seqlens_k": torch.zeros(2, dtype=torch.int32)}, "cu_seqlens_q"),
        ({"block_table": torch.zeros(1, 1, dtype=torch.int32)}, "seqlens_k"),
        ({"causal": 1}, "causal"),
        ({"dropout": 1.5}, "dropout"),
        ({"layout": "sbhd"}, "layout"),
        ({"backend": "magic"}, "backend"),
        ({"bias": torch.zeros(3, 3)}, "bias"),
    ],
)
def test_bad_input_is_refused_by_name(flags: dict[str, Any], argument: str) -> None:
    if flags.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(tw.InvalidProblem) as error:
        tw.explain(q, q, q, **flags)
    assert error.value.argument == argument


def test_flags_of_other_calls_are_refused() -> None:
    q, cu = torch.zeros(4, 1, 8), torch.tensor([0, 4], dtype=torch.int32)
    pages, table, lengths = torch.zeros(1, 4, 1, 8), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4]).int()
    with pytest.raises(tw.InvalidProblem, match="layout"):
        tw.explain(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, layout="bshd")
    with pytest.raises(tw.InvalidProblem, match="dropout"):
        tw.explain(q[:1], pages, pages, block_table=table, seqlens_k=lengths, dropout=0.1)
    with pytest.raises(tw.InvalidProblem, match="cu_seqlens_k"):
        tw.explain(q, pages, pages, block_table=table, seqlens_k=lengths, cu_seqlens_k=cu)


@pytest.mark.parametrize("batch", [0, 1])
def test_empty_problems_have_plans(batch: int) -> None:
    q, k = meta(batch, 2, 0, 8), meta(batch, 2, 5, 8)
    plan = tw.explain(q, k, k, causal=True, device="a100")
    assert plan.tiled.flops == 0
    assert plan.tiles.visited == 0
    assert str(plan)


def test_a_device_that_is_none() -> None:
    q = torch.empty(1, 2, 8, 16, device="meta")
    with pytest.raises(tw.InvalidProblem, match="device: expected a device, the name of one, or a DeviceSpec, got 3"):
        tw.explain(q, q, q, device=cast("Any", 3))
