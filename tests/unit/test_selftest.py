"""`kvfold selftest`: what it prints, how it fails, and that real models' shapes pass it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from typer.testing import CliRunner

import kvfold.plan
from kvfold.cli import app, main
from kvfold.errors import ConfigError
from kvfold.mesh import Mesh
from kvfold.models import build, load
from kvfold.placement import fragment_runs
from kvfold.spec import GroupSpec
from kvfold.testing.cluster import Cluster
from kvfold.testing.cluster_check import Layout, check
from kvfold.testing.cluster_store import store_shelf

LITE = "deepseek-v2-lite"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["selftest", *arguments])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_a_model_passes_through_a_real_store(
    capsys: pytest.CaptureFixture[str], no_leaks: None
) -> None:
    status, out, _ = run(capsys, LITE, "--tp", "2", "--read-tp", "1", "--read-layout", "BLNHC")
    assert status == 0, out
    lines = out.splitlines()
    assert lines[0] == f"{LITE} at tp 2 LBHNC: 2 ranks, 2 blocks of every group, 1 per chunk"
    # 27 layers x 16 tokens x 1,152 bytes x 2 blocks, once and on both ranks.
    row = "0     mla                    27      108    972 KiB    1.9 MiB  folded 2:1"
    assert lines[2] == row
    assert "stored 972 KiB in 2 chunks; all ranks hold 1.9 MiB, 2.0 times as much" in lines
    assert "loaded 1.9 MiB back, every byte in its place" in lines
    assert "read 972 KiB at tp 1 BLNHC, every byte in its place" in lines
    assert re.match(r"copies on one core: store \S+ \w+/s, load \S+ \w+/s", lines[-2])
    assert lines[-1] == "ok"
    assert max(map(len, lines)) <= 100


def test_a_real_store_refuses_false_replicas_and_streams_what_is_true(no_leaks: None) -> None:
    groups = build(load(LITE), Mesh(tp=2)).groups
    liar = groups[0].layers[5].name
    bad = check(groups, Layout(Mesh(tp=2)), unlike=[liar], process=True)
    assert [(s.layer, s.rank, s.others) for s in bad.stored.suspects] == [(liar, 1, (0,))]
    assert (bad.stored.refused, bad.stored.nbytes) == (2, 0)
    with store_shelf(1 << 22) as shelf:
        good = check(groups, Layout(Mesh(tp=2)), shelf=shelf)
        assert good.ok, good.problems()


def test_what_a_real_store_does_not_have_is_told(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfold.testing.cluster_store.PUBLISH_S", 0.1)
    cluster = Cluster(build(load(LITE), Mesh()).groups, Mesh())
    with store_shelf(1 << 22) as shelf:
        assert cluster.load(shelf).failures == ("group 0: chunk 0 is not stored",)
        cluster.fill()
        assert cluster.store(shelf).chunks == 2
        assert cluster.load(shelf).failures == ()
        assert not cluster.differences()


def test_a_broken_layer_is_named_with_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, LITE, "--tp", "2", "--in-memory", "--break", "3")
    assert status == 1
    assert (
        "FAILED: layer 'model.layers.3.self_attn.attn' rank 1: differs from rank 0, said to hold "
        "the same" in out
    )
    assert "ok" not in out.splitlines()
    assert max(map(len, out.splitlines())) <= 100


def test_a_difference_ends_with_status_1_and_a_short_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(*args: Any) -> Any:
        return [replace(run, nbytes=run.nbytes // 2) for run in fragment_runs(*args)]

    monkeypatch.setattr(kvfold.plan, "fragment_runs", half)
    status, out, _ = run(capsys, LITE, "--in-memory")
    assert status == 1
    assert "54 pages DIFFER" in out
    assert re.search(r"FAILED: and \d+ more", out)
    assert out.count("FAILED") == 21


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (LITE, "--tp", "2", "--read-tp", "1", "--in-memory", "--json", "--seed", "5")
    status, out, _ = run(capsys, *arguments)
    told = json.loads(out)
    assert (status, told["ok"], told["problems"]) == (0, True, [])
    assert told["rows"][0]["distinct_bytes"] == told["stored"]["nbytes"] == 995_328
    assert told["rows"][0]["copies_bytes"] == told["loaded"]["nbytes"] == 2 * 995_328
    assert told["reading"]["loaded"]["nbytes"] == 995_328
    status, out, _ = run(capsys, LITE, "--tp", "2", "--in-memory", "--json", "--break", "0")
    told = json.loads(out)
    assert (status, told["ok"]) == (1, False)
    assert told["stored"]["suspects"] == [["model.layers.0.self_attn.attn", 1, [0]]]


def test_states_that_belong_to_their_layout_are_told_and_not_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = ("jamba-v0.1", "--in-memory", "--blocks", "1", "--tp", "8")
    status, out, _ = run(capsys, *model, "--read-pp", "2")
    assert status == 0, out
    assert "group 0 belongs to its layout, not read at tp 8 pp 2 LBHNC: opaque.topology.pp" in out


def test_a_second_layout_that_can_read_nothing_is_a_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows_apart = ("glm-5.3", "--in-memory", "--tp", "4", "--kv-cache-dtype", "fp8_ds_mla")
    status, out, _ = run(capsys, *rows_apart, "--dcp", "2", "--read-dcp", "4")
    assert status == 1
    assert "FAILED: nothing of this model can be read at tp 4 dcp 4 LBHNC" in out
    assert "group 0 belongs to its layout" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "no-such-model"),
        ([LITE, "--tp", "3"], "tp=3: expected a divisor of num_attention_heads=16"),
        ([LITE, "--tp", "2", "--dcp", "4"], "dcp=4: expected a divisor of tp=2"),
        ([LITE, "--layout", "NHC"], "layout='NHC': expected one of LBHNC, LBNHC, BLHNC, BLNHC"),
        ([LITE, "--read-layout", "X"], "layout='X': expected one of"),
        ([LITE, "--blocks", "0"], "blocks=0: expected a multiple of blocks_per_chunk=1"),
        (
            [LITE, "--blocks", "3", "--blocks-per-chunk", "2"],
            "blocks=3: expected a multiple of blocks_per_chunk=2",
        ),
        ([LITE, "--blocks", "100000000"], "--blocks=100000000: expected fewer, or a smaller mesh"),
        (
            [LITE, "--block-size", "24", "--read-tp", "16", "--read-dcp", "16"],
            "--read-dcp=16: expected a divisor of 24, the tokens that a block of dcp=1 spans",
        ),
        (
            ["qwen3-next-80b-a3b", "--tp", "4", "--read-dcp", "2"],
            "expected a size whose pages fit at both layouts",
        ),
        ([LITE, "--tp", "2", "--break", "99"], "--break='99': expected the number or name"),
        ([LITE, "--break", "3"], "--break='3': expected a layer that is folded"),
        (["llama-3.1-8b", "--tp", "8", "--pp", "9"], "ranks=72: expected at most 64"),
    ],
)
def test_wrong_input_is_told_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, error = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_help_has_examples() -> None:
    shown = CliRunner().invoke(app, ["selftest", "--help"], env={"COLUMNS": "100", "TERM": "dumb"})
    assert shown.exit_code == 0
    assert "kvfold selftest deepseek-v3.2-exp --tp 8 --dcp 4" in shown.output
    assert max(map(len, shown.output.splitlines())) <= 100


# -- models: true page shapes, few layers ----------------------------------------------------------

# Layouts of TP 1 to 16, DCP 1 to 8 and one to three stages that the engine allows, out of 42: no
# windows under DCP, no more token shards than TP ranks that hold the same heads, and so on.
LEGAL = {
    "deepseek-v3.2-exp": 42,
    "deepseek-v4-flash": 30,
    "glm-5.3": 42,
    "kimi-k3": 42,
    "llama-3.1-70b": 18,
    "gemma-3-27b": 15,
    "gpt-oss-120b": 12,
    "qwen3-next-80b-a3b": 33,
    "nemotron-h-8b": 12,
}


def few_layers(name: str, mesh: Mesh) -> tuple[GroupSpec, ...]:
    """The model's groups, with the first and the last layer of each kind and size."""
    groups = []
    for group in build(load(name), mesh).groups:
        kinds: dict[Any, list[int]] = {}
        for i, layer in enumerate(group.layers):
            kinds.setdefault((layer.kind, layer.page_bytes), []).append(i)
        kept = sorted({i for found in kinds.values() for i in (found[0], found[-1])})
        layers, stages = ([part[i] for i in kept] for part in (group.layers, group.stages))
        groups.append(replace(group, layers=tuple(layers), stages=tuple(stages)))
    return tuple(groups)


@pytest.mark.parametrize("name", LEGAL)
def test_a_model_passes_at_every_legal_layout(name: str) -> None:
    passed = 0
    for tp, dcp, pp in product((1, 2, 4, 8, 16), (1, 2, 4, 8), (1, 2, 3)):
        order = ("LBHNC", "BLHNC", "LBNHC")[pp - 1]
        try:
            layout = Layout(Mesh(tp, dcp, 1, pp), order)
            groups = few_layers(name, layout.mesh)
            report = check(groups, layout, blocks=1)
        except ConfigError:
            continue
        assert report.ok, (layout, report.problems())
        passed += 1
    assert passed == LEGAL[name]


@pytest.mark.parametrize("name", LEGAL)
def test_a_model_written_at_one_layout_is_read_at_another(name: str) -> None:
    written, read = Layout(Mesh(tp=4, pp=2), "BLHNC"), Layout(Mesh(tp=4, pcp=2), "LBNHC")
    report = check(lambda mesh: few_layers(name, mesh), written, read)
    assert report.ok, report.problems()
    assert report.reading is not None
    states = {row.group for row in report.rows if row.kind in ("kda", "gdn", "mamba2")}
    assert set(report.reading.apart) == states
    assert report.reading.loaded.chunks == 2 * len({r.group for r in report.rows} - states)
