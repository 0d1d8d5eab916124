"""The pages a fake worker has kept of prompts it has seen, and the log of what came and went."""

import itertools
from collections.abc import Sequence

from jpd.cache.page_hashes import page_hashes
from jpd.cache.prefix_log import PrefixChanges, PrefixLog
from jpd.worker.protocol import Attempt


class FakePrefixes:
    """Whole pages, known by their hashes; nothing is evicted unless a test says so."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._known: dict[int, None] = {}
        self._log = PrefixLog()

    @property
    def incarnation(self) -> str:
        return self._log.incarnation

    @property
    def num_changes(self) -> int:
        return self._log.num_changes

    def since(self, incarnation: str, sequence: int) -> PrefixChanges:
        return self._log.since(incarnation, sequence, self._known)

    def match(self, attempt: Attempt) -> int:
        """Tokens of the longest known prefix; at least one is left to compute."""
        hashes = page_hashes(attempt.token_ids[:-1], self._page_size, attempt.cache_salt)
        matched = itertools.takewhile(self._known.__contains__, hashes)
        return self._page_size * sum(1 for _ in matched)

    def keep(self, token_ids: Sequence[int], salt: str | None) -> None:
        for page_hash in page_hashes(token_ids, self._page_size, salt):
            if page_hash not in self._known:
                self._known[page_hash] = None
                self._log.note(page_hash, is_added=True)

    def evict(self, token_ids: Sequence[int], salt: str | None) -> None:
        """Forget the pages of this prefix, as a full pool would."""
        for page_hash in page_hashes(token_ids, self._page_size, salt):
            if page_hash in self._known:
                del self._known[page_hash]
                self._log.note(page_hash, is_added=False)
