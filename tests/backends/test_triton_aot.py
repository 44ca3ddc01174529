"""The hot Triton kernels compile for their architecture without a GPU, within its resources, and as they were meant.

They are compiled by the function that the launch path compiles with. The exhaustive run compiles every row of the
tables for every architecture.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from making import watched
from tilewise import device as devices
from tilewise.backends.triton import BACKEND
from triton_cases import assembled, places, problem_of, registers_of
from triton_cases import calls_of as calls_of_case

triton = pytest.importorskip("triton")
compilation = pytest.importorskip("tilewise.backends.gpu.compilation")
launch = pytest.importorskip("tilewise.backends.triton.launch")
launch_higher = pytest.importorskip("tilewise.backends.triton.launch_higher")
configs = pytest.importorskip("tilewise.backends.triton.configs")
operand_views = pytest.importorskip("tilewise.backends.gpu.offline").operand_views
planning = pytest.importorskip("tilewise.backends.triton.planning")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(triton.knobs.runtime.interpret), reason="kernels are interpreted, not compiled"),
]

if TYPE_CHECKING:
    from tilewise.backends.gpu.symbols import KernelCall

BF16 = torch.bfloat16
# Bytes of registers that may go through memory in a kernel of the fast table (bf16, head_dim 64 and 128).
SPILL_LIMIT = 256
# And in any kernel: wide heads take more registers than a thread has.
MOST_SPILLED = 4096
# Of the architectures that have no test of their own, in the ordinary run.
SAMPLE = (("b200", "decode", 128), ("l40s", "decode e4m3", 128))


class Built(NamedTuple):
    """What ptxas says of a compiled kernel."""

    name: str
    registers: int
    spilled: int
    serialised: bool
    shared: int
    ptx: str
    misread: list[str]


def build(call: KernelCall, device: str) -> Built:
    """Compile one call as the launch path does, but for a device that is not here."""
    compiled = compilation.compile_call(call, devices.named(device), -1)
    ptx = compiled.asm["ptx"]
    log = assembled(ptx)
    registers, spilled = registers_of(log)
    misread = misread_products(compiled.asm["ttgir"])
    return Built(call.kernel.__name__, registers, spilled, "serializ" in log, compiled.metadata.shared, ptx, misread)


# A product of mma.sync: rows and inner dimension of its first operand, and how many neighbours a thread holds of it.
PRODUCT = re.compile(r"tt\.dot .*?: tensor<(\d+)x(\d+)x\w+, #ttg\.dot_op<\{opIdx = 0, .*?kWidth = (\d+)\}>>")


def misread_products(ttgir: str) -> list[str]:
    """Products whose inner dimension is so short for the layout of their operands that Triton sums some terms twice and
    others not at all: four threads hold it, and each term must have its own.
    """
    found = [tuple(map(int, product)) for product in PRODUCT.findall(ttgir)]
    return [f"{rows} x {inner} by {neighbours}" for rows, inner, neighbours in found if inner < 4 * neighbours]


def assert_fits(built: Built, device: str) -> None:
    spec = devices.named(device)
    assert built.shared <= spec.smem_bytes, f"{built.name}: {built.shared} of {spec.smem_bytes} bytes of shared memory"
    assert built.registers <= 255
    assert built.misread == [], built.name


def hot(call: KernelCall, device: str) -> Built:
    """A kernel that is worth more: it hardly spills, and its products run side by side."""
    built = build(call, device)
    assert_fits(built, device)
    assert built.spilled <= SPILL_LIMIT, built.name
    assert not built.serialised, f"{built.name}: ptxas waits after every wgmma"
    return built


# The kernels of the fast table, dense and packed, whose tiles are taken from a list.
HOT = (("h200", "causal", 128), ("h200", "packed", 128), ("h200", "causal", 512), ("a100", "causal", 64))
HOT_TOO = (("h200", "causal", 64), ("h200", "many causal", 64), ("h200", "many causal", 128), ("a100", "causal", 128))


@pytest.mark.parametrize(
    "place", [*HOT, *(pytest.param(place, marks=pytest.mark.exhaustive) for place in HOT_TOO)], ids=str
)
def test_hot_kernels(place: tuple[str, str, int]) -> None:
    device = place[0]
    for call in calls_of_case(*place):
        built = hot(call, device)
        if devices.named(device).has_wgmma and built.name not in ("row_stats_kernel", "list_blocks_kernel"):
            assert "wgmma.mma_async" in built.ptx


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("mask and dropout", "key_gradient_kernel"), ("higher mask and dropout", "second_query_kernel")],
)
def test_products_over_few_keys_under_a_mask_and_dropout(name: str, kernel: str) -> None:
    (call,) = (call for call in calls_of_case("h200", name, 256) if call.kernel.__name__ == kernel)
    assert 16 in (call.arguments["BLOCK_M"], call.arguments["BLOCK_N"])
    assert_fits(build(call, "h200"), "h200")


@pytest.mark.parametrize(
    ("device", "head_dim"),
    [
        ("h200", 128),
        ("a100", 64),
        *(pytest.param(*p, marks=pytest.mark.exhaustive) for p in (("h200", 64), ("a100", 128))),
    ],
)
def test_kernels_of_tangents_and_second_derivatives(device: str, head_dim: int) -> None:
    kernels = {"tangent_kernel", "second_key_kernel", "second_query_kernel"}
    for call in calls_of_case(device, "higher", head_dim):
        built = hot(call, device)
        if devices.named(device).has_wgmma and built.name in kernels:
            assert "wgmma.mma_async" in built.ptx
            kernels.remove(built.name)
    assert not kernels or not devices.named(device).has_wgmma


# What kernels of tangents and second derivatives are compiled for, beyond the cases of all kernels.
ALONE: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"causal": True, "window_left": 50},
    "softcap": {"softcap": 20.0},
    "alibi": {"has_alibi": True, "causal": True},
    "bias": {"bias_shape": (1, 4, 300, 300), "bias_dtype": torch.float32},
    "bias of a row": {"bias_shape": (1, 1, 1, 300), "bias_dtype": torch.bfloat16},
    "sinks": {"has_sinks": True},
    "mask": {"mask_shape": (1, 1, 300, 300)},
    "dropout": {"dropout": 0.1},
    "own keys": {"num_kv_heads": 4},
    "packed, capped": {"kind": "varlen", "softcap": 20.0, "dropout": 0.1, "has_sinks": True},
    "large pages": {"kind": "paged", "page_size": 128, "seqlen_k": 384, "total_k": 3840},
    "unequal": {"head_dim_v": 32},
    "large scores": {"scale": 3000.0},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("device", ["h200", "a100"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ALONE)
def test_each_feature_of_derivatives(name: str, head_dim: int, device: str, dtype: torch.dtype) -> None:
    problem = dataclasses.replace(problem_of("higher", head_dim), causal=False, dtype=dtype)
    problem, spec = dataclasses.replace(problem, **ALONE[name]), devices.named(device)
    if (refusal := BACKEND.supports(problem, spec)) is not None:
        pytest.skip(refusal)
    for call in launch_higher.calls_of(problem, spec):
        built = build(call, device)
        assert_fits(built, device)
        assert built.spilled <= MOST_SPILLED, built.name


@pytest.mark.parametrize(
    ("name", "along"),
    [
        ("higher", ("k",)),
        *(
            pytest.param(name, along, marks=pytest.mark.exhaustive)
            for name in ("higher", "higher packed", "higher pages", "higher rich")
            for along in ((), ("q",), ("k",), ("v",), ("q", "v"), ("k", "v"), ("bias",), ("sinks",))
            if (name, along) != ("higher", ("k",))
        ),
    ],
)
def test_absent_tangents_are_compiled_away(name: str, along: tuple[str, ...]) -> None:
    """And their products with them."""
    products = {}
    for given in (along, ("q", "k", "v")):
        calls = launch_higher.calls_of(problem_of(name, 64), devices.named("h200"), given)
        tangent, _known = (call for call in calls if call.kernel.__name__ == "tangent_kernel")
        for call in calls if given == along else [tangent]:
            built = build(call, "h200")
            assert_fits(built, "h200")
            if call is tangent:
                products[given] = len(re.findall(r"mma\S*\.m\d+n\d+k\d+", built.ptx))
    # Of the six products of a tile q' k, q k', (P S') v and P v' need a tangent, (P S') v any but that of v.
    assert products[along] < products["q", "k", "v"]


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, id=" ".join(map(str, place)), marks=() if place in SAMPLE else pytest.mark.exhaustive)
        for place in places()
    ],
)
def test_every_case_fits_its_architecture(place: tuple[str, str, int]) -> None:
    device = place[0]
    for call in calls_of_case(*place):
        built = build(call, device)
        assert_fits(built, device)
        assert built.spilled <= MOST_SPILLED, built.name


def rows_of(table: Any) -> Iterator[Any]:
    """The rows of a table of tables."""
    for inner in table.values():
        yield from rows_of(inner) if isinstance(inner, dict) else inner if isinstance(inner, tuple) else [inner]


def test_every_row_of_the_tables_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the cases, so that the exhaustive run compiles it."""
    chosen = [watched(monkeypatch, configs, name) for name in ("choose", "latent_config")]
    for place in places():
        calls_of_case(*place)
    rows = [row for table in vars(configs).values() if isinstance(table, dict) for row in rows_of(table)]
    rows = [row for row in rows if isinstance(row, configs.Config)]
    assert len(rows) > 60
    taken = {id(call.result) for calls in chosen for call in calls}
    assert [row for row in rows if id(row) not in taken] == []


@pytest.mark.parametrize("device", ["a100", pytest.param("h200", marks=pytest.mark.exhaustive)])
def test_three_products_of_tf32(device: str) -> None:
    """fp32 is multiplied by no matrix unit; asked for, every product becomes three of TF32 parts."""
    problem, spec = problem_of("fp32", 64), devices.named(device)
    views = operand_views(problem, packed_queries=True)
    views |= {name: made.view for name, made in launch.result_allocations(problem).items()}
    products = {}
    for precision in ("ieee", "tf32", "tf32x3"):
        (call,) = launch.tiled_calls(planning.plan_for(problem, spec, False, precision), views)
        built = build(call, device)
        products[precision] = len(re.findall(r"\bw?g?mma\S*\.f32\.tf32\.tf32", built.ptx))
        assert built.spilled == 0
    # Two products of 32 x 32 x 64, each in pieces of 16 x 8 x 8 by four warps.
    pieces = 2 * (32 // 16) * (32 // 8) * (64 // 8) // 2
    assert products == {"ieee": 0, "tf32": pieces, "tf32x3": 3 * pieces}
