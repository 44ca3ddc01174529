"""Steps of serving engines on a GPU: decoding in a call of its own beside prompts, and images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.integrations.engines import Batch, Layer

CUDA = torch.device("cuda")
HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
WINDOW = 40
# Keys and queries of each sequence; images, by number of the sequence.
LENGTHS, SPANS = [70, 300, 33, 128, 260, 91], {4: [(100, 163), (200, 259)], 5: [(10, 59)]}
FIRST, LAST = [1, 1, 1, 1, 90, 91], [90, 33, 1, 1, 1, 1]


def seen(length: int, count: int, window: int | None, spans: list[tuple[int, int]]) -> Tensor:
    """Which keys each of the last `count` tokens sees."""
    rows, keys = torch.arange(length - count, length)[:, None], torch.arange(length)
    near = torch.ones_like(keys, dtype=torch.bool) if window is None else keys > rows - window
    mask = (keys <= rows) & near
    for first, last in spans:
        mask |= (first <= rows) & (rows <= last) & (first <= keys) & (keys <= last)
    return mask


@pytest.mark.parametrize("window", [None, WINDOW], ids=["all keys", "window"])
@pytest.mark.parametrize(("counts", "has_images"), [(FIRST, False), (LAST, False), (FIRST, True)])
def test_a_mixed_step(counts: list[int], has_images: bool, window: int | None) -> None:
    draw = torch.Generator().manual_seed(0)
    pages = sum(-(-n // PAGE) for n in LENGTHS)
    cache = torch.randn(pages, KV_HEADS, PAGE, 2 * DIM, generator=draw).bfloat16()
    q = torch.randn(sum(counts), HEADS, DIM, generator=draw).bfloat16()
    order = iter(torch.randperm(pages, generator=draw).tolist())
    table = torch.zeros(len(LENGTHS), max(-(-n // PAGE) for n in LENGTHS), dtype=torch.int32)
    for n, length in enumerate(LENGTHS):
        for column in range(-(-length // PAGE)):
            table[n, column] = next(order)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=CUDA)
    slots = torch.empty(0, dtype=torch.int64, device=CUDA)
    batch = Batch(len(q), starts.to(CUDA), max(counts), lengths, table.to(CUDA), slots, page_size=PAGE)
    if has_images:
        batch.add_spans(SPANS, starts.tolist(), LENGTHS)
        assert batch.spans is not None
    else:
        batch.part_decodes(starts)
        assert len(batch.parts) == 2
    out = torch.full_like(q, torch.nan, device=CUDA)
    Layer(HEADS, DIM, DIM**-0.5, KV_HEADS, window=window).attend(q.to(CUDA), cache.to(CUDA), batch, out)
    for n, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
        rows = cache[table[n].long()].transpose(0, 1).reshape(1, KV_HEADS, -1, 2 * DIM)[:, :, :length].double()
        mask = seen(length, count, window, SPANS.get(n, []) if has_images else [])
        queries = q[starts[n] : starts[n + 1]].transpose(0, 1)[None].double()
        k, v = rows.split(DIM, -1)
        expected = tw.attention(queries, k, v, mask=mask, backend="reference")[0].transpose(0, 1)
        found = out[starts[n] : starts[n + 1]].cpu().double()
        torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
