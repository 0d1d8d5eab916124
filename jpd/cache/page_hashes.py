"""Names of prompt pages that mean the same in every process: a chain of 64-bit hashes.

The hash of a page covers its tokens and, through its parent, all that stand before them; the salt
of a tenant stands before the first page. Two prefixes that share a hash by accident cost time and
never tokens, for workers compare tokens. Called by the prefix cache and, once a prompt, by the
router.
"""

from array import array
from collections.abc import Hashable, Sequence
from hashlib import blake2b

HASH_BYTES = 8


def root_hash(salt: Hashable) -> int:
    """What stands before the first page of this salt's prompts."""
    return 0 if salt is None else _digest(str(salt).encode())


def next_hash(parent: int, page_tokens: Sequence[int]) -> int:
    """The hash of a page that follows `parent`."""
    return _digest(parent.to_bytes(HASH_BYTES, "little") + array("i", page_tokens).tobytes())


def page_hashes(token_ids: Sequence[int], page_size: int, salt: Hashable = None) -> tuple[int, ...]:
    """The hashes of all full pages of a prompt, in its order."""
    tokens = array("i", token_ids).tobytes()
    width = page_size * array("i").itemsize
    known = root_hash(salt).to_bytes(HASH_BYTES, "little")
    hashes = []
    for start in range(0, len(token_ids) // page_size * width, width):
        known = blake2b(known + tokens[start : start + width], digest_size=HASH_BYTES).digest()
        hashes.append(int.from_bytes(known, "little"))
    return tuple(hashes)


def _digest(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=HASH_BYTES).digest(), "little")
