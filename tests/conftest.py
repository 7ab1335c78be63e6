"""Fixtures for all tests: a runtime folder of the run's own, checkpoints, and a check for leaks."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from kvfold.testing import leaks

ROOT = Path(__file__).resolve().parents[1]

# No deadline: on a busy machine a time says nothing about the code.
settings.register_profile("kvfold", deadline=None)
settings.load_profile("kvfold")


@pytest.fixture(scope="session", autouse=True)
def runtime_root() -> Iterator[Path]:
    """The folder below which every store of this run lives; never the user's own stores.

    Short, because the path of a Unix socket must fit in 107 bytes.
    """
    leaks.mark_run()
    root = Path(tempfile.mkdtemp(prefix="kvf"))
    saved = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(root)
    yield root
    if saved is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = saved
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def tmp_runtime(runtime_root: Path) -> Iterator[Path]:
    """An empty runtime folder (mode 0700, short path) for one test."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir=runtime_root))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def no_leaks(runtime_root: Path) -> Iterator[None]:
    """Fail the test if a process, memory or socket of kvfold's outlives it by 10 s."""
    before = leaks.traces(runtime_root)
    yield
    left = leaks.left_behind(before, runtime_root)
    if left:
        leaks.kill_all()
        pytest.fail("left behind:\n" + "\n".join(left))


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """The folder of generated checkpoints; kept between runs."""
    return ROOT / ".cache" / "checkpoints"
