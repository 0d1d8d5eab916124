"""One compiler of the tiny vocabulary for all tests of guides."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jpd.guidance.compiler import GrammarCompiler
from jpd.tokenizer import HuggingFaceTokenizer, load_huggingface_tokenizer
from tests.support.tiny_tokenizer import EOS_ID, write_tiny_tokenizer

MODEL_VOCAB_SIZE = 192
"""The model has more rows than the tokenizer has tokens, as many models do."""


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(folder)
    return load_huggingface_tokenizer(folder)


@pytest.fixture(scope="session")
def compiler(tokenizer: HuggingFaceTokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, MODEL_VOCAB_SIZE, (EOS_ID,))
    yield compiler
    compiler.close()
