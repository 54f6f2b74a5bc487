"""``weft serve`` of a diffusion transformer: images over HTTP, with the interface of OpenAI."""

import asyncio
import base64
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from weft.data.size_buckets import ImageSize
from weft.diffusion.denoiser import Denoiser
from weft.diffusion.image_files import as_pixels, png_bytes
from weft.diffusion.picture_engine import PictureAsk, check_guidance, prompt_condition
from weft.diffusion.sample import solver_of
from weft.errors import UsageError
from weft.serve.answering import while_connected
from weft.serve.api_server import ApiServer, refused_for, seed_for_key
from weft.serve.picture_requests import PictureRequest
from weft.serve.picture_service import PictureLoad, PictureService
from weft.serve.server_metrics import RequestMetrics

#: Seeds that the server chooses are below this.
CHOSEN_SEEDS = 2**31

#: What is said of every field of :class:`PictureLoad`, with the name of its metric.
PICTURE_LOAD = (
    ("images_running", "Images that are being made."),
    ("images_waiting", "Images that wait for their turn."),
    ("image_evaluations", "Predictions of the model, of one image each."),
)


class PictureLoadCollector:
    """Collects Prometheus metrics of the load of ``service``: running and waiting images, and predictions so far."""

    def __init__(self, service: PictureService) -> None:
        self.service = service

    def collect(self) -> Iterator[Metric]:
        load: PictureLoad = self.service.load()
        for value, (name, said) in zip(load, PICTURE_LOAD, strict=True):
            yield GaugeMetricFamily(f"weft_{name}", said, float(value))


class PictureMetrics(RequestMetrics):
    """Prometheus metrics of the requests for images that ``service`` answers.

    Attributes:
        ``images_sent``: number of images that were completed and sent.
    """

    def __init__(self, service: PictureService) -> None:
        super().__init__()
        self.images_sent = self.counter("images", "Images that were made.")
        self.registry.register(PictureLoadCollector(service))


class PictureServer(ApiServer):
    """HTTP server of OpenAI's API for images, made by ``denoiser`` and offered under ``name``.

    Args:
        ``service``: denoises, in a thread of its own.
        ``denoiser``: the model.
        ``keys``: API keys, one of which each request must have; without any, all requests are accepted.
    """

    metrics: PictureMetrics

    def __init__(
        self,
        service: PictureService,
        denoiser: Denoiser,
        name: str,
        keys: Sequence[str] = (),
    ) -> None:
        super().__init__(service, name, PictureMetrics(service), keys)
        self.service, self.denoiser = service, denoiser

    def routes(self) -> list[Route]:
        return [
            *super().routes(),
            Route("/v1/images/generations", self.images, methods=["POST"]),
        ]

    @property
    def size(self) -> str:
        """Width and height in pixels of an image, or of a frame of a video, in the form of requests, such as
        "64x64".
        """
        return next(iter(self.sizes))

    @property
    def sizes(self) -> dict[str, ImageSize]:
        """The sizes of images that the model has learned, by their form in requests. The default comes first."""
        learned = self.denoiser.learned or [ImageSize(*self.denoiser.pixel_size[-2:])]
        return {f"{width}x{height}": ImageSize(height, width) for height, width in learned}  # fmt: skip

    def _card(self, name: str) -> dict[str, Any]:
        about = {"size": self.size, "classes": [*self.denoiser.class_names]}
        if self.denoiser.learned:
            about["sizes"] = [*self.sizes]
        return super()._card(name) | about

    async def images(self, request: Request) -> Response:
        """Answer ``POST /v1/images/generations``: read the request, wait for its images, and return them as JSON."""
        asked = await self._question(request, PictureRequest)
        asks = self._asks(request, asked)
        images = await while_connected(request, self.service.make(asks))
        data = await asyncio.to_thread(_encoded, self.denoiser, images, asked.response_format)  # fmt: skip
        self.metrics.images_sent.inc(len(images))
        self.metrics.whole.observe(time.perf_counter() - request.scope["began"])
        return JSONResponse(
            {"created": int(time.time()), "data": data, "size": self._size(asked), "output_format": "png",
             "seed": asks[0].seed, "model": self.name}
        )  # fmt: skip

    def _asks(self, request: Request, asked: PictureRequest) -> list[PictureAsk]:
        """Return the images of a request. Raises :class:`Refusal` with the name of a field that is wrong."""
        if (size := self._size(asked)) not in self.sizes:
            said = f"this model's images are {' or '.join(self.sizes)}, not {size}"
            raise refused_for(asked, "size", said)
        if asked.n > self.service.most:
            said = f"{asked.n} images are asked for at once; the most is {self.service.most}"
            raise refused_for(asked, "n", said)
        field = "prompt"
        try:
            condition = prompt_condition(self.denoiser, asked.prompt)
            field = "sampler"
            solver_of(asked.sampler)
            field = "guidance"
            check_guidance(self.denoiser, asked.guidance)
        except UsageError as error:
            raise refused_for(asked, field, str(error)) from None
        sides = self.sizes[size] if self.denoiser.learned else None
        seed = asked.seed
        if seed is None:
            key = request.headers.get("idempotency-key", "")
            tenant = self._tenant(request)
            seed = seed_for_key(key, tenant) if key else secrets.randbelow(CHOSEN_SEEDS)
        return [
            PictureAsk(
                condition, asked.steps, asked.sampler, asked.guidance, seed, n, sides
            )
            for n in range(asked.n)
        ]

    def _size(self, asked: PictureRequest) -> str:
        """Return the size of the images of a request, in the form of requests."""
        return self.size if asked.size == "auto" else asked.size


def _encoded(
    denoiser: Denoiser, images: Sequence[torch.Tensor], form: str
) -> list[dict[str, str]]:
    """Return ``images`` as PNG files in JSON; a video is a strip of its frames. ``form``: "b64_json" or "url"."""
    data = []
    for image in denoiser.pixels(torch.stack([*images])):
        pixels = as_pixels(image.numpy())
        text = base64.b64encode(png_bytes(pixels)).decode()
        data.append(
            {"b64_json": text}
            if form == "b64_json"
            else {"url": f"data:image/png;base64,{text}"}
        )
    return data
