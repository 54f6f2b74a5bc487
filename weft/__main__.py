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
            _leave(1)
        sys.exit(report_failure(error))
    except SystemExit as ended:
        if requests.asked:
            _leave(ended.code if isinstance(ended.code, int) else 1)
        raise


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
