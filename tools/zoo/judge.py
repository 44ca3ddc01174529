"""Whether a model under tilewise computes what it computes under eager attention, or refuses with a reason."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zoo.inputs import Batch
from zoo.tiny import first_line
from zoo.yardstick import (
    FACTOR,
    LIKE_SDPA,
    ROUNDING,
    ROUNDINGS,
    Reference,
    Wrong,
    Yardstick,
    build,
    distance,
    reset_random,
    run,
)

__all__ = ["Finding", "judge"]

NEW_TOKENS = 5
SKIPPED = "-"


@dataclasses.dataclass
class Finding:
    """`outcome`: right, untouched (right, and tilewise is never called), refused, partly (refused), wrong or unclear.

    `cases`: what was seen of build, switch, plain, left, right, image, video, audio, future, hidden, generate, weights.
    """

    outcome: str
    cases: dict[str, str] = dataclasses.field(default_factory=dict)
    reason: str = ""
    calls: int = 0


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
    eager = yardstick.once((what, batch.case), lambda: _moved(yardstick.eager.model, batch, other, keep))
    if eager > limit:
        return SKIPPED
    far = _moved(model, batch, other, keep)
    if far > limit + FACTOR * eager:
        if yardstick.sdpa is not None and _moved(yardstick.sdpa.model, batch, other, keep) > limit:
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
    said = set()
    for batch in yardstick.batches:
        if batch.case == "right":
            continue
        found = _generated_by(yardstick, yardstick.eager, batch)
        if isinstance(found, str):
            return found
        mine = _generated(model, batch)
        if not found[1] and not torch.equal(found[0], _generated(yardstick.eager.nudged(0), batch)[0]):
            return "without logits, and eager attention says something else after a rounding"
        try:
            _compare_generated(yardstick, batch, mine, found)
            said.add("right")
        except Wrong:
            if yardstick.sdpa is None or isinstance(found := _generated_by(yardstick, yardstick.sdpa, batch), str):
                raise
            _compare_generated(yardstick, batch, mine, found)
            said.add(LIKE_SDPA)
    return "right" if said == {"right"} else LIKE_SDPA


Generated = tuple[Tensor, list[Tensor]]


def _generated_by(yardstick: Yardstick, reference: Reference, batch: Batch) -> Generated | str:
    key = ("generate", reference.implementation, batch.case)
    found: Generated | str = yardstick.once(key, lambda: _generated_or_why_not(reference.model, batch))
    return found


def _compare_generated(yardstick: Yardstick, batch: Batch, mine: Generated, theirs: Generated) -> None:
    limit = 4 * max(yardstick.eager.allowed(batch.case, 0).values())
    for step, (ours, right) in enumerate(zip(mine[1], theirs[1], strict=False)):
        far = distance({"logits": ours}, {"logits": right})["logits"]
        if far > limit:
            where = f"{batch.case}, step {step}"
            raise Wrong(f"{where}: logits are off by {far:.1e} where rounding explains {limit:.1e}")
        if not torch.equal(ours.argmax(-1), right.argmax(-1)):
            return  # a tie: from here on the two say different things
    if mine[0].shape != theirs[0].shape or not torch.equal(mine[0], theirs[0]):
        raise Wrong(f"{batch.case}: other tokens")


def _generated_or_why_not(model: Any, batch: Batch) -> Any:
    try:
        return _generated(model, batch)
    except Exception as error:
        return f"not run with eager attention: {first_line(error)}"


def _generated(model: Any, batch: Batch) -> Generated:
    reset_random()
    arguments = {
        name: value.clone() if isinstance(value, Tensor) else value  # some models write into their inputs
        for name, value in batch.arguments.items() if name != "decoder_input_ids"
    }  # fmt: skip
    if model.config.is_encoder_decoder:
        arguments["decoder_start_token_id"] = 1
    for part in model.modules():
        if getattr(part, "generation_config", None) is not None:
            part.generation_config.pad_token_id = 0
    out = model.generate(
        **arguments, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    logits = getattr(out, "logits", None)
    return out.sequences, [] if logits is None else list(logits)


def _weights(model: Any, yardstick: Yardstick) -> str:
    """`output_attentions=True` returns weights or refuses; it does not leave them out."""
    batch = yardstick.batches[0]
    asked = dataclasses.replace(batch, arguments=batch.arguments | {"output_attentions": True})
    right = yardstick.once("weights", lambda: _attentions_or_none(yardstick.eager.model, asked))
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
