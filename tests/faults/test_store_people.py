"""What people see of a real store: metrics over HTTP, the command's text, and why requests miss."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from store_peers import PAYLOAD, SLOT, SPACE, Peer, eventually, join, key, settings

from kvfold.errors import ConfigError, StoreError
from kvfold.store.client import Group, StoreClient, _fitting
from kvfold.store.launch import running_stores
from kvfold.store.messages import MAX_RECORD_BYTES, Tell
from kvfold.store.settings import StoreSettings

pytestmark = pytest.mark.usefixtures("no_leaks")

OTHER = hashlib.sha256(b"another space").digest()


def identity(theta: int) -> str:
    return json.dumps({"fields": {"text_config": {"rope_theta": theta}}, "notes": {}})


MINE = Group(SLOT, PAYLOAD, SPACE, identity(10000), True, 8 * PAYLOAD)
THEIRS = Group(SLOT, PAYLOAD, OTHER, identity(500000))


@pytest.fixture
def folder(tmp_runtime: Path) -> Iterator[Path]:
    """A folder; whatever stores run below it at the end are ended."""
    yield tmp_runtime
    for found in running_stores(runtime_dir=str(tmp_runtime / "run")):
        StoreClient.connect_tool(found).stop(drain=False)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return samples(text)


def samples(text: str) -> dict[str, float]:
    return {
        " ".join([sample.name, *map(str, sample.labels.values())]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from kvfold.cli import main; sys.exit(main())"
    where = ["--runtime-dir", str(folder / "run")]
    return subprocess.run(
        [sys.executable, "-c", code, *arguments, *where], capture_output=True, text=True, timeout=60
    )


def record(request: str, **changes: Any) -> dict[str, Any]:
    return {
        "request": request,
        "engine": "engine",
        "time_s": 1.8e9,
        "epoch": False,
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


def miss(number: int) -> dict[str, Any]:
    return {
        "group": 0,
        "group_name": "sliding window",
        "chunk": 25,
        "first_token": 3200,
        "last_token": 3328,
        "key": key(number).hex(),
        "namespace": SPACE.hex(),
        "reason": "not stored",
    }


def their_key(number: int) -> bytes:
    """The key of the same block under the other namespace."""
    return bytes(a ^ b ^ c for a, b, c in zip(key(number), SPACE, OTHER, strict=True))


def store_theirs(peer: Peer, number: int) -> None:
    one = np.ones(1, np.uint64)
    offsets = peer.client.ask(1, 0, OTHER, their_key(number), 1, one).offsets
    peer.write(int(offsets[0]), number)
    peer.client.commit(1, np.zeros(1, np.uint32), True)


# ---- metrics ---------------------------------------------------------------------------------


def test_metrics_over_http_follow_what_happens(folder: Path) -> None:
    port = free_port()
    told = settings(folder, metrics_port=port)
    worker, scheduler = Peer(told, groups=[MINE]), Peer(told, "scheduler", groups=[MINE])
    assert scrape(port)["kvfold_store_stored_chunks_total"] == 0
    worker.store(1, [1, 2, 3])
    eventually(lambda: scrape(port)["kvfold_store_disk_written_chunks_total"] == 3)
    scheduler.client.open_ticket(1, 0, SPACE, join([1, 2]), 1)
    assert worker.load(1, [1, 2])
    worker.tiers([1, 9])
    now = scrape(port)
    assert now["kvfold_store_loaded_bytes_total host"] == 2 * PAYLOAD
    assert now["kvfold_store_lookup_keys_total absent"] == 1
    assert now["kvfold_store_stored_copies_bytes_total"] == 24 * PAYLOAD
    assert now["kvfold_store_disk_write_seconds_count"] == 3
    assert now["kvfold_store_disk_write_seconds_sum"] > 0
    assert now["kvfold_store_ticket_seconds_count"] == 1
    assert now["kvfold_store_clients worker"] == 1
    printed = samples(command(folder, "store", "status", "--prometheus").stdout)
    moving = re.compile("uptime|clients")
    assert {k: v for k, v in printed.items() if not moving.search(k)} == {
        k: v for k, v in now.items() if not moving.search(k)
    }
    both = command(folder, "store", "status", "--prometheus", "--json")
    assert both.returncode == 2
    worker.client.close()
    scheduler.client.close()


def test_two_engines_share_a_store_whatever_their_ports(folder: Path) -> None:
    ports = free_port(), free_port()
    one = Peer(settings(folder, metrics_port=ports[0]))
    two = Peer(settings(folder, metrics_port=ports[1]), engine="two")
    assert one.client.store_id == two.client.store_id
    assert scrape(ports[0])["kvfold_store_clients worker"] == 2
    with pytest.raises(OSError, match="refused"):
        scrape(ports[1])
    one.client.close()
    two.client.close()


def test_a_port_in_use_ends_the_start_but_not_a_client(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = settings(folder, metrics_port=port)
        with pytest.raises(StoreError, match=f"metrics_port={port}.*choose another"):
            Peer(told)
        first = Peer(settings(folder))
        second = Peer(told, engine="two")  # a store runs: its port is its own business
        assert first.client.store_id == second.client.store_id
        first.client.close()
        second.client.close()
        eventually(lambda: not running_stores(runtime_dir=str(folder / "run")))
        run = command(folder, "store", "run", "--host", "4MiB", "--metrics-port", str(port))
        assert run.returncode == 2
        assert "metrics_port" in run.stderr


def test_an_address_that_is_not_ours(folder: Path) -> None:
    with pytest.raises(StoreError, match="metrics_port"):
        Peer(settings(folder, metrics_port=free_port(), metrics_host="192.0.2.1"))
    for field, value in [("metrics_port", 65_536), ("metrics_port", -1), ("metrics_host", "")]:
        with pytest.raises(ConfigError, match=field):
            settings(folder, **{field: value}).check()


def test_a_store_run_by_hand_serves_metrics_until_it_ends(folder: Path) -> None:
    port = free_port()
    code = "import sys; from kvfold.cli import main; sys.exit(main())"
    run = ["store", "run", "--host", "4MiB", "--metrics-port", str(port)]
    store = subprocess.Popen(
        [sys.executable, "-c", code, *run, "--runtime-dir", str(folder / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert store.stdout is not None
    assert store.stdout.readline()
    assert scrape(port)["kvfold_store_capacity_bytes host"] == 4 << 20
    store.send_signal(signal.SIGTERM)
    assert store.wait(20) == 0
    store.stdout.close()
    with pytest.raises(OSError, match="refused"):
        scrape(port)


# ---- why -------------------------------------------------------------------------------------


@pytest.fixture
def told(folder: Path) -> StoreSettings:
    return settings(folder)


def test_why_a_request_missed(folder: Path, told: StoreSettings) -> None:
    scheduler, other = (
        Peer(told, "scheduler", groups=[MINE]),
        Peer(told, engine="b", groups=[THEIRS]),
    )
    store_theirs(other, 1)
    scheduler.client.tell("cmpl-ab12-0", record("cmpl-ab12-0", misses=[miss(1)]))
    shown = command(folder, "why", "ab12")
    assert shown.returncode == 0, shown.stderr
    first, *rest = shown.stdout.splitlines()
    assert first == (
        "request cmpl-ab12-0: 3,200 of 4,096 tokens came from the store; the next chunk missed: "
        "group 0 (sliding window), chunk 25 (tokens 3,200 to 3,328): not stored"
    )
    assert (
        "  the same tokens are stored (in host memory) under another identity: "
        "text_config.rope_theta differs (10000 here, 500000 there)"
    ) in rest
    content = json.loads(command(folder, "why", "--json", "cmpl-ab12-0").stdout)
    assert content["record"]["misses"][0]["elsewhere"][0]["theirs"] == 500000
    assert content["folder"] == str(told.runtime_path())
    scheduler.client.close()
    other.client.close()


def test_why_of_several_or_none(folder: Path, told: StoreSettings) -> None:
    assert command(folder, "why", "x").returncode == 3
    scheduler = Peer(told, "scheduler", groups=[MINE])
    assert "no engine has told" in command(folder, "why", "x").stderr
    for number in range(3):
        scheduler.client.tell(f"req-{number}", record(f"req-{number}", tokens=1000 + number))
    several = command(folder, "why", "req")
    assert several.returncode == 1
    assert "3 requests fit" in several.stderr
    assert all(f"1,00{n}" in several.stdout for n in range(3))
    none = command(folder, "why", "nobody")
    assert none.returncode == 1
    assert "3 are kept, since 20" in none.stderr
    latest = command(folder, "why", "--last", "2")
    assert "req-2" in latest.stdout
    assert "req-1" in latest.stdout
    assert "req-0" not in latest.stdout
    rows = json.loads(command(folder, "why", "--last", "9", "--json").stdout)
    assert [row["request"] for row in rows] == ["req-2", "req-1", "req-0"]
    for wrong in (["why"], ["why", "req", "--last", "2"]):
        assert command(folder, *wrong).returncode == 2
    scheduler.client.close()


def test_all_stores_of_the_user_are_asked(folder: Path) -> None:
    one = Peer(settings(folder, disk_path=None), "scheduler", groups=[MINE])
    named = settings(folder, disk_path=None, store_name="second")
    two = Peer(named, "scheduler", groups=[MINE])
    one.client.tell("req-1", record("req-1"))
    two.client.tell("req-2", record("req-2"))
    for request in ("req-1", "req-2"):
        assert f"request {request}:" in command(folder, "why", request).stdout
    assert "req-1" in command(folder, "why", "req").stdout
    rows = json.loads(command(folder, "why", "--last", "5", "--json").stdout)
    assert sorted(row["request"] for row in rows) == ["req-1", "req-2"]
    assert command(folder, "why", "req-1", "--store-name", "second").returncode == 1
    assert command(folder, "why", "req-2", "--store-name", "second").returncode == 0
    one.client.close()
    two.client.close()


def test_ids_with_control_characters_stay_text(folder: Path, told: StoreSettings) -> None:
    scheduler = Peer(told, "scheduler", groups=[MINE])
    scheduler.client.tell("evil\x1b[31m\n", record("x", reason="\x1b[2J", misses=[miss(1)]))
    for arguments in (["why", "evil"], ["why", "--last", "1"]):
        shown = command(folder, *arguments)
        assert shown.returncode == 0
        assert "evil" in shown.stdout
        assert "\x1b" not in shown.stdout
    scheduler.client.close()


def test_identities_outlive_their_store_on_disk(folder: Path, told: StoreSettings) -> None:
    other = Peer(told, engine="b", groups=[THEIRS])
    store_theirs(other, 1)
    other.client.close()
    command(folder, "store", "stop")
    eventually(lambda: not running_stores(runtime_dir=str(folder / "run")))
    scheduler = Peer(told, "scheduler", groups=[MINE])
    scheduler.client.tell("r", record("r", misses=[miss(1)]))

    def told_where() -> list[dict[str, Any]]:
        content = json.loads(command(folder, "why", "r", "--json").stdout)
        found: list[dict[str, Any]] = content["record"]["misses"][0]["elsewhere"]
        return found

    eventually(lambda: bool(told_where()))
    (place,) = told_where()
    assert (place["tier"], place["differs"]) == ("disk", "text_config.rope_theta")
    scheduler.client.close()


def test_who_may_not_tell_is_cut_off_and_a_long_record_is_shortened(
    folder: Path, told: StoreSettings
) -> None:
    scheduler, worker = Peer(told, "scheduler", groups=[MINE]), Peer(told, groups=[MINE])
    worker.client._wire.send(Tell("r", b"{}"))
    eventually(lambda: worker.gone == 1)
    scheduler.client.tell("malformed", {})
    scheduler.client._wire.send(Tell("worse", b"\xff"))
    long = record("long" * 200, misses=[miss(n) for n in range(500)], reason="why " * 10_000)
    scheduler.client.tell("long" * 200, long)
    scheduler.client.tell("", record(""))
    tool = StoreClient.connect_tool(told.runtime_path())
    answer = tool.why("long")
    assert answer["record"]["tokens"] == 4096
    assert answer["kept"] == 3
    assert tool.why("worse")["record"]["reason"] == "its record is malformed"
    tool.close()
    assert scheduler.gone == 0
    scheduler.client.close()
    scheduler.client.tell("r", record("r"))  # the store is gone: nothing happens
    worker.client.close()


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (record("r"), 0),
        (record("r", misses=[miss(n) for n in range(3)]), 3),
        (record("r", misses=[miss(n) for n in range(100)]), 50),
        (record("r", reason="x" * 20_000, misses=[miss(1)]), 1),
        ({f"field {n}": n for n in range(5000)}, 0),
        (record("r", odd={1, 2}), 0),
    ],
)
def test_records_are_shortened_to_fit(content: dict[str, Any], left: int) -> None:
    encoded = _fitting(content)
    assert len(encoded) <= MAX_RECORD_BYTES
    told = json.loads(encoded)
    assert told["outcome"] in ("partly", "unknown")
    assert len(told.get("misses", [])) == left
    if left:
        assert told["misses"] == content["misses"][:left]
