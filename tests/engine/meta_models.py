"""A process that builds shipped models as vLLM does, without weights, and tells their cache specs.

    python meta_models.py FOLDER_OF_CONFIGS < /dev/null > specs.json

Every model is built whole on the meta device at TP 1, from a real `VllmConfig` made of the shipped
fields. What those leave out is added here; none of it shapes a cache. What this machine cannot do,
and no cache depends on, is replaced: image processing, CUDA events, the choice of a sparse backend.
"""

from __future__ import annotations

import importlib.machinery
import json
import logging
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

MOE = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "swiglu_limit": 10.0,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "vocab_size": 1024,
    "intermediate_size": 1024,
}
V4 = MOE | {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "num_hash_layers": 0,
    "compress_rope_theta": 10000.0,
    "expert_dtype": "bfloat16",
}
FILLED: dict[str, dict[str, Any]] = {
    "DeepseekV4ForCausalLM": V4 | {"scoring_func": "sqrtsoftplus"},
    "DeepseekV41ForCausalLM": V4
    | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
    },
    "Gemma4ForConditionalGeneration": {"num_attention_heads": 32},
    "Glm5NextForConditionalGeneration": MOE
    | {
        "mhc": False,
        "mla_use_nope": True,
        "q_lora_rank": 1536,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "indexer_rope_interleave": False,
        "index_kpool_always_select_tail": True,
        "linear_lower_bound": None,
    },
    "MiniMaxM2ForCausalLM": {"rotary_dim": 64, "scoring_func": "sigmoid"},
    # Experts hold no cache, and these need a GPU: dense layers instead.
    "MiniMaxM3SparseForConditionalGeneration": {"moe_layer_freq": [0] * 60},
}
# Families whose classes with images need more than caches do: the language model alone.
LANGUAGE = {
    "DeepseekV41ForCausalLM": ("DeepseekV41ForCausalLM", "deepseek_v41"),
    "Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", "gemma3_text"),
    "Gemma4ForConditionalGeneration": ("Gemma4ForCausalLM", "gemma4_text"),
    "Glm5NextForConditionalGeneration": ("Glm5NextForCausalLM", "glm5_next_text"),
    "KimiK3ForConditionalGeneration": ("KimiLinearForCausalLM", "kimi_linear"),
    "MiniMaxM3SparseForConditionalGeneration": ("MiniMaxM3SparseForCausalLM", "minimax_m3_vl"),
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", "mistral"),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
}
ONLY_GPU = ("DeepseekV41ForCausalLM",)
"""No model code but that of GPUs: built as on a Hopper GPU, with its block size."""
ABSENT = (
    "",
    ".io",
    ".ops",
    ".transforms",
    ".transforms.functional",
    ".transforms.v2",
    ".transforms.v2.functional",
)


def pretend() -> None:
    """Stand in for what is not on this machine and shapes no cache. Before vLLM is imported."""
    import torch

    for part in ABSENT:
        module = MagicMock()
        module.__spec__ = importlib.machinery.ModuleSpec(f"torchvision{part}", None)
        module.__path__, module.__version__ = [], "0.0"
        sys.modules[f"torchvision{part}"] = module

    class Nothing:
        def __init__(self, *args: Any, **fields: Any) -> None: ...

    torch.cuda.Event = torch.cuda.Stream = Nothing
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    registry._run_in_subprocess = lambda inspect: inspect()  # one import instead of one each
    chosen = CpuPlatform.get_attn_backend_cls.__func__
    updated = CpuPlatform.check_and_update_config.__func__

    def any_backend(cls: Any, selected: Any, attn_selector_config: Any, **rest: Any) -> str:
        """The CPU has no sparse attention; the layers' caches are the same without."""
        dense = attn_selector_config._replace(use_sparse=False)
        return chosen(cls, selected, attn_selector_config=dense, **rest)

    def keep_configured(cls: Any, config: Any) -> None:
        """The CPU's kernels take one size of block and float32 states; others, what is asked."""
        cache = config.cache_config
        state_dtype, block_size = cache.mamba_ssm_cache_dtype, cache.block_size
        updated(cls, config)
        cache.mamba_ssm_cache_dtype = state_dtype
        if cache.user_specified_block_size:
            cache.block_size = block_size

    CpuPlatform.get_attn_backend_cls = classmethod(any_backend)
    CpuPlatform.check_and_update_config = classmethod(keep_configured)


def config_fields(path: Path) -> dict[str, Any]:
    """Return a config.json that vLLM accepts, of a shipped one."""
    fields = json.loads(path.read_text())
    fields = {name: value for name, value in fields.items() if not name.startswith("_")}
    architecture = fields["architectures"][0]
    if architecture in LANGUAGE:
        name, model_type = LANGUAGE[architecture]
        fields |= {"architectures": [name], "model_type": model_type}
    if "hybrid_override_pattern" in fields:  # no experts here either
        pattern = fields["hybrid_override_pattern"]
        fields["hybrid_override_pattern"] = pattern.replace("E", "-")
    fields = {"max_position_embeddings": 131072, **FILLED.get(architecture, {}), **fields}
    if fields["model_type"] == "minimax_m3_vl":  # has no type of its own for the language model
        head = {name: fields.pop(name) for name in ("architectures", "model_type")}
        return head | {"text_config": fields}
    return fields


def specs(folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Build the model of `folder` and return what its configuration and its layers say."""
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import DeviceCapability
    from vllm.utils.torch_utils import set_default_torch_dtype

    gpu = fields["architectures"][0] in ONLY_GPU
    config = EngineArgs(
        model=str(folder),
        block_size=256 if gpu else None,
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=4096,
        enforce_eager=True,
        enable_prefix_caching=False,
    ).create_engine_config()
    bf16 = set_default_torch_dtype(torch.bfloat16)
    with set_current_vllm_config(config), torch.device("meta"), bf16, ExitStack() as stack:
        if gpu:
            hopper = DeviceCapability(9, 0)
            name = "get_device_capability"
            stack.enter_context(patch.object(CpuPlatform, name, return_value=hopper))
        initialize_model(config)
    layers = {}
    for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items():
        if (spec := layer.get_kv_cache_spec(config)) is not None:
            layers[name] = {
                "class": type(spec).__name__,
                "block_size": spec.block_size,
                "page_bytes": spec.page_size_bytes,
                "real_bytes": getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes),
                "heads": getattr(spec, "num_kv_heads", None),
                "window": getattr(spec, "sliding_window", None),
                "max_tp_shards": getattr(spec, "max_tp_shards", None),
            }
    model = config.model_config
    return {
        "architecture": model.architecture,
        "cache_dtype": config.cache_config.cache_dtype,
        "block_size": config.cache_config.block_size,
        "uniform": not model.model_arch_config.per_layer_overrides,
        "use_mla": model.use_mla,
        "head_size": model.get_head_size(),
        "heads_at_tp": {
            tp: model.get_num_kv_heads(SimpleNamespace(tensor_parallel_size=tp))
            for tp in (1, 2, 4, 8)
        },
        "layers": layers,
    }


def main(configs: Path) -> dict[str, Any]:
    pretend()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    told = {}
    with tempfile.TemporaryDirectory() as root:
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{root}/ranks", 0, backend="gloo")
            initialize_model_parallel(1)
        for path in sorted(configs.glob("*.json")):
            folder = Path(root) / path.stem
            folder.mkdir()
            fields = config_fields(path)
            (folder / "config.json").write_text(json.dumps(fields))
            try:
                told[path.stem] = specs(folder, fields)
            except Exception as error:  # told to the test, which says which may fail and how
                told[path.stem] = {"error": f"{type(error).__name__}: {error}"}
    return told


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "0"}
    os.environ["VLLM_KIMI_K3_GEMM_AR"] = "0"  # a kernel of one GPU
    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(main(Path(sys.argv[1])), answers)
    answers.close()
