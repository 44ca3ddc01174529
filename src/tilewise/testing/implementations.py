"""What can be tested: backends of tilewise through its public API, and foreign implementations through adapters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewise import api, dispatch, validation
from tilewise import device as devices
from tilewise.arguments import KINDS, OPTIONS, taken_by
from tilewise.operands import LENGTHS, Lengths, Operands, Options
from tilewise.problem import AttentionProblem
from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs, make_inputs
from tilewise.testing.quantised import attended
from tilewise.testing.results import Results, differentiate, dropout_seed
from tilewise.tile_masks import TileMask


class Implementation(Protocol):
    """Anything that computes attention: says which cases it takes, then computes them with gradients."""

    @property
    def name(self) -> str:
        """Its name in reports."""

    @property
    def device(self) -> torch.device:
        """The device of its inputs."""

    def supports(self, case: Case) -> str | None:
        """None if it takes the case, else the reason why not."""

    def run(self, case: Case, inputs: Inputs) -> Results:
        """out, lse (if it has one) and the gradients the case asks for, by name."""


class BackendImplementation:
    """A backend of tilewise, called by name through `attention`, `attention_varlen` and `attention_paged`.

    >>> BackendImplementation("reference").supports(Case()) is None
    True
    """

    def __init__(self, name: str, device: torch.device | str = "cpu") -> None:
        self.name = name
        self.device = torch.device(device)

    def rounds_p(self, case: Case) -> bool:
        """Whether probabilities are rounded to e4m3, as docs/contract.md allows for FP8 tensor cores."""
        return self.name == "hopper" and case.fp8 not in ("", "kv", "int8")

    def supports(self, case: Case, *, higher: bool = False) -> str | None:
        """The backend's answer for the problem of the case, or for tangents and second derivatives of it."""
        backend = dispatch.load(self.name)
        inputs = make_inputs(case, self.device, drawn=False)
        spec = devices.of(self.device)
        problem = dataclasses.replace(_problem(case, inputs, self.name), higher=higher)
        return backend.unavailable() or dispatch.refusal(backend, problem, spec)

    def run(self, case: Case, inputs: Inputs) -> Results:
        """The public API with `backend=` this one."""
        return differentiate(case, inputs, lambda leaves: call_api(case, leaves, self.name))


@contextlib.contextmanager
def installed(backend: Any) -> Iterator[str]:
    """Within the block `backend=<its name>` runs this object, as if it were registered: yields the name."""
    api.register_backend(backend)
    try:
        yield backend.name
    finally:
        api.unregister_backend(backend.name)


def call_api(case: Case, inputs: Inputs, backend: str, **more: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of the case's public function, called with `more` arguments than the case has."""
    function = getattr(api, KINDS[case.kind])
    named = arguments_of(case, inputs) | {"backend": backend, "return_lse": True} | more
    return function(*attended(case, inputs), **named)  # type: ignore[no-any-return]


def arguments_of(case: Case, inputs: Inputs) -> dict[str, Any]:
    """What the case's call is given besides q, k and v: of its arguments all that a case or its inputs have."""
    given = dict(zip(("max_seqlen_q", "max_seqlen_k"), _bounds(case), strict=True))
    given |= {"mask": mask_of(case, inputs), "seed": dropout_seed(case)}
    attended = ("q", "k", "v", "k_pages", "v_pages")
    names = [name for name in taken_by(KINDS[case.kind]) if name not in attended]
    for name in names:
        for source in (inputs, case):
            if name not in given and hasattr(source, name):
                given[name] = getattr(source, name)
    return {name: value for name, value in given.items() if name in names}


def mask_of(case: Case, inputs: Inputs) -> Any:
    """The mask as the call gets it; of a tile mask, only batch and heads broadcast."""
    if inputs.mask is None or not case.tiles:
        return inputs.mask
    return TileMask.from_dense(inputs.mask.expand(*inputs.mask.shape[:-2], case.seqlen_q, case.seqlen_k))


def _bounds(case: Case) -> tuple[int | None, int | None]:
    """The longest lengths as the call gets them: dense and decoding calls take none, pages none for keys."""
    if case.kind == "dense" or case.bounds == "none":
        return None, None
    return None if case.decode else case.seqlen_q, None if case.kind == "paged" else case.seqlen_k


def _problem(case: Case, inputs: Inputs, backend: str) -> AttentionProblem:
    arguments = arguments_of(case, inputs)
    options = Options(**{name: value for name, value in arguments.items() if name in OPTIONS}, backend=backend)
    lengths = Lengths(**{name: value for name, value in arguments.items() if name in LENGTHS})
    tensors = {name: value for name, value in arguments.items() if name in Operands._fields and name != "seed"}
    given, seed, needs_grad = Operands(*attended(case, inputs), **tensors), dropout_seed(case), bool(case.wants_grad)
    operands, flags = validation.checked(case.kind, given, options, lengths, seed, cast=False, needs_grad=needs_grad)
    return validation.problem_of(case.kind, operands, flags)
