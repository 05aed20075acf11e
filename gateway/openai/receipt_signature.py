"""Signatures of receipts: an Ed25519 key of the server vouches for what a receipt says.

Signed is the receipt's JSON without the signature: with its members sorted and no spaces, behind a prefix. A key's id
is the SHA-256 of its public half as DER, so that `openssl pkey -pubout -outform DER | sha256sum` prints it too.

Not here: whether the tokens are the model's (offline/verify.py).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from outrider.gateway.openai.answer_types import ReceiptBody
from outrider.shared.errors import ConfigError

# A signature of something else with the same key is none of a receipt.
_PREFIX = b"outrider receipt "


class ReceiptKey:
    """The private key that a gateway signs receipts with."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self._id = _key_id(key.public_key())

    @classmethod
    def load(cls, path: str, setting: str) -> ReceiptKey:
        """Raises ConfigError that names the setting."""
        try:
            key = load_pem_private_key(Path(path).read_bytes(), None)
        except (OSError, TypeError, ValueError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"--{setting}: {path} is no private key in PEM without a passphrase: {error}") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"--{setting}: {path} is no Ed25519 key; `openssl genpkey -algorithm ed25519` makes one")
        return cls(key)

    def signed(self, body: ReceiptBody) -> ReceiptBody:
        named: ReceiptBody = {**body, "key_id": self._id}
        return {**named, "signature": base64.b64encode(self._key.sign(_signed_bytes(named))).decode()}


def load_public_key(path: Path, setting: str) -> Ed25519PublicKey:
    """Raises ConfigError that names the setting."""
    try:
        key = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"--{setting}: {path} is no public key in PEM: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"--{setting}: {path} is no Ed25519 key")
    return key


def signature_fault(body: Mapping[str, Any], key: Ed25519PublicKey) -> str:
    """Returns why a receipt is not signed by the key; empty: it is."""
    signature, key_id = body.get("signature"), body.get("key_id")
    if not isinstance(signature, str):
        return "the receipt is not signed"
    if key_id != _key_id(key):
        return f"the receipt is signed by key {str(key_id)[:64]}, not by {_key_id(key)}"
    try:
        key.verify(base64.b64decode(signature, validate=True), _signed_bytes(body))
    except (InvalidSignature, binascii.Error, ValueError):
        return "the receipt's signature is false"
    return ""


def _key_id(key: Ed25519PublicKey) -> str:
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _signed_bytes(body: Mapping[str, Any]) -> bytes:
    said = {name: value for name, value in body.items() if name != "signature"}
    return _PREFIX + json.dumps(said, sort_keys=True, separators=(",", ":")).encode()
