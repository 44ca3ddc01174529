"""Every shipped Triton configuration compiles for its architecture without a GPU, within its resources.

The launches come from the real launch path with its kernels caught instead of started, so what is compiled here is what
runs there.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tilewise import device as devices
from tilewise import validation
from tilewise.operands import Flags, Operands, Wanted

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(triton.knobs.runtime.interpret), reason="kernels are interpreted, not compiled"),
]

BF16, FP32 = torch.bfloat16, torch.float32
# Bytes of registers that may go through memory in a kernel of the fast table (bf16, head_dim 64 and 128). dK/dV
# for head_dim 128 on Hopper spills 604 and was the fastest tile tuned on an H200 (610 TFLOP/s, the next one 572).
SPILL_LIMITS = {"key_gradient_kernel": 640}
SPILL_LIMIT = 256


class Built(NamedTuple):
    """What ptxas says of a compiled kernel."""

    name: str
    registers: int
    spilled: int
    serialised: bool
    shared: int
    ptx: str


def build(launch: Any, capability: tuple[int, int]) -> Built:
    """Compile one launch ahead of time for a compute capability."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    backend, kernel = make_backend(target), launch.kernel
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "debug": False}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, extra = bind(**launch.arguments, **options)
    parsed, signature, constexprs, attrs = kernel._pack_args(
        backend, launch.arguments | options, bound, specialization, extra
    )
    compiled = triton.compile(ASTSource(kernel, signature, constexprs, attrs), target=target, options=parsed.__dict__)
    ptx = compiled.asm["ptx"]
    log = assemble(ptx)
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    registers = int(re.findall(r"Used (\d+) registers", log)[0])
    return Built(kernel.__name__, registers, spilled, "serializ" in log, compiled.metadata.shared, ptx)


def assemble(ptx: str) -> str:
    """The log of ptxas, which Triton keeps to itself."""
    found = re.search(r"\.target (sm_\w+)", ptx)
    assert found is not None
    # The wheel has a second assembler for what the first is too old for.
    assembler = "ptxas-blackwell" if found[1].startswith(("sm_10", "sm_12")) else "ptxas"
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / assembler
    command = [str(path), "-v", f"--gpu-name={found[1]}", "-", "-o", "/dev/null"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True)
    return done.stderr + done.stdout


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Launches are collected instead of started."""
    from tilewise.backends.triton import launch

    launches: list[Any] = []
    monkeypatch.setattr(launch.Launch, "start", lambda self: launches.append(self))
    return launches


def run(device: str, head_dim: int, dtype: torch.dtype, seqlen_q: int = 300, **flags: Any) -> None:
    """Forward and backward of a small dense problem as `device` would do it."""
    from tilewise.backends.triton import BACKEND, launch
    from tilewise.canonical import canonical

    q = torch.zeros(1, 4, seqlen_q, head_dim, dtype=dtype)
    k = torch.zeros(1, 2, 300, head_dim, dtype=dtype)
    with devices.overridden(devices.named(device)):
        operands = Operands(q, k, k, bias=flags.pop("bias", None), sinks=flags.pop("sinks", None), seed=torch.tensor(7))
        operands = operands if flags.get("dropout") else operands._replace(seed=None)
        problem = validation.problem_of("dense", operands, Flags(**flags, needs_grad=True, backend="triton"))
        refusal = BACKEND.supports(problem, devices.named(device))
        if refusal is not None:
            pytest.skip(refusal)
        operands = canonical(problem, operands)
        out, lse = launch.run_forward(problem, operands)
        wanted = Wanted(dbias=operands.bias is not None, dsinks=operands.sinks is not None)
        launch.run_backward(problem, operands, out, lse, out, None, wanted)


def assert_fits(built: Built, device: str) -> None:
    spec = devices.named(device)
    assert built.shared <= spec.smem_bytes, f"{built.name}: {built.shared} of {spec.smem_bytes} bytes of shared memory"
    assert built.registers <= 255


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("device", ["h200", "a100"])
def test_hot_kernels(caught: list[Any], device: str, head_dim: int) -> None:
    run(device, head_dim, BF16, causal=True)
    capability = devices.named(device).capability
    assert capability is not None
    for launch in caught:
        built = build(launch, capability)
        assert_fits(built, device)
        assert built.spilled <= SPILL_LIMITS.get(built.name, SPILL_LIMIT), built.name
        assert not built.serialised, f"{built.name}: ptxas waits after every wgmma"
        if devices.named(device).has_wgmma and launch.kernel.__name__ != "row_stats_kernel":
            assert "wgmma.mma_async" in built.ptx


def test_decode_kernels(caught: list[Any]) -> None:
    run("h200", 128, BF16, seqlen_q=1, causal=True)
    forward = [launch for launch in caught if launch.kernel.__name__ in ("decode_kernel", "combine_kernel")]
    assert len(forward) == 2
    for launch in forward:
        built = build(launch, (9, 0))
        assert_fits(built, "h200")
        assert built.spilled == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("device", ["h200", "a100", "l40s", "b200", "rtx5090"])
def test_every_configuration(caught: list[Any], device: str, head_dim: int, dtype: torch.dtype) -> None:
    run(device, head_dim, dtype, causal=True)
    capability = devices.named(device).capability
    assert capability is not None
    for launch in caught:
        assert_fits(build(launch, capability), device)


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["h200", "l40s"])
def test_every_feature_at_once(caught: list[Any], device: str) -> None:
    bias, sinks = torch.zeros(1, 4, 300, 300), torch.zeros(4)
    run(device, 64, BF16, causal=True, window_left=50, bias=bias, sinks=sinks, dropout=0.1, softcap=20.0)
    capability = devices.named(device).capability
    assert capability is not None
    for launch in caught:
        assert_fits(build(launch, capability), device)
