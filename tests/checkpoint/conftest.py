"""Checkpoints that tests of the loaders may spoil."""

from pathlib import Path

import pytest


@pytest.fixture
def checkpoint(golden_llama3: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama 3."""
    folder = tmp_path / "llama3"
    folder.mkdir()
    (folder / "config.json").write_text((golden_llama3 / "config.json").read_text())
    (folder / "model.safetensors").write_bytes((golden_llama3 / "model.safetensors").read_bytes())
    return folder
