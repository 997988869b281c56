"""`lockstep bench step` and `lockstep bench gpu`, as far as they need no workers: what is asked, how it reads."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.bench import catalogue, machine, models, plot, request, results
from lockstep.bench.frameworks import deepspeed_configuration
from lockstep.bench.results import Entry, Heat
from lockstep.cli.main import main
from lockstep.errors import UsageError

NO_CUDA = "there is no CUDA device here" if not torch.cuda.is_available() else "99 workers on"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(request.host, "num_cores", lambda: 2)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["step", "-n", "0"], "0 is too few: give 1 or more"),
        (["step", "-n", "9"], "9 workers on 2 core(s) would mostly wait for their turn"),
        (
            ["step", "--workload", "gpt-9t"],
            "invalid choice: 'gpt-9t' (choose from",
        ),
        (["step", "--workload", "gpt2-124m"], "invalid choice: 'gpt2-124m'"),
        (["step", "--variants", "nocomm", "horse"], "there is no variant 'horse': there are nocomm"),
        (["step", "--variants", "accelerate/gloo"], "there is no variant 'accelerate/gloo'"),
        (["step", "--variants", "fsdp2@4"], "there is no variant 'fsdp2@4'"),
        (["step", "--variants", "ddp/nccl"], "there is no variant 'ddp/nccl'"),
        (["step", "--steps", "0"], "--steps: 0 is too few"),
        (["step", "--warmup", "-1"], "--warmup: -1 is too few"),
        (["step", "--batch", "0"], "--batch: 0 is too few"),
        (["step", "--crews", "0"], "--crews: 0 is too few"),
        (["step", "--json", "nowhere/a.json"], "'nowhere/a.json' cannot be written: give a file"),
        (["step", "--plot", "nowhere/a.svg"], "'nowhere/a.svg' cannot be written: give a file"),
        (["gpu", "--workload", "gpt-10m"], "invalid choice: 'gpt-10m'"),
        (["gpu", "-n", "99"], NO_CUDA),
    ],
)
def test_a_request_that_cannot_be_right_is_refused_in_one_line(words, part, capsys):
    try:
        status = main(["bench", *words])
    except SystemExit as left:
        status = left.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert part in said.err
    assert said.err.startswith("lockstep bench")
    assert said.err.count("\n") == 1


def test_torch_is_not_needed_to_say_what_is_wrong():
    code = (
        "import sys; from lockstep.cli.main import main;"
        "print(main(['bench', 'step', '--variants', 'none']), 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["2", "False"]


@pytest.mark.parametrize(("command", "usual"), [("step", catalogue.ON_CPU), ("gpu", catalogue.ON_GPU)])
def test_help_names_every_option_workload_and_variant(command, usual, capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", command, "--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("-n", "--workload", "--variants", "--steps", "--json", "--plot", *usual))
    assert all(name in said for name in catalogue.workloads(on_gpu=command == "gpu"))


def test_what_is_asked_without_words():
    (asked,) = request.checked_contests("cpu", None, ["gpt-10m"], None, 5, 1, None)
    assert (asked.workers, asked.batch, asked.variants) == (2, 4, catalogue.ON_CPU)
    (asked,) = request.checked_contests("cpu", 4, ["mlp", "mlp"], ["ddp", "nocomm", "ddp"], 5, 1, 7)
    assert (asked.workers, asked.batch, asked.variants) == (4, 7, ("ddp", "nocomm"))


def test_names_taken_apart():
    assert catalogue.spelled("ddp@4/shm") == catalogue.Spelling("ddp", 4.0, "shm")
    assert catalogue.spelled("zero3") == catalogue.Spelling("zero3", None, None)
    for name in (*catalogue.ON_CPU, *catalogue.ON_GPU):
        catalogue.spelled(name)
    with pytest.raises(UsageError):
        catalogue.spelled("")


def test_the_limit_and_ddp_on_its_own_backend_are_compared_with():
    assert catalogue.bases(catalogue.ON_CPU) == ["nocomm", "ddp/gloo"]
    assert catalogue.bases(["ddp/shm", "ddp/gloo", "nocomm"]) == ["nocomm", "ddp/gloo"]
    assert catalogue.bases(["lockstep", "zero1"]) == ["lockstep"]
    assert catalogue.bases(["ddp"]) == ["ddp"]


@given(st.integers(0, 12), st.integers(0, 2), st.integers(0, 14))
def test_heats_hold_everyone_once_and_the_bases_always(num_others, num_bases, most):
    bases = [f"base {number}" for number in range(num_bases)]
    others = [f"other {number}" for number in range(num_others)]
    heats = catalogue.heats([*bases, *others], bases, most)
    assert [name for heat in heats for name in heat if name in others] == others
    assert all(set(bases) <= set(heat) for heat in heats)
    assert all(len(heat) <= max(most, len(bases) + 1) for heat in heats)


@pytest.mark.parametrize("name", catalogue.WORKLOADS)
def test_a_workload_is_as_large_as_it_says_and_gives_a_loss(name):
    device = torch.device("cpu" if name in ("gpt-10m", "mlp", "recommender", "tiny") else "meta")  # Shapes alone.
    with device:
        model = models.build(name)
    count = sum(param.numel() for param in model.parameters())
    assert count == pytest.approx(catalogue.WORKLOADS[name].num_params, rel=0.05)
    (batch,) = models.batches(name, 2, 0, torch.device("cpu"), count=1)
    loss = model(*(tensor.to(device) for tensor in batch))
    assert loss.shape == () and (loss.is_meta or loss.item() > 0)
    (other,) = models.batches(name, 2, 1, torch.device("cpu"), count=1)
    assert not batch[0].equal(other[0])
    inside = {id(param) for unit in models.units(model) for param in unit.parameters()}
    assert 0 < len(inside) < len(list(model.parameters()))


def test_memory_that_grows_and_stays():
    kept = []
    with machine.memory_growth(torch.device("cpu")) as grown:
        torch.ones(32 << 20)  # 134 MB that go away,
        kept.append(torch.ones(16 << 20))  # and 67 that stay.
    assert grown.peak >= grown.held
    assert 55e6 < grown.held < 100e6


def test_what_deepspeed_is_told():
    assert deepspeed_configuration(0, 4, bf16=False)["zero_optimization"] == {"stage": 0}
    told = deepspeed_configuration(2, 4, bf16=True)
    assert told["zero_optimization"] == {"stage": 2, "contiguous_gradients": True, "overlap_comm": True}
    assert told["torch_autocast"]["enabled"]


def found(seconds, *, failed=(), loss=None, heats=None, steps=2):
    """Results of a contest in which each variant took `seconds[name]`."""
    names = [*seconds, *failed, "fabric"]
    (asked,) = request.checked_contests("cpu", 2, ["tiny"], names, steps, 0, None)
    entry = {name: Entry(2_000_000, (loss or {}).get(name, 1.0)) for name in seconds}
    held = [
        Heat({"workers": 2}, "2 of 2 rounds count", {name: seconds[name] for name in heat}, entry, {})
        for heat in heats or [list(seconds)]
    ]
    missing = {**dict.fromkeys(failed, "RuntimeError: no"), "fabric": "not installed"}
    return results.collect(asked, "2026-01-01T00:00:00+00:00", missing, held)


SECONDS = {"nocomm": [0.1, 0.2], "lockstep": [0.1, 0.2], "ddp/gloo": [0.2, 0.4], "fsdp2": [2.0, 4.0]}


def test_what_several_crews_found_counts_together():
    entry = Entry(2_000_000, 1.0)
    crews = [
        Heat({"workers": 2}, "2 of 2", {"nocomm": [1.0, 2.0], "ddp": [3.0, 4.0]}, {"nocomm": entry}, {}),
        Heat({"workers": 2}, "1 of 2", {"nocomm": [5.0]}, {"nocomm": entry}, {"ddp": "it died"}),
    ]
    both = results.joined(crews)
    assert both.seconds == {"nocomm": [1.0, 2.0, 5.0]}
    assert (both.failed, both.rounds) == ({"ddp": "it died"}, "2 of 2\n1 of 2")
    assert results.joined(crews[:1]) == crews[0]


def test_the_table():
    said = results.lines(found(SECONDS, failed=["zero1"], loss={"lockstep": 1.2, "nocomm": 7}))
    assert all(len(line) <= 120 for line in said)
    rows = {line.split()[0]: line.split() for line in said if line}
    assert rows["nocomm"][1:] == ["150.0", "110.0", "-", "190.0", "1", "0.500", "(0.500-0.500)", "2"]
    assert rows["ddp/gloo"][-4:] == ["2.000", "(2.000-2.000)", "1", "2"]
    assert rows["fsdp2"][-5] == "20.000"
    assert rows["zero1"] == ["zero1", "RuntimeError:", "no"]
    assert rows["fabric"] == ["fabric", "not", "installed"]
    text = "\n".join(said)
    assert "for all that communicate, but for lockstep (2.0e-01)." in text
    assert "too few quiet rounds" in text


@pytest.mark.parametrize(("steps", "kept", "warns"), [(24, 6, True), (24, 11, True), (24, 12, False), (8, 5, True)])
def test_a_disturbed_run_says_so(steps, kept, warns):
    few = found({"nocomm": [1.0] * kept, "lockstep": [1.0] * kept}, steps=steps)
    assert ("too few quiet rounds" in "\n".join(results.lines(few))) == warns


def test_several_heats_are_one_table():
    several = found(SECONDS, heats=[["nocomm", "ddp/gloo", "lockstep"], ["nocomm", "ddp/gloo", "fsdp2"]])
    assert [(row.variant, row.heat) for row in several.rows] == [
        ("nocomm", 0), ("lockstep", 0), ("ddp/gloo", 0), ("fsdp2", 1),
    ]  # fmt: skip
    assert several.bases == ("nocomm", "ddp/gloo")
    # Who was not in every heat cannot be compared with.
    assert found(SECONDS, heats=[["nocomm", "lockstep"], ["ddp/gloo", "fsdp2"]]).bases == ()


def test_the_json_has_everything():
    written = json.loads(results.as_json([found(SECONDS, failed=["zero1"])]))
    assert len(written) == 1
    (tiny,) = written
    assert tiny["workload"] == "tiny"
    assert tiny["contest"]["workers"] == 2
    assert tiny["heats"][0]["seconds"] == SECONDS
    assert tiny["not_run"] == {"zero1": "RuntimeError: no", "fabric": "not installed"}
    row = next(row for row in tiny["rows"] if row["variant"] == "ddp/gloo")
    assert row["ratios"]["nocomm"] == {"median": 2.0, "low": 2.0, "high": 2.0}


def test_the_picture_parses_and_has_a_bar_for_everyone():
    picture = plot.svg([found(SECONDS), found({"nocomm": [1.0], "zero3": [1.5]})])
    root = ElementTree.fromstring(picture)
    name = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{name}svg"
    bars = [rect.get("class") for rect in root.iter(f"{name}rect") if rect.get("class") != "ground"]
    assert bars == ["limit", "ours", "peer", "peer", "limit", "ours"]
    assert [path.get("class") for path in root.iter(f"{name}path")].count("cut") == 1  # fsdp2 is beyond the scale.
    texts = [text.text for text in root.iter(f"{name}text")]
    assert "20.000 (20.000-20.000)" in texts
    assert "ddp/gloo 2.000" in root.find(f"{name}title").text
    width = float(root.get("width"))
    assert all(float(rect.get("x", 0)) + float(rect.get("width")) <= width for rect in root.iter(f"{name}rect"))
    assert ElementTree.fromstring(plot.svg([])).tag == f"{name}svg"


@given(st.floats(1.1, 1e4))
def test_ticks_are_few_and_within(top):
    found = plot.ticks(top)
    assert found[0] == 0
    assert 2 <= len(found) <= 11
    assert found[-1] <= top * (1 + 1e-6)
