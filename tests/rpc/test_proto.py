"""The committed stubs are those of the committed .proto files."""

import re
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import descriptor_pb2

from jpd.rpc import jpd_pb2, kv_pb2, worker_pb2

PROTOS = {"jpd": jpd_pb2, "worker": worker_pb2, "kv": kv_pb2}


def descriptor_of(module: ModuleType) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    return file


@pytest.mark.parametrize("name", PROTOS)
def test_generating_again_gives_the_same_descriptor(repo: Path, tmp_path: Path, name: str) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    target = tmp_path / "proto.bin"
    arguments = ["protoc", f"-I{repo}", f"--descriptor_set_out={target}", f"jpd/rpc/{name}.proto"]
    assert protoc.main(arguments) == 0
    generated = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file[0]
    generated.ClearField("source_code_info")
    for message in generated.message_type:
        for part in (message, *message.nested_type):
            for field in part.field:
                field.ClearField("json_name")
    assert generated == descriptor_of(PROTOS[name])


@pytest.mark.parametrize("name", PROTOS)
def test_stubs_import_each_other_as_a_package(repo: Path, name: str) -> None:
    source = (repo / "jpd" / "rpc" / f"{name}_pb2_grpc.py").read_text()
    assert f"from jpd.rpc import {name}_pb2" in source


@pytest.mark.parametrize("name", PROTOS)
def test_methods_are_explained(repo: Path, name: str) -> None:
    lines = (repo / "jpd" / "rpc" / f"{name}.proto").read_text().splitlines()
    assert max(map(len, lines)) <= 100
    for number, line in enumerate(lines):
        if line.strip().startswith("rpc "):
            assert lines[number - 1].strip().startswith("//"), line


def test_sampling_fields_are_explained(repo: Path) -> None:
    source = (repo / "jpd" / "rpc" / "jpd.proto").read_text()
    request = re.search(r"message SamplingParams \{(.*?)\n\}", source, re.DOTALL)
    assert request is not None
    for line in request[1].strip().splitlines():
        if ";" in line:
            assert "//" in line, line
