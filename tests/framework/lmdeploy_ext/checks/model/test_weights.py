"""A checkpoint that does not fill its model, or has what the model lacks, is refused by name before weights load."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.checks.model.written import Written
from dlinfer.framework.lmdeploy_ext.conversion import loading
from dlinfer.framework.lmdeploy_ext.preflight.check import preflight
from examples.tiny_models.build import build

WEIGHTS = "model.safetensors"
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen2", "mixtral", "deepseek_v2"):
        build(family, root / family, dtype="float32")
    return root


@pytest.fixture
def changed(folders: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes a copy of a family's folder whose tensors are changed; ``pickled`` saves them as torch does."""

    def changed(family: str, change: Change, *, pickled: bool = False, **config: object) -> Path:
        folder = Path(shutil.copytree(folders / family, tmp_path / family))
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        if pickled:
            (folder / WEIGHTS).unlink()
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
        return folder

    return changed


def refusal(folder: Path) -> str:
    """What preflight says of the folder."""
    (found,) = preflight(folder, "cpu", session_len=128, max_batch_size=2).refusals
    assert found.error == "ModelFolderError"
    assert str(folder) in found.text
    return found.text


def without(*names: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


PARTS = {
    "q_proj": ("llama", "model.layers.1.self_attn.q_proj.weight", "self_attn.qkv_proj.weight"),
    "up_proj": ("llama", "model.layers.0.mlp.up_proj.weight", "mlp.gate_up_proj.weight"),
    "k bias": ("qwen2", "model.layers.1.self_attn.k_proj.bias", "self_attn.qkv_proj.bias"),
    "gate of an expert": ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w1.weight", "gate_up.weight"),
    "down of an expert": ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight", "down.weight"),
}


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickled"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_joined_parameter(part, pickled, changed):
    family, name, parameter = PARTS[part]
    text = refusal(changed(family, without(name), pickled=pickled))
    assert "its files have only a part of" in text and parameter in text and "are missing" in text
    assert name not in text.partition("the files have ")[2]


@pytest.mark.parametrize("bits", ["int8", "int4", "bf12"])
def test_a_part_of_a_parameter_that_is_packed_as_it_loads(bits, changed, monkeypatch):
    monkeypatch.setenv("DLINFER_CPU_WEIGHTS", bits)
    assert "its files have only a part of" in refusal(changed("llama", without(PARTS["q_proj"][1])))


def test_a_missing_tensor_and_a_missing_layer(changed, folders):
    text = refusal(changed("qwen2", without("model.layers.1.mlp.down_proj.weight")))
    assert "have no values for model.layers.1.mlp.down_proj.weight (1 parameters in all)" in text
    names = [name for name in load_file(folders / "llama" / WEIGHTS) if name.startswith("model.layers.1.")]
    text = refusal(changed("llama", without(*names)))
    assert "have no values for model.layers.1." in text and "(6 parameters in all)" in text


def test_no_projection_where_the_configuration_ties_none(changed):
    folder = changed("llama", without("lm_head.weight"), tie_word_embeddings=False)
    (found,) = preflight(folder, "cpu", session_len=128, max_batch_size=2).refusals
    assert "have no values for lm_head.weight" in found.text
    assert "set tie_word_embeddings to true" in found.next_step


def test_what_a_class_makes_of_other_weights_is_not_missing(folders):
    assert preflight(folders / "deepseek_v2", "cpu", session_len=128, max_batch_size=2).fits


def test_a_tensor_that_the_model_has_no_place_for(changed):
    text = refusal(changed("llama", lambda tensors: tensors.update(extra=torch.zeros(3))))
    assert "tensor extra of shape [3]: LMDeploy's class LlamaForCausalLM has no place for it" in text


def test_names_with_another_prefix(changed):
    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"transformer.{name}"] = tensors.pop(name)

    assert "tensor transformer." in refusal(changed("llama", rename))


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight", "model.norm.weight"]
)
def test_a_tensor_of_another_shape(name, changed):
    def cut(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][..., :-1].contiguous()

    text = refusal(changed("llama", cut))
    assert f"tensor {name} of shape " in text and "does not fit" in text


def test_a_tensor_that_would_be_repeated_to_fill_its_place(changed):
    name = "model.layers.0.mlp.gate_proj.weight"
    text = refusal(changed("llama", lambda tensors: tensors.update({name: tensors[name][:1].contiguous()})))
    assert f"tensor {name} of shape [1, " in text and "instead of" in text


# --- NaN


def test_nan_is_named(caplog):
    weights = {"a": torch.ones(3), "b": torch.tensor([1.0, torch.nan, 2.0], dtype=torch.bfloat16)}
    weights |= {"whole": torch.ones(2, dtype=torch.int32), "inf": torch.tensor([-torch.inf, torch.inf])}
    names: list[str] = []
    assert dict(loading._with_nan_noted(weights.items(), names)) == weights
    assert names == ["b"]


def test_nan_is_named_as_weights_load(changed, caplog):
    from lmdeploy.pytorch.weight_loader.model_weight_loader import ModelWeightLoader

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"][1] = torch.nan

    folder = changed("llama", spoil)

    class Model(torch.nn.Module):
        def load_weights(self, weights: object) -> None:
            dict(weights)  # type: ignore[call-overload]

    preflight(folder, "cpu", session_len=128, max_batch_size=2)  # activates the device
    with caplog.at_level(logging.WARNING, "dlinfer"):
        ModelWeightLoader(str(folder)).load_model_weights(Model())
    assert f"model.norm.weight in {folder} contain NaN (1 tensors)" in caplog.text


# --- what is written


@st.composite
def views(draw: st.DrawFn) -> list[Callable[[Tensor], Tensor]]:
    """Views of a matrix of 6 by 8 numbers."""
    found = []
    for _ in range(draw(st.integers(0, 6))):
        rows = slice(draw(st.integers(0, 6)), draw(st.integers(0, 6)), draw(st.sampled_from([1, 1, 2])))
        columns = slice(draw(st.integers(0, 8)), draw(st.integers(0, 8)), draw(st.sampled_from([1, 1, 3])))
        turns = draw(st.booleans())
        found.append(
            lambda matrix, rows=rows, columns=columns, turns=turns: (
                matrix[rows, columns].t() if turns else matrix[rows, columns]
            )
        )
    return found


@given(views())
def test_the_first_gap_is_that_of_a_mask(chosen):
    parameter, mask = torch.empty(6, 8, device="meta"), torch.zeros(6, 8, dtype=torch.bool)
    with Written(lambda: "a tensor") as written:
        for view in chosen:
            view(parameter).fill_(1)
    for view in chosen:
        view(mask).fill_(True)
    missing = (~mask).flatten().nonzero().flatten().tolist()
    gap = written.gap(parameter)
    if not missing:
        assert gap is None
        return
    first = missing[0]
    filled = [at for at in np.flatnonzero(mask.flatten().numpy()) if at > first]
    assert gap == (first, int(filled[0]) if filled else 48)


def test_a_view_of_many_runs_counts_from_its_first_number_to_its_last():
    parameter = torch.empty(1 << 18, device="meta")
    with Written(lambda: "a tensor") as written:
        parameter[::2].fill_(1)
    assert written.gap(parameter) == ((1 << 18) - 1, 1 << 18)
