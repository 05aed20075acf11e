"""Does what grpcurl does with the options of docs/examples/grpcurl.sh, where it is not installed (Debian 12 lacks it).

The protos are read from -import-path and sent by their names, as grpcurl does it, without generated code. The example
runs this itself, from a folder on the PATH in which it is called `grpcurl`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_tools import protoc


def pool_of(import_path: str, proto: str) -> descriptor_pool.DescriptorPool:
    """The descriptors of `proto` and all that it imports. Raises SystemExit where they are not found."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder) / "set"
        well_known = str(Path(protoc.__file__).parent / "_proto")
        command = [
            "protoc",
            f"-I{import_path}",
            f"-I{well_known}",
            "--include_imports",
            f"--descriptor_set_out={compiled}",
        ]
        if protoc.main([*command, proto]) != 0:
            raise SystemExit(f"Failed to process proto source files: {import_path}: {proto}")
        files = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)  # type: ignore[no-untyped-call]
    return pool


def main() -> None:
    parser = argparse.ArgumentParser(prog="grpcurl", allow_abbrev=False)
    parser.add_argument("-plaintext", action="store_true", required=True)
    parser.add_argument("-import-path", required=True)
    parser.add_argument("-proto", required=True)
    parser.add_argument("-d", default="{}")
    parser.add_argument("address")
    parser.add_argument("symbol")
    given = parser.parse_args()
    pool = pool_of(given.import_path, given.proto)
    service, _, name = given.symbol.partition("/")
    method = pool.FindServiceByName(service).methods_by_name[name]
    request, reply = (message_factory.GetMessageClass(each) for each in (method.input_type, method.output_type))
    body = json_format.Parse(given.d, request())
    with grpc.insecure_channel(given.address) as channel:
        call = channel.unary_stream if method.server_streaming else channel.unary_unary
        answer = call(f"/{service}/{name}", request.SerializeToString, reply.FromString)(body, timeout=60)
        for message in answer if method.server_streaming else [answer]:
            print(json_format.MessageToJson(message, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())
