"""vLLM's configuration in kvfold's terms: what is refused, where pages lie, how workers agree."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvfold.errors import PlanError
from kvfold.plan import PlanOptions
from kvfold.vllm import translate

BLOCKS, BLOCK, HEADS, DIM = 5, 16, 2, 8


def full(**changes):
    fields = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.float32}
    return FullAttentionSpec(**fields | changes)


def mla():
    return MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=24, head_size_v=0, dtype=torch.float32,
        max_tp_shards=1,
    )  # fmt: skip


def kv_config(spec, layers=("layers.0.attn", "layers.1.attn"), groups=1):
    group = KVCacheGroupSpec(list(layers), spec)
    return KVCacheConfig(BLOCKS, [], [group] * groups, kv_cache_layout="LBHNC")


def engine_config(**changes):
    """As much of a `VllmConfig` as is read, with the given values changed ("a.b" paths)."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, prefill_context_parallel_size=1,
            decode_context_parallel_size=1, nnodes=1, tensor_parallel_size=1,
        ),
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
        cache_config=SimpleNamespace(
            calculate_kv_scales=False, prefix_caching_hash_algo="sha256"
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(
            model_arch_config=SimpleNamespace(per_layer_overrides=None, total_num_kv_heads=HEADS)
        ),
    )  # fmt: skip
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = config
        for name in parents:
            target = getattr(target, name)
        setattr(target, last, value)
    return config


def test_what_is_supported_passes():
    translate.check_supported(engine_config(), kv_config(full()))
    translate.check_supported(engine_config(), kv_config(mla()))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
        ({"parallel_config__nnodes": 2}, "nnodes=2"),
        ({"speculative_config": SimpleNamespace(method="mtp")}, "speculative_config='mtp'"),
        ({"lora_config": object()}, "lora_config"),
        ({"kv_transfer_config__kv_role": "kv_consumer"}, "kv_role='kv_consumer'"),
        ({"cache_config__calculate_kv_scales": True}, "calculate_kv_scales=True"),
        ({"device_config__device_type": "cuda"}, "device='cuda'"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(change, named):
    with pytest.raises(PlanError) as caught:
        translate.check_supported(engine_config(**change), kv_config(full()))
    assert str(caught.value).startswith(named)


def test_several_groups_and_other_caches_are_refused():
    with pytest.raises(PlanError, match=r"cache groups='2 \(FullAttentionSpec\)'"):
        translate.check_supported(engine_config(), kv_config(full(), groups=2))
    window = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=DIM, dtype=torch.float32, sliding_window=64
    )
    with pytest.raises(PlanError, match=r"layer 'layers.0.attn' cache='SlidingWindowSpec'"):
        translate.check_supported(engine_config(), kv_config(window))
    with pytest.raises(PlanError, match="FullAttentionSpec"):
        translate.check_supported(engine_config(), kv_config(full(sliding_window=64)))


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(translate.vllm, "__version__", "0.33.1")
    with pytest.raises(PlanError, match=r"vllm version='0.33.1': expected 0.32"):
        translate.check_supported(engine_config(), kv_config(full()))


def test_containers_are_unwrapped():
    specs = {"a": full(), "b": mla()}
    container = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs)
    assert translate.layer_specs(kv_config(container, ("a", "b")), 0) == specs


def view(layout: str, layers: int, heads: int, row: int, split: int = 1):
    """Views [B, H, N, C] of `layers` caches in one allocation, in the physical order `layout`."""
    sizes = {"L": layers, "B": BLOCKS * split, "H": heads, "N": BLOCK // split, "C": row}
    backing = torch.arange(sizes["L"] * sizes["B"] * heads * sizes["N"] * row, dtype=torch.float32)
    backing = backing.reshape([sizes[axis] for axis in layout])
    ordered = backing.permute([layout.index(axis) for axis in "LBHNC"])
    return [ordered[i] for i in range(layers)]


@pytest.mark.parametrize(
    ("layout", "heads", "split", "encoding"),
    [
        ("LBHNC", 2, 1, "heads_first"),
        ("LBNHC", 2, 1, "tokens_first"),
        ("BLHNC", 2, 1, "heads_first"),
        ("BLNHC", 2, 1, "tokens_first"),
        ("LBNHC", 1, 1, "heads_first"),
        ("LBHNC", 1, 4, "heads_first"),
        ("LBHNC", 2, 4, "opaque"),
    ],
)
def test_pages_are_found_by_layout(layout, heads, split, encoding):
    tensors = dict(zip("ab", view(layout, 2, heads, 2 * DIM, split), strict=True))
    config = kv_config(full(num_kv_heads=heads), ("a", "b"))
    assert translate._encoding(tensors["a"], BLOCKS, heads) == encoding
    for name, at in translate.pages(tensors, config).items():
        for block in range(BLOCKS):
            start = at.offset + block * at.block_stride
            page = at.memory[start : start + at.page_bytes]
            logical = tensors[name].unflatten(0, (BLOCKS, split))[block]
            wanted = logical.permute(0, 2, 1, 3) if encoding == "tokens_first" else logical
            assert page.tobytes() == wanted.contiguous().numpy().tobytes()


def test_pages_with_gaps_are_refused():
    backing = torch.zeros(BLOCKS, HEADS, BLOCK, 4 * DIM)
    with pytest.raises(PlanError, match="page strides"):
        translate._encoding(backing[..., : 2 * DIM], BLOCKS, HEADS)


def record(rank: int, heads: int, total: int, tp: int = 2):
    layer = {
        "name": "layers.0.attn", "kind": "full_attention", "block_size": BLOCK,
        "num_kv_heads": heads, "head_bytes": 64, "total_kv_heads": total,
        "max_tp_shards": total, "dcp_sharded": True, "encoding": "heads_first",
        "dtype": "float32", "tokens_per_state": 1, "page_bytes": heads * BLOCK * 64,
        "engine_page_bytes": heads * BLOCK * 64,
    }  # fmt: skip
    return {
        "rank": rank,
        "group": {"index": 0, "prefix_cacheable": True, "layers": [layer]},
        "strides": {"layers.0.attn": [1]},
        "mesh": {"tp": tp, "dcp": 1, "pcp": 1, "pp": 1},
        "options": {"blocks_per_chunk": 1, "tokens_per_hash": BLOCK},
        "layout": "LBHNC",
        "notes": {"hash_seed": "fixed"},
        "model": {
            "weights": "w", "loading": {}, "text_config": {}, "rope": {}, "dtype": "float32",
            "kv_encoding": "auto/CPU_ATTN", "kv_scales": {},
        },
    }  # fmt: skip


def test_one_head_folds_and_two_do_not():
    one = translate.build_plan([record(r, 1, 1) for r in (0, 1)]).groups[0]
    two = translate.build_plan([record(r, 1, 2) for r in (0, 1)]).groups[0]
    assert [f.replicas for f in one.fragments] == [2]
    assert [f.replicas for f in two.fragments] == [1, 1]
    assert two.chunk_bytes == 2 * one.chunk_bytes


def test_workers_that_differ_are_told_the_first_field():
    other = record(1, 1, 1)
    other["group"]["layers"][0]["dtype"] = "bfloat16"
    with pytest.raises(PlanError) as caught:
        translate.build_plan([record(0, 1, 1), other])
    assert str(caught.value) == (
        "worker 1 group.layers[0].dtype='bfloat16': expected 'float32' as on worker 0"
    )
    with pytest.raises(PlanError, match="worker records"):
        translate.build_plan([record(0, 1, 1)])


def test_the_identity_tells_models_apart_and_nothing_else():
    base = record(0, 2, 2, tp=1)

    def digest(changed):
        return translate.build_identity(changed, translate.build_plan([changed])).digest

    for section, field, value in (
        ("model", "weights", "v"),
        ("model", "dtype", "bfloat16"),
        ("model", "loading", {"quantization": "fp8"}),
        ("model", "kv_encoding", "fp8/CPU_ATTN"),
    ):
        changed = copy.deepcopy(base)
        changed[section][field] = value
        assert digest(changed) != digest(base), field
    seeded = {**base, "notes": {"hash_seed": "1"}}
    assert digest(seeded) == digest(base)
    folded = [record(r, 1, 2) for r in (0, 1)]
    at_tp2 = translate.build_identity(folded[0], translate.build_plan(folded)).digest
    assert at_tp2 == digest(base), "two heads' bytes do not depend on the ranks"


@pytest.mark.parametrize(
    ("algorithm", "seed", "random", "size"),
    [
        ("sha256", None, False, 32),
        ("sha256_cbor", None, False, 32),
        ("xxhash", None, True, 16),
        ("xxhash", "7", False, 16),
    ],
)
def test_hashes_that_no_other_process_can_make_are_noticed(
    monkeypatch, algorithm, seed, random, size
):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    config = engine_config(cache_config__prefix_caching_hash_algo=algorithm)
    assert translate.random_hash_seed(config) == random
    assert translate.hash_bytes(config) == size


def test_plan_options_travel_in_the_record():
    options = PlanOptions(blocks_per_chunk=2, tokens_per_hash=BLOCK)
    records = [{**record(r, 1, 1), "options": vars(options)} for r in (0, 1)]
    assert translate.build_plan(records).groups[0].tokens_per_chunk == 2 * BLOCK
