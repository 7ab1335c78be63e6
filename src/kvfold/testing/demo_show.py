"""The demo's progress: one line for each step done, and on a terminal what is going on now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


class Progress:
    """Prints to `console`: headings, steps with the seconds they took, and notes in between."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._started = time.monotonic()

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def heading(self, text: str) -> None:
        """Begin a part."""
        self.console.print(f"\n[bold]{text}[/bold]", highlight=False)

    def note(self, text: str) -> None:
        """Tell something that was just found."""
        line = f"            {text}"
        self.console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def step(self, label: str) -> Iterator[None]:
        """Do something that takes a while."""
        started = time.monotonic()
        if not self.console.is_terminal:
            self.console.print(f"  ...       {label}", markup=False, highlight=False)
            yield
        else:
            with self.console.status(label):
                yield
        took_s = time.monotonic() - started
        self.console.print(f"  {took_s:6.1f} s  {label}", markup=False, highlight=False)
