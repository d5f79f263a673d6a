"""Language models: a Hugging Face folder to a bmodel by the command, and generation through sail.EngineLLM.

The nets are run by name, the caller gives their outputs; the three constructors and the flags, with a model that
generates.
"""

import gc
import pickle
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from dlinfer import cli
from dlinfer.errors import ModelFolderError, UnsupportedFeatureError
from dlinfer.vendor.sophgo import sail
from dlinfer.vendor.sophgo.compiler.compile import compile_onnx
from dlinfer.vendor.sophgo.compiler.options import BmodelOptions
from dlinfer.vendor.sophgo.errors import SophgoLlmError, SophgoOptionError, SophgoWorkerError
from dlinfer.vendor.sophgo.llm import (
    Generator,
    LlmOptions,
    build,
    compile_folder,
    generate,
    layout,
    parts,
)
from dlinfer.vendor.sophgo.llm import folder as hf
from dlinfer.vendor.sophgo.llm.generating import open_engine
from tests.vendor.sophgo import llms

HALF = 5e-3
"""Relative L2 distance of float16's logits from float32's."""


QUICK = ("llama", "bm1684x")
"""The model and the chip that the gate compiles."""


@pytest.fixture(scope="session")
def generator(bmodel_of):
    """The Qwen2-like model on bm1688, loaded once."""
    return Generator(open_engine(bmodel_of(*QUICK)))


def distance(given: np.ndarray, wanted: torch.Tensor) -> float:
    right = wanted.double().numpy()
    return float(np.linalg.norm(given - right) / np.linalg.norm(right))


@pytest.mark.parametrize(
    ("kind", "chip", "count"),
    [
        (*QUICK, 6),
        pytest.param(*QUICK, 20, marks=pytest.mark.full),
        pytest.param("qwen2", "bm1688", 20, marks=pytest.mark.full),
        pytest.param("llama", "bm1688", 20, marks=pytest.mark.full),
        pytest.param("qwen2", "bm1684x", 20, marks=pytest.mark.full),
    ],
)
def test_greedy_tokens_are_those_of_transformers(bmodel_of, model_folder, kind, chip, count):
    """The prompt is shorter than the shortest stage. The emulator takes two seconds a token."""
    given = llms.prompt(5)
    tokens, logits = llms.by_transformers(model_folder(kind), given, count)
    made = generate(bmodel_of(kind, chip), given, count, keep_logits=True)
    assert made.tokens == tokens
    assert made.prefilled == 5
    assert made.logits is not None and made.logits.shape == (count, llms.VOCABULARY)
    assert distance(made.logits, logits) < HALF


@pytest.mark.full
@pytest.mark.parametrize("kind", ["mistral", "qwen3"])
def test_a_full_cache_of_the_other_kinds_of_models(bmodel_of, model_folder, kind):
    """Mistral's window is as long as the cache; Qwen3 has norms of queries and keys, and wider heads."""
    given = llms.prompt(llms.CAPACITY - 19)
    tokens, logits = llms.by_transformers(model_folder(kind), given, 20)
    made = generate(bmodel_of(kind, "bm1688"), given, 20, keep_logits=True)
    assert made.tokens == tokens
    assert made.logits is not None and distance(made.logits, logits) < HALF


@pytest.mark.full
@pytest.mark.parametrize("length", [8, 13, 18])
def test_prompts_as_long_as_a_stage_between_two_and_longer_than_all(generator, model_folder, length):
    """What is longer than the longest stage takes a step a token."""
    given = llms.prompt(length)
    tokens, logits = llms.by_transformers(model_folder(QUICK[0]), given, 2)
    made = generator.generate(given, 2, keep_logits=True)
    assert made.tokens == tokens
    assert made.prefilled == min(length, llms.STAGES[-1])
    assert made.logits is not None and distance(made.logits, logits) < HALF


def test_from_bytes_and_with_flags(bmodel_of, model_folder):
    """What another prompt left in the caches is not seen."""
    path = bmodel_of(*QUICK)
    given = llms.prompt(4)
    tokens, _ = llms.by_transformers(model_folder(QUICK[0]), given, 2)
    flags = sail.BmrtFlag.BM_RUNTIME_SHARE_MEM
    assert generate(path, given, 2, flags=flags).tokens == tokens
    generator = Generator(open_engine(path.read_bytes()))
    generator.generate(llms.prompt(10), 1)
    assert generator.generate(given, 2).tokens == tokens


def test_an_end_token_ends_it(generator, model_folder):
    given = llms.prompt(4)
    tokens, _ = llms.by_transformers(model_folder(QUICK[0]), given, 3)
    made = generator.generate(given, 3, eos_token_ids={tokens[0]})
    assert made.tokens == tokens[:1]


@pytest.mark.full
@pytest.mark.parametrize(("quantize", "tolerance"), [("F32", 1e-5), ("BF16", 5e-2), ("W8F16", 5e-2)])
def test_other_numbers(bmodel_of, model_folder, quantize, tolerance):
    """Tolerances by the bits of the weights: float32 none, bfloat16 and int8 about 0.5 % a product."""
    given = llms.prompt(5)
    _, logits = llms.by_transformers(model_folder("llama"), given, 1)
    made = generate(bmodel_of("llama", "bm1688", quantize), given, 1, keep_logits=True)
    assert made.logits is not None and distance(made.logits, logits) < tolerance


def test_all_that_is_needed_stands_in_the_bmodel(generator):
    found = layout.read(generator.engine)
    assert (found.layers, found.lengths, found.capacity) == (2, llms.STAGES, llms.CAPACITY)
    assert (found.hidden, found.heads, found.row, found.vocabulary) == (64, 2, 32, llms.VOCABULARY)
    assert found.dtype == sail.Dtype.BM_FLOAT16
    assert [found.stage_for(count) for count in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, 16]


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ([], 1),
        ([1], 0),
        ([1], 1.0),
        ([1.5], 1),
        (7, 1),
        ([256], 1),
        ([-1], 1),
        (llms.prompt(20), 14),
        (llms.prompt(33), 1),
    ],
)
def test_prompts_that_do_not_fit_are_refused(generator, given, count):
    with pytest.raises(SophgoLlmError):
        generator.generate(given, count)


def test_tokens_of_numpy_and_torch_are_tokens(generator):
    wanted = generator.generate([1, 2], 1).tokens
    assert generator.generate(np.array([1, 2]), 1).tokens == wanted
    assert generator.generate(torch.tensor([1, 2]), 1).tokens == wanted


@pytest.mark.full
def test_a_worker_that_ends_is_an_error_and_a_new_engine_works(fresh, bmodel_of, model_folder):
    path = bmodel_of(*QUICK)
    generator = Generator(open_engine(path))
    generator.engine._model._worker.kill()
    with pytest.raises(SophgoWorkerError) as caught:
        generator.generate(llms.prompt(3), 1)
    assert pickle.loads(pickle.dumps(caught.value)).explanation == caught.value.explanation
    tokens, _ = llms.by_transformers(model_folder(QUICK[0]), llms.prompt(3), 1)
    assert generate(path, llms.prompt(3), 1).tokens == tokens


def test_a_bmodel_that_is_no_language_model_is_refused(toolchain, model_folder, tmp_path):
    model = hf.load(model_folder("llama"), llms.CAPACITY)
    made = compile_onnx(parts.head(model).onnx(tmp_path), name="lm_head", options=BmodelOptions("bm1688"))
    with pytest.raises(SophgoLlmError, match="no net embedding"):
        Generator(open_engine(made))
    with pytest.raises(SophgoLlmError, match="flags"):
        open_engine(made.read_bytes(), flags=1)


# --- what is refused before anything is compiled


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"seq_length": 1}, "seq_length"),
        ({"stages": (16, 8)}, "ascending"),
        ({"stages": (8, 64), "seq_length": 32}, "from 2 to seq_length"),
        ({"jobs": 0}, "jobs"),
        ({"jobs": 1.0}, "whole numbers"),
        ({"seq_length": "512"}, "whole numbers"),
        ({"stages": "8"}, "whole numbers"),
        ({"compiler": BmodelOptions(quantize="INT8")}, "W8F16"),
        ({"compiler": BmodelOptions(dynamic=True)}, "stages"),
    ],
)
def test_wrong_options_name_the_right_ones(wrong, named):
    with pytest.raises(SophgoOptionError, match=named):
        LlmOptions(**wrong)


def test_one_stage_of_the_whole_length_is_the_default():
    assert LlmOptions(seq_length=64).stages == (64,)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_loaded(toolchain, monkeypatch, tmp_path):
    monkeypatch.setattr(hf, "load", None)
    (tmp_path / "file").touch()
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        compile_folder(tmp_path, tmp_path)
    with pytest.raises(OSError):
        compile_folder(tmp_path, tmp_path / "file" / "x.bmodel")
    with pytest.raises(OSError):
        compile_folder(tmp_path, Path("/proc/x.bmodel"))


def test_folders_that_cannot_be_compiled_are_refused(toolchain, model_folder, tmp_path):
    with pytest.raises(ModelFolderError, match=r"config\.json"):
        compile_folder(tmp_path / "none", tmp_path / "out.bmodel")
    with pytest.raises(UnsupportedFeatureError, match="a sequence of 512 tokens with a model of at most 128"):
        compile_folder(model_folder("llama"), tmp_path / "out.bmodel")
    assert not (tmp_path / "out.bmodel").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "mistral", "sliding_window": 31}, "window of 31 over 32 tokens"),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 16,
                "layer_types": ["full_attention", "sliding_attention"],
                "num_hidden_layers": 2,
            },
            "window of 16",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "weights quantised by gptq"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}, "dynamic"),
    ],
)
def test_models_of_other_kinds_are_refused_by_name(tmp_path, changes, named):
    import json

    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UnsupportedFeatureError, match=named):
        hf.load(tmp_path, 32)


def test_code_in_a_folder_is_not_run(tmp_path, monkeypatch):
    """And nobody is asked whether it may."""
    monkeypatch.setattr("builtins.input", lambda *asked: "y")
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(
        f"open({str(ran)!r}, 'w')\nfrom transformers import LlamaConfig as Own\n"
    )
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    with pytest.raises(ModelFolderError, match="contains custom code"):
        hf.load(tmp_path, 32)
    assert not ran.exists()


def test_the_command_says_what_is_wrong(toolchain, tmp_path, capsys):
    told = ["compile", "--engine", "sophgo", "-o", str(tmp_path / "x.bmodel"), str(tmp_path)]
    assert cli.main(told) == 1
    assert "config.json" in capsys.readouterr().err
    assert cli.main([*told, "--chip", "bm9"]) == 1
    assert "bm1684x, bm1688, bm1690" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*told, "--stages", "8,a"])


@pytest.mark.parametrize("package", ["onnx", "onnx_ir", "onnxscript", "transformers"])
def test_without_the_extra_the_command_names_it(tmp_path, capsys, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    told = ["compile", "--engine", "sophgo", "-o", str(tmp_path / "x.bmodel"), str(tmp_path)]
    assert cli.main(told) == 1
    said = capsys.readouterr().err
    assert f"{package} not installed" in said and "pip install 'dlinfer[sophgo]'" in said


@pytest.mark.full
def test_one_layers_copy_is_in_memory_at_a_time(model_folder, monkeypatch, tmp_path):
    """Of a model in 16 bits each net is a copy in float32. Automatic collection is off, as it may be late."""
    monkeypatch.setattr(build, "toolchain", lambda: None)
    monkeypatch.setattr(build, "combine", lambda bmodels, to: None)
    alive: list[weakref.ref] = []
    most = []

    def onnx(part: parts.Part, folder: Path) -> bytes | Path:
        made = written(part, folder)
        alive.extend(weakref.ref(one) for one in part.module.parameters())
        return made

    def compiled(model: bytes, **more) -> Path:
        most.append(sum(one() is not None for one in alive))
        return tmp_path

    written = parts.Part.onnx
    monkeypatch.setattr(parts.Part, "onnx", onnx)
    monkeypatch.setattr(build, "compile_onnx", compiled)
    model = hf.load(model_folder("llama"), llms.CAPACITY).bfloat16()
    monkeypatch.setattr(hf, "load", lambda folder, length: model)
    gc.disable()
    try:
        compile_folder(
            tmp_path, tmp_path / "out" / "x.bmodel", LlmOptions(seq_length=llms.CAPACITY, stages=(8,))
        )
    finally:
        gc.enable()
    assert len(most) == 2 + 2 * 2 + 1 and set(most) == {0}


@pytest.mark.parametrize(
    ("kind", "count"), [*((kind, 6) for kind in hf.MODEL_TYPES), ("mistral", llms.CAPACITY - 1)]
)
def test_the_nets_compute_what_transformers_does(model_folder, kind, count):
    """In torch, without a compiler: a prefill, then one token behind the cache; with Mistral up to its window."""
    folder = model_folder(kind)
    given = llms.prompt(count)
    tokens, logits = llms.by_transformers(folder, given, 2)
    model = hf.load(folder, llms.CAPACITY)
    tables = hf.rotary_tables(model, llms.CAPACITY)
    length = count + 1
    caches = []
    states = parts.embedding(model, length).module(torch.tensor([[*given, 0]]))
    mask = torch.full((length, length), layout.HIDDEN).triu(1)[None, None]
    for index in range(2):
        net = parts.block(model, index, tables, length).module
        states, keys, values = net(states, torch.arange(length)[None], mask)
        past = [torch.zeros(1, llms.CAPACITY, 2, llms.head_size(kind)) for _ in range(2)]
        past[0][:, :count], past[1][:, :count] = keys[:, :count], values[:, :count]
        caches.append(past)
    found = parts.head(model).module(states[:, count - 1 : count])
    torch.testing.assert_close(found[0], logits[:1], rtol=1e-4, atol=1e-5)
    states = parts.embedding(model, 1).module(torch.tensor([[tokens[0]]]))
    mask = torch.full((1, 1, 1, llms.CAPACITY + 1), layout.HIDDEN)
    mask[..., :count] = mask[..., -1] = 0
    for index in range(2):
        net = parts.block_cache(model, index, tables, llms.CAPACITY).module
        states, keys, _ = net(states, torch.tensor([[count]]), mask, *caches[index])
        assert keys.shape == (1, 1, 2, llms.head_size(kind))
    torch.testing.assert_close(parts.head(model).module(states)[0], logits[1:], rtol=1e-4, atol=1e-5)
