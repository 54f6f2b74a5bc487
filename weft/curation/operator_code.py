"""What a step of a pipeline is made of, as digests: its settings and the code of its operator."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from weft.curation.data_operators import Filter, Joint, Mapper, Operator
from weft.curation.data_pipeline import DataStep
from weft.curation.work_folder import content_digest, words_digest
from weft.errors import WeftError
from weft.registry import find

#: What every operator imports, and none computes with.
_FRAME = {
    f"weft.curation.{name}" for name in ("data_operators", "data_pipeline", "documents")
}


class StepDigests(NamedTuple):
    """Digests of a step. ``early``: of all that its statistics or summaries come from; ``whole``: of the rest, too."""

    early: str
    whole: str


def step_digests(step: DataStep, operator: Operator) -> StepDigests:
    """Return the digests of a step: of the operator's name, settings, code, and of what the operator itself adds.

    An operator that reads files, such as a model, has a method ``fingerprint()`` that returns a text about them.
    """
    settings = step.model_dump(mode="json", by_alias=True, exclude={"on_error"})
    late = getattr(operator, "late", ())
    own = getattr(operator, "fingerprint", None)
    implementation = find("operator", step.operator).implementation
    base = [code_digest(implementation.__module__), str(own()) if callable(own) else ""]
    early = {key: value for key, value in settings.items() if key not in late}
    early_digest = words_digest(base, early)
    return StepDigests(early_digest, words_digest(early_digest, settings))


@cache
def code_digest(module: str) -> str:
    """Return the digest of a module's source, and of the modules of operators that the source imports."""
    return words_digest(sorted(_sources(module, set()).items()))


def _sources(module: str, seen: set[str]) -> dict[str, str]:
    seen.add(module)
    file = _file_of(module)
    if file is None:
        return {}
    text = file.read_bytes()
    digests = {module: content_digest(text)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for name in (node.module, *(f"{node.module}.{a.name}" for a in node.names)):
                if _is_code(name) and name not in seen | _FRAME:
                    digests |= _sources(name, seen)
    return digests


def _is_code(name: str) -> bool:
    return name.startswith(("weft.curation.", "weft.techniques."))


def _file_of(module: str) -> Path | None:
    """Return the file of a module, None if it has none."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    origin = spec.origin if spec else None
    path = Path(origin) if origin else None
    return path if path and path.suffix == ".py" and path.is_file() else None


def build_operator(number: int, step: DataStep) -> Operator:
    """Build the operator of step ``number``, from 0. Raises :class:`WeftError` if it is none of the three kinds."""
    operator: Any = step.build()
    if not isinstance(operator, Mapper | Filter | Joint):
        source = inspect.getsourcefile(type(operator))
        raise WeftError(
            f"steps[{number}]: operator {step.operator!r} ({source}) has neither 'map', nor 'late' with 'statistics' "
            "and 'reasons' or with 'summarize' and 'decide'"
        )
    return operator
