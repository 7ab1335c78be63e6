"""Whether answers are those of an engine without kvfold.

Answers are greedy, so an answer is right if every token is the best one after the tokens before it.
The last bits of float32 logits depend on which requests are computed together. Where the two best
tokens are closer than that, either is right: the rest is then compared with what the oracle says
after our token. Such *ties* are counted. The logprob of every token is compared, too: wrong bytes
in a cache often change no token, but always its logprob.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvfold.testing.chaos_engine import Request
from kvfold.testing.engines import generate

TIE = 1e-4
"""Logprobs closer than this are equal."""
BEST = 4
"""Tokens that the oracle ranks."""


@dataclass
class Judgement:
    """What the oracle says of many answers."""

    answers: int = 0
    tokens: int = 0
    ties: int = 0
    widest: float = 0.0
    """The largest difference of two logprobs that was taken for none."""
    mismatches: list[str] = field(default_factory=list)

    def __iadd__(self, other: Judgement) -> Judgement:
        self.answers += other.answers
        self.tokens += other.tokens
        self.ties += other.ties
        self.widest = max(self.widest, other.widest)
        self.mismatches += other.mismatches
        return self


@dataclass
class _Open:
    """An answer that is right up to token `at`."""

    request: Request
    at: int = 0

    def prompt(self) -> list[int]:
        return self.request.prompt + self.request.tokens[: self.at]


def judge(oracle: Any, requests: Iterable[Request]) -> Judgement:
    """Compare the answers so far of `requests` with those of `oracle`, a `vllm.LLM`."""
    verdict = Judgement()
    left = [_Open(request) for request in requests if request.tokens]
    verdict.answers = len(left)
    verdict.tokens = sum(len(answer.request.tokens) for answer in left)
    while left:
        wanted: dict[tuple[int, ...], int] = {}
        for answer in left:
            key, more = tuple(answer.prompt()), len(answer.request.tokens) - answer.at
            wanted[key] = max(wanted.get(key, 0), more)
        said = _ask(oracle, wanted)
        left = [a for a in left if _compare(a, said[tuple(a.prompt())], verdict)]
    return verdict


def _ask(oracle: Any, wanted: dict[tuple[int, ...], int]) -> dict[tuple[int, ...], Any]:
    """Prompt -> one ranking [[token, logprob], ...] per token. One request per length, at once."""
    said: dict[tuple[int, ...], Any] = {}
    for tokens in sorted(set(wanted.values())):
        prompts = [prompt for prompt, more in wanted.items() if more == tokens]
        result = generate(oracle, prompts, max_tokens=tokens, logprobs=BEST)
        for prompt, output in zip(prompts, result["outputs"], strict=True):
            said[prompt] = output["logprobs"]
    return said


def _compare(answer: _Open, said: Sequence[Any], verdict: Judgement) -> bool:
    """Compare from `answer.at` on; True if after a tie the oracle must be asked again."""
    request, start = answer.request, answer.at
    for at in range(start, len(request.tokens)):
        token, ranked = request.tokens[at], said[at - start]
        best_token, best = ranked[0]
        theirs = dict(map(tuple, ranked)).get(token)
        if theirs is None or best - theirs > TIE:
            verdict.mismatches.append(
                f"{request.id}, prompt of {len(request.prompt)}, {request.cached_tokens} cached: "
                f"token {at} is {token}, the oracle says {ranked}"
            )
            return False
        apart = abs(theirs - request.logprobs[at])
        if apart > TIE:
            verdict.mismatches.append(
                f"{request.id}, prompt of {len(request.prompt)}, {request.cached_tokens} cached: "
                f"logprob of token {at} is {request.logprobs[at]:.5f}, the oracle's {theirs:.5f}"
            )
            return False
        verdict.widest = max(verdict.widest, apart)
        if token != best_token:
            verdict.ties += 1
            answer.at = at + 1
            return answer.at < len(request.tokens)
    return False
