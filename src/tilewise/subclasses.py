"""Which subclasses of torch.Tensor are accepted as plain tensors, and which are refused.

Kernels read memory, and a subclass may give it another meaning: `torch.nn.attention.bias.CausalBias` never fills its
own, a DTensor holds only one part of its value. Accepted are

- torch.Tensor and torch.nn.Parameter;
- torch's own stand-ins for them: fake and functional tensors of its compilers, and the result of a collective that may
  still be running;
- subclasses that only add attributes and methods. They define neither `__torch_dispatch__` nor `__torch_function__`
  (or disable the latter, as Parameter does), so torch's own functions read their memory too.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewise.errors import InvalidProblem

# Where torch defines the classes that stand in for plain tensors. A class that was never imported has no instances.
STAND_INS = (
    ("torch._subclasses.fake_tensor", "FakeTensor"),
    ("torch._subclasses.functional_tensor", "FunctionalTensor"),
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
)
# Advice for the torch classes that users are likely to pass.
FIXES = {
    "CausalBias": "causal=True is causal_lower_right; sdpa.scaled_dot_product_attention takes either as attn_mask.",
    "DTensor": "Pass its local part, tensor.to_local().",
    "MaskedTensor": "Pass tensor.get_data(), and which keys to attend to as mask=.",
}
ANY_FIX = "Convert it; where its own memory holds the numbers, tensor.as_subclass(torch.Tensor) is that without a copy."


def check_class(name: str, tensor: Tensor) -> None:
    """Refuse the argument `name` if its class may give its memory another meaning than torch.Tensor does."""
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter and not _is_known(kind):
        fix = next((FIXES[base.__name__] for base in kind.__mro__ if base.__name__ in FIXES), ANY_FIX)
        raise InvalidProblem(name, "a torch.Tensor, or a subclass with no operations of its own", kind.__name__, fix)


def _is_known(kind: type[Tensor]) -> bool:
    if any(kind is getattr(sys.modules.get(module), name, None) for module, name in STAND_INS):
        return True
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    function = kind.__torch_function__
    is_default = getattr(function, "__func__", None) is Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    return is_default or function is torch._C._disabled_torch_function_impl  # noqa: SLF001
