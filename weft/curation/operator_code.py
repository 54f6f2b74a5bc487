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
    """Digests by which a data run recognises that results of a step are still valid.

    ``early``: covers the inputs of the step's statistics or summaries. ``whole``: covers all settings and code.
    """

    early: str
    whole: str


def step_digests(step: DataStep, operator: Operator) -> StepDigests:
    """Return the digests of a step. They cover the operator's name, its settings and its code.

    An operator that reads files, such as a model, also has a method ``fingerprint()``; the text that it returns is part
    of the digests.
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
    """Return a digest of the source of ``module``, and of all modules of operators that it imports."""
    return words_digest(sorted(_sources(module, set()).items()))


def _sources(module: str, seen: set[str]) -> dict[str, str]:
    seen.add(module)
    file = _file_of(module)
    if file is None:
        return {}
    text = file.read_bytes()
    digests = {module: content_digest(text)}
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        base, *members = _imported_names(node, package) or [""]
        # what a plain module holds is no module, and to look for it would import the module
        names = [base] if _is_plain(base, module, file) else [base, *members]
        for name in names:
            if name not in seen | _FRAME and _is_code(name, module, file):
                digests |= _sources(name, seen)
    return digests


def _is_plain(name: str, module: str, file: Path) -> bool:
    """Return whether ``name`` is a module of operators that is no package."""
    source = _file_of(name) if _is_code(name, module, file) else None
    return source is not None and source.name != "__init__.py"


def _imported_names(node: ast.AST, package: str) -> list[str]:
    """Return names of which some are modules that ``node`` imports. ``package``: where relative names begin."""
    if isinstance(node, ast.Import):
        return ["", *(alias.name for alias in node.names)]
    if not isinstance(node, ast.ImportFrom):
        return []
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def _is_code(name: str, module: str, file: Path) -> bool:
    """Return whether ``name`` may be a module that operators compute with, which the ``file`` of ``module`` names.

    Of a plugin these are the modules of its package, or those beside its file.
    """
    if name.startswith("weft.") or module.startswith("weft."):
        return name.startswith(("weft.curation.", "weft.techniques."))
    top, folder = name.partition(".")[0], file.parent
    if top == module.partition(".")[0]:
        return True
    if {"site-packages", "dist-packages"} & {*file.parts}:
        return False
    beside = folder / f"{top}.py", folder / top / "__init__.py"
    return "." not in module and any(map(Path.is_file, beside))


def _file_of(module: str) -> Path | None:
    """Return the file of a module, None if it has none."""
    try:
        spec = find_spec(module)
    except Exception:  # of a plugin's module, which its import here would raise, too
        return None
    origin = spec.origin if spec else None
    path = Path(origin) if origin else None
    return path if path and path.suffix == ".py" and path.is_file() else None


def build_operator(number: int, step: DataStep) -> Operator:
    """Build the operator of step ``number``, from 0. Raises :class:`WeftError` if it is no mapper, filter or joint
    operator.
    """
    operator: Any = step.build()
    if not isinstance(operator, Mapper | Filter | Joint):
        source = inspect.getsourcefile(type(operator))
        raise WeftError(
            f"steps[{number}]: operator {step.operator!r} ({source}) has neither 'map', nor 'late' with 'statistics' "
            "and 'reasons' or with 'summarize' and 'decide'"
        )
    return operator
