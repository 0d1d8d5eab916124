"""Text ↔ token ids: the Tokenizer protocol, tokenizer.json folders, and decoding of streams.

Every token stands for bytes. Decoding joins the bytes of the kept tokens and reads them as UTF-8,
so that a stream and the whole answer give the same text. Knows no model and no jax. Called by the
text layer of the frontend and by `jpd.checkpoint`, which adds tokenizers made from sentencepiece
data.
"""

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from jpd.chat_template import ChatTemplates
from jpd.errors import ConfigError, Problem, RequestError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(Protocol):
    """What a decoder of streams needs of a tokenizer."""

    @property
    def strips_first_space(self) -> bool:
        """Whether a space at the very start belongs to the tokenizer, not to the text."""
        ...

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """What the token adds to the text; nothing for ids outside the vocabulary."""
        ...


class Tokenizer(TokenBytes, Protocol):
    """What the text layer needs of a tokenizer. All methods may run in any thread."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def tool_template(self) -> str | None:
        """The template of chats in which functions are offered."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text made by a chat template holds its own BOS: add_special_tokens=False.

        Raises RequestError for text that is not Unicode.
        """
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of a chat. Raises RequestError if there is no template or it refuses."""
        ...


class IncrementalDecoder:
    """Text of a stream of token ids in deltas; all deltas joined equal `decode` of all ids.

    Holds back the bytes of an unfinished character. Constant work per token. Not thread-safe.
    """

    def __init__(self, tokenizer: TokenBytes, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.strips_first_space

    def push(self, ids: Iterable[int]) -> str:
        data = b"".join(self._tokenizer.token_bytes(token_id, self._skip) for token_id in ids)
        return self._strip(self._utf8.decode(data))

    def finish(self) -> str:
        """The rest: U+FFFD when the last character is cut off."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if not self._at_start or not text:
            return text
        self._at_start = False
        return text.removeprefix(" ")


class TemplatedTokenizer(ABC):
    """What tokenizers have in common: bytes of tokens, found once each, and chat templates.

    The rest of the Tokenizer protocol is for each kind to say.
    """

    def __init__(self, templates: ChatTemplates, special_token_ids: frozenset[int]) -> None:
        self.templates, self.special_token_ids = templates, special_token_ids
        self._bytes: dict[int, bytes] = {}

    @property
    @abstractmethod
    def strips_first_space(self) -> bool: ...

    @abstractmethod
    def _make_bytes(self, token_id: int) -> bytes: ...

    @property
    def chat_template(self) -> str | None:
        return self.templates.default

    @property
    def tool_template(self) -> str | None:
        return self.templates.for_tools

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        decoder = IncrementalDecoder(self, skip_special_tokens)
        return decoder.push(ids) + decoder.finish()

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        if skip_special_tokens and token_id in self.special_token_ids:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        return self.templates.render(messages, tools, add_generation_prompt, variables)


def check_unicode(text: str) -> None:
    """Raise RequestError for a lone surrogate, which no tokenizer can encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        shown = text[error.start : error.end]
        raise RequestError("prompt", shown, "must be valid Unicode") from error


def with_special_ends(
    ids: list[int], bos: int | None, eos: int | None, *, add_bos: bool, add_eos: bool
) -> list[int]:
    """`ids` with BOS and EOS where they are wanted and the text does not bring its own."""
    if add_bos and bos is not None and ids[:1] != [bos]:
        ids = [bos, *ids]
    if add_eos and eos is not None and ids[-1:] != [eos]:
        ids = [*ids, eos]
    return ids


class HuggingFaceTokenizer(TemplatedTokenizer):
    """tokenizer.json with tokenizer_config.json and chat_template.jinja beside it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        templates: ChatTemplates,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        added = backend.get_added_tokens_decoder()
        super().__init__(templates, frozenset(i for i, token in added.items() if token.special))
        self._backend = backend
        self._config = config
        self._added_ids = frozenset(added)
        self._vocab_size = 1 + max(backend.get_vocab().values(), default=-1)
        self._bos = self._id_of(token_text(config.get("bos_token")))
        eos = self._id_of(token_text(config.get("eos_token")))
        self._eos_ids = eos_token_ids or (() if eos is None else (eos,))
        self._add_bos: bool | None = config.get("add_bos_token")
        self._add_eos = bool(config.get("add_eos_token"))
        self._is_byte_level, self._byte_fallback = _decoder_kind(backend)
        self._strips = not self._is_byte_level and _strips_first_space(backend)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self._bos

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    @property
    def strips_first_space(self) -> bool:
        return self._strips

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_unicode(text)
        bos = self._bos
        by_file = self._add_bos is None  # tokenizer.json itself says which tokens are added
        # Unlike `encode` this finds no offsets into the text, which takes most of the time.
        encoded = self._backend.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens and by_file
        )
        ids: list[int] = encoded[0].ids
        if not add_special_tokens:
            return ids
        if by_file and bos is not None and ids[:2] == [bos, bos]:  # one of them is of the text
            ids = ids[1:]
        eos = self._eos_ids[0] if self._eos_ids else None
        add_bos = bool(self._add_bos)
        return with_special_ends(ids, bos, eos, add_bos=add_bos, add_eos=self._add_eos)

    @property
    def config(self) -> Mapping[str, Any]:
        """The entries of tokenizer_config.json."""
        return self._config

    def save(self, path: Path) -> None:
        """Write tokenizer.json."""
        self._backend.save(str(path))

    def with_templates(self, templates: ChatTemplates) -> "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(self._backend, self._config, templates, self._eos_ids)

    def _id_of(self, token: str | None) -> int | None:
        token_id: int | None = None if token is None else self._backend.token_to_id(token)
        return token_id

    def _make_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self._vocab_size else None
        if token is None:
            return b""
        if token_id in self._added_ids:
            return str(token).encode()
        if self._is_byte_level:
            return byte_level_bytes(token)
        match = BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if match is not None:
            return bytes([int(match[1], 16)])
        if self._backend.decoder is None:
            return str(token).encode()
        # A token before it, so that only what the decoder does in the middle of a text is seen.
        text: str = self._backend.decoder.decode(["a", token])
        return text.removeprefix("a").encode()


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """(bytes are spelled as GPT-2's letters, bytes may be spelled <0xNN>)."""
    if backend.decoder is None:
        return False, False
    described = json.loads(backend.decoder.__getstate__())
    steps = described.get("decoders", [described])
    kinds = {step.get("type") for step in steps}
    return "ByteLevel" in kinds, "ByteFallback" in kinds


def _strips_first_space(backend: tokenizers.Tokenizer) -> bool:
    if backend.decoder is None:
        return False
    alone: str = backend.decoder.decode(["\u2581a"])
    return alone == "a" and backend.decoder.decode(["a", "\u2581a"]) == "a a"


def _byte_level_letters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 letters are themselves, other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_LEVEL_LETTERS: Mapping[str, int] = _byte_level_letters()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a token with other letters stands for its own text."""
    try:
        return bytes(BYTE_LEVEL_LETTERS[letter] for letter in token)
    except KeyError:
        return token.encode()


def token_text(value: Any) -> str | None:
    """A special token of tokenizer_config.json: a string, an object with `content`, or nothing."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def special_token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """The variables bos_token, eos_token, ... that chat templates may use."""
    texts = {key: token_text(value) for key, value in config.items() if key.endswith("_token")}
    return {key: text for key, text in texts.items() if text is not None}


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json; {} when neither is there."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if not path.exists():
            continue
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            config.update({key: value for key, value in values.items() if value is not None})
        except (ValueError, AttributeError, RecursionError) as error:
            rule = f"must be a JSON table: {error}"
            raise ConfigError([Problem(str(path), name, "unreadable", rule)]) from error
    return config


def load_huggingface_tokenizer(folder: Path) -> HuggingFaceTokenizer:
    """The tokenizer of a folder with a tokenizer.json. Raises ConfigError when a file is broken."""
    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        rule = f"is not a tokenizer: {error}"
        raise ConfigError([Problem(str(path), "tokenizer", path.name, rule)]) from error
    backend.no_truncation()
    backend.no_padding()
    config = read_tokenizer_config(folder)
    templates = ChatTemplates.from_folder(folder, config, special_token_texts(config))
    return HuggingFaceTokenizer(backend, config, templates)
