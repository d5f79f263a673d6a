"""``dlinfer explain``: run a Hugging Face model folder in graph mode (prefill and one decode step) and explain it."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from dlinfer.errors import DlinferError, ExplanationError, ModelFolderError
from dlinfer.explanation.explanation import FORMATS, Explanation, explain


def run(arguments: argparse.Namespace) -> int:
    files = {suffix: getattr(arguments, suffix.removeprefix(".")) for suffix in FORMATS}
    try:
        for suffix, path in files.items():
            if path is not None and path.suffix != suffix:
                raise ExplanationError(detail=f"--{suffix[1:]} {path} does not end in {suffix}")
        explanation = explain_folder(
            arguments.folder,
            batch=arguments.batch,
            length=arguments.prompt_length,
            engine=arguments.engine,
            dynamic=not arguments.static,
        )
        sys.stdout.write(str(explanation))
        for path in files.values():
            if path is not None:
                sys.stdout.write(f"written: {explanation.save(path)}\n")
    except (DlinferError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def explain_folder(
    folder: Path, *, batch: int, length: int, engine: str | None, dynamic: bool
) -> Explanation:
    """Explain a prefill and one decode step of a model folder, with a static KV cache.

    batch: number of sequences. length: tokens of each sequence. engine: a graph engine's name; None for the default.
    dynamic: True makes Dynamo compile for dynamic sizes; False leaves the choice of dynamic sizes to Dynamo.

    Raises ModelFolderError and the errors of ``explain``.
    """
    model = _load(folder)
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=length + 8)
    prompt = torch.arange(batch * length).reshape(batch, length) % model.config.get_text_config().vocab_size
    fixed: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
    with torch.no_grad():
        model(
            input_ids=prompt, **fixed
        )  # the cache allocates its tensors at the first call: keep that out of the explained calls
    cache.reset()
    explanation = explain(
        model, input_ids=prompt, **fixed, options={"engine": engine}, dynamic=dynamic or None
    )
    explanation.run(input_ids=prompt[:, :1].contiguous(), **fixed)
    return explanation


def _load(folder: Path) -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as cause:
        advice = "run pip install 'dlinfer[lmdeploy]', which installs transformers"
        raise ModelFolderError(
            path=str(folder), detail="transformers is not installed", advice=advice
        ) from cause
    if not (folder / "config.json").is_file():
        advice = "pass the folder that save_pretrained wrote, with config.json and the weights"
        raise ModelFolderError(path=str(folder), detail="it has no config.json", advice=advice)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,  # the other format is pickle, which can run code
            dtype="auto",
        )
    except Exception as cause:
        detail = f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[0]}"
        advice = "repair the checkpoint, or use a model that AutoModelForCausalLM can load"
        raise ModelFolderError(path=str(folder), detail=detail, advice=advice) from cause
    return model.eval()
