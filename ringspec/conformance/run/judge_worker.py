"""The program of a judging process, which runs cases and judges their results.

:mod:`ringspec.conformance.run.judges` starts it and sends ids of cases of one profile. The program answers each id with
the record of the case, as a line of a report.
"""

from __future__ import annotations

import json
import sys

from threadpoolctl import threadpool_limits

from ringspec.conformance.adapters.control import refusal, take_control
from ringspec.conformance.cases.model import IF_CLAIMED
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.diagnose.summary import Diagnoser
from ringspec.conformance.report.report import case_line
from ringspec.conformance.run.case import run_case
from ringspec.conformance.run.opening import opened
from ringspec.conformance.target.declared import check_name
from ringspec.errors import RingspecError


def main() -> None:
    """Answer each id with a record until the control stream ends."""
    setup = json.loads(sys.argv.pop())
    control = take_control()
    threadpool_limits(1)
    sys.path[:] = setup["path"]
    request = control.next()
    diagnoser = Diagnoser() if setup["diagnose"] else None
    try:
        profiles = (setup["profile"], "sharp", *IF_CLAIMED)
        cases = {case.id: case for profile in profiles for case in run_cases(profile)}
        target = opened(setup["spec"], setup["timeout"])
        while True:
            id = request["id"]
            check_name(f"the id of a case of the profile {setup['profile']}", id, cases)
            if diagnoser is not None:
                diagnoser.learn(request["readings"])
            control.reply(case_line(run_case(target, cases[id], diagnoser)))
            request = control.next()
    except RingspecError as error:
        control.reply(refusal(error))


if __name__ == "__main__":
    main()
