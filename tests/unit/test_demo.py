"""The demo's judgement: prompts, comparisons, checks and reports. Engines are not started here."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvfold import cli
from kvfold.errors import ConfigError, KvfoldError, StoreError, StoreGone
from kvfold.store.launch import ensure_store
from kvfold.store.settings import StoreSettings
from kvfold.testing import demo
from kvfold.testing.demo_ask import Asked, Asking, new_asking
from kvfold.testing.demo_chart import draw
from kvfold.testing.demo_fold import Case, Folded
from kvfold.testing.demo_judge import Check, aims, check_answers, check_asking, check_folded
from kvfold.testing.demo_measure import (
    Difference,
    DiskLimit,
    Stores,
    compare_bytes,
    difference,
    serves,
)
from kvfold.testing.demo_report import Findings, as_json, print_tables
from kvfold.testing.demo_text import (
    ANSWER_TOKENS,
    QUESTIONS,
    SHARED_TOKENS,
    SPAN,
    Prompts,
    document,
    make_prompts,
    source_root,
)

TEXT = " ".join(f"word{i}" for i in range(4000))


def encode(text: str) -> list[int]:
    """A token for each word."""
    return [sum(map(ord, word)) for word in text.split()]


# ---------------------------------------------------------------- prompts


def test_all_prompts_share_the_document_and_end_in_its_last_block():
    made = make_prompts(TEXT, encode)
    assert len(made.prompts) == len(QUESTIONS) >= 5
    assert made.hit_tokens >= 3000
    shared = {tuple(ids[: made.shared_tokens]) for ids in made.prompts}
    assert len(shared) == 1
    assert len({tuple(ids) for ids in made.prompts}) == len(QUESTIONS)
    for ids in made.prompts:
        assert made.hit_tokens < len(ids)
        assert len(ids) + ANSWER_TOKENS < made.hit_tokens + SPAN
    assert 0 < len(made.warm_up) < SPAN
    assert made.warm_up[:8] != made.prompts[0][:8]


@pytest.mark.parametrize("words", [SPAN, SPAN - ANSWER_TOKENS])  # itself, and with its answer
def test_a_question_that_leaves_the_block_is_refused(words):
    with pytest.raises(ConfigError, match="question"):
        make_prompts(TEXT, encode, ["why " * words])


def test_a_short_document_is_refused():
    with pytest.raises(ConfigError, match="document"):
        make_prompts("too short", encode)


def test_the_document_is_the_projects_own():
    text = document(source_root())
    assert "# kvfold" in text
    assert len(text) > 4 * SHARED_TOKENS  # about four characters a token


# ---------------------------------------------------------------- answers


def output(tokens: list[int], gap: float = 1.0) -> dict:
    ranked = [[[token, -0.1], [token + 1, -0.1 - gap]] for token in tokens]
    return {"tokens": tokens, "logprobs": ranked}


def test_equal_answers_have_no_difference():
    assert difference(0, output([1, 2, 3]), output([1, 2, 3])) is None


@pytest.mark.parametrize(("gap", "tie"), [(0.0009, True), (0.0011, False)])
def test_a_difference_tells_position_and_gap(gap, tie):
    found = difference(4, output([1, 2, 3, 4], gap), output([1, 2, 9, 9]))
    assert found is not None
    assert (found.question, found.position) == (4, 2)
    assert found.gap == pytest.approx(gap)
    assert found.is_tie == tie


def test_an_answer_cut_short_is_no_tie():
    found = difference(0, output([1, 2, 3], 0), output([1, 2]))
    assert found == Difference(0, 2, float("inf"))


def test_only_ties_pass():
    tie, bad = Difference(0, 3, 1e-4), Difference(1, 2, 0.5)
    assert check_answers("x", [], 5).ok
    assert check_answers("x", [tie], 5).ok
    verdict = check_answers("x", [tie, bad], 5)
    assert not verdict.ok
    assert "3 of 5 equal" in verdict.detail
    assert "question 2 from token 2 (gap 5.0e-01)" in verdict.detail


# ---------------------------------------------------------------- bytes of every rank


def line(event: str, rank: int, key: str, digest: str) -> dict:
    return {"event": event, "rank": rank, "key": key, "digest": digest}


def lines(same: bool = True) -> list[dict]:
    return [
        line(event, rank, key, key + ("" if same else f"-{rank}"))
        for event in ("store", "load")
        for rank in (0, 1)
        for key in ("a", "b")
    ]


@pytest.mark.parametrize("same", [True, False])
def test_bytes_that_came_back(same):
    found = compare_bytes(lines(same), 2)
    assert (found.chunks, found.kept) == (2, True)
    assert (found.same_on_ranks, found.distinct_on_ranks) == (same, not same)


def test_ranks_that_agree_on_some_chunks_only_are_neither_same_nor_distinct():
    mixed = [
        {**one, "digest": one["key"]} if one["key"] == "a" else one for one in lines(same=False)
    ]
    found = compare_bytes(mixed, 2)
    assert found.kept
    assert (found.same_on_ranks, found.distinct_on_ranks) == (False, False)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: [*rows[:-1], {**rows[-1], "digest": "x"}], "not those stored"),
        (lambda rows: [*rows, line("load", 0, "c", "c"), line("load", 1, "c", "c")], "not those"),
        (lambda rows: [*rows, line("store", 1, "a", "other")], "not those stored"),
        (lambda rows: rows[:-1], "not loaded by every rank"),
        (lambda rows: rows[:4], "no rank loaded anything"),
        (lambda rows: [], "no rank loaded anything"),
    ],
)
def test_wrong_or_missing_bytes_are_told(change, told):
    found = compare_bytes(change(lines()), 2)
    assert not found.kept
    assert told in found.trouble


# ---------------------------------------------------------------- the first part's checks

HIT = 2 * SPAN
ONE_COPY = 1_000_000


def asking() -> Asking:
    """A run in which everything went well."""
    prompts = Prompts(HIT + 8, ("a?", "b?"), ([1] * 300, [2] * 300), [3])
    found = new_asking(prompts)
    hits = {"own": "device", "again": "host", "host": "host", "disk": "disk"}
    for one in found.passes:
        for question in range(2):
            tier = hits.get(one.name)
            found_hits = {"device": 0, "host": 0, "disk": 0}
            if tier:
                found_hits[tier] = HIT
            external = HIT if tier in ("host", "disk") else 0
            ttft_s = {"cold": 5.0, "own": 0.1, "first": 5.2, "disk": 0.2}.get(one.name, 0.14)
            one.asked.append(
                Asked(question, ttft_s, 300, found_hits, external, output([question, 7, 8]))
            )
    found.stored = {
        "host": {"payload_bytes": ONE_COPY},
        "disk": {"payload_bytes": ONE_COPY, "chunks": 2, "direct": True},
    }
    found.read_limits = [1e9, 2e9, 1e8]
    return found


def names(checks: list) -> list[str]:
    return [check.name for check in checks if not check.ok]


def test_a_good_run_passes():
    assert names(check_asking(asking(), ONE_COPY)) == []


def changed(found: Asking, name: str, **fields: object) -> Asking:
    """`found` with fields of the pass's second question replaced."""
    asked = getattr(found, name).asked
    asked[1] = dataclasses.replace(asked[1], **fields)
    return found


@pytest.mark.parametrize("name", ["own", "again", "host", "disk"])
@pytest.mark.parametrize(
    "hits",
    [
        {"device": 0, "host": 0, "disk": 0},
        {"device": 0, "host": HIT - SPAN, "disk": 0},
        {"device": SPAN, "host": SPAN, "disk": 0},
        {"device": 0, "host": SPAN, "disk": SPAN},
        {"device": HIT, "host": HIT, "disk": HIT},
    ],
)
def test_hits_of_another_size_or_tier_fail(name, hits):
    found = changed(asking(), name, hit_tokens=hits)
    failed = names(check_asking(found, ONE_COPY))
    assert len(failed) == 1
    assert failed[0].startswith(f"{name}: hits")


@pytest.mark.parametrize(("name", "count"), [("host", 0), ("disk", HIT - 1), ("own", HIT)])
def test_vllms_own_counter_of_loaded_tokens_must_agree(name, count):
    found = changed(asking(), name, external_hit_tokens=count)
    assert len(names(check_asking(found, ONE_COPY))) == 1


@pytest.mark.parametrize("name", ["own", "first", "again", "host", "disk"])
def test_another_answer_fails(name):
    found = changed(asking(), name, output=output([1, 7, 9]))
    assert names(check_asking(found, ONE_COPY)) == [f"{name}: answers"]


def test_a_tie_does_not_fail():
    found = changed(asking(), "cold", output=output([1, 7, 8], 1e-4))
    found = changed(found, "host", output=output([1, 7, 9]))
    assert names(check_asking(found, ONE_COPY)) == []


def test_more_bytes_than_one_copy_fail():
    assert names(check_asking(asking(), ONE_COPY // 2)) == [
        "host holds one copy",
        "disk holds one copy",
    ]


def test_aims_come_from_the_runs_own_figures():
    host, disk = aims(asking())
    assert host.aim_s == pytest.approx(1.2 * 0.1 + 0.03)
    assert host.met
    assert disk.aim_s == pytest.approx(0.15 + ONE_COPY / (0.7 * 1e9))
    assert not disk.met


# ---------------------------------------------------------------- the second part's checks


def case(tmp_path: Path, config: dict, folds: bool, span: int = 128) -> Case:
    folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return Case("tiny", folder, span, folds)


LLAMA = {"num_hidden_layers": 4, "head_dim": 64, "num_key_value_heads": 1}
MLA = {"num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def test_what_copies_take(tmp_path):
    """Against figures worked out by hand: bytes per token on one rank, then whole blocks."""
    mla = case(tmp_path, {**MLA, "num_key_value_heads": 4}, True, 16)
    one = case(tmp_path, LLAMA, True)
    two = case(tmp_path, {**LLAMA, "num_key_value_heads": 2}, False)
    assert mla.rank_token_bytes == 4 * 576 * 4
    assert one.rank_token_bytes == two.rank_token_bytes == 4 * 2 * 64 * 4
    assert (mla.hit_tokens, one.hit_tokens, two.hit_tokens) == (800, 768, 768)
    assert mla.copies_bytes == 2 * mla.distinct_bytes == 2 * 800 * 9216
    assert one.copies_bytes == 2 * one.distinct_bytes == 2 * 768 * 2048
    assert two.copies_bytes == two.distinct_bytes == 2 * 768 * 2048


def folded(tmp_path: Path, folds: bool = True) -> Folded:
    heads = 1 if folds else 2
    which = case(tmp_path, {**LLAMA, "num_key_value_heads": heads}, folds)
    return Folded(
        case=which,
        loaded_tokens=768,
        loaded_from={"host": 0, "disk": 768},
        stored_bytes=which.distinct_bytes,
        stored_chunks=6,
        disk_bytes=which.distinct_bytes,
        answer=None,
        bytes=dataclasses.replace(compare_bytes(lines(folds), 2), chunks=6),
    )


@pytest.mark.parametrize("folds", [True, False])
def test_a_good_checkpoint_passes(tmp_path, folds):
    assert names(check_folded(folded(tmp_path, folds))) == []


WRONG_BYTES = dataclasses.replace(compare_bytes(lines(), 2), chunks=6, kept=False)


@pytest.mark.parametrize(
    ("fields", "failed"),
    [
        ({"loaded_tokens": 640}, "hits from disk"),
        ({"loaded_from": {"host": 768, "disk": 0}}, "hits from disk"),
        ({"stored_bytes": 2 * 768 * 2048}, "every byte stored once"),
        ({"disk_bytes": 2 * 768 * 2048}, "every byte stored once"),
        ({"answer": Difference(0, 1, 0.1)}, "answers"),
        ({"bytes": WRONG_BYTES}, "bytes after the load"),
        ({"bytes": compare_bytes(lines(), 2)}, "bytes after the load"),  # 2 chunks, not 6
    ],
)
def test_a_bad_checkpoint_fails(tmp_path, fields, failed):
    bad = dataclasses.replace(folded(tmp_path), **fields)
    assert any(failed in name for name in names(check_folded(bad)))


@pytest.mark.parametrize("folds", [True, False])
def test_ranks_must_hold_what_the_model_says(tmp_path, folds):
    bytes_found = dataclasses.replace(compare_bytes(lines(not folds), 2), chunks=6)
    bad = dataclasses.replace(folded(tmp_path, folds), bytes=bytes_found)
    assert names(check_folded(bad)) == ["tiny: bytes of the ranks"]


# ---------------------------------------------------------------- reports


@pytest.fixture
def findings(tmp_path):
    found = asking()
    both = [folded(tmp_path), folded(tmp_path, folds=False)]
    return Findings(found, both, aims(found), check_asking(found, ONE_COPY), 12.3)


def test_tables_fit_in_100_columns(findings):
    shown = io.StringIO()
    bad = Check("a check", False, "word " * 40)
    print_tables(
        Console(file=shown, width=180),
        dataclasses.replace(findings, checks=[*findings.checks, bad]),
    )
    text = shown.getvalue()
    assert "failed a check" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "missed" in text
    assert "1/2" in text
    assert "768 of 808" in text
    assert "differ" in text


def test_the_json_has_every_figure(findings):
    figures = json.loads(json.dumps(as_json(findings, decode=str)))
    assert figures["ok"] is True
    assert [aim["met"] for aim in figures["aims"]] == [True, False]
    assert [one["name"] for one in figures["passes"]] == [
        "cold", "own", "first", "again", "host", "disk",
    ]  # fmt: skip
    question = figures["passes"][-1]["questions"][1]
    assert question["hit_tokens"] == {"device": 0, "host": 0, "disk": HIT}
    assert question["computed_tokens"] == 300 - HIT
    assert figures["folding"][0]["tp_copies_bytes"] == 2 * figures["folding"][0]["stored_bytes"]


def test_the_chart_is_drawn_with_and_without_the_second_part(findings, tmp_path):
    pytest.importorskip("matplotlib")
    for number, rows in enumerate((findings.folded, [])):
        path = tmp_path / f"{number}.png"
        draw(dataclasses.replace(findings, folded=rows), path)
        assert path.read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- stores and disk


def test_stores_are_found_and_stopped(tmp_runtime, tmp_path, no_leaks):
    stores = Stores(tmp_runtime)
    with pytest.raises(StoreGone):
        stores.status()
    settings = StoreSettings(
        1 << 20, str(tmp_path / "disk"), 1 << 20, runtime_dir=str(tmp_runtime), populate=False
    )
    ensure_store(settings)
    found = stores.wait("it is scanned", serves(0))
    assert not serves(2)(found)
    assert not serves(0, other_than=found["store"])(found)
    assert not serves(0)({**found, "scanning": True})
    with pytest.raises(StoreError, match="until it has clients"):
        stores.wait("it has clients", serves(2), timeout_s=0.1)
    assert stores.stop() == found["store"]
    assert not Path(f"/proc/{found['pid']}").exists()
    assert stores.stop() is None


def test_the_disks_limit_reads_the_whole_file_and_leaves_none(tmp_path):
    limit = DiskLimit(tmp_path / "x" / "limit", 100_000, 10_000)
    assert limit.piece_bytes == 12_288
    assert limit.path.stat().st_size == limit.pieces * limit.piece_bytes == 98_304
    assert limit.measure() > 0
    limit.close()
    assert not limit.path.exists()


# ---------------------------------------------------------------- the whole


@pytest.fixture
def no_engines(monkeypatch, tmp_path):
    """The demo with everything replaced that would start an engine; `work` sees what is left."""

    class Tokenizer:
        def encode(self, text, add_special_tokens):
            return type("Encoding", (), {"ids": encode(text)})

        def decode(self, ids):
            return str(ids)

    (tmp_path / "llama").mkdir()
    config = {
        "num_hidden_layers": 1, "num_key_value_heads": 1, "hidden_size": 4,
        "num_attention_heads": 2,
    }  # fmt: skip
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    models = dict.fromkeys(("smollm2", "mla", "kv1", "kv2"), tmp_path / "llama")
    monkeypatch.setattr(demo, "_make_models", lambda *args, **how: models)
    monkeypatch.setattr(demo, "_tokenizer", lambda model: Tokenizer())
    monkeypatch.setattr(demo, "run_case", lambda case, work, progress: folded(tmp_path))

    def run_asking(model, prompts, work, progress):
        (work / "disk").mkdir(parents=True)
        return asking()

    monkeypatch.setattr(demo, "run_asking", run_asking)


def run(out: Path, *, quick: bool = False) -> tuple[bool, dict]:
    return demo.run_demo(demo.Options(out, quick), Console(file=io.StringIO()))


def test_a_failed_check_fails_the_demo_and_is_written_down(no_engines, tmp_path):
    pytest.importorskip("matplotlib")
    ok, figures = run(tmp_path / "out")
    assert not ok  # the made-up run stored other bytes than that config needs
    assert json.loads((tmp_path / "out" / "demo.json").read_text()) == figures
    assert {c["name"] for c in figures["checks"] if not c["ok"]} == {
        "host holds one copy",
        "disk holds one copy",
    }
    assert len(figures["folding"]) == 3
    assert not (tmp_path / "out" / "demo" / "ask" / "disk").exists()


def test_quick_leaves_the_second_part_out(no_engines, tmp_path):
    pytest.importorskip("matplotlib")
    assert run(tmp_path / "out", quick=True)[1]["folding"] == []


def test_a_failure_stops_the_stores(no_engines, tmp_path, monkeypatch, no_leaks):
    def fails(model, prompts, work, progress):
        ensure_store(StoreSettings(1 << 20, runtime_dir=str(work / "run"), populate=False))
        raise KvfoldError("the engine died")

    monkeypatch.setattr(demo, "run_asking", fails)
    with pytest.raises(KvfoldError, match="the engine died"):
        run(tmp_path / "out")


def test_the_exit_status_tells_failed_checks(monkeypatch, tmp_path, capsys):
    for ok in (True, False):
        monkeypatch.setattr(demo, "run_demo", lambda *args, ok=ok: (ok, {"ok": ok}))
        assert cli.main(["demo", "--json", "--out", str(tmp_path)]) == (0 if ok else 1)
        assert json.loads(capsys.readouterr().out) == {"ok": ok}
