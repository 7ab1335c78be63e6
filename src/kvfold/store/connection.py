"""One client's socket as the store sees it: frames in, a bounded backlog out."""

from __future__ import annotations

import array
import select
import selectors
import socket
import time
from collections import deque

from kvfold.store.messages import Frames, FromClient, client_decoder

MAX_BACKLOG_BYTES = 64 << 20
_READ_BYTES = 1 << 20


class Connection:
    """Never blocks. `broken` is set when the peer is gone or has let its backlog overflow."""

    def __init__(self, sock: socket.socket, number: int, pid: int) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.number = number
        self.pid = pid
        self.frames: Frames[FromClient] = Frames(client_decoder)
        self.backlog_bytes = 0
        self.broken = False
        self.watched = selectors.EVENT_READ
        self._backlog: deque[memoryview] = deque()

    def receive(self) -> bool:
        """Take in what has arrived; return False at the end of the stream."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        self.frames.feed(data)
        return bool(data)

    def send(self, frame: bytearray, descriptor: int | None = None) -> None:
        """Send a frame, or as much as fits and the rest later. A descriptor rides on byte one."""
        rest = memoryview(frame)
        if not self._backlog:
            try:
                if descriptor is None:
                    sent = self.sock.send(rest)
                else:
                    rights = array.array("i", [descriptor])
                    sent = self.sock.sendmsg(
                        [rest], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                    )
                rest = rest[sent:]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                self.broken = True
                return
        if len(rest):
            self._backlog.append(rest)
            self.backlog_bytes += len(rest)
            self.broken = self.broken or self.backlog_bytes > MAX_BACKLOG_BYTES

    def flush(self) -> None:
        """Send more of the backlog."""
        while self._backlog:
            first = self._backlog[0]
            try:
                sent = self.sock.send(first)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.broken = True
                self._backlog.clear()
                self.backlog_bytes = 0
                return
            self.backlog_bytes -= sent
            if sent == len(first):
                self._backlog.popleft()
            else:
                self._backlog[0] = first[sent:]

    def flush_until(self, until_s: float) -> None:
        """Wait for the peer to read the backlog, at most until the given monotonic time."""
        poll = select.poll()
        poll.register(self.sock, select.POLLOUT)
        while self.backlog_bytes and (left_s := until_s - time.monotonic()) > 0:
            poll.poll(1000 * left_s)
            self.flush()

    def close(self) -> None:
        self._backlog.clear()
        self.sock.close()
