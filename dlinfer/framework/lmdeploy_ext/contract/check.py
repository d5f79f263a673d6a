"""Compares an LMDeploy source tree with this package, and writes the record of a reviewed source tree."""

import functools
from pathlib import Path

from dlinfer.framework.lmdeploy_ext.contract import cuda_uses, records, specs, taken
from dlinfer.framework.lmdeploy_ext.contract.asked import Asked
from dlinfer.framework.lmdeploy_ext.contract.bodies import digest, installed_source
from dlinfer.framework.lmdeploy_ext.contract.drift import SCHEMA, Drift, Elsewhere, Looked, Report
from dlinfer.framework.lmdeploy_ext.contract.ours import Adaptor
from dlinfer.framework.lmdeploy_ext.contract.reach import Reach
from dlinfer.framework.lmdeploy_ext.contract.source import Tree
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.versions import describe


def check(device: str, source: Path | None = None, recorded: Path = records.FOLDER) -> Report:
    """Compare LMDeploy's source with this package for one device type, and return the report.

    source: the folder that holds the package ``lmdeploy``; None takes the installed package. recorded: the folder of
    records. The comparison takes some seconds and only reads files. Raises FrameworkSourceError if the source is
    missing or cannot be parsed.
    """
    tree = Tree(source if source is not None else installed_source())
    adaptor = _adaptor()
    record = records.nearest(tree.version, recorded)
    reach = Reach(tree, adaptor, device)
    asked = Asked(tree)
    build_specs = specs.all_specs(tree)
    findings: list[Drift | Elsewhere] = list(asked.compare(reach, record))
    findings += taken.compare_patches(tree, adaptor, record)
    findings += taken.compare_classes(tree, adaptor, record)
    findings += taken.compare_names(tree, adaptor)
    findings += cuda_uses.compare(tree, record)
    findings += specs.compare(tree, adaptor, reach, record, build_specs)
    findings = list(dict.fromkeys(findings))
    drifts = [finding for finding in findings if isinstance(finding, Drift)]
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
            specs=len(build_specs),
            patches=len(adaptor.patches),
            methods=sum(len(extended.methods) for extended in adaptor.extends),
            imports=len(adaptor.takes),
        ),
        drifts=sorted(drifts, key=lambda drift: (drift.severity, drift.kind, drift.where)),
        elsewhere=[finding for finding in findings if isinstance(finding, Elsewhere)],
    )


def record(source: Path | None = None, folder: Path = records.FOLDER) -> Path:
    """Write the record of a source tree, and return the record's path. Call this once a person has reviewed all drifts.

    source: the folder that holds the package ``lmdeploy``; None takes the installed package. folder: where to write.
    """
    tree = Tree(source if source is not None else installed_source())
    adaptor = _adaptor()
    asked = Asked(tree)
    originals = filter(None, taken.originals(tree, adaptor.patches).values())
    files = sorted({str(original.module.path.relative_to(tree.root)) for original in originals})
    return records.Record(
        version=tree.version,
        names=asked.names,
        calls=asked.texts(),
        specs={name: list(spec.fields) for name, spec in specs.all_specs(tree).items()},
        bodies=taken.bodies(tree, adaptor),
        files={file: digest(tree.root / file) for file in files},
        cuda=cuda_uses.uses(tree),
    ).write(folder)


@functools.cache
def _adaptor() -> Adaptor:
    return Adaptor(activation.patches().patches)
