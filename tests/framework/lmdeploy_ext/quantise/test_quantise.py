"""What is written: names, shapes and numbers of each format, compared with those of other code, and the report."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from dlinfer.cli import main
from dlinfer.framework.lmdeploy_ext.checks.folder.model_folder import check_model_folder
from dlinfer.framework.lmdeploy_ext.quantise import run, writer
from dlinfer.framework.lmdeploy_ext.quantise.run import format_of, quantise
from examples.tiny_models import awq
from tests.e2e import quantised_model
from tests.framework.lmdeploy_ext.quantise import folders

FORMATS = ("awq-int4", "w8a8", "fp8")
DOCS = Path(__file__).parents[4] / "docs/reference/json.md"


def expected(name: str, weight: Tensor, form: str, group_size: int = 128) -> dict[str, Tensor]:
    """The tensors of a weight by code that is not dlinfer's."""
    layer = name.removesuffix(".weight")
    if form == "awq-int4":
        return {
            f"{layer}.{part}": tensor for part, tensor in awq.rounded(weight.float(), group_size)[1].items()
        }
    return quantised_model.quantised(layer, weight.float(), {"w8a8": "int8", "fp8": "blocked"}[form])


def written(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def check_numbers(
    got: dict[str, Tensor], source: dict[str, Tensor], form: str, group_size: int = 128
) -> None:
    want: dict[str, Tensor] = {}
    for name, tensor in source.items():
        is_projection = name.endswith("_proj.weight")
        want |= expected(name, tensor, form, group_size) if is_projection else {name: tensor}
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(got[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("form", FORMATS)
def test_tensors_are_those_of_other_code(tmp_path, form, shards):
    source = folders.write(tmp_path / "model", shards=shards)
    quantise(tmp_path / "model", tmp_path / "out", format_of(form))
    check_numbers(written(tmp_path / "out"), source, form)
    check_model_folder(tmp_path / "out")  # the index, where there is one, names what the files hold
    files = {path.name for path in (tmp_path / "out").iterdir()}
    given = {path.name for path in (tmp_path / "model").iterdir()}
    assert given - files == {"consolidated.safetensors", "notes"}
    assert files <= given
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", FORMATS)
def test_other_floats(tmp_path, form, dtype):
    source = folders.write(tmp_path / "model", folders.tensors(dtype))
    quantise(tmp_path / "model", tmp_path / "out", format_of(form))
    check_numbers(written(tmp_path / "out"), source, form)


def test_other_groups(tmp_path):
    source = folders.write(tmp_path / "model")
    quantise(tmp_path / "model", tmp_path / "out", format_of("awq-int4", 32))
    check_numbers(written(tmp_path / "out"), source, "awq-int4", 32)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["group_size"] == 32


@pytest.mark.parametrize("form", FORMATS)
def test_pieces_make_the_whole(tmp_path, form, monkeypatch):
    monkeypatch.setattr(run, "PIECE", 1)  # the fewest rows at once, and a rest of another size
    source = folders.write(tmp_path / "model")
    quantise(tmp_path / "model", tmp_path / "out", format_of(form))
    check_numbers(written(tmp_path / "out"), source, form)


@pytest.mark.parametrize("form", FORMATS)
def test_rows_of_zeros_stay_zeros(tmp_path, form):
    weights = folders.tensors()
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name][:128] = 0
    folders.write(tmp_path / "model", weights)
    made = format_of(form)
    quantise(tmp_path / "model", tmp_path / "out", made)
    got = written(tmp_path / "out")
    layer = name.removesuffix("weight")
    again = made.dequantise({part: got[layer + part] for part in made.parts(*weights[name].shape)})
    assert torch.equal(again[:128], torch.zeros_like(again[:128]))
    assert again.isfinite().all()


@pytest.mark.parametrize(("form", "bound"), [("awq-int4", 0.2), ("w8a8", 0.012), ("fp8", 0.04)])
def test_the_report_tells_sizes_and_the_largest_error(tmp_path, form, bound):
    source = folders.write(tmp_path / "model", shards=2)
    seen: list[tuple[int, int, str]] = []
    made = format_of(form)
    report = quantise(
        tmp_path / "model", tmp_path / "out", made, lambda done, total, name: seen.append((done, total, name))
    )
    got = written(tmp_path / "out")
    assert report.bytes_before == sum(one.nbytes for one in source.values())
    assert report.bytes_after == sum(one.nbytes for one in got.values())
    assert (report.quantised, report.kept) == (14, 7)
    assert report.weights_before == sum(
        one.nbytes for name, one in source.items() if name.endswith("_proj.weight")
    )
    assert (seen[0][0], seen[-1]) == (0, (report.bytes_before, report.bytes_before, ""))
    assert {name for *_, name in seen} == {*source, ""}

    errors = {}
    for name in source:
        if name.endswith("_proj.weight"):
            layer, weight = name.removesuffix("weight"), source[name].double()
            again = made.dequantise({part: got[layer + part] for part in made.parts(*weight.shape)}).double()
            errors[name] = float((again - weight).norm() / weight.norm())
    assert report.worst_error == pytest.approx(max(errors.values()))
    assert errors[report.worst_tensor] == max(errors.values())
    # Of numbers drawn from a bell curve, by the width of a step: see the module of formats.
    assert bound / 10 < report.worst_error < bound


def test_configurations(tmp_path):
    folders.write(tmp_path / "model")
    folders.write(tmp_path / "old", torch_dtype="bfloat16")
    for form in FORMATS:
        quantise(tmp_path / "model", tmp_path / form, format_of(form))
    quantise(tmp_path / "old", tmp_path / "old-awq", format_of("awq-int4"))
    found = {
        form: json.loads((tmp_path / form / "config.json").read_text()) for form in (*FORMATS, "old-awq")
    }
    for form, config in found.items():
        kept = {name: value for name, value in config.items() if "dtype" not in name}
        assert kept.pop("quantization_config")
        assert kept == {name: value for name, value in folders.CONFIG.items() if name != "dtype"}, form
    assert [found[form]["dtype"] for form in FORMATS] == ["float16", "bfloat16", "bfloat16"]
    assert found["old-awq"]["torch_dtype"] == "float16"
    assert found["w8a8"]["quantization_config"] == quantised_model.METHODS["int8"]
    assert quantised_model.METHODS["blocked"].items() <= found["fp8"]["quantization_config"].items()


def test_unmodified_readers_take_the_file(tmp_path):
    """safetensors itself compares every offset; numbers lie aligned, so that a mapped file can be used in place."""
    layout = {"b": ("I8", (3,)), "a": ("F32", (2, 2)), "c": ("F16", (1,)), "none": ("I32", (0, 4))}
    tensors = {
        "b": torch.tensor([1, -2, 3], dtype=torch.int8),
        "a": torch.arange(4.0).view(2, 2),
        "c": torch.tensor([0.5]).half(),
        "none": torch.empty(0, 4, dtype=torch.int32),
    }
    with writer.ShardWriter(tmp_path / "file.safetensors", layout) as out:
        for name, tensor in tensors.items():
            out.write(name, tensor)
    start, places = writer.header(layout)
    assert len(start) % 8 == 0
    assert all(places[name][0] % tensor.element_size() == 0 for name, tensor in tensors.items())
    with safe_open(tmp_path / "file.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    for name, tensor in load_file(tmp_path / "file.safetensors").items():
        assert torch.equal(tensor, tensors[name])


def test_a_file_that_lacks_a_tensor_is_a_fault(tmp_path):
    with (
        pytest.raises(AssertionError, match="never written"),
        writer.ShardWriter(tmp_path / "file", {"a": ("F32", (1,))}),
    ):
        pass
    with (
        pytest.raises(AssertionError, match="instead of the planned"),
        writer.ShardWriter(tmp_path / "file", {"a": ("F32", (1,))}) as out,
    ):
        out.write("a", torch.zeros(2))


def test_the_command_prints_a_table_or_one_object(tmp_path, capsys):
    folders.write(tmp_path / "model")
    arguments = ["quantise", str(tmp_path / "model"), "--format", "w8a8"]
    assert main([*arguments, "-o", str(tmp_path / "one")]) == 0
    text = capsys.readouterr().out
    assert "w8a8" in text and "largest error of a weight, with a scale for a row" in text
    assert main([*arguments, "-o", str(tmp_path / "two"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["out"] == str(tmp_path / "two")
    assert (report["schema"], report["quantised"], report["kept"]) == (1, 14, 7)


def test_the_page_names_every_field_of_the_report():
    text = DOCS.read_text()
    assert [name for name in run.Report.__dataclass_fields__ if f"`{name}`" not in text] == []
