"""Compiling a kernel for exactly what its configuration says, from arguments or from their types.

Triton's own launch path specialises on integers that are 1 or multiples of 16, and for the elements of a tuple it does
so whatever the decorator says: a kernel compiled for one problem would be wrong for the next. Here nothing is
specialised on but constants, dtypes and the alignment of pointers that are always aligned, so one compiled kernel
serves every size, and what runs is what the offline tests compiled.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["compile_for", "compile_kernel", "signature_of"]

TYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
}


def compile_kernel(
    kernel: Any, signature: dict[str, Any], constants: dict[str, Any], divisible: tuple[str, ...], target: Any = None
) -> Any:
    """The compiled kernel; a None in the signature is an argument that is not there, no target means this device."""
    names = kernel.arg_names
    absent = {name: None for name, kind in signature.items() if kind is None}
    nested = {
        (names.index(name), i): None
        for name, kind in signature.items() if isinstance(kind, tuple) for i, k in enumerate(kind) if k is None
    }  # fmt: skip
    fixed = constants | absent
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return triton.compile(
        source(
            fn=kernel,
            signature={name: "constexpr" if name in fixed else signature[name] for name in names},
            constexprs={(names.index(name),): value for name, value in fixed.items()} | nested,
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
        ),
        target=target,
        options={"num_warps": 4},
    )


def compile_for(kernel: Any, args: tuple[Any, ...]) -> Any:
    """The kernel compiled for this device and for arguments like these."""
    signature, constants = signature_of(kernel, args)
    aligned = tuple(
        p.name
        for p, arg in zip(kernel.params, args, strict=True)
        if isinstance(arg, Tensor) and not p.do_not_specialize_on_alignment
    )
    return compile_kernel(kernel, signature, constants, aligned)


def signature_of(kernel: Any, args: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The types of a kernel's arguments, and the constants among them."""
    named = {p.name: (p.is_constexpr, arg) for p, arg in zip(kernel.params, args, strict=True)}
    constants = {name: arg for name, (is_constant, arg) in named.items() if is_constant}
    return {name: _type_of(arg) for name, (is_constant, arg) in named.items() if not is_constant}, constants


def _type_of(arg: Any) -> Any:
    if arg is None:
        return None
    if isinstance(arg, tuple):
        kinds = [_type_of(element) for element in arg]
        return type(arg)(*kinds) if hasattr(arg, "_fields") else tuple(kinds)
    if isinstance(arg, TensorDescriptor):
        box = ",".join(map(str, arg.block_shape))
        return f"tensordesc<{TYPE_NAMES[arg.base.dtype]}[{box}],{arg.layout!r}>"
    if isinstance(arg, Tensor):
        return "*" + TYPE_NAMES[arg.dtype]
    return "fp32" if isinstance(arg, float) else "i32"
