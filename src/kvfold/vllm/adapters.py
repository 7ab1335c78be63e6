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
    """The adapters that an engine has seen, by id and path."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[_Signature, bytes | None]] = {}

    def mask(self, number: int, path: str) -> bytes | None:
        """32 bytes to mix into the keys of the adapter's requests; None: these have no keys.

        The engine keeps what it has read once. So files that change while it runs tell nothing
        about its weights any more, and the adapter is neither stored nor loaded until a restart.
        """
        key = number, path
        try:
            signature = _signature(Path(path))
            if key not in self._known:
                names = [name for name, _, _ in signature]  # its configuration is one of them
                digest = bytes.fromhex(identity.weights_digest(Path(path), names))
                mask = hashlib.sha256(b"kvfold adapter" + digest).digest()
                self._known[key] = signature, mask
        except (OSError, KvfoldError) as error:
            if key not in self._known:
                logger.warning("kvfold: requests of adapter %s are not cached: %s", path, error)
                self._known[key] = (), None
            return None
        seen, known = self._known[key]
        if known is not None and seen != signature:
            logger.warning(
                "kvfold: the files of adapter %s have changed while the engine runs; its requests "
                "are not cached until a restart",
                path,
            )
            self._known[key] = (), None
            return None
        return known


def _signature(folder: Path) -> _Signature:
    """Names, sizes and times of an adapter's files."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    entries = sorted(path for path in folder.iterdir() if path.is_file())
    stats = [(path.name, path.stat()) for path in entries]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
