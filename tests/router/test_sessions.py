"""Bindings of sessions: refreshed, expired, bounded."""

from jpd.router.sessions import SessionTable


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_binding_lives_as_long_as_it_is_used() -> None:
    clock = Clock()
    table = SessionTable(10.0, clock)
    table.bind("s", "d0", "p0")
    clock.now = 9.0
    table.bind("s", "d1", "p0")
    clock.now = 18.0
    assert table.find("s").decode_worker == "d1"
    clock.now = 19.5
    assert table.find("s") is None
    assert table.find("other") is None
    assert table.find(None) is None


def test_a_turn_prefilled_on_decode_keeps_the_prefill_worker() -> None:
    table = SessionTable(10.0, Clock())
    table.bind("s", "d0", "p0")
    table.bind("s", "d0", None)
    assert table.find("s").prefill_worker == "p0"


def test_requests_without_a_session_leave_nothing() -> None:
    table = SessionTable(10.0, Clock())
    table.bind(None, "d0", "p0")
    assert len(table) == 0


def test_h01_the_table_is_bounded_in_number_and_in_time() -> None:
    clock = Clock()
    table = SessionTable(10.0, clock, max_sessions=100)
    for number in range(1000):
        table.bind(f"s{number}", "d0", None)
        table.bind("hot", "d1", None)
        assert len(table) <= 100
    assert table.find("hot") is not None and table.find("s999") is not None
    assert table.find("s0") is None
    clock.now = 11.0
    table.bind("new", "d0", None)
    assert len(table) == 1
