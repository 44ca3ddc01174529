"""Kernels that quantise rows on their way into pages write the bits that torch writes: on a CPU, in the interpreter of
Triton and on a GPU. `append` is `tilewise.kv.quantised.append_quantised` or takes what it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewise.fp8.rounding import encode_rows
from tilewise.kv.quantised import QuantisedRows, new_scales, write_quantised

HEADS, DIMS, E4M3, CPU = 2, (24, 40), torch.float8_e4m3fn, torch.device("cpu")
Append = Callable[[QuantisedRows], Any]


def check_e4m3(
    append: Append, dtype: torch.dtype, page_size: int, counts: tuple[int, int, int] = (1, 9, 30), device: str = "cpu"
) -> None:
    """Three sequences grow by so many rows in turn, large and small ones, with NaN, infinity, zeros and rows that have
    no slot; sequence s has the pages s, s + 3, ...
    """
    torch.manual_seed(0)
    sizes = (1.0, 0.01, 30.0, 1.0, 1e-7, 1e4) + (() if dtype == torch.float16 else (1e-38, 1e30))
    num_pages, lengths = 3 * -(-len(sizes) * max(counts) // page_size), [0, 0, 0]
    codes = [torch.randint(0, 256, (num_pages, page_size, HEADS, d), dtype=torch.uint8) for d in DIMS]
    scales = [new_scales(1, num_pages, HEADS, CPU)[0] for _ in DIMS]
    mine, mine_scales = ([t.clone().to(device) for t in made] for made in (codes, scales))
    for step, size in enumerate(sizes):
        slots: list[int] = []
        for sequence in range(3):
            count = counts[(step + sequence) % 3]
            position = range(lengths[sequence], lengths[sequence] + count)
            slots += [(sequence + 3 * (p // page_size)) * page_size + p % page_size for p in position] + [-1]
            lengths[sequence] += count
        new = [size * torch.randn(len(slots), HEADS, d) for d in DIMS]
        # Channels of a row differ, so that some end up below e4m3's normal numbers.
        new[1] *= torch.logspace(-6, 0, DIMS[1])
        rows, where = [t.to(dtype) for t in new], torch.tensor(slots)
        rows[0][0, 0, 3], rows[1][0, 1, 7], rows[1][1] = torch.nan, -torch.inf, 0.0
        for n, (kept, scale) in enumerate(zip(codes, scales, strict=True)):
            write_quantised(rows[n], kept.view(E4M3), scale, where)
        pages = [t.view(E4M3) for t in mine]
        append(QuantisedRows._make([*[t.to(device) for t in rows], *pages, *mine_scales, where.to(device)]))
        for a, b in zip((*mine, *mine_scales), (*codes, *scales), strict=True):
            assert torch.equal(a.cpu(), b)
    assert scales[0].unique().numel() > 2


def check_int8(
    append: Append, dtype: torch.dtype, page_size: int, count: int = 60, device: str = "cpu", strided: bool = False
) -> None:
    """Slots in any order, rows without one, NaN, infinities, zeros, ties, magnitudes of all sizes; scales next to each
    other, as in the cell of a token, if `strided`.
    """
    torch.manual_seed(0)
    num_pages = -(-2 * count // page_size)
    slots = torch.randperm(num_pages * page_size)[:count]
    slots[::7] = -1
    spread = 10.0 ** torch.linspace(-4, 4, count)[:, None, None]
    rows = [(torch.randn(count, HEADS, d) * spread).to(dtype) for d in DIMS]
    rows[0][1, 0, 3], rows[1][2, 1, 7], rows[1][3], rows[0][4] = torch.nan, -torch.inf, 0.0, 127.0
    rows[0][4, :, 1:] = torch.arange(23) - 11.5
    pages = [torch.randint(-128, 128, (num_pages, page_size, HEADS, d), dtype=torch.int8) for d in DIMS]
    scales = [torch.full((num_pages, HEADS, page_size), 3.0) for _ in DIMS]
    if strided:
        scales = list(torch.full((num_pages, page_size, HEADS, 2), 3.0).transpose(1, 2).unbind(-1))
    mine, mine_scales = ([t.to(device) if device != "cpu" else t for t in made] for made in (pages, scales))
    expected = [t.clone() for t in (*pages, *scales)]
    append(QuantisedRows._make([*[t.to(device) for t in rows], *mine, *mine_scales, slots.to(device)]))
    for n in range(2):
        codes, scale = encode_rows(rows[n])
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[n][slot // page_size, slot % page_size] = codes[row]
                expected[2 + n][slot // page_size, :, slot % page_size] = scale[row]
    for a, b in zip((*mine, *mine_scales), expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=0, rtol=0, equal_nan=True)
