"""Certificates of hosts, made by the commands of the guide. Needs openssl."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jpd.config import SecurityConfig


def make_certificates(repo: Path, folder: Path) -> SecurityConfig:
    """An authority, a certificate of hosts and a token in `folder`, as [security] names them."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make certificates")
    guide = (repo / "docs" / "multi_host.md").read_text()
    (commands,) = re.findall(r"```sh\n(.*?)```", guide, re.DOTALL)
    folder.mkdir(parents=True, exist_ok=True)
    for command in commands.splitlines():
        subprocess.run(command.split(), check=True, capture_output=True, timeout=30, cwd=folder)
    return SecurityConfig(
        token_file=str(folder / "token"),
        ca_file=str(folder / "ca.pem"),
        certificate_file=str(folder / "host.pem"),
        key_file=str(folder / "host.key"),
    )
