"""Targets and drafts for speculative decoding with random weights, of which a part of the drafts is right.

The token after t is most often next(t), a permutation: embeddings are random, and the row of next(t) in the head is t's
embedding. Layers add to that, ``strength`` times, so that caches matter and drafts, which know next alone, are wrong
now and then. EAGLE's and DeepSeek's drafts see the last token, and are right to any depth; EAGLE-3's sees the hidden
states of the one before, from which next(next(t)) follows, and is right once.

A job is ``{"out": FOLDER, "method": ..., "strength": ..., "prompts": [...], "new": N, "never": [...]}``. It makes
``out/target`` and ``out/draft``, but for the drafts of DeepSeek and Qwen3.5, which are a layer of the target.
``out/said.json`` has transformers' greedy tokens of each prompt. With "experts" the Qwen3.5 is one of experts.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples import hf_reference
from examples.tiny_models import tokenizer, vision
from examples.tiny_models.families import COMMON, FAMILIES, POSITIONAL, STOP_IDS
from examples.tiny_models.vision_families import VISION
from tests.e2e.peft_job import greedy
from tests.jobs import answer_jobs

VOCABULARY, HIDDEN, INNER, DRAFT_VOCABULARY = COMMON["vocab_size"], COMMON["hidden_size"], 128, 700
FILE = "model.safetensors"
QWEN3_5_ATTENTION = "model.language_model.layers.2."


class Chain:
    """What follows what: the embeddings, and the heads that know the next token, or the one after it."""

    def __init__(self) -> None:
        order = torch.randperm(VOCABULARY - 5) + 5  # the first are tokens of the tokenizer's own
        self.next = torch.cat([torch.arange(5), order])
        self.embeddings = torch.nn.functional.normalize(torch.randn(VOCABULARY, HIDDEN), dim=-1) * 8

    def head(self, following: Tensor) -> Tensor:
        head = torch.zeros(VOCABULARY, HIDDEN)
        head[following] = self.embeddings / 8
        return head


def make_qwen3_5(job: dict[str, Any], chain: Chain) -> Any:
    """Qwen3.5 with images, whose tokens no text may hold."""
    model = vision.make(VISION["qwen3_5_moe" if job.get("experts") else "qwen3_5"]).eval()
    for name, weight in model.named_parameters():
        if "language_model" in name and any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            weight.mul_(job["strength"])
    model.get_input_embeddings().weight[:VOCABULARY] = chain.embeddings
    model.lm_head.weight.zero_()
    model.lm_head.weight[:VOCABULARY] = chain.head(chain.next)
    return model


def make_target(job: dict[str, Any], chain: Chain) -> Any:
    mtp = job["method"] == "deepseek_mtp"
    family = POSITIONAL["deepseek_v2"] if mtp else FAMILIES["llama"]
    # EAGLE-3's draft reads what LMDeploy's layers 2, n / 2 and n - 3 get, which have to be three.
    depth = {} if mtp else {"num_hidden_layers": 8}
    config = getattr(transformers, f"{family.hf_name}Config")(**family.config | depth)
    model = getattr(transformers, f"{family.hf_name}ForCausalLM")(config).eval()
    for name, weight in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.mul_(job["strength"])
    model.model.embed_tokens.weight.copy_(chain.embeddings)
    model.lm_head.weight.copy_(chain.head(chain.next))
    model.generation_config.eos_token_id = STOP_IDS
    return model


def first_half() -> Tensor:
    return torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)


def layer(path: str, inputs: int, strength: float) -> dict[str, Tensor]:
    """A decoder layer of Llama's, whose attention takes so many inputs."""
    sizes = {
        "self_attn.q_proj": (HIDDEN, inputs),
        "self_attn.k_proj": (HIDDEN // 2, inputs),
        "self_attn.v_proj": (HIDDEN // 2, inputs),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    tensors = {f"{path}.{name}.weight": torch.randn(*size) * 0.2 for name, size in sizes.items()}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"{path}.{name}.weight"] *= strength
    return tensors | {f"{path}.post_attention_layernorm.weight": torch.ones(HIDDEN)}


def eagle(chain: Chain, strength: float) -> dict[str, Tensor]:
    own = {"embed_tokens.weight": chain.embeddings, "fc.weight": first_half()}
    return layer("layers.0", HIDDEN, strength) | own


def eagle3(chain: Chain, strength: float) -> dict[str, Tensor]:
    """With a vocabulary of its own, a part of the target's."""
    tokens = torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY].sort().values
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
    own = {
        "fc.weight": torch.cat([first_half(), torch.zeros(HIDDEN, HIDDEN)], dim=1),
        "d2t": tokens - torch.arange(DRAFT_VOCABULARY),
        "lm_head.weight": chain.head(chain.next[chain.next])[tokens],
    }
    return layer("midlayer", 2 * HIDDEN, strength) | own | {f"{n}.weight": torch.ones(HIDDEN) for n in norms}


def mtp(chain: Chain, target: dict[str, Tensor]) -> dict[str, Tensor]:
    """The layer behind the target's last: a copy of that, and what DeepSeek-V3 has around it."""
    path = "model.layers.2."
    block = {
        name.replace("model.layers.1.", path): weight.clone()
        for name, weight in target.items()
        if name.startswith("model.layers.1.")
    }
    norms = ("enorm", "hnorm", "shared_head.norm")
    own = {
        f"{path}embed_tokens.weight": chain.embeddings,
        f"{path}eh_proj.weight": first_half(),
        f"{path}shared_head.head.weight": chain.head(chain.next),
    }
    return block | own | {f"{path}{name}.weight": torch.ones(HIDDEN) for name in norms}


def qwen3_5_mtp(target: dict[str, Tensor]) -> dict[str, Tensor]:
    """The layer behind the target's last: a copy of the one of attention, whose norms are zeros that 1 is added to."""
    layer = {
        name.replace(QWEN3_5_ATTENTION, "mtp.layers.0."): weight.clone()
        for name, weight in target.items()
        if name.startswith(QWEN3_5_ATTENTION)
    }
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return layer | {"mtp.fc.weight": first_half()} | {f"mtp.{n}.weight": torch.zeros(HIDDEN) for n in norms}


def add_mtp(folder: Path, job: dict[str, Any], chain: Chain) -> None:
    """Add the draft's layer to the target's files."""
    target = load_file(folder / FILE)
    config = json.loads((folder / "config.json").read_text())
    if job["method"] == "deepseek_mtp":
        config["num_nextn_predict_layers"] = 1
        own = mtp(chain, target)
    else:
        config["text_config"]["mtp_num_hidden_layers"] = 1
        own = qwen3_5_mtp(target)
    write(folder, config, target | own)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE, {"format": "pt"}
    )


@torch.no_grad()
def answer(job: dict[str, Any]) -> dict[str, Any]:
    hf_reference.check_alone()
    out, method = Path(job["out"]), job["method"]
    torch.manual_seed(0)
    chain = Chain()
    if method == "qwen3_5_mtp":
        model = make_qwen3_5(job, chain)
        vision.save(VISION["qwen3_5_moe" if job.get("experts") else "qwen3_5"], model, out / "target")
    else:
        model = make_target(job, chain)
        model.save_pretrained(str(out / "target"))
        tokenizer.train().save_pretrained(str(out / "target"))
    if method in ("deepseek_mtp", "qwen3_5_mtp"):
        add_mtp(out / "target", job, chain)
    else:
        fields: dict[str, Any] = COMMON | {"num_hidden_layers": 1}
        config = transformers.LlamaConfig(**fields).to_dict()
        config |= {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": DRAFT_VOCABULARY}
        make = eagle if method == "eagle" else eagle3
        write(out / "draft", config, make(chain, job["strength"]))
    said = [greedy(model, prompt, job) for prompt in job["prompts"]]
    (out / "said.json").write_text(json.dumps(said))
    return {}


if __name__ == "__main__":
    answer_jobs(answer)
