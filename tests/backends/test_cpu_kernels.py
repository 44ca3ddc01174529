"""The CPU backend's emitters: right on this machine, and the right instructions for machines that are not here."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from llvmlite import binding, ir

import tilewise as tw
from tilewise.backends.cpu import isa
from tilewise.backends.cpu.compiler import Part, build_module, driver, part_of
from tilewise.backends.cpu.decode import stream_values
from tilewise.backends.cpu.decode_matrix import tile_scores
from tilewise.backends.cpu.emit import BF16, E4M3, E4M3_UNIT, FP16, Emitter, Value
from tilewise.backends.cpu.features import drop
from tilewise.backends.cpu.forward_matrix import (
    matrix_scores,
    matrix_values,
    pack_weights,
    start_tiles,
    stop_tiles,
    transpose_queries,
    transpose_values,
)
from tilewise.backends.cpu.isa import Isa
from tilewise.backends.cpu.microkernels import accumulate_keys, scores, softmax, weigh_values
from tilewise.backends.cpu.packing import transpose_panel
from tilewise.machine_code import optimise, target_machine

AMX_FEATURES = ("avx512f", "avx512dq", "avx512vl", "avx512bw", "avx512bf16", "amx-tile", "amx-bf16")


def loaded(parts: list[Part], table: Isa | None = None) -> tuple[Callable[..., Any], Any]:
    """The first part as a C function of addresses, and the engine that owns it."""
    machine = target_machine()
    module = build_module(parts, table or isa.host(), frozenset({parts[0].symbol}))
    engine = binding.create_mcjit_compiler(optimise(module, machine), machine)
    engine.finalize_object()
    kinds = [ctypes.c_float if str(kind) == "float" else ctypes.c_int64 for kind in parts[0].kind.args]
    return ctypes.CFUNCTYPE(None, *kinds)(engine.get_function_address(parts[0].symbol)), engine


@pytest.mark.parametrize("table", [isa.host(), isa.GENERIC], ids=["host", "generic"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_halves_round_like_torch_and_come_back(dtype: int, table: Isa) -> None:
    import torch

    name = torch.bfloat16 if dtype == BF16 else torch.float16
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(name)
    halfway = torch.nextafter(every.float(), torch.tensor(math.inf)).nan_to_num(0.0, 0.0, 0.0) * (1 + 2.0**-9)
    source = torch.cat([every.float(), halfway, torch.tensor([1e-8, 65519.9, 65520.0, 1e30, math.nan, -0.0])])
    source = torch.cat([source, torch.zeros(-len(source) % 16)])

    def body(e: Emitter, read: Value, write: Value, back: Value, count: Value) -> None:
        def step(i: Value) -> None:
            place = e.b.add(write, e.b.mul(i, e.i64(2)))
            e.store_from_f32(place, e.load(e.at(read, i)), dtype)
            e.store(e.at(back, i), e.load_as_f32(place, dtype))

        e.loop(count, e.lanes, (), step)

    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 4)
    function, engine = loaded([Part("tilewise_test", kind, body, is_driver=False)], table)
    rounded, back = torch.empty(len(source), dtype=name), torch.empty(len(source))
    function(source.data_ptr(), rounded.data_ptr(), back.data_ptr(), len(source))
    del engine
    expected = source.to(name)
    assert torch.equal(rounded.isnan(), expected.isnan())
    assert torch.equal(rounded.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(back.nan_to_num(7.0), expected.float().nan_to_num(7.0))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("table", [isa.host(), isa.NEON, isa.AVX2, isa.GENERIC], ids=lambda t: t.name)
def test_every_e4m3_code_is_the_number_that_torch_makes_of_it(table: Isa, count: int) -> None:
    """Subnormal numbers and NaN too, alone, as a vector, and as several vectors that are converted together."""
    import torch

    width = count * table.lanes
    codes = torch.cat([torch.arange(256, dtype=torch.uint8), torch.zeros(-256 % width, dtype=torch.uint8)])
    scale = 0.37

    def body(e: Emitter, read: Value, vectors: Value, single: Value, total: Value, factor: Value) -> None:
        def step(i: Value) -> None:
            e.store_vectors(e.at(vectors, i), e.load_many_as_f32(e.b.add(read, i), E4M3, count, factor))

        e.loop(total, width, (), step)
        e.loop(total, 1, (), lambda i: e.store(e.at(single, i), e.load_as_f32(e.b.add(read, i), E4M3, 1, factor)))

    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 4 + [ir.FloatType()])
    function, engine = loaded([Part("tilewise_test", kind, body, is_driver=False)], table)
    vectors, single = torch.empty(len(codes)), torch.empty(len(codes))
    function(codes.data_ptr(), vectors.data_ptr(), single.data_ptr(), len(codes), scale * E4M3_UNIT)
    del engine
    expected = codes.view(torch.float8_e4m3fn).float() * scale
    assert int(expected[:256].isnan().sum()) == 2
    for got in (vectors, single):
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(7.0).view(torch.int32), expected.nan_to_num(7.0).view(torch.int32))


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("aarch64", {}, isa.NEON),
        ("arm64", {"neon": True}, isa.NEON),
        ("x86_64", {"avx512f": True, "avx512dq": True, "avx512vl": True}, isa.AVX512),
        ("x86_64", dict.fromkeys(AMX_FEATURES, True), isa.AVX512_AMX),
        ("x86_64", dict.fromkeys(AMX_FEATURES, True) | {"amx-bf16": False}, isa.AVX512),
        ("x86_64", dict.fromkeys(AMX_FEATURES, True) | {"avx512bf16": False}, isa.AVX512),
        ("x86_64", {"avx512f": True, "avx2": True, "fma": True, "f16c": True}, isa.AVX2),
        ("x86_64", {"sse4.2": True}, isa.GENERIC),
        ("riscv64", {}, isa.GENERIC),
    ],
)
def test_instruction_set_is_chosen_by_features(machine: str, features: dict[str, bool], expected: Isa) -> None:
    assert isa.choose(machine, features) is expected


def assembly(named: Any, table: Isa, triple: str, cpu: str) -> str:
    """A kernel's code for another processor."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    part = part_of(named)
    return str(machine.emit_assembly(optimise(build_module([part], table, frozenset({part.symbol})), machine)))


def innermost(code: str, fma: str) -> str:
    """The loop with most multiply-adds, up to its jump back."""
    block = max(re.split(r"\n\.LBB", code), key=lambda part: len(re.findall(fma, part)))
    return block[: block.rindex(".LBB" + block.split(":")[0])]


NEON_TARGET = (isa.NEON, "aarch64-unknown-linux-gnu", "neoverse-n1", r"fmla\s", r"\bsp\b")
AVX2_TARGET = (isa.AVX2, "x86_64-unknown-linux-gnu", "haswell", r"vfmadd", r"\(%rsp\)")
AVX512_TARGET = (isa.AVX512, "x86_64-unknown-linux-gnu", "skylake-avx512", r"vfmadd", r"\(%rsp\)")


@pytest.mark.parametrize("target", [NEON_TARGET, AVX2_TARGET, AVX512_TARGET], ids=lambda t: t[0].name)
@pytest.mark.parametrize("name", ["scores", "weigh_values", "accumulate_keys"])
def test_inner_loops_multiply_and_do_not_spill(name: str, target: tuple[Isa, str, str, str, str]) -> None:
    table, triple, cpu, fma, stack = target
    named = {"scores": scores, "weigh_values": weigh_values, "accumulate_keys": accumulate_keys}[name]
    block = innermost(assembly(named, table, triple, cpu), fma)
    rounds = {
        "scores": table.score_keys * table.query_vectors * table.dim_step,
        "weigh_values": table.value_rows * table.value_vectors * table.value_unroll,
        "accumulate_keys": table.value_rows * table.value_vectors * (table.lanes if table.by_lane else 4),
    }
    assert len(re.findall(fma, block)) == rounds[name]
    assert not re.search(stack, block), "accumulators left the registers"
    if table.by_lane:
        assert re.search(r"fmla\s+v\d+\.4s, v\d+\.4s, v\d+\.s\[\d\]", block), "no multiply by element"


X86 = "x86_64-unknown-linux-gnu"


def test_bf16_is_decoded_with_the_instructions_for_it() -> None:
    values = innermost(assembly(stream_values, isa.AVX512, X86, "skylake-avx512"), r"vpand")
    assert (len(re.findall("vfmadd", values)), len(re.findall("vpand", values))) == (8, 4)
    assert not re.search(r"vpmovzx|\(%rsp\)", values)
    # Tiles of 32 keys, of 16, and of the rest.
    assert len(re.findall("tdpbf16ps", assembly(tile_scores, isa.AVX512_AMX, X86, "sapphirerapids"))) == 4


@pytest.mark.parametrize("target", [NEON_TARGET, AVX2_TARGET], ids=lambda t: t[0].name)
def test_other_kernels_compile_elsewhere(target: tuple[Isa, str, str, str, str]) -> None:
    for named in (softmax, drop, transpose_panel):
        assert len(assembly(named, *target[:3])) > 500


@pytest.mark.skipif(isa.host().matrix is None, reason="no matrix unit")
def test_matrix_products_are_exact_for_small_integers() -> None:
    """In one function, as the tiles belong to the thread: S = K Q^T and V^T S for integers that bf16 holds."""
    import torch

    def both(k: int, q_rows: int, q: int, s: int, v_rows: int, v: int, weights: int, out: int, tiles: int) -> None:
        start_tiles(tiles, tiles + 64)
        transpose_queries(q_rows, 128, 64, q)
        matrix_scores(k, 128, 64, q, s)
        pack_weights(s, 32, weights)
        transpose_values(v_rows, 64, 32, 32, v, 64)
        matrix_values(v, 64, weights, 32, out)
        stop_tiles(tiles + 64)

    kernels = (start_tiles, transpose_queries, matrix_scores, pack_weights, transpose_values, matrix_values, stop_tiles)
    both.__globals__.update({part_of(named).function.__name__: named for named in kernels})
    function, engine = loaded([part_of(driver(both)), *map(part_of, kernels)])
    k, q, v = (torch.randint(-1, 2, shape).bfloat16() for shape in ((32, 64), (32, 64), (32, 32)))
    s, out = torch.full((32, 32), torch.nan), torch.full((32, 32), torch.nan)
    scratch = [torch.empty(4096, dtype=torch.uint8) for _ in range(4)]
    q_pairs, v_columns, weights, tiles = (x.data_ptr() for x in scratch)
    function(k.data_ptr(), q.data_ptr(), q_pairs, s.data_ptr(), v.data_ptr(), v_columns, weights, out.data_ptr(), tiles)
    del engine
    assert torch.equal(s, k.float() @ q.float().T)
    assert torch.equal(out, v.float().T @ s)


def test_probabilities_are_recomputed_as_exactly_as_lse_says() -> None:
    """Scores that fp32 holds: an lse rounded again on its way to log2 units would put P off by up to 2.6e-6."""
    q, k, v = torch.zeros(32, 1, 1, 8), torch.zeros(32, 1, 13, 8), torch.ones(32, 1, 13, 8).requires_grad_()
    bias = (64 + torch.arange(32) / 2).view(32, 1, 1, 1)
    out, lse = tw.attention(q, k, v, bias=bias, scale=0.3, backend="cpu", return_lse=True)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    exact = torch.exp(bias.double() - lse.detach().double()[..., None])
    assert float((dv / exact - 1).abs().max()) < 2e-7


def test_delta_is_summed_without_rounding() -> None:
    """With one key delta is dP, however large the terms that cancel, and dq is 0."""
    q, k, v = torch.ones(3, 1, 1, 1, 8)
    dout = torch.tensor([1e8, -1e8, 1.0, 0, 0, 0, 0, 0]).view_as(q)
    out = tw.attention(q.requires_grad_(), k, v, backend="cpu")
    (dq,) = torch.autograd.grad(out, q, dout)
    assert dq.abs().max() == 0.0


@pytest.mark.parametrize("rows", [1, 40], ids=["decode", "prompt"])
@pytest.mark.parametrize("sink", [torch.inf, -torch.inf, torch.nan], ids=str)
def test_sinks_that_are_no_numbers(sink: float, rows: int) -> None:
    """An infinite one takes all weight, or none; what is NaN is seen."""
    q, k = torch.randn(2, 4, rows, 16), torch.randn(2, 2, 3000, 16)
    sinks = torch.tensor([0.5, sink, 2.0, sink])
    found, want = (tw.attention(q, k, k, sinks=sinks, backend=name, return_lse=True) for name in ("cpu", "reference"))
    torch.testing.assert_close(found, want, equal_nan=True, atol=1e-5, rtol=1e-5)
