"""Compares the quantising kernel, run by Triton's interpreter, with plain torch; run by test_fp8.py."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tilewise import fp8
from tilewise.backends.triton import quantising

GENERATOR = torch.Generator().manual_seed(0)


def faults(x: torch.Tensor, granularity: Any, *, rotation: bool = False, **options: Any) -> list[str]:
    """What differs between the two."""
    expected = fp8.quantize(x, granularity=granularity, rotation=rotation, **options)
    given = options.get("scale")
    data, scale = quantising.quantize(
        x, granularity, expected.block, expected.layout, options.get("cu_seqlens"), rotation=rotation,
        given=None if given is None else torch.as_tensor(given), max_seqlen=options.get("max_seqlen"),
    )  # fmt: skip
    same = torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8)) and torch.equal(scale, expected.scale)
    return [] if same else [f"{granularity} rotation={rotation} {options}"]


def main() -> int:
    """0 if every bit is the same."""
    odd = torch.randn(1, 2, 150, 40, generator=GENERATOR).bfloat16()
    odd[0, 0, 3, 4], odd[0, 1, 3, 4] = torch.nan, torch.inf
    odd[0, 0, 7] *= 1e-4
    packed = torch.randn(150, 2, 24, generator=GENERATOR).half()
    cu_seqlens = torch.tensor([0, 7, 7, 140], dtype=torch.int32)
    steps = torch.cat([torch.arange(-460, 460, 0.37), torch.arange(-0.1, 0.1, 2.0**-12)])
    found: list[str] = []
    for granularity in ("tensor", "head", "block"):
        found += faults(odd, granularity, rotation=granularity != "tensor")
        found += faults(packed, granularity, rotation=True, cu_seqlens=cu_seqlens, max_seqlen=133)
    found += faults(odd.transpose(1, 2), "block", layout="bshd")
    found += faults(odd, "block", block=48)
    found += faults(steps[: len(steps) // 16 * 16].reshape(1, 1, -1, 16), "head", scale=1.0)
    sys.stderr.write("\n".join(found))
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
