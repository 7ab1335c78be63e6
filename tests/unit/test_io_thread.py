"""The scheduler side's own thread: in order, and nothing that fails on it goes further."""

from __future__ import annotations

import logging
import threading

import pytest

pytest.importorskip("vllm")

from scheduler_bench import Bench

from kvfold.errors import StoreGone
from kvfold.vllm.io_thread import IoThread


def fails(error):
    raise error


def test_tasks_run_in_order_beside_the_engine_and_close_waits_for_them():
    io, ran = IoThread(), []
    started = threading.Event()
    release = threading.Event()
    io.put(started.set)
    io.put(lambda: release.wait(60))
    for number in range(20):
        io.put(lambda number=number: ran.append((number, threading.current_thread())))
    assert started.wait(60)
    assert not ran
    release.set()
    io.close()
    assert [number for number, _ in ran] == list(range(20))
    assert threading.current_thread() not in {thread for _, thread in ran}


def test_a_task_that_fails_does_not_end_the_thread(caplog):
    io, ran = IoThread(), []
    io.put(lambda: fails(StoreGone("gone")))
    io.put(lambda: fails(ZeroDivisionError("a bug")))
    io.put(lambda: ran.append(1))
    io.close()
    assert ran == [1]
    loud = [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert ["a bug" in str(record.exc_info) for record in loud] == [True], "a lost store is no news"


def test_a_lookup_that_fails_is_answered_with_nothing(caplog):
    bench = Bench()
    bench.store.lookup = lambda keys, timeout_s: fails(RuntimeError("a bug"))
    request = bench.arrive("a", 80)
    assert bench.offer(request) == 0
    assert "a bug" in caplog.text
    bench.store.lookup = lambda keys, timeout_s: b"\2" * 3  # too short an answer
    other = bench.arrive("b", 80, salt="b")
    assert bench.offer(other) in (0, 3 * 16)
