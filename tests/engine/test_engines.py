"""The helpers that drive engines, without a connector: what tests and the demo build on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvfold.testing import checkpoints as models
from kvfold.testing.checkpoints import llama, prompt
from kvfold.testing.engines import (
    Engine,
    EngineFailed,
    counters,
    generate,
    local_engine,
    run_engine,
)
from kvfold.testing.lora import ENGINE_ARGS, lora_adapter
from kvfold.testing.multimodal import blip2

PROMPT = prompt(150)
LONG = prompt(300)


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


def gap(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of logprobs up to where the tokens part; infinite with no common one.

    Of each token the five best are compared that both have.
    """
    worst = 0.0
    for i, (mine, theirs) in enumerate(zip(one["logprobs"], other["logprobs"], strict=True)):
        mine, theirs = dict(mine), dict(theirs)
        if not mine.keys() & theirs.keys():
            return float("inf")
        worst = max([worst, *(abs(mine[t] - theirs[t]) for t in mine.keys() & theirs.keys())])
        if one["tokens"][i] != other["tokens"][i]:
            break
    return worst


def zero_cached(llm: Any, group: int) -> None:
    """Zero what the prefix cache holds of one group of layers."""
    from vllm.v1.core.kv_cache_utils import get_group_id

    core = llm.llm_engine.engine_core.engine_core
    config = core.scheduler.kv_cache_config
    layers = core.vllm_config.compilation_config.static_forward_context
    for block in core.scheduler.kv_cache_manager.block_pool.blocks:
        if block.block_hash is None or get_group_id(block.block_hash) != group:
            continue
        for name in config.kv_cache_groups[group].layer_names:
            pages = layers[name].kv_cache
            for page in pages if isinstance(pages, (list, tuple)) else [pages]:
                page.view(config.num_blocks, -1, *page.shape[1:])[block.block_id].zero_()


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gemma3", ["SlidingWindowSpec", "SlidingWindowSpec", "FullAttentionSpec"]),
        ("gpt_oss", ["SlidingWindowSpec", "FullAttentionSpec"]),
        ("llama4", ["ChunkedLocalAttentionSpec", "FullAttentionSpec"]),
        ("qwen3_next", ["MambaSpec"] * 3 + ["FullAttentionSpec"]),
        ("granite4", ["MambaSpec"] * 3 + ["FullAttentionSpec"]),
        ("mamba2", ["MambaSpec"]),
        ("llama_eagle", ["FullAttentionSpec"]),
    ],
)
def test_answers_tell_what_was_cached(checkpoints: Path, name: str, kinds: list[str]) -> None:
    ids = prompt(400) if name == "llama4" else LONG  # a hit amid a chunk
    with local_engine(getattr(models, name)(checkpoints)) as llm:

        def ask() -> Any:
            return generate(llm, [ids], max_tokens=4, logprobs=5)["outputs"][0]

        groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        assert [type(group.kv_cache_spec).__name__ for group in groups] == kinds
        cold, warm = ask(), ask()
        assert cold["cached_tokens"] == 0 < warm["cached_tokens"]
        assert gap(cold, warm) < 1e-4
        for group in range(len(kinds)):
            zero_cached(llm, group)
            assert gap(cold, ask()) > 0.1, f"group {group} changes nothing"
            assert llm.reset_prefix_cache()
            ask()


@pytest.mark.usefixtures("no_leaks")
def test_a_draft_layer_changes_no_answer(checkpoints: Path) -> None:
    model = models.deepseek_v3_mtp(checkpoints)
    answers = []
    for arguments in ({}, {"speculative_config": None}):
        with local_engine(model, engine_args=arguments) as llm:
            answers.append(generate(llm, [LONG], max_tokens=6, logprobs=5)["outputs"][0])
            drafted = counters(llm).get("spec_decode_num_draft_tokens", 0)
        assert (drafted > 0) == (not arguments)
    assert answers[0]["tokens"] == answers[1]["tokens"]
    assert gap(*answers) < 1e-4


@pytest.mark.usefixtures("no_leaks")
def test_adapters_salts_and_images_have_their_own_prefixes(
    checkpoints: Path, llama_kv1: Path
) -> None:
    adapters = [str(lora_adapter(checkpoints, llama_kv1, seed)) for seed in (0, 1)]
    with local_engine(llama_kv1, engine_args=ENGINE_ARGS) as llm:
        tuned: list[dict[str, Any]] = [{"adapter": folder} for folder in adapters]
        plain, one, two, salted = own_prefixes(llm, [{}, *tuned, {"salts": ["pepper"]}])
    assert plain == salted
    assert len({tuple(plain), tuple(one), tuple(two)}) == 3
    with local_engine(blip2(checkpoints)) as llm:
        blind, cat, dog = own_prefixes(llm, [{}, {"images": [0]}, {"images": [1]}])
    assert len({tuple(blind), tuple(cat), tuple(dog)}) == 3


def own_prefixes(llm: Any, ways: list[dict[str, Any]]) -> list[list[int]]:
    """Ask the same in several ways, twice: only the second round hits. Returns the answers."""
    rounds = []
    for cached in (0, 256):
        outputs = [generate(llm, [LONG], max_tokens=6, **way)["outputs"][0] for way in ways]
        assert [output["cached_tokens"] for output in outputs] == [cached] * len(ways)
        rounds.append([output["tokens"] for output in outputs])
    assert rounds[0] == rounds[1]
    return rounds[0]
