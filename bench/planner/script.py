"""How the scripts of this folder end: a mistake of the user is one line and an exit code, as in ``weft``."""

import sys
from collections.abc import Callable

from weft.errors import UsageError, WeftError


def run(main: Callable[[], None]) -> None:
    try:
        main()
    except WeftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
