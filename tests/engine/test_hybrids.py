"""Every kind of cache that this CPU runs: whole hits, right bytes, and nothing stored in vain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kinds import FULL, KINDS, PROMPT, SAME
from trial import Answer, Asker, gap, labels, restart_store

from kvfold.testing import checkpoints as models
from kvfold.testing.checkpoints import prompt
from kvfold.testing.engines import counters, generate, local_engine
from kvfold.vllm.worker import ChunkCopies

OTHER = 0.05
"""With a part of the cache missing, logprobs differ by more."""


def leave_out(patch: pytest.MonkeyPatch, number: int) -> None:
    """Load nothing of one group."""
    copy_in = ChunkCopies.copy_in

    def lame(self: ChunkCopies, connection: int, group: int, *rest: Any) -> int:
        return 0 if group == number else copy_in(self, connection, group, *rest)

    patch.setattr(ChunkCopies, "copy_in", lame)


@pytest.mark.parametrize("name", KINDS)
def test_hits_before_and_after_a_restart(name, store, checkpoints, monkeypatch):
    kind, asker = KINDS[name], Asker(store)
    model = kind.make(checkpoints)

    def check(warm: Answer) -> None:
        assert warm.hit == kind.hit
        assert warm.chunks(len(kind.groups)) == list(kind.groups.values())
        assert asker.ledger.wrong(warm.loads) == set()
        assert gap(cold.logprobs, warm.logprobs) <= SAME

    with local_engine(model, connector=store) as llm:
        assert labels(llm) == list(kind.groups)
        cold = asker.ask(llm, PROMPT)
        assert cold.hit == 0
        check(asker.ask(llm, PROMPT))
        for number, label in enumerate(kind.groups):
            with monkeypatch.context() as patch:
                leave_out(patch, number)
                lame = asker.ask(llm, PROMPT)
            assert lame.hit == kind.hit
            assert asker.ledger.wrong(lame.loads) == {number}, "the digests notice"
            if label.endswith("draft"):
                assert gap(cold.logprobs, lame.logprobs) <= SAME, "drafts change no answer"
            else:
                assert gap(cold.logprobs, lame.logprobs) > OTHER, "the answers notice"
        if FULL or kind.restart == "store":
            restart_store(store, 2)
            warm = asker.ask(llm, PROMPT)
            check(warm)
            assert warm.disk == warm.hit
    if FULL or kind.restart == "engine":
        with local_engine(model, connector=store) as llm:
            check(asker.ask(llm, PROMPT))


DOCUMENT = prompt(2500, seed=2)
QUESTIONS = [prompt(200, seed=seed) for seed in (3, 4, 5)]
SHARED = 2432
"""What is shared of the document, which ends at no boundary. With a question the last is 2,688."""


@dataclass(frozen=True)
class Meeting:
    """A model, what the second request about a document hits, and the chunks of each group that
    three such requests load, and that are stored after each.
    """

    make: Callable[[Path], Path]
    second: int
    loads: list[list[int]]
    stored: list[list[int]]


MEETINGS = {
    # Five layers with a window to one with all tokens: windows are stored every five boundaries and
    # at the end, so that they take no more bytes than the rest. And where requests have met.
    "gemma3": Meeting(
        lambda root: models.gemma3(
            root, layer_types=["sliding_attention"] * 5 + ["full_attention"]
        ),
        second=1920,
        loads=[[0] * 5 + [0], [1] * 5 + [15], [1] * 5 + [19]],
        # 640, 1280, 1920, 2560 and the end; then 2432, 2560 and the end; then 2560 and the end
        stored=[[5] * 5 + [21], [8] * 5 + [23], [10] * 5 + [25]],
    ),
    # States are stored at the end and where requests have met.
    "qwen3_next": Meeting(
        models.qwen3_next,
        second=0,
        loads=[[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 19]],
        stored=[[1, 1, 1, 21], [3, 3, 3, 23], [4, 4, 4, 25]],
    ),
    "granite4": Meeting(
        models.granite4,
        second=0,
        loads=[[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 19]],
        stored=[[1, 1, 1, 21], [3, 3, 3, 23], [4, 4, 4, 25]],
    ),
}


@pytest.mark.parametrize("name", MEETINGS)
def test_requests_about_a_document_meet_at_its_end(name, store, checkpoints):
    meeting, asker = MEETINGS[name], Asker(store)
    asks = [DOCUMENT + question for question in QUESTIONS]
    with local_engine(meeting.make(checkpoints), connector=store) as llm:
        groups, answers, stored = len(labels(llm)), [], []
        for ids in asks:
            answers.append(asker.ask(llm, ids))
            stored.append(asker.ledger.stored_chunks(groups))
        assert [answer.hit for answer in answers] == [0, meeting.second, SHARED]
        assert [answer.chunks(groups) for answer in answers] == meeting.loads
        assert all(asker.ledger.wrong(answer.loads) == set() for answer in answers)
        assert stored == meeting.stored
        for ids, answer in zip(asks[1:], answers[1:], strict=True):
            assert llm.reset_prefix_cache(reset_connector=True)
            cold = asker.ask(llm, ids)
            assert cold.hit == 0
            assert gap(cold.logprobs, answer.logprobs) <= SAME


@pytest.mark.parametrize("name", ["deepseek_v3_mtp", "llama_eagle"])
def test_drafts_say_what_they_say_without_kvfold(name, store, checkpoints):
    model, asker, tokens = KINDS[name].make(checkpoints), Asker(store), 16
    with local_engine(model) as llm:
        plain = generate(llm, [PROMPT], max_tokens=tokens)
    with local_engine(model, connector=store) as llm:
        for times, hit in ((1, 0), (2, KINDS[name].hit)):
            answer = asker.ask(llm, PROMPT, tokens)
            assert answer.hit == hit
            assert answer.tokens == plain["outputs"][0]["tokens"]
            so_far = counters(llm)
            for what in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
                count = plain["counters"][f"spec_decode_{what}"]
                assert so_far[f"spec_decode_{what}"] == times * count
