"""Which prompt prefixes are in the KV pool: a radix tree whose nodes are full pages.

1. `match` before a prefill: the pages that hold the longest known prefix, held for the caller.
2. `insert` when a sequence's KV is complete: its full pages are known from now on.
3. `alloc` when room is needed: idle pages are evicted, longest idle first.
Compares tokens, not hashes: no collisions. Knows no devices. Owned by its worker's thread; what
changes is noted in `log`, for the router's index.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from jpd.cache.page_allocator import PageAllocator
from jpd.cache.page_hashes import next_hash, root_hash
from jpd.cache.prefix_log import PrefixChanges, PrefixLog

PageTokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Node:
    """One full page, known by its tokens and all that stand before them."""

    tokens: PageTokens
    page_id: int
    parent: "_Node | None"  # None: the root of a salt
    salt: Hashable
    page_hash: int  # the name that others know it by
    children: "dict[PageTokens, _Node]" = field(default_factory=dict)


class PrefixCache:
    """Prefixes of one pool. Prompts with different `salt` never share pages."""

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        retain_seconds: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._retain_seconds = retain_seconds
        self._clock = clock
        self._roots: dict[Hashable, _Node] = {}
        self.log = PrefixLog()
        self._nodes: dict[int, _Node] = {}  # by page id

    @property
    def num_pages(self) -> int:
        """Pages known here, held or idle."""
        return len(self._nodes)

    def match(self, token_ids: Sequence[int], salt: Hashable = None) -> tuple[int, ...]:
        """Pages of the longest known prefix; the caller holds them and must free them.

        At most (len(token_ids) - 1) // page_size pages: at least one token is always computed.
        """
        limit = (len(token_ids) - 1) // self._page_size
        pages = tuple(node.page_id for node in self._walk(token_ids, limit, salt))
        self._allocator.share(pages)
        return pages

    def _walk(self, token_ids: Sequence[int], limit: int, salt: Hashable) -> Iterator[_Node]:
        node = self._roots.get(salt)
        for index in range(limit):
            if node is None:
                return
            node = node.children.get(self._page_tokens(token_ids, index))
            if node is not None:
                yield node

    def _page_tokens(self, token_ids: Sequence[int], index: int) -> PageTokens:
        start = index * self._page_size
        return tuple(token_ids[start : start + self._page_size])

    def insert(
        self, token_ids: Sequence[int], page_ids: Sequence[int], salt: Hashable = None
    ) -> int:
        """Make a sequence's full pages known. Returns how many are new here.

        The caller holds them and frees them afterwards as usual. Where a prefix is known already,
        the known page stays and the caller's copy is left alone.
        """
        num_pages = min(len(token_ids) // self._page_size, len(page_ids))
        if num_pages == 0:
            return 0
        node = self._roots.setdefault(salt, _Node((), 0, None, salt, root_hash(salt)))
        path: list[_Node] = []
        num_new = 0
        for index in range(num_pages):
            tokens = self._page_tokens(token_ids, index)
            child = node.children.get(tokens)
            if child is None:
                child = self._add(node, tokens, page_ids[index])
                num_new += 1
            node = child
            path.append(node)
        for known in reversed(path):
            self._allocator.touch(known.page_id)
        return num_new

    def _add(self, parent: _Node, tokens: PageTokens, page_id: int) -> _Node:
        if page_id in self._nodes:
            raise ValueError(f"page {page_id} is already known under another prefix")
        self._allocator.mark_cached(page_id)
        page_hash = next_hash(parent.page_hash, tokens)
        node = _Node(tokens, page_id, parent, parent.salt, page_hash)
        parent.children[tokens] = node
        self._nodes[page_id] = node
        self.log.note(page_hash, is_added=True)
        return node

    def alloc(self, num_pages: int) -> tuple[int, ...] | None:
        """Take pages, evicting idle ones where needed. None, with nothing evicted: no room."""
        missing = num_pages - self._allocator.num_free
        if missing > self._allocator.num_idle:
            return None
        self.evict(missing)
        return self._allocator.alloc(num_pages)

    def evict(self, num_pages: int) -> int:
        """Free at least this many idle pages if there are so many. Returns how many were freed."""
        before = self._allocator.num_free
        while self._allocator.num_free - before < num_pages:
            oldest = self._allocator.longest_idle()
            if oldest is None:
                break
            self._forget(self._nodes[oldest[0]])
        return self._allocator.num_free - before

    def expire(self) -> int:
        """Free the pages idle for longer than retain_seconds. Returns how many were freed."""
        before = self._allocator.num_free
        limit = self._clock() - self._retain_seconds
        while (oldest := self._allocator.longest_idle()) is not None and oldest[1] < limit:
            self._forget(self._nodes[oldest[0]])
        return self._allocator.num_free - before

    def clear(self) -> None:
        """Forget everything; idle pages become free, held ones stay with their holders."""
        for root in list(self._roots.values()):
            for child in list(root.children.values()):
                self._forget(child)

    def _forget(self, node: _Node) -> None:
        """Drop a node and all below it, which could no longer be reached."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        if parent.parent is None and not parent.children:
            del self._roots[node.salt]
        stack = [node]
        while stack:
            gone = stack.pop()
            stack.extend(gone.children.values())
            del self._nodes[gone.page_id]
            self._allocator.unmark_cached(gone.page_id)
            self.log.note(gone.page_hash, is_added=False)

    def changes(self, incarnation: str, sequence: int) -> PrefixChanges:
        """What changed since a follower last asked, or all there is."""
        known = (node.page_hash for node in self._nodes.values())
        return self.log.since(incarnation, sequence, known)

    def check_integrity(self) -> None:
        """Tree, page index and allocator agree."""
        reached: set[int] = set()
        stack = list(self._roots.values())
        for root in stack:
            assert root.children, f"salt {root.salt!r} has an empty tree"
        while stack:
            node = stack.pop()
            for tokens, child in node.children.items():
                assert child.tokens == tokens and len(tokens) == self._page_size
                assert child.parent is node and child.salt == node.salt
                assert child.page_id not in reached, (
                    f"page {child.page_id} stands in the tree twice"
                )
                reached.add(child.page_id)
                stack.append(child)
        assert reached == self._nodes.keys() == set(self._allocator.cached_pages())
        self._allocator.check_integrity()
