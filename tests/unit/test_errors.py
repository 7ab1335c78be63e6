"""The exception tree: who is whose parent, and what a message always holds."""

from __future__ import annotations

import pytest

from kvfold import errors


@pytest.mark.parametrize(
    ("child", "parents"),
    [
        (errors.ConfigError, (errors.KvfoldError, ValueError)),
        (errors.PlanError, (errors.ConfigError,)),
        (errors.StoreError, (errors.KvfoldError,)),
        (errors.StoreRefused, (errors.StoreError,)),
        (errors.StoreGone, (errors.StoreError, ConnectionError)),
        (errors.FormatError, (errors.KvfoldError,)),
    ],
)
def test_each_error_is_caught_as_its_parents(
    child: type[Exception], parents: tuple[type[Exception], ...]
) -> None:
    assert all(issubclass(child, parent) for parent in parents)


def test_bad_bytes_are_not_a_bad_setting() -> None:
    assert not issubclass(errors.FormatError, errors.ConfigError)
    assert not issubclass(errors.StoreError, errors.ConfigError)


@pytest.mark.parametrize("kind", [errors.ConfigError, errors.PlanError])
def test_a_setting_error_names_field_value_and_expectation(kind: type[errors.ConfigError]) -> None:
    error = kind("host_bytes", "4 gib", 'a size such as "4GiB"')
    assert str(error) == "host_bytes='4 gib': expected a size such as \"4GiB\""
    assert (error.field, error.value, error.expected) == (
        "host_bytes",
        "4 gib",
        'a size such as "4GiB"',
    )


def test_a_refusal_keeps_its_code() -> None:
    error = errors.StoreRefused("rank", "rank 1 is taken")
    assert (error.code, str(error)) == ("rank", "rank 1 is taken")
