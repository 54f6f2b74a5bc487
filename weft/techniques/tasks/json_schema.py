"""JSON schema: answers that are JSON of a given form."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field, field_validator

from weft.errors import UsageError
from weft.registry import register
from weft.rl.prompt_task import PromptTask
from weft.rl.rollout import RewardQuestion
from weft.rl.schema_matching import check_schema, matches
from weft.section import Section

#: Characters of an answer that is read.
LONGEST = 100_000


class JsonSchemaSettings(Section):
    """Settings of the task of answering with JSON of a given schema."""

    json_schema: dict[str, Any] = Field(
        {},
        description=(
            "JSON schema that an answer must satisfy to get the reward 1. A prompt whose record has a column "
            "'schema' uses that schema instead."
        ),
    )

    @field_validator("json_schema")
    @classmethod
    def _can_be_checked(cls, schema: dict[str, Any]) -> dict[str, Any]:
        try:
            check_schema(schema)
        except UsageError as error:
            raise ValueError(str(error)) from None
        return schema


@register(
    "task",
    "json-schema",
    settings=JsonSchemaSettings,
    title="Answers in JSON of a given form",
)
class JsonSchema(PromptTask):
    """Asks the prompts of a file, and rewards an answer that is JSON and follows a JSON schema by 1, others by 0."""

    def score(self, question: RewardQuestion, answer: str) -> float:
        schema = question.facts.get("schema")
        if schema is None:
            schema = self.settings.own(JsonSchemaSettings).json_schema
        elif isinstance(schema, str):
            schema = json.loads(schema)
        if len(answer) > LONGEST:
            return 0.0
        check_schema(schema)
        try:
            value = json.loads(answer, parse_constant=_refuse)
            return float(matches(value, schema, schema))
        # numbers of too many digits, and nesting that no schema has
        except (ValueError, OverflowError, RecursionError):
            return 0.0


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
