"""The command line: one file per command, errors as one line."""

import gc
import os
import sys

from weft.errors import Interrupted, WeftError
from weft.run.failure import leave, report_failure
from weft.run.signals import requests


def run_command_line() -> None:
    """Run the command ``weft`` with the arguments of this process, and end the process.

    Exit code 0 is success, 1 a failure, 2 a request that cannot be met.
    """
    # Imports make several 100,000 objects that stay; looking for circles among them at every 700th takes a fifth.
    gc.set_threshold(10_000)
    requests.watch()
    try:
        from weft.cli.app import app

        code = app(standalone_mode=False) or 0
        leave(code)
        sys.exit(code)
    except WeftError as error:
        sys.exit(report_failure(error))
    except (Interrupted, KeyboardInterrupt, EOFError):
        # a later signal does not wait for the interpreter's own end
        requests.leaving = True
        # of several ranks, the first
        if os.environ.get("RANK", "0") == "0" and "WEFT_LAUNCHED" not in os.environ:
            print(f"weft: {requests.words(requests.run)}", file=sys.stderr)
        leave(requests.code)
        sys.exit(requests.code)
    except BrokenPipeError:  # the program's entry tells which one it is
        raise
    except Exception as error:
        # typer's own errors (it carries a private click) know how to say what is wrong with a command line.
        say = getattr(error, "format_message", None)
        if say is None:
            sys.exit(report_failure(error))
        text = say()
        if type(error).__name__ == "NoArgsIsHelpError":
            print(text)
        else:
            context = getattr(error, "ctx", None)
            command = getattr(context, "command_path", "weft")
            text = text.strip().rstrip(".")
            option = getattr(error, "option_name", None)
            taken = [
                name
                for parameter in getattr(
                    getattr(context, "command", None), "params", []
                )
                for name in parameter.opts
            ]
            if option and (remedy := _instead_of(option, command, taken)):
                text = f"No such option: {option}; {remedy}"
            if "--checkpoint" in getattr(getattr(error, "param", None), "opts", []):
                text += (
                    f": name the model by it, as in '{command} --checkpoint runs/mine'"
                )
            see = " See" if text.endswith("?") else "; see"
            print(f"weft: error: {text}{see} '{command} --help'", file=sys.stderr)
        sys.exit(2)


def _instead_of(option: str, command: str, taken: list[str]) -> str:
    """Words that say what to write instead of an option that ``command`` does not know; empty if nobody knows."""
    if "--set" in taken:
        return _as_setting(option)
    if "model" in taken and option in ("--checkpoint", "--from", "--model"):
        return f"the model needs none: '{command} runs/mine'"
    return ""


def _as_setting(option: str) -> str:
    """Return words on how a recipe sets the value of this option; empty if it is no setting."""
    from weft.recipe.elsewhere import here_it_is
    from weft.recipe.unknown_key import settings_called

    if elsewhere := here_it_is(option, as_option=True):
        return elsewhere
    section, _, key = option.strip("-").replace("-", "_").rpartition(".")
    named = [
        name
        for name in settings_called(key)
        if name == f"{section}.{key}" or not section
    ]
    return (
        f"write {' or '.join(f'--set {name}=...' for name in named)}" if named else ""
    )
