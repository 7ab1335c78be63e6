"""A client's end of the socket: one thread that receives, and sends what did not fit at once."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvfold.errors import FormatError, StoreGone, StoreRefused
from kvfold.store.launch import connect_socket
from kvfold.store.messages import (
    Frames,
    FromStore,
    Hello,
    Message,
    Refused,
    Welcome,
    encode,
    store_decoder,
)

log = logging.getLogger("kvfold.store.client")

MAX_UNSENT_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_CLOSE_S = 2.0


class Wire:
    """A connection after its welcome. Sending never blocks, from whichever thread.

    welcome: the store's answer to Hello. descriptor: the arena's memfd if it came along, else -1.
    alive: whether the connection stands.
    """

    def __init__(self, folder: Path, hello: Hello, until_s: float) -> None:
        """Connect to the store of a runtime folder and greet it.

        Raises `StoreGone`, `StoreRefused`, or `FormatError`. Nothing is received before `start`.
        """
        self.descriptor = -1
        self.alive = True
        self._frames: Frames[FromStore] = Frames(store_decoder)
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._sock = connect_socket(folder, max(0.1, until_s - time.monotonic()))
        try:
            self._sock.sendall(encode(hello))
            self.welcome = self._await_welcome(until_s)
        except BaseException as error:
            self._sock.close()
            self.close_descriptor()
            if isinstance(error, OSError) and not isinstance(error, StoreGone):
                raise StoreGone(f"the store in {folder} did not answer: {error}") from None
            raise
        self._sock.setblocking(False)
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvfold-client", daemon=True)

    def start(self, on_message: Callable[[FromStore], None], on_end: Callable[[], None]) -> None:
        """Receive from now on; `on_end` is called once, from the thread, after all messages."""
        self._on_message = on_message
        self._on_end = on_end
        self._thread.start()

    def close_descriptor(self) -> None:
        """The arena is mapped, or nobody wants it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def abandon(self) -> None:
        """Close a connection that was never started."""
        self.alive = False
        self._sock.close()
        os.close(self._wakeup)
        self.close_descriptor()

    def send(self, message: Message) -> None:
        """Send a message, or as much as fits and leave the rest to the thread.

        Raises `StoreGone`.
        """
        rest = memoryview(encode(message))
        with self._lock:
            if not self.alive:
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

    def join(self) -> None:
        """Wait for the store to close the connection, and close it if the store hangs."""
        if threading.current_thread() is self._thread:
            return
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._thread.join()

    def _await_welcome(self, until_s: float) -> Welcome:
        while True:
            self._sock.settimeout(max(0.01, until_s - time.monotonic()))
            data, received, _, _ = socket.recv_fds(self._sock, _READ_BYTES, 1)
            for descriptor in received:
                self.descriptor = descriptor
            if not data:
                raise StoreGone("the store closed the connection")
            self._frames.feed(data)
            for message in self._frames:
                if isinstance(message, Refused):
                    raise StoreRefused(message.code, message.message)
                if not isinstance(message, Welcome):
                    raise FormatError(f"{type(message).__name__} where a welcome was expected")
                return message

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for message in self._frames:  # what came together with the welcome
                self._on_message(message)
            poll = select.poll()
            poll.register(self._wakeup, select.POLLIN)
            while True:
                poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
                for descriptor, events in poll.poll():
                    if descriptor == self._wakeup:
                        os.eventfd_read(self._wakeup)
                        continue
                    if events & select.POLLOUT:
                        self._flush()
                    if events & ~select.POLLOUT and not self._receive():
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
            self._on_message(message)
        return bool(data)

    def _end(self) -> None:
        with self._lock:
            self.alive = False
            self._unsent.clear()
            self._unsent_bytes = 0
            self._sock.close()
            os.close(self._wakeup)
        self._on_end()
