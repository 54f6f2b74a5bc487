"""Mistakes that cost nothing to see are said before anything is read or computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Command

#: A name that no file system takes.
LONG = "a" * 300


def _no_work(*given: object, **named: object) -> None:
    raise AssertionError("this reads a model, or searches")


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("a")
    for work in (
        "weft.checkpoint.model.open_model", "weft.planner.layout_search.search",
        "weft.checkpoint.convert.write.open_foreign", "weft.generate.open_engine.open_model",
        "weft.cli.schedule_view.build", "weft.federated.split_data._records",
        "weft.train.setup.recipe_tokenizer", "weft.curation.train_classifier.train_classifier",
        "weft.data.pictures.read_pictures", "weft.federated.client_recipe.ask_offer",
        "weft.train.runs.prepare_run",
    ):  # fmt: skip
        monkeypatch.setattr(work, _no_work)


@pytest.mark.parametrize(("words", "code", "said"), [
    ("export --from run --out there", 1, "--out there exists already; choose another folder"),
    ("export --from run --out there --texts a --keep 2", 1, "--out there exists already; choose another folder"),
    ("checkpoint convert run --out there/x --to nothing", 2, "--to 'nothing' is not possible; "),
    ("eval missing.jsonl --from run", 2, "missing.jsonl is no file of questions; docs/how-to/evaluation.md says"),
    ("plan llama3-405x", 1, "model 'llama3-405x' is neither a file nor built in; did you mean 'llama3-405b'?"),
    ("plan llama3-405x --cluster h100", 1, "did you mean 'llama3-405b'?"),
    ("plan llama3-405x --here", 1, "did you mean 'llama3-405b'?"),
    ("plan llama3-8b --cluster h100 --gpus 8 --batch 8 --seq 512 --html there", 1, "cannot write --html there: "),
    ("plan llama3-8b --cluster h100 --gpus 8 --batch 8 --seq 512 --recipe there", 1, "cannot write --recipe there: "),
    ("plan llama3-8b --here --html p.html", 2, "--html is of the layouts for training, and --here plans something "),
    ("export --from run --out file/x", 1, "cannot write --out file/x: Not a directory; choose another folder"),
    ("checkpoint convert run --out file/x --to hf", 1, "cannot write --out file/x: Not a directory; "),
    ("schedule zb-v --html there", 1, "cannot write --html there: Is a directory; name another file"),
    ("profile --from run --out file", 1, "cannot write --out file: Not a directory; choose another folder"),
    ("data preview finetune --html there", 1, "cannot write --html there: Is a directory; "),
    ("data classify --positive a --negative b --out there", 1, "cannot write --out there: Is a directory; "),
    ("data split a.jsonl --out file", 1, "cannot write --out file: Not a directory; "),
    ("data autoencoder a --out file/x", 1, "cannot write --out file/x: Not a directory; "),
    (f"peer get a --to {LONG}", 1, f"cannot write --to {LONG}: File name too long; choose another folder"),
    (f"client --join a --out none/{LONG}", 1, f"cannot write --out none/{LONG}: File name too long; choose another"),
    (f"export --from run --out {LONG}", 1, f"cannot write --out {LONG}: File name too long; choose another folder"),
    (f"checkpoint convert run --out {LONG} --to hf", 1, f"{LONG}: File name too long; choose another folder"),
    ("peer get a --to file", 1, "cannot write --to file: Not a directory; "),
    ("client --join a --out file", 1, "cannot write --out file: Not a directory; "),
    ("train offload --set memory.weights=file --set memory.folder=file", 1, "memory.folder = 'file' cannot be used: "),
    ("experts finetune --out file --expert a", 1, "cannot write --out file: Not a directory; "),
    ("generate --from run --prompt a --keys-in file", 1, "--keys-in = 'file' cannot be used: it is a file; "),
    ("serve --port 0 --from run --keys-in file", 1, "--keys-in = 'file' cannot be used: it is a file; "),
    ("engine --from run --join h:1 --joined-file there", 2, "--joined-file there is a folder or has content, and "),
    ("engine --from run --join h:1 --joined-file file", 2, "--joined-file file is a folder or has content, and "),
    ("engine --from run --join h:1 --joined-file a/b", 2, "--joined-file a/b cannot be written: there is no folder a"),
    (f"engine --from run --join h:1 --joined-file {LONG}", 2, "File name too long; name another file"),
    ("serve --port 0 --from run --cache-folder file", 2, "the cache folder file cannot be made: File exists; "),
])  # fmt: skip
def test_cheap_checks_come_first(
    command: Command, words: str, code: int, said: str
) -> None:
    ended, _, err = command(*words.split())
    assert ended == code and said in err and err.count("\n") == 1
