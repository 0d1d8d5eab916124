"""Whose turn it is: short ones overtake, nobody starves."""

import random

import pytest

from jpd.engine.buckets import ChunkLayout
from jpd.engine.scheduler import ALLOWANCE, OVERHEAD_TOKENS, PrefillScheduler

NEVER = float("inf")
WHOLE = ChunkLayout(1, 128)


def make(seconds_per_token: float = 0.001) -> PrefillScheduler:
    scheduler = PrefillScheduler()
    scheduler.seconds_per_token = seconds_per_token
    return scheduler


def pick(scheduler: PrefillScheduler) -> str | None:
    return next(iter(scheduler.first(1)), None)


def test_equal_prompts_keep_their_order() -> None:
    scheduler = make()
    for number in range(3):
        scheduler.add(str(number), 100, now=0.0, priority=0, deadline=NEVER)
    order = []
    while (task := pick(scheduler)) is not None:
        order.append(task)
        scheduler.remove(task)
    assert order == ["0", "1", "2"]


def test_a_short_prompt_overtakes_a_long_one_that_has_begun() -> None:
    scheduler = make()
    scheduler.add("long", 4000, now=0.0, priority=0, deadline=NEVER)
    assert pick(scheduler) == "long"
    scheduler.add("short", 40, now=3.0, priority=0, deadline=NEVER)
    assert pick(scheduler) == "short"
    scheduler.remove("short")
    assert pick(scheduler) == "long"


def test_nobody_starves_under_a_flood_of_short_prompts() -> None:
    """One unit of time computes 1000 tokens, and 1000 tokens of short prompts arrive in it."""
    scheduler = make()
    scheduler.add("long", 4000, now=0.0, priority=0, deadline=NEVER)
    left = {"long": 4000}
    now, number = 0.0, 0
    while "long" in left:
        task = f"short-{number}"
        number += 1
        left[task] = 100
        scheduler.add(task, 100, now=now, priority=0, deadline=NEVER)
        picked = pick(scheduler)
        assert picked is not None
        left[picked] -= 100
        if left[picked] == 0:
            del left[picked]
            scheduler.remove(picked)
        now += 0.1
        assert now < 2 * ALLOWANCE * 4000 * 0.001


def test_a_near_deadline_comes_first_and_so_does_a_higher_priority() -> None:
    scheduler = make()
    scheduler.add("plain", 100, now=0.0, priority=0, deadline=NEVER)
    scheduler.add("due", 100, now=0.1, priority=0, deadline=0.3)
    assert pick(scheduler) == "due"
    scheduler.add("urgent", 4000, now=0.2, priority=20, deadline=NEVER)
    assert pick(scheduler) == "urgent"


def test_priority_is_a_head_start_not_a_right() -> None:
    scheduler = make()
    scheduler.add("low", 100, now=0.0, priority=0, deadline=NEVER)
    scheduler.add("high", 100, now=0.9, priority=1, deadline=NEVER)
    assert pick(scheduler) == "high"
    scheduler.add("later", 100, now=1.1, priority=1, deadline=NEVER)
    scheduler.remove("high")
    assert pick(scheduler) == "low"


def test_a_removed_task_that_comes_back_has_its_new_place() -> None:
    scheduler = make()
    scheduler.add("a", 10, now=0.0, priority=0, deadline=NEVER)
    scheduler.remove("a")
    scheduler.remove("a")
    assert pick(scheduler) is None and len(scheduler) == 0
    scheduler.add("b", 10, now=1.0, priority=0, deadline=NEVER)
    scheduler.add("a", 10, now=2.0, priority=0, deadline=NEVER)
    assert pick(scheduler) == "b"
    with pytest.raises(ValueError, match="a is queued already"):
        scheduler.add("a", 10, now=2.0, priority=0, deadline=NEVER)


def test_the_first_ones_equal_a_naive_sort_under_random_operations() -> None:
    rng = random.Random(0)
    scheduler = make()
    due: dict[str, tuple[float, int]] = {}
    for number in range(500):
        if due and rng.random() < 0.45:
            task = rng.choice(list(due))
            scheduler.remove(task)
            del due[task]
        else:
            tokens, priority = rng.randint(1, 5000), rng.randint(0, 3)
            deadline = rng.choice([NEVER, number + rng.random() * 5])
            scheduler.add(
                str(number), tokens, now=float(number), priority=priority, deadline=deadline
            )
            allowance = ALLOWANCE * 0.001 * tokens
            due[str(number)] = (min(number + allowance, deadline) - priority, number)
        assert scheduler.first(4) == sorted(due, key=lambda task: due[task])[:4]


def test_the_measured_rate_is_followed() -> None:
    scheduler = make()
    for _ in range(50):
        scheduler.observe(WHOLE, num_tokens=100, seconds=1.0)
    assert scheduler.seconds_per_token == pytest.approx(0.01, rel=1e-3)
    assert scheduler.seconds(WHOLE) == pytest.approx(1.0)
    assert scheduler.seconds(ChunkLayout(4, 128)) == pytest.approx(
        0.01 * (512 + OVERHEAD_TOKENS), rel=1e-3
    )
