"""What forks of the server of :mod:`tests.started` find ready, as the server imports this file.

Weft imports much as late as it can, so that short commands are quick. In tests each of a thousand processes would
import it, compile the same page templates, and build the same command line.
"""

from weft.cli.app import command_line
from weft.pages import templates

#: What tests import, and what runs import late.
MODULES = ("hypothesis", "jinja2", "tests.cases")

for name in MODULES:
    __import__(name)
command_line()
for page in ("page.html", "observe/run_page.html"):
    templates().get_template(page)
