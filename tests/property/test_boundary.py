"""The longest hit and what must be stored for it, token by token against an oracle.

The oracle is the rule itself: a hit of n tokens needs of full attention every token before n, of a
window the tokens that the next one looks back on, of a state the state at n.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("vllm")

from hypothesis import example, given, settings
from hypothesis import strategies as st
from scheduler_bench import geometry
from small_specs import group

from kvfold.vllm import boundary
from kvfold.vllm.requests import Geometry

BLOCK = 4
CHUNKS = 7


@dataclass(frozen=True)
class Case:
    """`stored`: one bit per chunk and group."""

    geometry: Geometry
    stored: tuple[int, ...]

    @property
    def tiers(self):
        bits = [[tier & 1 << i for i in range(CHUNKS)] for tier in self.stored]
        return (np.array(bits) != 0).astype(np.uint8)


kinds = st.one_of(
    st.tuples(st.just("mla"), st.just(BLOCK), st.none()),
    st.tuples(st.just("sliding_window_mla"), st.sampled_from([2, BLOCK]), st.integers(1, 40)),
    st.tuples(st.just("chunked_local"), st.just(BLOCK), st.integers(1, 40)),
    st.tuples(st.just("gdn"), st.sampled_from([8, 64]), st.none()),
)


@st.composite
def models(draw):
    """1 to 4 groups; a draft is a second group of the same kind of number."""
    shapes = draw(st.lists(kinds, min_size=1, max_size=3))
    groups = [group(i, *shape) for i, shape in enumerate(shapes)]
    if draw(st.booleans()):
        groups.append(group(0, draw(st.sampled_from(["mla", "gdn"])), BLOCK * 2, draft=True))
    return geometry(groups, alignment=8, hash_tokens=2)


@st.composite
def cases(draw):
    known = draw(models())
    most = (1 << CHUNKS) - 1
    bits = st.one_of(st.just(most), st.integers(0, most))
    return Case(known, tuple(draw(bits) for _ in known.groups))


def has(known: Geometry, number: int, stored: int, token: int) -> bool:
    """Whether a stored chunk of the group holds a token: chunks end at the multiples of the period
    and hold the last blocks before it."""
    shape = known.groups[number]
    chunk = token // known.period
    end = (chunk + 1) * known.period
    held = shape.blocks_per_chunk * shape.tokens_per_block
    return bool(stored & 1 << chunk) and token >= end - held


def looked_at(known: Geometry, number: int, n: int) -> range:
    """The tokens before n whose cache the token at n needs."""
    shape = known.groups[number]
    if shape.need == "window":
        return range(max(0, n - shape.look_back), n)
    if shape.need == "chunked":
        return range(n // shape.look_back * shape.look_back, n)
    return range(n)


def serves(case: Case, local: int, n: int) -> bool:
    """Whether every mandatory group can serve a hit of n tokens; the engine has the first
    `local`."""
    known = case.geometry
    for number, shape in enumerate(known.groups):
        if shape.optional:
            continue
        if shape.need == "state":
            if not case.stored[number] & 1 << n // known.period - 1:
                return False
        elif not all(
            token < local or has(known, number, case.stored[number], token)
            for token in looked_at(known, number, n)
        ):
            return False
    return True


def oracle(case: Case, local: int, limit: int) -> int:
    period = case.geometry.period
    good = [
        n
        for n in range(period, CHUNKS * period + 1, period)
        if local < n <= limit and serves(case, local, n)
    ]
    return max(good, default=0)


eighths = st.lists(st.integers(0, 8 * CHUNKS + 8), min_size=3, max_size=3)


@settings(max_examples=300)
@given(cases(), eighths, eighths)
def test_the_longest_hit_is_what_the_rule_says(case, locals_, limits):
    period = case.geometry.period
    for local, limit in ((a * period // 8, b * period // 8) for a in locals_ for b in limits):
        found = boundary.longest(case.geometry, case.tiers, local, limit)
        assert found == oracle(case, local, limit), (local, limit)


@settings(max_examples=200)
@given(cases(), st.data())
def test_what_limits_a_hit_is_named_and_would_serve_it(case, data):
    known, tiers = case.geometry, case.tiers
    period = known.period
    local, limit = (data.draw(st.integers(0, CHUNKS * period)) for _ in range(2))
    last = limit // period * period
    named = [(shape.number, chunk) for shape, chunk in boundary.missing(known, tiers, local, limit)]
    if last <= local // period * period:
        assert not named
        return
    assert bool(named) == (oracle(case, local, limit) < last or last <= local)
    assert len({number for number, _ in named}) == len(named), "the first of each group"
    needs = [known.groups[number].need == "all" for number, _ in named]
    assert needs == sorted(needs, reverse=True), "what needs every token limits most"
    # With all that is named stored, and what follows, the hit would be there.
    stored = list(case.stored)
    for number, chunk in named:
        assert not tiers[number, chunk]
        stored[number] |= (1 << CHUNKS) - (1 << chunk)
    assert oracle(Case(known, tuple(stored)), local, limit) == last


@settings(max_examples=200)
@given(cases(), st.data())
def test_the_whole_prefix_is_what_groups_of_every_token_have(case, data):
    known = case.geometry
    local, limit = (data.draw(st.integers(0, CHUNKS * known.period)) for _ in range(2))
    found = boundary.whole_prefix(known, case.tiers, local, limit)
    whole = [shape.number for shape in known.groups if shape.need == "all" and not shape.optional]
    only = Case(
        known,
        tuple(
            case.stored[number] if number in whole else (1 << CHUNKS) - 1
            for number in range(len(known.groups))
        ),
    )
    if whole and limit >= (local // known.period + 1) * known.period:
        longest = oracle(only, local, limit)
        assert found == longest if longest else found <= local
    else:
        assert found == 0


# -- what must be stored -----------------------------------------------------------------------


def store_wanted(known, tokens, prompt, junctions):
    """Exactly what one request of `tokens` tokens stores."""
    chunks = np.arange(tokens // known.period)
    return np.stack(
        [
            boundary.wanted(known, shape, chunks, prompt, junctions).astype(np.uint8)
            for shape in known.groups
        ]
    )


@st.composite
def requests(draw):
    """Windows much wider than the rest, so that not every one of them is stored."""
    known = geometry(
        [
            group(0, "mla", BLOCK, head_bytes=draw(st.integers(1, 8))),
            group(
                1, "sliding_window_mla", BLOCK, draw(st.integers(2, 60)),
                head_bytes=draw(st.sampled_from([1, 8, 100])),
            ),
            group(2, "chunked_local", BLOCK, draw(st.integers(1, 40)), head_bytes=20),
            group(3, "gdn", 64),
        ],
        alignment=8,
        hash_tokens=4,
    )  # fmt: skip
    prompt = draw(st.integers(1, 600))
    generated = draw(st.integers(0, 60))
    junctions = draw(st.lists(st.integers(0, prompt), max_size=2))
    return known, prompt, generated, junctions


@settings(max_examples=300)
@given(requests(), st.integers(0, 600))
@example((geometry([group(0)]), 32, 0, []), 0)
def test_what_is_wanted_suffices_for_the_hits_it_is_for(request_, local):
    known, prompt, generated, junctions = request_
    period, total = known.period, prompt + generated
    tiers = store_wanted(known, total, prompt, junctions)
    interval = known.window_interval
    expected = {
        *range(interval, prompt // period * period + 1, interval),
        *(tokens // period * period for tokens in (prompt - 1, prompt, *junctions)),
        *range((prompt // period + 1) * period, total + 1, period),
    }
    for end in expected:
        for known_here in (0, local % (end + 1)):
            if end > known_here:
                assert boundary.longest(known, tiers, known_here, end) == end


def test_a_window_is_stored_by_its_tails_only():
    known = geometry(
        [group(0, "mla", 16, head_bytes=4), group(1, "sliding_window_mla", 16, 129, head_bytes=32)],
        alignment=64, hash_tokens=16,
    )  # fmt: skip
    assert (known.period, known.window_interval, known.groups[1].blocks_per_chunk) == (64, 1024, 4)
    tiers = store_wanted(known, 4000, 3000, [1500])
    assert tiers[0].all()
    wanted = np.flatnonzero(tiers[1]).tolist()
    tails = [14, 15, 30, 31]  # before 1,024 and 2,048
    junction, end, generated = [21, 22], [44, 45], list(range(46, 62))
    assert wanted == sorted(tails + junction + end + generated)


def test_a_resent_prompt_of_whole_chunks_finds_its_last_state_but_one():
    known = geometry(
        [group(0, "mla", 16, head_bytes=1), group(1, "sliding_window_mla", 16, 17, head_bytes=64),
         group(2, "gdn", 16)],
        alignment=16, hash_tokens=16,
    )  # fmt: skip
    assert known.window_interval == 1024
    tiers = store_wanted(known, 160, 160, [])
    assert boundary.longest(known, tiers, 0, 159) == 144, "as a prompt keeps a token to compute"
    assert boundary.longest(known, tiers, 0, 160) == 160
    for row in tiers[1:]:
        assert np.flatnonzero(row).tolist() == [8, 9]
