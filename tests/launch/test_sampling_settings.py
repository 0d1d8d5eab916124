"""Penalties and log-probabilities over a real fleet: coupled, disaggregated, with prefix hits."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

import jpd
from jpd.request import TokenLogprobs
from jpd.rpc import jpd_pb2, jpd_pb2_grpc
from tests.launch.tiny_fleets import deployment, worker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(repo: Path) -> Iterator[jpd.Server]:
    workers = worker("prefill-0", "prefill", [0]), worker("decode-0", "decode", [4], slots=2)
    config = deployment(*workers, retain_seconds=60.0)
    model = str(repo / "tests" / "golden" / "llama3")
    with jpd.launch(model, config, can_prefill_locally=True) as server:
        yield server
        assert server.metrics.value("jpd:compilations_after_ready_total") == 0
        assert server.health().status == "ok"


@pytest.fixture(scope="module")
def golden(repo: Path) -> dict[str, np.ndarray]:
    return dict(np.load(repo / "tests" / "golden" / "llama3" / "expected.npz"))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def check(entry: TokenLogprobs | None, logprobs: np.ndarray, token_id: int, num_top: int) -> None:
    assert entry is not None
    assert abs(entry.logprob - logprobs[token_id]) < 2e-4
    best = -np.sort(-logprobs)[:num_top]
    np.testing.assert_allclose(entry.top_logprobs, best, atol=2e-4)


@pytest.mark.parametrize("disaggregate", [True, False])
def test_e06_e07_golden_logprobs_with_and_without_a_prefix_hit(
    server: jpd.Server, golden: dict[str, np.ndarray], disaggregate: bool
) -> None:
    asked: dict[str, Any] = {
        "max_tokens": 5,
        "temperature": 0.0,
        "logprobs": 3,
        "ignore_eos": True,
        "disaggregate": disaggregate,
    }
    for prompt, logits in zip(golden["prompts"].tolist(), golden["logits"], strict=True):
        expected = log_softmax(logits)
        found = [
            server.generate(prompt, **asked)[0],
            server.generate(prompt, **asked, prompt_logprobs=2)[0],  # the prompt is cached by now
        ]
        for answer in found:
            assert len(answer.logprobs) == len(answer.token_ids) == 5
            check(answer.logprobs[0], expected[-1], answer.token_ids[0], 3)
        assert found[0].token_ids == found[1].token_ids
        for one, other in zip(found[0].logprobs, found[1].logprobs, strict=True):
            assert abs(one.logprob - other.logprob) < 2e-4
        assert found[0].prompt_logprobs == () and found[1].prompt_logprobs[0] is None
        assert len(found[1].prompt_logprobs) == len(prompt)
        for position in range(1, len(prompt)):
            entry = found[1].prompt_logprobs[position]
            check(entry, expected[position - 1], prompt[position], 2)
        assert found[1].timeline is not None and found[1].timeline.num_cached_tokens == 0


def test_choices_share_the_prompts_logprobs_and_count_their_own_tokens(server: jpd.Server) -> None:
    settings: dict[str, Any] = {"max_tokens": 6, "seed": 5, "n": 3, "frequency_penalty": 1.0}
    answers = server.generate([9] * 20, **settings, prompt_logprobs=0, logprobs=0)
    assert len({answer.prompt_logprobs for answer in answers}) == 1
    assert len(answers[0].prompt_logprobs) == 20
    assert all(len(answer.logprobs) == len(answer.token_ids) for answer in answers)


def test_penalties_are_the_same_coupled_and_disaggregated(server: jpd.Server) -> None:
    settings: dict[str, Any] = {
        "max_tokens": 24,
        "temperature": 0.0,
        "ignore_eos": True,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {7: 2.0},
    }
    prompt = [5, 6, 7, 8] * 5
    answers = [
        server.generate(prompt, **settings, disaggregate=apart)[0].token_ids
        for apart in (True, False)
    ]
    assert answers[0] == answers[1]
    plain = server.generate(prompt, max_tokens=24, temperature=0.0, ignore_eos=True)[0]
    assert answers[0] != plain.token_ids


def test_e13_e14_wrong_values_are_refused_and_counted(server: jpd.Server) -> None:
    before = server.metrics.value("jpd:requests_failed_total", reason="bad_request")
    for name, value in (
        ("logit_bias", {160: 1.0}),
        ("logit_bias", {5: 101}),
        ("repetition_penalty", 0.0),
        ("logprobs", 21),
        ("presence_penalty", float("nan")),
    ):
        with pytest.raises(jpd.RequestError, match=name):
            server.generate([5], **{name: value})  # type: ignore[arg-type]
    after = server.metrics.value("jpd:requests_failed_total", reason="bad_request")
    assert after - before == 5


def test_e08_usage_tells_the_pages_that_a_cache_saved_alike_at_every_door(
    server: jpd.Server,
) -> None:
    doors = server.serve()
    prompt = [7 * place % 90 + 5 for place in range(64)]

    def over_http(token_ids: list[int], **fields: object) -> int:
        url = f"http://{doors.host}:{doors.http_port}/v1/completions"
        body = {"prompt": token_ids, "max_tokens": 3, "ignore_eos": True, "cache_salt": "e08"}
        text = httpx.post(url, json=body | fields, timeout=30).raise_for_status().text
        last = text.removesuffix("data: [DONE]\n\n").rpartition("data: ")[2]
        usage = json.loads(last)["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (64, 3)
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    cold, warm = over_http(prompt), over_http(prompt)
    streamed = over_http(prompt, stream=True, stream_options={"include_usage": True})
    request = jpd_pb2.GenerateRequest(
        token_ids={"ids": prompt}, sampling={"max_tokens": 3}, cache_salt="e08"
    )
    with grpc.insecure_channel(f"{doors.host}:{doors.grpc_port}") as channel:
        *_, last = jpd_pb2_grpc.JpdStub(channel).Generate(request)
    half = over_http(prompt[:32] + prompt[63:31:-1])
    # The last token of a prompt is always computed, and with it its page.
    assert (cold, warm, streamed, last.usage.num_cached_tokens, half) == (0, 48, 48, 48, 32)
