"""Places in Python code where the host would wait for a device, found on the syntax tree.

A wait is a method that brings words to the host, or a tensor where Python wants a number or a truth value. Whether a name is a tensor
follows from annotations and from the functions that made it, within one function. Methods on anything (``.item``) need no such knowledge.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

#: Methods that wait, whatever they are called on.
METHODS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "synchronize",
    "is_nonzero",
    "equal",
    "allclose",
    "unique",
    "masked_select",
)
#: Functions that ask a tensor for a number or a truth value.
ASKING = ("bool", "int", "float", "min", "max", "sum", "any", "all", "str", "repr", "format", "range", "sorted")
#: Attributes and methods of a tensor that need no device.
ON_HOST = ("shape", "dtype", "device", "nbytes", "itemsize", "layout", "numel", "element_size", "data_ptr", "size", "dim", "stride",
           "is_contiguous", "storage_offset", "record_stream", "is_cuda", "untyped_storage", "nelement")  # fmt: skip
#: Functions of torch that make no tensor.
NO_TENSOR = (
    "device",
    "Size",
    "Tensor",
    "inference_mode",
    "no_grad",
    "is_tensor",
    "is_grad_enabled",
    "finfo",
    "iinfo",
    "Generator",
)
#: Methods of a tensor, and functions of torch, that make several tensors.
SEVERAL = ("split", "chunk", "unbind", "tensor_split")
ONE, MANY = "a tensor", "tensors"


def kind_of(annotation: ast.AST | None) -> str:
    """``ONE`` or ``MANY`` for an annotation of a tensor, or of a list of them; "" for others."""
    if annotation is None:
        return ""
    text = ast.unparse(annotation)
    if any(word in text for word in ("Callable", "tuple", "Mapping", "dict")) or "torch.Tensor" not in text:
        return ""
    return ONE if text.replace(" | None", "") == "torch.Tensor" else MANY


class Known:
    """Kinds of the attributes and of the results of functions, by name, of some modules."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.attributes: dict[str, str] = {}
        self.results: dict[str, str] = {}
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and kind_of(node.returns):
                    self.results[node.name] = kind_of(node.returns)
                elif isinstance(node, ast.ClassDef):
                    self.attributes |= {
                        field.target.id: kind_of(field.annotation)
                        for field in node.body
                        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                    }


class Function:
    """The waits of one function, and of the functions inside."""

    def __init__(self, node: ast.FunctionDef, known: Known) -> None:
        self._known, self._names = known, {}
        arguments = node.args
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            self._names[one.arg] = kind_of(one.annotation)
        for _ in range(2):  # a name of a loop may be used above its last assignment
            for inner in ast.walk(node):
                self._learn(inner)
        self._node = node

    def waits(self) -> Iterator[tuple[int, str]]:
        """Line and text of each place."""
        for node in ast.walk(self._node):
            reason = self._reason(node)
            if reason:
                yield getattr(node, "lineno", self._node.lineno), f"{ast.unparse(node)}: {reason}"

    def _reason(self, node: ast.AST) -> str:
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name in METHODS:
                return f".{name}() brings words to the host"
            if name == "to" and any(isinstance(one, ast.Constant) and one.value == "cpu" for one in node.args):
                return "a copy to the host"
            if isinstance(node.func, ast.Name) and node.func.id in ASKING and any(map(self._kind_is_one, node.args)):
                return f"{node.func.id}() of a tensor"
        tests = []
        if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            tests = [node.test]
        elif isinstance(node, ast.BoolOp):
            tests = node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            tests = [node.operand]
        elif isinstance(node, ast.comprehension):
            tests = node.ifs
        elif isinstance(node, ast.FormattedValue):
            tests = [node.value]
        return "a tensor decides" if any(map(self._kind_is_one, tests)) else ""

    def _kind_is_one(self, node: ast.AST) -> bool:
        return self._kind(node) == ONE

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, self._kind(node.value), node.value)
        elif isinstance(node, ast.AnnAssign):
            self._bind(node.target, kind_of(node.annotation), None)
        elif isinstance(node, ast.NamedExpr):
            self._bind(node.target, self._kind(node.value), node.value)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind(node.optional_vars, self._kind(node.context_expr), None)
        elif isinstance(node, (ast.For, ast.comprehension)):
            self._iterate(node.target, node.iter)

    def _bind(self, target: ast.AST, kind: str, value: ast.AST | None) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = kind or self._names.get(target.id, "")
        elif isinstance(target, ast.Attribute) and kind:
            self._known.attributes[target.attr] = kind
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else [None] * len(target.elts)
            for one, part in zip(target.elts, parts, strict=False):
                inner = one.value if isinstance(one, ast.Starred) else one
                self._bind(inner, ONE if part is None and kind else self._kind(part) if part is not None else "", part)

    def _iterate(self, target: ast.AST, source: ast.AST) -> None:
        if isinstance(source, ast.Call) and isinstance(source.func, ast.Name) and isinstance(target, ast.Tuple):
            if source.func.id == "zip":
                for one, some in zip(target.elts, source.args, strict=False):
                    self._iterate(one, some)
                return
            if source.func.id == "enumerate":
                self._iterate(target.elts[-1], source.args[0])
                return
        if self._kind(source):
            self._bind(target, ONE, None)

    def _kind(self, node: ast.AST | None) -> str:
        if isinstance(node, ast.Name):
            return self._names.get(node.id, "")
        if isinstance(node, ast.Attribute):
            return "" if node.attr in ON_HOST else self._known.attributes.get(node.attr, "")
        if isinstance(node, ast.Subscript):
            whole = self._kind(node.value)
            return MANY if whole == MANY and isinstance(node.slice, ast.Slice) else ONE if whole else ""
        if isinstance(node, ast.BinOp):
            kinds = {self._kind(node.left), self._kind(node.right)}
            return ONE if ONE in kinds else MANY if MANY in kinds else ""
        if isinstance(node, ast.UnaryOp):
            return "" if isinstance(node.op, ast.Not) else self._kind(node.operand)
        if isinstance(node, ast.Compare):
            plain = all(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops)
            return "" if plain else ONE if any(map(self._kind_is_one, (node.left, *node.comparators))) else ""
        if isinstance(node, (ast.List, ast.Tuple)):
            return (
                MANY if any(self._kind(one.value if isinstance(one, ast.Starred) else one) for one in node.elts) else ""
            )
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            return MANY if self._kind(node.elt) else ""
        if isinstance(node, ast.IfExp):
            return self._kind(node.body) or self._kind(node.orelse)
        return self._result(node) if isinstance(node, ast.Call) else ""

    def _result(self, call: ast.Call) -> str:
        if isinstance(call.func, ast.Name):
            return (
                MANY
                if call.func.id in ("list", "tuple") and any(map(self._kind, call.args))
                else self._known.results.get(call.func.id, "")
            )
        if not isinstance(call.func, ast.Attribute):
            return ""
        name, owner = call.func.attr, call.func.value
        if name in ON_HOST:
            return ""
        if self._kind(owner) == ONE or (isinstance(owner, ast.Name) and owner.id == "torch" and name not in NO_TENSOR):
            return MANY if name in SEVERAL else ONE
        return self._known.results.get(name, "")


def waits(tree: ast.Module, known: Known, *, allowed: Iterable[str] = (), only: str = "") -> list[tuple[int, str]]:
    """Line and text of each place of a module where the host would wait, in order.

    Args:
        allowed: names of functions that may wait.
        only: the name of the functions to look at; "": all.
    """
    found = []
    inner = {
        id(one)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for one in ast.walk(node)
        if one is not node
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef)
            and id(node) not in inner
            and node.name not in allowed
            and only in ("", node.name)
        ):
            found += Function(node, known).waits()
    return sorted(found)
