"""The connector's figures on their way through vLLM's own classes to its endpoint and its log."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import msgspec
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.reader import get_metrics_snapshot
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvfold.vllm import metrics
from kvfold.vllm.metrics import (
    HIT_TOKENS,
    LOAD_FAILURES,
    LOAD_SECONDS,
    LOADED_BYTES,
    METRICS,
    PINNED_BLOCKS,
    SECONDS,
    STORED_BYTES,
    Recorder,
)

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
CONFIG = SimpleNamespace(
    kv_transfer_config=KVTransferConfig(kv_connector="KvfoldConnector", kv_role="kv_both")
)
ENGINES = {0: ["m", "0"], 1: ["m", "1"]}


class Connector:
    """The two class methods of the connector that the front end calls."""

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return metrics.build_stats(data)

    @classmethod
    def build_prom_metrics(cls, *args):
        return metrics.prom_metrics(*args)


@pytest.fixture(autouse=True)
def _connector(monkeypatch):
    monkeypatch.setattr(KVConnectorFactory, "get_connector_class", lambda config: Connector)
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


def prom(engines=None):
    return KVConnectorProm(CONFIG, ["model_name", "engine"], engines or ENGINES)


def samples():
    """All of vLLM's samples as text, parsed: (name, label values by their names' order)."""
    families = text_string_to_metric_families(generate_latest(REGISTRY).decode())
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }


def sent(stats):
    """Stats as the front end gets them from another process."""
    scheduler_stats = SchedulerStats(kv_connector_stats=stats.to_dict())
    encoded = MsgpackEncoder().encode(scheduler_stats)
    return MsgpackDecoder(SchedulerStats).decode(encoded).kv_connector_stats


def recorded(**by_name):
    recorder = Recorder()
    for name, value in by_name.items():
        recorder.add(METRICS[name], value, **({"tier": "host"} if name == "hit_tokens" else {}))
    return recorder.take()


def test_what_was_counted_is_told_once_and_nothing_is_none():
    recorder = Recorder()
    assert recorder.take() is None
    recorder.add(HIT_TOKENS, 64, tier="host")
    recorder.add(HIT_TOKENS, 32, tier="host")
    recorder.add(HIT_TOKENS, 16, tier="disk")
    assert recorder.take().data == {"hit_tokens": {"host": 96, "disk": 16}}
    assert recorder.take() is None
    recorder.add(HIT_TOKENS, 0, tier="host")
    assert recorder.take() is None


def test_a_gauge_is_told_when_it_changes():
    recorder = Recorder()
    for value in (3, 5):
        recorder.set(PINNED_BLOCKS, value)
    assert recorder.take().data == {"pinned_blocks": {"": 5}}
    recorder.set(PINNED_BLOCKS, 5)
    assert recorder.take() is None
    recorder.set(PINNED_BLOCKS, 0)
    assert recorder.take().data == {"pinned_blocks": {"": 0}}


def test_counting_from_many_threads_loses_nothing():
    recorder, took = Recorder(), []

    def count():
        for _ in range(2000):
            recorder.add(metrics.LOADS)
            recorder.observe(LOAD_SECONDS, 0.2)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        took.append(recorder.take())
    took.append(recorder.take())
    total = metrics.build_stats(None)
    for stats in filter(None, took):
        total.aggregate(stats)
    assert total.data["loads"] == {"": 8000}
    [(_, (count, seconds))] = total.data["load_seconds"][""].items()
    assert (count, round(seconds, 6)) == (8000, 1600)


def test_wrong_labels_are_refused():
    recorder = Recorder()
    for labels in ({}, {"group": "0"}, {"tier": "host", "group": "0"}):
        with pytest.raises(AssertionError):
            recorder.add(HIT_TOKENS, 1, **labels)
    with pytest.raises(AssertionError):
        recorder.set(HIT_TOKENS, 1, tier="host")


def test_workers_and_scheduler_of_one_step_add_up_in_vllms_aggregator():
    outputs = []
    for rank in range(3):
        worker = Recorder()
        worker.add(LOADED_BYTES, 100 + rank, group="0 mla")
        worker.observe(LOAD_SECONDS, 0.2)
        worker.observe(LOAD_SECONDS, 7)
        stats = pickle.loads(pickle.dumps(worker.take()))
        output = KVConnectorOutput(kv_connector_stats=None if rank == 0 else stats)
        outputs.append(
            ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output)
        )
    merged = KVOutputAggregator(expected_finished_count=3).aggregate(outputs)
    scheduler = Recorder()
    scheduler.add(HIT_TOKENS, 64, tier="disk")
    scheduler.set(PINNED_BLOCKS, 7)
    data = merged.kv_connector_output.kv_connector_stats.aggregate(scheduler.take()).data
    assert data["loaded_bytes"] == {"0 mla": 203}
    assert data["hit_tokens"] == {"disk": 64}
    assert data["pinned_blocks"] == {"": 7}
    assert sorted(data["load_seconds"][""].values()) == [[2, 0.4], [2, 14.0]]


def test_the_size_of_a_step_does_not_grow_with_its_events():
    recorder = Recorder()
    for i in range(100_000):
        recorder.observe(LOAD_SECONDS, i / 1000)
        recorder.add(LOADED_BYTES, 1 << 20, group="0 full_attention")
    assert len(msgspec.msgpack.encode(recorder.take().data)) < 600


def test_numbers_of_numpy_can_be_sent():
    recorder = Recorder()
    recorder.add(metrics.CHUNKS_NO_ROOM, np.int64(3))
    recorder.set(PINNED_BLOCKS, np.int32(4))
    recorder.observe(LOAD_SECONDS, np.float64(0.3))
    data = recorder.take().data
    assert json.loads(json.dumps(data)) == data


def test_totals_by_engine_are_in_vllms_endpoint_with_their_labels():
    endpoint = prom()
    for engine, tokens in ((0, 10), (0, 5), (1, 7)):
        recorder = Recorder()
        recorder.add(HIT_TOKENS, tokens, tier="host")
        recorder.add(STORED_BYTES, tokens, group="1 sliding_window")
        recorder.set(PINNED_BLOCKS, tokens)
        endpoint.observe(sent(recorder.take()), engine)
    found = samples()
    assert found["vllm:kvfold_hit_tokens_total", "0", "m", "host"] == 15
    assert found["vllm:kvfold_hit_tokens_total", "1", "m", "host"] == 7
    assert found["vllm:kvfold_stored_bytes_total", "0", "1 sliding_window", "m"] == 15
    assert found["vllm:kvfold_pinned_blocks", "0", "m"] == 5


def test_what_never_happened_is_zero_from_the_start():
    prom()
    found = samples()
    for row in METRICS.values():
        suffix = {"counter": "_total", "gauge": "", "histogram": "_count"}[row.kind]
        for engine in ("0", "1"):
            for labels in [[value] for value in row.values] if row.label else [[]]:
                key = (f"vllm:kvfold_{row.name}{suffix}", engine, "m", *labels)
                assert found[key] == 0, key


def test_histograms_have_the_counts_and_the_sum_of_what_was_observed():
    times = [0.0, 1e-4, 1.1e-4, 0.1, 0.1, 0.1, 0.25, 0.2500001, 3.3, 59.9, 60.0, 61, 1000]
    recorder, expected = Recorder(), Histogram("expected", "", buckets=SECONDS, registry=None)
    for seconds in times:
        recorder.observe(LOAD_SECONDS, seconds)
        expected.observe(seconds)
    prom().observe(sent(recorder.take()), 1)
    found = samples()
    [family] = expected.collect()
    for sample in family.samples:
        if sample.name.endswith("_created"):
            continue
        name = sample.name.replace("expected", "vllm:kvfold_load_seconds")
        key = (name, "1", *sample.labels.values(), "m")
        if name.endswith("_sum"):
            assert found[key] == pytest.approx(sample.value)
        else:
            assert found[key] == sample.value, key


def test_offline_engines_read_them_with_vllms_reader():
    prom({0: ["m", "0"]}).observe(sent(recorded(hit_tokens=5)), 0)
    read = {(m.name, *sorted(m.labels.values())): m for m in get_metrics_snapshot()}
    assert read["vllm:kvfold_hit_tokens", "0", "host", "m"].value == 5
    assert read["vllm:kvfold_load_seconds", "0", "m"].count == 0


def test_metrics_that_only_have_vllms_interface_will_do():
    """Ray's stand-ins take no other arguments and have no other methods."""
    made = {}

    class Base:
        def __init__(self, name, documentation, labelnames, **options):
            made[name], self.options, self.calls = self, options, []

        def labels(self, *values):
            child = type(self)("child", "", [])
            child.calls, child.values = self.calls, values
            return child

    class RayGauge(Base):
        def set(self, value):
            self.calls.append((*self.values, value))

    class RayCounter(Base):
        def inc(self, value):
            self.calls.append((*self.values, value))

    class RayHistogram(Base):
        def observe(self, value):
            self.calls.append((*self.values, value))

    types = {Gauge: RayGauge, Counter: RayCounter, Histogram: RayHistogram}
    figures = metrics.prom_metrics(CONFIG, types, ["model_name"], {0: ["m"]})
    recorder = Recorder()
    recorder.add(HIT_TOKENS, 5, tier="host")
    recorder.set(PINNED_BLOCKS, 3)
    recorder.observe(LOAD_SECONDS, 0.5)
    figures.observe(recorder.take().data, 0)
    assert made["vllm:kvfold_hit_tokens"].calls == [("m", "host", 5)]
    assert made["vllm:kvfold_pinned_blocks"].calls == [("m", 3)]
    # Several front ends must not add gauges up.
    assert made["vllm:kvfold_pinned_blocks"].options == {"multiprocess_mode": "mostrecent"}
    assert made["vllm:kvfold_load_seconds"].calls == [("m", 0.5)]
    assert made["vllm:kvfold_load_seconds"].options == {"buckets": list(SECONDS)}


def test_the_periodic_line_sums_its_interval_and_two_loggers_do_not_disturb_each_other():
    loggers = [KVConnectorLogging(CONFIG.kv_transfer_config) for _ in range(2)]
    steps = [recorded(hit_tokens=5).to_dict(), recorded(hit_tokens=7, loads=2).to_dict()]
    steps[1]["hit_tokens"]["disk"] = 8
    lines = []
    for step in steps:
        for logger in loggers:
            logger.observe(step)
    for logger in loggers:
        logger.log(lambda text, *values: lines.append(text % values))
    assert steps[0] == {"hit_tokens": {"host": 5}}
    assert len(lines) == 2
    for line in lines:
        assert "kvfold_hit_tokens=20" in line
        assert "kvfold_load_failures=0" in line
    loggers[0].log(lambda *_: pytest.fail("nothing happened since"))


def test_reasons_in_words_become_few_labels():
    said = {
        "the store is gone": "store_gone",
        "the store is stopping": "store_gone",
        "no progress for 10 s": "late",
        "no slot became free in time": "late",
        "neither in host memory nor on disk": "lost",
        "corrupt on disk (checksum)": "corrupt",
        "disk: Input/output error": "disk",
        "the store did not hold the pins to the end": "unpinned",
        "the cache was reset": "reset",
        "something new": "other",
    }
    assert {text: metrics.failure_kind(text) for text in said} == said
    assert set(said.values()) == set(LOAD_FAILURES.values)


def test_groups_are_named_shortly():
    def group(index, kinds, is_draft=False):
        layers = [SimpleNamespace(spec=SimpleNamespace(kind=kind)) for kind in kinds]
        return SimpleNamespace(index=index, layers=layers, is_draft=is_draft)

    assert metrics.group_label(group(1, ["sliding_window"] * 2)) == "1 sliding_window"
    assert metrics.group_label(group(0, ["mla", "indexer"])) == "0 indexer+mla"
    assert metrics.group_label(group(2, ["full_attention"], True)) == "2 full_attention draft"


def test_docs_list_every_metric():
    section = DOCS.read_text().split("## In vLLM's own endpoint")[1].split("\n## ")[0]
    documented = [line for line in section.splitlines() if line.startswith("| `vllm:")]
    for row in METRICS.values():
        name = f"vllm:kvfold_{row.name}{'_total' if row.kind == 'counter' else ''}"
        labels = f"`{row.label}`" if row.label else ""
        assert documented.pop(0) == f"| `{name}` | {row.kind} | {labels} | {row.meaning} |"
    assert documented == []
