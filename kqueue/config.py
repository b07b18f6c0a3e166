"""All settings of a fleet, in one place: the environment's ``KQUEUE_*`` and nothing else.

Order, strongest first: arguments given to :func:`load`, the environment, the one-machine fleet that runs
under ``home`` (its addresses only), the defaults here. Nothing is read when this module is imported.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from kqueue.errors import ConfigError

#: Written under ``home`` by a running one-machine fleet: its addresses and pid, readable by its owner.
FLEET_FILE: Final = "fleet.json"
#: The most evaluations that one request over HTTP can be allowed to have.
MAX_BATCH: Final = 100_000


class Config(BaseSettings):
    """A fleet's settings. Each is ``KQUEUE_<NAME>`` in the environment."""

    model_config = SettingsConfigDict(
        env_prefix="KQUEUE_",
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
        env_ignore_empty=True,
    )

    home: Path = Field(default_factory=lambda: Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share") / "kqueue")
    """Where a one-machine fleet keeps its data, and where clients on that machine find it."""
    database_url: SecretStr | None = None
    """SQLAlchemy URL of Postgres: ``postgresql+psycopg://user:password@host/database``, over TLS with
    ``?sslmode=verify-full&sslrootcert=FILE``."""
    redis_url: SecretStr | None = None
    """URL of Redis or Valkey: ``redis://user:password@host:6379/0``, ``redis+socket:///path``, or over TLS
    ``rediss://user:password@host:6379/0?ssl_ca_certs=FILE``."""
    scratch: Path = Field(default_factory=lambda: Path(tempfile.gettempdir()) / f"kqueue-{os.getuid()}")
    """Where candidates get their private directories; on a local disk that others may traverse."""
    gpus: str = "all"
    """``all``, ``none``, or indices and UUIDs separated by commas: the GPUs that this host's workers use."""
    slots_per_gpu: int = Field(default=4, ge=1, le=32)
    """Evaluations prepared at once on a GPU; only one at a time is checked and timed."""
    cpu_slots: int | None = Field(default=None, ge=0, le=1024)
    """Slots of the ``cpu`` lane; where unset one a core on a host without GPUs (at most 8), else none."""
    candidate_uid: int = Field(default=48000, ge=1000)
    """First uid for candidates where the fleet runs as root: each slot adds its number. Nobody else may have the 5120
    from it on: whatever runs under one is ended with its candidate."""
    isolation: Literal["none", "basic", "strong", "full"] = "basic"
    """The least isolation of candidates with which a worker starts; ``kqueue doctor`` tells what this host gives."""
    lease_s: float = Field(default=30.0, ge=1)
    """How long a worker may be silent before its evaluation is taken to be lost."""
    gpu_shared: Literal["wait", "refuse", "label"] = "wait"
    """Before a kernel is timed while a stranger computes on its GPU: wait a minute for it to stop, have the
    evaluation tried again at once, or only say so in the verdict."""
    min_free_memory: float = Field(default=0.05, ge=0, lt=1)
    """The share of the host's memory, or of its control group's, below which no evaluation is taken; 0 for none."""
    min_free_disk: float = Field(default=0.02, ge=0, lt=1)
    """The share of the disks of ``scratch`` and ``home`` below which no evaluation is taken; 0 for none."""
    flower_port: int = Field(default=5555, ge=0, le=65535)
    flower_address: str = "127.0.0.1"
    flower_auth: SecretStr | None = None
    """``user:password`` for Flower; without it Flower answers only on loopback and offers no API."""
    url: str | None = None
    """Where a :class:`kqueue.RemoteClient` finds `kqueue serve`: ``http://host:18188``."""
    token: SecretStr | None = None
    """The token that it shows there."""
    http_address: str = "127.0.0.1"
    """Where `kqueue serve` listens; on loopback it answers without tokens too."""
    http_port: int = Field(default=18188, ge=0, le=65535)
    http_tokens: Literal["auto", "required"] = "auto"
    """``required`` asks for a token on loopback too, as behind a proxy of the same host."""
    http_max_body_bytes: int = Field(default=32 << 20, ge=1 << 10)
    """The largest body of a request."""
    http_max_batch: int = Field(default=1000, ge=1, le=MAX_BATCH)
    """The most evaluations in one request."""
    http_max_queued: int = Field(default=10_000, ge=1)
    """The most evaluations without a verdict that were submitted with one token."""
    retry_delay_s: float = Field(default=1.0, ge=0)
    """Delay before a second attempt after a fleet's failure, doubled for each further one."""
    retention_days: float | None = Field(default=None, gt=0)
    """Finished evaluations are removed after so many days, with all that belongs to them; where unset never."""
    log_retention_days: float | None = Field(default=None, gt=0)
    """Logs and long evidence of finished evaluations are emptied after so many days; where unset never."""
    log_level: str = "INFO"
    log_json: bool = False

    @cached_property
    def home_path(self) -> Path:
        """``home`` with ``~`` resolved."""
        return self.home.expanduser().absolute()

    def require_database(self) -> str:
        """The database's URL; :class:`ConfigError` where there is none."""
        return _require(self.database_url, "KQUEUE_DATABASE_URL", self.home_path)

    def require_redis(self) -> str:
        """The broker's URL; :class:`ConfigError` where there is none."""
        return _require(self.redis_url, "KQUEUE_REDIS_URL", self.home_path)

    def environment(self) -> dict[str, str]:
        """What a child process needs in its environment to load the same settings. Holds secrets."""
        values: dict[str, str] = {}
        for name in type(self).model_fields:
            value: Any = getattr(self, name)
            if value is not None:
                text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
                values[f"KQUEUE_{name.upper()}"] = text
        return values


def _require(value: SecretStr | None, name: str, home: Path) -> str:
    if value is None:
        raise ConfigError(
            f"no fleet is known: set {name}, or start one on this machine with `kqueue up` (none runs under {home})"
        )
    return value.get_secret_value()


def _running_fleet(home: Path) -> dict[str, str]:
    """The addresses of the one-machine fleet running under ``home``; empty where none runs.

    A running fleet holds the lock on its home; a process id could be another's by now.
    """
    try:
        with (home / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return {}
    except BlockingIOError:
        pass
    except OSError:
        return {}
    try:
        known = json.loads((home / FLEET_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return {k: known[k] for k in ("database_url", "redis_url", "url") if known.get(k) is not None}


def load(**overrides: Any) -> Config:
    """Read the settings. ``overrides`` that are None count as not given.

    Raises:
        ConfigError: a setting has a value that cannot work; the message names it.
    """
    given: dict[str, Any] = {k: v for k, v in overrides.items() if v is not None}
    try:
        config = Config(**given)
        missing: dict[str, Any] = {
            k: v for k, v in _running_fleet(config.home_path).items() if getattr(config, k) is None
        }
        return Config(**given, **missing) if missing else config
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"]).upper()
        raise ConfigError(f"KQUEUE_{name}: {first['msg']} (given: {first['input']!r})") from None
