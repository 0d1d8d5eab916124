"""The guides: mesh files through the reader, commands that exist."""

import re
from pathlib import Path

from jpd.cli import build_parser
from jpd.mesh_file import load_deployment


def test_mesh_files_and_commands_of_the_guide_are_real(repo: Path, tmp_path: Path) -> None:
    text = (repo / "docs" / "multi_host.md").read_text()
    first, *_ = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "mesh.toml"
    path.write_text(first)
    assert load_deployment(path).launch.kind == "subprocess"
    asked = [line.split()[1:] for line in re.findall(r"`(jpd workers [^`]+ [A-Z|a-z ]+)`", text)]
    assert [words[1] for words in asked] == ["drain", "set-role", "add", "remove"]
    for words in asked:
        options = build_parser().parse_args([word.partition("|")[0] for word in words])
        assert options.action == words[1]
