"""What runs under compute-sanitizer: small calls of every kind of kernel, and one kernel that is broken on purpose.

Every tensor has an allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that a byte too far is seen; inputs are
made on the host, so that hardly any kernel but ours runs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import tilewise as tw
from tilewise.kv import append_rotated, rotary_table


@triton.jit
def out_of_bounds_kernel(target, count):
    """Write far past the end of `target`."""
    tl.store(target + count + (1 << 20), 1.0)


def normal(*shape: int) -> Tensor:
    """Standard normal bf16 numbers that take part in autograd."""
    return torch.randn(shape, dtype=torch.float32).to(torch.bfloat16).cuda().requires_grad_()


def backward(out: Tensor | tuple[Tensor, Tensor], *inputs: Tensor) -> None:
    """Gradients of all inputs."""
    assert isinstance(out, Tensor)
    torch.autograd.grad(out, inputs, torch.ones(out.shape, dtype=out.dtype).cuda())


def dense(head_dim: int, **flags: Any) -> None:
    """Forward and backward of ragged tiles and shared heads."""
    q, k, v = normal(1, 2, 77, head_dim), normal(1, 1, 139, head_dim), normal(1, 1, 139, head_dim)
    backward(tw.attention(q, k, v, backend="triton", **flags), q, k, v)


def many_tiles(**flags: Any) -> None:
    """Enough query tiles for the forward with warps of their own for loading, where there is one."""
    q, k, v = (normal(8, heads, 100, 128).detach() for heads in (16, 4, 4))
    tw.attention(q, k, v, backend="triton", **flags)


def packed() -> None:
    """Mixed lengths, an empty sequence and rows that belong to none."""
    q, k, v = (normal(240, 2, 64) for _ in range(3))
    cu_seqlens = torch.tensor([0, 130, 130, 199, 206], dtype=torch.int32).cuda()
    lengths = (cu_seqlens, cu_seqlens)
    backward(
        tw.attention_varlen(q, k, v, *lengths, max_seqlen_q=130, max_seqlen_k=130, causal=True, backend="triton"),
        q,
        k,
        v,
    )


def paged() -> None:
    """Split decoding from pages."""
    q, k, v = normal(2, 4, 64).detach(), normal(24, 16, 2, 64).detach(), normal(24, 16, 2, 64).detach()
    for pages, lengths in ((10, (150, 33)), (40, (640, 300))):
        table = torch.randint(0, 24, (2, pages), dtype=torch.int32).cuda()
        tw.attention_paged(q, k, v, table, torch.tensor(lengths, dtype=torch.int32).cuda(), backend="triton")


def appended() -> None:
    """Rows that are normalised, rotated and written into bf16 and e4m3 pages, some without a slot; q in place."""
    q, k, v = normal(37, 4, 64).detach(), normal(37, 2, 64).detach(), normal(37, 2, 40).detach()
    table, positions = rotary_table(50, 48, device="cuda"), torch.randint(0, 50, (37,)).cuda()
    slots = torch.cat((torch.arange(5, 40), torch.tensor([-1, 63]))).cuda()
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        pages = [torch.zeros(4, 16, 2, dim).to(dtype).cuda() for dim in (64, 40)]
        scales = [torch.full((4, 2), 1.0).cuda() for _ in pages]
        grows: dict[str, Any] = {} if dtype == torch.bfloat16 else {"k_scale": scales[0], "v_scale": scales[1]}
        append_rotated(q, k, v, pages[0], pages[1], slots, positions, table, norm_eps=1e-6, out=q, **grows)


def of_hopper() -> None:
    """Few and small: the sanitiser makes a kernel some hundred times slower."""
    for head_dim, deterministic in ((128, False), (128, True), (256, False)):
        q, k, v = (normal(1, 2, 130, head_dim) for _ in range(3))
        backward(tw.attention(q, k, v, causal=True, backend="hopper", deterministic=deterministic), q, k, v)


def main(which: str) -> None:
    """Run everything, some of it, or the broken kernel."""
    torch.manual_seed(0)
    if which == "broken":
        out_of_bounds_kernel[(1,)](torch.zeros(64).cuda(), 64)
    elif which == "many_tiles":
        many_tiles()
        many_tiles(causal=True)
    elif which == "hopper":
        of_hopper()
    else:
        dense(64, causal=True)
        dense(128, window=(40, 3), softcap=20.0)
        packed()
        paged()
        appended()
    torch.cuda.synchronize()
    print("finished", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
