"""All settings of a fleet, read from ``KQUEUE_*`` environment variables.

Precedence, highest first: arguments to :func:`load`, the environment, the one-machine fleet that runs
under ``home`` (its addresses and ``gpu_fallback`` only), the defaults here. Importing this module reads nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from kqueue.errors import ConfigError

#: A running one-machine fleet writes its addresses, its pid, its token for HTTP, Flower's password and ``gpu_fallback``
#: to this file under ``home``. Only its owner can read it.
FLEET_FILE: Final = "fleet.json"
#: The names of lanes.
LANE: Final = re.compile(r"cpu|gpu(\.[a-z0-9][a-z0-9_-]{0,30})?")
#: Upper bound of ``http_max_batch``.
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
    """Directory of the one-machine fleet's data. Clients on the machine find the fleet there. By default ``kqueue`` in
    ``XDG_DATA_HOME``, or in ``~/.local/share``."""
    database_url: SecretStr | None = None
    """SQLAlchemy URL of Postgres: ``postgresql+psycopg://user:password@host/database``, over TLS with
    ``?sslmode=verify-full&sslrootcert=FILE``."""
    redis_url: SecretStr | None = None
    """URL of Redis or Valkey: ``redis://user:password@host:6379/0``, ``redis+socket:///path``, or over TLS
    ``rediss://user:password@host:6379/0?ssl_ca_certs=FILE``."""
    scratch: Path = Field(default_factory=lambda: Path(tempfile.gettempdir()) / f"kqueue-{os.getuid()}")
    """Parent of the candidates' private directories, on a local disk. Other users must be able to traverse it.
    By default ``kqueue-UID`` in the temporary folder."""
    build_store: str | None = None
    """Where compiled extensions are kept for later evaluations of the same source: an absolute path, or a URL of fsspec
    such as ``s3://bucket/builds`` that several hosts share. By default the folder ``builds`` in ``scratch``. Nobody but
    fleets of yours may write there: what lies there is judged."""
    build_store_bytes: int = Field(default=2 << 30, ge=0)
    """Most bytes of all compiled extensions that are kept; the longest unused go first. 0 keeps none."""
    gpus: str = "all"
    """The GPUs that this host's workers use: ``all``, ``none``, or indices and UUIDs separated by commas."""
    slots_per_gpu: int = Field(default=4, ge=1, le=32)
    """Evaluations prepared at once on a GPU. Only one at a time is checked and timed."""
    gpu_fallback: str | None = None
    """The lane that takes an evaluation for a GPU lane that no live worker serves: ``gpu`` (any GPU), ``gpu.<model>``,
    or ``cpu``. It applies to all submissions but those that ask to wait for their lane. The verdict names the lane
    that it came from. By default nothing is substituted."""
    cpu_slots: int | None = Field(default=None, ge=0, le=1024)
    """Slots on the ``cpu`` lane. By default one per core (at most 8) on a host without GPUs, and none otherwise."""
    candidate_uid: int = Field(default=48000, ge=1000)
    """First uid for candidates if the fleet runs as root; each slot adds its number. Reserve the 5120 uids from here
    on: the fleet kills every process that runs under one of them when its candidate ends."""
    isolation: Literal["none", "basic", "strong", "full"] = "basic"
    """The minimum isolation of candidates. Workers do not start below it. ``kqueue doctor`` shows what this host
    provides."""
    lease_s: float = Field(default=30.0, ge=1)
    """Seconds that a worker may be silent before its evaluation counts as lost."""
    gpu_shared: Literal["wait", "refuse", "label"] = "wait"
    """The action if another process computes on the GPU when a kernel is to be timed: ``wait`` up to a minute for it
    to stop, ``refuse`` and retry the evaluation at once, or ``label`` the verdict."""
    min_free_memory: float = Field(default=0.05, ge=0, lt=1)
    """Take no evaluation while less than this share of the memory of the host or control group is free; 0 for no
    limit."""
    min_free_disk: float = Field(default=0.02, ge=0, lt=1)
    """Take no evaluation while less than this share of the disk of ``scratch`` or ``home`` is free; 0 for no limit."""
    flower_port: int = Field(default=5555, ge=0, le=65535)
    """Where `kqueue up` has Flower listen; 0 picks a free port."""
    flower_address: str = "127.0.0.1"
    """The address of that."""
    flower_auth: SecretStr | None = None
    """``user:password`` for Flower, in ASCII and without a comma. By default `kqueue up` generates a password for each
    run."""
    url: str | None = None
    """Address of `kqueue serve` for a :class:`kqueue.RemoteClient`: ``http://host:18188``, or ``unix:///path`` of its
    unix socket."""
    token: SecretStr | None = None
    """The token that a :class:`kqueue.RemoteClient` sends."""
    http_address: str = "127.0.0.1"
    """Where `kqueue serve` listens."""
    http_port: int = Field(default=18188, ge=0, le=65535)
    """The port of that; 0 picks a free one."""
    http_socket: Path | None = None
    """A unix socket on which `kqueue serve` listens too. Its owner and root need no token there."""
    http_tokens: Literal["required", "trust-local-users"] = "required"
    """``trust-local-users`` asks for no token on loopback: every user and every program of this machine may then
    submit code that the fleet runs, read all sources, and reset GPUs. It is for clients that send no token."""
    http_max_body_bytes: int = Field(default=32 << 20, ge=1 << 10)
    """Maximum size of a request's body."""
    http_max_batch: int = Field(default=1000, ge=1, le=MAX_BATCH)
    """Maximum number of evaluations in one request."""
    http_max_queued: int = Field(default=10_000, ge=1)
    """Maximum number of evaluations without a verdict per token."""
    http_access_log: bool = True
    """Whether `kqueue serve` logs a line for each request that it has answered."""
    reuse: bool = True
    """Whether equal evaluations may have the verdicts of this host's workers. False: none of them is reused."""
    probe_share: float = Field(default=0.005, ge=0, le=0.5)
    """Share of the judged evaluations that is added as probes of the fleet's own judge, on each lane. 0 for none. It
    counts where a fleet sweeps: give all hosts the same."""
    retry_delay_s: float = Field(default=1.0, ge=0)
    """Delay before the second attempt after a failure of the fleet. It doubles for each further attempt."""
    retention_days: float | None = Field(default=None, gt=0)
    """Remove evaluations, with all that belongs to them, so many days after their verdict; by default never."""
    log_retention_days: float | None = Field(default=None, gt=0)
    """Empty logs and long evidence so many days after the verdict; by default never."""
    log_level: str = "INFO"
    """The least level of what is logged: ``DEBUG``, ``INFO``, ``WARNING`` or ``ERROR``."""
    log_json: bool = False
    """Whether each event is logged as a line of JSON."""

    @field_validator("build_store")
    @classmethod
    def _is_location(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/") and not re.match(r"[a-z][a-z0-9+.-]*(://|::)", value):
            raise ValueError("neither an absolute path nor a URL")
        if value is not None and value.startswith(("file:", "local:")):
            raise ValueError("give a folder as a path, which the fleet then keeps closed to others")
        return value

    @field_validator("gpu_fallback")
    @classmethod
    def _is_lane(cls, value: str | None) -> str | None:
        if value is not None and not LANE.fullmatch(value):
            raise ValueError("not a lane: use gpu, gpu.<model> such as gpu.h200, or cpu")
        return value

    @cached_property
    def home_path(self) -> Path:
        """``home`` as an absolute path, with ``~`` expanded."""
        return self.home.expanduser().absolute()

    @property
    def live_s(self) -> float:
        """Seconds after its last heartbeat for which a worker counts as alive by those who submit and those who look.

        Twice the lease: what a worker held is given to another before its lane counts as gone.
        """
        return 2 * self.lease_s

    @property
    def build_location(self) -> str:
        """Where compiled extensions are kept, an absolute path or a URL; empty for nowhere."""
        if self.build_store_bytes == 0:
            return ""
        return self.build_store or str(self.scratch.absolute() / "builds")

    def require_database(self) -> str:
        """Return the database's URL. Raises :class:`ConfigError` if there is none."""
        return _require(self.database_url, "KQUEUE_DATABASE_URL", self.home_path)

    def require_redis(self) -> str:
        """Return the broker's URL. Raises :class:`ConfigError` if there is none."""
        return _require(self.redis_url, "KQUEUE_REDIS_URL", self.home_path)

    def environment(self) -> dict[str, str]:
        """Return the environment variables from which a child process loads the same settings. Holds secrets."""
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
            f"no fleet found: set {name}, or start one on this machine with `kqueue up` (none runs under {home})"
        )
    return value.get_secret_value()


def _running_fleet(home: Path) -> dict[str, str]:
    """Return the addresses and the token of the one-machine fleet that runs under ``home``; empty if none runs.

    The lock on the home shows that the fleet runs. Its pid would not: the kernel reuses pids.
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
        known: dict[str, Any] = json.loads((home / FLEET_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return {name: value for name, value in known.items() if isinstance(value, str)}


def _of_running_fleet(config: Config) -> dict[str, str]:
    """Return the settings that the running fleet provides and nothing else gave."""
    fleet = _running_fleet(config.home_path)
    shared = ("database_url", "redis_url", "gpu_fallback")
    given = {name: fleet.get(name) for name in shared if getattr(config, name) is None}
    if config.url is None and "socket" in fleet:
        given["url"] = f"unix://{fleet['socket']}"
    elif config.url in (None, fleet.get("url")):
        # The fleet's token is for the fleet's address alone.
        given["url"] = fleet.get("url")
        if config.token is None:
            given["token"] = fleet.get("token")
    return {name: value for name, value in given.items() if value is not None}


def http_url(config: Config) -> str:
    """Return the address at which browsers reach the fleet: the one that is set, the running fleet's, or the usual."""
    if config.url is not None and not config.url.startswith("unix:"):
        return config.url
    host = f"[{config.http_address}]" if ":" in config.http_address else config.http_address
    return _running_fleet(config.home_path).get("url") or f"http://{host}:{config.http_port}"


def flower_access(config: Config) -> tuple[str, str]:
    """Return the address and the credentials (``user:password``) of the running fleet's Flower.

    Raises:
        ConfigError: no fleet with Flower runs under ``home``.
    """
    fleet = _running_fleet(config.home_path)
    if "flower_auth" not in fleet:
        raise ConfigError(f"no Flower found: start one with `kqueue up` (none runs under {config.home_path})")
    return fleet["flower_url"], fleet["flower_auth"]


def load(**overrides: Any) -> Config:
    """Read the settings.

    Args:
        overrides: settings by name, which take precedence; None means not given.

    Raises:
        ConfigError: a setting has an invalid value; the message names it.
    """
    given: dict[str, Any] = {k: v for k, v in overrides.items() if v is not None}
    try:
        config = Config(**given)
        found: dict[str, Any] = _of_running_fleet(config)
        return Config(**given | found) if found else config
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"]).upper()
        raise ConfigError(f"KQUEUE_{name}: {first['msg']} (given: {first['input']!r})") from None
