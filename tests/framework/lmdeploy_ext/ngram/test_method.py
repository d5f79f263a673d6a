"""LMDeploy takes the method ngram without a model and a cache, and refuses what it does not serve."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from lmdeploy import PytorchEngineConfig
from lmdeploy.cli.utils import ArgumentHelper, FlexibleArgumentParser, get_speculative_config
from lmdeploy.messages import SpeculativeConfig
from lmdeploy.pytorch.config import DistConfig, ModelConfig
from lmdeploy.pytorch.engine.config_builder import ConfigBuilder

from dlinfer import settings
from dlinfer.errors import SettingError, UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.ngram import method


def test_ngram_needs_no_model_and_no_cache():
    config = PytorchEngineConfig(device_type="cpu", max_batch_size=4, adapters={"a": "hub/a"})
    asked = SpeculativeConfig(method="ngram", num_speculative_tokens=6)
    cache, ranks = ConfigBuilder.build_cache_config(config), DistConfig()
    made = ConfigBuilder.build_specdecode_config("path", asked, config, cache, ranks)
    assert made.method == "ngram" and made.num_speculative_tokens == 6
    assert made.model_config is None and made.cache_config is None
    assert made.dist_config is ranks


def test_ngram_with_bounds_that_contradict_each_other():
    config = PytorchEngineConfig(device_type="cpu", max_batch_size=4)
    asked = SpeculativeConfig(method="ngram", num_speculative_tokens=6)
    cache = ConfigBuilder.build_cache_config(config)
    with (
        settings.override(prompt_lookup_min=4, prompt_lookup_max=3),
        pytest.raises(SettingError, match=r"DLINFER_PROMPT_LOOKUP_MIN='4'.*DLINFER_PROMPT_LOOKUP_MAX, 3"),
    ):
        ConfigBuilder.build_specdecode_config("path", asked, config, cache, DistConfig())


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("Qwen3Next", {}, "'ngram' with Qwen3NextForCausalLM, whose layers keep states"),
        (
            "Qwen2",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope type 'dynamic'",
        ),
    ],
)
def test_ngram_with_models_that_cannot_take_a_token_back(family, fields, words):
    PytorchEngineConfig(device_type="cpu")
    hf_config = getattr(transformers, f"{family}Config")(architectures=[f"{family}ForCausalLM"], **fields)
    with pytest.raises(UnsupportedFeatureError, match=re.escape(words)):
        ModelConfig.from_hf_config(hf_config, device_type="cpu", spec_method="ngram", num_spec_tokens=3)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "DeepseekV2"])
def test_ngram_leaves_the_model_as_it_is(family):
    PytorchEngineConfig(device_type="cpu")
    of_class = getattr(transformers, f"{family}Config")
    plain, looked_up = (
        ModelConfig.from_hf_config(
            of_class(architectures=[f"{family}ForCausalLM"]), dtype="float32", device_type="cpu", **options
        )
        for options in ({}, {"spec_method": "ngram", "num_spec_tokens": 3})
    )
    assert looked_up.model_paradigm == plain.model_paradigm == "ar"
    assert looked_up.hf_config.to_dict() == plain.hf_config.to_dict()


def test_ngram_on_the_command_line():
    parser = FlexibleArgumentParser()
    ArgumentHelper.add_spec_group(parser)
    arguments = ["--speculative-algorithm", "ngram", "--speculative-num-draft-tokens", "4"]
    made = get_speculative_config(parser.parse_args(arguments))
    assert made is not None
    assert (made.method, made.model, made.num_speculative_tokens) == ("ngram", None, 4)


@pytest.mark.parametrize("searches", [True, False])
def test_metrics_count_the_drafts_that_a_step_has_verified(searches: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(activation, "_active", "cpu")
    told = {"num_draft_tokens": 3, "num_accepted_tokens": 1}
    # Of a sequence that was just prefilled LMDeploy tells nothing.
    infos = {1: dict(told), 2: dict(told), 3: None}

    def outputs(*arguments: object) -> dict[int, SimpleNamespace]:
        return {
            session: SimpleNamespace(req_metrics=SimpleNamespace(spec_info=info))
            for session, info in infos.items()
        }

    strategy = SimpleNamespace(searches_texts=True) if searches else SimpleNamespace()
    loop = SimpleNamespace(
        config=SimpleNamespace(enable_metrics=True), inputs_maker=SimpleNamespace(engine_strategy=strategy)
    )
    tails = {1: [5, 6, 7, 8, -1], 2: [5, 6, -1, -1, -1], 3: [5, 6]}
    running = [
        SimpleNamespace(session_id=session, history_cache=np.array(tokens), num_valid_ids=2)
        for session, tokens in tails.items()
    ]
    result = method._outputs.build(outputs)(loop, None, running, None, None)
    counted = {session: output.req_metrics.spec_info for session, output in result.items()}
    assert counted == (
        {1: {"num_draft_tokens": 2, "num_accepted_tokens": 1}, 2: None, 3: None} if searches else infos
    )
