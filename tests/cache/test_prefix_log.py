"""Changes of a prefix cache as a follower in another process hears of them."""

import random

from jpd.cache.page_hashes import next_hash, page_hashes, root_hash
from jpd.cache.prefix_log import PrefixChanges, PrefixLog
from tests.cache.test_prefix_cache import PAGE, Pool


class Follower:
    """Knows what it was told."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.position = ("", 0)
        self.num_snapshots = 0

    def take(self, changes: PrefixChanges) -> None:
        if changes.is_snapshot:
            self.known.clear()
            self.num_snapshots += 1
        self.known -= set(changes.removed)
        self.known |= set(changes.added)
        self.position = changes.incarnation, changes.sequence


def test_a_page_is_named_by_all_that_stands_before_it() -> None:
    hashes = page_hashes(range(10), 4)
    assert len(hashes) == 2, "the last page is not full"
    assert hashes[1] == next_hash(next_hash(root_hash(None), range(4)), range(4, 8))
    assert page_hashes(range(8), 4) == hashes
    assert page_hashes([9, *range(1, 8)], 4)[1] != hashes[1]
    assert page_hashes(range(8), 4, salt="tenant")[0] != hashes[0]
    assert all(0 <= known < 1 << 64 for known in hashes)


def test_hashes_are_the_same_in_every_process_for_ever() -> None:
    assert page_hashes([1, 2, 3, 4], 4) == (8052976908588476977,)


def held_pages(pool: Pool, prompt: list[int], salt: str | None) -> tuple[int, ...]:
    """The names of this prompt's pages that the cache finds by its tokens."""
    matched = pool.cache.match([*prompt, 0], salt)
    pool.allocator.free(matched)
    return page_hashes(prompt, PAGE, salt)[: len(matched)]


def test_a_follower_knows_what_the_cache_holds_whatever_happens() -> None:
    pool, draw = Pool(num_pages=24), random.Random(0)
    follower, held = Follower(), []
    for _ in range(400):
        prompt = [draw.randrange(2) for _ in range(draw.choice((4, 9, 16)))]
        salt = draw.choice((None, "a"))
        pool.serve(prompt, salt)
        held.append((prompt, salt))
        if draw.random() < 0.3:
            follower.take(pool.cache.changes(*follower.position))
            assert follower.known == {name for one in held for name in held_pages(pool, *one)}
    assert follower.num_snapshots == 1


def test_a_gap_or_another_life_is_answered_with_all_there_is() -> None:
    log = PrefixLog(max_changes=3)
    for page_hash in range(5):
        log.note(page_hash, is_added=True)
    assert log.since(log.incarnation, 2, range(5)).added == (4, 3, 2)
    gap = log.since(log.incarnation, 1, range(5))
    assert gap.is_snapshot and gap.added == (0, 1, 2, 3, 4) and gap.sequence == 5
    assert log.since("earlier life", 5, range(5)).is_snapshot
    assert log.since(log.incarnation, 9, range(5)).is_snapshot
    assert log.since(log.incarnation, 5, range(5)).added == ()


def test_a_page_that_came_and_went_is_told_of_once() -> None:
    log = PrefixLog()
    for is_added in (True, False, True):
        log.note(7, is_added)
    log.note(8, is_added=True)
    log.note(8, is_added=False)
    changes = log.since(log.incarnation, 0, ())
    assert (changes.added, changes.removed) == ((7,), (8,))
