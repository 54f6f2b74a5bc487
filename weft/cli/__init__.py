"""The command line: one file per command, errors as one line."""

import gc
import os
import sys

from weft.errors import WeftError


def main() -> None:
    """Entry point of ``weft``. Exit code 0 is success, 1 a failure, 2 a request that cannot be met."""
    # Imports make several 100,000 objects that stay; looking for circles among them at every 700th takes a fifth.
    gc.set_threshold(10_000)
    from weft.cli.app import app
    from weft.train.failure import leave, report_failure

    try:
        code = app(standalone_mode=False) or 0
        leave(code)
        sys.exit(code)
    except WeftError as error:
        sys.exit(report_failure(error))
    except (KeyboardInterrupt, EOFError):
        if "RANK" not in os.environ:  # of several ranks, the launcher says it once
            print("weft: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        # typer's own errors (it carries a private click) know how to say what is wrong with a command line.
        say = getattr(error, "format_message", None)
        if say is None:
            sys.exit(report_failure(error))
        text = say()
        if type(error).__name__ == "NoArgsIsHelpError":
            print(text)
        else:
            command = getattr(getattr(error, "ctx", None), "command_path", "weft")
            print(f"weft: error: {text.strip().rstrip('.')}; see '{command} --help'", file=sys.stderr)
        sys.exit(2)
