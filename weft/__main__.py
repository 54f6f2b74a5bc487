"""Entry point of ``weft``. Signals are handled before anything is imported, as imports of commands take a while.

Until then Python itself answers Ctrl-C with a traceback, so this file and ``weft/__init__.py`` import what the
interpreter has imported anyway.
"""

import os
import sys


def main() -> None:
    """Run the command line ``weft``.

    Ctrl-C or SIGTERM while it starts or ends prints at most one line, and no traceback.
    """
    try:
        _open_closed()
        import signal

        # Also Ctrl-C that was ignored where this process was started: see weft.run.signals.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _stop)
        if "WEFT_LAUNCHED" in os.environ:
            # the launcher has held it back so far
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

        from weft.cli import run_command_line
        from weft.run.signals import requests

        requests.program = main
        run_command_line()
    except KeyboardInterrupt:
        _stop(2)
    except BrokenPipeError as error:
        from weft.run.failure import nobody_reads, report_failure

        if nobody_reads():
            _end_unread()
        sys.exit(report_failure(error))
    except SystemExit as ended:
        if requests.asked:
            _leave(ended.code if isinstance(ended.code, int) else 1)
        # rich's answer to a pipe that nobody reads
        if isinstance(ended.__context__, BrokenPipeError):
            _end_unread()
        raise


def _end_unread() -> None:
    """End because nobody reads the output. Of several ranks the launcher gets a record, which it would otherwise miss
    as if the rank had crashed.
    """
    if "WEFT_LAUNCHED" in os.environ:
        from weft.errors import WeftError
        from weft.run.failure import report_failure

        report_failure(
            WeftError(
                "nobody reads this command's output any more; let it go to a file"
            )
        )
    _leave(1)


def _open_closed() -> None:
    """Open standard streams that are closed, as under ``>&-``. Otherwise the next file would take the place of one, and
    get what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # the lowest number that is free, as those below it are open
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _stop(number: int, frame: object = None) -> None:
    """End because of the signal ``number``, with one line of the first rank.

    As its handler this raises nothing, as the import that it interrupts could swallow an exception, or print it.
    """
    if os.environ.get("RANK", "0") == "0" and "WEFT_LAUNCHED" not in os.environ:
        os.write(2, b"weft: interrupted\n")
    _leave(128 + number)


def _leave(code: int) -> None:
    """End at once, because a repeated signal while the interpreter ends would change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, RuntimeError):
            # nobody reads it any more, or a signal has interrupted its writer
            continue
    os._exit(code)


if __name__ == "__main__":
    main()
