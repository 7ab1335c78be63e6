"""The records that answer `kvfold why`: one per outcome of a request, with what limited it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from scheduler_bench import DRAFT, FULL, STATE, WINDOW, Bench, hybrid, namespace
from small_specs import group

from kvfold.vllm import metrics

DOCS = Path(__file__).parents[2] / "docs" / "protocol.md"


@pytest.fixture
def mixed():
    return hybrid()


def only(bench):
    """The one record, as the store would get it."""
    ((name, record),) = bench.store.told
    assert record["request"] == name
    return json.loads(json.dumps(record))


def test_a_miss_names_the_first_chunk_of_each_group_that_limits(mixed):
    request = mixed.request("a", 300)
    mixed.know(request, range(1, 4), [FULL])
    mixed.know(request, range(4), [WINDOW])
    mixed.side.on_new_request(request)
    before = time.time()
    assert mixed.offer(request) == 0
    record = only(mixed)
    assert before <= record.pop("time_s") <= time.time()
    misses = record.pop("misses")
    assert record == {
        "request": "a", "engine": "e", "epoch": False, "tokens": 300, "local_tokens": 0,
        "found_tokens": 0, "offered_tokens": 0, "loaded_tokens": 0, "outcome": "missed",
        "reason": "not stored",
    }  # fmt: skip
    assert misses == [
        {
            "group": FULL, "group_name": "0 full_attention", "chunk": 0, "first_token": 0,
            "last_token": 64, "key": mixed.key(request, 0, FULL).hex(),
            "namespace": namespace(FULL).hex(), "reason": "not stored",
        },
        {
            "group": STATE, "group_name": "3 gdn", "chunk": 0, "first_token": 0,
            "last_token": 64, "key": mixed.key(request, 0, STATE).hex(),
            "namespace": namespace(STATE).hex(), "reason": "no state is stored for a hit there",
        },
    ]  # fmt: skip


def test_records_have_the_documented_fields(mixed):
    assert mixed.offer(mixed.arrive("a", 300)) == 0
    text = DOCS.read_text()
    table = text[text.index("**Records.**") : text.index("**Why.**")]
    record = only(mixed)
    row = next(line for line in table.splitlines() if line.startswith("| `misses`"))
    named = set(re.findall(r"`(\w+)`", table)) - set(re.findall(r"`([\w ]+)`", outcomes(table)))
    assert set(record["misses"][0]) <= set(re.findall(r"`(\w+)`", row))
    assert {*record, *record["misses"][0]} == named - {"Tell"}


def outcomes(table):
    return next(line for line in table.splitlines() if line.startswith("| `outcome`"))[11:]


def test_a_window_that_is_not_stored_is_named_with_its_tokens(mixed):
    request = mixed.request("a", 300)
    mixed.know(request, range(4), [FULL, STATE])
    mixed.side.on_new_request(request)
    mixed.offer(request)
    record = only(mixed)
    (miss,) = record["misses"]
    assert (miss["group"], miss["chunk"]) == (WINDOW, 0), "what one more chunk would need"
    assert (miss["first_token"], miss["last_token"]) == (32, 64)
    assert record["reason"] == miss["reason"] == "no window is stored for a hit there"


def test_a_load_that_took_all_is_loaded(mixed):
    request = mixed.arrive("a", 300, know=4)
    assert mixed.offer(request, local=128) == 128
    mixed.load_of(request, 128, local=128)
    assert not mixed.store.told, "told when it has ended"
    mixed.loaded(request, 256)
    record = only(mixed)
    assert record["outcome"] == "loaded"
    assert record["reason"] == ""
    assert record["misses"] == []
    counts = [record[f"{name}_tokens"] for name in ("local", "found", "offered", "loaded")]
    assert counts == [128, 256, 128, 128]
    mixed.loaded(request, 256)
    assert len(mixed.store.told) == 1


def test_a_draft_that_is_missing_limits_nothing(mixed):
    request = mixed.request("a", 300)
    mixed.know(request, range(4), [FULL, WINDOW, STATE])
    mixed.side.on_new_request(request)
    mixed.offer(request)
    mixed.load_of(request, 256)
    mixed.loaded(request, 256)
    assert only(mixed)["outcome"] == "loaded"
    assert DRAFT not in {miss["group"] for miss in only(mixed)["misses"]}


def test_a_load_of_less_is_partly(mixed):
    request = mixed.request("a", 300)
    mixed.know(request, range(3))
    mixed.side.on_new_request(request)
    mixed.offer(request)
    mixed.load_of(request, 192)
    mixed.loaded(request, 192)
    record = only(mixed)
    assert (record["outcome"], record["loaded_tokens"]) == ("partly", 192)
    assert [miss["chunk"] for miss in record["misses"]] == [3, 3, 3]
    assert record["reason"] == "not stored"


def test_the_last_chunk_of_a_prompt_of_whole_chunks_is_not_missed(mixed):
    request = mixed.arrive("a", 256, know=3)
    assert mixed.offer(request) == 192
    mixed.load_of(request, 192)
    mixed.loaded(request, 192)
    assert only(mixed)["outcome"] == "loaded", "a token of it must be computed"


def test_what_the_engine_has_itself_is_no_miss_of_the_store(mixed):
    request = mixed.arrive("a", 300)
    assert mixed.offer(request, local=256) == 0
    record = only(mixed)
    assert record["reason"] == "the engine's own cache has all of it"
    assert record["misses"] == []
    assert mixed.counted(metrics.MISSED_REQUESTS) == {}


def outcome_of(bench, how):
    request = bench.request("a", 300, skip_reading_prefix_cache=how == "skipped")
    if how == "disabled":
        bench.side.disable()
    bench.io.inline = how != "late"
    bench.side.on_new_request(request)
    bench.offer(request)
    bench.now += 1
    bench.offer(request)
    bench.io.inline = True
    bench.io.run()


@pytest.mark.parametrize(
    ("how", "outcome", "words"),
    [
        ("absent", "missed", "not stored"),
        ("disabled", "disabled", "nothing any more"),
        ("skipped", "skipped", "asks for no cached tokens"),
        ("late", "late", "lookup_wait_ms"),
    ],
)
def test_each_outcome_is_told_and_counted_once(mixed, how, outcome, words):
    outcome_of(mixed, how)
    record = only(mixed)
    assert record["outcome"] == outcome
    assert words in record["reason"]
    assert mixed.counted(metrics.MISSED_REQUESTS) == {how: 1}


def test_a_request_that_failed_and_then_gave_up_says_so(mixed):
    request = mixed.arrive("a", 300, know=4)
    assert mixed.offer(request) == 256
    mixed.failed(request, mixed.load_of(request, 256), part=STATE)
    assert mixed.retry(request) == 192
    mixed.failed(request, mixed.load_of(request, 192), part=STATE)
    assert mixed.retry(request) == 0
    record = only(mixed)
    assert record["outcome"] == "failed"
    assert record["reason"] == "loads of it failed twice"


def test_later_outcomes_of_a_request_are_told_but_counted_once(mixed):
    request = mixed.arrive("a", 300)
    assert mixed.offer(request) == 0
    mixed.know(request, range(4))
    mixed.now += 1
    assert mixed.offer(request) == 256
    mixed.load_of(request, 256)
    mixed.loaded(request, 256)
    assert mixed.outcomes == ["missed", "loaded"]
    again = mixed.arrive("b", 300, salt="b")
    assert mixed.offer(again) == 0
    mixed.io.inline, mixed.now = False, mixed.now + 1
    assert mixed.offer(again) is None
    mixed.now += 1
    assert mixed.offer(again) == 0
    mixed.io.run()
    assert mixed.outcomes == ["missed", "loaded", "missed", "late"]
    assert mixed.counted(metrics.MISSED_REQUESTS) == {"absent": 2}


def test_without_a_store_it_is_counted_only(mixed):
    mixed.connected = False
    mixed.offer(mixed.arrive("a", 300))
    assert not mixed.store.told
    assert mixed.counted(metrics.MISSED_REQUESTS) == {"absent": 1}


def test_a_record_after_a_reset_says_so(mixed):
    mixed.side.reset()
    mixed.offer(mixed.arrive("a", 300))
    record = only(mixed)
    assert record["epoch"] is True
    assert record["misses"][0]["namespace"] == namespace(FULL, mixed.side.epoch).hex()


def xor(*texts):
    return bytes(a ^ b for a, b in zip(*map(bytes.fromhex, texts), strict=True))


def test_key_and_namespace_of_a_miss_give_the_block_hash(mixed):
    request = mixed.arrive("a", 300)
    mixed.offer(request)
    for miss in only(mixed)["misses"]:
        assert xor(miss["key"], miss["namespace"]) == request.block_hashes[4 * miss["chunk"] + 3]


def test_a_record_that_waits_while_the_epoch_changes_is_of_its_own_epoch(mixed):
    request = mixed.arrive("a", 300)
    mixed.io.inline = False
    mixed.offer(request)
    mixed.side.reset()
    mixed.io.run()
    miss = only(mixed)["misses"][0]
    assert miss["namespace"] == namespace(FULL).hex()
    assert xor(miss["key"], miss["namespace"]) == request.block_hashes[3]


def test_a_request_whose_adapter_has_no_keys_is_told_and_no_error(mixed, tmp_path, caplog):
    mixed.offer(mixed.arrive("a", 300, lora=(1, tmp_path / "gone")))
    record = only(mixed)
    assert (record["outcome"], record["misses"]) == ("missed", [])
    assert "its adapter" in record["reason"]
    assert "Traceback" not in caplog.text


def test_a_prompt_shorter_than_a_chunk_misses_nothing():
    bench = Bench([group(0)])
    bench.offer(bench.arrive("a", 15))
    assert only(bench)["misses"] == []
