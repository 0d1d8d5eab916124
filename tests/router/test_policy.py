"""Who may be chosen, and the named policies: small functions over one snapshot."""

from collections import Counter
from dataclasses import replace
from typing import get_args

from jpd.config import PolicyName
from jpd.router import policies, policy
from jpd.router.policies import POLICIES
from jpd.router.policy import Row, Wishes, WorkerView
from jpd.router.rates import Line

WISHES = Wishes(Row(num_pages=4), num_sequence_pages=4, num_tokens=100)


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


def test_b08_a_full_worker_is_asked_only_for_a_higher_priority() -> None:
    fleet = [
        view("low", num_rows=8, lowest_priority=0),
        view("high", num_rows=8, lowest_priority=5),
        view("free", num_rows=7, lowest_priority=5),
    ]
    assert names(policy.free_decoders(fleet, WISHES)) == ["free"]
    assert policy.yielding_decoders(fleet, WISHES) == []
    urgent = WISHES._replace(row=Row(4, priority=3))
    assert names(policy.yielding_decoders(fleet, urgent)) == ["low"]


def test_room_is_counted_as_the_workers_count_it() -> None:
    """The first pages must be free, the whole sequence must fit an empty pool, growers keep one."""
    wishes = Wishes(Row(num_pages=4, grows=True), num_sequence_pages=50)
    assert policy.has_room([view("d", num_reserved_pages=96)], wishes)
    assert not policy.has_room([view("d", num_reserved_pages=96, num_growing_rows=1)], wishes)
    assert not policy.has_room([view("d", num_pages=49)], wishes)


def test_who_cannot_decode_is_not_asked() -> None:
    fleet = [
        view("prefill", "prefill"),
        view("gone", is_available=False),
        view("full", num_rows=8),
        view("small", num_pages=3),
        view("lost"),
        view("good"),
    ]
    wishes = WISHES._replace(lost={"lost"})
    assert names(policy.free_decoders(fleet, wishes)) == ["good"]
    assert names(policy.capable_decoders(fleet, wishes)) == ["full", "good"]


def test_suspended_and_avoided_workers_are_a_last_resort() -> None:
    fleet = [view("sick", is_suspended=True), view("avoided"), view("well", num_rows=7)]
    wishes = WISHES._replace(avoided={"avoided"})
    assert names(policy.free_decoders(fleet, wishes)) == ["well"]
    assert names(policy.free_decoders(fleet[:2], wishes)) == ["sick", "avoided"]


def test_colocated_workers_prefill_for_others_only_when_asked() -> None:
    fleet = [view("a", "colocated"), view("b", "colocated")]
    assert policy.capable_prefills(fleet, "a", WISHES) == []
    for asked in (WISHES._replace(disaggregate=True), WISHES._replace(pinned_prefill="b")):
        assert names(policy.capable_prefills(fleet, "a", asked)) == ["b"]


def test_b06_a_pin_holds_for_its_own_hop_only() -> None:
    fleet = [view("p0", "prefill"), view("p1", "prefill"), view("d0"), view("d1")]
    on_decode = WISHES._replace(pinned_decode="d1")
    assert names(policy.free_decoders(fleet, on_decode)) == ["d1"]
    assert names(policy.capable_prefills(fleet, "d1", on_decode)) == ["p0", "p1"]
    on_prefill = WISHES._replace(pinned_prefill="p1")
    assert names(policy.free_decoders(fleet, on_prefill)) == ["d0", "d1"]
    assert names(policy.capable_prefills(fleet, "d0", on_prefill)) == ["p1"]


def test_room_is_a_row_and_all_pages_by_the_routers_own_count() -> None:
    assert policy.has_room([view("d", num_rows=7, num_reserved_pages=96)], WISHES)
    assert not policy.has_room([view("d", num_rows=7, num_reserved_pages=97)], WISHES)
    assert not policy.has_room([view("d", num_rows=8)], WISHES)


def test_every_policy_of_the_mesh_file_is_there_and_ranks_both_hops() -> None:
    assert tuple(POLICIES) == get_args(PolicyName)
    fleet = [view(f"p{n}", "prefill") for n in range(3)] + [view(f"d{n}") for n in range(3)]
    for found in POLICIES.values():
        assert sorted(names(found.rank_decoders(fleet, WISHES))) == ["d0", "d1", "d2"]
        prefills = found.rank_prefills(fleet, fleet[3], WISHES)
        assert sorted(names(prefills)) == ["p0", "p1", "p2"]
        assert found.rank_decoders(fleet[:3], WISHES) == []
        assert found.rank_prefills(fleet[3:], fleet[3], WISHES) == []


def test_round_robin_asks_who_was_chosen_longest_ago() -> None:
    fleet = [view("b", last_chosen=5), view("a", last_chosen=2, num_rows=7), view("c")]
    assert names(policies.round_robin(fleet, WISHES, "decode")) == ["c", "a", "b"]


def test_least_load_then_by_turn() -> None:
    fleet = [view("busy", num_rows=5), view("late", last_chosen=9), view("early", last_chosen=3)]
    assert names(policies.least_load(fleet, WISHES, "decode")) == ["early", "late", "busy"]


def test_b02_prefill_load_is_in_tokens_not_requests() -> None:
    fleet = [
        view("long", "prefill", num_prefills=1, num_prefill_tokens=2000),
        view("short", "prefill", num_prefills=5, num_prefill_tokens=100),
    ]
    assert names(policies.least_load(fleet, WISHES, "prefill"))[0] == "short"


def test_power_of_two_takes_the_less_loaded_of_two_drawn_evenly() -> None:
    fleet = [view(f"d{n}", num_rows=n) for n in range(4)]
    first = Counter()
    for draw in range(1200):
        ranked = policies.power_of_two(fleet, WISHES._replace(draw=draw), "decode")
        assert sorted(names(ranked)) == ["d0", "d1", "d2", "d3"]
        first[ranked[0].name] += 1
    assert first == {"d0": 600, "d1": 400, "d2": 200}, "the worst of four never wins a draw of two"
    assert names(policies.power_of_two(fleet[:1], WISHES, "decode")) == ["d0"]


def test_least_kv_and_least_requests_count_what_they_say() -> None:
    fleet = [
        view("pages", num_reserved_pages=50, num_rows=1),
        view("rows", num_reserved_pages=10, num_rows=5),
    ]
    assert names(policies.least_kv(fleet, WISHES, "decode"))[0] == "rows"
    assert names(policies.least_requests(fleet, WISHES, "decode"))[0] == "pages"


def test_prefix_affinity_goes_by_the_longest_prefix_then_by_load() -> None:
    wishes = WISHES._replace(cached_tokens={"a": 32, "b": 64, "c": 64})
    fleet = [view("a"), view("b", num_rows=3), view("c", num_rows=1)]
    assert names(policies.prefix_affinity(fleet, wishes, "decode")) == ["c", "b", "a"]


def test_sessions_spread_evenly_and_move_only_with_their_worker() -> None:
    fleet = [view(f"d{n}") for n in range(4)]
    sessions = [WISHES._replace(session_id=f"session-{n}") for n in range(400)]
    homes = [policies.session_affinity(fleet, wishes, "decode")[0].name for wishes in sessions]
    assert min(Counter(homes).values()) > 60
    fewer = [policies.session_affinity(fleet[:3], wishes, "decode")[0].name for wishes in sessions]
    moved = [old for old, new in zip(homes, fewer, strict=True) if old != new]
    assert set(moved) == {"d3"}


def test_length_aware_goes_by_measured_speed_and_spills() -> None:
    slow, fast = Line(0.0, 1e-3), Line(0.0, 1e-4)
    fleet = [
        view("slow", "prefill", prefill_line=slow),
        view("fast", "prefill", prefill_line=fast, num_prefill_tokens=100),
    ]
    long, short = WISHES._replace(is_long=True), WISHES
    assert names(policies.length_aware(fleet, short, "prefill"))[0] == "slow"
    idle = [fleet[0], replace(fleet[1], num_prefill_tokens=0)]
    assert names(policies.length_aware(idle, long, "prefill"))[0] == "fast"
    busy = [fleet[0], replace(fleet[1], num_prefill_tokens=100_000)]
    assert names(policies.length_aware(busy, long, "prefill"))[0] == "slow", "it spills over"
    equal = [replace(found, prefill_line=fast) for found in fleet]
    assert names(policies.length_aware(equal, long, "prefill"))[0] == "slow", "all are strong"
