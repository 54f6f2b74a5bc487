"""Operators that tests of data pipelines name: a mapper, a filter that counts its calls, and a joint operator."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from weft.curation.data_operators import Decision
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.plugins import register
from weft.section import Section


class HalvesSettings(Section):
    at: str = Field("|", description="What separates the parts.")


@register("operator", "parts", settings=HalvesSettings)
class Parts:
    """Divides documents; those that are empty are left out."""

    def __init__(self, step: DataStep) -> None:
        self.at = step.own(HalvesSettings).at

    def map(self, documents: Documents) -> Documents:
        rows = [
            (f"{name}/{number}", part, i)
            for i, name in enumerate(documents.ids)
            for number, part in enumerate(documents.texts[i].split(self.at))
            if part
        ]
        columns = {k: [v[i] for *_, i in rows] for k, v in documents.columns.items()}
        return Documents([r[0] for r in rows], [r[1] for r in rows], columns)


class LengthsSettings(Section):
    least: int = Field(0, description="Fewest characters.")
    log: str = Field("", description="File that gets a line for each document.")
    fails: str = Field("", description="Text on which the operator fails.")


@register("operator", "lengths", settings=LengthsSettings)
class Lengths:
    late: ClassVar = ("least",)

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(LengthsSettings)

    def statistics(self, documents: Documents) -> dict[str, list[Any]]:
        for name, text in zip(documents.ids, documents.texts, strict=True):
            if self.settings.fails and self.settings.fails in text:
                raise ValueError(f"cannot read {text!r}")
            if self.settings.log:
                with Path(self.settings.log).open("a") as file:
                    file.write(f"{name}\n")
        return {"length": [len(text) for text in documents.texts]}

    def reasons(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        return ["short" if n < self.settings.least else "" for n in columns["length"]]


class SameSettings(Section):
    keep: str = Field("first", description="Which of several is kept: first or last.")
    log: str = Field("", description="File that gets a line for each document.")
    die: str = Field("", description="A file: the process ends while there is none.")


@register("operator", "same", settings=SameSettings)
class Same:
    """Keeps one of the documents of equal text; the column has all their number."""

    late: ClassVar = ("keep",)

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(SameSettings)

    def summarize(self, documents: Documents) -> dict[str, np.ndarray]:
        if self.settings.log:
            with Path(self.settings.log).open("a") as file:
                file.writelines(f"{name}\n" for name in documents.ids)
        if self.settings.die and not Path(self.settings.die).exists():
            with suppress(OSError):
                Path(self.settings.die).touch()
            os._exit(9)
        data = [np.frombuffer(text.encode(), np.uint8) for text in documents.texts]
        offsets = np.cumsum([0, *map(len, data)])
        return {"text": np.concatenate(data), "text_offsets": offsets}

    def decide(
        self,
        ids: Sequence[Sequence[str]],
        summaries: Sequence[Mapping[str, np.ndarray]],
    ) -> list[Decision]:
        texts = [
            [
                s["text"][a:b].tobytes()
                for a, b in zip(s["text_offsets"], s["text_offsets"][1:], strict=False)
            ]
            for s in summaries
        ]
        groups: dict[bytes, list[str]] = {}
        for names, own in zip(ids, texts, strict=True):
            for name, text in zip(names, own, strict=True):
                groups.setdefault(text, []).append(name)
        choose = min if self.settings.keep == "first" else max
        return [
            Decision(
                {"alike": [len(groups[text]) for text in own]},
                [
                    "" if choose(groups[t]) == n else f"same: {choose(groups[t])}"
                    for n, t in zip(names, own, strict=True)
                ],
            )
            for names, own in zip(ids, texts, strict=True)
        ]
