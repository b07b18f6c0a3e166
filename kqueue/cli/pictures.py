"""Pictures that commands write, in a format that the file's name determines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from kqueue.cli.render import say
from kqueue.errors import ConfigError, InvalidRequest
from kqueue.text import clean

if TYPE_CHECKING:
    from kqueue.charts import Form

#: Name of standard output.
STDOUT: Final = "-"


def form_of(out: str | None) -> Form:
    """Return the format for the argument of ``--out``. The default, and the format of standard output, is SVG.

    Raises:
        InvalidRequest: its ending is not a supported format.
    """
    from kqueue.charts import Form

    if out is None or out == STDOUT:
        return Form.SVG
    ending = Path(out).suffix.lower().removeprefix(".")
    if ending not in list(Form):
        raise InvalidRequest(f"--out {out}: the name must end in .svg or .png")
    return Form(ending)


def write(file: Path, picture: bytes) -> None:
    """Write a picture, and print its path.

    Raises:
        ConfigError: it cannot be written.
    """
    existed = file.exists()
    try:
        file.write_bytes(picture)
    except OSError as error:
        raise ConfigError(f"--out: {file} cannot be written: {error.strerror or error}") from None
    if existed:
        say(f"{file} existed and was replaced")
    typer.echo(clean(file))
