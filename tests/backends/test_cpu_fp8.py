"""e4m3 operands in the CPU kernels: the bits of the dequantised tensors' attention, and no copy of them."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import fp8
from tilewise.fp8 import Fp8Tensor

E4M3 = torch.float8_e4m3fn
# Lengths of packed sequences, with an empty one.
LENGTHS = (300, 0, 41)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def equal(ours: tuple[Tensor, Tensor], plain: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b.to(a.dtype)) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("rows", "dims"), [(1, (128, 64)), (3, (40, 33)), (50, (64, 64)), (150, (33, 80))])
def test_dense_operands_of_any_granularity(rows: int, dims: tuple[int, int], layout: str) -> None:
    """Decoding, rows that are split over keys, and whole blocks, whose scales begin and end within tiles."""
    shapes = ((2, 4, rows, dims[0]), (2, 2, 1300, dims[0]), (2, 2, 1300, dims[1]))
    tensors = [normal(*shape, seed=n) for n, shape in enumerate(shapes)]
    if layout == "bshd":
        tensors = [t.transpose(1, 2).contiguous() for t in tensors]
    flags: Any = {"layout": layout, "causal": True, "backend": "cpu", "return_lse": True}
    odd: dict[str, Any] = {"granularity": "block", "block": 50}
    choices: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"granularity": "tensor"}, odd), ({"granularity": "block"}, {"granularity": "head"}),
    ]  # fmt: skip
    for k_choice, v_choice in choices:
        k, v = (
            fp8.quantize(t, layout=layout, **choice)  # type: ignore[arg-type]
            for t, choice in zip(tensors[1:], (k_choice, v_choice), strict=True)
        )
        q = fp8.quantize(tensors[0], layout=layout, **v_choice)  # type: ignore[arg-type]
        plain = k.dequantize(), v.dequantize()
        assert equal(tw.attention(tensors[0], k, v, **flags), tw.attention(tensors[0], *plain, **flags))
        assert equal(tw.attention(q, k, v, **flags), tw.attention(q.dequantize(), *plain, **flags))


@pytest.mark.parametrize("granularity", ["tensor", "head", "block"])
def test_packed_operands(granularity: Any) -> None:
    bounds = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    q, k, v = (normal(int(bounds[-1]) + 5, heads, 48, seed=seed) for seed, heads in enumerate((6, 2, 2)))
    k8, v8 = (fp8.quantize(t, granularity=granularity, cu_seqlens=bounds) for t in (k, v))
    q8 = fp8.quantize(q, granularity=granularity, cu_seqlens=bounds)
    flags: Any = {"window": (200, 0), "backend": "cpu", "return_lse": True}
    plain_q, plain_k, plain_v = (t.dequantize(bounds) for t in (q8, k8, v8))
    ours = tw.attention_varlen(q8, k8, v8, bounds, bounds, **flags)
    assert equal(ours, tw.attention_varlen(plain_q, plain_k, plain_v, bounds, bounds, **flags))
    ours = tw.attention_varlen(q, k8, v8, bounds, bounds, **flags)
    assert equal(ours, tw.attention_varlen(q, plain_k, plain_v, bounds, bounds, **flags))


def pages(num_pages: int, page_size: int, dim: int, seed: int) -> Fp8Tensor:
    """Every code that is a number, with scales of any mantissa."""
    make = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (num_pages, page_size, 2, dim), generator=make, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x01
    scale = torch.rand(num_pages, 2, 1, generator=make) * 0.02 + 1e-4
    return Fp8Tensor(codes.view(E4M3), scale, "page", "paged")


@pytest.mark.parametrize(("page_size", "dim"), [(1, 64), (16, 128), (24, 40), (64, 33), (256, 64)])
@pytest.mark.parametrize("rows", [1, 20])
def test_pages_and_what_nobody_may_read(page_size: int, dim: int, rows: int) -> None:
    lengths = torch.tensor([700, 0, 1150], dtype=torch.int32)
    width = -(-1150 // page_size)
    k, v = (pages(3 * width + 1, page_size, dim, seed) for seed in (0, 1))
    table = torch.randperm(3 * width, generator=torch.Generator().manual_seed(2)).to(torch.int32).view(3, width)
    q = normal(3 * rows, 6, dim, seed=3)
    starts = None if rows == 1 else torch.arange(0, 3 * rows + 1, rows, dtype=torch.int32)
    flags: Any = {"cu_seqlens_q": starts, "causal": True, "backend": "cpu", "return_lse": True}
    plain = tw.attention_paged(q, k.dequantize(), v.dequantize(), table, lengths, **flags)
    used = -(-lengths // page_size)
    read = torch.cat([row[:count] for row, count in zip(table.long(), used, strict=True)])
    unread = torch.ones(len(k.data), dtype=torch.bool).index_fill_(0, read, value=False)
    for tensor in (k, v):
        tensor.data.view(torch.uint8)[unread] = 0x7F
        tensor.scale[unread] = torch.nan
        for row, length, count in zip(table.long(), lengths, used, strict=True):
            if length % page_size:
                tensor.data.view(torch.uint8)[row[count - 1], int(length) % page_size :] = 0xFF
    assert equal(tw.attention_paged(q, k, v, table, lengths, **flags), plain)


def test_nan_in_a_key_or_value_is_seen() -> None:
    k, v = (pages(4, 16, 64, seed) for seed in (0, 1))
    table, lengths = torch.arange(4, dtype=torch.int32)[None], torch.tensor([64], dtype=torch.int32)
    v.data.view(torch.uint8)[2, 3, 1, 5] = 0xFF
    out = tw.attention_paged(normal(1, 4, 64, seed=2), k, v, table, lengths, backend="cpu")
    assert out.isnan().nonzero().tolist() == [[0, 2, 5], [0, 3, 5]]


@pytest.mark.slow
def test_decoding_copies_no_pages() -> None:
    """32 MiB of codes, which would be 128 in fp32; in a process of its own, as memory is measured by its peak."""
    code = """
    import resource, torch, tilewise as tw
    from tilewise.fp8 import Fp8Tensor
    codes = torch.zeros(1024, 128, 2, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    pages = Fp8Tensor(codes, torch.ones(1024, 2, 1), "page", "paged")
    q, table = torch.zeros(1, 4, 128), torch.arange(1024, dtype=torch.int32)[None]
    def peak_after(keys):
        tw.attention_paged(q, pages, pages, table, torch.tensor([keys], dtype=torch.int32), backend="cpu")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(peak_after(600), peak_after(1024 * 128))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after - before < 8 * 1024, "KiB beyond the inputs"


def test_explain_says_how_codes_are_read() -> None:
    k, v = (fp8.quantize(normal(1, 2, 64, 32, seed=n)) for n in range(2))
    assert "in registers" in str(tw.explain(normal(1, 2, 64, 32, seed=2), k, v, backend="cpu"))
