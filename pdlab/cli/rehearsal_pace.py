"""How slow the rehearsals of an experiment are, before they are launched."""

from __future__ import annotations

from pdlab.bench.experiment.schedule import Schedule
from pdlab.core.errors import UsageError


def paced(plan: Schedule) -> Schedule:
    """The plan with the slow-down that each launch would choose on this machine, where its file gives none.

    Starts nothing; a slow-down is a short simulation. Raises UsageError for what no rehearsal can simulate.
    """
    unknown = [each for each in plan.configurations if plan.slow_down(each) is None]
    if not unknown:
        return plan
    from pdlab.rehearsal.fake_cluster import RehearsalSubstitutes

    chosen: dict[str, float] = {}
    for each in unknown:
        try:
            chosen[each.name] = RehearsalSubstitutes(each.request).slow_down
        except UsageError as error:
            raise UsageError(f"{plan.path}: {each.name}: {error}") from error
    return plan.model_copy(update={"slow_downs": plan.slow_downs | chosen})
