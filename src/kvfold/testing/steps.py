"""What a test asks of an engine, one JSON-able step at a time."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvfold.errors import KvfoldError

Step = Mapping[str, Any]


class EngineFailed(KvfoldError):
    """An engine process died, did not answer in time, or answered a step with an error."""


def do_step(llm: Any, step: Step) -> dict[str, Any]:
    """Carry out one step on a `vllm.LLM` and return its result, JSON-able.

    `{"op": "generate", "prompts": [[ids]], "max_tokens": 8, "logprobs": 0, "ignore_eos": true}` ->
        `{"outputs": [{"tokens", "logprobs", "cached_tokens", "ttft_s"}], "wall_s", "counters"}`;
        with `logprobs` n, each token has its n best `[id, logprob]`, best first, and its own if not
        among them; `counters` are vLLM's totals so far, as `counters()` returns them.
        Optional: `"adapter"`, a folder (see `kvfold.testing.lora`), for all of them; and, one for
        each prompt or None, `"salts"` and `"images"` (seeds, see `kvfold.testing.multimodal`).
    `{"op": "reset_prefix_cache", "reset_connector": false}` -> `{"ok": bool}`.
    `{"op": "sleep", "seconds": 1.0}` -> `{}`.
    `{"op": "rpc", "method": name, "args": []}` -> `{"results": [one per rank]}`; methods of vLLM's
        worker or of the class that the engine argument `worker_extension_cls` names.
    """
    match step["op"]:
        case "generate":
            return _generate(llm, step)
        case "reset_prefix_cache":
            done = llm.reset_prefix_cache(reset_connector=step.get("reset_connector", False))
            return {"ok": bool(done)}
        case "sleep":
            time.sleep(step["seconds"])
            return {}
        case "rpc":
            return {"results": llm.collective_rpc(step["method"], args=tuple(step.get("args", ())))}
        case other:
            raise EngineFailed(f"unknown step {other!r}")


def generate(llm: Any, prompts: Sequence[Sequence[int]], **options: Any) -> dict[str, Any]:
    """Return the result of a "generate" step; `options` are the step's other fields."""
    return do_step(llm, {"op": "generate", "prompts": prompts, **options})


def counters(llm: Any) -> dict[str, int]:
    """Return vLLM's counters by name without "vllm:"; those by source as "name/source", those by
    tier both in all and as "name/tier"."""
    totals: dict[str, int] = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", None)
        if not isinstance(value, int):  # gauges are floats, histograms have none
            continue
        name = metric.name.removeprefix("vllm:")
        if "source" in metric.labels:
            name = f"{name}/{metric.labels['source']}"
        if "tier" in metric.labels:
            tier = f"{name}/{metric.labels['tier']}"
            totals[tier] = totals.get(tier, 0) + value
        totals[name] = totals.get(name, 0) + value
    return totals


def _generate(llm: Any, step: Step) -> dict[str, Any]:
    from vllm import SamplingParams

    best = step.get("logprobs", 0)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=step.get("max_tokens", 8),
        ignore_eos=step.get("ignore_eos", True),
        logprobs=best or None,
        detokenize=False,
    )
    start = time.monotonic()
    requests = llm.generate(
        list(_prompts(step)), sampling, use_tqdm=False, lora_request=_adapter(step)
    )
    wall_s = time.monotonic() - start
    return {
        "outputs": [_output(request) for request in requests],
        "wall_s": wall_s,
        "counters": counters(llm),
    }


def _prompts(step: Step) -> Iterator[dict[str, Any]]:
    nothing = [None] * len(step["prompts"])
    each = (step["prompts"], step.get("salts", nothing), step.get("images", nothing))
    for ids, salt, seed in zip(*each, strict=True):
        prompt: dict[str, Any] = {"prompt_token_ids": list(ids)}
        if salt is not None:
            prompt["cache_salt"] = salt
        if seed is not None:
            from kvfold.testing.multimodal import image

            prompt["multi_modal_data"] = {"image": image(seed)}
        yield prompt


def _adapter(step: Step) -> Any:
    if (folder := step.get("adapter")) is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(Path(folder).name, 1 + zlib.crc32(folder.encode()) % (1 << 30), folder)


def _output(request: Any) -> dict[str, Any]:
    completion = request.outputs[0]
    ranked = None
    if completion.logprobs:
        ranked = [
            [[token, entry.logprob] for token, entry in sorted(at.items(), key=_by_rank)]
            for at in completion.logprobs
        ]
    return {
        "tokens": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "logprobs": ranked,
        "cached_tokens": request.num_cached_tokens,
        "ttft_s": request.metrics.first_token_latency if request.metrics else None,
    }


def _by_rank(item: tuple[int, Any]) -> int:
    return int(item[1].rank)
