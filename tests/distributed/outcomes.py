"""What the checks of a group of gloo ranks come to."""

from __future__ import annotations

import datetime as dt
import traceback
from collections.abc import Callable, Iterator

import torch.distributed as dist


def outcomes_of(checks: Iterator[tuple[str, Callable[[], None]]], place: str, rank: int, world: int) -> dict[str, str]:
    """Join the group and run the checks: "ok", or the failures of all ranks, by the name of a check."""
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60), init_method=place, rank=rank, world_size=world)
    outcomes: dict[str, str] = {}
    for name, check in checks:
        failure = ""
        try:
            check()
        except Exception:  # every failure is a line in the report, and peers must go on too
            failure = f"rank {rank}: {traceback.format_exc()}"
        everywhere: list[str] = [""] * world
        dist.all_gather_object(everywhere, failure)
        outcomes[name] = "\n".join(filter(None, everywhere)) or "ok"
    return outcomes
