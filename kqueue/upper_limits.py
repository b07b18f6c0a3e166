"""Upper limits of the numbers in requests, which operators set by scope or token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

from pydantic import BaseModel, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from kqueue.contract import Request, Settings
from kqueue.errors import ConfigError, InvalidRequest

_ModelT = TypeVar("_ModelT", bound=BaseModel)
#: Paths of the size of each source, in bytes of UTF-8, and of the number of a token's attempts that run at once. All
#: other paths lead to numbers in the settings.
SOURCE: Final = "source_bytes"
RUNNING: Final = "running"
_GIVEN: Final[TypeAdapter[float]] = TypeAdapter(Annotated[float | ByteSize, Field(union_mode="left_to_right")])
_SCOPES: Final = TypeAdapter(
    dict[Literal["*", "submit", "problems", "admin"], dict[str, float | str]], config=ConfigDict(strict=True)
)


def _numbers(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of each number in a model, with its type."""
    for name, field in model.model_fields.items():
        for kind in (Annotated[field.annotation, field], *get_args(field.annotation)):  # pyright: ignore[reportInvalidTypeForm]
            base: Any = getattr(kind, "__origin__", kind)
            if base in (int, float):
                yield prefix + name, kind
            elif isinstance(base, type) and issubclass(base, BaseModel):
                yield from _numbers(base, f"{prefix}{name}.")


_KINDS: Final[Mapping[str, Any]] = {
    **dict(_numbers(Settings)),
    SOURCE: Annotated[int, Field(ge=1)],
    RUNNING: Annotated[int, Field(ge=1, lt=1 << 31)],
}


def parse(limits: Mapping[str, object]) -> dict[str, float]:
    """Return upper limits by path, such as ``deadlines.check_s``. A limit is a number, or a text such as ``4GiB``.

    Raise InvalidRequest if a request has no such number, or the number cannot have this value.
    """
    parsed: dict[str, float] = {}
    for path, given in limits.items():
        if path not in _KINDS:
            raise InvalidRequest(f"{path}: a request has no such number. Use one of {', '.join(_KINDS)}")
        kind = TypeAdapter[float](_KINDS[path], config=ConfigDict(allow_inf_nan=False))
        try:
            parsed[path] = kind.validate_python(_GIVEN.validate_python(given))
        except ValidationError as error:
            raise InvalidRequest(f"{path}: {error.errors()[0]['msg']}, not {given!r}") from None
    return parsed


def of_scopes(table: str) -> dict[str, dict[str, float]]:
    """Return the upper limits of each scope in the setting ``http_limits``, or raise ConfigError."""
    try:
        scopes = {scope: parse(limits) for scope, limits in _SCOPES.validate_json(table).items()}
        if any(RUNNING in limits for limits in scopes.values()):
            raise InvalidRequest(f"{RUNNING} is only for tokens (`kqueue token create --limit`)")
        return scopes
    except ValidationError:
        example = 'give limits by scope (*, submit, problems, admin) as JSON: {"submit": {"deadlines.check_s": 60}}'
        raise ConfigError(f"KQUEUE_HTTP_LIMITS: {example}") from None
    except InvalidRequest as error:
        raise ConfigError(f"KQUEUE_HTTP_LIMITS: {error}") from None


def apply(request: Request, limits: Mapping[str, float]) -> Request:
    """Return the request with the numbers that it does not set lowered to their limits. Refuse one above its limit."""
    for path, most in limits.items():
        if path == RUNNING:  # the claims check it
            continue
        for one in request.settings.tolerances or ():
            if path.startswith("tolerance.") and getattr(one, path.rpartition(".")[2], 0) > most:
                raise InvalidRequest(f"settings.tolerances: a value exceeds your upper limit {path} of {most:.12g}")
        if path != SOURCE:
            request = _lowered(request, ["settings", *path.split(".")], path, most, is_set=True)
            continue
        for name in ("problem", "kernel", "trees"):
            if (size := len("".join(getattr(request, name)).encode())) > most:
                raise InvalidRequest(f"{name}: its {size} bytes exceed your upper limit of {most:.12g}")
    return request


def _lowered(model: _ModelT, parts: list[str], path: str, most: float, *, is_set: bool) -> _ModelT:
    name, *rest = parts
    value, is_set = getattr(model, name, None), is_set and name in model.model_fields_set
    if value is None or (not rest and value <= most):
        return model
    if not rest and is_set:
        raise InvalidRequest(f"settings.{path}: {value:.12g} exceeds your upper limit of {most:.12g}")
    lower = _lowered(value, rest, path, most, is_set=is_set) if rest else most
    return model if lower is value else model.model_copy(update={name: lower})
