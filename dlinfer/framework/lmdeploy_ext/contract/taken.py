"""Compares the patches, base classes and imports of our adaptor with LMDeploy's source."""

import ast
from collections.abc import Iterator

from dlinfer.framework.lmdeploy_ext.contract.drift import Drift, Severity
from dlinfer.framework.lmdeploy_ext.contract.ours import Adaptor, Extended
from dlinfer.framework.lmdeploy_ext.contract.records import Record
from dlinfer.framework.lmdeploy_ext.contract.signatures import (
    accepts,
    constructor_of,
    fingerprint,
    misfit,
    signature_of,
    text_of,
)
from dlinfer.framework.lmdeploy_ext.contract.source import Found, Function, Module, Tree, dotted
from dlinfer.framework.lmdeploy_ext.device.view import COVERED
from dlinfer.framework.patching import Patch, contains

_READ = "read what changed; record the release if our code still fits, else change our code"
_MOVE = "find where LMDeploy does this now, and move the patch; drop the patch if the fault is fixed"
_REWRITE = "rewrite the replacement for the new parameters, with its signature in the Patch"
_CONTEXT = "lmdeploy.pytorch.model_inputs.StepContext"
_SET_BY_US = {"attn_metadata", "moe_metadata"}

_BACKENDS = "lmdeploy.pytorch.backends"
_CUDA_MOE = f"{_BACKENDS}.cuda.moe"
_CALLED_AS = {
    "lora:LoRAImpl": f"{_BACKENDS}.cuda.lora.TritonLoRAImpl",
    "awq_modules:LinearW4A16Impl": f"{_BACKENDS}.dlinfer.awq_modules.AwqLinearW4A16Impl",
    "moe:FusedMoEW8A8Impl": f"{_CUDA_MOE}.w8a8.TritonFusedMoEW8A8Impl",
    "moe:FusedMoEBlockedF8Impl": f"{_CUDA_MOE}.blocked_fp8.TritonFusedMoEBlockedF8Impl",
}
"""Abstract class of LMDeploy's -> a subclass of LMDeploy's, whose ``forward`` is compared with ours instead.

LMDeploy's layers call ``forward`` with other parameters than these abstract classes declare.
"""


def originals(tree: Tree, patches: tuple[Patch, ...]) -> dict[str, Found | None]:
    """Return a dict from each patch's target to the LMDeploy function that the patch replaces.

    The function is None if the source lacks it.
    """
    return {patch.target: tree.find(patch.target.replace(":", ".")) for patch in patches}


def bodies(tree: Tree, adaptor: Adaptor) -> dict[str, str]:
    """Return a dict from function, as ``module:path``, to the fingerprint of its body.

    The dict has the functions that our patches replace. It also has the methods of LMDeploy's classes that our classes
    extend.
    """
    replaced = originals(tree, adaptor.patches)
    prints = {target: fingerprint(function.node) for target, function in replaced.items() if function}
    bases = (tree.find(extended.base) for extended in adaptor.extends)
    members = (member for base in bases if base is not None for member in tree.members(base))
    return prints | {member.name: fingerprint(member.node) for member in members}


def compare_patches(tree: Tree, adaptor: Adaptor, record: Record) -> Iterator[Drift]:
    """Yield a drift for each patch whose original function is missing or changed. Skip patches of other releases.

    The function has changed if its parameters differ from those of the patch, or its body differs from that in
    ``record``, the reviewed LMDeploy release to compare with.
    """
    replaced = originals(tree, adaptor.patches)
    for patch in adaptor.patches:
        if not contains(patch.versions, tree.version):
            continue
        severity = "essential" if patch.essential else "optional"
        used = f"patch on {patch.target}{patch.signature}, which {patch.why}"
        function = replaced[patch.target]
        if function is None:
            where = f"{patch.module.replace('.', '/')}.py"
            yield Drift("missing", severity, where, used, "no such function", _MOVE)
            continue
        where = tree.where(function.module, function.node)
        offered = text_of(function.node) if isinstance(function.node, Function) else "no function"
        if offered != patch.signature:
            yield Drift("changed signature", severity, where, used, offered, _REWRITE)
        elif drift := _other_body(function, patch.target, record, severity, where, used):
            yield drift


def _other_body(
    function: Found, name: str, record: Record, severity: Severity, where: str, used: str
) -> Drift | None:
    if record.bodies.get(name) in (None, fingerprint(function.node)):
        return None
    offered = f"another body than in {record.version}"
    return Drift("new meaning suspected", severity, where, used, offered, _READ)


def compare_classes(tree: Tree, adaptor: Adaptor, record: Record) -> Iterator[Drift]:
    """Yield drifts of the methods of LMDeploy's classes that our classes extend.

    - Our method cannot take a call that LMDeploy's method takes.
    - LMDeploy's abstract method is missing in our class.
    - The body of LMDeploy's method differs from that in ``record``, the reviewed LMDeploy release to compare with.
    """
    compared: set[str] = set()
    for extended in adaptor.extends:
        base = tree.find(extended.base)
        seen: set[str] = set()
        # compare_names reports a base that is missing.
        for member in tree.members(base) if base is not None else ():
            assert isinstance(member.node, Function)
            where = tree.where(member.module, member.node)
            if member.node.name not in seen:
                seen.add(member.node.name)
                yield from _overridden(tree, extended, member, member.node, where)
            if member.name not in compared:
                compared.add(member.name)
                used = f"{member.name}, under our {extended.ours.name} ({extended.where})"
                if drift := _other_body(member, member.name, record, "essential", where, used):
                    yield drift


def _overridden(tree: Tree, extended: Extended, member: Found, node: Function, where: str) -> Iterator[Drift]:
    name, used = node.name, f"{member.name}{text_of(node)}"
    ours = extended.methods.get(name)
    if ours is None:
        if any(dotted(each).rpartition(".")[2] == "abstractmethod" for each in node.decorator_list):
            offered = f"{extended.ours.name} at {extended.where} lacks it, and cannot be instantiated"
            yield Drift("new method", "essential", where, used, offered, f"implement {name} in it")
    elif name != "__init__":
        abstract = member.name.removeprefix(f"{_BACKENDS}.").removesuffix(".forward")
        called = tree.find(f"{_CALLED_AS[abstract]}.{name}") if abstract in _CALLED_AS else None
        theirs = called.node if called is not None else node
        assert isinstance(theirs, Function)
        if why := accepts(signature_of(ours), signature_of(theirs)):
            step = f"give {extended.ours.name}.{name} the parameters that it is called with"
            offered = f"{text_of(ours)} at {extended.where}: {why}"
            yield Drift("changed signature", "essential", where, used, offered, step)


def compare_names(tree: Tree, adaptor: Adaptor) -> Iterator[Drift]:
    """Yield drifts of LMDeploy names that our adaptor uses.

    - A name that we import is missing.
    - A call of ours does not bind to the signature of LMDeploy's function or class.
    - A module that the device view covers (``device/view.py``) is missing.
    - A field that we read from StepContext is missing.
    """
    for taken in adaptor.takes:
        if taken.name not in tree.paths and tree.find(taken.name) is None:
            module, _, name = taken.name.rpartition(".")
            used = f"from {module} import {name}"
            step = "find where LMDeploy has this name now, and import it from there"
            severity = adaptor.severity(taken.by)
            yield Drift("missing", severity, taken.where, used, "no such name", step)
    for taken, call in adaptor.calls():
        definition = tree.find(taken.name)
        if definition is not None and (why := _misfit(tree, definition, call)):
            where = tree.where(definition.module, definition.node)
            used = f"{ast.unparse(call)} at {adaptor.tree.where(taken.by, call)}"
            step = "change the call to fit this definition"
            yield Drift("misbinding", adaptor.severity(taken.by), where, used, why, step)
    for name, why in COVERED.items():
        if name not in tree.paths:
            used, where = f"the device view covers {name}, which {why}", f"{tree.package} {tree.version}"
            step = "find the module that does this now, and cover that module (device/view.py)"
            yield Drift("missing", "essential", where, used, "no such module", step)
    yield from _context(tree, adaptor)


def _misfit(tree: Tree, definition: Found, call: ast.Call) -> str:
    if isinstance(definition.node, Function):
        return misfit(call, signature_of(definition.node))
    signature = constructor_of(tree, definition)
    return misfit(call, signature) if signature is not None else ""


def _context(tree: Tree, adaptor: Adaptor) -> Iterator[Drift]:
    """Yield a drift for each field that our layers read from StepContext, but that LMDeploy's source lacks."""
    context = tree.find(_CONTEXT)
    if context is None:
        return
    fields = {name for base in tree.bases(context) for name in _attributes(base.node)} | _SET_BY_US
    for module in adaptor.modules:
        for node in _reads(module):
            if node.attr not in fields:
                where = tree.where(context.module, context.node)
                used = f"StepContext.{node.attr} at {adaptor.tree.where(module, node)}"
                step = "read the field that replaces it in LMDeploy"
                yield Drift("removed field", "essential", where, used, "no such field", step)


def _reads(module: Module) -> Iterator[ast.Attribute]:
    """Yield the attributes that a layer's functions read from a parameter ``context`` or ``step_context``."""
    for function in ast.walk(module.tree) if ".layers." in module.name else ():
        if isinstance(function, Function):
            contexts = {arg.arg for arg in function.args.args} & {"context", "step_context"}
            for node in ast.walk(function):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Load)
                    and dotted(node.value) in contexts
                ):
                    yield node


def _attributes(node: ast.AST) -> Iterator[str]:
    """Yield the names of a class's fields and methods, and of the attributes that its methods assign to ``self``."""
    for inner in ast.walk(node):
        match inner:
            case ast.AnnAssign(target=ast.Name(name)):
                yield name
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                yield name
            case ast.Attribute(value=ast.Name("self"), attr=name, ctx=ast.Store()):
                yield name
