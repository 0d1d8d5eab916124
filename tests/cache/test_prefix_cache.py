"""The prefix cache: by hand, and against what is written in the pages under random traffic."""

import itertools
import random

import pytest

from jpd.cache.page_allocator import PageAllocator
from jpd.cache.page_hashes import page_hashes
from jpd.cache.prefix_cache import PrefixCache

PAGE = 4


class Pool:
    """An allocator and a cache over it, with a clock that stands still until told."""

    def __init__(self, num_pages: int, retain_seconds: float = float("inf")) -> None:
        self.now = 0.0
        self.allocator = PageAllocator(num_pages + 1, clock=lambda: self.now)
        self.cache = PrefixCache(
            self.allocator, PAGE, retain_seconds=retain_seconds, clock=lambda: self.now
        )

    def serve(self, token_ids: list[int], salt: object = None) -> int:
        """One whole request: match, allocate the rest, make known, free. Returns cached tokens."""
        matched = self.cache.match(token_ids, salt)
        fresh = self.cache.alloc(-(-len(token_ids) // PAGE) - len(matched))
        assert fresh is not None
        self.cache.insert(token_ids, matched + fresh, salt)
        self.allocator.free(matched + fresh)
        self.cache.check_integrity()
        return len(matched) * PAGE

    def num_matched(self, token_ids: list[int], salt: object = None) -> int:
        """How many tokens would be found, by the names of pages. Uses and holds none of them."""
        known = set(self.cache.changes("", 0).added)
        hashes = page_hashes(token_ids[:-1], PAGE, salt)
        return PAGE * len(list(itertools.takewhile(known.__contains__, hashes)))


def tokens(*starts: int) -> list[int]:
    """Four tokens for each number."""
    return [start * 10 + offset for start in starts for offset in range(PAGE)]


def test_a_repeated_prompt_is_found_but_one_token_is_left_to_compute() -> None:
    pool = Pool(8)
    prompt = tokens(1, 2, 3)
    assert pool.serve(prompt) == 0
    assert pool.serve(prompt) == 8, "of 12 tokens the last page must be computed"
    assert pool.serve([*prompt, 99]) == 12
    assert pool.serve(tokens(1, 2, 4)) == 8
    assert pool.serve(tokens(2, 1)) == 0
    assert pool.serve(tokens(1)[:3]) == 0


def test_matched_pages_are_held_and_cannot_be_evicted() -> None:
    pool = Pool(4)
    pool.serve(tokens(1, 2, 3))
    pages = pool.cache.match([*tokens(1, 2, 3), 0])
    assert len(pages) == 3 and pool.allocator.num_held == 3
    assert pool.cache.alloc(2) is None
    assert pool.cache.evict(4) == 0
    assert pool.cache.num_pages == 3, "nothing evicted in vain"
    pool.allocator.free(pages)
    assert pool.cache.alloc(2) is not None


def test_eviction_takes_the_longest_idle_from_its_end() -> None:
    pool = Pool(6)
    pool.serve(tokens(1, 2, 3))
    pool.serve(tokens(4, 5, 6))
    assert pool.cache.evict(1) == 1
    assert pool.num_matched([*tokens(1, 2, 3), 0]) == 8
    assert pool.num_matched([*tokens(4, 5, 6), 0]) == 12
    pool.serve(tokens(1, 2)[:8])  # used again: now 4 5 6 are older
    assert pool.cache.evict(3) == 3
    assert pool.num_matched([*tokens(1, 2), 0]) == 8
    assert pool.num_matched([*tokens(4, 5, 6), 0]) == 0


def test_two_copies_of_one_prefix_leave_one_known() -> None:
    pool = Pool(8)
    first, second = pool.cache.alloc(2), pool.cache.alloc(3)
    assert first is not None and second is not None
    assert pool.cache.insert(tokens(1, 2), first) == 2
    assert pool.cache.insert(tokens(1, 2, 3), second) == 1
    pool.allocator.free(first)
    pool.allocator.free(second)
    assert (pool.allocator.num_idle, pool.allocator.num_free) == (3, 5)
    assert pool.cache.match([*tokens(1, 2, 3), 0]) == (*first, second[2])
    pool.cache.check_integrity()


def test_forgetting_a_page_forgets_what_is_below_it_even_if_held() -> None:
    pool = Pool(8)
    first, second = pool.cache.alloc(1), pool.cache.alloc(2)
    assert first is not None and second is not None
    pool.cache.insert(tokens(1), first)
    pool.cache.insert(tokens(1, 2), second)  # page of 2 hangs below the first copy of 1
    pool.allocator.free(first)
    assert pool.cache.evict(1) == 1
    assert pool.cache.num_pages == 0
    pool.cache.check_integrity()
    pool.allocator.free(second)
    assert pool.allocator.num_free == 8


def test_expiry_after_retain_seconds() -> None:
    pool = Pool(8, retain_seconds=10.0)
    pool.serve(tokens(1))
    pool.now = 6.0
    pool.serve(tokens(2))
    pool.now = 12.0
    assert pool.cache.expire() == 1
    assert pool.num_matched([*tokens(1), 0]) == 0
    assert pool.num_matched([*tokens(2), 0]) == 4
    pool.now = 17.0
    assert pool.cache.expire() == 1
    assert pool.allocator.num_free == 8


def test_d06_different_salts_share_nothing_and_equal_ones_do() -> None:
    pool = Pool(16)
    prompt = [*tokens(1, 2), 0]
    assert pool.serve(prompt, salt="a") == 0
    assert pool.serve(prompt, salt="b") == 0
    assert pool.serve(prompt) == 0
    assert pool.serve(prompt, salt="a") == 8
    assert pool.serve(prompt, salt="b") == 8


def test_clear_keeps_held_pages_with_their_holders() -> None:
    pool = Pool(8)
    pool.serve(tokens(1, 2))
    pages = pool.cache.match(tokens(1, 3))
    pool.cache.clear()
    pool.cache.check_integrity()
    assert (pool.allocator.num_held, pool.allocator.num_idle) == (1, 0)
    pool.allocator.free(pages)
    assert pool.allocator.num_free == 8


def test_h02_branches_that_came_and_went_leave_the_tree_as_it_was() -> None:
    """A long prefix in use, and short-lived branches off it at every depth."""
    pool, draw = Pool(64), random.Random(0)
    base = list(range(20 * PAGE))
    pool.serve(base)
    held = pool.cache.match([*base, 0])
    for number in range(500):
        branch = [1000 + number] * (PAGE * draw.randint(1, 3))
        pool.serve(base[: draw.randrange(len(base))] + branch)
    pool.cache.evict(64)
    pool.cache.check_integrity()
    assert pool.cache.num_pages == len(held) == 20
    assert pool.serve([*base, 0]) == len(base)


def test_integrity_check_notices_a_page_the_tree_lost() -> None:
    pool = Pool(8)
    pool.serve(tokens(1, 2))
    next(iter(pool.cache._roots.values())).children.clear()
    with pytest.raises(AssertionError):
        pool.cache.check_integrity()


@pytest.mark.parametrize("seed", range(6))
def test_d05_every_hit_holds_what_its_tokens_say_under_random_traffic(seed: int) -> None:
    """The oracle: `written` says for which tokens each page was filled last."""
    rng = random.Random(seed)
    pool = Pool(24, retain_seconds=40.0)
    written: dict[int, tuple[object, tuple[int, ...]]] = {}
    running: list[tuple[object, list[int], tuple[int, ...]]] = []
    num_hits = 0
    for step in range(500):
        pool.now = float(step)
        if running and (rng.random() < 0.5 or len(running) > 4):
            salt, prompt, pages = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.8:  # else: cancelled, nothing becomes known
                pool.cache.insert(prompt, pages, salt)
            pool.allocator.free(pages)
        else:
            salt = rng.choice(["a", "b"])
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
            known = {written[page] for page in pool.allocator.cached_pages()}
            longest = 0
            while (longest + 1) * PAGE < len(prompt) and (
                (salt, tuple(prompt[: (longest + 1) * PAGE])) in known
            ):
                longest += 1
            matched = pool.cache.match(prompt, salt)
            assert len(matched) == longest and longest * PAGE < len(prompt)
            for index, page in enumerate(matched):
                assert written[page] == (salt, tuple(prompt[: (index + 1) * PAGE]))
            fresh = pool.cache.alloc(-(-len(prompt) // PAGE) - longest)
            if fresh is None:
                pool.allocator.free(matched)
            else:
                num_hits += longest > 0
                for index, page in enumerate(fresh, start=longest):
                    written[page] = (salt, tuple(prompt[: (index + 1) * PAGE]))
                running.append((salt, prompt, matched + fresh))
        if rng.random() < 0.1:
            pool.cache.expire()
        pool.cache.check_integrity()
    assert num_hits >= 10
    for _, _, pages in running:
        pool.allocator.free(pages)
    pool.cache.clear()
    assert pool.allocator.num_free == 24
