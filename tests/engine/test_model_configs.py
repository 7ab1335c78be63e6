"""Our layers beside those of vLLM's own models, built from real configurations without weights.

Blocks of models with states are compared by token: aligning a block to a state's page is a step of
other devices than the CPU, and is checked with the engine's shapes. Of ring buffers, which are not
stored, only the size is compared. Layers are found by number and class: some have other names here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from kvfold.errors import ConfigError
from kvfold.mesh import Mesh
from kvfold.models import KV_DTYPES, Model, build, load, shipped
from kvfold.spec import STATE_KINDS, LayerSpec

#: Models that this vLLM cannot build, and its words.
NOT_BUILT = {
    # Its class left vLLM in 0.23; what Transformers offers instead has no caches of states.
    "bamba-9b": "does not dispatch through the Transformers attention interface",
}
CLASSES = dict.fromkeys(STATE_KINDS, "MambaSpec") | {
    "full_attention": "FullAttentionSpec",
    "sliding_window": "SlidingWindowSpec",
    "mla": "MLAAttentionSpec",
    "indexer": "MLAAttentionSpec",
    "sliding_window_mla": "SlidingWindowMLASpec",
    "circular_buffer": "CircularBufferSpec",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM says of every shipped model, from one process that builds them all."""
    script = Path(__file__).with_name("meta_models.py")
    with resources.as_file(resources.files("kvfold.models") / "configs") as configs:
        done = subprocess.run(
            [sys.executable, str(script), str(configs)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            cwd=tmp_path_factory.mktemp("meta"),
        )
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_every_other_model_is_built(engine: dict[str, Any]) -> None:
    assert set(engine) == set(shipped())
    failed = {name: told["error"] for name, told in engine.items() if "error" in told}
    assert set(failed) == set(NOT_BUILT), failed
    for name, why in NOT_BUILT.items():
        assert why in failed[name]


def built(name: str, told: dict[str, Any], tp: int = 1) -> Model:
    dtype = told["cache_dtype"] if told["cache_dtype"] in KV_DTYPES else "auto"
    return build(load(name), Mesh(tp=tp), dtype, told["block_size"])


Row = tuple[Any, ...]


def their_rows(told: dict[str, Any], layers: int, states: bool) -> Counter[Row]:
    rows: Counter[Row] = Counter()
    for name, spec in told["layers"].items():
        number = next(int(part) for part in name.split(".") if part.isdigit())
        # Falcon-H1 numbers the states of its layers after all attention.
        at = (number % layers, spec["class"])
        if spec["class"] == "MambaSpec":
            rows[*at, spec["real_bytes"]] += 1
            continue
        row_bytes = Fraction(spec["real_bytes"], spec["block_size"])
        page = None if states else (spec["block_size"], spec["page_bytes"])
        heads = None if spec["class"] == "CircularBufferSpec" else spec["heads"]
        rows[*at, heads, spec["window"], spec["max_tp_shards"], row_bytes, page] += 1
    return rows


def our_rows(model: Model, states: bool) -> Counter[Row]:
    def row(layer: LayerSpec) -> Row:
        at = (int(layer.name.split(".")[2]), CLASSES[layer.kind])
        if layer.kind in STATE_KINDS:
            return (*at, layer.page_bytes)
        row_bytes = Fraction(layer.page_bytes, layer.block_size)
        shards = layer.max_tp_shards if layer.name in model.engine_declares else None
        page = None if states else (layer.block_size, layer.engine_page_bytes)
        heads = None if layer.kind == "circular_buffer" else layer.num_kv_heads
        return (*at, heads, layer.window, shards, row_bytes, page)

    return Counter(map(row, model.layers))


@pytest.mark.parametrize("name", sorted(set(shipped()) - set(NOT_BUILT)))
def test_layers_have_the_engines_caches(name: str, engine: dict[str, Any]) -> None:
    told = engine[name]
    assert "error" not in told, told
    model = built(name, told)
    states = any(layer.kind in STATE_KINDS for layer in model.layers)
    theirs, ours = their_rows(told, model.config.layers, states), our_rows(model, states)
    assert sum(theirs.values()) == len(model.layers)
    assert not (theirs - ours), (sorted(theirs - ours)[:3], sorted(ours - theirs)[:3])


@pytest.mark.parametrize("name", sorted(set(shipped()) - set(NOT_BUILT)))
def test_heads_follow_the_engines_configuration(name: str, engine: dict[str, Any]) -> None:
    told = engine[name]
    if not told["uniform"]:
        return  # layers differ in heads; at TP 1 they are compared one by one
    for tp, heads in told["heads_at_tp"].items():
        try:
            layers = built(name, told, int(tp)).layers
        except ConfigError:
            continue  # the engine does not run this model at this tp
        plain = [x for x in layers if x.kind in ("full_attention", "sliding_window")]
        if told["use_mla"]:
            assert not plain
        for layer in plain:
            assert layer.num_kv_heads == heads
            if told["cache_dtype"] == "auto":
                assert layer.head_bytes == 2 * 2 * told["head_size"]
