"""Options of the conformance suite; they must be known before tests/backends is collected."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest tests/backends --backend triton --device cuda`: see tests/backends/conftest.py."""
    group = parser.getgroup("tilewise conformance")
    group.addoption("--backend", action="append", default=[], help="judge this backend (repeatable; default: all here)")
    group.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where the inputs live")
    group.addoption("--size", default="full", choices=("full", "small"), help="small: for the Triton interpreter")
