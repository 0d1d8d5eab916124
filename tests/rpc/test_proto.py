"""The committed stubs are those of the committed jpd.proto."""

import re
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from jpd.rpc import jpd_pb2


def descriptor_of_module() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    jpd_pb2.DESCRIPTOR.CopyToProto(file)
    return file


def test_generating_again_gives_the_same_descriptor(repo: Path, tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    target = tmp_path / "jpd.bin"
    arguments = ["protoc", f"-I{repo}", f"--descriptor_set_out={target}", "jpd/rpc/jpd.proto"]
    assert protoc.main(arguments) == 0
    generated = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file[0]
    generated.ClearField("source_code_info")
    for message in generated.message_type:
        for field in message.field:
            field.ClearField("json_name")
    assert generated == descriptor_of_module()


def test_stubs_import_each_other_as_a_package(repo: Path) -> None:
    source = (repo / "jpd" / "rpc" / "jpd_pb2_grpc.py").read_text()
    assert "from jpd.rpc import jpd_pb2" in source


def test_methods_and_sampling_fields_are_explained(repo: Path) -> None:
    source = (repo / "jpd" / "rpc" / "jpd.proto").read_text()
    lines = source.splitlines()
    for number, line in enumerate(lines):
        if line.strip().startswith("rpc "):
            assert lines[number - 1].strip().startswith("//"), line
    request = re.search(r"message SamplingParams \{(.*?)\n\}", source, re.DOTALL)
    assert request is not None
    for line in request[1].strip().splitlines():
        assert "//" in line, line


def test_lines_are_no_longer_than_ours(repo: Path) -> None:
    lines = (repo / "jpd" / "rpc" / "jpd.proto").read_text().splitlines()
    assert max(map(len, lines)) <= 100
