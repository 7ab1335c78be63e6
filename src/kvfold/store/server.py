"""The store's process: sockets, client processes, disk threads and signals around the core."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from kvfold.errors import FormatError, StoreError, StoreRefused
from kvfold.store.arena import Arena
from kvfold.store.connection import Connection
from kvfold.store.core import CoreSettings, StoreCore
from kvfold.store.core_disk import Drained
from kvfold.store.disk import DiskTier
from kvfold.store.messages import Bye, FromClient, Hello, Message, Refused, encode
from kvfold.store.settings import StoreSettings
from kvfold.store.threads import CountThread, DiskThreads, Wakeup

log = logging.getLogger("kvfold.store")

_PEER = struct.Struct("3i")
_TASK_CHUNKS = 8
_TASK_BYTES = 4 << 20
_DRAIN_S = 30.0
_FIRST_CLIENT_S = 30.0
_SNAPSHOT_S = 10.0


class MetricsEndpoint(Protocol):
    """Serves what `snapshot` gives, a store's status, from threads of its own."""

    def serve(self, snapshot: Callable[[], dict[str, object]]) -> None: ...

    def close(self) -> None: ...


class Server:
    """Runs one store until it is told to stop, or has had no clients for `linger_s`."""

    def __init__(
        self,
        settings: StoreSettings,
        listener: socket.socket,
        arena: Arena,
        disk: DiskTier | None,
        endpoint: MetricsEndpoint | None = None,
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._arena = arena
        self._disk = disk
        self._selector = selectors.DefaultSelector()
        self._wakeup = Wakeup()
        self._counting = CountThread(self._wakeup)
        self._connections: dict[int, Connection] = {}
        self._pidfds: dict[int, int] = {}  # client number -> pidfd
        self._engine_clients: set[int] = set()  # their processes may still be there
        self._next_number = 1
        self._stop_now = False
        self._stop_by_s = float("inf")
        self._signalled = False
        self._draining = False
        self._idle_since_s = time.monotonic()
        self._had_clients = False
        core_settings = CoreSettings(job_deadline_s=settings.job_deadline_s)
        self.core = StoreCore(
            arena,
            disk,
            core_settings,
            time.monotonic,
            self._send,
            self._stop,
            self._sync,
            os.getpid(),
            self._counting.run,
            self._backlog_bytes,
        )
        self._endpoint = endpoint
        self._threads: DiskThreads | None = None
        if disk is not None:
            self._threads = DiskThreads(
                disk,
                settings.disk_threads,
                self._wakeup,
                self.core.read_done,
                self.core.write_done,
            )
            self._threads.scan(self.core.found, self.core.scan_finished)
            self._threads.call(lambda: self._recall(disk))
        if endpoint is not None:
            endpoint.serve(self.snapshot)

    def run(self) -> None:
        """The loop. Returns after a clean stop."""
        # Disk threads hold the interpreter between their system calls; hand it over soon.
        sys.setswitchinterval(0.0005)
        self._listener.setblocking(False)
        select = self._selector
        select.register(self._listener, selectors.EVENT_READ, self._accept)
        select.register(self._wakeup.fd, selectors.EVENT_READ, self._wakeup.run)
        busy = False
        due_s: float | None = None
        try:
            while not self._stop_now:
                for key, events in select.select(self._timeout(busy, due_s)):
                    if isinstance(key.data, Connection):
                        self._serve(key.data, events)
                    else:
                        key.data()
                due_s = self.core.tick()
                busy = self.core.step()
                self._feed_threads()
                self.core.evictions.tell()
                self._consider_stopping()
            self._say_goodbye()
        finally:
            self._close()

    def request_stop(self, signum: int = 0, _frame: object = None) -> None:
        """Drain and stop soon. Safe in a signal handler and from other threads."""
        self._signalled = True
        self._wakeup.ring()

    def install_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.request_stop)

    def snapshot(self) -> dict[str, object]:
        """The store's status, for any thread but the loop's. Raises `StoreError` if it is late."""
        status: Future[dict[str, object]] = Future()
        self._wakeup.put(lambda: self.core.status_later(status.set_result))
        try:
            return status.result(_SNAPSHOT_S)
        except TimeoutError:
            raise StoreError("the store did not tell its figures in time") from None

    # ---- loop parts -------------------------------------------------------------------------

    def _timeout(self, busy: bool, due_s: float | None) -> float:
        if busy:
            return 0.0
        now_s = time.monotonic()
        times = [now_s + 1.0, self._stop_by_s]
        if due_s is not None:
            times.append(due_s)
        return max(0.0, min(times) - now_s)

    def _feed_threads(self) -> None:
        threads = self._threads
        while threads is not None and threads.free_tasks > 0:
            orders = self.core.disk.take(_TASK_CHUNKS, _TASK_BYTES)
            if not orders:
                return
            threads.submit(orders)

    def _consider_stopping(self) -> None:
        now_s = time.monotonic()
        if self._signalled and not self._draining:
            self._draining = True
            log.info("stopping")
            self.core.stop(True, lambda drained: log.info("drained: %s", told(drained)))
        if self.core.stopping and self._stop_by_s == float("inf"):
            self._stop_by_s = now_s + _DRAIN_S
        if now_s >= self._stop_by_s:
            log.warning("what could not be written in %.0f s is given up", _DRAIN_S)
            self._stop_now = True
        if self._engine_clients:
            self._idle_since_s = now_s
            return
        linger_s = self._settings.linger_s
        if self._settings.private:
            linger_s = 0.0
        if not self._had_clients:
            linger_s = max(linger_s, _FIRST_CLIENT_S)
        if now_s - self._idle_since_s >= linger_s and not self.core.stopping:
            log.info("no clients for %.0f s", linger_s)
            self._signalled = True
            self._wakeup.ring()

    def _stop(self) -> None:
        """The core has drained."""
        self._stop_now = True

    def _sync(self, done: Callable[[bool], None]) -> None:
        """Make what was written durable, on a disk thread, and run `done` in the loop."""
        disk, threads = self._disk, self._threads
        assert disk is not None
        assert threads is not None

        def run() -> None:
            synced = False
            try:
                disk.sync()
                synced = True
            finally:
                self._wakeup.put(lambda: done(synced))

        threads.call(run)

    def _recall(self, disk: DiskTier) -> None:
        """Read the identities that an earlier store left. On a disk thread."""
        texts = disk.namespaces()
        self._wakeup.put(lambda: self.core.namespaces.learn_old(texts))

    def _say_goodbye(self) -> None:
        """Send what clients were promised, for a moment at most."""
        until_s = time.monotonic() + 1.0
        for connection in list(self._connections.values()):
            connection.flush_until(until_s)

    def _close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
        self._counting.close()
        if self._threads is not None:
            self._threads.close()
        if self._disk is not None:
            try:
                self._disk.sync()
            except OSError:
                log.exception("the disk tier could not be synced")
            self._disk.close()
        for connection in self._connections.values():
            connection.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._selector.close()
        self._listener.close()
        self._wakeup.close()
        self._arena.close()

    # ---- clients ----------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # the peer has gone already, or too many files are open
            log.warning("a connection could not be accepted: %s", error)
            time.sleep(0.01)  # the listener stays ready; do not spin
            return
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        pid, uid, _gid = _PEER.unpack(peer)
        connection = Connection(sock, self._next_number, pid)
        self._next_number += 1
        refusal: str | None = None
        if uid not in (os.getuid(), 0):
            refusal = f"user {uid} may not use the store of user {os.getuid()}"
        else:
            try:
                self._pidfds[connection.number] = os.pidfd_open(pid)
            except OSError as error:
                refusal = f"the store cannot watch process {pid}: {error}"
        if refusal is not None:
            log.warning("refused: %s", refusal)
            connection.send(encode(Refused("user", refusal)))
            connection.close()
            return
        number = connection.number
        self._connections[number] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._selector.register(
            self._pidfds[number], selectors.EVENT_READ, lambda: self._exited(number)
        )

    def _serve(self, connection: Connection, events: int) -> None:
        """One client's socket is ready. Nothing that it does may end the store."""
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            if events & selectors.EVENT_READ:
                open_still = connection.receive()
                for message in connection.frames:
                    if not self._handle(connection, message):
                        return
                if not open_still:
                    self._drop(connection, self.core.vanished)
                    return
        except FormatError as error:
            log.warning("client %d (process %d): %s", connection.number, connection.pid, error)
            self.core.malformed += 1
            self._drop(connection, self.core.vanished)
            return
        except Exception:
            log.exception("client %d (process %d)", connection.number, connection.pid)
            self.core.malformed += 1
            self._drop(connection, self.core.vanished)
            return
        self._watch(connection)

    def _handle(self, connection: Connection, message: FromClient) -> bool:
        """Act on a message; return whether the connection goes on."""
        if isinstance(message, Bye):
            self._drop(connection, self.core.bye)
            return False
        if not isinstance(message, Hello):
            if connection.number not in self.core.clients:
                raise FormatError("the first message must be Hello")
            self.core.handle(connection.number, message)
            return connection.number in self._connections
        if connection.number in self.core.clients:
            raise FormatError("a second Hello")
        try:
            welcome = self.core.hello(connection.number, connection.pid, message)
        except StoreRefused as error:
            connection.send(encode(Refused(error.code, str(error))))
            self._drop(connection, self.core.bye)
            return False
        if message.role != "tool":
            self._had_clients = True
            self._engine_clients.add(connection.number)
        connection.send(encode(welcome), self._arena.fd if message.role == "worker" else None)
        if self._threads is not None and self._disk is not None:
            for group in message.groups:
                self._threads.call(self._remember(self._disk, group.namespace, group.text))
        return True

    @staticmethod
    def _remember(disk: DiskTier, namespace: bytes, text: str) -> Callable[[], None]:
        return lambda: disk.remember_namespace(namespace, text)

    def _send(self, number: int, message: Message) -> None:
        connection = self._connections.get(number)
        if connection is None:
            return
        connection.send(encode(message))
        if connection.broken:
            # Not now: the core is in the middle of something.
            self._wakeup.put(lambda: self._drop(connection, self.core.vanished))
        else:
            self._watch(connection)

    def _backlog_bytes(self, number: int) -> int:
        connection = self._connections.get(number)
        return 0 if connection is None else connection.backlog_bytes

    def _watch(self, connection: Connection) -> None:
        wanted = selectors.EVENT_READ
        if connection.backlog_bytes:
            wanted |= selectors.EVENT_WRITE
        if wanted != connection.watched and connection.number in self._connections:
            connection.watched = wanted
            self._selector.modify(connection.sock, wanted, connection)

    def _drop(self, connection: Connection, tell: Callable[[int], None]) -> None:
        """Close a connection and tell the core how it ended."""
        number = connection.number
        if self._connections.pop(number, None) is None:
            return
        self._selector.unregister(connection.sock)
        connection.close()
        try:
            tell(number)
        except Exception:
            log.exception("client %d (process %d) left badly", number, connection.pid)
        # A private store lives as long as its clients' processes, connected or not.
        waits = self._settings.private and tell == self.core.vanished
        if number not in self.core.clients and not waits:
            self._forget_process(number)

    def _exited(self, number: int) -> None:
        connection = self._connections.get(number)
        if connection is not None:
            self._drop(connection, self.core.exited)
        else:
            self.core.exited(number)
        self._forget_process(number)

    def _forget_process(self, number: int) -> None:
        self._engine_clients.discard(number)
        pidfd = self._pidfds.pop(number, None)
        if pidfd is not None:
            self._selector.unregister(pidfd)
            os.close(pidfd)


def listen(folder: Path) -> socket.socket:
    """A listening socket in the runtime folder; removes what a killed store left there.

    The folder is addressed through a descriptor, because a socket's path is limited to 107 bytes.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        (folder / "store.sock").unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            listener.bind(f"/proc/self/fd/{descriptor}/store.sock")
        finally:
            os.umask(before)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    finally:
        os.close(descriptor)
    return listener


def told(drained: Drained) -> str:
    return f"{drained.written} chunks written, {drained.host_only} in host memory only"
