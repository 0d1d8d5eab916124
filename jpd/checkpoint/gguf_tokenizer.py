"""The tokenizer stored in the metadata of a .gguf file.

`llama` vocabularies are sentencepiece models, `gpt2` ones are byte-level BPE with merges. Knows no
tensors. Called by `model_source`.
"""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from jpd.chat_template import DEFAULT, ChatTemplates
from jpd.checkpoint.gguf_file import GgufFile
from jpd.checkpoint.sentencepiece_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    PieceVocabulary,
    SentencePieceTokenizer,
)
from jpd.errors import ConfigError, Problem
from jpd.tokenizer import HuggingFaceTokenizer, Tokenizer

PREFIX = "tokenizer.ggml."

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, str] = {
    "default": GPT2_SPLIT,
    "gpt-2": GPT2_SPLIT,
    "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "llama3": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "smaug-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "dbrx": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_WORDS}|\p{{N}}|{_REST}",
}
"""How each kind of vocabulary cuts a text before merging, by tokenizer.ggml.pre."""

TURN_ENDS = ("<end_of_turn>", "<|eot_id|>", "<|im_end|>", "<|end|>", "<|eom_id|>", "<|return|>")
"""Control tokens that end an answer of a model with a chat template; GGUF names only one EOS."""


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer | None:
    """None when the file carries no tokenizer. Raises ConfigError for one that cannot be used."""
    kind = file.metadata.get(f"{PREFIX}model")
    if kind is None or kind == "none":
        return None
    reader = _Reader(file)
    if kind == "llama":
        return _sentencepiece(reader)
    if kind == "gpt2":
        return _byte_level(reader)
    raise reader.fail("model", kind, "supported: llama (sentencepiece), gpt2 (byte-level BPE)")


class _Reader:
    """The tokenizer's metadata keys."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.pieces: list[str] = self.require("tokens")
        kinds = self.get("token_type")
        self.kinds = [NORMAL] * len(self.pieces) if kinds is None else [int(x) for x in kinds]
        if len(self.kinds) != len(self.pieces):
            raise self.fail("token_type", len(self.kinds), f"needs {len(self.pieces)} entries")

    @property
    def location(self) -> str:
        return str(self._file.path)

    def fail(self, key: str, value: object, rule: str) -> ConfigError:
        return ConfigError([Problem(self.location, PREFIX + key, value, rule)])

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(PREFIX + key, default)

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise self.fail(key, None, "this metadata key is needed")
        return value

    def token_id(self, name: str) -> int | None:
        token_id = self.get(f"{name}_token_id")
        if token_id is not None and not 0 <= int(token_id) < len(self.pieces):
            rule = f"must be below the number of tokens, {len(self.pieces)}"
            raise self.fail(f"{name}_token_id", token_id, rule)
        return None if token_id is None else int(token_id)

    def eos_ids(self) -> tuple[int, ...]:
        ids = [self.token_id("eos"), self.token_id("eot")]
        if self._file.metadata.get("tokenizer.chat_template"):
            wanted = set(TURN_ENDS)
            pairs = enumerate(zip(self.pieces, self.kinds, strict=True))
            ids += [i for i, (piece, kind) in pairs if kind == CONTROL and piece in wanted]
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))

    def templates(self) -> ChatTemplates:
        source = self._file.metadata.get("tokenizer.chat_template")
        names = {"bos_token": self.token_id("bos"), "eos_token": self.token_id("eos")}
        texts = {key: self.pieces[i] for key, i in names.items() if i is not None}
        templates = ChatTemplates({DEFAULT: source} if source else {}, texts)
        templates.warn_of_faults(self.location)
        return templates


def _sentencepiece(reader: _Reader) -> SentencePieceTokenizer:
    scores = reader.require("scores")
    if len(scores) != len(reader.pieces):
        raise reader.fail("scores", len(scores), f"needs {len(reader.pieces)} entries")
    unknown = reader.token_id("unknown")
    if unknown is None:
        unknown = next((i for i, kind in enumerate(reader.kinds) if kind == UNKNOWN), 0)
    vocabulary = PieceVocabulary(
        pieces=[_as_piece(*row) for row in zip(reader.pieces, reader.kinds, strict=True)],
        scores=[float(score) for score in scores],
        kinds=reader.kinds,
        bos_id=reader.token_id("bos"),
        eos_ids=reader.eos_ids(),
        unknown_id=unknown,
        add_bos=bool(reader.get("add_bos_token", True)),
        add_eos=bool(reader.get("add_eos_token", False)),
        add_space_prefix=bool(reader.get("add_space_prefix", True)),
    )
    return SentencePieceTokenizer(vocabulary, reader.templates(), reader.location)


def _as_piece(text: str, kind: int) -> str:
    """GGUF keeps the spaces of user-defined pieces; sentencepiece matches escaped text."""
    return text.replace(" ", SPACE) if kind == USER_DEFINED else text


def _byte_level(reader: _Reader) -> HuggingFaceTokenizer:
    cut = reader.get("pre", "default")
    if cut not in SPLITS:
        raise reader.fail("pre", cut, f"supported: {', '.join(sorted(SPLITS))}")
    merges = [tuple(line.split(" ", 1)) for line in reader.require("merges")]
    vocab = {piece: token_id for token_id, piece in enumerate(reader.pieces)}
    try:
        model = models.BPE(vocab, merges, ignore_merges=cut in ("llama-bpe", "llama3"))
    except Exception as error:  # the library raises bare Exception
        raise reader.fail("merges", "merges", f"do not fit the tokens: {error}") from error
    backend = tokenizers.Tokenizer(model)
    split = pre_tokenizers.Split(Regex(SPLITS[cut]), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    backend.decoder = decoders.ByteLevel()
    kinds = reader.kinds
    for special, wanted in ((True, (CONTROL,)), (False, (USER_DEFINED, BYTE))):
        texts = [p for p, kind in zip(reader.pieces, kinds, strict=True) if kind in wanted]
        tokens = [AddedToken(text, special=special, normalized=False) for text in texts]
        (backend.add_special_tokens if special else backend.add_tokens)(tokens)
    bos, eos = reader.token_id("bos"), reader.eos_ids()
    config: dict[str, Any] = {"add_bos_token": bool(reader.get("add_bos_token", False))}
    config["add_eos_token"] = bool(reader.get("add_eos_token", False))
    config["bos_token"] = None if bos is None else reader.pieces[bos]
    config["eos_token"] = reader.pieces[eos[0]] if eos else None
    return HuggingFaceTokenizer(backend, config, reader.templates(), eos)
