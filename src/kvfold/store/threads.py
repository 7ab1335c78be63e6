"""Threads that wait for the disk, or count chunks, so that the store's loop never has to."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvfold.store.core_disk import Order
from kvfold.store.disk import DiskTier, Found, ReadOutcome
from kvfold.store.tally import Tally

log = logging.getLogger("kvfold.store")

# A disk that hangs must not keep the store from ending.
_JOIN_S = 30.0

# A completion, to be run by the store's loop.
Completion = Callable[[], None]


class Wakeup:
    """Completions on their way to the loop: any thread puts, the loop's selector sees `fd`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waiting: deque[Completion] = deque()

    def put(self, completion: Completion) -> None:
        self._waiting.append(completion)
        self.ring()

    def ring(self) -> None:
        """Wake the loop. Safe in a signal handler."""
        os.eventfd_write(self.fd, 1)

    def run(self) -> None:
        """Run what has come, in order. For the loop only."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return
        for _ in range(len(self._waiting)):
            self._waiting.popleft()()

    def close(self) -> None:
        os.close(self.fd)


class DiskThreads:
    """A few threads that carry out orders; each chunk is reported as soon as it is done."""

    def __init__(
        self,
        disk: DiskTier,
        threads: int,
        wakeup: Wakeup,
        read_done: Callable[[Order, ReadOutcome | OSError, float], None],
        write_done: Callable[[Order, OSError | None, float], None],
    ) -> None:
        self._disk = disk
        self._wakeup = wakeup
        self._read_done = read_done
        self._write_done = write_done
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        # Two tasks a thread: the next one lies ready when a thread has finished one.
        self.free_tasks = 2 * threads
        self._threads = [
            threading.Thread(target=self._run, name=f"kvfold-disk-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, orders: Sequence[Order]) -> None:
        """Hand one task's orders to some thread."""
        self.free_tasks -= 1
        self._tasks.put(lambda: self._carry_out(orders))

    def call(self, function: Callable[[], None]) -> None:
        """Run something else on a disk thread; its errors are logged."""
        self._tasks.put(function)

    def scan(self, found: Callable[[list[Found]], None], finished: Callable[[], None]) -> None:
        """Read what an earlier store left, in a thread of its own."""
        thread = threading.Thread(
            target=self._scan, args=(found, finished), name="kvfold-scan", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """End the threads after the tasks that they have."""
        self._stopping.set()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                log.exception("a task of a disk thread failed")

    def _carry_out(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if order.is_read:
                self._report_read(order)
            else:
                self._report_write(order)
        self._wakeup.put(self._task_done)

    def _task_done(self) -> None:
        self.free_tasks += 1

    def _report_read(self, order: Order) -> None:
        outcome: ReadOutcome | OSError
        began_s = time.monotonic()
        try:
            outcome = self._disk.read(order.slot, order.key, order.namespace, order.view)
        except OSError as error:
            outcome = error
        took_s = time.monotonic() - began_s
        self._wakeup.put(lambda: self._read_done(order, outcome, took_s))

    def _report_write(self, order: Order) -> None:
        failed: OSError | None = None
        began_s = time.monotonic()
        try:
            self._disk.write(order.slot, order.key, order.namespace, order.view, order.sequence)
        except OSError as error:
            failed = error
        took_s = time.monotonic() - began_s
        self._wakeup.put(lambda: self._write_done(order, failed, took_s))

    def _scan(self, found: Callable[[list[Found]], None], finished: Callable[[], None]) -> None:
        # The loop must not drown in batches: at most this many wait for it.
        room = threading.Semaphore(4)

        def take(batch: list[Found]) -> None:
            room.release()
            found(batch)

        try:
            for batch in self._disk.scan():
                while not room.acquire(timeout=0.2):
                    if self._stopping.is_set():
                        return
                if self._stopping.is_set():
                    return
                self._wakeup.put(lambda batch=batch: take(batch))  # type: ignore[misc]
        except OSError:
            log.exception("the scan of the disk tier stopped early")
        self._wakeup.put(finished)


class CountThread:
    """Counts chunks beside the loop. Whoever asks waits for those who asked before."""

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup
        self._thread = ThreadPoolExecutor(1, "kvfold-count")

    def run(self, work: Callable[[], Tally], done: Callable[[Tally], None]) -> None:
        """Run `work` on the thread, then `done` in the loop; the errors of both are logged."""
        self._thread.submit(self._work, work, done)

    def _work(self, work: Callable[[], Tally], done: Callable[[Tally], None]) -> None:
        try:
            tally = work()
        except Exception:
            log.exception("the chunks could not be counted")
            return
        self._wakeup.put(lambda: self._finish(done, tally))

    @staticmethod
    def _finish(done: Callable[[Tally], None], tally: Tally) -> None:
        try:
            done(tally)
        except Exception:
            log.exception("a report failed")

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
