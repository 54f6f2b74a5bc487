"""lm-eval over a model of Weft's: what transformers makes of the same model, and lm-eval's own evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chats import TEMPLATES, save_tokenizer
from weft.errors import WeftError

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow

TEXT = "The Python function opens a file, reads it and returns what it holds. Then it closes the file again."
PAIRS = [
    ("What does it do?", " It opens a file."), ("", "Nothing at all"), ("Some words with blanks  ", "then more"),
    (TEXT * 4, " and so on"), ("a", "b"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as transformers saves it, with a tokenizer that knows how to chat."""
    transformers = pytest.importorskip("transformers")
    folder = save_tokenizer(tmp_path_factory.mktemp("model"), TEMPLATES["smollm2"])
    vocab = len(transformers.AutoTokenizer.from_pretrained(folder))
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[Any, Any]:
    """The same model as lm-eval has it from Weft, and from transformers."""
    from lm_eval.models.huggingface import HFLM

    from weft.serve.harness import WeftLM

    theirs = HFLM(
        str(folder), device="cpu", dtype="float32", max_length=64, batch_size=1
    )
    return WeftLM(str(folder), max_length=64, device="cpu"), theirs


def asked(kind: str, *args: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, args, 0)


def test_log_likelihoods_are_those_of_transformers(both: tuple[Any, Any]) -> None:
    ours, theirs = (
        lm.loglikelihood([asked("loglikelihood", *pair) for pair in PAIRS])
        for lm in both
    )
    for (a, greedy), (b, theirs_greedy) in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=2e-6) and greedy == theirs_greedy
    texts = [TEXT, TEXT * 5, "a"]
    ours, theirs = (
        lm.loglikelihood_rolling([asked("loglikelihood_rolling", t) for t in texts])
        for lm in both
    )
    assert ours == pytest.approx(theirs, rel=2e-6)


def test_what_greedy_decoding_writes_is_greedy(both: tuple[Any, Any]) -> None:
    settings = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    chat = both[0].apply_chat_template([{"role": "user", "content": "What is a file?"}])
    assert chat == both[1].apply_chat_template(
        [{"role": "user", "content": "What is a file?"}]
    )
    assert both[0].tok_encode(chat) == both[1].tok_encode(chat)
    history = [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "It is"},
    ]
    assert both[0].apply_chat_template(history, False) == both[1].apply_chat_template(
        history, False
    )
    for context in (TEXT, chat, TEXT * 9):
        ours, theirs = (
            lm.generate_until([asked("generate_until", context, settings)])[0]
            for lm in both
        )
        assert ours == theirs and ours
    stopped = both[0].generate_until(
        [asked("generate_until", TEXT, settings | {"until": [ours[3:5]]})]
    )[0]
    assert ours[3:5] not in stopped
    with pytest.raises(WeftError, match="no setting 'top_p'"):
        both[0].generate_until(
            [asked("generate_until", TEXT, settings | {"top_p": 0.5})]
        )


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[str]:
    """The address at which the same model is served."""
    from tests.serve.running import Running
    from weft.checkpoint.model import open_model, tokenizer_of

    model, files, _ = open_model(str(folder), "cpu", print)
    running = Running(tokenizer_of(files, folder), model=model, context=256)
    yield f"{running.client.base_url}/v1/completions"
    running.close()


def over_http(served: str, folder: Path, **more: Any) -> Any:
    """lm-eval's client, whose ``max_length`` counts the last token of a text, and one more that is written."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        served,
        "huggingface",
        model="tiny",
        tokenizer=str(folder),
        max_length=66,
        **more,
    )


def test_log_likelihoods_over_http_are_those_in_the_process(
    both: tuple[Any, Any], served: str, folder: Path
) -> None:
    """lm-eval's ``local-completions``, one request at a time and several, with texts and with ids."""
    pairs = [asked("loglikelihood", *pair) for pair in PAIRS]
    ours = both[0].loglikelihood(pairs)
    for more in ({}, {"num_concurrent": 3, "batch_size": 2}):
        theirs = over_http(served, folder, **more).loglikelihood(pairs)
        for (a, greedy), (b, theirs_greedy) in zip(ours, theirs, strict=True):
            assert a == pytest.approx(b, abs=2e-4) and greedy == theirs_greedy
    texts = [asked("loglikelihood_rolling", t) for t in (TEXT, TEXT * 5, "a")]
    theirs = over_http(served, folder).loglikelihood_rolling(texts)
    assert theirs == pytest.approx(both[0].loglikelihood_rolling(texts), abs=1e-3)
    settings = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    ours, theirs = (
        lm.generate_until([asked("generate_until", "A short text", dict(settings))])
        for lm in (both[0], over_http(served, folder))
    )
    assert ours == theirs and ours[0]


def test_lm_eval_itself(folder: Path, served: str, tmp_path: Path) -> None:
    """A task of choices and one of generation, from a file, by the harness's own evaluation."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    rows = [
        {"q": f"What is {i}?", "choices": ["one", "two"], "answer": i % 2}
        for i in range(6)
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    head = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/rows.jsonl\ntest_split: test\n"
    (tmp_path / "choice.yaml").write_text(
        f"task: choice\noutput_type: multiple_choice\n{head}doc_to_text: '{{{{q}}}}'\ndoc_to_choice: choices\n"
        "doc_to_target: answer\nmetric_list:\n  - metric: acc\n"
    )
    (tmp_path / "write.yaml").write_text(
        f"task: write\noutput_type: generate_until\n{head}doc_to_text: '{{{{q}}}}'\n"
        "doc_to_target: '{{choices[0]}}'\ngeneration_kwargs:\n  until: ['.']\n  max_gen_toks: 4\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    import weft.serve.harness  # noqa: F401 (makes the name known)

    found = {}
    remote = f"base_url={served},tokenizer={folder},tokenizer_backend=huggingface,model=tiny,max_length=66"
    ways = {
        "weft": "max_length=64",
        "hf": "max_length=64,dtype=float32",
        "local-completions": remote,
    }
    for model, arguments in ways.items():
        given = (
            arguments
            if model == "local-completions"
            else f"pretrained={folder},{arguments}"
        )
        results = simple_evaluate(
            model, given, ["choice", "write"], task_manager=manager,
            batch_size=2, device="cpu", bootstrap_iters=0, apply_chat_template=True,
        )["results"]  # fmt: skip
        found[model] = {
            task: {key: value for key, value in of.items() if isinstance(value, float)}
            for task, of in results.items()
        }
    assert (
        found["weft"] == found["hf"] == found["local-completions"]
        and "acc,none" in found["weft"]["choice"]
    )
