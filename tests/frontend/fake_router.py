"""A router without workers, and a byte-level tokenizer whose ids can be read by eye.

FakeRouter implements what TextService needs: `generate(request)`. What it answers is scripted by a
function of the request. Used by the tests of the doors.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import decoders as token_decoders

from jpd.chat_template import ChatTemplates
from jpd.frontend.prompts import ServedModel
from jpd.request import (
    FinishReason,
    PromptLogprobs,
    Request,
    Timeline,
    TokenLogprobs,
    TokenOutput,
)
from jpd.tokenizer import BYTE_LEVEL_LETTERS, HuggingFaceTokenizer

BOS, EOS, EOS2 = 256, 257, 258  # bytes are their own ids
PIECES = ("Obs", "erva", "tion", "END", " the")
FIRST_PIECE = 259
VOCAB_SIZE = 272  # padded beyond the tokenizer
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

Script = Callable[[Request], Sequence[int]]


def piece(text: str) -> int:
    """The id of a token of several letters."""
    return FIRST_PIECE + PIECES.index(text)


def make_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> HuggingFaceTokenizer:
    vocab = {letter: byte for letter, byte in BYTE_LEVEL_LETTERS.items()}
    for index, text in enumerate(("<bos>", "<eos>", "<eos2>")):
        vocab[text] = BOS + index
    for index, text in enumerate(PIECES):
        vocab[text.replace(" ", "Ġ")] = FIRST_PIECE + index
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = token_decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<bos>", "<eos>", "<eos2>")]
    backend.add_special_tokens(special)
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
    sources = {} if chat_template is None else {"default": chat_template}
    special_texts = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return HuggingFaceTokenizer(backend, config, ChatTemplates(sources, special_texts))


def make_model(
    tokenizer: HuggingFaceTokenizer | None = None, max_model_len: int = 512, **changes: object
) -> ServedModel:
    return ServedModel(
        name="tiny",
        tokenizer=tokenizer,
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=(EOS, EOS2),
        **changes,  # type: ignore[arg-type]
    )


def say(text: str) -> Script:
    """Answer every request with the bytes of `text`, then EOS."""
    return lambda request: [*text.encode(), EOS]


def echo_script(request: Request) -> Sequence[int]:
    """The prompt again, without its BOS, then EOS."""
    return [*(token_id for token_id in request.prompt_token_ids if token_id != BOS), EOS]


@dataclass
class FakeRouter:
    """One token an event, unless `tokens_per_event` says otherwise. Counts what it does."""

    script: Script = echo_script
    delay_seconds: float = 0.0  # before each event
    gate: asyncio.Semaphore | None = None  # lets one event through for each release
    tokens_per_event: int = 1
    error: Exception | None = None  # raised instead of event number `error_after`
    error_after: int = 0
    requests: list[Request] = field(default_factory=list)
    num_running: int = 0
    num_cancelled: int = 0
    num_finished: int = 0

    def generate(self, request: Request) -> "FakeStream":
        return FakeStream(self, request)


class FakeStream:
    """The outputs of one scripted request."""

    def __init__(self, router: FakeRouter, request: Request) -> None:
        self._router, self._request = router, request
        self._outputs = self._run()

    def __aiter__(self) -> AsyncGenerator[TokenOutput, None]:
        return self._outputs

    async def aclose(self) -> None:
        await self._outputs.aclose()

    async def finish(self) -> Timeline:
        """Ends the request as a success; no read may be going on."""
        self._router.num_cancelled -= 1
        await self.aclose()
        self._router.num_finished += 1
        return _timeline(self._request)

    async def _run(self) -> AsyncGenerator[TokenOutput, None]:
        router = self._router
        router.requests.append(self._request)
        router.num_running += 1
        try:
            for number, output in enumerate(self._scripted()):
                await asyncio.sleep(router.delay_seconds)
                if router.gate is not None:
                    await router.gate.acquire()
                if router.error is not None and number == router.error_after:
                    raise router.error
                yield output
        except (GeneratorExit, asyncio.CancelledError):
            router.num_cancelled += 1
            raise
        finally:
            router.num_running -= 1
        router.num_finished += 1

    def _scripted(self) -> Iterator[TokenOutput]:
        request, sampling = self._request, self._request.sampling
        token_ids = list(self._router.script(request))
        stops = set(sampling.stop_token_ids)
        stops |= set() if sampling.ignore_eos else set(request.eos_token_ids)
        most = sampling.max_tokens or 1 << 30
        end = next((i + 1 for i, token_id in enumerate(token_ids) if token_id in stops), None)
        reason: FinishReason = "length" if end is None or end > most else "stop"
        token_ids = token_ids[: min(end or len(token_ids), most)]
        step = self._router.tokens_per_event
        for start in range(0, len(token_ids), step):
            new = tuple(token_ids[start : start + step])
            is_last = start + step >= len(token_ids)
            logprobs = () if sampling.logprobs is None else map(self._opinion, new)
            yield TokenOutput(
                new,
                reason if is_last else None,
                _timeline(request) if is_last else None,
                tuple(logprobs),
                self._of_prompt() if start == 0 else (),
            )

    def _of_prompt(self) -> PromptLogprobs:
        num_top = self._request.sampling.prompt_logprobs
        if num_top is None:
            return ()
        return (None, *(opinion(i, num_top) for i in self._request.prompt_token_ids[1:]))

    def _opinion(self, token_id: int) -> TokenLogprobs:
        return opinion(token_id, self._request.sampling.logprobs or 0)


def opinion(token_id: int, num_top: int) -> TokenLogprobs:
    """Each token is second to the one before it in the alphabet."""
    others = tuple((token_id - 1 + rank) % VOCAB_SIZE for rank in range(num_top))
    return TokenLogprobs(-token_id / 64, 2, others, tuple(-other / 64 for other in others))


def _timeline(request: Request) -> Timeline:
    return Timeline(
        queue_seconds=0.001,
        prefill_seconds=0.02,
        num_cached_tokens=len(request.prompt_token_ids) // 2,
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        path=["disaggregated"],
    )
