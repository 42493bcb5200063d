"""The CSV of `plan.py --predict`: the many ways to write one configuration, and what is refused rather than guessed."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.cli import plan
from pdlab.core.errors import UsageError
from pdlab.plan.csv_rows import ALIASES, RequestedRow, read


def one(text: str) -> RequestedRow:
    (row,) = read(text, "in.csv")[2]
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
        ("mode,p_num,p_tp,p_ep,d_num,d_tp,d_ep,conc\ncollocated,nan,nan,,1,8,1,8\n", "collocated-1xtp8ep"),
        ("mode,num,tp,p_num,p_tp,d_num,d_tp,conc\npd-pack,nan,nan,1,2,3,2,8\n", "pd-pack-p1xtp2-d3xtp2"),
        ("mode,num,tp,p_num,p_tp,d_num,d_tp,conc\n,0,0,1,2,3,2,8\n", "pd-pack-p1xtp2-d3xtp2"),
        ("p_replicas,prefill_tp,num_decode,tp_d,conc\n1,2,3,2,8\n", "pd-pack-p1xtp2-d3xtp2"),
        ("mode,tp,p_num,d_num,conc\npd-pack,2,1,3,8\n", "pd-pack-p1xtp2-d3xtp2"),
        ("mode,placement,p_num,p_tp,d_num,d_tp,conc\npd,spread,1,4,1,4,8\n", "pd-spread-p1xtp4-d1xtp4"),
        ("mode,placement,p_num,p_tp,d_num,d_tp,conc\npd,pd-pack,1,4,1,4,8\n", "pd-pack-p1xtp4-d1xtp4"),
        ("mode,p_num,p_tp,d_num,d_tp,link,conc\npd,1,4,1,4,EFA/SRD,8\n", "pd-spread-p1xtp4-d1xtp4"),
        ("mode,p_num,p_tp,d_num,d_tp,link,conc\npd,1,4,1,4,cuda_ipc,8\n", "pd-pack-p1xtp4-d1xtp4"),
        ("mode,p_num,p_tp,d_num,d_tp,conc\ndisaggregated,2,4,1,8,8\n", "pd-spread-p2xtp4-d1xtp8"),
        ("mode,p_num,p_tp,p_ep,d_num,d_tp,d_ep,conc\nPD_Spread,1,8,1,1,8,1,8\n", "pd-spread-p1xtp8ep-d1xtp8ep"),
        ("mode,conc\npd-spread-p1xtp4-d1xtp4,8\n", "pd-spread-p1xtp4-d1xtp4"),
        ("exp,conc\ngptoss_itl5000_otl250_mixed_1xtp2-3xtp2,8\n", "pd-pack-p1xtp2-d3xtp2"),
        ("exp,mode,conc\n1xtp4-1xtp4,pd-spread,8\n", "pd-spread-p1xtp4-d1xtp4"),
        ("name,mode,num,tp,conc\nthe first,collocated,4,2,8\n", "collocated-4xtp2"),
        ("exp,mode,num,tp,ep,conc\n1xtp8,collocated,1,8,1,8\n", "collocated-1xtp8ep"),
    ],
)
def test_many_ways_to_write_a_configuration(text: str, label: str) -> None:
    row = one(text)
    assert row.deployment.label == label
    assert row.load.value == 8 and row.num_requests == 40


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mode,concurrency\ncollocated,8\n", "no TP degree"),
        ("mode,num,tp,concurrency\ncollocated,4,,8\n", "no TP degree is given; give tp"),
        ("mode,p_num,p_tp,d_num,d_tp,concurrency\npd-pack,1,2,1,,8\n", "no TP degree is given; give d_tp"),
        ("mode,p_num,p_tp,d_num,d_tp,concurrency\npd-pack,0,2,1,2,8\n", "p_num '0' must be above 0"),
        ("mode,p_num,p_tp,d_num,d_tp,concurrency\ncollocated,4,2,2,2,8\n", "p_num is 4 and d_num 2"),
        ("config,num,tp,concurrency\n4xtp2,2,4,8\n", "'4xtp2' contradicts the columns, which give 2xtp4"),
        ("config,mode,concurrency\n4xtp2,pd-pack,8\n", "contradicts the configuration"),
        ("config,mode,concurrency\n1xtp2-1xtp2,collocated,8\n", "contradicts the configuration"),
        ("mode,placement,p_tp,d_tp,concurrency\npd-pack,spread,2,2,8\n", "contradicts placement spread"),
        ("mode,placement,p_tp,d_tp,concurrency\npd,diagonal,2,2,8\n", "placement 'diagonal' is not known"),
        ("mode,num,tp,concurrency\ncollocated,4,2,8,9\n", "5 cells for 4 columns"),
        ("mode,num,tp,TP,concurrency\ncollocated,4,2,2,8\n", "occurs twice"),
        ("mode,num,tp,concurrency\ncollocated,4,2,1000000\n", "too many to simulate"),
        ("mode,num,tp,concurrency,request_rate\ncollocated,4,2,,nan\n", "concurrency and request_rate are both empty"),
    ],
)
def test_what_is_left_to_guess_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=r"in\.csv") as caught:
        read(text, "in.csv")
    assert message in str(caught.value)


def test_no_name_means_two_columns() -> None:
    names = [name for ours, others in ALIASES.items() for name in (ours, *others)]
    assert len(names) == len(set(names))


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
    for row, why in zip(refused, ("one pipeline stage", "does not fit", "does not divide", "131072"), strict=True):
        assert row["predicted_requests_per_s"] == "" == row["predicted_mean_tpot_ms"]
        assert why in row["prediction_note"]
    assert float(plain["predicted_requests_per_s"]) > 0 and plain["prediction_note"] == ""
    assert float(wide["predicted_requests_per_s"]) > 0 and "does not fit a node" in wide["prediction_note"]
    assert [line.split(", ")[1] for line in printed.err.splitlines()] == [f"line {n}" for n in (2, 3, 4, 5)]
