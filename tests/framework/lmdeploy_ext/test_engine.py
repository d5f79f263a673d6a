"""The adaptor under a running engine: what else is in the process, weight layouts, and undoing it all."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from examples.tiny_models.build import build

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

ENGINE = """
    import json
    from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline

    def generate(path, **options):
        config = PytorchEngineConfig(device_type="cpu", dtype="float32", cache_max_entry_count=0.01, **options)
        with pipeline(path, backend_config=config) as pipe:
            greedy = GenerationConfig(max_new_tokens=12, do_sample=False, ignore_eos=True)
            return [r.token_ids for r in pipe(["hello world", "the quick"], gen_config=greedy, do_preprocess=False)]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "llama"
    build("llama", path, seed=0, dtype="float32")
    return path


def run(script, *arguments, **variables):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ENGINE) + textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.full
def test_transformers_in_the_same_process_gives_the_same_results_before_and_after(model):
    script = """
        import sys
        import torch
        from transformers import AutoModelForCausalLM

        def logits():
            model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
            return model(torch.arange(3, 60)[None]).logits.detach()

        before = logits()
        config = PytorchEngineConfig(device_type="cpu")
        between = logits()
        tokens = generate(sys.argv[1])
        print(torch.equal(before, between) and torch.equal(before, logits()) and len(tokens) == 2)
    """
    assert run(script, model) == "True"


@pytest.mark.full
def test_weights_in_nn_layout_give_the_same_tokens(model):
    """The setting is looked for in the weights themselves, as the model that ignores it gives the same tokens."""
    script = """
        import sys
        from dlinfer.framework.lmdeploy_ext.running import graph_runner

        shapes = []
        built = graph_runner.CompiledRunner.__init__
        def noted(self, model, *args, **kwargs):
            built(self, model, *args, **kwargs)
            name, weight = next((n, w) for n, w in model.named_parameters() if n.endswith("gate_up_proj.weight"))
            shapes.append(tuple(weight.shape))
        graph_runner.CompiledRunner.__init__ = noted
        print(json.dumps([generate(sys.argv[1]), shapes[0]]))
    """
    tokens, (outputs, inputs) = json.loads(run(script, model))
    transposed = json.loads(run(script, model, DLINFER_LINEAR_USE_NN_LAYOUT="1"))
    assert outputs != inputs
    assert transposed == [tokens, [inputs, outputs]]


@pytest.mark.full
def test_the_reference_vendor_can_be_put_under_lmdeploy(model):
    """Eagerly, where each op is a call: its calls are counted in the table of the vendor that is named."""
    script = """
        import sys
        from dlinfer.ops.core import kernels
        from dlinfer.vendor import discovery

        PytorchEngineConfig(device_type="cpu")
        calls = []
        table = kernels._tables["cpu"]
        kernel = table["paged_decode_attention"]
        def counted(*args):
            calls.append(1)
            return kernel(*args)
        table["paged_decode_attention"] = counted
        tokens = generate(sys.argv[1], eager_mode=True)
        print(json.dumps([discovery.active("cpu").name, len(calls), tokens]))
    """
    vendor, calls, tokens = json.loads(run(script, model))
    reference = json.loads(run(script, model, DLINFER_VENDOR="reference"))
    assert vendor == "cpu"
    assert calls > 0
    assert reference == ["reference", calls, tokens]


ROUTED_EXPERTS = """
    import sys

    def experts(wanted):
        config = PytorchEngineConfig(device_type="cpu", cache_max_entry_count=0.01, enable_return_routed_experts=wanted)
        with pipeline(sys.argv[1], backend_config=config) as pipe:
            gen = GenerationConfig(max_new_tokens=4, ignore_eos=True, return_routed_experts=wanted)
            found = pipe("hello world", gen_config=gen, do_preprocess=False).routed_experts
            return None if found is None else list(found.shape)

    print(json.dumps([experts(False), experts(True), experts(False)]))
"""


@pytest.mark.full
def test_a_graph_stored_without_routed_experts_is_not_run_with_them(tmp_path):
    """LMDeploy builds the option into the model, and its forward then gives two tensors."""
    model = tmp_path / "qwen3_moe"
    build("qwen3_moe", model, seed=0, dtype="float32")
    found = json.loads(run(ROUTED_EXPERTS, model, DLINFER_CACHE_DIR=str(tmp_path / "cache")))
    tokens, layers, chosen = 2 + 4 - 1, 2, 2  # the last token was never an input
    assert found == [None, [tokens, layers, chosen], None]


@pytest.mark.full
def test_the_patches_can_be_undone(model):
    script = """
        import sys
        import lmdeploy.pytorch.engine.engine
        from lmdeploy.messages import PytorchEngineConfig
        from dlinfer.framework.lmdeploy_ext.device import activation

        generate(sys.argv[1])
        activation.patches().revert()
        assert activation.patches().applied == ()
        try:
            PytorchEngineConfig(device_type="cpu")
        except AssertionError as error:
            print(error)
    """
    assert run(script, model) == "invalid device_type: cpu"


@pytest.mark.full
def test_reports_of_an_engine_end_with_it(model):
    script = """
        import gc
        import sys

        found = []
        for _ in range(2):
            config = PytorchEngineConfig(device_type="cpu", dtype="float32", session_len=64)
            with pipeline(sys.argv[1], backend_config=config) as pipe:
                from dlinfer.framework.lmdeploy_ext.running import graph_runner

                found.append(len(graph_runner.counts()))
            del pipe
            gc.collect()
            found.append(len(graph_runner.counts()))
        print(found)
    """
    assert run(script, model) == "[1, 0, 1, 0]"
