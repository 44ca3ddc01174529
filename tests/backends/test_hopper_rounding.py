"""Sums in fixed point: products become integers, and units come to the threads that multiply by them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from emulated_asm import units_counted

# As backward_rows.COUNT_BIAS.
COUNT_BIAS = 0x40400000
LANES, COUNT = 32, 32


def as_float(bits: Tensor) -> Tensor:
    """The floats that registers hold."""
    return bits.to(torch.int32).view(torch.float32)


def run_in_a_warp(text: str, operands: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Run PTX without loops for the lanes of a warp; registers hold bits. What is stored: (addresses, bits)."""
    registers, stored = dict(operands), []

    def bits(name: str) -> Tensor:
        if name in registers:
            return registers[name]
        value = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return torch.full((LANES,), value - (value >> 31 << 32), dtype=torch.int64)

    def number(name: str) -> Tensor:
        return as_float(bits(name)).double()

    def word(x: Tensor) -> Tensor:
        return x.to(torch.int32).long()

    operations: dict[str, Callable[..., Tensor]] = {
        "fma.rn.f32": lambda a, b, c: (number(a) * number(b) + number(c)).float().view(torch.int32).long(),
        "sub.f32": lambda a, b: (number(a) - number(b)).float().view(torch.int32).long(),
        "abs.f32": lambda a: bits(a) & 0x7FFFFFFF,
        "mov.b32": bits,
        "or.b32": lambda a, b: bits(a) | bits(b),
        "and.b32": lambda a, b: bits(a) & bits(b),
        "xor.b32": lambda a, b: bits(a) ^ bits(b),
        "mad.lo.u32": lambda a, b, c: word(bits(a) * bits(b) + bits(c)),
        "mad.wide.s32": lambda a, b, c: bits(a) * bits(b) + bits(c),
        "setp.ne.u32": lambda a, b: bits(a) != bits(b),
        "setp.geu.f32": lambda a, b: ~(number(a) < number(b)),
        "vote.sync.any.pred": lambda a, _: bits(a).any().expand(LANES),
    }
    for line in re.sub(r"\.reg [^;]*;", "", text.strip("{} ")).split(";"):
        words = line.replace(",", " ").split()
        if words[:1] == ["@!p"] and not bool(registers["p"].all()):
            break  # to DONE, which is the end
        if words[:1] == ["@p"]:
            stored.append((bits(words[2].strip("[]"))[registers["p"]], bits(words[3])[registers["p"]]))
        elif words and words[0] == "lop3.b32":
            assert words[-1] == "0xFE"  # a or b or c
            registers[words[1]] = bits(words[2]) | bits(words[3]) | bits(words[4])
        elif words and words[0] in operations:
            registers[words[1]] = operations[words[0]](*words[2:])
        else:
            assert not words or words[0] in ("@!p", "DONE:"), line
    operands.update({name: registers[name] for name in registers if name.startswith("$")})
    return stored


def counted(
    x: Tensor, units: Tensor, emulated: Callable[[str], Any], rows: Tensor | None = None, at: int = 0
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """What a warp's threads make of x [LANES, COUNT], and the NaN that they store."""
    text = emulated("primitives")._count_asm(COUNT, rows is not None)
    inputs = [x, units] if rows is None else [x, units, rows]
    operands: dict[str, Tensor] = {}
    for group, values in enumerate(inputs):
        held = values if values.dtype != torch.float32 else values.view(torch.int32)
        operands |= {f"${(group + 1) * COUNT + i}": held[:, i].long() for i in range(COUNT)}
    operands[f"${4 * COUNT}"] = torch.full((LANES,), at, dtype=torch.int64)
    stored = run_in_a_warp(text, operands)
    return torch.stack([operands[f"${i}"] for i in range(COUNT)], 1), stored


def unbiased(counts: Tensor) -> Tensor:
    """Integers out of counts, modulo 2^32."""
    return (counts - COUNT_BIAS).to(torch.int32).double()


@pytest.mark.parametrize("most", [22, 31])
def test_products_are_rounded_to_the_nearest_integer(most: int, emulated: Callable[[str], Any]) -> None:
    """By one addition, if all of a warp's products are below 2^22, else by two."""
    generator = torch.Generator().manual_seed(most)
    sizes = torch.exp2(torch.randint(-3, most, (LANES, COUNT), generator=generator).float())
    x = (torch.rand((LANES, COUNT), generator=generator) * 2 - 1) * sizes
    x.view(-1)[:11] = torch.tensor([0.0, -0.0, 0.5, 1.5, -0.5, 2.5, 255.5, 256.0, 256.5, -256.5, 4194303.5])
    x.view(-1)[11:13] = torch.tensor([4194304.0, -4194304.5]) if most == 31 else 7.0
    units = torch.rand((LANES, COUNT), generator=generator) * 0.5 + 0.5
    units.view(-1)[:13] = 1.0
    found, _ = counted(x, units * 2.0**-22, emulated)
    exact = torch.round(x.double() * units.double())
    assert torch.equal(unbiased(found), exact)
    assert torch.equal(
        units_counted(x, units * 2.0**-22).double(), (exact.long() + COUNT_BIAS).to(torch.int32).double()
    )


def test_rows_that_are_not_finite_are_marked(emulated: Callable[[str], Any]) -> None:
    """A thread looks at its first and third element, of which a row has one."""
    rows = torch.arange(LANES)[:, None] // 4 + torch.arange(COUNT)[None] // 2 % 2 * 8
    x = torch.ones(LANES, COUNT)
    units = torch.full((LANES, COUNT), 2.0**-22)
    assert counted(x, units, emulated, rows, 1000)[1] == []
    x[rows == 3] = math.inf
    x[rows == 13] = math.nan
    found, stored = counted(x, units, emulated, rows, 1000)
    assert sorted({int(at) for at, _ in stored for at in at}) == [1000 + 4 * 3, 1000 + 4 * 13]
    assert all(bool((bits == 0x7FFFFFFF).all()) for _, bits in stored)
    assert bool((unbiased(found)[x == 1] == 1).all())
