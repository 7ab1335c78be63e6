"""vLLM's configuration in kvfold's terms: what is refused, and what a worker tells of itself."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import CircularBufferSpec, UniformTypeKVCacheSpecs
from vllm_configs import (
    BLOCK,
    BLOCKS,
    DIM,
    HEADS,
    HfConfig,
    engine_config,
    full,
    group,
    kv_config,
    mla,
    model_config,
    speculative,
    state,
    states,
    view,
)

from kvfold.errors import PlanError
from kvfold.mesh import Mesh
from kvfold.vllm import translate
from kvfold.vllm.agreement import agree


def ring():
    return CircularBufferSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)


def hybrid(**changes):
    """Attention and its draft, a ring outside prefix caching, states."""
    return kv_config(
        group(full(), "layers.0.attn", "layers.1.attn", "layers.4.attn"),
        group(ring(), "layers.0.ring"),
        group(state(), "layers.2.state"),
        **changes,
    )


def caches():
    names = ("layers.0.attn", "layers.1.attn", "layers.4.attn")
    tensors = dict(zip(names, view("LBHNC", 3, HEADS, 2 * DIM), strict=True))
    return {**tensors, "layers.2.state": states()[0]}


def recorded(config=None, kv=None, rank=0, blocks=1):
    config = config or engine_config(speculative_config=speculative())
    return translate.stage_record(config, kv or hybrid(), caches(), blocks, rank)


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel_config__pipeline_parallel_size": 2},
        {"parallel_config__prefill_context_parallel_size": 2},
        {"parallel_config__decode_context_parallel_size": 2},
        {"speculative_config": speculative()},
        {"lora_config": object()},
    ],
)
def test_what_is_supported_passes(changes):
    config = engine_config(**changes)
    translate.check_supported(config, kv_config(group(full())))
    translate.check_supported(config, kv_config(group(mla()), group(state())))
    translate.check_supported(config, hybrid())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parallel_config__nnodes": 2}, "nnodes=2"),
        ({"speculative_config": speculative("extract_hidden_states")}, "speculative_config='ext"),
        ({"kv_transfer_config__kv_role": "kv_consumer"}, "kv_role='kv_consumer'"),
        ({"cache_config__calculate_kv_scales": True}, "calculate_kv_scales=True"),
        ({"device_config__device_type": "cuda"}, "device='cuda'"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(change, named):
    with pytest.raises(PlanError) as caught:
        translate.check_supported(engine_config(**change), hybrid())
    assert str(caught.value).startswith(named)


def test_caches_that_cannot_be_stored_are_refused_by_layer():
    with pytest.raises(PlanError, match=r"layer 'layers.0.attn' mamba_cache_mode='none'"):
        translate.check_supported(engine_config(), kv_config(group(state(mode="none"))))
    resident = group(full(), "layers.0.attn", host_resident=True)
    with pytest.raises(PlanError, match="cache group 1='host resident'"):
        translate.check_supported(engine_config(), kv_config(group(mla(), "a"), resident))


@pytest.mark.parametrize("version", ["0.33.1", "0.30.0", "1.32.0"])
def test_another_version_is_refused(monkeypatch, version):
    monkeypatch.setattr(translate.vllm, "__version__", version)
    with pytest.raises(PlanError, match=rf"vllm version='{version}': expected 0.31 or 0.32"):
        translate.check_supported(engine_config(), hybrid())


# -- the record --------------------------------------------------------------------------------


def test_a_record_has_every_group_in_its_place():
    record = recorded(rank=3, blocks=2)
    assert json.loads(json.dumps(record)) == record
    attention, scratch, gdn = record["groups"]
    skeletons = [{k: v for k, v in g.items() if k != "layers"} for g in record["groups"]]
    assert skeletons == [
        {"index": 0, "prefix_cacheable": True, "block_size": 16, "mode": ""},
        {"index": 1, "prefix_cacheable": False, "block_size": 4, "mode": ""},
        {"index": 2, "prefix_cacheable": True, "block_size": 32, "mode": "align"},
    ]
    assert scratch["layers"] == []
    assert [layer["spec"]["name"] for layer in gdn["layers"]] == ["layers.2.state"]
    drafts = {layer["spec"]["name"]: layer["draft"] for layer in attention["layers"]}
    assert drafts == {"layers.0.attn": False, "layers.1.attn": False, "layers.4.attn": True}
    assert (record["rank"], record["blocks_per_chunk"]) == (3, 2)
    assert (record["tokens_per_hash"], record["num_blocks"]) == (BLOCK, BLOCKS)
    assert record["layout"] == "LBHNC"
    assert set(record["strides"]) == set(record["shapes"]) == set(record["backends"])
    assert set(record["strides"]) == {*drafts, "layers.2.state"}
    assert record["strides"]["layers.0.attn"] == [256, 16, 1], "without the distance of blocks"


def test_the_alignment_of_hits_is_the_engine_s_or_a_hash():
    assert recorded(kv=hybrid(cache_hit_alignment_tokens=32))["alignment_tokens"] == 32
    assert recorded(kv=hybrid())["alignment_tokens"] == BLOCK


def test_a_record_is_what_the_plan_is_built_from():
    agreed = agree([recorded(kv=hybrid(cache_hit_alignment_tokens=32))])
    assert agreed.period_tokens == 32
    assert [(g.index, g.is_draft) for g in agreed.plan.stored] == [
        (0, False),
        (0, True),
        (2, False),
    ]
    assert agreed.modes == ("", "", "align")
    assert [g.chunk_bytes for g in agreed.plan.stored] == [2 * 2 * 2048, 2 * 2048, 40]


def test_layers_that_read_another_s_cache_are_not_stored():
    shared = SimpleNamespace(kv_sharing_target_layer_name="layers.0.attn")
    config = engine_config(compilation_config__static_forward_context={"layers.1.attn": shared})
    names = [layer["spec"]["name"] for layer in recorded(config)["groups"][0]["layers"]]
    assert names == ["layers.0.attn", "layers.4.attn"]


def test_containers_are_unwrapped():
    specs = {"layers.2.state": state()}
    container = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)
    kv = kv_config(group(container, "layers.2.state"))
    (found,) = recorded(kv=kv)["groups"]
    assert found["mode"] == "align"
    assert [layer["spec"]["kind"] for layer in found["layers"]] == ["gdn"]


def test_a_group_that_is_not_transferred_takes_no_part():
    kv = kv_config(group(full(), "layers.0.attn", enable_kv_transfer=False), group(mla(), "b"))
    assert not translate.participates(kv, 0)
    assert translate.participates(kv, 1)


def test_a_backend_is_named_if_it_has_a_name():
    class Named:
        def get_attn_backend(self):
            return SimpleNamespace(get_name=lambda: "CPU_ATTN")

    class Other:
        def get_attn_backend(self):
            raise NotImplementedError

    context = {"layers.0.attn": Named(), "layers.2.state": Other()}
    backends = recorded(engine_config(compilation_config__static_forward_context=context))
    assert backends["backends"]["layers.0.attn"] == "CPU_ATTN"
    assert backends["backends"]["layers.2.state"] == "Other"


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("model.layers.3.self_attn.attn", False),
        ("model.layers.4.self_attn.attn", True),
        ("draft_model.layers.0.attn", True),
        ("encoder", False),
    ],
)
def test_draft_layers_are_those_behind_the_target_s(name, draft):
    assert translate.is_draft(engine_config(speculative_config=speculative()), name) is draft
    assert not translate.is_draft(engine_config(), name)


# -- the model ---------------------------------------------------------------------------------


def model(**changes):
    return recorded(engine_config(**changes))["model"]


def test_the_model_s_fields():
    assert model() == {
        "weights": "dummy 0",
        "loading": {"format": "dummy", "quantization": None, "quantization_config": None},
        "text_config": {"hidden_size": 64},
        "rope": {"parameters": {}, "max_model_len": None},
        "dtype": "float32",
        "kv_encoding": "auto",
        "kv_scales": {},
    }


def test_the_length_of_a_model_counts_for_its_rope_only():
    short = model(model_config=model_config(max_model_len=128))
    assert short == model()
    rope = HfConfig(rope_parameters={"rope_type": "longrope"})
    long = [model(model_config=model_config(hf_text_config=rope, max_model_len=n)) for n in (1, 2)]
    assert long[0] != long[1]


def test_weights_count_by_their_bytes(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"one")
    changes = {"load_config__load_format": "auto"}
    found = model(**changes, model_config=model_config(model=str(tmp_path)))["weights"]
    single = str(tmp_path / "model.bin")
    assert model(**changes, model_config=model_config(model=single))["weights"] == found
    (tmp_path / "model.bin").write_bytes(b"two")
    assert model(**changes, model_config=model_config(model=str(tmp_path)))["weights"] != found


def test_weights_that_are_not_here_count_by_name_and_revision(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("organisation/nothing-of-this-name", "s3://not a name"):
        elsewhere = model_config(model=name, revision="r")
        found = model(load_config__load_format="auto", model_config=elsewhere)["weights"]
        assert found == f"{name} at r"


def test_damaged_weights_are_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(PlanError, match="readable weights"):
        model(load_config__load_format="auto", model_config=model_config(model=str(tmp_path)))


def test_a_draft_is_told_with_its_weights():
    assert recorded(engine_config())["draft"] is None
    own = recorded(engine_config(speculative_config=speculative(seed=7, dtype=torch.bfloat16)))
    assert own["draft"] == {
        "method": "mtp", "weights": "dummy 7", "text_config": {"hidden_size": 64},
        "quantization": None, "dtype": "bfloat16",
    }  # fmt: skip
    ngram = SimpleNamespace(method="ngram", num_speculative_tokens=2, draft_model_config=None)
    assert recorded(engine_config(speculative_config=ngram))["draft"] is None


# -- single settings ---------------------------------------------------------------------------


def test_the_mesh():
    config = engine_config(
        parallel_config__tensor_parallel_size=4,
        parallel_config__decode_context_parallel_size=2,
        parallel_config__pipeline_parallel_size=3,
        parallel_config__cp_kv_cache_interleave_size=8,
    )
    assert translate.mesh(config) == Mesh(tp=4, dcp=2, pcp=1, pp=3, dcp_interleave=8)


def test_a_draft_lags_by_what_may_be_rejected():
    assert translate.draft_lag(engine_config()) == 0
    assert translate.draft_lag(engine_config(speculative_config=speculative(tokens=3))) == 4
    none = speculative(tokens=None)
    assert translate.draft_lag(engine_config(speculative_config=none)) == 1


def test_events():
    assert not translate.events_enabled(engine_config())
    for enabled in (True, False):
        events = SimpleNamespace(enable_kv_cache_events=enabled)
        assert translate.events_enabled(engine_config(kv_events_config=events)) is enabled


def test_adapters_of_requests():
    lora = SimpleNamespace(lora_int_id=3, lora_path="/a")
    assert translate.adapter(SimpleNamespace(lora_request=None)) is None
    assert translate.adapter(SimpleNamespace(lora_request=lora)) == (3, "/a")


def test_a_junction_is_never_moved_back():
    request = SimpleNamespace(shared_prefix_boundary=64)
    translate.mark_junction(request, 32)
    assert request.shared_prefix_boundary == 64
    translate.mark_junction(request, 96)
    assert request.shared_prefix_boundary == 96


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
