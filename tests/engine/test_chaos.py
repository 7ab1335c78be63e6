"""Real engines under chaos: see `kvfold.testing.chaos`.

`KVFOLD_SEED` draws the operations (default 1). With `KVFOLD_TEST_FULL=1` the runs take 30 minutes
altogether instead of one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfold.copy.cpu import CpuCopier
from kvfold.testing.chaos import MODELS, Run
from kvfold.testing.chaos_oracle import judge
from kvfold.testing.chaos_report import Report
from kvfold.testing.chaos_talk import Fault, Reset, deck
from kvfold.testing.engines import local_engine

SEED = int(os.environ.get("KVFOLD_SEED", "1"))
MINUTES = 10.0 if os.environ.get("KVFOLD_TEST_FULL") == "1" else 0.25
pytestmark = pytest.mark.timeout(600 + 180 * MINUTES)


@pytest.fixture
def chaos(checkpoints: Path, tmp_path: Path, tmp_runtime: Path) -> Callable[[str], Run]:
    """chaos(model) -> a run whose store lives in this test's folders."""

    def made(model: str) -> Run:
        scratch = Path(tempfile.mkdtemp(dir=tmp_path))
        return Run(model, SEED, root=checkpoints, runtime=tmp_runtime, scratch=scratch)

    return made


@pytest.mark.parametrize("model", sorted(MODELS))
def test_chaos_changes_no_answer(model, chaos, no_leaks):
    report: Report = chaos(model).run(MINUTES)
    print(report.text())
    assert not report.problems
    assert all(report.happened().values()), report.happened()
    assert report.answered + report.aborted == report.requests


def test_wrong_bytes_are_noticed(chaos, monkeypatch):
    """The negative control: of all chunks loaded, a few get a page of zeros."""
    to_pages, calls = CpuCopier.to_pages, []

    def careless(sweeps, blocks, offset):
        calls.append(offset)
        copied = to_pages(sweeps, blocks, offset)
        if len(calls) % 4 == 0:
            sweeps[0].pages[blocks[sweeps[0].block]][:] = 0
        return copied

    monkeypatch.setattr(CpuCopier, "to_pages", staticmethod(careless))
    report = chaos("llama").run(0)
    print(report.text())
    assert any(text.startswith("wrong answer") for text in report.problems)
    assert any("never stored under it" in text for text in report.problems)


def test_every_deck_has_everything_and_a_seed_repeats_it():
    for number in range(3):
        drawn = deck(SEED, number)
        assert drawn == deck(SEED, number)
        assert drawn != deck(SEED + 1, number)
        faults = {step.do.name for step in drawn if isinstance(step.do, Fault)}
        assert faults == {
            "kill", "end", "stop", "slow", "corrupt", "truncate", "delete", "full", "unreadable",
        }  # fmt: skip
        resets = {(step.do.how, step.do.connector) for step in drawn if isinstance(step.do, Reset)}
        assert len(resets) == 6


def test_the_oracle_judges(llama_kv2):
    """Its own answers are right; another token, or another logprob, is not; a tie is."""
    from kvfold.testing import chaos_oracle
    from kvfold.testing.chaos_engine import Stepper
    from kvfold.testing.checkpoints import prompt

    with local_engine(llama_kv2) as llm:
        stepper = Stepper(llm)
        answer = stepper.answer(prompt(50, seed=1), 6)
        verdict = judge(llm, [answer])
        assert (verdict.answers, verdict.tokens, verdict.mismatches) == (1, 6, [])
        right = answer.logprobs[3]
        answer.logprobs[3] += 0.01
        assert "logprob of token 3" in judge(llm, [answer]).mismatches[0]
        answer.logprobs[3] = right
        answer.tokens[2] = (answer.tokens[2] + 1) % 500
        assert "token 2 is" in judge(llm, [answer]).mismatches[0]
        second = second_best(llm, answer.prompt)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chaos_oracle, "TIE", 100.0)
            answer.tokens, answer.logprobs = [second, 8], [0.0, 0.0]
            assert judge(llm, [answer]).ties >= 1


def second_best(llm, ids):
    from kvfold.testing.engines import generate

    return generate(llm, [ids], max_tokens=1, logprobs=2)["outputs"][0]["logprobs"][0][1][0]
