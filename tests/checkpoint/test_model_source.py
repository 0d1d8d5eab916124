"""open_model: cards, folders and files; EOS and defaults merged; one clear error otherwise."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jpd.checkpoint.card import read_card
from jpd.checkpoint.model_source import GenerationDefaults, Model, open_model
from jpd.errors import ConfigError
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_tokenizer import copy_with_tokenizer, tiny_backend

CARD = """
name = "tiny"
source = "made up"
num_params = 102_848
[config]
{config}
[weights]
{weights}
"""


@pytest.fixture
def folder(golden_llama3: Path, tmp_path: Path) -> Path:
    return copy_with_tokenizer(golden_llama3, tmp_path / "tiny-llama")


def set_json(path: Path, **fields: object) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | fields))


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        action()
    return str(caught.value)


def write_card(path: Path, checkpoint: Path, weights: str = "", **changes: object) -> Path:
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    lines = [f"{key} = {json.dumps(value)}" for key, value in config.items() if is_plain(value)]
    rope = "\n".join(f"{key} = {json.dumps(v)}" for key, v in config["rope_parameters"].items())
    text = CARD.format(config="\n".join(lines), weights=weights)
    path.write_text(text + f"\n[config.rope_parameters]\n{rope}\n")
    return path


def is_plain(value: object) -> bool:
    return value is not None and not isinstance(value, dict)


def test_a_folder(folder: Path) -> None:
    model = open_model(str(folder))
    assert model.name == "tiny-llama"
    assert model.spec == str(folder)
    assert model.config.num_layers == 3
    assert model.tokenizer is not None
    assert model.tokenizer.decode(model.tokenizer.encode("hi")) == "hi"
    assert model.require_source().location == str(folder)


def test_a_folder_without_tokenizer_serves_ids(golden_llama3: Path) -> None:
    model = open_model(str(golden_llama3))
    assert model.tokenizer is None
    assert model.eos_token_ids == (2,)


def test_a_gguf_file(golden_gemma3: Path, tmp_path: Path) -> None:
    path = write_gguf(golden_gemma3, tmp_path / "tiny.gguf", with_tokenizer=True)
    model = open_model(str(path))
    assert model.name == "tiny"
    assert model.config == open_model(str(golden_gemma3)).config
    assert model.tokenizer is not None
    assert model.tokenizer.chat_template is not None


def test_f09_eos_ids_of_all_files_are_merged(folder: Path) -> None:
    set_json(folder / "generation_config.json", eos_token_id=[2, 5, 900])
    set_json(folder / "tokenizer_config.json", eos_token="a")
    model = open_model(str(folder))
    assert model.tokenizer is not None
    letter = model.tokenizer.encode("a", add_special_tokens=False)
    assert model.eos_token_ids == (2, 5, *letter)


def test_generation_defaults(folder: Path) -> None:
    assert open_model(str(folder)).generation.given() == {}
    path = folder / "generation_config.json"
    set_json(path, temperature=0.6, top_p=0.9, top_k=-1, repetition_penalty=1.1, do_sample=True)
    given = {"temperature": 0.6, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.1}
    assert open_model(str(folder)).generation == GenerationDefaults(**given)
    assert open_model(str(folder)).generation.given() == given
    assert open_model(str(folder), generation_config="off").generation.given() == {}


def test_a_default_that_every_request_would_be_refused_for(folder: Path) -> None:
    set_json(folder / "generation_config.json", temperature="warm", top_p=2)
    message = refusal(lambda: open_model(str(folder)))
    assert f"{folder}/generation_config.json: temperature = 'warm': must be" in message
    assert "top_p = 2: must be" in message


def test_a_tokenizer_that_exceeds_the_embedding_is_refused(folder: Path) -> None:
    backend = tiny_backend()
    backend.add_tokens(["more", "words"])
    backend.save(str(folder / "tokenizer.json"))
    message = refusal(lambda: open_model(str(folder)))
    assert f"{folder}: tokenizer = 162" in message
    assert "model.embed_tokens.weight: vocab_size = 160" in message


def test_special_tokens_without_embedding_are_only_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = tiny_backend()
    backend.add_special_tokens(["<image>"])
    backend.save(str(folder / "tokenizer.json"))
    with caplog.at_level(logging.WARNING):
        assert open_model(str(folder)).tokenizer is not None
    assert "from id 160 on" in caplog.text


def test_a_chat_template_given_at_start(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("<{{ messages[0].content }}>")
    model = open_model(str(folder), chat_template=str(path))
    assert model.tokenizer is not None
    assert model.tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "<x>"
    path.write_text("{% if %}")
    assert "t.jinja" in refusal(lambda: open_model(str(folder), chat_template=str(path)))


def test_a_chat_template_needs_a_tokenizer(golden_llama3: Path, tmp_path: Path) -> None:
    assert "tokenizer" in refusal(lambda: open_model(str(golden_llama3), chat_template="x"))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_broken_json_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    assert name in refusal(lambda: open_model(str(folder)))


def test_an_unknown_architecture_is_named(folder: Path) -> None:
    set_json(folder / "config.json", architectures=["MambaForCausalLM"], model_type="mamba")
    assert "MambaForCausalLM" in refusal(lambda: open_model(str(folder)))


def test_a_name_that_is_nothing_lists_the_cards() -> None:
    message = refusal(lambda: open_model("no-such-model"))
    assert "no-such-model" in message
    assert "gemma-3-270m" in message


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    message = refusal(lambda: open_model(str(tmp_path)))
    assert str(tmp_path) in message
    assert "holds no config.json" in message
    assert "JSON" not in message.replace("config.json", "")


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("just a text that is longer than a header")
    assert "GGUF" in refusal(lambda: open_model(str(path)))


def test_a_card_by_bare_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    model = open_model("llama-3.1-70b")
    assert model.name == "llama-3.1-70b"
    assert model.source is None
    assert model.num_params == 70_553_706_496


def test_a_card_here_stands_before_those_that_come_with_jpd(
    golden_llama3: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    write_card(tmp_path / "models" / "llama-3.1-70b.toml", golden_llama3)
    monkeypatch.chdir(tmp_path)
    assert open_model("llama-3.1-70b").config.vocab_size == 160


def test_a_card_whose_weights_are_not_here(golden_llama3: Path, tmp_path: Path) -> None:
    for weights, word in (
        ('huggingface = "org/tiny"', "org/tiny"),
        ('package = "no_such_package"', "no-such-package"),
        ('path = "nowhere"', "nowhere"),
    ):
        model = open_model(str(write_card(tmp_path / "tiny.toml", golden_llama3, weights)))
        assert model.source is None
        assert model.config == open_model(str(golden_llama3)).config
        message = refusal(model.require_source)
        assert word in message


def test_a_card_with_a_path(folder: Path) -> None:
    card = write_card(folder.parent / "tiny.toml", folder, f'path = "{folder.name}"')
    model = open_model(str(card))
    assert model.name == "tiny"
    assert model.tokenizer is not None
    assert model.require_source().location == str(folder)


def test_weights_are_left_alone_when_nobody_needs_them(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    card = write_card(folder.parent / "tiny.toml", folder, f'path = "{folder.name}"')
    for spec in (card, folder):
        assert open_model(str(spec), need_weights=False).source is None
        assert "model.safetensors" in refusal(lambda spec=spec: open_model(str(spec)))


def test_a_card_must_describe_its_weights(folder: Path) -> None:
    weights = f'path = "{folder.name}"'
    card = write_card(folder.parent / "tiny.toml", folder, weights, rms_norm_eps=1e-5)
    message = refusal(lambda: open_model(str(card)))
    assert "norm_eps" in message
    assert "1e-05" in message
    assert "1e-06" in message


def test_a_card_with_a_wrong_sha256_is_refused(golden_llama3: Path, tmp_path: Path) -> None:
    write_gguf(golden_llama3, tmp_path / "a.gguf")
    weights = f'path = "a.gguf"\nsha256 = "{"0" * 64}"'
    card = write_card(tmp_path / "tiny.toml", golden_llama3, weights)
    assert "sha256" in refusal(lambda: open_model(str(card)))


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ('source = "made up"', "", "source"),
        ("num_params = 102_848", "num_params = 0", "num_params"),
        ("num_params", "num_parms", "num_parms"),
        ('name = "tiny"', "name = 3", "name"),
        ("[weights]", '[weights]\npath = "x"\npackage = "y"', "package"),
        ("[weights]", '[weights]\nsha256 = "abc"', "sha256"),
        ("vocab_size = 160", 'vocab_size = "many"', "vocab_size"),
    ],
)
def test_faults_of_a_card_are_named(
    golden_llama3: Path, tmp_path: Path, old: str, new: str, word: str
) -> None:
    card = write_card(tmp_path / "tiny.toml", golden_llama3)
    assert old in card.read_text()
    card.write_text(card.read_text().replace(old, new))
    message = refusal(lambda: open_model(str(card)))
    assert "tiny.toml" in message
    assert word in message


def test_all_faults_of_a_card_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("nothing = 1")
    with pytest.raises(ConfigError) as caught:
        read_card(path)
    assert {problem.key for problem in caught.value.problems} == {
        "source",
        "num_params",
        "config",
        "nothing",
    }


def test_a_model_can_be_made_by_hand(golden_llama3: Path) -> None:
    """What tests and embedders may rely on: the fields without defaults."""
    config = open_model(str(golden_llama3)).config
    model = Model("m", "m", config, source=None, tokenizer=None, eos_token_ids=(2,))
    assert "m" in refusal(model.require_source)


def test_without_the_extra_packages_folders_still_open(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(folder, tmp_path / "a.gguf")
    for name in ("gguf", "gguf.constants", "gguf.quants", "sentencepiece"):
        monkeypatch.setitem(sys.modules, name, None)
    assert open_model(str(folder)).tokenizer is not None
    assert "the extra `gguf`" in refusal(lambda: open_model(str(path)))
