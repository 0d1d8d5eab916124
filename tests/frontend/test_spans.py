"""Spans of requests: phases below the router's, below the caller's."""

from collections.abc import Generator
from pathlib import Path

import grpc
import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jpd.api import Server
from jpd.config import DeploymentConfig
from jpd.errors import WorkerLostError
from jpd.frontend.spans import read_trace_context
from jpd.rpc import jpd_pb2, jpd_pb2_grpc
from tests.support.fake_server import FakeFleet, make_tiny_model, write_deployment

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> DeploymentConfig:
    return write_deployment(tmp_path_factory.mktemp("mesh"))


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Generator[TracerProvider, None, None]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider
    provider.shutdown()


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet(step_seconds=0.001)


@pytest.fixture
def server(
    repo: Path, deployment: DeploymentConfig, provider: TracerProvider, fleet: FakeFleet
) -> Generator[Server, None, None]:
    model = make_tiny_model(repo)
    with Server(model, deployment, lambda: fleet, tracer_provider=provider) as server:
        yield server


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = exporter.get_finished_spans()
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


def parent_of(span: ReadableSpan) -> str:
    return "" if span.parent is None else format(span.parent.span_id, "016x")


def test_phases_stand_below_the_routers_span_in_their_order(
    server: Server, exporter: InMemorySpanExporter
) -> None:
    [answer] = server.generate("abc", max_tokens=5)
    spans = by_name(exporter)
    assert (
        {"router", "prefill", "decode"}
        <= set(spans)
        <= {*("router", "queue", "prefill", "transfer", "decode")}
    )
    root = spans.pop("router")
    assert root.kind is SpanKind.SERVER and root.parent is None
    attributes = root.attributes or {}
    assert attributes["gen_ai.request.model"] == "tiny"
    assert attributes["gen_ai.usage.input_tokens"] == 4
    assert attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["jpd.path"] == ("disaggregated",)
    assert attributes["jpd.state"] == "finished" and root.status.status_code is StatusCode.UNSET
    assert answer.timeline is not None
    assert attributes["jpd.kv_bytes"] == answer.timeline.kv_bytes > 0
    [trace] = server.trace.requests()
    assert attributes["gen_ai.request.id"] == trace.request_id
    starts = []
    for span in spans.values():
        assert parent_of(span) == format(root.context.span_id, "016x")
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time  # type: ignore[operator]
        starts.append(span.start_time)
    assert starts == sorted(starts)  # type: ignore[type-var]
    assert (spans["prefill"].attributes or {})["jpd.worker"] == "prefill-0"
    decode = spans["decode"].attributes or {}
    assert (decode["jpd.worker"], decode["jpd.output_tokens"]) == ("decode-0", 5)
    seconds = (root.end_time - root.start_time) / 1e9  # type: ignore[operator]
    assert 0.004 < seconds < 5.0


def test_the_callers_span_is_the_parent_over_http_and_grpc(
    server: Server, exporter: InMemorySpanExporter
) -> None:
    doors = server.serve()
    httpx.post(
        f"http://127.0.0.1:{doors.http_port}/v1/completions",
        json={"prompt": "a", "max_tokens": 2},
        headers={"traceparent": TRACEPARENT},
    ).raise_for_status()
    request = jpd_pb2.GenerateRequest(text="a", sampling=jpd_pb2.SamplingParams(max_tokens=2))
    with grpc.insecure_channel(f"127.0.0.1:{doors.grpc_port}") as channel:
        stub = jpd_pb2_grpc.JpdStub(channel)
        list(stub.Generate(request, metadata=(("traceparent", TRACEPARENT),)))
        not_sampled = TRACEPARENT[:-1] + "0"
        list(stub.Generate(request, metadata=(("traceparent", not_sampled),)))
    roots = [span for span in exporter.get_finished_spans() if span.name == "router"]
    assert [parent_of(root) for root in roots] == [SPAN_ID, SPAN_ID]
    assert {format(root.context.trace_id, "032x") for root in roots} == {TRACE_ID}


def test_the_callers_span_is_the_parent_in_python(
    server: Server, exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    with provider.get_tracer("caller").start_as_current_span("caller") as caller:
        server.generate("a", max_tokens=2)
    root = by_name(exporter)["router"]
    assert parent_of(root) == format(caller.get_span_context().span_id, "016x")


def test_a_failed_request_is_an_error(
    server: Server, exporter: InMemorySpanExporter, fleet: FakeFleet
) -> None:
    fleet.decode.die("fell over")
    with pytest.raises(WorkerLostError):
        server.generate("a", max_tokens=2)
    root = by_name(exporter)["router"]
    assert root.status.status_code is StatusCode.ERROR
    assert "no decode worker is available" in (root.status.description or "")
    attributes = root.attributes or {}
    assert attributes["error.type"] == "WorkerLostError" and attributes["jpd.state"] == "failed"


@pytest.mark.parametrize("value", ["nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 99])
def test_a_trace_context_that_is_none_is_no_parent(
    server: Server, exporter: InMemorySpanExporter, value: str
) -> None:
    url = f"http://127.0.0.1:{server.serve(grpc_port=None).http_port}/v1/completions"
    body = {"prompt": "a", "max_tokens": 2}
    httpx.post(url, json=body, headers={"traceparent": value}).raise_for_status()
    assert by_name(exporter)["router"].parent is None
    assert len(read_trace_context({"traceparent": "x" * 99, "tracestate": "a=b"}.get)) == 1
