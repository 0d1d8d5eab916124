"""Random protobufs for every method of the public service: refused with a reason, or answered."""

import logging

import grpc
import pytest

from jpd.rpc import jpd_pb2
from tests.frontend.conftest import Doors
from tests.support.random_messages import RandomMessages

NUM_EACH = 80
CODES = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
KNOWN = {
    "model": ["", "tiny"],
    "max_tokens": [1, 5],
    "n": [1, 2],
    "role": ["user", "assistant", "tool"],
    "ids": [5, 97],
    "regex": ["a+"],
    "json_schema": ['{"type": "object"}'],
}


@pytest.mark.parametrize("seed", [1, 2])
def test_random_messages_are_answered_or_refused(
    doors: Doors, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    service = jpd_pb2.DESCRIPTOR.services_by_name["Jpd"]
    codes = set()
    with grpc.insecure_channel(doors.grpc_address) as channel:
        for path, data in RandomMessages(seed, KNOWN).calls(service, NUM_EACH):
            call = channel.stream_stream(path)(iter([data]), timeout=20)
            try:
                list(call)
            except grpc.RpcError:
                pass
            codes.add(call.code())
            assert call.code() in CODES, (path, data, call.details())
    assert codes == CODES
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert doors.router.num_running == 0 and doors.router.num_finished > 0
