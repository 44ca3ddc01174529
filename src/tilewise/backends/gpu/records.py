"""Records of both GPU backends: what the host fills, kernels take and their functions pass on, by name.

Each is a NamedTuple, which Triton and Gluon take as an argument and make in device code, as the interpreter and the
emulator of the tests do. A part that a problem does not have is None. Triton 3.6 returns no None from a function of the
device, so a record with a part that may be absent is made where it is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Place(NamedTuple):
    """Coordinates of token 0 of a (sequence, head) in a tensor map; `end` counts for packed rows alone (see
    triton.primitives).
    """

    batch: Any
    end: Any
    head: Any
    row: Any
    column: Any


class Source(NamedTuple):
    """Where tiles of K or V, or of their tangents, come from.

    `base` points to token 0 of the (sequence, head), or to slot 0 of page 0 of the head, whose pages `table` names.
    `box` is a tensor map, in which `place` is where token 0 lies. `scales` are those of 8-bit rows.
    """

    rows: Any
    base: Any
    table: Any
    box: Any
    place: Any
    scales: Any
