"""What the compiler makes of the forward with warps of their own for loading: who is there, what is copied, and where
barriers lie. The kernel is trusted only as far as this was read (releases.READ).
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from shared_memory import Buffer, buffers_of, complaints_about, strays_of
from tilewise import device as devices
from tilewise.backends.gpu import releases
from tilewise.backends.triton import BACKEND, configs
from tilewise.problem import AttentionProblem

triton = pytest.importorskip("triton")
compilation = pytest.importorskip("tilewise.backends.gpu.compilation")
offline = pytest.importorskip("tilewise.backends.triton.offline")
pytestmark = pytest.mark.skipif(bool(triton.knobs.runtime.interpret), reason="kernels are interpreted, not compiled")

H200 = devices.named("h200")


def problem_of(head_dim: int, *, causal: bool = False, seqlen: int = 128) -> AttentionProblem:
    batch, total = 40, 40 * seqlen
    return AttentionProblem(
        kind="dense", dtype=torch.bfloat16, batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, total_q=total, total_k=total,
        num_heads=16, num_kv_heads=16, head_dim=head_dim, head_dim_v=head_dim, scale=0.1, causal=causal,
    )  # fmt: skip


def call_of(problem: AttentionProblem) -> Any:
    (call,) = offline.calls_of(problem, H200)
    assert call.kernel.__name__ == "specialised_forward_kernel"
    return call


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_barriers_end_before_their_memory_holds_a_tile(head_dim: int, causal: bool) -> None:
    """Triton leaves barriers that nobody waits for where K comes to lie; nothing else may share memory."""
    compiled = compilation.compile_call(call_of(problem_of(head_dim, causal=causal)), H200, -1)
    buffers, ptx = buffers_of(compiled.asm["ttgir"], 90), compiled.asm["ptx"]
    strays = strays_of(buffers)
    assert strays == {0, 8}
    assert complaints_about(ptx, strays) == []
    used = {buffer for buffer in buffers if buffer.begin not in strays or not buffer.holds_barriers}
    assert not [pair for pair in combinations(used, 2) if pair[0].meets(pair[1])]
    # q for each of two warpgroups, K, V, and what of each is full and, for whoever reads it, empty again.
    assert [sum(buffer.holds_barriers is kind for buffer in used) for kind in (False, True)] == [4, 4 + 6]
    # Once, by the thread that made them: the warps that compute have no copy.
    assert ptx.count("mbarrier.inval") == len(strays)
    assert ptx.index("mbarrier.inval") > ptx.rindex("mbarrier.init")


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper_kernels_leave_none(head_dim: int) -> None:
    """Whose barriers are written by hand and live as long as the kernel."""
    hopper = pytest.importorskip("tilewise.backends.hopper.offline")
    for call in hopper.calls_of(replace(problem_of(head_dim, seqlen=1024), needs_grad=True), H200):
        buffers = buffers_of(compilation.compile_call(call, H200, -1).asm["ttgir"], 90)
        assert strays_of(buffers) == set(), call.kernel.__name__


@pytest.mark.slow
def test_a_kernel_that_leaves_them_is_noticed() -> None:
    ptx = compilation.compile_call(call_of(problem_of(128)), H200, -1).asm["ptx"]
    assert len(complaints_about(ptx.replace("mbarrier.inval", "// mbarrier_inval"), {0, 8})) == 2
    assert len(complaints_about(ptx, {0, 8, 16})) == 1
    assert len(complaints_about(ptx, {0})) == 1
    later = re.sub(r"(cp\.async\.bulk\.tensor.*)", r"\1\n mbarrier.inval.shared::cta.b64 [global_smem];", ptx)
    assert len(complaints_about(later, {0, 8})) == 1


def test_strays_are_barriers_in_memory_of_others() -> None:
    tile, before, after = Buffer(16, 64, False), Buffer(0, 24, True), Buffer(64, 72, True)
    assert strays_of([tile, before, after]) == {16}
    assert strays_of([tile, after]) == set()


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_warpgroup_loads_and_two_compute(head_dim: int, causal: bool) -> None:
    """Query tiles are dealt out among the two, which is what `shares` says, but described as if they were not."""
    call = call_of(problem_of(head_dim, causal=causal))
    compiled = compilation.compile_call(call, H200, -1)
    ptx, ttgir = compiled.asm["ptx"], compiled.asm["ttgir"]
    assert ".reqntid 384" in ptx
    assert "setmaxnreg.inc" in ptx
    assert compiled.metadata.shared <= H200.smem_bytes
    rows = call.arguments["BLOCK_M"]
    copies = re.findall(r"async_tma_copy_global_to_local %q_desc\[.*-> !ttg.memdesc<(\d+)x", ttgir)
    assert copies == [str(rows // call.arguments["q_desc"].shares)] * 2
    described = compilation.types_of(call).signature[0]
    assert described.startswith(f"tensordesc<bf16[{rows},")


@pytest.mark.parametrize("release", ["3.6.0", "3.6.1", "3.10.0", ""])
def test_only_compilers_that_were_read_are_trusted(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "installed", lambda: release)
    shape = BACKEND.tile_shape(problem_of(128), H200)
    assert (tuple(shape) == (128, 128)) is (release in releases.READ)


def test_programs_take_long_and_short_blocks_in_turn() -> None:
    """Under a causal mask no divisor is common to programs and blocks of a head; else every multiprocessor has one."""
    for seqlen, programs in ((128, 132), (256, 131), (384, 131), (512, 131)):
        assert call_of(problem_of(128, causal=True, seqlen=seqlen)).grid == (programs, 1, 1)
        assert call_of(problem_of(128, seqlen=seqlen)).grid == (132, 1, 1)


@pytest.mark.parametrize(("num_warps", "num_stages"), [(4, 3), (8, 2)])
def test_tiles_whose_strays_are_not_those_that_are_ended_are_refused(num_warps: int, num_stages: int) -> None:
    with pytest.raises(ValueError, match=rf"\(2, 4\) stages and warps, not \({num_stages}, {num_warps}\)"):
        configs.Config(128, 128, num_warps, num_stages, specialised=True)
