"""The adaptor under a running engine: what else is in the process, weight layouts, and undoing it all."""

import os
import subprocess
import sys
import textwrap

import pytest

from examples.tiny_models.build import build

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

ENGINE = """
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


def test_weights_in_nn_layout_give_the_same_tokens(model):
    script = "import sys; print(generate(sys.argv[1]))"
    assert run(script, model) == run(script, model, DLINFER_LINEAR_USE_NN_LAYOUT="1")


def test_every_op_runs_on_a_kernel_of_the_cpu_vendor(model):
    script = "import sys; print(len(generate(sys.argv[1])))"
    assert run(script, model, DLINFER_FALLBACK="error") == "2"


def test_the_reference_vendor_can_be_put_under_lmdeploy(model):
    script = "import sys; print(generate(sys.argv[1]))"
    assert run(script, model, DLINFER_VENDOR="reference") == run(script, model)


def test_the_patches_can_be_undone(model):
    script = """
        import sys
        import lmdeploy.pytorch.engine.engine
        from lmdeploy.messages import PytorchEngineConfig
        from dlinfer.framework.lmdeploy_ext import install

        generate(sys.argv[1])
        install.deactivate()
        assert install.patches().applied == ()
        from lmdeploy.pytorch.engine.model_agent import agent
        import torch
        assert agent.torch is torch
        try:
            PytorchEngineConfig(device_type="cpu")
        except AssertionError as error:
            print(error)
    """
    assert run(script, model) == "invalid device_type: cpu"
