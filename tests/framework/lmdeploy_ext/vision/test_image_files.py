"""Image files: upright by their EXIF data, and an error with its reason where they are damaged."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmdeploy import PytorchEngineConfig
from lmdeploy.serve.processors.multimodal import MultimodalProcessor
from lmdeploy.vl.media.image import ImageMediaIO
from PIL import Image, ImageFile
from transformers.image_utils import load_image


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)  # as LMDeploy sets it
    PytorchEngineConfig(device_type="cpu")


def picture() -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 255, (24, 40, 3), dtype=np.uint8))


def encoded(form: str, orientation: int = 1) -> bytes:
    exif = Image.Exif()
    exif[0x112] = orientation
    out = io.BytesIO()
    picture().save(out, form, exif=exif)
    return out.getvalue()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_transformers(form: str, orientation: int, tmp_path: Path):
    file = tmp_path / f"image.{form.lower()}"
    file.write_bytes(encoded(form, orientation))
    expected = np.asarray(load_image(str(file)))
    assert np.array_equal(np.asarray(ImageMediaIO().load_file(file)), expected)
    assert np.array_equal(np.asarray(ImageMediaIO().load_bytes(file.read_bytes())), expected)


@pytest.mark.parametrize("orientation", [3, 6])
def test_an_image_that_the_caller_opened(orientation: int):
    image = Image.open(io.BytesIO(encoded("JPEG", orientation)))
    part = {"type": "image_data", "image_data": {"data": image}}
    out: list[Any] = [None]
    MultimodalProcessor._parse_multimodal_item(0, [{"role": "user", "content": [part]}], out, {})
    found = out[0]["content"][0]["data"]
    assert np.array_equal(np.asarray(found.convert("RGB")), np.asarray(load_image(image)))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("kept", [0.4, 0.95])
def test_half_an_image_is_an_error(form: str, kept: float):
    """LMDeploy 0.18 itself serves what there is, and grey for the rest."""
    data = encoded(form)
    with pytest.raises(ValueError, match="The image cannot be read"):
        ImageMediaIO().load_bytes(data[: int(len(data) * kept)])


def test_what_is_no_image():
    with pytest.raises(ValueError, match="5 bytes are not in a known image format"):
        ImageMediaIO().load_bytes(b"hello")


def test_an_image_that_is_too_large(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match="decompression bomb"):
        ImageMediaIO().load_bytes(encoded("PNG"))
