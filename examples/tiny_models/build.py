"""Build one tiny checkpoint: deterministic, atomic, and instant when it is there already."""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from .families import BRIEF, DIFFUSION, ELSEWHERE, FAMILIES, QUANTISED, RELEASED, REWARD, SIZED
from .vision_families import VISION, VISION_ELSEWHERE

STAMP = "tiny_model.json"
REFERENCE = "hf_reference"
TEXT = FAMILIES | BRIEF | DIFFUSION | QUANTISED | REWARD | ELSEWHERE | SIZED
BUILT = TEXT | VISION | VISION_ELSEWHERE
DTYPES = ("float32", "bfloat16", "float16")


def fingerprint(family: str, seed: int, dtype: str) -> str:
    """Hash of what the checkpoint depends on: this package's source, the arguments, the libraries."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    libraries = [metadata.version(name) for name in ("torch", "transformers", "tokenizers")]
    digest.update(json.dumps([family, seed, dtype, libraries]).encode())
    return digest.hexdigest()[:16]


def is_built(out: Path, wanted: str) -> bool:
    """True when out holds a finished checkpoint with this fingerprint."""
    stamp = out / STAMP
    return stamp.is_file() and json.loads(stamp.read_text())["fingerprint"] == wanted


def reference_folder(model: Path) -> Path:
    """The folder that transformers can load: the model's own, or the twin it carries (InternLM's Llama, and the floats
    of quantised weights)."""
    twin = model / REFERENCE
    return twin if twin.is_dir() else model


def build(family: str, out: Path, seed: int = 0, dtype: str = "float32") -> bool:
    """Make ``out`` a checkpoint of ``family``; False when it already was.

    The folder appears whole or not at all: it is written beside ``out`` and renamed. A folder there that this
    function did not make is never touched.

    Raises:
        ValueError: unknown family or dtype.
        FileExistsError: ``out`` exists and is not a tiny model.
    """
    if family not in BUILT:
        raise ValueError(f"unknown family {family!r}; available: {', '.join(BUILT)}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; available: {', '.join(DTYPES)}")
    wanted = fingerprint(family, seed, dtype)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _one_process_at_a_time(out.parent):
        if is_built(out, wanted):
            return False
        if out.exists() and not (out / STAMP).is_file():
            raise FileExistsError(f"{out} exists and was not built by this script; choose another folder")
    temp = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        _write(family, temp, seed, dtype)
        stamp = {"fingerprint": wanted, "family": family, "seed": seed, "dtype": dtype}
        (temp / STAMP).write_text(json.dumps(stamp) + "\n")
        temp.chmod(0o755)  # mkdtemp's 0700 would hide the model from other users
        with _one_process_at_a_time(out.parent):
            # Where another process was faster, it may be reading the same bytes already.
            if not is_built(out, wanted):
                if out.exists():
                    shutil.rmtree(out)
                os.rename(temp, out)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return True


@contextmanager
def _one_process_at_a_time(folder: Path) -> Iterator[None]:
    """A lock of the kernel's on the folder itself, which leaves no file in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(family: str, folder: Path, seed: int, dtype: str) -> None:
    # Imported late: a folder that is there already costs no import of torch.
    import torch
    import transformers

    from . import (
        awq,
        chatglm,
        cogvlm,
        deepseek,
        glm4v,
        internlm2,
        internlm3,
        remote,
        reward,
        sdar,
        tokenizer,
        vision,
    )
    from .families import STOP_IDS

    if family in VISION:
        torch.manual_seed(seed)
        model = vision.make(VISION[family])
        randomise_vectors(model)
        vision.forbid_image_tokens(model)
        model = model.to(getattr(torch, dtype)).eval()
        if VISION[family].chat is not None:
            vision.save_chat(VISION[family], model, folder, folder / REFERENCE)
        elif (names := VISION[family].remote) is not None:
            vision.save(VISION[family], model, folder / REFERENCE)
            remote.save(folder, folder / REFERENCE, *names)
        elif (publish := VISION[family].published) is not None:
            vision.save(VISION[family], model, folder / REFERENCE)
            publish(folder, folder / REFERENCE)
        else:
            vision.save(VISION[family], model, folder)
        return
    if family in cogvlm.CONFIGS:
        torch.manual_seed(seed)
        model = cogvlm.make(family)
        cogvlm.save(model.to(getattr(torch, dtype)), folder)
        tokenizer.begin_texts(tokenizer.train()).save_pretrained(folder)
        return
    spec = TEXT[VISION_ELSEWHERE[family].text if family in VISION_ELSEWHERE else family]
    model_class = getattr(transformers, f"{spec.hf_name}ForCausalLM")
    config = model_class.config_class(**spec.config)
    torch.manual_seed(seed)
    model = model_class(config)
    randomise_vectors(model)
    model.generation_config.eos_token_id = STOP_IDS
    model = model.to(getattr(torch, dtype)).eval()
    tokens = tokenizer.train()
    twins = {
        "internlm2": internlm2.save,
        "internlm3": internlm3.save,
        "chatglm": chatglm.save,
        "deepseek": deepseek.save,
        "glm_4v": glm4v.save,
        **dict.fromkeys(DIFFUSION, sdar.save),
        "qwen2_reward": reward.save_qwen2,
        "internlm2_reward": reward.save_internlm2,
    }
    if family in twins:
        if family == "deepseek":
            deepseek.prepare(model)
        model.save_pretrained(folder / REFERENCE)
        tokens.save_pretrained(folder / REFERENCE)
        twins[family](model, folder)
        model.generation_config.save_pretrained(folder)
    elif family in RELEASED:
        model.save_pretrained(folder)
        _configure_as_released(folder, RELEASED[family])
    elif family in QUANTISED:
        awq.save(model, folder, twin=folder / REFERENCE)
        tokens.save_pretrained(folder / REFERENCE)
    else:
        model.save_pretrained(folder)
    tokens.save_pretrained(folder)


# What transformers 5 writes out, and released configurations leave to other fields.
_WRITTEN_OUT = ("original_max_position_embeddings", "head_dim", "qk_head_dim", "v_head_dim", "mlp_bias")


def _configure_as_released(folder: Path, architecture: str) -> None:
    """Give config.json the form in which Phi-3.5-MoE's and MiniCPM3's were released, which transformers 5 still reads.

    architecture: the class that it names. Rope parameters have another key there, and ``type`` in place of
    ``rope_type``.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for name in _WRITTEN_OUT:
        config.pop(name, None)
    rope = config.pop("rope_parameters")
    config |= {"architectures": [architecture], "rope_theta": rope.pop("rope_theta"), "rope_scaling": None}
    kind = rope.pop("rope_type")
    if kind != "default":
        config["rope_scaling"] = {"type": kind, **rope}
    file.write_text(json.dumps(config, indent=2) + "\n")


def randomise_vectors(model) -> None:
    """Norm weights are born as ones, biases and routers' corrections as zeros, where forgetting them would not show.

    So are the biases of positions in a window, and the experts of hashed tokens, which become distinct for each token.
    Decay rates of gated linear attention (``A_log``) become so small that a state lasts for dozens of tokens.
    """
    import torch

    with torch.no_grad():
        corrections = [pair for pair in model.named_buffers() if pair[0].endswith("correction_bias")]
        for name, parameter in [*model.named_parameters(), *corrections]:
            if parameter.ndim == 1:
                noise = torch.randn_like(parameter) * 0.2
                middle = 0 if name.endswith("bias") else -2 if name.endswith("A_log") else 1
                parameter.copy_(middle + noise)
            elif name.endswith("position_bias"):
                parameter.copy_(torch.randn_like(parameter))
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):
                experts = model.config.n_routed_experts
                table.copy_(torch.rand(len(table), experts).argsort(-1)[:, : table.shape[1]])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.tiny_models", description=__doc__)
    parser.add_argument("family", choices=BUILT)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    args = parser.parse_args()
    try:
        made = build(args.family, args.out, args.seed, args.dtype)
    except (ValueError, FileExistsError) as error:
        parser.exit(2, f"error: {error}\n")
    print(f"{args.out}: {'built' if made else 'up to date'}")
