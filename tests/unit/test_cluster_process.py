"""Virtual clusters whose ranks are processes: over a store, across layouts, and when one dies."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from kvfold.cli import main
from kvfold.errors import ConfigError, StoreError
from kvfold.mesh import Mesh
from kvfold.spec import GroupSpec, LayerSpec
from kvfold.testing import cluster_process
from kvfold.testing.cluster_check import Layout, check
from kvfold.testing.cluster_process import ProcessCluster, RankLost
from kvfold.testing.cluster_store import MemoryShelf, store_shelf

TP2 = Layout(Mesh(tp=2))
LATENT = [
    LayerSpec(
        name=f"m{i}", kind="mla", block_size=16, num_kv_heads=1, head_bytes=1152, max_tp_shards=1
    )
    for i in range(4)
]
HEADS = [
    LayerSpec(
        name=f"a{i}",
        kind="full_attention",
        block_size=16,
        num_kv_heads=1,
        head_bytes=128,
        max_tp_shards=2,
    )
    for i in range(4)
]


def test_ranks_that_hold_the_same_latents_store_them_once(no_leaks: None) -> None:
    report = check([GroupSpec.of(0, LATENT)], TP2, rank_processes=True)
    assert report.ok, report.problems()
    page_bytes = 16 * 1152
    assert report.stored.nbytes == 4 * 2 * page_bytes
    assert report.loaded.nbytes == report.copies_bytes == 2 * report.stored.nbytes
    assert (report.stored.chunks, report.loaded.chunks) == (2, 2)


def test_two_heads_of_two_ranks_are_read_at_other_layouts(no_leaks: None) -> None:
    groups = [GroupSpec.of(0, HEADS), GroupSpec.of(1, LATENT)]
    written, read = Layout(Mesh(tp=2), "BLHNC"), Layout(Mesh(tp=1, pp=2), "LBNHC")
    report = check(groups, written, read, blocks=3, rank_processes=True)
    assert report.ok, report.problems()
    assert report.stored.nbytes == 3 * 4 * 16 * (2 * 128 + 1152)
    assert report.reading is not None
    assert not report.reading.apart
    assert (report.reading.loaded.chunks, report.reading.loaded.failures) == (6, ())
    assert report.reading.loaded.nbytes == report.stored.nbytes


def test_a_false_replica_in_another_process_is_named(no_leaks: None) -> None:
    report = check([GroupSpec.of(0, LATENT)], TP2, unlike=["m2"], rank_processes=True)
    assert [tuple(s) for s in report.stored.suspects] == [("m2", 1, (0,))]
    assert (report.stored.refused, report.stored.nbytes) == (2, 0)


def test_pages_that_were_not_loaded_differ_and_missing_chunks_are_told(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfold.testing.cluster_store.PUBLISH_S", 0.1)
    groups = [GroupSpec.of(0, LATENT[:1])]
    with store_shelf(1 << 20) as shelf, ProcessCluster(groups, Mesh(tp=2)) as cluster:
        cluster.fill()
        assert not cluster.differences()
        assert cluster.load(shelf).failures == ("group 0: chunk 0 is not stored",)
        cluster.wipe()
        found = cluster.differences()
        assert {(d.rank, d.layer, d.block) for d in found} == {
            (rank, "m0", block) for rank in (0, 1) for block in (0, 1)
        }
        assert len(cluster.differences(limit=3)) == 3


class Deadly(ProcessCluster):
    """Rank 1 is killed while it does the step `fatal`: before it or, stopped, in the middle."""

    fatal, stop = "", False

    def order(self, step: str, *arguments: Any, ranks: Any = None) -> list[Any]:
        if step == self.fatal:
            victim = self.processes[1]
            if self.stop:
                victim.send_signal(signal.SIGSTOP)
                timer = threading.Timer(0.3, victim.kill)
                timer.start()
            else:
                victim.kill()
        return super().order(step, *arguments, ranks=ranks)


@pytest.mark.parametrize(
    ("step", "stop"), [("write", True), ("commit", False), ("read", True)], ids=str
)
def test_a_rank_killed_in_the_middle_is_told_and_nothing_is_left(
    step: str, stop: bool, no_leaks: None
) -> None:
    groups = [GroupSpec.of(0, LATENT)]
    with store_shelf(1 << 20) as shelf, Deadly(groups, Mesh(tp=2)) as cluster:
        cluster.fatal, cluster.stop = step, stop
        cluster.fill()
        pids = [process.pid for process in cluster.processes]
        if step == "read":
            assert cluster.store(shelf).chunks == 2
        transfer = cluster.load if step == "read" else cluster.store
        with pytest.raises(RankLost, match=f"rank 1 was ended by SIGKILL in step '{step}'") as lost:
            transfer(shelf)
        assert lost.value.rank == 1
        for pid in pids:
            assert not os.path.exists(f"/proc/{pid}")


def test_a_rank_that_does_not_answer_is_told(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProcessCluster([GroupSpec.of(0, LATENT[:1])], Mesh(tp=2)) as cluster:
        cluster.fill()
        monkeypatch.setattr(cluster_process, "STEP_S", 0.2)
        cluster.processes[1].send_signal(signal.SIGSTOP)
        with pytest.raises(RankLost, match="rank 1 did not answer for 0 s in step 'wipe'"):
            cluster.wipe()


def test_a_step_that_a_rank_cannot_do_is_told_in_its_words(no_leaks: None) -> None:
    groups = [GroupSpec.of(0, LATENT[:1])]
    told = pytest.raises(StoreError, match=r"rank [01] in step 'join': no store")
    with store_shelf(1 << 20) as shelf, ProcessCluster(groups, Mesh(tp=2)) as cluster, told:
        cluster.order("join", shelf.settings)


def test_processes_need_a_store_and_at_most_its_ranks() -> None:
    with pytest.raises(ConfigError, match="shelf='MemoryShelf': expected a store process"):
        ProcessCluster([GroupSpec.of(0, LATENT)], Mesh(tp=2)).store(MemoryShelf(1 << 20))
    with pytest.raises(ConfigError, match="ranks=128: expected at most 64"):
        ProcessCluster([GroupSpec.of(0, LATENT)], Mesh(tp=128))


def test_the_command_says_so(capsys: pytest.CaptureFixture[str], no_leaks: None) -> None:
    model = ["selftest", "deepseek-v2-lite", "--tp", "2", "--processes"]
    assert main(model) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("deepseek-v2-lite at tp 2 LBHNC: 2 rank processes, 2 blocks")
    assert "loaded 1.9 MiB back, every byte in its place" in lines
    assert main([*model, "--in-memory"]) == 2
    assert "--processes=True: expected no --in-memory" in capsys.readouterr().err


def test_a_lost_rank_is_status_1_and_one_line(
    capsys: pytest.CaptureFixture[str], no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Deadly, "fatal", "judge")
    monkeypatch.setattr("kvfold.testing.cluster_check.ProcessCluster", Deadly)
    assert main(["selftest", "deepseek-v2-lite", "--tp", "2", "--processes"]) == 1
    assert capsys.readouterr().err == "error: rank 1 was ended by SIGKILL in step 'commit'\n"
