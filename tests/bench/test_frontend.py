"""The benchmark of the doors: real sockets, a fake engine, a process of its own."""

from jpd.bench import frontend
from jpd.bench.results import Result


def test_both_doors_are_measured_side_by_side() -> None:
    results = {result.name: result for result in frontend.run(is_quick=True)}
    for door in ("HTTP", "gRPC"):
        total = results[f"{door}: host time, router to socket"]
        assert total == Result(total.name, total.value, "us/token", frontend.TARGET_MICROSECONDS)
        assert 1.0 < total.value < 1e5  # measured, whatever else this machine does
        least = 0.5 * frontend.QUICK.num_streams / frontend.QUICK.step_seconds
        assert results[f"{door}: tokens streamed"].value < 4.0 * least
    http, rpc = (results[f"{d}: host time, router to socket"].value for d in ("HTTP", "gRPC"))
    assert results["gRPC over HTTP"].value == rpc / http
