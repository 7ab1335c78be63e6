"""An in-process engine stepped by hand, so that things can happen between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvfold.errors import KvfoldError
from kvfold.testing.drain import drain


class Stuck(KvfoldError):
    """An engine made steps for too long without what was waited for."""


@dataclass
class Request:
    """A request and what has been answered so far."""

    id: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of each token."""
    finish_reason: str | None = None
    cached_tokens: int = 0
    aborted: bool = False
    steps: int = 0

    @property
    def over(self) -> bool:
        return self.aborted or self.finish_reason is not None


class Stepper:
    """Drives a `vllm.LLM` of this process, with or without kvfold, step by step."""

    def __init__(self, llm: Any, *, patience_s: float = 120) -> None:
        self.llm, self._engine = llm, llm.llm_engine
        self.scheduler = self._engine.engine_core.engine_core.scheduler
        self.connector = self.scheduler.connector
        self.patience_s = patience_s
        self.running: dict[str, Request] = {}
        self._made = 0

    @property
    def side(self) -> Any:
        """The connector's `SchedulerSide`."""
        return self.connector._scheduler

    @property
    def pool(self) -> Any:
        """The engine's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    def ask(
        self,
        prompt: Sequence[int],
        tokens: int = 8,
        *,
        skip: bool = False,
        stop: Sequence[int] = (),
        salt: str | None = None,
        prompt_logprobs: int | None = None,
        adapter: Any = None,
    ) -> Request:
        """Add a request; greedy. `adapter` is a `LoRARequest`. Nothing happens before `step`."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            stop_token_ids=list(stop),
            logprobs=0,
            prompt_logprobs=prompt_logprobs,
            detokenize=False,
            skip_reading_prefix_cache=skip or None,
        )
        self._made += 1
        request = Request(f"r{self._made}", list(prompt))
        asked: dict[str, Any] = {"prompt_token_ids": request.prompt}
        if salt is not None:
            asked["cache_salt"] = salt
        self.running[request.id] = request
        self._engine.add_request(request.id, asked, sampling, lora_request=adapter)
        return request

    def step(self) -> list[Request]:
        """One engine step; the requests that it finished."""
        finished = []
        for output in self._engine.step():
            request, said = self.running[output.request_id], output.outputs[0]
            request.tokens = list(said.token_ids)
            request.logprobs = [
                at[token].logprob for token, at in zip(said.token_ids, said.logprobs, strict=True)
            ]
            if output.finished:
                request.finish_reason = said.finish_reason
                request.cached_tokens = output.num_cached_tokens
                finished.append(self.running.pop(request.id))
        for request in self.running.values():
            request.steps += 1
        return finished

    def abort(self, request: Request) -> None:
        """Abort a request that runs or waits."""
        self._engine.abort_request([request.id])
        request.aborted = True
        del self.running[request.id]

    def until(self, holds: Callable[[], Any], what: str) -> None:
        """Step until `holds()`. Raises `Stuck` after `patience_s` seconds."""
        deadline = time.monotonic() + self.patience_s
        while not holds():
            if time.monotonic() > deadline:
                raise Stuck(f"{what} did not come: {self.story()}")
            self.step()

    def story(self) -> str:
        """What the engine's requests wait for, for people."""
        manager = self.scheduler.kv_cache_manager
        told = [
            f"{r.request_id} {r.status.name}, {r.num_computed_tokens} of {r.num_tokens} tokens, "
            f"{[len(blocks) for blocks in manager.get_blocks(r.request_id).blocks]} blocks"
            for r in self.scheduler.requests.values()
        ]
        return "; ".join([*told, f"{self.pool.get_num_free_blocks()} blocks are free"])

    def answer(self, prompt: Sequence[int], tokens: int = 8, **how: Any) -> Request:
        """Ask and step until the answer is complete."""
        request = self.ask(prompt, tokens, **how)
        self.until(lambda: request.over, f"an answer to {request.id}")
        return request

    def loading(self) -> int:
        """Requests that hold blocks without running: their load is under way or just over."""
        running = {request.request_id for request in self.scheduler.running}
        manager = self.scheduler.kv_cache_manager
        return sum(
            any(manager.get_blocks(name).blocks)
            for name in self.scheduler.requests
            if name not in running
        )

    def settle(self) -> None:
        """Step until nothing runs, no store holds blocks, and the engine has nothing to do."""
        self.until(lambda: not self.running, "answers to all requests")
        if self.connector is not None:
            drain(self.llm, self.patience_s)
        self.until(lambda: not self.scheduler.has_requests(), "an idle engine")

    def held(self) -> dict[str, int]:
        """What a settled engine still holds, empty if nothing; its prefix cache is emptied."""
        assert self.llm.reset_prefix_cache()
        pool = self.pool
        held = {"blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()}  # less the hole
        if self.connector is not None:
            side = self.side
            held |= {"jobs": side.holds.jobs, "pinned": side.holds.blocks}
            held |= {"loads": side.waiting_loads, "requests": len(side._requests)}
            held |= {"push work": int(self.connector.has_pending_push_work())}
        return {name: count for name, count in held.items() if count}


def figures(llm: Any) -> dict[str, float]:
    """vLLM's and kvfold's counters: by name without "vllm:", and by "name/label" for ours."""
    totals: dict[str, float] = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", None)
        if value is None:
            continue
        name = metric.name.removeprefix("vllm:")
        labels: Mapping[str, str] = metric.labels
        own = [labels[key] for key in ("tier", "reason", "group") if key in labels]
        if name.startswith("kvfold_") and own:
            name = f"{name}/{own[0]}"
        totals[name] = totals.get(name, 0) + value
    return totals
