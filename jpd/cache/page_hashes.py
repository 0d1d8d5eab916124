"""Names of prompt pages that mean the same in every process: a chain of 64-bit hashes.

The hash of a page covers its tokens and, through its parent, all that stand before them; the salt
of a tenant stands before the first page. Two prefixes that share a hash by accident cost time and
never tokens, for workers compare tokens. Called by the prefix cache and, once a prompt, by the
router.
"""

from array import array
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from struct import unpack

HASH_BYTES = 8


def root_hash(salt: Hashable) -> int:
    """What stands before the first page of this salt's prompts."""
    return 0 if salt is None else _number(blake2b(str(salt).encode(), digest_size=HASH_BYTES))


def next_hash(parent: int, page_tokens: Sequence[int]) -> int:
    """The hash of a page that follows `parent`."""
    before = parent.to_bytes(HASH_BYTES, "little")
    page = array("i", page_tokens).tobytes()
    return _number(blake2b(page, digest_size=HASH_BYTES, salt=before))


def page_hashes(token_ids: Sequence[int], page_size: int, salt: Hashable = None) -> tuple[int, ...]:
    """The hashes of all full pages of a prompt, in its order."""
    tokens = array("i", token_ids).tobytes()
    width = page_size * array("i").itemsize
    known = root_hash(salt).to_bytes(HASH_BYTES, "little")
    hashes = []
    for start in range(0, len(token_ids) // page_size * width, width):
        page = tokens[start : start + width]
        known = blake2b(page, digest_size=HASH_BYTES, salt=known).digest()
        hashes.append(known)
    return unpack(f"<{len(hashes)}Q", b"".join(hashes))


def _number(hasher: blake2b) -> int:
    return int.from_bytes(hasher.digest(), "little")
