"""Benchmarks: tilewise and its peers on the same problems in one process, checked, in turn, with the bars to clear.

    PYTHONPATH=src:bench python3 -m suite --quick      # with torch alone, and Triton on a GPU

docs/benchmarks.md says what is measured and how.
"""

from suite.cases import Bar, Case
from suite.command import Options, execute
from suite.results import Results, read, write

__all__ = ["Bar", "Case", "Options", "Results", "execute", "read", "write"]
