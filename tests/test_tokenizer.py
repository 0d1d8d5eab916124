"""Tokenizers: ids in, text out, streams that never break a character, chat templates."""

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from jpd.chat_template import ChatTemplates
from jpd.errors import ConfigError, RequestError
from jpd.tokenizer import (
    HuggingFaceTokenizer,
    IncrementalDecoder,
    Tokenizer,
    load_huggingface_tokenizer,
)
from tests.support.tiny_tokenizer import (
    BOS,
    BOS_ID,
    EOS,
    EOS_ID,
    SAMPLE,
    VOCAB_SIZE,
    tiny_backend,
    write_tiny_tokenizer,
)

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def tiny(folder: Path) -> HuggingFaceTokenizer:
    return load_huggingface_tokenizer(folder)


def set_config(folder: Path, **fields: object) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps(config))


def with_config(folder: Path, **fields: object) -> HuggingFaceTokenizer:
    set_config(folder, **fields)
    return load_huggingface_tokenizer(folder)


def sentencepiece_like(*, strips: bool) -> HuggingFaceTokenizer:
    """A tokenizer.json as Llama 2 (strips the first space) and Gemma (does not) have it."""
    pieces = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "b"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    steps = [normalizers.Prepend("▁")] if strips else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    last = [decoders.Strip(" ", 1, 0)] if strips else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    backend.add_special_tokens([AddedToken(BOS), AddedToken(EOS)])
    return HuggingFaceTokenizer(backend, {"bos_token": BOS}, ChatTemplates({}, {}))


def metaspace() -> HuggingFaceTokenizer:
    vocab = {"<unk>": 0, "▁a": 1, "b": 2, "▁": 3, "c": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return HuggingFaceTokenizer(backend, {}, ChatTemplates({}, {}))


def splits(ids: Sequence[int], rng: random.Random) -> Iterator[list[int]]:
    """Cut `ids` into runs of random lengths."""
    start = 0
    while start < len(ids):
        end = start + rng.randint(1, 5)
        yield list(ids[start:end])
        start = end


def streamed(tokenizer: Tokenizer, pieces: Iterator[list[int]]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [*(decoder.push(piece) for piece in pieces), decoder.finish()]


# Encoding and decoding


def test_text_comes_back(tiny: HuggingFaceTokenizer) -> None:
    text = f"the cat sat on the mat, in {SAMPLE}"
    ids = tiny.encode(text)
    assert ids[0] == BOS_ID
    assert tiny.decode(ids) == text
    assert tiny.decode(ids, skip_special_tokens=False) == BOS + text
    assert tiny.encode(text, add_special_tokens=False) == ids[1:]
    assert tiny.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("make", [metaspace, lambda: sentencepiece_like(strips=True)])
def test_decoding_agrees_with_the_library(make: Any) -> None:
    tokenizer = make()
    rng = random.Random(3)
    ordinary = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) != 0]
    texts = [i for i in ordinary if tokenizer.token_bytes(i).isascii()]
    for _ in range(200):
        ids = rng.choices(texts, k=rng.randint(0, 6))
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids), ids


def test_byte_level_decoding_agrees_with_the_library_even_when_it_is_broken(
    tiny: HuggingFaceTokenizer,
) -> None:
    rng = random.Random(5)
    for _ in range(500):
        ids = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 8))]
        assert tiny.decode(ids) == tiny._backend.decode(ids), ids


def test_e01_characters_of_several_tokens_are_never_cut(tiny: HuggingFaceTokenizer) -> None:
    ids = tiny.encode(SAMPLE)
    rng = random.Random(1)
    for _ in range(100):
        deltas = streamed(tiny, splits(ids, rng))
        assert "".join(deltas) == SAMPLE
        assert not any("\ufffd" in delta for delta in deltas)


def test_e01_byte_fallback_tokens_are_never_cut() -> None:
    tokenizer = sentencepiece_like(strips=False)
    ids = tokenizer.encode("a 中🙂a")
    deltas = streamed(tokenizer, ([token_id] for token_id in ids))
    assert "".join(deltas) == tokenizer.decode(ids) == "a 中🙂a"
    assert not any("\ufffd" in delta for delta in deltas)


def test_e01_a_truncated_tail_shows_at_the_end_only(tiny: HuggingFaceTokenizer) -> None:
    ids = tiny.encode("a🙂")[:-1]
    decoder = IncrementalDecoder(tiny)
    assert decoder.push(ids) == "a"
    assert decoder.finish() == "\ufffd"
    assert tiny.decode(ids) == "a\ufffd"


def test_e01_any_stream_of_ids_gives_the_text_of_the_whole(tiny: HuggingFaceTokenizer) -> None:
    rng = random.Random(2)
    for tokenizer in (tiny, sentencepiece_like(strips=True), sentencepiece_like(strips=False)):
        for _ in range(200):
            ids = [rng.randrange(tokenizer.vocab_size + 5) for _ in range(30)]
            assert "".join(streamed(tokenizer, splits(ids, rng))) == tokenizer.decode(ids)


def test_streaming_costs_the_same_for_every_token(tiny: HuggingFaceTokenizer) -> None:
    decoder = IncrementalDecoder(tiny)
    ids = tiny.encode("the cat 🙂 ") * 20_000
    start = time.perf_counter()
    for token_id in ids:
        decoder.push((token_id,))
    assert (time.perf_counter() - start) / len(ids) < 50e-6  # decoding all again takes milliseconds


def test_f10_ids_outside_the_vocabulary_are_empty(tiny: HuggingFaceTokenizer) -> None:
    for token_id in (VOCAB_SIZE, 295, 1 << 40, -1):
        assert tiny.decode([token_id]) == ""
    assert tiny.decode([*tiny.encode("a"), 295, *tiny.encode("b")]) == "ab"


@pytest.mark.parametrize("text", ["\ud83d", "\ude00 x", "a\udfff"])
def test_e17_lone_surrogates_are_the_callers_fault(tiny: HuggingFaceTokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        tiny.encode(text)


# Special tokens


def test_f12_bos_stands_once(folder: Path) -> None:
    tokenizer = load_huggingface_tokenizer(folder)
    assert tokenizer.encode(f"{BOS}hi") == tokenizer.encode("hi")
    prompt = tokenizer.apply_chat_template(USER)
    assert prompt.startswith(BOS)
    chat_ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert chat_ids.count(BOS_ID) == 1
    assert chat_ids == tokenizer.encode(prompt)  # so chat and completions share their prefixes


@pytest.mark.parametrize("adds_bos", [True, False])
def test_add_bos_token_in_the_config_decides(tmp_path: Path, adds_bos: bool) -> None:
    write_tiny_tokenizer(tmp_path, adds_bos=adds_bos)
    ids = with_config(tmp_path, add_bos_token=True).encode("hi")
    assert ids.count(BOS_ID) == 1
    without = with_config(tmp_path, add_bos_token=False)
    assert without.encode("hi") == ids[1:]
    assert without.encode(f"{BOS}hi") == ids  # the text may bring its own
    assert with_config(tmp_path, add_bos_token=False, add_eos_token=True).encode("hi") == [
        *ids[1:],
        EOS_ID,
    ]


@pytest.mark.parametrize("value", [BOS, {"content": BOS, "lstrip": False}])
def test_f17_special_tokens_as_string_or_object(folder: Path, value: object) -> None:
    tokenizer = with_config(folder, bos_token=value, eos_token={"content": EOS})
    assert tokenizer.bos_token_id == BOS_ID
    assert tokenizer.eos_token_ids == (EOS_ID,)
    assert tokenizer.apply_chat_template(USER).startswith(BOS)


def test_f17_special_tokens_null_or_absent(folder: Path) -> None:
    tokenizer = with_config(folder, bos_token=None, eos_token=None)
    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_ids == ()
    (folder / "tokenizer_config.json").unlink()
    alone = load_huggingface_tokenizer(folder)
    assert alone.eos_token_ids == ()
    assert alone.decode(alone.encode("hi")) == "hi"
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": EOS}))
    assert load_huggingface_tokenizer(folder).eos_token_ids == (EOS_ID,)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_f17_broken_files_are_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(ConfigError, match=name):
        load_huggingface_tokenizer(folder)


def test_truncation_and_padding_in_the_file_are_switched_off(folder: Path) -> None:
    backend = tiny_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    assert len(load_huggingface_tokenizer(folder).encode("a" * 30)) == 31


# Chat templates


def render(source: str, messages: Sequence[Any] = USER, **variables: Any) -> str:
    templates = ChatTemplates({"default": source}, {"bos_token": BOS})
    return templates.render(messages, variables.pop("tools", None), True, variables)


def test_f11_without_a_template_chat_is_refused_and_completions_work(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=None)
    tokenizer = load_huggingface_tokenizer(tmp_path)
    assert tokenizer.chat_template is None
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template(USER)
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"


def test_f11_a_broken_template_hurts_only_chat(folder: Path) -> None:
    tokenizer = with_config(folder, chat_template="{% for %}")
    with pytest.raises(RequestError, match="broken"):
        tokenizer.apply_chat_template(USER)
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "chat will be refused"),
        ("{{ messages|magic }}", "chat will be refused"),
        ("{{ nothing() }}", "fails on one plain user message"),
    ],
)
def test_f11_a_broken_template_is_told_at_load(
    folder: Path, caplog: pytest.LogCaptureFixture, source: str, words: str
) -> None:
    with_config(folder)
    assert not caplog.text
    with_config(folder, chat_template=source)
    assert words in caplog.text and str(folder) in caplog.text


def test_f11_a_template_that_is_no_text_is_named(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="chat_template.jinja"):
        load_huggingface_tokenizer(folder)


def test_f11_a_template_that_refuses_the_messages(folder: Path) -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate"):
        with_config(folder, chat_template=source).apply_chat_template(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content }}",
        "{{ 1 // 0 }}",
        "{{ messages.append }}{{ x.y }}",
        "{{ 'a' + 1 }}",
    ],
)
def test_f11_a_template_that_fails_is_a_bad_request(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)


def test_f11_an_override_must_be_right(tiny: HuggingFaceTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "other.jinja"
    path.write_text("<{{ messages[0].content }}>")
    other = tiny.with_templates(tiny.templates.with_override(path))
    assert other.apply_chat_template(USER) == "<hi>"
    path.write_text("{% if %}")
    with pytest.raises(ConfigError, match="other.jinja"):
        tiny.templates.with_override(path)
    with pytest.raises(ConfigError, match="missing.jinja"):
        tiny.templates.with_override(tmp_path / "missing.jinja")


def test_a_template_file_stands_before_the_config(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("from the file")
    assert load_huggingface_tokenizer(folder).apply_chat_template(USER) == "from the file"
    extra = folder / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("with tools")
    tokenizer = load_huggingface_tokenizer(folder)
    assert tokenizer.apply_chat_template(USER, tools=[{"name": "f"}]) == "with tools"


def test_a_list_of_templates(folder: Path) -> None:
    rows = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = with_config(folder, chat_template=rows)
    assert tokenizer.apply_chat_template(USER) == "plain"
    assert tokenizer.apply_chat_template(USER, tools=[{"name": "f"}]) == "tools"


def test_whitespace_and_json_are_as_transformers_has_them() -> None:
    source = (
        "{% for m in messages %}\n  {% if true %}\n{{ m | tojson }}\n  {% endif %}\n{% endfor %}"
    )
    message = {"role": "user", "content": "<é> & 'x'"}
    assert render(source, [message]) == json.dumps(message, ensure_ascii=False) + "\n"
    assert render("{{ messages | tojson(indent=2) }}") == json.dumps(USER, indent=2)


def test_what_templates_may_use() -> None:
    assert render("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}") == "hi"
    assert render("{% generation %}{{ bos_token }}{% endgeneration %}") == BOS
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for x in range(10000000) %}{% endfor %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)
