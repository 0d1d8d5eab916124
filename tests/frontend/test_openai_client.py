"""The official client against the HTTP door."""

from collections.abc import Generator

import openai
import pytest

from jpd.errors import DeadlineError, OverloadedError, WorkerLostError
from tests.frontend.conftest import Doors, Opened
from tests.frontend.fake_router import BOS, EOS, FakeRouter, make_model, say

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def module_client(module_doors: Doors) -> Generator[openai.OpenAI, None, None]:
    url = f"{module_doors.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def client(module_client: openai.OpenAI, doors: Doors) -> openai.OpenAI:
    """The client, with a fresh router behind the doors."""
    return module_client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="héllo")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "héllo"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 7)
    assert answer.usage.total_tokens == 14


def test_completion_of_token_ids(client: openai.OpenAI, doors: Doors) -> None:
    answer = client.completions.create(model="tiny", prompt=[104, 105])
    assert answer.choices[0].text == "hi"
    answer = client.completions.create(model="tiny", prompt=[[104], [105]], max_tokens=1)
    assert [choice.text for choice in answer.choices] == ["h", "i"]
    assert doors.router.requests[0].prompt_token_ids == (104, 105)


def test_e19_several_prompts_with_several_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["a", "bb"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "a"),
        (1, "a"),
        (2, "bb"),
        (3, "bb"),
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2 + 3  # each prompt once
    assert answer.usage.completion_tokens == 2 * 2 + 2 * 3


def test_completion_defaults_to_16_tokens_as_openai_does(
    client: openai.OpenAI, doors: Doors
) -> None:
    doors.router.script = say("x" * 50)
    answer = client.completions.create(model="tiny", prompt="a")
    assert len(answer.choices[0].text) == 16
    assert answer.choices[0].finish_reason == "length"
    chat = client.chat.completions.create(model="tiny", messages=USER)
    assert chat.choices[0].message.content == "x" * 50


def test_chat(client: openai.OpenAI, doors: Doors) -> None:
    doors.router.script = say("Hello 👋")
    answer = client.chat.completions.create(model="tiny", messages=USER)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hello 👋"
    expected = [BOS, *b"<user>hi\n<assistant>"]
    assert list(doors.router.requests[0].prompt_token_ids) == expected


def test_sampling_fields_reach_the_request(client: openai.OpenAI, doors: Doors) -> None:
    client.chat.completions.create(
        model="tiny",
        messages=USER,
        max_completion_tokens=20,
        temperature=0.5,
        top_p=0.9,
        seed=11,
        stop=["zz"],
        extra_headers={"X-Session-Id": "s1"},
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [9],
            "priority": 3,
            "slo": "interactive",
        },
    )
    [request] = doors.router.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (20, 2)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.9, 0.1)
    assert (sampling.top_k, sampling.seed, sampling.ignore_eos) == (5, 11, True)
    assert (sampling.stop, sampling.stop_token_ids) == (("zz",), (9,))
    assert (request.session_id, request.priority, request.slo) == ("s1", 3, "interactive")
    assert request.deadline > request.arrival_time


def test_streamed_completion_equals_the_whole_one(client: openai.OpenAI, doors: Doors) -> None:
    doors.router.script = say("one 😀 two. three")
    settings = {"model": "tiny", "prompt": "a", "max_tokens": 100}
    whole = client.completions.create(**settings, stop=["three"])
    chunks = list(client.completions.create(**settings, stop=["three"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.choices[0].text == "one 😀 two. "
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].id != whole.id
    assert all(chunk.choices[0].text or chunk.choices[0].finish_reason for chunk in chunks)


def test_streamed_chat(client: openai.OpenAI, doors: Doors) -> None:
    doors.router.script = say("ab")
    chunks = list(client.chat.completions.create(model="tiny", messages=USER, stream=True))
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == "ab" and texts[0] == ""
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]


def test_streamed_choices_have_their_index(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="tiny", prompt=["aa", "b"], n=2, stream=True)
    texts = ["", "", "", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["aa", "aa", "b", "b"]


@pytest.mark.parametrize("include_usage", [True, False, None])
def test_e09_usage_is_one_last_chunk_without_choices(
    client: openai.OpenAI, include_usage: bool | None
) -> None:
    settings: dict[str, object] = {"model": "tiny", "prompt": ["a", "bb"], "n": 2}
    whole = client.completions.create(**settings)  # type: ignore[call-overload]
    if include_usage is not None:
        settings["stream_options"] = {"include_usage": include_usage}
    chunks = list(client.completions.create(**settings, stream=True))  # type: ignore[call-overload]
    empty = [chunk for chunk in chunks if not chunk.choices]
    if include_usage:
        assert empty == [chunks[-1]]
        assert chunks[-1].usage == whole.usage
        assert all(chunk.usage is None for chunk in chunks[:-1])
    else:
        assert not empty


def test_e08_cached_tokens_are_counted_once_for_each_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="abc", n=3)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_details_and_token_ids_come_when_asked_for(client: openai.OpenAI) -> None:
    asked = {"include_details": True, "return_token_ids": True}
    answer = client.completions.create(model="tiny", prompt="hi", extra_body=asked)
    choice = answer.choices[0].model_dump()
    assert choice["token_ids"] == [104, 105, EOS]
    assert choice["prompt_token_ids"] == [BOS, 104, 105]
    assert choice["details"]["path"] == ["disaggregated"]
    assert choice["details"]["prefill_seconds"] == 0.02
    stream = client.completions.create(model="tiny", prompt="hi", extra_body=asked, stream=True)
    choices = [chunk.choices[0].model_dump() for chunk in stream]
    assert [i for item in choices for i in item["token_ids"]] == [104, 105, EOS]
    assert choices[-1]["details"]["decode_worker"] == "decode-0"
    plain = client.completions.create(model="tiny", prompt="hi").choices[0].model_dump()
    assert "details" not in plain and "token_ids" not in plain


def test_echo(client: openai.OpenAI, doors: Doors) -> None:
    doors.router.script = say("!")
    settings = {"model": "tiny", "prompt": ["hi", "yo"], "echo": True}
    whole = client.completions.create(**settings)  # type: ignore[call-overload]
    assert [choice.text for choice in whole.choices] == ["hi!", "yo!"]
    texts = ["", ""]
    for chunk in client.completions.create(**settings, stream=True):  # type: ignore[call-overload]
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["hi!", "yo!"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (OverloadedError("no room", 7.2), openai.RateLimitError, "overloaded"),
        (WorkerLostError("decode-0", "gone"), openai.InternalServerError, "worker_lost"),
        (DeadlineError("too late"), openai.InternalServerError, "deadline_exceeded"),
        (ValueError("secret text"), openai.InternalServerError, "internal_error"),
    ],
)
def test_e15_errors_before_the_first_token_have_a_status_of_their_own(
    client: openai.OpenAI,
    doors: Doors,
    stream: bool,
    error: Exception,
    kind: type[openai.APIStatusError],
    code: str,
) -> None:
    doors.router.error = error
    with pytest.raises(kind) as caught:
        client.completions.create(model="tiny", prompt="a", stream=stream)
    assert caught.value.code == code
    assert "secret" not in str(caught.value)
    retry_after = caught.value.response.headers.get("retry-after")
    assert retry_after == ("7" if code == "overloaded" else None)
    doors.router.error = None
    assert client.completions.create(model="tiny", prompt="a").choices[0].text == "a"


def test_e18_error_in_mid_stream_is_raised_by_the_client(
    client: openai.OpenAI, doors: Doors
) -> None:
    doors.router.error, doors.router.error_after = WorkerLostError("decode-0", "gone"), 2
    text = ""
    with pytest.raises(openai.APIError, match="gone"):
        for chunk in client.completions.create(model="tiny", prompt="abcd", stream=True):
            text += chunk.choices[0].text
    assert text == "ab"


def test_model_without_a_tokenizer(open_doors: Opened) -> None:
    doors = open_doors(make_model(None))
    doors.router = FakeRouter()
    with openai.OpenAI(base_url=f"{doors.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model="tiny", prompt=[1, 2])
        assert answer.choices[0].text == ""
        assert answer.choices[0].model_dump()["token_ids"] == [1, 2, EOS]
        chunks = list(client.completions.create(model="tiny", prompt=[1, 2], stream=True))
        ids = [i for chunk in chunks for i in chunk.choices[0].model_dump()["token_ids"]]
        assert ids == [1, 2, EOS]
        with pytest.raises(openai.BadRequestError, match="no tokenizer"):
            client.completions.create(model="tiny", prompt="text")
        with pytest.raises(openai.BadRequestError, match="no tokenizer"):
            client.chat.completions.create(model="tiny", messages=USER)
