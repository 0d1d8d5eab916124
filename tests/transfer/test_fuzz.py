"""Random protobufs and spoilt records for every method of the service that moves KV."""

import contextlib
from collections.abc import Iterator
from random import Random

import grpc
import pytest

from jpd.rpc import kv_pb2
from jpd.rpc.records import dump
from jpd.transfer.notice import notice_of
from jpd.transfer.protocol import ArrivedPiece, PageRequest
from jpd.transfer.remote import RemoteTransfer
from tests.support.random_messages import RandomMessages
from tests.support.random_records import spoilt
from tests.transfer import kv_pools
from tests.transfer.peer_process import HEADS, PAGE_SIZE, make_transfer, target_of
from tests.transfer.test_remote import wait_until

NUM_EACH = 150
TOKEN = "a secret"


@pytest.fixture
def transfer() -> Iterator[RemoteTransfer]:
    transfer = make_transfer("host_staged", TOKEN)
    yield transfer
    transfer.close()


def test_random_calls_stop_no_lane_and_no_lease(transfer: RemoteTransfer) -> None:
    arrived: list[ArrivedPiece] = []
    transfer.register("decode-1", target_of(1).mesh, arrived.append)
    source = kv_pools.make_side(0, 1, HEADS, page_size=PAGE_SIZE)
    wire = kv_pools.wire_between(source, target_of(1))
    piece = kv_pools.piece_of(source, wire, (3, 1), destination="decode-1", page_start=2)
    notice = notice_of(piece, "nobody.1", transfer.address, "host_staged", "")
    asked = PageRequest("a", "prefill-0", "decode-1", 0, 1)
    random = Random(1)
    whole = {"notice_record": dump(notice), "request_record": dump(asked)}
    known = {
        name: [record, *(spoilt(random, record) for _ in range(100))]
        for name, record in whole.items()
    }
    service = kv_pb2.DESCRIPTOR.services_by_name["KvTransfer"]
    with grpc.insecure_channel(transfer.address) as channel:
        for path, data in RandomMessages(1, known).calls(service, NUM_EACH):
            metadata = (("authorization", f"Bearer {TOKEN}"),)
            call = channel.stream_stream(path)(iter([data]), timeout=10, metadata=metadata)
            with contextlib.suppress(grpc.RpcError):
                list(call)
            assert call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: transfer.num_in_flight("decode-1") == 0, 20)
    assert arrived and all(piece.error is not None for piece in arrived if piece.num_pages)
    assert transfer._keeper.is_alive() and all(
        lane.thread.is_alive() for lane in transfer._lanes.values()
    )
    assert transfer.num_kept == 0
