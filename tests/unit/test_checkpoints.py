"""Generated folders appear whole or not at all; prompts are the same for the same seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfold.testing.checkpoints import build_once, prompt


def test_builds_once(tmp_path: Path) -> None:
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "weights").write_text("w")

    target = tmp_path / "models" / "tiny"
    assert build_once(target, build) == build_once(target, build) == target
    assert len(calls) == 1
    assert (target / "weights").read_text() == "w"


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("w")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        build_once(tmp_path / "tiny", build)
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_builders_wins(tmp_path: Path) -> None:
    target = tmp_path / "tiny"

    def fast(folder: Path) -> None:
        (folder / "by").write_text("fast")

    def slow(folder: Path) -> None:
        (folder / "by").write_text("slow")
        build_once(target, fast)

    assert build_once(target, slow) == target
    assert (target / "by").read_text() == "fast"
    assert list(tmp_path.iterdir()) == [target]


def test_prompts_are_reproducible_and_in_range() -> None:
    first = prompt(1000, seed=3, vocab=64)
    assert first == prompt(1000, seed=3, vocab=64)
    assert first[:10] == prompt(10, seed=3, vocab=64)
    assert first != prompt(1000, seed=4, vocab=64)
    assert len(first) == 1000
    assert set(first) == set(range(8, 64))
