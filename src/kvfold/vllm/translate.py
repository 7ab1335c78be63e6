"""Everything that depends on vLLM's version: its configuration in, kvfold's terms out.

Written for vLLM 0.32. No other module reads a vLLM configuration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)

from kvfold import identity
from kvfold.copy.cpu import LayerPages
from kvfold.errors import FormatError, PlanError
from kvfold.mesh import Mesh
from kvfold.plan import OffloadPlan, PlanOptions, plan
from kvfold.spec import FULL_ATTENTION, MLA, Encoding, GroupSpec, LayerSpec, declared_shards

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUPPORTED = ((0, 32),)
VOLATILE_CONFIG_FIELDS = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
"""Fields of a model's config that do not shape its KV cache, or that the identity has elsewhere."""


def check_supported(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse, by name of the setting, what kvfold cannot offload correctly yet.

    Raises `PlanError`; runs in every process before anything is stored.
    """
    version = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    if version not in SUPPORTED:
        raise PlanError("vllm version", vllm.__version__, "0.32")
    parallel = config.parallel_config
    for field in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "nnodes",
    ):
        if getattr(parallel, field) != 1:
            raise PlanError(field, getattr(parallel, field), "1: kvfold does not support more yet")
    if config.speculative_config is not None:
        method = config.speculative_config.method
        raise PlanError("speculative_config", method, "none: kvfold has no draft layers yet")
    if config.lora_config is not None:
        raise PlanError("lora_config", "enabled", "none: kvfold does not tell adapters apart yet")
    assert config.kv_transfer_config is not None
    if config.kv_transfer_config.kv_role != "kv_both":
        raise PlanError("kv_role", config.kv_transfer_config.kv_role, "kv_both")
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise PlanError("calculate_kv_scales", True, "false: scales differ from run to run")
    if config.device_config.device_type != "cpu":
        raise PlanError(
            "device", config.device_config.device_type, "cpu: other devices have no copy path yet"
        )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(g.kv_cache_spec).__name__ for g in groups}))
        raise PlanError("cache groups", f"{len(groups)} ({kinds})", "one group for all layers")
    for name, spec in layer_specs(kv_cache_config, 0).items():
        _kind(name, spec)


def layer_specs(config: KVCacheConfig, group: int) -> dict[str, AttentionSpec]:
    """Each layer's own spec: containers are unwrapped."""
    spec = config.kv_cache_groups[group].kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return dict(spec.kv_cache_specs)
    return dict.fromkeys(config.kv_cache_groups[group].layer_names, spec)


def _kind(name: str, spec: Any) -> Any:
    if type(spec) is MLAAttentionSpec:
        return MLA
    if type(spec) is FullAttentionSpec and spec.sliding_window is None:
        return FULL_ATTENTION
    raise PlanError(f"layer {name!r} cache", type(spec).__name__, "full attention or MLA")


def total_heads(config: VllmConfig, layer: str) -> int | None:
    """Total KV heads of `layer` over all ranks, by the model's own configuration."""
    from vllm.model_executor.models.utils import extract_layer_index

    arch = config.model_config.model_arch_config
    if arch.per_layer_overrides:
        try:
            arch = arch[extract_layer_index(layer)]
        except (AssertionError, IndexError, ValueError):
            return None
    return int(arch.total_num_kv_heads)


def _encoding(tensor: torch.Tensor, blocks: int, heads: int) -> Encoding:
    """The order inside a page, from the strides of a layer's view [blocks, heads, states, row]."""
    grouped = group_kernel_blocks(tensor, blocks)
    split = grouped.dim() == tensor.dim() + 1
    page = grouped[0]
    if page.numel() * page.element_size() != _page_extent_bytes(page):
        raise PlanError("page strides", tuple(page.stride()), "pages without gaps")
    if split and heads > 1:
        return "opaque"  # kernel blocks of [head, state, row] each: no order of heads as a whole
    inner = page.flatten(0, 1) if split else page
    if inner.is_contiguous():
        return "heads_first"
    return "tokens_first" if inner.transpose(0, 1).is_contiguous() else "opaque"


def _page_extent_bytes(page: torch.Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(page.shape, page.stride(), strict=True))
    return int((last + 1) * page.element_size())


def pages(kv_caches: Mapping[str, torch.Tensor], config: KVCacheConfig) -> dict[str, LayerPages]:
    """Where each layer's pages lie, for group 0. Layers of one allocation share its memory."""
    memory: dict[int, Any] = {}
    found = {}
    for name, spec in layer_specs(config, 0).items():
        tensor = kv_caches[name]
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in memory:
            view = torch.empty(0, dtype=torch.uint8).set_(storage)
            memory[storage.data_ptr()] = view.numpy()
        grouped = group_kernel_blocks(tensor, config.num_blocks)
        found[name] = LayerPages(
            memory[storage.data_ptr()],
            tensor.data_ptr() - storage.data_ptr(),
            grouped.stride(0) * tensor.element_size(),
            spec.unpadded_page_size_bytes,
            config.num_blocks,
        )
    return found


def stage_record(
    config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    options: PlanOptions,
    rank: int,
) -> dict[str, Any]:
    """What this worker knows and the plan needs, JSON-ready. Equal on all ranks but `rank`."""
    specs = layer_specs(kv_cache_config, 0)
    tp = config.parallel_config.tensor_parallel_size
    layers = []
    for name, spec in specs.items():
        kind, tensor = _kind(name, spec), kv_caches[name]
        total = 1 if kind == MLA else total_heads(config, name)
        shards = spec.max_tp_shards
        if shards is None and kind == FULL_ATTENTION:
            shards = declared_shards(spec.num_kv_heads, tp, total)
        heads = spec.num_heads
        layer = LayerSpec(
            name=name,
            kind=kind,
            block_size=spec.block_size,
            num_kv_heads=heads,
            head_bytes=spec.state_content_size_bytes,
            total_kv_heads=total,
            max_tp_shards=shards if heads == spec.num_kv_heads else None,
            dcp_sharded=spec.dcp_sharded,
            encoding=_encoding(tensor, kv_cache_config.num_blocks, heads),
            dtype=str(spec.dtype).removeprefix("torch."),
            tokens_per_state=int(spec.tokens_per_state),
            page_bytes=spec.unpadded_page_size_bytes,
            engine_page_bytes=spec.page_size_bytes,
        )
        layers.append(asdict(layer))
    return {
        "rank": rank,
        "group": {"index": 0, "prefix_cacheable": True, "layers": layers},
        "strides": {name: list(kv_caches[name].stride()) for name in specs},
        "shapes": {name: list(kv_caches[name].shape[1:]) for name in specs},
        "mesh": {"tp": tp, "dcp": 1, "pcp": 1, "pp": 1},
        "options": asdict(options),
        "num_blocks": kv_cache_config.num_blocks,
        "layout": kv_cache_config.kv_cache_layout,
        "model": _model_fields(config, list(specs)),
        "notes": hash_notes(config),
    }


def _model_fields(config: VllmConfig, layers: list[str]) -> dict[str, Any]:
    """The identity's fields that come from the model and not from the plan."""
    model = config.model_config
    text = json.loads(model.hf_text_config.to_json_string(use_diff=False))
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    long = "longrope" in json.dumps(rope)
    contexts = config.compilation_config.static_forward_context
    backends = {contexts[name].get_attn_backend().get_name() for name in layers}
    return {
        "weights": _weights(config),
        "loading": {
            "format": str(config.load_config.load_format),
            "quantization": None if model.quantization is None else str(model.quantization),
            "quantization_config": _plain(model.quantization_config),
        },
        "text_config": {k: v for k, v in text.items() if k not in VOLATILE_CONFIG_FIELDS},
        "rope": {"parameters": rope, "max_model_len": model.max_model_len if long else None},
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_encoding": f"{config.cache_config.cache_dtype}/{'+'.join(sorted(backends))}",
        "kv_scales": {},
    }


def _plain(value: Any) -> Any:
    """A setting in JSON terms: mappings as they are, anything else by its text."""
    return value if value is None or isinstance(value, dict) else str(value)


def _weights(config: VllmConfig) -> str:
    """A digest of the weights as loaded; a model that is not on this disk counts by name and
    revision.
    """
    model = config.model_config
    if str(config.load_config.load_format) == "dummy":
        return f"dummy {model.seed}"
    path = Path(model.model)
    if path.is_file():
        return identity.weights_digest(path.parent, [path.name])
    if not path.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            path = Path(
                snapshot_download(model.model, revision=model.revision, local_files_only=True)
            )
        except (LocalEntryNotFoundError, ValueError):
            return f"{model.model} at {model.revision}"
    try:
        return identity.weights_digest(path)
    except FormatError as error:
        raise PlanError("model", str(path), f"readable weights ({error})") from error


def hash_notes(config: VllmConfig) -> dict[str, Any]:
    """How block hashes are made: inside every key already, told in clear to explain misses."""
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    seed = os.environ.get("PYTHONHASHSEED")
    return {
        "vllm": vllm.__version__,
        "hash_algorithm": algorithm,
        "hash_seed": seed if seed is not None else ("random" if "xx" in algorithm else "fixed"),
    }


def random_hash_seed(config: VllmConfig) -> bool:
    """Whether block hashes differ from process to process, so that nothing can be found again."""
    return bool(hash_notes(config)["hash_seed"] == "random")


def hash_bytes(config: VllmConfig) -> int:
    """Bytes of one block hash."""
    return 16 if "xx" in str(config.cache_config.prefix_caching_hash_algo) else 32


def build_plan(records: list[dict[str, Any]]) -> OffloadPlan:
    """The plan from the records of all workers.

    Raises `PlanError` naming the first field in which two workers differ.
    """
    first = records[0]
    for other in records[1:]:
        mine, theirs = {**first, "rank": None}, {**other, "rank": None}
        field = identity.first_difference(mine, theirs)
        if field is not None:
            raise PlanError(
                f"worker {other['rank']} {field}",
                _at(theirs, field),
                f"{_at(mine, field)!r} as on worker {first['rank']}",
            )
    mesh = Mesh(**first["mesh"])
    ranks = sorted(record["rank"] for record in records)
    if ranks != list(range(mesh.world_size)):
        raise PlanError("worker records", ranks, f"one of each rank 0 to {mesh.world_size - 1}")
    group = first["group"]
    layers = tuple(LayerSpec(**layer) for layer in group["layers"])
    return plan(
        [GroupSpec(group["index"], layers, prefix_cacheable=group["prefix_cacheable"])],
        mesh,
        PlanOptions(**first["options"]),
    )


def _at(record: Any, path: str) -> Any:
    """The value at a path such as `group.layers[0].dtype`, or "absent"."""
    for part in path.replace("[", ".").replace("]", "").split("."):
        try:
            record = record[int(part)] if isinstance(record, list) else record[part]
        except (KeyError, IndexError, ValueError, TypeError):
            return "absent"
    return record


def build_identity(record: Mapping[str, Any], planned: OffloadPlan) -> identity.Identity:
    """The identity of group 0's bytes."""
    group = planned.groups[0]
    layers = {layer.spec.name: layer.spec.block_size for layer in group.layers}
    opaque = identity.opaque_fields(
        group, str(record["layout"]), max(layers.values()), record["strides"]
    )
    return identity.identity(
        identity.IdentityFields(
            **record["model"], group=identity.group_fields(group), opaque=opaque
        ),
        notes=record["notes"],
    )
