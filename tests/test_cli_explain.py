"""``dlinfer explain``: a tiny model from its folder to text, JSON and page, and clean errors."""

import json

import pytest

from dlinfer.cli import main
from tests.caches import fresh_cache


@pytest.fixture
def llama(tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", pytest.param("inductor", marks=pytest.mark.full)])
def test_a_model_is_explained(engine, llama, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DLINFER_CACHE_DIR", str(fresh_cache(tmp_path / "cache")))
    monkeypatch.setattr("dlinfer.settings._current", None)
    page, data = tmp_path / "out.html", tmp_path / "out.json"
    argv = ["explain", str(llama), "--prompt-length", "5", "--batch", "3", "--engine", engine]
    assert main([*argv, "--html", str(page), "--json", str(data)]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out
    assert f"written: {page}" in out
    found = json.loads(data.read_text())
    assert len(found["graphs"]) == 2  # prefill, and a decode step whose length is 1
    assert found["size_1_variants"] == [found["graphs"][1]["index"]]
    assert found["coverage"] == 1.0
    assert found["graph_breaks"] == []
    assert found["fired"]["rms_norm"] > 0
    assert "model.layers.1" in page.read_text()


def test_a_folder_without_a_model(tmp_path, capsys):
    assert main(["explain", str(tmp_path / "absent")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: the model folder")
    assert "it has no config.json" in err
    assert "Traceback" not in err


def test_a_broken_model(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llamma"}')
    assert main(["explain", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: the model folder")
    assert "llamma" in err


def test_weights_are_read_from_safetensors_only(llama, capsys):
    """The other format is a pickle."""
    import torch
    from safetensors.torch import load_file

    weights = llama / "model.safetensors"
    torch.save(load_file(weights), llama / "pytorch_model.bin")
    weights.unlink()
    assert main(["explain", str(llama), "--prompt-length", "5"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: the model folder")
    assert "model.safetensors" in err


def test_a_wrong_file_name_is_noticed_before_any_work(tmp_path, capsys):
    assert main(["explain", str(tmp_path), "--html", "out.htm"]) == 1
    assert capsys.readouterr().err.startswith("error: explanation: --html out.htm does not end")


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_a_wrong_number_is_refused(number, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "folder", "--batch", number])
    assert "is not a whole number above 0" in capsys.readouterr().err
