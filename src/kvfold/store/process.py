"""A store's start and end: memory, disk, runtime folder and log around the server."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from kvfold.errors import ConfigError, KvfoldError, StoreError
from kvfold.sizes import format_bytes
from kvfold.store.arena import Arena
from kvfold.store.disk import DiskTier
from kvfold.store.launch import try_lock
from kvfold.store.server import MetricsEndpoint, Server, listen
from kvfold.store.settings import StoreSettings, private_folder

log = logging.getLogger("kvfold.store")


def run_started(folder: str, lock_fd: int, ready_fd: int, settings_json: str) -> int:
    """Run a store that another process started; tell it through `ready_fd` how that went."""
    os.set_inheritable(lock_fd, False)
    os.set_inheritable(ready_fd, False)

    def tell(error: str | None) -> None:
        with suppress(OSError):  # the starter may have given up
            os.write(ready_fd, json.dumps({"error": error}).encode())
        os.close(ready_fd)

    try:
        settings = StoreSettings.from_json(settings_json)
        server = make_server(settings, Path(folder))
    except (KvfoldError, OSError) as error:
        tell(str(error))
        return 1
    _serve(server, Path(folder), lambda: tell(None))
    return 0


def run_here(settings: StoreSettings, ready: Callable[[Path], None]) -> None:
    """Run a store in this process until it is stopped. Raises `StoreError` if it cannot start."""
    settings.check()
    folder = private_folder(settings.runtime_path())
    lock = try_lock(folder)
    if lock is None:
        raise StoreError(f"a store runs already in {folder}{_pid_of(folder)}")
    try:
        server = make_server(settings, folder)
        _serve(server, folder, lambda: ready(folder))
    finally:
        os.close(lock)


def make_server(settings: StoreSettings, folder: Path) -> Server:
    """A server that listens in `folder`, whose lock the caller holds. Raises `StoreError`."""
    os.umask(0o077)
    with suppress(OSError):
        # An engine's worker that started us may be pinned to a core of its model; we are not.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    check_memory(settings.host_bytes)
    with ExitStack() as opened:
        endpoint = None
        if settings.metrics_port:
            endpoint = _metrics(settings)
            opened.callback(endpoint.close)
        disk = None
        if settings.disk_path is not None:
            disk = DiskTier(Path(settings.disk_path).absolute(), settings.disk_bytes)
            opened.callback(disk.close)
        arena = Arena(settings.host_bytes, populate=settings.populate)
        opened.callback(arena.close)
        listener = listen(folder)
        opened.pop_all()  # the server closes them
    content = {"pid": os.getpid(), "settings": json.loads(settings.to_json())}
    temporary = folder / "store.json.tmp"
    temporary.write_text(json.dumps(content) + "\n")
    temporary.replace(folder / "store.json")
    return Server(settings, listener, arena, disk, endpoint)


def _metrics(settings: StoreSettings) -> MetricsEndpoint:
    """The endpoint that the settings want. Raises `ConfigError` if its address cannot be had."""
    from kvfold.store.metrics import HttpEndpoint  # with an HTTP server, which most stores lack

    where = f"{settings.metrics_host}:{settings.metrics_port}"
    try:
        return HttpEndpoint(settings.metrics_host, settings.metrics_port)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            "metrics_port",
            settings.metrics_port,
            f"a port that is free: {where} cannot be had ({error}); choose another, or 0 for none",
        ) from None


def _serve(server: Server, folder: Path, ready: Callable[[], None]) -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    server.install_signals()
    log.info("store %s runs as process %d", server.core.store_id, os.getpid())
    ready()
    try:
        server.run()
    finally:
        (folder / "store.sock").unlink(missing_ok=True)
    log.info("stopped")


def check_memory(host_bytes: int) -> None:
    """Raise `StoreError` if the machine, or this process's control group, lacks the memory."""
    available = _available_bytes()
    if available is not None and host_bytes > available:
        raise StoreError(
            f"host_bytes={host_bytes}: a host tier of {format_bytes(host_bytes)} does not fit the "
            f"{format_bytes(available)} of memory that are available; give it less"
        )


def _available_bytes() -> int | None:
    bounds: list[int] = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        bounds.append(int(next(x for x in lines if x.startswith("MemAvailable:")).split()[1]) << 10)
    with suppress(OSError, ValueError, StopIteration):
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        name = next(x for x in groups if x.startswith("0::"))[3:]
        folder = Path("/sys/fs/cgroup") / name.lstrip("/")
        limit = int((folder / "memory.max").read_text())
        bounds.append(limit - int((folder / "memory.current").read_text()))
    return min(bounds) if bounds else None


def _pid_of(folder: Path) -> str:
    with suppress(OSError, ValueError, KeyError):
        return f" (process {int(json.loads((folder / 'store.json').read_text())['pid'])})"
    return ""
