"""What tests of ``kvferry doctor`` share: what a finding has to say."""

from __future__ import annotations

from kvferry.cli.doctor.finding import Finding, FindingLevel

OK, WARN, BAD = FindingLevel.OK, FindingLevel.WARN, FindingLevel.BAD


def check(finding: Finding, verdict: FindingLevel, found: str = "", *remedies: str) -> None:
    """Check a finding's verdict, and parts of what it found and of its remedy."""
    assert finding.verdict is verdict, finding
    assert found in finding.found, finding
    assert [remedy for remedy in remedies if remedy not in finding.remedy] == [], finding
    assert finding.remedy or verdict is OK, finding
