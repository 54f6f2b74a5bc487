"""Requests for images, in the form of OpenAI's ``/v1/images/generations``."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator

from weft.serve.protocol import Modelled, shown_json

#: Most steps of an image, and most characters of what it is to be.
MOST_STEPS, LONGEST_PROMPT = 1000, 32_000


def read_picture_prompt(given: Any) -> str:
    """Return the prompt of a request for images as text. ``given``: the value in the request: a text, or the number of
    a class. Raises ValueError for any other value and for texts that are too long.
    """
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
    """A request for images. Names of fields are OpenAI's; the fields after ``response_format`` are Weft's own.

    Attributes:
        ``prompt``: name or number of a class, or a text if the model reads texts; "" or "none": no condition.
        ``n``: number of images.
        ``size``: width and height in pixels, such as "64x64", which the model must have learned; "auto": the size of
            most images of its training.
        ``response_format``: whether an image is sent as base64 or as a URL that contains the image.
        ``seed``: seed of the noise; None: a random one, which the response names.
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
