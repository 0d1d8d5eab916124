"""Compiles grammars, each once while it is remembered, on threads of its own.

Compiling and every step of a guide are bounded by limits of `llguidance`: a grammar that takes too
much fails for its own request. Called by the text layer to check a request, and by workers to
follow it. Any thread may call.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jpd.errors import RequestError
from jpd.grammar import Grammar
from jpd.guidance.guide import EndRule, Guide
from jpd.guidance.vocabulary import guided_vocabulary
from jpd.tokenizer import Tokenizer

MAX_REMEMBERED = 128
"""Compiled grammars that are kept, those used last."""

NUM_THREADS = 2

WHITESPACE = r"(\n[ \t]{0,40}| )?"
"""Between parts of JSON: nothing, a space, or a new line with its indentation. Bounded, or a model
that likes blanks never ends."""

Result = TypeVar("Result")


class GrammarCompiler:
    """For one model's vocabulary. `close` ends its threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, Future[LLMatcher | str]] = OrderedDict()
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="jpd-grammar")
        self._vocabulary: Future[LLTokenizer] | None = None
        self.num_compiled = 0  # since the start

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def warm_up(self) -> None:
        """Begin to read the vocabulary, so that the first guided request need not wait for it."""
        with self._lock:
            self._start_vocabulary()

    def check(self, grammar: Grammar) -> "Future[None]":
        """Compile; the future raises RequestError when that cannot be done. Never blocks."""
        return self._executor.submit(lambda: self._check(grammar))

    def open(
        self, grammar: Grammar, token_ids: Sequence[int] = (), *, ignores_eos: bool = False
    ) -> Guide:
        """A guide that has taken these tokens of the answer; PENDING at first. Never blocks."""
        taken = tuple(token_ids)
        end = EndRule(self._vocab_size, self._eos_token_ids, ignores_eos)
        begin = partial(self._matcher, grammar, taken)
        return Guide(begin, end, grammar.field, self._executor.submit)

    # On a thread of the compiler.

    def _check(self, grammar: Grammar) -> None:
        self._start_of(grammar)

    def _matcher(self, grammar: Grammar, token_ids: Sequence[int]) -> LLMatcher:
        matcher = self._start_of(grammar).deep_copy()
        if token_ids and not matcher.consume_tokens(list(token_ids)):
            rule = f"does not allow the tokens sent so far: {_reason(matcher.get_error())}"
            raise RequestError(grammar.field, grammar.text, rule)
        return matcher

    def _start_of(self, grammar: Grammar) -> LLMatcher:
        """A matcher at its start, never to be advanced. Raises RequestError."""
        compiled = self._compile(grammar)
        if isinstance(compiled, str):
            raise RequestError(grammar.field, grammar.text, f"cannot be followed: {compiled}")
        return compiled

    def _compile(self, grammar: Grammar) -> LLMatcher | str:
        """The matcher, or why there is none."""
        with self._lock:
            vocabulary = self._start_vocabulary()
            found = self._compiled.get(grammar)
            is_mine = found is None
            if found is None:
                found = self._compiled[grammar] = Future()
                self.num_compiled += 1
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > MAX_REMEMBERED:
                self._compiled.popitem(last=False)
        if is_mine:
            _fulfil(found, lambda: _compile(grammar, vocabulary.result()))
        return found.result()

    def _start_vocabulary(self) -> "Future[LLTokenizer]":
        """Under the lock. On a thread of its own: those of the executor wait for it."""
        if self._vocabulary is None:
            future = self._vocabulary = Future()
            read = partial(guided_vocabulary, self._tokenizer, self._vocab_size)
            thread = threading.Thread(target=_fulfil, args=(future, read), daemon=True)
            thread.start()
        return self._vocabulary


def _fulfil(future: "Future[Result]", function: Callable[[], Result]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # a panic of the library is no Exception
        future.set_exception(RuntimeError(f"llguidance: {error!r}"))


def _compile(grammar: Grammar, vocabulary: LLTokenizer) -> LLMatcher | str:
    limits = LLParserLimits(verbose_errors=False)
    try:
        source = _source(grammar)
    except ValueError as error:
        return _reason(str(error))
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
    return _reason(matcher.get_error()) if matcher.is_error() else matcher


def _source(grammar: Grammar) -> str:
    """The grammar in the words of llguidance."""
    match grammar.kind:
        case "json_object":
            return _json_source('{"type":"object"}')
        case "json_schema":
            return _json_source(grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(_without_anchors(grammar.text))
        case "choice":
            choices = [json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text)]
            return LLMatcher.grammar_from_lark("start: " + " | ".join(choices))
        case "answer_or_calls":
            return LLMatcher.grammar_from_lark(_answer_or_calls(json.loads(grammar.text)))


def _answer_or_calls(parts: Mapping[str, Any]) -> str:
    """In Lark: the answer, or one call or several between their marks."""
    match parts["kind"]:
        case "json_object":
            answer = _json_in_lark({"type": "object"})
        case "json_schema":
            answer = _json_in_lark(json.loads(parts["text"]))
        case "regex":
            answer = f"/{_without_anchors(parts['text']).replace('/', chr(92) + '/')}/"
        case _:
            texts = json.loads(parts["text"])
            answer = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    blank = f"/{WHITESPACE}/"
    quoted = [json.dumps(parts[name], ensure_ascii=False) for name in ("opens", "closes")]
    marked = " blank ".join([quoted[0], "one", quoted[1]]) if parts["opens"] else "one"
    between = f"{json.dumps(parts['separator'])} blank" if parts["separator"] else "blank"
    more = f" ({between} call)*" if parts["is_parallel"] else ""
    rules = {
        "start": "answer | calls",
        "answer": answer,
        "calls": f"call{more}",
        "call": marked,
        "one": _json_in_lark(parts["call"]),
        "blank": blank,
    }
    return "\n".join(f"{name}: {rule}" for name, rule in rules.items())


def _json_in_lark(schema: Mapping[str, Any]) -> str:
    told = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}
    return f"%json {json.dumps(told)}"


def _json_source(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})


def _without_anchors(pattern: str) -> str:
    """The whole answer must match, so a ^ at the start and a $ at the end say nothing new."""
    pattern = pattern.removeprefix("^")
    backslashes = re.search(r"(\\*)\$$", pattern)
    is_anchor = backslashes is not None and len(backslashes[1]) % 2 == 0
    return pattern[:-1] if is_anchor else pattern


def _reason(error: str) -> str:
    """Of a message of llguidance; of one about an expression, the line that says what is wrong."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (told + lines + ["unknown reason"])[0][:200]
