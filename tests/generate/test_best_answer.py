"""``--think`` and ``--verifier``: prompts whose reasoning is closed, and the choice among several answers."""

from __future__ import annotations

import asyncio
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from tests.chats import TEMPLATES, save_tokenizer
from tests.conftest import Command
from tests.generate.test_many import PROMPTS, alone, build
from tests.generate.test_text_options import texts_of
from tests.serve.running import Running
from weft.checkpoint.model import open_model
from weft.data.chat.encode import reasoning_prompt
from weft.data.chat.reasoning import Thoughts
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError, WeftError
from weft.generate.best_answer import Verifier, answer_start, rated_answers, text_score
from weft.generate.engine import Engine
from weft.generate.open_engine import EngineOptions, open_engine
from weft.generate.sampling import Sampling
from weft.recipe import Task
from weft.rl.build_task import reward_task
from weft.rl.reward_workers import RewardWorkers, task_words
from weft.rl.rollout import RewardQuestion
from weft.serve.service import Service

#: A template that opens reasoning itself and has no variable for it.
OPENING = (
    "{% for m in messages %}{{ m.content.split('</think>')[-1] }} {% endfor %}"
    "{% if add_generation_prompt %}ask <think> {% endif %}"
)
WORDS = ("</s>", "<think>", "</think>", "begin", "ask", "hm", "four", "five", "six")
#: What the model writes behind each word, with the logits.
FOLLOWS: dict[str, dict[str, float]] = {
    "<think>": {"hm": 20}, "hm": {"hm": 12, "</think>": 12}, "</think>": {"four": 12, "five": 11.5, "six": 11},
    **{word: {"</s>": 20} for word in ("four", "five", "six")},
}  # fmt: skip
TALK = [{"role": "user", "content": "begin"}]


def words_model(folder: Path, kind: Any, **more: Any) -> Any:
    """A model without layers that do anything: its head sees the last word alone."""
    ids = {word: i for i, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="</s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", chat_template=OPENING
    )
    fast.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(ids), hidden_size=16, intermediate_size=4, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=False, eos_token_id=0, **more,
    )  # fmt: skip
    model = kind(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(torch.eye(len(ids), 16))
    return model


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that thinks for some words and then says four, five or six."""
    folder = tmp_path_factory.mktemp("writer")
    model = words_model(folder, transformers.LlamaForCausalLM)
    with torch.no_grad():
        for before, follows in FOLLOWS.items():
            for after, logit in follows.items():
                # a one-hot row of 16 has 4 where it is not 0 behind the norm
                place = WORDS.index(after), WORDS.index(before)
                model.lm_head.weight[place] = logit / 4
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model that likes six best."""
    folder = tmp_path_factory.mktemp("judge")
    kind = transformers.LlamaForSequenceClassification
    model = words_model(folder, kind, num_labels=1)
    with torch.no_grad():
        model.score.weight[0] = torch.arange(16) / 4
    model.save_pretrained(folder)
    return folder


def ask(command: Command, writer: Path, *words: object) -> Any:
    said = ("generate", "--from", writer, "--prompt", "begin", "--chat", "--tokens", 12)
    return command(*said, "--temperature", 1, "--top-k", 0, "--seed", 3, *words)


def test_reasoning_is_closed_as_the_template_does_or_by_its_tags(
    tmp_path: Path, writer: Path
) -> None:
    qwen = load_tokenizer(str(save_tokenizer(tmp_path / "qwen3", TEMPLATES["qwen3"])))
    kept, closed = (reasoning_prompt(qwen, TALK, think, "Q") for think in (True, False))
    assert kept.thoughts == Thoughts("<think>", "</think>") and not closed.thoughts
    tail = qwen.decode(closed.ids[len(kept.ids) :])
    assert closed.ids[: len(kept.ids)] == kept.ids
    assert tail == "<think>\n\n</think>\n\n"
    own = load_tokenizer(str(writer))
    kept, closed = (reasoning_prompt(own, TALK, think, "W") for think in (True, False))
    assert kept.thoughts == Thoughts("<think>", "</think>", begun=True)
    assert own.decode(kept.ids) == "begin ask <think>"
    assert own.decode(closed.ids) == "begin ask <think> </think>"
    smol = load_tokenizer(str(save_tokenizer(tmp_path / "smol", TEMPLATES["smollm2"])))
    with pytest.raises(UsageError, match=r"of S knows no reasoning.*leave out --think"):
        reasoning_prompt(smol, TALK, False, "S")


def test_an_answer_begins_behind_its_reasoning(writer: Path) -> None:
    tokenizer, tags = load_tokenizer(str(writer)), Thoughts("<think>", "</think>")

    def start(text: str, thoughts: Thoughts | None) -> int | None:
        return answer_start(tokenizer, [WORDS.index(i) for i in text.split()], thoughts)

    begun = tags._replace(begun=True)
    assert start("hm hm </think> four", begun) == 3
    assert start("hm hm </think>", begun) == 3
    assert start("<think> hm </think> four </think>", tags) == 3
    assert start("hm four", begun) is None and start("<think> hm", tags) is None
    assert start("four", tags) == 0 and start("hm </think> four", None) == 0
    # Tags that are special tokens, of which decoded text shows nothing.
    assert tokenizer.model is not None
    tokenizer.model.add_special_tokens(["<think>", "</think>"])
    tokenizer = replace(tokenizer)
    assert tokenizer.decode([WORDS.index("</think>")]) == ""
    assert start("hm hm </think> four", begun) == 3 and start("hm four", begun) is None
    assert start("<think> hm </think> four", tags) == 3 and start("four", tags) == 0


def test_confidence_is_the_mean_log_probability_of_the_answer_alone() -> None:
    model, how, n = build("softmax", torch.float64), Sampling(seed=7), 6
    rated = rated_answers(
        Engine(model, size=4), PROMPTS[1], 10, how, n, (),
        lambda ids: None if ids[0] % 3 == 0 else str(ids), lambda ids: ids[0] % 5,
    )  # fmt: skip
    for number, each in enumerate(rated):
        text = alone(model, PROMPTS[1], Sampling(seed=7 + number), top=0)
        first = text.written[0]
        chances = [p for p, _ in text.log_probabilities[first % 5 :]]
        wanted = None if first % 3 == 0 else sum(chances) / len(chances)
        assert each.score == (wanted and pytest.approx(wanted, abs=1e-9))
        assert each.text == ("" if wanted is None else str(text.written))
    assert {each.score is None for each in rated} == {True, False}


def test_the_best_answer_is_shown(command: Command, writer: Path, judge: Path) -> None:
    """The likeliest by confidence, the one that the verifier likes by its scores, and the most frequent by vote."""
    code, out, err = ask(command, writer, "--think", 16)
    shown = texts_of(out)
    assert code == 0, err
    (heading,) = (name for name in shown if name.startswith("answer"))
    assert shown[heading] == "four"
    scores = [
        line.split()[1] for line in shown["confidence of the answers"].split("\n")
    ]
    assert len(scores) == 16 and len({*scores} - {"no"}) == 3
    shown = texts_of(ask(command, writer, "--think", 16, "--verifier", judge)[1])
    (heading,) = (name for name in shown if name.startswith("answer"))
    assert shown[heading] == "six"
    scores = [line.split()[1] for line in shown["verifier of the answers"].split("\n")]
    assert {round(float(score)) for score in scores if score != "no"} == {6, 7, 8}
    shown = texts_of(ask(command, writer, "--texts", 16, "--verifier", judge)[1])
    assert "six" in shown.values()  # without what was thought before it
    said = texts_of(ask(command, writer, "--think", 16, "--answer", r"\w+")[1])
    assert said["most say"] == "four" and "hm" not in said["answers"]
    # Without reasoning: the answer comes at once, alone or the best of several.
    assert ask(command, writer, "--think", "none", "--top-k", 1)[1] == "four\n"
    shown = texts_of(ask(command, writer, "--think", "none", "--texts", 8)[1])
    assert "no answer" not in shown["confidence of the answers"]
    code, _, err = ask(command, writer, "--think", 2, "--tokens", 1)
    assert (code, err) == (
        1,
        "weft: error: none of the 2 texts came to an answer; give them more --tokens\n",
    )


def test_a_verifier_scores_as_transformers_do(judge: Path) -> None:
    model, *_ = open_model(str(judge), "cpu", lambda line: None)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(judge)
    fast = transformers.AutoTokenizer.from_pretrained(judge)
    verify = Verifier(model, load_tokenizer(str(judge)), "J", TALK)
    for answer in ("four", "six", "five hm"):
        talk = [*TALK, {"role": "assistant", "content": answer}]
        text = fast.apply_chat_template(talk, tokenize=False)
        given = fast(text, return_tensors="pt").input_ids
        with torch.no_grad():
            wanted = theirs(given).logits.item()
        assert verify(answer) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("words", "said"), [
    (["--think", "some"], "--think some is no way to think"), (["--think", 0], "--think 0 is no way to think"),
    (["--think", 4, "--texts", 2], "leave out --texts"), (["--think", 4, "--beams", 2], "--think is for sampled texts"),
    (["--think", 4, "--temperature", 0], "all texts are the same"),
    (["--texts", 4, "--verifier", "X", "--answer", "a"], "--verifier and --answer"),
    (["--verifier", "X"], "--verifier chooses among several answers"),
    (["--think", "none", "--answer", "a"], "--answer is what most of several texts say"),
])  # fmt: skip
def test_what_cannot_be_chosen_is_one_line(
    command: Command, writer: Path, words: list[object], said: str
) -> None:
    code, _, err = ask(command, writer, *words)
    assert code == 2 and said in err and err.count("\n") == 1


def test_a_model_that_writes_is_no_verifier(command: Command, writer: Path) -> None:
    code, _, err = ask(command, writer, "--think", 2, "--verifier", writer)
    assert code == 2 and "writes texts and scores none; --verifier is for" in err
    code, _, err = command("generate", "--from", writer, "--prompt", "a", "--think", 2)
    assert code == 2 and "--think is for --chat" in err


def test_a_reward_model_gives_rewards_of_the_same_scores(judge: Path) -> None:
    model, *_ = open_model(str(judge), "cpu", lambda line: None)
    verify = Verifier(model, load_tokenizer(str(judge)), "J", TALK)
    plain, squashed = (
        reward_task(Task(reward="reward-model", model=str(judge), scale=scale))
        for scale in ("none", "logistic")
    )
    question = RewardQuestion("begin")
    scores = [verify(answer) for answer in ("four", "six", "hm")]
    assert len(set(scores)) == 3
    for answer, score in zip(("four", "six", "hm"), scores, strict=True):
        assert plain.score(question, answer) == score
        logistic = squashed.score(question, answer)
        assert logistic == pytest.approx(1 / (1 + math.exp(-score)))
    with pytest.raises(UsageError, match=r"needs tasks.model"):
        reward_task(Task(reward="reward-model")).score(question, "four")


def test_the_commands_that_serve_open_a_reward_model(judge: Path) -> None:
    plain: dict[str, Any] = {
        "checkpoint": str(judge), "requests": 8, "waiting": 8, "budget": 64, "policy": "exact-fill", "cache": 0,
        "adapters": None, "models": None, "ema": False, "weights": "float", "invariant": False, "draft": "",
        "ahead": 0, "early_layer": 0, "plugins": (), "layout": "",
    }  # fmt: skip
    opened = open_engine(EngineOptions(**plain), "cpu", "judge", print)
    assert opened is not None
    service = Service(opened.engine)
    assert service.facts.scores
    model, *_ = open_model(str(judge), "cpu", lambda line: None)
    score = asyncio.run(service.score([1, 2, 3]))
    service.close()
    assert score == text_score(model, [1, 2, 3])
    with pytest.raises(UsageError, match="and writes none; leave out --host-cache"):
        open_engine(EngineOptions(**plain | {"host_cache": 1}), "cpu", "judge", print)


@pytest.mark.soak
@pytest.mark.slow(3)
def test_a_served_reward_model_gives_the_same_rewards(
    judge: Path, writer: Path, tmp_path: Path
) -> None:
    """Over HTTP, with a key; a server that writes texts, one without the key and none at all are each named."""
    model, *_ = open_model(str(judge), "cpu", lambda line: None)
    plain = reward_task(Task(reward="reward-model", model=str(judge)))
    key = tmp_path / "key"
    key.write_text("open sesame\n")
    question = RewardQuestion("begin")
    server = Running(load_tokenizer(str(judge)), ("open sesame",), model=model)
    with closing(server) as running:
        where = "http://{}:{}".format(*running.address)
        served = Task(reward="reward-model", model=f"{where}/v1", key=str(key))
        words = task_words(served)
        with RewardWorkers(words, 1) as workers:
            scored = workers.scores([question] * 2, ["four", "six"])
        assert [s.value for s in scored] == [plain.score(question, a) for a in ("four", "six")]  # fmt: skip
        without = reward_task(Task(reward="reward-model", model=where))
        with pytest.raises(WeftError, match=r"/v1/score answers 401: .*no valid API key"):  # fmt: skip
            without.score(question, "four")
    with pytest.raises(WeftError, match=r"gives no score: .*refused"):
        without.score(question, "four")
    other, *_ = open_model(str(writer), "cpu", lambda line: None)
    with closing(Running(load_tokenizer(str(writer)), model=other)) as running:
        where = "http://{}:{}".format(*running.address)
        wrong = reward_task(Task(reward="reward-model", model=where))
        with pytest.raises(WeftError, match=r"answers 400: .*scores none"):
            wrong.score(question, "four")
