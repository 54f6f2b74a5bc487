"""Images over HTTP: what OpenAI's client asks for, what is refused, and who leaves or comes too late."""

from __future__ import annotations

import asyncio
import base64
import io
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import openai
import PIL.Image
import pytest
import torch

from tests.models.test_diffusion_transformer import model_of
from tests.serve.running import JSON, until
from weft.data.size_buckets import ImageSize
from weft.diffusion.denoiser import Denoiser
from weft.diffusion.image_files import as_pixels
from weft.diffusion.picture_engine import PictureEngine
from weft.diffusion.sample import SampleRequest, sample
from weft.serve.front import front_of
from weft.serve.gate import gate_rules
from weft.serve.picture_server import PictureServer
from weft.serve.picture_service import PictureService


class PicturesRunning:
    """A server of images in a thread, and a client of it."""

    def __init__(
        self, keys: tuple[str, ...] = (), drain: float = 60, learned: Any = ()
    ) -> None:
        names = ("dark", "light", "seven")
        self.denoiser = Denoiser(model_of(), names, None, learned)
        self.denoiser = self.denoiser.sized(learned[0]) if learned else self.denoiser
        self.engine = PictureEngine(self.denoiser, 2)
        self.service = PictureService(self.engine, 6)
        self.server = PictureServer(self.service, self.denoiser, "tiny", keys)
        listening = socket.create_server(("127.0.0.1", 0))
        self.said: list[str] = []
        self.front = front_of(
            self.server, gate_rules("127.0.0.1"), self.said.append, drain
        )
        self.thread = threading.Thread(
            target=lambda: asyncio.run(self.front.serve([listening])), daemon=True
        )
        self.thread.start()
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.client = httpx.Client(base_url=self.url, timeout=120, headers=JSON)
        until(lambda: self.front.started)

    def ask(self, **asked: Any) -> httpx.Response:
        return self.client.post("/v1/images/generations", json=asked)

    def close(self) -> None:
        self.client.close()
        self.front.should_exit = True
        self.thread.join(120)
        assert not self.thread.is_alive() and not self.service.thread.is_alive()


@pytest.fixture(scope="module")
def server() -> Iterator[PicturesRunning]:
    running = PicturesRunning()
    yield running
    until(lambda: running.engine.idle)
    running.close()


def pixels_of(encoded: str) -> np.ndarray:
    return np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(encoded))))


def expected(server: PicturesRunning, number: int, **about: Any) -> np.ndarray:
    request = SampleRequest(torch.tensor([number]), **about)
    denoiser = server.denoiser
    (image,) = sample(denoiser, denoiser.process, denoiser.shape, request, 3)
    return as_pixels(image.float().numpy())


def near(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two images are equal but for values at the edge of rounding."""
    return one.shape == other.shape and int(np.abs(one.astype(int) - other).max()) <= 1


def test_images_are_those_of_weft_sample(server: PicturesRunning) -> None:
    answer = server.ask(prompt="light", n=3, seed=5, steps=4, guidance=2, sampler="heun").json()  # fmt: skip
    assert answer["size"] == "6x4" and answer["seed"] == 5 and answer["created"] > 1e9
    images = [pixels_of(each["b64_json"]) for each in answer["data"]]
    about = {"seed": 5, "steps": 4, "guidance": 2.0, "sampler": "heun"}
    for number, image in enumerate(images):
        assert near(image, expected(server, 1, first=number, **about))
    assert len({image.tobytes() for image in images}) == 3
    url = server.ask(prompt=1, seed=5, steps=4, guidance=2, sampler="heun", response_format="url")  # fmt: skip
    kind, _, encoded = url.json()["data"][0]["url"].partition(",")
    assert kind == "data:image/png;base64"
    assert near(pixels_of(encoded), images[0])


def test_openai_s_client_is_served(server: PicturesRunning) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = client.images.generate(
        model="tiny", prompt="seven", n=2, size="auto", response_format="b64_json", quality="auto", user="me",
        extra_body={"seed": 1, "steps": 3},
    )  # fmt: skip
    images = [pixels_of(each.b64_json) for each in answer.data]
    assert near(images[1], expected(server, 2, seed=1, steps=3, first=1))
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt="eight")
    assert caught.value.param == "prompt" and "seven" in str(caught.value)
    assert [model.id for model in client.models.list()] == ["tiny"]
    client.close()


def test_without_a_seed_each_is_another_and_says_which(server: PicturesRunning) -> None:
    first, second = (server.ask(prompt="none", steps=1).json() for _ in range(2))
    assert first["seed"] != second["seed"]
    again = server.ask(prompt="", steps=1, seed=first["seed"]).json()
    assert near(*(pixels_of(a["data"][0]["b64_json"]) for a in (first, again)))
    keyed = [
        server.client.post(
            "/v1/images/generations",
            json={"prompt": "dark", "steps": 1},
            headers={"idempotency-key": "k"},
        ).json()["seed"]
        for _ in range(2)
    ]
    assert keyed[0] == keyed[1]


@pytest.mark.parametrize(
    ("asked", "field", "said"),
    [
        ({}, "prompt", "missing"),
        ({"prompt": "eight"}, "prompt", "dark, light, seven, and none"),
        ({"prompt": ["dark"]}, "prompt", "give a text"),
        ({"prompt": True}, "prompt", "give a text"),
        ({"prompt": "x" * 40_000}, "prompt", "at most 32000"),
        ({"prompt": "dark", "n": 0}, "n", "greater"),
        ({"prompt": "dark", "n": 7}, "n", "the most is 6"),
        ({"prompt": "dark", "size": "8x8"}, "size", "6x4"),
        ({"prompt": "dark", "steps": 0}, "steps", "greater"),
        ({"prompt": "dark", "steps": 2000}, "steps", "less"),
        ({"prompt": "dark", "guidance": -1}, "guidance", "greater"),
        ({"prompt": "dark", "seed": -1}, "seed", "greater"),
        ({"prompt": "dark", "sampler": "eular"}, "sampler", "euler"),
        ({"prompt": "dark", "response_format": "jpeg"}, "response_format", "b64_json"),
        ({"prompt": "dark", "quality": "hd"}, "quality", "auto"),
        ({"prompt": "dark", "stream": True}, "stream", "False"),
        ({"prompt": "dark", "step": 3}, "step", "did you mean 'steps'"),
    ],
)
def test_wrong_fields_are_named(
    server: PicturesRunning, asked: dict[str, Any], field: str, said: str
) -> None:
    answer = server.ask(**asked)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field, error
    assert said in error["message"] and error["type"] == "invalid_request_error"
    assert "\n" not in error["message"] and len(error["message"]) < 300


def test_other_models_paths_and_bodies(server: PicturesRunning) -> None:
    answer = server.ask(prompt="dark", model="other")
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "model"
    assert server.client.get("/v1/images/generations").status_code == 405
    assert server.client.post("/v1/completions", json={}).status_code == 404
    broken = server.client.post("/v1/images/generations", content=b"{")
    assert broken.status_code == 400 and "JSON" in broken.json()["error"]["message"]
    (card,) = server.client.get("/v1/models").json()["data"]
    assert card["size"] == "6x4" and card["classes"] == ["dark", "light", "seven"]


def test_learned_sizes_are_made_side_by_side_and_others_refused() -> None:
    running = PicturesRunning(learned=(ImageSize(4, 4), ImageSize(2, 6)))
    try:
        about = {"seed": 5, "steps": 3}
        with ThreadPoolExecutor() as clients:
            asked = ({}, {"size": "6x2"}, {"size": "4x4", "guidance": 2})
            answers = [*clients.map(lambda each: running.ask(prompt=1, **about, **each).json(), asked)]  # fmt: skip
        assert [answer["size"] for answer in answers] == ["4x4", "6x2", "4x4"]
        wide = SimpleNamespace(denoiser=running.denoiser.sized((2, 6)))
        images = [pixels_of(answer["data"][0]["b64_json"]) for answer in answers]
        assert near(images[0], expected(running, 1, **about))
        assert near(images[1], expected(cast(Any, wide), 1, **about))
        assert near(images[2], expected(running, 1, **about, guidance=2.0))
        error = running.ask(prompt=1, size="6x4").json()["error"]
        assert error["param"] == "size" and "4x4 or 6x2, not 6x4" in error["message"]
        (card,) = running.client.get("/v1/models").json()["data"]
        assert card["size"] == "4x4" and card["sizes"] == ["4x4", "6x2"]
    finally:
        running.close()


def test_health_and_metrics(server: PicturesRunning) -> None:
    assert server.client.get("/health").json() == {"status": "ok"}
    before = server.engine.evaluations
    server.ask(prompt="dark", n=2, steps=3, guidance=3)
    assert server.engine.evaluations - before == 2 * 3 * 2
    text = server.client.get("/metrics").text
    assert 'weft_requests_total{path="/v1/images/generations",status="200"}' in text
    assert "weft_images_running 0.0" in text and "weft_images_waiting 0.0" in text
    assert f"weft_image_evaluations {float(server.engine.evaluations)}" in text
    assert "weft_images_total" in text and "weft_e2e_request_latency_seconds" in text


@pytest.fixture
def held(server: PicturesRunning, monkeypatch: Any) -> SimpleNamespace:
    """The engine's steps wait until they may go on."""
    may = threading.Event()
    step = server.engine.step

    def waiting() -> Any:
        assert may.wait(60)
        return step()

    monkeypatch.setattr(server.engine, "step", waiting)
    return SimpleNamespace(go=may.set)


def test_too_many_are_told_to_come_back_and_who_leaves_makes_room(
    server: PicturesRunning, held: SimpleNamespace
) -> None:
    async def ask() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def images(n: int) -> httpx.Response:
                asked = {"prompt": "dark", "n": n, "steps": 2}
                return await client.post("/v1/images/generations", json=asked)

            leaving = asyncio.ensure_future(images(5))
            while len(server.engine.waiting) < 5:
                await asyncio.sleep(0.01)
            busy = asyncio.ensure_future(images(2))
            before = server.engine.evaluations
            await asyncio.sleep(0.05)
            leaving.cancel()
            await asyncio.sleep(0.05)
            held.go()
            refused = await busy
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "busy"
            while not server.engine.idle:
                await asyncio.sleep(0.01)
            assert server.engine.evaluations - before <= 2, "a step was under way"
            assert (await images(6)).status_code == 200

    asyncio.run(ask())


def test_keys_and_the_end(monkeypatch: Any) -> None:
    server = PicturesRunning(("secret",), drain=0)
    assert server.ask(prompt="dark").status_code == 401
    assert server.client.get("/health").status_code == 200
    begun = threading.Event()
    step = server.engine.step

    def slow() -> Any:
        begun.set()
        threading.Event().wait(0.01)
        return step()

    monkeypatch.setattr(server.engine, "step", slow)
    answers: list[httpx.Response] = []

    def ask() -> None:
        headers = {"authorization": "Bearer secret", **JSON}
        asked = {"prompt": "dark", "steps": 1000}
        answers.append(
            httpx.post(f"{server.url}/v1/images/generations", json=asked, headers=headers, timeout=60)
        )  # fmt: skip

    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(60)
    server.close()
    asking.join(60)
    assert answers[0].status_code == 503
    assert "were not finished" in answers[0].json()["error"]["message"]
    assert server.said == ["1 answer was not at the end after 0 s (--drain), and cut"]


def test_an_engine_that_fails_is_ill(monkeypatch: Any) -> None:
    server = PicturesRunning()

    def fail() -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(server.engine, "step", fail)
    answer = server.ask(prompt="dark")
    assert answer.status_code == 500 and "out of memory" in answer.text
    assert server.client.get("/health").status_code == 503
    assert server.ask(prompt="dark").status_code == 500
    server.close()
