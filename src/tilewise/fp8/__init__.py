"""FP8: q, k and v in e4m3 with their scales, and the rotation that makes outliers harmless. See docs/fp8.md.

>>> from tilewise import fp8
>>> q, k = (fp8.quantize(x, granularity="block", rotation=True) for x in (q, k))
>>> out = tilewise.attention(q, k, fp8.quantize(v))
"""

import importlib
from typing import TYPE_CHECKING, Any

from tilewise.fp8.container import BLOCK, E4M3_MAX, Fp8Tensor

if TYPE_CHECKING:
    from tilewise.fp8.quantisation import quantize, quantize_pages
    from tilewise.fp8.rotation import rotate

__all__ = ["BLOCK", "E4M3_MAX", "Fp8Tensor", "quantize", "quantize_pages", "rotate"]

# Names that are loaded on first use, and their modules: every call knows containers, few make them.
_LAZY = {"quantize": "quantisation", "quantize_pages": "quantisation", "rotate": "rotation"}


def __dir__() -> list[str]:
    return [*globals(), *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        # Stored, because the lookup takes longer than the host work before a launch.
        found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
