"""What the end-to-end tests stand on: tiny models, HF's answers and LMDeploy's, each from its own process."""

import hashlib
import json
import random
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from examples.tiny_models.build import STAMP, build, reference_folder
from tests.caches import fresh_cache
from tests.e2e.processes import Processes
from tests.workers import ROOT

REFERENCE_SCRIPT = ROOT / "examples" / "hf_reference.py"
DIFFUSION_SCRIPT = ROOT / "examples" / "sdar_reference.py"
VISION_SCRIPTS = [
    ROOT / "examples" / f"{name}_reference.py" for name in ("hf_vision", "cogvlm", "glm4v", "kimi_k25")
]

PROMPT_LENGTHS = (1, 2, 9, 80)
NEW_TOKENS = 40

# Small enough to start at once; the cache still holds hundreds of times what the tests need.
ENGINE_DEFAULTS = {"session_len": 512, "max_batch_size": 16, "cache_max_entry_count": 0.02}


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
    """Builds models and asks both sides; keeps models and HF's answers under ``cache`` between test runs.

    Processes that answered wait for more until ``close``, which raises AssertionError where one leaves others behind.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self._processes = Processes()

    def close(self) -> None:
        self._processes.close()

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
        vision = VISION_SCRIPTS if "chats" in job else []
        diffusion = [DIFFUSION_SCRIPT] if "diffusion" in job else []
        scripts = [script.read_text() for script in (REFERENCE_SCRIPT, *vision, *diffusion)]
        key = json.dumps([stamp, job, versions, *scripts], sort_keys=True)
        return self.cache / "references" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.npz"

    def _ask_transformers(self, missing: list[tuple[Path, dict, Path]]) -> None:
        folder = missing[0][2].parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temp:
            outs = [Path(temp, f"{number}.npz") for number in range(len(missing))]
            runs = [
                (str(reference_folder(model)), job, str(out))
                for (model, job, _), out in zip(missing, outs, strict=True)
            ]
            self.ask_alone("tests.e2e.reference_job", {"runs": runs})
            for out, (_, _, file) in zip(outs, missing, strict=True):
                out.rename(file)

    def ask_alone(self, module: str, job: dict[str, Any]) -> None:
        """Ask a process that sees neither LMDeploy nor dlinfer."""
        self._processes.ask(module, job, 500, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})

    def ask(self, module: str, job: dict, timeout: float, environment: dict[str, str]) -> None:
        """Have a job done by a process of a module that calls ``tests.jobs.answer_jobs``."""
        self._processes.ask(module, job, timeout, environment)

    def engine(
        self,
        model: Path,
        steps: list[dict],
        timeout: float = 1000,
        environment: dict[str, str] | None = None,
        **options,
    ) -> EngineRun:
        """Start an engine with ``options`` of PytorchEngineConfig and let it answer ``steps``.

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
        """Start engines one after another in a process that sees ``environment``: (model, steps, options) of each."""
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
            given = {"DLINFER_CACHE_DIR": str(self.compiled)} | (environment or {})
            asked = {"jobs": jobs, "out": temp, "lmdeploy": metadata.version("lmdeploy")}
            log = self._processes.ask("tests.e2e.engine_job", asked, timeout, given)
            return [EngineRun(Path(temp), log, number) for number in range(len(jobs))]
