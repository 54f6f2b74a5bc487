"""How much of Weft a short run imports, by module: python bench/footprint.py [LAYOUT], such as dp=4.

Two steps of a quickstart that is small in all its sizes. Counted are the tokens of the files of weft that the first
rank has imported at its end, without comments, docstrings and layout. `tests/test_footprint.py` sets the limits.
"""

import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import weft

RUN = """
import json, sys
for name in json.loads(sys.argv[1]): sys.modules[name] = None
del sys.argv[1]
from weft import load_recipe, train
outcome = train(load_recipe("quickstart", sys.argv[3:], sys.argv[1]), out=sys.argv[2])
assert outcome.progress.step == 2 and outcome.interrupted == 0 and outcome.checkpoint.holds("weft.json"), outcome
import plugin_of_footprint
plugin_of_footprint.write()
"""

#: Ranks end by os._exit, which nothing is told of.
PLUGIN = """
import os, sys
from pathlib import Path
import weft

def write():
    root = os.path.dirname(weft.__file__) + os.sep
    files = [path for m in [*sys.modules.values()] if (path := str(getattr(m, "__file__", ""))).startswith(root)]
    Path(__file__).with_name(f"rank-{os.environ.get('RANK', 0)}-{os.getpid()}").write_text("\\n".join(files))

def leave(code, exit=os._exit):
    write()
    exit(code)

os._exit = leave
"""

LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


@cache
def tokens(path: Path) -> int:
    """Tokens of a source file, without comments, docstrings and layout."""
    text = path.read_text()
    documented = (
        node.body[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    )
    docstrings = {(node.lineno, node.col_offset) for node in documented}
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(t.type not in LAYOUT and t.start not in docstrings for t in found)


def imported(layout: str, hidden: Sequence[str] = ()) -> dict[str, int]:
    """The modules of weft that the first rank of a run under ``layout`` has imported, and how many tokens each has.

    ``hidden``: modules that this process cannot import.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plugin_of_footprint.py").write_text(PLUGIN)
        (folder / "text").mkdir()
        (folder / "text/one.txt").write_text("A text of a few words. " * 2000)
        words = [
            'plugins=["plugin_of_footprint"]', "train.steps=2", "validation.every=0",
            "model.layers=2", "model.embed=32", "data.tokenizer='bytes'", f"data.cache='{folder}/cache'",
            f"data.sources=[{{kind='text', path='{folder}/text'}}]",
            "resilience.detect=60",  # a rank that is late on a busy machine is not lost
        ]  # fmt: skip
        places = [str(Path(weft.__file__).parents[1]), name]
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                RUN,
                json.dumps([*hidden]),
                layout,
                str(folder / "run"),
                *words,
            ],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        lists = [path.read_text().split("\n") for path in folder.glob("rank-0-*")]
    root = Path(weft.__file__).parent
    # of a rank and the processes that it has started, the rank
    files = {Path(file) for file in max(lists, key=len)}
    return {file.relative_to(root).as_posix(): tokens(file) for file in files}


def main(layout: str = "") -> None:
    modules = imported(layout)
    rooms: dict[str, list[str]] = defaultdict(list)
    for name in sorted(modules, key=lambda name: -modules[name]):
        rooms[name.split("/")[0]].append(name)
    for names in sorted(
        rooms.values(), key=lambda names: -sum(map(modules.get, names))
    ):
        print(f"{sum(modules[name] for name in names):7,} {names[0].split('/')[0]}")
        for name in names if len(names) > 1 else ():
            print(f"{modules[name]:15,} {name}")
    print(f"{sum(modules.values()):,} tokens of {len(modules)} files")


if __name__ == "__main__":
    main(*sys.argv[1:])
