"""Prefill in one process, decode in another, with other tensor sizes: the tokens of one process.

KV leaves layer group by layer group; without groups hosts are tried in test_subprocess_hosts.py.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import jpd
from jpd.config import HostConfig, KVTransport, LaunchConfig
from tests.launch.tiny_fleets import PAGE_SIZE, deployment, worker

pytestmark = pytest.mark.slow

CORES = sorted(os.sched_getaffinity(0))


def apart(transport: KVTransport, checksum: bool, layer_groups: int):
    config = deployment(
        replace(worker("prefill-0", "prefill", [0, 1]), host="a", page_size=PAGE_SIZE // 2),
        replace(worker("decode-0", "decode", [0]), host="b"),
        retain_seconds=60.0,
    )
    return replace(
        config,
        hosts=(
            HostConfig("a", "cpu", 2, cores=(CORES[0],)),
            HostConfig("b", "cpu", 1, cores=(CORES[-1],)),
        ),
        launch=LaunchConfig("subprocess"),
        engine=replace(config.engine, layer_groups=layer_groups),
        cache=replace(config.cache, transport=transport, checksum=checksum, wire_dtype="float32"),
        router=replace(config.router, send_back="always"),
    )


@pytest.mark.parametrize(
    ("transport", "checksum", "layer_groups"),
    [("host_staged", True, 2), ("jax_transfer", False, 3)],
)
def test_d01_d11_g09_g10_tokens_are_those_of_one_process(
    golden_llama3: Path, transport: KVTransport, checksum: bool, layer_groups: int
) -> None:
    expected = dict(np.load(golden_llama3 / "expected.npz"))
    prompts, num_tokens = expected["prompts"].tolist(), expected["greedy"].shape[1]
    with jpd.launch(str(golden_llama3), apart(transport, checksum, layer_groups)) as server:
        answers = server.generate(prompts, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        for answer, greedy in zip(answers, expected["greedy"], strict=True):
            assert list(answer.token_ids) == greedy.tolist()
            timeline = answer.timeline
            assert (timeline.prefill_worker, timeline.decode_worker) == ("prefill-0", "decode-0")
            assert timeline.kv_bytes > 0
        again = server.generate(
            [[*prompts[0], *answers[0].token_ids, 7]], max_tokens=4, temperature=0.0
        )
        held = (len(prompts[0]) + num_tokens - 1) // PAGE_SIZE
        pages = -(-(len(prompts[0]) + num_tokens + 1) // PAGE_SIZE)
        page_bytes = answers[0].timeline.kv_bytes // -(-len(prompts[0]) // PAGE_SIZE)
        assert again[0].timeline.kv_bytes == (pages - held) * page_bytes, "g09: only what is new"
        known = len(prompts[0]) // (PAGE_SIZE // 2) * (PAGE_SIZE // 2)  # by the prefill worker
        assert (
            again[0].timeline.sent_back_kv_bytes
            == (held * PAGE_SIZE - known) * page_bytes // PAGE_SIZE
        )
        assert again[0].timeline.path == ["disaggregated", "send_back"]
        assert server.health().status == "ok"
