"""What forks of the server of :mod:`tests.started` find ready, as the server imports this file.

Weft imports much as late as it can, so that short commands are quick. In tests each of a thousand processes would
import it, and compile the same page templates.
"""

from weft.pages import templates

#: What tests import, and what runs import late.
MODULES = ("hypothesis", "jinja2", "tests.cases", "weft.cli.app")

for name in MODULES:
    __import__(name)
for page in ("page.html", "observe/run_page.html"):
    templates().get_template(page)
