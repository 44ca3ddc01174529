"""Test a backend, or another library's attention, against the contract.

    from tilewise.testing import BackendImplementation, Case, check
    check(Case(causal=True, dropout=0.1), BackendImplementation("cpu"))

`check` makes the case's tensors (odd strides, NaN in everything that must not be read), computes the fp64 reference and
the tolerance, runs the implementation on NaN-filled memory and raises `Nonconformance` with a report. The cases of the
conformance suite come from `tilewise.testing.generation`.
"""

from tilewise.testing.cases import Case
from tilewise.testing.conformance import (
    Nonconformance,
    check,
    check_largest,
    check_repeatable,
    check_unread,
    check_untouched,
    check_written,
    find_faults,
    run,
)
from tilewise.testing.higher import check_higher, check_higher_repeatable
from tilewise.testing.implementations import BackendImplementation, Implementation, installed
from tilewise.testing.inputs import Inputs, make_inputs
from tilewise.testing.oracle import Expectation, expect
from tilewise.testing.poison import uninitialised_is_nan

__all__ = [
    "BackendImplementation",
    "Case",
    "Expectation",
    "Implementation",
    "Inputs",
    "Nonconformance",
    "check",
    "check_higher",
    "check_higher_repeatable",
    "check_largest",
    "check_repeatable",
    "check_unread",
    "check_untouched",
    "check_written",
    "expect",
    "find_faults",
    "installed",
    "make_inputs",
    "run",
    "uninitialised_is_nan",
]
