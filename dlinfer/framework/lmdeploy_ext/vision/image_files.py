"""Read image files: apply the orientation in their EXIF data, and refuse damaged files.

LMDeploy 0.18 shows the missing rest of a truncated file as grey. LMDeploy also ignores the orientation, though
transformers and vLLM apply it.
"""

from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original


def read(data: bytes, mode: str) -> Image.Image:
    """Decode the bytes of an image file, and return the image in its right orientation. mode: pillow's, such as "RGB".

    Raises ValueError with the reason if the file cannot be read.
    """
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # LMDeploy sets it, for the whole process
    try:
        with Image.open(BytesIO(data)) as image:
            image.load()
            return ImageOps.exif_transpose(image).convert(mode)
    except UnidentifiedImageError:
        reason = f"its {len(data)} bytes are not in a known image format"
        raise ValueError(f"The image cannot be read: {reason}.") from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError: a broken PNG
        raise ValueError(f"The image cannot be read: {error}.") from error


_UNREAD = "serves a truncated image with its missing part in grey, and ignores its orientation"


@corrects("lmdeploy.vl.media.image:ImageMediaIO.load_bytes", why=_UNREAD)
def load_bytes(original: Original, self: Any, data: bytes) -> Any:
    return read(data, self.image_mode)


@corrects("lmdeploy.vl.media.image:ImageMediaIO.load_file", why=_UNREAD)
def load_file(original: Original, self: Any, file_path: Path) -> Any:
    return read(Path(file_path).read_bytes(), self.image_mode)


@corrects(
    "lmdeploy.serve.processors.multimodal:MultimodalProcessor._parse_multimodal_item",
    why="ignores the orientation of images that the caller has opened",
    signature="(i, in_messages, out_messages, media_io_kwargs, allowed_media_domains=None)",
)
def parse_item(
    original: Original, i: int, in_messages: Any, out_messages: Any, *rest: Any, **options: Any
) -> None:
    original(i, in_messages, out_messages, *rest, **options)
    content = out_messages[i].get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("data"), Image.Image):
            part["data"] = ImageOps.exif_transpose(part["data"])
