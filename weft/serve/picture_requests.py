"""Requests for images, in the form of OpenAI's ``/v1/images/generations``."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator

from weft.serve.protocol import Modelled, shown_json

#: Most steps of an image, and most characters of what it is to be.
MOST_STEPS, LONGEST_PROMPT = 1000, 32_000


def read_picture_prompt(given: Any) -> str:
    """Return what an image is to be as text; a number of a class may come as a number. Raises ValueError for others."""
    if isinstance(given, int) and not isinstance(given, bool):
        return str(given)
    if not isinstance(given, str):
        raise ValueError(
            f"give a text or the number of a class, not {shown_json(given)}"
        )
    if len(given) > LONGEST_PROMPT:
        raise ValueError(
            f"a prompt has at most {LONGEST_PROMPT} characters, not {len(given)}"
        )
    return given


class PictureRequest(Modelled):
    """A request for images. Names are OpenAI's; the fields after ``response_format`` are Weft's own.

    Attributes:
        ``prompt``: name or number of a class; "" or "none": no class in particular.
        ``n``: number of images.
        ``size``: width and height, such as "64x64", which must be those of the model; "auto": those.
        ``response_format``: whether an image comes as base64 or as an URL that holds it.
        ``seed``: seed of the noise; None: another one each time, which the answer tells.
        ``steps``: number of denoising steps.
        ``guidance``: scale of classifier-free guidance; 1: none.
        ``sampler``: name of the sampler.
    """

    IDLE: ClassVar[dict[str, Any]] = {
        "background": "auto", "moderation": "auto", "output_compression": 100, "output_format": "png",
        "partial_images": 0, "quality": "auto", "stream": False, "style": "natural",
    }  # fmt: skip

    prompt: Annotated[str, PlainValidator(read_picture_prompt)]
    n: int = Field(1, ge=1, le=128)
    size: str = Field("auto", max_length=32)
    response_format: Literal["b64_json", "url"] = "b64_json"
    seed: int | None = Field(None, ge=0, lt=2**63)
    steps: int = Field(20, ge=1, le=MOST_STEPS)
    guidance: float = Field(1.0, ge=0, le=1000)
    sampler: str = Field("euler", max_length=64)
