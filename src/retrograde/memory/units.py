"""Bytes and seconds as people write and read them: decimal units, one digit after the point."""

from __future__ import annotations

import re

_BYTES = ("B", "kB", "MB", "GB", "TB")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def human(count: float) -> str:
    """A number of bytes, in decimal units.

    >>> human(812), human(8_388_608), human(54_400_000_000), human(999_960)
    ('812 B', '8.4 MB', '54.4 GB', '1.0 MB')
    """
    if abs(count) < 1000:
        return f"{count:.0f} B"
    scaled, unit = float(count), 0
    while abs(round(scaled, 1)) >= 1000 and unit < len(_BYTES) - 1:
        scaled, unit = scaled / 1000, unit + 1
    return f"{scaled:.1f} {_BYTES[unit]}"


def parse_bytes(text: str) -> int:
    """The number of bytes in a text: the inverse of `human`. "GB" are decimal, "GiB" binary.

    >>> parse_bytes("24GB"), parse_bytes("1.5 GiB"), parse_bytes("16e9")
    (24000000000, 1610612736, 16000000000)
    """
    match = re.fullmatch(r"\s*((?:\d+\.?\d*|\.\d+)(?:e\d+)?)\s*([kmgt]?)(i?)(b?)\s*", text.lower())
    if match is None or (match[3] and not (match[2] and match[4])):
        raise ValueError(f"a number of bytes is written as 24GB, 1.5GiB or 4096; got {text!r}.")
    number, prefix, binary, _ = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" kmgt".index(prefix) if prefix else 0))


def duration(seconds: float) -> str:
    """A time of seconds or less.

    >>> duration(1.5), duration(0.0123), duration(4.2e-5)
    ('1.5 s', '12.3 ms', '42.0 µs')
    """
    scale, unit = next((pair for pair in _SECONDS if abs(seconds) >= pair[0]), _SECONDS[-1])
    return f"{seconds / scale:.1f} {unit}"
