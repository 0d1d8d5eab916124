"""Orbax checkpoints: parameters in jpd's own layout, restored straight into shardings.

A folder holds config.json and the tokenizer's files as a Hugging Face folder does, the parameters
in `params/` and `jpd_checkpoint.json`, which says how they are laid out. Knows no other format.
Called by `model_source` (open), `load` (restore) and `convert` (the names).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from jpd.checkpoint.int8 import quantize_on_devices
from jpd.checkpoint.progress import ProgressCallback, ProgressMeter
from jpd.errors import ConfigError, Problem
from jpd.nn.config import WeightFormat
from jpd.nn.params import AbstractParams, ParamSpec

MARKER_NAME = "jpd_checkpoint.json"
PARAMS_NAME = "params"
LAYOUT_VERSION = 2
"""Raised whenever the shape or the meaning of a parameter changes."""

RESTORE_GROUP_BYTES = 1 << 28
"""Parameters restored together: bounds host memory, and how often progress is told."""


@dataclass(frozen=True, slots=True)
class OrbaxSource:
    """An opened Orbax folder. Numbers were checked when it was written."""

    folder: Path
    weights: WeightFormat = "float"  # how the matrices are stored

    @property
    def location(self) -> str:
        return str(self.folder)

    def read_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes by name. Starts JAX, as all of Orbax does: so not for `open_orbax`, which
        runs before a launcher makes its devices. Raises ConfigError."""
        try:
            with _checkpointer() as checkpointer:
                metadata = checkpointer.metadata(self.folder / PARAMS_NAME)
                return {name: tuple(leaf.shape) for name, leaf in metadata.item_metadata.items()}
        except (OSError, ValueError, AttributeError) as error:
            rule = f"is not a readable Orbax checkpoint: {error}"
            problem = Problem(str(self.folder / PARAMS_NAME), "params", "", rule)
            raise ConfigError([problem]) from error

    def restore(
        self,
        abstract: AbstractParams,
        shardings: Sequence[tuple[NamedSharding, ...]],
        progress: ProgressCallback | None = None,
    ) -> list[tuple[jax.Array, ...]]:
        """The parameters on each mesh; every device reads its own part. Blocks.

        `shardings` holds for each parameter its sharding on each mesh. Raises ConfigError when
        names or shapes are not those of the model. Floating-point matrices become int8 where
        `abstract` has them so.
        """
        self._check(abstract)
        places = {s.path: where for s, where in zip(abstract.specs, shardings, strict=True)}
        stored = [spec for spec in abstract.specs if not (spec.is_scale and self.is_float)]
        num_targets = len(shardings[0]) if shardings else 0
        total = sum(spec.num_bytes for spec in abstract.specs)
        meter = ProgressMeter("loading", total, progress)
        restored: list[dict[str, jax.Array]] = [{} for _ in range(num_targets)]
        for group in _groups(stored):
            for target, arrays in enumerate(restored):
                there = {path: where[target] for path, where in places.items()}
                arrays.update(self._restore_group(group, there))
            for spec in group:
                meter.add(spec.num_bytes, spec.path)
        return [tuple(arrays[spec.path] for spec in abstract.specs) for arrays in restored]

    @property
    def is_float(self) -> bool:
        return self.weights == "float"

    def _restore_group(
        self, wanted: Sequence[ParamSpec], places: Mapping[str, NamedSharding]
    ) -> dict[str, jax.Array]:
        item, restore_args = {}, {}
        for spec in wanted:
            dtype = jnp.dtype(jnp.float32) if spec.summed and self.is_float else spec.dtype
            place: Any = {"sharding": places[spec.path], "dtype": dtype}
            item[spec.path] = jax.ShapeDtypeStruct(spec.shape, **place)
            restore_args[spec.path] = ocp.ArrayRestoreArgs(global_shape=spec.shape, **place)
        args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
        with _checkpointer() as checkpointer:
            arrays: dict[str, jax.Array] = checkpointer.restore(self.folder / PARAMS_NAME, args)
        jax.block_until_ready(arrays)
        for spec in wanted if self.is_float else ():
            if spec.summed:
                there = (places[spec.path], places[spec.scale_path])
                made = quantize_on_devices(arrays[spec.path], spec.summed, *there)
                arrays[spec.path], arrays[spec.scale_path] = made
        return arrays

    def _check(self, abstract: AbstractParams) -> None:
        problems = []
        shapes = self.read_shapes()
        for spec in abstract.specs:
            if spec.is_scale and self.is_float:
                continue
            found = shapes.get(spec.path)
            if found is None:
                rule = f"the model needs this parameter, of shape {list(spec.shape)}"
                problems.append(Problem(self.location, spec.path, "missing", rule))
            elif found != spec.shape:
                rule = f"the config asks for shape {list(spec.shape)}"
                problems.append(Problem(self.location, spec.path, list(found), rule))
        if problems:
            raise ConfigError(problems)


def is_orbax_folder(folder: Path) -> bool:
    return (folder / MARKER_NAME).is_file() or (folder / PARAMS_NAME / "_METADATA").is_file()


def open_orbax(folder: Path) -> OrbaxSource:
    """Look at files only, start no JAX. Raises ConfigError for a folder that is not whole."""
    marker = _read_marker(folder)
    if marker.get("layout") != LAYOUT_VERSION:
        rule = f"this jpd reads layout {LAYOUT_VERSION}: convert the checkpoint again"
        raise ConfigError(
            [Problem(str(folder / MARKER_NAME), "layout", marker.get("layout"), rule)]
        )
    _check_files(folder, marker.get("file_bytes"))
    return OrbaxSource(folder.resolve(), stored_format(folder))


def stored_format(folder: Path) -> WeightFormat:
    """How the matrices are stored. Raises ConfigError."""
    return "int8" if _read_marker(folder).get("weights") == "int8" else "float"


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file in `folder`, by its path in there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _check_files(folder: Path, expected: Any) -> None:
    """Raise ConfigError for every file of the parameters that is missing or was cut off."""
    found = file_sizes(folder / PARAMS_NAME)
    problems = []
    for name, num_bytes in expected.items() if isinstance(expected, dict) else ():
        if found.get(name) != num_bytes:
            rule = f"was written with {num_bytes} bytes"
            problems.append(
                Problem(str(folder / PARAMS_NAME / name), "bytes", found.get(name), rule)
            )
    if problems:
        raise ConfigError(problems)


def _read_marker(folder: Path) -> dict[str, Any]:
    path = folder / MARKER_NAME
    try:
        marker = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        rule = "is needed: it is written by `jpd convert`"
        raise ConfigError([Problem(str(path), MARKER_NAME, str(error), rule)]) from error
    return marker if isinstance(marker, dict) else {}


def _checkpointer() -> Any:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=1))


def _groups(specs: Sequence[ParamSpec]) -> Iterator[list[ParamSpec]]:
    """Runs of parameters of at most RESTORE_GROUP_BYTES, at least one each."""
    group: list[ParamSpec] = []
    num_bytes = 0
    for spec in specs:
        if group and num_bytes + spec.num_bytes > RESTORE_GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(spec)
        num_bytes += spec.num_bytes
    if group:
        yield group
