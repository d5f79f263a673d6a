"""What the end-to-end tests stand on: tiny models, HF's answers and LMDeploy's, each from its own process."""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer

from examples.tiny_models.build import STAMP, build, reference_folder
from tests.caches import fresh_cache

ROOT = Path(__file__).parents[2]
REFERENCE_SCRIPT = ROOT / "examples" / "hf_reference.py"
ENGINE_SCRIPT = Path(__file__).with_name("engine_job.py")

PROMPT_LENGTHS = (1, 2, 9, 80)
NEW_TOKENS = 40

# Seconds for helpers such as multiprocessing's resource tracker to notice that their parent has gone, on a machine that
# does much else besides.
GRACE = 120.0

# Small enough to start at once; the cache still holds hundreds of times what the tests need.
ENGINE_DEFAULTS = {"session_len": 512, "max_batch_size": 16, "cache_max_entry_count": 0.02}


def run_process(command: list[str], timeout: float, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own and leave nothing of it behind.

    Raises:
        AssertionError: it took longer than ``timeout`` seconds, or a descendant outlived it by more than ``GRACE``;
            either way the whole process group is killed first. The message ends with the command's output.
    """
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    trouble = None
    try:
        out, err = child.communicate(timeout=timeout)
        if not _group_ends(child.pid, within=GRACE):
            trouble = "left processes behind"
    except subprocess.TimeoutExpired:
        trouble = f"was still running after {timeout} s"
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
    finally:
        if _group_is_alive(child.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    assert trouble is None, f"{' '.join(command)} {trouble}\n{out[-2000:]}\n{err[-6000:]}"
    return subprocess.CompletedProcess(command, child.returncode, out, err)


def _group_ends(group: int, within: float) -> bool:
    deadline = time.monotonic() + within
    while _group_is_alive(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    # What is dead may stay in the group for ever, where the first process of a container buries nobody.
    return any(_runs(process, group) for process in psutil.process_iter())


def _runs(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):  # gone meanwhile
        return False


class EngineRun:
    """What one engine start answered; indexing by a step's name raises what that step, or the start, raised."""

    def __init__(self, folder: Path, log: str, number: int = 0) -> None:
        self.results: dict[str, Any] = json.loads((folder / "results.json").read_text())[number]
        own = f"{number}/"
        with np.load(folder / "logits.npz") as arrays:
            self.logits = {name.removeprefix(own): arrays[name] for name in arrays if name.startswith(own)}
        self.log = log

    def __getitem__(self, step: str):
        if "raised" in self.results:
            raise AssertionError(f"the engine ended early:\n{self.results['raised']}")
        answer = self.results[step]
        if isinstance(answer, dict) and "raised" in answer:
            raise AssertionError(f"step {step!r} raised in the engine's process:\n{answer['raised']}")
        return answer

    def tokens(self, step: str) -> list[list[int]]:
        return [response["token_ids"] for response in self[step]]


class Lab:
    """Builds models and asks both sides; keeps models and HF's answers under ``cache`` between test runs."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    @property
    def compiled(self) -> Path:
        """dlinfer's cache folder in LMDeploy's processes."""
        return fresh_cache(self.cache / "compiled")

    def model(self, family: str, seed: int = 0, dtype: str = "float32") -> Path:
        """Folder of a tiny checkpoint, built on first use."""
        folder = self.cache / "models" / f"{family}-{seed}-{dtype}"
        build(family, folder, seed, dtype)
        return folder

    def tokenizer(self, model: Path) -> Tokenizer:
        return Tokenizer.from_file(str(model / "tokenizer.json"))

    def prompts(self, model: Path, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[str]:
        """Texts of exactly so many tokens, made of whole words of the vocabulary."""
        tokenizer = self.tokenizer(model)
        words = sorted(
            i for word, i in tokenizer.get_vocab().items() if word[0] == "Ġ" and word[1:].isalpha()
        )
        rng = random.Random(
            1
        )  # no model of the matrix comes near a tie on these prompts (matrix.FP32_DECISIVE)
        texts = []
        for length in lengths:
            ids = rng.choices(words, k=length)
            texts.append(tokenizer.decode(ids))
            assert tokenizer.encode(texts[-1]).ids == ids, f"{texts[-1]!r} does not survive the tokenizer"
        return texts

    def reference(self, model: Path, **job) -> dict[str, np.ndarray]:
        """HF's answer to a job of ``examples/hf_reference.py``, from its own process, kept on disk."""
        (answer,) = self.references([(model, job)])
        return answer

    def references(self, jobs: list[tuple[Path, dict]]) -> list[dict[str, np.ndarray]]:
        """HF's answers to several (model, job), from one process where they are not on disk."""
        kept = [self._kept_reference(model, job) for model, job in jobs]
        missing = [
            (model, job, file) for (model, job), file in zip(jobs, kept, strict=True) if not file.is_file()
        ]
        if missing:
            self._ask_transformers(missing)
        answers = []
        for file in kept:
            with np.load(file) as arrays:
                answers.append(dict(arrays))
        return answers

    def _kept_reference(self, model: Path, job: dict) -> Path:
        versions = [metadata.version(name) for name in ("torch", "transformers")]
        stamp = (model / STAMP).read_text()
        key = json.dumps([stamp, job, versions, REFERENCE_SCRIPT.read_text()], sort_keys=True)
        return self.cache / "references" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.npz"

    def _ask_transformers(self, missing: list[tuple[Path, dict, Path]]) -> None:
        folder = missing[0][2].parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temp:
            runs = []
            for number, (model, job, _) in enumerate(missing):
                job_file, out = Path(temp, f"{number}.json"), Path(temp, f"{number}.npz")
                job_file.write_text(json.dumps(job))
                runs += [str(reference_folder(model)), str(job_file), str(out)]
            command = [sys.executable, str(REFERENCE_SCRIPT), *runs]
            done = run_process(command, timeout=500, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
            assert done.returncode == 0, done.stderr[-4000:]
            for out, (_, _, file) in zip(runs[2::3], missing, strict=True):
                Path(out).rename(file)

    def engine(
        self,
        model: Path,
        steps: list[dict],
        timeout: float = 1000,
        environment: dict[str, str] | None = None,
        **options,
    ) -> EngineRun:
        """Start LMDeploy once with ``options`` of PytorchEngineConfig and let it answer ``steps``.

        A graph that no earlier run has compiled takes most of the time; compiled ones are kept beside the models.
        """
        (run,) = self.engines([(model, steps, options)], timeout, environment)
        return run

    def engines(
        self,
        starts: list[tuple[Path, list[dict], dict[str, Any]]],
        timeout: float = 1000,
        environment: dict[str, str] | None = None,
    ) -> list[EngineRun]:
        """Start engines one after another in one process: (model, steps, options) of each."""
        jobs = [
            {
                "model": str(model),
                "trust_remote_code": any(model.glob("configuration_*.py")),
                "engine": ENGINE_DEFAULTS | options,
                "steps": steps,
            }
            for model, steps, options in starts
        ]
        with tempfile.TemporaryDirectory(prefix="dlinfer-e2e-") as temp:
            job_file = Path(temp, "jobs.json")
            job_file.write_text(json.dumps(jobs))
            # transformers copies remote code beneath HF_HOME, while another process may be reading what lies there
            done = run_process(
                [sys.executable, str(ENGINE_SCRIPT), str(job_file), temp],
                timeout,
                HF_HOME=str(Path(temp, "hf")),
                DLINFER_CACHE_DIR=str(self.compiled),
                **(environment or {}),
            )
            log = done.stdout + done.stderr
            assert done.returncode == 0, f"LMDeploy ended with {done.returncode}:\n{log[-6000:]}"
            return [EngineRun(Path(temp), log, number) for number in range(len(jobs))]
