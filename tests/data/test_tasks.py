"""Tasks: what is counted as right, the same under every layout, and what a broken file says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.cases import recipe, start, write_corpus
from tests.chats import TEMPLATES, save_tokenizer
from tests.conftest import Command
from tests.generate.one_text import generate
from weft.api import start as start_run
from weft.checkpoint.model import open_model, tokenizer_of
from weft.data.tasks import Question, Score, Text, open_task, read_questions
from weft.data.tokenizer import load_tokenizer
from weft.errors import WeftError
from weft.generate.sampling import GREEDY
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.observe.charts import charts
from weft.observe.run_metrics import RecordedRun, read_metrics
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Task, Train, build_recipe
from weft.train.score import scores
from weft.train.setup import prepare
from weft.train.training import train_job

SHAPE = ModelShape(
    vocab=61, layers=2, embed=32, heads=4, kv_heads=2, ffn=48, init_std=0.5
)
TEXTS = [
    Text([3, 1, 4], [1, 5, 9]),
    Text([7], [2]),
    Text([2, 7, 1, 8, 2, 8], [1, 8]),
    Text([5, 5], [60, 0, 3, 4, 6]),
]


def model(dtype: str = "float64") -> Transformer:
    return parallelize(SHAPE, Mesh.single(), Train(seed=2, dtype=dtype))[0]


@torch.no_grad()
def directly(model: Transformer, text: Text) -> Score:
    """The score of one text by itself, from the logits of all its tokens."""
    ids = torch.tensor([[*text.given, *text.following]])
    n = ids.shape[1]
    logits = model(ids, torch.arange(n)[None], torch.tensor([0, n], dtype=torch.int32))[
        0
    ]
    following = torch.tensor(text.following)
    before = logits[len(text.given) - 1 : -1].double()
    found = before.log_softmax(-1)[range(len(following)), following].sum()
    return Score(found.item(), bool((before.argmax(-1) == following).all()))


def test_scores_are_those_of_each_text_by_itself() -> None:
    own = model()
    written = Text([3, 1, 4], list(generate(own, [3, 1, 4], 5, (), GREEDY)))
    texts = [*TEXTS, written]
    for room in (1, 9, 64):
        for found, text in zip(
            scores(own, None, own.mesh, texts, room=room), texts, strict=True
        ):
            expected = directly(own, text)
            assert found.log_probability == pytest.approx(
                expected.log_probability, rel=1e-10
            )
            assert found.greedy == expected.greedy
    assert (
        scores(own, None, own.mesh, texts)[-1].greedy
        and not directly(own, TEXTS[0]).greedy
    )
    assert scores(own, None, own.mesh, []) == []


def scored(values: dict[str, Any], texts: list[Text]) -> list[Score]:
    job = start(values)
    rows, passes = job.settings.rows_per_pass(job.mesh.layout)
    return scores(
        job.model, job.state, job.mesh, texts, rows, passes, job.settings.data.seq_len
    )


LAYOUTS = [
    (2, {"shard": 2}), (2, {"tp": 2}), (2, {"pp": 2}), (4, {"cp": 4}), (4, {"dp": 2, "tp": 2}),
    (2, {"pp": 2, "schedule": "dualpipe-v"}), (4, {"shard": 4, "zero": 3, "secondary": 2}),
]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("world", "layout"), LAYOUTS, ids=lambda x: str(x).replace(" ", "")
)
def test_scores_are_the_same_under_every_layout(
    pool: Any, corpus: str, world: int, layout: dict[str, Any]
) -> None:
    change = {"model__layers": 4} if layout.get("pp") else {}

    def tree(axes: dict[str, Any]) -> dict[str, Any]:
        return recipe(
            corpus, **{f"layout__{k}": v for k, v in axes.items()}, **change
        ).model_dump(mode="json")

    (expected,) = pool.run(1, scored, tree({}), TEXTS)
    for found in pool.run(world, scored, tree(layout), TEXTS):
        for one, other in zip(found, expected, strict=True):
            assert one.log_probability == pytest.approx(
                other.log_probability, rel=1e-10
            )
            assert one.greedy == other.greedy


def run(values: dict[str, Any], out: str) -> list[float]:
    settings = build_recipe(values)
    mesh = Mesh.create(settings.layout, "cpu")
    return train_job(prepare(settings), mesh, Path(out)).validations


def write(folder: Path, *lines: object) -> Path:
    file = folder / "questions.jsonl"
    file.write_text(
        "".join(
            f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines
        )
    )
    return file


QUESTIONS = [
    {"prompt": "ab", "answer": "c"}, {"prompt": "abc", "choices": ["d", "efg"], "answer": 0},
    {"prompt": "hg ", "choices": ["a", "b", "c"], "answer": "b"},
]  # fmt: skip


@pytest.mark.slow
def test_a_run_asks_and_validates_by_its_averages(
    pool: Any, corpus: str, tmp_path: Path
) -> None:
    """Under two layouts alike; what the averages know is what a model made of them knows, and training is as ever."""
    tasks = [{"path": str(write(tmp_path, *QUESTIONS)), "every": 2, "name": "three"}]

    def tree(use: bool, **layout: int) -> dict[str, Any]:
        axes = {f"layout__{axis}": size for axis, size in layout.items()}
        made = recipe(
            corpus, validation__every=2, optimizer__ema=0.5, optimizer__lr=1e-2, **axes
        )
        plain = made.model_dump(mode="json")
        return plain | {
            "tasks": tasks,
            "optimizer": plain["optimizer"] | {"use_ema": use},
        }

    runs = {
        "one": (1, True, {}),
        "two": (2, True, {"shard": 2}),
        "pipeline": (2, True, {"pp": 2}),
    }
    runs |= {"cut": (2, True, {"tp": 2}), "current": (1, False, {})}
    found = {
        name: pool.run(world, run, tree(use, **layout), str(tmp_path / name))[0]
        for name, (world, use, layout) in runs.items()
    }
    for name in ("two", "pipeline", "cut"):
        assert found[name] == pytest.approx(found["one"], rel=1e-9)
    assert found["current"][0] == pytest.approx(found["one"][0], rel=1e-12)
    assert all(
        abs(a - b) > 1e-4
        for a, b in zip(found["current"][1:], found["one"][1:], strict=True)
    )
    losses = {
        name: [r["loss"] for r in read_metrics(tmp_path / name)["train"]]
        for name in runs
    }
    assert losses["one"] == losses["current"]
    asked = {name: read_metrics(tmp_path / name)["task.three"] for name in runs}
    assert [r["step"] for r in asked["one"]] == [0, 2, 4, 6]
    for name in ("two", "pipeline", "cut"):
        assert [r["loss"] for r in asked[name]] == pytest.approx(
            [r["loss"] for r in asked["one"]], rel=1e-9
        )

    checkpoint = str(tmp_path / "two")
    averaged, files, _ = open_model(checkpoint, "cpu", print, ema=True)
    drawn = charts([RecordedRun("one", read_metrics(tmp_path / "one"))])
    (chart,) = (chart for chart in drawn if chart["title"] == "Tasks")
    assert chart["note"].endswith(": three") and [
        len(t["x"]) for t in chart["traces"]
    ] == [4]
    task = open_task(Task(path=tasks[0]["path"]), tokenizer_of(files, checkpoint), "it")
    for ema, record in ((True, asked["one"][-1]), (False, asked["current"][-1])):
        opened = open_model(checkpoint, "cpu", print, ema)[0]
        answered = task.answered(
            lambda texts, model=opened: scores(model, None, model.mesh, texts)
        )
        assert answered is not None
        assert answered.loss == pytest.approx(record["loss"], rel=1e-4)
    assert averaged.blocks["0"].attention.wq.ne(opened.blocks["0"].attention.wq).any()


def test_averages_begin_where_they_are_first_asked_for(
    corpus: str, tmp_path: Path
) -> None:
    """A run that goes on with averages begins them with its parameters, and one that goes on without lets them go."""
    start_run(
        recipe(corpus, train__steps=2, optimizer__schedule="constant"), tmp_path / "run"
    )
    before = dict(open_model(str(tmp_path / "run"), "cpu", print)[0].named_parameters())
    more = recipe(
        corpus,
        train__steps=3,
        optimizer__schedule="constant",
        optimizer__ema=0.75,
        optimizer__lr=1e-2,
    )
    start_run(more, tmp_path / "run", "auto")
    after, averages = (
        dict(open_model(str(tmp_path / "run"), "cpu", print, e)[0].named_parameters())
        for e in (0, 1)
    )
    for name, average in averages.items():
        torch.testing.assert_close(average, 0.75 * before[name] + 0.25 * after[name])
    assert any(
        not torch.equal(average, after[name]) for name, average in averages.items()
    )
    start_run(recipe(corpus, train__steps=4), tmp_path / "run", "auto")
    with pytest.raises(WeftError, match="has no averages"):
        open_model(str(tmp_path / "run"), "cpu", print, True)


def test_averages_of_an_adapter(corpus: str, tmp_path: Path) -> None:
    """They are those of what learns, beside the same base."""
    settings = {
        "adapter__rank": 3,
        "optimizer__ema": 0.5,
        "optimizer__use_ema": True,
        "optimizer__lr": 1e-2,
    }
    outcome = start_run(
        recipe(corpus, train__steps=3, checkpoint__export="adapter", **settings),
        tmp_path / "run",
    )
    plain, averaged = (
        dict(open_model(str(outcome.run), "cpu", print, e)[0].named_parameters())
        for e in (0, 1)
    )
    moved = {name for name in plain if not torch.equal(plain[name], averaged[name])}
    assert moved and all(".adapters." in name for name in moved)
    stored = load_file(outcome.run / "export/adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    torch.testing.assert_close(
        stored[key], averaged["blocks.0.attention.adapters.wq.b"].detach()
    )


@pytest.mark.slow
def test_the_command_asks_and_exports_averages(
    command: Command, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = recipe(
        corpus,
        optimizer__ema=0.5,
        optimizer__lr=1e-2,
        optimizer__use_ema=True,
        checkpoint__export="model",
    )
    outcome = start_run(values, tmp_path / "run")
    file = write(tmp_path, *QUESTIONS)
    capsys.readouterr()
    code, out, err = command("eval", file, "--from", outcome.run, "--ema", "--json")
    assert code == 0, err
    found = json.loads(out)["questions"]
    assert found["questions"] == 3 and found["accuracy"] == found["right"] / 3
    assert (
        command("export", "--from", outcome.run, "--ema", "--out", tmp_path / "out")[0]
        == 0
    )
    written = {
        name: (tmp_path / name / "model.safetensors").read_bytes()
        for name in ("out", "run/export")
    }
    assert written["out"] == written["run/export"]
    assert command("export", "--from", outcome.run, "--out", tmp_path / "plain")[0] == 0
    assert (tmp_path / "plain/model.safetensors").read_bytes() != written["out"]
    assert (
        json.loads(command("eval", file, "--from", tmp_path / "out", "--json")[1])[
            "questions"
        ]
        == found
    )

    start_run(recipe(corpus, train__steps=1), tmp_path / "none")
    for words in (
        ["eval", file],
        ["export", "--out", tmp_path / "no"],
        ["generate", "--prompt", "a"],
    ):
        code, _, err = command(*words, "--from", tmp_path / "none", "--ema")
        assert (
            code == 1
            and "has no averages of its parameters; train with optimizer.ema"
            in " ".join(err.split())
        )
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(("line", "said"), [
    ("{\"prompt\": ", "not valid JSON"), ([1], "a question is an object"), ({"prompt": "a"}, "'answer' is the text"),
    ({"prompt": "a", "answer": ""}, "'answer' is the text"), ({"answer": "a"}, "give either 'prompt' or 'messages'"),
    ({"prompt": 3, "answer": "a"}, "'prompt' is a text"), ({"prompt": "a", "anwser": "b"}, "unknown key 'anwser'"),
    ({"prompt": "a", "choices": ["b"], "answer": 0}, "'choices' is a list of two texts"),
    ({"prompt": "a", "choices": ["b", "c"], "answer": 2}, "its number from 0 to 1"),
    ({"prompt": "a", "choices": ["b", "c"], "answer": True}, "its number from 0 to 1"),
    ({"messages": [{"role": "user", "content": "a"}], "answer": "b"}, "'messages' are for a model that chats"),
])  # fmt: skip
def test_a_broken_question_is_named(tmp_path: Path, line: object, said: str) -> None:
    file = write(tmp_path, {"prompt": "a", "answer": "b"}, "", line)
    with pytest.raises(WeftError) as error:
        open_task(Task(path=str(file)), load_tokenizer("bytes"), "it")
    assert (
        str(error.value).startswith(f"{file}:3: ")
        and said in str(error.value)
        and "\n" not in str(error.value)
    )


def test_files_that_hold_no_question(tmp_path: Path) -> None:
    for name, content, said in (
        ("empty.jsonl", "", "has no question"), ("empty.toml", "", "[[questions]]"),
        ("bad.toml", "a = [", "valid TOML"), ("none.jsonl", None, "No such file"),
    ):  # fmt: skip
        file = tmp_path / name
        if content is not None:
            file.write_text(content)
        with pytest.raises(WeftError) as error:
            read_questions(file)
        assert name in str(error.value) and said in str(error.value)
    file = tmp_path / "good.toml"
    file.write_text('[[questions]]\nprompt = "a"\nanswer = "b"\n' * 3)
    assert read_questions(file, 2) == [
        Question(f"{file}:{i}", "a", ("b",)) for i in (1, 2)
    ]


def test_a_conversation_is_asked_for_its_turn(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path, TEMPLATES["smollm2"])))
    file = write(
        tmp_path,
        {"prompt": "one and one", "choices": ["two", "three"], "answer": "two"},
    )
    task = open_task(Task(path=str(file), chat=True), tokenizer, "it")
    for text, answer in zip(task.texts[0], ("two", "three"), strict=True):
        whole = tokenizer.model.decode(
            [*text.given, *text.following], skip_special_tokens=False
        )
        turn = tokenizer.model.decode(list(text.following), skip_special_tokens=False)
        assert (
            turn.replace(" ", "") == f"{answer}<|im_end|>"
            and "one and one<|im_end|>" in whole
        )
        assert text.given == task.texts[0][0].given
    with pytest.raises(WeftError, match="it has no chat template"):
        open_task(Task(path=str(file), chat=True), load_tokenizer("bytes"), "it")
