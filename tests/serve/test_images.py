"""``image_url`` through the API server, asked by OpenAI's own client."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.harness import Lab
from tests.e2e.vision_chats import CHATS, as_openai
from tests.serve.api_server import ENDED_BY_SIGTERM, MODEL_NAME, ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2000)]

NEW = 12


@pytest.fixture(scope="module")
def model(lab: Lab) -> Path:
    return lab.model("qwen2_vl")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ApiServer]:
    with ApiServer(model, "--eager-mode") as server:
        server.ready()
        yield server
        ending = server.stop()
        assert ending.status == ENDED_BY_SIGTERM, server.output()[-4000:]
        assert not ending.survivors


def test_images_in_data_urls(lab: Lab, model: Path, server: ApiServer):
    """The text of transformers' tokens, for chats with none, one and several images."""
    hf = lab.reference(model, chats=CHATS[:3], max_new_tokens=NEW)
    tokenizer = lab.tokenizer(model)
    for i, chat in enumerate(CHATS[:3]):
        answer = server.client().chat.completions.create(
            model=MODEL_NAME,
            messages=as_openai(chat),  # pyright: ignore[reportArgumentType]
            max_completion_tokens=NEW,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(hf[f"prompt_{i}"])
        assert answer.choices[0].message.content == tokenizer.decode(hf[f"tokens_{i}"].tolist())


@pytest.mark.parametrize("kind", ["video_url", "audio_url"])
def test_what_is_no_image_is_refused_by_name(server: ApiServer, kind: str):
    content = [{"type": kind, kind: {"url": "data:video/mp4;base64,AAAA"}}, {"type": "text", "text": "hello"}]
    with pytest.raises(openai.BadRequestError, match=f"{kind.removesuffix('_url')} input is not supported"):
        server.client().chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "user", "content": content}],  # pyright: ignore[reportArgumentType]
            max_completion_tokens=2,
        )
    assert server.answers()
