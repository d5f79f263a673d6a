"""What is put right in LMDeploy's CogVLM and GLM-4V: positions, whose expert takes which token, and the prompt."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy import PytorchEngineConfig
from lmdeploy.model import CogVLM
from lmdeploy.pytorch.models.cogvlm import CogVLMForCausalLM
from lmdeploy.vl.model.cogvlm import CogVLMVisionModel
from lmdeploy.vl.model.glm4_v import GLM4VisionModel

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.request.media import check_one_image
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.models import cogvlm
from dlinfer.framework.lmdeploy_ext.faults.models.one_position import of_images
from dlinfer.framework.lmdeploy_ext.vision.parts import PARTS, of_model

MODEL: Any = SimpleNamespace(config=SimpleNamespace(vision_config={}))


@pytest.fixture(autouse=True)
def on_our_device():
    PytorchEngineConfig(device_type="cpu")


def step(*sequences: tuple[int, int, list[tuple[int, int]]], metas: Any = None) -> Any:
    """(history, new tokens, (begin, end) of images in the sequence) of each sequence of a prefill."""
    histories, lengths = (torch.tensor([one[i] for one in sequences]) for i in (0, 1))
    positions = torch.cat([torch.arange(h, h + n) for h, n, _ in sequences])
    images = [
        [SimpleNamespace(start=b, end=e, data=torch.full((3, 2, 2), float(b))) for b, e in one[2]]
        for one in sequences
    ]
    return SimpleNamespace(
        input_ids=torch.zeros(1, len(positions), dtype=torch.int64),
        position_ids=positions[None],
        q_seqlens=lengths,
        kv_seqlens=histories + lengths,
        q_start_loc=lengths.cumsum(0) - lengths,
        input_multimodals=[{"image": one} for one in images] if any(images) else None,
        model_metas=metas,
        attn_metadata="metadata",
    )


def positions_of(context: Any) -> tuple[list[int], list[dict[int, int]]]:
    """(positions, for each sequence: where an image ends -> by how much later positions are less)."""
    metas: Any = CogVLMForCausalLM.update_model_metas(MODEL, [], context=context)
    return context.position_ids[0].tolist(), [meta["images"] for meta in metas]


def test_pieces_of_an_image_share_a_position():
    # A text of 3, and one whose image of 6 tokens begins behind the first token.
    positions, images = positions_of(step((0, 3, []), (0, 9, [(1, 7)])))
    assert positions == [0, 1, 2, 0, 1, 2, 2, 2, 2, 3, 4, 5]
    assert images == [{}, {7: 3}]


def test_later_steps_go_on_behind_the_image():
    metas = [{"images": {}}, {"images": {7: 3}}, None]
    positions, images = positions_of(step((3, 1, []), (9, 1, []), (5, 2, []), metas=metas))
    assert positions == [3, 6, 5, 6]
    assert images == [{}, {7: 3}, {}]


def test_a_chunk_may_begin_before_the_image():
    positions, images = positions_of(step((4, 8, [(5, 10)]), metas=[{"images": {}}]))
    assert positions == [4, 5, 6, 6, 6, 7, 8, 9]
    assert images == [{10: 2}]


@pytest.mark.parametrize("shared", [0, 2])
def test_an_evicted_sequence_counts_its_image_once(shared: int):
    """It is computed again, from its beginning or behind blocks of text that other sequences share."""
    again = step((shared, 12 - shared, [(4, 10)]), metas=[{"images": {10: 3}}])
    positions, images = positions_of(again)
    assert positions == [0, 1, 2, 3, 4, 5, 5, 5, 5, 6, 7, 8][shared:]
    assert images == [{10: 3}]


def test_the_closing_token_is_text_to_the_experts():
    context = step((0, 3, []), (0, 9, [(1, 7)]), (2, 6, [(3, 7)]))
    made: Any = CogVLMForCausalLM.prepare_inputs_for_generation(MODEL, [], context=context)
    assert made["vision_ids"].tolist() == [4, 5, 6, 7, 8, 13, 14, 15]
    assert made["lang_ids"].tolist() == [0, 1, 2, 3, 9, 10, 11, 12, 16, 17]
    assert made["images"].flatten(1)[:, 0].tolist() == [1.0, 3.0]


def test_padding_in_a_text_is_no_image():
    made = CogVLMForCausalLM.prepare_inputs_for_generation(MODEL, [], context=step((0, 3, [])))
    assert made["vision_ids"] is None and made["images"] is None


def prompt_of(*messages: dict[str, Any]) -> str:
    return CogVLMVisionModel.proc_messages(list(messages), SimpleNamespace())[0]


def test_a_message_keeps_all_its_texts():
    content = [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}]
    assert prompt_of({"role": "user", "content": content}) == "<IMAGE_TOKEN>Question: one\ntwo Answer:"


def test_a_template_that_the_user_chose_is_used():
    content = [{"type": "image"}, {"type": "text", "text": "who"}]
    chosen = CogVLM(user="Q: ", assistant="A:")
    prompt, _ = CogVLMVisionModel.proc_messages([{"role": "user", "content": content}], chosen)
    assert prompt == "<IMAGE_TOKEN>Q: who A:"


def test_other_devices_get_the_pixels():
    """Where dlinfer serves no device, LMDeploy's own forward is called with all that it was given."""
    seen: list[Any] = []
    patched = cogvlm.forward.build(lambda self, *args: seen.extend(args) or torch.zeros(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation, "_active", None)
        patched(None, *range(8))
    assert seen == list(range(8))


def test_an_image_stands_before_the_conversation():
    """As the authors' own code puts it, whichever message it came with."""
    asked = {"role": "user", "content": "who"}
    told = {"role": "assistant", "content": "me"}
    seen = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and here"}]}
    text = prompt_of(asked, told, seen)
    assert text.startswith("<IMAGE_TOKEN>Question: who Answer:") and text.endswith(
        "Question: and here Answer:"
    )
    assert text.count("<IMAGE_TOKEN>") == 1


def test_a_second_image_is_refused():
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    once = [{"role": "user", "content": [image, {"type": "text", "text": "one"}]}]
    check_one_image(once, "CogVLM")
    with pytest.raises(UnsupportedFeatureError, match="more than one image in a conversation with CogVLM"):
        check_one_image(once * 2, "CogVLM")


def test_every_token_of_an_image_is_one_in_glm_4v():
    """There, features stand in the place of all of them, and one set of weights takes all."""
    context = step((0, 3, []), (2, 6, [(3, 7)]))
    assert of_images(context, closing=True).nonzero().flatten().tolist() == [4, 5, 6, 7]


def test_a_chatglm_without_images_has_no_parts():
    chatglm: Any = type("ChatGLMForConditionalGeneration", (torch.nn.Module,), {})()
    transformer: Any = torch.nn.Module()
    chatglm.transformer, transformer.vision = transformer, None
    assert of_model(chatglm) is None
    transformer.vision = torch.nn.Linear(1, 1)
    assert of_model(chatglm) is PARTS["ChatGLMForConditionalGeneration"]


def test_glm_4v_keeps_all_texts_of_a_message():
    content = [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}]
    template = SimpleNamespace(messages2prompt=lambda messages, **_: messages[0]["content"])
    prompt, _ = GLM4VisionModel.proc_messages([{"role": "user", "content": content}], template)
    assert prompt == "<IMAGE_TOKEN>\none\ntwo"
