"""What people see of a real engine: why a request hit no more, metrics, KV events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trial import eventually
from typer.testing import CliRunner

from kvfold.cli import app
from kvfold.testing import drain
from kvfold.testing.checkpoints import gemma3, prompt
from kvfold.testing.engines import counters, generate, local_engine

DOCUMENT = prompt(1500, seed=1)


def why(store: dict[str, Any], *words: str) -> str:
    done = CliRunner().invoke(app, ["why", *words, "--runtime-dir", store["runtime_dir"]])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def latest(store: dict[str, Any], told: int) -> dict[str, Any]:
    """The latest of `told` requests; its last record may come a moment after its answer."""

    def listed() -> dict[str, Any] | None:
        rows = json.loads(why(store, "--last", "9", "--json"))
        return rows[0] if len(rows) == told else None

    return eventually(listed, f"the store was not told of {told} requests")


def ask(llm: Any, question: int) -> None:
    generate(llm, [DOCUMENT + prompt(200, seed=question)], max_tokens=4)
    drain(llm)
    assert llm.reset_prefix_cache()


def test_why_a_request_hit_no_more_and_what_was_counted(
    checkpoints: Path, store: dict[str, Any]
) -> None:
    model = gemma3(checkpoints)
    with local_engine(model, connector=store) as llm:
        ask(llm, 2)
        assert latest(store, 1)["outcome"] == "missed"
        ask(llm, 3)
        row = latest(store, 2)
        text = why(store, row["request"])
        assert "1,280 of 1,700 tokens came from the store" in text
        # Attention has more of the document, but no window ends where a hit of it would.
        assert "chunk 10 (tokens 1,280 to 1,408): no window is stored for a hit there" in text
        totals = counters(llm)
        assert totals["kvfold_hit_tokens"] == 1280
        assert totals["kvfold_missed_requests"] == 1
        assert totals["kvfold_loaded_bytes"] > 0
        assert totals["kvfold_stored_bytes"] == totals["kvfold_stored_as_tp_copies_bytes"] > 0
    other = {"hf_overrides": {"rope_theta": 123456.0}}
    with local_engine(model, connector=store, engine_args=other) as llm:
        ask(llm, 2)
        text = why(store, latest(store, 3)["request"])
        assert "none of 1,700 tokens came from the store" in text
        assert "the same tokens are stored" in text
        assert "text_config.rope_theta differs (123456.0 here" in text


def test_kv_events_of_what_the_store_has(checkpoints: Path, store: dict[str, Any]) -> None:
    events = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
    with local_engine(gemma3(checkpoints), connector=store, engine_args=events) as llm:
        connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
        taken: list[Any] = []
        take = connector.take_events
        connector.take_events = lambda: taken.extend(found := list(take())) or found
        ask(llm, 2)
        ask(llm, 3)
        stored = [event for event in taken if type(event).__name__ == "BlockStored"]
        attention = [event for event in stored if event.group_idx == 2]
        assert {event.medium for event in stored} == {"CPU"}
        assert {event.block_size for event in stored} == {128}
        assert sum(len(event.block_hashes) for event in attention) == 1664 // 128 + 2
        assert attention[0].token_ids == DOCUMENT + prompt(200, seed=2)[:164]
        taken.clear()
        assert llm.reset_prefix_cache(reset_connector=True)
        ask(llm, 2)
        removed = [event for event in taken if type(event).__name__ == "BlockRemoved"]
        gone = {h for event in removed if event.group_idx == 2 for h in event.block_hashes}
        assert gone == {h for event in attention for h in event.block_hashes}
