"""Reads signatures of functions from source, checks calls against them, and fingerprints bodies."""

import ast
import copy
import hashlib
import inspect
from inspect import Parameter, Signature

from dlinfer.framework.lmdeploy_ext.contract.source import Found, Function, Tree, dotted

_NO_MEANING = {"annotation", "returns", "type_comment", "kind", "ctx", "type_params"}
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def text_of(function: Function) -> str:
    """Return a function's parameters and defaults as text, without annotations: ``(x, size=4)``.

    ``patching.bare_signature`` returns the same text for the imported function.
    """
    return f"({ast.unparse(_DefaultsWorkedOut().visit(_bare(function.args)))})"


def signature_of(function: Function) -> Signature:
    """Return a function's signature as callers see it: without ``self`` or ``cls``. Every default becomes ``...``."""
    arguments = _bare(function.args)
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(...) for default in arguments.kw_defaults]
    expression = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, ast.Constant(None))))
    parameters = inspect.signature(eval(compile(expression, "<signature>", "eval"))).parameters
    bound = next(iter(parameters), "") in ("self", "cls")
    return Signature(list(parameters.values())[bound:])


def constructor_of(tree: Tree, definition: Found) -> Signature | None:
    """Return the signature of a class's constructor, from ``__init__`` or from dataclass fields.

    The result is None if the class has neither.
    """
    init = tree.member(definition, "__init__")
    if init is not None and isinstance(init.node, Function):
        return signature_of(init.node)
    bases = tree.bases(definition)
    if not any(_is_dataclass(base.node) for base in bases):
        return None
    fields = {name: default for base in reversed(bases) for name, default in fields_of(base.node)}
    parameters = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=... if default else Parameter.empty)
        for name, default in fields.items()
    ]
    return Signature(sorted(parameters, key=lambda parameter: parameter.default is not Parameter.empty))


def _is_dataclass(node: ast.AST) -> bool:
    decorators = node.decorator_list if isinstance(node, ast.ClassDef) else []
    names = (dotted(each.func if isinstance(each, ast.Call) else each) for each in decorators)
    return any(name.rpartition(".")[2] == "dataclass" for name in names)


def fields_of(node: ast.AST) -> list[tuple[str, bool]]:
    """Return (name, whether it has a default) of each annotated field of a class."""
    return [
        (field.target.id, field.value is not None)
        for field in getattr(node, "body", ())
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]


def misfit(call: ast.Call, signature: Signature) -> str:
    """Return an error text if a call does not bind to a signature; else an empty text.

    A call with ``*args`` or ``**kwargs`` may bind without some required arguments.
    """
    positional = [arg for arg in call.args if not isinstance(arg, ast.Starred)]
    keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    is_whole = len(positional) == len(call.args) and len(keywords) == len(call.keywords)
    try:
        (signature.bind if is_whole else signature.bind_partial)(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return ""


def unknown_keyword(call: ast.Call, signature: Signature) -> str:
    """Return the first keyword of a call that the signature lacks; an empty text if the signature has all keywords."""
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return ""
    names = (keyword.arg for keyword in call.keywords)
    return next((name for name in names if name is not None and name not in signature.parameters), "")


def crossed(call: ast.Call, signature: Signature) -> str:
    """Return an error text if a call seems to swap parameters; else an empty text.

    It seems so if a variable has the name of one parameter, but is passed as another parameter.
    """
    places = list(signature.parameters)
    passed = dict(zip(places, call.args, strict=False))
    passed |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    named = {parameter: _root(value) for parameter, value in passed.items()}
    for parameter, name in named.items():
        if name != parameter and name in places and named.get(name) != name:
            return f"{name} is passed as {parameter}"
    return ""


def accepts(ours: Signature, theirs: Signature) -> str:
    """Return an error text if ``ours`` refuses some call that ``theirs`` allows; else an empty text.

    ours: the signature of our method, which overrides LMDeploy's. theirs: the signature of LMDeploy's method.
    """
    own, named = list(ours.parameters.values()), ours.parameters
    takes_all = all(any(parameter.kind is kind for parameter in own) for kind in _VARIADIC)
    for at, parameter in enumerate(theirs.parameters.values()):
        name = parameter.name
        if parameter.kind in _VARIADIC:
            continue
        mine = own[at].name if at < len(own) else "missing"
        same = name in named if parameter.kind is Parameter.KEYWORD_ONLY else name == mine
        if not same and not takes_all:
            return f"parameter {at + 1} is {name!r}, but ours is {mine!r}"
        if same and parameter.default is not Parameter.empty and named[name].default is Parameter.empty:
            return f"{name!r} may be left out, but ours has no default"
    for mine in own:
        if mine.name not in theirs.parameters and mine.default is mine.empty and mine.kind not in _VARIADIC:
            return f"ours requires {mine.name!r}, which is not passed"
    return ""


def fingerprint(node: ast.AST) -> str:
    """Return 16 hexadecimal digits: a hash of a definition's syntax tree.

    Docstrings, annotations and line numbers do not change the hash.
    """
    return hashlib.sha256(_canonical(node).encode()).hexdigest()[:16]


def _canonical(value: object) -> str:
    if isinstance(value, ast.AST):
        parts = []
        for name, inner in ast.iter_fields(value):
            match inner:
                case [ast.Expr(ast.Constant(str())), *rest] if name == "body":  # a docstring
                    parts.append(f"{name}={_canonical(rest)}")
                case _ if name not in _NO_MEANING and inner not in (None, []):
                    parts.append(f"{name}={_canonical(inner)}")
        return f"{type(value).__name__}({','.join(parts)})"
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    return repr(value)


def _bare(arguments: ast.arguments) -> ast.arguments:
    bare = copy.deepcopy(arguments)
    for argument in ast.walk(bare):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return bare


class _DefaultsWorkedOut(ast.NodeTransformer):
    """Replaces ``float("inf")`` by ``inf`` and ``Kind.SUM`` by ``SUM``, as ``patching.bare_signature`` prints defaults.

    Then both texts can be compared.
    """

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Name(node.attr) if node.attr.isupper() else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(func=ast.Name("float"), args=[ast.Constant(str(text))], keywords=[]):
                return ast.Name(repr(float(text)))
        return node


def _root(node: ast.AST) -> str:
    """Return the variable or attribute inside an argument: ``x`` in ``x.squeeze(0)``, ``scale`` in ``self.scale``."""
    while isinstance(node, ast.Call | ast.Subscript):
        inner = node.func if isinstance(node, ast.Call) else node.value
        node = inner.value if isinstance(node, ast.Call) and isinstance(inner, ast.Attribute) else inner
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
