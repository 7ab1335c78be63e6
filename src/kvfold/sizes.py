"""Sizes as people write them: "4GiB", "512 MiB", 4096."""

from __future__ import annotations

import re

from kvfold.errors import ConfigError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGTP", 1)},
    **{f"{p}B": 1000**i for i, p in enumerate("KMGTP", 1)},
}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")


def parse_bytes(field: str, value: object) -> int:
    """Return `value` (an int, or text such as "4GiB") in bytes.

    Raises `ConfigError` naming `field` for anything else, and for negative numbers.
    """
    expected = 'a size such as "4GiB", "512MiB" or a whole number of bytes'
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(field, value, expected)
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(field, value, expected)
        return value
    match = _SIZE.match(value)
    unit = None if match is None else _UNITS.get(match[2])
    if match is None or unit is None:
        raise ConfigError(field, value, expected)
    return int(float(match[1]) * unit)


def format_bytes(count: float) -> str:
    """Return `count` bytes for people, in binary units with three significant figures."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            # Three figures, but never an exponent between 1000 and 1023.
            digits = ".0f" if unit == "B" or abs(count) >= 999.5 else ".3g"
            return f"{count:{digits}} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
