"""At which share of cached prompt tokens disaggregation stops paying: simulated, gpt-oss-120b on H100.

    python benchmarks/hit_share.py --out docs/hit-share.png

*Stated shares.* For every hit share the planner ranks all deployments of 8 GPUs by goodput per GPU under Poisson
arrivals; drawn are the best PD and the best collocated one. Assumed: every engine's cache, decode's too, answers that
share of each prompt, so that only the rest is computed and moved; a request holds KV memory for its whole context.

*Agents.* Generated agent sessions whose steps add more or less to their context, caches simulated by vLLM's rules,
sessions stick to engines. Goodput is where the share of requests within the SLO falls below 95 %, between simulated
rates. The hit share is what the caches of the best collocated deployment answered.

``--json`` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pdlab.core.catalog import load_cluster, load_model  # noqa: E402
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, parse_label  # noqa: E402
from pdlab.core.nodes import ClusterView  # noqa: E402
from pdlab.core.workload import Level, Open, Slo, Workload  # noqa: E402
from pdlab.plan.planner import gain, plan  # noqa: E402
from pdlab.plan.scenario import Scenario  # noqa: E402
from pdlab.report import paper  # noqa: E402
from pdlab.report.figure import DASHED, DOTTED, Axis, Figure, Line, PlotPanel, rising  # noqa: E402
from pdlab.report.style import HUES, SOFT  # noqa: E402
from pdlab.results.slo import stresses  # noqa: E402
from pdlab.sim.hardware import load_hardware  # noqa: E402
from pdlab.sim.level import Trace, columns  # noqa: E402
from pdlab.sim.simulator import simulate  # noqa: E402
from pdlab.traffic.compiled import of_spec  # noqa: E402
from pdlab.traffic.file import TrafficFile  # noqa: E402

GPUS, MODEL, HARDWARE, NODE = 8, "gpt-oss-120b", "h100-vllm-0.11", "p5.48xlarge-x1"
SHARES = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
INPUT, OUTPUT, TTFT_S, QUANTILE = 10_000, 250, 2.0, 0.95
TPOTS_S = (0.012, 0.025)
# Agents: tokens that a step adds, and the deployments that are compared.
GROWTHS = (5000, 3000, 1500, 700)
COLLOCATED = ("collocated-4xtp2",)
PD = ("pd-pack-p2xtp2-d2xtp2", "pd-pack-p1xtp2-d3xtp2")
# Rates of requests that are simulated; as many sessions as begin in the time of three, of which a step takes so long.
LEAST_RPS, MOST_RPS, STEP, SESSIONS_LONG, STEP_S = 2.7, 60.0, 1.35, 3.0, 4.5
# InferenceX, agentic replay of gpt-oss-120b on H200: output tokens/s per GPU.
PUBLISHED_COLLOCATED, PUBLISHED_PD = 1256, 1046


def figures(share: float, tpot_s: float) -> dict[str, Any]:
    """The best PD and the best collocated deployment at a hit share: output tokens/s per GPU within the SLO, and how
    much more PD gives."""
    shape = load_model(MODEL)
    assert shape is not None
    workload = Workload(input_tokens=INPUT, output_tokens=OUTPUT)
    scenario = Scenario(load_hardware(HARDWARE), shape, workload, Slo(ttft_s=TTFT_S, tpot_s=tpot_s), share)
    view = ClusterView(name=NODE, nodes=load_cluster(NODE).engine_nodes)
    made = plan(scenario, MODEL, view, GPUS)
    split, base = made.best_candidate(collocated=False), made.best_candidate(collocated=True)
    assert split is not None
    assert base is not None
    compared = gain(split, base, scenario)
    return {
        "hit_share": share,
        "tpot_s": tpot_s,
        "pd": split.deployment.label,
        "collocated": base.deployment.label,
        "pd_tokens_per_s_per_gpu": split.served_per_gpu * OUTPUT if split.best else 0.0,
        "collocated_tokens_per_s_per_gpu": base.served_per_gpu * OUTPUT if base.best else 0.0,
        "gain": compared.value if compared else None,
        "interval": compared.interval if compared else None,
    }


def agent_trace(growth_tokens: int, rate_rps: float) -> Trace:
    """Sessions whose context grows from 1,000 tokens of tools to some 10,000, by so many tokens a step. They begin so
    often that about so many requests come in a second."""
    steps = max(round(9000 / (growth_tokens + OUTPUT)), 1)
    begins_rps = rate_rps / steps
    spec = {
        "seed": 1,
        "agents": {
            "rate_rps": begins_rps,
            "sessions": max(round(SESSIONS_LONG * begins_rps * steps * STEP_S), 40),
            "steps": f"{steps} uniform:0.5-1.5",
            "tools_tokens": 1000,
            "task_tokens": f"{growth_tokens} lognormal:0.5",
            "growth_tokens": f"{growth_tokens} lognormal:0.5",
            "answer_tokens": OUTPUT,
            "tool_gap_s": "2 lognormal:0.8",
        },
    }
    return Trace.of([*of_spec(TrafficFile.model_validate(spec), "agents")[1]])


def sticking(label: str) -> Deployment:
    """The deployment with sessions that stick to an engine of every pool."""
    topology = parse_label(label)
    if isinstance(topology, Collocated):
        pool = topology.pool.model_copy(update={"routing": "session"})
        return Deployment(topology=topology.model_copy(update={"pool": pool}))
    assert isinstance(topology, Disaggregated)
    pools = {name: getattr(topology, name).model_copy(update={"routing": "session"}) for name in ("prefill", "decode")}
    return Deployment(topology=topology.model_copy(update=pools))


def agents_served(label: str, growth_tokens: int) -> dict[str, Any]:
    """Requests/s within each of `TPOTS_S`, and the hit share at the highest rate that was simulated within one.

    Judged are requests that come when sessions have begun for as long as one lasts, until the last one begins."""
    shape = load_model(MODEL)
    assert shape is not None
    deployment = sticking(label)
    within: dict[float, list[tuple[float, float]]] = {tpot_s: [] for tpot_s in TPOTS_S}
    hit_share, rate_rps = 0.0, LEAST_RPS
    while rate_rps <= MOST_RPS:
        trace = agent_trace(growth_tokens, rate_rps)
        last_s = max(each.at_s for each in trace.requests if each.at_s is not None)
        level = Level(load=Open(rate_rps=rate_rps), num_requests=len(trace.requests), seed=0)
        done = simulate(deployment, [level], Workload(), load_hardware(HARDWARE), shape, trace=trace)[0]
        requests = columns(done)
        came = (requests.arrival_s >= last_s / SESSIONS_LONG) & (requests.arrival_s <= last_s)
        came_rps = float(came.sum() / (last_s * (1 - 1 / SESSIONS_LONG)))
        for tpot_s in TPOTS_S:
            slo = Slo(ttft_s=TTFT_S, tpot_s=tpot_s)
            within[tpot_s].append((came_rps, float((stresses(requests, slo)[came] <= 1).mean())))
        if within[TPOTS_S[-1]][-1][1] < QUANTILE:
            break
        hit_share, rate_rps = done.hit_share, rate_rps * STEP
    served = {f"{1000 * tpot_s:.0f}": crossing(within[tpot_s]) for tpot_s in TPOTS_S}
    return {
        "label": label,
        "growth_tokens": growth_tokens,
        "hit_share": hit_share,
        "served_rps": served,
        "simulated": {f"{1000 * tpot_s:.0f}": within[tpot_s] for tpot_s in TPOTS_S},
    }


def crossing(shares: list[tuple[float, float]]) -> float:
    """The rate at which the share falls below the quantile, straight between two rates in their logarithm; 0 where it
    is below at the lowest."""
    before = None
    for rate_rps, share in shares:
        if share < QUANTILE:
            if before is None:
                return 0.0
            part = (before[1] - QUANTILE) / max(before[1] - share, 1e-9)
            return float(before[0] * (rate_rps / before[0]) ** part)
        before = (rate_rps, share)
    return shares[-1][0]


def best(agents: list[dict[str, Any]], labels: Sequence[str], growth_tokens: int, bound: str) -> dict[str, Any]:
    mine = [each for each in agents if each["label"] in labels and each["growth_tokens"] == growth_tokens]
    return max(mine, key=lambda each: each["served_rps"][bound])


def stated(rows: list[dict[str, Any]]) -> tuple[list[Line], list[Line]]:
    """At stated hit shares: the goodput of the best ones, and what PD gives over collocated, with intervals."""
    goodputs, gains = [], []
    for tpot_s, color in zip(TPOTS_S, HUES, strict=False):
        mine = [row for row in rows if row["tpot_s"] == tpot_s]
        for kind, dashes, word in (("pd", (), "PD"), ("collocated", DASHED, "collocated")):
            points = [(100 * row["hit_share"], row[f"{kind}_tokens_per_s_per_gpu"]) for row in mine]
            goodputs.append(Line(points, color, f"best {word}, {bound(tpot_s)}", dashes, marker="o", mark=4))
        bands = [(100 * row["hit_share"], row["interval"]) for row in mine if row["interval"] is not None]
        low, high = ([(share, 1 + interval[side]) for share, interval in bands] for side in (0, 1))
        points = [(100 * row["hit_share"], 1 + row["gain"]) for row in mine]
        gains.append(Line(points, color, bound(tpot_s), marker="o", mark=4, area=[*low, *reversed(high)]))
    return goodputs, gains


def of_agents(agents: list[dict[str, Any]]) -> list[Line]:
    """What PD gives over collocated, by what the caches of collocated answered."""
    lines = []
    for tpot_s, color in zip(TPOTS_S, HUES, strict=False):
        key, points = f"{1000 * tpot_s:.0f}", []
        for growth_tokens in GROWTHS:
            split, base = (best(agents, labels, growth_tokens, key) for labels in (PD, COLLOCATED))
            if base["served_rps"][key]:
                points.append((100 * base["hit_share"], split["served_rps"][key] / base["served_rps"][key]))
        lines.append(Line(sorted(points), color, bound(tpot_s), marker="s", mark=5))
    return lines


def bound(tpot_s: float) -> str:
    return f"TPOT ≤ {1000 * tpot_s:.0f} ms"


def figure(rows: list[dict[str, Any]], agents: list[dict[str, Any]]) -> Figure:
    x = Axis("prompt tokens answered by prefix caches (%)", -4, 100)
    published = f"InferenceX, agents, H200: {PUBLISHED_PD} / {PUBLISHED_COLLOCATED}"
    beside = [
        Line([(x.low, 1.0), (x.high, 1.0)], SOFT, width=1),
        Line([(end, PUBLISHED_PD / PUBLISHED_COLLOCATED) for end in (x.low, x.high)], HUES[3], published, DOTTED),
    ]
    goodputs, gains = stated(rows)
    ratio, title = "best PD over best collocated, per GPU", "stated hit shares"
    others = [*of_agents(agents), *beside]
    panels = [
        PlotPanel(rising("goodput, output tokens/s per GPU", goodputs), x, goodputs, title=title),
        PlotPanel(Axis(ratio, 0.4, 1.6), x, [*gains, *beside], title=title),
        PlotPanel(Axis(ratio, 0.4, 2.4), x._replace(low=40), others, title="agents, caches simulated, sessions stick"),
    ]
    return Figure(
        [[panel._replace(legend="best", height_in=5.4) for panel in panels]],
        f"Simulated: {MODEL} on {GPUS} H100, TTFT ≤ {TTFT_S:g} s for {QUANTILE:.0%} of requests. Stated hit shares: "
        f"{INPUT}:{OUTPUT} tokens, Poisson arrivals; bands: 90 % intervals from the errors of the model",
        width_in=16.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "hit-share.png")
    parser.add_argument("--json", type=Path, help="keep the figures here, and simulate only what is not there yet")
    words = parser.parse_args()
    kept = json.loads(words.json.read_text(encoding="utf-8")) if words.json and words.json.exists() else {}
    rows, agents = kept.get("stated", []), kept.get("agents", [])

    def keep() -> None:
        if words.json:
            words.json.write_text(json.dumps({"stated": rows, "agents": agents}, indent=1), encoding="utf-8")

    for tpot_s in TPOTS_S:
        for share in SHARES:
            if not any((row["tpot_s"], row["hit_share"]) == (tpot_s, share) for row in rows):
                rows.append(figures(share, tpot_s))
                keep()
    for growth_tokens in GROWTHS:
        for label in (*COLLOCATED, *PD):
            if not any((each["label"], each["growth_tokens"]) == (label, growth_tokens) for each in agents):
                agents.append(agents_served(label, growth_tokens))
                print(json.dumps(agents[-1]), flush=True)
                keep()
    paper.draw(figure(rows, agents), words.out)


if __name__ == "__main__":
    main()
