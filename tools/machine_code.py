"""Where the machine code of a kernel touches local memory: in its hot loops, at their edges, or elsewhere.

A register that does not fit is stored to local memory (STL) and loaded again (LDL). Between tiles that costs little, in
the loop that multiplies it costs every tile. So the listing is read as blocks and jumps, a loop is what a jump back to
a block that dominates it encloses, and local accesses are counted by where they are:

    hot       in an innermost loop that multiplies (HGMMA, QGMMA), on the way that every pass takes
    aside     in such a loop, but on a way that passes leave out: O rescaled, a wait that was not over at once
    edges     in such a loop over the few tiles of a block that are not whole: it compares the place of every score with
              an edge, or has no exponentials, where nothing is seen; of a kernel without another loop this one is hot
    outside   anywhere else: between tiles, before and after the loops

    >>> counted("  /*0000*/ STL [R1], R2 ;")
    LocalAccesses(hot=0, aside=0, edges=0, outside=1)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Block", "LocalAccesses", "Loop", "at_edge", "blocks_of", "counted", "loops_of", "multiplying"]

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P[0-9T])\s+)?([A-Z][\w.]*)(.*)")
LABEL = re.compile(r"^(\.L_x_\d+):")
TARGET = re.compile(r"\.L_x_\d+")
# What ends a block. CALL comes back; BSYNC goes where BSSY said, the label that follows it.
JUMPS = ("BRA", "BRX", "JMP", "EXIT", "RET")
# A mask compares every score of a thread, 32 or more in a tile; loops without one have up to 15 comparisons.
MASK_COMPARISONS = 24


@dataclass(frozen=True)
class Block:
    """Instructions that run one after the other, and the blocks that may come next."""

    opcodes: tuple[str, ...]
    following: tuple[int, ...]

    def count(self, *names: str) -> int:
        """Instructions of these names, with any modifiers."""
        return sum(opcode.split(".")[0] in names for opcode in self.opcodes)


@dataclass(frozen=True)
class Loop:
    """Blocks between a header and the jumps back to it; `always` are those that every pass runs through."""

    header: int
    blocks: frozenset[int]
    always: frozenset[int]


@dataclass(frozen=True)
class LocalAccesses:
    """Local loads and stores of a kernel, by where they are."""

    hot: int
    aside: int
    edges: int
    outside: int


def counted(sass: str) -> LocalAccesses:
    """The local accesses of a kernel, as nvdisasm lists it."""
    blocks = blocks_of(sass)
    loops = multiplying(blocks)
    whole = [loop for loop in loops if not at_edge(blocks, loop)] or loops
    hot = sum(_accesses(blocks, loop.always) for loop in whole)
    aside = sum(_accesses(blocks, loop.blocks - loop.always) for loop in whole)
    edges = sum(_accesses(blocks, loop.blocks) for loop in loops if loop not in whole)
    return LocalAccesses(hot, aside, edges, _accesses(blocks, range(len(blocks))) - hot - aside - edges)


def multiplying(blocks: list[Block]) -> list[Loop]:
    """Innermost loops among those that multiply matrices."""
    loops = [loop for loop in loops_of(blocks) if _number(blocks, loop, "HGMMA", "QGMMA")]
    return [loop for loop in loops if not any(other.blocks < loop.blocks for other in loops)]


def at_edge(blocks: list[Block], loop: Loop) -> bool:
    """Whether a loop compares places one by one, or has no scores to take exponentials of."""
    return _number(blocks, loop, "ISETP") >= MASK_COMPARISONS or not _number(blocks, loop, "MUFU")


def _number(blocks: list[Block], loop: Loop, *names: str) -> int:
    return sum(blocks[b].count(*names) for b in loop.blocks)


def _accesses(blocks: list[Block], chosen: Iterable[int]) -> int:
    return sum(blocks[b].count("LDL", "STL") for b in chosen)


def blocks_of(sass: str) -> list[Block]:
    """Cut a listing at labels and behind jumps."""
    bodies: list[list[tuple[str, str, str]]] = [[]]
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if found := LABEL.match(line):
            if bodies[-1]:
                bodies.append([])
            labels[found[1]] = len(bodies) - 1
        elif found := INSTRUCTION.match(line):
            bodies[-1].append((found[1] or "", found[2], found[3]))
            if _jumps(found[2]):
                bodies.append([])
    opcodes = [tuple(opcode for _, opcode, _ in body) for body in bodies]
    return [Block(names, _following(i, bodies, labels)) for i, names in enumerate(opcodes)]


def _jumps(opcode: str) -> bool:
    return opcode.split(".")[0] in JUMPS


def _following(index: int, bodies: list[list[tuple[str, str, str]]], labels: dict[str, int]) -> tuple[int, ...]:
    """Where a block's last instruction may lead."""
    onwards = {index + 1} if index + 1 < len(bodies) else set()
    if not bodies[index] or not _jumps(bodies[index][-1][1]):
        return tuple(onwards)
    guard, opcode, operands = bodies[index][-1]
    targets = {labels[name] for name in TARGET.findall(operands) if name in labels}
    # Beside a guard, a condition may be an operand (BRA P1, ...) or whether threads agree (BRA.DIV).
    conditional = guard or ".DIV" in opcode or re.match(r"\s*!?U?P\d", operands)
    return tuple(sorted(targets | onwards if conditional else targets))


def loops_of(blocks: list[Block]) -> list[Loop]:
    """Natural loops; jumps back to one header make one loop."""
    dominators = _dominators(blocks)
    backward: dict[int, list[int]] = {}
    for i, block in enumerate(blocks):
        for target in block.following:
            if target in dominators[i]:
                backward.setdefault(target, []).append(i)
    return [_loop(blocks, header, ends, dominators) for header, ends in backward.items()]


def _loop(blocks: list[Block], header: int, ends: list[int], dominators: list[frozenset[int]]) -> Loop:
    before = _preceding(blocks)
    found, open_ends = {header}, list(ends)
    while open_ends:
        block = open_ends.pop()
        if block not in found:
            found.add(block)
            open_ends += before[block]
    always = frozenset.intersection(*(dominators[end] for end in ends))
    return Loop(header, frozenset(found), always & frozenset(found))


def _preceding(blocks: list[Block]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in blocks]
    for i, block in enumerate(blocks):
        for target in block.following:
            before[target].append(i)
    return before


def _dominators(blocks: list[Block]) -> list[frozenset[int]]:
    """For every block the blocks that all ways to it run through; a block that nothing leads to is an entry."""
    before = _preceding(blocks)
    everything = frozenset(range(len(blocks)))
    found = [frozenset({i}) if i == 0 or not before[i] else everything for i in range(len(blocks))]
    changed = True
    while changed:
        changed = False
        for i in range(len(blocks)):
            if i and before[i]:
                new = frozenset.intersection(*(found[b] for b in before[i])) | {i}
                changed, found[i] = changed or new != found[i], new
    return found
