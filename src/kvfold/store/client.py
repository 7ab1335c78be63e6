"""A client of the store, as the connector and the tools use it.

Callbacks run on a thread of the client's own. No call blocks, except those that take a timeout,
and none outlives its store.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
from kvfold.store.launch import ensure_store
from kvfold.store.messages import (
    EXISTS,
    KEY_BYTES,
    MAX_KEYS,
    MAX_RECORD_BYTES,
    MAX_REQUEST_CHARS,
    NO_FRAGMENT,
    NO_ROOM,
    REFUSED,
    VERSION,
    Ack,
    Ask,
    Bye,
    Commit,
    Done,
    Evicted,
    Failed,
    Flush,
    FromStore,
    Group,
    Hello,
    Lookup,
    Message,
    OpenTicket,
    Ready,
    Released,
    Report,
    Status,
    Stop,
    Tell,
    Tiers,
    Why,
    as_keys,
)
from kvfold.store.messages import Verdicts as VerdictsMessage
from kvfold.store.settings import StoreSettings
from kvfold.store.whynot import explain
from kvfold.store.wire import Wire

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

_RETRY_S = 0.05

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
    on_evicted: Callable[[bytes, bytes], None] | None = None


class StoreClient:
    """One connection to a store. Any thread may call; made by `connect`.

    arena: the store's memory (workers only), until `close`. store_id: new at every start of a
    store. alive: whether the connection still stands.
    """

    def __init__(self, wire: Wire, arena: memoryview | None, callbacks: Callbacks) -> None:
        self.arena = arena
        self.store_id = wire.welcome.store
        self.store_pid = wire.welcome.pid
        self._wire = wire
        self._callbacks = callbacks
        self._rids = itertools.count(1)
        self._lock = threading.Lock()
        self._answers: dict[int, tuple[type[Any], Future[Any]]] = {}
        self._closing = False
        wire.start(self._dispatch, self._end)

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
        on_evicted: Callable[[bytes, bytes], None] | None = None,
    ) -> StoreClient:
        """Connect to the store that `settings` name, and start it first if `start`.

        `on_evicted(namespace, keys)`, for schedulers: chunks of this engine's have left every tier.
        Without keys: some have that nobody can name.

        Raises `StoreRefused` with a code, `StoreGone` if there is no store or it does not answer,
        `StoreError` in the store's words if it cannot start.
        """
        until_s = time.monotonic() + timeout_s
        evictions = on_evicted is not None
        hello = Hello(VERSION, role, engine, rank, world, fingerprint, list(groups), evictions)
        callbacks = Callbacks(on_ready, on_failed, on_gone, on_evicted)
        while True:
            folder = settings.runtime_path(engine)
            left_s = until_s - time.monotonic()
            if start:
                folder = ensure_store(settings, engine, max(0.0, left_s))
            try:
                return cls._open(folder, hello, callbacks, until_s)
            except (StoreGone, StoreRefused) as error:
                # A store that is just ending may still have let us in: the next one will not.
                ending = isinstance(error, StoreGone) or error.code == "stopping"
                if not start or not ending or time.monotonic() + _RETRY_S > until_s:
                    raise
            time.sleep(_RETRY_S)

    @classmethod
    def connect_tool(cls, folder: Path, timeout_s: float = 5.0) -> StoreClient:
        """Connect to the store of a runtime folder, to ask it or to stop it. Raises `StoreGone`."""
        hello = Hello(VERSION, "tool", "kvfold", 0, 1, "", [])
        return cls._open(folder, hello, Callbacks(), time.monotonic() + timeout_s)

    @classmethod
    def _open(cls, folder: Path, hello: Hello, callbacks: Callbacks, until_s: float) -> StoreClient:
        wire = Wire(folder, hello, until_s)
        arena = None
        try:
            if hello.role == "worker":
                if wire.descriptor < 0:
                    raise FormatError("the store sent no arena")
                arena = map_arena(wire.descriptor, wire.welcome.arena_bytes)
        except BaseException:
            wire.abandon()
            raise
        wire.close_descriptor()
        return cls(wire, arena, callbacks)

    @property
    def alive(self) -> bool:
        return self._wire.alive

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
        self._wire.send(OpenTicket(ticket, group, namespace, keys, readers))

    def tell(self, request: str, record: Mapping[str, Any]) -> None:
        """Let the store know how a request went, for `kvfold why`. Silent if the store is gone.

        Of a record that is too long only the first misses and short texts are told.
        """
        if not request:
            return
        name = request[:MAX_REQUEST_CHARS].encode(errors="replace").decode()
        with suppress(StoreGone):
            self._wire.send(Tell(name, _fitting(record)))

    # ---- worker -----------------------------------------------------------------------------

    def ack(self, ticket: int, indices: NDArray[np.uint32]) -> None:
        """These announced chunks are copied. Silent if the store is gone."""
        with suppress(StoreGone):
            self._wire.send(Ack(ticket, np.asarray(indices, "<u4").tobytes()))

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
            self._wire.send(Commit(job, np.asarray(indices, "<u4").tobytes(), ok))

    def _decline(self, job: int, future: Future[VerdictsMessage]) -> None:
        if future.exception() is None:
            offsets = np.frombuffer(future.result().offsets, "<u8")
            self.commit(job, np.flatnonzero(offsets < REFUSED).astype(np.uint32), False)

    # ---- tools ------------------------------------------------------------------------------

    def status(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """The store's figures. Raises `StoreGone`."""
        return self._report(Status, timeout_s)

    def why(self, request: str, timeout_s: float = 10.0, *, last: int = 0) -> dict[str, Any]:
        """What engines told of a request, named in full or in part. Raises `StoreGone`.

        `record` (None unless exactly one request fits) is as told; each of its `misses` also has
        `elsewhere` and `near` (see `whynot.explain`). `matches`: all that fit, in short; for an
        empty `request` the `last` ones. `matching`: how many fit; `kept`, `since_s`: how many
        records the store has, and the unix time of the oldest.
        """
        return explain(self._report(lambda rid: Why(rid, request, last), timeout_s))

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
            self._wire.send(Bye())
        self._wire.join()
        self.arena = None

    # ---- requests ---------------------------------------------------------------------------

    def _request(self, make: Callable[[int], Message], answer: type[Answer]) -> Future[Answer]:
        """Send a message with a new rid; its answer, or `StoreGone`, ends the future."""
        rid = next(self._rids)
        future: Future[Answer] = Future()
        with self._lock:
            self._answers[rid] = answer, future
        try:
            self._wire.send(make(rid))
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

    # ---- on the wire's thread ---------------------------------------------------------------

    def _dispatch(self, message: FromStore) -> None:
        try:
            match message:
                case Ready(ticket, indices, offsets):
                    self._callbacks.on_ready(
                        ticket, np.frombuffer(indices, "<u4"), np.frombuffer(offsets, "<u8")
                    )
                case Failed(ticket, index, reason):
                    self._callbacks.on_failed(ticket, index, reason)
                case Evicted(namespace, keys) if self._callbacks.on_evicted is not None:
                    as_keys(keys)
                    self._callbacks.on_evicted(namespace, keys)
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
            answers, self._answers = self._answers, {}
        for _, future in answers.values():
            future.set_exception(StoreGone("the store is gone"))
        if not self._closing:
            try:
                self._callbacks.on_gone()
            except Exception:
                log.exception("a callback of the store's client failed")


_LONG_TEXT = 200


def _fitting(record: Mapping[str, Any]) -> bytes:
    """A record's JSON, made to fit a message: short texts first, then fewer misses."""
    content = dict(record)
    misses = list(record.get("misses") or [])
    while len(encoded := json.dumps(content, default=str).encode()) > MAX_RECORD_BYTES:
        shorter = {k: v[:_LONG_TEXT] if isinstance(v, str) else v for k, v in content.items()}
        if shorter != content:
            content = shorter
        elif misses:
            misses = misses[: len(misses) // 2]
            content["misses"] = misses
        else:
            content = {"outcome": "unknown", "reason": "its record is too long"}
    return encoded
