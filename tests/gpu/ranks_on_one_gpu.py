"""What two ranks on one GPU run under torchrun: gloo carries what NCCL refuses to carry between ranks of one device."""

from __future__ import annotations

import datetime as dt
from typing import Any

import torch
import torch.distributed as dist

import tilewise as tw
from tilewise.distributed import context_parallel_attention, shard, unshard

SEQLEN = 1000


def main() -> None:
    """Every method against the same call on one device, in bf16, with gradients."""
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=120))
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, SEQLEN, 64), (1, 2, SEQLEN, 64), (1, 2, SEQLEN, 64), (1, 4, SEQLEN, 64))
    q, k, v, dout = (torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in shapes)
    slopes, sinks = torch.rand(4, generator=generator).cuda() / 8, torch.zeros(4, device="cuda")
    problems: list[dict[str, Any]] = [{"causal": True}, {"causal": True, "window": (100, None)}]
    problems += [{"causal": True, "alibi_slopes": slopes, "sinks": sinks}, {"alibi_slopes": slopes, "softcap": 20.0}]
    for method in ("ring", "all_gather", "heads"):
        for flags in problems:
            compare(q, k, v, dout, method, flags)
    if dist.get_rank() == 0:
        print(f"{3 * len(problems)} calls agree", flush=True)  # noqa: T201
    dist.barrier()
    dist.destroy_process_group()


def compare(q: Any, k: Any, v: Any, dout: Any, method: Any, flags: dict[str, Any]) -> None:
    """Out and gradients of both ways within a few bf16 roundings of each other."""
    whole = [t.detach().requires_grad_() for t in (q, k, v)]
    out = tw.attention(whole[0], whole[1], whole[2], **flags)
    expected = (out, *torch.autograd.grad(out, whole, dout))
    local = [shard(t, pad=0).requires_grad_() for t in (q, k, v)]
    part = context_parallel_attention(local[0], local[1], local[2], seqlen=SEQLEN, method=method, **flags)
    parts = (part, *torch.autograd.grad(part, local, shard(dout, pad=0)))
    for mine, theirs in zip(parts, expected, strict=True):
        got = unshard(mine, seqlen=SEQLEN)
        scale = float(theirs.float().abs().max())
        torch.testing.assert_close(got.float(), theirs.float(), atol=2**-6 * scale, rtol=0.0)


if __name__ == "__main__":
    main()
