"""Chats with pictures that are drawn here, in the words of both sides."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

Chat = list[dict[str, Any]]


def picture(seed: int, width: int, height: int) -> str:
    """A data URL of a PNG: noise over a slope, so that no two patches are alike."""
    draw = np.random.default_rng(seed)
    slope = np.linspace(0, 120, width * height * 3).reshape(height, width, 3)
    pixels = (slope + draw.integers(0, 136, (height, width, 3))).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def chat(*parts: str) -> Chat:
    """One message of texts and of data URLs of pictures; text alone is a string, as users write it."""
    if len(parts) == 1 and not parts[0].startswith("data:"):
        return [{"role": "user", "content": parts[0]}]
    content = [
        {"type": "image", "url": part} if part.startswith("data:") else {"type": "text", "text": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def as_openai(chat: Chat) -> Chat:
    """The chat as OpenAI's API, and LMDeploy's pipeline, have it."""
    messages = []
    for message in chat:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                {"type": "image_url", "image_url": {"url": part["url"]}} if part["type"] == "image" else part
                for part in content
            ]
        messages.append(message | {"content": content})
    return messages


def one_image(chat: Chat) -> Chat:
    """The chat with the last picture of its message alone: all that CogVLM was made for."""
    messages = []
    for message in chat:
        content = message["content"]
        if not isinstance(content, str):
            last = [part for part in content if part["type"] == "image"][-1]
            content = [part for part in content if part["type"] == "text" or part is last]
        messages.append(message | {"content": content})
    return messages


WIDE, TALL, SMALL = picture(1, 72, 40), picture(2, 40, 88), picture(3, 32, 32)

# Text alone, one picture, several, and pictures of three sizes: all in one batch.
CHATS = [
    chat("the quick brown fox jumps over the lazy dog"),
    chat(WIDE, "what is the capital of the smallest country"),
    chat("hello world", TALL, "and how far is it from here?", SMALL, "please introduce yourself"),
    chat(SMALL, "large language models"),
    chat("many users from one cache of keys and values, in one short paragraph"),
    chat(WIDE, TALL, SMALL, "many users"),
]
