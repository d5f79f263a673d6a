"""A model that ``examples/trained_model`` trains: it learns, the same each time, and few bits lose what docs say."""

import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.quantisation_loss import write_with_outliers
from dlinfer.framework.lmdeploy_ext.quantise.loss import Loss, measure
from examples.trained_model import train
from tests.e2e.processes import run_process

STEPS = 300


def test_the_same_weights_each_time():
    tokens = torch.arange(500) % 7
    first, second = (train.train(tokens, 3).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@torch.no_grad()
def logits_of(folder: Path) -> tuple[torch.Tensor, float]:
    """A model's logits in float32, and the largest input of a linear layer behind a norm."""
    model, states = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), list[torch.Tensor]()
    layer = model.get_submodule("model.layers.1.mlp.gate_proj")
    layer.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    logits = model(torch.arange(40)[None]).logits
    return logits, float(states[0].abs().max())


def test_outlier_features_change_no_logit(tmp_path: Path):
    torch.manual_seed(0)
    LlamaForCausalLM(train.CONFIG).bfloat16().save_pretrained(tmp_path / "plain")
    write_with_outliers(tmp_path / "plain", tmp_path / "outliers", 16)
    (plain, largest), (outliers, larger) = (logits_of(tmp_path / name) for name in ("plain", "outliers"))
    assert torch.equal(plain, outliers)
    assert larger > 5 * largest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "model"
    command = [sys.executable, "-m", "examples.trained_model", str(out), "--steps", str(STEPS)]
    done = run_process(command, timeout=1500, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr[-4000:]
    again = run_process(command, timeout=100, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert again.returncode == 2
    assert "exists; remove it" in again.stderr
    return out


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(2000)
@pytest.mark.parametrize(("form", "most"), [("w8a8", 0.01), ("awq-int4", 0.05)])
def test_what_few_bits_lose(folder: Path, form: str, most: float):
    """most: the logarithm of the ratio of perplexities; docs/guides/quantise.md has 0.001 and less than 0.03."""
    loss: Loss = measure(folder, form, tokens=2048)
    assert loss.perplexity < train.CONFIG.vocab_size / 5, "it has learned nothing"
    for way in loss.ways:
        assert abs(math.log(way.perplexity / loss.perplexity)) < most
        assert way.divergence < most
