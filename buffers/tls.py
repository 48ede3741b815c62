"""The certificate files of a store that serves TLS itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.buffers.base import BufferError

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
"""The names that Kubernetes and cert-manager give them. PEM."""


@dataclass(frozen=True, slots=True)
class Tls:
    """What the server shows, and where `authority` is set: clients must show a certificate that it has signed."""

    certificate: Path
    key: Path
    authority: Path | None

    @classmethod
    def of(cls, folder: Path) -> Tls:
        """Find them in a folder. Raises BufferError that names the missing one, or a key that others can read."""
        folder = folder.resolve()  # the server runs in another folder
        for name in (CERTIFICATE, KEY):
            if not (folder / name).is_file():
                raise BufferError(
                    f"--tls {folder}: there is no {name}; it takes {CERTIFICATE}, {KEY} and, optionally, {AUTHORITY}"
                )
        key = folder / KEY
        if key.stat().st_mode & 0o077:
            raise BufferError(f"--tls {folder}: others can read {KEY}; run `chmod 600 {key}`")
        authority = folder / AUTHORITY
        return cls(folder / CERTIFICATE, key, authority if authority.is_file() else None)

    def settings(self) -> list[str]:
        """Lines of the server's configuration."""
        lines = [f'tls-cert-file "{self.certificate}"', f'tls-key-file "{self.key}"']
        if self.authority is None:
            return [*lines, "tls-auth-clients no"]
        return [*lines, f'tls-ca-cert-file "{self.authority}"', "tls-auth-clients yes"]
