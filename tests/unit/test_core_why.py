"""What schedulers tell of requests, and what the store answers when asked why they missed."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from core_world import OTHER_SPACE, SPACE, Peer, World, key, words

from kvfold.errors import FormatError
from kvfold.store import namespaces, records
from kvfold.store.core_why import MAX_MATCHES
from kvfold.store.messages import MAX_RECORDS, Ask, Group, Report, Tell, Verdicts, Why, encode
from kvfold.store.namespaces import NamespaceBook
from kvfold.store.whynot import explain

THIRD_SPACE = hashlib.sha256(b"a third namespace").digest()


def xor(*parts: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(parts[0], parts[1], strict=True))


def identity(**fields: Any) -> str:
    notes = {"hash_seed": fields.pop("hash_seed", "0")}
    return json.dumps({"fields": fields, "notes": notes}, sort_keys=True)


MINE = identity(dtype="bfloat16", text_config={"rope_theta": 10000})
THEIRS = identity(dtype="bfloat16", text_config={"rope_theta": 500000})


def miss(number: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "group": 0,
        "group_name": "full attention",
        "chunk": 3,
        "first_token": 48,
        "last_token": 64,
        "key": key(number).hex(),
        "namespace": SPACE.hex(),
        "reason": "not stored",
        **changes,
    }


def record(*misses: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"request": "r", "tokens": 100, "outcome": "missed", "misses": list(misses), **changes}


def group(world: World, namespace: bytes = SPACE, text: str = MINE, **changes: Any) -> Group:
    return world.group(namespace=namespace, text=text, **changes)


def tell(peer: Peer, request: str, content: dict[str, Any] | bytes) -> None:
    peer.send(
        Tell(request, content if isinstance(content, bytes) else json.dumps(content).encode())
    )


def ask(world: World, request: str, last: int = 0) -> dict[str, Any]:
    tool = world.connect("tool", groups=[])
    tool.send(Why(7, request, last))
    report = tool.take(Report)
    tool.bye()
    assert report.rid == 7
    encode(report)
    content: dict[str, Any] = explain(json.loads(report.json))
    return content


def first_miss(world: World, request: str = "r") -> dict[str, Any]:
    told: dict[str, Any] = ask(world, request)["record"]["misses"][0]
    return told


def store_under(world: World, namespace: bytes, number: int, text: str, job: int = 1) -> Peer:
    """Another engine stores, under its namespace, the block that `number` is under SPACE."""
    peer = world.connect(
        engine=f"engine of {namespace.hex()}", groups=[group(world, namespace, text)]
    )
    there = xor(xor(key(number), SPACE), namespace)
    peer.send(Ask(1, job, 0, namespace, there, 1, words(1), b""))
    assert peer.take(Verdicts)
    peer.commit(job, 0)
    return peer


def test_a_record_comes_back_as_it_was_told() -> None:
    world = World()
    scheduler = world.connect("scheduler")
    tell(scheduler, "r", record(miss(), loaded_tokens=48))
    answer = ask(world, "r")
    assert answer["kept"] == answer["matching"] == 1
    told = answer["record"]
    assert (told["request"], told["engine"], told["loaded_tokens"]) == ("r", "e", 48)
    assert told["misses"][0].items() >= miss().items()
    assert answer["matches"][0]["miss"] == {
        "group_name": "full attention",
        "reason": "not stored",
    }
    assert "namespaces" not in answer


def test_only_schedulers_tell_and_only_tools_ask() -> None:
    world = World()
    peers = [world.connect("tool", groups=[]), world.connect()]
    for peer in peers:
        with pytest.raises(FormatError):
            tell(peer, "r", record())
    for peer in (peers[1], world.connect("scheduler")):
        with pytest.raises(FormatError):
            peer.send(Why(1, "r", 0))
    assert ask(world, "r") == {
        "kept": 0,
        "since_s": None,
        "matching": 0,
        "matches": [],
        "record": None,
    }


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no json",
        b"[1, 2]",
        b"\xff\xfe",
        b"[" * 16_000,
        b'{"misses": 5}',
        b'{"misses": [5, null, []]}',
        b'{"misses": [{"key": 5, "namespace": "xy"}, {"key": "zz"}]}',
        json.dumps({"misses": [{"key": "é" * 64, "namespace": "g" * 64}]}).encode(),
        json.dumps({"misses": [miss(group=-1), miss(group="0"), miss(group=10**30)]}).encode(),
        json.dumps({"deep": {"deeper": [1]}, "misses": [{**miss(), "deep": [[[]]]}]}).encode(),
        b'{"tokens": 1e999, "reason": "\\ud800"}',
    ],
)
def test_a_malformed_record_is_told_as_far_as_it_goes(content: bytes) -> None:
    world = World()
    scheduler = world.connect("scheduler")
    tell(scheduler, "r", content)
    answer = ask(world, "r")
    assert answer["record"]["request"] == "r"
    assert "deep" not in answer["record"]
    assert all(told["elsewhere"] == [] for told in answer["record"]["misses"])
    assert scheduler.lookup(1) == [0]


def test_ids_are_found_by_beginning_and_by_part() -> None:
    world = World()
    scheduler = world.connect("scheduler")
    for request in ("cmpl-ab-0", "cmpl-abc-0", "ab", "xx-cmpl-ab-0"):
        tell(scheduler, request, record())

    def fits(wanted: str) -> list[str]:
        return [match["request"] for match in ask(world, wanted)["matches"]]

    assert fits("ab") == ["ab"]
    assert fits("cmpl-abc") == ["cmpl-abc-0"]
    assert fits("cmpl") == ["cmpl-abc-0", "cmpl-ab-0"]  # newest first
    assert fits("bc") == ["cmpl-abc-0"]
    assert fits("-0") == ["xx-cmpl-ab-0", "cmpl-abc-0", "cmpl-ab-0"]
    assert fits("none") == []
    assert ask(world, "cmpl")["record"] is None


def test_the_latest_word_on_a_request_counts_for_each_engine() -> None:
    world = World()
    one, two = world.connect("scheduler"), world.connect("scheduler", engine="e2")
    tell(one, "r", record(outcome="missed"))
    tell(two, "r", record(outcome="late"))
    tell(one, "r", record(outcome="loaded"))
    answer = ask(world, "r")
    assert (answer["kept"], answer["matching"]) == (2, 2)
    assert (answer["record"]["engine"], answer["record"]["outcome"]) == ("e", "loaded")
    assert [match["outcome"] for match in answer["matches"]] == ["loaded", "late"]


def test_records_outlive_their_engine_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORDS", 50)
    world = World()
    scheduler = world.connect("scheduler")
    for number in range(60):
        tell(scheduler, f"request {number}", record())
    scheduler.bye()
    assert ask(world, "request 9")["matching"] == 0
    answer = ask(world, "", last=5)
    assert answer["kept"] == 50
    assert [m["request"] for m in answer["matches"]] == [f"request {n}" for n in range(59, 54, -1)]
    assert len(ask(world, "request")["matches"]) == 50
    assert world.core.status()["requests_told"] == 60


def test_a_report_of_many_matches_is_bounded() -> None:
    world = World()
    scheduler = world.connect("scheduler")
    for number in range(MAX_MATCHES + 20):
        tell(scheduler, f"request {number}", record())
    answer = ask(world, "request")
    assert (answer["matching"], len(answer["matches"])) == (MAX_MATCHES + 20, MAX_MATCHES)
    assert len(ask(world, "", last=MAX_RECORDS)["matches"]) == MAX_MATCHES + 20


def test_the_same_block_under_another_identity() -> None:
    world = World(disk_slots=20)
    scheduler = world.connect("scheduler", groups=[group(world)])
    tell(scheduler, "r", record(miss(1), miss(2)))
    store_under(world, OTHER_SPACE, 1, THEIRS)
    misses = ask(world, "r")["record"]["misses"]
    assert misses[0]["elsewhere"] == [
        {
            "namespace": OTHER_SPACE.hex(),
            "tier": "host",
            "differs": "text_config.rope_theta",
            "mine": 10000,
            "theirs": 500000,
            "more": 0,
            "chunks": 1,
        }
    ]
    assert misses[0]["near"] == []
    assert misses[1]["elsewhere"] == []
    near = misses[1]["near"]
    assert [(at["namespace"], at["differs"], at["chunks"]) for at in near] == [
        (OTHER_SPACE.hex(), "text_config.rope_theta", 1)
    ]


def test_a_chunk_of_that_key_in_a_third_namespace_is_another_chunk() -> None:
    world = World()
    scheduler = world.connect("scheduler", groups=[group(world)])
    tell(scheduler, "r", record(miss(1)))
    world.core.table.namespace_number(OTHER_SPACE)
    there = xor(xor(key(1), SPACE), OTHER_SPACE)
    third = world.connect(engine="third", groups=[group(world, THIRD_SPACE)])
    third.send(Ask(1, 1, 0, THIRD_SPACE, there, 1, words(1), b""))
    third.commit(1, 0)
    assert first_miss(world)["elsewhere"] == []


def test_asking_touches_nothing_and_a_chunk_on_disk_is_found_there() -> None:
    world = World(slots=4, disk_slots=20)
    scheduler = world.connect("scheduler", groups=[group(world)])
    tell(scheduler, "r", record(miss(1)))
    other = store_under(world, OTHER_SPACE, 1, THEIRS)
    world.run_disk()
    for number in range(10, 13):
        other.store(number, number)
        world.run_disk()
    assert first_miss(world)["elsewhere"][0]["tier"] == "host"
    other.store(13, 13)  # evicts what was used first: asking was no use
    assert first_miss(world)["elsewhere"][0]["tier"] == "disk"
    world.check()


def test_an_epoch_has_the_identity_of_its_group() -> None:
    world = World()
    scheduler = world.connect("scheduler", groups=[group(world)])
    worker = world.connect(groups=[group(world)])
    worker.ask(1, (5,), 1, space=OTHER_SPACE)  # the engine's cache was reset
    worker.commit(1, 0)
    before = xor(xor(key(5), OTHER_SPACE), SPACE)  # the block's key before the reset
    tell(scheduler, "r", record(miss(key=before.hex())))
    told = first_miss(world)
    assert [(at["differs"], at["tier"]) for at in told["elsewhere"]] == [("epoch", "host")]
    assert world.core.namespaces.get(OTHER_SPACE).epoch


def test_what_an_earlier_store_left_is_known_by_its_text() -> None:
    world = World(slots=4, disk_slots=20, scanned=False)
    there = xor(xor(key(1), SPACE), OTHER_SPACE)
    found = world.disk.put(3, space=OTHER_SPACE)._replace(key=there)
    world.core.found([found])
    world.core.scan_finished()
    scheduler = world.connect("scheduler", groups=[group(world)])
    tell(scheduler, "r", record(miss(1)))
    assert first_miss(world)["elsewhere"][0]["differs"] is None  # nobody told what it is
    world.core.namespaces.learn_old({OTHER_SPACE: THEIRS, SPACE: "{}"})
    told = first_miss(world)["elsewhere"][0]
    assert (told["tier"], told["differs"]) == ("disk", "text_config.rope_theta")


def test_groups_of_other_layers_are_left_out() -> None:
    def layers(name: str, **more: Any) -> str:
        return identity(group={"layers": [{"name": name}]}, **more)

    world = World()
    scheduler = world.connect("scheduler", groups=[group(world, text=layers("model.0"))])
    tell(scheduler, "r", record(miss(1)))
    store_under(world, OTHER_SPACE, 1, layers("model.1"))
    assert first_miss(world)["elsewhere"] == first_miss(world)["near"] == []
    store_under(world, THIRD_SPACE, 1, layers("model.0", dtype="float16"))
    told = first_miss(world)["elsewhere"]
    assert [(at["differs"], at["mine"], at["theirs"]) for at in told] == [
        ("dtype", "(absent)", "float16")
    ]


def test_the_closest_identity_comes_first() -> None:
    world = World()
    scheduler = world.connect("scheduler", groups=[group(world)])
    tell(scheduler, "r", record(miss(1)))
    far = identity(dtype="float16", text_config={"rope_theta": 1, "heads": 3})
    store_under(world, THIRD_SPACE, 1, far)
    store_under(world, OTHER_SPACE, 1, THEIRS)
    told = first_miss(world)["elsewhere"]
    assert [(at["differs"], at["more"]) for at in told] == [
        ("text_config.rope_theta", 0),
        ("dtype", 2),
    ]


def test_other_block_hashes_under_the_same_identity() -> None:
    world = World()
    scheduler = world.connect("scheduler", groups=[group(world)])
    other = identity(dtype="bfloat16", text_config={"rope_theta": 10000}, hash_seed="7")
    world.connect("scheduler", "other", groups=[group(world, text=other)])
    tell(scheduler, "r", record(miss(1)))
    assert first_miss(world)["notes"] == [{"field": "hash_seed", "mine": "0", "theirs": "7"}]


def test_texts_that_are_no_identity_do_no_harm() -> None:
    world = World()
    scheduler = world.connect("scheduler", groups=[group(world, text="no json")])
    tell(scheduler, "r", record(miss(1), miss(1, group=9), miss(1, namespace=THIRD_SPACE.hex())))
    store_under(world, OTHER_SPACE, 1, "[" * 5000)
    misses = ask(world, "r")["record"]["misses"]
    assert [len(told["elsewhere"]) for told in misses] == [1, 1, 0]
    assert misses[0]["elsewhere"][0]["differs"] is None


def test_a_report_fits_a_frame_however_long_the_identities() -> None:
    world = World()
    worst = "\x01" * (1 << 18)
    groups = [group(world, text=worst[n:]) for n in range(64)]
    scheduler = world.connect("scheduler", groups=groups)
    tell(scheduler, "r", record(*({"group": n} for n in range(64))))
    assert ask(world, "r")["record"]["request"] == "r"
    for number in range(60):
        world.core.namespaces.learn(hashlib.sha256(b"%d" % number).digest(), worst)
    tell(scheduler, "r", record(miss(1)))
    assert ask(world, "r")["record"]["request"] == "r"


def test_the_book_of_namespaces_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "MAX_NAMESPACES", 10)
    book = NamespaceBook()
    spaces = [hashlib.sha256(b"space %d" % n).digest() for n in range(12)]
    for number, space in enumerate(spaces):
        book.learn(space, f"text {number}", copies_bytes=number)
    assert spaces[0] not in book
    assert spaces[2] in book
    for number in range(9):
        book.learn(spaces[11], f"another text {number}")
    assert len(book.get(spaces[11]).texts) == 4
    assert book.get(spaces[11]).copies_bytes == 11
    book.learn(spaces[11], "x" * (1 << 19))
    assert max(map(len, book.get(spaces[11]).texts)) < 100
    book.learn_old({spaces[0]: "old"})  # no room: what engines said goes first
    assert spaces[0] not in book
    assert next(iter(book.latest_first()))[0] == spaces[11]
