"""Sizes as people write them, there and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.errors import ConfigError
from kvfold.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("0", 0),
        ("1B", 1),
        ("4KiB", 4096),
        ("4GiB", 4 << 30),
        (" 512 MiB ", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("2TiB", 2 << 40),
        ("1PiB", 1 << 50),
        ("4KB", 4000),
        ("1.5GB", 1_500_000_000),
    ],
)
def test_reads_a_size(text: object, count: int) -> None:
    assert parse_bytes("host_bytes", text) == count


@pytest.mark.parametrize(
    "value", [-1, "-1", "", "GiB", "4 gib", "4GiBs", "4G", "1e3", "nan", 1.5, True, None, [4]]
)
def test_refuses_what_is_no_size(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes("host_bytes", value)
    assert str(caught.value).startswith(f"host_bytes={value!r}: expected a size such as")


@given(st.integers(0, 1 << 50))
def test_reads_whole_numbers_exactly(count: int) -> None:
    assert parse_bytes("f", count) == parse_bytes("f", str(count)) == count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (5_013_504, "4.78 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 40, "1 TiB"),
        (-2048, "-2 KiB"),
        (1023 << 10, "1023 KiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_writes_a_size(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.floats(1, 1023), st.sampled_from([1 << 10, 1 << 20, 1 << 30, 1 << 40]))
def test_written_sizes_read_back_to_three_digits(mantissa: float, unit: int) -> None:
    count = int(mantissa * unit)
    assert parse_bytes("f", format_bytes(count)) == pytest.approx(count, rel=0.005)
