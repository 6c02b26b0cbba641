"""One file per command, or a few that belong together: parse, call one function below, render. No logic."""

import signal


def command() -> None:
    """The `hpcdl` command. Ctrl-C while it loads ends it silently: nothing has begun (later `run` handles it)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from hpcdl.cli.main import main

    main()
