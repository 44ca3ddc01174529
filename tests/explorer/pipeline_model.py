"""FlashAttention-3's inner loop as a timeline: a producer that loads tiles, and consumers that multiply and softmax.

A model with three units that each do one thing at a time: the copy engine, the tensor cores, and the special function
units that compute exponentials. Per tile of keys, a consumer (a warpgroup) computes its scores on the tensor cores, its
softmax on the special function units, and its values on the tensor cores. A stage of the ring of tiles is free again
when every consumer has used it.

With ping-pong, whoever is ready takes a unit: one consumer's softmax runs beside the other's products. Without it, the
consumers go in lockstep: all scores, then all softmaxes, then all values, and the tensor cores wait in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tilewise.errors import InvalidProblem

__all__ = ["Pipeline", "Span", "busy_share", "timeline"]

Task = Literal["load_k", "load_v", "scores", "softmax", "values"]
UNITS: dict[Task, str] = {
    "load_k": "copy",
    "load_v": "copy",
    "scores": "tensor",
    "softmax": "special",
    "values": "tensor",
}
CONSUMER_TASKS: tuple[Task, ...] = ("scores", "softmax", "values")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Tiles of keys, consumers, stages of the ring, and the cycles of a load, a product and a softmax of one tile.

    The defaults are an H100's in fp16: a consumer has 64 rows, a tile 128 keys, d = 128. A product is 2 x 64 x 128 x
    128 FLOP at 4,096 a cycle, a softmax 64 x 128 exponentials at 16 a cycle, a load 32 KiB at 64 bytes a cycle.
    """

    tiles: int = 4
    consumers: int = 2
    stages: int = 2
    load: int = 512
    product: int = 512
    softmax: int = 512
    ping_pong: bool = True


class Span(NamedTuple):
    """One task, from cycle `start` to `stop`; a load has no consumer."""

    task: Task
    consumer: int | None
    tile: int
    start: int
    stop: int


def timeline(pipe: Pipeline) -> tuple[Span, ...]:
    """Every task in the order in which they start: earliest first, then who waited longest, then the lower number.

    >>> lockstep = timeline(Pipeline(ping_pong=False))
    >>> round(busy_share(lockstep), 2), round(busy_share(timeline(Pipeline())), 2)
    (0.67, 0.94)
    """
    for name in ("tiles", "consumers", "stages", "load", "product", "softmax"):
        if getattr(pipe, name) < 1:
            raise InvalidProblem(name, "at least 1", getattr(pipe, name), "Change the pipeline.")
    cycles = {"copy": pipe.load, "tensor": pipe.product, "special": pipe.softmax}
    free = dict.fromkeys(cycles, 0)
    ends: dict[tuple[Task, int | None, int], int] = {}
    spans: list[Span] = []
    todo = [_loads(pipe), *(_products(pipe, consumer) for consumer in range(pipe.consumers))]
    while any(todo):
        waiting = []
        for index, queue in enumerate(todo):
            ready = _ready(pipe, queue[0], ends) if queue else None
            if ready is not None:
                waiting.append((max(ready, free[UNITS[queue[0][0]]]), ready, index))
        start, _, index = min(waiting)
        task, consumer, tile = todo[index].pop(0)
        unit = UNITS[task]
        free[unit] = start + cycles[unit]
        ends[task, consumer, tile] = free[unit]
        spans.append(Span(task, consumer, tile, start, free[unit]))
    return tuple(spans)


def busy_share(spans: tuple[Span, ...]) -> float:
    """How much of the time from the first product to the last the tensor cores work."""
    products = [span for span in spans if UNITS[span.task] == "tensor"]
    if not products:
        return 0.0
    window = max(span.stop for span in products) - min(span.start for span in products)
    return sum(span.stop - span.start for span in products) / window


def _loads(pipe: Pipeline) -> list[tuple[Task, int | None, int]]:
    kinds: tuple[Task, Task] = ("load_k", "load_v")
    return [(kind, None, tile) for tile in range(pipe.tiles) for kind in kinds]


def _products(pipe: Pipeline, consumer: int) -> list[tuple[Task, int | None, int]]:
    return [(task, consumer, tile) for tile in range(pipe.tiles) for task in CONSUMER_TASKS]


def _ready(
    pipe: Pipeline, item: tuple[Task, int | None, int], ends: dict[tuple[Task, int | None, int], int]
) -> int | None:
    """When everything it needs has ended; None while something of it has not been scheduled."""
    needed = _needs(pipe, *item)
    return max((ends[need] for need in needed), default=0) if all(need in ends for need in needed) else None


def _needs(pipe: Pipeline, task: Task, consumer: int | None, tile: int) -> list[tuple[Task, int | None, int]]:
    everybody: tuple[int | None, ...] = tuple(range(pipe.consumers))
    if consumer is None:
        user: Task = "scores" if task == "load_k" else "values"
        return [(user, one, tile - pipe.stages) for one in everybody] if tile >= pipe.stages else []
    before: tuple[Task, int] | None = {
        "scores": ("values", tile - 1) if tile else None,
        "softmax": ("scores", tile),
        "values": ("softmax", tile),
    }[task]
    who = (consumer,) if pipe.ping_pong else everybody
    needs = [(before[0], one, before[1]) for one in who] if before else []
    if task != "softmax":
        needs.append(("load_k" if task == "scores" else "load_v", None, tile))
    return needs
