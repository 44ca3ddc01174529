"""What the Hopper kernels may spill: nothing in a hot loop, but for a short list with exact numbers and what is known.

The numbers are of one release of Triton. Others give registers otherwise, and are held to a bound for all.

Whoever makes one of these numbers smaller changes it here; a larger one, or a configuration that is not listed, needs a
measurement of the version that does not spill. Of those listed, WHOLE was timed in bf16 at D=128, in any order, and no
version without ADDRESS or without the 176 of FP8 is known.
"""

from __future__ import annotations

from typing import NamedTuple

from machine_code import LocalAccesses
from tilewise.backends.gpu import releases

__all__ = ["ALLOWED", "Allowed", "hold", "is_recorded"]

# The release whose output was recorded, and what others may spill in hot loops: three warpgroups at D=64 take 127
# accesses by 3.9.0.
RECORDED, ELSEWHERE = "3.6.", 160


class Allowed(NamedTuple):
    """Local loads and stores in the hot loops of a kernel, all its warpgroups together, and why they stay."""

    number: int
    reason: str


# TFLOP/s of a backward or a forward.
WHOLE = "descriptors of K and V made anew: no mask, N = 4096/16384, 556/591 -> 550/582"
ADDRESS = "one address, with a softmax that took causal N = 1024/16384 from 473/662 to 485/668"
WINDOW = "window_left=100 window_right=50"
ALLOWED = {
    "backward d=128": Allowed(2, WHOLE),
    "backward d=96 dtype=torch.float16 seqlen_q=1024 seqlen_k=1024": Allowed(2, WHOLE),
    "backward d=64 dv=128": Allowed(2, WHOLE),
    "backward d=64 causal=True num_kv_heads=4": Allowed(10, "descriptors made anew: N=4096, 472 -> 454"),
    "backward d=64 causal=True softcap=30.0": Allowed(10, "dP issued when P is done: N=4096, 338 -> 334"),
    "forward d=256 causal=True": Allowed(1, ADDRESS),
    "forward d=256 causal=True dtype=torch.float16": Allowed(1, ADDRESS),
    "forward d=256 causal=True softcap=30.0": Allowed(1, ADDRESS),
    f"forward d=256 {WINDOW}": Allowed(1, ADDRESS),
    # O, half of P V and S take 256 registers.
    f"fp8 d=256 dtype=torch.float16 {WINDOW} scale_blocks=(128, 128, 128)": Allowed(176, "188 before: 682 -> 692"),
}


def is_recorded() -> bool:
    """Whether records are of the release that is installed."""
    return releases.installed().startswith(RECORDED)


def hold(name: str, found: LocalAccesses, edges: int) -> None:
    """Fail where a kernel spills otherwise than it may; `edges`: at most so often where tiles are not whole."""
    allowed = ALLOWED.get(name, Allowed(0, ""))
    if not is_recorded():
        assert found.hot <= allowed.number + ELSEWHERE, f"{name}: {found.hot} local accesses in hot loops"
        return
    assert found.hot == allowed.number, f"{name}: {found.hot} local accesses in hot loops, {allowed.number} recorded"
    others = found.aside + found.edges
    assert others <= edges, f"{name}: {others} local accesses at edges or aside, {edges} recorded"
