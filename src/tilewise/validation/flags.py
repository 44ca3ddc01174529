"""Validates everything that is not a tensor, with one rule per argument."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tilewise import backends
from tilewise.arguments import FLAGS, ROWS, UNCHANGED, Rule
from tilewise.errors import InvalidProblem
from tilewise.operands import LENGTHS, NO_LENGTHS, Flags, Lengths, Options
from tilewise.subclasses import check_class


def _is_registered(name: str) -> bool:
    # torch.compile cannot trace the search for entry points; the op checks the name then.
    return torch.compiler.is_compiling() or name in backends.names()


# The rules of all arguments that have one. That of `backend` needs the registry.
RULES: dict[str, Rule] = {name: row.rule for name, row in ROWS.items() if row.rule is not None} | {
    "backend": Rule(
        lambda x: isinstance(x, str) and (x == "auto" or x in backends.NAMES or _is_registered(x)),
        "'auto' or one of " + ", ".join(map(repr, backends.NAMES)) + ", or the name of a registered backend",
        "tilewise.backends() lists what is there.",
    )
}
# The options that flags hold as floats.
_FLOATS = frozenset(name for name in UNCHANGED if FLAGS[name].startswith("float"))


# fp64 is chosen on purpose; e4m3 data means nothing without its scales.
KEPT_BY_AUTOCAST = (torch.float64, torch.float8_e4m3fn)
OPTIONAL = frozenset(("bias", "mask", "alibi_slopes", "sinks", "out"))
# Without cu_seqlens_q a paged call has one query token per sequence.
OPTIONAL_PAGED = OPTIONAL | {"cu_seqlens_q"}


def require_tensors(*, optional: frozenset[str] = OPTIONAL, **tensors: Any) -> None:
    """Every named value must be a dense tensor, or None for those that are `optional`."""
    for name, value in tensors.items():
        if value is None and name in optional:
            continue
        if not isinstance(value, Tensor):
            kind = (
                "a torch.Tensor" + (", a TileMask" if name == "mask" else "") + (" or None" if name in optional else "")
            )
            fix = "Pass one: it is required." if value is None else "Convert it with torch.as_tensor."
            if name == "mask":
                fix = (
                    "tile_mask takes a function, torch.as_tensor an array, TileMask.from_block_mask a BlockMask, "
                    "TileMask.stack several masks."
                )
            raise InvalidProblem(name, kind, type(value).__name__, fix)
        if value.is_nested:
            fix = (
                "Pass x.values() to attention_varlen, with x.offsets() as its cu_seqlens. For that x is (batch, "
                "seqlen, heads, dim), contiguous and of layout torch.jagged, as "
                "torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged) makes it."
            )
            raise InvalidProblem(name, "a dense tensor", "a nested one", fix)
        check_class(name, value)
        if value.layout != torch.strided:
            raise InvalidProblem(name, "a dense tensor", f"layout {value.layout}", "Convert it with .to_dense().")
        if name == "alibi_slopes" and value.requires_grad and torch.is_grad_enabled():
            fix = "Slopes get no gradient: pass alibi_slopes.detach(), or learn a bias."
            raise InvalidProblem(name, "a tensor that requires no gradient", "one that does", fix)


def normalise(options: Options, lengths: Lengths = NO_LENGTHS, *, needs_grad: bool) -> Flags:
    """Options and lengths as the op takes them. Raises InvalidProblem for the first one that breaks its rule."""
    flags = _flags_of(options, needs_grad)
    if lengths is NO_LENGTHS:
        return flags
    for name, value in zip(LENGTHS, lengths, strict=True):
        if name in RULES:
            check_flag(name, value)
    return flags.with_lengths(lengths)


def _flags_of(options: Options, needs_grad: bool) -> Flags:
    repeatable = options.deterministic is None and torch.are_deterministic_algorithms_enabled()
    if not torch.compiler.is_compiling():
        try:
            # The cache does not compare types inside a pair: (4.0, 0) would hit the entry of (4, 0).
            if options.window is None or SIDES.issuperset(map(type, options.window)):
                return _checked_once(needs_grad, repeatable, *options)
        except TypeError:  # unhashable: a list as window is legal, anything else fails its rule
            pass
    return _checked(needs_grad, repeatable, *options)


def _checked(needs_grad: bool, repeatable: bool, *spelled: Any) -> Flags:
    options = Options(*spelled)
    for name, value in zip(Options._fields, options, strict=True):
        check_flag(name, value)
    if options.deterministic == "batch" and options.dropout > 0:
        fix = "Its random bits count through the batch: leave out one of the two."
        raise InvalidProblem("dropout", "0 next to deterministic='batch'", options.dropout, fix)
    left, right = (None, None) if options.window is None else options.window
    given = {name: getattr(options, name) for name in UNCHANGED}
    floats = {name: float(value) for name, value in given.items() if name in _FLOATS and value is not None}
    return Flags(
        **(given | floats),
        window_left=left,
        window_right=right,
        deterministic=bool(options.deterministic) or repeatable,
        needs_grad=needs_grad,
        max_logits=options.return_max_logits,
        batch_invariant=options.deterministic == "batch",
    )


# Types of a window's sides, subclasses aside.
SIDES = frozenset((int, type(None)))
# Cached, because checking is slower than a lookup. Typed, so that causal=1 does not hit the entry of causal=True.
_checked_once = functools.lru_cache(maxsize=1024, typed=True)(_checked)


def seed_tensor(seed: int | Tensor | None, dropout: float) -> Tensor | None:
    """The dropout seed as a 0-d int64 tensor, drawn from torch's default CPU generator if none is given."""
    if seed is not None:
        if isinstance(seed, Tensor):
            check_class("seed", seed)
        check_flag("seed", seed)
    if dropout == 0.0:
        return None
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu")
    if isinstance(seed, Tensor):
        return seed.reshape(())
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device="cpu")


def any_needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd will need a gradient of any of these."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k and v in torch.autocast's dtype, as for SDPA. fp64 ones, bias, sinks and slopes keep theirs."""
    dtype = _autocast_dtype(tensors[0])
    return tensors if dtype is None else tuple(t.to(dtype) if _is_cast(t) else t for t in tensors)


def autocast_stand_ins(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors with the dtype that `autocast` would give but one element of memory each: for validation only."""
    dtype = _autocast_dtype(tensors[0])
    if dtype is None:
        return tensors
    return tuple(
        t.new_empty((), dtype=dtype).expand(t.shape) if _is_cast(t) and t.dtype != dtype else t for t in tensors
    )


def is_autocast(tensor: Tensor) -> bool:
    """Whether `autocast` may convert such tensors."""
    return _autocast_dtype(tensor) is not None


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    kind = tensor.device.type
    return None if kind == "meta" or not torch.is_autocast_enabled(kind) else torch.get_autocast_dtype(kind)


def _is_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype not in KEPT_BY_AUTOCAST


def check_flag(name: str, value: Any) -> None:
    """Validate one flag by its rule."""
    rule = RULES[name]
    if not rule.accepts(value):
        raise InvalidProblem(name, rule.expected, repr(value), rule.fix)
