"""`tilewise explain --context-parallel`: the scaling model for one problem, as text and numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.distributed.scaling import Link, Prediction, Rates, Scenario, compare, link_between, predict
from tilewise.units import format_bytes, format_count, format_seconds

__all__ = ["Forecast", "forecast"]

# Other numbers of devices that are reported for the ring.
NEIGHBOURS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


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
        return "\n".join((*self._heading(), "", *self._methods(), "", self._verdict(), "", *self._ring_lines()))

    def _heading(self) -> list[str]:
        s = self.scenario
        mask = "causal" if s.causal else "full"
        measured = "measured" if self.rates.measured else "assumed from its peak"
        most = self.link.bandwidth
        reach = f"{format_count(most * self.link.share, 'B/s')} of {format_count(most, 'B/s')}"
        return [
            f"problem   {s.seqlen} tokens x {s.batch} over {s.world} ranks, {s.rows} tokens each, {mask}, {s.sharding}",
            f"          {s.num_heads} heads, {s.num_kv_heads} K/V heads, head_dim {s.head_dim}, {s.itemsize} bytes",
            f"compute   {self.rates.name}: forward {format_count(self.rates.forward, 'FLOP/s')}, backward "
            f"{format_count(self.rates.backward, 'FLOP/s')} ({measured})",
            f"link      {self.link.name}: {reach}, {format_seconds(self.link.latency)} latency; the slowest on the way",
        ]

    def _methods(self) -> list[str]:
        lines = ["method       pass       time      exposed   hidden    of ideal  memory a rank"]
        for p in self.predictions:
            for name, one in (("forward", p.forward), ("backward", p.backward)):
                memory = format_bytes(p.memory_bytes) if name == "forward" else ""
                times = "".join(f"{format_seconds(t):<10}" for t in (one.seconds, one.exposed, one.hidden))
                lines.append(f"{p.method:<13}{name:<11}{times}{one.efficiency:<10.1%}{memory}".rstrip())
        if self.scenario.num_heads < self.scenario.world:
            lines.append(f"heads        not possible: {self.scenario.num_heads} heads, {self.scenario.world} ranks")
        return lines

    def _verdict(self) -> str:
        fastest = self.best
        by_memory = min(self.predictions, key=lambda p: p.memory_bytes)
        thrift = "" if by_memory is fastest else f"; {by_memory.method} takes least memory"
        return f"better    {fastest.method}, {format_seconds(fastest.seconds)} forward and backward{thrift}"

    def _ring_lines(self) -> list[str]:
        lines = ["ring over     time      of ideal  memory a rank   link"]
        for p in self.ring:
            ideal = (p.forward.ideal + p.backward.ideal) / p.seconds
            lines.append(
                f"{p.scenario.world:<14}{format_seconds(p.seconds):<10}{ideal:<10.1%}"
                f"{format_bytes(p.memory_bytes):<16}{p.link.name}"
            )
        return lines


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
