"""The text of `kvfold why`: what is said, and that nothing is said twice or without need."""

from __future__ import annotations

from typing import Any

import pytest

from kvfold.cli.why_text import lines, short


def record(**changes: Any) -> dict[str, Any]:
    return {
        "request": "r",
        "engine": "e",
        "told_s": 1.8e9,
        "tokens": 4096,
        "local_tokens": 0,
        "found_tokens": 3200,
        "offered_tokens": 3200,
        "loaded_tokens": 3200,
        "outcome": "partly",
        "reason": "",
        "misses": [],
        **changes,
    }


def miss(**changes: Any) -> dict[str, Any]:
    return {
        "group": 1,
        "group_name": "window",
        "chunk": 25,
        "first_token": 3200,
        "last_token": 3328,
        "reason": "not stored",
        "elsewhere": [],
        "near": [],
        "notes": [],
        **changes,
    }


def place(**changes: Any) -> dict[str, Any]:
    told = {"namespace": "ab" * 32, "tier": "disk", "differs": "dtype", "chunks": 1200}
    return told | {"mine": "bfloat16", "theirs": "float16", "more": 0} | changes


def body(**changes: Any) -> str:
    return "\n".join(lines(record(**changes))[:-1])  # less the engine and time


CHUNK = "group 1 (window), chunk 25 (tokens 3,200 to 3,328): not stored"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "request r: 3,200 of 4,096 tokens came from the store"),
        (
            {"misses": [miss()], "reason": "not stored"},
            "request r: 3,200 of 4,096 tokens came from the store; the next chunk missed: " + CHUNK,
        ),
        (
            {"loaded_tokens": 4096, "offered_tokens": 4096, "found_tokens": 4096},
            "request r: all of 4,096 tokens came from the store",
        ),
        (
            {"local_tokens": 1024, "loaded_tokens": 2176, "offered_tokens": 2176},
            "request r: 2,176 of 4,096 tokens came from the store, 1,024 from the engine's own "
            "cache",
        ),
        (
            {"loaded_tokens": 0, "outcome": "failed", "reason": "loads of it failed twice"},
            "request r: none of 4,096 tokens came from the store; the load failed: loads of it "
            "failed twice\n  the store could serve 3,200 tokens; 3,200 were offered to the "
            "scheduler, 0 loaded",
        ),
        (
            {"misses": [miss(), miss(group=0, group_name="full")], "reason": "too late"},
            "request r: 3,200 of 4,096 tokens came from the store; the next chunk missed: "
            + CHUNK
            + "\n  also missed: group 0 (full), chunk 25 (tokens 3,200 to 3,328): not stored"
            "\n  too late",
        ),
    ],
)
def test_headlines(changes: dict[str, Any], text: str) -> None:
    assert body(**changes) == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"elsewhere": [place(tier="host", more=2)]},
            "(in host memory) under another identity: dtype differs (bfloat16 here, float16 "
            "there), and 2 more fields",
        ),
        ({"elsewhere": [place(differs="epoch")]}, "(on disk) under the same identity in another"),
        ({"elsewhere": [place(differs=None)]}, "another identity, abababababababab, whose fields"),
        ({"near": [place(more=1)]}, "has 1,200 chunks: dtype differs (bfloat16 here, float16 th"),
        (
            {"notes": [{"field": "hash_seed", "mine": "0", "theirs": "1"}]},
            "other block hashes: hash_seed is 0 here, 1 there",
        ),
    ],
)
def test_where_else_it_is(changes: dict[str, Any], text: str) -> None:
    assert text in lines(record(misses=[miss(**changes)]))[1]
    assert len(lines(record(misses=[miss(**changes), miss(chunk=30, **changes)]))) == 4


def test_a_malformed_record_has_a_text_too() -> None:
    told = {"request": "r", "engine": "e", "told_s": 0.0, "misses": [miss(chunk=None)]}
    assert "? of" not in lines(told)[0]
    assert "chunk ?" in lines(told)[0]


def test_long_values_are_cut_and_stay_on_a_line() -> None:
    assert short({"a": "x" * 100}).endswith("...")
    assert len(short("y" * 1000)) == 60
    assert short("a\n\tb\x1b") == "a b?"
