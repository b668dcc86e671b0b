"""`rlkit view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlkit.cli.common.output import Output
from rlkit.cli.common.signals import graceful_shutdown


def view(
    output: Output,
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Run names, run folders, folders of runs, or records of tinker-cookbook, verifiers or inspect_ai; "
            "by default all runs.",
            show_default=False,
        ),
    ] = None,
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of 127.0.0.1; 0 for any free port.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the link without opening a browser.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write static pages instead: a .html file, or a folder for large runs."),
    ] = None,
) -> None:
    """Show runs in a browser, until Ctrl-C.

    The pages only read files. They follow a run while it trains, and do not slow it.
    """
    from rlkit.view.library import Library

    library = Library.find(runs or [])
    if html is not None:
        from rlkit.view.html_export import export_html

        # The first signal is a KeyboardInterrupt, so that an export that is stopped leaves no page behind.
        with graceful_shutdown(lambda: None, output.note, message="stopping", is_ready=lambda: False):
            written = export_html(library, html, note=output.note)
        output.result({"html": str(written)}, f"open {written}")
        return
    import threading
    import webbrowser

    from rlkit.view.server import ViewServer

    server = ViewServer(library, port=port)
    link = server.link + library.start
    output.result({"url": link}, link)
    if not no_open:  # in a thread, because `$BROWSER` may end only when its window is closed
        threading.Thread(target=webbrowser.open, args=(link,), daemon=True).start()
    with graceful_shutdown(server.stop, output.note, message="stopping"):
        server.run()
