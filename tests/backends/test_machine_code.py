"""Local loads and stores are counted where they are: listings written by hand, and what loops are made of."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", minversion="3.6")
machine_code = pytest.importorskip("machine_code")

SCORES = ["HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT", "MUFU.EX2 R3, R4"]
MASK = ["ISETP.GE.AND P2, PT, R5, 0x8, PT", "FSEL R3, R3, RZ, P2"] * 32
LOAD, STORE = "LDL.LU R4, [R1+0x8]", "STL [R1+0x8], R4"


def listing(*lines: str) -> str:
    """As nvdisasm prints it: labels at the margin, every instruction with its address and a comment."""
    shown = [line if line.startswith(".L") else f"        /*{16 * i:04x}*/  {line} ;" for i, line in enumerate(lines)]
    return "\n".join(['        .headerflags @"EF_CUDA_SM90"', ".text.kernel:", *shown])


def counts(*lines: str) -> tuple[int, int, int, int]:
    """(hot, aside, edges, outside)."""
    found = machine_code.counted(listing(*lines, "EXIT"))
    return found.hot, found.aside, found.edges, found.outside


def looped(label: str, *body: str) -> list[str]:
    """A loop that is left when P0 is not set."""
    return [f"{label}:", *body, f"@P0 BRA `({label})"]


def test_a_loop_is_hot_if_it_multiplies() -> None:
    """Straight code and other loops may spill."""
    hot = looped(".L_x_1", *SCORES, LOAD, STORE, "@!P3 LDL R9, [R1]")
    assert counts(STORE, *hot, *looped(".L_x_2", LOAD, "MUFU.EX2 R3, R4"), LOAD) == (3, 0, 0, 3)


def test_a_masked_loop_is_an_edge() -> None:
    masked = looped(".L_x_1", *SCORES, *MASK, LOAD)
    whole = looped(".L_x_2", *SCORES, STORE, LOAD)
    assert counts(*masked, *whole) == (2, 0, 1, 0)


def test_the_only_loop_is_hot_even_with_a_mask() -> None:
    """Decoding masks every tile."""
    assert counts(*looped(".L_x_1", *SCORES, *MASK, LOAD)) == (1, 0, 0, 0)


def test_what_a_pass_may_leave_out_is_aside() -> None:
    """A branch around the rescaling of O, here with a spill in it, and one behind it."""
    rescaled = ["@!P1 BRA `(.L_x_3)", "FMUL R8, R8, R9", LOAD, ".L_x_3:", STORE]
    assert counts(*looped(".L_x_1", *SCORES, *rescaled)) == (1, 1, 0, 0)


def test_a_wait_out_of_line_is_aside() -> None:
    """ptxas puts the code of a wait that is not over at once behind the kernel's end, from where it jumps back.

    The loop of the wait itself is not innermost among those that multiply: it does not.
    """
    ready = ["SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR5], R6", "@!P1 BRA `(.L_x_8)", ".L_x_9:"]
    hot = looped(".L_x_1", *ready, *SCORES, LOAD)
    waiting = [".L_x_8:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR5], R6", "@!P1 BRA `(.L_x_8)", STORE, "BRA `(.L_x_9)"]
    assert counts(*hot, "EXIT", *waiting) == (1, 1, 0, 0)
