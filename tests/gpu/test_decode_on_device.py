"""What only a real Hopper GPU can show of the decode kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from making import cuda_randn as randn
from tilewise import fp8

pytestmark = pytest.mark.hopper

LENGTHS = [5000, 33, 0, 1300, 64, 257]
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"causal": True, "window": (700, 0)},
    "softcap, sinks": {"causal": True, "softcap": 20.0, "sinks": torch.linspace(-2, 2, 16)},
}


def on_device(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in flags.items()}


def in_pages(page_size: int, head_dim: int, heads: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(k pages, v pages, table, lengths): pages in any order, NaN in all slots that no sequence has."""
    counts = [-(-n // page_size) for n in LENGTHS]
    order = torch.randperm(sum(counts) + 3).tolist()
    table = torch.full((len(LENGTHS), max(counts)), 1 << 30, dtype=torch.int32)
    k, v = (torch.full((sum(counts) + 3, page_size, heads, head_dim), torch.nan).bfloat16() for _ in range(2))
    for b, length in enumerate(LENGTHS):
        for number in range(counts[b]):
            page = table[b, number] = order.pop()
            rows = min(page_size, length - number * page_size)
            k[page, :rows], v[page, :rows] = torch.randn(2, rows, heads, head_dim).bfloat16()
    return k.cuda(), v.cuda(), table.cuda(), torch.tensor(LENGTHS, dtype=torch.int32).cuda()


CODES = [None, torch.float8_e4m3fn, torch.int8]
CODE_NAMES = ["bf16", "e4m3", "int8"]


def stored(pages: Tensor, codes: torch.dtype | None) -> Any:
    return pages if codes is None else fp8.quantize_pages(pages, dtype=codes)


def close(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(got[0].double(), want[0].double(), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(got[1].double(), want[1].double(), atol=1e-3, rtol=1e-4)


# (query tokens, head_dim, flags)
ROWS = [(1, 64, "plain"), (1, 128, "plain"), (4, 128, "window"), (1, 192, "softcap, sinks"), (4, 256, "plain")]
# (page size, flags)
PAGES = [(8, "plain"), (16, "softcap, sinks"), (48, "window"), (64, "plain"), (256, "plain")]


@pytest.mark.parametrize(("tokens", "head_dim", "name"), ROWS)
def test_rows(tokens: int, head_dim: int, name: str) -> None:
    q, k, v = randn(4, 16, tokens, head_dim), randn(4, 4, 5001, head_dim), randn(4, 4, 5001, head_dim)
    flags = on_device(FLAGS[name])
    got = tw.attention(q, k, v, backend="hopper", return_lse=True, **flags)
    close(got, tw.attention(q, k, v, backend="reference", return_lse=True, **flags))


@pytest.mark.parametrize(("page_size", "name"), PAGES)
@pytest.mark.parametrize("several", [False, True], ids=["one token", "several tokens"])
@pytest.mark.parametrize("codes", CODES, ids=CODE_NAMES)
def test_pages(codes: torch.dtype | None, several: bool, page_size: int, name: str) -> None:
    k, v, table, lengths = in_pages(page_size, 128)
    keys, values = stored(k, codes), stored(v, codes)
    flags = on_device(FLAGS[name])
    if several:
        starts = torch.tensor([0, 3, 3, 4, 8, 10, 12], dtype=torch.int32).cuda()
        flags |= {"cu_seqlens_q": starts, "max_seqlen_q": 4}
    q = randn(12 if several else len(LENGTHS), 16, 128)
    got, want = (
        tw.attention_paged(q, keys, values, table, lengths, return_lse=True, backend=backend, **flags)
        for backend in ("hopper", "reference")
    )
    close(got, want)


def test_pages_give_the_bits_of_rows() -> None:
    q, k, v = randn(2, 32, 1, 128), randn(2, 8, 4096, 128), randn(2, 8, 4096, 128)
    rows = tw.attention(q, k, v, backend="hopper")
    pages = [t.transpose(1, 2).reshape(-1, 64, 8, 128) for t in (k, v)]
    table = torch.arange(128, dtype=torch.int32).view(2, 64).cuda()
    lengths = torch.full((2,), 4096, dtype=torch.int32).cuda()
    assert torch.equal(
        rows[:, :, 0], tw.attention_paged(q[:, :, 0], pages[0], pages[1], table, lengths, backend="hopper")
    )


@pytest.mark.parametrize("codes", CODES, ids=CODE_NAMES)
def test_a_thousand_runs_give_the_same_bits(codes: torch.dtype | None) -> None:
    k, v, table, lengths = in_pages(16, 128)
    keys, values = stored(k, codes), stored(v, codes)
    q = randn(len(LENGTHS), 16, 128)
    first = tw.attention_paged(q, keys, values, table, lengths, backend="hopper")
    for _ in range(1000):
        assert torch.equal(first, tw.attention_paged(q, keys, values, table, lengths, backend="hopper"))
