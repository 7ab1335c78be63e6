"""A client of the store, as the connector and the tools use it.

One thread per client does the receiving (and what sending did not fit the socket at once);
callbacks run on it. No call blocks, except those that take a timeout, and none outlives a store.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvfold.errors import FormatError, StoreGone, StoreRefused
from kvfold.store.arena import map_arena
from kvfold.store.launch import connect_socket, ensure_store
from kvfold.store.messages import (
    EXISTS,
    KEY_BYTES,
    MAX_KEYS,
    NO_FRAGMENT,
    NO_ROOM,
    REFUSED,
    VERSION,
    Ack,
    Ask,
    Bye,
    Commit,
    Done,
    Failed,
    Flush,
    Frames,
    FromStore,
    Group,
    Hello,
    Lookup,
    Message,
    OpenTicket,
    Ready,
    Refused,
    Released,
    Report,
    Status,
    Stop,
    Tiers,
    Welcome,
    encode,
    store_decoder,
)
from kvfold.store.messages import Verdicts as VerdictsMessage
from kvfold.store.settings import StoreSettings

__all__ = [
    "EXISTS",
    "NO_FRAGMENT",
    "NO_ROOM",
    "REFUSED",
    "Group",
    "StoreClient",
    "StoreSettings",
    "Verdicts",
]

log = logging.getLogger("kvfold.store.client")

MAX_UNSENT_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_CLOSE_S = 2.0

Role = Literal["scheduler", "worker", "tool"]
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Verdicts:
    """Answer to an `ask`: one offset or mark per key, and fragments whose owners differ."""

    offsets: NDArray[np.uint64]
    conflicts: NDArray[np.uint32]


@dataclass(frozen=True)
class Callbacks:
    """What a client calls from its own thread."""

    on_ready: Callable[[int, NDArray[np.uint32], NDArray[np.uint64]], None] = lambda *_: None
    on_failed: Callable[[int, int, str], None] = lambda *_: None
    on_gone: Callable[[], None] = lambda: None


class StoreClient:
    """One connection to a store. Any thread may call; made by `connect`.

    arena: the store's memory (workers only), until `close`. store_id: new at every start of a
    store. alive: whether the connection still stands.
    """

    def __init__(
        self,
        sock: socket.socket,
        frames: Frames[FromStore],
        welcome: Welcome,
        arena: memoryview | None,
        callbacks: Callbacks,
    ) -> None:
        self.arena = arena
        self.store_id = welcome.store
        self.store_pid = welcome.pid
        self._sock = sock
        self._frames = frames
        self._callbacks = callbacks
        self._rids = itertools.count(1)
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._answers: dict[int, tuple[type[Any], Future[Any]]] = {}
        self._alive = True
        self._closing = False
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        sock.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kvfold-client", daemon=True)
        self._thread.start()

    @classmethod
    def connect(
        cls,
        settings: StoreSettings,
        *,
        role: Role,
        engine: str,
        rank: int = 0,
        world: int = 1,
        fingerprint: str = "",
        groups: Sequence[Group] = (),
        start: bool = True,
        timeout_s: float = 30.0,
        on_ready: Callable[[int, NDArray[np.uint32], NDArray[np.uint64]], None] = lambda *_: None,
        on_failed: Callable[[int, int, str], None] = lambda *_: None,
        on_gone: Callable[[], None] = lambda: None,
    ) -> StoreClient:
        """Connect to the store that `settings` name, and start it first if `start`.

        Raises `StoreRefused` with a code, `StoreGone` if there is no store or it does not answer,
        `StoreError` in the store's words if it cannot start.
        """
        until_s = time.monotonic() + timeout_s
        folder = settings.runtime_path(engine)
        if start:
            folder = ensure_store(settings, engine, timeout_s)
        hello = Hello(VERSION, role, engine, rank, world, fingerprint, list(groups))
        return cls._open(folder, hello, Callbacks(on_ready, on_failed, on_gone), until_s)

    @classmethod
    def connect_tool(cls, folder: Path, timeout_s: float = 5.0) -> StoreClient:
        """Connect to the store of a runtime folder, to ask it or to stop it. Raises `StoreGone`."""
        hello = Hello(VERSION, "tool", "kvfold", 0, 1, "", [])
        return cls._open(folder, hello, Callbacks(), time.monotonic() + timeout_s)

    @classmethod
    def _open(cls, folder: Path, hello: Hello, callbacks: Callbacks, until_s: float) -> StoreClient:
        sock = connect_socket(folder, max(0.1, until_s - time.monotonic()))
        frames: Frames[FromStore] = Frames(store_decoder)
        descriptors: list[int] = []
        try:
            sock.sendall(encode(hello))
            welcome = _receive_welcome(sock, frames, descriptors, until_s)
            arena = None
            if hello.role == "worker":
                if len(descriptors) != 1:
                    raise FormatError(f"the store sent {len(descriptors)} descriptors")
                arena = map_arena(descriptors[0], welcome.arena_bytes)
        except StoreGone:
            sock.close()
            raise
        except OSError as error:
            sock.close()
            raise StoreGone(f"the store in {folder} did not answer: {error}") from None
        except BaseException:
            sock.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return cls(sock, frames, welcome, arena, callbacks)

    @property
    def alive(self) -> bool:
        return self._alive

    # ---- scheduler --------------------------------------------------------------------------

    def lookup(self, keys: bytes, timeout_s: float) -> bytes:
        """One byte per key: 0 absent, 1 disk, 2 host. Raises `StoreGone`, also when late."""
        until_s = time.monotonic() + timeout_s
        step = MAX_KEYS * KEY_BYTES
        pending = [
            self._request(lambda rid, part=keys[at : at + step]: Lookup(rid, part), Tiers)  # type: ignore[misc]
            for at in range(0, len(keys), step)
        ]
        return b"".join(self._wait(future, until_s).tiers for future in pending)

    def open_ticket(
        self, ticket: int, group: int, namespace: bytes, keys: bytes, readers: int
    ) -> None:
        """Have chunks brought to host and announced to `readers` (a mask of ranks).

        Raises `StoreGone`.
        """
        self._send(OpenTicket(ticket, group, namespace, keys, readers))

    # ---- worker -----------------------------------------------------------------------------

    def ack(self, ticket: int, indices: NDArray[np.uint32]) -> None:
        """These announced chunks are copied. Silent if the store is gone."""
        with suppress(StoreGone):
            self._send(Ack(ticket, np.asarray(indices, "<u4").tobytes()))

    def done(self, ticket: int, callback: Callable[[bool], None]) -> None:
        """This worker touches the ticket no more; `callback(held)`, False if the store is gone."""
        try:
            future = self._request(lambda rid: Done(rid, ticket), Released)
        except StoreGone:
            callback(False)
            return
        future.add_done_callback(lambda f: callback(f.exception() is None and f.result().held))

    def ask(
        self,
        job: int,
        group: int,
        namespace: bytes,
        keys: bytes,
        askers: int,
        writers: NDArray[np.uint64],
        audit: bytes = b"",
        timeout_s: float = 10.0,
    ) -> Verdicts:
        """Where to write the chunks of a job. Raises `StoreGone`, also when late.

        `writers`: a mask of ranks per key. `audit`: records as `messages.AUDIT_RECORD`. An answer
        that comes after the timeout is declined: its slots go back.
        """
        masks = np.asarray(writers, "<u8").tobytes()
        future = self._request(
            lambda rid: Ask(rid, job, group, namespace, keys, askers, masks, audit),
            VerdictsMessage,
        )
        try:
            answer = self._wait(future, time.monotonic() + timeout_s)
        except StoreGone:
            future.add_done_callback(lambda f: self._decline(job, f))
            raise
        return Verdicts(
            np.frombuffer(answer.offsets, "<u8"), np.frombuffer(answer.conflicts, "<u4")
        )

    def commit(self, job: int, indices: NDArray[np.uint32], ok: bool) -> None:
        """The chunks are written (`ok`) or will not be. Silent if the store is gone."""
        with suppress(StoreGone):
            self._send(Commit(job, np.asarray(indices, "<u4").tobytes(), ok))

    def _decline(self, job: int, future: Future[VerdictsMessage]) -> None:
        if future.exception() is None:
            offsets = np.frombuffer(future.result().offsets, "<u8")
            self.commit(job, np.flatnonzero(offsets < REFUSED).astype(np.uint32), False)

    # ---- tools ------------------------------------------------------------------------------

    def status(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """The store's figures. Raises `StoreGone`."""
        return self._report(Status, timeout_s)

    def flush(self, timeout_s: float) -> dict[str, Any]:
        """Write everything to disk; how that went. Raises `StoreGone`, also when late."""
        return self._report(Flush, timeout_s)

    def stop(self, drain: bool, timeout_s: float = 60.0) -> dict[str, Any]:
        """End the store, after writing everything to disk if `drain`. Raises `StoreGone`."""
        return self._report(lambda rid: Stop(rid, drain), timeout_s)

    def _report(self, make: Callable[[int], Message], timeout_s: float) -> dict[str, Any]:
        report = self._wait(self._request(make, Report), time.monotonic() + timeout_s)
        content: dict[str, Any] = json.loads(report.json)
        return content

    # ---- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye: the caller touches the arena no more. Idempotent; `on_gone` is not called.

        The mapping goes when the last view of it does.
        """
        self._closing = True
        with suppress(StoreGone):
            self._send(Bye())
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():  # the store hangs
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
                self._thread.join()
        self.arena = None

    # ---- requests ---------------------------------------------------------------------------

    def _request(self, make: Callable[[int], Message], answer: type[Answer]) -> Future[Answer]:
        """Send a message with a new rid; its answer, or `StoreGone`, ends the future."""
        rid = next(self._rids)
        future: Future[Answer] = Future()
        with self._lock:
            self._answers[rid] = answer, future
        try:
            self._send(make(rid))
        except BaseException:
            with self._lock:
                self._answers.pop(rid, None)
            raise
        return future

    @staticmethod
    def _wait(future: Future[Answer], until_s: float) -> Answer:
        try:
            return future.result(max(0.0, until_s - time.monotonic()))
        except FutureTimeout:
            raise StoreGone("the store did not answer in time") from None

    def _send(self, message: Message) -> None:
        """Send a message, or as much as fits and leave the rest to the thread."""
        rest = memoryview(encode(message))
        with self._lock:
            if not self._alive:
                raise StoreGone("the connection to the store is closed")
            if not self._unsent:
                try:
                    rest = rest[self._sock.send(rest) :]
                except (BlockingIOError, InterruptedError):
                    pass
                except OSError as error:
                    raise StoreGone(f"the store is gone: {error}") from None
            if not len(rest):
                return
            self._unsent.append(rest)
            self._unsent_bytes += len(rest)
            if self._unsent_bytes > MAX_UNSENT_BYTES:
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
                raise StoreGone("the store does not read what it is sent")
            os.eventfd_write(self._wakeup, 1)

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for message in self._frames:  # what came together with the welcome
                self._dispatch(message)
            poll = select.poll()
            poll.register(self._wakeup, select.POLLIN)
            while True:
                wanted = select.POLLIN | (select.POLLOUT if self._unsent else 0)
                poll.register(self._sock, wanted)
                for descriptor, events in poll.poll():
                    if descriptor == self._wakeup:
                        os.eventfd_read(self._wakeup)
                    elif events & select.POLLOUT:
                        self._flush()
                    elif not self._receive():
                        return
        except FormatError:
            log.exception("the store sent what a store does not send")
        except OSError as error:
            log.info("the connection to the store broke: %s", error)
        finally:
            self._end()

    def _flush(self) -> None:
        with self._lock:
            while self._unsent:
                first = self._unsent[0]
                try:
                    sent = self._sock.send(first)
                except (BlockingIOError, InterruptedError):
                    return
                self._unsent_bytes -= sent
                if sent < len(first):
                    self._unsent[0] = first[sent:]
                    return
                self._unsent.popleft()

    def _receive(self) -> bool:
        """Take in what has come; False at the end of the stream."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return True
        self._frames.feed(data)
        for message in self._frames:
            self._dispatch(message)
        return bool(data)

    def _dispatch(self, message: FromStore) -> None:
        try:
            match message:
                case Ready(ticket, indices, offsets):
                    self._callbacks.on_ready(
                        ticket, np.frombuffer(indices, "<u4"), np.frombuffer(offsets, "<u8")
                    )
                case Failed(ticket, index, reason):
                    self._callbacks.on_failed(ticket, index, reason)
                case Tiers() | Released() | VerdictsMessage() | Report():
                    self._answer(message)
                case _:
                    raise FormatError(f"unexpected {type(message).__name__}")
        except FormatError:
            raise
        except Exception:
            log.exception("a callback of the store's client failed")

    def _answer(self, message: Tiers | Released | VerdictsMessage | Report) -> None:
        with self._lock:
            expected = self._answers.pop(message.rid, None)
        if expected is None or not isinstance(message, expected[0]):
            raise FormatError(f"an answer to no question: {type(message).__name__}")
        expected[1].set_result(message)

    def _end(self) -> None:
        """The connection is over: every question is answered with `StoreGone`."""
        with self._lock:
            self._alive = False
            answers, self._answers = self._answers, {}
            self._unsent.clear()
            self._unsent_bytes = 0
        self._sock.close()
        with self._lock:
            os.close(self._wakeup)
        for _, future in answers.values():
            future.set_exception(StoreGone("the store is gone"))
        if not self._closing:
            try:
                self._callbacks.on_gone()
            except Exception:
                log.exception("a callback of the store's client failed")


def _receive_welcome(
    sock: socket.socket, frames: Frames[FromStore], descriptors: list[int], until_s: float
) -> Welcome:
    """Wait for the answer to Hello; descriptors that come along are added to the list."""
    while True:
        sock.settimeout(max(0.01, until_s - time.monotonic()))
        data, received, _, _ = socket.recv_fds(sock, _READ_BYTES, 4)
        descriptors += received
        if not data:
            raise StoreGone("the store closed the connection")
        frames.feed(data)
        for message in frames:
            if isinstance(message, Refused):
                raise StoreRefused(message.code, message.message)
            if not isinstance(message, Welcome):
                raise FormatError(f"{type(message).__name__} where a welcome was expected")
            return message
