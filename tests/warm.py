"""What forks of the server of :mod:`tests.started` find ready, as the server imports this file.

Weft imports much as late as it can, so that short commands are quick. In tests each of a thousand processes would
import it, compile the same page templates, and make the same parser of command lines.
"""

from weft.cli.app import app
from weft.pages import templates

#: What tests import, and what runs import late.
MODULES = (
    "hypothesis",
    "jinja2",
    "safetensors.torch",
    "spmd_types.checker",
    "tests.cases",
    "weft.checkpoint.convert",
    "weft.data.chat.source",
    "weft.generate.engine",
    "weft.models.hugging_face",
    "weft.parallel.context.attend",
    "weft.parallel.pipeline_pass",
    "weft.parallel.sharded",
    "weft.prove.equality",
    "weft.prove.types",
    "weft.train.reference_layout",
)

for name in MODULES:
    __import__(name)
for page in ("page.html", "observe/run_page.html"):
    templates().get_template(page)
_ = app.parser
