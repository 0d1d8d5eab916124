"""Every card of models/: built without memory, as large as its authors say, planned on any mesh."""

import functools
from pathlib import Path

import jax.numpy as jnp
import pytest

from jpd.checkpoint.card import read_card
from jpd.checkpoint.model_source import open_model
from jpd.errors import ConfigError
from jpd.mesh_file import load_deployment
from jpd.nn.params import abstract_params
from jpd.planner import deployment_plan
from jpd.planner.deployment_plan import plan_deployment

ROOT = Path(__file__).resolve().parent.parent.parent
CARDS = sorted((ROOT / "models").glob("*.toml"))
MESHES = sorted((ROOT / "mesh_configs").glob("*.toml"))

# Parameters as the authors round them in model cards and reports (billions), and to what.
PUBLISHED = {
    "deepseek-v3": (671, 1),
    "gemma-2-9b": (9.24, 0.01),
    "gemma-3-270m": (0.27, 0.01),
    "gemma-3-27b": (27.016, 0.02),  # 1,416 M + 25,600 M
    "gpt-oss-120b": (116.83, 0.01),
    "llama-2-7b": (6.74, 0.01),
    "llama-3.1-405b": (405.85, 0.01),
    "llama-3.1-70b": (70.6, 0.1),
    "llama-3.1-8b": (8.03, 0.01),
    "mistral-7b": (7.25, 0.01),
    "mixtral-8x7b": (46.7, 0.1),
    "phi-3-mini": (3.82, 0.01),
    "qwen2.5-7b": (7.61, 0.02),
    "qwen3-0.6b": (0.6, 0.05),
    "qwen3-235b-a22b": (235, 1),
    "qwen3-32b": (32.8, 0.1),
}

# Of those, what is not in the embeddings (billions), where the authors say so.
NOT_EMBEDDING = {"qwen3-0.6b": 0.44, "qwen3-32b": 31.2, "qwen3-235b-a22b": 234, "qwen2.5-7b": 6.53}


describe = functools.cache(abstract_params)  # a second for the largest models


def test_every_promised_card_is_there() -> None:
    assert {card.stem for card in CARDS} == PUBLISHED.keys()


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_a_card_has_the_published_number_of_parameters(card: Path) -> None:
    model = open_model(str(card), need_weights=False)
    assert model.name == card.stem
    assert read_card(card).source.strip()
    abstract = describe(model.config, jnp.bfloat16)
    assert abstract.num_params == model.num_params
    billions, step = PUBLISHED[card.stem]
    assert abs(abstract.num_params / 1e9 - billions) <= step / 2
    if card.stem in NOT_EMBEDDING:
        outer = ("embed.weight", "head.weight")
        tables = sum(s.num_params for s in abstract.specs if s.path in outer)
        assert (abstract.num_params - tables) / 1e9 == pytest.approx(
            NOT_EMBEDDING[card.stem], rel=0.01
        )


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_every_card_is_checked_against_every_mesh(
    card: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan, or problems that name file, key and rule; never anything else."""
    monkeypatch.setattr(deployment_plan, "abstract_params", describe)
    config = open_model(str(card), need_weights=False).config
    assert MESHES
    for mesh in MESHES:
        try:
            plan = plan_deployment(config, load_deployment(mesh))
        except ConfigError as error:
            assert all(problem.file and problem.key for problem in error.problems)
        else:
            assert plan.num_params == describe(config, jnp.bfloat16).num_params


def test_a_null_of_config_json_can_be_told() -> None:
    """Mistral 7B has had no window since v0.2; a missing one would be that of v0.1."""
    config = open_model(str(ROOT / "models" / "mistral-7b.toml"), need_weights=False).config
    assert {layer.sliding_window for layer in config.layers} == {None}


@pytest.mark.parametrize("line", ['weights = "int8"', '[weights]\nformat = "int8"'])
def test_a_card_may_ask_for_int8(tmp_path: Path, line: str) -> None:
    text = (ROOT / "models" / "llama-3.1-8b.toml").read_text()
    head, config = text.partition("[config]")[::2]
    config = config.partition("[weights]")[0]
    top, table = (line + "\n", "") if line.startswith("weights") else ("", line + "\n")
    card = tmp_path / "mine.toml"
    card.write_text(f"{head}{top}[config]{config}{table}")
    model = open_model(str(card), need_weights=False)
    assert model.config.weights == "int8"
    assert open_model(str(card), need_weights=False, weights="float").config.weights == "float"
    assert describe(model.config, jnp.bfloat16).num_params == model.num_params


def test_a_card_with_another_format_is_refused(tmp_path: Path) -> None:
    card = tmp_path / "mine.toml"
    text = (ROOT / "models" / "llama-2-7b.toml").read_text()
    card.write_text(
        text.replace("[config]", 'weights = "int4"\n[config]').partition("[weights]")[0]
    )
    with pytest.raises(ConfigError, match="weights = 'int4': must be one of float, int8"):
        open_model(str(card), need_weights=False)
