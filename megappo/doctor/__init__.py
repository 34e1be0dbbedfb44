"""`megappo doctor`: what of a machine, its software and its links is fine, slow or broken, and what to do."""

from megappo.doctor.command import doctor_command
from megappo.doctor.findings import Finding

__all__ = ["Finding", "doctor_command"]
