"""What must be equal for bytes to be interchangeable, and what must not matter."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from kvfold.errors import ConfigError, FormatError
from kvfold.identity import (
    WINDOW_BYTES,
    IdentityFields,
    chunk_keys,
    first_difference,
    group_fields,
    identity,
    namespace,
    opaque_fields,
    weights_digest,
)
from kvfold.mesh import Mesh
from kvfold.plan import GroupPlan, PlanOptions, plan
from kvfold.spec import GroupSpec, LayerSpec


def attention(tp: int = 1, **changes: Any) -> LayerSpec:
    fields: dict[str, Any] = {
        "name": "a",
        "kind": "full_attention",
        "block_size": 16,
        "num_kv_heads": max(1, 4 // tp),
        "head_bytes": 64,
        "max_tp_shards": 4,
    }
    return LayerSpec(**(fields | changes))


def group(layer: LayerSpec | None = None, mesh: Mesh | None = None, blocks: int = 1) -> GroupPlan:
    spec = GroupSpec.of(0, layer or attention(), (mesh or Mesh()).pp - 1)
    return plan([spec], mesh or Mesh(), PlanOptions(blocks)).groups[0]


def given(**changes: Any) -> IdentityFields:
    fields: dict[str, Any] = {
        "weights": "0" * 64,
        "text_config": {"hidden_size": 576, "layers": 30},
        "rope": {"type": "default", "theta": 10000.0},
        "dtype": "bfloat16",
        "kv_encoding": "auto",
        "kv_scales": {},
        "loading": {"format": "auto", "quantization": None},
        "group": group_fields(group()),
    }
    return IdentityFields(**(fields | changes))


def test_the_text_is_the_fields_in_clear_and_the_digest_is_of_them() -> None:
    made = identity({"b": 1, "a": [True, None, "é"]}, {"seed": 7})
    assert made.text == '{"fields":{"a":[true,null,"\\u00e9"],"b":1},"notes":{"seed":7}}'
    expected = hashlib.sha256(b'{"a":[true,null,"\\u00e9"],"b":1}').digest()
    assert made.digest == expected
    assert identity(given()).digest == identity(given().values()).digest
    assert json.loads(identity(given()).text)["fields"]["format"] == 1


def test_notes_explain_but_do_not_separate() -> None:
    assert identity(given(), {"seed": 1}).digest == identity(given(), {"seed": 2}).digest
    assert identity(given(), {"seed": 1}).text != identity(given(), {"seed": 2}).text


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": "1" * 64},
        {"text_config": {"hidden_size": 576, "layers": 31}},
        {"rope": {"type": "longrope"}},
        {"dtype": "float16"},
        {"kv_encoding": "fp8"},
        {"kv_scales": {"a": [1.0, 2.0]}},
        {"loading": {"format": "auto", "quantization": "fp8"}},
        {"group": group_fields(group(blocks=2))},
        {"group": group_fields(group(attention(name="b")))},
        {"group": group_fields(group(attention(head_bytes=128)))},
        {"group": group_fields(group(attention(dtype="uint8")))},
        {"group": group_fields(group(attention(block_size=32)))},
    ],
)
def test_every_field_separates(changes: dict[str, Any]) -> None:
    changed = given(**changes)
    assert identity(changed).digest != identity(given()).digest
    path = first_difference(identity(given()).text, identity(changed).text)
    assert path is not None
    assert path.startswith(f"fields.{next(iter(changes))}")


@pytest.mark.parametrize(
    ("layer", "mesh"),
    [
        (attention(2), Mesh(tp=2)),
        (attention(8), Mesh(tp=8)),
        (attention(8, block_size=8), Mesh(tp=8, dcp=2)),
        (attention(2), Mesh(tp=2, pp=2)),
        (attention(encoding="tokens_first"), Mesh()),
        (attention(encoding="halves_heads_first"), Mesh()),
        (attention(2, encoding="halves_tokens_first", key_bytes=9), Mesh(tp=2)),
        (attention(engine_page_bytes=8192), Mesh()),
        (attention(total_kv_heads=4), Mesh()),
    ],
)
def test_topology_and_page_order_do_not_matter_where_pages_are_understood(
    layer: LayerSpec, mesh: Mesh
) -> None:
    assert group_fields(group(layer, mesh)) == group_fields(group())


def test_where_v_begins_matters_in_pages_kept_whole() -> None:
    def kept(key_bytes: int) -> Any:
        layer = attention(2, max_tp_shards=None, encoding="halves_heads_first", key_bytes=key_bytes)
        return group_fields(group(layer, Mesh(tp=2)))

    assert first_difference(kept(9), kept(10)) == "layers[0].kept_whole.key_bytes"


@pytest.mark.parametrize(
    "layer", [attention(2, encoding="opaque"), attention(2, max_tp_shards=None)]
)
def test_pages_kept_whole_bring_layout_and_topology(layer: LayerSpec) -> None:
    bound = group(layer, Mesh(tp=2))
    fields = opaque_fields(bound, "LBHNC", 16, {"a": [64, 4], "elsewhere": [1, 1]})
    assert fields is not None
    assert fields["topology"]["tp"] == 2
    assert fields["strides"] == {"a": [64, 4]}
    whole = given(group=group_fields(bound), opaque=fields)
    moved = given(group=group_fields(bound), opaque=fields | {"layout": "LBNHC"})
    assert identity(whole).digest != identity(moved).digest
    with pytest.raises(ConfigError, match="identity opaque"):
        given(group=group_fields(bound))


def test_understood_pages_take_no_layout() -> None:
    assert opaque_fields(group(), "LBHNC", 16, {"a": [1]}) is None
    with pytest.raises(ConfigError, match="identity opaque"):
        given(opaque={"layout": "LBHNC"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights", ""),
        ("dtype", None),
        ("kv_encoding", 8),
        ("text_config", "x"),
        ("rope", None),
        ("kv_scales", 1.0),
        ("loading", "auto"),
        ("group", {}),
    ],
)
def test_bad_fields_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"identity {name}"):
        given(**{name: value})


@pytest.mark.parametrize("value", [float("nan"), b"bytes", {1, 2}])
def test_values_without_a_json_form_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="JSON"):
        identity({"field": value})


def test_namespaces_differ_by_identity_group_and_epoch() -> None:
    one, two = bytes(32), bytes(31) + b"\1"
    made = {
        namespace(one, 0),
        namespace(two, 0),
        namespace(one, 1),
        namespace(one, 0, bytes(16)),
        namespace(one, 0, bytes(15) + b"\1"),
    }
    assert len(made) == 5
    assert all(len(name) == 32 for name in made)
    assert namespace(one, 0, b"") == namespace(one, 0)
    with pytest.raises(ConfigError, match="identity digest"):
        namespace(b"short", 0)


@pytest.mark.parametrize("hash_bytes", [1, 8, 16, 31, 32])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_keys_are_padded_hashes_xor_the_namespace(hash_bytes: int, count: int) -> None:
    space = hashlib.sha256(b"space").digest()
    hashes = [hashlib.sha256(b"%d" % i).digest()[:hash_bytes] for i in range(count)]
    expected = b"".join(
        bytes(x ^ y for x, y in zip(h.ljust(32, b"\0"), space, strict=True)) for h in hashes
    )
    assert chunk_keys(space, b"".join(hashes), hash_bytes) == expected


@pytest.mark.parametrize(
    ("space", "hashes", "hash_bytes", "named"),
    [
        (bytes(31), b"", 32, "namespace"),
        (bytes(32), bytes(64), 64, "block hash bytes"),
        (bytes(32), b"", 0, "block hash bytes"),
        (bytes(32), bytes(33), 32, "block hashes"),
    ],
)
def test_hashes_that_do_not_fit_are_refused(
    space: bytes, hashes: bytes, hash_bytes: int, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        chunk_keys(space, hashes, hash_bytes)


@pytest.mark.parametrize(
    ("a", "b", "path"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": 1, "b": {"c": [1, 2]}}, {"a": 1, "b": {"c": [1, 3]}}, "b.c[1]"),
        ({"a": 2, "b": 1}, {"a": 1, "b": 2}, "a"),
        ({"a": 1}, {"a": 1, "b": None}, "b"),
        ([1, 2], [1, 2, 3], "[2]"),
        ({"a": [{"x": 1}]}, {"a": [{"x": "1"}]}, "a[0].x"),
        ({"a": True}, {"a": 1}, "a"),
        ({"a": (1, 2)}, {"a": [1, 2]}, None),
        ('{"a": {"b": 1}}', '{"a": {"b": 2}}', "a.b"),
        ("text", "other", "value"),
    ],
)
def test_the_first_field_that_differs(a: Any, b: Any, path: str | None) -> None:
    assert first_difference(a, b) == path
    assert (first_difference(b, a) is None) == (path is None)


def safetensors(folder: Path, name: str, payload: bytes, header: dict[str, Any]) -> Path:
    text = json.dumps(header).encode()
    path = folder / name
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    header = {"w": {"dtype": "U8", "shape": [4_000_000], "data_offsets": [0, 4_000_000]}}
    safetensors(tmp_path, "model-1.safetensors", bytes(4_000_000), header)
    (tmp_path / "extra.gguf").write_bytes(bytes(100_000))
    (tmp_path / "config.json").write_text('{"model_type": "x", "quantization_config": {"bits": 8}}')
    return tmp_path


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def test_equal_weights_have_equal_digests(model: Path, tmp_path_factory: Any) -> None:
    other = tmp_path_factory.mktemp("copy")
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "README.md").write_text("not weights")
    assert weights_digest(other) == weights_digest(model)


@pytest.mark.parametrize("offset", [300, 60_000, 262_500, -WINDOW_BYTES, -1])
def test_sampled_bytes_count(model: Path, offset: int) -> None:
    before = weights_digest(model)
    path = model / "model-1.safetensors"
    overwrite(path, offset % path.stat().st_size, b"\1")
    assert weights_digest(model) != before


def test_a_small_file_counts_in_every_byte(model: Path) -> None:
    seen = {weights_digest(model)}
    for offset in (0, 65_535, 65_536, 99_999):
        overwrite(model / "extra.gguf", offset, b"\1")
        seen.add(weights_digest(model))
    assert len(seen) == 5


def test_name_size_header_and_quantisation_count(model: Path) -> None:
    seen = {weights_digest(model)}
    (model / "extra.gguf").rename(model / "other.gguf")
    seen.add(weights_digest(model))
    with (model / "other.gguf").open("ab") as file:
        file.write(b"\0")
    seen.add(weights_digest(model))
    overwrite(model / "model-1.safetensors", 8, b'{"v"')
    seen.add(weights_digest(model))
    (model / "config.json").write_text('{"model_type": "x", "quantization_config": {"bits": 4}}')
    seen.add(weights_digest(model))
    (model / "hf_quant_config.json").write_text('{"kv": "fp8"}')
    seen.add(weights_digest(model))
    assert len(seen) == 6
    before = weights_digest(model)
    (model / "config.json").write_text('{"model_type": "y", "quantization_config": {"bits": 4}}')
    assert weights_digest(model) == before  # the config itself is another field of the identity


def test_listed_files_replace_the_search(model: Path) -> None:
    assert weights_digest(model, ["extra.gguf"]) != weights_digest(model)
    with pytest.raises(ConfigError, match="weight file"):
        weights_digest(model, ["missing.gguf"])


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model folder"):
        weights_digest(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\x08\0\0", (200).to_bytes(8, "little") + b"{}", b"\xff" * 8 + bytes(64)]
)
def test_a_damaged_header_is_refused_before_it_is_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match="safetensors"):
        weights_digest(tmp_path)


def test_a_damaged_quantisation_file_is_refused(model: Path) -> None:
    (model / "config.json").write_text("{")
    with pytest.raises(FormatError, match=r"config\.json"):
        weights_digest(model)
