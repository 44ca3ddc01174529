"""Tables of cases of which the ordinary run takes some, and the exhaustive one the rest."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import pytest


def sampled(cases: dict[str, Any], ordinary: Container[str]) -> list[Any]:
    """The cases as parameters with their names; a tuple is several parameters."""
    return [
        pytest.param(*(case if type(case) is tuple else (case,)), id=name, marks=marks_of(name in ordinary))
        for name, case in cases.items()
    ]


def marks_of(is_ordinary: bool) -> tuple[Any, ...]:
    """The marks of a parameter."""
    return () if is_ordinary else (pytest.mark.exhaustive,)
