"""The metrics: their names, their independence, what a request adds to them."""

import re

from jpd.metrics import Metrics
from jpd.request import Timeline

NAMES = """
time_to_first_token_seconds inter_token_latency_seconds time_per_output_token_seconds
request_queue_seconds request_prefill_seconds kv_transfer_seconds kv_transfer_bytes_total
kv_sent_back_total
kv_pages_in_use kv_pages kv_pages_cached worker_up prefix_cache_hit_tokens_total requests_total
requests_failed_total
compilations_after_ready_total router_decisions_total retries_total requests_waiting
requests_running unknown_attempts_total late_kv_pieces_total prompt_tokens_total output_tokens_total
replayed_tokens_total preemptions_total admissions_total placements_total prefill_is_missing
spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
""".split()


def families(metrics: Metrics) -> set[str]:
    return set(re.findall(r"^# TYPE jpd:(\w+) ", metrics.render().decode(), re.MULTILINE))


def test_every_name_is_exported_with_help_and_nothing_else_is() -> None:
    metrics = Metrics()
    assert families(metrics) == set(NAMES)
    helps = re.findall(r"^# HELP jpd:\w+ (.+)$", metrics.render().decode(), re.MULTILINE)
    assert len(helps) == len(NAMES)


def test_start_times_of_counters_are_left_out() -> None:
    metrics = Metrics()
    metrics.requests.labels("finished").inc()
    text = metrics.render().decode()
    assert "_created" not in text
    assert 'jpd:requests_total{outcome="finished"} 1.0' in text


def test_two_servers_in_one_process_do_not_share_counts() -> None:
    first, second = Metrics(), Metrics()
    first.output_tokens.inc(5)
    assert first.value("jpd:output_tokens_total") == 5
    assert second.value("jpd:output_tokens_total") == 0


def test_labels_are_told_apart() -> None:
    metrics = Metrics()
    metrics.kv_pages_in_use.labels("decode-0").set(3)
    metrics.requests_running.labels("decode-0", "decode").set(2)
    assert metrics.value("jpd:kv_pages_in_use", worker="decode-0") == 3
    assert metrics.value("jpd:kv_pages_in_use", worker="decode-1") == 0
    assert metrics.value("jpd:requests_running", worker="decode-0", role="decode") == 2


def test_phases_that_were_not_reached_are_not_observed() -> None:
    metrics = Metrics()
    refused = Timeline(queue_seconds=3.0)
    metrics.observe_phases(refused, num_output_tokens=0)
    assert metrics.value("jpd:request_queue_seconds_sum") == 3.0
    for name in ("request_prefill", "kv_transfer", "time_per_output_token"):
        assert metrics.value(f"jpd:{name}_seconds_count") == 0
    served = Timeline(prefill_seconds=2.0, transfer_seconds=0.5, tpot_seconds=0.25, kv_bytes=8)
    metrics.observe_phases(served, num_output_tokens=9)
    assert metrics.value("jpd:request_prefill_seconds_sum") == 2.0
    assert metrics.value("jpd:kv_transfer_seconds_sum") == 0.5
    assert metrics.value("jpd:time_per_output_token_seconds_sum") == 0.25
    single = Timeline(prefill_seconds=1.0)
    metrics.observe_phases(single, num_output_tokens=1)
    assert metrics.value("jpd:time_per_output_token_seconds_count") == 1


def test_a_removed_worker_leaves_no_gauge_standing() -> None:
    metrics = Metrics()
    for worker in ("decode-0", "decode-1"):
        metrics.observe_pool(worker, 8, 5, 2)
        metrics.worker_up.labels(worker).set(1)
        metrics.requests_running.labels(worker, "decode").set(1)
    metrics.forget_worker("decode-0")
    text = metrics.render().decode()
    assert 'worker="decode-0"' not in text
    assert metrics.value("jpd:kv_pages", worker="decode-1") == 8
    assert metrics.value("jpd:kv_pages_cached", worker="decode-1") == 2
