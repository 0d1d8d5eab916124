"""Where spans are sent: collectors over gRPC and HTTP, and what asks for them."""

import gzip
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import ModuleSpec

import grpc
import pytest
from google.protobuf.message import Message
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from jpd.errors import ConfigError
from jpd.frontend import otlp

COLLECTOR = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("endpoint", "environment", "is_wanted"),
    [
        (None, {}, False),
        (COLLECTOR, {}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": COLLECTOR}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR, "OTEL_SDK_DISABLED": "true"}, False),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR, "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_a_flag_or_a_variable_asks_for_spans(
    endpoint: str | None, environment: dict[str, str], is_wanted: bool
) -> None:
    for protocol in ("grpc", "http/protobuf"):
        chosen = {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
        provider = otlp.open_otlp(endpoint, environment | chosen, "1")
        assert (provider is not None) == is_wanted
        if provider is not None:
            assert provider.resource.attributes["service.name"] == "jpd"
            provider.shutdown()


class Collector(BaseHTTPRequestHandler):
    """What a collector hears."""

    heard: list[tuple[str, ExportTraceServiceRequest]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers["content-encoding"] == "gzip":
            body = gzip.decompress(body)
        self.heard.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *values: object) -> None:
        """Quiet."""


@pytest.fixture(params=["grpc", "http/protobuf"])
def collector(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, type[Collector]]]:
    """The protocol, where it listens, and what it hears."""
    kind = type("Heard", (Collector,), {"heard": []})
    if request.param == "grpc":
        server = grpc.server(ThreadPoolExecutor(1))

        def export(message: ExportTraceServiceRequest, context: object) -> Message:
            kind.heard.append(("/v1/traces", message))
            return ExportTraceServiceResponse()

        method = grpc.unary_unary_rpc_method_handler(
            export, ExportTraceServiceRequest.FromString, lambda reply: reply.SerializeToString()
        )
        name = "opentelemetry.proto.collector.trace.v1.TraceService"
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(name, {"Export": method}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield request.param, f"http://127.0.0.1:{port}", kind
        server.stop(0).wait()
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        yield request.param, f"http://127.0.0.1:{listener.server_port}", kind
        listener.shutdown()
        thread.join()


def test_spans_reach_a_collector(collector: tuple[str, str, type[Collector]]) -> None:
    protocol, address, kind = collector
    variables = {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
    provider = otlp.open_otlp(address, variables, "1.2")
    assert provider is not None
    with provider.get_tracer("jpd").start_as_current_span("router"):
        pass
    provider.shutdown()  # sends what is left
    [(path, message)] = kind.heard
    [resource_spans] = message.resource_spans
    named = {pair.key: pair.value.string_value for pair in resource_spans.resource.attributes}
    assert (named["service.name"], named["service.version"]) == ("jpd", "1.2")
    assert resource_spans.scope_spans[0].spans[0].name == "router" and path == "/v1/traces"


@pytest.mark.parametrize(
    ("endpoint", "environment", "told"),
    [
        ("localhost:4317", {}, "--otlp-endpoint.*must be a URL"),
        (COLLECTOR, {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "smoke"}, "must be grpc or http"),
    ],
)
def test_what_cannot_be_exported_to_is_told(
    endpoint: str, environment: dict[str, str], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        otlp.open_otlp(endpoint, environment, "1")


@pytest.mark.parametrize(
    ("endpoint", "name"), [(COLLECTOR, "--otlp-endpoint"), (None, "OTEL_EXPORTER_OTLP_ENDPOINT")]
)
def test_without_the_extra_who_asks_is_told_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, endpoint: str | None, name: str
) -> None:
    def find(module: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(otlp, "find_spec", find)
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR}
    with pytest.raises(ConfigError, match=re.escape(name) + ".*jpd\\[otel\\]"):
        otlp.open_otlp(endpoint, environment, "1")
    assert otlp.open_otlp(None, {}, "1") is None
