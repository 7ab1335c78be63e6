"""What must hold when a chaos run comes to rest: nothing is held, no wrong bytes were loaded."""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from kvfold.errors import StoreGone
from kvfold.store.client import StoreClient
from kvfold.store.launch import running_stores


class Errors(logging.Handler):
    """Collects what kvfold logs as errors: chaos is no error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        what = record.exc_info[1] if record.exc_info else ""
        self.lines.append(f"logged: {record.getMessage()} {what!r}")


def held_by_store(runtime: Path, within_s: float = 30) -> dict[str, int]:
    """What a store at rest still lends or pins, once it had time to end it."""
    deadline = time.monotonic() + within_s
    held = {"stores": 0}
    while held and time.monotonic() < deadline:
        time.sleep(0.1)
        with suppress(StoreGone, ValueError):
            (folder,) = running_stores(None, str(runtime))
            client = StoreClient.connect_tool(folder)
            try:
                status = client.status()
            finally:
                client.close()
            held = {
                name: status[name]
                for name in ("tickets_open", "jobs_open", "quarantined_slots", "departed_holders")
                if status[name]
            }
            if status["host"]["pinned_chunks"]:
                held["pinned_chunks"] = status["host"]["pinned_chunks"]
            for row in status["classes"]:
                held |= {name: row[name] for name in ("windows", "writing") if row[name]}
    return held


def tracebacks(runtime: Path) -> list[str]:
    """Stores that met an error nobody had thought of."""
    found = []
    for path in runtime.glob("*/store.log"):
        lines = path.read_text(errors="replace").splitlines()
        for at, line in enumerate(lines):
            if line.startswith("Traceback"):
                found.append("the store logged: " + " | ".join(lines[max(0, at - 1) : at + 30]))
    return found


class Bytes:
    """Compares what was loaded with what was stored, by the digests that workers write.

    A key may be stored with several contents: what is computed again may differ in its last bits.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stored: defaultdict[tuple[int, int, str], set[str]] = defaultdict(set)

    def compare(self) -> tuple[int, list[str]]:
        """Read what was written since the last call; (chunks loaded, what was wrong)."""
        loaded = []
        for path in self.folder.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                at = entry["rank"], entry["group"], entry["key"]
                if entry["event"] == "store":
                    self._stored[at].add(entry["digest"])
                else:
                    loaded.append((at, entry["digest"]))
            path.unlink()
        wrong = sorted({at for at, digest in loaded if digest not in self._stored[at]})
        return len(loaded), [
            f"chunk {key} of group {group} was loaded with bytes that were never stored under it"
            for _, group, key in wrong
        ]
