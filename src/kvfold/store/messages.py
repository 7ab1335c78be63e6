"""The store's wire: every message, its bounds, and frames (see docs/protocol.md).

A frame is a little-endian u32 length and one msgpack array whose first item is the message's
name. Whatever does not fit these types and bounds is a `FormatError`; its connection closes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Generic, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvfold.errors import FormatError

VERSION = 3
KEY_BYTES = 32
MAX_FRAME_BYTES = 16 << 20
MAX_KEYS = 65_536
MAX_RANKS = 64
MAX_GROUPS = 64
MAX_REQUEST_CHARS = 512
MAX_RECORD_BYTES = 16 << 10
MAX_RECORDS = 4096

# Marks in `Verdicts.offsets`, in place of a byte offset into the arena.
EXISTS = 2**64 - 1
NO_ROOM = 2**64 - 2
REFUSED = 2**64 - 3

# One audit record: a fragment number and the checksum of that fragment's bytes.
AUDIT_RECORD = np.dtype([("fragment", "<u4"), ("checksum", "<u8")])
# An asker that owns no replicated fragment sends this fragment alone: "audited, nothing to say".
NO_FRAGMENT = 2**32 - 1

Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Mask = Annotated[int, Meta(ge=0)]  # msgpack itself bounds it to 64 bits
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Keys = Annotated[bytes, Meta(max_length=MAX_KEYS * KEY_BYTES)]
Indices = Annotated[bytes, Meta(max_length=MAX_KEYS * 4)]
Words = Annotated[bytes, Meta(max_length=MAX_KEYS * 8)]
Audit = Annotated[bytes, Meta(max_length=MAX_KEYS * 12)]
SlotBytes = Annotated[int, Meta(ge=1, le=1 << 40)]
CopiesBytes = Annotated[int, Meta(ge=0, le=1 << 50)]

Keys64 = NDArray[np.uint64]
Message_ = TypeVar("Message_")


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Group(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One cache group of an engine: slot and payload in bytes, namespace, identity in clear.

    `durable=False` keeps the group's chunks off the disk (their keys mean nothing later).
    `copies_bytes`: what the engine's own TP copies of one chunk would take; 0: not told.
    """

    slot_bytes: SlotBytes
    payload_bytes: SlotBytes
    namespace: Digest
    text: Annotated[str, Meta(max_length=1 << 18)]
    durable: bool = True
    copies_bytes: CopiesBytes = 0


class Hello(Message, frozen=True):
    version: Number
    role: Literal["scheduler", "worker", "tool"]
    engine: Name
    rank: Rank
    world: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    fingerprint: Annotated[str, Meta(max_length=256)]
    groups: Annotated[list[Group], Meta(max_length=MAX_GROUPS)]
    evictions: bool = False


class Lookup(Message, frozen=True):
    rid: Number
    keys: Keys


class OpenTicket(Message, frozen=True):
    ticket: Number
    group: Number
    namespace: Digest
    keys: Keys
    readers: Mask


class Ack(Message, frozen=True):
    ticket: Number
    indices: Indices


class Done(Message, frozen=True):
    rid: Number
    ticket: Number


class Ask(Message, frozen=True):
    rid: Number
    job: Number
    group: Number
    namespace: Digest
    keys: Keys
    askers: Mask
    writers: Words
    audit: Audit


class Commit(Message, frozen=True):
    job: Number
    indices: Indices
    ok: bool


class Status(Message, frozen=True):
    rid: Number


class Flush(Message, frozen=True):
    rid: Number


class Stop(Message, frozen=True):
    rid: Number
    drain: bool


class Tell(Message, frozen=True):
    request: Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_CHARS)]
    record: Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]


class Why(Message, frozen=True):
    rid: Number
    request: Annotated[str, Meta(max_length=MAX_REQUEST_CHARS)]
    last: Annotated[int, Meta(ge=0, le=MAX_RECORDS)]


class Bye(Message, frozen=True):
    pass


class Welcome(Message, frozen=True):
    client: Number
    store: str
    arena_bytes: Number
    pid: Number


class Refused(Message, frozen=True):
    code: str
    message: str


class Tiers(Message, frozen=True):
    rid: Number
    tiers: Annotated[bytes, Meta(max_length=MAX_KEYS)]


class Ready(Message, frozen=True):
    ticket: Number
    indices: Indices
    offsets: Words


class Failed(Message, frozen=True):
    ticket: Number
    index: Number
    reason: str


class Evicted(Message, frozen=True):
    namespace: Digest
    keys: Keys


class Released(Message, frozen=True):
    rid: Number
    held: bool


class Verdicts(Message, frozen=True):
    rid: Number
    offsets: Words
    conflicts: Indices


class Report(Message, frozen=True):
    rid: Number
    json: bytes


FromClient = (
    Hello
    | Lookup
    | OpenTicket
    | Ack
    | Done
    | Ask
    | Commit
    | Tell
    | Status
    | Why
    | Flush
    | Stop
    | Bye
)
FromStore = Welcome | Refused | Tiers | Ready | Failed | Evicted | Released | Verdicts | Report

client_decoder: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
store_decoder: msgspec.msgpack.Decoder[FromStore] = msgspec.msgpack.Decoder(FromStore)
_encoder = msgspec.msgpack.Encoder()
_LENGTH = struct.Struct("<I")


def encode(message: Message) -> bytearray:
    """Return `message` as one frame."""
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(message, frame, _LENGTH.size)
    body_bytes = len(frame) - _LENGTH.size
    if body_bytes > MAX_FRAME_BYTES:
        raise FormatError(f"a message of {body_bytes} bytes exceeds a frame")
    _LENGTH.pack_into(frame, 0, body_bytes)
    return frame


class Frames(Generic[Message_]):
    """Cuts a stream of bytes into decoded messages; holds at most one unfinished frame."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Message_]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray) -> None:
        self._buffer += data

    def __iter__(self) -> Iterator[Message_]:
        """Yield the complete messages fed so far. Raises `FormatError`."""
        used = 0
        try:
            while (message_and_end := self._take(used)) is not None:
                message, used = message_and_end
                yield message
        finally:
            if used:
                del self._buffer[:used]

    def _take(self, start: int) -> tuple[Message_, int] | None:
        body = start + _LENGTH.size
        if len(self._buffer) < body:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, start)
        if length > MAX_FRAME_BYTES:
            raise FormatError(f"a frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
        if len(self._buffer) < body + length:
            return None
        try:
            with memoryview(self._buffer) as whole, whole[body : body + length] as part:
                return self._decoder.decode(part), body + length
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(f"malformed message: {error}") from None


def as_keys(joined: bytes) -> Keys64:
    """Return joined 32-byte keys as u64 (n, 4), read-only. Raises `FormatError`."""
    if len(joined) % KEY_BYTES:
        raise FormatError(f"{len(joined)} bytes of keys are not a multiple of {KEY_BYTES}")
    return np.frombuffer(joined, "<u8").reshape(-1, 4)


def as_indices(joined: bytes, bound: int) -> NDArray[np.int64]:
    """Return joined u32 indices, each below `bound`, without repetition. Raises `FormatError`."""
    if len(joined) % 4:
        raise FormatError(f"{len(joined)} bytes of indices are not a multiple of 4")
    indices = np.frombuffer(joined, "<u4").astype(np.int64)
    if len(indices) and int(indices.max()) >= bound:
        raise FormatError(f"index {int(indices.max())} is not below {bound}")
    if len(indices) > 1:
        indices = np.unique(indices)
    return indices


def as_words(joined: bytes, count: int) -> NDArray[np.uint64]:
    """Return exactly `count` joined u64. Raises `FormatError`."""
    if len(joined) != 8 * count:
        raise FormatError(f"{len(joined)} bytes where {count} u64 were expected")
    return np.frombuffer(joined, "<u8")


def as_audit(joined: bytes) -> NDArray[np.void]:
    """Return audit records (fields `fragment`, `checksum`). Raises `FormatError`."""
    if len(joined) % AUDIT_RECORD.itemsize:
        raise FormatError(f"{len(joined)} bytes of audit are not whole records")
    return np.frombuffer(joined, AUDIT_RECORD)
