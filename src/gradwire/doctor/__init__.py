"""What this machine has, what it lacks, and the command that mends it; how fast the links between ranks are."""

from gradwire.doctor.finding import Finding, Level, worst
from gradwire.doctor.links import LinkReport, PairSpeed
from gradwire.doctor.machine import machine_findings
from gradwire.doctor.network import network_findings
from gradwire.doctor.optional import optional_findings
from gradwire.doctor.software import software_findings

__all__ = [
    "Finding",
    "Level",
    "LinkReport",
    "PairSpeed",
    "machine_findings",
    "network_findings",
    "optional_findings",
    "software_findings",
    "worst",
]
