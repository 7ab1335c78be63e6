"""Random models on virtual clusters: stored at one layout, read at it and at another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvfold.plan
from kvfold.copy.cpu import CpuCopier
from kvfold.errors import ConfigError, PlanError
from kvfold.mesh import Mesh
from kvfold.placement import Fragment, Run, fragment_runs, place
from kvfold.plan import GroupPlan, PlanOptions
from kvfold.spec import ROW_KINDS, STATE_KINDS, GroupSpec, LayerSpec
from kvfold.store.client import Group
from kvfold.testing.cluster import LAYOUTS, Cluster, in_layout
from kvfold.testing.cluster_check import Layout, Report, check, respread
from kvfold.testing.cluster_store import MemoryShelf
from kvfold.testing.cluster_truth import holding, seats

WINDOWED = ("sliding_window", "chunked_local", "sliding_window_mla")


@dataclass(frozen=True)
class Model:
    """Groups of layers as a model has them, whatever the mesh."""

    groups: tuple[tuple[dict[str, Any], ...], ...]
    span: int
    interleave: int
    halved: frozenset[Mesh] = frozenset()
    """Where pages have all K before all V: what is stored there is read elsewhere."""

    def __call__(self, mesh: Mesh) -> tuple[GroupSpec, ...]:
        made = []
        for index, layers in enumerate(self.groups):
            specs = [self._layer(dict(fields), mesh) for fields in layers]
            stages = [i * mesh.pp // len(specs) for i in range(len(specs))]
            made.append(GroupSpec.of(index, specs, stages))
        return tuple(made)

    def _layer(self, fields: dict[str, Any], mesh: Mesh) -> LayerSpec:
        total, padding = fields.pop("total"), fields.pop("padding")
        sharded = fields["dcp_sharded"]
        fields["block_size"] = self.span // (mesh.dcp if sharded else 1)
        state = fields["kind"] in STATE_KINDS
        if state:
            fields["tokens_per_state"] = fields["block_size"]
        heads = 1 if state or fields["kind"] in ROW_KINDS else max(1, total // mesh.tp)
        key_bytes = fields.pop("key", 0)
        if key_bytes and mesh in self.halved:
            fields |= {"encoding": "halves_heads_first", "key_bytes": key_bytes}
        bare = LayerSpec(num_kv_heads=heads, **fields)
        return replace(bare, engine_page_bytes=bare.page_bytes + padding)


@st.composite
def layers(draw: Any, name: str, sharded: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": name,
        "dcp_sharded": sharded,
        "head_bytes": draw(st.integers(4, 9)),
        "encoding": "heads_first",
        "total": 1,
    }
    if not sharded and draw(st.booleans()):
        replicated = draw(st.booleans())
        kind = draw(st.sampled_from(["mamba2", "gdn"]))
        whole = draw(st.sampled_from(["whole_page", "opaque"])) if replicated else "opaque"
        return fields | {"kind": kind, "tp_replicated": replicated, "encoding": whole}
    kinds = ["full_attention", "full_attention", "sliding_window", "chunked_local"]
    kind = draw(st.sampled_from([*kinds, "mla", "mla", "indexer", "sliding_window_mla"]))
    total = 1 if kind in ROW_KINDS else draw(st.sampled_from([1, 2, 4, 8, 16]))
    declared = draw(st.sampled_from([True] * 5 + [False]))
    strange = draw(st.sampled_from([None] * 6 + ["opaque", "whole_page"]))
    if strange == "opaque" or (strange == "whole_page" and kind in ROW_KINDS):
        fields["encoding"] = strange
    elif kind not in ROW_KINDS:
        fields["key"] = draw(st.sampled_from([1, 2, fields["head_bytes"] - 1]))
    return fields | {
        "kind": kind,
        "total": total,
        "max_tp_shards": total if declared else None,
        "window": 8 if kind in WINDOWED else None,
        "tokens_per_state": draw(st.sampled_from([1, 1, 1, 2])),
    }


@st.composite
def meshes(draw: Any, model: Model) -> Mesh:
    """Any mesh on which some rank holds every token of every head."""
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    pcp = draw(st.sampled_from([1, 1, 2] if tp <= 4 else [1]))
    pp = draw(st.sampled_from([1, 1, 2] if tp * pcp <= 4 else [1]))
    heads = [la["total"] for g in model.groups for la in g if la["dcp_sharded"]]
    sharing = min((tp // h for h in heads), default=tp)  # ranks with the same heads
    choices = [d for d in (1, 2, 4, 8) if d <= sharing] if pcp == 1 else [1, pcp]
    choices += [tp * pcp] if pcp > 1 and max(heads, default=1) == 1 else []
    return Mesh(tp, draw(st.sampled_from(choices or [1])), pcp, pp, model.interleave)


@st.composite
def models(draw: Any) -> Model:
    groups = []
    for g in range(draw(st.integers(1, 2))):
        sharded = draw(st.sampled_from([True, True, False]))
        kinds = [draw(layers("", sharded)) for _ in range(draw(st.integers(1, 2)))]
        copies = [draw(st.sampled_from(kinds)) for _ in range(draw(st.integers(1, 4)))]
        paddings = [draw(st.sampled_from([0, 0, 5])) for _ in copies]
        groups.append(
            tuple(
                fields | {"name": f"g{g}.{i}", "padding": padding}
                for i, (fields, padding) in enumerate(zip(copies, paddings, strict=True))
            )
        )
    return Model(tuple(groups), draw(st.sampled_from([16, 32])), draw(st.sampled_from([1, 2])))


@st.composite
def cases(draw: Any) -> tuple[Model, Layout, Layout, int]:
    model = draw(models())
    written, read = (Layout(draw(meshes(model)), draw(st.sampled_from([*LAYOUTS]))) for _ in "ab")
    halved = draw(st.sets(st.sampled_from([written.mesh, read.mesh])))
    model = replace(model, halved=frozenset(halved))
    return model, written, read, draw(st.integers(1, 3))


def quickly(examples: int) -> Any:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def bound(model: Model, layout: Layout) -> list[bool]:
    planned = kvfold.plan.plan(in_layout(model(layout.mesh), layout.order), layout.mesh)
    return [group.topology_bound for group in planned.groups]


@quickly(1500)
@given(cases(), st.integers(0, 3))
def test_every_rank_gets_its_bytes_at_the_same_and_at_another_layout(case: Any, seed: int) -> None:
    model, written, read, per_chunk = case
    options = PlanOptions(per_chunk)
    report = check(model, written, read, options=options, blocks=2 * per_chunk, seed=seed)
    assert report.ok, report.problems()
    assert report.stored.nbytes == sum(row.distinct_bytes for row in report.rows)
    assert report.loaded.nbytes == report.copies_bytes
    assert report.reading is not None
    tied = [a or b for a, b in zip(bound(model, written), bound(model, read), strict=True)]
    for number, topology_bound in enumerate(tied):
        if not topology_bound:  # what is understood is portable
            assert number not in report.reading.apart
        elif written.mesh != read.mesh:
            assert number in report.reading.apart
    if written == read:
        assert not report.reading.apart


@quickly(500)
@given(cases())
def test_exactly_the_ranks_that_hold_the_same_are_folded(case: Any) -> None:
    model, layout, _, _ = case
    cluster = Cluster(model(layout.mesh), layout.mesh, layout=layout.order, blocks=1)
    cluster.fill()
    for group in cluster.groups:
        for layer in group.layers:
            sharers: dict[bytes, list[int]] = {}
            for rank in layout.mesh.stage_ranks(layer.placement.stage):
                at = cluster.pages(rank)[layer.spec.name]
                start = at.offset + cluster.table[0] * at.block_stride
                page = at.memory[start : start + at.page_bytes].tobytes()
                sharers.setdefault(page, []).append(rank)
            folded = [f.owners for f in layer.placement.fragments]
            assert sorted(folded) == sorted(map(tuple, sharers.values()))


@quickly(150)
@given(cases(), st.data())
def test_a_false_replica_is_named_and_not_stored(case: Any, data: Any) -> None:
    model, layout, _, _ = case
    honest = Cluster(model(layout.mesh), layout.mesh, layout=layout.order)
    folded = [
        layer
        for group in honest.groups
        for layer in group.layers
        if layer.placement.fragments[0].replicas > 1
    ]
    if not folded:
        return
    liar = data.draw(st.sampled_from(folded))
    report = check(model, layout, layout, unlike=[liar.spec.name])
    suspects = report.stored.suspects
    assert {s.layer for s in suspects} == {liar.spec.name}
    expected = {r for f in liar.placement.fragments for r in f.owners[1:]}
    assert {s.rank for s in suspects} == expected
    assert report.stored.refused
    assert any(f"rank {min(expected)}:" in line for line in report.problems())


@quickly(200)
@given(cases(), st.data())
def test_a_single_byte_that_differs_is_found_by_the_audit(case: Any, data: Any) -> None:
    model, layout, _, per_chunk = case
    mesh, options = layout.mesh, PlanOptions(per_chunk)
    cluster = Cluster(model(mesh), mesh, options, layout.order, blocks=2 * per_chunk)
    layers = [la for group in cluster.groups for la in group.layers]
    folded = [la for la in layers if la.placement.fragments[0].replicas > 1]
    if not folded:
        return
    cluster.fill()
    layer = data.draw(st.sampled_from(folded))
    owners = data.draw(st.sampled_from(layer.placement.fragments)).owners
    rank = data.draw(st.sampled_from(owners))
    at = cluster.pages(rank)[layer.spec.name]
    block = data.draw(st.sampled_from(cluster.table))
    byte = data.draw(st.integers(0, at.page_bytes - 1))
    at.memory[at.offset + block * at.block_stride + byte] ^= 0x10
    (found,) = cluster.store(MemoryShelf(1 << 18)).suspects
    assert found.layer == layer.spec.name
    assert found.rank == (rank if len(owners) > 2 else owners[1])
    assert {found.rank, *found.others} == set(owners)


@quickly(150)
@given(cases())
def test_fixed_groups_are_fitted_to_another_mesh_as_the_model_has_them(case: Any) -> None:
    model, written, read, _ = case
    model = replace(model, halved=frozenset())
    fitted = respread(model(written.mesh), written.mesh, read.mesh)
    for mine, expected in zip(fitted, model(read.mesh), strict=True):
        for a, b in zip(mine.layers, expected.layers, strict=True):
            if b.max_tp_shards is not None or b.kind in STATE_KINDS:
                assert a == b
        assert mine.stages == expected.stages


# -- the judge is able to judge: each broken plan or copy must be seen -----------------------------


def attention(name: str = "a", **fields: Any) -> LayerSpec:
    values: dict[str, Any] = {
        "kind": "full_attention",
        "block_size": 8,
        "num_kv_heads": 2,
        "head_bytes": 8,
        "max_tp_shards": 4,
    }
    return LayerSpec(name=name, **(values | fields))


def latent(name: str = "m", **fields: Any) -> LayerSpec:
    values: dict[str, Any] = {"kind": "mla", "num_kv_heads": 1, "max_tp_shards": 1}
    return LayerSpec(name=name, **({"block_size": 8, "head_bytes": 12} | values | fields))


TP2 = Layout(Mesh(tp=2))
DCP = Layout(Mesh(tp=4, dcp=2, dcp_interleave=2))


def tried(written: Layout = TP2, read: Layout | None = None) -> Report:
    tp = written.mesh.tp
    heads = attention(num_kv_heads=4 // tp, engine_page_bytes=300)
    groups = [GroupSpec.of(0, [latent("m0"), latent("m1")])]
    if written.mesh.dcp == 1:
        groups.append(GroupSpec.of(1, [heads]))
    return check(groups, written, read, options=PlanOptions(2), blocks=4)


def test_the_unbroken_plan_passes() -> None:
    for written, read in ((TP2, Layout(Mesh(tp=4), "BLNHC")), (DCP, Layout(Mesh(tp=2)))):
        report = tried(written, read)
        assert report.ok, report.problems()
        assert report.reading is not None
        assert not report.reading.apart


def test_layers_of_other_strides_are_not_copied_as_one() -> None:
    """Equal pieces and counts, but more heads between them in the second layer's pages."""
    layers = [attention(f"a{n}", num_kv_heads=n, max_tp_shards=n) for n in (1, 2, 4)]
    for order in ("LBNHC", "BLNHC"):
        written = Layout(Mesh(pcp=2, dcp=2), order)
        report = check([GroupSpec.of(0, layers)], written, Layout(Mesh(tp=2)))
        assert report.ok, report.problems()
        assert report.reading is not None
        assert not report.reading.apart


def broken_runs(**change: Any) -> Any:
    def runs(*args: Any) -> list[Run]:
        found = fragment_runs(*args)
        values = {name: make(found[-1]) for name, make in change.items()}
        return [*found[:-1], replace(found[-1], **values)]

    return runs


@pytest.mark.parametrize(
    "change",
    [
        {"slot_offset": lambda run: run.slot_offset + 8},
        {"slot_stride": lambda run: run.slot_stride + 1},
        {"page_offset": lambda run: run.page_offset + 8, "nbytes": lambda run: run.nbytes - 8},
        {"nbytes": lambda run: run.nbytes - 1},
        {"layer": lambda run: "m1" if run.layer == "m0" else run.layer},
    ],
    ids=["slot", "stride", "page", "short", "layer"],
)
def test_a_run_that_goes_astray_is_seen(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvfold.plan, "fragment_runs", broken_runs(**change))
    assert not tried(DCP).ok


def test_a_wrong_order_that_agrees_with_itself_is_seen_by_the_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages written in the order of the shard read back well at the same mesh, and only there."""

    def as_if_not_interleaved(spec: Any, placed: Any, shard: int, mesh: Mesh) -> list[Run]:
        fragment = placed.fragments[shard]
        start = fragment.token_shard * spec.page_bytes
        return [Run(spec.name, 0, 0, start, spec.page_bytes)]

    assert tried(DCP, Layout(Mesh(tp=2))).ok
    monkeypatch.setattr(kvfold.plan, "fragment_runs", as_if_not_interleaved)
    report = tried(DCP, Layout(Mesh(tp=2)))
    assert not report.differences
    assert report.stored.misplaced
    assert report.reading is not None
    assert report.reading.differences
    assert report.problems()[-1].startswith("reading at tp 2 LBHNC: layer 'm1' rank 1: block 3 ")


def test_folding_what_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token shards that are taken for replicas: the audit names them, before anything is lost."""

    def folded(spec: LayerSpec, stage: int, mesh: Mesh) -> Any:
        placed, ranks = place(spec, stage, mesh), tuple(mesh.stage_ranks(stage))
        fragments = (Fragment(spec.name, 0, 0, ranks),)
        return replace(placed, token_shards=1, fragments=fragments)

    monkeypatch.setattr(kvfold.plan, "place", folded)
    problems = tried(DCP).problems()
    assert any("layer 'm0' rank 1: differs from rank 0, 2," in line for line in problems)
    assert any("bytes, " in line and "are distinct" in line for line in problems)


def test_storing_what_is_the_same_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def unfolded(spec: LayerSpec, stage: int, mesh: Mesh) -> Any:
        return place(replace(spec, max_tp_shards=None), stage, mesh)

    monkeypatch.setattr(kvfold.plan, "place", unfolded)
    report = tried()
    assert not report.differences
    assert any("the plan stores" in line for line in report.problems())


def test_every_owner_writing_its_copy_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are right then, and moved once for every replica."""
    everyone = frozenset(range(2))
    monkeypatch.setattr(GroupPlan, "writes", lambda group, rank, rotation: group.reads(rank))
    monkeypatch.setattr(GroupPlan, "writers", lambda group, rotation: everyone)
    report = tried()
    assert not report.differences
    assert report.problems() == ["2,560 bytes were stored, 1,792 are distinct"]


def test_copies_that_lose_or_spill_bytes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CpuCopier.to_pages

    def without_the_last(sweeps: Any, blocks: Sequence[int], offset: int) -> int:
        return whole(tuple(sweeps)[:-1], blocks, offset)

    def into_the_next_page(sweeps: Any, blocks: Sequence[int], offset: int) -> int:
        whole(sweeps, [block + 1 for block in blocks], offset)
        return whole(sweeps, blocks, offset)

    for broken in (without_the_last, into_the_next_page):
        monkeypatch.setattr(CpuCopier, "to_pages", staticmethod(broken))
        assert not tried().ok


def test_bytes_in_padding_and_in_nobodys_pages_are_seen() -> None:
    layer = attention(num_kv_heads=4, engine_page_bytes=300)
    cluster = Cluster([GroupSpec.of(0, [layer])], Mesh(), blocks=2)
    cluster.fill()
    at = cluster.pages(0)["a"]
    at.memory[cluster.table[1] * at.block_stride + at.page_bytes] ^= 1
    at.memory[cluster.table[0] * at.block_stride] ^= 1
    at.memory[3] ^= 1
    at.memory[at.memory.size - 2] ^= 1
    assert sorted(cluster.differences()) == [
        (0, "a", -1, 3),
        (0, "a", -1, at.block_stride - 2),
        (0, "a", 0, 0),
        (0, "a", 1, at.page_bytes),
    ]
    assert len(cluster.differences(limit=2)) == 2


def test_a_chunk_without_room_or_writers_is_a_problem() -> None:
    shelf = MemoryShelf(4096)
    report = check([GroupSpec.of(0, [latent()])], TP2, Layout(Mesh()), blocks=2, shelf=shelf)
    assert "1 chunks found no room in the store" in report.problems()
    assert "group 0: chunk 1 is not stored" in report.problems()
    assert "reading at tp 1 LBHNC: group 0: chunk 1 is not stored" in report.problems()


def test_memory_gives_the_answers_of_a_store() -> None:
    groups = [GroupSpec.of(0, [latent()])]
    shelf, cluster = MemoryShelf(1 << 14), Cluster(groups, Mesh(tp=2), blocks=2)
    cluster.fill()
    assert [cluster.store(shelf).chunks for _ in "ab"] == [2, 0]  # the second time they exist
    session = shelf.open("", 2, "", [Group(4096, 96, bytes(32), "")])
    job, offsets, _ = session.ask(0, b"k" * 32, [0b11], [b"", b""])
    assert offsets == [8192]
    session.commit(job, 0, [0])
    assert session.load(0, b"k" * 32, lambda *_: None) == "chunk 0 is not stored"
    session.commit(job, 1, [0])
    copied: list[tuple[int, int, int]] = []
    assert session.load(0, b"k" * 32, lambda *where: copied.append(where)) is None
    assert copied == [(0, 0, 8192), (1, 0, 8192)]


# -- the oracle itself, against worked examples ----------------------------------------------------


def test_worked_examples_of_what_a_rank_holds() -> None:
    def held(layer: LayerSpec, mesh: Mesh, rank: int) -> Any:
        found = holding(layer, mesh, list(seats(mesh))[rank])
        return found.heads, found.states

    heads = attention(num_kv_heads=2, max_tp_shards=4)
    assert held(heads, Mesh(tp=2), 1) == ((2, 3), tuple(range(8)))
    shared = replace(heads, num_kv_heads=1, page_bytes=0)
    assert held(replace(shared, page_bytes=64, engine_page_bytes=64), Mesh(tp=8), 5)[0] == (2,)
    # Two tokens at a time to each of two shards; pcp runs fastest.
    mesh = Mesh(tp=2, pcp=2, dcp=2, dcp_interleave=2)
    four = replace(latent(), block_size=4, page_bytes=0, engine_page_bytes=0)
    assert held(four, mesh, 0)[1] == (0, 1, 4, 5)
    assert held(four, mesh, 2)[1] == (2, 3, 6, 7)


def test_clear_errors() -> None:
    groups = [GroupSpec.of(0, [latent()])]
    with pytest.raises(ConfigError, match="layout='NHC': expected one of LBHNC"):
        Cluster(groups, Mesh(), layout="NHC")
    with pytest.raises(ConfigError, match="blocks=3: expected a multiple of blocks_per_chunk=2"):
        Cluster(groups, Mesh(), PlanOptions(2), blocks=3)
    with pytest.raises(ConfigError, match="layer='x': expected one of m"):
        Cluster(groups, Mesh(), unlike=["x"])
    with pytest.raises(ConfigError, match="layer 'm' block_size=8: expected a block_size x dcp"):
        respread(groups, Mesh(), Mesh(tp=16, dcp=16))
    with pytest.raises(PlanError, match="KV heads"):
        Cluster([GroupSpec.of(0, [attention(max_tp_shards=6)])], Mesh(tp=4))
