"""The host's side of one worker's KV pool: pages for a sequence, with the prefix it already holds.

Joins the allocator and the prefix cache for the two roles of a worker. Knows no attempts and no
devices. Owned by the worker's thread.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jpd.cache.page_allocator import PageAllocator, num_pages_for
from jpd.cache.prefix_cache import PrefixCache
from jpd.cache.prefix_log import PrefixChanges


@dataclass(frozen=True, slots=True)
class HeldPages:
    """Pages of a sequence, in its order; its first num_cached_tokens tokens are in them."""

    page_ids: tuple[int, ...]
    num_cached_tokens: int


class PagePool:
    """Takes and gives back pages of sequences; full pages stay known as prefixes."""

    def __init__(
        self,
        allocator: PageAllocator,
        prefix_cache: PrefixCache,
        *,
        page_size: int,
        retain_seconds: float,
    ) -> None:
        self._allocator, self._prefix_cache = allocator, prefix_cache
        self._retain_seconds = retain_seconds
        self.page_size = page_size
        self.num_releases = 0  # tells those who found no room whether to try again

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_held(self) -> int:
        return self._allocator.num_held

    @property
    def num_cached(self) -> int:
        return self._allocator.num_idle

    @property
    def next_expiry(self) -> float:
        """When the longest unused prefix is to be forgotten, by time.monotonic."""
        oldest = self._allocator.longest_idle()
        return float("inf") if oldest is None else oldest[1] + self._retain_seconds

    def num_pages_for(self, num_tokens: int) -> int:
        return num_pages_for(num_tokens, self.page_size)

    @property
    def num_available(self) -> int:
        """Pages that can be taken now."""
        return self._allocator.num_free + self._allocator.num_idle

    def take(
        self,
        token_ids: Sequence[int],
        num_tokens: int,
        salt: str | None = None,
        *,
        use_prefix: bool = True,
        num_spare: int = 0,
    ) -> HeldPages | None:
        """Pages for num_tokens tokens beginning with token_ids. None: no room, nothing held.

        Prefixes are shared only among sequences of the same salt. num_spare pages must be left.
        """
        cached = self._prefix_cache.match(token_ids, salt) if use_prefix else ()
        num_fresh = self.num_pages_for(num_tokens) - len(cached)
        has_room = num_fresh + num_spare <= self.num_available
        fresh = self._prefix_cache.alloc(num_fresh) if has_room else None
        if fresh is None:
            self._allocator.free(cached)
            return None
        return HeldPages(cached + fresh, len(cached) * self.page_size)

    def take_page(self) -> int | None:
        """One page more for a sequence that grows. None: there is none."""
        pages = self._prefix_cache.alloc(1)
        return None if pages is None else pages[0]

    def keep(
        self, token_ids: Sequence[int], page_ids: Sequence[int], salt: str | None = None
    ) -> None:
        """Make the full pages of token_ids, whose KV is written, known as a prefix."""
        self._prefix_cache.insert(token_ids, page_ids, salt)

    def release(self, page_ids: Sequence[int]) -> None:
        """Give a sequence's pages back; those known as a prefix stay until they are evicted."""
        self._allocator.free(page_ids)
        self.num_releases += 1

    @property
    def incarnation(self) -> str:
        return self._prefix_cache.log.incarnation

    @property
    def num_prefix_changes(self) -> int:
        return self._prefix_cache.log.num_changes

    def prefix_changes(self, incarnation: str, sequence: int) -> PrefixChanges:
        """Pages that became known or were forgotten since that change, or all there are."""
        return self._prefix_cache.changes(incarnation, sequence)

    def expire(self) -> None:
        """Forget prefixes that nobody used for the retention time."""
        self._prefix_cache.expire()

    def check_integrity(self, held: Sequence[Sequence[int]]) -> None:
        """Tables agree, and every page is held just as often as it stands in `held`.

        `held` are the pages of all live attempts.
        """
        self._prefix_cache.check_integrity()
        holders = Counter(page for page_ids in held for page in page_ids)
        for page in range(1, self._allocator.num_pages + 1):
            counted, listed = self._allocator.num_holders(page), holders[page]
            assert counted == listed, f"page {page}: {counted} holders, {listed} attempts list it"
