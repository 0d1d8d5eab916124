"""Sentencepiece tokenizers: from the vocabulary inside a .gguf file, or a tokenizer.model file.

Control tokens written in a text (`<start_of_turn>`) become one id, as `transformers` does; the
sentencepiece library alone would spell them out. Needs the package `sentencepiece`. Called by
`model_source`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jpd.chat_template import ChatTemplates
from jpd.errors import ConfigError, Problem
from jpd.tokenizer import (
    BYTE_TOKEN,
    TemplatedTokenizer,
    check_unicode,
    with_special_ends,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BPE_MODEL = 2
SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class PieceVocabulary:
    """Everything a sentencepiece tokenizer is made of, as plain data."""

    pieces: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    unknown_id: int
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    model_type: int = BPE_MODEL
    charsmap: bytes = b""
    remove_extra_spaces: bool = False


class SentencePieceTokenizer(TemplatedTokenizer):
    """Tokenizer of a PieceVocabulary."""

    def __init__(self, vocabulary: PieceVocabulary, templates: ChatTemplates, file: str) -> None:
        special = (i for i, kind in enumerate(vocabulary.kinds) if kind in (CONTROL, UNKNOWN))
        super().__init__(templates, frozenset(special))
        self.vocabulary = vocabulary
        self._processor = _processor(_model_proto(vocabulary), file)

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.pieces)

    @property
    def bos_token_id(self) -> int | None:
        return self.vocabulary.bos_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.vocabulary.eos_ids

    @property
    def strips_first_space(self) -> bool:
        return self.vocabulary.add_space_prefix

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_unicode(text)
        ids: list[int] = self._processor.encode(text)
        if not add_special_tokens:
            return ids
        own = self.vocabulary
        eos = own.eos_ids[0] if own.eos_ids else None
        return with_special_ends(ids, own.bos_id, eos, add_bos=own.add_bos, add_eos=own.add_eos)

    def with_templates(self, templates: ChatTemplates) -> "SentencePieceTokenizer":
        return SentencePieceTokenizer(self.vocabulary, templates, "tokenizer")

    def special_texts(self) -> dict[str, str]:
        """bos_token and eos_token, as tokenizer_config.json and chat templates name them."""
        own = self.vocabulary
        ids = {"bos_token": own.bos_id, "eos_token": own.eos_ids[0] if own.eos_ids else None}
        return {key: own.pieces[token_id] for key, token_id in ids.items() if token_id is not None}

    def model_file(self) -> bytes:
        """The content of a tokenizer.model file of this vocabulary."""
        return _model_proto(self.vocabulary, parse_control=False)

    def _make_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            return b""
        piece = self.vocabulary.pieces[token_id]
        kind = self.vocabulary.kinds[token_id]
        match = BYTE_TOKEN.fullmatch(piece) if kind == BYTE else None
        if match is not None:
            return bytes([int(match[1], 16)])
        return piece.encode() if kind == CONTROL else piece.replace(SPACE, " ").encode()


def _model_proto(vocabulary: PieceVocabulary, parse_control: bool = True) -> bytes:
    """The library's own model format. `parse_control`: control tokens are found in texts."""
    model_pb2 = _import_sentencepiece()[1]
    model = model_pb2.ModelProto()
    rows = zip(vocabulary.pieces, vocabulary.scores, vocabulary.kinds, strict=True)
    for token_id, (text, score, kind) in enumerate(rows):
        if token_id == vocabulary.unknown_id:
            kind = UNKNOWN
        elif kind == UNKNOWN or (kind == CONTROL and parse_control):
            kind = USER_DEFINED
        if not text:  # padding of the vocabulary; the library wants every piece distinct
            text, kind = f"<empty {token_id}>", UNUSED
        model.pieces.add(piece=text, score=score, type=kind)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type = vocabulary.model_type
    trainer.vocab_size = len(vocabulary.pieces)
    trainer.byte_fallback = list(vocabulary.kinds).count(BYTE) == 256  # the library wants all
    trainer.unk_id = vocabulary.unknown_id
    trainer.unk_piece = vocabulary.pieces[vocabulary.unknown_id]
    trainer.bos_id = -1 if vocabulary.bos_id is None else vocabulary.bos_id
    trainer.eos_id = vocabulary.eos_ids[0] if vocabulary.eos_ids else -1
    trainer.pad_id = -1
    if vocabulary.bos_id is not None:
        trainer.bos_piece = vocabulary.pieces[vocabulary.bos_id]
    if vocabulary.eos_ids:
        trainer.eos_piece = vocabulary.pieces[vocabulary.eos_ids[0]]
    normalizer.name = "identity"
    normalizer.precompiled_charsmap = vocabulary.charsmap
    normalizer.add_dummy_prefix = vocabulary.add_space_prefix
    normalizer.remove_extra_whitespaces = vocabulary.remove_extra_spaces
    normalizer.escape_whitespaces = True
    data: bytes = model.SerializeToString()
    return data


def _processor(model: bytes, file: str) -> Any:
    library = _import_sentencepiece()[0]
    try:
        return library.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        problem = Problem(file, "tokenizer", "vocabulary", f"is not usable: {error}")
        raise ConfigError([problem]) from error


def _import_sentencepiece() -> tuple[Any, Any]:
    try:
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        rule = "is needed for this tokenizer: install jpd with the extra `gguf`"
        raise ConfigError([Problem("environment", "package", "sentencepiece", rule)]) from error
    return sentencepiece, sentencepiece_model_pb2


def load_sentencepiece_file(
    path: Path, config: Mapping[str, Any], templates: ChatTemplates
) -> SentencePieceTokenizer:
    """The tokenizer of a tokenizer.model file; `config` is the tokenizer_config.json beside it."""
    model = _import_sentencepiece()[1].ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError has no stable home
        rule = f"is not a sentencepiece model: {error}"
        raise ConfigError([Problem(str(path), "tokenizer", path.name, rule)]) from error
    if not model.pieces:
        problem = Problem(str(path), "tokenizer", path.name, "holds no pieces")
        raise ConfigError([problem])
    vocabulary = _with_added_tokens(_from_proto(model, config), config)
    return SentencePieceTokenizer(vocabulary, templates, str(path))


def _from_proto(model: Any, config: Mapping[str, Any]) -> PieceVocabulary:
    pieces = [piece.piece for piece in model.pieces]
    kinds = [int(piece.type) for piece in model.pieces]
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    unknown = next((i for i, kind in enumerate(kinds) if kind == UNKNOWN), 0)

    def control(token_id: int) -> int | None:
        return token_id if 0 <= token_id < len(pieces) else None

    eos_id = control(trainer.eos_id)
    return PieceVocabulary(
        pieces=pieces,
        scores=[float(piece.score) for piece in model.pieces],
        kinds=kinds,
        bos_id=control(trainer.bos_id),
        eos_ids=() if eos_id is None else (eos_id,),
        unknown_id=unknown,
        add_bos=bool(config.get("add_bos_token", True)),
        add_eos=bool(config.get("add_eos_token", False)),
        add_space_prefix=bool(config.get("add_prefix_space", normalizer.add_dummy_prefix)),
        model_type=int(trainer.model_type),
        charsmap=bytes(normalizer.precompiled_charsmap),
        remove_extra_spaces=bool(normalizer.remove_extra_whitespaces),
    )


def _with_added_tokens(vocabulary: PieceVocabulary, config: Mapping[str, Any]) -> PieceVocabulary:
    """Tokens that transformers added beside the sentencepiece model; ids must follow on."""
    added = config.get("added_tokens_decoder")
    if not isinstance(added, Mapping):
        return vocabulary
    pieces, kinds = list(vocabulary.pieces), list(vocabulary.kinds)
    scores = list(vocabulary.scores)
    for key, token in sorted(added.items(), key=lambda item: int(item[0])):
        token_id, text = int(key), str(token.get("content", ""))
        kind = CONTROL if token.get("special") else USER_DEFINED
        if token_id < len(pieces):
            if pieces[token_id] == text and kinds[token_id] != UNKNOWN:
                kinds[token_id] = kind
        elif token_id == len(pieces) and text not in pieces:
            pieces.append(text)
            kinds.append(kind)
            scores.append(0.0)
    return replace(vocabulary, pieces=pieces, kinds=kinds, scores=scores)
