"""Certificates for tests: an authority of its own per folder, and what it signs.

authority = Authority(tmp_path, "fleet")
server = authority.issue("verifier", dns_names=("verifier",))
TlsConfig(server.cert_file, server.key_file, authority.ca_file)
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """Paths of the PEM files."""

    cert_file: str
    key_file: str


class Authority:
    """Signs with a key that only it knows; `ca_file` is its certificate."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} test authority")])
        basic = x509.BasicConstraints(ca=True, path_length=0)
        certificate = (
            self._builder(self._subject, self._key.public_key())
            .add_extension(basic, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca_file = str(folder / f"{name}-ca.pem")
        Path(self.ca_file).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        dns_names: Sequence[str] = (),
        addresses: Sequence[str] = (),
        days: int = 2,
        password: bytes | None = None,
    ) -> Issued:
        """A certificate for these names; `days` under 1 is one that has run out; `password` encrypts the key."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName(dns_name) for dns_name in dns_names]
        names += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key.public_key(), days)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        encryption = (
            serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
        )
        cert_path, key_path = (self._folder / f"{self._name}-{name}-{kind}.pem" for kind in ("cert", "key"))
        cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_path.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        )
        return Issued(str(cert_path), str(key_path))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, days: int = 2) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 3 * _DAY)
            .not_valid_after(now + (days - 1) * _DAY if days > 0 else now - _DAY)
        )
