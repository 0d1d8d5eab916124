"""Log-probabilities at the doors: the official client, both shapes, streamed and whole."""

import json
from collections.abc import Generator
from typing import Any

import grpc
import openai
import pytest

from jpd.frontend.token_texts import LogprobWriter, TokenTexts
from jpd.request import LEAST_LOGPROB, TokenLogprobs
from jpd.rpc import jpd_pb2, jpd_pb2_grpc
from tests.frontend.conftest import Doors, Opened
from tests.frontend.fake_router import (
    EOS,
    FakeRouter,
    make_model,
    make_tokenizer,
    opinion,
    piece,
    say,
)

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def module_client(module_doors: Doors) -> Generator[openai.OpenAI, None, None]:
    url = f"{module_doors.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def client(module_client: openai.OpenAI, doors: Doors) -> openai.OpenAI:
    return module_client


def joined(parts: list[Any]) -> dict[str, list[Any]]:
    """Completion logprobs of several chunks as one."""
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    given = [part for part in parts if part is not None]
    return {key: [value for part in given for value in getattr(part, key)] for key in keys}


def own(*token_ids: int) -> list[float]:
    return [opinion(token_id, 0).logprob for token_id in token_ids]


@pytest.mark.parametrize("n", [1, 2])
def test_e06_completion_has_one_entry_for_each_token(
    client: openai.OpenAI, doors: Doors, n: int
) -> None:
    doors.router.script = say("héy")
    asked: dict[str, Any] = {"model": "tiny", "prompt": "a", "logprobs": 2, "n": n}
    whole = client.completions.create(**asked)
    assert whole.usage is not None and whole.usage.completion_tokens == n * 5
    for choice in whole.choices:
        found = joined([choice.logprobs])
        assert found["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "y", "<eos>"]
        assert found["token_logprobs"] == own(*"héy".encode(), EOS)
        assert found["top_logprobs"][0] == {"g": -103 / 64, "h": -104 / 64}
        assert found["text_offset"] == [0, 1, 1, 2, 3]
    chunks = list(client.completions.create(**asked, stream=True))
    for index in range(n):
        mine = [c.choices[0].logprobs for c in chunks if c.choices[0].index == index]
        assert joined(mine) == joined([whole.choices[index].logprobs])


@pytest.mark.parametrize(("num_top", "others"), [(0, {}), (1, {"g": -103 / 64})])
def test_a_token_that_is_not_among_the_best_stands_beside_them(
    client: openai.OpenAI, doors: Doors, num_top: int, others: dict[str, float]
) -> None:
    doors.router.script = say("h")
    answer = client.completions.create(model="tiny", prompt="a", logprobs=num_top)
    found = joined([answer.choices[0].logprobs])
    assert found["top_logprobs"][0] == {"h": -104 / 64} | others


@pytest.mark.parametrize("n", [1, 3])
def test_e07_echo_gives_the_prompts_own(client: openai.OpenAI, doors: Doors, n: int) -> None:
    doors.router.script = say("!")
    asked: dict[str, Any] = {"model": "tiny", "prompt": "ab", "echo": True, "logprobs": 1, "n": n}
    whole = client.completions.create(**asked)
    for choice in whole.choices:
        found = joined([choice.logprobs])
        assert choice.text == "ab!"
        assert found["tokens"] == ["<bos>", "a", "b", "!", "<eos>"]
        assert found["token_logprobs"] == [None, *own(97, 98, 33, EOS)]
        assert found["top_logprobs"][0] is None
        assert found["text_offset"] == [0, 0, 1, 2, 3]
        assert "prompt_logprobs" not in choice.model_dump()
    asked_of_router = [request.sampling.prompt_logprobs for request in doors.router.requests]
    assert asked_of_router == [1] + [None] * (n - 1), "computed once for a prompt"
    chunks = list(client.completions.create(**asked, stream=True))
    for index in range(n):
        mine = [c.choices[0].logprobs for c in chunks if c.choices[0].index == index]
        assert joined(mine) == joined([whole.choices[0].logprobs])


@pytest.mark.parametrize("n", [1, 2])
def test_chat_shape(client: openai.OpenAI, doors: Doors, n: int) -> None:
    doors.router.script = say("é")
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "logprobs": True, "n": n}
    whole = client.chat.completions.create(**asked, top_logprobs=2)
    for choice in whole.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        first, _, last = choice.logprobs.content
        assert (first.bytes, first.logprob) == ([0xC3], own(0xC3)[0])
        assert [top.bytes for top in first.top_logprobs] == [[0xC2], [0xC3]]
        assert (last.token, last.bytes) == ("<eos>", list(b"<eos>"))
    chunks = list(client.chat.completions.create(**asked, top_logprobs=2, stream=True))
    for index in range(n):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        content = [x for c in mine if c.logprobs for x in c.logprobs.content or []]
        expected = whole.choices[index].logprobs
        assert expected is not None and content == expected.content
    plain = client.chat.completions.create(**asked).choices[0].logprobs
    assert plain is not None and plain.content is not None
    assert plain.content[0].top_logprobs == []


def test_without_the_question_there_are_none(client: openai.OpenAI, doors: Doors) -> None:
    assert client.completions.create(model="tiny", prompt="a").choices[0].logprobs is None
    chat = client.chat.completions.create(model="tiny", messages=USER, logprobs=False)
    assert chat.choices[0].logprobs is None
    assert all(request.sampling.logprobs is None for request in doors.router.requests)


@pytest.mark.parametrize("tokens_per_event", [1, 2, 7])
def test_e02_text_that_is_held_back_keeps_tokens_and_logprobs_aligned(
    client: openai.OpenAI, doors: Doors, tokens_per_event: int
) -> None:
    token_ids = [ord("x"), piece("Obs"), piece("erva"), piece("tion"), ord(":"), ord("y"), EOS]
    doors.router = FakeRouter(lambda request: token_ids, tokens_per_event=tokens_per_event)
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": "a",
        "logprobs": 0,
        "stop": ["Observation:"],
        "extra_body": {"return_token_ids": True},
    }
    whole = client.completions.create(**asked).choices[0]
    assert whole.text == "x" and whole.model_dump()["token_ids"] == token_ids[:5]
    found = joined([whole.logprobs])
    assert found["tokens"] == ["x", "Obs", "erva", "tion", ":"]
    assert found["token_logprobs"] == own(*token_ids[:5])
    chunks = [c.choices[0] for c in client.completions.create(**asked, stream=True)]
    assert joined([chunk.logprobs for chunk in chunks]) == found
    for chunk in chunks:
        tokens = [] if chunk.logprobs is None else chunk.logprobs.tokens
        assert len(tokens or []) == len(chunk.model_dump()["token_ids"])


def test_prompt_logprobs_in_vllms_field(client: openai.OpenAI, doors: Doors) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "ab", "extra_body": {"prompt_logprobs": 1}}
    choice = client.completions.create(**asked).choices[0].model_dump()
    expected = [
        None,
        {
            "97": {"logprob": -97 / 64, "rank": 2, "decoded_token": "a"},
            "96": {"logprob": -96 / 64, "rank": 1, "decoded_token": "`"},
        },
        {
            "98": {"logprob": -98 / 64, "rank": 2, "decoded_token": "b"},
            "97": {"logprob": -97 / 64, "rank": 1, "decoded_token": "a"},
        },
    ]
    assert choice["prompt_logprobs"] == expected and choice["logprobs"] is None
    chunks = [c.choices[0].model_dump() for c in client.completions.create(**asked, stream=True)]
    assert [c.get("prompt_logprobs") for c in chunks] == [expected] + [None] * (len(chunks) - 1)
    asked = {"model": "tiny", "messages": USER, "extra_body": {"prompt_logprobs": 1}}
    chat = client.chat.completions.create(**asked).choices[0].model_dump()
    assert len(chat["prompt_logprobs"]) == len(b"<user>hi\n<assistant>") + 1


def test_settings_reach_the_request(client: openai.OpenAI, doors: Doors) -> None:
    client.completions.create(
        model="tiny",
        prompt="a",
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": -100, "271": 1.5},  # type: ignore[dict-item]
        extra_body={"repetition_penalty": 1.25},
    )
    sampling = doors.router.requests[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.repetition_penalty == 1.25
    assert sampling.logit_bias == ((5, -100), (271, 1.5))


def test_tokens_as_ids_when_asked_or_without_a_tokenizer(
    client: openai.OpenAI, doors: Doors, open_doors: Opened
) -> None:
    doors.router.script = say("h")
    as_ids = {"return_tokens_as_token_ids": True}
    answer = client.completions.create(model="tiny", prompt="a", logprobs=0, extra_body=as_ids)
    assert joined([answer.choices[0].logprobs])["tokens"] == ["token_id:104", f"token_id:{EOS}"]
    bare = open_doors(make_model(None))
    bare.router = FakeRouter(lambda request: [5, EOS])
    body = {"prompt": [1, 2], "logprobs": 1, "echo": True}
    [choice] = bare.http.post("/v1/completions", json=body).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in (1, 2, 5, EOS)]


def test_e16_the_least_logprob_is_a_number_in_json() -> None:
    writer = LogprobWriter(TokenTexts(make_tokenizer()), 1)
    least = TokenLogprobs(LEAST_LOGPROB, 40, (6,), (LEAST_LOGPROB,))
    assert "-9999.0" in json.dumps(writer.completion([5], [least]), allow_nan=False)


def test_grpc_carries_all_of_it(doors: Doors) -> None:
    doors.router.script = say("h")
    sampling = jpd_pb2.SamplingParams(
        logprobs=2,
        prompt_logprobs=0,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=0.25,
        logit_bias={5: -2.0},
    )
    with grpc.insecure_channel(doors.grpc_address) as channel:
        stub = jpd_pb2_grpc.JpdStub(channel)
        request = jpd_pb2.GenerateRequest(text="ab", sampling=sampling, n=2)
        messages = list(stub.Generate(request))
        bad = jpd_pb2.SamplingParams(logit_bias={5000: 1.0})
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(jpd_pb2.GenerateRequest(text="a", sampling=bad)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "5000" in caught.value.details()
    found = doors.router.requests[0].sampling
    assert (found.repetition_penalty, found.presence_penalty) == (1.5, -1.0)
    assert (found.frequency_penalty, found.logit_bias) == (0.25, ((5, -2.0),))
    for index in range(2):
        mine = [message for message in messages if message.index == index]
        entries = [entry for message in mine for entry in message.logprobs]
        assert [entry.logprob for entry in entries] == own(104, EOS)
        assert list(entries[0].top_token_ids) == [103, 104] and entries[0].rank == 2
        of_prompt = [[e.logprob for e in message.prompt_logprobs] for message in mine]
        assert of_prompt == [own(97, 98), []], "nothing for the first token"
