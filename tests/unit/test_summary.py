"""The summary at start: groups, slots, what copies would take, how many tokens the tiers hold."""

from __future__ import annotations

import pytest
from scheduler_bench import agreed
from small_specs import group, outside

from kvfold.mesh import Mesh
from kvfold.vllm.requests import Geometry
from kvfold.vllm.settings import ConnectorSettings
from kvfold.vllm.summary import summary

HYBRID = [
    group(0, "mla", 16, total_kv_heads=1, max_tp_shards=1, head_bytes=1024),
    outside(1),
    group(2, "sliding_window", 16, window=33, total_kv_heads=4, max_tp_shards=4, head_bytes=64),
    group(3, "gdn", 64, head_bytes=9000),
]


def lines(groups, settings, **options):
    planned = agreed(groups, **options)
    known = Geometry.of(planned, hash_bytes=32, num_blocks=100, max_step_tokens=2048)
    return summary(planned, known, ConnectorSettings.parse(settings)).splitlines()


def test_every_group_has_a_line_and_the_tiers_count_tokens():
    settings = {"host": "1GiB", "disk": "10GiB", "disk_path": "/d"}
    options = {"alignment": 64, "hash_tokens": 16, "modes": {3: "align"}, "mesh": Mesh(tp=2)}
    text = lines(HYBRID, settings, **options)
    assert text[:6] == [
        "kvfold: 3 layers in 3 groups, hits every 64 tokens, 1 groups outside prefix caching",
        "  0 mla: 1 layers, 64 tokens in 64 KiB, TP copies would take 128 KiB",
        "  2 sliding_window: 1 layers, 32 tokens in 8 KiB",
        "  3 gdn: 1 layers, 1 state in 20 KiB",
        f"  host 1 GiB: up to {(1 << 30) * 64 // (72 << 10):,} tokens",
        f"  disk 10 GiB: up to {(10 << 30) * 64 // (72 << 10):,} tokens",
    ]
    assert "\n".join(text[6:]) == agreed(HYBRID, **options).plan.explain()


def test_one_group_without_a_disk():
    text = lines([group(0)], {"host": "1MiB"})
    assert text[:4] == [
        "kvfold: 1 layers in 1 groups, hits every 16 tokens",
        "  0 full_attention: 1 layers, 16 tokens in 4 KiB",
        "  host 1 MiB: up to 4,096 tokens",
        "  disk none",
    ]


@pytest.mark.parametrize("blocks", [1, 4])
def test_chunks_of_several_blocks_are_named_by_their_tokens(blocks):
    text = lines([group(0)], {"host": "1MiB"}, chunk=blocks)
    assert f"hits every {16 * blocks} tokens" in text[0]
    assert f" {16 * blocks} tokens in 4 KiB" in text[1]


def test_an_engine_of_states_alone_has_no_tokens_to_count():
    text = lines([group(0, "gdn", 64)], {"host": "1MiB"}, alignment=64, modes={0: "align"})
    assert text[2] == "  host 1 MiB"
