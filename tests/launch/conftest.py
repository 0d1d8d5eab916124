"""One server of a tiny checkpoint with text, for the tests of what requests can ask for."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jpd.api import Server, launch
from tests.launch.tiny_fleets import deployment, fleet_of, worker
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, copy_with_tokenizer

MAX_DRAFTS = 3
TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + CHAT_TEMPLATE


@pytest.fixture(scope="module")
def server(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Prefill and decode apart, and both on the decode worker; nothing may compile meanwhile.

    Of a module: compilations are the process's, and other modules start fleets of their own."""
    golden, folder = repo / "tests" / "golden" / "llama3", tmp_path_factory.mktemp("model")
    model = copy_with_tokenizer(golden, folder, chat_template=TEMPLATE)
    workers = worker("prefill-0", "prefill", [0]), worker("decode-0", "decode", [1])
    config = deployment(*workers, retain_seconds=60.0)
    config = replace(config, engine=replace(config.engine, max_speculative_tokens=MAX_DRAFTS))
    with launch(str(model), config, can_prefill_locally=True) as server:
        yield server
        fleet = fleet_of(server)
        assert fleet.compile_counter.num_after_ready == 0
        fleet.check_integrity()
