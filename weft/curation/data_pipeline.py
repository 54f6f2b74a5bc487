"""The sections of a pipeline's file: sources, steps, output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from weft.curation.data_operators import Operator
from weft.recipe import Source
from weft.recipe.host_section import HostSection, with_techniques
from weft.registry import find
from weft.section import Section


class DataStep(HostSection):
    """A table ``[[steps]]`` of a data pipeline: the name of an operator, with the settings of this operator."""

    hosts: ClassVar = {"operator": "operator"}

    operator: str = Field(
        description="Name of the operator, such as 'minhash'. Plugins can register others."
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop",
        description=(
            "What happens to a document on which the operator raises an error: 'stop' ends the run after naming "
            "all such documents, 'skip' leaves them out, counts them and lists them on the page."
        ),
    )

    def build(self) -> Operator:
        """Build and return the operator that this step names, such as a filter, with the step's settings."""
        operator: Operator = find("operator", self.operator).implementation(self)
        return operator


class PipelineOutput(Section):
    """Section ``[output]`` of a pipeline: the form of the documents and tokens that it writes."""

    format: Literal["parquet", "jsonl"] = Field(
        "parquet", description="Format of the files of documents."
    )
    tokenizer: str = Field(
        "",
        description=(
            "Tokenizer with which the documents are also written as token ids. If not set: only texts are written."
        ),
    )


class DataPipeline(Section):
    """A data pipeline: sources of documents, and the steps that all documents pass through, one after another."""

    name: str = Field("", description="Name of the pipeline in reports.")
    plugins: Sequence[str] = Field(
        (), description="Python modules that register operators and sources."
    )
    seed: int = Field(
        0, description="Default of the setting 'seed' of every step that has one."
    )
    shards: int = Field(
        0,
        ge=0,
        description=(
            "Number of shards (parts of the data that are processed on their own). 0: it follows from "
            "the size of the sources, at 1 to 64 MB for a shard."
        ),
    )
    sources: Sequence[Source] = Field(
        min_length=1,
        description="Data sources to read, written as [[data.sources]] of a recipe are.",
    )
    steps: Sequence[Annotated[SerializeAsAny[DataStep], with_techniques(DataStep)]] = (
        Field(
            (), description="Operators that all documents pass through, in this order."
        )
    )
    output: PipelineOutput = Field(
        PipelineOutput(),
        description="Format and tokenizer of the documents that are written.",
    )

    def seeded_steps(self) -> list[DataStep]:
        """Return the steps, where every setting ``seed`` that the user has not set has the pipeline's seed."""
        return [
            step.model_copy(update={"seed": self.seed})
            if "seed" in type(step).model_fields and "seed" not in step.model_fields_set
            else step
            for step in self.steps
        ]
