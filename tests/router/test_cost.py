"""The cost of a placement as arithmetic: each term moves the choice the way it should."""

from dataclasses import replace

import pytest

from jpd.router import cost
from jpd.router.policy import Row, Wishes, WorkerView
from jpd.router.rates import Line
from tests.router.test_policy import names, view

SECONDS = {
    "prefill_line": Line(0.0, 1e-3),
    "step_line": Line(0.1, 0.01),
    "link_line": Line(0.0, 1e-3),
    "kv_bytes_per_token": 1.0,
}
WISHES = Wishes(Row(4), num_sequence_pages=4, num_tokens=1000, num_output_tokens=10.0)


def prefill(name: str, **fields: object) -> WorkerView:
    return view(name, "prefill", **(SECONDS | fields))


def decode(name: str, **fields: object) -> WorkerView:
    return view(name, **(SECONDS | fields))


def best(fleet: list[WorkerView], wishes: Wishes = WISHES) -> tuple[str, str]:
    decoder = cost.rank_decoders(fleet, wishes)[0]
    return cost.rank_prefills(fleet, decoder, wishes)[0].name, decoder.name


def test_b02_b03_the_queue_counts_and_not_what_is_cached_of_others() -> None:
    fleet = [prefill("a", num_prefills=1, num_prefill_tokens=50), prefill("b"), decode("d")]
    assert best(fleet) == ("b", "d")


def test_a_cached_prefix_draws_until_its_queue_outweighs_it() -> None:
    wishes = WISHES._replace(cached_tokens={"a": 800})
    worth = 800 + round(1e3 * cost.MOST_DUPLICATE_SECONDS)
    for tokens, expected in ((0, "a"), (worth - 300, "a"), (worth + 300, "b")):
        fleet = [prefill("a", num_prefill_tokens=tokens), prefill("b"), decode("d")]
        assert best(fleet, wishes)[0] == expected, tokens


def test_a_cache_is_not_worth_missing_the_first_token_of_its_class() -> None:
    fleet = [prefill("a", num_prefill_tokens=2200), prefill("b"), decode("d")]
    wishes = WISHES._replace(cached_tokens={"a": 900})
    assert best(fleet, wishes)[0] == "a"
    assert best(fleet, wishes._replace(ttft=8.0))[0] == "a"
    assert best(fleet, wishes._replace(ttft=2.0))[0] == "b"


def test_even_caches_are_no_reason_to_leave_a_much_faster_worker() -> None:
    """It has done all the work of late; one of equal pace would get the next prompt."""
    fast = prefill("fast", prefill_line=Line(0.0, 1e-4), recent_tokens=1e6)
    assert best([fast, prefill("slow"), decode("d")])[0] == "fast"
    assert best([fast, replace(fast, name="peer", recent_tokens=0.0), decode("d")])[0] == "peer"


def test_a_fast_worker_gets_the_prompt_until_it_is_busier_in_time() -> None:
    fast = Line(0.0, 1e-4)
    fleet = [prefill("slow"), prefill("fast", prefill_line=fast), decode("d")]
    assert best(fleet)[0] == "fast"
    fleet[1] = replace(fleet[1], num_prefill_tokens=8_000)
    assert best(fleet)[0] == "fast", "0.9 s against 1 s"
    fleet[1] = replace(fleet[1], num_prefill_tokens=12_000)
    assert best(fleet)[0] == "slow"


def test_the_link_of_the_pair_decides_jointly() -> None:
    """Each prefill worker is near another decode worker; d1 is a little busier."""
    near, far = Line(0.0, 1e-5), Line(0.0, 1e-2)
    fleet = [
        prefill("p0", links={"d0": far, "d1": near}, num_prefill_tokens=0),
        prefill("p1", links={"d0": far, "d1": far}),
        decode("d0"),
        decode("d1", num_rows=2),
    ]
    assert best(fleet) == ("p0", "d1")


def test_pages_that_the_decode_worker_holds_do_not_travel() -> None:
    fleet = [prefill("p"), decode("d0"), decode("d1", num_rows=1)]
    assert best(fleet)[1] == "d0"
    assert best(fleet, WISHES._replace(cached_tokens={"d1": 900}))[1] == "d1"


def test_the_batch_and_head_room_count_on_the_decode_side() -> None:
    assert best([prefill("p"), decode("d0", num_rows=3), decode("d1", num_rows=2)])[1] == "d1"
    small, large = decode("d0", num_pages=10), decode("d1", num_pages=1000)
    assert best([prefill("p"), small, large])[1] == "d1"


def test_b04_a_popular_prefix_spreads_before_its_worker_is_much_hotter_than_the_mean() -> None:
    fleet = [prefill(f"p{n}") for n in range(4)] + [decode("d")]
    wishes = WISHES._replace(cached_tokens={"p0": 900})
    for _ in range(400):
        chosen = cost.rank_prefills(fleet, fleet[-1], wishes)[0]
        held = {**wishes.cached_tokens, chosen.name: 900}
        uncached = wishes.num_uncached(chosen.name)
        fleet = [
            replace(found, recent_tokens=found.recent_tokens + uncached, last_chosen=_ + 1)
            if found.name == chosen.name
            else found
            for found in fleet
        ]
        wishes = wishes._replace(cached_tokens=held)
    work = [found.recent_tokens for found in fleet[:4]]
    assert max(work) <= 1.2 * sum(work) / 4


def test_costs_that_are_nearly_equal_go_round() -> None:
    fleet = [prefill("a", last_chosen=2), prefill("b", last_chosen=1, num_prefill_tokens=5)]
    assert names(cost.rank_prefills([*fleet, decode("d")], decode("d"), WISHES)) == ["b", "a"]


def test_the_terms_add_up_to_what_was_ranked_by() -> None:
    fleet = [
        prefill("p", num_prefill_tokens=70, num_prefills=2, recent_tokens=500.0),
        prefill("q"),
        decode("d", num_rows=3, num_reserved_pages=12),
    ]
    wishes = WISHES._replace(cached_tokens={"p": 64, "q": 128, "d": 32})
    ranked = cost.remote_costs(fleet[:2], fleet[2], wishes)[0] + cost.decode_cost(fleet[2], wishes)
    taken = replace(fleet[2], num_rows=4, num_reserved_pages=16)
    terms = cost.explain(taken, fleet[0], wishes, [*fleet[:2], taken])
    values = terms.rounded()
    assert sum(values.values()) == pytest.approx(1e3 * ranked, rel=1e-4)
    assert {"queue", "prefill", "duplicate", "transfer", "decode", "batch"} <= values.keys()


@pytest.mark.parametrize(
    ("rows", "queue", "uncached", "limit", "is_local"),
    [
        (1, 0, 16, 16, True),  # nothing travels, nobody is stopped
        (1, 0, 17, 16, False),  # longer than the operator allows
        (9, 0, 16, 16, False),  # eight rows would stand still
        (9, 400, 16, 16, True),  # the prefill worker is busier than that is worth
        (1, 0, 1, 0, False),
    ],
)
def test_the_path_goes_by_the_suffix_the_load_and_the_rates(
    rows: int, queue: int, uncached: int, limit: int, is_local: bool
) -> None:
    decoder = decode("d", num_rows=rows, num_slots=16)
    sender = prefill("p", num_prefill_tokens=queue)
    cached = {"d": 1000 - uncached, "p": 1000 - uncached}
    wishes = WISHES._replace(cached_tokens=cached, local_prefill_tokens=limit)
    assert cost.is_local_cheaper(decoder, sender, wishes) is is_local
    unable = replace(decoder, can_prefill=False)
    assert not cost.is_local_cheaper(unable, sender, wishes)


def test_paths_of_colocated_workers_forced_ones_and_pins() -> None:
    colocated, sender = view("c", "colocated"), prefill("p")
    long = WISHES._replace(num_tokens=9999)
    assert cost.is_local_cheaper(colocated, sender, long)
    assert not cost.is_local_cheaper(colocated, sender, long._replace(disaggregate=True))
    assert cost.is_local_cheaper(decode("d"), sender, long._replace(disaggregate=False))
    assert cost.is_local_cheaper(decode("d"), None, long._replace(pinned_prefill="d"))
    short = WISHES._replace(num_tokens=2, local_prefill_tokens=64, pinned_prefill="p")
    assert not cost.is_local_cheaper(decode("d"), sender, short)


def test_sending_back_is_weighed_against_computing_again() -> None:
    """d holds 800 of 1000 tokens, p none of them; what travels back is 800 kB."""
    decoder = decode("d", kv_bytes_per_token=1000.0, links={"p": Line(0.0, 1e-8)})
    sender = prefill("p", prefill_line=Line(0.0, 1e-4), links={"d": Line(0.0, 0.0)})
    wishes = WISHES._replace(num_tokens=1000, cached_tokens={"d": 800}, send_back="cost")
    assert cost.send_back_gain(sender, decoder, wishes) == pytest.approx(0.080 - 0.008)
    assert cost.is_sent_back_to(sender, decoder, wishes)
    terms = cost.explain(decoder, sender, wishes, [decoder, sender])
    assert (terms.prefill, terms.send_back) == pytest.approx((20.0, 8.0))

    slow = replace(decoder, links={"p": Line(0.0, 2e-7)})  # 160 ms against 80
    assert not cost.is_sent_back_to(sender, slow, wishes)
    terms = cost.explain(slow, sender, wishes, [slow, sender])
    assert (terms.prefill, terms.send_back) == pytest.approx((100.0, 0.0))
    assert cost.is_sent_back_to(sender, slow, wishes._replace(send_back="always"))
    assert not cost.is_sent_back_to(sender, decoder, wishes._replace(send_back="never"))
    for has_it in ({"d": 800, "p": 800}, {"p": 800}, {}):
        assert not cost.is_sent_back_to(sender, decoder, wishes._replace(cached_tokens=has_it))


def test_the_three_ways_to_a_prefix_that_only_the_decode_worker_has() -> None:
    """Appending, sending back, computing again: whichever takes the fewest milliseconds."""

    def way(link: float, uncached: int) -> str:
        decoder = decode("d", kv_bytes_per_token=1000.0, links={"p": Line(0.0, link)}, num_rows=9)
        sender = prefill("p", links={"d": Line(0.0, 0.0)})
        cached = {"d": WISHES.num_tokens - uncached}
        wishes = WISHES._replace(
            cached_tokens=cached, send_back="cost", local_prefill_tokens=uncached
        )
        if cost.is_local_cheaper(decoder, sender, wishes):
            return "append"
        return "send back" if cost.is_sent_back_to(sender, decoder, wishes) else "compute"

    fast, slow = 1e-9, 1e-3
    assert way(fast, 200) == "send back"
    assert way(slow, 200) == "compute"
    assert way(slow, 1) == "append"
