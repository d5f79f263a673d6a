"""torch.export: the inputs and outputs of an exported program."""

from typing import Any


def export_kinds(exported: Any) -> list[tuple[str, str, Any]]:
    """For each input of an exported graph: ``user`` or ``weight``, the name of its tensor, its constant value."""
    from torch.export.graph_signature import ConstantArgument, InputKind

    kinds = []
    for spec in exported.graph_signature.input_specs:
        user = spec.kind == InputKind.USER_INPUT
        constant = spec.arg.value if isinstance(spec.arg, ConstantArgument) else None
        kinds.append(("user" if user else "weight", spec.target or "", constant))
    return kinds


def export_gives_results_only(exported: Any) -> bool:
    """Whether an exported graph returns only the module's outputs, and no new contents of inputs."""
    from torch.export.graph_signature import OutputKind

    return all(spec.kind == OutputKind.USER_OUTPUT for spec in exported.graph_signature.output_specs)
