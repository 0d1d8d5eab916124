"""Placement as arithmetic: load by phase, affinity that yields, paths by the uncached suffix."""

from dataclasses import replace

import pytest

from jpd.router import policy
from jpd.router.policy import Row, Wishes, WorkerView

WISHES = Wishes(Row(num_pages=4), num_sequence_pages=4)


def view(name: str, role: str = "decode", **fields: object) -> WorkerView:
    values: dict = {
        "is_available": True,
        "is_suspended": False,
        "can_prefill": True,
        "num_slots": 0 if role == "prefill" else 8,
        "num_pages": 100,
    }
    return WorkerView(name=name, role=role, **(values | fields))  # type: ignore[arg-type]


def names(views: list[WorkerView]) -> list[str]:
    return [v.name for v in views]


def test_decode_load_is_the_scarcer_of_rows_and_pages() -> None:
    assert policy.decode_load(view("d", num_rows=2, num_reserved_pages=10)) == 0.25
    assert policy.decode_load(view("d", num_rows=2, num_reserved_pages=90)) == 0.9


def test_decoders_are_ranked_by_load_then_by_turn() -> None:
    fleet = [
        view("busy", num_rows=5),
        view("idle-late", last_chosen=9),
        view("idle-early", last_chosen=3),
        view("p", "prefill"),
    ]
    assert names(policy.rank_decoders(fleet, WISHES)) == ["idle-early", "idle-late", "busy"]


def test_b08_a_full_worker_is_asked_last_and_only_for_a_higher_priority() -> None:
    fleet = [
        view("low", num_rows=8, lowest_priority=0),
        view("high", num_rows=8, lowest_priority=5),
        view("free", num_rows=7, lowest_priority=5),
    ]
    assert names(policy.rank_decoders(fleet, WISHES)) == ["free"]
    urgent = replace(WISHES, row=Row(4, priority=3))
    assert names(policy.rank_decoders(fleet, urgent)) == ["free", "low"]


def test_room_is_counted_as_the_workers_count_it() -> None:
    """The first pages must be free, the whole sequence must fit an empty pool, growers keep one."""
    wishes = Wishes(Row(num_pages=4, grows=True), num_sequence_pages=50)
    assert policy.has_room([view("d", num_reserved_pages=96)], wishes)
    assert not policy.has_room([view("d", num_reserved_pages=96, num_growing_rows=1)], wishes)
    assert not policy.has_room([view("d", num_pages=49)], wishes)


def test_b03_ties_are_broken_by_turn_not_by_what_is_cached() -> None:
    fleet = [view("a", num_rows=6), view("b")]
    assert names(policy.rank_decoders(fleet, WISHES))[0] == "b"


def test_who_cannot_decode_is_not_asked() -> None:
    fleet = [
        view("prefill", "prefill"),
        view("gone", is_available=False),
        view("full", num_rows=8),
        view("small", num_pages=3),
        view("lost"),
        view("good"),
    ]
    wishes = replace(WISHES, lost={"lost"})
    assert names(policy.rank_decoders(fleet, wishes)) == ["good"]
    assert names(policy.capable_decoders(fleet, wishes)) == ["full", "good"]


def test_suspended_and_avoided_workers_are_a_last_resort() -> None:
    fleet = [view("sick", is_suspended=True), view("avoided"), view("well", num_rows=7)]
    wishes = replace(WISHES, avoided={"avoided"})
    assert names(policy.rank_decoders(fleet, wishes)) == ["well"]
    assert names(policy.rank_decoders(fleet[:2], wishes)) == ["sick", "avoided"]


@pytest.mark.parametrize(
    ("sticky_rows", "others_rows", "stays"),
    [(0, 0, True), (2, 0, True), (3, 0, False), (6, 2, True), (7, 2, False), (8, 7, False)],
)
def test_b04_affinity_yields_to_load(sticky_rows: int, others_rows: int, stays: bool) -> None:
    """8 rows: a session stays up to twice the least load plus two rows; a full worker is out."""
    fleet = [view("other", num_rows=others_rows), view("home", num_rows=sticky_rows)]
    wishes = replace(WISHES, sticky_decode="home")
    assert (names(policy.rank_decoders(fleet, wishes))[0] == "home") is stays


@pytest.mark.parametrize("change", [{"is_available": False}, {"is_suspended": True}])
def test_b05_affinity_yields_when_the_worker_is_gone(change: dict) -> None:
    fleet = [view("home", **change), view("other")]
    wishes = replace(WISHES, sticky_decode="home")
    assert names(policy.rank_decoders(fleet, wishes))[0] == "other"
    lost = replace(wishes, lost={"home"})
    assert names(policy.rank_decoders([view("home"), view("other")], lost)) == ["other"]


def test_b02_prefill_load_is_in_tokens_not_requests() -> None:
    fleet = [
        view("long", "prefill", num_prefills=1, num_prefill_tokens=2000),
        view("short", "prefill", num_prefills=5, num_prefill_tokens=100),
    ]
    assert policy.choose_prefill(fleet, "d", WISHES).name == "short"


def test_prefill_affinity_yields_to_load() -> None:
    wishes = replace(WISHES, sticky_prefill="home")
    home = view("home", "prefill", num_prefill_tokens=1000)
    fleet = [view("other", "prefill"), home]
    assert policy.choose_prefill(fleet, "d", wishes).name == "home"
    fleet = [view("other", "prefill"), replace(home, num_prefill_tokens=1025)]
    assert policy.choose_prefill(fleet, "d", wishes).name == "other"


def test_colocated_workers_prefill_for_others_only_when_asked() -> None:
    fleet = [view("a", "colocated"), view("b", "colocated")]
    assert policy.choose_prefill(fleet, "a", WISHES) is None
    assert policy.choose_prefill(fleet, "a", WISHES, allow_colocated=True).name == "b"


@pytest.mark.parametrize(
    ("num_uncached", "limit", "can_prefill", "path"),
    [
        (16, 16, True, "local"),
        (17, 16, True, "disaggregated"),
        (1, 0, True, "disaggregated"),
        (16, 16, False, "disaggregated"),
    ],
)
def test_the_path_goes_by_the_uncached_suffix(
    num_uncached: int, limit: int, can_prefill: bool, path: str
) -> None:
    decoder = view("d", can_prefill=can_prefill)
    assert policy.choose_path(decoder, num_uncached, limit, None) == path


def test_paths_of_colocated_workers_and_forced_ones() -> None:
    assert policy.choose_path(view("c", "colocated"), 9999, 0, None) == "local"
    assert policy.choose_path(view("c", "colocated"), 9999, 0, True) == "disaggregated"
    assert policy.choose_path(view("d"), 9999, 0, False) == "local"
    assert policy.choose_path(view("d"), 1, 64, True) == "disaggregated"


def test_room_is_a_row_and_all_pages_by_the_routers_own_count() -> None:
    assert policy.has_room([view("d", num_rows=7, num_reserved_pages=96)], WISHES)
    assert not policy.has_room([view("d", num_rows=7, num_reserved_pages=97)], WISHES)
    assert not policy.has_room([view("d", num_rows=8)], WISHES)
