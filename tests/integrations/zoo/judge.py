"""Whether a model under tilewise computes what it computes under eager attention.

Distances are relative to the largest entry of a tensor. A result may be three times as far from eager attention's as
PyTorch's fused attention (sdpa) is, or as eager attention moves when each weight moves by one rounding, whichever is
more; a few roundings of the result itself come on top. Where sdpa and eager attention do not compute the same, a model
of transformers is at fault; then either result is accepted, and nothing between them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.inputs import Batch, batches
from zoo.tiny import NotBuilt, first_line

__all__ = ["Finding", "judge"]

ROUNDING = torch.finfo(torch.float32).eps
FACTOR, ROUNDINGS = 3.0, 16
NEW_TOKENS = 5

# Apart from eager attention by more than this, sdpa has computed something else.
DISAGREES = 1e-3
LIKE_SDPA = "as sdpa, not as eager"
SKIPPED = "-"

Tensors = dict[str, Tensor]
Results = tuple[Tensors, Tensors]


@dataclasses.dataclass
class Finding:
    """`outcome`: right, untouched (right, and tilewise is never called), refused, partly (refused), wrong or unclear.

    `cases`: what was seen of build, switch, plain, left, right, image, video, audio, future, hidden, generate, weights.
    """

    outcome: str
    cases: dict[str, str] = dataclasses.field(default_factory=dict)
    reason: str = ""
    calls: int = 0


class Wrong(Exception):
    """A result differs from eager attention's by more than rounding explains."""


def build(cls: Any, config: Any, implementation: str, seed: int = 0) -> Any:
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
    """Matrices keep the size of what they multiply; vectors (norms, biases) move away from where they start."""
    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.dim() >= 2 and parameter.numel():
        parameter.copy_(noise * min(1.0, 1.5 * parameter[0].numel() ** -0.5))
    else:
        parameter.add_(noise * 0.2)


def reset_random() -> None:
    """Models that draw numbers in forward draw the same ones each time."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed visits every kind of device
    np.random.seed(0)
    random.seed(0)


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating point tensors of an output, but not those of caches."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key not in (
                "past_key_values",
                "attentions",
                "encoder_attentions",
                "decoder_attentions",
                "cross_attentions",
            ):
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
        (part * torch.randn(part.shape, generator=generator)).sum()
        / (part.detach().abs().max() + 1e-6)
        / part.numel() ** 0.5
        for part in found.values()
        if part.requires_grad and torch.isfinite(part).all()
    ]
    if terms:
        torch.stack(terms).sum().backward()
    return outputs, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _valid(part: Tensor, batch: Batch) -> Tensor:
    valid = batch.valid
    if valid is None or part.dim() < 2 or part.shape[0] != valid.shape[0]:
        return part
    if batch.shortened and part.dim() == 3 and 1 < part.shape[1] < valid.shape[1]:
        # A position of the output stands for several of the input, and sees a few beyond.
        ends = (torch.arange(1, part.shape[1] + 1) * (valid.shape[1] / part.shape[1])).long()
        return part[valid[:, (ends + 2 * valid.shape[1] // part.shape[1]).clamp_max(valid.shape[1] - 1)]]
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


class Yardstick:
    """Eager results of one model, and how far from them rounding may lead."""

    def __init__(self, cls: Any, config: Any) -> None:
        self.cls, self.config = cls, config
        self.eager = build(cls, config, "eager")
        self.batches = batches(self.eager)
        self.kept: dict[Any, Any] = {}
        self.sdpa: Any = None
        self.gradients = True
        try:
            self.results = {batch.case: run(self.eager, batch) for batch in self.batches}
        except (RuntimeError, AssertionError):  # some models have no gradient outside of training
            self.gradients = False
            self.results = {batch.case: run(self.eager, batch, gradients=False) for batch in self.batches}
        for first in self.batches[:1]:
            again = run(self.eager, first, gradients=False)
            if max(distance(again[0], self.results[first.case][0]).values(), default=0.0) > ROUNDING * ROUNDINGS:
                raise NotBuilt("eager attention does not repeat its result")
        nudged, self.fused = self._nudged(), self._fused()
        self.allowed = {
            case: tuple(self._allow(case, [nudged, self.fused], which) for which in (0, 1)) for case in self.results
        }

    def once(self, key: Any, compute: Any) -> Any:
        """What eager attention says, computed for the first implementation and kept for the next."""
        if key not in self.kept:
            self.kept[key] = compute()
        return self.kept[key]

    def floor(self, tensors: Tensors, which: int) -> float:
        """Below a hundredth of the largest gradient, rounding of the large ones is all there is."""
        return 0.01 * max((float(t.abs().max()) for t in tensors.values() if t.numel()), default=0.0) if which else 0.0

    def _allow(self, case: str, others: list[dict[str, Results]], which: int) -> float:
        right = self.results[case][which]
        far = 0.0
        for other in others:
            if case in other:
                with contextlib.suppress(Wrong):
                    apart = max(distance(other[case][which], right, self.floor(right, which)).values(), default=0.0)
                    far = max(far, apart if apart < DISAGREES else 0.0)
        return FACTOR * far + ROUNDINGS * ROUNDING

    def _nudged(self) -> dict[str, Results]:
        model = build(self.cls, self.config, "eager")
        generator = torch.Generator(device="cpu").manual_seed(9)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.mul_(1 + ROUNDING * torch.randn(parameter.shape, generator=generator).sign())
        return {batch.case: run(model, batch, self.gradients) for batch in self.batches}

    def _fused(self) -> dict[str, Results]:
        """Nothing where the model does not take sdpa."""
        found = {}
        with contextlib.suppress(Exception):
            self.sdpa = build(self.cls, self.config, "sdpa")
            for batch in self.batches:
                found[batch.case] = run(self.sdpa, batch, self.gradients)
        return found

    def compare(self, case: str, which: int, mine: Tensors) -> str:
        """What result it is: "right", or sdpa's where that is another one. Raises Wrong if it is neither."""
        allowed = self.allowed[case][which]
        names: dict[str, float] = {}
        for theirs, said in ((self.results, "right"), (self.fused, LIKE_SDPA)):
            if case in theirs:
                far = distance(mine, theirs[case][which], self.floor(theirs[case][which], which))
                if all(value <= allowed for value in far.values()):
                    return said
                names = names or far
        worst = max(names, key=lambda name: names[name])
        what = "the gradient of " if which else ""
        raise Wrong(f"{what}{worst} is off by {names[worst]:.1e} where rounding explains {allowed:.1e}")


def judge(cls: Any, config: Any, name: str, calls: Callable[[], int], yardstick: Yardstick) -> Finding:
    """Everything one implementation has to get right for one model class."""
    before = calls()
    cases = {"switch": _case(lambda: _switched(cls, config, name, yardstick))}
    try:
        model = build(cls, config, name)
    except Exception as error:
        cases["build"] = _said(error)
    else:
        for batch in yardstick.batches:
            cases[batch.case] = _case(functools.partial(_outputs, model, yardstick, batch))
        for case, check in CHECKS.items() if yardstick.batches else ():
            cases[case] = _case(functools.partial(check, model, yardstick))
    cases = {case: said for case, said in cases.items() if said != SKIPPED}
    count = calls() - before
    return Finding(_sum_up(cases, count), cases, _reason(cases), count)


def _case(check: Callable[[], str]) -> str:
    try:
        return check()
    except Wrong as error:
        return f"wrong: {error}"
    except Exception as error:
        return _said(error)


def _sum_up(cases: dict[str, str], calls: int) -> str:
    kinds = {case: said.split(":")[0] for case, said in cases.items()}
    for kind in ("wrong", "unclear"):
        if kind in kinds.values():
            return kind
    core = [kind for case, kind in kinds.items() if case not in ("weights", "switch")]
    if core and all(kind == "refused" for kind in core):
        return "refused"
    if "refused" in core:
        return "partly"
    return "right" if calls else "untouched"


def _reason(cases: dict[str, str]) -> str:
    for kind in ("wrong", "unclear", "refused"):
        for case, said in cases.items():
            if said.startswith(kind) and not (kind == "refused" and case in ("weights", "switch")):
                return f"{case}: {said}"
    return ""


def _said(error: Exception) -> str:
    """Refused, by a sentence that says what is not supported, or unclear: an error that leaves the user alone."""
    import tilewise as tw

    text = " ".join(str(error).split())
    clear = isinstance(error, tw.TilewiseError) or (
        isinstance(error, (ValueError, NotImplementedError, ImportError))
        and any(part in text.lower() for part in ("attn_implementation", "attention implementation", "flash attention"))
    )
    return f"{'refused' if clear else 'unclear'}: {type(error).__name__}: {text[:600]}"


def _switched(cls: Any, config: Any, name: str, yardstick: Yardstick) -> str:
    """`set_attn_implementation` on a model that exists. Some models keep their attention then, which is right too."""
    model = build(cls, config, "eager")
    model.set_attn_implementation(name)
    for batch in yardstick.batches[:1]:
        return yardstick.compare(batch.case, 0, run(model, batch, gradients=False)[0])
    return "right"


def _outputs(model: Any, yardstick: Yardstick, batch: Batch) -> str:
    results = run(model, batch, yardstick.gradients)
    said = {yardstick.compare(batch.case, which, results[which]) for which in (0, 1)}
    return "right" if said == {"right"} else LIKE_SDPA


def _moved(model: Any, batch: Batch, other: Batch, keep: Tensor) -> float:
    """How far outputs at `keep` move, relative to the largest entry."""
    far = 0.0
    both = [run(model, dataclasses.replace(b, valid=keep), gradients=False)[0] for b in (batch, other)]
    for name, part in both[0].items():
        if part.dim() and part.shape[0] == int(keep.sum()):
            far = max(far, distance({name: both[1][name]}, {name: part})[name])
    return far


def _independent(model: Any, yardstick: Yardstick, what: str, batch: Batch, changed: Tensor, keep: Tensor) -> str:
    """Outputs at `keep` do not depend on words at `changed`, where eager attention's do not."""
    other = batch.changed(changed)
    limit = ROUNDING * ROUNDINGS
    eager = yardstick.once((what, batch.case), lambda: _moved(yardstick.eager, batch, other, keep))
    if eager > limit:
        return SKIPPED
    far = _moved(model, batch, other, keep)
    if far > limit + FACTOR * eager:
        if yardstick.sdpa is not None and _moved(yardstick.sdpa, batch, other, keep) > limit:
            return LIKE_SDPA
        raise Wrong(f"outputs move by {far:.1e} with words that they must not see")
    return "right"


def _future(model: Any, yardstick: Yardstick) -> str:
    batch = yardstick.batches[0]
    if "input_ids" not in batch.arguments:
        return SKIPPED
    ids = batch.arguments["input_ids"]
    late = (torch.arange(ids.shape[1]) >= ids.shape[1] // 2).expand(ids.shape[:2])
    return _independent(model, yardstick, "future", batch, late, ~late)


def _hidden(model: Any, yardstick: Yardstick) -> str:
    padded = [batch for batch in yardstick.batches if batch.valid is not None]
    padded = [batch for batch in padded if batch.case in ("left", "right") and not batch.shortened]
    said = [_independent(model, yardstick, "hidden", b, ~b.valid, b.valid) for b in padded if b.valid is not None]
    return next((part for part in (LIKE_SDPA, "right") if part in said), SKIPPED)


def _generate(model: Any, yardstick: Yardstick) -> str:
    if not model.can_generate():
        return SKIPPED
    for batch in yardstick.batches:
        if batch.case == "right":
            continue
        expected = functools.partial(_generated_or_why_not, yardstick.eager, batch)
        found = yardstick.once(("generate", batch.case), expected)
        if isinstance(found, str):
            return found
        right, logits = found
        mine, my_logits = _generated(model, batch)
        limit = 4 * yardstick.allowed[batch.case][0]
        for step, (ours, theirs) in enumerate(zip(my_logits, logits, strict=False)):
            far = distance({"logits": ours}, {"logits": theirs})["logits"]
            if far > limit:
                where = f"{batch.case}, step {step}"
                raise Wrong(f"{where}: logits are off by {far:.1e} where rounding explains {limit:.1e}")
            if not torch.equal(ours.argmax(-1), theirs.argmax(-1)):
                break
        else:
            if mine.shape != right.shape or not torch.equal(mine, right):
                raise Wrong(f"{batch.case}: other tokens")
    return "right"


def _generated_or_why_not(model: Any, batch: Batch) -> Any:
    try:
        return _generated(model, batch)
    except Exception as error:
        return f"not run with eager attention: {first_line(error)}"


def _generated(model: Any, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    reset_random()
    arguments = {name: value for name, value in batch.arguments.items() if name != "decoder_input_ids"}
    if model.config.is_encoder_decoder:
        arguments["decoder_start_token_id"] = 1
    out = model.generate(
        **arguments, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return out.sequences, list(out.logits or ())


def _weights(model: Any, yardstick: Yardstick) -> str:
    """`output_attentions=True` returns weights or refuses; it does not leave them out."""
    batch = yardstick.batches[0]
    asked = dataclasses.replace(batch, arguments=batch.arguments | {"output_attentions": True})
    right = yardstick.once("weights", lambda: _attentions_or_none(yardstick.eager, asked))
    if not right:
        return SKIPPED
    reset_random()
    with torch.no_grad():
        mine = _attentions(model(**asked.arguments))
    if len(mine) < len(right):
        raise Wrong(f"output_attentions=True returns {len(mine)} of {len(right)} matrices of weights")
    return "right"


def _attentions_or_none(model: Any, batch: Batch) -> list[Tensor]:
    reset_random()
    try:
        with torch.no_grad():
            return _attentions(model(**batch.arguments))
    except Exception:
        return []


def _attentions(output: Any) -> list[Tensor]:
    if not isinstance(output, Mapping):
        return []
    found: list[Tensor] = []
    for key, value in output.items():
        if key.endswith("attentions") and isinstance(value, (list, tuple)):
            found += [part for part in value if isinstance(part, Tensor)]
    return found


CHECKS = {"future": _future, "hidden": _hidden, "generate": _generate, "weights": _weights}
