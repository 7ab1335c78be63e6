"""What a store is told at its start, and where its clients find it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kvfold.errors import ConfigError, StoreError

MIN_HOST_BYTES = 1 << 20


@dataclass(frozen=True)
class StoreSettings:
    """Settings of one store, all per machine.

    host_bytes, disk_bytes: sizes of the tiers; disk_path: None means no disk tier.
    private: the store serves one engine and ends with it.
    linger_s: a shared store without clients ends after so long; `inf` means never.
    job_deadline_s: how long a store job waits for a silent writer.
    populate: touch the whole arena in the background, so that first writes are fast.
    metrics_port, metrics_host: where the store's process serves Prometheus metrics over HTTP; port
    0: nowhere. Whoever starts a shared store decides: clients that find it running share it,
    whatever port they would have chosen. Private stores need a port each.
    """

    host_bytes: int
    disk_path: str | None = None
    disk_bytes: int = 0
    store_name: str = "default"
    private: bool = False
    runtime_dir: str | None = None
    disk_threads: int = 2
    linger_s: float = 900.0
    job_deadline_s: float = 60.0
    populate: bool = True
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"

    def check(self) -> StoreSettings:
        """Return self. Raises `ConfigError` naming the first unusable field."""
        name = self.store_name
        if not name or len(name) > 64 or not all(c.isalnum() or c in "-_." for c in name):
            raise ConfigError("store_name", name, "1 to 64 letters, digits, '-', '_' or '.'")
        _bounded("host_bytes", self.host_bytes, MIN_HOST_BYTES, 1 << 50)
        _bounded("disk_threads", self.disk_threads, 1, 64)
        _bounded("linger_s", self.linger_s, 0, float("inf"))
        _bounded("job_deadline_s", self.job_deadline_s, 0.1, 86_400)
        _bounded("metrics_port", self.metrics_port, 0, 65_535)
        if not self.metrics_host:
            raise ConfigError("metrics_host", self.metrics_host, "an address of this machine")
        if self.disk_path is None:
            if self.disk_bytes:
                raise ConfigError("disk_bytes", self.disk_bytes, "0, or a disk_path beside it")
        else:
            if not self.disk_path:
                raise ConfigError("disk_path", self.disk_path, "a folder")
            _bounded("disk_bytes", self.disk_bytes, 1, 1 << 60)
        return self

    def digest(self) -> str:
        """Twelve hex digits that differ where two stores could not serve one another's clients."""
        path = None if self.disk_path is None else str(Path(self.disk_path).absolute())
        told = json.dumps([self.host_bytes, path, self.disk_bytes])
        return hashlib.sha256(told.encode()).hexdigest()[:12]

    def runtime_path(self, engine: str = "") -> Path:
        """Folder of the store's lock, socket and log; a private store's is named by its engine."""
        name = f"kvfold-{os.getuid()}-{self.store_name}-{self.digest()}"
        if self.private:
            name += "-" + hashlib.sha256(engine.encode()).hexdigest()[:12]
        return runtime_base(self.runtime_dir) / name

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StoreSettings:
        """Raises `ConfigError` for anything but the settings of a store."""
        try:
            fields = json.loads(text)
            return cls(**fields).check()
        except (ValueError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                "settings", text[:200], f"JSON of a store's settings ({error})"
            ) from None


def runtime_base(runtime_dir: str | None) -> Path:
    """Where runtime folders are: as told, else the user's runtime folder, else /tmp."""
    if runtime_dir is not None:
        return Path(runtime_dir)
    users = os.environ.get("XDG_RUNTIME_DIR")
    return Path(users) / "kvfold" if users else Path("/tmp")


def private_folder(path: Path) -> Path:
    """Make `path` (mode 0700) if need be, and return it.

    Raises `StoreError` if it is not a folder of this user's alone: whoever can write there could
    pose as the store.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.mkdir(mode=0o700, exist_ok=True)
        seen = path.lstat()
    except OSError as error:
        raise StoreError(f"cannot make the store's runtime folder {path}: {error}") from None
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        raise StoreError(
            f"the store's runtime folder {path} must be a folder of user {os.getuid()} with mode "
            f"0700; it has owner {seen.st_uid} and mode {stat.S_IMODE(seen.st_mode):04o}"
        )
    return path


def _bounded(field: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(field, value, f"a number from {low} to {high}")
