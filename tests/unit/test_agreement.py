"""What all processes of an engine agree on: records of stages in, one plan and identities out."""

from __future__ import annotations

import copy
import json
import random

import pytest

pytest.importorskip("vllm")

from small_specs import layer
from stage_records import group_record, record

from kvfold.errors import ConfigError, PlanError
from kvfold.identity import first_difference
from kvfold.vllm.agreement import agree, all_records, copies_bytes


def heads(name, total=2, own=1, **changes):
    return layer(name, num_kv_heads=own, total_kv_heads=total, max_tp_shards=total, **changes)


def latent(name, **changes):
    return layer(name, "mla", total_kv_heads=1, max_tp_shards=1, **changes)


def tp2(*groups, **changes):
    return [record(rank, groups, tp=2, **changes) for rank in (0, 1)]


def hybrid(stage=0, pp=1):
    """One stage of a hybrid: attention, scratch, states; the draft is on the last stage."""
    n = 2 * stage
    drafts = [heads("mtp.9", own=2)] if stage == pp - 1 else []
    return [
        group_record(0, *(heads(f"layers.{i}", own=2) for i in (n, n + 1)), drafts=drafts),
        group_record(1, cached=False, block=4),
        group_record(2, layer(f"states.{n}", "gdn", 32), mode="align", block=32),
    ]


def stages(pp=2, **changes):
    return [record(stage, hybrid(stage, pp), pp=pp, **changes) for stage in range(pp)]


def refusal(records):
    with pytest.raises(PlanError) as caught:
        agree(records)
    return str(caught.value)


# -- the plan ----------------------------------------------------------------------------------


def test_one_head_folds_and_two_do_not():
    one = agree(tp2(group_record(0, heads("a", total=1))))
    two = agree(tp2(group_record(0, heads("a", total=2))))
    assert [f.replicas for f in one.plan.stored[0].fragments] == [2]
    assert [f.replicas for f in two.plan.stored[0].fragments] == [1, 1]
    assert two.plan.stored[0].chunk_bytes == 2 * one.plan.stored[0].chunk_bytes
    assert copies_bytes(one, 0) == copies_bytes(two, 0) == two.plan.stored[0].chunk_bytes


def test_what_copies_take_counts_every_block_of_a_chunk():
    records = tp2(group_record(0, latent("a", block=16)), blocks_per_chunk=4)
    agreed = agree(records)
    assert agreed.period_tokens == 64
    assert copies_bytes(agreed, 0) == 2 * agreed.plan.stored[0].chunk_bytes == 2 * 4 * 16 * 4


def test_the_union_of_all_stages_is_planned():
    agreed = agree(stages())
    attention, states, draft = (agreed.plan.stored[i] for i in (0, 2, 1))
    assert [(g.index, g.is_draft) for g in agreed.plan.groups] == [
        (0, False), (0, True), (1, False), (2, False),
    ]  # fmt: skip
    assert [(la.spec.name, la.placement.stage) for la in attention.layers] == [
        ("layers.0", 0), ("layers.1", 0), ("layers.2", 1), ("layers.3", 1),
    ]  # fmt: skip
    assert [(la.spec.name, la.placement.stage) for la in states.layers] == [
        ("states.0", 0), ("states.2", 1),
    ]  # fmt: skip
    assert [(la.spec.name, la.placement.stage) for la in draft.layers] == [("mtp.9", 1)]
    assert agreed.modes == ("", "", "align")
    assert not agreed.plan.groups[2].participating
    assert len(agreed.identities) == 3


def test_states_do_not_bind_the_period_but_their_alignment():
    assert agree(stages()).period_tokens == 16
    assert agree(stages(alignment_tokens=32)).period_tokens == 32
    assert agree(stages(blocks_per_chunk=3)).period_tokens == 48


def test_a_stage_without_layers_of_a_group_agrees():
    first, second = stages()
    second["groups"][2]["layers"] = []
    agreed = agree([first, second])
    assert [la.spec.name for la in agreed.plan.stored[2].layers] == ["states.0"]


def test_a_group_of_which_nobody_has_layers_of_its_own_is_left_out():
    """All its layers read the caches of others."""
    records = stages()
    for one in records:
        one["groups"][2]["layers"] = []
    assert [g.index for g in agree(records).plan.stored] == [0, 0]


def test_the_order_of_records_does_not_matter():
    records = [
        record(rank, hybrid(stage, 2), pp=2, tp=2, pcp=2)
        for rank, stage in enumerate([0, 0, 0, 0, 1, 1, 1, 1])
    ]
    for one in records:
        for known in one["groups"][0]["layers"]:
            known["spec"] |= {"num_kv_heads": 1, "page_bytes": 64, "engine_page_bytes": 64}
    wanted = agree(records)
    shuffled = records[:]
    random.Random(1).shuffle(shuffled)
    found = agree(shuffled)
    assert found.fingerprint == wanted.fingerprint
    assert found.identities == wanted.identities
    assert agree(json.loads(json.dumps(records))) == wanted


def test_draft_layers_alone_are_a_group():
    agreed = agree([record(0, [group_record(0, heads("a", own=2)),
                               group_record(1, drafts=[heads("mtp.1", own=2)])])])  # fmt: skip
    assert [(g.index, g.is_draft) for g in agreed.plan.stored] == [(0, False), (1, True)]


# -- refusals ----------------------------------------------------------------------------------


def changed(records, number, path, value):
    """`records` with one value of one of them changed; path as in messages."""
    records = copy.deepcopy(records)
    at = records[number]
    *parents, last = path.replace("[", ".").replace("]", "").split(".")
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    at[int(last) if isinstance(at, list) else last] = value
    return records


@pytest.mark.parametrize(
    ("path", "value", "mine"),
    [
        ("groups[0].layers[1].spec.dtype", "float16", "bfloat16"),
        ("groups[2].mode", "all", "align"),
        ("alignment_tokens", 32, 16),
        ("num_blocks", 99, 100),
        ("layout", "LBNHC", "LBHNC"),
        ("model.weights", "v", "w"),
        ("mesh.dcp_interleave", 2, 1),
    ],
)
def test_workers_of_a_stage_that_differ_are_told_the_first_field(path, value, mine):
    records = [record(rank, hybrid(), pcp=2) for rank in (0, 1)]
    text = refusal(changed(records, 1, path, value))
    assert text == f"worker 1 {path}={value!r}: expected {mine!r} as on worker 0"


def test_workers_whose_pages_differ_are_told_both():
    records = [record(rank, hybrid(), pcp=2) for rank in (0, 1)]
    strides = {**records[1]["strides"], "layers.0": [8, 4, 2]}
    text = refusal(changed(records, 1, "strides", strides))
    assert text == "worker 1 strides.layers.0[2]=2: expected 1 as on worker 0"


def test_workers_whose_drafts_differ_are_told_so():
    records = [record(rank, hybrid(), pcp=2) for rank in (0, 1)]
    assert refusal(changed(records, 1, "draft", {"weights": "d"})).startswith("worker 1 draft=")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("groups[0].block_size", 32),
        ("groups[1].prefix_cacheable", True),
        ("groups[2].mode", "all"),
        ("groups[2].index", 3),
        ("tokens_per_hash", 8),
        ("num_blocks", 99),
        ("layout", "LBNHC"),
        ("model.dtype", "bfloat16"),
        ("notes.hash_seed", "7"),
    ],
)
def test_stages_that_differ_are_told_the_first_field(path, value):
    assert refusal(changed(stages(3), 2, path, value)).startswith(f"worker 2 {path}={value!r}: ")


def test_stages_whose_groups_are_in_another_order_are_refused():
    first, second = stages()
    second["groups"] = [second["groups"][i] for i in (2, 1, 0)]
    assert refusal([first, second]).startswith("worker 1 groups[0].block_size=32: expected 16")


def test_stages_with_another_number_of_groups_are_refused():
    first, second = stages()
    second["groups"].pop()
    assert refusal([first, second]).startswith("worker 1 groups[2]='absent'")


def test_a_layer_on_two_stages_is_refused():
    first, second = stages()
    second["groups"][0]["layers"][0]["spec"]["name"] = "layers.1"
    with pytest.raises(ConfigError, match=r"layer name='layers\.1'"):
        agree([first, second])


@pytest.mark.parametrize("ranks", [[0], [0, 0], [1, 2], [0, 1, 2]])
def test_every_rank_must_have_told(ranks):
    one = record(0, [group_record(0, heads("a"))], tp=2)
    text = refusal([{**one, "rank": rank} for rank in ranks])
    assert text.startswith("worker records=")
    assert "one of each rank 0 to 1" in text


def test_an_engine_with_nothing_to_store_is_refused():
    scratch = group_record(0, cached=False)
    assert refusal([record(0, [scratch, scratch | {"index": 1}])]).startswith("cache groups=2")


# -- prefill-context ranks ---------------------------------------------------------------------


def test_records_of_prefill_context_ranks_are_completed():
    groups = [group_record(0, latent("a"))]
    everybody = [record(rank, groups, tp=2, pcp=2) for rank in range(4)]
    handed = [everybody[0], everybody[1]]
    completed = all_records(handed)
    assert sorted(one["rank"] for one in completed) == [0, 1, 2, 3]
    assert agree(completed) == agree(everybody)
    assert handed == everybody[:2], "what was given is as it was"


def test_each_stage_completes_its_own():
    records = [record(rank, hybrid(rank // 2, 2), pp=2, pcp=2) for rank in range(4)]
    assert all_records([records[0], records[2]]) == [
        records[0], records[2], {**records[0], "rank": 1}, {**records[2], "rank": 3},
    ]  # fmt: skip
    assert agree(all_records([records[0], records[2]])) == agree(records)


def test_without_such_ranks_nothing_is_made_up():
    records = tp2(group_record(0, latent("a")))
    assert all_records(records[:1]) == records[:1]
    assert refusal(all_records(records[:1])).startswith("worker records=[0]")


def test_a_stage_that_nobody_told_of_is_missing():
    records = [record(rank, hybrid(rank // 2, 2), pp=2, pcp=2) for rank in range(4)]
    assert refusal(all_records(records[:1])).startswith("worker records=[0, 1]")


# -- identities --------------------------------------------------------------------------------


def digests(records):
    return [known.digest for known in agree(records).identities]


BASE = [record(0, hybrid())]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.weights", "v"),
        ("model.dtype", "bfloat16"),
        ("model.loading", {"quantization": "fp8"}),
        ("model.kv_encoding", "fp8"),
        ("model.rope", {"max_model_len": 1024}),
        ("model.text_config", {"a": 2}),
        ("blocks_per_chunk", 2),
    ],
)
def test_models_that_differ_share_no_group(path, value):
    before, after = digests(BASE), digests(changed(BASE, 0, path, value))
    shared = set(before) & set(after)
    # A state is whole in its block however many tokens a period has.
    assert shared == ({before[2]} if path == "blocks_per_chunk" else set())


@pytest.mark.parametrize(
    ("path", "value"), [("notes.hash_seed", "1"), ("num_blocks", 7), ("alignment_tokens", 16)]
)
def test_what_does_not_change_bytes_does_not_count(path, value):
    assert digests(changed(BASE, 0, path, value)) == digests(BASE)


def test_a_backend_counts_for_the_groups_that_have_it():
    one = digests(BASE)
    other = digests(changed(BASE, 0, "backends", {**BASE[0]["backends"], "states.0": "GDN"}))
    assert one[:2] == other[:2]
    assert one[2] != other[2]


def test_a_draft_s_bytes_depend_on_the_draft_and_its_target():
    first = digests(changed(BASE, 0, "draft", {"weights": "d1"}))
    second = digests(changed(BASE, 0, "draft", {"weights": "d2"}))
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, True]
    other = changed(BASE, 0, "draft", {"weights": "d1"})
    assert digests(changed(other, 0, "model.weights", "v"))[1] != first[1]


def test_understood_pages_do_not_depend_on_the_ranks_and_whole_ones_do():
    one = digests([record(0, [group_record(0, heads("a", own=2))])])
    assert digests(tp2(group_record(0, heads("a", own=1)))) == one
    split = [record(stage, hybrid(stage, 2), pp=2) for stage in (0, 1)]
    whole = record(0, [
        group_record(0, *(heads(f"layers.{i}", own=2) for i in range(4)),
                     drafts=[heads("mtp.9", own=2)]),
        group_record(1, cached=False, block=4),
        group_record(2, *(layer(f"states.{i}", "gdn", 32) for i in (0, 2)), mode="align", block=32),
    ])  # fmt: skip
    at_pp2, at_pp1 = agree(split).identities, agree([whole]).identities
    assert at_pp2[0] == at_pp1[0]
    assert at_pp2[1].digest == at_pp1[1].digest
    assert at_pp2[2].digest != at_pp1[2].digest
    assert first_difference(at_pp1[2].text, at_pp2[2].text) == "fields.opaque.topology.pp"


def test_strides_count_for_whole_pages_only():
    moved = changed(BASE, 0, "strides", {name: [16, 4, 1] for name in BASE[0]["strides"]})
    one, other = digests(BASE), digests(moved)
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, False]
