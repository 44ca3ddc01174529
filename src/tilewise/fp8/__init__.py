"""FP8: q, k and v in e4m3 with their scales, and the rotation that makes outliers harmless. See docs/fp8.md.

>>> from tilewise import fp8
>>> q, k = (fp8.quantize(x, granularity="block", rotation=True) for x in (q, k))
>>> out = tilewise.attention(q, k, fp8.quantize(v))
"""

from tilewise.fp8.container import BLOCK, E4M3_MAX, Fp8Tensor
from tilewise.fp8.quantisation import quantize, quantize_pages
from tilewise.fp8.rotation import rotate

__all__ = ["BLOCK", "E4M3_MAX", "Fp8Tensor", "quantize", "quantize_pages", "rotate"]
