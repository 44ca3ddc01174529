"""Backends from outside: registered by a call or by an entry point, in their order, and never in another's place."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import tilewise as tw
from tilewise import dispatch, settings
from tilewise.backends.base import TileShape
from tilewise.backends.reference import BACKEND as REFERENCE
from tilewise.cli import build_app
from tilewise.device import DeviceSpec
from tilewise.operands import Gradients, Operands
from tilewise.problem import AttentionProblem
from tilewise.testing import BackendImplementation, Case, check, installed


class Toy:
    """Computes by the reference, for head_dim 24 or less, and counts its passes."""

    name = "toy"
    honours = dispatch.load("reference").honours

    def __init__(self, most: int = 24) -> None:
        self.most, self.forwards, self.backwards = most, 0, 0

    def unavailable(self) -> str | None:
        return None

    def supports(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        del device
        return None if problem.head_dim <= self.most else f"head_dim is at most {self.most}"

    def tile_shape(self, problem: AttentionProblem, device: DeviceSpec) -> TileShape:
        return dispatch.load("reference").tile_shape(problem, device)

    def forward(self, problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
        self.forwards += 1
        return dispatch.load("reference").forward(problem, operands)

    def backward(self, problem: AttentionProblem, operands: Operands, *rest: Any) -> Gradients:
        self.backwards += 1
        return dispatch.load("reference").backward(problem, operands, *rest)


@pytest.fixture
def toy() -> Iterator[Toy]:
    backend = Toy()
    tw.register_backend(backend)
    yield backend
    tw.unregister_backend("toy")


def qkv(head_dim: int = 24, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 7, head_dim, dtype=dtype)
    return q, k, v


def test_a_registered_backend_runs_by_its_name(toy: Toy) -> None:
    q, k, v = (t.requires_grad_() for t in qkv())
    out = tw.attention(q, k, v, causal=True, backend="toy")
    torch.testing.assert_close(out, tw.attention(q, k, v, causal=True, backend="reference"))
    out.sum().backward()
    assert (toy.forwards, toy.backwards) == (1, 1)
    tw.attention(*qkv(), causal=True, backend="toy")
    tw.attention(*qkv(), causal=True, backend="toy")
    assert toy.forwards == 3
    with pytest.raises(tw.Unsupported, match="head_dim is at most 24"):
        tw.attention(*qkv(32), backend="toy")


def test_a_registered_backend_is_compiled(toy: Toy) -> None:
    compiled = torch.compile(lambda *t: tw.attention(*t, backend="toy"), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv()), tw.attention(*qkv(), backend="reference"))
    assert toy.forwards == 1


def test_an_unknown_backend_is_refused_in_a_compiled_call() -> None:
    compiled = torch.compile(lambda *t: tw.attention(*t, backend="none-such"), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="none-such"):
        compiled(*qkv())


def test_registered_backends_are_listed_and_explained(toy: Toy) -> None:
    names = [status.name for status in tw.backends()]
    assert names == ["hopper", "triton", "cpu", "toy", "reference"]
    plan = tw.explain(*qkv(), backend="toy")
    assert plan.backend == "toy"
    exact = qkv(dtype=torch.float64)  # what no backend but the reference takes
    assert tw.explain(*exact).backend == "toy"
    assert ("toy", "head_dim is at most 24") in tw.explain(*qkv(32, torch.float64)).rejected
    output = CliRunner().invoke(build_app(), ["doctor"]).output
    assert "toy" in output


class Integral(Toy):
    """Does with sizes what only integers can."""

    def supports(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        del device
        return None if round(problem.seqlen_q) ** 2 >= abs(self.most) else f"fewer than {self.most} rows"


@pytest.mark.parametrize("most", [0, 10**9])
def test_a_backend_need_not_know_traced_sizes(most: int) -> None:
    """Neither one that computes a call, nor one that is asked before and refuses it."""
    tw.register_backend(Integral(most), before="cpu")
    try:
        for rows in (20, 24, 28, 31):
            q, k, v = torch.randn(3, 1, 2, rows, 16)
            expected = tw.attention(q, k, v, backend="reference")
            torch.testing.assert_close(tw.attention(q, k, v), expected)
            assert tw.explain(q, k, v).backend == ("cpu" if most else "toy")
            if most:
                with pytest.raises(tw.Unsupported, match="fewer than"):
                    tw.attention(q, k, v, backend="toy")
    finally:
        tw.unregister_backend("toy")


def test_before_says_who_is_preferred() -> None:
    q, k, v = qkv()
    backend = Toy()
    with settings.overridden(backend="auto"):
        before = tw.attention(q, k, v)  # and the call is known from now on
        assert tw.explain(q, k, v).backend == "cpu"
        tw.register_backend(backend, before="cpu")
        try:
            assert [status.name for status in tw.backends()] == ["hopper", "triton", "toy", "cpu", "reference"]
            assert tw.explain(q, k, v).backend == "toy"
            torch.testing.assert_close(tw.attention(q, k, v), before)
            assert backend.forwards == 1
        finally:
            tw.unregister_backend("toy")
        tw.attention(q, k, v)
        assert backend.forwards == 1
        assert tw.explain(q, k, v).backend == "cpu"
    with pytest.raises(tw.InvalidProblem, match="'toy'"):
        tw.attention(q, k, v, backend="toy")


@pytest.mark.parametrize("name", ["cpu", "auto", "toy", "", "two words", 7])
def test_names_that_clash_or_are_none_are_refused(toy: Toy, name: Any) -> None:
    other = Toy()
    other.name = name
    with pytest.raises(tw.InvalidProblem, match="backend"):
        tw.register_backend(other)
    assert [status.name for status in tw.backends()] == ["hopper", "triton", "cpu", "toy", "reference"]


def test_what_is_no_backend_is_refused() -> None:
    class Half:
        name = "half"

        def forward(self) -> None: ...

    with pytest.raises(tw.InvalidProblem, match="backward, supports, tile_shape, unavailable"):
        tw.register_backend(Half())
    with pytest.raises(tw.InvalidProblem, match="an object"):
        tw.register_backend(Toy)
    with pytest.raises(tw.InvalidProblem, match=r"before.*'gpu'"):
        tw.register_backend(Toy(), before="gpu")
    with pytest.raises(tw.InvalidProblem, match="'cpu'"):
        tw.unregister_backend("cpu")
    with pytest.raises(tw.InvalidProblem, match="'toy'"):
        tw.unregister_backend("toy")


def test_a_registered_backend_passes_cases_of_the_conformance_suite(toy: Toy) -> None:
    for kind in ("dense", "varlen", "paged"):
        case = Case(kind=kind, seqlens_q=(9, 3), seqlens_k=(9, 3), head_dim=16, head_dim_v=16, causal=True)
        check(case, BackendImplementation("toy"))
    assert toy.forwards > 0


def test_what_a_backend_leaves_out_has_a_default(toy: Toy) -> None:
    q, k, v = qkv()
    plan = tw.explain(*(tw.fp8.quantize(t) for t in (q, k, v)), backend="toy")
    assert (plan.quantised, plan.unordered) == ("dequantised before the kernels", None)
    plan = tw.explain(q, k, v, mask=tw.TileMask.prefix(3, 7), backend="toy")
    assert plan.mask is not None
    assert plan.mask.path == "the backend does not say how"
    found = json.loads(CliRunner().invoke(build_app(), ["doctor", "--json"]).stdout)["backends"]
    told = next(found for found in found if found["name"] == toy.name)
    assert [told[key] for key in ("available", "compiler", "cache", "launch_path")] == [True, None, None, None]


class Telling(Toy):
    """Says and does more than it must."""

    def fp8_path(self, problem: AttentionProblem) -> str:
        return f"{problem.codes} as they are"

    def forward_tangent(self, *given: Any) -> Any:
        return REFERENCE.forward_tangent(*given)

    def backward_twice(self, *given: Any) -> Any:
        return REFERENCE.backward_twice(*given)

    def bind_forward(self, problem: AttentionProblem, operands: Operands, *, want_lse: bool) -> Any:
        del operands
        return Prepared(self, problem, want_lse=want_lse)


class Prepared:
    """A pass for the sizes of one problem."""

    def __init__(self, backend: Toy, problem: AttentionProblem, *, want_lse: bool) -> None:
        self.backend, self.problem = backend, problem
        self.made = ("out", "lse") if want_lse else ("out",)

    def __call__(self, tensors: Any, *_: Any) -> list[Tensor]:
        made = self.backend.forward(self.problem, Operands(*tensors))
        return list(made[: len(self.made)])


# Of torch's own rules for forward derivatives.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_what_a_backend_brings_is_used_though_it_inherits_nothing() -> None:
    backend = Telling()
    with installed(backend) as name:
        for length in (5, 7, 5, 7, 7):
            q, k, v = (t[:, :, :length] for t in qkv())
            torch.testing.assert_close(tw.attention(q, k, v, backend=name), tw.attention(q, k, v, backend="reference"))
        assert backend.forwards == 5
        quantised = [tw.fp8.quantize(t) for t in (q, k, v)]
        assert tw.explain(*quantised, backend=name).quantised == "e4m3 as they are"
        assert tw.explain(q, k, v, backend=name).higher.backend == name
        found, expected = (
            torch.func.jvp(lambda q, n=n: tw.attention(q, k, v, backend=n), (q,), (k,)) for n in (name, "reference")
        )
        torch.testing.assert_close(found, expected)


# What a backend need not know, a call that needs it, and the refusal of one that does not know it.
ABILITIES: dict[str, tuple[dict[str, Any], str]] = {
    "tile mask": ({"mask": tw.TileMask.prefix(3, 7)}, r"mask\.dense\(\)"),
    "max_logits": ({"return_max_logits": True}, "does not know max_logits"),
    "batch-invariant": ({"deterministic": "batch"}, "independent of the batch"),
    "softcap": ({"softcap": 2.0}, "does not know softcap"),
    "forward_tangent": ({}, "no tangents"),
}


class Unknowing:
    """The reference without one of its features, or of its methods."""

    name = "unknowing"

    def __init__(self, ability: str) -> None:
        self.ability = ability
        self.honours = dispatch.load("reference").honours - {ability}

    def __getattr__(self, name: str) -> Any:
        if name == self.ability:
            raise AttributeError(name)
        return getattr(dispatch.load("reference"), name)


# Of torch's own rules for forward derivatives.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("ability", ABILITIES)
def test_a_backend_that_does_not_know_a_feature_is_not_asked(ability: str) -> None:
    """It would ignore what it does not know: a mask, say."""
    flags, reason = ABILITIES[ability]
    q, k, v = qkv()

    def attend(q: Tensor, **flags: Any) -> Any:
        return tw.attention(q, k, v, backend="unknowing", **flags)

    with installed(Unknowing(ability)):
        attend(q)
        with pytest.raises(tw.Unsupported, match=reason):
            attend(q, **flags) if flags else torch.func.jvp(attend, (q,), (q,))


ENTRY_POINTS = """
[tilewise.backends]
plugged = plugged_backend:BACKEND
broken = package_that_is_not_there:BACKEND
misnamed = plugged_backend:BACKEND
cpu = plugged_backend:BACKEND
"""
MODULE = """
from tilewise.backends.reference import ReferenceBackend
class Plugged(ReferenceBackend):
    name = "plugged"
BACKEND = Plugged()
"""
PROGRAM = """
import sys, warnings, torch, tilewise as tw
q = torch.randn(1, 1, 4, 8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    tw.attention(q, q, q)
    tw.attention(q, q, q, causal=True)
print(*[w.message for w in caught], sep="\\n")
assert "plugged_backend" not in sys.modules  # nobody needed it
compiled = torch.compile(lambda q: tw.attention(q, q, q, backend="plugged"), backend="eager", fullgraph=True)
assert torch.equal(compiled(q), tw.attention(q, q, q, backend="reference"))
print(*tw.backends(), sep="\\n")
"""


def test_entry_points_register_backends(tmp_path: Path) -> None:
    """A backend that another distribution declares is there without a call; a broken one says so and harms nobody."""
    info = tmp_path / "plugged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "plugged_backend.py").write_text(MODULE)
    paths = [str(tmp_path), str(Path(tw.__file__).parent.parent)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{PROGRAM}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    warned, *rest = done.stdout.strip().split("\n")
    assert "'cpu'" in warned
    assert "plugged" in warned
    listed = dict(line.split(": ", 1) for line in rest)
    assert list(listed) == ["hopper", "triton", "cpu", "broken", "misnamed", "plugged", "reference"]
    assert listed["cpu"] == listed["plugged"] == "available"
    assert "ModuleNotFoundError" in listed["broken"]
    assert "its name is 'plugged'" in listed["misnamed"]
