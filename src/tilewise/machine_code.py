"""LLVM in this process: from a module to machine code, and from machine code to a function in memory.

llvmlite is imported by the first call that needs it. LLVM's global context takes one thread at a time, so whoever
builds, compiles or loads code does it within `lock`. fork() waits for the lock, else the child would find it locked.
"""

from __future__ import annotations

import os
import threading
from typing import Any, NamedTuple

lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class Loaded(NamedTuple):
    """A function in memory, which the engine owns."""

    address: int
    engine: Any


def target_machine() -> Any:
    """A new code generator for this processor. An engine owns the one that it is given, so none is shared."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    features = binding.get_host_cpu_features().flatten()
    return target.create_target_machine(
        cpu=binding.get_host_cpu_name(), features=features, opt=3, reloc="pic", codemodel="jitdefault", jit=True
    )


def optimise(module: Any, machine: Any) -> Any:
    """The parsed module after the usual optimisation passes."""
    from llvmlite import binding

    parsed = binding.parse_assembly(str(module))
    parsed.triple, parsed.data_layout = machine.triple, str(machine.target_data)
    options = binding.create_pipeline_tuning_options(speed_level=2)
    # Code that gains from vectors is vectorised already. These passes would only bloat the rest.
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.loop_unrolling = False
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return parsed


def object_of(module: Any) -> bytes:
    """The machine code of a module, as an object file for this processor."""
    machine = target_machine()
    return bytes(machine.emit_object(optimise(module, machine)))


def load(code: bytes, symbol: str) -> Loaded:
    """The function of this name in an object file. An engine that compiles itself would keep a MiB more."""
    from llvmlite import binding

    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target_machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Loaded(engine.get_function_address(symbol), engine)
