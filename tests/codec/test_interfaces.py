"""The tables of C functions and structs in :mod:`ds_zipccl.kernels`, compared with the headers that are the interfaces."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest

from ds_zipccl.kernels import build
from ds_zipccl.kernels.c_functions import F64, I32, POINTER, TEXT, U32, U64, Signatures
from ds_zipccl.kernels.cpp import interface as cpp
from ds_zipccl.kernels.cuda import interface as cuda

_SCALARS = {"void": None, "int32_t": I32, "uint32_t": U32, "uint64_t": U64, "double": F64}
_HEADERS = {"cpu/interface.h": cpp.SIGNATURES, "cuda/interface.h": cuda.SIGNATURES}


def _text(*names: str) -> str:
    """The declarations of headers, without comments."""
    return re.sub(r"//.*", "", "".join((build.CSRC / name).read_text() for name in names))


def _kind(declared: str) -> Any:
    """The kind of ``int32_t dtype``, ``const char* name`` and the like."""
    if "*" in declared:
        return TEXT if "char*" in declared else POINTER
    return _SCALARS[declared.split()[0]]


def declared(text: str) -> Signatures:
    """The functions that a header declares."""
    block = text.partition('extern "C" {')[2]
    found = {}
    for result, name, arguments in re.findall(r"([\w ]+\*?)\s(zipccl_\w+)\(([^)]*)\);", block):
        found[name] = _kind(result.strip()), tuple(_kind(one.strip()) for one in arguments.split(",") if one.strip())
    return found


def fields(text: str) -> dict[str, list[tuple[str, Any]]]:
    """The structs that headers define, by their names behind ``Zipccl``: names and kinds of the members."""
    structs: dict[str, list[tuple[str, Any]]] = {}
    for struct, body in re.findall(r"struct Zipccl(\w+) \{(.*?)\n\};", text, flags=re.S):
        members = []
        for line in filter(None, map(str.strip, body.split(";"))):
            kind, names = re.fullmatch(r"((?:const )?\w+\*?) (.+)", line, flags=re.S).groups()  # type: ignore[union-attr]
            for name in names.split(","):
                found: Any = POINTER if "*" in kind + name else _SCALARS.get(kind, kind)
                if size := re.search(r"\[(\d+)\]", name):
                    found = (kind, int(size[1]))
                members.append((re.sub(r"\[\d+\]|[* ]", "", name), found))
        structs[struct] = members
    return structs


def _same(field: Any, declared: Any) -> bool:
    if isinstance(declared, tuple):
        return declared == ("uint8_t", field._length_) and field._type_ is ctypes.c_uint8
    return f"Zipccl{field.__name__}" == declared if isinstance(declared, str) else field is declared


def differences(text: str, signatures: Signatures) -> list[str]:
    """The functions whose signature in the table is not the declared one."""
    said = declared(text)
    return sorted(name for name in said.keys() | signatures.keys() if said.get(name) != signatures.get(name))


@pytest.mark.parametrize("header", _HEADERS)
def test_the_table_of_signatures_is_that_of_the_header(header: str) -> None:
    assert len(declared(_text(header))) == len(_HEADERS[header]) > 4
    assert differences(_text(header), _HEADERS[header]) == []


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("int32_t dtype, int32_t code, uint32_t block", "int32_t dtype, uint32_t code, uint32_t block", ["zipccl_encode"]),
        ("zipccl_hash(const void* data, uint64_t bytes, ", "zipccl_hash(const void* data, ", ["zipccl_hash"]),
        ("void zipccl_add(", "int32_t zipccl_add(", ["zipccl_add"]),
        ("zipccl_level()", "zipccl_levels()", ["zipccl_level", "zipccl_levels"]),
        ("zipccl_orthonormalize(float* columns", "zipccl_orthonormalize(uint64_t columns", ["zipccl_orthonormalize"]),
    ],
)  # fmt: skip
def test_a_planted_difference_is_seen(before: str, after: str, found: list[str]) -> None:
    text = _text("cpu/interface.h")
    assert before in text
    assert differences(text.replace(before, after, 1), cpp.SIGNATURES) == found


def _different_structs(text: str) -> list[str]:
    said = fields(text)
    ours = {struct.__name__: struct._fields_ for struct in cpp.STRUCTS}
    assert said.keys() == ours.keys()
    return [
        struct
        for struct, members in ours.items()
        if [name for name, *_ in members] != [name for name, _ in said[struct]]
        or not all(_same(field[1], kind) for field, (_, kind) in zip(members, said[struct], strict=True))
    ]


def test_the_structs_are_those_of_the_header() -> None:
    text = _text("common/scaling.cuh", "cpu/interface.h")
    assert _different_structs(text) == []
    assert _different_structs(text.replace("uint64_t slots, mask;", "uint64_t mask, slots;")) == ["Search"]
    assert _different_structs(text.replace("int32_t dtype, code;", "uint32_t dtype, code;")) == ["RowSegment"]


def test_each_source_with_a_function_includes_the_interface() -> None:
    """A definition that the header does not declare would be mangled, and the library would lack its function."""
    definition = re.compile(r"^[\w *]+ zipccl_(?!chosen)\w+\(", re.M)
    sources = [path for path in (build.CSRC / "cpu").rglob("*.cpp") if definition.search(path.read_text())]
    assert len(sources) == 11
    for path in sources:
        text = path.read_text()
        assert 'extern "C"' not in text and '#include "cpu/interface.h"' in text, path.name
