"""The walk: which classes there are, a process for each type, a line for each result."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

__all__ = ["NAMES", "classes_of", "main", "types", "visit", "walk"]

NAMES = ("tilewise", "tilewise_flash")
LARGEST = 20_000_000  # parameters

# Mappings of the auto classes whose models differ in their attention; the first class of a type that is found in one
# group stands for the group.
GROUPS = (
    (
        "SEQ_TO_SEQ_CAUSAL_LM",
        "SPEECH_SEQ_2_SEQ",
        "IMAGE_TEXT_TO_TEXT",
        "MULTIMODAL_LM",
        "TEXT_TO_WAVEFORM",
        "CAUSAL_LM",
    ),
    ("MASKED_LM",),
)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="zoo", description="tilewise under every model of transformers")
    parser.add_argument("--types", help="model types, with commas; all of them unless given")
    parser.add_argument("--name", choices=NAMES, help="one name of tilewise; both unless given")
    parser.add_argument("--classes", choices=("main", "all"), default="main")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a type may take")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--eager", action="store_true", help="only what can be built and runs with eager attention")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks of unclear errors")
    options = parser.parse_args(arguments)
    _prepare()
    wanted = options.types.split(",") if options.types else types()
    names = () if options.eager else (options.name,) if options.name else NAMES
    found = walk(wanted, names, options.classes, options.jobs, options.limit, options.verbose, options.output)
    counts: dict[str, int] = {}
    for entry in found["results"]:
        counts[entry["outcome"]] = counts.get(entry["outcome"], 0) + 1
    _print(f"transformers {found['transformers']}: " + ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())))
    return 1 if counts.get("wrong") or counts.get("unclear") else 0


def _prepare() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    import warnings

    warnings.filterwarnings("ignore")


def types() -> list[str]:
    """Model types that have a model."""
    from transformers.models.auto import modeling_auto

    known: set[str] = set()
    for mapping in _mappings(modeling_auto):
        known |= set(getattr(modeling_auto, mapping))
    return sorted(known)


def _mappings(module: Any) -> list[str]:
    return [name for name in dir(module) if name.startswith("MODEL_") and name.endswith("MAPPING_NAMES")]


def classes_of(model_type: str, which: str = "main") -> list[str]:
    """Names of the classes to visit."""
    from transformers.models.auto import modeling_auto

    def named(mapping: str) -> list[str]:
        value = getattr(modeling_auto, mapping, {}).get(model_type, ())
        return [value] if isinstance(value, str) else list(value)

    if which == "all":
        everything = [name for mapping in _mappings(modeling_auto) for name in named(mapping)]
        return sorted(dict.fromkeys(everything))
    found: list[str] = []
    for group in GROUPS:
        candidates = [name for part in group for name in named(f"MODEL_FOR_{part}_MAPPING_NAMES")]
        found += candidates[:1]
    found = found or named("MODEL_MAPPING_NAMES")
    if not found:
        found = [name for mapping in _mappings(modeling_auto) for name in named(mapping)][:1]
    return list(dict.fromkeys(found))


def walk(
    wanted: list[str],
    names: tuple[str, ...],
    which: str,
    jobs: int,
    limit: float,
    verbose: bool = False,
    output: Path | None = None,
) -> dict[str, Any]:
    """Visit types in processes of their own: a line for each on standard output, and all there is in `output`."""
    import transformers

    # Loaded once, for all the processes.
    import transformers.models.llama.modeling_llama

    import tilewise.integrations.transformers  # noqa: F401

    context = multiprocessing.get_context("fork")
    waiting = list(reversed(wanted))
    running: dict[Any, tuple[str, Any, float]] = {}
    results: list[dict[str, Any]] = []
    found = {"transformers": transformers.__version__, "results": results}
    begin = time.monotonic()
    while waiting or running:
        while waiting and len(running) < jobs:
            model_type = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(sender, model_type, names, which, verbose))
            process.start()
            sender.close()
            running[receiver] = (model_type, process, time.monotonic())
        ready = multiprocessing.connection.wait(list(running), timeout=1.0)
        for receiver in list(running):
            model_type, process, started = running[receiver]
            taken = time.monotonic() - started
            if receiver in ready:
                try:
                    entries = receiver.recv()
                except EOFError:
                    process.join()
                    entries = [
                        _entry(model_type, "", "", "unclear", f"the process ended with status {process.exitcode}")
                    ]
            elif taken > limit:
                process.kill()
                entries = [_entry(model_type, "", "", "unclear", f"not done after {limit:.0f} s")]
            else:
                continue
            process.join()
            del running[receiver]
            results += entries
            done = len(wanted) - len(waiting) - len(running)
            for entry in entries:
                _say(entry, f"{done}/{len(wanted)} {time.monotonic() - begin:5.0f} s")
            results.sort(key=lambda entry: (entry["type"], entry["class"], entry["name"]))
            if output is not None:
                output.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return found


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _say(entry: dict[str, Any], progress: str) -> None:
    what = f"{entry['type']} {entry['class']} {entry['name']}"
    _print(f"[{progress}] {entry['outcome']:9} {what} {entry['reason'][:300]}")


def _entry(model_type: str, cls: str, name: str, outcome: str, reason: str, **more: Any) -> dict[str, Any]:
    return {"type": model_type, "class": cls, "name": name, "outcome": outcome, "reason": reason, **more}


def _child(sender: Any, model_type: str, names: tuple[str, ...], which: str, verbose: bool) -> None:
    entries = visit(model_type, names, which, verbose)
    sender.send(entries)
    sender.close()
    sys.stdout.flush()
    os._exit(0)


def visit(
    model_type: str, names: tuple[str, ...] = NAMES, which: str = "main", verbose: bool = False
) -> list[dict[str, Any]]:
    """What is found about one type: an entry for each class and name."""
    import torch
    import transformers

    from zoo.judge import judge
    from zoo.tiny import NotBuilt, first_line, tiny_config
    from zoo.yardstick import Yardstick

    calls = _count_calls(names)
    entries = []
    for cls_name in classes_of(model_type, which):
        try:
            config = tiny_config(model_type)
            try:
                cls = getattr(transformers, cls_name)
                with torch.device("meta"):
                    size = sum(p.numel() for p in cls._from_config(config, attn_implementation="eager").parameters())
            except Exception as error:
                raise NotBuilt(f"the model: {first_line(error)}") from error
            if size > LARGEST:
                raise NotBuilt(f"the model has {size / 1e6:.0f} million parameters")
            try:
                yardstick = Yardstick(cls, config)
            except NotBuilt:
                raise
            except Exception as error:
                if verbose:
                    traceback.print_exc()
                raise NotBuilt(f"eager attention: {first_line(error)}") from error
        except NotBuilt as error:
            if verbose:
                traceback.print_exc()
            entries.append(_entry(model_type, cls_name, "", "not built", str(error)))
            continue
        if not names:
            entries.append(_entry(model_type, cls_name, "", "runs", ", ".join(b.case for b in yardstick.batches)))
        for name in names:
            finding = judge(cls, config, name, calls, yardstick)
            entries.append(_entry(model_type, cls_name, name, **dataclasses.asdict(finding)))
    return entries


def _count_calls(names: tuple[str, ...]) -> Any:
    """Register tilewise so that its calls are counted; returns what reads the count."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from tilewise.integrations.transformers import register

    register()
    count = 0

    def counting(forward: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return forward(*args, **kwargs)

        return counted

    for name in names:
        AttentionInterface.register(name, counting(ALL_ATTENTION_FUNCTIONS[name]))
    return lambda: count
