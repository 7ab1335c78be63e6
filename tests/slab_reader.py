"""An independent reader of the slab format, written from docs/format.md alone.

It shares no code with kvfold: engine tests compare what it finds with the pages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash


class Slot(NamedTuple):
    key: bytes
    namespace: bytes
    payload: bytes
    sequence: int
    slot_bytes: int
    slab: int
    index: int


def read_slots(root: Path) -> Iterator[Slot]:
    """Yield every valid slot below `root`: slabs by number, slots by index.

    Raises ValueError if `root` is not of format 1.
    """
    if (root / "format").read_bytes() != b"kvfold-disk 1\n":
        raise ValueError(f"{root}: not a kvfold disk of format 1")
    for path in sorted((root / "slabs").iterdir()):
        stem, dot, kind = path.name.partition(".")
        proper = len(stem) == 8 and set(stem) <= set("0123456789abcdef") and dot + kind == ".slab"
        if proper and path.is_file() and not path.is_symlink():
            yield from _read_slab(path, int(stem, 16))


def _read_slab(path: Path, number: int) -> Iterator[Slot]:
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(4096)
        if len(head) != 4096 or _xxh3(head[:40]) != head[40:56] or head[:8] != b"KVFDSLAB":
            return
        version, slot_count, slot_bytes = struct.unpack("<IIQ", head[8:24])
        slab_epoch = head[24:40]
        if version != 1 or not 1 <= slot_count <= 1_048_576:
            return
        if slot_bytes % 4096 or not 4096 <= slot_bytes <= 1_073_741_824:
            return
        for index in range(slot_count):
            begin = 4096 + index * (4096 + slot_bytes)
            if begin + 4096 + slot_bytes > file_bytes:
                return
            file.seek(begin)
            fields = file.read(144)
            if len(fields) != 144 or _xxh3(fields[:128]) != fields[128:]:
                continue
            if fields[:12] != b"KVFDSLOT\1\0\0\0" or fields[16:32] != slab_epoch:
                continue
            payload_bytes, sequence = struct.unpack("<QQ", fields[96:112])
            if not 1 <= payload_bytes <= slot_bytes:
                continue
            file.seek(begin + 4096)
            payload = file.read(payload_bytes)
            if len(payload) == payload_bytes and _xxh3(payload) == fields[112:128]:
                key, namespace = fields[32:64], fields[64:96]
                yield Slot(key, namespace, payload, sequence, slot_bytes, number, index)


def _xxh3(data: bytes) -> bytes:
    return xxhash.xxh3_128(data, seed=0).digest()
