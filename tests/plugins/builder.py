"""Writes vendor plugins for tests: a module and the dist-info that announces it, as pip would leave them."""

from pathlib import Path

MINI = Path(__file__).parent
"""The folder to put on ``sys.path`` for the plugin ``mini``, which is kept ready made beside this file."""

HEALTHY = """
from dlinfer.vendor import Probe, Vendor

loads = 0

def load_kernels():
    global loads
    loads += 1
    return {{}}

def probe():
    return {probe}

VENDOR = Vendor(
    "{name}", "{device_type}", "made for a test", probe, load_kernels, priority={priority}, engines={engines}
)
"""


def write_plugin(folder: Path, name: str, source: str, distribution: str = "") -> None:
    """Put the vendor ``name`` into ``folder``: module ``<name>_plugin`` with ``source``, which sets VENDOR.

    distribution: what pip would call it, ``<name>-package`` when left out; of its own for each plugin.
    """
    distribution = distribution or f"{name}-package"
    module = f"{distribution.replace('-', '_')}_plugin"
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dlinfer.vendors]\n{name} = {module}:VENDOR\n")


def healthy(
    name: str,
    device_type: str,
    priority: int = 0,
    probe: str = "Probe(True, 'made for a test')",
    engines: tuple[str, ...] = (),
) -> str:
    """Source of a plugin that loads; ``probe`` is the expression its probe evaluates."""
    return HEALTHY.format(name=name, device_type=device_type, priority=priority, probe=probe, engines=engines)
