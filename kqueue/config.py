"""All settings of a fleet, read from ``KQUEUE_*`` environment variables.

Precedence, highest first: arguments to :func:`load`, the environment, the one-machine fleet that runs
under ``home`` (only its addresses, token and ``gpu_fallback``), the defaults here. Importing this module reads nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from functools import cached_property
from importlib.machinery import PathFinder
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from kqueue.errors import ConfigError

#: File under ``home`` to which a running one-machine fleet writes its addresses, pid, HTTP token, Flower password and
#: ``gpu_fallback``. Only its owner can read it.
FLEET_FILE: Final = "fleet.json"
#: Pattern of the names of lanes.
LANE: Final = re.compile(r"cpu|gpu(\.[a-z0-9][a-z0-9_-]{0,30})?")
#: Secrets that only `kqueue serve` needs.
_SERVERS_SECRETS: Final = frozenset({"oidc_client_secret", "callback_secret"})
#: Maximum value of ``http_max_batch``.
MAX_BATCH: Final = 100_000


class Config(BaseModel):
    """A fleet's settings. The environment variable of each is ``KQUEUE_<NAME>``. An empty one is not set."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)

    home: Path = Field(default_factory=lambda: Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share") / "kqueue")
    """Directory of the one-machine fleet's data, where clients on the machine find the fleet. By default ``kqueue`` in
    ``XDG_DATA_HOME``, or in ``~/.local/share``."""
    database_url: SecretStr | None = None
    """SQLAlchemy URL of Postgres: ``postgresql+psycopg://user:password@host/database``, over TLS with
    ``?sslmode=verify-full&sslrootcert=FILE``."""
    redis_url: SecretStr | None = None
    """URL of Redis or Valkey: ``redis://user:password@host:6379/0``, ``redis+socket:///path``, or over TLS
    ``rediss://user:password@host:6379/0?ssl_ca_certs=FILE``. Sentinels that name the server:
    ``sentinel://user:password@host:26379;sentinel://host:26379/0?master_name=NAME``."""
    scratch: Path = Field(default_factory=lambda: Path(tempfile.gettempdir()) / f"kqueue-{os.getuid()}")
    """Parent of the candidates' private directories, on a local disk. Other users must be able to traverse it. By
    default ``kqueue-UID`` in the temporary folder."""
    build_store: str | None = None
    """Location of compiled extensions, which later evaluations of the same source reuse. It is an absolute path, or a
    URL of fsspec such as ``s3://bucket/builds`` that several hosts share. By default the folder ``builds`` in
    ``scratch``. Only your own fleets must have write access, because the judge runs these files."""
    build_store_bytes: int = Field(default=2 << 30, ge=0)
    """Maximum size in bytes of all stored extensions. The least recently used are removed first. 0 stores none."""
    gpus: str = "all"
    """The GPUs that this host's workers use: ``all``, ``none``, or indices and UUIDs separated by commas."""
    slots_per_gpu: int = Field(default=4, ge=1, le=32)
    """Evaluations that are prepared concurrently on a GPU. Only one at a time is checked and timed."""
    gpu_fallback: str | None = None
    """Lane that replaces a GPU lane without a live worker: ``gpu`` (any GPU), ``gpu.<model>`` or ``cpu``. It applies to
    all submissions except those that ask to wait for their lane. The verdict names the lane that judged the kernel. By
    default no lane is substituted."""
    cpu_slots: int | None = Field(default=None, ge=0, le=1024)
    """Slots of the ``cpu`` lane. By default one per core (at most 8) on a host without GPUs, and none otherwise."""
    candidate_uid: int = Field(default=48000, ge=1000)
    """First uid of candidates if the fleet runs as root. Each slot adds its number. Reserve the 5120 uids from this
    one, because the fleet kills every process that runs under one of them when its candidate ends."""
    isolation: Literal["none", "basic", "strong", "full"] = "basic"
    """Minimum isolation of candidates. A worker does not start on a host that provides less. ``kqueue doctor`` shows
    the host's level."""
    preload: str = ""
    """Modules that workers import before they fork sealed processes, separated by commas, such as
    ``transformers.modeling_layers``. Otherwise each sealed process that needs one imports it."""
    lease_s: float = Field(default=30.0, ge=1)
    """Seconds without a heartbeat of the worker after which its evaluation counts as lost."""
    gpu_shared: Literal["wait", "refuse", "label"] = "wait"
    """Action if another process computes on the GPU when a kernel is to be timed: ``wait`` up to a minute until it
    stops, ``refuse`` and retry the evaluation at once, or ``label`` the verdict."""
    min_free_memory: float = Field(default=0.05, ge=0, lt=1)
    """Minimum free share of the memory of the host or control group. Below it, workers take no evaluation. 0 disables
    the limit."""
    min_free_disk: float = Field(default=0.02, ge=0, lt=1)
    """Minimum free share of the disks of ``scratch`` and ``home``. Below it, workers take no evaluation. 0 disables the
    limit."""
    flower_port: int = Field(default=5555, ge=0, le=65535)
    """Port of the Flower that `kqueue up` starts. 0 picks a free port."""
    flower_address: str = "127.0.0.1"
    """Address on which Flower listens."""
    flower_auth: SecretStr | None = None
    """``user:password`` for Flower, in ASCII and without a comma. By default `kqueue up` generates a password for each
    run."""
    url: str | None = None
    """Address of `kqueue serve` for a :class:`kqueue.RemoteClient`: ``http://host:18188``, or ``unix:///path`` of its
    unix socket. ``http://user:TOKEN@host:18188`` contains the token too, with any user name."""
    token: SecretStr | None = None
    """Token that a :class:`kqueue.RemoteClient` sends."""
    http_address: str = "127.0.0.1"
    """Address on which `kqueue serve` listens."""
    http_port: int = Field(default=18188, ge=0, le=65535)
    """Port on which `kqueue serve` listens. 0 picks a free port."""
    http_socket: Path | None = None
    """Unix socket on which `kqueue serve` listens too. Its owner and root need no token there."""
    http_tokens: Literal["required", "trust-local-users"] = "required"
    """``trust-local-users`` requires no token on loopback: every user and program of this machine can then submit code
    that the fleet runs, read all sources, and reset GPUs. It is for clients that send no token."""
    http_max_body_bytes: int = Field(default=32 << 20, ge=1 << 10)
    """Maximum size in bytes of a request's body."""
    http_max_batch: int = Field(default=1000, ge=1, le=MAX_BATCH)
    """Maximum number of evaluations in one request."""
    http_max_queued: int = Field(default=10_000, ge=1)
    """Maximum number of evaluations without a verdict for each token."""
    http_limits: str = "{}"
    """Upper limits of the numbers in requests, by scope as JSON: ``{"submit": {"deadlines.check_s": 60}}``. The highest
    scope of a token counts, ``*`` is for all, and a token's own limits take precedence (`kqueue token create
    --limit`)."""
    session_idle_s: float = Field(default=14_400.0, gt=0)
    """Seconds without a request after which a browser is logged out. A page that updates itself sends none."""
    oidc_issuer: str | None = None
    """URL of the OpenID provider with which people log in at the page. By default they log in by token or link."""
    oidc_client_id: str | None = None
    """Id of this fleet's page at the OpenID provider."""
    oidc_client_secret: SecretStr | None = None
    """Secret of this fleet's page at the OpenID provider. A public client has none."""
    oidc_redirect_url: str | None = None
    """URL to which the OpenID provider returns the browser: the page's address, followed by ``/login/callback``."""
    oidc_groups: str = "{}"
    """Scopes of each group of the OpenID provider, as JSON: ``{"kernels": ["submit"], "leads": ["read:all"]}``. People
    without any of these groups are not let in."""
    oidc_groups_claim: str = "groups"
    """Claim of the OpenID provider with a person's groups."""
    oidc_owner_claim: Literal["sub", "email"] = "sub"
    """Claim of the OpenID provider from which a person's owner is derived. ``email`` must be verified there."""
    oidc_scopes: str = "openid profile email"
    """Scopes that are requested from the OpenID provider."""
    oidc_session_s: float = Field(default=3600.0, ge=60, le=43_200)
    """Seconds after which a person's login is renewed at the OpenID provider, which is the longest time for which a
    person keeps the scopes of a former group."""
    http_access_log: bool = True
    """True if `kqueue serve` logs a line for each answered request."""
    callback_secret: SecretStr | None = Field(default=None, min_length=16)
    """Secret of at least 16 characters from which `kqueue serve` makes the owners' secrets, which sign callbacks. By
    default no callbacks are sent. Give all servers of a fleet the same value."""
    callback_networks: str = ""
    """Networks to which callbacks are sent although they are not public, separated by commas, such as ``10.1.0.0/16``.
    All users who submit can then send requests to these networks."""
    receipt_key: Path | None = None
    """File of the Ed25519 keys in PEM with which `kqueue serve` signs receipts. The first key signs. Without keys there
    are no receipts. `kqueue up` creates the file, by default ``receipts.pem`` in ``home``."""
    reuse: bool = True
    """True if verdicts of this host's workers can be reused for equal evaluations."""
    probe_share: float = Field(default=0.005, ge=0, le=0.5)
    """Probes of the fleet's own judge on each lane, relative to the number of judged evaluations. 0 disables probes.
    The host that sweeps applies it, so give all hosts the same value."""
    retry_delay_s: float = Field(default=1.0, ge=0)
    """Seconds before the second attempt after a failure of the fleet. The delay doubles for each further attempt."""
    retention_days: float | None = Field(default=None, gt=0)
    """Age in days, counted from the verdict, at which an evaluation is removed with all its data. By default never."""
    log_retention_days: float | None = Field(default=None, gt=0)
    """Age in days, counted from the verdict, at which logs and long evidence are removed. By default never."""
    log_level: str = "INFO"
    """Minimum level of log lines: ``DEBUG``, ``INFO``, ``WARNING`` or ``ERROR``."""
    log_json: bool = False
    """True if each event is logged as a line of JSON."""

    def __init__(self, **given: Any) -> None:
        named = {name: os.environ.get(f"KQUEUE_{name.upper()}") for name in type(self).model_fields}
        super().__init__(**{name: value for name, value in named.items() if value} | given)

    @model_validator(mode="before")
    @classmethod
    def _split_url(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Move the token from the URL to its own setting, so that no message shows it."""
        scheme, found, rest = str(values.get("url") or "").partition("://")
        host, slash, path = rest.partition("/")
        credentials, at, host = host.rpartition("@")
        if not (found and at) or not scheme.lower().startswith("http"):
            return values
        secret = unquote(credentials.partition(":")[2] or credentials)
        return {**values, "url": f"{scheme}://{host}{slash}{path}", "token": values.get("token") or secret}

    @field_validator("callback_networks")
    @classmethod
    def _are_networks(cls, value: str) -> str:
        networks(value)
        return value

    @field_validator("build_store")
    @classmethod
    def _is_location(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/") and not re.match(r"[a-z][a-z0-9+.-]*(://|::)", value):
            raise ValueError("neither an absolute path nor a URL")
        if value is not None and value.startswith(("file:", "local:")):
            raise ValueError("give a folder as a path, so that the fleet can close it to other users")
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
        """Seconds after its last heartbeat for which producers and reports count a worker as alive.

        It is twice the lease, so that a lost worker's evaluations are queued again before its lane counts as gone.
        """
        return 2 * self.lease_s

    @property
    def build_location(self) -> str:
        """The absolute path or URL of compiled extensions. It is empty if they are not stored."""
        return "" if self.build_store_bytes == 0 else self.build_store or str(self.scratch.absolute() / "builds")

    def require_database(self) -> str:
        """Return the database's URL. Raise :class:`ConfigError` if it is not set, or its packages are absent."""
        url = self._require(self.database_url, "KQUEUE_DATABASE_URL")
        require_packages()
        return url

    def require_redis(self) -> str:
        """Return the broker's URL. Raise :class:`ConfigError` if it is not set."""
        return self._require(self.redis_url, "KQUEUE_REDIS_URL")

    def _require(self, value: SecretStr | None, name: str) -> str:
        if value is not None:
            return value.get_secret_value()
        if self.url is not None:
            raise ConfigError(f"this needs {name}, because the server at KQUEUE_URL does not offer it")
        raise ConfigError(
            f"no fleet found: set {name}, or start one on this machine with `kqueue up` (none runs under "
            f"{self.home_path}: set KQUEUE_HOME if its folder is another one). For a server set KQUEUE_URL"
        )

    @property
    def has_servers_secrets(self) -> bool:
        """True if a secret is set that only `kqueue serve` needs."""
        return any(getattr(self, name) is not None for name in _SERVERS_SECRETS)

    def environment(self, *, serves: bool = False) -> dict[str, str]:
        """Return the environment variables from which a child process loads the same settings, secrets included.

        Unless the child ``serves`` HTTP, variables of secrets that only servers need are empty, which unsets them.
        """
        values: dict[str, str] = {}
        for name in type(self).model_fields:
            value: Any = getattr(self, name)
            if name in _SERVERS_SECRETS and not serves:
                values[f"KQUEUE_{name.upper()}"] = ""
            elif value is not None:
                text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
                values[f"KQUEUE_{name.upper()}"] = text
        return values


def require_packages() -> None:
    """Raise ConfigError if the packages of the extra ``database`` are absent."""
    # The finder of installed modules does not know the stand-ins of kqueue/cli/absent.py.
    if any(PathFinder.find_spec(name) is None for name in ("celery", "psycopg", "sqlalchemy")):
        raise ConfigError(
            "a fleet's database and queue need more packages: `pip install 'kqueue[database]'`, or set KQUEUE_URL alone"
        )


def networks(value: str) -> list[IPv4Network | IPv6Network]:
    """Return the networks in a text with commas, or raise ValueError."""
    return [ip_network(part.strip()) for part in value.split(",") if part.strip()]


def running_fleet(home: Path) -> dict[str, str]:
    """Return the contents of the fleet file, ``state`` alone if it is missing, or nothing if no fleet runs there."""
    # The lock on the home shows that the fleet runs. Its pid would not, because Linux reuses pids.
    try:
        with (home / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return {}
    except BlockingIOError:
        pass
    except OSError:
        return {}
    try:
        contents: dict[str, Any] = json.loads((home / FLEET_FILE).read_text())
    except (OSError, ValueError):
        return {"state": "starting or stopping"}
    return {name: value for name, value in contents.items() if isinstance(value, str)}


def _ofrunning_fleet(config: Config) -> dict[str, str]:
    """Return the settings that only the running fleet provides."""
    fleet = running_fleet(config.home_path)
    shared = ("database_url", "redis_url", "gpu_fallback")
    given = {name: fleet.get(name) for name in shared if getattr(config, name) is None}
    if config.url is None and "socket" in fleet:
        given["url"] = f"unix://{fleet['socket']}"
    elif config.url in (None, fleet.get("url")):
        # The fleet's token is valid for the fleet's own address only. A URL that is set can contain another token.
        given |= {name: fleet.get(name) for name in ("url", "token") if getattr(config, name) is None}
    return {name: value for name, value in given.items() if value is not None}


def names_server() -> bool:
    """Return True if the environment names a server and no database."""
    load()  # raises a readable error for a wrong setting
    named = Config()
    return named.url is not None and named.database_url is None


def http_url(config: Config) -> str:
    """Return the address of the fleet for browsers: the configured, the running fleet's, or the default one."""
    if config.url is not None and not config.url.startswith("unix:"):
        return config.url
    host = f"[{config.http_address}]" if ":" in config.http_address else config.http_address
    return running_fleet(config.home_path).get("url") or f"http://{host}:{config.http_port}"


def flower_access(config: Config) -> tuple[str, str]:
    """Return the address and the credentials (``user:password``) of Flower of the fleet that runs under ``home``.

    Raise ConfigError if there is none.
    """
    fleet = running_fleet(config.home_path)
    if "flower_auth" not in fleet:
        raise ConfigError(f"no Flower found: start one with `kqueue up` (none runs under {config.home_path})")
    return fleet["flower_url"], fleet["flower_auth"]


def load(**overrides: Any) -> Config:
    """Read the settings.

    ``overrides`` are settings by name, which take precedence unless they are None. The message of a ConfigError names
    the setting with the invalid value.
    """
    given: dict[str, Any] = {k: v for k, v in overrides.items() if v is not None}
    try:
        config = Config(**given)
        inherited: dict[str, Any] = _ofrunning_fleet(config)
        return Config(**given | inherited) if inherited else config
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"]).upper()
        given_value = "a secret" if name.endswith("_SECRET") else repr(first["input"])
        raise ConfigError(f"KQUEUE_{name}: {first['msg']} (given: {given_value})") from None
