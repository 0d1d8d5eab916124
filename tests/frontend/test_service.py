"""TextService over a fake router: choices, seeds, limits, cancelling."""

import asyncio
import threading
from contextlib import aclosing
from typing import Any

import pytest

from jpd.errors import RequestError, WorkerError, WorkerLostError
from jpd.frontend.job import GenerateJob, read_sampling
from jpd.frontend.prompts import ServedModel
from jpd.frontend.service import Generation, TextDelta, TextService
from jpd.request import SamplingParams
from jpd.tokenizer import HuggingFaceTokenizer
from tests.frontend.fake_router import (
    BOS,
    EOS,
    EOS2,
    VOCAB_SIZE,
    FakeRouter,
    make_model,
    make_tokenizer,
    say,
)


def service(router: FakeRouter, model: ServedModel | None = None) -> TextService:
    return TextService(router, model or make_model(make_tokenizer()))


async def generate(service: TextService, job: GenerateJob) -> list[Generation]:
    return await service.collect(await service.prepare(job))


async def stream(service: TextService, job: GenerateJob) -> list[TextDelta]:
    return [delta async for delta in service.stream(await service.prepare(job))]


def job(*prompts: str | tuple[int, ...], n: int = 1, **sampling: object) -> GenerateJob:
    return GenerateJob(prompts=prompts, sampling=read_sampling(sampling), n=n)


async def test_text_goes_through_the_tokenizer_both_ways() -> None:
    router = FakeRouter()
    [answer] = await generate(service(router), job("hé"))
    assert router.requests[0].prompt_token_ids == (BOS, *"hé".encode())
    assert answer.text == "hé"
    assert answer.token_ids == (*"hé".encode(), EOS)
    assert answer.finish_reason == "stop"
    assert answer.num_prompt_tokens == 4
    assert answer.timeline is not None and answer.timeline.path == ["disaggregated"]


async def test_g07_tokenising_a_long_text_stops_nobody_else() -> None:
    is_slow, may_go_on = threading.Event(), threading.Event()

    class Slow(HuggingFaceTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            if text == "long":
                is_slow.set()
                assert may_go_on.wait(10)
            return super().encode(text, add_special_tokens)

    tokenizer = make_tokenizer()
    tokenizer.__class__ = Slow
    served = service(FakeRouter(), make_model(tokenizer))
    late = asyncio.ensure_future(generate(served, job("long")))
    while not is_slow.is_set():
        await asyncio.sleep(0.001)
    (answer,) = await generate(served, job("hi"))
    assert answer.text == "hi" and not late.done()
    may_go_on.set()
    assert (await late)[0].text == "long"


async def test_g07_a_chat_template_that_takes_long_stops_nobody_else() -> None:
    threads = []

    class Watched(HuggingFaceTokenizer):
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
            threads.append(threading.current_thread())
            return super().apply_chat_template(*args, **kwargs)

    tokenizer = make_tokenizer()
    tokenizer.__class__ = Watched
    served = service(FakeRouter(), make_model(tokenizer))
    await served.chat_prompt([{"role": "user", "content": "hi"}])
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


async def test_token_ids_are_taken_as_they_are() -> None:
    router = FakeRouter()
    [answer] = await generate(service(router), job((104, 105)))
    assert router.requests[0].prompt_token_ids == (104, 105)
    assert answer.text == "hi"


async def test_streamed_deltas_join_to_the_whole_answer() -> None:
    deltas = await stream(service(FakeRouter()), job("a😀b"))
    assert "".join(delta.text for delta in deltas) == "a😀b"
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "stop" and deltas[-1].timeline is not None


async def test_e12_every_choice_has_an_id_of_its_own() -> None:
    router = FakeRouter()
    text_service = service(router)
    await asyncio.gather(*(generate(text_service, job("a", "b", n=2)) for _ in range(3)))
    assert len({request.request_id for request in router.requests}) == 12


async def test_e19_choices_of_several_prompts_have_the_right_index() -> None:
    router = FakeRouter()
    deltas = await stream(service(router), job("aa", "b", "cc", n=2))
    texts = ["".join(delta.text for delta in deltas if delta.index == i) for i in range(6)]
    assert texts == ["aa", "aa", "b", "b", "cc", "cc"]
    ends = [delta.index for delta in deltas if delta.finish_reason is not None]
    assert sorted(ends) == list(range(6))


async def test_e19_seeds_of_choices_count_up_and_the_first_is_that_of_n_1() -> None:
    router = FakeRouter()
    text_service = service(router)
    await generate(text_service, job("a", n=3, seed=7))
    await generate(text_service, job("a", seed=7))
    seeds = sorted(request.sampling.seed or 0 for request in router.requests[:3])
    assert seeds == [7, 8, 9]
    assert router.requests[3].sampling.seed == 7


async def test_seed_stays_a_64_bit_integer() -> None:
    router = FakeRouter()
    top = (1 << 63) - 1
    await generate(service(router), job("a", n=2, seed=top))
    assert [request.sampling.seed for request in router.requests] == [top, -(1 << 63)]


async def test_e24_without_a_seed_none_is_made_up() -> None:
    router = FakeRouter()
    await generate(service(router), job("a", n=2))
    assert [request.sampling.seed for request in router.requests] == [None, None]


async def test_e19_prompt_is_prefilled_by_the_first_choice_before_the_others_start() -> None:
    router = FakeRouter(delay_seconds=0.01)
    text_service = service(router)
    deltas = text_service.stream(await text_service.prepare(job("abc", n=3)))
    waiting = asyncio.ensure_future(anext(deltas))
    await asyncio.sleep(0.003)
    assert len(router.requests) == 1
    await waiting
    assert len(router.requests) == 1, "the prompt's KV may still be on its way"
    await anext(deltas)
    await asyncio.sleep(0.003)
    assert len(router.requests) == 3
    await deltas.aclose()


@pytest.mark.parametrize("n", [1, 3])
async def test_e20_closing_the_stream_cancels_every_choice(n: int) -> None:
    router = FakeRouter(script=lambda request: [97] * 10_000)
    text_service = service(router)
    async with aclosing(text_service.stream(await text_service.prepare(job("a", n=n)))) as deltas:
        for _ in range(3 * n):
            await anext(deltas)
        assert router.num_running == n
    assert router.num_running == 0 and router.num_cancelled == n


async def test_e02_stop_string_ends_the_request_behind_it() -> None:
    router = FakeRouter(say("one. two. three."))
    [answer] = await generate(service(router), job("a", stop=["two"]))
    assert answer.text == "one. " and answer.finish_reason == "stop"
    assert len(answer.token_ids) == len("one. two")
    assert router.num_running == 0
    assert (router.num_finished, router.num_cancelled) == (1, 0)  # a success, not a cancel
    assert answer.timeline is not None


async def test_e04_max_tokens_and_end_token_counts() -> None:
    router = FakeRouter(say("abc"))
    text_service = service(router)
    for count, text in ((1, "a"), (2, "ab"), (3, "abc")):
        [answer] = await generate(text_service, job("a", max_tokens=count))
        assert (answer.text, answer.finish_reason) == (text, "length")
        assert len(answer.token_ids) == count
    [answer] = await generate(text_service, job("a", max_tokens=4))
    assert (answer.text, answer.finish_reason) == ("abc", "stop")


async def test_e23_ignore_eos_keeps_explicit_stop_ids() -> None:
    router = FakeRouter(lambda request: [97, EOS2, 98, 99, EOS, 100])
    text_service = service(router)
    [one] = await generate(text_service, job("a"))
    assert (one.text, one.finish_reason) == ("a", "stop")
    [two] = await generate(text_service, job("a", ignore_eos=True))
    assert (two.text, two.finish_reason) == ("abcd", "length")
    [three] = await generate(text_service, job("a", ignore_eos=True, stop_token_ids=[99]))
    assert (three.text, three.token_ids) == ("ab", (97, EOS2, 98, 99))


async def test_echo_puts_the_prompt_before_the_text() -> None:
    text_service = service(FakeRouter(say("!")))
    for prompt in ("hi", (104, 105)):
        echo = GenerateJob(prompts=(prompt,), sampling=SamplingParams(), echo=True)
        [answer] = await generate(text_service, echo)
        assert answer.text == "hi!"


async def test_more_prompts_than_may_run_at_once() -> None:
    router = FakeRouter()
    answers = await generate(service(router), job(*(f"p{i}" for i in range(600))))
    assert [answer.text for answer in answers] == [f"p{i}" for i in range(600)]


async def test_without_a_tokenizer_ids_work_and_text_is_refused() -> None:
    text_service = service(FakeRouter(), make_model(None))
    [answer] = await generate(text_service, job((1, 2)))
    assert (answer.text, answer.token_ids) == ("", (1, 2, EOS))
    for bad in (job("text"), job((1,), stop=["x"])):
        with pytest.raises(RequestError, match="no tokenizer: send token ids"):
            await text_service.prepare(bad)
    for call in (text_service.tokenize("a"), text_service.chat_prompt(())):
        with pytest.raises(RequestError, match="no tokenizer"):
            await call


async def test_text_with_a_token_beyond_the_embedding_is_refused() -> None:
    small = ServedModel("tiny", make_tokenizer(), vocab_size=EOS, max_model_len=512)
    router = FakeRouter(say("x"))
    await generate(service(router, small), job("a<bos>"))
    with pytest.raises(RequestError, match="no embedding"):
        await generate(service(router, small), job("a<eos>"))


async def test_f11_no_chat_template_is_told_and_text_still_works() -> None:
    text_service = service(FakeRouter(), make_model(make_tokenizer(chat_template=None)))
    with pytest.raises(RequestError, match="no chat template"):
        await text_service.chat_prompt([{"role": "user", "content": "hi"}])
    assert (await generate(text_service, job("hi")))[0].text == "hi"


async def test_f12_chat_prompt_has_one_bos() -> None:
    router = FakeRouter()
    text_service = service(router)
    prompt = await text_service.chat_prompt([{"role": "user", "content": "hi"}])
    assert prompt == "<bos><user>hi\n<assistant>"
    sampling = SamplingParams()
    chat = GenerateJob(prompts=(prompt,), sampling=sampling, add_special_tokens=False)
    await generate(text_service, chat)
    assert router.requests[0].prompt_token_ids.count(BOS) == 1


async def test_model_defaults_stand_where_the_client_says_nothing() -> None:
    defaults = {"temperature": 0.6, "top_k": 64}
    assert read_sampling({}, defaults) == SamplingParams(temperature=0.6, top_k=64)
    assert read_sampling({"temperature": 0.0}, defaults).temperature == 0.0


async def test_an_error_of_the_router_comes_through() -> None:
    router = FakeRouter(error=WorkerLostError("decode-0", "fell over"), error_after=2)
    deltas = []
    text_service = service(router)
    with pytest.raises(WorkerLostError, match="fell over"):
        async for delta in text_service.stream(await text_service.prepare(job("abcd"))):
            deltas.append(delta)
    assert "".join(delta.text for delta in deltas) == "ab"


async def test_a_stream_without_an_end_is_an_error_not_an_answer() -> None:
    with pytest.raises(WorkerError, match="without a last token"):
        await generate(service(FakeRouter(lambda request: [])), job("a"))


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (job(n=1), "prompt"),
        (job(()), "prompt"),
        (job("a", ()), "prompt[1]"),
        (job((VOCAB_SIZE,)), "prompt[0]"),
        (job((-1,)), "prompt[0]"),
        (job((1 << 31,)), "prompt[0]"),
        (job((True,)), "prompt[0]"),
        (job("\ud83d"), "prompt"),
        (job("x" * 600), "prompt"),
        (job("a", n=0), "n"),
        (job("a", n=True), "n"),
        (job("a", n=10_000), "n"),
        (job("a", max_tokens=511), "max_tokens"),
        (job("a", min_tokens=511), "min_tokens"),
        (job("a", stop_token_ids=[VOCAB_SIZE]), "stop_token_ids[0]"),
        (job("a", stop_token_ids=["5"]), "stop_token_ids[0]"),
        (GenerateJob(("a",), SamplingParams(), session_id=""), "session_id"),
        (GenerateJob(("a",), SamplingParams(), session_id="x\ny"), "session_id"),
        (GenerateJob(("a",), SamplingParams(), session_id="x" * 300), "session_id"),
        (GenerateJob(("a",), SamplingParams(), priority=1 << 40), "priority"),
    ],
)
async def test_refusals_name_the_field_and_reach_no_router(bad: GenerateJob, field: str) -> None:
    router = FakeRouter()
    with pytest.raises(RequestError) as caught:
        await service(router).prepare(bad)
    assert caught.value.field == field
    assert router.requests == []


async def test_e14_the_last_id_of_the_vocabulary_is_fine() -> None:
    router = FakeRouter(say("x"))
    last = VOCAB_SIZE - 1
    await generate(service(router), job((last,), stop_token_ids=[last]))
    assert router.requests[0].prompt_token_ids == (last,)


@pytest.mark.parametrize(
    "bad", ["", [""], ["", " END"], [5], 5, ["x"] * 17, "x" * 2000, ["\udc00"]]
)
def test_e03_stops_that_are_refused(bad: object) -> None:
    with pytest.raises(RequestError, match="stop"):
        read_sampling({"stop": bad})


@pytest.mark.parametrize("good", [None, []])
def test_e03_no_stops(good: object) -> None:
    assert read_sampling({"stop": good}).stop == ()


def test_unknown_sampling_names_are_refused() -> None:
    with pytest.raises(RequestError, match="temprature"):
        read_sampling({"temprature": 0.5})
