"""What the integrations say where the library they are for is not installed."""

import sys

import pytest

from tilewise.integrations import sglang, transformers


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # which makes its import fail
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tilewise\[transformers\]'"):
        transformers.register()


def test_without_sglang_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ModuleNotFoundError, match="pip install sglang"):
        sglang.register()
