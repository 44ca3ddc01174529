"""Every Triton from 3.6 on: the releases that were tested run as they are, newer ones after a trial, older ones not."""

from __future__ import annotations

import gc
import importlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.backends.gpu import releases, trial
from tilewise.backends.gpu.symbols import KernelCall
from tilewise.errors import Unsupported
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem

KNOWN = ("3.6.0", "3.6.1", "3.7.0", "3.7.1", "3.8.0", "3.9.0", "3.9.0+cu130")
CPU = torch.device("cpu")
both = pytest.mark.parametrize("name", ["hopper", "triton"])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A machine with a GPU and a Triton of the given number; nothing was tried yet."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    trial._outcomes.cache_clear()
    yield lambda number: monkeypatch.setattr(releases, "installed", lambda: number)
    trial._outcomes.cache_clear()


@both
@pytest.mark.parametrize("number", KNOWN)
def test_tested_releases_run(name: str, number: str, installed: Callable[[str], None]) -> None:
    installed(number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.load(name).unavailable() is None


@both
def test_older_releases_are_refused(name: str, installed: Callable[[str], None]) -> None:
    installed("3.5.1")
    reason = dispatch.load(name).unavailable()
    assert reason == "triton 3.5.1 is older than 3.6 (pip install --upgrade triton)"
    installed("")
    assert "not installed" in (dispatch.load(name).unavailable() or "")


class Tried:
    """The CPU's kernels in the place of those that a new compiler made; `wrong` is what is added to a result."""

    name = "hopper"

    def __init__(self, wrong: float = 0.0, raises: str | None = None) -> None:
        self.wrong, self.raises, self.calls = wrong, raises, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(dispatch.load("cpu"), name)

    def forward(self, problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.raises is not None:
            raise ValueError(self.raises)
        out, lse = dispatch.load("cpu").forward(problem, operands)
        return out + self.wrong, lse


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, installed: Callable[[str], None]) -> None:
    """An unknown release, tried on CPU tensors."""
    plain = trial._outcome
    monkeypatch.setattr(trial, "_outcome", lambda backend, _: plain(backend, CPU))
    installed("3.10.0")


@pytest.mark.usefixtures("on_cpu")
def test_a_newer_release_runs_after_a_trial_with_one_warning() -> None:
    backend: Any = Tried()
    with pytest.warns(UserWarning, match=r"triton 3\.10\.0 is newer than the releases that tilewise was tested with"):
        assert trial.failure(backend) is None
    calls = backend.calls
    assert calls == 3  # forward, backward, decoding
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trial.failure(backend) is None
    assert backend.calls == calls


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("tried", "words"),
    [
        (Tried(wrong=0.1), r"triton 3\.10\.0 is newer .* its forward is off by \d+\.\d% of the result"),
        (Tried(wrong=float("nan")), "its forward is off by nan% of the result"),
        (Tried(raises="no such name"), "its forward failed: ValueError: no such name"),
    ],
    ids=["wrong", "nan", "raises"],
)
def test_a_newer_release_that_fails_its_trial_is_refused(tried: Any, words: str) -> None:
    reason = trial.failure(tried)
    assert reason is not None
    assert re.search(words, reason), reason


@pytest.mark.usefixtures("on_cpu")
def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = Tried()
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(Unsupported, match="call attention once before"):
            trial.failure(backend)
    assert backend.calls == 0
    with pytest.warns(UserWarning, match="newer"):
        assert trial.failure(backend) is None


@pytest.mark.usefixtures("on_cpu")
def test_no_mode_of_the_caller_is_in_force_in_a_trial() -> None:
    backend: Any = Tried()
    with torch.inference_mode(), torch.device("meta"), pytest.warns(UserWarning, match="newer"):
        assert trial.failure(backend) is None


def test_kernels_have_one_name_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    modules = [importlib.import_module(f"tilewise.backends.{name}") for name in ("triton.backward", "hopper.decode")]
    kernels = [
        getattr(module, name) for module, name in zip(modules, ("row_stats_kernel", "decode_kernel"), strict=True)
    ]
    functions = [one for one in gc.get_objects() if issubclass(type(one), jit.JITCallable)]

    def named(first: Sequence[Any]) -> list[str]:
        """In a process that has named other functions before."""
        for function in functions:
            monkeypatch.setattr(function, "hash", None)
            monkeypatch.setattr(function, "used_global_vals", {})
        for function in (*first, *kernels):
            KernelCall(function, (1, 1, 1), {})
            assert function.cache_key
        return [kernel.cache_key for kernel in kernels]

    helpers = [one for module in modules for one in vars(module).values() if isinstance(one, jit.JITFunction)]
    assert named(()) == named(helpers) == named(helpers[::-1])
