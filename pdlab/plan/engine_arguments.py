"""Engine arguments of a launch and of its plan: those that a launch adds itself, those that it needs so that its
engines are those of the plan, and what only a person can add."""

from __future__ import annotations

from pdlab.core.catalog import ModelShape
from pdlab.core.command_lines import flag_words
from pdlab.core.deployment import Deployment, Pool, launch_words
from pdlab.core.request_lengths import length_for, short_pools
from pdlab.plan.accuracy import MeasuredSweep
from pdlab.plan.scenario import Scenario
from pdlab.sim.argument_effects import with_added
from pdlab.sim.hardware import Hardware

KV_FORMATS = ("bfloat16", "fp8")  # names that the tables and vLLM's kv_cache_dtype share


def measured_as_launched(sweep: MeasuredSweep, hardware: Hardware, shape: ModelShape) -> MeasuredSweep:
    """The sweep with the arguments that the launch of its engines added. Sweeps of other people's engines stay as they
    are."""
    if not sweep.launched:
        return sweep
    return sweep.model_copy(update={"deployment": with_added(sweep.deployment, hardware, shape)})


def _without_added(deployment: Deployment, shape: ModelShape) -> Deployment:
    """The deployment without the arguments that a launch adds itself."""

    def changed(pool: Pool) -> Pool:
        added = shape.engine_kwargs_by_tp.get(pool.tp, {})
        own = {key: value for key, value in pool.engine_kwargs.items() if added.get(key) != value}
        return pool.model_copy(update={"engine_kwargs": own})

    return deployment.with_pools(changed)


def as_planned(deployment: Deployment, scenario: Scenario) -> Deployment:
    """The deployment with the engine arguments of vLLM that the step times assume, without those that a launch adds;
    and with a max_model_len for the requests, where the launch's own is too short for them."""
    deployment = _with_formats(deployment, scenario)
    if not _too_short(deployment, scenario):
        return deployment
    return deployment.model_copy(update={"max_model_len": length_for(scenario.longest, scenario.shape)})


def planned_words(deployment: Deployment, scenario: Scenario, config: str | None = None) -> tuple[str, ...]:
    """The flags of the launch of `as_planned`, or of its file ``config``. The lengths of the requests are among them
    where the launch's own max_model_len is too short for them."""
    deployment = _with_formats(deployment, scenario)
    words = launch_words(deployment) if config is None else flag_words("launch", config=config)
    if not _too_short(deployment, scenario):
        return words
    nominal = dict(zip(("input_tokens", "output_tokens"), scenario.longest.longest, strict=True))
    return (*words, *flag_words("launch", workload=scenario.longest.bench_fields.get("requests", nominal)))


def _with_formats(deployment: Deployment, scenario: Scenario) -> Deployment:
    deployment = _without_added(deployment, scenario.shape)
    kept = _formats(scenario).get("kvcache")
    if kept not in KV_FORMATS:
        return deployment
    return deployment.model_copy(update={"engine_kwargs": {**deployment.engine_kwargs, "kv_cache_dtype": kept}})


def _too_short(deployment: Deployment, scenario: Scenario) -> bool:
    """Whether engines of a launch accept fewer tokens than the longest request has."""
    return any(short_pools(deployment, scenario.shape, scenario.longest, cpu=scenario.hardware.cpu))


def by_hand(scenario: Scenario) -> list[str]:
    """What the plan assumes and its commands lack, each with what a person must add. A line is a comment of a shell."""
    hardware, lines = scenario.hardware, []
    formats = [
        f"{part}={name}" for part, name in _formats(scenario).items() if part != "kvcache" or name not in KV_FORMATS
    ]
    if formats:
        lines.append(
            f"the plan assumes {', '.join(formats)}, which no flag of a launch sets: serve a checkpoint that has it"
        )
    if hardware.speculation is not None:
        drafts = hardware.speculation.draft_tokens
        config = f'{{"method": "...", "model": "...", "num_speculative_tokens": {drafts}}}'
        lines.append(
            f"the plan assumes speculative decoding with {drafts} guessed tokens per step: add your method and draft "
            f"model to each launch, --engine-arg 'speculative_config={config}'"
        )
    if hardware.direct is not None:
        lines.append("the plan leaves out Ray's path (--without-ray), and these launches have it: expect a longer TTFT")
    if scenario.prefix_hit_rate and scenario.trace is None:
        lines.append(
            f"the plan assumes that {scenario.prefix_hit_rate:.0%} of each prompt is cached, and these prompts share "
            "nothing: measure a workload file whose prompts share text (docs/traffic.md)"
        )
    return lines


def _formats(scenario: Scenario) -> dict[str, str]:
    """The formats of --quant, by part of the model."""
    steps = scenario.hardware.steps
    return {} if steps is None else {str(part): name for part, name in steps.quant.items()}
