"""Checks object files before LLVM loads them, because LLVM aborts the process on one that it cannot read."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

# 64 bits, little endian, version 1.
IDENT = b"\x7fELF\x02\x01\x01"
RELOCATABLE = 1
MACHINES = {"x86_64": 62, "amd64": 62, "aarch64": 183, "arm64": 183}
SYMBOLS, STRINGS, RELOCATIONS, WITHOUT_BYTES = 2, 3, 4, 8
# Section numbers from here on are special (absolute, common).
RESERVED = 0xFF00
FUNCTION, GLOBAL = 2, 1
MOST_ALIGNMENT = 4096

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
RELOCATION = struct.Struct("<QQq")


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class _Malformed(Exception):
    """A malformed object."""


def provides(code: bytes, machine: str, function: str) -> bool:
    """Whether this is a well-formed ELF object for a machine, with a function of this name in it.

    Sections, symbols and relocations must be within the bytes and refer to each other consistently. The instructions
    are not inspected.
    """
    try:
        return function.encode() in set(_functions(code, machine))
    except (_Malformed, struct.error):
        return False


def _require(holds: bool) -> None:
    if not holds:
        raise _Malformed


def _functions(code: bytes, machine: str) -> Iterator[bytes]:
    """Names of the global functions. Raises if the object is malformed."""
    ident, kind, target, _, _, _, start, _, _, _, _, section_size, count, names = HEADER.unpack_from(code)
    _require(ident.startswith(IDENT) and kind == RELOCATABLE and target == MACHINES.get(machine.lower()))
    _require(section_size == SECTION.size and names < count < RESERVED)
    _require(start + count * SECTION.size <= len(code))
    sections = [_Section(*SECTION.unpack_from(code, start + i * SECTION.size)) for i in range(count)]
    labels = _strings(code, sections, names)
    tables = 0
    for section in sections:
        _require(section.kind == WITHOUT_BYTES or section.offset + section.size <= len(code))
        _require(section.name < len(labels) and section.link < count)
        _require(section.alignment <= MOST_ALIGNMENT and section.alignment & (section.alignment - 1) == 0)
        if section.kind == SYMBOLS:
            tables += 1
            yield from _symbols(code, sections, section)
        elif section.kind == RELOCATIONS:
            _check_relocations(code, sections, section)
    _require(tables == 1)


def _bytes(code: bytes, section: _Section) -> bytes:
    _require(section.offset + section.size <= len(code))
    return code[section.offset : section.offset + section.size]


def _strings(code: bytes, sections: list[_Section], number: int) -> bytes:
    _require(number < len(sections) and sections[number].kind == STRINGS)
    found = _bytes(code, sections[number])
    _require(found.endswith(b"\0"))
    return found


def _symbols(code: bytes, sections: list[_Section], table: _Section) -> Iterator[bytes]:
    _require(table.entry_size == SYMBOL.size and table.size % SYMBOL.size == 0)
    labels = _strings(code, sections, table.link)
    for name, info, _, home, value, size in SYMBOL.iter_unpack(_bytes(code, table)):
        _require(name < len(labels) and (home < len(sections) or home >= RESERVED))
        if 0 < home < len(sections):
            _require(value + size <= sections[home].size)
            if info == GLOBAL << 4 | FUNCTION:
                yield labels[name : labels.index(b"\0", name)]


def _check_relocations(code: bytes, sections: list[_Section], table: _Section) -> None:
    _require(table.entry_size == RELOCATION.size and table.size % RELOCATION.size == 0)
    _require(table.info < len(sections) and sections[table.link].kind == SYMBOLS)
    symbols = sections[table.link].size // SYMBOL.size
    for offset, info, _ in RELOCATION.iter_unpack(_bytes(code, table)):
        _require(info >> 32 < symbols and offset + 4 <= sections[table.info].size)
