"""The README is short, its programs run, its table says what the tests cover, and what it names is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dlinfer
from dlinfer.framework.lmdeploy_ext.checks.model.support import NOT_SERVED_VISION
from dlinfer.vendor import discovery
from examples.tiny_models.families import FAMILIES, POSITIONAL
from tests.e2e.matrix import BRIEF, ENGINES, MODES, cells

README = Path(__file__).parents[2] / "README.md"
TEXT = README.read_text()

# transformers' name of a family, or ours where it is not transformers' own -> what the README calls it.
CALLED = {
    "internlm2": "InternLM2",
    "internlm3": "InternLM3",
    "phi4_longrope": "Phi-4-mini",
    "deepseek": "DeepSeek",
    "chatglm": "ChatGLM",
    "Llama": "Llama",
    "Qwen2": "Qwen2",
    "Qwen3": "Qwen3",
    "Mixtral": "Mixtral",
    "Qwen2Moe": "Qwen2-MoE",
    "Qwen3Moe": "Qwen3-MoE",
    "Phi3": "Phi-3",
    "Phimoe": "Phi-3.5-MoE",
    "MiniCPM3": "MiniCPM3",
    "Glm4": "GLM-4",
    "Mistral": "Mistral",
    "Gemma": "Gemma",
    "Gemma2": "Gemma 2",
    "Gemma3": "Gemma 3 (text)",
    "DeepseekV2": "DeepSeek-V2",
    "DeepseekV3": "DeepSeek-V3",
    "DeepseekV32": "DeepSeek-V3.2",
    "DeepseekV4": "DeepSeek-V4",
    "GlmMoeDsa": "GLM-5",
    "Glm4MoeLite": "GLM-4.7-Flash",
    "HYV3": "Hy3",
    "Glm4Moe": "GLM-4.5 (MoE)",
    "GptOss": "gpt-oss",
    "Qwen3Next": "Qwen3-Next",
    "Llama4": "Llama 4",
    "Qwen3_5": "Qwen3.5",
    "Qwen3_5Moe": "Qwen3.5-MoE",
    "Kimi_K25": "Kimi-K2.5",
}
REFUSED = {"MiniCPM-V": "MiniCPMV", "Phi-3-Vision": "Phi3VForCausalLM"}


def run(code: str, folder: Path) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=folder, capture_output=True, text=True, timeout=250
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def called(family: str) -> str:
    known = {**FAMILIES, **BRIEF}
    return CALLED.get(family) or CALLED[known[family].hf_name]


def table() -> dict[str, list[str]]:
    """Model -> its row's other cells; a row may hold several models."""
    lines = TEXT.partition("| model | positions |")[2].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: row[1:] for row in rows for name in re.split(r", (?!bf16)", row[0].removesuffix(", bf16"))}


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 120


def test_a_model_becomes_a_file_that_another_process_runs_and_measures(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    [making] = [block for block in blocks if "artifact.save" in block]
    [running] = [block for block in blocks if "dlinfer.load" in block]
    run(making, tmp_path)
    said = run(running, tmp_path)
    assert said.startswith("(3, 64)\nBenchmarkResult(inf_completed=100,")
    assert re.search(r"Number of inferences\s+101\n", said)


def test_the_ops_are_called_and_a_model_compiled_as_it_says(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    [calling] = [block for block in blocks if "rms_norm(" in block]
    [compiling] = [block for block in blocks if "torch.compile(" in block]
    given = "import torch\nmodel, input_ids = torch.nn.Embedding(9, 8).eval(), torch.tensor([[1, 2, 3]])\n"
    assert shown_after(calling) == run(calling, tmp_path)
    assert "Embedding" in run(given + compiling, tmp_path)


def shown_after(block: str) -> str:
    """The output that the README shows below a block."""
    return TEXT.partition(f"```python\n{block}```\n\n```text\n")[2].partition("```")[0]


def test_the_lines_of_explain_are_those_that_it_prints():
    said = str(
        dlinfer.explain(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU()).eval(), torch.ones(1, 4))
    )
    [block] = [
        block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "torch.compile(" in block
    ]
    for line in shown_after(block).splitlines():
        assert line[:19] in said, line


def test_serving_is_the_block_that_the_pages_run():
    [block] = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "pipeline(" in block]
    assert block in (README.parent / "docs/start/serve.md").read_text()


def test_every_page_that_it_links_to_is_there():
    pages = [page for page in re.findall(r"\]\(([^)#]+)\)", TEXT) if not page.startswith("http")]
    assert pages
    assert [page for page in pages if not (README.parent / page).exists()] == []


def test_the_table_has_the_models_of_the_matrix_and_no_other():
    assert table().keys() == {called(family) for family in (*FAMILIES, *BRIEF)}


def test_the_columns_are_the_modes_and_engines_of_the_matrix():
    assert MODES == ("graph", "eager")
    assert ENGINES == ("openvino",)
    assert "| eager | graph (inductor) | graph (openvino) |" in TEXT


@pytest.mark.parametrize("name", sorted(set(CALLED.values())))
def test_a_row_says_where_the_matrix_has_cells(name):
    tested = {(cell.mode, cell.engine) for cell in cells() if called(cell.family) == name}
    _, eager, graph, openvino = table()[name]
    assert (eager == "yes", graph == "yes") == (("eager", "") in tested, ("graph", "") in tested)
    positional = any(called(family) == name for family in BRIEF)
    if ("graph", "openvino") not in tested:
        assert openvino == "not tested"
    elif positional:
        assert openvino.startswith("without ")  # the plain model alone
    else:
        assert openvino == "yes"


@pytest.mark.parametrize("family", POSITIONAL)
def test_a_row_says_which_positions_are_tested(family):
    config = POSITIONAL[family].config
    said = table()[called(family)][0]
    rope = config.get("rope_parameters", {})
    kinds = {rope.get("rope_type")} | {part["rope_type"] for part in rope.values() if isinstance(part, dict)}
    assert [kind for kind in kinds - {None, "default"} if kind not in said] == []
    if config.get("sliding_window"):
        assert "window" in said


def test_bfloat16_is_claimed_where_the_matrix_has_it():
    claimed = set(re.findall(r"^\| ([\w-]+), bf16 \|", TEXT, re.MULTILINE))
    assert claimed == {called(cell.family) for cell in cells() if cell.dtype == "bfloat16"}


def test_what_it_calls_refused_is_refused():
    refused = TEXT.partition("**Refused by name**")[2].partition("\n\n")[0]
    for said, architecture in REFUSED.items():
        assert said in " ".join(refused.split())
        assert architecture in NOT_SERVED_VISION


def test_the_engines_that_it_names_are_those_of_our_vendors():
    named = TEXT.partition("Graph engines are ")[2].partition(":")[0]
    engines = {engine for name in discovery.names() for engine in discovery.get(name).engines}
    assert engines <= set(re.findall(r"\w+", named))
