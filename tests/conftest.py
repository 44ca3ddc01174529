"""Which backends are tested, where, with which cases: --backend NAME (repeatable), --device, --isa, --size."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from emulated_backend import emulated
from interpreting import hasten
from tilewise import cascade, dispatch
from tilewise.backends import NAMES
from tilewise.backends.cpu import isa
from tilewise.testing import Case
from tilewise.testing.threads import one_thread

__all__ = ["emulated"]  # a fixture

# What `--size small` leaves: interpreted kernels take seconds for 65 x 65 scores.
SMALL_SEQLEN, SMALL_HEAD_DIM, SMALL_COUNT = 65, 64, 100
# Of so many cases the reference takes one, unless it is asked for: the oracle is the reference in fp64, which
# test_suite_itself compares with plain PyTorch.
REFERENCE_STEP = 8
# Files whose kernels are emulated, interpreted or only compiled, which uses no threads of torch, or which do not test
# them: that conformance, tests/kv and test_cpu_* do. On a GPU's machine references are larger.
UNTHREADED = tuple(f"test_{name}" for name in ("accuracy", "decode_", "fp8_protocol", "hopper_", "triton_", "two_gpus"))
UNTHREADED = (*UNTHREADED, "test_long_sequences", "test_suite_", "test_tile_masks")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest tests/backends --backend triton --device cuda` tests one backend on a GPU."""
    group = parser.getgroup("tilewise conformance")
    group.addoption("--backend", action="append", default=[], help="test this backend (repeatable; default: all here)")
    group.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where the inputs live")
    group.addoption("--isa", help="CPU kernels from this table instead of the processor's: NEON, AVX2, ...")
    group.addoption("--size", default="full", choices=("full", "small"), help="small: for the Triton interpreter")


def pytest_configure(config: pytest.Config) -> None:
    """The tables differ in lanes and tiles; LLVM makes code for this processor of any of them."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        hasten()
    name = config.getoption("--isa")
    if name is not None:
        table = getattr(isa, name)
        isa.choose = lambda *_: table


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with a `backend` argument runs once per backend; one that has `cases` too, cases outermost.

    Neighbouring tests then share the case, whose oracle is remembered.
    """
    if "backend" not in metafunc.fixturenames:
        return
    names = _backends(metafunc.config)
    cases = getattr(metafunc.function, "cases", None)
    if cases is None:
        metafunc.parametrize("backend", names)
        return
    chosen = _small(cases()) if metafunc.config.getoption("size") == "small" else cases()
    step = 1 if metafunc.config.getoption("backend") else REFERENCE_STEP
    pairs = [
        pytest.param(case, name, id=f"{name}-{case.id}")
        for number, case in enumerate(chosen)
        for name in names
        if name != "reference" or number % step == 0
    ]
    metafunc.parametrize(("case", "backend"), pairs)


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Where the inputs live."""
    return str(pytestconfig.getoption("device"))


@pytest.fixture(autouse=True, scope="module")
def small_work_has_one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """On two busy cores emulated kernels with their references took 36 s by two threads and 14 by one."""
    path = request.path
    unthreaded = path.parent.name == "integrations" or path.name.startswith(UNTHREADED)
    with one_thread() if unthreaded and path.parent.name != "gpu" else contextlib.nullcontext():
        yield


@pytest.fixture
def reference_is_single_threaded(request: pytest.FixtureRequest) -> Iterator[None]:
    """See `one_thread`; the other backends are tested with the threads they are used with."""
    alone = request.getfixturevalue("backend") == "reference"
    with one_thread() if alone else contextlib.nullcontext():
        yield


@pytest.fixture
def always_cascade(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared prefixes are attended once, of whatever size, whether it pays or not."""
    monkeypatch.setattr(cascade, "price_seconds", lambda *_: 0.0)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Any]:
    """A group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _backends(config: pytest.Config) -> list[str]:
    named: list[str] = config.getoption("backend")
    return named or [name for name in NAMES if dispatch.load(name).unavailable() is None]


def _small(cases: Iterable[Case]) -> list[Case]:
    """Cut the cases down, merge those that become equal, and thin out what is still too many."""
    distinct = list(dict.fromkeys(capped(c, SMALL_SEQLEN, SMALL_HEAD_DIM) for c in cases))
    return distinct[:: 1 + len(distinct) // SMALL_COUNT]


def capped(case: Case, seqlen: int, head_dim: int) -> Case:
    """The case with its lengths and head dimensions cut down, for slow implementations such as interpreters."""
    return dataclasses.replace(
        case,
        seqlens_q=tuple(min(n, seqlen) for n in case.seqlens_q),
        seqlens_k=tuple(min(n, seqlen) for n in case.seqlens_k),
        head_dim=min(case.head_dim, head_dim),
        head_dim_v=min(case.head_dim_v, head_dim),
    )
