"""Signatures, calls and bodies of functions, read from source."""

import ast
import copy
import hashlib
import inspect
from typing import Any

from dlinfer.framework.lmdeploy_ext.contract.source import Found, Function, Tree, dotted

_NO_MEANING = {"annotation", "returns", "type_comment", "kind", "ctx", "type_params"}


def text_of(function: Function) -> str:
    """Parameters and defaults without annotations, as ``dlinfer.framework.patching.bare_signature`` writes them."""
    return f"({ast.unparse(_FloatsWorkedOut().visit(_bare(function.args)))})"


def signature_of(function: Function, bound: bool = False) -> inspect.Signature:
    """The parameters of a function. bound: without the first, as a method is called. Defaults read as ``...``."""
    arguments = _bare(function.args)
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(...) for default in arguments.kw_defaults]
    expression = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, ast.Constant(None))))
    signature = inspect.signature(eval(compile(expression, "<signature>", "eval")))
    return signature.replace(parameters=list(signature.parameters.values())[bound:])


def is_static(function: Function) -> bool:
    """Whether a method has no first parameter that Python fills in."""
    return any(dotted(one) == "staticmethod" for one in function.decorator_list)


def constructor_of(tree: Tree, found: Found) -> inspect.Signature | None:
    """How a class is made: by its ``__init__``, or by a dataclass's fields; None where neither is in the tree."""
    init = tree.member(found, "__init__")
    if init is not None and isinstance(init.node, Function):
        return signature_of(init.node, bound=True)
    if not any(is_dataclass(one.node) for one in tree.bases(found)):
        return None
    fields = {name: default for one in reversed(tree.bases(found)) for name, default in fields_of(one.node)}
    kind: Any = inspect.Parameter
    parameters = [
        kind(name, kind.POSITIONAL_OR_KEYWORD, default=... if default else kind.empty)
        for name, default in fields.items()
    ]
    return inspect.Signature(sorted(parameters, key=lambda one: one.default is not kind.empty))


def is_dataclass(node: ast.AST) -> bool:
    """Whether a class is decorated as one."""
    decorators = node.decorator_list if isinstance(node, ast.ClassDef) else []
    names = (dotted(one.func if isinstance(one, ast.Call) else one) for one in decorators)
    return any(name.rpartition(".")[2] == "dataclass" for name in names)


def fields_of(node: ast.AST) -> list[tuple[str, bool]]:
    """(name, whether it has a default) of each annotated field of a class."""
    body = node.body if isinstance(node, ast.ClassDef) else []
    return [
        (one.target.id, one.value is not None)
        for one in body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    ]


def misfit(call: ast.Call, signature: inspect.Signature) -> str:
    """Why a call does not bind to a signature; empty where it does, or where stars hide what is passed."""
    open_ended = any(isinstance(arg, ast.Starred) for arg in call.args)
    open_ended |= any(keyword.arg is None for keyword in call.keywords)
    positional = [... for arg in call.args if not isinstance(arg, ast.Starred)]
    keywords = {keyword.arg: ... for keyword in call.keywords if keyword.arg is not None}
    try:
        if open_ended:
            signature.bind_partial(*positional, **keywords)
        else:
            signature.bind(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return ""


def unknown_keyword(call: ast.Call, signature: inspect.Signature) -> str:
    """The first keyword of a call that a signature lacks, or empty."""
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values()):
        return ""
    names = (keyword.arg for keyword in call.keywords)
    return next((name for name in names if name is not None and name not in signature.parameters), "")


def crossed(call: ast.Call, signature: inspect.Signature) -> str:
    """An argument that has another parameter's name and goes to the wrong one, in words; empty where none does."""
    places = list(signature.parameters)
    given = dict(zip(places, call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    named = {parameter: _root(value) for parameter, value in given.items()}
    for parameter, name in named.items():
        if name != parameter and name in places and named.get(name) != name:
            return f"{name} is passed as {parameter}"
    return ""


def accepts(ours: inspect.Signature, theirs: inspect.Signature) -> str:
    """Why a method of ours cannot be called as the one that it stands for; empty where it can."""
    kind: Any = inspect.Parameter
    own = list(ours.parameters.values())
    rest = any(one.kind is kind.VAR_POSITIONAL for one in own)
    keywords = any(one.kind is kind.VAR_KEYWORD for one in own)
    named = {one.name: one for one in own}
    for at, one in enumerate(theirs.parameters.values()):
        if one.kind in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD):
            continue
        mine = own[at] if at < len(own) else None
        same = mine is not None and mine.name == one.name
        if one.kind is kind.KEYWORD_ONLY:
            same = one.name in named
        if not same and not (rest and keywords):
            return f"parameter {at + 1} is {one.name!r}, ours is {mine.name if mine else 'not there'!r}"
        if same and one.default is not kind.empty and named[one.name].default is kind.empty:
            return f"{one.name!r} may be left out, and ours has no default"
    more = [
        one.name
        for one in own
        if one.name not in theirs.parameters
        and one.default is kind.empty
        and one.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)
    ]
    return f"ours wants {more[0]!r}, which is not passed" if more else ""


def fingerprint(node: ast.AST) -> str:
    """16 hexadecimal digits of what a definition does: without docstrings, comments, annotations and places."""
    return hashlib.sha256(_canonical(node).encode()).hexdigest()[:16]


def _canonical(value: object) -> str:
    if isinstance(value, ast.AST):
        parts = []
        for name, inner in ast.iter_fields(value):
            if name in _NO_MEANING or inner in (None, []):
                continue
            shown = _without_docstring(inner) if name == "body" and isinstance(inner, list) else inner
            parts.append(f"{name}={_canonical(shown)}")
        return f"{type(value).__name__}({','.join(parts)})"
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    return repr(value)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    texts = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if texts and isinstance(first.value.value, str) else body  # pyright: ignore[reportAttributeAccessIssue]


def _bare(arguments: ast.arguments) -> ast.arguments:
    bare = copy.deepcopy(arguments)
    for one in ast.walk(bare):
        if isinstance(one, ast.arg):
            one.annotation = None
    return bare


class _FloatsWorkedOut(ast.NodeTransformer):
    """Writes ``float("inf")`` as a function that has been imported shows it: inf."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(func=ast.Name("float"), args=[ast.Constant(str(text))], keywords=[]):
                return ast.Name(repr(float(text)))
        return node


def _root(node: ast.AST) -> str:
    """The name that an argument starts from: ``x`` of ``x.squeeze(0)``; ``scale`` of ``self.scale``."""
    while isinstance(node, ast.Call | ast.Subscript):
        inner = node.func if isinstance(node, ast.Call) else node.value
        node = inner.value if isinstance(node, ast.Call) and isinstance(inner, ast.Attribute) else inner
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
