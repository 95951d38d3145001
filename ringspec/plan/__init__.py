"""Estimate the cost of attention on any number of workers and given hardware, and recommend a layout and a circulation.

A layout assigns tokens to workers; a circulation says which tensors travel in the ring. Other ways to split attention,
such as Ulysses, are planned beside it. Pairs and bytes are counted by closed formulas, so nothing is run.

``pairs``          number of visible (query, key) pairs of every worker in every step
``workload``       the attention layer to plan, and the checks of its arguments
``traffic``        bytes that each worker sends after each step, and bytes that it holds
``hardware``       rates of a device, with their sources; presets for H200 and trn2
``hardware_file``  rates from a TOML or JSON file
``times``          time of one pass: computing, waiting, and transfers that are not hidden by computing
``options``        the function ``plan``, which compares layouts and circulations
``moves``          what each rank of a scheme, such as Ulysses, sends and holds
``scheme_times``   time of one pass of a scheme
``scheme_question`` the schemes, mesh and tokens that a caller asks about
``scheme_options`` the schemes and meshes that W workers permit, and why others are not possible
``advice``         the recommendation, in sentences
``document``       the plan as plain data, for JSON
``spans``          the timeline of a small ring, for a figure

>>> from ringspec.plan import plan
>>> plan(1 << 17, 8, hardware="h200", heads=32, kv_heads=8).best.layout
'zigzag'
"""

from ringspec.plan.advice import advice, scheme_advice
from ringspec.plan.document import plan_document
from ringspec.plan.hardware import PRESETS, Hardware, Link, Rate
from ringspec.plan.hardware_file import hardware_from, read_hardware
from ringspec.plan.options import Option, Plan, plan
from ringspec.plan.scheme_options import Impossible, SchemeOption, SchemePass
from ringspec.plan.scheme_times import Times
from ringspec.plan.spans import ring_spans
from ringspec.plan.times import Pass
from ringspec.plan.traffic import Memory
from ringspec.plan.workload import Workload

__all__ = [
    "PRESETS",
    "Hardware",
    "Impossible",
    "Link",
    "Memory",
    "Option",
    "Pass",
    "Plan",
    "Rate",
    "SchemeOption",
    "SchemePass",
    "Times",
    "Workload",
    "advice",
    "hardware_from",
    "plan",
    "plan_document",
    "read_hardware",
    "ring_spans",
    "scheme_advice",
]
