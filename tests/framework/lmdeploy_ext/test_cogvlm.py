"""What is put right in LMDeploy's CogVLM: positions, whose expert takes which token, and the prompt."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.models.cogvlm import CogVLMForCausalLM
from lmdeploy.vl.model.cogvlm import CogVLMVisionModel

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.refusals.media import check_one_image

MODEL: Any = SimpleNamespace()


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


def positions_of(context: Any) -> tuple[list[int], list[int]]:
    metas = CogVLMForCausalLM.update_model_metas(MODEL, [], context=context)
    return context.position_ids[0].tolist(), [meta["num_img_tokens"] for meta in metas]


def test_pieces_of_an_image_share_a_position():
    # A text of 3, and one whose image of 6 tokens begins behind the first token.
    positions, behind = positions_of(step((0, 3, []), (0, 9, [(1, 7)])))
    assert positions == [0, 1, 2, 0, 1, 2, 2, 2, 2, 3, 4, 5]
    assert behind == [0, 3]


def test_later_steps_go_on_behind_the_image():
    metas = [{"num_img_tokens": 0}, {"num_img_tokens": 3}, None]
    assert positions_of(step((3, 1, []), (9, 1, []), (5, 2, []), metas=metas)) == ([3, 6, 5, 6], [0, 3, 0])


def test_a_chunk_may_begin_before_the_image():
    positions, behind = positions_of(step((4, 8, [(5, 10)]), metas=[{"num_img_tokens": 0}]))
    assert positions == [4, 5, 6, 6, 6, 7, 8, 9]
    assert behind == [2]


def test_an_evicted_sequence_counts_its_image_once():
    _, behind = positions_of(step((0, 9, [(1, 7)]), metas=[{"num_img_tokens": 3}]))
    assert behind == [3]


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
    check_one_image(once)
    with pytest.raises(UnsupportedFeatureError, match="more than one image"):
        check_one_image(once * 2)
