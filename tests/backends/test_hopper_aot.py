"""The Hopper kernels compile for sm_90a here, without a GPU, by whichever Triton is installed: tensor cores multiply
without waiting for each other, hot loops keep to their registers, shared memory suffices.

The ordinary run compiles one or a few kernels of each family. The exhaustive one compiles problems that between them
take every tile of the tables together with every other choice that a kernel is compiled for (hopper_choices.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from hopper_choices import FAMILIES, cover
from tilewise.backends.gpu import releases

pytestmark = pytest.mark.slow

pytest.importorskip("triton", minversion="3.6")
aot = pytest.importorskip("hopper_aot")
launching = pytest.importorskip("tilewise.backends.gpu.launching")
quantising = pytest.importorskip("tilewise.backends.triton.quantising")

SMEM_LIMIT = 227 * 1024
# The Triton of constraints.txt, whose hot loops touch no local memory. Those of other releases may load and store a few
# addresses there, and rarely taken configurations more.
PINNED = "3.7.1"
FEW_SPILLS, MOST_SPILLS = 8, 192
PARTS = 8


class Kernel(NamedTuple):
    """A kernel, the problem it is compiled for, and the local accesses that the pinned Triton may put into its loop."""

    name: str
    family: str
    features: dict[str, Any]
    spills: int = 0


CAUSAL: dict[str, Any] = {"causal": True}
TRAINED: dict[str, Any] = {"needs_grad": True}
PAGED: dict[str, Any] = {"kind": "paged", "page_size": 64}
# 320 tiles for 132 multiprocessors: those of the last round are cut.
CUT: dict[str, Any] = {
    "num_heads": 5, "num_kv_heads": 5, "batch": 1, "seqlen_q": 8192, "seqlen_k": 8192, "needs_grad": True,
}  # fmt: skip
KERNELS = (
    Kernel("forward_quad_kernel", "forward", {"d": 64, **CAUSAL}),
    Kernel("forward_kernel", "forward", {"d": 128, **CAUSAL, "has_sinks": True}),
    Kernel("forward_kernel", "forward", {"d": 64, "has_sinks": True}),
    Kernel("backward_kernel", "backward", {"d": 64, "num_kv_heads": 4, "seqlen_k": 1024, **CAUSAL, **TRAINED}),
    Kernel("backward_kernel", "backward", {"d": 128, **CAUSAL, **TRAINED}),
    Kernel("backward_kernel", "backward", {"d": 128, "tiles_shape": (1, 1, 32, 32), **TRAINED}),
    Kernel("backward_pieces_kernel", "backward", {"d": 128, **CUT}),
    Kernel("backward_wide_kernel", "backward", {"d": 256, **CAUSAL, **TRAINED}),
    Kernel("query_gradient_kernel", "backward", {"d": 256, **TRAINED}),
    Kernel("decode_kernel", "decode", {}),
    Kernel("decode_kernel", "decode", {**PAGED, "fp8": ("k", "v")}),
    Kernel("fp8_forward_kernel", "fp8", {"d": 128, **CAUSAL}),
    Kernel("latent_kernel", "latent", PAGED),
    Kernel("forward_kernel", "forward", {"d": 128, **CAUSAL, "max_logits": True}),
    Kernel("forward_quad_kernel", "forward", {"d": 64, **CAUSAL, "max_logits": True}),
    Kernel("forward_kernel", "forward", {"d": 256, **CAUSAL, "has_sinks": True, "max_logits": True}),
    Kernel("forward_wide_kernel", "forward", {"d": 512, **CAUSAL, **PAGED, "has_sinks": True}),
    Kernel("decode_kernel", "decode", {"d": 512, **PAGED}),
    # Where a maximum is taken across warps, Triton 3.7 loads into a register in some threads only. ptxas carries what
    # the others have in it, which nobody uses, from tile to tile: one load and one store, beside 36 KiB of keys.
    Kernel("decode_kernel", "latent", {"num_heads": 16, **PAGED, "fp8": ("k", "v")}, spills=2),
    Kernel("decode_kernel", "latent", {"num_heads": 16, **PAGED}),
    Kernel("forward_wide_kernel", "forward", {"d": 384, "window_left": 100, "softcap": 30.0}),
    Kernel("forward_kernel", "forward", {"d": 128, "tiles_shape": (1, 1, 32, 32)}),
    Kernel("forward_quad_kernel", "forward", {"d": 64, "tiles_shape": (1, 1, 32, 32)}),
)


def name_of(kernel: Kernel) -> str:
    return " ".join([kernel.name, *(f"{key}={value}" for key, value in kernel.features.items())])


def hold(found: Any, spills: int, what: object) -> None:
    assert found.hgmma > 0, what
    assert not found.serialised, f"ptxas waits after every wgmma: {what}"
    assert found.smem_bytes <= SMEM_LIMIT, what
    assert found.local.hot <= spills, f"{found.local} in {what}"
    assert found.unused_barriers == [], what
    assert found.early_signals == 0, what


# One of each family; the others in the exhaustive run.
FIRST = (KERNELS[0], KERNELS[1], KERNELS[4], KERNELS[7], KERNELS[9], KERNELS[11], KERNELS[12], KERNELS[16], KERNELS[-2])


@pytest.mark.parametrize(
    "kernel", [pytest.param(k, id=name_of(k), marks=() if k in FIRST else pytest.mark.exhaustive) for k in KERNELS]
)
def test_hot_loops_multiply_without_spills(kernel: Kernel) -> None:
    problem = FAMILIES[kernel.family].problem(**kernel.features)
    spills = kernel.spills if releases.installed() == PINNED else FEW_SPILLS
    hold(aot.resources(aot.call_of(problem, kernel.name)), spills, kernel.name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_configuration(family: str, part: int) -> None:
    for problem in cover(family)[part::PARTS]:
        names = {call.kernel.__name__ for call in aot.calls_of(problem, aot.HOPPER)}
        kernels = [name for name in FAMILIES[family].kernels if name in names]
        assert kernels, problem
        for name in kernels:
            hold(aot.resources(aot.call_of(problem, name)), MOST_SPILLS, (name, problem))


@pytest.mark.parametrize(
    ("head_dim", "rotation"),
    [(128, True), *(pytest.param(*c, marks=pytest.mark.exhaustive) for c in ((128, False), (256, True)))],
)
def test_quantising_spills_nothing(head_dim: int, rotation: bool) -> None:
    """Tiles are small so that all of it fits into registers."""
    job = quantising.Job("own", 1, 2, 4096, head_dim, "bhsd", 128, False, rotation, True)
    shape, small = (1, 2, 4096, head_dim), launching.Allocation.contiguous
    basis = {"signs": torch.float32, "sizes": torch.int32, "norms": torch.float32, "directions": torch.bfloat16}
    made = {
        "x": small(shape, torch.bfloat16),
        "data": small(shape, torch.uint8),
        "scale": small((1, 2, 32), torch.float32),
    }
    made |= {name: small((head_dim,), dtype) for name, dtype in basis.items() if rotation}
    found = tuple(tuple(made[name].view) if name in made else None for name in quantising.NAMES)
    (call,) = quantising.quantising_calls(job, found)
    assert aot.resources(call).spill_bytes == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tile_of_the_tables_is_covered(family: str) -> None:
    """No row of a table is left that no problem takes; so the exhaustive run compiles all of them."""
    assert {FAMILIES[family].choices(problem)["tile"] for problem in cover(family)} >= FAMILIES[family].tiles()
