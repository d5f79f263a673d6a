"""Images as they are meant: turned as their EXIF data says, and refused where the file is damaged.

LMDeploy 0.18 reads what there is of a truncated file, and leaves the rest grey; it ignores EXIF's orientation, which
transformers and vLLM apply.
"""

import functools
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.versions import FAULTY
from dlinfer.framework.patching import Patch


def read(data: bytes, mode: str) -> Image.Image:
    """Decode an image file. Raises ValueError with the reason where that fails."""
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # LMDeploy sets it, for the whole process
    try:
        with Image.open(BytesIO(data)) as image:
            image.load()
            return upright(image).convert(mode)
    except UnidentifiedImageError:
        raise ValueError(
            f"The image cannot be read: {len(data)} bytes of no image format that is known."
        ) from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError: a broken PNG
        raise ValueError(f"The image cannot be read: {error}.") from error


def upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF data says."""
    return ImageOps.exif_transpose(image)


def _load_bytes(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_bytes(self: Any, data: bytes) -> Any:
        return original(self, data) if activation.active() is None else read(data, self.image_mode)

    return load_bytes


def _load_file(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_file(self: Any, file_path: Path) -> Any:
        if activation.active() is None:
            return original(self, file_path)
        return read(Path(file_path).read_bytes(), self.image_mode)

    return load_file


def _parse_item(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _parse_multimodal_item(
        i: int, in_messages: Any, out_messages: Any, media_io_kwargs: Any, allowed_media_domains: Any = None
    ) -> None:
        original(i, in_messages, out_messages, media_io_kwargs, allowed_media_domains)
        content = out_messages[i].get("content") if activation.active() is not None else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and isinstance(part.get("data"), Image.Image):
                part["data"] = upright(part["data"])

    return _parse_multimodal_item


PATCHES = (
    Patch(
        target="lmdeploy.vl.media.image:ImageMediaIO.load_bytes",
        why="serves the half of a truncated image, and ignores its orientation",
        signature="(self, data)",
        build=_load_bytes,
        versions=FAULTY,
    ),
    Patch(
        target="lmdeploy.vl.media.image:ImageMediaIO.load_file",
        why="serves the half of a truncated image, and ignores its orientation",
        signature="(self, file_path)",
        build=_load_file,
        versions=FAULTY,
    ),
    Patch(
        target="lmdeploy.serve.processors.multimodal:MultimodalProcessor._parse_multimodal_item",
        why="ignores the orientation of images that a caller has opened",
        signature="(i, in_messages, out_messages, media_io_kwargs, allowed_media_domains=None)",
        build=_parse_item,
        versions=FAULTY,
    ),
)
