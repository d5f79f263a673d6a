"""The whole comparison of one source with this package, and the recording of one."""

import functools
from collections.abc import Iterable
from pathlib import Path

from dlinfer.framework.lmdeploy_ext.checks.model.support import NOT_SERVED
from dlinfer.framework.lmdeploy_ext.contract import compare_taken, cuda_uses, records
from dlinfer.framework.lmdeploy_ext.contract.bodies import digest, installed_source
from dlinfer.framework.lmdeploy_ext.contract.compare_calls import Asked
from dlinfer.framework.lmdeploy_ext.contract.drift import SCHEMA, Drift, Elsewhere, Looked, Report
from dlinfer.framework.lmdeploy_ext.contract.ours import Adaptor
from dlinfer.framework.lmdeploy_ext.contract.reach import VENDORS, Reach
from dlinfer.framework.lmdeploy_ext.contract.source import Tree
from dlinfer.framework.lmdeploy_ext.contract.specs import all_specs, architectures_of
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.versions import describe


def check(device: str, source: Path | None = None, recorded: Path = records.FOLDER) -> Report:
    """Compare LMDeploy's source with this package.

    device: a device type. source: the folder that holds the package ``lmdeploy``; None takes the installed one.
    recorded: the folder of records. Reads files only, for some seconds. Raises FrameworkSourceError.
    """
    tree = Tree(source if source is not None else installed_source())
    adaptor = _adaptor()
    record = records.nearest(tree.version, recorded)
    reach = Reach(tree, adaptor, device)
    asked = Asked(tree)
    specs = all_specs(tree)
    found: list[Drift | Elsewhere] = list(asked.compare(reach, record))
    if device not in VENDORS:  # on those, LMDeploy's own layers run
        served = set(architectures_of(tree)) - set(NOT_SERVED)
        found += compare_taken.compare_patches(tree, adaptor, record)
        found += compare_taken.compare_classes(tree, adaptor, record)
        found += compare_taken.compare_names(tree, adaptor)
        found += cuda_uses.compare(tree, record)
        found += compare_taken.compare_specs(tree, adaptor, reach, record, specs, served)
    return Report(
        schema=SCHEMA,
        lmdeploy=tree.version,
        source=str(tree.root),
        device=device,
        admitted=describe(tree.version)[0],
        record=record.version,
        looked=Looked(
            names=len(asked.names),
            calls=len(asked.calls),
            specs=len(specs),
            patches=len(adaptor.patches),
            methods=sum(len(one.methods) for one in adaptor.extends),
            imports=len(adaptor.takes),
        ),
        drifts=_sorted(one for one in found if isinstance(one, Drift)),
        elsewhere=list(dict.fromkeys(one for one in found if isinstance(one, Elsewhere))),
    )


def record(source: Path | None = None, folder: Path = records.FOLDER) -> Path:
    """Write down what a source looks like, once a person has read its drifts. Returns the file."""
    tree = Tree(source if source is not None else installed_source())
    adaptor = _adaptor()
    asked = Asked(tree)
    return records.Record(
        version=tree.version,
        names=asked.names,
        calls=asked.texts(),
        specs={name: list(spec.fields) for name, spec in all_specs(tree).items()},
        bodies=compare_taken.bodies(tree, adaptor),
        files={file: digest(tree.root / file) for file in compare_taken.files(tree, adaptor)},
        cuda=cuda_uses.uses(tree),
    ).write(folder)


@functools.cache
def _adaptor() -> Adaptor:
    return Adaptor(activation.patches().patches)


def _sorted(drifts: Iterable[Drift]) -> list[Drift]:
    return sorted(dict.fromkeys(drifts), key=lambda one: (one.severity, one.kind, one.where))
