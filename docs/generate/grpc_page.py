"""reference/grpc.md: services and messages of outrider.v1 with their comments, as protoc reads them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from docs.generate.markdown import code, table

PROTOS = Path(__file__).parents[2] / "protos"
_INTRODUCTION = """# gRPC, `outrider.v1`

Clients need `gateway.proto` and `common.proto`; `verifier.proto`, `drafter.proto` and `log.proto` are how the services
speak to each other and to Redis. Fields are only ever added, so neighbouring versions talk to each other. This page
is made from `protos/`.
"""
_F = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in _F.Type.items()
    if value not in (_F.TYPE_MESSAGE, _F.TYPE_ENUM, _F.TYPE_GROUP)
}
# Field numbers of descriptor.proto, of which source paths are made.
_FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE, _VALUE, _METHOD = 4, 5, 6, 2, 2
_FIELD, _NESTED_MESSAGE, _NESTED_ENUM = 2, 3, 4
_Path = tuple[int, ...]


def grpc_page() -> str:
    return _INTRODUCTION + "".join(_FilePage(file).text() for file in _files())


def _files() -> Sequence[descriptor_pb2.FileDescriptorProto]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "protos.bin"
        names = [str(path) for path in sorted(PROTOS.rglob("*.proto"))]
        arguments = ["protoc", f"-I{PROTOS}", "--include_source_info", f"--descriptor_set_out={output}", *names]
        if protoc.main(arguments) != 0:
            raise RuntimeError("protoc refused protos/")
        return descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes()).file


class _FilePage:
    def __init__(self, file: descriptor_pb2.FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(location.path): " ".join(location.leading_comments.split())
            for location in file.source_code_info.location
        }

    def text(self) -> str:
        parts = [f"\n## {Path(self._file.name).name}\n"]
        for index, service in enumerate(self._file.service):
            parts.append(self._service(service, (_FILE_SERVICE, index)))
        for index, message in enumerate(self._file.message_type):
            parts.extend(self._message(message, (_FILE_MESSAGE, index), ""))
        for index, enum in enumerate(self._file.enum_type):
            parts.append(self._enum(enum, (_FILE_ENUM, index), ""))
        return "".join(parts)

    def _comment(self, path: _Path) -> str:
        return self._comments.get(path, "")

    def _service(self, service: descriptor_pb2.ServiceDescriptorProto, path: _Path) -> str:
        rows = []
        for index, method in enumerate(service.method):
            took = ("stream " if method.client_streaming else "") + _short(method.input_type)
            gave = ("stream " if method.server_streaming else "") + _short(method.output_type)
            comment = self._comment((*path, _METHOD, index))
            rows.append([code(method.name), code(took), code(gave), _prose(comment)])
        head = f"\n### service {service.name}\n\n{self._comment(path)}\n\n"
        return head + table(("method", "takes", "gives", ""), rows)

    def _message(self, message: descriptor_pb2.DescriptorProto, path: _Path, outer: str) -> Iterator[str]:
        name = outer + message.name
        maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
        rows = []
        for index, field in enumerate(message.field):
            comment = _prose(self._comment((*path, _FIELD, index)))
            if field.HasField("oneof_index") and not field.proto3_optional:
                comment = f"One of {code(message.oneof_decl[field.oneof_index].name)}. {comment}"
            rows.append([str(field.number), code(field.name), code(_type(field, maps)), comment])
        body = table(("no.", "field", "type", ""), rows) if rows else "No fields.\n"
        yield f"\n### {name}\n\n{self._comment(path)}\n\n{body}"
        for index, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message(nested, (*path, _NESTED_MESSAGE, index), f"{name}.")
        for index, enum in enumerate(message.enum_type):
            yield self._enum(enum, (*path, _NESTED_ENUM, index), f"{name}.")

    def _enum(self, enum: descriptor_pb2.EnumDescriptorProto, path: _Path, outer: str) -> str:
        rows = [
            [str(value.number), code(value.name), _prose(self._comment((*path, _VALUE, index)))]
            for index, value in enumerate(enum.value)
        ]
        return f"\n### enum {outer}{enum.name}\n\n{self._comment(path)}\n\n" + table(("no.", "value", ""), rows)


def _type(field: descriptor_pb2.FieldDescriptorProto, maps: dict[str, descriptor_pb2.DescriptorProto]) -> str:
    entry = maps.get(_short(field.type_name).rpartition(".")[2])
    if entry is not None:
        return f"map<{_type(entry.field[0], {})}, {_type(entry.field[1], {})}>"
    name = _SCALARS.get(field.type) or _short(field.type_name)
    if field.label == _F.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _short(type_name: str) -> str:
    return type_name.removeprefix(".outrider.v1.")


def _prose(comment: str) -> str:
    return comment.replace("|", "\\|").replace("<", "&lt;")
