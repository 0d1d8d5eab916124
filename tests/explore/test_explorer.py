"""The control plane through ten thousand orders of events; and proof that a fault would be seen."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from jpd import cli
from jpd.explore.explorer import Story, explore, explore_seed
from jpd.explore.paper_transfer import PaperTransfer
from jpd.request import RequestState
from jpd.router.accounting import account_end
from jpd.router.holding import Holding
from jpd.router.journey import Journey
from jpd.transfer.missing import MissingKV
from jpd.transfer.offers import Offers
from jpd.transfer.protocol import PieceRange
from jpd.worker.decode_attempts import DecodeAttempts
from jpd.worker.pages_back import AwaitedPages
from jpd.worker.prefill_attempts import PrefillAttempts

NUM_SEEDS_TO_FIND = 600
"""Each of the faults below must show within so many orders."""


@pytest.mark.slow
@pytest.mark.timeout(600)  # cores may be busy
def test_ten_thousand_orders_of_events() -> None:
    report = explore(range(10_000), num_processes=2)
    assert report.failed is None, tell(report.failed)
    assert report.num_interleavings == 10_000


def test_some_orders_of_events() -> None:
    report = explore(range(20_000, 20_150))
    assert report.failed is None, tell(report.failed)


def tell(story: Story) -> str:
    return f"jpd explore --seed {story.seed}: {story.violation}"


def find() -> Story:
    report = explore(range(NUM_SEEDS_TO_FIND))
    assert report.failed is not None, "the fault was not found"
    return report.failed


def test_the_same_seed_is_the_same_story(monkeypatch: pytest.MonkeyPatch) -> None:
    stories = [explore_seed(number) for number in (7, 7, 8)]
    assert stories[0].events == stories[1].events != stories[2].events
    forget_pages_of_a_prefill(monkeypatch)
    found = find()
    again = explore_seed(found.seed)
    assert (again.events, again.violation) == (found.events, found.violation)


def forget_pages_of_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(self: PrefillAttempts, attempt_id: str) -> None:
        self._held.pop(attempt_id, None)
        self._engine.remove(attempt_id)

    monkeypatch.setattr(PrefillAttempts, "remove", remove)


def write_into_pages_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a writer does that knows addresses instead of owners: the pages may be another's now."""
    addresses: dict[str, tuple[int, ...]] = {}
    reserve, receive = DecodeAttempts.reserve, DecodeAttempts.receive

    def remember(self: DecodeAttempts, attempt):  # type: ignore[no-untyped-def]
        found = reserve(self, attempt)
        if found is not None:
            addresses[attempt.attempt_id] = self._held[attempt.attempt_id].pages.page_ids
        return found

    def write(self: DecodeAttempts, piece):  # type: ignore[no-untyped-def]
        if piece.error is None and self.get(piece.attempt_id) is None:
            page_ids = addresses[piece.attempt_id]
            places = page_ids[piece.pages.start : piece.pages.stop]
            self._engine.write_pages(piece.arrays, places, piece.layers)
        return receive(self, piece)

    monkeypatch.setattr(PaperTransfer, "cancel", lambda self, attempt_id: None)
    monkeypatch.setattr(DecodeAttempts, "reserve", remember)
    monkeypatch.setattr(DecodeAttempts, "receive", write)


def end_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Journey._end

    def end_again(self: Journey, state: RequestState, error: Exception | None) -> None:
        end(self, state, error)
        if state is RequestState.CANCELLED:
            account_end(self._metrics, self.record, error)

    monkeypatch.setattr(Journey, "_end", end_again)


def forget_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Holding.release

    def forget(self: Holding) -> None:
        if self.is_kv_complete:
            self.decode_worker = ""
        release(self)

    monkeypatch.setattr(Holding, "release", forget)


def do_not_wait_for_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode begins with the last piece to be offered, not with the last to arrive."""
    receive = DecodeAttempts.receive

    def hurry(self: DecodeAttempts, piece):  # type: ignore[no-untyped-def]
        held = self.get(piece.attempt_id)
        if held is not None and piece.is_last and piece.error is None:
            held.missing = MissingKV(piece.pages, self._engine.num_layers)
            for layer in set(range(self._engine.num_layers)) - set(piece.layers):
                held.missing.take(replace(piece, layer_start=layer, num_layers=1))
        return receive(self, piece)

    monkeypatch.setattr(DecodeAttempts, "receive", hurry)


def take_a_page_with_any_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode begins when something of each page is here."""

    def take(self: MissingKV, piece: PieceRange) -> None:
        for page in piece.pages:
            del self._layers[page]

    monkeypatch.setattr(MissingKV, "take", take)


def do_not_wait_for_pages_that_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a prompt is computed with the first of them, not with the last."""
    monkeypatch.setattr(AwaitedPages, "is_whole", property(lambda self: True))


def keep_offers_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Offers, "expire", lambda self: None)


def serve_late_reads_of_what_is_there_now(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Offers.begin_copy

    def serve(self: Offers, offer_id: str):  # type: ignore[no-untyped-def]
        if offer_id in self._offers or not self._offers:
            return begin(self, offer_id)
        other = next(iter(self._offers))
        self._offers[offer_id] = self._offers[other]
        return begin(self, offer_id)

    monkeypatch.setattr(Offers, "begin_copy", serve)


def give_back_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages go back twice when a decode is cancelled."""
    remove = DecodeAttempts.remove

    def twice(self: DecodeAttempts, attempt_id: str) -> None:
        held = self.get(attempt_id)
        remove(self, attempt_id)
        if held is not None and any(map(self._pool._allocator.num_holders, held.pages.page_ids)):
            self._pool._allocator.free(
                [p for p in held.pages.page_ids if self._pool._allocator.num_holders(p)]
            )

    monkeypatch.setattr(DecodeAttempts, "remove", twice)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (forget_pages_of_a_prefill, "holders, 0 attempts list it"),
        (write_into_pages_given_back, "which holds nothing here, was written"),
        (end_twice, "terminal events of"),
        (forget_a_row, "there are"),
        (do_not_wait_for_pages, "the reference has"),
        (take_a_page_with_any_of_its_layers, "the reference has"),
        (do_not_wait_for_pages_that_come_back, "the reference has"),
        (keep_offers_for_ever, "pieces are kept"),
        (serve_late_reads_of_what_is_there_now, ""),
        (give_back_twice, "attempts list it"),
    ],
)
def test_a_fault_put_in_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert what in find().violation


def test_the_command_tells_the_seed_and_replays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explore", "--seeds", "20"]) == 0
    assert "20 interleavings" in capsys.readouterr().out
    forget_pages_of_a_prefill(monkeypatch)
    assert cli.main(["explore", "--seeds", "99"]) == 1
    printed = capsys.readouterr().out
    assert "replay: jpd explore --seed " in printed
    seed = printed.rpartition("--seed ")[2].strip()
    assert cli.main(["explore", "--seed", seed]) == 1
    assert "attempts list it" in capsys.readouterr().out
