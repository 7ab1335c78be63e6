"""The helpers that drive engines, without a connector: what tests and the demo build on."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfold.testing.checkpoints import llama, prompt
from kvfold.testing.engines import Engine, EngineFailed, generate, local_engine, run_engine

PROMPT = prompt(150)


def reference(model: Path, ids: list[int]) -> int:
    """The most likely next token, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return int(network(torch.tensor([ids])).logits[0, -1].argmax())


@pytest.mark.usefixtures("no_leaks")
def test_engines_follow_one_another_in_one_process(llama_kv2: Path, mla: Path) -> None:
    for model in (llama_kv2, mla, llama_kv2):
        with local_engine(model) as llm:
            (first,) = generate(llm, [PROMPT], max_tokens=4, logprobs=2)["outputs"]
            # One token more computed than decoded: equal only if the cache holds what was computed.
            longer = [*PROMPT, *first["tokens"][:3]]
            (again,) = generate(llm, [longer], max_tokens=1)["outputs"]
        assert first["tokens"][0] == reference(model, PROMPT)
        assert again["tokens"] == first["tokens"][3:]
        assert [ranked[0][0] for ranked in first["logprobs"]] == first["tokens"]


@pytest.mark.usefixtures("no_leaks")
def test_two_ranks_say_what_the_reference_says(mla: Path, engine_log: Path) -> None:
    with Engine(mla, tp=2, log=engine_log) as engine:
        result = engine.generate([PROMPT], max_tokens=2)
        assert engine.do({"op": "reset_prefix_cache"})["ok"]
        with pytest.raises(EngineFailed, match="unknown step 'nap'"):
            engine.do({"op": "nap"})
        assert engine.close() == 0
    assert result["outputs"][0]["tokens"][0] == reference(mla, PROMPT)
    assert result["counters"]["prompt_tokens"] == len(PROMPT)
    assert result["outputs"][0]["ttft_s"] > 0


@pytest.mark.usefixtures("no_leaks")
def test_the_prefix_cache_hit_is_counted(llama_kv1: Path, engine_log: Path) -> None:
    generate_once = {"op": "generate", "prompts": [PROMPT], "max_tokens": 2}
    cold, hit, reset, after = run_engine(
        llama_kv1,
        [generate_once, generate_once, {"op": "reset_prefix_cache"}, generate_once],
        log=engine_log,
    )
    assert reset == {"ok": True}
    cached = [run["outputs"][0]["cached_tokens"] for run in (cold, hit, after)]
    assert cached == [0, 128, 0]
    assert after["counters"]["prefix_cache_hits"] == 128
    assert cold["outputs"][0]["tokens"] == hit["outputs"][0]["tokens"]


@pytest.mark.usefixtures("no_leaks")
def test_a_failed_start_says_why(llama_kv1: Path, engine_log: Path) -> None:
    with pytest.raises(EngineFailed, match=r"max_model_len|model_max_length|max_position"):
        Engine(llama_kv1, log=engine_log, engine_args={"max_model_len": 1 << 20})


def test_checkpoints_are_the_same_for_the_same_seed(tmp_path: Path, llama_kv1: Path) -> None:
    again = llama(tmp_path, 1)
    other = llama(tmp_path, 1, seed=1)
    assert again.name == llama_kv1.name != other.name
    weights = [(m / "model.safetensors").read_bytes() for m in (llama_kv1, again, other)]
    assert weights[0] == weights[1] != weights[2]
