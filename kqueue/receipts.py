"""Receipts: signed records of finished evaluations, and their keys.

A receipt is an in-toto statement in a DSSE envelope. Both are canonical JSON: sorted keys, no white space, ASCII, the
shortest decimals that identify each number. The extra ``receipts`` is required.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field

from kqueue import registry
from kqueue.contract import HASH, Verdict
from kqueue.errors import ConfigError
from kqueue.evidence import Part

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
except ImportError as missing:
    raise ConfigError("receipts need cryptography: `pip install 'kqueue[receipts]'`") from missing

if TYPE_CHECKING:
    from kqueue.store.reports import Detail

#: Address of the statement's predicate and of its schema, with their version.
PREDICATE: Final = "urn:kqueue:receipt:2"
_PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
_KEY: Final = re.compile(rb"-----BEGIN PRIVATE KEY-----[^-]+-----END PRIVATE KEY-----")
_Hash = Annotated[str, Field(pattern=f"^{HASH}$")]


class Envelope(Part):
    """A signed record of a finished evaluation, in the form of DSSE."""

    payload: str
    """An in-toto statement in Base64. Its predicate's type is ``urn:kqueue:receipt:2``."""
    payload_type: Annotated[Literal["application/vnd.in-toto+json"], Field(alias="payloadType")]
    signatures: list[dict[Literal["keyid", "sig"], str]]
    """The short name of the fleet's key, and its Ed25519 signature in Base64."""


class Receipt(Part):
    """A record of a finished evaluation: the predicate of a signed in-toto statement."""

    public_key: _Hash
    """The Ed25519 key that signed, in hexadecimal."""
    issued_at: datetime
    """Time of the signature, in UTC."""
    issued_by: str
    """Version of kqueue that signed."""
    owner: str
    """Owner of the evaluation."""
    problem_hash: _Hash
    """SHA-256 of the problem's source."""
    public_problem_hash: _Hash
    """SHA-256 of the problem's source without shapes that are held out."""
    kernel_hash: _Hash
    """SHA-256 of the kernel's backend, a NUL byte, and the kernel's source."""
    kernel_source_hash: _Hash | None = None
    """SHA-256 of the kernel's source. Null only in the first form of receipts."""
    settings: dict[str, Any]
    """Settings with which the evaluation was submitted."""
    purpose: str | None = None
    """Name of the work that made the evaluation as a trial: ``autopsy``, ``duel``, ``tune`` or ``tournament``."""
    problem: str | None
    """Source of the problem without shapes that are held out. Null in a receipt without sources."""
    kernel: str | None
    """Source of the kernel. Null in a receipt without sources."""
    verdict: Verdict
    """The verdict. Its log is empty in a receipt without sources."""


def create_key(path: Path) -> None:
    """Create a key in a new file of mode 0600. Raise ConfigError if it cannot be written, or exists."""
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(Ed25519PrivateKey.generate().private_bytes(*form))
    except OSError as error:
        raise ConfigError(f"KQUEUE_RECEIPT_KEY: {path} cannot be written: {error.strerror}") from error


def load_keys(path: Path | None) -> list[Ed25519PrivateKey]:
    """Return the keys in a file, of which the first signs. A missing file has none. Raise ConfigError for a bad one."""
    try:
        content = path.read_bytes() if path is not None and path.exists() else b""
        keys = [serialization.load_pem_private_key(block, None) for block in _KEY.findall(content)]
        known = [key for key in keys if isinstance(key, Ed25519PrivateKey)]
        if len(known) == len(keys) and not _KEY.sub(b"", content).strip():
            return known
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm):
        pass  # The error could repeat a part of a key.
    raise ConfigError(f"KQUEUE_RECEIPT_KEY: {path} cannot be read, or has other content than Ed25519 keys in PEM")


def public_key(key: Ed25519PrivateKey) -> str:
    """Return the public part of a key in hexadecimal."""
    return key.public_key().public_bytes_raw().hex()


def key_id(public: str) -> str:
    """Return the short name of a public key: the first 16 hexadecimal digits of its bytes' SHA-256."""
    return hashlib.sha256(bytes.fromhex(public)).hexdigest()[:16]


def issue(key: Ed25519PrivateKey, detail: Detail, verdict: Verdict, *, sources: bool) -> bytes:
    """Return the receipt of an evaluation as the bytes of a file."""
    document: dict[str, Any] = {
        "public_key": public_key(key),
        "issued_at": datetime.now(UTC).isoformat(),
        "issued_by": version("kqueue"),
        "owner": detail.owner,
        "problem_hash": detail.problem_hash,
        "public_problem_hash": sha256(detail.problem),
        "kernel_hash": detail.kernel_hash,
        "kernel_source_hash": sha256(detail.kernel),
        "settings": dict(detail.settings),
        "purpose": purpose_of(detail),
        "problem": detail.problem if sources else None,
        "kernel": detail.kernel if sources else None,
        "verdict": verdict.model_dump(mode="json") | ({} if sources else {"log": ""}),
    }
    return enclose(document, key.sign(signable(document)))


def purpose_of(detail: Detail) -> str | None:
    """Return the name of the work that made an evaluation as a trial, by its batch or its recorded search."""
    if detail.algorithm in registry.each_of("runs"):
        return detail.algorithm
    return next((one[:-1] for one in registry.each_of("trials") if (detail.batch or "").startswith(one)), None)


def enclose(document: Mapping[str, Any], signature: bytes) -> bytes:
    """Return a receipt's file: an envelope with its statement."""
    signatures = [{"keyid": key_id(document["public_key"]), "sig": b64encode(signature).decode()}]
    payload = b64encode(_statement(document)).decode()
    return canonical({"payload": payload, "payloadType": _PAYLOAD_TYPE, "signatures": signatures}) + b"\n"


def signable(document: Mapping[str, Any]) -> bytes:
    """Return the bytes that a receipt's signature covers: DSSE's encoding of its statement."""
    content = _statement(document)
    return f"DSSEv1 {len(_PAYLOAD_TYPE)} {_PAYLOAD_TYPE} {len(content)} ".encode() + content


def _statement(document: Mapping[str, Any]) -> bytes:
    subject = {"problem": "problem_hash", "public problem": "public_problem_hash", "kernel": "kernel_source_hash"}
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": document[one]}} for name, one in subject.items()],
        "predicateType": PREDICATE,
        "predicate": document,
    }
    return canonical(statement)


def sha256(source: str) -> str:
    """Return the SHA-256 of a source."""
    return hashlib.sha256(source.encode()).hexdigest()


def canonical(document: Mapping[str, Any]) -> bytes:
    """Return a document in canonical JSON."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def signed(public: str, signature: bytes, content: bytes) -> bool:
    """Return True if the private part of a public key signed ``content``."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True
