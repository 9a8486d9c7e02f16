"""Opens the web console of a running llamasup in a browser (``llamasup ui``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from llamasup.cli.command_group import command_set, flag
from llamasup.cli.output.results import write_result
from llamasup.cli.target import with_client
from llamasup.errors import FolderUnusable, OutputFailed

if TYPE_CHECKING:
    from llamasup.cli.output.view import View
    from llamasup.core.control.client import ControlClient

commands = command_set()

_PRINT = "Open the address of `llamasup ui --print` in a browser."

Print = Annotated[bool, flag("--print", "Print the address instead of opening a browser.")]


@commands.command()
@with_client
def ui(view: View, client: ControlClient, *, print_: Print = False) -> None:
    """Open the web console of a running llamasup.

    The browser opens a private file, which signs it in within 60 seconds. A browser from a snap or a flatpak
    often cannot read this file. Open the address that --print prints in such a browser.
    """
    token = client.console_token()
    # Of another machine, only the given URL is known to be reachable from here.
    address = str(token["url"])
    if client.address.socket is None:
        address = f"{client.address.url.rstrip('/')}/llamasup/#token={token['token']}"
    if print_:
        write_result(address)
        return
    import webbrowser

    if not webbrowser.open(_file_for(address, client.address.socket).as_uri()):
        raise OutputFailed("No browser could be opened.", remedy=_PRINT)
    view.say("info", "control", "The console is open in your browser")


def _file_for(address: str, socket: str | None) -> Path:
    """Write the file that the browser opens: its arguments must not contain the token.

    It is next to the ``socket``, in the run folder, which llamasup removes when it stops. A llamasup on
    another machine has no such folder here.
    """
    from llamasup.core.system.process.run_folder import private_runtime_folder
    from llamasup.features.console.sign_in_file import write_sign_in_file

    try:
        folder = private_runtime_folder() if socket is None else Path(socket).parent
        return write_sign_in_file(folder, address)
    except (FolderUnusable, OSError) as error:
        raise OutputFailed(f"The file for the browser cannot be written: {error}", remedy=_PRINT) from error
