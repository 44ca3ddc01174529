"""Numbers for people: bytes, counts and times with three significant digits and a unit, nouns with their number."""

from __future__ import annotations


def format_bytes(size: float) -> str:
    """Binary units: 33.0 MiB, 512 B."""
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_count(count: float, of: str = "") -> str:
    """Decimal units: 1.10 T, 640, 17.2 GFLOP, 0 FLOP."""
    return _scaled(count, 1000, tuple(prefix + of for prefix in ("", "k", "M", "G", "T", "P", "E")))


def format_seconds(seconds: float) -> str:
    """1.24 s, 310 ms, 4.20 us."""
    return _scaled(seconds * 1e9, 1000, ("ns", "us", "ms", "s")) if seconds < 1000 else f"{seconds:.0f} s"


def counted(number: int, singular: str, plural: str = "", *, spec: str = "") -> str:
    """A number and the noun in its form: 1 thread, 2 threads, 0 queries (its `plural`). `spec` formats the number."""
    return f"{number:{spec}} {singular if number == 1 else plural or singular + 's'}"


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= base * 0.9995 and power < len(units) - 1:
        value /= base
        power += 1
    if float(value).is_integer() and power == 0:
        digits = 0
    else:
        digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {units[power]}".rstrip()
