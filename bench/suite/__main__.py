"""`python -m suite`, with bench/ on the path: the benchmark as text. It needs torch alone, and Triton on a GPU."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from suite.command import Options, chosen_cases, execute
from suite.plots import write_plots
from suite.report import plain
from suite.results import RESULTS, Results, default_path, ensure_writable, read, write
from suite.verdicts import judge_all
from tilewise.errors import TilewiseError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the status is 0 unless the options make no sense."""
    given = _parser().parse_args(arguments)
    options = Options(
        given.device,
        tuple(given.only),
        given.quick,
        given.threads,
        given.seconds_per_case,
        given.max_seconds,
        given.commit,
        given.compile_first,
    )
    try:
        _run(options, given)
    except TilewiseError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _run(options: Options, given: argparse.Namespace) -> None:
    if given.list:
        sys.stdout.write("".join(f"{case.name}\n" for case in chosen_cases(options)))
        return
    if given.results:
        results = read(given.results)
    else:
        if given.output:
            ensure_writable(given.output)
        else:
            RESULTS.mkdir(parents=True, exist_ok=True)
        results = execute(options, _announcer(len(chosen_cases(options))))
        path = given.output or default_path(results)
        write(results, path, judge_all(results))
        sys.stderr.write(f"written: {path}\n")
    sys.stdout.write(plain(results) + "\n")
    if given.plots:
        _draw(results, given.plots, None if given.results else path)


def _draw(results: Results, folder: Path, kept: Path | None) -> None:
    """Plots; where a run was just kept in a file and cannot be drawn here, how to draw it elsewhere."""
    try:
        sys.stderr.write("".join(f"written: {path}\n" for path in write_plots(results, folder)))
    except TilewiseError as error:
        if kept is None:
            raise
        sys.stderr.write(f"no plots here: {error}\nlater: python -m suite --results {kept} --plots {folder}\n")


def _announcer(total: int) -> Callable[[str], None]:
    """One line on stderr per case, with the seconds since the start."""
    start, done = time.monotonic(), 0

    def announce(name: str) -> None:
        nonlocal done
        done += 1
        sys.stderr.write(f"[{done}/{total}] {time.monotonic() - start:5.0f} s  {name}\n")
        sys.stderr.flush()

    return announce


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m suite", description=main.__doc__)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="part of a name, or a group")
    parser.add_argument("--quick", action="store_true", help="the short list, less time for each")
    parser.add_argument("--threads", type=int, help="torch's threads on the CPU")
    parser.add_argument("--seconds-per-case", type=float, help="timing, without checks and compilation")
    parser.add_argument("--max-seconds", type=float, help="cases not begun by then are skipped")
    parser.add_argument("--commit", help="recorded where git does not know it")
    parser.add_argument("--compile-first", type=int, default=0, metavar="N", help="FlexAttention, in N processes")
    parser.add_argument("--output", type=Path, help="the JSON file; bench/results/<device>-<date>.json by default")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write SVG plots there (needs matplotlib)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="report a stored run instead of running")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
