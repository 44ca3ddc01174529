"""The tiles that tune_triton.py tries, by pass and head_dim."""

from __future__ import annotations

from collections.abc import Callable

from tilewise.backends.triton.configs import Config, Pass

__all__ = ["CANDIDATES", "DECODE"]

Shape = tuple[int, int, int, int]

# head_dim -> (block_m, block_n, num_warps, num_stages).
FORWARD: dict[int, tuple[Shape, ...]] = {
    64: (
        (128, 64, 4, 3), (128, 128, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3),
        (64, 128, 4, 2), (256, 64, 8, 2), (256, 64, 8, 3),
    ),
    128: (
        (128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 2), (64, 64, 4, 3),
        (128, 64, 4, 2), (64, 128, 4, 2), (128, 32, 8, 4), (256, 64, 8, 2),
    ),
    256: (
        (128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 2), (64, 32, 4, 2), (64, 64, 4, 2), (64, 32, 4, 3),
        (128, 64, 8, 1),
    ),
}  # fmt: skip
DKDV: dict[int, tuple[Shape, ...]] = {
    64: (
        (64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2), (128, 64, 4, 2),
        (64, 128, 4, 2), (32, 128, 4, 3),
    ),
    128: (
        (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 2), (32, 128, 8, 3), (64, 64, 4, 2), (32, 64, 4, 3),
        (128, 64, 8, 2), (16, 128, 8, 3),
    ),
    256: (
        (32, 64, 8, 2), (32, 64, 8, 1), (64, 64, 8, 1), (16, 64, 8, 2), (16, 64, 4, 2), (32, 128, 8, 1),
        (16, 128, 8, 2), (64, 64, 8, 2),
    ),
}  # fmt: skip
DQ: dict[int, tuple[Shape, ...]] = {
    64: (
        (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 4, 2), (64, 128, 4, 2),
        (128, 32, 4, 3),
    ),
    128: (
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3), (128, 32, 4, 2),
        (64, 32, 4, 3),
    ),
    256: (
        (128, 32, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2), (64, 32, 8, 1), (128, 64, 8, 1), (64, 64, 8, 1),
        (64, 64, 4, 1), (128, 32, 8, 1),
    ),
}  # fmt: skip


def with_and_without_tma(shapes: tuple[Shape, ...], *, early_dp: bool = True) -> list[Config]:
    """Every tile twice."""
    return [Config(*shape, descriptors=tma, early_dp=early_dp) for shape in shapes for tma in (False, True)]


def dkdv_candidates(dim: int) -> list[Config]:
    """The likely tiles, and the tallest, also with dP after the softmax."""
    shapes = DKDV[dim]
    late = shapes[:3] + tuple(shape for shape in shapes[3:] if shape[0] == 128)
    return with_and_without_tma(shapes) + with_and_without_tma(late, early_dp=False)


CANDIDATES: dict[Pass, Callable[[int], list[Config]]] = {
    "forward": lambda dim: with_and_without_tma(FORWARD[dim]),
    "dkdv": dkdv_candidates,
    "dq": lambda dim: with_and_without_tma(DQ[dim]),
}
DECODE = [
    Config(16, block_n, warps, stages)
    for block_n, warps, stages in (
        (32, 4, 3), (32, 4, 5), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 4, 3), (128, 8, 2),
        (128, 8, 3), (64, 2, 3), (32, 2, 4),
    )
]  # fmt: skip
