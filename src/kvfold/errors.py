"""Every error kvfold raises on purpose.

KvfoldError
├── ConfigError        a setting or input is unusable: names field, value, expectation
├── PlanError          a model, layout or engine cannot be planned
├── StoreError         the store refused or cannot do what was asked
│   ├── StoreRefused   the store answered "no" to a hello (carries a code)
│   └── StoreGone      the store's process or socket is gone, or a deadline passed
└── FormatError        bytes on disk or from a socket are not what they claim to be
"""

from __future__ import annotations


class KvfoldError(Exception):
    """Base of all errors raised on purpose by kvfold."""


class ConfigError(KvfoldError, ValueError):
    """A setting or an input is unusable.

    The message always has the same shape: which field, which value, what was expected.
    """

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field}={value!r}: expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected


class PlanError(ConfigError):
    """A model, a layout or an engine configuration cannot be planned."""


class StoreError(KvfoldError):
    """The store refused, or cannot do, what was asked of it."""


class StoreRefused(StoreError):
    """The store answered a hello with a refusal; `code` says which kind."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class StoreGone(StoreError, ConnectionError):
    """The store's process or socket is gone, or it did not answer in time."""


class FormatError(KvfoldError):
    """Bytes from disk or from a socket are not what they claim to be."""
