"""Whether a model under tilewise computes what it computes under eager attention.

Distances are relative to the largest entry of a tensor. A result may be three times as far from eager attention's as
PyTorch's fused attention (sdpa) is, as eager attention in float64 is, or as eager attention moves when each weight
moves by one rounding, whichever is most; a few roundings of the result itself come on top. A gradient that jumps with a
rounding (a ReLU at zero, a sample between two pixels) excuses itself, not the others. Where sdpa and eager attention do
not compute the same, a model of transformers is at fault; then either result is accepted, and nothing between them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.inputs import Batch, batches
from zoo.tiny import NotBuilt

__all__ = ["FACTOR", "LIKE_SDPA", "ROUNDING", "ROUNDINGS", "Reference", "Wrong", "Yardstick", "build", "distance",
           "reset_random", "run"]  # fmt: skip

ROUNDING = torch.finfo(torch.float32).eps
FACTOR, ROUNDINGS = 3.0, 16
NUDGES = 8  # most that are tried; the first suffices nearly always

# Apart from each other by more than this, two implementations compute different things.
DISAGREES = 1e-3
LIKE_SDPA = "as sdpa, not as eager"

# PyTorch's fused attention with the masks of eager attention, which also models take that do not know sdpa.
FUSED = "zoo_fused"

Tensors = dict[str, Tensor]
Results = tuple[Tensors, Tensors]


class Wrong(Exception):
    """A result differs from eager attention's by more than rounding explains."""


def build(cls: Any, config: Any, implementation: str | None, seed: int = 0) -> Any:
    """A model in float32 whose random weights make attention matter."""
    reset_random()
    model = cls._from_config(copy.deepcopy(config), attn_implementation=implementation).float().eval()
    generator = torch.Generator(device="cpu").manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                _randomise(parameter, generator)
    return model


def _randomise(parameter: Tensor, generator: torch.Generator) -> None:
    """Matrices enlarge what they multiply a little; vectors (norms, biases) move away from where they start.

    Convolutions do not enlarge: without norms behind them, their results would drive a softmax to a single key.
    """
    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.dim() >= 2 and parameter.numel():
        gain = 1.5 if parameter.dim() == 2 else 1.0
        parameter.copy_(noise * min(1.0, gain * parameter[0].numel() ** -0.5))
    else:
        parameter.add_(noise * 0.2)


def reset_random() -> None:
    """Models that draw numbers in forward draw the same ones each time."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed visits every kind of device
    np.random.seed(0)
    random.seed(0)


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating point tensors of an output, but not those of caches, and not the weights of attention."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key != "past_key_values" and not key.endswith("attentions"):
                yield from flatten(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from flatten(part, f"{name}[{index}]")


def run(model: Any, batch: Batch, gradients: bool = True) -> Results:
    """Outputs at valid positions, and the gradient of a fixed weighting of them for each parameter."""
    reset_random()
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(gradients):
        found = {name: _valid(part, batch) for name, part in flatten(model(**batch.arguments))}
    outputs = {name: part.detach().clone() for name, part in found.items()}
    if not gradients:
        return outputs, {}
    generator = torch.Generator(device="cpu").manual_seed(5)
    terms = [
        (part * torch.randn(part.shape, generator=generator, dtype=torch.float32)).sum()
        / (part.detach().abs().max() + 1e-6)
        / part.numel() ** 0.5
        for part in found.values()
        if part.requires_grad and torch.isfinite(part).all()
    ]
    if terms:
        torch.stack(terms).sum().backward()
    return outputs, {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def _valid(part: Tensor, batch: Batch) -> Tensor:
    valid = batch.valid
    if valid is None or part.dim() < 2 or part.shape[0] != valid.shape[0]:
        return part
    if batch.shortened and part.dim() == 3 and 1 < part.shape[1] < valid.shape[1]:
        # A position of the output stands for several of the input, and sees a few beyond.
        ends = (torch.arange(1, part.shape[1] + 1) * (valid.shape[1] / part.shape[1])).long()
        return part[valid[:, (ends + 2 * valid.shape[1] // part.shape[1]).clamp_max(valid.shape[1] - 1)]]
    if part.shape[1] == valid.shape[1] + 1:
        # A token of the model's own, before the others or behind them.
        own = torch.ones_like(valid[:, :1])
        return part[torch.cat([own, valid], 1) & torch.cat([valid, own], 1)]
    return part[valid] if part.shape[1] == valid.shape[1] else part


def distance(ours: Tensors, theirs: Tensors, floor: float = 0.0) -> dict[str, float]:
    """By tensor: the largest difference, relative to the largest entry (or to `floor`)."""
    if ours.keys() != theirs.keys():
        raise Wrong(f"outputs {sorted(ours)} instead of {sorted(theirs)}")
    found = {}
    for name, right in theirs.items():
        mine = ours[name]
        if mine.shape != right.shape:
            raise Wrong(f"{name} has shape {tuple(mine.shape)} instead of {tuple(right.shape)}")
        if right.numel() == 0:
            continue
        same = (mine == right) | (mine.isnan() & right.isnan())
        gap = torch.where(same, 0.0, (mine - right).abs())
        scale = max(float(right[right.isfinite()].abs().max()) if right.isfinite().any() else 0.0, floor, 1e-30)
        found[name] = float(gap.nan_to_num(nan=float("inf")).max()) / scale
    return found


class Reference:
    """Results of one model under one implementation, and how far from them rounding may lead."""

    def __init__(
        self, cls: Any, config: Any, implementation: str | None, inputs: list[Batch], gradients: bool = True
    ) -> None:
        self.cls, self.config, self.implementation = cls, config, implementation
        self.batches, self.gradients = inputs, gradients
        self.model = build(cls, config, implementation)
        self.results = self._run(self.model)
        self.samples: list[dict[str, Results]] = []
        self._finer = self._more_samples()

    def distance(self, case: str, which: int, mine: Tensors) -> dict[str, float]:
        """From these outputs (`which` is 0) or gradients (1)."""
        return distance(mine, self.results[case][which], self._floor(case, which))

    def allowed(self, case: str, which: int) -> dict[str, float]:
        """How far each output or gradient may be off."""
        most: dict[str, float] = dict.fromkeys(self.results[case][which], 0.0)
        common = 0.0
        for sample in self.samples:
            with contextlib.suppress(Wrong, KeyError):
                if self.agrees(case, sample):
                    far = self.distance(case, which, sample[case][which])
                    most |= {name: max(value, most[name]) for name, value in far.items()}
                    common = max([common, *(value for value in far.values() if value < DISAGREES)])
        return {name: FACTOR * max(value, common) + ROUNDINGS * ROUNDING for name, value in most.items()}

    def agrees(self, case: str, others: dict[str, Results]) -> bool:
        """Whether these are results of the same computation."""
        return max(self.distance(case, 0, others[case][0]).values(), default=0.0) < DISAGREES

    def refine(self) -> bool:
        """Learn more of how far rounding leads; False where nothing is left to be learned."""
        sample = next(self._finer, None)
        if sample is not None:
            self.samples.append(sample)
        return sample is not None

    def _floor(self, case: str, which: int) -> float:
        """Below a hundredth of the largest gradient, rounding of the large ones is all there is."""
        tensors = self.results[case][which].values()
        return 0.01 * max((float(t.abs().max()) for t in tensors if t.numel()), default=0.0) if which else 0.0

    def _run(self, model: Any, dtype: torch.dtype = torch.float32) -> dict[str, Results]:
        return {batch.case: run(model, batch.to(dtype), self.gradients) for batch in self.batches}

    def _more_samples(self) -> Iterator[dict[str, Results]]:
        yield self._run(self.nudged(0))
        with contextlib.suppress(Exception):  # not every model runs in float64
            yield self._exact()
        for seed in range(1, NUDGES):
            yield self._run(self.nudged(seed))

    def nudged(self, seed: int) -> Any:
        """The model with each weight moved by one rounding."""
        model = build(self.cls, self.config, self.implementation)
        generator = torch.Generator(device="cpu").manual_seed(9 + seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.mul_(1 + ROUNDING * torch.randn(parameter.shape, generator=generator).sign())
        return model

    def _exact(self) -> dict[str, Results]:
        model = build(self.cls, self.config, self.implementation).double()
        torch.set_default_dtype(torch.float64)
        try:
            found = self._run(model, torch.float64)
        finally:
            torch.set_default_dtype(torch.float32)
        return {case: (_single(outputs), _single(gradients)) for case, (outputs, gradients) in found.items()}


def _single(tensors: Tensors) -> Tensors:
    return {name: tensor.float() for name, tensor in tensors.items()}


class Yardstick:
    """What eager attention computes, and sdpa where that is something else.

    A model that does not take sdpa as a whole may have parts that do, and use it unless told otherwise.
    """

    def __init__(self, cls: Any, config: Any) -> None:
        self.cls, self.config = cls, config
        self.batches = batches(build(cls, config, "eager"))  # not the one below: some models remember what they saw
        try:
            self.eager = Reference(cls, config, "eager", self.batches)
        except (RuntimeError, AssertionError):  # some models have no gradient outside of training
            self.eager = Reference(cls, config, "eager", self.batches, gradients=False)
        self.gradients = self.eager.gradients
        self.kept: dict[Any, Any] = {}
        for first in self.batches[:1]:
            again = run(self.eager.model, first, gradients=False)[0]
            once = self.eager.results[first.case][0]
            if max(distance({n: again[n] for n in once}, once).values(), default=0.0) > ROUNDING * ROUNDINGS:
                raise NotBuilt("eager attention does not repeat its result")
        self.sdpa = self._reference("sdpa") or self._reference(None)
        fused = self._reference(_register_fused()) if self.sdpa is None or self.sdpa.implementation is None else None
        self.eager.samples += [other.results for other in (self.sdpa, fused) if other is not None]
        self.eager.refine()

    def _reference(self, implementation: str | None) -> Reference | None:
        with contextlib.suppress(Exception):
            return Reference(self.cls, self.config, implementation, self.batches, self.gradients)
        return None

    @property
    def references(self) -> list[tuple[Reference, str]]:
        """What a result may be, and what to say of it."""
        return [(self.eager, "right"), *([(self.sdpa, LIKE_SDPA)] if self.sdpa is not None else [])]

    def once(self, key: Any, compute: Any) -> Any:
        """What a reference says, computed for the first implementation and kept for the next."""
        if key not in self.kept:
            self.kept[key] = compute()
        return self.kept[key]

    def compare(self, case: str, which: int, mine: Tensors) -> str:
        """What result it is: "right", or sdpa's where that is another one. Raises Wrong if it is neither."""
        said = self._match(case, which, mine)
        while said is None:
            learned = [reference.refine() for reference, _ in self.references]
            if not any(learned):
                break
            said = self._match(case, which, mine)
        if said is not None:
            return said
        off, allowed = self.eager.distance(case, which, mine), self.eager.allowed(case, which)
        worst = max(off, key=lambda name: off[name] / allowed[name])
        what = "the gradient of " if which else ""
        raise Wrong(f"{what}{worst} is off by {off[worst]:.1e} where rounding explains {allowed[worst]:.1e}")

    def _match(self, case: str, which: int, mine: Tensors) -> str | None:
        for reference, said in self.references:
            if reference is self.eager or not self.same(case):
                with contextlib.suppress(Wrong):
                    off, allowed = reference.distance(case, which, mine), reference.allowed(case, which)
                    if all(value <= allowed[name] for name, value in off.items()):
                        return said
        return None

    def same(self, case: str) -> bool:
        """Whether sdpa computes what eager attention computes."""
        with contextlib.suppress(Wrong):
            return self.sdpa is None or self.eager.agrees(case, self.sdpa.results)
        return False


@functools.cache
def _register_fused() -> str:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import eager_mask

    def forward(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **(kwargs | {"is_causal": False}))  # the mask says it

    AttentionInterface.register(FUSED, forward)
    AttentionMaskInterface.register(FUSED, eager_mask)
    return FUSED
