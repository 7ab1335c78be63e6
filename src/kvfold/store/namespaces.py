"""What is known of each namespace beside its digest: identities in clear, and what copies take.

Engines bring it with their groups, and an earlier store left it on disk. Kept in memory, bounded,
for `kvfold why` and metrics; no chunk depends on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_NAMESPACES = 256
# Identities whose notes differ share a namespace: the latest few are kept.
_TEXTS_EACH = 4
_MAX_TEXT_CHARS = 1 << 18


@dataclass
class Known:
    """One namespace. `epoch`: it was made by a reset, under the identity of `texts`."""

    texts: list[str] = field(default_factory=list)
    epoch: bool = False
    copies_bytes: int = 0  # what the engine's own TP copies of a chunk take; 0: not told


class NamespaceBook:
    """The latest `MAX_NAMESPACES` namespaces, in the order in which they were learned."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Known] = OrderedDict()

    def __contains__(self, namespace: bytes) -> bool:
        return namespace in self._known

    def get(self, namespace: bytes) -> Known:
        """What is known; an empty record if nothing is."""
        return self._known.get(namespace) or Known()

    def latest_first(self) -> Iterable[tuple[bytes, Known]]:
        return reversed(self._known.items())

    def learn(
        self, namespace: bytes, text: str, *, copies_bytes: int = 0, epoch: bool = False
    ) -> None:
        """Note an identity under its namespace."""
        known = self._known.setdefault(namespace, Known())
        self._known.move_to_end(namespace)
        known.epoch = epoch
        known.copies_bytes = copies_bytes or known.copies_bytes
        if text in known.texts:
            known.texts.remove(text)
        if len(text) <= _MAX_TEXT_CHARS:
            known.texts.append(text)
        del known.texts[:-_TEXTS_EACH]
        while len(self._known) > MAX_NAMESPACES:
            self._known.popitem(last=False)

    def learn_old(self, texts: dict[bytes, str]) -> None:
        """Take in what an earlier store left; engines that came since know better."""
        for namespace, text in texts.items():
            if namespace not in self and len(self._known) < MAX_NAMESPACES:
                self.learn(namespace, text)
                self._known.move_to_end(namespace, last=False)
