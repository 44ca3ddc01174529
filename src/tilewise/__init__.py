"""tilewise: exact, IO-aware attention on CPUs and GPUs behind one contract.

import tilewise as tw
out = tw.attention(q, k, v, causal=True)
print(tw.explain(q, k, v, causal=True))
"""

from tilewise.api import attention, attention_paged, attention_varlen, backends, merge
from tilewise.errors import InvalidProblem, OutOfPages, TilewiseError, Unsupported
from tilewise.plan import Plan, explain

__version__ = "0.1.0"

__all__ = [
    "InvalidProblem",
    "OutOfPages",
    "Plan",
    "TilewiseError",
    "Unsupported",
    "attention",
    "attention_paged",
    "attention_varlen",
    "backends",
    "explain",
    "merge",
]
