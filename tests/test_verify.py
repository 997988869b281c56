"""`lockstep verify`, as far as it needs no workers: sketches, comparisons, causes and words."""

import itertools
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cli import verify as cli
from lockstep.cli.main import main
from lockstep.verify import switched_off, tensors, worker_record
from lockstep.verify.causes import BATCH_NORM
from lockstep.verify.comparison import Comparison, RecordedRun, disagreeing
from lockstep.verify.evidence import SampleMismatch, blend, mismatch
from lockstep.verify.session import VerdictKind, judge, with_batch_norm_synced, with_float64
from lockstep.verify.tensors import sample_of, sketch_of
from lockstep.verify.worker_record import (
    SAMPLE,
    Backward,
    Forward,
    RecordedStep,
    WorkerRecord,
    distance,
    joined,
    same_bits,
)

SIZES = st.sampled_from([0, 1, 5, SAMPLE - 1, SAMPLE, SAMPLE + 1, 3 * SAMPLE + 7])


def numbers(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


# Sketches


@settings(deadline=None)
@given(size=SIZES, cuts=st.lists(st.floats(0, 1), max_size=4))
def test_pieces_make_the_whole(size, cuts):
    whole = numbers(size)
    ends = [0, *sorted(int(cut * size) for cut in cuts), size]
    pieces = [sketch_of(whole[a:b], a, size) for a, b in itertools.pairwise(ends)]
    together = joined(pieces)
    assert same_bits(together, sketch_of(whole))
    assert together.is_whole
    assert np.array_equal(together.sample, sketch_of(whole).sample)
    assert together.norm == pytest.approx(whole.double().norm().item())


@settings(deadline=None)
@given(size=SIZES.filter(bool), place=st.floats(0, 0.999), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_one_bit_makes_another_fingerprint(size, place, dtype):
    one = numbers(size).to(dtype)
    other = one.clone()
    other.view(torch.int16)[int(place * size)] ^= 1
    assert not same_bits(sketch_of(one), sketch_of(other))
    assert same_bits(sketch_of(one), sketch_of(one.clone()))


def test_elements_that_change_places_make_another_fingerprint():
    assert not same_bits(sketch_of(torch.tensor([1.0, 2.0])), sketch_of(torch.tensor([2.0, 1.0])))


@pytest.mark.parametrize("size", [10, 5 * SAMPLE])
def test_distance_is_the_norm_of_the_difference(size):
    one, other = numbers(size), numbers(size) + 0.01 * numbers(size, seed=1)
    assert distance(sketch_of(one), sketch_of(other)) == pytest.approx((one - other).norm().item(), rel=0.1)


def test_what_the_sample_misses_shows_in_the_norm():
    one = numbers(SAMPLE * 4)
    other = one.clone()
    other[1] += 1000
    assert distance(sketch_of(one), sketch_of(other)) > 800


@pytest.mark.parametrize(("one", "other"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, -math.inf), (math.inf, -math.inf)])
def test_what_is_no_number_is_infinitely_far(one, other):
    assert distance(sketch_of(torch.tensor([one, 2.0])), sketch_of(torch.tensor([other, 2.0]))) == math.inf


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(7),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, 3j]),
        torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,), check_invariants=True),
        numbers(6).half().view(2, 3).t(),
        torch.tensor(2.5),
    ],
)
def test_every_kind_of_tensor_has_a_sketch(tensor):
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    assert sketch_of(tensor).norm == pytest.approx(dense.to(torch.complex128).norm().item())


def test_a_sample_alone_is_that_of_the_sketch():
    for tensor in (numbers(3 * SAMPLE + 7)[:12295].view(-1, 5)[:, :4], numbers(6).bfloat16(), torch.tensor([1 + 2j])):
        assert np.array_equal(sample_of(tensor).sample, sketch_of(tensor).sample)


def test_a_record_is_read_as_it_was_written(tmp_path):
    step = RecordedStep(
        [Forward(["a"], "s")], [Backward(0.5, 2.0, None, True)], [0.1], grads={"w": sketch_of(numbers(3))}
    )
    written = WorkerRecord(3, [step, RecordedStep()], {"w": sketch_of(numbers(5))}, is_seeded=True, batch_norms=["bn"])
    assert worker_record.load(tmp_path) == []
    written.save(tmp_path)
    (read,) = worker_record.load(tmp_path)
    assert (read.steps[0].forwards, read.steps[0].backwards) == (step.forwards, step.backwards)
    assert same_bits(read.steps[0].grads["w"], step.grads["w"])
    assert np.array_equal(read.initial["w"].sample, written.initial["w"].sample)
    assert (read.rank, read.is_seeded, read.batch_norms, len(read.steps)) == (3, True, ["bn"], 2)


# Samples


def test_samples_are_the_same_however_the_batch_is_cut():
    x, lengths = numbers(24).view(6, 4), torch.arange(6)
    whole = tensors.digests(((x,), {"lengths": lengths, "mask": torch.ones(4, 4)}), None)
    parts = [
        tensors.digests(((x[a:b],), {"lengths": lengths[a:b], "mask": torch.ones(4, 4)}), b - a)
        for a, b in ((0, 4), (4, 6))
    ]
    assert whole == parts[0] + parts[1]
    assert len(set(whole)) == 6


def test_samples_may_lie_along_the_second_dimension_and_be_padded():
    x = torch.randint(1, 9, (5, 3, 2))  # Time, samples, features.
    longer = torch.cat([x, torch.zeros(2, 3, 2, dtype=x.dtype)])
    assert tensors.digests((longer,), 3) == tensors.digests((x,), 3)
    assert tensors.digests((x[:, :2],), 2) == tensors.digests((x,), 3)[:2]


def test_inputs_without_tensors_are_one_sample():
    assert len(tensors.digests((("text", 3), {}), None)) == 1
    assert tensors.digests(((torch.zeros(0, 4),), {}), 0) == []


# Runs, made by hand: a linear model whose gradient of each sample is known


def run(size=1, steps=2, parts=None, **changes):
    """`size` workers that share eight samples in every step; `changes` are made to each step of each worker."""
    per_sample = numbers(8 * 6, seed=5).view(8, 6)
    records = []
    for rank in range(size):
        mine = parts[rank] if parts else list(range(8))[rank * 8 // size : (rank + 1) * 8 // size]
        made = []
        for number in range(steps):
            step = RecordedStep(rates=[0.1], settings=["{}"])
            step.forwards = [Forward([f"{number}.{sample}" for sample in mine], f"state {rank} {number}")]
            step.backwards = [Backward(1.0, len(mine), 8.0, True)]
            step.local = {"w": sketch_of(per_sample[mine].mean(0) * (1 + number))}
            step.grads = {"w": sketch_of(per_sample.mean(0) * (1 + number))}
            step.weights = {"w": sketch_of(per_sample.mean(0) * 3 + number)}
            for name, change in changes.items():
                change(step, rank, number) if callable(change) else setattr(step, name, change)
            made.append(step)
        records.append(WorkerRecord(rank, made, {"w": sketch_of(torch.ones(6))}, is_joined=True, is_wrapped=True))
    return RecordedRun(records)


def grads(value, workers=(0, 1), since=0):
    def change(step, rank, number):
        if rank in workers and number >= since:
            step.grads = {"w": sketch_of(numbers(6, seed=9 + rank if value == "own" else 9))}

    return change


def found(one, many):
    verdict = judge(Comparison(one, many))
    return [cause.name for cause in verdict.causes]


def test_the_same_twice_is_bit_identical():
    verdict = judge(Comparison(run(), run(2)))
    assert (verdict.kind, verdict.is_same, verdict.causes) == (VerdictKind.BIT_IDENTICAL, True, ())


def test_rounding_is_within_tolerance_and_grows_with_the_steps():
    def rounded(step, _rank, _number):
        step.grads = {"w": sketch_of(torch.from_numpy(step.grads["w"].sample) * (1 + 1e-6))}

    verdict = judge(Comparison(run(), run(2, rounded=rounded)))
    assert verdict.kind is VerdictKind.EQUAL
    assert verdict.comparison.largest.relative == pytest.approx(1e-6, rel=0.1)
    assert verdict.comparison.tolerance(3) == 4 * verdict.comparison.tolerance(0)


def test_the_first_difference_is_named():
    comparison = Comparison(run(), run(2, wrong=grads("same", since=1)))
    first = comparison.first
    assert (first.step, first.kind, first.name) == (1, "gradient", "w")
    assert judge(comparison).kind is VerdictKind.DIFFERENT


def test_noise_does_not_count():
    """Adam makes a full step of the rounding error of zero, as of a bias before a batch norm."""

    def noisy(seed):
        def change(step, _rank, _number):
            step.grads["bias"] = sketch_of(1e-8 * numbers(3, seed))
            step.weights["bias"] = sketch_of(0.1 * numbers(3, seed))
            step.buffers["mean"] = sketch_of(1 + 0.1 * numbers(3, seed))

        return change

    verdict = judge(Comparison(run(noise=noisy(1)), run(2, noise=noisy(2))))
    assert verdict.kind is VerdictKind.EQUAL


def test_pieces_of_split_parameters_are_put_together():
    whole = numbers(6)

    def split(step, rank, _number):
        step.grads = {"w": sketch_of(whole[:4] if rank == 0 else whole[4:], 4 * rank, 6)}
        step.weights = {"w": step.grads["w"]} if rank == 0 else {}

    def plain(step, _rank, _number):
        step.grads = {"w": sketch_of(whole)}
        step.weights = {"w": sketch_of(whole[:4], 0, 6)}

    many = run(2, split=split)
    for each in many.records:
        each.is_split = True
    assert judge(Comparison(run(plain=plain), many)).kind is VerdictKind.BIT_IDENTICAL
    assert disagreeing([step.grads for step in many.steps(0)], is_split=True) == []


# Causes


def test_different_initial_weights():
    many = run(2)
    for each in many.records:
        each.initial = {"w": sketch_of(numbers(6))}
    assert found(run(), many) == ["initial weights depend on the number of workers"]
    many.records[1].initial = {"w": sketch_of(numbers(6, seed=3))}
    assert found(run(), many) == ["workers begin with different weights"]


def test_a_rate_that_differs_between_workers_shows_on_the_worker_that_has_it():
    def scaled(step, rank, _number):
        if rank == 1:
            step.rates, step.weights = [0.2], {"w": sketch_of(numbers(6))}

    comparison = Comparison(run(), run(2, scaled=scaled))
    assert (comparison.first.kind, comparison.first.worker) == ("weight", 1)
    assert found(run(), run(2, scaled=scaled)) == ["workers take different steps"]


def test_a_rate_that_was_scaled_though_the_batch_was_not():
    many = run(2, rates=[0.2], weights={"w": sketch_of(numbers(6))})
    assert found(run(), many) == ["optimizer settings depend on the number of workers"]


def test_a_script_that_never_joins():
    many = run(2, parts=[range(8), range(8)])
    for each in many.records:
        each.is_joined = False
    assert found(run(), many)[0] == "the workers do not know of each other"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda many: setattr(many.records[0], "is_wrapped", False), "no model is wrapped"),
        (lambda many: many.records[0].foreign.append("w"), "'w' is in no wrapped model"),
        (lambda many: setattr(many.records[1].steps[0].forwards[0], "bypassed", True), "past lockstep.DataParallel"),
        (lambda many: [setattr(s.backwards[0], "syncs", False) for s in many.steps(0)], "inside no_sync()"),
        (lambda many: None, "changed after the backward pass"),
    ],
)
def test_gradients_that_differ_between_workers(change, words):
    many = run(2, wrong=grads("own"))
    change(many)
    (cause,) = judge(Comparison(run(), many)).causes
    assert cause.name == "gradients used before sync"
    assert words in cause.found


def test_a_hook_that_changes_gradients():
    many = run(2, wrong=grads("same"), local={"w": sketch_of(numbers(6, seed=8))})
    many.records[0].hooked = ["w"]
    (cause,) = judge(Comparison(run(), many)).causes
    assert (cause.name, "has a hook" in cause.found) == ("gradients used before sync", True)


def test_right_gradients_that_were_changed_afterwards():
    (cause,) = judge(Comparison(run(), run(2, wrong=grads("same")))).causes
    assert (cause.name, "the optimizer was given others:" in cause.found) == ("gradients used before sync", True)

    def doubled(step, _rank, _number):
        step.grads = {"w": sketch_of(2 * torch.from_numpy(step.grads["w"].sample))}

    (cause,) = judge(Comparison(run(), run(2, doubled=doubled))).causes
    assert "others, 2 times as large" in cause.found


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([range(4), range(4, 8)], None),
        ([range(3), range(3, 8)], None),
        ([range(8), range(8)], SampleMismatch.SAME_ON_ALL),
        ([range(8), range(8, 16)], SampleMismatch.LARGER),
        ([range(8), range(7, 15)], SampleMismatch.OVERLAP),
        ([range(5), range(3, 8)], SampleMismatch.PADDED),
        ([range(3), range(4, 8)], SampleMismatch.LEFT_OUT),
        ([range(4), range(3, 7)], SampleMismatch.OVERLAP),
        ([range(4), range(5, 9)], SampleMismatch.OTHER),
    ],
)
def test_samples_of_many_workers_against_those_of_one(parts, kind):
    one = run()
    many = run(2)
    for each, part in zip(many.records, parts, strict=True):
        each.steps[0].forwards = [Forward([f"0.{sample}" for sample in part], f"state {each.rank}")]
    found = mismatch(one, many, 2)
    assert (found and found.kind) == kind


def test_a_larger_batch_with_a_scaled_rate_may_be_on_purpose():
    def larger(step, rank, number):
        step.forwards = [Forward([f"{number}.{rank}.{sample}" for sample in range(8)], f"state {rank}")]
        step.rates = [0.2]

    assert found(run(), run(2, larger=larger, wrong=grads("same"))) == ["a larger batch"]


def test_the_right_weights_are_found():
    parts = [[0, 1, 2], [3, 4, 5, 6, 7]]

    def equal(step, _rank, number):
        step.backwards = [Backward(1.0, 1.0, 2.0, True)]
        grads("same")(step, 0, number)

    many = run(2, parts=parts, equal=equal)
    mixed = blend(run(), many, 0)
    assert mixed.right == pytest.approx((3 / 8, 5 / 8))
    assert mixed.used == (0.5, 0.5)
    assert mixed.left_with_right < 1e-6 < 1e-2 < mixed.left_with_used
    assert found(run(), many) == ["mean of means"]


def test_a_loss_that_is_a_sum():
    one = run()
    for step in one.records[0].steps:
        step.local = {"w": sketch_of(torch.from_numpy(step.local["w"].sample * 8))}

    def summed(step, _rank, number):
        step.local = {"w": sketch_of(torch.from_numpy(step.local["w"].sample * 4))}
        grads("same")(step, 0, number)

    (cause,) = judge(Comparison(one, run(2, summed=summed))).causes
    assert cause.name == "loss is not a mean"
    assert "0.5 times one worker's" in cause.found


def local(step, rank, _number):
    step.local = {"w": sketch_of(numbers(6, seed=20 + rank))}


def test_state_that_no_wrapper_knows_of():
    def hidden(step, rank, _number):
        step.hidden = {"net.mean": sketch_of(numbers(2, seed=rank))}

    many = run(2, local=local, wrong=grads("same", since=1), hidden=hidden)
    (cause,) = judge(Comparison(run(hidden=hidden), many)).causes
    assert (cause.name, "'net.mean'" in cause.found) == ("a forgotten all-reduce of a buffer", True)


def test_random_numbers_and_samples_that_look_at_each_other():
    assert found(run(), run(2, local=local, wrong=grads("same"), draws=True)) == ["random numbers in the forward pass"]
    assert found(run(), run(2, local=local, wrong=grads("same"))) == ["samples that look at each other"]
    many = run(2, local=local, wrong=grads("same"))
    many.records[0].is_coupled = True  # Each worker's gradients depend on all samples.
    assert found(run(), many) == ["not known"]


def test_no_cause_is_named_without_a_trace_of_it():
    """What SyncBatchNorm hides, what differs in a later step only, gradients that are the same on the whole."""
    many = run(2, local=local, wrong=grads("same", since=1))
    many.records[0].is_coupled = True
    (cause,) = judge(Comparison(run(), many)).causes
    assert cause.name == "not known" and "the steps before step 1 agree" in cause.found

    def slightly(step, _rank, _number):  # One small tensor differs; of all together, nothing is to be seen.
        step.grads["b"] = sketch_of(1e-3 * numbers(2, seed=step.local["w"].numel))
        step.local["b"] = sketch_of(torch.zeros(2))

    one = run(slightly=slightly)
    for step in one.records[0].steps:
        step.grads["b"] = sketch_of(2e-3 * numbers(2, seed=6))
    said = "".join(cause.found for cause in judge(Comparison(one, run(2, slightly=slightly))).causes)
    assert "1 times as large" not in said


def test_a_difference_in_numbers_alone_may_be_rounding_and_float64_tells():
    many = run(2, local=local, wrong=grads("same"))
    verdict = judge(Comparison(run(), many))
    assert verdict.may_be_rounding
    assert not judge(Comparison(run(), run(2, parts=[range(8), range(8)], wrong=grads("same")))).may_be_rounding
    assert with_float64(verdict, judge(Comparison(run(), run(2)))).kind is VerdictKind.EQUAL
    still = with_float64(verdict, verdict)
    assert (still.kind, still.causes) == (VerdictKind.DIFFERENT, verdict.causes)
    assert any("not rounding" in line for line in cli.closing(still))
    unable = replace(verdict, failure="dtype")
    assert "Not known: whether rounding made it" in " ".join(cli.closing(unable))


def test_what_trains_or_clips_nothing_is_wrong_even_where_one_worker_agrees():
    assert found(run(grads={}), run(2, grads={})) == ["the optimizer has no gradients"]
    assert found(run(), run(2, clips_nothing=True)) == ["gradients are not clipped"]


def test_weights_that_differ_by_noise_alone_are_shown_as_they_differ():
    def noisy(seed):
        def change(step, _rank, _number):
            step.grads["bias"] = sketch_of(1e-8 * numbers(3, seed))
            step.weights = {"bias": sketch_of(numbers(3, seed))}

        return change

    comparison = Comparison(run(noise=noisy(1)), run(2, noise=noisy(2)))
    assert judge(comparison).is_same
    rows = cli.table(comparison)
    assert "0.0e+00" not in rows[1] and "~" in rows[1] and "does not count" in rows[-1]


def test_the_same_random_state_counts_only_where_dropout_is_used():
    def alike(step, _rank, _number):
        step.forwards[0].random_state = "same"

    assert found(run(), run(2, alike=alike)) == []
    assert found(run(), run(2, alike=alike, drops=True)) == ["the same dropout seed on every worker"]


def test_what_makes_no_difference_is_told_beside_what_does():
    def alike(step, _rank, _number):
        step.forwards[0].random_state = "same"

    names = found(run(), run(2, alike=alike, drops=True, local=local, wrong=grads("same"), draws=True))
    assert names == ["random numbers in the forward pass", "the same dropout seed on every worker"]


def test_gradients_that_were_clipped_too_early():
    (cause,) = judge(Comparison(run(), run(2, wrong=grads("same"), clips_early=True))).causes
    assert (cause.name, "inside no_sync()" in cause.found) == ("gradients used before sync", True)


def test_another_number_of_steps():
    assert found(run(), run(2, steps=1)) == ["another number of steps"]


def test_batch_norm_is_the_cause_only_if_syncing_it_helps():
    wrong = run(2, wrong=grads("same"), local=local)
    for each in wrong.records:
        each.batch_norms = ["bn"]
    verdict = judge(Comparison(run(), wrong))
    assert [cause.name for cause in verdict.causes] == [BATCH_NORM]

    def after(synced):
        return [cause.name for cause in with_batch_norm_synced(verdict, Comparison(run(), synced)).causes]

    assert after(run(2)) == [BATCH_NORM]
    assert after(run(2, wrong=grads("same"), local=local)) == ["samples that look at each other"]
    assert after(run(2, local=local, wrong=grads("same", since=1), draws=True)) == [
        BATCH_NORM,
        "random numbers in the forward pass",
    ]


# The compiler's stand-in


def test_the_stand_in_gives_way_when_more_is_asked_of_it(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "wsgiref"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(switched_off, "_COMPILER", "wsgiref")  # A package that nobody needs.
    stand_in = switched_off.CompilerStandIn("wsgiref")
    monkeypatch.setitem(sys.modules, "wsgiref", stand_in)
    import wsgiref

    assert wsgiref.disable(len) is wsgiref.disable(recursive=False)(len) is len
    assert wsgiref.graph_break() is wsgiref.trace_rules.clear_lru_cache() is None
    assert not hasattr(wsgiref, "__file__")
    assert sys.modules["wsgiref"] is stand_in
    from wsgiref.util import guess_scheme

    assert guess_scheme({}) == "http"
    assert sys.modules["wsgiref"] is not stand_in
    assert stand_in.util.guess_scheme is guess_scheme


# Words


def test_the_verdict_in_words():
    comparison = Comparison(run(), run(2, wrong=grads("same", since=1)))
    said = "\n".join([*cli.notes(comparison), *cli.table(comparison), *cli.closing(judge(comparison))])
    assert "2 steps compared, on 1 worker and on 2." in said
    assert "The script sets no seed" in said
    assert "same bits" in said
    assert "First difference: gradient 'w' of step 1 on worker" in said
    assert cli.closing(judge(Comparison(run(), run(2)))) == ["Verdict: bit-identical."]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["-n", "2", "script.py"], "there is no 'script.py'"),
        (["-n", "1", __file__], "1 is too few: give 2 or more"),
        (["-n", "2", "--steps", "0", __file__], "--steps: 0 is too few"),
        (["-n", "2", "--threads", "0", __file__], "0 threads per worker"),
        ([], "SCRIPT"),
    ],
)
def test_a_request_that_cannot_be_right(words, part, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    try:
        status = main(["verify", *words])
    except SystemExit as left:
        status = left.code
    assert status == 2
    assert part in capsys.readouterr().err


def test_help_says_what_the_exit_codes_mean(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    said = capsys.readouterr().out
    assert all(words in said for words in ("bit-identical", "exit code 1", "exit code 2", "--steps", "example:"))
