"""Benchmarks: tilewise and its peers on the same problems in one process, checked, in turn, with the bars to clear.

    python -m tilewise bench --quick            # or python -m tilewise.bench, which needs neither typer nor rich

docs/benchmarks.md says what is measured and how.
"""

from tilewise.bench.cases import Bar, Case
from tilewise.bench.command import Options, execute
from tilewise.bench.results import Results, read, write

__all__ = ["Bar", "Case", "Options", "Results", "execute", "read", "write"]
