"""Answers of a run that stay in its folder: a file of conversations for each of the newest rollout phases."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.data.chat.trajectory_records import atif_record
from weft.errors import WeftError, why_unwritten

if TYPE_CHECKING:
    from weft.rl.rollout import GroupRequest, WrittenAnswer
    from weft.rl.scored_answers import ScoredGroup

#: Folder within that of the run.
FOLDER = "answers"


def keep_phase(
    run: Path,
    phase: int,
    groups: Sequence[ScoredGroup],
    text_of: Callable[[Sequence[int]], str],
    most: int,
) -> Path:
    """Write all answers of rollout phase ``phase`` to a file of JSON lines, and return the file.

    ``data.kind = "chat"`` reads such a file. Only the files of the newest ``most`` phases are kept. ``groups``: the
    answers with their rewards. ``run``: the run's folder. ``text_of``: returns the text of an answer's token ids.
    Raises :class:`WeftError` if the file cannot be written.
    """
    folder = run / FOLDER
    file = folder / f"{phase:06d}.jsonl"
    draft = file.with_suffix(".new")
    try:
        folder.mkdir(exist_ok=True)
        with draft.open("w", encoding="utf-8") as out:
            for group in groups:
                rows = zip(group.group.answers, group.rewards, group.whys, strict=True)
                for answer, reward, why in rows:
                    record = answer_record(group.group.request, answer, text_of)
                    known = None if math.isnan(reward) else reward
                    record |= {"phase": phase, "reward": known, "failed": why}
                    out.write(json.dumps(record, ensure_ascii=False) + "\n")
        os.replace(draft, file)
        for other in folder.glob("[0-9]*.jsonl"):
            if not other.stem.isdecimal():  # somebody else's
                continue
            if not phase - most < int(other.stem) <= phase:
                other.unlink()
    except OSError as error:
        raise WeftError(
            f"{file} cannot be written: {why_unwritten(error, 'set rl.keep = 0')}"
        ) from None
    return file


def answer_record(
    request: GroupRequest,
    answer: WrittenAnswer,
    text_of: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
    """Return an ``answer`` to ``request`` as the JSON values of a conversation. ``text_of``: returns the text of token
    ids. An answer of several turns becomes a record of ATIF.

    The entry ``versions`` has pairs: the index of a token, and the version of the weights that wrote the tokens from
    there on, counted in updates.
    """
    question = request.question
    about = {
        "question": request.number,
        "right_answer": question.answer,
        "versions": [[span.first, span.version] for span in answer.versions],
        "finished": answer.finished,
    }
    if answer.trajectory is not None:
        return atif_record(answer.trajectory) | about
    prompt = question.prompt
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    said = {"role": "assistant", "content": text_of(answer.ids)}
    return {"messages": [*asked, said], **about}
