"""Page ownership: by hand, and against a naive model under random operations."""

import random

import pytest

from jpd.cache.page_allocator import PageAllocator


def test_pages_come_in_order_and_the_bin_is_never_given() -> None:
    allocator = PageAllocator(5)
    assert allocator.num_pages == 4
    assert allocator.alloc(3) == (1, 2, 3)
    assert allocator.alloc(2) is None, "all or none"
    assert allocator.num_free == 1
    assert allocator.alloc(1) == (4,)
    assert allocator.alloc(0) == ()


def test_a_shared_page_returns_with_its_last_holder() -> None:
    allocator = PageAllocator(3)
    pages = allocator.alloc(2)
    assert pages is not None
    allocator.share(pages)
    allocator.free(pages)
    assert (allocator.num_held, allocator.num_free) == (2, 0)
    allocator.free(pages)
    assert (allocator.num_held, allocator.num_free) == (0, 2)
    allocator.check_integrity()


def test_freeing_twice_and_sharing_a_free_page_are_refused() -> None:
    allocator = PageAllocator(3)
    pages = allocator.alloc(1)
    assert pages is not None
    allocator.free(pages)
    with pytest.raises(ValueError, match="page 1 is not held"):
        allocator.free(pages)
    with pytest.raises(ValueError, match="page 1 is free"):
        allocator.share(pages)
    with pytest.raises(ValueError, match="page 0 is not held"):
        allocator.free((0,))
    allocator.check_integrity()


def test_a_cached_page_goes_idle_and_the_end_of_a_sequence_first() -> None:
    now = [0.0]
    allocator = PageAllocator(4, clock=lambda: now[0])
    pages = allocator.alloc(3)
    assert pages is not None
    for page in pages:
        allocator.mark_cached(page)
    now[0] = 7.0
    allocator.free(pages)
    assert (allocator.num_held, allocator.num_idle, allocator.num_free) == (0, 3, 0)
    assert allocator.longest_idle() == (3, 7.0)
    allocator.touch(3)
    assert allocator.longest_idle() == (2, 7.0)
    allocator.share((2,))
    assert allocator.longest_idle() == (1, 7.0)
    allocator.unmark_cached(1)
    assert allocator.num_free == 1
    allocator.check_integrity()


def test_integrity_check_notices_a_page_with_two_states() -> None:
    allocator = PageAllocator(4)
    allocator.alloc(1)
    allocator._free.append(1)
    with pytest.raises(AssertionError, match="page 1"):
        allocator.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_counts_equal_a_naive_model_under_random_operations(seed: int) -> None:
    rng = random.Random(seed)
    allocator = PageAllocator(33)
    held: list[tuple[int, ...]] = []
    for _ in range(400):
        if held and rng.random() < 0.45:
            allocator.free(held.pop(rng.randrange(len(held))))
        elif held and rng.random() < 0.3:
            pages = rng.choice(held)
            allocator.share(pages)
            held.append(pages)
        else:
            wanted = rng.randint(1, 9)
            in_use = {page for pages in held for page in pages}
            taken = allocator.alloc(wanted)
            assert (taken is None) == (wanted > 32 - len(in_use))
            if taken is not None:
                assert len(set(taken)) == wanted and not in_use & set(taken)
                held.append(taken)
        for page in range(1, 33):
            assert allocator.num_holders(page) == sum(pages.count(page) for pages in held)
        allocator.check_integrity()
    for pages in held:
        allocator.free(pages)
    assert allocator.num_free == 32
