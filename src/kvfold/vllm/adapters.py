"""Adapters (LoRA) as a part of keys: a digest of their files.

The engine's block hashes hold an adapter's name and path only, so an adapter that is retrained in
place would find what its predecessor stored. Runs on the I/O thread.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from kvfold import identity
from kvfold.errors import KvfoldError

logger = logging.getLogger(f"vllm.{__name__}")  # with vLLM's handlers and level

_Signature = tuple[tuple[str, int, int], ...]


class Adapters:
    """The adapters that an engine has seen, by their numbers: what it loaded once under a number it
    takes for all later requests with it, whatever path they name."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, _Signature, bytes | None]] = {}

    def mask(self, number: int, path: str) -> bytes | None:
        """32 bytes to mix into the keys of the adapter's requests; None: these have no keys.

        The engine keeps what it has read once. So files that change while it runs tell nothing
        about its weights any more, and the adapter is neither stored nor loaded until a restart.
        """
        try:
            signature = _signature(Path(path))
            if number not in self._known:
                names = [name for name, _, _ in signature]  # its configuration is one of them
                digest = bytes.fromhex(identity.weights_digest(Path(path), names))
                mask = hashlib.sha256(b"kvfold adapter" + digest).digest()
                self._known[number] = path, signature, mask
        except (OSError, KvfoldError) as error:
            if number not in self._known:
                self._refuse(number, path, f"they cannot be read ({error})")
            return None
        first, seen, known = self._known[number]
        if known is not None and path != first:
            self._refuse(number, path, f"its number {number} is that of {first}")
        elif known is not None and seen != signature:
            self._refuse(number, path, "its files have changed while the engine runs")
        return self._known[number][2]

    def _refuse(self, number: int, path: str, why: str) -> None:
        logger.warning(
            "kvfold: requests of adapter %s are not cached until the engine starts again: %s",
            path, why,
        )  # fmt: skip
        self._known[number] = path, (), None


def _signature(folder: Path) -> _Signature:
    """Names, sizes and times of an adapter's files."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    entries = sorted(path for path in folder.iterdir() if path.is_file())
    stats = [(path.name, path.stat()) for path in entries]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
