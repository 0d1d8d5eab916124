"""A server whose workers have no devices: the real API, router and doors over FakeWorkers.

Text goes through the byte-level tokenizer of `tests.frontend.fake_router`; after t comes t + 1.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jpd.checkpoint.model_source import Model, open_model
from jpd.config import DeploymentConfig
from jpd.mesh_file import load_deployment
from tests.frontend.fake_router import VOCAB_SIZE, make_tokenizer
from tests.support.fake_worker import FakeWorker

MESH = """
[[host]]
name = "laptop"
platform = "cpu"
devices = 2

[[worker]]
name = "prefill"
role = "prefill"
host = "laptop"
devices = [[0]]
mesh = { tensor = 1 }

[[worker]]
name = "decode"
role = "decode"
host = "laptop"
devices = [[1]]
mesh = { tensor = 1 }
slots = 8

[cache]
page_size = 16
pages = 65

[engine]
prefill_chunk = 32

[router]
request_timeout_seconds = 20

[[slo]]
name = "interactive"
ttft_ms = 500
tpot_ms = 50
priority = 10
"""


class FakeFleet:
    """One prefill and one decode worker; the token after t is t + 1."""

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.prefill = FakeWorker("prefill-0", "prefill", vocab_size=VOCAB_SIZE)
        self.decode = FakeWorker(
            "decode-0", "decode", slots=8, vocab_size=VOCAB_SIZE, step_seconds=step_seconds
        )
        self.num_closed = 0
        self.grammars = None

    @property
    def clients(self) -> Sequence[FakeWorker]:
        return (self.prefill, self.decode)

    @property
    def num_held(self) -> int:
        return self.prefill.num_held + self.decode.num_held

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        return np.zeros((len(token_ids), VOCAB_SIZE), np.float32)

    def close(self) -> None:
        self.num_closed += 1


def write_deployment(folder: Path) -> DeploymentConfig:
    path = folder / "1p1d.toml"
    path.write_text(MESH)
    return load_deployment(path)


def make_tiny_model(repo: Path) -> Model:
    """The sizes of a golden model, with a vocabulary and a tokenizer that can be read by eye."""
    found = open_model(str(repo / "tests" / "golden" / "llama3"))
    config = replace(found.config, vocab_size=VOCAB_SIZE)
    tokenizer = make_tokenizer()
    return replace(found, name="tiny", config=config, tokenizer=tokenizer, eos_token_ids=(2,))
