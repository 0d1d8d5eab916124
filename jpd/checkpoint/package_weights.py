"""Weights that come as a Python package: put together once, in the cache, checked by sha256.

Such a package has `MODEL_NAME` and `assemble(path)`. Knows no model format. Called by
`model_source`.
"""

import hashlib
import importlib
import importlib.util
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from jpd.errors import ConfigError, Problem

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "JPD_CACHE_DIR"


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where jpd keeps what can be made again: assembled models, compiled programs."""
    chosen = environment.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "jpd"


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def assembled_weights(package: str, sha256: str | None, cache: Path) -> Path:
    """The model file of an installed package. Raises ConfigError when its sha256 is not the card's.

    Another process may do the same at the same time: the file appears whole or not at all.
    """
    module = importlib.import_module(package)
    target = cache / "models" / str(module.MODEL_NAME)
    if target.is_file() and (sha256 is None or file_sha256(target) == sha256):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".assembling-", dir=target.parent) as folder:
        partial = Path(folder) / target.name
        logger.info("assembling %s from package %s", target, package)
        try:
            module.assemble(partial, overwrite=True)
        except (OSError, ValueError) as error:
            problem = Problem(str(target), "weights.package", package, f"cannot assemble: {error}")
            raise ConfigError([problem]) from error
        found = file_sha256(partial)
        if sha256 is not None and found != sha256:
            rule = f"the file assembled from {package} has sha256 {found}"
            raise ConfigError([Problem(str(target), "weights.sha256", sha256, rule)])
        os.replace(partial, target)
    return target


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
