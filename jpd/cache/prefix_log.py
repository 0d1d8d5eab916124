"""What became known and what was forgotten in one prefix cache, in order, for those who follow it.

A follower asks for all that came after the last change it has heard of. One that fell too far
behind, or followed an earlier life of the worker, gets everything there is instead. Bounded. Owned
by its worker's thread; written by the prefix cache, read for the router.
"""

import uuid
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

MAX_CHANGES = 65_536


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """Hashes of pages, as `jpd.cache.page_hashes` makes them."""

    incarnation: str  # of the worker: another one means that it began anew, empty
    sequence: int  # changes since its start, these included
    is_snapshot: bool  # `added` is all it holds; what was known before is void
    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


class PrefixLog:
    """The latest changes of one prefix cache."""

    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self.incarnation = uuid.uuid4().hex[:16]
        self.num_changes = 0
        self._latest: deque[tuple[int, bool]] = deque(maxlen=max_changes)

    def note(self, page_hash: int, is_added: bool) -> None:
        self.num_changes += 1
        self._latest.append((page_hash, is_added))

    def since(self, incarnation: str, sequence: int, known: Iterable[int]) -> PrefixChanges:
        """All changes after number `sequence`; `known` is read when only a snapshot will do."""
        num_new = self.num_changes - sequence
        if incarnation != self.incarnation or not 0 <= num_new <= len(self._latest):
            return PrefixChanges(self.incarnation, self.num_changes, True, tuple(known))
        latest: dict[int, bool] = {}  # a page that came and went is told of once
        for page_hash, is_added in islice(reversed(self._latest), num_new):
            latest.setdefault(page_hash, is_added)
        return PrefixChanges(
            self.incarnation,
            self.num_changes,
            False,
            tuple(page_hash for page_hash, is_added in latest.items() if is_added),
            tuple(page_hash for page_hash, is_added in latest.items() if not is_added),
        )
