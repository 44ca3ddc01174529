"""A model of the time of a step on many devices: compute rates, links, and how much communication is hidden.

A model, not a measurement: FLOPs over a measured rate, bytes over a link, and the schedule of each method in time.
docs/distributed.md compares it with runs of 1, 2 and 4 CPU ranks.

    >>> million = Scenario(world=64, seqlen=1 << 20, causal=True)
    >>> predict(million, Rates.of_device("h200"), LINKS["infiniband-ndr"]).forward.efficiency > 0.9
    True
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilewise import device as devices
from tilewise.errors import InvalidProblem
from tilewise.masks import Band
from tilewise.units import counted, format_bytes, format_count, format_seconds

GB, TERA = 1e9, 1e12
METHODS = ("ring", "all_gather", "heads")
# Numbers of devices for which a forecast reports the ring.
NEIGHBOURS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Link(NamedTuple):
    """A link to a neighbour: nominal bytes per second, the share that large messages reach, seconds of latency."""

    name: str
    bandwidth: float
    share: float
    latency: float

    def seconds(self, size: float) -> float:
        """How long a message takes."""
        return self.latency + size / (self.bandwidth * self.share) if size > 0 else 0.0


# Nominal rates per device and direction are the vendors'. The share of 0.8 is an assumption for all of them: no such
# link was measured. "loopback" is gloo between two processes of one busy machine, measured (bench/results).
LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("nvlink3", 300 * GB, 0.8, 3e-6),
        Link("nvlink4", 450 * GB, 0.8, 3e-6),
        Link("nvlink5", 900 * GB, 0.8, 3e-6),
        Link("pcie4", 32 * GB, 0.8, 5e-6),
        Link("pcie5", 64 * GB, 0.8, 5e-6),
        Link("infiniband-hdr", 25 * GB, 0.8, 8e-6),
        Link("infiniband-ndr", 50 * GB, 0.8, 8e-6),
        Link("infiniband-xdr", 100 * GB, 0.8, 8e-6),
        Link("ethernet-25g", 3.125 * GB, 0.8, 30e-6),
        Link("ethernet-100g", 12.5 * GB, 0.8, 30e-6),
        Link("ethernet-400g", 50 * GB, 0.8, 20e-6),
        Link("loopback", 0.5 * GB, 1.0, 200e-6),
    )
}

# The links of a device type: within a node of that many devices, and between nodes.
NODES: dict[str, tuple[str, str, int]] = {
    "v100": ("pcie4", "infiniband-hdr", 8),
    "a100": ("nvlink3", "infiniband-hdr", 8),
    "rtx4090": ("pcie4", "ethernet-100g", 8),
    "l40s": ("pcie4", "ethernet-100g", 8),
    "h100": ("nvlink4", "infiniband-ndr", 8),
    "h200": ("nvlink4", "infiniband-ndr", 8),
    "b200": ("nvlink5", "infiniband-xdr", 8),
    "rtx5090": ("pcie5", "ethernet-100g", 8),
    "cpu": ("loopback", "ethernet-25g", 1024),
}

# Shares of the dense bf16 peak that the kernels reach on an H200 (causal, head_dim 128, 4096 tokens; bench/results).
# The same shares are assumed for other devices.
FORWARD_SHARE, BACKWARD_SHARE = 649 / 989, 545 / 989
# Host time of one ring step on a GPU (a launch, a merge and a transfer) where the GPU does not hide it.
LAUNCH_SECONDS = 30e-6
# What `method="auto"` assumes of a CPU rank, so that every rank assumes the same.
NOMINAL_CPU = 60e9


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of one rank: FLOPs per second forward and backward, bytes per second of memory, seconds per launch."""

    name: str
    forward: float
    backward: float
    bandwidth: float
    launch: float
    measured: bool

    @classmethod
    def of_device(cls, name: str, dtype: torch.dtype = torch.bfloat16) -> Rates:
        """A device of `tilewise.device.DEVICES` by its peak and the shares above; "cpu" by what `auto` assumes."""
        if name == "cpu":
            return cls("cpu", NOMINAL_CPU, NOMINAL_CPU, 10 * GB, 50e-6, measured=False)
        spec = devices.named(name)
        peak = spec.flops.get(dtype, spec.flops[torch.float32])
        own = name == "h200"
        return cls(spec.name, peak * FORWARD_SHARE, peak * BACKWARD_SHARE, spec.bandwidth, LAUNCH_SECONDS, measured=own)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A problem over `world` ranks; sizes of the whole sequence."""

    world: int
    seqlen: int
    batch: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    head_dim_v: int = 128
    itemsize: int = 2
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    sharding: str = "zigzag"

    @property
    def rows(self) -> int:
        """Tokens a rank holds."""
        return -(-self.seqlen // self.world)

    @property
    def kv_bytes(self) -> int:
        """One rank's keys and values."""
        return self.batch * self.rows * self.num_kv_heads * (self.head_dim + self.head_dim_v) * self.itemsize

    @property
    def kv_elements(self) -> int:
        """The same in elements."""
        return self.kv_bytes // self.itemsize

    @property
    def q_elements(self) -> int:
        """One rank's queries."""
        return self.batch * self.rows * self.num_heads * self.head_dim

    @property
    def out_elements(self) -> int:
        """One rank's results."""
        return self.batch * self.rows * self.num_heads * self.head_dim_v

    @property
    def head_groups(self) -> int:
        """Groups of K/V heads that are gathered one after another."""
        return math.ceil(self.num_kv_heads / max(1, self.num_kv_heads // self.world))

    def flops(self, products: float = 1) -> float:
        """FLOPs of the whole problem; `products` is 1 for the two products of the forward, 2.5 of the backward."""
        left, right = self.window
        right = 0 if self.causal else right
        pairs = Band(self.seqlen, self.seqlen, left, right).count_pairs()
        return products * 2.0 * pairs * self.batch * self.num_heads * (self.head_dim + self.head_dim_v)

    def busiest(self) -> float:
        """The busiest rank's work over the average: contiguous causal shards are uneven."""
        left, right = self.window
        if self.sharding == "zigzag" or not (self.causal or right == 0) or left is not None:
            return 1.0
        # The last rank sees everything: (world - 1/2) blocks, where the average is world / 2.
        return (self.world - 0.5) / (self.world / 2.0)

    def ring_steps(self) -> int:
        """Steps of the ring that have work: all, or with a window about as many as it reaches."""
        left, right = self.window
        if left is None or (right is None and not self.causal):
            return self.world
        reach = left + (0 if self.causal else right or 0)
        per_rank = 2 if self.sharding == "zigzag" else 1
        return min(self.world, 1 + per_rank * -(-reach * per_rank // max(1, self.rows)))


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of a forward or backward pass on one rank: total, computing, and waiting for the link.

    `hidden` is communication that overlaps with computing; `ideal` is the work over the ranks' rates alone.
    """

    seconds: float
    compute: float
    exposed: float
    hidden: float
    ideal: float

    @property
    def efficiency(self) -> float:
        """Share of the time that an ideal machine would take."""
        return self.ideal / self.seconds if self.seconds > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The cost of one method on every rank."""

    method: str
    scenario: Scenario
    link: Link
    forward: Pass
    backward: Pass
    memory_bytes: int

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward.seconds + self.backward.seconds


def predict(scenario: Scenario, rates: Rates, link: Link, method: str = "ring") -> Prediction:
    """Time and memory of one method over the slowest link of the ring."""
    if method not in METHODS:
        raise InvalidProblem("method", "one of " + ", ".join(METHODS), repr(method), "Name one of them.")
    passes = {"ring": _ring, "all_gather": _gather, "heads": _heads}[method]
    forward, backward = passes(scenario, rates, link, False), passes(scenario, rates, link, True)
    return Prediction(method, scenario, link, forward, backward, memory_bytes(scenario, method))


def compare(scenario: Scenario, rates: Rates, link: Link) -> list[Prediction]:
    """Every method that the problem allows, fastest first."""
    return sorted(_predictions(scenario, rates, link), key=lambda p: p.seconds)


def _predictions(scenario: Scenario, rates: Rates, link: Link) -> list[Prediction]:
    allowed = [m for m in METHODS if m != "heads" or scenario.num_heads >= scenario.world]
    return [predict(scenario, rates, link, method) for method in allowed]


def link_between(device: str, world: int, link: str | None = None) -> Link:
    """The slowest link of a ring over that many devices: within a node, or between nodes."""
    if link is not None:
        if link not in LINKS:
            raise InvalidProblem("link", "one of " + ", ".join(LINKS), repr(link), "Name a listed link.")
        return LINKS[link]
    inside, beyond, node = NODES.get(device, NODES["h100"])
    return LINKS[inside if world <= node else beyond]


def best_method(
    world: int, num_heads: int, num_kv_heads: int, rows: int, head_dim: int, *, causal: bool, device: str, itemsize: int
) -> str:
    """What `method="auto"` takes: the fastest by the model; the same on every rank."""
    if world == 1 or rows == 0:
        return "ring"
    scenario = Scenario(world, rows * world, 1, num_heads, num_kv_heads, head_dim, head_dim, itemsize, causal=causal)
    best, *others = _predictions(scenario, Rates.of_device(device), link_between(device, world))
    for other in others:  # torch.compile cannot trace min() over symbolic lengths
        if other.seconds < best.seconds:
            best = other
    return best.method


def _compute(scenario: Scenario, rates: Rates, backward: bool) -> tuple[float, float]:
    """Seconds of computing on the busiest rank, and on each if it were even."""
    ideal = scenario.flops(2.5) / rates.backward if backward else scenario.flops() / rates.forward
    return ideal / scenario.world * scenario.busiest(), ideal / scenario.world


def _ring(scenario: Scenario, rates: Rates, link: Link, backward: bool) -> Pass:
    """Every step computes with one block while the next arrives. A backward sends the gradients home at the end."""
    steps = scenario.ring_steps()
    compute, ideal = _compute(scenario, rates, backward)
    accumulators = scenario.kv_elements * 4
    # The merge reads and writes fp32 rows and reads the partial ones. The backward adds dq, dk and dv likewise.
    merged = scenario.out_elements * (8 + scenario.itemsize)
    if backward:
        merged = (scenario.q_elements + scenario.kv_elements) * (8 + scenario.itemsize)
    busy = compute / steps + merged / rates.bandwidth + rates.launch
    transfer = link.seconds(scenario.kv_bytes + (accumulators if backward else 0))
    waits = (steps - 1) * max(0.0, transfer - busy)
    if backward and steps > 1:
        waits += link.seconds(accumulators)
    return Pass(steps * busy + waits, steps * busy, waits, (steps - 1) * min(transfer, busy), ideal)


def _gather(scenario: Scenario, rates: Rates, link: Link, backward: bool) -> Pass:
    """Groups of heads: the first gather is waited for, the others overlap. Gradients are sent home after each group."""
    compute, ideal = _compute(scenario, rates, backward)
    groups = scenario.head_groups
    others = scenario.world - 1
    transfer = link.seconds(others * scenario.kv_bytes / groups)
    home = link.seconds(others * scenario.kv_elements * 4 / groups) if backward else 0.0
    gathered = scenario.world * scenario.kv_bytes / groups
    busy = compute / groups + 2 * gathered / rates.bandwidth + rates.launch
    waits = transfer + (groups - 1) * max(0.0, transfer - busy) + groups * home
    return Pass(groups * busy + waits, groups * busy, waits, (groups - 1) * min(transfer, busy), ideal)


def _heads(scenario: Scenario, rates: Rates, link: Link, backward: bool) -> Pass:
    """All-to-alls before and after one plain call; nothing overlaps. A K/V head goes to every rank that needs it."""
    compute, ideal = _compute(scenario, rates, backward)
    uneven = math.ceil(scenario.num_heads / scenario.world) * scenario.world / scenario.num_heads
    copies = max(1.0, scenario.world / scenario.num_kv_heads)
    crossing = (scenario.world - 1) / scenario.world
    elements = scenario.q_elements + scenario.out_elements + scenario.kv_elements * copies
    waits = link.seconds(elements * scenario.itemsize * crossing) if scenario.world > 1 else 0.0
    busy = compute * uneven / scenario.busiest() + rates.launch
    return Pass(busy + waits, busy, waits, 0.0, ideal)


def memory_bytes(scenario: Scenario, method: str) -> int:
    """Peak memory of a rank in a training step's attention: shards, results, buffers and gradients."""
    size = scenario.itemsize
    lse = scenario.batch * scenario.rows * scenario.num_heads * 4
    shards = (scenario.q_elements + scenario.out_elements) * size + scenario.kv_bytes + lse
    # dout, and the returned gradients.
    gradients = (scenario.out_elements + scenario.q_elements) * size + scenario.kv_bytes
    if method == "heads":
        copies = max(1, -(-scenario.world // scenario.num_kv_heads))
        whole = (scenario.q_elements + scenario.out_elements) * size + scenario.kv_bytes * copies + lse
        return shards + gradients + 2 * whole
    if method == "ring":
        # Two alternating blocks of keys; their fp32 gradients: local, arriving and leaving; dq in fp32.
        buffers = (
            2 * scenario.kv_bytes + 3 * 4 * scenario.kv_elements if scenario.world > 1 else 4 * scenario.kv_elements
        )
        return shards + gradients + buffers + 4 * scenario.q_elements
    groups = scenario.head_groups
    gathered = scenario.world * scenario.kv_elements / groups
    return int(shards + gradients + gathered * (3 * size + 3 * 4) + 4 * (scenario.q_elements + scenario.kv_elements))


@dataclass(frozen=True, slots=True)
class Forecast:
    """Every method for one problem, fastest first, and the ring over other numbers of devices."""

    scenario: Scenario
    rates: Rates
    link: Link
    predictions: tuple[Prediction, ...]
    ring: tuple[Prediction, ...]

    @property
    def best(self) -> Prediction:
        """The fastest method."""
        return self.predictions[0]

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain dicts, lists, strings and numbers."""
        plain = dataclasses.asdict(self)
        plain["link"] = self.link._asdict()
        for group, source in (("predictions", self.predictions), ("ring", self.ring)):
            for entry, prediction in zip(plain[group], source, strict=True):
                entry["link"] = prediction.link.name
                for name in ("forward", "backward"):
                    entry[name]["efficiency"] = getattr(prediction, name).efficiency
        plain["best"] = self.best.method
        return plain

    def __str__(self) -> str:
        s, rates, link = self.scenario, self.rates, self.link
        measured = "measured" if rates.measured else "assumed from its peak"
        reach = f"{format_count(link.bandwidth * link.share, 'B/s')} of {format_count(link.bandwidth, 'B/s')}"
        compute, gradients = (format_count(rate, "FLOP/s") for rate in (rates.forward, rates.backward))
        lines = [
            f"problem   {counted(s.seqlen, 'token')} x {s.batch} over {counted(s.world, 'rank')}, "
            f"{counted(s.rows, 'token')} each, "
            f"{'causal' if s.causal else 'full'}, {s.sharding}",
            f"          {counted(s.num_heads, 'head')}, {counted(s.num_kv_heads, 'K/V head')}, head_dim {s.head_dim}, "
            f"{counted(s.itemsize, 'byte')}",
            f"compute   {rates.name}: forward {compute}, backward {gradients} ({measured})",
            f"link      {link.name}: {reach}, {format_seconds(link.latency)} latency; the slowest on the way",
            "",
            "method       pass       time      exposed   hidden    of ideal  memory a rank",
        ]
        for p in self.predictions:
            for name, one in (("forward", p.forward), ("backward", p.backward)):
                memory = format_bytes(p.memory_bytes) if name == "forward" else ""
                times = "".join(f"{format_seconds(t):<10}" for t in (one.seconds, one.exposed, one.hidden))
                lines.append(f"{p.method:<13}{name:<11}{times}{one.efficiency:<10.1%}{memory}".rstrip())
        if s.num_heads < s.world:
            lines.append(f"heads        not possible: {counted(s.num_heads, 'head')}, {counted(s.world, 'rank')}")
        thrifty = min(self.predictions, key=lambda p: p.memory_bytes)
        least = "" if thrifty is self.best else f"; {thrifty.method} takes least memory"
        seconds = format_seconds(self.best.seconds)
        lines += ["", f"better    {self.best.method}, {seconds} forward and backward{least}", ""]
        lines.append("ring over     time      of ideal  memory a rank   link")
        for p in self.ring:
            ideal = (p.forward.ideal + p.backward.ideal) / p.seconds
            times = f"{p.scenario.world:<14}{format_seconds(p.seconds):<10}{ideal:<10.1%}"
            lines.append(f"{times}{format_bytes(p.memory_bytes):<16}{p.link.name}")
        return "\n".join(lines)


def forecast(scenario: Scenario, *, device: str = "h200", link: str | None = None, dtype: torch.dtype) -> Forecast:
    """The prediction for a device of `tilewise.device.DEVICES` (or "cpu") and a link of `LINKS` (None: its own)."""
    rates = Rates.of_device(device, dtype)
    between = link_between(device, scenario.world, link)
    ring = tuple(
        predict(dataclasses.replace(scenario, world=world), rates, link_between(device, world, link))
        for world in NEIGHBOURS
        if world <= max(1, scenario.seqlen)
    )
    return Forecast(scenario, rates, between, tuple(compare(scenario, rates, between)), ring)
