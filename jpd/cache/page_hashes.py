"""Names of prompt pages that mean the same in every process: a chain of 64-bit hashes.

The hash of a page covers its tokens and, through its parent, all that stand before them; the salt
of a tenant stands before the first page. Two prefixes that share a hash by accident cost time and
never tokens, for workers compare tokens. Called by the prefix cache and, once a prompt, by the
router.
"""

from collections.abc import Hashable, Sequence
from struct import pack

from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4


def root_hash(salt: Hashable) -> int:
    """What stands before the first page of this salt's prompts."""
    return 0 if salt is None else xxh3_64_intdigest(str(salt).encode())


def next_hash(parent: int, page_tokens: Sequence[int]) -> int:
    """The hash of a page that follows `parent`."""
    return xxh3_64_intdigest(_packed(page_tokens), parent)


class PageHashes:
    """The hashes of all full pages of a prompt, each computed once and not before it is needed."""

    def __init__(self, token_ids: Sequence[int], page_size: int, salt: Hashable = None) -> None:
        self._token_ids, self._page_size = token_ids, page_size
        self._num_pages = len(token_ids) // page_size
        self._last = root_hash(salt)
        self._known: list[int] = []

    def first(self, count: int) -> Sequence[int]:
        """At least so many, or all there are, in the prompt's order."""
        start, end = len(self._known), min(count, self._num_pages)
        if start < end:
            size, last = self._page_size, self._last
            tokens, width = _packed(self._token_ids[start * size : end * size]), size * TOKEN_BYTES
            for place in range(0, len(tokens), width):
                last = xxh3_64_intdigest(tokens[place : place + width], last)
                self._known.append(last)
            self._last = last
        return self._known

    def all(self) -> Sequence[int]:
        return self.first(self._num_pages)


def page_hashes(token_ids: Sequence[int], page_size: int, salt: Hashable = None) -> tuple[int, ...]:
    """The hashes of all full pages of a prompt, at once."""
    return tuple(PageHashes(token_ids, page_size, salt).all())


def _packed(token_ids: Sequence[int]) -> bytes:
    """Three times as fast as an array of them is made."""
    return pack(f"<{len(token_ids)}i", *token_ids)
