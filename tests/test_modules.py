import pytest
from torch import nn

from lockstep.errors import UsageError
from lockstep.replica.modules import assign, find_blocks


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(3))})
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.decoder = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def test_blocks_are_members_of_lists_of_like_modules():
    model = Model()
    blocks = find_blocks(model)
    assert blocks == [*model.encoder["layers"], *model.decoder]  # Not the stem: a Linear is too small to be a block.


def test_blocks_by_name_and_by_class():
    model = Model()
    assert find_blocks(model, ["stem", "encoder.layers.1"]) == [model.encoder["layers"][1], model.stem]
    assert find_blocks(model, [Layer]) == [*model.encoder["layers"], *model.decoder]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [(["nowhere"], "nowhere"), ([nn.Conv2d], "no submodule"), (["decoder", Layer], "within another")],
)
def test_wrong_blocks_are_refused(wanted, words):
    with pytest.raises(UsageError, match=words):
        find_blocks(Model(), wanted)


def test_what_is_shared_belongs_to_the_model():
    model = Model()
    model.decoder[0].linear.weight = model.decoder[1].linear.weight
    model.encoder["layers"][0].linear.bias = model.stem[0].bias
    params = list(model.parameters())
    numbers = dict(zip(map(id, params), assign(model, params, find_blocks(model)), strict=True))
    assert numbers[id(model.embed.weight)] == -1
    assert numbers[id(model.decoder[0].linear.weight)] == -1
    assert numbers[id(model.stem[0].bias)] == -1
    assert numbers[id(model.encoder["layers"][2].linear.weight)] == 2
    assert numbers[id(model.decoder[1].linear.bias)] == 4


def test_a_model_without_lists_has_no_blocks():
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    assert find_blocks(net) == []
    assert assign(net, list(net.parameters()), []) == [-1] * 4
