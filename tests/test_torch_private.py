"""The private names of torch: all there on the torch that is installed, and no harm where one is not."""

import pytest
import torch

from lockstep import torch_private
from lockstep.errors import LockstepError


def test_all_names_are_there() -> None:
    assert torch_private.missing() == []


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    assert torch_private.missing() == ["torch._C._current_graph_task_id"]
    with pytest.raises(LockstepError, match="_current_graph_task_id"):
        torch_private.in_backward()


def test_plain_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((torch._C, "Future"), (torch, "_foreach_mul_")):
        monkeypatch.delattr(owner, name)
    assert torch_private.is_future(torch.futures.Future()) and not torch_private.is_future(1)
    ones = [torch.ones(2), torch.ones(3)]
    torch_private.foreach_("mul", ones, 3.0)
    assert [each.tolist() for each in ones] == [[3.0] * 2, [3.0] * 3]


def test_backward_pass_is_heard_of() -> None:
    heard: list[object] = []
    weight = torch.ones(1, requires_grad=True)

    def see(grad: torch.Tensor) -> None:
        heard.append(torch_private.in_backward())
        torch_private.queue_callback(lambda: heard.append("ended"))

    weight.register_hook(see)
    weight.sum().backward()
    assert heard == [True, "ended"]
    assert not torch_private.in_backward()
