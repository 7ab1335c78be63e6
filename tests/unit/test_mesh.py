"""Ranks and coordinates."""

from __future__ import annotations

from typing import Any

import pytest

from kvfold.errors import ConfigError
from kvfold.mesh import Coords, Mesh


def test_ranks_count_tp_first_then_pcp_then_pp() -> None:
    mesh = Mesh(tp=3, pcp=2, dcp=2, pp=2)
    expected = [(pp, pcp, tp) for pp in range(2) for pcp in range(2) for tp in range(3)]
    assert [mesh.coords(rank)[:3] for rank in range(12)] == expected
    assert [mesh.rank(*where) for where in expected] == list(range(mesh.world_size))
    assert list(mesh.stage_ranks(1)) == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("mesh", "dcp_ranks"),
    [
        (Mesh(tp=4, dcp=2), [0, 1, 0, 1]),
        (Mesh(tp=4, dcp=4), [0, 1, 2, 3]),
        (Mesh(tp=2, pcp=2, dcp=2), [0, 0, 1, 1]),
        (Mesh(tp=2, pcp=2, dcp=4), [0, 2, 1, 3]),
        (Mesh(tp=2, pcp=2), [0, 0, 0, 0]),
    ],
)
def test_token_shards_of_ranks(mesh: Mesh, dcp_ranks: list[int]) -> None:
    assert [mesh.coords(rank).dcp for rank in range(mesh.world_size)] == dcp_ranks


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ({"tp": 0}, "tp"),
        ({"tp": 2.0}, "tp"),
        ({"pp": True}, "pp"),
        ({"tp": 4, "dcp": 3}, "dcp"),
        ({"tp": 2, "dcp": 4}, "dcp"),
        ({"tp": 4, "pcp": 2, "dcp": 4}, "dcp"),
        ({"dcp_interleave": 0}, "dcp_interleave"),
    ],
)
def test_an_impossible_mesh_is_refused_by_axis(axes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Mesh(**axes)
    assert caught.value.field == named


def test_coordinates_outside_the_mesh_are_refused() -> None:
    mesh = Mesh(tp=2, pp=2)
    assert mesh.coords(3) == Coords(1, 0, 1, 0)
    for wrong in (-1, 4):
        with pytest.raises(ConfigError, match="rank"):
            mesh.coords(wrong)
    with pytest.raises(ConfigError, match="pp_rank"):
        mesh.stage_ranks(2)
    with pytest.raises(ConfigError, match="tp_rank"):
        mesh.rank(0, 0, 2)
