"""Every shipped model on random meshes: each page byte is stored once and read by each owner."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvfold.errors import ConfigError
from kvfold.mesh import Mesh
from kvfold.models import Model, build, load, shipped
from kvfold.plan import OffloadPlan, PlanOptions, plan

CONFIGS = [load(name) for name in shipped()]


@st.composite
def models(draw: Any) -> tuple[Model, OffloadPlan]:
    config = draw(st.sampled_from(CONFIGS))
    dtypes = ["auto", "fp8", "fp8_ds_mla", "nvfp4", "int4_per_token_head"]
    dtype = draw(st.sampled_from(dtypes))
    tp = draw(st.sampled_from([1, 2, 4, 8, 16]))
    pcp = draw(st.sampled_from([1, 1, 2]))
    dcp = draw(st.sampled_from([1, 2, tp, pcp, tp * pcp]))
    pp = draw(st.sampled_from([1, 2, 3]))
    try:
        mesh = Mesh(tp=tp, dcp=dcp, pcp=pcp, pp=pp)
        model = build(config, mesh, dtype)
        made = plan(model.groups, mesh, PlanOptions(draw(st.integers(1, 2))))
    except ConfigError:
        assume(False)
    return model, made


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(models(), st.data())
def test_ranks_hold_their_pages_and_slots_hold_each_byte_once(case: Any, data: Any) -> None:
    _, made = case
    groups = [group for group in made.groups if group.participating]
    group = data.draw(st.sampled_from(groups))
    ranks = range(made.mesh.world_size)
    # Every rank reads exactly its own pages.
    for rank in ranks:
        read: Counter[tuple[str, int]] = Counter()
        for run in group.reads(rank):
            read[run.layer, run.block] += run.count * run.nbytes
        stage = made.mesh.coords(rank).pp
        assert read == {
            (layer.spec.name, block): layer.spec.page_bytes
            for layer in group.layers
            if layer.placement.stage == stage
            for block in range(group.blocks_per_chunk)
        }
    # The writers' bytes are the slot's, each once: distinct fragments and nothing else.
    rotation = data.draw(st.integers(0, group.rotations - 1))
    written = [run for rank in ranks for run in group.writes(rank, rotation)]
    assert sum(run.count * run.nbytes for run in written) == group.chunk_bytes
    starts = sorted((run.slot_offset, run.nbytes) for run in written if run.count == 1)
    for (first, nbytes), (second, _) in pairwise(starts):
        assert first + nbytes <= second


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(models())
def test_only_declared_replicas_fold(case: Any) -> None:
    """A fragment's owners differ in nothing that its layer is split by."""
    _, made = case
    for group in made.groups:
        for layer in group.layers:
            spec, mesh = layer.spec, made.mesh
            for fragment in layer.placement.fragments:
                held = [mesh.coords(rank) for rank in fragment.owners]
                assert len({c.pp for c in held}) == 1
                if spec.dcp_sharded:
                    assert len({c.dcp for c in held}) == 1
                shards = spec.max_tp_shards
                if shards is None and not spec.tp_replicated:
                    assert len({c.tp for c in held}) == 1
                elif shards is not None:
                    assert len({c.tp * shards // mesh.tp for c in held}) == 1 or shards > mesh.tp
                    assert shards < mesh.tp or len({c.tp for c in held}) == 1
            owners = sorted(r for f in layer.placement.fragments for r in f.owners)
            assert owners == list(mesh.stage_ranks(layer.placement.stage))
