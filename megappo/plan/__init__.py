"""What a configuration will need, before it is queued: bytes on every rank, FLOPs and seconds of every stage.

Everything here is arithmetic on the settings and the models' config.json; nothing is built and no device is touched.
"""

from megappo.plan.command import plan_command
from megappo.plan.inputs import Models
from megappo.plan.machine_file import find_machine, read_machine
from megappo.plan.machines import ASSUMED, MACHINES, Machine
from megappo.plan.planner import Plan, make_plan, read_models
from megappo.plan.search import Proposal, best_layouts, nearest_fit, remedy
from megappo.plan.tables import to_json

__all__ = [
    "ASSUMED",
    "MACHINES",
    "Machine",
    "Models",
    "Plan",
    "Proposal",
    "best_layouts",
    "find_machine",
    "make_plan",
    "nearest_fit",
    "plan_command",
    "read_machine",
    "read_models",
    "remedy",
    "to_json",
]
