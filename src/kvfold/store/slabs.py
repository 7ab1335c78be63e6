"""Slabs and their slots as bytes: headers, checks, and one transfer of one slot (docs/format.md).

Nothing here knows about quotas, classes or who owns a slot; that is `kvfold.store.disk`.
"""

from __future__ import annotations

import enum
import errno
import mmap
import re
import struct
import threading
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from kvfold.store.files import FileSystem

PAGE = 4096
VERSION = 1
MAX_SLOT_BYTES = 1 << 30
MAX_SLOT_COUNT = 1 << 20
SLAB_SIZE_BYTES = 64 << 20

_SLAB_MAGIC = b"KVFDSLAB"
_SLOT_MAGIC = b"KVFDSLOT"
_SLAB = struct.Struct("<8sIIQ16s")
_SLOT = struct.Struct("<8sI4x16s32s32sQQ16s")
_SUM = 16
_NAME = re.compile(r"([0-9a-f]{8})\.slab")


class ReadOutcome(enum.Enum):
    """What came of reading a slot. Anything but OK is a miss, and the slot is free space."""

    OK = "ok"
    CORRUPT_HEADER = "header"
    CORRUPT_EPOCH = "epoch"
    CORRUPT_KEY = "key"
    CORRUPT_NAMESPACE = "namespace"
    CORRUPT_LENGTH = "length"
    CORRUPT_CHECKSUM = "checksum"


@dataclass(frozen=True, slots=True)
class SlabShape:
    """Slots of `slot_bytes` (a multiple of 4096), `slot_count` of them."""

    slot_bytes: int
    slot_count: int

    @property
    def stride_bytes(self) -> int:
        return PAGE + self.slot_bytes

    @property
    def length_bytes(self) -> int:
        return PAGE + self.slot_count * self.stride_bytes

    def offset(self, index: int) -> int:
        """Where slot `index` begins in the file."""
        return PAGE + index * self.stride_bytes

    def cut(self, file_bytes: int) -> SlabShape:
        """The slots that lie wholly inside a file of `file_bytes`."""
        whole = max(0, file_bytes - PAGE) // self.stride_bytes
        return SlabShape(self.slot_bytes, min(self.slot_count, whole))


class SlabHeader(NamedTuple):
    shape: SlabShape
    epoch: bytes


class SlotHeader(NamedTuple):
    epoch: bytes
    key: bytes
    namespace: bytes
    payload_bytes: int
    sequence: int
    checksum: bytes


def checksum(data: memoryview | bytes) -> bytes:
    """Return the 16 bytes of xxh3-128; the interpreter runs on meanwhile."""
    return xxhash.xxh3_128_digest(data)


def valid_slot_bytes(slot_bytes: int) -> bool:
    return PAGE <= slot_bytes <= MAX_SLOT_BYTES and slot_bytes % PAGE == 0


def choose_shape(slot_bytes: int, quota_bytes: int) -> SlabShape:
    """The shape of new slabs: what fits 64 MiB or an eighth of the quota, at least one slot."""
    size = min(SLAB_SIZE_BYTES, quota_bytes // 8)
    count = (size - PAGE) // (PAGE + slot_bytes)
    return SlabShape(slot_bytes, min(max(count, 1), MAX_SLOT_COUNT))


def slab_name(number: int) -> str:
    return f"{number:08x}.slab"


def slab_number(name: str) -> int | None:
    """The number in a slab's file name, or None if the name is not of that shape."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1], 16)


def pack_slab_header(header: SlabHeader) -> bytes:
    """Return the slab's first page."""
    shape = header.shape
    fields = _SLAB.pack(_SLAB_MAGIC, VERSION, shape.slot_count, shape.slot_bytes, header.epoch)
    return (fields + checksum(fields)).ljust(PAGE, b"\0")


def parse_slab_header(page: memoryview) -> SlabHeader | None:
    """Return the header in `page`, or None if any check fails."""
    end = _SLAB.size
    if len(page) < PAGE or page[end : end + _SUM] != checksum(page[:end]):
        return None
    magic, version, slot_count, slot_bytes, epoch = _SLAB.unpack_from(page)
    if magic != _SLAB_MAGIC or version != VERSION or not valid_slot_bytes(slot_bytes):
        return None
    if not 1 <= slot_count <= MAX_SLOT_COUNT:
        return None
    return SlabHeader(SlabShape(slot_bytes, slot_count), epoch)


def pack_slot_header(page: memoryview, header: SlotHeader) -> None:
    """Write the fields into the start of `page`, whose rest stays as it is (zeros)."""
    _SLOT.pack_into(page, 0, _SLOT_MAGIC, VERSION, *header)
    page[_SLOT.size : _SLOT.size + _SUM] = checksum(page[: _SLOT.size])


def parse_slot_header(page: memoryview, slot_bytes: int) -> SlotHeader | None:
    """Return the header in `page`, or None if any check but that of the epoch fails."""
    end = _SLOT.size
    if len(page) < end + _SUM or page[end : end + _SUM] != checksum(page[:end]):
        return None
    magic, version, *fields = _SLOT.unpack_from(page)
    header = SlotHeader(*fields)
    if magic != _SLOT_MAGIC or version != VERSION or not 1 <= header.payload_bytes <= slot_bytes:
        return None
    return header


class _Scratch(threading.local):
    """Aligned pages per thread: a header to write (zero at its end), one read, a payload's end."""

    def __init__(self) -> None:
        pages = memoryview(mmap.mmap(-1, 3 * PAGE))
        self.header = pages[:PAGE]
        self.arrived = pages[PAGE : 2 * PAGE]
        self.tail = pages[2 * PAGE :]


_scratch = _Scratch()


def aligned_buffer(length: int) -> memoryview:
    """Return `length` zeroed bytes that begin on a page."""
    return memoryview(mmap.mmap(-1, max(length, 1)))[:length]


def _is_aligned(view: memoryview) -> bool:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address % PAGE == 0


def write_slot(
    files: FileSystem, fd: int, offset: int, header: SlotHeader, payload: memoryview
) -> None:
    """Write header and payload in one call; `header.checksum` is that of `payload`.

    `payload` is sent from where it lies if it begins on a page. Raises `OSError`, also if the write
    was short.
    """
    if not _is_aligned(payload):
        copy = aligned_buffer(len(payload))
        copy[:] = payload
        payload = copy
    pack_slot_header(_scratch.header, header)
    whole = len(payload) // PAGE * PAGE
    parts = [_scratch.header, payload[:whole]]
    rest = len(payload) - whole
    if rest:
        _scratch.tail[:rest] = payload[whole:]
        _scratch.tail[rest:] = bytes(PAGE - rest)
        parts.append(_scratch.tail)
    expected = sum(map(len, parts))
    written = files.pwrite(fd, parts, offset)
    if written != expected:
        raise OSError(errno.EIO, f"short write: {written} of {expected} bytes")


def read_slot(
    files: FileSystem, fd: int, offset: int, slot_bytes: int, wanted: SlotHeader, out: memoryview
) -> ReadOutcome:
    """Read header and payload in one call and check them against `wanted`.

    Of `wanted` the epoch, key, namespace and payload length count. `out` has `wanted.payload_bytes`
    bytes and is filled where it lies if it begins on a page; unless the outcome is OK its content
    is arbitrary.
    """
    target = out if _is_aligned(out) else aligned_buffer(len(out))
    whole = len(target) // PAGE * PAGE
    rest = len(target) - whole
    parts = [_scratch.arrived, target[:whole], *([_scratch.tail] if rest else [])]
    count = files.pread(fd, parts, offset)
    header = parse_slot_header(_scratch.arrived, slot_bytes) if count >= PAGE else None
    outcome = _compare(header, wanted, count - PAGE)
    if header is None or outcome is not ReadOutcome.OK:
        return outcome
    target[whole:] = _scratch.tail[:rest]
    if checksum(target) != header.checksum:
        return ReadOutcome.CORRUPT_CHECKSUM
    if target is not out:
        out[:] = target
    return ReadOutcome.OK


def _compare(header: SlotHeader | None, wanted: SlotHeader, arrived_bytes: int) -> ReadOutcome:
    if header is None:
        return ReadOutcome.CORRUPT_HEADER
    if header.epoch != wanted.epoch:
        return ReadOutcome.CORRUPT_EPOCH
    if header.key != wanted.key:
        return ReadOutcome.CORRUPT_KEY
    if header.namespace != wanted.namespace:
        return ReadOutcome.CORRUPT_NAMESPACE
    if header.payload_bytes != wanted.payload_bytes or arrived_bytes < header.payload_bytes:
        return ReadOutcome.CORRUPT_LENGTH
    return ReadOutcome.OK


def read_page(files: FileSystem, fd: int, offset: int) -> memoryview:
    """Return the page at `offset`, or what there is of it; valid until this thread reads again."""
    return _scratch.arrived[: files.pread(fd, [_scratch.arrived], offset)]
