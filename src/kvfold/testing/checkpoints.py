"""Tiny random checkpoints that a real engine loads, for tests and the demo.

Weights are drawn from N(0, 0.15), norms stay at one. The spread matters: with an engine's own
dummy weights (about 1e-3) a model gives the same tokens whatever is in its cache, and every
tensor-parallel rank draws the same shard, so neither a wrong load nor a wrong fold would show.
Recurrent states would fade within a few tokens, so they are made to last for hundreds, and their
convolutions are wide. Embeddings are never tied: a model that repeats its last token hides much.
Where a model needs experts, every token takes all of them: a choice would turn rounding, which
depends on how requests are batched, into other answers.

With each model here, zeroing what is cached of any one group of layers (but a draft's) changes a
logprob by more than 0.1 for a prompt of 300 tokens, 44 of them after the cached ones; llama4 needs
400, for a hit amid a chunk. A hit gives the cold run's logprobs to within 1e-4.

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
_CONV_STD = 0.5  # few taps, so each has to count
_FIXED = {"A_log": -6.0, "dt_bias": 0.0}  # a state keeps about 99.8 % of itself from token to token
_SMALL: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


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


def deepseek_v3_mtp(root: Path | str, *, seed: int = 0) -> Path:
    """Return a DeepSeek-V3 checkpoint, 4 MLA layers, with one more that predicts the next token.

    All layers are dense. Engines run the last one as a draft; its cache changes no answer.
    """
    layers = 4
    config = _SMALL | {
        "num_key_value_heads": 4,
        "num_hidden_layers": layers + 1,  # the draft's block, which becomes its own below
        "first_k_dense_replace": layers + 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "moe_intermediate_size": 64,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    }

    def build(folder: Path) -> None:
        import torch

        weights = _save(folder, "DeepseekV3", config, seed)
        hidden, draft = _SMALL["hidden_size"], f"model.layers.{layers}"
        generator = torch.Generator().manual_seed(seed + 1)
        weights |= {
            f"{draft}.enorm.weight": torch.ones(hidden),
            f"{draft}.hnorm.weight": torch.ones(hidden),
            f"{draft}.eh_proj.weight": torch.empty(hidden, 2 * hidden).normal_(
                0.0, _STD, generator=generator
            ),
            f"{draft}.embed_tokens.weight": weights["model.embed_tokens.weight"],
            f"{draft}.shared_head.norm.weight": torch.ones(hidden),
            f"{draft}.shared_head.head.weight": weights["lm_head.weight"],
        }
        _write(folder, weights, num_hidden_layers=layers, num_nextn_predict_layers=1)

    return _cached(Path(root), "v3-mtp", "DeepseekV3", config, seed, build)


def llama_eagle(root: Path | str, *, draft_kv_heads: int = 4, seed: int = 0) -> Path:
    """Return Llama with 2 KV heads and an EAGLE draft of one layer in its folder `draft`.

    With other KV heads than the target's, the draft's layer has pages of another size.
    """
    target = _SMALL | {"num_hidden_layers": 4}
    draft = _SMALL | {"num_hidden_layers": 1, "num_key_value_heads": draft_kv_heads}

    def build(folder: Path) -> None:
        import torch

        _save(folder, "Llama", target, seed)
        (folder / "draft").mkdir()
        whole = _save(folder / "draft", "Llama", draft, seed + 1)
        layer = {
            name.removeprefix("model."): weight
            for name, weight in whole.items()
            if name.startswith("model.layers.") and "input_layernorm" not in name
        }
        hidden, generator = target["hidden_size"], torch.Generator().manual_seed(seed + 2)
        layer["fc.weight"] = torch.empty(hidden, 2 * hidden).normal_(0.0, _STD, generator=generator)
        _write(folder / "draft", layer)

    both = {"target": target, "draft": draft}
    return _cached(Path(root), f"eagle-kv{draft_kv_heads}", "Llama", both, seed, build)


def gemma3(root: Path | str, *, seed: int = 0, **config: Any) -> Path:
    """Return a Gemma-3 checkpoint: 4 layers with a window of 64 tokens, 2 with full attention."""
    config = {
        **_SMALL,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 64,
        "query_pre_attn_scalar": 64,
        **config,
    }
    return _cached(Path(root), "gemma3", "Gemma3Text", config, seed)


def gpt_oss(root: Path | str, *, seed: int = 0, **config: Any) -> Path:
    """Return a gpt-oss checkpoint: window of 200 tokens and full attention in turn, with sinks."""
    config = {
        **_SMALL,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 200,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "intermediate_size": 256,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        **config,
    }
    return _cached(Path(root), "gpt-oss", "GptOss", config, seed)


def llama4(root: Path | str, *, seed: int = 0, **config: Any) -> Path:
    """Return a Llama-4 checkpoint: attention within chunks of 256 tokens and full, in turn."""
    config = {
        **_SMALL,
        "num_hidden_layers": 4,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "attention_chunk_size": 256,
        "no_rope_layers": [1, 0] * 2,
        "intermediate_size": 64,
        "intermediate_size_mlp": 512,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "moe_layers": [],
        "interleave_moe_layer_step": 0,
        **config,
    }
    return _cached(Path(root), "llama4", "Llama4Text", config, seed)


def qwen3_next(root: Path | str, *, seed: int = 0, **config: Any) -> Path:
    """Return a Qwen3-Next checkpoint: 3 layers of gated delta net, then one of full attention.

    vLLM's CPU kernel takes state heads of 128 x 128 only, and bfloat16 activations only.
    """
    config = {
        **_SMALL,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "head_dim": 256,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mlp_only_layers": [0, 1, 2],
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        **config,
    }
    return _cached(Path(root), "qwen3-next", "Qwen3Next", config, seed)


def granite4(root: Path | str, *, seed: int = 0, **config: Any) -> Path:
    """Return a Granite-4 checkpoint: 3 layers of Mamba-2, then one of full attention."""
    config = {
        **_SMALL,
        "num_hidden_layers": 4,
        "layer_types": ["mamba"] * 3 + ["attention"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 512,
        "position_embedding_type": "rope",
        "attention_multiplier": 0.125,
        "mamba_n_heads": 8,
        "mamba_n_groups": 1,
        "mamba_d_head": 64,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 64,
        **config,
    }
    return _cached(Path(root), "granite4", "GraniteMoeHybrid", config, seed)


def mamba2(root: Path | str, *, seed: int = 0, **config: Any) -> Path:
    """Return a Mamba-2 checkpoint: 3 layers of states and no attention at all."""
    config = {
        "num_hidden_layers": 3,
        "hidden_size": 256,
        "vocab_size": 512,
        "num_heads": 8,
        "head_dim": 64,
        "state_size": 32,
        "n_groups": 1,
        "expand": 2,
        "conv_kernel": 4,
        "chunk_size": 64,
        "tie_word_embeddings": False,
        **config,
    }
    return _cached(Path(root), "mamba2", "Mamba2", config, seed)


def prompt(length: int, seed: int = 0, vocab: int = 512) -> list[int]:
    """Return `length` token ids below `vocab`, the same for the same seed, without special ids."""
    stream = b"".join(
        hashlib.sha256(f"{seed}:{i}".encode()).digest() for i in range(-(-length // 16))
    )
    span = vocab - 8
    return [8 + int.from_bytes(stream[2 * i : 2 * i + 2], "little") % span for i in range(length)]


def _cached(
    root: Path,
    kind: str,
    family: str,
    config: dict[str, Any],
    seed: int,
    build: Callable[[Path], None] | None = None,
) -> Path:
    recipe = json.dumps([_RECIPE, _STD, family, config, seed], sort_keys=True)
    target = root / f"{kind}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"

    def save(folder: Path) -> None:
        _save(folder, family, config, seed)

    return build_once(target, build or save)


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


def _save(folder: Path, family: str, config: dict[str, Any], seed: int) -> dict[str, Any]:
    """Write a checkpoint of transformers' classes for `family` and return its weights by name."""
    import transformers

    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")
    model = model_class(config_class(**config)).float()
    draw_weights(model, seed)
    model.save_pretrained(folder)
    return dict(model.state_dict())


def draw_weights(model: Any, seed: int) -> None:
    """Fill a torch module's parameters as this module's text says."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # By name, so that the bytes do not depend on the order in which modules are built.
        for name, weight in sorted(model.named_parameters()):
            kind = name.rsplit(".", 1)[-1]
            if kind in _FIXED:
                weight.fill_(_FIXED[kind])
            elif weight.dim() > 1 or kind == "bias":
                std = _CONV_STD if "conv1d" in name else _STD
                weight.normal_(0.0, std, generator=generator)
            else:
                weight.fill_(1.0)


def _write(folder: Path, weights: dict[str, Any], **changes: Any) -> None:
    """Replace the weights of a saved checkpoint, and fields of its config."""
    from safetensors.torch import save_file

    # Each in memory of its own: the format knows no sharing.
    weights = {name: weight.detach().clone() for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
