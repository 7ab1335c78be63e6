"""Tiny random checkpoints that a real engine loads, for tests and the demo.

Weights are drawn from N(0, 0.15), norms stay at one. The spread matters: with an engine's own
dummy weights (about 1e-3) a model gives the same tokens whatever is in its cache, and every
tensor-parallel rank draws the same shard, so neither a wrong load nor a wrong fold would show.

Every function returns a folder `<root>/<kind>-<digest>`, made once and then reused. The digest
covers config, seed and recipe; a folder appears complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_RECIPE = 1  # raise when the bytes of a checkpoint change for the same config and seed
_STD = 0.15


def llama(
    root: Path | str,
    num_kv_heads: int,
    *,
    num_heads: int = 4,
    layers: int = 4,
    head_dim: int = 64,
    hidden: int = 256,
    intermediate: int = 512,
    vocab: int = 512,
    max_position: int = 8192,
    seed: int = 0,
) -> Path:
    """Return a Llama checkpoint with `num_kv_heads` KV heads of `head_dim` in each layer."""
    config = {
        "num_key_value_heads": num_kv_heads,
        "num_attention_heads": num_heads,
        "num_hidden_layers": layers,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": False,
    }
    return _cached(Path(root), f"llama-kv{num_kv_heads}", "Llama", config, seed)


def deepseek_mla(
    root: Path | str,
    *,
    num_heads: int = 4,
    layers: int = 4,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    hidden: int = 256,
    intermediate: int = 512,
    vocab: int = 512,
    max_position: int = 8192,
    seed: int = 0,
) -> Path:
    """Return a DeepSeek-V2 checkpoint: one latent of rank + rope values per token and layer.

    All layers are dense. Random experts would make the output depend on how requests are batched.
    """
    config = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers,
        "kv_lora_rank": kv_lora_rank,
        "q_lora_rank": None,
        "qk_rope_head_dim": qk_rope_head_dim,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "head_dim": qk_rope_head_dim,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "moe_intermediate_size": 64,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
        "vocab_size": vocab,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": False,
    }
    return _cached(Path(root), "mla", "DeepseekV2", config, seed)


def prompt(length: int, seed: int = 0, vocab: int = 512) -> list[int]:
    """Return `length` token ids below `vocab`, the same for the same seed, without special ids."""
    stream = b"".join(
        hashlib.sha256(f"{seed}:{i}".encode()).digest() for i in range(-(-length // 16))
    )
    span = vocab - 8
    return [8 + int.from_bytes(stream[2 * i : 2 * i + 2], "little") % span for i in range(length)]


def _cached(root: Path, kind: str, family: str, config: dict[str, Any], seed: int) -> Path:
    recipe = json.dumps([_RECIPE, _STD, family, config, seed], sort_keys=True)
    target = root / f"{kind}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    return build_once(target, lambda folder: _save(folder, family, config, seed))


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, made by `build(folder)` in a folder beside it unless it is there already.

    Two processes may build at once; the first rename wins and the other's work is dropped.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        build(scratch)
        scratch.chmod(0o755)
        try:
            os.rename(scratch, target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _save(folder: Path, family: str, config: dict[str, Any], seed: int) -> None:
    import torch
    import transformers

    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model = model_class(config_class(**config)).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # By name, so that the bytes do not depend on the order in which modules are built.
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                weight.normal_(0.0, _STD, generator=generator)
            else:
                weight.fill_(1.0)
    model.save_pretrained(folder)
