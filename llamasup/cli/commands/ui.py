"""``llamasup ui``: opens the web console of a running llamasup in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llamasup.cli.command_group import command_set
from llamasup.cli.options.groups import takes_groups
from llamasup.cli.output.results import write_result
from llamasup.cli.target import TargetOptions, with_client
from llamasup.errors import OutputFailed

if TYPE_CHECKING:
    from llamasup.cli.output.view import View
    from llamasup.control.client import ControlClient

__all__ = ["commands"]

commands = command_set()

Print = Annotated[bool, typer.Option("--print", help="Print the address instead of opening a browser.")]


@commands.command()
@takes_groups
def ui(ctx: typer.Context, *, target: TargetOptions, print_: Print = False) -> int:
    """Open the web console of a running llamasup.

    The address signs one browser in. It is valid for 60 seconds.
    """

    def act(view: View, client: ControlClient) -> None:
        token = client.console_token()
        # Of another machine, only the given URL is known to be reachable from here.
        address = str(token["url"])
        if client.address.socket is None:
            address = f"{client.address.url.rstrip('/')}/llamasup/#token={token['token']}"
        if print_:
            write_result(address)
            return
        import webbrowser

        if not webbrowser.open(address):
            raise OutputFailed(
                "No browser could be opened.", remedy="Open the address of `llamasup ui --print` in one."
            )
        view.say("info", "control", "The console is open in your browser")

    return with_client(target, act)
