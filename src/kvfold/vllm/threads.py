"""Threads of kvfold's own in the engine's processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress


def start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread that may run on any core.

    vLLM pins a CPU worker's threads to the cores of its model, and threads inherit that: ours would
    only run when the model, or a peer's busy waiting, leaves that core.
    """

    def run() -> None:
        with suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
