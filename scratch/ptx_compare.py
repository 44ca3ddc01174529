# ruff: noqa
# fmt: off
"""Compile every shipped kernel configuration of two trees without a GPU, and compare what ptxas is given and makes.

    ptx_compare.py build TREE OUT [--triton DIR] [--only TEXT]   # resumable; one file per kernel under OUT
    ptx_compare.py compare OUT_A OUT_B [--all]                   # PTX equal? registers and spills?

`build` runs with a Python that has torch; --triton DIR puts another Triton release in front. The cases are those of
the tree's own ahead-of-time tests: tests/backends/triton_cases.py for sm_90 and sm_80, hopper_choices.py for sm_90a.
Kernels that several cases share are compiled once. The name of a file is (device, case, head dim, kernel, number).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path


def normalised(ptx: str) -> str:
    """PTX without comments, line information and parameter names."""
    lines = []
    for line in ptx.splitlines():
        line = re.sub(r"//.*", "", line).strip()
        if not line or line.startswith((".loc", ".file", ".version", "$L__tmp", "$L__func", "$L__info", ".section")):
            continue
        if line.startswith(".b8") or line in ("}", "{") and lines and lines[-1] == line == "}":
            continue
        lines.append(line)
    text = "\n".join(lines)
    return re.sub(r"\b\w+_kernel_param_(\d+)", r"param_\1", text)


def build(tree: Path, out: Path, only: str, backends: str) -> None:
    sys.path[:0] = [str(tree / "src"), str(tree / "tests" / "backends"), str(tree / "tests"), str(tree / "tools")]
    os.environ["TILEWISE_X"] = ""
    import tilewise

    assert str(tree) in tilewise.__file__, tilewise.__file__
    import triton

    print("tree", tree, "triton", triton.__version__, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    from tilewise import device as devices
    from tilewise.backends.gpu import compilation

    def work():
        if "triton" in backends:
            import triton_cases

            for place in triton_cases.places():
                if place[0] in ("h200", "a100"):
                    for number, call in enumerate(triton_cases.calls_of(*place)):
                        yield (*place, call.kernel.__name__, number), call, devices.named(place[0])
        if "hopper" in backends:
            import hopper_aot
            import hopper_choices
            import test_hopper_aot

            for at, kernel in enumerate(test_hopper_aot.KERNELS):
                problem = hopper_choices.FAMILIES[kernel.family].problem(**kernel.features)
                for number, call in enumerate(hopper_aot.calls_of(problem, hopper_aot.HOPPER)):
                    yield ("hopper", f"first {at}", kernel.family, call.kernel.__name__, number), call, hopper_aot.HOPPER
            for family in hopper_choices.FAMILIES:
                for at, problem in enumerate(hopper_choices.cover(family)):
                    for number, call in enumerate(hopper_aot.calls_of(problem, hopper_aot.HOPPER)):
                        yield ("hopper", family, at, call.kernel.__name__, number), call, hopper_aot.HOPPER

    seen: dict[object, str] = {}
    index_path = out / f"index-{backends}.json"
    index: dict[str, str] = {}
    began, made = time.time(), 0
    for key, call, spec in work():
        name = " ".join(map(str, key))
        if only and not re.search(only, name):
            continue
        types = compilation.types_of(call)
        same = (id(call.kernel), types, tuple(call.options.items()), spec.capability)
        if same in seen:
            index[name] = seen[same]
            continue
        seen[same] = name
        index[name] = name
        path = out / (re.sub(r"[^\w.]+", "-", name) + ".json")
        if path.exists():
            continue
        try:
            compiled = compilation.compile_call(call, spec, -1, types)
            ptx = compiled.asm["ptx"]
            registers, spilled, serial = assembled(ptx, compilation, spec, call)
            found = {
                "registers": registers, "spilled": spilled, "serialised": serial,
                "shared": compiled.metadata.shared, "ptx": normalised(ptx), "raw": ptx,
            }
        except Exception as error:  # noqa: BLE001
            found = {"error": repr(error)[-2000:]}
            print("FAILED", name, repr(error)[-800:], flush=True)
        path.write_text(json.dumps(found))
        compilation.forget_compiled()
        made += 1
        if made % 20 == 0:
            print(made, name, f"{time.time() - began:.0f} s", flush=True)
    old = json.loads(index_path.read_text()) if index_path.exists() and only else {}
    index_path.write_text(json.dumps(old | index))
    print("done", len(index), "calls,", len(set(index.values())), "kernels", f"{time.time() - began:.0f} s", flush=True)


def assembled(ptx: str, compilation: object, spec: object, call: object) -> tuple[int, int, bool]:
    from tilewise.backends.gpu import releases

    target = re.search(r"\.target (sm_\w+)", ptx)[1]
    capability = int(target.removeprefix("sm_").rstrip("a"))
    command = [releases.ptxas(capability), "-v", f"--gpu-name={target}", "-", "-o", "/dev/null"]
    options = call.options
    if options.get("ptx_options"):
        command[1:1] = options["ptx_options"].split()
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True)
    log = done.stderr + done.stdout
    registers = int(re.findall(r"Used (\d+) registers", log)[0])
    return registers, sum(map(int, re.findall(r"(\d+) bytes spill", log))), "serializ" in log


def load(out: Path) -> dict[str, dict]:
    """The kernels by name; of a build that has not ended, by the names of files."""
    index: dict[str, str] = {}
    for path in out.glob("index-*.json"):
        index |= json.loads(path.read_text())
    for path in out.glob("*.json"):
        if not path.name.startswith("index-"):
            index.setdefault(path.stem, path.stem)
    index = {re.sub(r"[^\w.]+", "-", name): first for name, first in index.items()}
    files = {}
    found = {}
    for name, first in index.items():
        path = out / (re.sub(r"[^\w.]+", "-", first) + ".json")
        if first not in files:
            files[first] = json.loads(path.read_text()) if path.exists() else {"error": "missing"}
        found[name] = files[first]
    return found


def shuffled(ptx: str) -> list[str]:
    """The instructions without registers, parameter numbers and labels, sorted: equal if only their order differs."""
    return sorted(re.sub(r"%\w+|param_\d+|\$L\w+|BB\d+_\d+", "_", line) for line in ptx.splitlines() if not line.startswith((".reg", ".param")))


def compare(a: Path, b: Path, verbose: bool) -> None:
    old, new = load(a), load(b)
    equal, unequal, missing = 0, [], sorted(set(old) ^ set(new))
    moved = 0
    seen = set()
    for name in old:
        if name not in new:
            continue
        x, y = old[name], new[name]
        pair = (id(x), id(y))
        if pair in seen:
            continue
        seen.add(pair)
        if "error" in x or "error" in y:
            print("ERROR", name, x.get("error"), y.get("error"))
        elif x["ptx"] == y["ptx"]:
            equal += 1
        elif shuffled(x["ptx"]) == shuffled(y["ptx"]) and (x["registers"], x["spilled"]) == (y["registers"], y["spilled"]):
            moved += 1
        else:
            unequal.append(name)
    print(f"{len(seen)} pairs of kernels: {equal} equal PTX, {moved} the same instructions in another order, {len(unequal)} neither; {len(missing)} calls in one tree only")
    for name in missing[:40] if not verbose else missing:
        print("only in one:", name, "(old)" if name in old else "(new)")
    for name in unequal:
        x, y = old[name], new[name]
        lines = (len(x["ptx"].splitlines()), len(y["ptx"].splitlines()))
        print(
            f"{name}: registers {x['registers']} -> {y['registers']}, spilled {x['spilled']} -> {y['spilled']}, "
            f"shared {x['shared']} -> {y['shared']}, PTX lines {lines[0]} -> {lines[1]}"
            + (f" SERIALISED {x['serialised']} -> {y['serialised']}" if x["serialised"] or y["serialised"] else "")
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("build", "compare"))
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--triton")
    parser.add_argument("--only", default="")
    parser.add_argument("--backends", default="triton,hopper")
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    if given.what == "compare":
        compare(given.a, given.b, given.all)
    else:
        if given.triton:
            sys.path.insert(0, given.triton)
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
        build(given.a.resolve(), given.b, given.only, given.backends)
