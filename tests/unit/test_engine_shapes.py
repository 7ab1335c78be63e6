"""Our sizes, spans and replicas beside those of vLLM's own classes, for every shipped model."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvfold.errors import ConfigError
from kvfold.mesh import Mesh
from kvfold.models import Model, build, load, shipped
from kvfold.placement import kv_cache_groups_tp_replicas, tokens_per_block
from kvfold.spec import STATE_KINDS, LayerSpec

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
HYBRID = {
    "bamba-9b": "mamba2",
    "falcon-h1-7b": "mamba2",
    "falcon-h1-34b": "mamba2",
    "nemotron-h-8b": "mamba2",
    "nemotron-nano-9b-v2": "mamba2",
    "nemotron-3-nano-30b-a3b": "mamba2",
    "jamba-v0.1": "mamba1",
    "jamba-1.5-large": "mamba1",
    "qwen3-next-80b-a3b": "gdn",
    "qwen3.5-35b-a3b": "gdn",
    "qwen3.5-397b-a17b": "gdn",
    "qwen3.8-2.4t-a95b": "gdn",
    "kimi-k3": "kda",
    "glm-5.3-flash": "kda",
}
ANY_OF = {  # how families spell the same field
    "heads": ("mamba_n_heads", "mamba_num_heads"),
    "head_dim": ("mamba_d_head", "mamba_head_dim"),
    "groups": ("mamba_n_groups", "n_groups"),
    "states": ("mamba_d_state", "ssm_state_size"),
    "kernel": ("mamba_d_conv", "conv_kernel"),
}


def state_shapes(name: str, tp: int) -> tuple[tuple[int, ...], ...]:
    """The state's shapes by the engine's calculator: convolution first."""
    config = load(name).values

    def field(what: str) -> int:
        return next(int(config[f]) for f in ANY_OF[what] if f in config)

    if HYBRID[name] == "mamba2":
        heads, dim = field("heads"), field("head_dim")
        return Shapes.mamba2_state_shape(
            tp, heads * dim, field("groups"), heads, dim, field("states"), field("kernel")
        )
    if HYBRID[name] == "mamba1":
        inner = config["mamba_expand"] * config["hidden_size"]
        return Shapes.mamba1_state_shape(tp, inner, field("states"), field("kernel"))
    if HYBRID[name] == "gdn":
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        sizes = [config[f"linear_{n}"] for n in names]
        return Shapes.gated_delta_net_state_shape(tp, *sizes, config["linear_conv_kernel_dim"])
    linear = config.get("linear_attn_config")
    if linear:
        heads, dim, kernel = (
            linear[n] for n in ("num_heads", "head_dim", "short_conv_kernel_size")
        )
    else:
        names = ("num_heads", "head_dim", "conv_kernel_dim")
        heads, dim, kernel = (config[f"linear_{n}"] for n in names)
    return Shapes.kda_state_shape(tp, heads, dim, conv_kernel_size=kernel)


def test_every_model_with_states_is_checked() -> None:
    found = {
        name
        for name in shipped()
        if any(layer.kind in STATE_KINDS for layer in build(load(name), Mesh()).layers)
    }
    assert found == set(HYBRID)


@pytest.mark.parametrize("name", HYBRID)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_states_have_the_engines_shapes(name: str, tp: int) -> None:
    try:
        layers = build(load(name), Mesh(tp=tp)).layers
    except ConfigError:
        pytest.skip("the engine does not run this model at this tp")
    [dtypes] = {layer.dtype for layer in layers if layer.kind in STATE_KINDS}
    conv, state = DTYPES[dtypes.split("+")[0]], DTYPES[dtypes.split("+")[-1]]
    shapes = state_shapes(name, tp)
    expected = prod(shapes[0]) * conv.itemsize + prod(shapes[1]) * state.itemsize
    assert {x.page_bytes for x in layers if x.kind in STATE_KINDS} == {expected}


def engine_spec(model: Model, layer: LayerSpec) -> KVCacheSpec:
    """The layer as vLLM's class; rows that are packed are told in bytes, as vLLM tells them."""
    fields: dict[str, Any] = {"block_size": layer.block_size}
    if layer.kind in STATE_KINDS:
        return MambaSpec(
            shapes=((layer.page_bytes,),),
            dtypes=(torch.uint8,),
            page_size_padded=layer.engine_page_bytes,
            **fields,
        )
    dtype = DTYPES.get(layer.dtype, torch.uint8)
    elements = layer.head_bytes // dtype.itemsize
    fields |= {"num_kv_heads": layer.num_kv_heads, "dtype": dtype, "head_size": elements}
    if layer.kind == "circular_buffer":
        return CircularBufferSpec(head_size_v=0, **fields)
    fields["max_tp_shards"] = layer.max_tp_shards
    if layer.kind in ("mla", "indexer", "sliding_window_mla"):
        if model.architecture.startswith("DeepseekV4"):
            packed = model.kv_cache_dtype != "auto"
            fields |= {"alignment": 576 if packed else 512, "model_version": "deepseek_v4"}
        if layer.kind == "sliding_window_mla":
            return SlidingWindowMLASpec(sliding_window=layer.window, head_size_v=0, **fields)
        return MLAAttentionSpec(tokens_per_state=layer.tokens_per_state, **fields)
    fields["head_size"] = elements // 2
    if layer.kind == "sliding_window":
        return SlidingWindowSpec(sliding_window=layer.window, **fields)
    return FullAttentionSpec(**fields)


@pytest.mark.parametrize("name", shipped())
@pytest.mark.parametrize(("dtype", "tp", "dcp"), [("auto", 1, 1), ("auto", 8, 1), ("fp8", 4, 2)])
def test_pages_spans_and_replicas_are_the_engines(name: str, dtype: str, tp: int, dcp: int) -> None:
    try:
        model = build(load(name), Mesh(tp=tp, dcp=dcp), dtype)
    except ConfigError:
        pytest.skip("the engine does not run this model at this layout")
    groups = []
    for ours, layers in zip(model.groups, model.engine_view(), strict=True):
        specs = {layer.name: engine_spec(model, layer) for layer in layers}
        for layer in layers:
            spec = specs[layer.name]
            assert spec.page_size_bytes == layer.engine_page_bytes, layer.name
            if ours.prefix_cacheable:  # no span is asked of the others
                span = kv_cache_utils.resolve_dcp_kv_block_size(spec, dcp)
                assert span == tokens_per_block(layer, dcp), layer.name
        if ours.prefix_cacheable:
            whole = UniformTypeKVCacheSpecs(
                block_size=layers[0].block_size,
                kv_cache_specs=specs,
                dcp_sharded=layers[0].dcp_sharded,
            )
            assert whole.prefix_cacheable
            groups.append(KVCacheGroupSpec(list(specs), whole))
    view = [x for g, x in zip(model.groups, model.engine_view(), strict=True) if g.prefix_cacheable]
    for size in (1, dcp):
        expected = kv_cache_utils.kv_cache_groups_tp_replicas(groups, tp, size)
        assert kv_cache_groups_tp_replicas(view, tp, size) == expected
