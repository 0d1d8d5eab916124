"""The prefix index: what it is told, what it forgets, and how large it gets."""

import random

from jpd.cache.page_hashes import page_hashes
from jpd.cache.prefix_log import PrefixChanges
from jpd.router.prefix_index import PrefixIndex


def told(index: PrefixIndex, worker: str, *added: int, removed: tuple[int, ...] = ()) -> None:
    incarnation, sequence = index.position(worker)
    changes = PrefixChanges(incarnation or "life", sequence + 1, not incarnation, added, removed)
    index.apply(worker, changes)


def test_the_longest_held_prefix_is_found_at_every_length() -> None:
    index = PrefixIndex(["a", "b", "c"])
    prompt = tuple(range(100, 120))
    for length in range(21):
        index.forget("a")
        told(index, "a", *prompt[:length], 7, 8)
        assert index.match(prompt) == ({"a": length} if length else {})
    told(index, "b", *prompt[:3])
    assert index.match(prompt) == {"a": 20, "b": 3}
    assert index.match(()) == {}


def test_pages_that_were_evicted_are_not_credited() -> None:
    index = PrefixIndex(["a"])
    told(index, "a", 1, 2, 3)
    told(index, "a", removed=(3,))
    assert index.match((1, 2, 3)) == {"a": 2}


def test_b14_another_life_of_a_worker_begins_empty() -> None:
    index = PrefixIndex(["a"])
    told(index, "a", 1, 2, 3)
    index.apply("a", PrefixChanges("next life", 1, False, (9,)))
    assert index.match((1, 2, 3)) == {"a": 3}, "no snapshot: it does not follow what is known"
    index.apply("a", PrefixChanges("next life", 0, True))
    assert index.match((1, 2, 3)) == {} and index.position("a") == ("next life", 0)


def test_late_changes_of_the_past_are_left_alone() -> None:
    index = PrefixIndex(["a"])
    told(index, "a", 1)
    told(index, "a", removed=(1,))
    index.apply("a", PrefixChanges("life", 1, False, (1,)))
    assert index.match((1,)) == {}


def test_what_was_just_computed_counts_at_once_and_is_dropped_unless_confirmed() -> None:
    index = PrefixIndex(["a", "silent"])
    told(index, "a", 1)
    index.expect("a", (1, 2, 3))
    index.expect("silent", (1, 2))
    assert index.match((1, 2, 3)) == {"a": 3}
    index.settle("a")
    assert index.match((1, 2, 3)) == {"a": 3}
    told(index, "a", 2)
    index.settle("a")
    assert index.match((1, 2, 3)) == {"a": 2}


def test_h01_the_index_is_bounded_and_hot_prefixes_survive() -> None:
    workers = [f"w{n}" for n in range(16)]
    index, draw = PrefixIndex(workers, max_pages=16_000), random.Random(0)
    hot = page_hashes(range(64), 16)
    for name in workers:
        told(index, name, *hot)
    for number in range(20_000):
        name = draw.choice(workers)
        prompt = page_hashes((number, *range(63)), 16)
        told(index, name, *prompt)
        if number % 10 == 0:
            index.expect(name, hot)
        assert len(index) <= 16_000
    assert len(index) > 8_000
    assert index.match(hot) == dict.fromkeys(workers, 4)


def test_a_snapshot_larger_than_the_budget_is_cut() -> None:
    index = PrefixIndex(["a"], max_pages=100)
    index.apply("a", PrefixChanges("life", 500, True, tuple(range(500))))
    assert len(index) <= 100 and index.match(range(40)) == {"a": 40}
