"""Sums in fixed point: products become integers, and units come to the threads that multiply by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from test_hopper_protocol import emulated  # noqa: F401  (a fixture)


def test_products_are_rounded_to_the_nearest_integer(emulated: Callable[[str], Any]) -> None:  # noqa: F811
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-3, 31, (20000,), generator=generator).float())
    x = (torch.rand(20000, generator=generator) * 2.2 - 1.1) * sizes
    edges = torch.tensor([0.0, -0.0, 0.5, 1.5, -0.5, 255.5, 256.0, 256.5, -256.5, 2.0**30, -(2.0**30), math.nan])
    x = torch.cat([x, edges])
    factor = torch.cat([torch.rand(20000, generator=generator) * 0.5 + 0.5, torch.ones(len(edges))])
    rounded = emulated("primitives").round_scaled(x, factor)
    assert rounded.dtype == torch.int32
    exact = torch.round(x.double() * factor.double())
    assert torch.equal(rounded[:-1].double(), exact[:-1])


def test_units_lie_where_the_elements_of_their_rows_do(emulated: Callable[[str], Any]) -> None:  # noqa: F811
    """In the order of registers an element of a block meets the unit of its row, which both names find."""
    rows = torch.arange(128.0)
    spread = emulated("backward_rows").in_register_order(rows, 128).reshape(2, 16, 32)
    for block in range(2):
        elements = rows[block * 64 : block * 64 + 64, None].expand(64, 64)
        stored = emulated("dq_tiles").in_register_order(elements).reshape(8, 16, 32)
        assert torch.equal(stored, spread[block].expand(8, 16, 32))
