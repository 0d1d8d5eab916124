"""Stop strings: the incremental matcher against a search in the whole text."""

import itertools
import random

import pytest

from jpd.frontend.stop import StopMatcher, StopPatterns


def run(stops: list[str], pieces: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(StopPatterns(stops), include_stop)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.stop is not None:
            return shown, matcher.stop
    return shown + matcher.finish(), None


def search(stops: list[str], text: str) -> tuple[str, str | None]:
    """By definition: the stop that is complete first, of two that end together the longer one."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_e02_stop_over_several_pieces_is_never_shown() -> None:
    assert run(["Observation:"], ["a Obs", "erva", "tion", ": b"]) == ("a ", "Observation:")


def test_e02_held_back_text_is_shown_as_soon_as_it_cannot_match() -> None:
    matcher = StopMatcher(StopPatterns(["Observation:"]), include_stop=False)
    assert matcher.push("x Obs") == "x "
    assert matcher.push("erver") == "Observer"
    assert matcher.push(" Obser") == " "
    assert matcher.finish() == "Obser"


def test_e02_stop_that_ends_inside_a_piece_drops_the_rest() -> None:
    assert run(["END"], ["one EN", "D two"]) == ("one ", "END")


@pytest.mark.parametrize("stops", [["ab", "abc"], ["abc", "ab"]])
def test_e02_of_two_stops_the_one_complete_first_wins(stops: list[str]) -> None:
    assert run(stops, ["xabc"]) == ("x", "ab")
    assert run(stops, ["xa", "bc"]) == ("x", "ab")


def test_of_two_stops_that_end_together_the_longer_wins() -> None:
    assert run(["c", "abc"], ["xabc"]) == ("x", "abc")


def test_stop_can_be_included() -> None:
    assert run(["END"], ["one EN", "D two"], include_stop=True) == ("one END", "END")


def test_overlapping_prefixes_fall_back() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")
    assert run(["abab!"], ["ababab!"]) == ("ab", "abab!")


def test_equals_search_in_the_whole_text_however_it_is_cut() -> None:
    rng = random.Random(0)
    for _ in range(1500):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", k=rng.randint(0, 14)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 5)))
        edges = itertools.pairwise([0, *cuts, len(text)])
        pieces = [text[start:end] for start, end in edges]
        assert run(stops, pieces) == search(stops, text), (stops, pieces)


def test_nothing_is_held_back_that_cannot_become_a_stop() -> None:
    rng = random.Random(1)
    for _ in range(300):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5)))]
        matcher = StopMatcher(StopPatterns(stops), include_stop=False)
        text, shown = "", ""
        for letter in rng.choices("abc", k=12):
            text += letter
            shown += matcher.push(letter)
            if matcher.stop is not None:
                break
            held = text[len(shown) :]
            assert stops[0].startswith(held)
            assert not any(stops[0].startswith(text[i:]) for i in range(len(shown)))
