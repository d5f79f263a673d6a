"""The README's programs, in processes and a folder of their own."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def run(code: str, folder: Path) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=folder, capture_output=True, text=True, timeout=250
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_model_becomes_a_file_that_another_process_runs_and_measures(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    [making] = [block for block in blocks if "artifact.save" in block]
    [running] = [block for block in blocks if "dlinfer.load" in block]
    run(making, tmp_path)
    said = run(running, tmp_path)
    assert said.startswith("(3, 64)\nBenchmarkResult(inf_completed=100,")
    assert re.search(r"Number of inferences\s+101\n", said)
