"""Folders that ``dlinfer quantise`` wrote: unmodified LMDeploy generates transformers' tokens on what the weights mean.

What a packed AWQ weight means is read here by other code than it was written with. Formats of 8 bits also round
activations; their oracle is that of ``test_quantised.py``.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dlinfer.cli import main
from examples.tiny_models import awq, tokenizer
from examples.tiny_models.build import REFERENCE, STAMP
from examples.tiny_models.families import COMMON, STOP_IDS
from tests.e2e import quantised_model, test_quantised
from tests.e2e.cell_checks import check_decisive, check_logits, compare_tokens
from tests.e2e.cell_jobs import SCORED
from tests.e2e.harness import NEW_TOKENS, Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2000)]

README = Path(__file__).parents[2] / "README.md"
FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}


def make(family: str, folder: Path, dtype: torch.dtype, shard: str = "50GB") -> None:
    """A random model in floats, of sizes that every format takes, with biases and norms that count."""
    import transformers

    model_class = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")
    extra = {"sliding_window": None} if family == "mistral" else {}
    torch.manual_seed(len(family))
    model = model_class(model_class.config_class(**COMMON | quantised_model.SIZES | extra)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                noise = torch.randn_like(parameter) * 0.2
                parameter.copy_(noise if name.endswith("bias") else 1 + noise)
    model.generation_config.eos_token_id = STOP_IDS
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    tokenizer.train().save_pretrained(folder)


def quantise(folder: Path, out: Path, *arguments: str) -> None:
    assert main(["quantise", str(folder), "-o", str(out), *arguments, "--json"]) == 0


def unpacked(words: Tensor) -> Tensor:
    """Numbers [rows, columns] of words [rows, columns / 8]."""
    found = [(words.long() >> (4 * place)) & 15 for place in awq.PLACES]
    return torch.stack(found, -1).flatten(1)


def write_twin(folder: Path, floats: Path) -> None:
    """Put what an AWQ folder means, in float32, where the oracle looks for it."""
    tensors: dict[str, Tensor] = {}
    files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    stored = {name: tensor for file in files for name, tensor in file.items()}
    for name, tensor in stored.items():
        layer, _, part = name.rpartition(".")
        if part == "qweight":
            scales, zeros = stored[f"{layer}.scales"], unpacked(stored[f"{layer}.qzeros"])
            size = len(tensor) // len(scales)
            zeros, scales = zeros.repeat_interleave(size, 0), scales.float().repeat_interleave(size, 0)
            tensors[f"{layer}.weight"] = ((unpacked(tensor) - zeros) * scales).t().contiguous()
        elif part not in ("scales", "qzeros"):
            tensors[name] = tensor.float()
    twin = folder / REFERENCE
    shutil.copytree(floats, twin, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    config = json.loads((floats / "config.json").read_text()) | {"dtype": "float32"}
    (twin / "config.json").write_text(json.dumps(config))
    digest = hashlib.sha256((twin / "model.safetensors").read_bytes()).hexdigest()
    (folder / STAMP).write_text(digest)  # kept answers are told apart by it


@pytest.mark.parametrize(
    ("family", "group_size", "shard", "eager"),
    [
        ("llama", "128", "50GB", True),
        ("llama", "128", "50GB", False),
        ("qwen2", "32", "300KB", True),
        ("qwen3", "64", "300KB", True),
        ("mistral", "128", "50GB", True),
    ],
)
def test_awq(lab: Lab, tmp_path: Path, family: str, group_size: str, shard: str, eager: bool) -> None:
    floats, out = tmp_path / "floats", tmp_path / "awq"
    make(family, floats, torch.bfloat16, shard)
    assert (floats / "model.safetensors").is_file() == (shard == "50GB")
    quantise(floats, out, "--format", "awq-int4", "--group-size", group_size)
    check_awq(lab, out, floats, eager)


def test_calibrated_awq(lab: Lab, tmp_path: Path) -> None:
    floats, out = tmp_path / "floats", tmp_path / "awq"
    make("qwen3", floats, torch.bfloat16, "300KB")
    looked = ["--calibrate", str(README), "--samples", "16", "--length", "48", "--steps", "8"]
    quantise(floats, out, "--format", "awq-int4", "--group-size", "64", *looked)
    check_awq(lab, out, floats, eager=True)


def check_awq(lab: Lab, out: Path, floats: Path, eager: bool) -> None:
    """LMDeploy's tokens and logits of the folder that was written are transformers' on what its weights mean."""
    write_twin(out, floats)
    prompts = lab.prompts(out)
    hf = lab.reference(
        out, prompts=prompts, max_new_tokens=NEW_TOKENS, score_continued=SCORED, dtype="float32"
    )
    scored = [[*hf[f"prompt_{i}"].tolist(), *hf[f"tokens_{i}"].tolist()] for i in SCORED]
    gen = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    steps = [
        {"name": "batch", "kind": "call", "prompts": prompts, "gen": gen},
        {"name": "logits", "kind": "teacher_forced", "sequences": scored},
    ]
    run = lab.engine(out, steps, environment={"DLINFER_FALLBACK": "error"}, dtype="float32", eager_mode=eager)
    failures = check_decisive(hf) + compare_tokens("batch", run, hf, "float32")
    failures += check_logits("logits", run, [hf[f"logits_{i}"] for i in range(len(SCORED))], "float32")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(("form", "method"), [("w8a8", "int8"), ("fp8", "blocked")])
@pytest.mark.parametrize("family", FAMILIES)
def test_8_bits(lab: Lab, tmp_path: Path, family: str, form: str, method: str) -> None:
    make(family, tmp_path / "floats", torch.float32)
    quantise(tmp_path / "floats", tmp_path / f"{family}-{method}", "--format", form)
    test_quantised.check(lab, tmp_path, test_quantised.Case(family, method, eager=True))
