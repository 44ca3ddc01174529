"""What the integrations say where the library they are for is not installed."""

import sys

import pytest

from tilewise.integrations.transformers import register


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # which makes its import fail
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tilewise\[transformers\]'"):
        register()
