"""What this adaptor takes of LMDeploy against what the source has: patches, base classes, names, BuildSpecs."""

import ast
from collections.abc import Iterator
from typing import Any

from dlinfer.framework.lmdeploy_ext.contract.drift import Drift
from dlinfer.framework.lmdeploy_ext.contract.ours import Adaptor, Extended, Taken, base_of
from dlinfer.framework.lmdeploy_ext.contract.reach import BACKENDS, Reach
from dlinfer.framework.lmdeploy_ext.contract.records import Record
from dlinfer.framework.lmdeploy_ext.contract.signatures import (
    accepts,
    constructor_of,
    fingerprint,
    is_static,
    misfit,
    signature_of,
    text_of,
)
from dlinfer.framework.lmdeploy_ext.contract.source import Found, Function, Module, Tree, dotted
from dlinfer.framework.lmdeploy_ext.contract.specs import Spec, models_of
from dlinfer.framework.patching import Patch, contains

_READ = "read what changed; where ours still holds, record the release, else change it"
_CONTEXT = "lmdeploy.pytorch.model_inputs", "StepContext"

_BACKENDS = "lmdeploy.pytorch.backends"
_CALLED_AS = {
    f"{_BACKENDS}.lora:LoRAImpl.forward": (f"{_BACKENDS}.cuda.lora", "TritonLoRAImpl.forward"),
    f"{_BACKENDS}.awq_modules:LinearW4A16Impl.forward": (
        f"{_BACKENDS}.dlinfer.awq_modules",
        "AwqLinearW4A16Impl.forward",
    ),
    f"{_BACKENDS}.moe:FusedMoEW8A8Impl.forward": (
        f"{_BACKENDS}.cuda.moe.w8a8",
        "TritonFusedMoEW8A8Impl.forward",
    ),
    f"{_BACKENDS}.moe:FusedMoEBlockedF8Impl.forward": (
        f"{_BACKENDS}.cuda.moe.blocked_fp8",
        "TritonFusedMoEBlockedF8Impl.forward",
    ),
}
"""Abstract methods whose parameters are not those that LMDeploy's layers call them with -> one of its own methods that
is called as ours is."""


def bodies(tree: Tree, adaptor: Adaptor) -> dict[str, str]:
    """Fingerprints of the functions that we replace, and of those of the classes that we extend."""
    found = {}
    for patch in adaptor.patches:
        target = _target(tree, patch)
        if target is not None:
            found[patch.target] = fingerprint(target.node)
    for extended in adaptor.extends:
        base = base_of(tree, extended)
        for one in tree.members(base) if base is not None else ():
            found[one.name] = fingerprint(one.node)
    return found


def files(tree: Tree, adaptor: Adaptor) -> list[str]:
    """The files that hold the functions that we replace, by their place below the package."""
    originals = [_target(tree, patch) for patch in adaptor.patches]
    return sorted({str(one.module.path.relative_to(tree.root)) for one in originals if one is not None})


# --- patches


def compare_patches(tree: Tree, adaptor: Adaptor, record: Record) -> Iterator[Drift]:
    """Every patch against the function that it replaces, where the release needs it."""
    for patch in adaptor.patches:
        if not _needs(patch, tree.version):
            continue
        severity = "essential" if patch.essential else "optional"
        used = f"patch on {patch.target}{patch.signature}, which {patch.why}"
        found = _target(tree, patch)
        if found is None:
            step = "find where LMDeploy does it now and move the patch, or drop it where the fault is mended"
            where = f"{tree.package}/{patch.module.removeprefix(tree.package + '.').replace('.', '/')}.py"
            yield Drift("missing", severity, where, used, "no such function", step)
            continue
        where = tree.where(found.module, found.node.lineno)
        given = text_of(found.node) if isinstance(found.node, Function) else "no function"
        if given != patch.signature:
            step = (
                "write the replacement for the new parameters, and its signature in the record of the patch"
            )
            yield Drift("changed signature", severity, where, used, given, step)
        elif patch.target in record.bodies and fingerprint(found.node) != record.bodies[patch.target]:
            offered = f"another body than in {record.version}"
            yield Drift("new meaning suspected", severity, where, used, offered, _READ)


def _target(tree: Tree, patch: Patch) -> Found | None:
    return tree.find(patch.module, ".".join(patch.path))


def _needs(patch: Patch, version: str) -> bool:
    return contains(patch.versions, version)


# --- classes


def compare_classes(tree: Tree, adaptor: Adaptor, record: Record) -> Iterator[Drift]:
    """Classes of ours upon LMDeploy's: what they override, what they inherit, what they have to bring."""
    told: set[str] = set()
    for extended in adaptor.extends:
        base = base_of(tree, extended)
        if base is None:
            continue  # the import of it is told of
        yield from _overridden(tree, extended, base)
        for one in tree.members(base):
            where = tree.where(one.module, one.node.lineno)
            used = f"{one.name}, under our {extended.ours.name} ({extended.where})"
            if one.name in told:
                continue
            told.add(one.name)
            recorded = record.bodies.get(one.name)
            if recorded is not None and fingerprint(one.node) != recorded:
                offered = f"another body than in {record.version}"
                yield Drift("new meaning suspected", "essential", where, used, offered, _READ)


def _overridden(tree: Tree, extended: Extended, base: Found) -> Iterator[Drift]:
    ours, seen = extended.methods, set()
    for one in tree.members(base):
        assert isinstance(one.node, Function)
        name = one.node.name
        if name in seen:
            continue
        seen.add(name)
        where = tree.where(one.module, one.node.lineno)
        used = f"{one.name}{text_of(one.node)}"
        if name in ours:
            node = _called_as(tree, one)
            mine = signature_of(ours[name], bound=not is_static(ours[name]))
            theirs = signature_of(node, bound=not is_static(node) and _has_self(node))
            why = "" if name == "__init__" else accepts(mine, theirs)
            if why:
                step = f"give {extended.ours.name}.{name} the parameters that it is called with"
                offered = f"{text_of(ours[name])} at {extended.where}: {why}"
                yield Drift("changed signature", "essential", where, used, offered, step)
        elif any(dotted(each).rpartition(".")[2] == "abstractmethod" for each in one.node.decorator_list):
            offered = f"{extended.ours.name} at {extended.where} has none, and cannot be made"
            yield Drift("new method", "essential", where, used, offered, f"write {name} for it")


def _called_as(tree: Tree, method: Found) -> Function:
    """The method whose parameters are those of the calls: itself, or the one that ``_CALLED_AS`` names."""
    found = tree.find(*_CALLED_AS[method.name]) if method.name in _CALLED_AS else None
    node = method.node if found is None else found.node
    assert isinstance(node, Function)
    return node


def _has_self(function: Function) -> bool:
    """LMDeploy's MultinomialSamplingImpl.forward has none."""
    first = next(iter([*function.args.posonlyargs, *function.args.args]), None)
    return first is not None and first.arg in ("self", "cls")


# --- names


def compare_names(tree: Tree, adaptor: Adaptor) -> Iterator[Drift]:
    """What we import of LMDeploy, how we call it, the modules of the device view, and the step's context."""
    from dlinfer.framework.lmdeploy_ext.device.view import COVERED

    for taken in adaptor.takes:
        if not _is_there(tree, taken):
            yield _gone(adaptor, taken)
    for taken, call in adaptor.calls():
        why = _misfit(tree, taken, call)
        if why:
            found = tree.find(taken.module, taken.name)
            assert found is not None, "a call of what is missing has no misfit"
            where = tree.where(found.module, found.node.lineno)
            used = f"{ast.unparse(call)} at {adaptor.where(taken.by, call.lineno)}"
            yield Drift(
                "misbinding", _severity(adaptor, taken), where, used, why, "call it as it is defined now"
            )
    for name, why in COVERED.items():
        if name not in tree.paths:
            used = f"the device view covers {name}: {why}"
            step = "find the module that does it now, and cover that (device/view.py)"
            yield Drift(
                "missing", "essential", f"{tree.package} {tree.version}", used, "no such module", step
            )
    yield from _context(tree, adaptor)


def _is_there(tree: Tree, taken: Taken) -> bool:
    if not taken.name or f"{taken.module}.{taken.name}" in tree.paths:
        return taken.module in tree.paths or not taken.name
    return tree.find(taken.module, taken.name) is not None


def _severity(adaptor: Adaptor, taken: Taken) -> Any:
    return adaptor.severity(taken.by)


def _gone(adaptor: Adaptor, taken: Taken) -> Drift:
    used = f"from {taken.module} import {taken.name}"
    step = "find where LMDeploy has it now, and import it from there"
    return Drift("missing", _severity(adaptor, taken), taken.where, used, "no such name", step)


def _misfit(tree: Tree, taken: Taken, call: ast.Call) -> str:
    found = tree.find(taken.module, taken.name)
    if found is None:
        return ""
    if isinstance(found.node, Function):
        signature = signature_of(found.node)
    else:
        signature = constructor_of(tree, found) if isinstance(found.node, ast.ClassDef) else None
    return misfit(call, signature) if signature is not None else ""


def _context(tree: Tree, adaptor: Adaptor) -> Iterator[Drift]:
    """Fields that our layers read of LMDeploy's StepContext: parameters called ``context`` and ``step_context``."""
    found = tree.find(*_CONTEXT)
    if found is None:
        return
    there = {name for one in tree.bases(found) for name in _attributes(one.node)}
    for module in adaptor.modules:
        for name, line in _reads(module):
            if name not in there and name not in _SET_BY_US:
                step = "read the field that LMDeploy has for it now"
                where = tree.where(found.module, found.node.lineno)
                used = f"StepContext.{name} at {adaptor.where(module, line)}"
                yield Drift("removed field", "essential", where, used, "no such field", step)


def _reads(module: Module) -> Iterator[tuple[str, int]]:
    """(attribute, line) of what a layer's functions read of a parameter that is a StepContext."""
    for function in ast.walk(module.tree) if ".layers." in module.name else ():
        if not isinstance(function, Function):
            continue
        contexts = {arg.arg for arg in function.args.args} & {"context", "step_context"}
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Load)
                and dotted(node.value) in contexts
            ):
                yield node.attr, node.lineno


_SET_BY_US = {"attn_metadata", "moe_metadata"}


def _attributes(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            yield one.target.id
        elif isinstance(one, Function):
            yield one.name
        elif (
            isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and dotted(one.value) == "self"
        ):
            yield one.attr


# --- BuildSpecs


def compare_specs(
    tree: Tree, adaptor: Adaptor, reach: Reach, record: Record, specs: dict[str, Spec], served: set[str]
) -> Iterator[Drift]:
    """BuildSpecs and their fields. served: LMDeploy's architectures, without those that are refused."""
    if not specs:
        step = "this release chooses layers another way; it needs a backend of its own"
        used = f"no BuildSpec at all, where {record.version} has {len(record.specs)}"
        yield Drift(
            "removed BuildSpec",
            "essential",
            f"{BACKENDS}.base",
            used,
            "running/backend.py builds specs",
            step,
        )
        return
    for name, spec in specs.items():
        where = tree.where(spec.module, spec.line)
        own = name in adaptor.own_specs
        if name not in record.specs:
            yield _new_spec(tree, reach, spec, served)
            continue
        before = record.specs[name]
        severity = "essential" if own else "optional"
        built = (
            "our backend builds it" if own else ", ".join(reach.builders.get(name, [])) or "nobody builds it"
        )
        for field in spec.fields:
            if field not in before:
                step = "see what it means, pass it on, or refuse what is not its neutral value; then record the release"
                yield Drift(
                    "new field", severity, where, f"{name}.{field}", f"not in {record.version}; {built}", step
                )
        for field in before:
            if field not in spec.fields:
                used = f"{name}({', '.join(spec.fields)})"
                yield Drift(
                    "removed field",
                    severity,
                    where,
                    used,
                    f"{field} in {record.version}; {built}",
                    "read what is there now",
                )
    for name in adaptor.own_specs:
        if name in specs:
            there = {field.rstrip("=") for field in specs[name].fields}
            for field, where in adaptor.fields_read(name):
                if field not in there:
                    used, offered = f"{name}.{field}, which we read", f"fields {', '.join(sorted(there))}"
                    yield Drift(
                        "removed field", "essential", where, used, offered, "read the field that is there now"
                    )
    for name in record.specs:
        if name not in specs:
            severity = "essential" if name in adaptor.own_specs else "optional"
            step = (
                "see what LMDeploy's layers build instead"
                if severity == "essential"
                else "record the release"
            )
            where = f"{tree.package} {tree.version}"
            yield Drift("removed BuildSpec", severity, where, "nothing", f"{name} in {record.version}", step)


def _new_spec(tree: Tree, reach: Reach, spec: Spec, served: set[str]) -> Drift:
    where = tree.where(spec.module, spec.line)
    models = [name for name in models_of(tree, spec.name) if name in served]
    users = f"; reached by {', '.join(models[:4])}{', ...' * (len(models) > 4)}" if models else ""
    used = f"{spec.name}({', '.join(spec.fields)}){users}"
    builders = reach.builders.get(spec.name)
    if builders:
        step = f"see that {builders[0]} of LMDeploy's builds it from what we have, then record the release"
        return Drift("new BuildSpec", "optional", where, used, f"{builders[0]} builds it", step)
    severity = "essential" if models else "optional"
    step = "write a layer for it (running/backend.py), or leave it: a model that needs it is refused as it is built"
    return Drift("new BuildSpec", severity, where, used, "nobody builds it on this device", step)
