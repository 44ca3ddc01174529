"""Rank 1 dies in the middle of a ring; rank 0 must see an error, not wait for ever."""

from __future__ import annotations

import datetime as dt
import os
import time

import torch
import torch.distributed as dist

from tilewise.distributed import PeerFailure, context_parallel_attention

SECONDS = 15


def main() -> None:
    """One good call, then rank 1 is gone."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=SECONDS))
    q = torch.ones(1, 2, 8, 16)
    context_parallel_attention(q, q, q, causal=True, method="ring")
    if dist.get_rank() == 1:
        time.sleep(1)
        os._exit(0)
    start = time.monotonic()
    try:
        for _ in range(10**6):
            context_parallel_attention(q, q, q, causal=True, method="ring")
    except PeerFailure as error:
        assert time.monotonic() - start < SECONDS + 5
        print(f"rank 0 saw {type(error).__name__}: {error}", flush=True)  # noqa: T201
    os._exit(0)


if __name__ == "__main__":
    main()
