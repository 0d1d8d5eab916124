"""The failure table, row by row."""

from dataclasses import replace

import pytest

from jpd.config import FailureConfig
from jpd.errors import PreemptedError, TransferError, WorkerLostError
from jpd.router.failure import Action, Fault, FaultFacts, classify, decide

DEFAULT = FailureConfig()
FACTS = FaultFacts(num_faults=1, is_short=True, other_prefill=True, other_decode=True)


@pytest.mark.parametrize(
    ("fault", "change", "action"),
    [
        (Fault.PREFILL_LOST, {}, Action.RETRY_OTHER_PREFILL),
        (Fault.PREFILL_LOST, {"num_faults": 2}, Action.LOCAL_PREFILL),
        (Fault.PREFILL_LOST, {"other_prefill": False}, Action.LOCAL_PREFILL),
        (Fault.PREFILL_LOST, {"num_faults": 2, "is_short": False}, Action.FAIL),
        (Fault.PREFILL_LOST, {"other_prefill": False, "is_short": False}, Action.FAIL),
        (Fault.TRANSFER_FAILED, {}, Action.RETRY_TRANSFER),
        (Fault.TRANSFER_FAILED, {"num_faults": 2}, Action.RECOMPUTE_ON_DECODE),
        (Fault.TRANSFER_FAILED, {"num_faults": 2, "is_short": False}, Action.FAIL),
        (Fault.TRANSFER_FAILED, {"num_faults": 3}, Action.FAIL),
        (Fault.DECODE_LOST, {}, Action.REPLAY),
        (Fault.DECODE_LOST, {"num_faults": 7}, Action.REPLAY),
        (Fault.DECODE_LOST, {"other_decode": False}, Action.FAIL),
        (Fault.PREEMPTED, {"num_faults": 99, "other_decode": False}, Action.REPLAY),
    ],
)
def test_the_table(fault: Fault, change: dict, action: Action) -> None:
    assert decide(DEFAULT, fault, replace(FACTS, **change)) is action


@pytest.mark.parametrize("fault", [f for f in Fault if f is not Fault.PREEMPTED])
def test_every_row_can_be_switched_to_fail(fault: Fault) -> None:
    strict = FailureConfig(prefill_lost="fail", transfer_failed="fail", decode_lost="fail")
    assert decide(strict, fault, FACTS) is Action.FAIL


def test_an_error_is_told_by_its_kind_and_by_who_was_called() -> None:
    assert classify(TransferError("d", "late"), "d", "d") is Fault.TRANSFER_FAILED
    assert classify(TransferError("d", "no link"), "p", "d") is Fault.TRANSFER_FAILED
    assert classify(WorkerLostError("p", "gone"), "p", "d") is Fault.PREFILL_LOST
    assert classify(WorkerLostError("d", "gone"), "p", "d") is Fault.DECODE_LOST
    assert classify(WorkerLostError("d", "gone"), "d", "d") is Fault.DECODE_LOST
    assert classify(PreemptedError("d", "no pages"), "d", "d") is Fault.PREEMPTED
    assert classify(PreemptedError("d", "no pages"), "p", "d") is Fault.PREEMPTED
