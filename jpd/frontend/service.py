"""Text in, text out, over the router's stream of tokens: what HTTP, gRPC and the Python API share.

1. `prepare` checks a job and tokenises it in a thread; all that is wrong with a request is found
   here.
2. `stream` makes one router request for each choice and yields text deltas as tokens come.
3. `collect` is `stream` read to its end.

Knows no transport and no devices. Everything but the tokenising runs on the router's event loop.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, TypeAlias, TypeVar

from jpd.errors import RequestError, WorkerError
from jpd.frontend.conversation import assistant_message
from jpd.frontend.job import GenerateJob, PreparedJob, check_fits, check_job, sampling_of_choice
from jpd.frontend.merge import merge
from jpd.frontend.messages import ChatMessage
from jpd.frontend.prompts import ServedModel, check_text, check_token_ids, encode
from jpd.frontend.sequence_text import SequenceText, ShownText, TextRules
from jpd.frontend.stop import StopPatterns
from jpd.frontend.tool_calls import CallReader, Found, ToolCallDelta, join_calls, open_reader
from jpd.frontend.tool_fields import Tool
from jpd.grammar import Grammar
from jpd.guidance.compiler import GrammarCompiler
from jpd.request import (
    FinishReason,
    PromptLogprobs,
    Request,
    Timeline,
    TokenLogprobs,
    TokenOutput,
)

MAX_RUNNING_PER_JOB = 256
"""Sequences of one job that are with the router at a time; the others wait here."""

NUM_ITEMS_AHEAD = 2
"""Choices of one prompt follow its first one after two deltas: with its second token the prompt's
KV is complete where it is decoded, and they share those pages instead of computing them."""

Result = TypeVar("Result")

EndReason: TypeAlias = FinishReason | Literal["tool_calls"]
"""Why a choice ended, as clients are told: a stop with calls in it has its own name."""


class OutputStream(Protocol):
    """The outputs of one request. `aclose` cancels it; `finish` ends it early as a success."""

    def __aiter__(self) -> AsyncIterator[TokenOutput]: ...

    async def aclose(self) -> None: ...

    async def finish(self) -> Timeline: ...


class TokenSource(Protocol):
    """What this layer needs of the router."""

    def generate(self, request: Request) -> OutputStream: ...


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one event adds to choice `index`. Its last delta has the finish reason and the timeline.

    `text` may be empty while `token_ids` is not: half a character, or text that may become a stop
    string, is held back.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: EndReason | None = None
    timeline: Timeline | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token id, if they were asked for
    prompt_logprobs: PromptLogprobs = ()  # on the first delta, if they were asked for
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """One whole choice."""

    text: str
    token_ids: tuple[int, ...]  # all that were made, with the one that ended it
    finish_reason: EndReason
    num_prompt_tokens: int
    timeline: Timeline | None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token id, if they were asked for
    prompt_logprobs: PromptLogprobs = ()  # one for each prompt token; None for the first
    tool_calls: tuple[ToolCallDelta, ...] = ()  # whole ones

    def as_message(self) -> dict[str, object]:
        """The answer as a message of the assistant, for the next turn of a chat."""
        return assistant_message(self.text, self.tool_calls)


class TextService:
    """The text layer over one router and one model. `close` ends its tokenising threads."""

    def __init__(
        self,
        router: TokenSource,
        model: ServedModel,
        request_timeout_seconds: float = 600.0,
        grammars: GrammarCompiler | None = None,
        count_refusal: Callable[[], None] = lambda: None,
    ) -> None:
        """`grammars` is the caller's to close; without one guided requests are refused.

        `count_refusal` hears of each request that is refused before the router knows of it.
        """
        self.model = model
        self.count_refusal = count_refusal
        self._grammars = grammars
        self._router = router
        self._request_timeout_seconds = request_timeout_seconds
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="jpd-tokenize")

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Around all that is done with a request before its stream is read."""
        try:
            yield
        except RequestError:
            self.count_refusal()
            raise

    async def prepare(self, job: GenerateJob) -> PreparedJob:
        """Check and tokenise. Raises RequestError for whatever the client did wrong."""
        sampling = job.sampling
        check_job(job, self.model)
        await self._check_grammar(sampling.grammar)
        prompts = await self._in_thread(
            partial(encode, job.prompts, self.model, job.add_special_tokens)
        )
        for prompt in prompts:
            check_fits(prompt, sampling, self.model)
        stop_token_ids = frozenset(sampling.stop_token_ids)
        eos_token_ids = frozenset() if sampling.ignore_eos else frozenset(self.model.eos_token_ids)
        rules = TextRules(
            StopPatterns(sampling.stop),
            hidden_token_ids=stop_token_ids | eos_token_ids,
            min_tokens=sampling.min_tokens,
            include_stop=job.include_stop_str_in_output,
            skip_special_tokens=job.skip_special_tokens,
        )
        return PreparedJob(job, prompts, rules)

    async def _check_grammar(self, grammar: Grammar | None) -> None:
        """Compile it, on the compiler's threads. Raises RequestError when it cannot be followed."""
        if grammar is None:
            return
        if self._grammars is None:
            raise RequestError(grammar.field, grammar.kind, "is not supported by this server")
        await asyncio.wrap_future(self._grammars.check(grammar))

    async def stream(self, prepared: PreparedJob) -> AsyncGenerator[TextDelta, None]:
        """Deltas of all choices as they come. Closing it cancels what still runs."""
        n = prepared.job.n
        of_prompts: dict[int, PromptLogprobs] = {}
        if prepared.num_choices == 1:
            source = self._choice(prepared, 0, of_prompts)
        else:
            groups = [
                [partial(self._choice, prepared, first + sample, of_prompts) for sample in range(n)]
                for first in range(0, prepared.num_choices, n)
            ]
            source = merge(groups, MAX_RUNNING_PER_JOB, NUM_ITEMS_AHEAD)
        async with aclosing(source) as deltas:
            async for delta in deltas:
                yield delta

    async def collect(
        self, prepared: PreparedJob, hear: Callable[[TextDelta], None] | None = None
    ) -> list[Generation]:
        """All choices, whole, in order; `hear` is told each delta."""
        texts: list[list[str]] = [[] for _ in range(prepared.num_choices)]
        token_ids: list[list[int]] = [[] for _ in range(prepared.num_choices)]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in range(prepared.num_choices)]
        calls: list[list[ToolCallDelta]] = [[] for _ in range(prepared.num_choices)]
        of_prompts: dict[int, PromptLogprobs] = {}
        ends: dict[int, TextDelta] = {}
        async with aclosing(self.stream(prepared)) as deltas:
            async for delta in deltas:
                if hear is not None:
                    hear(delta)
                texts[delta.index].append(delta.text)
                token_ids[delta.index].extend(delta.token_ids)
                logprobs[delta.index].extend(delta.logprobs)
                calls[delta.index].extend(delta.tool_calls)
                of_prompts.setdefault(delta.index, delta.prompt_logprobs)
                if delta.finish_reason is not None:
                    ends[delta.index] = delta
        return [
            Generation(
                text="".join(texts[index]),
                token_ids=tuple(token_ids[index]),
                finish_reason=ends[index].finish_reason or "stop",
                num_prompt_tokens=len(prepared.prompt_of(index).token_ids),
                timeline=ends[index].timeline,
                logprobs=tuple(logprobs[index]),
                prompt_logprobs=of_prompts[index],
                tool_calls=join_calls(calls[index]),
            )
            for index in range(prepared.num_choices)
        ]

    async def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        tools: Sequence[Tool] = (),
    ) -> str:
        """The messages through the model's chat template. Raises RequestError when it has none."""
        tokenizer = self.model.need_tokenizer("messages", "...")
        if tokenizer.chat_template is None:
            rule = (
                f"the model {self.model.name!r} has no chat template: "
                "use completions, or start the server with --chat-template FILE"
            )
            raise RequestError("messages", "...", rule)
        if tools and "tools" not in (tokenizer.tool_template or ""):
            rule = f"the chat template of {self.model.name!r} has no place for them"
            raise RequestError("tools", f"{len(tools)} functions", rule)
        render = partial(
            tokenizer.apply_chat_template,
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=add_generation_prompt,
        )
        return await self._in_thread(render)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        tokenizer = self.model.need_tokenizer("prompt", text[:80])
        check_text("prompt", text)
        return tuple(await self._in_thread(partial(tokenizer.encode, text, add_special_tokens)))

    async def detokenize(self, values: Sequence[object], field_name: str = "tokens") -> str:
        tokenizer = self.model.need_tokenizer(field_name, "...")
        token_ids = check_token_ids(field_name, values, self.model.vocab_size)
        return await self._in_thread(
            partial(tokenizer.decode, token_ids, skip_special_tokens=False)
        )

    async def _in_thread(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    async def _choice(
        self, prepared: PreparedJob, index: int, of_prompts: dict[int, PromptLogprobs]
    ) -> AsyncGenerator[TextDelta, None]:
        """Deltas of one choice. Leaving it before the end cancels its request.

        The first choice of a prompt puts the prompt's log-probabilities into `of_prompts`, and the
        others, which start after its first delta, take them from there.
        """
        prompt = index // prepared.job.n
        shown = SequenceText(self.model.tokenizer, prepared.rules)
        reader = None if prepared.job.tools is None else open_reader(prepared.job.tools)
        prefix = self._echo(prepared, index)
        request = self._request(prepared, index)
        is_finished = has_begun = False
        async with aclosing(self._router.generate(request)) as outputs:
            async for output in outputs:
                new = shown.push(output)
                if output.prompt_logprobs:
                    of_prompts[prompt] = output.prompt_logprobs
                timeline = output.timeline
                is_finished = new.finish_reason is not None
                if is_finished and output.finish_reason is None:  # a stop string
                    timeline = await outputs.finish()
                found, reason = _find_calls(reader, new)
                yield TextDelta(
                    index=index,
                    text=prefix + found.text,
                    token_ids=new.token_ids,
                    finish_reason=reason,
                    timeline=timeline,
                    logprobs=output.logprobs[: len(new.token_ids)],
                    prompt_logprobs=() if has_begun else of_prompts.get(prompt, ()),
                    tool_calls=tuple(found.calls),
                )
                prefix, has_begun = "", True
        if not is_finished:
            raise WorkerError("router", f"request {request.request_id} ended without a last token")

    def _echo(self, prepared: PreparedJob, index: int) -> str:
        if not prepared.job.echo:
            return ""
        prompt = prepared.prompt_of(index)
        if prompt.text is not None or self.model.tokenizer is None:
            return prompt.text or ""
        return self.model.tokenizer.decode(prompt.token_ids)

    def _request(self, prepared: PreparedJob, index: int) -> Request:
        job = prepared.job
        if job.timeout_seconds is None:
            deadline = time.monotonic() + self._request_timeout_seconds
        else:
            deadline = job.arrival_time + job.timeout_seconds
        return Request(
            request_id=prepared.id_of(index),
            prompt_token_ids=prepared.prompt_of(index).token_ids,
            sampling=sampling_of_choice(job.sampling, index % job.n),
            arrival_time=job.arrival_time,
            deadline=deadline,
            eos_token_ids=self.model.eos_token_ids,
            session_id=job.session_id,
            priority=job.priority,
            slo=job.slo,
            cache_salt=job.cache_salt,
            prefill_worker=job.prefill_worker,
            decode_worker=job.decode_worker,
            disaggregate=job.disaggregate,
            trace_context=job.trace_context,
        )


def _find_calls(reader: CallReader | None, new: ShownText) -> tuple[Found, EndReason | None]:
    """What of new text is to be shown and what is a call; with its end, the true reason."""
    if reader is None:
        return Found(new.text), new.finish_reason
    found = reader.push(new.text)
    if new.finish_reason is None:
        return found, None
    rest = reader.finish()
    found = Found(found.text + rest.text, [*found.calls, *rest.calls])
    has_called = reader.num_calls > 0 and new.finish_reason == "stop"
    return found, "tool_calls" if has_called else new.finish_reason
