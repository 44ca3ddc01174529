"""Which operators of torch a call reaches, and torch's own SDPA on the kernels of tilewise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.nn import attention as torch_attention
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.integrations import sdpa

needs_registry = pytest.mark.skipif(
    not hasattr(torch_attention, "register_flash_attention_impl"), reason="this torch has no registry"
)


@contextmanager
def activated() -> Iterator[None]:
    """The kernels behind torch's own SDPA are those of tilewise."""
    if not hasattr(torch_attention, "register_flash_attention_impl"):
        pytest.skip("this torch has no registry")
    sdpa.register()
    torch_attention.activate_flash_attention_impl("tilewise")
    try:
        assert torch_attention.current_flash_attention_impl() == "tilewise"
        yield
    finally:
        torch_attention.restore_flash_attention_impl()


class Operators(TorchDispatchMode):
    """Keeps the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
