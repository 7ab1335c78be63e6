"""As much of vLLM's configuration as `translate` reads, with vLLM's own specs in it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
)

BLOCKS, BLOCK, HEADS, DIM = 5, 16, 2, 8


def full(**changes):
    fields = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.float32}
    return FullAttentionSpec(**fields | changes)


def mla(**changes):
    fields = {
        "block_size": BLOCK, "num_kv_heads": 1, "head_size": 24, "dtype": torch.float32,
        "max_tp_shards": 1,
    }  # fmt: skip
    return MLAAttentionSpec(**fields | changes)


def state(kind="GDN_ATTN", mode="align", **changes):
    """A state of 40 bytes of two types, in pages of 64."""
    fields = {
        "block_size": 32, "shapes": ((2, 4), (2,)), "dtypes": (torch.float32, torch.float32),
        "page_size_padded": 64, "mamba_type": MambaAttentionBackendEnum[kind],
        "mamba_cache_mode": mode,
    }  # fmt: skip
    return MambaSpec(**fields | changes)


def group(spec, *layers, **changes):
    return KVCacheGroupSpec(list(layers or ("layers.0.attn", "layers.1.attn")), spec, **changes)


def kv_config(*groups, **changes):
    fields = {
        "kv_cache_layout": "LBHNC", "hash_block_size": BLOCK, "cache_hit_alignment_tokens": BLOCK,
    }  # fmt: skip
    config = KVCacheConfig(BLOCKS, [], list(groups))
    for name, value in (fields | changes).items():  # as the engine does; 0.31 lacks some
        setattr(config, name, value)
    return config


class HfConfig:
    """A text config in Hugging Face's form."""

    def __init__(self, **fields):
        self.fields = {"hidden_size": 64, "_name_or_path": "x", "torch_dtype": "float32"} | fields

    def to_json_string(self, use_diff):
        assert not use_diff
        return json.dumps(self.fields)


def model_config(**changes):
    fields = {
        "hf_text_config": HfConfig(), "quantization": None, "quantization_config": None,
        "max_model_len": 4096, "dtype": torch.float32, "seed": 0, "model": "m", "revision": None,
        "model_arch_config": SimpleNamespace(per_layer_overrides=None, total_num_kv_heads=HEADS),
        "get_total_num_hidden_layers": lambda: 4,
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)


def engine_config(**changes):
    """Of one rank, with the given values changed ("a__b" is a.b)."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, prefill_context_parallel_size=1,
            decode_context_parallel_size=1, nnodes=1, tensor_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        speculative_config=None,
        lora_config=None,
        kv_events_config=None,
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
        cache_config=SimpleNamespace(
            calculate_kv_scales=False, prefix_caching_hash_algo="sha256", cache_dtype="auto"
        ),
        compilation_config=SimpleNamespace(static_forward_context={}),
        device_config=SimpleNamespace(device_type="cpu"),
        load_config=SimpleNamespace(load_format="dummy"),
        model_config=model_config(),
    )  # fmt: skip
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = config
        for name in parents:
            target = getattr(target, name)
        setattr(target, last, value)
    return config


def speculative(method="mtp", tokens=3, **model):
    """A draft of its own."""
    return SimpleNamespace(
        method=method,
        num_speculative_tokens=tokens,
        draft_model_config=model_config(**model) if model is not None else None,
    )


def view(layout: str, layers: int, heads: int, row: int, split: int = 1):
    """Views [B, H, N, C] of `layers` caches in one allocation, in the physical order `layout`."""
    sizes = {"L": layers, "B": BLOCKS * split, "H": heads, "N": BLOCK // split, "C": row}
    count = sizes["L"] * sizes["B"] * heads * sizes["N"] * row
    backing = torch.arange(count, dtype=torch.float32)
    backing = backing.reshape([sizes[axis] for axis in layout])
    ordered = backing.permute([layout.index(axis) for axis in "LBHNC"])
    return [ordered[i] for i in range(layers)]


def states(count=1, content=40, stride=64):
    """Views [B, 1, 1, bytes] of states in padded pages, all in one allocation."""
    backing = torch.arange(count * BLOCKS * stride, dtype=torch.int64).to(torch.int8)
    pages = backing.reshape(count, BLOCKS, 1, 1, stride)
    return [pages[i][..., :content] for i in range(count)]
