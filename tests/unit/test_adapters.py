"""Adapters as a part of keys: their files, not their names."""

from __future__ import annotations

import os

import pytest
from scheduler_bench import FULL, SPAN, STATE, Bench, hybrid, index_of

from kvfold.vllm.adapters import Adapters
from kvfold.vllm.storing import masked


@pytest.fixture
def folder(tmp_path):
    return adapter(tmp_path / "a")


def adapter(path, weights=b"weights", config=b'{"r": 8}'):
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_bytes(config)
    (path / "adapter_model.bin").write_bytes(weights)
    return path


def mask(path, number=1, known=None):
    return (known or Adapters()).mask(number, str(path))


def test_the_same_files_have_the_same_mask_in_every_engine(folder, tmp_path):
    found = mask(folder)
    assert len(found) == 32
    assert any(found)
    assert mask(adapter(tmp_path / "copy"), number=7) == found


@pytest.mark.parametrize(
    "changes", [{"weights": b"wEights"}, {"weights": b"weights!"}, {"config": b'{"r": 16}'}]
)
def test_other_weights_or_settings_have_another_mask(folder, tmp_path, changes):
    assert mask(adapter(tmp_path / "other", **changes)) != mask(folder)


def test_a_file_of_another_name_counts(folder):
    before = mask(folder)
    (folder / "new_embeddings.bin").write_bytes(b"")
    assert mask(folder) != before


def test_an_adapter_is_read_once_and_never_again_after_its_files_changed(folder, caplog):
    known = Adapters()
    found = mask(folder, known=known)
    assert mask(folder, known=known) == found
    adapter(folder, weights=b"retrained")
    assert mask(folder, known=known) is None
    assert "have changed while the engine runs" in caplog.text
    caplog.clear()
    adapter(folder)
    assert mask(folder, known=known) is None, "nobody knows which weights the engine has"
    assert not caplog.text, "said once"


def test_a_touched_file_counts_as_changed(folder):
    known = Adapters()
    assert mask(folder, known=known) is not None
    os.utime(folder / "adapter_model.bin", ns=(1, 1))
    assert mask(folder, known=known) is None


def test_folders_are_no_files_of_an_adapter(folder):
    before = mask(folder)
    (folder / "checkpoints").mkdir()
    assert mask(folder) == before


def test_an_adapter_that_is_not_here_has_no_keys(tmp_path, caplog):
    known = Adapters()
    for _ in range(2):
        assert mask(tmp_path / "organisation" / "name", known=known) is None
    assert caplog.text.count("are not cached") == 1
    empty = tmp_path / "empty"
    empty.mkdir()
    assert mask(empty, known=known) is None
    damaged = adapter(tmp_path / "damaged")
    (damaged / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    assert mask(damaged, known=known) is None


def test_an_adapter_that_vanished_for_a_while_is_known_again(folder):
    known = Adapters()
    found = mask(folder, known=known)
    folder.rename(folder.with_name("away"))
    assert mask(folder, known=known) is None
    folder.with_name("away").rename(folder)
    assert mask(folder, known=known) == found


def test_one_id_for_two_adapters_has_no_keys(folder, tmp_path):
    other = adapter(tmp_path / "b", weights=b"Weights")
    for path in (folder, other):
        for name in ("adapter_config.json", "adapter_model.bin"):
            os.utime(path / name, ns=(1, 1))
    known = Adapters()
    assert mask(folder, number=1, known=known) is not None
    assert mask(other, number=1, known=known) is None
    assert mask(folder, number=1, known=known) is None, "nobody knows which one the engine has"
    assert mask(other, number=2, known=known) is not None


def test_a_mask_is_mixed_into_a_namespace():
    space = bytes(range(32))
    assert masked(space, b"") == space
    assert masked(space, bytes(31) + b"\x01") == bytes([*range(31), 30])


# -- in the scheduler's side -------------------------------------------------------------------


def test_requests_with_an_adapter_have_keys_of_their_own(folder):
    bench = hybrid()
    bench.arrive("plain", 300, know=4)
    request = bench.arrive("a", 300, lora=(1, folder))
    assert bench.offer(request) == 0
    mix = mask(folder)
    bench.know(request, range(4), mask=mix)
    bench.now += 1
    assert bench.offer(request) == 256
    full, _, state, _ = bench.load_of(request, 256).parts
    assert full.keys == b"".join(bench.key(request, c, FULL, mix) for c in range(4))
    assert state.keys == bench.key(request, 3, STATE, mix)


def test_what_an_adapter_s_request_computes_is_stored_under_its_keys(folder):
    bench = Bench()
    request = bench.compute(bench.arrive("a", 40, lora=(1, folder)))
    (order,) = bench.step((request, 40)).stores
    mix = mask(folder)
    assert order.keys == bench.key(request, 0, 0, mix) + bench.key(request, 1, 0, mix)
    assert order.namespace == bench.side.namespaces[0]


def test_until_the_files_are_read_nothing_is_stored_and_then_all_is(folder):
    bench = Bench()
    bench.io.inline = False
    request = bench.compute(bench.arrive("a", 80, lora=(1, folder)))
    assert not bench.step((request, 40)).stores
    bench.io.run()
    (order,) = bench.step((request, 1)).stores
    mix = mask(folder)
    assert order.keys == bench.key(request, 0, 0, mix) + bench.key(request, 1, 0, mix)


def test_a_request_that_must_not_read_still_stores(folder):
    bench = Bench()
    request = bench.arrive("a", 40, lora=(1, folder), skip_reading_prefix_cache=True)
    assert bench.offer(request) == 0
    (order,) = bench.step((bench.compute(request), 40)).stores
    assert order.keys[:32] == bench.key(request, 0, 0, mask(folder))


def test_an_adapter_retrained_in_place_neither_loads_nor_stores(folder):
    bench = hybrid()
    mix = mask(folder)
    first = bench.arrive("a", 300, lora=(1, folder))
    bench.know(first, range(4), mask=mix)
    adapter(folder, weights=b"retrained")
    again = bench.arrive("b", 300, lora=(1, folder))
    assert bench.offer(again) == 0
    block = bench.compute(again) and bench.ids("b", 3)[0]
    assert not bench.step((again, 300), handed={"b": [(3, block, 128)]}).stores
    bench.finish(again)
    assert not bench.step().stores


def test_an_adapter_retrained_between_two_engines_is_missed(folder):
    before = Bench()
    request = before.arrive("a", 80, lora=(1, folder))
    before.know(request, range(4), mask=mask(folder))
    adapter(folder, weights=b"retrained")
    after = Bench()
    after.store.tiers = before.store.tiers
    assert after.offer(after.arrive("a", 80, lora=(1, folder))) == 0
    adapter(folder)
    restored = Bench()
    restored.store.tiers = before.store.tiers
    assert restored.offer(restored.arrive("a", 80, lora=(1, folder))) == 4 * SPAN


def test_an_adapter_that_is_not_here_is_a_miss_and_no_error(tmp_path):
    bench = hybrid()
    request = bench.compute(bench.arrive("a", 300, lora=(1, tmp_path / "gone")))
    assert bench.offer(request) == 0
    orders = bench.step((request, 300), handed={"a": [(3, bench.ids("a", 3)[0], 128)]})
    assert not orders.stores
    plain = bench.compute(bench.arrive("b", 300))
    assert index_of(bench.step((plain, 300)), FULL).keys == bench.keys(plain, range(4), FULL)
