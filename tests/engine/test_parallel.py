"""Several ranks as processes: each gets its own bytes back, and of replicas one copy is on disk.

Each layout is tried in one engine: cold, with a hit, and with a hit from the disk of a store that
was stopped under the engine. What a rank must hold is worked out from what an independent reader
finds on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import xxhash
from kinds import FULL, KINDS, PROMPT, SAME, Kind
from slab_reader import Slot, read_slots
from trial import Answer, Asker, gap, restart_store, stop

import kvfold
from kvfold.testing import checkpoints as models
from kvfold.testing.checkpoints import prompt
from kvfold.testing.engines import Engine, kv_transfer_config, local_engine

MODULES = Path(__file__).parent / "modules"
SOURCE = Path(kvfold.__file__).parents[1]
pytestmark = pytest.mark.timeout(
    1200
)  # engines of several processes start slowly on a busy machine
LONG = pytest.mark.skipif(not FULL, reason="a rarer layout: KVFOLD_TEST_FULL=1")
START_S = 600
CHUNKS = 5


@dataclass(frozen=True)
class Cache:
    """A model whose layers all have pages of the same form. `heads` 1 with MLA."""

    make: Callable[[Path], Path]
    heads: int
    span: int
    layers: int = 4

    def prompt(self, seed: int) -> list[int]:
        return prompt(CHUNKS * self.span + 6, seed=seed)  # no chunk more, with the answer


LLAMA = {
    heads: Cache(lambda root, n=heads: models.llama(root, n, num_heads=8), heads, 128)
    for heads in (1, 2, 8)
}
MLA = Cache(models.deepseek_mla, 1, 16)


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> range:
        return range(self.tp * self.pp)

    def held(self, cache: Cache, rank: int) -> list[tuple[int, int]]:
        """The (layer, head) pairs of which a rank holds the cache, in the order of its pages."""
        stage, place = divmod(rank, self.tp)
        layers = cache.layers // self.pp
        heads = max(1, cache.heads // self.tp)
        first = place * cache.heads // self.tp
        return [
            (layer, head)
            for layer in range(stage * layers, (stage + 1) * layers)
            for head in range(first, first + heads)
        ]

    def digest(self, cache: Cache, rank: int, slot: Slot) -> str:
        """What a rank must hold of a chunk that is on disk: its heads of its layers."""
        piece, rest = divmod(len(slot.payload), cache.layers * cache.heads)
        assert rest == 0
        state = xxhash.xxh3_128()
        for layer, head in self.held(cache, rank):
            start = (layer * cache.heads + head) * piece
            state.update(slot.payload[start : start + piece])
        return state.hexdigest()


def check_ranks(layout: Layout, cache: Cache, answer: Answer, slots: list[Slot]) -> None:
    """Every rank has loaded the whole prompt, and holds of it what it must."""
    assert answer.hit == CHUNKS * cache.span
    on_disk = {slot.key.hex(): slot for slot in slots}
    assert [answer.chunks(1, rank) for rank in layout.ranks] == [[CHUNKS]] * len(layout.ranks)
    for chunk in answer.loads:
        assert chunk.digest == layout.digest(cache, chunk.rank, on_disk[chunk.key])


def start(layout: Layout, model: Path, log: Path, store: dict[str, Any], **more: Any) -> Engine:
    """An engine of so many processes."""
    how = {"tp": layout.tp, "pp": layout.pp, "connector": store, "start_timeout_s": START_S}
    return Engine(model, log=log, **how, **more)


def try_layout(
    layout: Layout, running: Engine, asker: Asker, ids: list[int]
) -> tuple[Answer, Answer, Answer]:
    """Ask cold, for a hit, and for a hit from disk after a restart of the store."""
    cold = asker.ask(running, ids)
    warm = asker.ask(running, ids)
    restart_store(asker.settings, len(layout.ranks) + 1)
    again = asker.ask(running, ids)
    assert cold.hit == 0
    assert again.disk == again.hit
    for answer in (warm, again):
        assert asker.ledger.wrong(answer.loads) == set()
        assert gap(cold.logprobs, answer.logprobs) <= SAME
    return cold, warm, again


@pytest.mark.parametrize(
    ("cache", "layout"),
    [
        pytest.param(LLAMA[1], Layout(tp=2), id="llama 1 head tp2"),
        pytest.param(LLAMA[8], Layout(tp=2), id="llama 8 heads tp2"),
        pytest.param(MLA, Layout(tp=2), id="mla tp2"),
        pytest.param(MLA, Layout(pp=2), id="mla pp2", marks=LONG),
    ],
)
def test_every_rank_gets_its_own_bytes_back(cache, layout, store, checkpoints, engine_log):
    asker, model, ids = Asker(store), cache.make(checkpoints), cache.prompt(3)
    with start(layout, model, engine_log, store) as running:
        cold, *answers = try_layout(layout, running, asker, ids)
    if FULL:
        with start(layout, model, engine_log, store) as running:
            answers.append(asker.ask(running, ids))
            assert gap(cold.logprobs, answers[-1].logprobs) <= SAME
    stop(store)
    slots = list(read_slots(Path(store["disk_path"])))
    assert len(slots) == CHUNKS, "one copy of each chunk"
    for answer in answers:
        check_ranks(layout, cache, answer, slots)


def test_what_two_ranks_stored_serves_other_layouts(store, checkpoints, engine_log):
    cache, two, one, stages = LLAMA[2], Layout(tp=2), Layout(), Layout(pp=2)
    asker, model, ids, other = (
        Asker(store),
        cache.make(checkpoints),
        cache.prompt(3),
        cache.prompt(4),
    )
    with start(two, model, engine_log, store) as running:
        cold, *answers = try_layout(two, running, asker, ids)
    with local_engine(model, connector=store) as llm:
        alone = asker.ask(llm, ids)
    with start(stages, model, engine_log, store) as running:
        staged = asker.ask(running, ids)
        _, *own = try_layout(stages, running, asker, other)
    stop(store)
    slots = list(read_slots(Path(store["disk_path"])))
    assert len(slots) == 2 * CHUNKS, "nobody stored again what was there"
    for layout, hits in ((two, answers), (one, [alone]), (stages, [staged, *own])):
        for answer in hits:
            check_ranks(layout, cache, answer, slots)
    for answer in (alone, staged):
        assert gap(cold.logprobs, answer.logprobs) <= SAME
    rank_0, rank_1 = ({two.digest(cache, rank, slot) for slot in slots} for rank in two.ranks)
    assert rank_0.isdisjoint(rank_1), "the control: two heads are two different shards"


STATES_ON_BOTH_STAGES = Kind(
    lambda root: models.qwen3_next(
        root, layer_types=["linear_attention", "full_attention"] * 2, mlp_only_layers=[0, 2]
    ),
    {"0 gdn": 1, "1 full_attention": 11},
    hit=1408,
    restart="store",
)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(KINDS["granite4"], Layout(tp=2), id="granite4 tp2"),
        pytest.param(KINDS["gemma3"], Layout(tp=2), id="gemma3 tp2", marks=LONG),
        pytest.param(KINDS["qwen3_next"], Layout(tp=2), id="qwen3_next tp2", marks=LONG),
        pytest.param(KINDS["deepseek_v3_mtp"], Layout(tp=2), id="mtp tp2", marks=LONG),
        pytest.param(KINDS["gemma3"], Layout(pp=2), id="gemma3 pp2", marks=LONG),
        pytest.param(STATES_ON_BOTH_STAGES, Layout(pp=2), id="qwen3_next pp2", marks=LONG),
    ],
)
def test_every_rank_gets_its_part_of_every_group_back(kind, layout, store, checkpoints, engine_log):
    asker, wanted = Asker(store), list(kind.groups.values())
    with start(layout, kind.make(checkpoints), engine_log, store) as running:
        _, *answers = try_layout(layout, running, asker, PROMPT)
    for answer in answers:
        assert answer.hit == kind.hit
        assert [answer.chunks(len(wanted), rank) for rank in layout.ranks] == [wanted, wanted]
    stop(store)
    keys = {(group, key) for _, group, key in asker.ledger.stored}
    assert len(list(read_slots(Path(store["disk_path"])))) == len(keys), "one copy of each chunk"


def test_folding_what_differs_is_seen_by_digests_and_audit(store, checkpoints, engine_log):
    """The controls: a lie about heads is stored without the audit, and caught by it."""
    transfer = kv_transfer_config({**store, "audit_chunks": 0, "audit_every": 3})
    transfer |= {"kv_connector": "LyingConnector", "kv_connector_module_path": "lying_connector"}
    cache, layout, asker = LLAMA[2], Layout(tp=2), Asker(store)
    with start(
        layout,
        cache.make(checkpoints),
        engine_log,
        store,
        engine_args={"kv_transfer_config": transfer},
        env={"PYTHONPATH": f"{MODULES}:{SOURCE}"},
    ) as running:
        first, second, third = (cache.prompt(seed) for seed in (5, 6, 7))
        cold, _, warm = (asker.ask(running, ids) for ids in (first, second, first))
        assert warm.hit == CHUNKS * cache.span
        assert asker.ledger.wrong(warm.loads) == {0}
        assert gap(cold.logprobs, warm.logprobs) > SAME
        assert "do not, in layers" not in engine_log.read_text()
        for ids in (third, third, first):  # the third job is audited
            assert asker.ask(running, ids).hit == 0
    assert "do not, in layers model.layers.0.self_attn.attn" in engine_log.read_text()
    assert stop(store)["audit_conflicts"] > 0
    assert len(list(read_slots(Path(store["disk_path"])))) == 2 * CHUNKS, "none of the third"
