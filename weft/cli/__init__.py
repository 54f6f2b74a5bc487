"""The command line: one file per command, errors as one line."""

from __future__ import annotations

import sys

from weft.errors import WeftError


def main() -> None:
    """Entry point of ``weft``. Exit code 0 is success, 1 a failure, 2 a request that cannot be met."""
    import click

    from weft.cli.app import app
    from weft.cli.launch import report_failure

    try:
        sys.exit(app(standalone_mode=False) or 0)
    except WeftError as error:
        sys.exit(report_failure(error))
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        sys.exit(2)
    except click.ClickException as error:
        command = error.ctx.command_path if getattr(error, "ctx", None) else "weft"  # type: ignore[attr-defined]
        print(f"weft: error: {error.format_message().rstrip('.')}; see '{command} --help'", file=sys.stderr)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        print("weft: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        sys.exit(report_failure(error))
