"""Workers whose pages differ, wires with checksums and in int8: from prompt to tokens."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jpd.checkpoint.model_source import open_model
from jpd.errors import TransferError
from jpd.launch.fleet import Fleet
from jpd.launch.inprocess import launch_workers
from jpd.transfer.faulty import Fault, FaultyTransfer
from jpd.transfer.plan import kv_bytes_per_token
from tests.launch.tiny_fleets import CHUNK, PAGE_SIZE, deployment, generate, worker

CONVERSATION = [5, 9, 3] * 17  # three pages of the decode worker's, and a little


def page_bytes(repo: Path) -> int:
    """What a page of the decode worker's takes on the wire, in float32."""
    config = open_model(str(repo / "tests" / "golden" / "llama3")).config
    return PAGE_SIZE * kv_bytes_per_token(config, 4)


@pytest.fixture(scope="module")
def fleet(repo: Path) -> Iterator[Fleet]:
    """Small pages on two devices, large ones on one; every piece is checked on arrival."""
    fault = Fault("corrupt", piece_index=1, attempt_id="broken", layer=1)
    config = deployment(
        replace(worker("small-0", "prefill", [0, 1]), page_size=8),
        replace(worker("large-0", "prefill", [2]), page_size=CHUNK),
        worker("decode-0", "decode", [4, 5]),
        retain_seconds=60.0,
    )
    running = launch_workers(
        open_model(str(repo / "tests" / "golden" / "llama3")),
        replace(config, cache=replace(config.cache, checksum=True, wire_dtype="float32")),
        transfer_wrapper=lambda inner: FaultyTransfer(inner, [fault]),
    )
    yield running
    running.check_integrity()
    running.close()


@pytest.mark.slow
@pytest.mark.parametrize("prefill", ["small-0", "large-0"])
async def test_d08_tokens_do_not_depend_on_page_sizes(
    fleet: Fleet, prefill: str, repo: Path
) -> None:
    golden = dict(np.load(repo / "tests" / "golden" / "llama3" / "expected.npz"))
    for number, (prompt, greedy) in enumerate(
        zip(golden["prompts"], golden["greedy"], strict=True)
    ):
        name = f"{prefill}-{number}"
        tokens, _, _ = await generate(
            fleet, name, prompt, len(greedy), prefill=prefill, decode="decode-0"
        )
        assert tokens == greedy.tolist()
    assert fleet.compile_counter.num_after_ready == 0


@pytest.mark.slow
@pytest.mark.parametrize("prefill", ["small-0", "large-0"])
async def test_g09_a_second_turn_moves_only_new_pages_whatever_their_size(
    fleet: Fleet, prefill: str, repo: Path
) -> None:
    prompt = [10 + ord(prefill[0]), *CONVERSATION]  # nobody has seen its beginning
    tokens, _, _ = await generate(
        fleet, f"turn-1-{prefill}", prompt, 9, prefill=prefill, decode="decode-0"
    )
    longer = [*prompt, *tokens, 7, 7, 7, *range(3, 20)]
    again, _, second = await generate(
        fleet, f"turn-2-{prefill}", longer, 9, prefill=prefill, decode="decode-0"
    )
    num_held = (len(prompt) + len(tokens) - 1) // PAGE_SIZE  # the last token has no KV yet
    num_pages = -(-len(longer) // PAGE_SIZE)
    assert second.kv_bytes == (num_pages - num_held) * page_bytes(repo)
    alone, _, _ = await generate(
        fleet, f"alone-{prefill}", longer, 9, prefill="large-0", decode="decode-0"
    )
    assert again == alone


@pytest.mark.slow
async def test_d16_an_altered_page_is_an_error_before_any_token_of_decode(fleet: Fleet) -> None:
    with pytest.raises(TransferError, match="checksum differs, altered on their way"):
        await generate(fleet, "broken", range(3, 80), 9, prefill="small-0", decode="decode-0")
