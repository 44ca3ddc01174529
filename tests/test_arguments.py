"""Everything that restates the table of arguments agrees with it, and no argument is dropped on the way to a kernel."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pickle
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, get_type_hints

import pytest
import torch
from typer.utils import get_params_from_function

import tilewise as tw
from tilewise import api, bodies, calls, dispatch, problem, schemas, validation
from tilewise import device as devices
from tilewise.arguments import (
    ARGUMENTS,
    CALLS,
    DENSE,
    DERIVED,
    EVERY,
    EXPLAIN,
    FLAGS,
    KINDS,
    OPTIONS,
    PAGED,
    ROWS,
    VARLEN,
    Shared,
    taken_by,
)
from tilewise.backends import NAMES
from tilewise.backends.reference import ReferenceBackend
from tilewise.cascade import Group, SharedPrefix
from tilewise.cli import explain as cli
from tilewise.integrations import flash_attn_interface, sdpa
from tilewise.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tilewise.integrations.flash_attn.cute import interface as cute
from tilewise.operands import Flags, Lengths, Operands, Options
from tilewise.problem import FEATURES, PLAIN, AttentionProblem
from tilewise.testing import Case, generation
from tilewise.testing.implementations import arguments_of
from tilewise.testing.inputs import make_inputs
from tilewise.validation import foreign

ROOT = Path(__file__).parent.parent
HEADS, ROWS_Q, KEYS = 2, 4, 8


def base(call: str) -> dict[str, Any]:
    """The arguments that a call needs, for two sequences of four queries and eight keys."""
    torch.manual_seed(0)
    if call in (DENSE, EXPLAIN):
        q, (k, v) = torch.randn(2, HEADS, ROWS_Q, 8), torch.randn(2, 2, HEADS, KEYS, 8)
        return {"q": q, "k": k, "v": v}
    totals, lengths = torch.tensor([0, 4, 8], dtype=torch.int32), torch.tensor([8, 8], dtype=torch.int32)
    if call == VARLEN:
        q, (k, v) = torch.randn(8, HEADS, 8), torch.randn(2, 16, HEADS, 8)
        bounds = {"max_seqlen_q": ROWS_Q, "max_seqlen_k": KEYS}
        return {"q": q, "k": k, "v": v, "cu_seqlens_q": totals, "cu_seqlens_k": 2 * totals, **bounds}
    pages = dict(zip(("k_pages", "v_pages"), torch.randn(2, 4, 4, HEADS, 8), strict=True))
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    rows = {"cu_seqlens_q": totals, "max_seqlen_q": ROWS_Q, "block_table": table, "seqlens_k": lengths}
    return {"q": torch.randn(8, HEADS, 8), **pages, **rows}


def as_explain(call: str) -> dict[str, Any]:
    """The same for `explain`, which calls pages k and v."""
    return {name.removesuffix("_pages"): value for name, value in base(call).items()}


# A value of each option that is not its default, but for those that the suite's cases are combined with.
OTHERS: dict[str, Any] = {
    "window": (3, 2),
    "layout": "bshd",
    "deterministic": True,
    "backend": "reference",
    "max_seqlen_q": ROWS_Q + 1,
    "max_seqlen_k": KEYS + 1,
    "return_max_logits": True,
    "return_lse": True,
}
TRIED = {row.name: row.tried for row in ARGUMENTS if row.tried is not None} | OTHERS
TENSORS: dict[str, Callable[[], Any]] = {
    "bias": lambda: torch.randn(ROWS_Q, KEYS),
    "mask": lambda: torch.ones(ROWS_Q, KEYS, dtype=torch.bool),
    "alibi_slopes": lambda: torch.ones(HEADS),
    "sinks": lambda: torch.ones(HEADS),
}
PAIRS = [(call, name) for call in EVERY for name in taken_by(call)]
# Of a call that has them anyway; the only argument of this kind is a hint, and `device` is where to plan for.
NEEDED = {name for call in CALLS for name in base(call)} - {"max_seqlen_q", "max_seqlen_k"}
ELSEWHERE = {"shared_prefix", "device"}


class Seen:
    """The problems that were validated, with their operands and flags."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.last: tuple[AttentionProblem, Operands, Flags] | None = None
        describe = validation.problem_of

        def noted(kind: problem.Kind, operands: Operands, flags: Flags) -> AttentionProblem:
            described = describe(kind, operands, flags)
            self.last = described, operands, flags
            return described

        monkeypatch.setattr(validation, "problem_of", noted)

    def of(self, function: Callable[..., Any], /, **given: Any) -> tuple[Any, list[bool], Flags]:
        calls.forget()
        self.last = None
        function(**given)
        assert self.last is not None, "the problem was not described"
        described, operands, flags = self.last
        return described, [tensor is not None for tensor in operands], flags._replace(needs_grad=False)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    yield Seen(monkeypatch)
    calls.forget()


def parameters(call: str) -> dict[str, inspect.Parameter]:
    found = inspect.signature(getattr(tw, call)).parameters
    return {name: p for name, p in found.items() if p.kind is not p.VAR_KEYWORD}


@pytest.mark.parametrize("call", EVERY)
def test_functions_are_written_as_the_table_says(call: str) -> None:
    written = parameters(call)
    assert set(written) == set(taken_by(call))
    for name, parameter in written.items():
        if call in ROWS[name].required:
            assert parameter.default is parameter.empty
        else:
            assert parameter.default == ROWS[name].default
            assert parameter.kind is parameter.KEYWORD_ONLY


def test_type_checkers_see_the_same_arguments() -> None:
    """Of overloads: positional arguments, and a TypedDict of the others."""
    tree = ast.parse(inspect.getsource(api))
    own, parents = {}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            own[node.name] = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}  # type: ignore[union-attr]
            parents[node.name] = [ast.unparse(b).partition("[")[0] for b in node.bases]

    def fields(name: str) -> set[str]:
        return own.get(name, set()).union(*[fields(parent) for parent in parents.get(name, [])])

    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    overloads = [n for n in functions if [ast.unparse(d) for d in n.decorator_list] == ["overload"]]
    assert Counter(n.name for n in overloads) == dict.fromkeys(CALLS, 4)
    for node in overloads:
        keywords = re.findall(r"Unpack\[(\w+)\[", ast.unparse(node))
        assert set(taken_by(node.name)) == {a.arg for a in node.args.args} | fields(keywords[0])


@pytest.mark.parametrize(("kind", "call"), KINDS.items())
def test_bodies_are_written_as_they_are_compiled(kind: problem.Kind, call: str) -> None:
    """But for the call's own arguments, and in the same lines, which tracebacks show."""
    function = getattr(tw, call)
    (written,) = [
        n
        for n in ast.parse(inspect.getsource(api)).body
        if isinstance(n, ast.FunctionDef) and n.name == call and ast.unparse(n.decorator_list[0]) != "overload"
    ]
    assert [ast.unparse(d) for d in written.decorator_list] == [f"with_body({kind!r})"]
    codes = compile(inspect.getsource(api), api.__file__, "exec").co_consts
    (code,) = [c for c in codes if isinstance(c, CodeType) and c.co_name == call and "OWN_ARGUMENTS" in c.co_names]
    (compiled,) = ast.parse(bodies.source(kind, call, code)).body
    assert isinstance(compiled, ast.FunctionDef)
    last = compiled.body[-1]
    assert isinstance(last, ast.Return)
    assert isinstance(last.value, ast.Call)
    last.value.args[1:] = [ast.Starred(ast.Name("OWN_ARGUMENTS"))]
    statements = written.body[1:]
    assert [ast.unparse(n) for n in compiled.body] == [ast.unparse(n) for n in statements]
    assert [n.lineno for n in compiled.body] == [n.lineno for n in statements]
    # Signatures, sources and pickles are those of the function as it is written.
    assert inspect.getsource(function).startswith("@with_body")
    assert inspect.getdoc(function) is not None
    assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize("given", [{"unknown": 1}, {"causal": 1}])
def test_tracebacks_show_the_calls_as_they_are_written(given: dict[str, int]) -> None:
    with pytest.raises(tw.TilewiseError) as raised:
        tw.attention(**base(DENSE), **given)  # type: ignore[call-overload]
    frames = traceback.extract_tb(raised.tb)
    assert (frames[1].filename, frames[1].name) == (api.__file__, "attention")
    line = "raise validation.unexpected(attention, unknown)" if "unknown" in given else "return _attend("
    assert str(frames[1].line).startswith(line)


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize(("kind", "call"), KINDS.items())
def test_what_a_call_passes_on_has_the_name_of_what_it_was_given(
    kind: problem.Kind, call: str, every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether every argument is given, or only those that the call needs."""
    passed: list[Any] = []
    monkeypatch.setattr(api, "_attend", lambda *given: passed.append(given))
    names = [name for name in taken_by(call) if every or call in ROWS[name].required]
    given = {name: object() for name in names}
    getattr(tw, call)(**given)
    ((as_kind, operands, options, lengths, seed, out, shared_prefix),) = passed
    assert (type(options), type(lengths)) == (Options, Lengths)
    found = {**Operands(*operands)._asdict(), "seed": seed, "out": out, "shared_prefix": shared_prefix}
    found |= {**dict(zip(Options._fields, options, strict=True)), **lengths._asdict()}
    found |= {f"{name}_pages": found[name] for name in "kv"}
    assert as_kind == kind
    assert {name: found[name] for name in given} == given
    defaults = {name: row.default for name, row in ROWS.items() if name not in given} | {"mask_seqlen_q": None}
    others = set(found) - set(given) - (set("kv") if kind == "paged" else {"k_pages", "v_pages"})
    assert {name: found[name] for name in others} == {name: defaults.get(name) for name in others}


@pytest.mark.parametrize("call", CALLS)
def test_docstrings_and_the_contract_name_every_argument(call: str) -> None:
    """The docstring of `attention` is that of all calls."""
    contract = (ROOT / "docs" / "contract.md").read_text()
    said = f"{tw.attention.__doc__} {getattr(tw, call).__doc__}"
    for name in taken_by(call):
        shown = "max_seqlen_\\*" if name.startswith("max_seqlen") and call == VARLEN else rf"{name}\b"
        assert call in ROWS[name].required or re.search(rf"\b{shown}", said), name
        assert re.search(rf"\b{name}\b", contract), name
    (listed,) = re.findall(r"All flags are keyword-only: `([^`]*)`", contract)
    assert set(listed.split(", ")) == {n for n, p in parameters(DENSE).items() if p.kind is p.KEYWORD_ONLY}
    (without,) = re.findall(r"`attention_paged` has no ((?:`\w+`(?:, | and )?)+)", contract)
    assert set(re.findall(r"\w+", without)) - {"and"} == set(taken_by(DENSE)) - set(taken_by(PAGED)) - {"k", "v"}


@pytest.mark.parametrize(("call", "name"), [(call, name) for call, name in PAIRS if name not in ELSEWHERE])
def test_every_argument_is_validated(call: str, name: str) -> None:
    """What no argument can be is refused under the argument's name: it was not mixed up with another one."""
    given = base(call)
    if call == EXPLAIN and name not in taken_by(DENSE):
        given = as_explain(VARLEN if name in taken_by(VARLEN) else PAGED)
    with pytest.raises(tw.InvalidProblem, match=rf"^{name}: expected"):
        getattr(tw, call)(**given | {name: object()})


def probes() -> Iterator[Any]:
    for call, name in PAIRS:
        if name not in NEEDED | ELSEWHERE:
            yield pytest.param(call, name, id=f"{call}-{name}")


@pytest.mark.filterwarnings("ignore:.*deterministic.*")
@pytest.mark.parametrize(("call", "name"), list(probes()))
def test_every_argument_changes_the_problem_or_its_operands(call: str, name: str, seen: Seen) -> None:
    function = getattr(tw, call)
    plain = as_explain(VARLEN) if call == EXPLAIN and name.startswith("max_") else base(call)
    if name == "seed":
        plain["dropout"] = 0.5
        for number in (1, 2):
            seen.of(function, **plain, seed=number)
            assert seen.last is not None
            assert seen.last[1].seed == number
        return
    if name == "out":
        value: Any = torch.empty_like(plain["q"])
    else:
        value = TENSORS[name]() if name in TENSORS else TRIED[name]
    given = plain | {name: value}
    if name == "return_lse":
        assert call == EXPLAIN or isinstance(function(**given), tuple) > isinstance(function(**plain), tuple)
        return
    if name == "layout":
        given |= {x: plain[x].transpose(1, 2) for x in "qkv"}
    before, after = seen.of(function, **plain), seen.of(function, **given)
    assert before != after
    # What the backend sees, which is no flag: the problem, its operands, or which backend it is.
    assert before[:2] != after[:2] or name == "backend"


def test_every_operand_and_flag_comes_from_a_row() -> None:
    lands = {name for row in ARGUMENTS for name in row.operands} | {"max_logits"}
    assert lands == set(Operands._fields)
    assert [row.name for row in ARGUMENTS if not row.operands and not row.flags] == [
        "shared_prefix", "return_lse", "device",
    ]  # fmt: skip
    assert Options._fields == tuple(OPTIONS)
    assert Flags._fields == tuple(FLAGS)
    assert DERIVED.split()[1] in FLAGS
    for kind, call in KINDS.items():
        schema = {a.name: str(a.type) for a in getattr(torch.ops.tilewise, kind).default._schema.arguments}
        assert list(schema) == [*schemas.operand_names(kind), *FLAGS]  # type: ignore[arg-type]
        for name in schemas.operand_names(kind):  # type: ignore[arg-type]
            needed = any(name == row.operands[0] for row in ARGUMENTS if row.operands and call in row.required)
            assert schema[name] == ("Tensor" if needed else "Optional[Tensor]")


def test_shared_fields_have_the_tables_names_and_defaults() -> None:
    for field in dataclasses.fields(Shared):
        assert field.default == ROWS[field.name].default
        assert field.name in OPTIONS
        assert field.name in FLAGS
        for holder in (AttentionProblem, Case):
            assert {f.name: f.default for f in dataclasses.fields(holder)}[field.name] == field.default
    # What an option that is a plain number could be, it is.
    same = {name for name, kind in get_type_hints(AttentionProblem).items() if get_type_hints(Case).get(name) == kind}
    # Packed problems have one layout, whatever the case says.
    assert same & set(OPTIONS) & set(FLAGS) - {"layout"} == {f.name for f in dataclasses.fields(Shared)}


def test_rules_of_every_option() -> None:
    rules = {name for name, row in ROWS.items() if row.rule is not None} | {"backend"}
    assert set(OPTIONS) <= rules
    for name in OPTIONS:
        validation.check_flag(name, ROWS[name].default)


@pytest.mark.parametrize("name", [name for name, kind in FLAGS.items() if kind == "float?"])
@pytest.mark.parametrize("value", [1e-300, 1e300])
def test_numbers_that_fp32_does_not_hold_are_refused(name: str, value: float) -> None:
    given, attention = base(DENSE) | {name: value}, getattr(tw, DENSE)
    with pytest.raises(tw.InvalidProblem, match=f"^{name}: expected a magnitude"):
        attention(**given)
    attention(**{x: t.double() if x in "qkv" else t for x, t in given.items()})


# Options of calls that the command line leaves out: results of calls, and what a plan by sizes has no use for.
NOT_ON_THE_COMMAND_LINE = {
    "scale", "layout", "deterministic", "return_lse", "return_max_logits", "max_seqlen_q", "max_seqlen_k",
}  # fmt: skip
UNDER_ANOTHER_NAME = {"alibi_slopes": "alibi"}


def test_the_command_line_has_an_option_for_every_argument_that_changes_scores() -> None:
    command = get_params_from_function(cli.command)
    for name in [*OPTIONS, *TENSORS]:
        assert (UNDER_ANOTHER_NAME.get(name, name) in command) != (name in NOT_ON_THE_COMMAND_LINE), name
    for field in dataclasses.fields(Shared):
        assert command[field.name].default.help == ROWS[field.name].cli != ""


@pytest.mark.parametrize("kind", KINDS)
def test_cases_pass_every_argument_they_have(kind: problem.Kind) -> None:
    """All that a call takes but results, the backend and hints, which the suite tests otherwise."""
    numbers = {
        name: value for name, value in TRIED.items() if name in {field.name for field in dataclasses.fields(Case)}
    }
    case = Case(
        **numbers | {"layout": "bhsd", "dropout": 0.0 if kind == "paged" else 0.25},
        kind=kind, bias="qk", mask="qk", alibi="h", sinks=True,
    )  # fmt: skip
    passed = arguments_of(case, make_inputs(case))
    left = {"q", "k", "v", "k_pages", "v_pages", "backend", "return_lse", "return_max_logits", "out", "shared_prefix"}
    assert set(passed) == set(taken_by(KINDS[kind])) - left
    assert {name for name, value in passed.items() if value is None} <= {"max_seqlen_q", "max_seqlen_k"}


def test_every_feature_is_among_those_that_the_suite_combines(seen: Seen) -> None:
    combined = {name for feature in generation.FEATURES for name in feature.changes}
    for name in {*OPTIONS, *TENSORS} & set(taken_by(DENSE)):
        value = TENSORS[name]() if name in TENSORS else TRIED[name]
        given = {x: t.transpose(1, 2) for x, t in base(DENSE).items()} if name == "layout" else base(DENSE)
        if seen.of(tw.attention, **given | {name: value})[0].features and name not in ("return_max_logits",):
            assert UNDER_ANOTHER_NAME.get(name, name) in combined, name
    for name, row in ROWS.items():
        assert row.tried is None or {name: row.tried} in [feature.changes for feature in generation.FEATURES]


def test_foreign_names_are_those_of_the_table() -> None:
    for row in ARGUMENTS:
        for name, meant in row.foreign.items():
            assert name not in ROWS
            assert foreign.MEANT[name] == (meant or f"{row.name}=")
        for call in EVERY:
            if call not in row.calls:
                assert foreign.ELSEWHERE[row.name] in str(foreign.unexpected(getattr(tw, call), [row.name]))


X = torch.ones(2, ROWS_Q, HEADS, 8)
PACKED, TOTALS = torch.ones(8, HEADS, 8), torch.tensor([0, 4, 8], dtype=torch.int32)
CACHE, LENGTHS = torch.ones(2, KEYS, HEADS, 8), torch.tensor([8, 8], dtype=torch.int32)
# Drop-in functions, with what they need.
DROP_INS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "sdpa": (sdpa.scaled_dot_product_attention, (X, X, X)),
    "flash_attn_func": (flash_attn_func, (X, X, X)),
    "flash_attn_varlen_func": (flash_attn_varlen_func, (PACKED, PACKED, PACKED, TOTALS, TOTALS, 4, 4)),
    "flash_attn_with_kvcache": (flash_attn_with_kvcache, (X, CACHE, CACHE, None, None, None, None, LENGTHS)),
    "flash-attn 3": (flash_attn_interface.flash_attn_func, (X, X, X)),
    "flash-attn 4": (cute.flash_attn_func, (X, X, X)),
}
# Values of the arguments that they share with us, under our names; of tensors in the layout of flash-attn.
GIVEN: dict[str, Any] = {
    "causal": True, "window": (2, 0), "softcap": 1.5, "scale": 0.37, "dropout": 0.3, "deterministic": True,
    "alibi_slopes": torch.ones(HEADS), "sinks": torch.ones(HEADS), "mask": torch.ones(1, 1, dtype=torch.bool),
}  # fmt: skip


def claimed() -> Iterator[Any]:
    """Every argument of a drop-in whose name is one of ours, or a foreign name of one."""
    ours = {alias: row.name for row in ARGUMENTS for alias in (row.name, *row.foreign)}
    for drop_in, (function, _) in DROP_INS.items():
        for name in inspect.signature(function).parameters:
            if ours.get(name) in GIVEN and name != "mask_mod":
                yield pytest.param(drop_in, name, GIVEN[ours[name]], id=f"{drop_in}-{name}")


@pytest.mark.parametrize(("drop_in", "name", "value"), list(claimed()))
def test_drop_ins_pass_on_what_they_take(drop_in: str, name: str, value: Any, seen: Seen) -> None:
    function, given = DROP_INS[drop_in]
    plain, asked = (seen.of(lambda **more: function(*given, **more), **more) for more in ({}, {name: value}))
    assert plain[:2] != asked[:2]


# --- Refused by default


@dataclasses.dataclass(frozen=True, slots=True)
class Grown(AttentionProblem):
    """A problem with a field that no backend has heard of."""

    made_up: float | None = None


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> Grown:
    monkeypatch.setattr(problem, "_FEATURES", problem._features_of(Grown))
    return Grown(
        kind="dense", dtype=torch.bfloat16, batch=2, seqlen_q=300, seqlen_k=400, total_q=600, total_k=800, num_heads=8,
        num_kv_heads=8, head_dim=128, head_dim_v=128, scale=0.1, made_up=3.0,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_new_field_is_refused_by_every_backend_that_does_not_declare_it(name: str, grown: Grown) -> None:
    backend = dispatch.load(name)
    spec = devices.named("h200") if name in ("hopper", "triton") else devices.this_cpu()
    assert grown.features == ("made_up",)
    assert dispatch.refusal(backend, dataclasses.replace(grown, made_up=None), spec) is None
    reason = dispatch.refusal(backend, grown, spec)
    assert reason is not None
    assert "made_up" in reason


def test_a_backend_that_declares_a_new_field_is_asked(grown: Grown, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = dispatch.load("cpu")
    monkeypatch.setattr(type(backend), "honours", backend.honours | {"made_up"})
    assert dispatch.refusal(backend, grown, devices.this_cpu()) is None


def test_declared_features_are_features() -> None:
    for name in NAMES:
        assert dispatch.load(name).honours <= FEATURES
    assert dispatch.load("reference").honours == FEATURES
    fields = {field.name for field in dataclasses.fields(AttentionProblem)}
    assert fields >= PLAIN
    # Every other field, and what is made of sizes, turns a feature on.
    named = {field for field, *_ in problem._FEATURES}
    assert named == fields - PLAIN | {"group_size", "has_own_width"}


# Who computes for a backend, besides its own package.
HELPERS = {"hopper": ("gpu", "triton"), "triton": ("gpu",)}
# How features are read that are not read by their field: through properties and operands.
READ_AS = {
    "causal": "band", "window": "band", "head_dim_v": "head_dim_v", "mask": "mask", "tile mask": "tiles",
    "sinks": "sinks",
}  # fmt: skip
# Each sequence is computed alone, whatever the problem says.
BY_NATURE = {("cpu", "batch-invariant")}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "reference"])
def test_a_backend_reads_the_fields_of_the_features_it_declares(name: str) -> None:
    """A kernel that does not exist reads nothing. The reference declares everything; plain torch checks it."""
    package = Path(dispatch.__file__).parent / "backends"
    words: set[str] = set()
    for path in [path for part in (name, *HELPERS.get(name, ())) for path in (package / part).glob("*.py")]:
        tree = ast.parse(path.read_text())
        declared = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "honours"]
        skipped = {id(inner) for node in declared for inner in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                words.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
                words.add(node.value)
    for feature in dispatch.load(name).honours - dispatch.HINTS:
        fields = {field for field, _, named in problem._FEATURES if named == feature}
        assert words & (fields | {READ_AS.get(feature)}) or (name, feature) in BY_NATURE, feature


class Knowing(ReferenceBackend):
    """Knows what the CPU backend is made to forget."""

    name = "knowing"


@pytest.mark.usefixtures("always_cascade")
def test_the_pass_for_prefixes_is_refused_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of another backend than the one that takes the call."""
    backend: Any = dispatch.load("cpu")
    asked: list[Any] = []
    attend = backend.attend_prefixes

    def noted(_: Any, *given: Any) -> None:
        asked.append(given)
        attend(*given)

    monkeypatch.setattr(type(backend), "attend_prefixes", noted)
    pages, table = torch.randn(2, 5, 4, HEADS, 8), torch.tensor([[0, 1, 2], [0, 1, 3]], dtype=torch.int32)
    lengths, totals = torch.tensor([10, 11], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    own, prefix = table[:, 2:].contiguous(), (table[:1, :2].contiguous(), torch.tensor([8], dtype=torch.int32))
    hint = SharedPrefix((Group(2, 2, 8),), *prefix, totals, None, own, lengths - 8)
    given = torch.randn(2, HEADS, 8), *pages, table, lengths
    expected = tw.attention_paged(*given, softcap=2.0, backend="reference")
    torch.testing.assert_close(tw.attention_paged(*given, softcap=2.0, shared_prefix=hint), expected)
    assert len(asked) == 1
    monkeypatch.setattr(type(backend), "honours", backend.honours - {"softcap"})
    tw.register_backend(Knowing(), before="cpu")
    try:
        torch.testing.assert_close(tw.attention_paged(*given, softcap=2.0, shared_prefix=hint), expected)
    finally:
        tw.unregister_backend("knowing")
    assert len(asked) == 1
