"""The engine arguments that a model needs on a CPU with vLLM 0.32, read off its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SCAN = {"worker_extension_cls": "kvfold.testing.mamba2.Mamba2OnCpu"}
_STATES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": _SCAN,
    "mamba2": _SCAN,
    "qwen3_next": {"dtype": "bfloat16"},  # all that the CPU kernel takes
}


def engine_needs(model: Path, pp: int = 1) -> dict[str, Any]:
    """Return arguments of `vllm.LLM` for the checkpoint in `model`; empty for most at `pp` 1."""
    config = json.loads((model / "config.json").read_text())
    needs: dict[str, Any] = {}
    compilation: dict[str, Any] = {}
    if "kv_lora_rank" in config:
        # The CPU kernel rotates MLA's strided keys wrongly, and differently for every number of
        # tokens computed at once: a prefix's bytes would change with what follows it.
        compilation["custom_ops"] = ["-rotary_embedding"]
    if pp > 1:
        # Later stages allocate what they receive into while the model warms up, which an eager
        # engine does not do. This one does, and with dynamo disabled compiles nothing all the same.
        needs["enforce_eager"] = False
        compilation |= {"mode": 2, "backend": "eager"}
    if compilation:
        needs["compilation_config"] = compilation
    if config.get("num_nextn_predict_layers"):
        needs["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
    draft = model / "draft"
    if draft.is_dir():
        needs["speculative_config"] = {
            "method": "eagle",
            "model": str(draft),
            "num_speculative_tokens": 2,
        }
    if config["model_type"] == "blip-2":
        needs["skip_tokenizer_init"] = False  # its image processor is one of words too
    if config["model_type"] in _STATES:
        # Otherwise an engine keeps no state that another request could begin with.
        needs |= {"enable_prefix_caching": True, "mamba_cache_mode": "align"}
        needs |= _STATES[config["model_type"]]
    return needs


def few_threads(model: Path) -> dict[str, str]:
    """Return the environment of an engine's process: one thread for a tiny model.

    With as many as there are cores, each step's threads wait for one another in turn as soon as
    anything else runs: steps of 6 ms take 500.
    """
    config = json.loads((model / "config.json").read_text())
    return {"OMP_NUM_THREADS": "1"} if config.get("hidden_size", 0) <= 512 else {}
