"""Headers and transfers of slots, against docs/format.md."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvfold.store import slabs
from kvfold.store.files import FileSystem
from kvfold.store.slabs import PAGE, ReadOutcome, SlabHeader, SlabShape, SlotHeader

EPOCH, KEY, NAMESPACE = b"e" * 16, b"k" * 32, b"n" * 32
SLOT_BYTES = 4 * PAGE


def slot_header(payload: bytes, **changes: object) -> SlotHeader:
    header = SlotHeader(EPOCH, KEY, NAMESPACE, len(payload), 7, slabs.checksum(payload))
    return header._replace(**changes)


def slot_page(header: SlotHeader) -> memoryview:
    page = memoryview(bytearray(PAGE))
    slabs.pack_slot_header(page, header)
    return page


def test_slab_header_lies_where_the_format_says() -> None:
    page = slabs.pack_slab_header(SlabHeader(SlabShape(SLOT_BYTES, 9), EPOCH))
    fields = b"KVFDSLAB" + struct.pack("<IIQ", 1, 9, SLOT_BYTES) + EPOCH
    assert page == (fields + xxhash.xxh3_128_digest(fields)).ljust(PAGE, b"\0")
    assert slabs.parse_slab_header(memoryview(page)) == (SlabShape(SLOT_BYTES, 9), EPOCH)


def test_slot_header_lies_where_the_format_says() -> None:
    fields = b"KVFDSLOT\1\0\0\0\0\0\0\0" + EPOCH + KEY + NAMESPACE
    fields += struct.pack("<QQ", 5, 7) + xxhash.xxh3_128_digest(b"abcde")
    page = slot_page(slot_header(b"abcde"))
    assert page == (fields + xxhash.xxh3_128_digest(fields)).ljust(PAGE, b"\0")
    assert slabs.parse_slot_header(page, SLOT_BYTES) == slot_header(b"abcde")


def test_any_flipped_bit_makes_a_header_invalid() -> None:
    slab = bytearray(slabs.pack_slab_header(SlabHeader(SlabShape(SLOT_BYTES, 9), EPOCH)))
    slot = bytearray(slot_page(slot_header(b"abcde")))
    for page, length, parse in (
        (slab, 56, slabs.parse_slab_header),
        (slot, 144, lambda view: slabs.parse_slot_header(view, SLOT_BYTES)),
    ):
        for bit in range(length * 8):
            page[bit // 8] ^= 1 << bit % 8
            assert parse(memoryview(page)) is None, bit
            page[bit // 8] ^= 1 << bit % 8
        assert parse(memoryview(page)) is not None


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, b"KVFDSLAX"),
        (8, struct.pack("<I", 2)),
        (12, struct.pack("<I", 0)),
        (12, struct.pack("<I", (1 << 20) + 1)),
        (16, struct.pack("<Q", 0)),
        (16, struct.pack("<Q", 4097)),
        (16, struct.pack("<Q", (1 << 30) + 4096)),
        (16, struct.pack("<Q", 1 << 63)),
    ],
)
def test_slab_header_out_of_bounds_is_refused_though_its_checksum_agrees(
    at: int, value: bytes
) -> None:
    page = bytearray(slabs.pack_slab_header(SlabHeader(SlabShape(SLOT_BYTES, 9), EPOCH)))
    page[at : at + len(value)] = value
    page[40:56] = xxhash.xxh3_128_digest(bytes(page[:40]))
    assert slabs.parse_slab_header(memoryview(page)) is None


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, b"KVFDSLAB"),
        (8, struct.pack("<I", 2)),
        (96, struct.pack("<Q", 0)),
        (96, struct.pack("<Q", SLOT_BYTES + 1)),
        (96, struct.pack("<Q", 1 << 63)),
    ],
)
def test_slot_header_out_of_bounds_is_refused_though_its_checksum_agrees(
    at: int, value: bytes
) -> None:
    page = bytearray(slot_page(slot_header(b"abcde")))
    page[at : at + len(value)] = value
    page[128:144] = xxhash.xxh3_128_digest(bytes(page[:128]))
    assert slabs.parse_slot_header(memoryview(page), SLOT_BYTES) is None


def test_short_pages_and_zeros_are_no_headers() -> None:
    page = slabs.pack_slab_header(SlabHeader(SlabShape(SLOT_BYTES, 9), EPOCH))
    assert slabs.parse_slab_header(memoryview(page)[: PAGE - 1]) is None
    assert slabs.parse_slab_header(memoryview(b"")) is None
    assert slabs.parse_slab_header(memoryview(bytes(PAGE))) is None
    assert slabs.parse_slot_header(memoryview(bytes(PAGE)), SLOT_BYTES) is None


@given(st.integers(1, 1 << 18), st.integers(0, 1 << 40))
def test_a_slab_fits_its_size_unless_it_is_one_slot(pages: int, quota_bytes: int) -> None:
    shape = slabs.choose_shape(pages * PAGE, quota_bytes)
    size = min(64 << 20, quota_bytes // 8)
    assert 1 <= shape.slot_count <= slabs.MAX_SLOT_COUNT
    assert shape.length_bytes <= size or shape.slot_count == 1
    assert shape.length_bytes + shape.stride_bytes > size  # one more would not fit


@pytest.mark.parametrize(
    ("slot_bytes", "quota_bytes", "slot_count"),
    [(512 << 10, 1 << 40, 127), (4 << 20, 1 << 40, 15), (196 << 20, 1 << 40, 1), (16 << 10, 0, 1)],
)
def test_slots_per_slab(slot_bytes: int, quota_bytes: int, slot_count: int) -> None:
    assert slabs.choose_shape(slot_bytes, quota_bytes).slot_count == slot_count


def test_a_cut_file_keeps_the_slots_that_end_inside_it() -> None:
    shape = SlabShape(SLOT_BYTES, 9)
    assert shape.cut(shape.length_bytes) == shape
    assert shape.cut(shape.length_bytes + 1) == shape
    assert shape.cut(shape.length_bytes - 1).slot_count == 8
    assert shape.cut(shape.offset(1)).slot_count == 1
    assert shape.cut(shape.offset(1) - 1).slot_count == 0
    assert shape.cut(0).slot_count == 0


def test_names_of_slabs() -> None:
    assert slabs.slab_name(0x1234) == "00001234.slab"
    assert slabs.slab_number("00001234.slab") == 0x1234
    for name in ("1234.slab", "0000123G.slab", "00001234.slab.tmp", "0000123A.slab", "../1.slab"):
        assert slabs.slab_number(name) is None


@pytest.fixture(params=[os.O_DIRECT, 0], ids=["direct", "buffered"])
def slab_fd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "slab", os.O_RDWR | os.O_CREAT | request.param, 0o600)
    os.posix_fallocate(fd, 0, SlabShape(SLOT_BYTES, 3).length_bytes)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("length", [1, 511, 4095, 4096, 4097, 3 * PAGE + 7, SLOT_BYTES])
@pytest.mark.parametrize("skew", [0, 1, 512])
def test_every_length_and_alignment_comes_back(slab_fd: int, length: int, skew: int) -> None:
    files = FileSystem()
    offset = SlabShape(SLOT_BYTES, 3).offset(1)
    for seed in (b"first", b"other"):  # the second time over old bytes
        payload = slabs.aligned_buffer(SLOT_BYTES + PAGE)[skew : skew + length]
        payload[:] = (seed * length)[:length]
        header = slot_header(bytes(payload))
        slabs.write_slot(files, slab_fd, offset, header, payload)
        out = slabs.aligned_buffer(SLOT_BYTES + PAGE)[skew : skew + length]
        outcome = slabs.read_slot(files, slab_fd, offset, SLOT_BYTES, header, out)
        assert outcome is ReadOutcome.OK
        assert out == payload
    padded = slabs.aligned_buffer(PAGE + SLOT_BYTES)
    os.preadv(slab_fd, [padded], offset)
    rest = -length % PAGE
    assert padded[PAGE + length : PAGE + length + rest] == bytes(rest)
    assert padded[144:PAGE] == bytes(PAGE - 144)


def test_the_unused_end_of_a_header_is_zero_whatever_was_read_before(slab_fd: int) -> None:
    files = FileSystem()
    noise = slabs.aligned_buffer(PAGE)
    noise[:] = b"\xff" * PAGE
    os.pwritev(slab_fd, [noise], 0)
    assert slabs.read_page(files, slab_fd, 0) == noise
    slabs.write_slot(files, slab_fd, PAGE, slot_header(b"abc"), memoryview(b"abc"))
    assert slabs.read_page(files, slab_fd, PAGE)[144:] == bytes(PAGE - 144)


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"epoch": b"x" * 16}, ReadOutcome.CORRUPT_EPOCH),
        ({"key": b"x" * 32}, ReadOutcome.CORRUPT_KEY),
        ({"namespace": b"x" * 32}, ReadOutcome.CORRUPT_NAMESPACE),
        ({"payload_bytes": 4}, ReadOutcome.CORRUPT_LENGTH),
        ({"checksum": b"x" * 16}, ReadOutcome.CORRUPT_CHECKSUM),
    ],
)
def test_each_field_is_compared(
    slab_fd: int, changes: dict[str, object], outcome: ReadOutcome
) -> None:
    files = FileSystem()
    slabs.write_slot(files, slab_fd, PAGE, slot_header(b"abc", **changes), memoryview(b"abc"))
    out = memoryview(bytearray(3))
    assert slabs.read_slot(files, slab_fd, PAGE, SLOT_BYTES, slot_header(b"abc"), out) is outcome
