"""Which backends are judged, on which device, by which cases: --backend NAME (repeatable), --device, --size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest

from tilewise import dispatch
from tilewise.backends import NAMES
from tilewise.testing import Case
from tilewise.testing.generation import capped

# What `--size small` leaves: an interpreted kernel takes seconds for 65 x 65 scores.
SMALL_SEQLEN, SMALL_HEAD_DIM = 65, 64


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with a `backend` argument runs once per backend that can run here, cases outermost (one oracle each)."""
    if "backend" not in metafunc.fixturenames:
        return
    names = _backends(metafunc.config)
    cases = getattr(metafunc.function, "cases", None)
    if cases is None:
        metafunc.parametrize("backend", names)
        return
    small = metafunc.config.getoption("size") == "small"
    chosen = _small(cases()) if small else cases()
    pairs = [pytest.param(case, name, id=f"{name}-{case.id}") for case in chosen for name in names]
    metafunc.parametrize(("case", "backend"), pairs)


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Where the inputs live."""
    return str(pytestconfig.getoption("device"))


def _backends(config: pytest.Config) -> list[str]:
    named: list[str] = config.getoption("backend")
    return named or [name for name in NAMES if dispatch.load(name).unavailable() is None]


def _small(cases: Iterable[Case]) -> list[Case]:
    """Cut the cases down; those that become equal are one."""
    return list({dataclasses.replace(c): c for c in (capped(c, SMALL_SEQLEN, SMALL_HEAD_DIM) for c in cases)}.values())
