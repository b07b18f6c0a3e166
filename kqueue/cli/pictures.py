"""Pictures that commands write: their format by the file's name, and the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from kqueue.cli.render import say
from kqueue.errors import ConfigError, InvalidRequest
from kqueue.text import clean

if TYPE_CHECKING:
    from kqueue.charts import Form

#: The name that stands for standard output.
STDOUT: Final = "-"


def form_of(out: str | None) -> Form:
    """Return the format that the argument of ``--out`` asks for; SVG without one, and for standard output.

    Raises:
        InvalidRequest: its ending says another format.
    """
    from kqueue.charts import Form

    if out is None or out == STDOUT:
        return Form.SVG
    ending = Path(out).suffix.lower().removeprefix(".")
    if ending not in list(Form):
        raise InvalidRequest(f"--out {out}: the name must end in .svg or .png")
    return Form(ending)


def write(file: Path, picture: bytes) -> None:
    """Write a picture, and print where it is.

    Raises:
        ConfigError: it cannot be written.
    """
    there = file.exists()
    try:
        file.write_bytes(picture)
    except OSError as error:
        raise ConfigError(f"--out: {file} cannot be written: {error.strerror or error}") from None
    if there:
        say(f"{file} was there, and is replaced")
    typer.echo(clean(file))
