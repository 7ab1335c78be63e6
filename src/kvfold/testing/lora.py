"""Tiny LoRA adapters for the checkpoints of `kvfold.testing.checkpoints`, in PEFT's file format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvfold.testing.checkpoints import build_once

ENGINE_ARGS = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
"""What an engine that takes these adapters is started with."""

_RECIPE = 1  # raise when what is written changes
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
_STD = 0.15


def lora_adapter(root: Path | str, model: Path, seed: int = 0, *, rank: int = 8) -> Path:
    """Return `<root>/lora-<model's name>-...`, an adapter of `model`'s attention projections.

    Keys and values change too, so what one adapter caches is wrong for every other.
    """
    target = Path(root) / f"lora-{model.name}-r{rank}-s{seed}-{_RECIPE}"
    return build_once(target, lambda folder: _write(folder, model, seed, rank))


def _write(folder: Path, model: Path, seed: int, rank: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Any:
        return torch.empty(*shape).normal_(0.0, _STD, generator=generator)

    weights = {}
    for name, weight in sorted(load_file(model / "model.safetensors").items()):
        layer = name.removesuffix(".weight")
        if layer.endswith(_TARGETS):
            out, into = weight.shape
            weights[f"base_model.model.{layer}.lora_A.weight"] = draw(rank, into)
            weights[f"base_model.model.{layer}.lora_B.weight"] = draw(out, rank)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "target_modules": list(_TARGETS),
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
