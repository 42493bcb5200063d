"""The CSV of `plan.py --predict`: the many ways to write one configuration, and what is refused rather than guessed."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import HARDWARE

from pdlab.cli import plan
from pdlab.core.catalog import require_shape
from pdlab.core.errors import UsageError
from pdlab.core.workload import Level
from pdlab.plan import csv_predictions
from pdlab.plan.csv_columns import ALIASES
from pdlab.plan.csv_rows import RefusedRow, RequestedRow, read
from pdlab.plan.stack_bands import saturation
from pdlab.sim.simulator import simulate


def one(text: str) -> RequestedRow:
    (row,) = read(text, "in.csv")[2]
    assert isinstance(row, RequestedRow)
    return row


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("mode,num,tp,conc\ncollocated,4,2,8\n", "collocated-4xtp2"),
        ("Mode;Num;TP;Concurrency\nCollocated;4;2;8\n", "collocated-4xtp2"),
        ("mode\tnum\ttp\tconcurrency\ncollocated\t4\t2\t8\n", "collocated-4xtp2"),
        ("# by hand\n\nmode,num,tp,concurrency\n\ncollocated,4.0,2.0,8.0\n", "collocated-4xtp2"),
        ("\ufeffmode,num,tp,concurrency\r\ncollocated,4,2,8\r\n", "collocated-4xtp2"),
        ("concurrency,tp,num,mode\n8,2,4,collocated\n", "collocated-4xtp2"),
        ("tp,concurrency\n8,8\n", "collocated-1xtp8"),
        ("tp,ep,concurrency\n8,True,8\n", "collocated-1xtp8ep"),
        ("mode,p_num,p_tp,d_num,d_tp,concurrency\ncollocated,4,2,,,8\n", "collocated-4xtp2"),
        ("mode,p_num,p_tp,d_num,d_tp,concurrency\ncollocated,,,4,2,8\n", "collocated-4xtp2"),
        ("mode,p_num,p_tp,d_num,d_tp,concurrency\ncollocated,0,0,4,2,8\n", "collocated-4xtp2"),
        ("mode,p_num,p_tp,d_num,d_tp,concurrency\ncollocated,4,2,4,2,8\n", "collocated-4xtp2"),
        ("mode,p_num,p_tp,p_ep,d_num,d_tp,d_ep,conc\ncollocated,nan,nan,,1,8,8,8\n", "collocated-1xtp8ep"),
        ("mode,num,tp,p_num,p_tp,d_num,d_tp,conc\npd-pack,nan,nan,1,2,3,2,8\n", "pd-pack-p1xtp2-d3xtp2"),
        ("mode,num,tp,p_num,p_tp,d_num,d_tp,conc\n,0,0,1,2,3,2,8\n", "pd-pack-p1xtp2-d3xtp2"),
        ("p_replicas,prefill_tp,num_decode,tp_d,conc\n1,2,3,2,8\n", "pd-pack-p1xtp2-d3xtp2"),
        ("mode,tp,p_num,d_num,conc\npd-pack,2,1,3,8\n", "pd-pack-p1xtp2-d3xtp2"),
        ("mode,placement,p_num,p_tp,d_num,d_tp,conc\npd,spread,1,4,1,4,8\n", "pd-spread-p1xtp4-d1xtp4"),
        ("mode,placement,p_num,p_tp,d_num,d_tp,conc\npd,pd-pack,1,4,1,4,8\n", "pd-pack-p1xtp4-d1xtp4"),
        ("mode,p_num,p_tp,d_num,d_tp,link,conc\npd,1,4,1,4,EFA/SRD,8\n", "pd-spread-p1xtp4-d1xtp4"),
        ("mode,p_num,p_tp,d_num,d_tp,link,conc\npd,1,4,1,4,cuda_ipc,8\n", "pd-pack-p1xtp4-d1xtp4"),
        ("mode,p_num,p_tp,d_num,d_tp,conc\ndisaggregated,2,4,1,8,8\n", "pd-spread-p2xtp4-d1xtp8"),
        ("mode,p_num,p_tp,p_ep,d_num,d_tp,d_ep,conc\nPD_Spread,1,8,yes,1,8,8,8\n", "pd-spread-p1xtp8ep-d1xtp8ep"),
        ("mode,conc\npd-spread-p1xtp4-d1xtp4,8\n", "pd-spread-p1xtp4-d1xtp4"),
        ("exp,conc\ngptoss_itl5000_otl250_mixed_1xtp2-3xtp2,8\n", "pd-pack-p1xtp2-d3xtp2"),
        ("exp,mode,conc\n1xtp4-1xtp4,pd-spread,8\n", "pd-spread-p1xtp4-d1xtp4"),
        ("config,p_num,d_num,conc\n1xtp2-3xtp2,1,3,8\n", "pd-pack-p1xtp2-d3xtp2"),
        ("config,d_num,conc\n1xtp2-3xtp2,3,8\n", "pd-pack-p1xtp2-d3xtp2"),
        ("config,num,conc\n4xtp2,4,8\n", "collocated-4xtp2"),
        ("config,conc\n1xtp4_pp2,8\n", "collocated-1xtp4pp2"),
        ("config,conc\ncollocated-1xtp4-dp2,8\n", "collocated-1xtp4dp2"),
        ("config,conc\n1xtp4-1xtp4-dp2,8\n", "pd-spread-p1xtp4dp2-d1xtp4dp2"),
        ("config,pp,conc\n1xtp4-pp2,2,8\n", "collocated-1xtp4pp2"),
        ("config,p_dp,dp,conc\n1xtp4-1xtp4-dp2,2,2,8\n", "pd-spread-p1xtp4dp2-d1xtp4dp2"),
        ("config,num,conc\ncollocated-2xtp4ep,2,8\n", "collocated-2xtp4ep"),
        ("name,mode,num,tp,conc\nthe first,collocated,4,2,8\n", "collocated-4xtp2"),
        ("exp,mode,num,tp,ep,conc\n1xtp8,collocated,1,8,true,8\n", "collocated-1xtp8ep"),
        ("tp,ep,conc\n8,1,8\n", "collocated-1xtp8"),
        ("tp,ep,conc\n8,0,8\n", "collocated-1xtp8"),
        ("tp,dp,ep,conc\n1,8,8,8\n", "collocated-1xdp8ep"),
        ("tp,moe_ep,conc\n4,4.0,8\n", "collocated-1xtp4ep"),
        ("tp,attention_dp,moe_ep,gpus,conc\n1,8,8,8,8\n", "collocated-1xdp8ep"),
        (
            "mode,p_workers,p_tp,p_attention_dp,d_workers,d_tp,d_attention_dp,d_moe_ep,gpus_total,conc\n"
            "disagg,2,2,4,1,1,32,32,48,8\n",
            "pd-spread-p2xtp2dp4-d1xdp32ep",
        ),
        ("TP,Concurrency,Disaggregated,Num Prefill GPUs\n4,8,false,\n", "collocated-1xtp4"),
        (
            "Prefill TP,Decode TP,Conc,Disaggregated,Num Prefill GPUs,Num Decode GPUs\n4,4,8,true,4,8\n",
            "pd-spread-p1xtp4-d2xtp4",
        ),
        ("mode,p_workers,p_tp,d_workers,d_tp,gpus_total,conc\ndisagg,2,2,1,4,8,8\n", "pd-pack-p2xtp2-d1xtp4"),
    ],
)
def test_many_ways_to_write_a_configuration(text: str, label: str) -> None:
    row = one(text)
    assert row.deployment.label == label
    assert row.load.value == 8 and row.num_requests == 40


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("tp,conc,Spec Decoding\n4,8,mtp\n", "spec_decoding"),
        ("tp,conc,DP Attention\n4,8,true\n", "dp_attention"),
        ("tp,conc,attention_dp\n4,8,8\n", "dp_attention"),
        ("tp,conc,attention_dp,gpus\n8,8,8,8\n", "gpus"),
        ("tp,dp,conc,attention_dp,gpus\n1,4,8,8,8\n", "dp_attention"),
        ("mode,p_tp,d_tp,conc,d_attention_dp\npd-pack,4,4,8,4\n", "d_dp_attention"),
        ("tp,conc,dcp\n4,8,8\n", "context_parallel"),
        ("tp,conc,chunked_prefill_size\n4,8,-1\n", "max_num_batched_tokens"),
        ("tp,conc,max_num_batched_tokens\n4,8,auto\n", "max_num_batched_tokens"),
        ("tp,conc,gpu_memory_utilization\n4,8,90%\n", "gpu_memory_utilization"),
        ("tp,conc,gpu_memory_utilization\n4,8,1.5\n", "gpu_memory_utilization"),
        ("tp,conc,async_scheduling\n4,8,perhaps\n", "async_scheduling"),
        ("tp,conc,block_size\n4,8,64\n", "block_size"),
        ("tp,conc,enforce_eager\n4,8,true\n", "enforce_eager"),
        ("tp,conc,stream_interval\n4,8,0\n", "stream_interval"),
        ("tp,conc,cpu_offload_gb\n4,8,1\n", "cpu_offload_gb"),
        ("tp,conc,enable_prefix_caching\n4,8,false\n", "enable_prefix_caching"),
        ("tp,conc,random_range_ratio\n4,8,0.8\n", "range_ratio"),
        ("tp,conc,random_range_ratio,framework\n4,8,0.0,SGLang 0.5.3\n", "range_ratio"),
        ("tp,conc,attention_backend\n4,8,TRTLLM\n", "attention_backend"),
        ("tp,conc,Prefix Cache Hit Rate\n4,8,0.9\n", "prefix_hit_rate"),
        ("tp,conc,prefix_hit_rate\n4,8,1\n", "prefix_hit_rate"),
        ("tp,ep,conc\n4,2,8\n", "ep"),
        ("tp,conc,gpus\n4,8,8\n", "gpus"),
        ("tp,conc,Num Prefill GPUs,Num Decode GPUs\n4,8,4,8\n", "p_gpus"),
        ("tp,conc,Disaggregated,Num Prefill GPUs,Num Decode GPUs\n4,8,true,4,8\n", "disaggregated"),
        ("p_tp,d_tp,conc,Disaggregated\n4,4,8,true\n", "disaggregated"),
        ("p_tp,d_tp,conc,Disaggregated,prefill_gpus,decode_gpus\n4,4,8,true,6,8\n", "p_gpus"),
        ("mode,tp,conc,Disaggregated\ncollocated,4,8,true\n", "mode"),
        ("mode,p_tp,d_tp,conc,Disaggregated\npd-pack,4,4,8,false\n", "mode"),
        ("tp,conc,Disaggregated\n4,8,perhaps\n", "disaggregated"),
        ("tp,tensor_parallel,conc\n4,8,8\n", "tp"),
    ],
)
def test_a_row_of_what_is_not_simulated_is_refused_and_the_others_are_read(text: str, column: str) -> None:
    head, row = text.splitlines()
    empty = ",".join("" if name not in ("tp", "conc") else "4" for name in head.split(","))
    more = f"{empty}\n" if "tp" in head.split(",") else ""
    refused, *others = read(f"{head}\n{row}\n{more}", "in.csv")[2]
    assert isinstance(refused, RefusedRow) and refused.line == 2 and refused.reason.startswith(column)
    assert all(isinstance(other, RequestedRow) for other in others) and len(others) == bool(more)


def test_engine_settings_that_are_vllms_own_change_nothing() -> None:
    """As `vllm serve --help` gives them; people write down what they did not change."""
    columns = "enable_prefix_caching,enable_chunked_prefill,enforce_eager,kv_offloading_size,cpu_offload_gb"
    text = f"tp,conc,{columns},stream_interval\n4,8,True,on,False,0,0.0,1\n"
    assert one(text) == one("tp,conc\n4,8\n") and read(text, "in.csv").unread == []


@pytest.mark.parametrize("name", ["max_num_seqs", "Max Num Seqs", "max_running_requests"])
def test_the_most_sequences_of_an_engine_are_simulated(name: str) -> None:
    rows = read(f"tp,conc,prompts,{name}\n4,32,fresh,\n4,32,fresh,64\n4,32,fresh,8\n", "in.csv")
    assert not rows.unread and all(isinstance(row, RequestedRow) for row in rows.requested)
    own, many, few = csv_predictions.predict(rows.requested, HARDWARE)
    assert own["predicted_mean_ttft_ms"] == many["predicted_mean_ttft_ms"], "32 requests never fill 64 places"
    assert float(few["predicted_mean_ttft_ms"]) > 5 * float(own["predicted_mean_ttft_ms"]), "24 of 32 wait"
    assert float(few["predicted_mean_tpot_ms"]) < float(own["predicted_mean_tpot_ms"])


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "Chunked Prefill Size"])
def test_the_largest_step_of_an_engine_is_simulated(name: str) -> None:
    rows = read(f"tp,conc,prompts,{name}\n4,32,fresh,\n4,32,fresh,8192\n4,32,fresh,1024\n4,32,fresh,16384\n", "in.csv")
    own, same, small, large = csv_predictions.predict(rows.requested, HARDWARE)
    assert own == same
    assert float(small["predicted_mean_tpot_ms"]) > 1.2 * float(own["predicted_mean_tpot_ms"]), (
        "more steps have prefill"
    )
    assert small["predicted_mean_tpot_ms_low"] and not large["predicted_mean_tpot_ms_low"]
    assert "max_num_batched_tokens=16384" in large["prediction_note"]


def test_memory_and_scheduling_of_an_engine_are_simulated() -> None:
    columns = "tp,conc,itl,prompts,gpu_memory_utilization,async_scheduling"
    text = f"{columns}\n1,16,5000,fresh,,\n1,16,5000,fresh,0.88,\n1,16,5000,fresh,,on\n1,16,5000,fresh,,off\n"
    own, small, ahead, one_step = csv_predictions.predict(read(text, "in.csv").requested, HARDWARE)
    assert float(small["predicted_mean_ttft_ms"]) > 1.2 * float(own["predicted_mean_ttft_ms"]), (
        "prompts wait for memory"
    )
    assert own == one_step and "async_scheduling=true" in ahead["prediction_note"]
    assert float(ahead["predicted_mean_ttft_ms"]) > float(own["predicted_mean_ttft_ms"]), "two steps are in flight"


def test_a_full_memory_of_a_stated_share_is_near_saturation() -> None:
    """1xtp1 on H200: half of the memory leaves room for few requests, and the levels wait for it."""
    rows = "tp,isl,osl,conc,num_prompts,gpu_memory_utilization\n1,2000,300,36,216,\n1,2000,300,36,216,0.52\n"
    whole, half = read(rows, "in.csv").requested
    assert isinstance(whole, RequestedRow) and isinstance(half, RequestedRow)
    hardware, shape = HARDWARE.with_values({"memory_gb": 150.0}), require_shape("gpt-oss-120b")
    for row, full in ((whole, False), (half, True)):
        level = Level(load=row.load, num_requests=row.num_requests, seed=0)
        levels = simulate(row.deployment, [level], row.workload, hardware, shape)
        assert bool(saturation(levels, hardware, shape, row.deployment)) is full


def test_a_request_fits_the_memory_that_is_stated() -> None:
    """More than the hardware's own share holds a longer request; less holds none, and the row says so."""
    shares = {"": 90000, "0.98": 90000, "0.84": 5000}
    rows = [f"1,1,{tokens},50,fresh,{share}" for share, tokens in shares.items()]
    text = "\n".join(["tp,conc,isl,osl,prompts,gpu_memory_utilization", *rows])
    own, more, less = csv_predictions.predict(read(text, "in.csv").requested, HARDWARE)
    assert not own["predicted_mean_ttft_ms"] and more["predicted_mean_ttft_ms"]
    assert not less["predicted_mean_ttft_ms"] and "weights take" in less["prediction_note"]


@pytest.mark.parametrize("cell", ["0", "-1", "2.5", "many"])
def test_a_number_of_sequences_is_a_whole_one(cell: str) -> None:
    with pytest.raises(UsageError, match=f"line 2: max_num_seqs '{cell}'"):
        read(f"tp,conc,max_num_seqs\n4,8,{cell}\n", "in.csv")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("tp,conc,random_input_len,random_output_len\n4,8,1000,100\n", (1000, 100)),  # vllm bench serve, SGLang
        ("tp,num_concurrency,Mean Input Tokens,Mean Output Tokens\n4,8,1000,100\n", (1000, 100)),
        ("tp,streams,prompt_tokens,output_tokens\n4,8,1000,100\n", (1000, 100)),  # guidellm
        ("tp,concurrency,input_sequence_length,output_sequence_length\n4,8,1000,100\n", (1000, 100)),  # AIPerf
    ],
)
def test_lengths_by_the_names_of_load_generators(text: str, tokens: tuple[int, int]) -> None:
    workload, table = one(text).workload, read(text, "in.csv")
    assert (workload.input_tokens, workload.output_tokens) == tokens
    assert table.unread == [] and table.assumed == ()


def test_lengths_that_are_assumed_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.csv"
    path.write_text("tp,conc,itl,otl\n4,8,1000,100\n4,8,1000,\n")
    assert plan.main(["--predict", str(path)]) == 0
    assert "without otl are predicted with the defaults, 5000 input and 250 output tokens" in capsys.readouterr().err
    assert read("tp,conc\n4,8\n", "in.csv").assumed == ("itl", "otl")


@pytest.mark.parametrize("column", ["gpu_model", "accelerator", "Accelerator Type", "GPU Name"])
def test_another_gpu_is_not_predicted_as_this_one(column: str) -> None:
    """A note that a column was not read is not enough: the row would have another GPU's figures."""
    both = read(f"tp,conc,{column}\n4,8,B200\n4,8,H100\n", "in.csv").requested
    b200, h100 = csv_predictions.predict(both, HARDWARE)
    assert "B200" in b200[csv_predictions.NOTE] and not b200["predicted_mean_tpot_ms"]
    assert h100["predicted_mean_tpot_ms"]


def test_columns_of_the_simulated_engine_change_nothing() -> None:
    plain = one("tp,conc\n4,8\n")
    columns = "Spec Decoding,DP Attention,attention_dp,dcp,range_ratio,EP,gpus,max_num_seqs,note,Disaggregated"
    text = f"tp,conc,{columns},prefix_hit_rate,empty\n4,8,none,false,0,1,0,1,4,,anything,false,0,\n"
    assert one(text) == plain
    assert read(text, "in.csv").unread == ["note"], "of what is said and not looked at the person hears"


def test_lengths_are_those_of_the_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = one("tp,conc,itl,otl,lengths\n4,8,1000,100,uniform:0.5-1.0\n")
    assert row.workload.varied and row.workload.longest == (1000, 100) and row.workload.mean_tokens.input < 800
    path = tmp_path / "in.csv"
    path.write_text("tp,conc,prompts,lengths\n4,8,fresh,\n4,8,fresh,uniform:0.2-0.4\n4,8,fresh,fixed\n")
    assert plan.main(["--predict", str(path)]) == 0
    fixed, varied, again = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert float(varied["predicted_mean_ttft_ms"]) < 0.7 * float(fixed["predicted_mean_ttft_ms"])
    per_request = [
        float(r["predicted_output_tokens_per_s"]) / float(r["predicted_requests_per_s"]) for r in (fixed, varied)
    ]
    assert per_request[0] == pytest.approx(250, rel=1e-3) and 50 < per_request[1] < 100
    assert again["predicted_mean_ttft_ms"] == fixed["predicted_mean_ttft_ms"]


@pytest.mark.parametrize(
    ("column", "same", "other"),
    [
        (
            "Hardware",
            ("h100", "H100_SXM", "NVIDIA H100 80GB HBM3", "h100-sxm5"),
            ("h200", "gb200", "B200", "H100 PCIe"),
        ),
        ("GPU", ("H100",), ("L40S", "8")),
        ("Model", ("gpt-oss-120b", "openai/gpt-oss-120b"), ("meta-llama/Llama-3.3-70B",)),
        ("Framework", ("vllm", "vLLM 0.11.0"), ("sglang", "dynamo-trt", "trtllm")),
        ("Precision", ("fp4", "mxfp4"), ("fp8", "bf16")),
        ("kv_cache_dtype", ("auto", "bfloat16"), ("fp8",)),
    ],
)
def test_a_row_of_another_stack_is_refused_with_a_note(
    column: str, same: tuple[str, ...], other: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.csv"
    path.write_text(f"tp,conc,{column}\n4,8,\n" + "".join(f"4,8,{cell}\n" for cell in (*same, *other)))
    assert plan.main(["--predict", str(path)]) == 0
    out, err = capsys.readouterr()
    plain, *rows = csv.DictReader(io.StringIO(out))
    for row in rows[: len(same)]:
        assert row["predicted_mean_tpot_ms"] == plain["predicted_mean_tpot_ms"] and not row["prediction_note"]
    for row in rows[len(same) :]:
        assert not row["predicted_mean_tpot_ms"] and row["prediction_note"].startswith("not predicted: ")
        assert repr(row[column]) in row["prediction_note"] and row["prediction_note"] in err


def test_no_name_means_two_columns() -> None:
    names = [name for ours, others in ALIASES.items() for name in (ours, *others)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("config", ["collocated-2xtp4", "pd-pack-p1xtp2-d1xtp2"])
def test_rows_of_fresh_prompts_do_not_depend_on_others(config: str) -> None:
    """Neither on the routing of other rows nor on the age of the KV pool that they leave."""

    def predicted(*concurrencies: int) -> list[dict[str, str]]:
        rows = "".join(f"{config},{n},{40 * n},fresh\n" for n in concurrencies)
        requested = read(f"config,concurrency,num_prompts,prompts\n{rows}", "in.csv").requested
        return csv_predictions.predict(requested, HARDWARE, (0,))

    (alone,), beside = predicted(16), predicted(8, 16, 32)
    assert beside[1] == alone


@pytest.mark.parametrize(
    ("cell", "policy"),
    [("", "repeated"), ("nan", "repeated"), ("as measured", "repeated"), ("True", "repeated"), ("none", "fresh")],
)
def test_what_becomes_of_prompts(cell: str, policy: str) -> None:
    assert one(f"tp,concurrency,reused_prompt_policy\n8,8,{cell}\n").prompts == policy


COLUMNS = {
    "mode": "pd-spread",
    "p_num": "2",
    "p_tp": "4",
    "d_num": "1",
    "d_tp": "8",
    "d_ep": "1",
    "itl": "1000",
    "otl": "100",
    "concurrency": "16",
    "num_prompts": "160",
    "prompts": "fresh",
    "link": "tcp",
}


@given(
    order=st.permutations(list(COLUMNS)),
    names=st.fixed_dictionaries({name: st.sampled_from((name, *ALIASES[name])) for name in COLUMNS}),
    delimiter=st.sampled_from(",;\t"),
    upper=st.booleans(),
)
def test_order_and_spelling_of_columns_do_not_matter(
    order: list[str], names: dict[str, str], delimiter: str, upper: bool
) -> None:
    head = delimiter.join(names[name].upper() if upper else names[name] for name in order)
    row = delimiter.join(COLUMNS[name] for name in order)
    plain = one(",".join(COLUMNS) + "\n" + ",".join(COLUMNS.values()) + "\n")
    assert one(f"{head}\n{row}\n") == plain


def test_a_row_that_cannot_run_does_not_take_the_others_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.csv"
    path.write_text(
        "mode,p_num,p_tp,p_pp,d_num,d_tp,itl,concurrency\n"
        "pd-pack,1,2,2,1,2,5000,8\n"
        "pd-pack,1,1,1,1,1,90000,8\n"
        "pd-pack,1,3,1,1,2,5000,8\n"
        "pd-pack,1,2,1,1,2,200000,8\n"
        "pd-pack,1,2,1,1,2,5000,8\n"
        "pd-pack,1,8,1,1,8,5000,8\n"
    )
    assert plan.main(["--predict", str(path)]) == 0
    printed = capsys.readouterr()
    *refused, plain, wide = csv.DictReader(io.StringIO(printed.out))
    for row, why in zip(refused, ("one pipeline stage", "does not hold", "does not divide", "131072"), strict=True):
        assert row["predicted_requests_per_s"] == "" == row["predicted_mean_tpot_ms"]
        assert why in row["prediction_note"]
    assert float(plain["predicted_requests_per_s"]) > 0 and plain["prediction_note"] == ""
    assert float(wide["predicted_requests_per_s"]) > 0 and "does not fit a node" in wide["prediction_note"]
    named = [line.split(", ")[1] for line in printed.err.splitlines() if not line.startswith("note: ")]
    assert named == [f"line {n}" for n in (2, 3, 4, 5)]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("1xtp4-tp8,,", "tp8 contradicts 1xtp4"),
        ("1xtp4_pp2,4,1", "contradicts the columns, which give 1xtp4"),
        ("1xtp4pp4,,2", "contradicts the columns, which give 1xtp4pp2"),
        ("pd-fluid-8xtp2-run1,,", "fluid contradicts"),
    ],
)
def test_names_that_contradict_are_refused(row: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"line 2: .*{said}"):
        read(f"config,tp,pp,conc\n{row},8\n", "in.csv")


@pytest.mark.parametrize(
    ("config", "unread"),
    [
        ("1xtp4-spec", "spec"),
        ("1xtp4_fp8", "fp8"),
        ("fp8_1xtp4", "fp8"),
        ("1xtp4-sglang", "sglang"),
        ("pd-1xtp4", "pd"),
        ("1xtp4-2", "2"),
        ("1xtp4_vllm-0.19.1", "0.19.1"),
        ("gptoss_itl10000_otl500_1xtp4", "itl10000"),
        ("1xtp4-prefill_only", "prefill-only"),
        ("1xtp4_c16", "c16"),
        ("h200_1xtp4", "h200"),
        ("1xtp4_ep8", "ep8"),
        ("1xtp4-8gpus", "8gpus"),
        ("1xtp4-nixl", "nixl"),
        ("qwen-pp512_1xtp4", "pp512"),
        ("fluid-test-1xtp4", "fluid"),
    ],
)
def test_words_that_no_prediction_depends_on_cost_the_band(config: str, unread: str) -> None:
    """The word may name another deployment than the plain configuration's, whose band the row would get."""
    plain, row = csv_predictions.predict(
        read(f"config,conc\n1xtp4,8\n{config},8\n", "in.csv").requested, HARDWARE, (0,)
    )
    assert row["predicted_mean_tpot_ms"] == plain["predicted_mean_tpot_ms"]
    assert plain["predicted_mean_tpot_ms_low"] and not row["predicted_mean_tpot_ms_low"]
    assert f"no prediction depends on {unread}" in row[csv_predictions.NOTE]


@pytest.mark.parametrize(
    "config",
    [
        "gptoss_itl5000_otl250_mixed_baseline_1xtp4",
        "gpt-oss-120b_1xtp4-run2",
        "collocated-1xtp4_2026-01-05T12-00-00",
        "2026-01-05_h100-vllm-0.11.2_1xtp4_conc8",
        "1xtp4-tp4-r3",
        "1xtp4_no-ep",
        "1xtp4-4gpus",
        "1xtp4-v2",
    ],
)
def test_words_that_agree_with_the_row_cost_nothing(config: str) -> None:
    text = f"config,conc\n1xtp4,8\n{config},8\n"
    plain, row = csv_predictions.predict(read(text, "in.csv").requested, HARDWARE, (0,))
    assert row == plain and plain["predicted_mean_tpot_ms_low"]


def test_experts_that_ranks_do_not_divide_get_copies() -> None:
    """The shipped systems of 104 GPUs. Without its load balancer vLLM refuses them."""
    text = (
        "config,itl,otl,concurrency,num_prompts,enable_eplb\n"
        + "pd-spread-p1xdp32ep-d1xdp72ep,2000,100,32,64,{0}\n"
        + "pd-spread-p1xdp32ep-d1xdp32ep,2000,100,32,64,{1}\n"
    )
    given = read(text.format("true", "true"), "in.csv", "deepseek-v3").requested
    balanced, even = csv_predictions.predict(given, HARDWARE, (0,))
    assumed, plain = csv_predictions.predict(
        read(text.format("", ""), "in.csv", "deepseek-v3").requested, HARDWARE, (0,)
    )
    assert balanced["predicted_mean_tpot_ms"] == assumed["predicted_mean_tpot_ms"] != ""
    assert plain["predicted_mean_tpot_ms"] == even["predicted_mean_tpot_ms"]
    for row, copies in ((balanced, "32 redundant"), (assumed, "32 redundant"), (even, "0 redundant")):
        assert copies in row[csv_predictions.NOTE] and not row["predicted_mean_tpot_ms_low"]
    assert "redundant" not in plain[csv_predictions.NOTE]
    off, _ = csv_predictions.predict(read(text.format("no", "no"), "in.csv", "deepseek-v3").requested, HARDWARE, (0,))
    assert off["predicted_mean_tpot_ms"] == "" and "leave enable_eplb out" in off[csv_predictions.NOTE]


def test_refusals_of_rows_advise_no_flag_that_a_plan_lacks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    rows = "pd-spread-p1xtp2pp2-d1xtp4", "pd-spread-p1xtp16-d1xtp8", "collocated-1xtp4", "collocated-1xdp3ep,off"
    path.write_text("config,enable_eplb,conc\n" + "".join(f"{row if ',' in row else row + ','},8\n" for row in rows))
    assert plan.main(["--predict", str(path)]) == 0
    told = capsys.readouterr().err
    assert [f"line {n}" in told for n in (2, 3, 4, 5)] == [True, True, False, True]
    assert not {word for word in told.split() if word.startswith("--")}


@pytest.mark.parametrize(
    ("row", "same"),
    [
        ("1xtp8,yes,", "1xtp8ep"),
        ("1xtp8,8,", "1xtp8ep"),
        ("1xtp8,no,", "1xtp8"),
        ("p1xtp2-d1xtp4,,yes", "p1xtp2ep-d1xtp4"),
        ("p1xtp2-d1xtp4,yes,", "p1xtp2ep-d1xtp4ep"),
    ],
)
def test_columns_of_ep_add_to_the_name_of_a_configuration(row: str, same: str) -> None:
    given, named = read(f"config,ep,p_ep,conc\n{row},8\n{same},,,8\n", "in.csv").requested
    assert given.deployment.pools == named.deployment.pools
