"""The table of arguments: one row for each public argument of the calls. See docs/adding-a-feature.md.

Made from it at import: what the public functions pass on, the `torch.library` schemas, the options and flags, their
rules, the fields of a problem that are numbers, the options of the command line, the names of other libraries, and what
test cases pass and vary. Signatures are written out, for people and type checkers; tests/test_arguments.py holds them
to the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_FLOAT = sys.float_info.max


class Rule(NamedTuple):
    """The values that an argument takes, in the words of its error message."""

    accepts: Callable[[Any], bool]
    expected: str
    fix: str


def _is_number(value: Any) -> bool:
    # A comparison, because torch.compile cannot trace math.isfinite of a symbolic float. NaN compares false; an integer
    # too large for a float compares larger.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -MAX_FLOAT <= value <= MAX_FLOAT


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_window(value: Any) -> bool:
    return value is None or (
        isinstance(value, (tuple, list)) and len(value) == 2 and all(side is None or _is_count(side) for side in value)
    )


def _is_seed(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype == torch.int64 and value.numel() == 1
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**64)


_BOOL = Rule(lambda x: isinstance(x, bool), "True or False", "Pass a Python bool.")
_LONGEST = Rule(
    lambda x: x is None or _is_count(x), "None or an integer >= 0", "Pass the length of the longest sequence."
)


# The public functions that compute, and what plans them.
DENSE, VARLEN, PAGED, EXPLAIN = "attention", "attention_varlen", "attention_paged", "explain"
CALLS = (DENSE, VARLEN, PAGED)
EVERY = (*CALLS, EXPLAIN)
# The operator of each call.
KINDS = {"dense": DENSE, "varlen": VARLEN, "paged": PAGED}


class Argument(NamedTuple):
    """A row. `calls` are the functions that take the argument, and `required` those that need it.

    Where it lands: `operands` are the tensors it becomes, `flags` the flags, in torch.library's schema syntax. An
    argument without operands is an option: a number, a switch or a name, which `rule` checks; or it bounds lengths, and
    is a size. One that `is_factor` multiplies or bounds scores, so fp32 must hold it.

    `foreign` are the names of other libraries, each with what to write here instead ("": this name and =). `elsewhere`
    ends the error of a call that does not take the argument. `cli` is the help text of `tilewise explain`'s option.
    `tried` is the value with which the conformance suite combines it, on a backend that honours it.
    """

    name: str
    calls: tuple[str, ...] = EVERY
    required: tuple[str, ...] = ()
    default: Any = None
    operands: tuple[str, ...] = ()
    flags: str = ""
    rule: Rule | None = None
    is_factor: bool = False
    foreign: Mapping[str, str] = MappingProxyType({})
    elsewhere: str = ""
    cli: str = ""
    tried: Any = None

    @property
    def is_option(self) -> bool:
        """Whether it is a number, a switch or a name, which tensors and sizes have no part in."""
        return bool(self.flags or self.rule) and not self.operands and self.rule is not _LONGEST


def _tensor(name: str, *, beside: tuple[str, ...] = (), **row: Any) -> Argument:
    """The row of an argument that is a tensor, whose operand has its name; `beside` are more operands."""
    return Argument(name=name, operands=(row.pop("operand", name), *beside), **row)


_PAGES = "seqlens_k= of attention_paged"
_SERVING = ": pages are for serving and have no dropout"
_DESCALE = "{0}=, a tilewise.fp8.Fp8Tensor, which holds its scales"

# How torch.library's schemas call the types of flags.
_SCHEMA_TYPES = {"bool": "bool", "float": "float", "float | None": "float?"}


def _shared(default: Any, **row: Any) -> Any:
    return field(default=default, metadata=row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The numbers and switches that have one name and one type in options, flags, problems and test cases: the field of
    each is also its row.
    """

    causal: bool = _shared(
        False,
        rule=_BOOL,
        foreign={
            "is_causal": "causal=; where q and k differ in length, SDPA aligns to the upper left corner and causal= to "
            "the lower right one (tilewise.integrations.sdpa keeps SDPA's)"
        },
        cli="Keys after a query are hidden.",
        tried=True,
    )
    softcap: float | None = _shared(
        None,
        rule=Rule(
            lambda x: x is None or (_is_number(x) and x > 0),
            "None or a finite number > 0",
            "Leave softcap=None to switch it off.",
        ),
        is_factor=True,
        foreign=dict.fromkeys(("logits_soft_cap", "logit_cap", "soft_cap", "softcapping"), ""),
        cli="Scores become c * tanh(s / c).",
        tried=1.5,
    )
    dropout: float = _shared(
        0.0,
        calls=(DENSE, VARLEN, EXPLAIN),
        rule=Rule(
            lambda x: _is_number(x) and 0 <= x < 1,
            "a probability in [0, 1)",
            "dropout is the share of probabilities to drop; 0.0 switches it off.",
        ),
        foreign={"dropout_p": "", "p": ""},
        elsewhere=_SERVING,
        cli="Share of probabilities dropped.",
        tried=0.3,
    )


_SHARED = [
    Argument(name=f.name, default=f.default, flags=f"{_SCHEMA_TYPES[str(f.type)]} {f.name}", **f.metadata)
    for f in fields(Shared)
]

ARGUMENTS: tuple[Argument, ...] = (
    # q, k and v of 8 bits come with their scales, in an Fp8Tensor.
    _tensor(
        "q",
        required=EVERY,
        beside=("q_scale",),
        flags="int? q_block, ScalarType? out_dtype",
        foreign={"q_descale": _DESCALE.format("q")},
    ),
    _tensor(
        "k",
        calls=(DENSE, VARLEN, EXPLAIN),
        required=(DENSE, VARLEN, EXPLAIN),
        beside=("k_scale",),
        flags="int? k_block",
        foreign={"k_descale": _DESCALE.format("k")},
    ),
    _tensor(
        "v",
        calls=(DENSE, VARLEN, EXPLAIN),
        required=(DENSE, VARLEN, EXPLAIN),
        beside=("v_scale",),
        flags="int? v_block",
        foreign={"v_descale": _DESCALE.format("v")},
    ),
    _tensor(
        "k_pages",
        operand="k",
        calls=(PAGED,),
        required=(PAGED,),
        beside=("k_scale",),
        foreign={"k_cache": "k_pages= of attention_paged"},
    ),
    _tensor(
        "v_pages",
        operand="v",
        calls=(PAGED,),
        required=(PAGED,),
        beside=("v_scale",),
        foreign={"v_cache": "v_pages= of attention_paged"},
    ),
    _tensor(
        "cu_seqlens_q",
        calls=(VARLEN, PAGED, EXPLAIN),
        required=(VARLEN,),
        foreign={"cu_seqlens": "cu_seqlens_q= and cu_seqlens_k= of attention_varlen"},
    ),
    _tensor("cu_seqlens_k", calls=(VARLEN, EXPLAIN), required=(VARLEN,)),
    _tensor(
        "block_table",
        calls=(PAGED, EXPLAIN),
        required=(PAGED,),
        foreign=dict.fromkeys(("page_table", "block_tables"), "block_table= of attention_paged"),
    ),
    _tensor(
        "seqlens_k",
        calls=(PAGED, EXPLAIN),
        required=(PAGED,),
        foreign=dict.fromkeys(("cache_seqlens", "seqused_k", "seq_lens", "context_lens"), _PAGES),
    ),
    Argument(name="shared_prefix", calls=(PAGED, EXPLAIN)),
    *_SHARED,
    Argument(
        name="window",
        flags="SymInt? window_left, SymInt? window_right",
        rule=Rule(
            _is_window,
            "None or a pair (left, right), each None or an integer >= 0 of at most 31 bits",
            "The last n keys are (n - 1, 0); None is an unbounded side (what flash-attn writes as -1).",
        ),
        foreign={
            "window_size": "window=, whose unbounded side is None instead of -1",
            "sliding_window": "window=(sliding_window - 1, 0)",
            "local_window_size": "",
        },
    ),
    _tensor(
        "bias",
        foreign={
            "attn_bias": "bias=, or causal=True, window= and attention_varlen for what xFormers has classes for",
            "position_bias": "",
            "score_mod": "bias=, softcap=, alibi_slopes= or window=, whichever it computes",
        },
    ),
    _tensor(
        "mask",
        beside=("tiles", "tile_bits", "tile_lists"),
        flags="SymInt? mask_seqlen_q, SymInt? mask_seqlen_k",
        foreign={
            "attn_mask": "mask= if it is boolean (True = attend), bias= if its numbers are added to the scores",
            "key_padding_mask": "mask=~key_padding_mask[:, None, None, :], as True means attend here",
            "attention_mask": "mask=attention_mask.bool()[:, None, None, :] if it marks the tokens in use "
            "(True = attend)",
            "mask_mod": "mask=, causal= or window=, whichever it computes",
            "block_mask": "mask=, causal= or window=, whichever it stands for",
        },
    ),
    _tensor("alibi_slopes"),
    _tensor("sinks", foreign=dict.fromkeys(("s_aux", "sink", "learnable_sink", "attention_sink"), "")),
    Argument(
        name="scale",
        flags="float? scale",
        rule=Rule(
            lambda x: x is None or _is_number(x),
            "None or a finite number",
            "None means 1 / sqrt(head_dim); for a scale in a tensor, pass q * scale and scale=1.0.",
        ),
        is_factor=True,
        foreign=dict.fromkeys(("softmax_scale", "sm_scale", "scaling"), ""),
        tried=0.37,
    ),
    _tensor(
        "seed",
        calls=(DENSE, VARLEN, EXPLAIN),
        rule=Rule(
            _is_seed,
            "None, an integer of at most 64 bits, or an int64 tensor with one element",
            "None draws a seed from torch's default CPU generator.",
        ),
        elsewhere=_SERVING,
    ),
    Argument(
        name="layout",
        calls=(DENSE, EXPLAIN),
        default="bhsd",
        flags="str layout",
        rule=Rule(
            lambda x: isinstance(x, str) and x in ("bhsd", "bshd"),
            "'bhsd' or 'bshd'",
            "'bhsd' is (batch, heads, seqlen, dim), 'bshd' is (batch, seqlen, heads, dim).",
        ),
        foreign=dict.fromkeys(("tensor_layout", "kv_layout", "qkv_format"), "layout='bhsd' or 'bshd'"),
        elsewhere=": packed and paged tensors have one layout",
    ),
    Argument(
        name="deterministic",
        flags="bool deterministic, bool batch_invariant",
        rule=Rule(
            lambda x: x is None or isinstance(x, bool) or (isinstance(x, str) and x == "batch"),
            "None, True, False or 'batch'",
            "None follows torch.use_deterministic_algorithms; 'batch' also makes bits independent of the batch.",
        ),
    ),
    Argument(
        name="backend",
        default="auto",
        flags="str backend",  # validation.flags has its rule, which asks the registry
        foreign={"op": "", "implementation": ""},
    ),
    Argument(
        name="return_lse",
        default=False,
        rule=_BOOL,
        foreign={
            "return_softmax_lse": "",
            "return_attn_probs": "return_lse=; probabilities are never kept",
            "return_softmax": "return_lse=; probabilities are never kept",
        },
    ),
    Argument(
        name="return_max_logits",
        default=False,
        flags="bool max_logits",
        rule=_BOOL,
        foreign={"return_max_logit": "", "return_max_score": ""},
    ),
    Argument(
        name="max_seqlen_q",
        calls=(VARLEN, PAGED, EXPLAIN),
        flags="SymInt? max_seqlen_q",
        rule=_LONGEST,
        foreign={"max_seqlen": "max_seqlen_q= and max_seqlen_k= of attention_varlen"},
    ),
    Argument(name="max_seqlen_k", calls=(VARLEN, EXPLAIN), flags="SymInt? max_seqlen_k", rule=_LONGEST),
    _tensor("out", calls=CALLS, elsewhere="; a forecast is the same without it"),
    Argument(name="device", calls=(EXPLAIN,), elsewhere=": a call runs where q is"),
)

ROWS = {row.name: row for row in ARGUMENTS}
# The arguments that tensors have no part in.
OPTIONS = {row.name: row for row in ARGUMENTS if row.is_option}
# What the tensors decide: whether one of them needs a gradient.
DERIVED = "bool needs_grad"
# The flags of the operators with their types, in order.
FLAGS: dict[str, str] = {
    name: kind
    for flags in (*[row.flags for row in ARGUMENTS if row.flags], DERIVED)
    for kind, name in [part.split() for part in flags.split(", ")]
}
# A flag that is not given. `layout` and `backend` have the defaults of their arguments.
_NOT_GIVEN = {"bool": False, "float": 0.0}
FLAG_DEFAULTS = {name: ROWS[name].default if kind == "str" else _NOT_GIVEN.get(kind) for name, kind in FLAGS.items()}
# The options that are flags of the same name, unchanged but for the type of numbers.
UNCHANGED = tuple(name for name in OPTIONS if name in FLAGS and name != "deterministic")


def taken_by(call: str) -> tuple[str, ...]:
    """The names of a call's arguments."""
    return tuple(row.name for row in ARGUMENTS if call in row.calls)


def operands_of(kind: str) -> dict[str, bool]:
    """The operands of an operator and whether it needs them: those first, then others, then what comes beside them.

    `out` is no operand of the plain operators.
    """
    call = KINDS[kind]
    rows = [row for row in ARGUMENTS if row.operands and call in row.calls and row.name != "out"]
    needed = [row.operands[0] for row in rows if call in row.required]
    others = [row.operands[0] for row in rows if call not in row.required]
    beside = [name for row in rows for name in row.operands[1:]]
    return {name: name in needed for name in (*needed, *others, *beside)}
