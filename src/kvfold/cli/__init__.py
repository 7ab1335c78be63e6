"""The `kvfold` command: thin; each group of commands is a module of this package with an `app`.

What only one command needs (numpy, rich, the store) is imported when it runs, so that the others
answer at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvfold import __version__
from kvfold.cli import demo, plan, selftest, store, why
from kvfold.errors import ConfigError, KvfoldError, StoreGone

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_NO_STORE = 3

app = typer.Typer(
    name="kvfold",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="KV-cache offloading for vLLM that stores every distinct byte once.",
    epilog="Exit status: 0 done, 1 failed, 2 wrong usage or setting, 3 no store runs.",
)
app.add_typer(store.app, name="store")
app.command("plan", epilog=plan.EXAMPLES)(plan.plan)
app.command("why", epilog=why.EXAMPLES)(why.why)
app.command("selftest", epilog=selftest.EXAMPLES)(selftest.selftest)
app.command("demo", epilog=demo.EXAMPLES)(demo.demo)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvfold {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status. Errors made for people are one line."""
    try:
        status = app(args=arguments, prog_name="kvfold", standalone_mode=True)
    except SystemExit as ending:
        return _status(ending.code)
    except KvfoldError as error:
        from rich.console import Console

        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        if isinstance(error, StoreGone):
            return EXIT_NO_STORE
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ERROR
    except BrokenPipeError:
        return EXIT_ERROR
    return _status(status)


def _status(code: object) -> int:
    if code is None:
        return 0
    return code if isinstance(code, int) else EXIT_ERROR
