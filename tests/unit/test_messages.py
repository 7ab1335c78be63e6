"""The wire: what goes in comes out, and nothing malformed, unknown or too long gets through."""

from __future__ import annotations

import struct
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.errors import FormatError
from kvfold.store import messages as m
from kvfold.store.messages import Frames, client_decoder, encode, store_decoder

SPACE = bytes(range(32))
GROUP = m.Group(8192, 5000, SPACE, '{"model": "x"}', False, 40_000)

FROM_CLIENT = [
    m.Hello(1, "worker", "engine", 63, 64, "f", [GROUP]),
    m.Hello(1, "scheduler", "engine", 0, 64, "f", [GROUP], True),
    m.Lookup(2**63 - 1, SPACE * 3),
    m.OpenTicket(1, 0, SPACE, SPACE * 2, 2**64 - 1),
    m.Ack(1, b"\0\0\0\0"),
    m.Done(5, 1),
    m.Ask(1, 2, 0, SPACE, SPACE, 3, b"\1" + bytes(7), b""),
    m.Commit(2, b"", True),
    m.Tell("r" * 512, b"x" * (16 << 10)),
    m.Why(1, "", 4096),
    m.Status(1),
    m.Flush(1),
    m.Stop(1, False),
    m.Bye(),
]
FROM_STORE = [
    m.Welcome(1, "ab" * 16, 4096, 77),
    m.Refused("rank", "taken"),
    m.Tiers(1, b"\0\1\2"),
    m.Ready(1, b"\0\0\0\0", bytes(8)),
    m.Failed(1, 3, "corrupt"),
    m.Evicted(SPACE, SPACE * 2),
    m.Evicted(bytes(32), b""),
    m.Released(1, True),
    m.Verdicts(1, b"\xff" * 8, b""),
    m.Report(1, b"{}"),
]


def decode_all(decoder: object, data: bytes) -> list[object]:
    frames: Frames[object] = Frames(decoder)  # type: ignore[arg-type]
    frames.feed(data)
    return list(frames)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [(client_decoder, x) for x in FROM_CLIENT] + [(store_decoder, x) for x in FROM_STORE],
    ids=lambda x: type(x).__name__,
)
def test_every_message_survives_the_wire(decoder: object, message: m.Message) -> None:
    assert decode_all(decoder, encode(message)) == [message]


def test_a_message_is_an_array_that_begins_with_its_name() -> None:
    frame = encode(m.Done(5, 1))
    assert struct.unpack_from("<I", frame)[0] == len(frame) - 4
    assert msgspec.msgpack.decode(frame[4:]) == ["Done", 5, 1]


@given(st.lists(st.integers(1, 50), max_size=30))
def test_frames_may_arrive_in_any_pieces(cuts: list[int]) -> None:
    stream = b"".join(encode(x) for x in FROM_CLIENT)
    frames = Frames(client_decoder)
    got = []
    for cut in cuts:
        frames.feed(stream[:cut])
        stream = stream[cut:]
        got += list(frames)
    frames.feed(stream)
    assert got + list(frames) == FROM_CLIENT


def raw(*items: object) -> bytes:
    body = msgspec.msgpack.encode(items)
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    "data",
    [
        raw("Nonsense", 1),
        raw("Done", 5),
        raw("Done", 5, 1, 1),
        raw("Done", -1, 1),
        raw("Done", 2**63, 1),
        raw("Done", 1.0, 1),
        raw("Tiers", 1, b""),
        raw("Lookup", 1, b"x" * (m.MAX_KEYS * 32 + 1)),
        raw("Lookup", 1, "text"),
        raw("OpenTicket", 1, 0, b"short", b"", 1),
        raw("Tell", "", b"{}"),
        raw("Tell", "r" * 513, b"{}"),
        raw("Tell", "r", b"x" * (16 * 1024 + 1)),
        raw("Tell", "r", {"tokens": 1}),
        raw("Why", 1, "r"),
        raw("Why", 1, "r", 4097),
        raw("Why", 1, "r", -1),
        raw("Hello", 1, "worker", "e", 0, 1, "", [[4096, 1, SPACE, "", True, -1]]),
        raw("Hello", 1, "worker", "e", 0, 1, "", [[4096, 1, SPACE, "", True, 2**50 + 1]]),
        raw("Hello", 1, "king", "e", 0, 1, "", []),
        raw("Hello", 1, "worker", "", 0, 1, "", []),
        raw("Hello", 1, "worker", "e", 64, 1, "", []),
        raw("Hello", 1, "scheduler", "e", 0, 1, "", [], 1),
        raw("Hello", 1, "worker", "e", 0, 65, "", []),
        raw("Hello", 1, "worker", "e", 0, 1, "", [[0, 1, SPACE, ""]]),
        raw("Hello", 1, "worker", "e", 0, 1, "", [[4096, 1, SPACE, ""]] * 65),
        struct.pack("<I", m.MAX_FRAME_BYTES + 1),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 0),
        raw("Done", 5, 1).replace(b"Done", b"\xff\xff\xff\xff"),
        struct.pack("<I", 100_000) + b"\x91" * 100_000,
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_all(client_decoder, data)


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_but_format_errors(body: bytes) -> None:
    with suppress(FormatError):
        decode_all(client_decoder, struct.pack("<I", len(body)) + body)


def test_a_message_longer_than_a_frame_is_not_made() -> None:
    with pytest.raises(FormatError):
        encode(m.Report(1, bytes(m.MAX_FRAME_BYTES)))


def test_joined_fields() -> None:
    assert m.as_keys(SPACE * 2).shape == (2, 4)
    assert m.as_indices(struct.pack("<3I", 5, 0, 5), 6).tolist() == [0, 5]
    assert m.as_words(struct.pack("<2Q", 1, 2**64 - 1), 2).tolist() == [1, 2**64 - 1]
    record = m.as_audit(struct.pack("<IQ", 7, 9))
    assert (record["fragment"][0], record["checksum"][0]) == (7, 9)
    assert len(np.unique(m.as_keys(b""))) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: m.as_keys(bytes(31)),
        lambda: m.as_indices(bytes(3), 10),
        lambda: m.as_indices(struct.pack("<I", 10), 10),
        lambda: m.as_words(bytes(16), 1),
        lambda: m.as_words(bytes(7), 1),
        lambda: m.as_audit(bytes(11)),
    ],
)
def test_joined_fields_of_a_wrong_length(wrong: object) -> None:
    with pytest.raises(FormatError):
        wrong()  # type: ignore[operator]
