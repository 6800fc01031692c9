"""Sources of secrets; no message shows a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.core.errors import SecretError
from kvferry.core.security import Secret, read_secret

HIDDEN = "correct horse battery staple"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    created = tmp_path / "ticket.secret"
    created.write_text(f"  {HIDDEN}\n")
    return created


@pytest.mark.parametrize(
    ("mode", "credentials", "is_open"),
    [
        (0o600, "", False),
        *((mode, "", True) for mode in (0o640, 0o604, 0o660)),
        # A credential of systemd shows the mask of its access list as its group's permissions.
        (0o440, ".", False),
        (0o460, ".", True),
        (0o444, ".", True),
        (0o440, "beside", True),
    ],
)
def test_a_file_that_others_can_read_is_reported(
    path: Path, mode: int, credentials: str, is_open: bool
) -> None:
    path.chmod(mode)
    folder = str(path.parent / credentials) if credentials else ""
    why = f"file:{path} is open to others than its owner: chmod 600 it" if is_open else ""
    assert read_secret(f"file:{path}", {"CREDENTIALS_DIRECTORY": folder}) == Secret(
        text=HIDDEN, source=f"file:{path}", exposed=why
    )


def test_a_secret_is_read_from_the_environment() -> None:
    got = read_secret("env:KVFERRY_TEST", {"KVFERRY_TEST": f"{HIDDEN}\n"})
    assert got == Secret(text=HIDDEN, source="env:KVFERRY_TEST")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("env:KVFERRY_TEST", "env:KVFERRY_TEST is empty or not set"),
        ("file:nowhere/at/all", "cannot be read (No such file or directory)"),
        ("file:a\0b", "cannot be read"),
        ("file:", "cannot be read"),
        ("env:", "env: is empty or not set"),
        ("", "a text of 0 characters"),
    ],
)
def test_a_source_without_a_secret_is_named(source: str, message: str) -> None:
    with pytest.raises(SecretError) as refused:
        read_secret(source, {})
    assert message in str(refused.value)


def test_a_secret_given_instead_of_a_source_is_not_shown() -> None:
    with pytest.raises(SecretError, match="a text of 28 characters") as refused:
        read_secret(HIDDEN)
    assert HIDDEN not in str(refused.value)
    assert "kvferry keygen" in str(refused.value)


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe" * 20, b"a" * (1 << 17)])
def test_a_file_without_a_secret_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(SecretError, match=r"ticket\.secret"):
        read_secret(f"file:{path}")


def test_a_secret_is_not_shown() -> None:
    assert HIDDEN not in repr(Secret(text=HIDDEN, source="env:X"))
