"""The scheduler side's own thread: whatever waits for the store or reads files runs here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue

from kvfold.errors import KvfoldError
from kvfold.vllm.threads import start_thread

logger = logging.getLogger(f"vllm.{__name__}")  # with vLLM's handlers and level

CLOSE_S = 6.0
"""How long closing waits for the task under way: longer than a lookup may take."""


class IoThread:
    """Runs tasks one after another on a thread of its own."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = start_thread("kvfold-lookups", self._run)

    def put(self, task: Callable[[], None]) -> None:
        """Run `task` soon; an exception of it is logged."""
        self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            run_logged(task)

    def close(self) -> None:
        """End the thread, after what is queued."""
        self._tasks.put(None)
        self._thread.join(timeout=CLOSE_S)


def run_logged(task: Callable[[], None]) -> None:
    """Run `task`; its errors are logged, those of the store only for debugging."""
    try:
        task()
    except KvfoldError as error:
        logger.debug("kvfold: %s", error)
    except Exception:
        logger.exception("kvfold: a task of the scheduler's side failed")
