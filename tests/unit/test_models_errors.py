"""What a config.json or a layout must not be: refused by field, with what would be accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvfold.errors import ConfigError, PlanError
from kvfold.mesh import Mesh
from kvfold.models import Config, build, load


def changed(name: str, **changes: Any) -> Config:
    return Config(name, load(name).values | changes)


def nested(name: str, field: str, **changes: Any) -> Config:
    return changed(name, **{field: load(name).values[field] | changes})


GLM_TYPES = load("glm-5.3").values["indexer_types"]
V4_RATIOS = load("deepseek-v4-flash").values["compress_ratios"]
GEMMA_TYPES = load("gemma-4-31b").values["layer_types"]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (changed("qwen3-8b", architectures=None), r"architectures=None: expected a list"),
        (changed("qwen3-8b", architectures=["Qwen4ForCausalLM"]), r"nearest: Qwen3ForCausalLM"),
        (changed("qwen3-8b", architectures=["Nothing"]), r"'Nothing': expected one of Bamba.*Qwen"),
        (changed("qwen3-8b", num_hidden_layers=None), r"qwen3-8b num_hidden_layers=None: .*number"),
        (changed("qwen3-8b", num_hidden_layers=10**9), r"num_hidden_layers=1000000000: .*at most"),
        (changed("qwen3-8b", num_hidden_layers=True), r"num_hidden_layers=True"),
        (changed("qwen3-8b", num_key_value_heads="8"), r"num_key_value_heads='8'"),
        (changed("qwen3-8b", head_dim=0), r"head_dim=0"),
        (changed("qwen3-8b", head_dim=None, hidden_size=4095), r"head_dim=None.*hidden_size=4095"),
        (changed("qwen3-8b", use_sliding_window=True), r"sliding_window=.*null"),
        (changed("llama-3.1-8b", sliding_window=4096), r"sliding_window=4096: expected null"),
        (changed("qwen3-8b", torch_dtype="int8"), r"torch_dtype='int8'.*bfloat16"),
        (changed("deepseek-v3", kv_lora_rank=None), r"kv_lora_rank=None"),
        (changed("deepseek-v3", qk_rope_head_dim=-1), r"qk_rope_head_dim=-1.*at least 0"),
        (changed("glm-5.3", index_head_dim=None), r"index_head_dim=None"),
        (changed("glm-5.3", index_topk_pattern="FFS"), r"index_topk_pattern='FFS': expected null"),
        (
            changed("glm-5.3", index_topk_freq=3),
            r"indexer_types\[5\]='shared': expected 'full', by",
        ),
        (
            changed("glm-5.3", index_skip_topk_offset=2),
            r"indexer_types\[2\]='full': expected 'shared', by index_topk_freq=4 and .*offset=2",
        ),
        (changed("glm-5.3", indexer_types=GLM_TYPES[:77]), r"indexer_types=77: expected 78 entr"),
        (changed("glm-5.3", indexer_types=["x"] * 78), r"indexer_types\[0\]='x'.*'full', 'shared'"),
        (changed("glm-5.3", indexer_types=5), r"indexer_types=5"),
        (changed("deepseek-v4-flash", compress_ratios=V4_RATIOS[:42]), r"compress_ratios=42"),
        (
            changed("deepseek-v4-flash", compress_ratios=[*V4_RATIOS, 4]),
            r"compress_ratios=\[0, 4\]",
        ),
        (
            changed("deepseek-v4-flash", compress_ratios=[2] * 43),
            r"compress_ratios\[0\]=2.*\(0, 4, 128\)",
        ),
        (changed("deepseek-v4-flash", compress_ratios="x"), r"compress_ratios='x'"),
        (
            nested("minimax-m3", "sparse_attention_config", sparse_attention_freq=[1]),
            r"freq=1: .*60",
        ),
        (changed("minimax-m3", sparse_attention_config=None), r"sparse_attention_config=None"),
        (changed("gemma-4-31b", num_kv_shared_layers=3), r"num_kv_shared_layers=3: expected 0"),
        (changed("gemma-4-31b", layer_types=None), r"layer_types=None"),
        (changed("gemma-3-27b", layer_types=["full_attention"] * 62), r"layer_types\[0\].*pattern"),
        (changed("gemma-4-31b", sliding_window=None), r"sliding_window=None"),
        (changed("gemma-4-31b", global_head_dim=None), r"global_head_dim=None"),
        (changed("gpt-oss-20b", layer_types=["full"] * 24), r"layer_types\[0\]='full'"),
        (
            changed("qwen3-next-80b-a3b", layer_types=["full_attention"] * 48),
            r"layer_types\[0\]='full_attention'.*full_attention_interval=4",
        ),
        (
            nested("kimi-k3", "linear_attn_config", kda_layers=[1, 2]),
            r"kda_layers='2 layers beside",
        ),
        (changed("kimi-k3", linear_attn_config=[]), r"linear_attn_config=\[\]"),
        (
            changed("nemotron-h-8b", hybrid_override_pattern="M*"),
            r"hybrid_override_pattern=2: .*52",
        ),
        (changed("nemotron-h-8b", hybrid_override_pattern="M" * 51 + "?"), r"pattern\[51\]='\?'"),
        (changed("jamba-v0.1", attn_layer_offset=8), r"attn_layer_offset=8.*less than"),
        (changed("bamba-9b", attn_layer_indices=[32]), r"attn_layer_indices=\[32\]"),
    ],
)
def test_a_bad_config_is_refused_by_field(config: Config, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build(config, Mesh())


@pytest.mark.parametrize(
    ("name", "mesh", "named"),
    [
        ("llama-3.1-8b", Mesh(tp=3), r"tp=3: .*num_attention_heads=32"),
        ("minimax-m2", Mesh(tp=12), r"tp=12: .*multiple of num_key_value_heads=8"),
        ("gpt-oss-120b", Mesh(tp=16), r"tp=16: .*at most num_key_value_heads=8: gpt-oss"),
        ("deepseek-v4-flash", Mesh(tp=16), r"tp=16: .*at most o_groups=8"),
        ("nemotron-h-8b", Mesh(tp=16), r"tp=16: .*n_groups=8"),
        ("falcon-h1-34b", Mesh(tp=4), r"tp=4: .*mamba_n_groups=2"),
        ("falcon-h1-7b", Mesh(tp=8), r"tp=8: .*num_attention_heads=12"),
        ("qwen3-next-80b-a3b", Mesh(tp=32), r"tp=32: .*num_attention_heads=16"),
        ("gemma-3-27b", Mesh(tp=4, dcp=2), r"dcp=2: .*windows"),
        ("qwen3.5-35b-a3b", Mesh(tp=16, dcp=16), r"dcp=16: .*8 query heads per KV head"),
        ("deepseek-v4.1-flash", Mesh(pp=4), r"pp=4: .*layer 8 is.*of layer 10"),
        ("llama-3.1-8b", Mesh(pp=33), r"pp=33: .*num_hidden_layers=32"),
    ],
)
def test_a_layout_the_engine_refuses_is_refused(name: str, mesh: Mesh, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        build(load(name), mesh)


@pytest.mark.parametrize(
    ("name", "dtype", "named"),
    [
        ("llama-3.1-8b", "fp4", r"kv_cache_dtype='fp4': expected one of auto"),
        ("llama-3.1-8b", "fp8_ds_mla", r"'fp8_ds_mla'.*no MLA rows"),
        ("deepseek-v3", "fp8_ds_mla", r"'fp8_ds_mla'.*sparse indexer"),
        ("deepseek-v3", "int8_per_token_head", r"'int8_per_token_head'.*no scales per head"),
        ("glm-5.3-flash", "fp8_ds_mla", r"'fp8_ds_mla'.*512 \+ 64"),
        ("deepseek-v4-flash", "nvfp4", r"'nvfp4'.*fp8_ds_mla"),
    ],
)
def test_a_kv_dtype_that_does_not_fit_is_refused(name: str, dtype: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build(load(name), Mesh(), dtype)


@pytest.mark.parametrize(
    ("name", "block_size", "named"),
    [
        ("llama-3.1-8b", 0, r"block_size=0"),
        ("llama-3.1-8b", True, r"block_size=True"),
        ("deepseek-v4-flash", 64, r"block_size=64: expected a multiple of 128"),
        ("glm-5.3-flash", 24, r"block_size=24: expected a multiple of index_kpool=16"),
    ],
)
def test_a_block_size_that_does_not_fit_is_refused(name: str, block_size: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build(load(name), Mesh(), "auto", block_size)


def test_a_fp8_latent_of_another_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"head_dim=256.*512"):
        build(changed("deepseek-v4-flash", head_dim=256), Mesh(), "fp8")


def test_a_model_is_a_file_a_folder_or_a_shipped_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    values = load("glm-5.3").values
    (folder / "config.json").write_text(json.dumps(values))
    (tmp_path / "other.json").write_text(json.dumps({"text_config": values} | values))
    found = [
        load(str(folder)),
        load(str(folder / "config.json")),
        load(str(tmp_path / "other.json")),
    ]
    assert [c.name for c in found] == ["my-model", "my-model", "other"]
    assert found[0].source == found[1].source == str(folder)
    assert load("GLM-5.3").source is None
    assert all(build(c, Mesh()).groups == build(load("GLM-5.3"), Mesh()).groups for c in found)


def test_fields_of_a_nested_text_config_count_but_not_its_architecture() -> None:
    text = load("gemma-3-27b").values | {"architectures": ["Gemma3ForCausalLM"]}
    config = Config("x", {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    model = build(config, Mesh())
    assert model.architecture == "Gemma3ForConditionalGeneration"
    assert len(model.layers) == 62


@pytest.mark.parametrize(
    ("content", "named"),
    [("{", r"JSON object in config.json \("), ("[]", r"a JSON object in config.json$")],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=named):
        load(str(tmp_path))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"readable config.json \(No such file"):
        load(str(tmp_path))


def test_an_unknown_name_is_refused_with_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"did you mean deepseek-v3"):
        load("deepseek-ai/DeepSeek-V3.2")
    with pytest.raises(ConfigError, match=r"ships with kvfold: bamba-9b, .*qwen3-8b"):
        load("zzz")
