"""What the page may ask: a JSON object becomes a validated `Question`, a question a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from tilewise.device import DEVICES
from tilewise.errors import InvalidProblem
from tilewise.plan import Plan, explain

__all__ = ["DTYPES", "HEAD_DIMS", "LIMITS", "PHASES", "Question", "plan_of", "question_of"]

Phase = Literal["prefill", "train", "decode"]

PHASES: tuple[Phase, ...] = ("prefill", "train", "decode")
DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
# From the shortest sequence that fills a tile, to what takes well under a second to plan.
LIMITS: dict[str, tuple[int, int]] = {
    "batch": (1, 4096),
    "context": (128, 1 << 22),
    "heads": (1, 512),
    "kv_heads": (1, 512),
    "window": (0, 1 << 22),
}


@dataclass(frozen=True, slots=True)
class Question:
    """One layer's attention: `context` tokens of each sequence, `window` keys before its own that a query sees."""

    batch: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    device: str
    phase: Phase
    causal: bool
    window: int | None


def question_of(asked: object) -> Question:
    """The question a JSON value asks; rejects what is missing, unknown, of another type or beyond the limits."""
    if not isinstance(asked, dict):
        raise InvalidProblem("question", "a JSON object", type(asked).__name__, "Send the fields of the form.")
    names = {item.name for item in fields(Question)}
    for name in sorted(names ^ asked.keys()):
        what = "a value" if name in names else "no such field"
        raise InvalidProblem(
            str(name)[:40], what, "none" if name in names else "one", "Send exactly the form's fields."
        )
    for name in names:
        expected, accepts = _expectation(name)
        if not accepts(asked[name]):
            raise InvalidProblem(name, expected, repr(asked[name])[:60], "Change it in the form.")
    return Question(**asked)


def _expectation(name: str) -> tuple[str, Callable[[Any], bool]]:
    """What a field may be, in words and as a test."""
    choices: dict[str, tuple[Any, ...]] = {
        "head_dim": HEAD_DIMS,
        "dtype": DTYPES,
        "device": ("cpu", *DEVICES),
        "phase": PHASES,
        "causal": (True, False),
    }
    if name in choices:
        allowed = choices[name]
        # 1 equals True: the type counts too.
        return "one of " + ", ".join(
            map(str, allowed)
        ), lambda value: type(value) is type(allowed[0]) and value in allowed
    low, high = LIMITS[name]
    none = name == "window"
    words = f"a whole number from {low} to {high}" + (", or null" if none else "")
    return words, lambda value: (none and value is None) or (type(value) is int and low <= value <= high)


def plan_of(question: Question) -> Plan:
    """What `tilewise.explain` says to it; computes nothing and allocates nothing."""
    dtype: torch.dtype = getattr(torch, question.dtype)
    queries = 1 if question.phase == "decode" else question.context
    batch, dim = question.batch, question.head_dim
    q = torch.empty(batch, question.heads, queries, dim, dtype=dtype, device="meta")
    kv = torch.empty(batch, question.kv_heads, question.context, dim, dtype=dtype, device="meta")
    return explain(
        q.requires_grad_(question.phase == "train"),
        kv,
        kv,
        causal=question.causal,
        window=None if question.window is None else (question.window, None),
        device=question.device,
    )
