"""Images through LMDeploy: tokens equal transformers', in eager and in graph mode, beside requests of text alone.

Pixels are compared exactly: both sides run transformers' processor on pillow and numpy.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlinfer.framework.lmdeploy_ext.faults.models.image_prompts import has_torchvision
from examples.tiny_models.vision_families import VISION, VISION_ELSEWHERE
from tests.e2e.cell_checks import FP32_DECISIVE
from tests.e2e.harness import EngineRun, Lab
from tests.e2e.matrix import STRICT
from tests.e2e.vision_chats import CHATS, Chat, as_openai, one_image

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

NEW = 24
STEPS = ("batch", "one by one", "staggered")
CONFIGS: dict[str, dict[str, Any]] = {
    "base": {},
    "chunked": {"max_prefill_token_num": 48},
    "prefix": {"enable_prefix_caching": True, "block_size": 16, "prefix_cache_state_budget": 32},
}
# An image of CogVLM's takes 1227 tokens, one of LLaVA-NeXT's up to 336, and is not cut.
LONG: dict[str, dict[str, dict[str, Any]]] = {
    family: {name: {"session_len": 2048} for name in ("base", "prefix")}
    | {"chunked": {"session_len": 2048, "max_prefill_token_num": chunk}}
    for family, chunk in {"cogvlm": 1236, "llava_next": 340}.items()
}
# LMDeploy caches prefixes of images where transformers' processor expands the text; of others it says so, and does not.
SHARES_IMAGES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni", "glm4v", "kimi_k25")
# Their states are kept at the ends of prompts, and of chunks, whose sizes depend on the time that steps take.
CONTINUES_IMAGES = ("qwen3_5", "qwen3_5_moe", "interns2_preview")
# transformers has their image processor for torchvision alone.
OF_TORCHVISION = ("llama4",)
PHASES = ["decoding", "logits", "prefill", "vision"]


def chats_of(family: str) -> list[Chat]:
    return [one_image(chat) for chat in CHATS] if family in VISION_ELSEWHERE else CHATS


def ask(
    lab: Lab, family: str, mode: str, config: str, model: Path | None = None
) -> tuple[EngineRun, dict[str, np.ndarray]]:
    """LMDeploy's answers, and transformers'. model: in place of the family's own."""
    model = model or lab.model(family)
    chats = chats_of(family)
    hf = lab.reference(model, chats=chats, max_new_tokens=NEW)
    asked = [as_openai(chat) for chat in chats]
    many = {"prompts": asked, "chat": True, "gen": {"max_new_tokens": NEW, "ignore_eos": True}}
    with_images = [chat for i, chat in enumerate(asked) if f"pixels_{i}" in hf]
    steps: list[dict[str, Any]] = [
        {"name": "batch", "kind": "call", **many},
        {"name": "one by one", "kind": "one_by_one", **many},
        {"name": "staggered", "kind": "staggered", "after": 3, **many},
        {"name": "pixels", "kind": "pixels", "prompts": with_images},
    ]
    options = CONFIGS[config] | LONG.get(family, {}).get(config, {})
    run = lab.engine(model, steps, environment=STRICT, eager_mode=mode == "eager", **options)
    return run, hf


def check(family: str, mode: str, config: str, run: EngineRun, hf: dict[str, np.ndarray]) -> None:
    count = len(CHATS)
    assert min(float(hf[f"gap_{i}"].min()) for i in range(count)) > FP32_DECISIVE, "choose another seed"
    for step in STEPS:
        lengths = [response["input_token_len"] for response in run[step]]
        assert lengths == [len(hf[f"prompt_{i}"]) for i in range(count)], step
        assert run.tokens(step) == [hf[f"tokens_{i}"].tolist() for i in range(count)], step
    pixels = [hf[f"pixels_{i}"] for i in range(count) if f"pixels_{i}" in hf]
    for i, expected in enumerate(pixels):
        np.testing.assert_array_equal(run.logits[f"pixels/{i}"], expected)
    assert len(pixels) == len(run["pixels"]) == 4
    graphs = run["graphs"]
    assert sorted(phase for phase, _, _ in graphs["phases"]) == (PHASES if mode == "graph" else [])
    assert graphs["late"] == 0, "an image was compiled for while requests ran"
    assert all(graph["coverage"] == 1.0 for graph in run["explained"])
    if config == "prefix" and family not in CONTINUES_IMAGES:
        cached = max(response["cached_tokens"] for response in run["one by one"])
        assert (cached > 0) is (family in SHARES_IMAGES)


def test_images_in_eager_mode(lab: Lab) -> None:
    """One of several sizes beside texts, in the quick lane."""
    check("qwen2_vl", "eager", "base", *ask(lab, "qwen2_vl", "eager", "base"))


@pytest.mark.full
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("family", [*VISION, *VISION_ELSEWHERE])
def test_images(lab: Lab, family: str, mode: str, config: str) -> None:
    if family in OF_TORCHVISION and not has_torchvision():
        pytest.skip("torchvision is not installed")
    check(family, mode, config, *ask(lab, family, mode, config))


@pytest.mark.full
@pytest.mark.parametrize("family", [*SHARES_IMAGES, *CONTINUES_IMAGES])
def test_one_image_twice_is_seen_in_the_prefix_cache(lab: Lab, family: str) -> None:
    """The same text with another image must not find the first one's blocks and states."""
    model = lab.model(family)
    image, other = (CHATS[i][0]["content"] for i in (1, 3))
    more: Chat = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "many users"}]
    first, second = ([{"role": "user", "content": [part, image[1]]}] for part in (image[0], other[0]))
    chats = [first, second, first + more, second + more]
    hf = lab.reference(model, chats=chats, max_new_tokens=NEW)
    asked = {"prompts": [as_openai(chat) for chat in chats], "chat": True}
    step = {"name": "s", "kind": "one_by_one", "gen": {"max_new_tokens": NEW, "ignore_eos": True}, **asked}
    run = lab.engine(model, [step], environment=STRICT, eager_mode=True, **CONFIGS["prefix"])
    assert run.tokens("s") == [hf[f"tokens_{i}"].tolist() for i in range(len(chats))]
    cached = [response["cached_tokens"] for response in run["s"]]
    assert cached[0] == cached[1] == 0
    assert min(cached[2:]) > 0
