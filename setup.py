"""``DEVICE=ascend python setup.py develop``, as earlier dlinfer was installed: pip does it, from pyproject.toml."""

import subprocess
import sys
from pathlib import Path

import hatch_version

PIP = {"develop": ["--editable"], "install": []}

if __name__ == "__main__":
    asked = sys.argv[1:]
    if len(asked) != 1 or asked[0] not in PIP:
        sys.exit(f"usage: python setup.py {'|'.join(PIP)}; for all else: pip install . or python -m build")
    print(hatch_version.sentence(), flush=True)
    command = [sys.executable, "-m", "pip", "install", *PIP[asked[0]], str(Path(__file__).parent)]
    sys.exit(subprocess.run(command, check=False).returncode)
