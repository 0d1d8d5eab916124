"""n choices of one prompt: prefilled once, pages shared by reference count."""

import asyncio
import time
from typing import Any

from jpd.config import RouterConfig
from jpd.explore.paper_engines import VOCAB_SIZE
from jpd.frontend.job import GenerateJob
from jpd.frontend.prompts import ServedModel
from jpd.frontend.service import TextService
from jpd.metrics import Metrics
from jpd.request import SamplingParams
from jpd.router.router import Router
from tests.worker.fleet import TestFleet, attempt_of, fleet
from tests.worker.paper import reference

PAGE = 4
N = 4


async def generate(running: TestFleet, prompt: tuple[int, ...], most_pages: list[int]) -> Any:
    """All choices, and the most pages that the decode worker held at a time."""
    router = Router(
        [member.client for member in running.members.values()],
        RouterConfig(),
        (),
        Metrics(),
        max_model_len=128,
        page_size=PAGE,
    )
    await router.start()
    decode = running["decode-0"]
    assert decode.decode is not None

    def before_step() -> None:
        time.sleep(0.001)
        most_pages.append(decode.pool.num_held)

    decode.decode.before_step = before_step
    service = TextService(router, ServedModel("paper", None, VOCAB_SIZE, 128))
    sampling = SamplingParams(max_tokens=24, temperature=0.0, seed=0)
    try:
        return await service.collect(await service.prepare(GenerateJob((prompt,), sampling, n=N)))
    finally:
        service.close()
        await router.close()


async def test_e19_a_prompt_is_prefilled_once_for_all_its_choices() -> None:
    for num_tokens in (33, 36, 39):
        prompt = tuple(range(5, 5 + num_tokens))
        most_pages: list[int] = []
        async with fleet(page_size=PAGE, num_pages=100) as running:
            choices = await generate(running, prompt, most_pages)
            wanted = reference(attempt_of(prompt, 24))
            assert [list(choice.token_ids) for choice in choices] == [wanted] * N
            prefill = running["prefill-0"].prefill
            assert prefill is not None
            num_computed = sum(prefill.num_computed.values())
            assert num_computed <= num_tokens + (N - 1) * PAGE
            num_prompt_pages, num_output_pages = num_tokens // PAGE, -(-24 // PAGE) + 1
            assert max(most_pages) <= num_prompt_pages + N * num_output_pages + N
            await asyncio.wait_for(running.assert_at_rest(), 10)
