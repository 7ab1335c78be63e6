"""Model families: from a Hugging Face config.json to the specs of every layer.

`build(load("deepseek-v3.2-exp"), Mesh(tp=8))` gives the groups that `kvfold.plan.plan` takes.
One file per family; `FAMILIES` says which architecture is whose.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvfold.errors import ConfigError
from kvfold.mesh import Mesh
from kvfold.models import (
    deepseek,
    deepseek_v4,
    deepseek_v41,
    falcon_h1,
    gemma,
    glm5_next,
    gpt_oss,
    jamba,
    kimi_k3,
    minimax_m3,
    nemotron_h,
    plain,
    qwen_next,
)
from kvfold.models.builder import DEFAULT_BLOCK_SIZE, Builder, Model
from kvfold.models.config import Config, load, shipped
from kvfold.models.pages import KV_DTYPES, check_kv_dtype

__all__ = ["FAMILIES", "KV_DTYPES", "Config", "Family", "Model", "build", "load", "shipped"]


class Family(NamedTuple):
    """How a family's layers are built, and the engine's block size for it.

    `kernel_block` is the tokens that its attention kernels take at a time (on Hopper): a block
    must be a multiple of it.
    """

    build: Callable[[Builder], None]
    block_size: int = DEFAULT_BLOCK_SIZE
    kernel_block: int = DEFAULT_BLOCK_SIZE


_PLAIN = Family(plain.build)
_MLA = Family(deepseek.build)
_DSA = Family(deepseek.build, 64, 64)

FAMILIES: Mapping[str, Family] = {
    "BambaForCausalLM": Family(falcon_h1.build_bamba),
    "DeepseekV2ForCausalLM": _MLA,
    "DeepseekV32ForCausalLM": _DSA,
    "DeepseekV3ForCausalLM": _MLA,
    "DeepseekV41ForCausalLM": Family(deepseek_v41.build, 256, 256),
    "DeepseekV4ForCausalLM": Family(deepseek_v4.build, 256, 256),
    "FalconH1ForCausalLM": Family(falcon_h1.build),
    "Gemma3ForCausalLM": Family(gemma.build),
    "Gemma3ForConditionalGeneration": Family(gemma.build),
    "Gemma4ForConditionalGeneration": Family(gemma.build),
    "Glm5NextForConditionalGeneration": Family(glm5_next.build, 64, 64),
    "GlmMoeDsaForCausalLM": _DSA,
    "GptOssForCausalLM": Family(gpt_oss.build),
    "JambaForCausalLM": Family(jamba.build),
    "KimiK3ForConditionalGeneration": Family(kimi_k3.build),
    "LlamaForCausalLM": _PLAIN,
    "MiniMaxM2ForCausalLM": _PLAIN,
    "MiniMaxM3SparseForConditionalGeneration": Family(minimax_m3.build, 128, 128),
    "Mistral3ForConditionalGeneration": _PLAIN,
    "MistralForCausalLM": _PLAIN,
    "MistralLarge3ForCausalLM": _MLA,
    "NemotronHForCausalLM": Family(nemotron_h.build),
    "Qwen2ForCausalLM": _PLAIN,
    "Qwen3ForCausalLM": _PLAIN,
    "Qwen3MoeForCausalLM": _PLAIN,
    "Qwen3NextForCausalLM": Family(qwen_next.build),
    "Qwen3_5MoeForConditionalGeneration": Family(qwen_next.build),
}


def architecture(config: Config) -> str:
    """Return the config's architecture. Raises `ConfigError` with the known ones nearest to it."""
    given = config.values.get("architectures")
    if not isinstance(given, list) or not given or not isinstance(given[0], str):
        config.refuse("architectures", "a list with the name of the model's class")
    if given[0] not in FAMILIES:
        near = difflib.get_close_matches(given[0], FAMILIES, n=3, cutoff=0.6)
        hint = f" (nearest: {', '.join(near)})" if near else ""
        raise ConfigError(
            f"{config.name} architectures", given[0], f"one of {', '.join(FAMILIES)}{hint}"
        )
    return given[0]


def build(
    config: Config, mesh: Mesh, kv_cache_dtype: str = "auto", block_size: int | None = None
) -> Model:
    """Return the groups of `config`'s model on `mesh`, layers dealt to stages as the engine does.

    `block_size` (tokens; default: the family's) is raised where state pages need it, and a note
    says so. Raises `ConfigError` or `PlanError` naming the field and what would be accepted.
    """
    check_kv_dtype(kv_cache_dtype)
    name = architecture(config)
    family = FAMILIES[name]
    asked = family.block_size if block_size is None else block_size
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= 1 << 20:
        raise ConfigError("block_size", asked, "a whole number of tokens from 1 to 1,048,576")
    builder = Builder(config, mesh, kv_cache_dtype, asked)
    family.build(builder)
    aligned = builder.aligned_block_size()
    if aligned != asked:
        builder = Builder(config, mesh, kv_cache_dtype, aligned)
        family.build(builder)
        builder.notes.append(
            f"block size {aligned} instead of {asked}: a state page must fit an attention page"
        )
    return builder.finish(name)
