"""Problems that between them take every row of the Triton backend's tables, on every architecture."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise import device as devices
from tilewise.backends.triton import BACKEND
from tilewise.problem import AttentionProblem

if TYPE_CHECKING:
    from tilewise.backends.gpu.symbols import KernelCall

EVERYWHERE = ("h200", "a100", "l40s", "b200", "rtx5090")
WIDTHS = (64, 128, 256, 512)


class Case(NamedTuple):
    """What makes a problem special, and the (devices, head dims) for which it is compiled.

    For those of `elsewhere` only where not one of the first: what differs there is the architecture, not the table.
    """

    features: dict[str, Any]
    devices: tuple[str, ...] = EVERYWHERE
    head_dims: tuple[int, ...] = WIDTHS
    elsewhere: tuple[int, ...] = ()


H200 = ("h200",)
GRADIENTS: dict[str, Any] = {"needs_grad": True}
HIGHER: dict[str, Any] = {"needs_grad": True, "higher": True}
CAUSAL: dict[str, Any] = {"causal": True}
MANY: dict[str, Any] = {"seqlen_k": 4096, "total_k": 4096}
RICH: dict[str, Any] = {
    **CAUSAL, **GRADIENTS, "window_left": 50, "softcap": 20.0, "dropout": 0.1, "has_sinks": True,
    "bias_shape": (1, 4, 300, 300), "bias_dtype": torch.float32,
}  # fmt: skip
PAGES: dict[str, Any] = {"kind": "paged", "page_size": 16, "seqlen_k": 320, "total_k": 3200}
ONE_TOKEN: dict[str, Any] = {"seqlen_q": 1, "total_q": 1, "seqlen_k": 8192, "total_k": 8192}
E4M3: dict[str, Any] = {**PAGES, "page_size": 64, "fp8": ("k", "v")}
INT8: dict[str, Any] = {**E4M3, "int8": True, "scale_blocks": (None, 1, 1)}
# 16 or 128 query heads on a latent. Its widths are its own, whatever the head dim.
LATENT: dict[str, Any] = {
    **PAGES, **ONE_TOKEN, "page_size": 64, "num_heads": 128, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512,
    "latent": True,
}  # fmt: skip
FEW_HEADS: dict[str, Any] = {**LATENT, "num_heads": 16}
CASES: dict[str, Case] = {
    "causal": Case({**CAUSAL, **GRADIENTS}),
    "full": Case({}, H200),
    "many": Case(MANY, H200),
    "many causal": Case({**MANY, **CAUSAL, **GRADIENTS}, H200, (64, 128)),
    "short": Case(GRADIENTS, H200, (64, 128)),
    "window": Case({**MANY, **CAUSAL, **GRADIENTS, "window_left": 100}, H200, (64, 128), (128,)),
    "packed": Case({"kind": "varlen", **CAUSAL, **GRADIENTS}, H200, (64, 128, 256), (128,)),
    "packed many": Case({"kind": "varlen", **MANY, **CAUSAL}, H200, (64, 128)),
    "fp16": Case({"dtype": torch.float16, **CAUSAL, **GRADIENTS}, H200, (64, 128), (128,)),
    "unequal": Case({"head_dim_v": 64, **CAUSAL, **GRADIENTS}, H200, (128, 256)),
    "rich": Case(RICH, H200, WIDTHS, (128,)),
    "fp32": Case({"dtype": torch.float32, **CAUSAL, **GRADIENTS}),
    "decode": Case(ONE_TOKEN),
    "decode fp32": Case({**ONE_TOKEN, "dtype": torch.float32}, H200, WIDTHS, (64,)),
    "decode pages": Case({**PAGES, **ONE_TOKEN}, H200, (128,), (128,)),
    "decode e4m3": Case({**E4M3, **ONE_TOKEN, "page_size": 128}, H200, WIDTHS, (128,)),
    "decode e4m3 64": Case({**E4M3, **ONE_TOKEN}, H200, (64, 128)),
    "decode int8": Case({**INT8, **ONE_TOKEN}, H200, WIDTHS, (128,)),
    "decode int8 16": Case({**INT8, **ONE_TOKEN, "page_size": 16}, H200, (64, 128)),
    "latent": Case(LATENT, EVERYWHERE, (512,)),
    "latent of few heads": Case(FEW_HEADS, EVERYWHERE, (512,)),
    "latent of 32 rows": Case({**FEW_HEADS, **CAUSAL, "seqlen_q": 2, "total_q": 2}, H200, (512,)),
    "latent fp32": Case({**FEW_HEADS, "dtype": torch.float32}, H200, (512,), (512,)),
    "latent e4m3": Case({**FEW_HEADS, "fp8": ("k", "v")}, H200, (512,), (512,)),
    "latent e4m3 128": Case({**LATENT, "fp8": ("k", "v")}, H200, (512,), (512,)),
    "latent of 256": Case({**LATENT, "head_dim": 288, "head_dim_v": 256}, H200, (512,), (512,)),
    "latent of 128": Case({**LATENT, "head_dim": 192, "head_dim_v": 128}, H200, (512,), (512,)),
    "latent of 64": Case({**LATENT, "head_dim": 96, "head_dim_v": 64}, H200, (512,), (512,)),
    **{
        f"latent of {dv}, {bits}": Case(
            {**LATENT, **features, "head_dim": dv + 32, "head_dim_v": dv, "num_heads": heads}, H200, (512,)
        )
        for dv in (64, 128, 256)
        for bits, features, heads in (
            ("16 heads", {}, 16),
            ("e4m3", {"fp8": ("k", "v")}, 128),
            ("e4m3, 16 heads", {"fp8": ("k", "v")}, 16),
            ("fp32", {"dtype": torch.float32}, 16),
        )
    },
    "keys of 576": Case({**LATENT, "latent": False}, H200, (512,), (512,)),
    "e4m3": Case({**E4M3, **CAUSAL}, H200, WIDTHS, (128,)),
    "int8": Case({**INT8, **CAUSAL}, H200, WIDTHS, (128,)),
    "mask and slopes": Case({**GRADIENTS, "mask_shape": (1, 1, 300, 300), "has_alibi": True}, H200, (64, 128)),
    "mask and dropout": Case({**GRADIENTS, "mask_shape": (1, 1, 300, 300), "dropout": 0.1}, H200, WIDTHS),
    "tile mask": Case({**GRADIENTS, **CAUSAL, "tiles_shape": (1, 4, 3, 3)}, H200, WIDTHS, (64, 128)),
    "tile mask and bias": Case({**RICH, "tiles_shape": (1, 1, 3, 3)}, H200, (64, 128), (128,)),
    "tile mask, pages": Case({**PAGES, **CAUSAL, **GRADIENTS, "tiles_shape": (1, 1, 3, 3)}, H200, (64, 128)),
    "pages": Case({**PAGES, **CAUSAL, **GRADIENTS}, H200, (64, 128), (128,)),
    "fp32 rich": Case({"dtype": torch.float32, **RICH}, H200),
    "higher": Case({**CAUSAL, **HIGHER}, head_dims=(64, 128, 256)),
    "higher packed": Case({"kind": "varlen", **CAUSAL, **HIGHER}, H200, (64, 128)),
    "higher pages": Case({**PAGES, **CAUSAL, **HIGHER}, H200, (128,)),
    "higher tile mask": Case({**CAUSAL, **HIGHER, "tiles_shape": (1, 1, 3, 3)}, H200, (64, 128)),
    "higher mask and dropout": Case({**HIGHER, "mask_shape": (1, 1, 300, 300), "dropout": 0.1}, H200, (64, 128, 256)),
    "higher rich": Case({**RICH, **HIGHER}, H200, (64, 128, 256), (128,)),
    "higher fp32": Case({"dtype": torch.float32, **CAUSAL, **HIGHER}, H200, (64, 128), (128,)),
    "higher fp32 rich": Case({"dtype": torch.float32, **RICH, **HIGHER}, H200, (64, 128)),
}


def places() -> Iterator[tuple[str, str, int]]:
    """(device, case, head_dim) of all that is compiled."""
    for name, case in CASES.items():
        for device in EVERYWHERE:
            for head_dim in case.head_dims if device in case.devices else case.elsewhere:
                yield device, name, head_dim


def problem_of(name: str, head_dim: int) -> AttentionProblem:
    """300 tokens in one sequence of four heads on two, but for what is special."""
    values: dict[str, Any] = {
        "kind": "dense", "dtype": torch.bfloat16, "batch": 1, "seqlen_q": 300, "seqlen_k": 300, "total_q": 300,
        "total_k": 300, "num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim, "head_dim_v": head_dim, "scale": 0.1,
    }  # fmt: skip
    return AttentionProblem(**values | CASES[name].features)


def calls_of(device: str, name: str, head_dim: int) -> list[KernelCall]:
    """The kernels of a case; without gradients where a device has no room for them. Those of tangents and second
    derivatives if the case is `higher`.
    """
    from tilewise.backends.triton import launch, launch_higher

    problem, spec = problem_of(name, head_dim), devices.named(device)
    if problem.higher:
        assert BACKEND.supports(problem, spec) is None
        return launch_higher.calls_of(problem, spec)
    if BACKEND.supports(problem, spec) is not None:
        problem = replace(problem, needs_grad=False)
    assert BACKEND.supports(problem, spec) is None
    return launch.calls_of(problem, spec)


def assembled(ptx: str) -> str:
    """The log of ptxas, which Triton keeps to itself."""
    from tilewise.backends.gpu import releases

    found = re.search(r"\.target (sm_\w+)", ptx)
    assert found is not None
    capability = int(found[1].removeprefix("sm_").rstrip("a"))
    command = [releases.ptxas(capability), "-v", f"--gpu-name={found[1]}", "-", "-o", "/dev/null"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True)
    return done.stderr + done.stdout


def registers_of(log: str) -> tuple[int, int]:
    """(registers, bytes spilled) as ptxas says."""
    return int(re.findall(r"Used (\d+) registers", log)[0]), sum(map(int, re.findall(r"(\d+) bytes spill", log)))
