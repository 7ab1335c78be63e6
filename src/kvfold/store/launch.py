"""Finding the machine's store, or starting it.

Whoever starts a store holds the lock file and hands the open descriptor to the new process, which
keeps it for life: so there is one store per runtime folder, and a killed one leaves no lock.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import kvfold
from kvfold.errors import StoreError, StoreGone
from kvfold.store.settings import StoreSettings, private_folder, runtime_base

_POLL_S = 0.05
_LOG_TAIL_BYTES = 2000


def connect_socket(folder: Path, timeout_s: float) -> socket.socket:
    """A connection to the store of a runtime folder. Raises `StoreGone` if none listens.

    The folder is addressed through a descriptor, because a socket's path is limited to 107 bytes.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            sock.settimeout(timeout_s)
            sock.connect(f"/proc/self/fd/{descriptor}/store.sock")
        finally:
            os.close(descriptor)
    except OSError as error:
        sock.close()
        raise StoreGone(f"no store listens in {folder}: {error}") from None
    return sock


def running_stores(name: str | None = None, runtime_dir: str | None = None) -> list[Path]:
    """Runtime folders of this user's stores that listen, of that name or any."""
    base = runtime_base(runtime_dir)
    pattern = f"kvfold-{os.getuid()}-{'*' if name is None else glob.escape(name)}-*"
    found: list[Path] = []
    for folder in sorted(base.glob(pattern)):
        with suppress(StoreGone):
            connect_socket(folder, 1.0).close()
            found.append(folder)
    return found


def try_lock(folder: Path) -> int | None:
    """The lock file's descriptor, locked; None if another store or starter holds it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def ensure_store(settings: StoreSettings, engine: str = "", timeout_s: float = 30.0) -> Path:
    """Return the runtime folder of a store that listens; start the store if need be.

    Raises `StoreError` with the store's own words if it cannot start, or after `timeout_s`.
    """
    settings.check()
    folder = private_folder(settings.runtime_path(engine))
    until_s = time.monotonic() + timeout_s
    while True:
        with suppress(StoreGone):
            connect_socket(folder, 1.0).close()
            return folder
        lock = try_lock(folder)
        if lock is not None:
            try:
                _start(settings, folder, lock, until_s)
            finally:
                os.close(lock)
            return folder
        if time.monotonic() > until_s:
            raise StoreError(
                f"the store in {folder} did not answer within {timeout_s:.0f} s; it may be "
                f"stopping, or hang. Its log: {folder / 'store.log'}"
            )
        time.sleep(_POLL_S)


def _start(settings: StoreSettings, folder: Path, lock: int, until_s: float) -> None:
    """Start a detached store and wait until it listens."""
    ready, told = os.pipe()
    log_path = folder / "store.log"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log = os.open(log_path, flags, 0o600)
    # The very kvfold that runs here, installed or not.
    source = str(Path(kvfold.__file__).parent.parent)
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-P", "-m", "kvfold.store", "--detach"]
    command += ["--folder", str(folder), "--lock-fd", str(lock), "--ready-fd", str(told)]
    try:
        starter = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(lock, told),
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        os.close(told)
        told = -1
        starter.communicate(settings.to_json().encode())
        answer = _read_all(ready, until_s)
    finally:
        for descriptor in (ready, told, log):
            if descriptor >= 0:
                os.close(descriptor)
    if answer is None:
        raise StoreError(f"the store did not start in time; its log: {log_path}")
    _judge(answer, log_path)


def _judge(answer: bytes, log_path: Path) -> None:
    """Raise `StoreError` unless the new store said that it listens."""
    try:
        error = json.loads(answer)["error"]
    except (ValueError, TypeError, KeyError):
        tail = log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        raise StoreError(
            f"the store ended while it started; {log_path} ends with:\n{tail}"
        ) from None
    if error is not None:
        raise StoreError(error)


def _read_all(descriptor: int, until_s: float) -> bytes | None:
    """Everything until the other end is closed; None if the time is over before."""
    answer = b""
    while (left_s := until_s - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left_s)[0]:
            break
        part = os.read(descriptor, 1 << 16)
        if not part:
            return answer
        answer += part
    return None
