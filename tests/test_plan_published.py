"""Predictions of published runs: the bounds that are promised, and tables that are not as they should be."""

import csv
import json
import math
from dataclasses import replace

import pytest

from lockstep.cli.main import main
from lockstep.errors import UsageError
from lockstep.plan import machine, models, published, timing
from lockstep.plan.published import PUBLISHED, Calibration, read_table
from lockstep.plan.timing import Choices

HEADER = (
    "id,source,model,params,layers,hidden,seq_len,precision,strategy,activation_checkpointing,micro_batch,grad_accum,"
    "global_batch,gpu,gpus,gpus_per_host,network,unit,throughput_per_gpu,memory_gb"
)


@pytest.fixture(scope="module")
def runs():
    return read_table(PUBLISHED)


@pytest.fixture(scope="module")
def calibration(runs):
    return Calibration(runs)


def test_the_table_is_read_whole(runs):
    assert len(runs) == 57 and not any(run.remarks for run in runs)
    assert sum(run.is_multi_host for run in runs) == 19
    assert {run.device for run in runs} == {"h100", "a100-80", "a100-40", "v100-16"}


def test_runs_on_several_hosts_follow_from_those_on_one(runs, calibration):
    errors = published.multi_host_errors(runs, calibration)
    assert errors.count == 19
    assert errors.median <= 0.08
    assert errors.median < errors.baseline
    assert errors.median < errors.one_host


def test_a_series_follows_from_the_others_better_than_by_constant_efficiency(runs, calibration):
    errors = published.left_out_errors(runs, calibration)
    assert errors.count == 57
    assert errors.median < errors.baseline


def test_what_comes_with_the_package_is_what_the_code_computes(calibration, runs):
    kept = published.built_in()
    hint = (
        "models or constants have changed: run python -m lockstep.plan.published, and put its errors into docs/plan.md"
    )
    ours, theirs = dict(calibration.residuals()), dict(kept.calibration.residuals())
    assert {run.id: ours[run] for run in ours} == pytest.approx({run.id: theirs[run] for run in theirs}, abs=2e-6), hint
    assert kept.multi_host.rows == pytest.approx(published.multi_host_errors(runs, calibration).rows, abs=2e-4)


def test_no_row_is_predicted_from_itself(runs, calibration):
    run = runs[0]
    doubled = replace(run, measured=2 * run.measured)
    others = calibration.without(lambda other: other.id == run.id)
    assert calibration.predict(run).value == others.predict(run).value
    assert others.predict(doubled).value == others.predict(run).value


@pytest.mark.parametrize(
    ("model", "where", "reference", "share"),
    [
        # Sergeev and Del Balso 2018 (Horovod): 128 hosts of 4 P100s, 25 Gbit/s; against one GPU.
        ("inception-v3", "512xP100/4@25Gb", 1, 0.90),
        ("resnet101", "512xP100/4@25Gb", 1, 0.90),
        ("vgg16", "512xP100/4@25Gb", 1, 0.68),
        # Goyal et al. 2017: 32 hosts of 8 P100s, 50 Gbit/s; against one host.
        ("resnet50", "256xP100/8@50Gb", 8, 0.90),
    ],
)
def test_scaling_that_nothing_was_fitted_to(model, where, reference, share):
    micro = 32 if reference == 8 else 64
    work = replace(models.named(model, precision="fp32"), micro_batch=micro)
    on = machine.named(where)
    many, few = (timing.speed(work, each, Choices()) for each in (on, on.of(reference)))
    assert many.units_per_s_per_worker / few.units_per_s_per_worker == pytest.approx(share, abs=0.05)


def written(tmp_path, *rows, header=HEADER, name="table.csv"):
    path = tmp_path / name
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_predict_writes_all_rows_in_their_order(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main(["plan", "--calibrate", str(PUBLISHED), "--predict", str(PUBLISHED), "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    with PUBLISHED.open() as file:
        table = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [row["id"] for row in table]
    assert [row["measured"] for row in rows] == [float(row["throughput_per_gpu"]) for row in table]
    assert all(math.isfinite(row["predicted"]) and row["predicted"] > 0 for row in rows)
    assert "median error" in capsys.readouterr().out


def test_odd_rows_are_predicted_from_what_is_there(tmp_path, capsys):
    path = written(
        tmp_path,
        "a,s,GPT-13B,13B,,,2048,bf16,fsdp,yes,4,,,h100,512,8,8x400 Gb/s IB,tokens/s/gpu,,",
        "b,s,mystery,,,,,fp32,,,,,,tpu_v9,64,,,images/s/gpu,100,",
        "c,s,ResNet-50,,,,,amp,ddp,no,128,,,Tesla V100-SXM2-16GB,32,8,100 Gb/s IB,images/s,,",
        "d,s,Llama-3.1-8B,8.03e9,,,8192,bf16,zero=3,selective,2,,,h100,256,8,400 Gb/s a GPU,tokens/s/gpu,,",
        "e,s,MPT-7b,6658859008,32,4096,2048,bf16,zero=3,no,-5,1,lots,a100_80gb,0,8,,tokens/s/gpu,4641,",
        "f,s,VGG-16,,,,,fp32,dp,no,64,,,p100,512,4,25 GbE,scaling efficiency (%),68,",
        "g,s,strange images,40M,,,,fp32,dp,no,64,,,v100_16gb,8,8,,images/s/gpu,,",
        "i,s,endless,9e99,999999999,9e30,2048,bf16,zero=1,no,1e30,9e30,,h100,9e30,8,,tokens/s/gpu,1e500,",
        "h,s,BERT-large phase 1,336000000,,,128,amp,zero=0,no,256,,65536,a100_80gb,16,8,,ms/step,,,more,and more",
    )
    out = tmp_path / "out.json"
    assert main(["plan", "--predict", str(path), "--json", str(out)]) == 0
    rows = {row["id"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == list("abcdefgih")
    assert all(row["predicted"] and math.isfinite(row["predicted"]) for row in rows.values())
    assert rows["c"]["predicted"] == pytest.approx(32 * 700, rel=0.25)  # All GPUs together, as the unit says.
    assert rows["f"]["predicted"] == pytest.approx(68, abs=5)
    assert 4000 < rows["d"]["predicted"] < 7500
    said = capsys.readouterr().err
    assert "tpu_v9" in said and "mystery" in said and "-5" in said


def test_columns_may_be_missing_or_called_otherwise(tmp_path):
    path = written(tmp_path, "r1,MPT-7b,6658859008,64,h100,4500", header="id,model,params,gpus,gpu,throughput")
    run = read_table(path)[0]
    assert (run.gpus, run.device, run.measured) == (64, "h100", 4500)
    assert run.precision == "bf16" and run.remarks
    assert Calibration().predict(run).value > 0


def test_a_table_of_something_else_is_refused(tmp_path):
    with pytest.raises(UsageError, match="none of the columns"):
        read_table(written(tmp_path, "1,2", header="x,y"))
    with pytest.raises(UsageError, match="cannot be read"):
        read_table(tmp_path / "missing.csv")
    assert read_table(written(tmp_path)) == []


@pytest.mark.parametrize(
    ("unit", "factor"),
    [
        ("tokens/s/gpu", 1),
        ("tokens/sec/GPU", 1),
        ("tokens/s", 64),
        ("samples/s/gpu", 1 / 2048),
        ("k tokens/s/gpu", 1e-3),
    ],
)
def test_units_of_throughput(unit, factor, tmp_path):
    rows = [
        f"a,s,MPT-7b,6658859008,32,4096,2048,bf16,zero=3,no,6,2,768,h100,64,8,,{each},,"
        for each in ("tokens/s/gpu", unit)
    ]
    plain, other = (Calibration().predict(run).value for run in read_table(written(tmp_path, *rows)))
    assert other == pytest.approx(factor * plain)


def test_units_of_time(tmp_path):
    units = ("ms/step", "s/step", "steps/s", "step time (ms)")
    rows = [f"a,s,MPT-7b,6658859008,32,4096,2048,bf16,zero=3,no,6,2,768,h100,64,8,,{unit},," for unit in units]
    milliseconds, seconds, rate, again = (
        Calibration().predict(run).value for run in read_table(written(tmp_path, *rows))
    )
    assert milliseconds == again == pytest.approx(1e3 * seconds) == pytest.approx(1e3 / rate)


@pytest.mark.parametrize(
    ("text", "gbit"),
    [
        ("100 Gb/s IB a host", 100),
        ("DGX A100, 8x200 Gb/s IB", 1600),
        ("400 Gb/s a GPU", 3200),
        ("25 GbE", 25),
        ("EFA (instance type not stated)", None),
        ("3.2 Tb/s", 3200),
        ("50 GB/s", 400),
        ("", None),
    ],
)
def test_networks_are_read(text, gbit):
    assert published._gbit(text, 8) == gbit
