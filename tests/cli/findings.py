"""What tests of ``kvferry doctor`` share: the machine as files, and what a finding has to say."""

from __future__ import annotations

from pathlib import Path

from kvferry.cli.doctor.finding import Finding, FindingLevel

OK, WARN, BAD = FindingLevel.OK, FindingLevel.WARN, FindingLevel.BAD


def write_files(root: Path, **files: str) -> Path:
    """Write files below a folder; two underscores in a name stand for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def check(finding: Finding, verdict: FindingLevel, found: str = "", *remedies: str) -> None:
    """Check a finding's verdict, and parts of what it found and of its remedy."""
    assert finding.verdict is verdict, finding
    assert found in finding.found, finding
    assert [remedy for remedy in remedies if remedy not in finding.remedy] == [], finding
    assert finding.remedy or verdict is OK, finding
