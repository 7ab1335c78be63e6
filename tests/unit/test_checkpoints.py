"""Generated folders appear whole or not at all; prompts are the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvfold.testing.checkpoints import build_once, draw_weights, prompt
from kvfold.testing.lora import lora_adapter
from kvfold.testing.needs import engine_needs, few_threads


def test_builds_once(tmp_path: Path) -> None:
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "weights").write_text("w")

    target = tmp_path / "models" / "tiny"
    assert build_once(target, build) == build_once(target, build) == target
    assert len(calls) == 1
    assert (target / "weights").read_text() == "w"


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("w")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        build_once(tmp_path / "tiny", build)
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_builders_wins(tmp_path: Path) -> None:
    target = tmp_path / "tiny"

    def fast(folder: Path) -> None:
        (folder / "by").write_text("fast")

    def slow(folder: Path) -> None:
        (folder / "by").write_text("slow")
        build_once(target, fast)

    assert build_once(target, slow) == target
    assert (target / "by").read_text() == "fast"
    assert list(tmp_path.iterdir()) == [target]


def test_prompts_are_reproducible_and_in_range() -> None:
    first = prompt(1000, seed=3, vocab=64)
    assert first == prompt(1000, seed=3, vocab=64)
    assert first[:10] == prompt(10, seed=3, vocab=64)
    assert first != prompt(1000, seed=4, vocab=64)
    assert len(first) == 1000
    assert set(first) == set(range(8, 64))


def saved(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


def test_engines_get_what_models_need(tmp_path: Path) -> None:
    plain = saved(tmp_path / "plain")
    assert engine_needs(plain) == {}
    latent = saved(tmp_path / "latent", kv_lora_rank=512, num_nextn_predict_layers=1)
    no_kernel = {"custom_ops": ["-rotary_embedding"]}
    assert engine_needs(latent)["compilation_config"] == no_kernel
    assert engine_needs(latent)["speculative_config"]["method"] == "mtp"
    (plain / "draft").mkdir()
    assert engine_needs(plain)["speculative_config"]["model"] == str(plain / "draft")
    states = engine_needs(saved(tmp_path / "states", model_type="qwen3_next"))
    assert states["mamba_cache_mode"] == "align"
    assert states["dtype"] == "bfloat16"
    staged = engine_needs(latent, pp=2)
    assert staged["enforce_eager"] is False
    assert staged["compilation_config"] == no_kernel | {"mode": 2, "backend": "eager"}


def test_only_tiny_models_run_with_one_thread(tmp_path: Path) -> None:
    assert few_threads(saved(tmp_path / "tiny", hidden_size=256)) == {"OMP_NUM_THREADS": "1"}
    assert few_threads(saved(tmp_path / "small", hidden_size=576)) == {}


def test_weights_are_drawn_by_what_they_are() -> None:
    torch = pytest.importorskip("torch")

    def module(order: list[str]) -> Any:
        shapes = {"A_log": (9,), "dt_bias": (9,), "scale": (9,), "bias": (999,), "w": (99, 99)}
        whole = torch.nn.Module()
        for name in order:
            whole.register_parameter(name, torch.nn.Parameter(torch.zeros(*shapes[name])))
        whole.conv1d = torch.nn.Conv1d(99, 99, 4)
        draw_weights(whole, seed=1)
        return whole

    whole = module(["A_log", "dt_bias", "scale", "bias", "w"])
    kept = torch.exp(-torch.exp(whole.A_log) * torch.nn.functional.softplus(whole.dt_bias))
    assert kept.min() ** 100 > 0.8, "a state lasts"
    assert whole.scale.tolist() == [1.0] * 9
    for weight, std in ((whole.bias, 0.15), (whole.w, 0.15), (whole.conv1d.weight, 0.5)):
        assert abs(weight.std().item() / std - 1) < 0.1
    again = module(["w", "bias", "scale", "dt_bias", "A_log"])
    assert torch.equal(whole.w, again.w)


def test_an_adapter_fits_the_models_projections(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    model.mkdir()
    attention = "model.layers.0.self_attn"
    weights = {f"{attention}.k_proj.weight": torch.zeros(6, 10), "model.norm.weight": torch.ones(9)}
    save_file(weights, model / "model.safetensors")
    adapter = lora_adapter(tmp_path, model, rank=2)
    shapes = {
        n: tuple(w.shape) for n, w in load_file(adapter / "adapter_model.safetensors").items()
    }
    name = f"base_model.model.{attention}.k_proj"
    assert shapes == {f"{name}.lora_A.weight": (2, 10), f"{name}.lora_B.weight": (6, 2)}
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 2
    assert lora_adapter(tmp_path, model, 1, rank=2) != adapter
