"""Token events → text to show: characters over several tokens, stops, end tokens."""

import pytest

from jpd.frontend.sequence_text import SequenceText, ShownText, TextRules
from jpd.frontend.stop import StopPatterns
from jpd.request import FinishReason, TokenOutput
from tests.frontend.fake_router import BOS, EOS, EOS2, make_tokenizer, piece

TOKENIZER = make_tokenizer()


def rules(
    stops: tuple[str, ...] = (), min_tokens: int = 0, include_stop: bool = False
) -> TextRules:
    return TextRules(StopPatterns(stops), frozenset({EOS, EOS2}), min_tokens, include_stop)


def play(
    rules: TextRules, events: list[list[int]], finish_reason: FinishReason = "stop"
) -> list[ShownText]:
    """Push the events, the last one with the finish reason, until the text ends."""
    sequence = SequenceText(TOKENIZER, rules)
    shown = []
    for number, token_ids in enumerate(events, 1):
        last = finish_reason if number == len(events) else None
        shown.append(sequence.push(TokenOutput(tuple(token_ids), last)))
        if shown[-1].finish_reason is not None:
            break
    return shown


def text_of(shown: list[ShownText]) -> str:
    return "".join(part.text for part in shown)


def one_by_one(token_ids: list[int]) -> list[list[int]]:
    return [[token_id] for token_id in token_ids]


@pytest.mark.parametrize("text", ["é", "😀", "👨‍👩‍👧", "नमस्ते", "🇩🇪", "a😀b"])
@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_e01_characters_over_tokens_however_they_are_cut(text: str, stops: tuple[str, ...]) -> None:
    token_ids = [*text.encode(), EOS]
    for cut in range(1, len(token_ids)):
        events = [token_ids[:cut], token_ids[cut:]]
        shown = play(rules(stops), events)
        assert text_of(shown) == text
        assert "\ufffd" not in text_of(shown)
    assert text_of(play(rules(stops), one_by_one(token_ids))) == text


def test_e01_a_character_cut_off_by_the_end_is_one_replacement() -> None:
    token_ids = list("a😀".encode())[:-1]
    assert text_of(play(rules(), one_by_one(token_ids), "length")) == "a\ufffd"
    assert text_of(play(rules(("z",)), one_by_one(token_ids), "length")) == "a\ufffd"


def test_e02_stop_over_tokens_cuts_text_tokens_and_reason() -> None:
    token_ids = [ord("x"), piece("Obs"), piece("erva"), piece("tion"), ord(":"), ord("y"), EOS]
    shown = play(rules(("Observation:",)), one_by_one(token_ids))
    assert text_of(shown) == "x"
    assert shown[-1].finish_reason == "stop"
    assert [token_id for part in shown for token_id in part.token_ids] == token_ids[:5]


def test_e02_several_tokens_in_one_event_give_the_same() -> None:
    token_ids = [ord("x"), piece("Obs"), piece("erva"), piece("tion"), ord(":"), ord("y"), EOS]
    for size in range(1, 8):
        events = [token_ids[start : start + size] for start in range(0, 7, size)]
        shown = play(rules(("Observation:",)), events)
        assert text_of(shown) == "x"
        assert sum(len(part.token_ids) for part in shown) == 5


def test_e02_held_back_text_comes_at_the_end() -> None:
    shown = play(rules(("Observation:",)), one_by_one([ord("x"), piece("Obs")]), "length")
    assert [part.text for part in shown] == ["x", "Obs"]
    assert shown[-1].finish_reason == "length"


def test_e02_stop_completed_by_the_last_token_is_a_stop_not_a_length() -> None:
    shown = play(rules(("END",)), one_by_one([ord("a"), piece("END")]), "length")
    assert text_of(shown) == "a"
    assert shown[-1].finish_reason == "stop"


def test_e02_included_stop_is_shown_up_to_its_end() -> None:
    shown = play(rules(("END",), include_stop=True), [[ord("a"), piece("END"), ord("b")]])
    assert text_of(shown) == "aEND"


def test_e04_end_token_first_gives_no_text_but_counts() -> None:
    shown = play(rules(), [[EOS]])
    assert shown == [ShownText("", (EOS,), "stop")]


def test_e23_only_the_token_that_ends_is_hidden() -> None:
    hidden = TextRules(StopPatterns(()), frozenset({ord("q")}))
    sequence = SequenceText(TOKENIZER, hidden)
    assert sequence.push(TokenOutput((ord("q"),))).text == "q"  # not the end: a letter like others
    assert sequence.push(TokenOutput((ord("a"), ord("q")), "stop")).text == "a"


def test_special_tokens_are_not_shown_unless_asked_for() -> None:
    assert text_of(play(rules(), [[BOS, ord("a")]], "length")) == "a"
    shown = TextRules(StopPatterns(()), frozenset(), skip_special_tokens=False)
    assert text_of(play(shown, [[BOS, ord("a")]], "length")) == "<bos>a"


def test_stop_must_lie_behind_min_tokens() -> None:
    token_ids = [ord(letter) for letter in "END END x"]
    assert text_of(play(rules(("END",)), one_by_one(token_ids), "length")) == ""
    assert text_of(play(rules(("END",), min_tokens=4), one_by_one(token_ids))) == "END "
    assert (
        text_of(play(rules(("END",), min_tokens=5), one_by_one(token_ids), "length")) == "END END x"
    )


def test_f10_ids_beyond_the_tokenizer_are_empty_text() -> None:
    shown = play(rules(), one_by_one([ord("a"), 271, ord("b")]), "length")
    assert text_of(shown) == "ab"


def test_without_a_tokenizer_there_are_only_ids() -> None:
    sequence = SequenceText(None, rules())
    assert sequence.push(TokenOutput((5, 6), "length")) == ShownText("", (5, 6), "length")
